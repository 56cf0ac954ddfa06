"""`oelm watch` as a user types it: a page that stays up to date, in a file or served, and ends when it is told to."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner, Result

from oelm.cli.app import app as every_command
from oelm.cli.watch import watch
from tests.conftest import oelm_command
from tests.experiments.recorded import record
from tests.report.synthetic import write_arm

app = typer.Typer()
app.command()(watch)
BASE = (30.0, 30.2, 29.9, 30.1, 30.05)


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder of its own; the tests keep their priority."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os, "nice", lambda increment: increment)
    return tmp_path / "outputs"


def oelm(*arguments: object, code: int = 0) -> Result:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == code, result.output
    assert "Traceback" not in result.output
    return result


def wait_until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 90
    while not is_so():
        assert time.monotonic() < deadline, "it never came"
        time.sleep(0.1)


def test_without_options_it_writes_watch_html_and_says_so(root: Path) -> None:
    write_arm(root, "GPT-01", BASE)
    shown = oelm("--until-done").stdout
    page = Path("watch.html").read_text(encoding="utf-8")
    assert shown == "watch.html is kept up to date; Ctrl-C ends\n"
    assert "oelm watch has ended, so this page is no longer updated." in page and page.count("GPT-01") > 5
    assert [path.name for path in sorted(Path().iterdir())] == ["outputs", "watch.html"], "written in one go"
    assert not (root / "looks.json").exists()


def test_the_page_is_named_by_the_user_and_speaks_chinese(root: Path) -> None:
    record(root, "stopped")
    oelm("--until-done", "--lang", "zh", "--html", "mine.html")
    assert "队列" in Path("mine.html").read_text(encoding="utf-8") and not Path("watch.html").exists()


def test_only_what_is_named_is_shown_with_its_baseline(root: Path) -> None:
    for experiment in ("GPT-01", "GPT-02", "GPT-03", "GPT-04"):
        record(root, "stopped", experiment=experiment)
    oelm("GPT-02", "--until-done")
    page = Path("watch.html").read_text(encoding="utf-8")
    assert [f"GPT-0{n}" in page for n in (1, 2, 3, 4)] == [True, True, False, False]


def test_imported_runs_are_judged_by_the_question_of_the_command_line(root: Path) -> None:
    rows = ["arm,seed,step,eval_loss"]
    for arm, shift in (("A", 0.0), ("B", 0.01)):
        rows += [f"{arm},{seed},{step},{3.0 + 0.01 * seed + shift}" for seed in (0, 1) for step in (1, 2)]
    Path("t.csv").write_text("\n".join(rows))
    assert CliRunner().invoke(every_command, ["import", "t.csv", "--name", "theirs"]).exit_code == 0
    oelm("--until-done", "--metric", "eval_loss", "--baseline", "A", "--at-most", "1.05x")
    page = Path("watch.html").read_text(encoding="utf-8")
    assert "theirs: eval_loss against A, bound 1.05x." in page and "+1.0% [" in page and page.count("<svg") == 4
    assert not (root / "looks.json").exists()


def test_an_experiment_without_runs_yet_may_be_watched(root: Path) -> None:
    oelm("GPT-02", "--until-done")
    assert "No runs yet." in Path("watch.html").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--port", "8000"), "only --serve has a port"),
        (("--metric", "eval_loss"), "add --baseline ARM"),
        (("--at-most", "1.05x"), "add --metric"),
        (("--metric", "eval_loss", "--baseline", "A"), "nothing is imported"),
        (("--serve", "--socket", "x.sock"), "give one of them"),
        (("--lang", "de"), "--lang 'de': choose one of en, zh"),
        (("GPT-2",), "no experiment or group called 'GPT-2'"),
        (("--out", "file.txt"), "file.txt: is a file"),
        (("--html", "folder"), "is a folder"),
        (("--catalog", "nowhere.yaml"), "nowhere.yaml"),
        (("--socket", "file.txt"), "exists and is no socket"),
    ],
)
def test_a_wrong_wish_is_refused_with_what_to_do(root: Path, arguments: tuple[str, ...], message: str) -> None:
    Path("file.txt").write_text("mine")
    Path("folder").mkdir()
    result = CliRunner().invoke(app, [*arguments, "--until-done"])
    assert result.exit_code != 0 and message in " ".join(result.output.split()), result.output
    assert Path("file.txt").read_text() == "mine"


@contextlib.contextmanager
def started(*command: str) -> Iterator[subprocess.Popen[str]]:
    """A command in a process of its own, ended with the block whatever comes."""
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def test_it_serves_until_it_is_interrupted_and_loads_no_torch(root: Path) -> None:
    record(root, "running", host="elsewhere")
    program = "import sys; from oelm.cli import main\ntry:\n main()\nfinally:\n assert 'torch' not in sys.modules, 'torch'"
    with started(sys.executable, "-c", program, "watch", "--serve", "--every", "1") as process:
        assert process.stdout is not None
        address = process.stdout.readline().split()[0]
        assert re.fullmatch(r"http://127\.0\.0\.1:\d+/[\w-]{32}/", address)
        wait_until(lambda: b"GPT-02" in answer(address))
        page = answer(address).decode()
        assert "; connect-src" in page and 'data-live="server"' in page
        record(root, "done")
        wait_until(lambda: b"1 done" in answer(f"{address}part-queue"))
        process.send_signal(signal.SIGINT)
        _, told = process.communicate(timeout=90)
    assert (process.returncode, told) == (0, "") and not Path("watch.html").exists()


def answer(address: str) -> bytes:
    try:
        with urllib.request.urlopen(address, timeout=20) as found:
            return bytes(found.read())
    except OSError:
        return b""


def test_a_page_that_cannot_be_written_for_a_while_is_written_later(root: Path) -> None:
    record(root, "running", host="elsewhere")
    page = Path("page/p.html")
    with started(*oelm_command("watch", "--html", str(page), "--every", "1", "--until-done")) as process:
        wait_until(page.is_file)
        # In its place a folder, which is no file to write.
        page.unlink()
        page.mkdir()
        assert process.stderr is not None
        assert "warning: the page was not updated" in process.stderr.readline()
        page.rmdir()
        wait_until(page.is_file)
        record(root, "done")
        assert process.wait(timeout=90) == 0
    assert "1 done" in page.read_text(encoding="utf-8")


def test_a_run_that_fails_while_it_is_watched_is_told_to_the_users_command(root: Path) -> None:
    run = record(root, "running", host="elsewhere")
    program = "import sys; open('told.txt', 'a').write(sys.argv[1] + ' ' + sys.stdin.read())"
    Path("notify.json").write_text(json.dumps({"command": [sys.executable, "-c", program, "{event}"], "timeout_s": 60}))
    with started(*oelm_command("watch", "--every", "1", "--until-done", "--notify", "notify.json")) as process:
        wait_until(Path("watch.html").is_file)
        record(root, "failed", message="out of memory")
        assert process.wait(timeout=90) == 0
    told = Path("told.txt").read_text().splitlines()
    assert told == [
        "failed oelm: GPT-02/smoke/default/seed-0 failed: out of memory",
        "ended oelm: no run is left: 1 failed",
    ]
    assert "notify" not in "".join(path.read_text() for path in run.iterdir() if path.is_file())
