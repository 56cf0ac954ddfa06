"""The live page in a real browser over a real queue: it follows runs from their start to a kill and to their end."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from oelm.runs.status import read_status
from tests.faults.queues import write_catalog
from tests.report.test_browser import CHROMIUM, Browser

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine (apt-get install chromium)"),
]
# The parent of a page's parts, as text that a reader sees.
TEXT = "document.querySelector('main').innerText"


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    chromium = Browser(tmp_path_factory.mktemp("profile"))
    yield chromium
    chromium.close()


@pytest.fixture
def browser(chromium: Browser) -> Iterator[Browser]:
    """A browser without the page of the test before, which would go on asking for a server that is gone."""
    yield chromium
    chromium.call("Page.navigate", url="about:blank")
    chromium.run("1")


@pytest.fixture
def folder(tmp_path: Path, text_file: Path) -> Path:
    """A working folder with an experiment and its baseline, whose runs last long enough to be seen."""
    catalog = write_catalog(tmp_path, text_file) / "experiments.yaml"
    catalog.write_text(catalog.read_text().replace("steps: 60", "steps: 900").replace("eval_every: 13", "eval_every: 60"))
    return tmp_path


@contextlib.contextmanager
def started(folder: Path, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "oelm", *arguments]
    with subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        try:
            yield process
        finally:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.communicate(timeout=60)
            process.kill()


def first_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline()


def wait_for(browser: Browser, expression: str, *, seconds: float = 300) -> None:
    """Wait for what a queue does, which may take minutes where the machine is busy; an answer may fall into a reload."""
    deadline = time.monotonic() + seconds
    while True:
        with contextlib.suppress(AssertionError):
            if browser.run(expression):
                return
        assert time.monotonic() < deadline, f"never true: {expression}"
        time.sleep(0.1)


def kill_one_under_way(outputs: Path) -> Path:
    """Kill the process of a run that has a checkpoint; return its folder."""
    deadline = time.monotonic() + 240
    while time.monotonic() < deadline:
        for run in sorted(outputs.glob("*/*/*/seed-*")):
            status = read_status(run)
            if status is not None and status.status == "running" and 60 < status.step < 500:
                os.kill(status.pid, signal.SIGKILL)
                return run
        time.sleep(0.02)
    raise AssertionError("no run was under way long enough to be killed")


def test_the_page_follows_a_queue_from_its_start_over_a_kill_to_its_end(browser: Browser, folder: Path) -> None:
    with started(folder, "watch", "--serve", "--every", "1") as watching:
        address = first_line(watching).split()[0]
        browser.open(address)
        wait_for(browser, f"{TEXT}.includes('No runs yet.')")
        with started(folder, "run", "mine-02", "--budget", "smoke", "--seeds", "1", "--jobs", "1") as queue:
            wait_for(browser, f"{TEXT}.includes('running') && {TEXT}.includes('waiting')")
            killed = kill_one_under_way(folder / "outputs")
            wait_for(browser, "document.querySelector('#part-trouble') !== null")
            assert "killed" in browser.run("document.querySelector('#part-trouble').innerText")
            command = browser.run("document.querySelector('#part-trouble code').innerText")
            queue.communicate(timeout=300)
        assert queue.returncode == 75
        wait_for(browser, f"{TEXT}.includes('1 killed, 1 done')")
        assert browser.run("document.querySelectorAll('.still svg').length") >= 2, "curves, wide and narrow"
        status = read_status(killed)
        assert status is not None and status.status == "running"
        # What the page says continues the run, typed as it stands there.
        words = shlex.split(command)
        assert words[0] == "oelm"
        subprocess.run([sys.executable, "-m", "oelm", *words[1:]], cwd=folder, check=True, timeout=300, capture_output=True)
        wait_for(browser, f"{TEXT}.includes('2 runs: 2 done. Nothing is running or waiting.')")
        assert browser.run("document.querySelector('#part-trouble')") is None
        # Parts are replaced one after the other.
        wait_for(browser, "document.querySelector('#part-verdicts').innerText.includes('smoke: never a result')")
        assert browser.problems() == []
    assert not list(folder.rglob("looks.json"))


def test_an_update_keeps_what_the_reader_has_sorted_and_where_the_keyboard_is(browser: Browser, folder: Path) -> None:
    with (
        started(folder, "watch", "--serve", "--every", "1") as watching,
        started(folder, "run", "mine-02", "--budget", "smoke", "--seeds", "1", "--jobs", "1"),
    ):
        address = first_line(watching).split()[0]
        browser.open(address)
        wait_for(browser, f"{TEXT}.includes('running')")
        stops = []
        for _ in range(12):
            browser.press("Tab")
            stops.append(browser.run("document.activeElement.id || document.activeElement.closest('th')?.innerText || 'other'"))
        assert {"theme", "pause"} <= set(stops) and "seed" in stops
        browser.run("document.querySelectorAll('#part-queue thead button')[1].focus()")
        browser.press("Enter")
        browser.run("window.before = document.querySelector('#part-queue')")
        wait_for(browser, "document.querySelector('#part-queue') !== window.before")
        assert browser.run("document.querySelectorAll('#part-queue thead th')[1].ariaSort") == "ascending"
        assert browser.run("document.activeElement === document.querySelectorAll('#part-queue thead button')[1]")
        browser.run("document.getElementById('pause').click(); window.before = document.querySelector('#part-queue')")
        time.sleep(3)
        assert browser.run("document.querySelector('#part-queue') === window.before"), "paused"
        assert browser.problems() == []


@pytest.mark.parametrize(("width", "theme", "lang"), [(1280, "light", "en"), (360, "dark", "zh")])
def test_a_file_reloads_itself_and_says_when_nobody_updates_it(
    browser: Browser, folder: Path, width: int, theme: str, lang: str
) -> None:
    page = folder / "watch.html"
    with started(folder, "watch", "--every", "1", "--lang", lang) as watching:
        first_line(watching)
        browser.open(page, width=width, theme=theme)
        first = browser.run("document.documentElement.dataset.updated")
        wait_for(browser, f"document.documentElement.dataset.updated !== '{first}'")
        assert browser.run("document.documentElement.scrollWidth <= document.documentElement.clientWidth")
        watching.kill()
        watching.wait()
        wait_for(browser, "document.getElementById('silence')?.innerText.includes('oelm watch')", seconds=60)
    assert browser.problems() == []
