"""A report in a real browser: nothing fails, nothing is fetched, no text runs; it serves phone, keyboard and paper."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from oelm.report.document import Cell, Section, Table
from oelm.report.html import render_html
from tests.report.sample_document import ATTACKS, hostile_document, sample_document, side_by_side

_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
CHROMIUM = next((path for name in _NAMES if (path := shutil.which(name))), None)
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine (apt-get install chromium)"),
]
# The protocol's file descriptors are 3 and 4.
_LAUNCH = """
import os, sys
os.dup2(int(sys.argv[1]), 3)
os.dup2(int(sys.argv[2]), 4)
os.execv(sys.argv[3], sys.argv[3:])
"""


class Browser:
    """Headless Chromium by its DevTools protocol over a pipe, which needs no library for web sockets."""

    def __init__(self, profile: Path) -> None:
        assert CHROMIUM is not None
        to_read, self._out = os.pipe()
        self._in, to_write = os.pipe()
        # Root, as in a container, must do without the sandbox.
        flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run", f"--user-data-dir={profile}"]
        launch = [sys.executable, "-c", _LAUNCH, str(to_read), str(to_write), CHROMIUM]
        command = [*launch, *flags, "--remote-debugging-pipe"]
        quiet = subprocess.DEVNULL
        self.process = subprocess.Popen(command, pass_fds=(to_read, to_write), stdout=quiet, stderr=quiet)
        os.close(to_read)
        os.close(to_write)
        self._received = b""
        self._last_id = 0
        self.events: list[dict[str, Any]] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    _session: str | None = None

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Send one command and return its result; what happens meanwhile is kept in `events`."""
        self._last_id += 1
        message = {"id": self._last_id, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while (answer := self._read()).get("id") != self._last_id:
            self.events.append(answer)
        assert "error" not in answer, f"{method}: {answer['error']}"
        return answer["result"]

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._received:
            chunk = os.read(self._in, 1 << 20)
            assert chunk, "Chromium ended"
            self._received += chunk
        message, _, self._received = self._received.partition(b"\0")
        return json.loads(message)

    def run(self, expression: str) -> Any:
        """Evaluate JavaScript in the page, waiting for a promise."""
        result = self.call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def wait_for(self, expression: str) -> None:
        """Wait until JavaScript becomes true; a minute is for machines that do other things too."""
        deadline = time.monotonic() + 60
        while not self.run(expression):
            assert time.monotonic() < deadline, f"never true: {expression}"
            time.sleep(0.05)

    def open(self, page: Path | str, *, width: int = 1280, theme: str = "light") -> None:
        """Open a file or an address at a width in CSS pixels and wait until it is whole."""
        address = page if isinstance(page, str) else page.as_uri()
        self.events.clear()
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=width < 600)
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": theme}])
        self.call("Page.navigate", url=address)
        self.wait_for(f"document.readyState === 'complete' && location.href === {json.dumps(address)}")

    def draw_all(self) -> None:
        """Scroll through the page so that every chart is drawn."""
        for number in range(self.run("document.querySelectorAll('figure.chart').length")):
            figure = f"document.querySelectorAll('figure.chart')[{number}]"
            self.run(f"{figure}.scrollIntoView({{behavior: 'instant'}})")
            self.wait_for(f"{figure}.querySelector('.live svg') !== null")

    def press(self, key: str) -> None:
        """Press and release a key."""
        codes = {"Tab": 9, "Enter": 13}
        for kind in ("keyDown", "keyUp"):
            text = {"text": "\r"} if key == "Enter" and kind == "keyDown" else {}
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=codes[key], **text)

    def problems(self) -> list[Any]:
        """Return errors and warnings of the console, exceptions, refusals of the policy, and dialogs."""
        self.run("1")
        loud = ("Runtime.exceptionThrown", "Page.javascriptDialogOpening")
        found: list[Any] = [event["params"] for event in self.events if event.get("method") in loud]
        found += [event["params"]["entry"] for event in self.events if event.get("method") == "Log.entryAdded"]
        calls = [event["params"] for event in self.events if event.get("method") == "Runtime.consoleAPICalled"]
        return found + [call for call in calls if call["type"] in ("error", "warning")]

    def close(self) -> None:
        os.close(self._out)
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        os.close(self._in)


def point_at_marks(browser: Browser) -> None:
    """Move the mouse over every mark of the first chart, so that its tooltips show."""
    browser.run("document.querySelector('figure.chart').scrollIntoView({behavior: 'instant', block: 'center'})")
    places = browser.run(
        "[...document.querySelectorAll('.live svg .mark-rect path')].map(mark => {"
        "const box = mark.getBoundingClientRect(); return [box.x + box.width / 2, box.y + box.height / 2]})"
    )
    for x, y in places:
        browser.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
        browser.wait_for("document.querySelector('#vg-tooltip-element.visible') !== null")


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    chromium = Browser(tmp_path_factory.mktemp("profile"))
    yield chromium
    chromium.close()


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> Path:
    document = sample_document()
    pair = Section("pair", "Side by side", (side_by_side(),))
    path = tmp_path_factory.mktemp("pages") / "sample.html"
    path.write_text(render_html(replace(document, sections=(*document.sections, pair))), encoding="utf-8")
    return path


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("width", [360, 1280])
def test_every_chart_is_drawn_without_a_word_on_the_console(browser: Browser, sample: Path, width: int, theme: str) -> None:
    browser.open(sample, width=width, theme=theme)
    browser.draw_all()
    assert browser.problems() == []


def test_nothing_is_fetched_but_the_file_itself(browser: Browser, sample: Path) -> None:
    browser.open(sample)
    browser.draw_all()
    browser.run("1")
    asked = [
        event["params"]["request"]["url"] for event in browser.events if event.get("method") == "Network.requestWillBeSent"
    ]
    assert asked == [sample.as_uri()]


@pytest.mark.parametrize("attack", ATTACKS)
def test_no_text_runs(browser: Browser, tmp_path: Path, attack: str) -> None:
    path = tmp_path / "hostile.html"
    path.write_text(render_html(hostile_document(ATTACKS[attack])), encoding="utf-8")
    browser.open(path)
    browser.draw_all()
    point_at_marks(browser)
    assert browser.problems() == [] and browser.run(
        "window.pwned === undefined && document.querySelector('img, b, u') === null"
    )


@pytest.mark.parametrize("width", [320, 360, 768, 1280, 1920])
def test_only_tables_and_charts_scroll_sideways(browser: Browser, sample: Path, width: int) -> None:
    browser.open(sample, width=width)
    browser.draw_all()
    assert browser.run("document.documentElement.scrollWidth <= document.documentElement.clientWidth && innerWidth") == width


@pytest.mark.parametrize("width", [360, 700, 1280])
def test_every_chart_fits_its_column(browser: Browser, sample: Path, width: int) -> None:
    browser.open(sample, width=width)
    browser.draw_all()
    browser.wait_for("[...document.querySelectorAll('.picture')].every(box => box.scrollWidth <= box.clientWidth)")


@pytest.mark.parametrize("width", [1280, 1920])
def test_a_wide_table_takes_the_window_and_shows_where_it_goes_on(browser: Browser, tmp_path: Path, width: int) -> None:
    gap = Cell("+19.6% [+15.2, +24.1] (test) INCONCLUSIVE", mark="warn")
    sets = ("tinystories", "openwebtext", "wikitext103", "stdlib")
    table = Table(
        "classes",
        "caption",
        ("method", "class", *sets, *(f"note {n}" for n in range(20))),
        ((Cell("GPT-02-last-half"), Cell("a little"), *[gap] * 4, *[Cell("words")] * 20),),
        frozenset(range(2, 6)),
    )
    document = replace(sample_document(), sections=(Section("part", "Part", (table,)),))
    (tmp_path / "wide.html").write_text(render_html(document), encoding="utf-8")
    browser.open(tmp_path / "wide.html", width=width)
    right = browser.run("[...document.querySelectorAll('thead th')].map(cell => cell.getBoundingClientRect().right)")
    assert right[5] <= width < right[-1], "every data set is in sight, and notes are not"
    line = browser.run("parseFloat(getComputedStyle(document.querySelector('tbody th')).lineHeight)")
    text = "(() => { const all = document.createRange(); all.selectNodeContents(document.querySelector('tbody th'));"
    assert browser.run(f"{text} return all.getBoundingClientRect().height }})()") <= line
    assert browser.run("getComputedStyle(document.querySelector('.scroll')).backgroundImage").count("gradient") == 6
    assert browser.run("document.querySelector('.scroll').tabIndex") == 0


def test_a_chart_follows_the_window(browser: Browser, sample: Path) -> None:
    browser.open(sample, width=1000)
    browser.draw_all()
    browser.call("Emulation.setDeviceMetricsOverride", width=500, height=900, deviceScaleFactor=1, mobile=False)
    browser.run("document.querySelector('figure.chart').scrollIntoView({behavior: 'instant'})")
    browser.wait_for("document.querySelector('.live svg').getBoundingClientRect().width < 500")


def test_text_of_charts_is_of_readable_size_on_a_phone(browser: Browser, sample: Path) -> None:
    browser.open(sample, width=360)
    browser.draw_all()
    sizes = browser.run("[...document.querySelectorAll('.live svg text')].map(t => parseFloat(getComputedStyle(t).fontSize))")
    assert min(sizes) >= 11


def test_the_theme_follows_the_system_and_the_button(browser: Browser, sample: Path) -> None:
    paper = "getComputedStyle(document.body).backgroundColor"
    browser.open(sample, theme="dark")
    browser.draw_all()
    dark, label = browser.run(paper), "getComputedStyle(document.querySelector('.live svg text')).fill"
    dark_label = browser.run(label)
    browser.run("document.getElementById('theme').click()")
    assert browser.run(paper) != dark and browser.run(label) != dark_label
    browser.run("document.getElementById('theme').click(); localStorage.clear()")
    assert browser.run(paper) == dark and browser.run("document.getElementById('theme').ariaPressed") == "true"


def test_a_table_is_sorted_by_keyboard_up_down_and_back(browser: Browser, sample: Path) -> None:
    browser.open(sample)
    column = "[...document.querySelectorAll('table')[1].tBodies[0].rows].map(row => row.cells[2].textContent.trim())"
    original = browser.run(column)
    measured = sorted(float(text) for text in original if text != "not measured")
    browser.run("document.querySelectorAll('table')[1].tHead.rows[0].cells[2].querySelector('button').focus()")
    state = "document.querySelectorAll('table')[1].tHead.rows[0].cells[2].ariaSort"
    for expected, order in (("ascending", measured), ("descending", measured[::-1])):
        browser.press("Enter")
        shown = browser.run(column)
        assert browser.run(state) == expected and [float(text) for text in shown[: len(measured)]] == order
        assert set(shown[len(measured) :]) == {"not measured"}
    browser.press("Enter")
    assert browser.run(state) == "none" and browser.run(column) == original


def test_the_tab_key_goes_from_the_skip_link_through_the_contents_to_the_tables(browser: Browser, sample: Path) -> None:
    browser.open(sample)
    stops = []
    for _ in range(10):
        browser.press("Tab")
        stops.append(
            browser.run("document.activeElement.className || document.activeElement.id || document.activeElement.tagName")
        )
    # The contents are folded: one stop, and from there to the first table.
    assert stops[:3] == ["skip", "theme", "SUMMARY"] and {"BUTTON"} <= set(stops[3:]) <= {"BUTTON", "SUMMARY"}


def test_what_has_the_focus_is_outlined(browser: Browser, sample: Path) -> None:
    browser.open(sample)
    browser.press("Tab")
    assert browser.run("getComputedStyle(document.activeElement).outlineStyle") == "solid"


def test_the_head_of_a_long_table_stays_in_sight(browser: Browser, sample: Path) -> None:
    browser.open(sample)
    browser.run("document.querySelectorAll('.scroll')[1].scrollTop = 500")
    box, head = "document.querySelectorAll('.scroll')[1]", "document.querySelectorAll('thead th')[4]"
    assert abs(browser.run(f"{head}.getBoundingClientRect().top - {box}.getBoundingClientRect().top")) <= 2


def test_on_paper_stills_replace_live_charts_and_nothing_scrolls(browser: Browser, sample: Path) -> None:
    browser.open(sample, theme="dark")
    browser.draw_all()
    browser.call("Emulation.setEmulatedMedia", media="print")
    assert browser.run("[...document.querySelectorAll('.still svg')].every(svg => svg.getBoundingClientRect().width > 300)")
    assert browser.run(
        "[...document.querySelectorAll('.live, #theme, thead button')].every(part => !part.getClientRects().length)"
    )
    assert browser.run("getComputedStyle(document.querySelector('.scroll')).overflow") == "visible"
    assert browser.run("getComputedStyle(document.body).color") == "rgb(0, 0, 0)"
    browser.call("Emulation.setEmulatedMedia", media="")


def test_it_prints(browser: Browser, sample: Path) -> None:
    browser.open(sample)
    assert base64.b64decode(browser.call("Page.printToPDF", preferCSSPageSize=True)["data"]).startswith(b"%PDF-")


def test_without_javascript_the_stills_are_shown(browser: Browser, sample: Path) -> None:
    browser.call("Emulation.setScriptExecutionDisabled", value=True)
    browser.open(sample)
    shown = browser.run(
        "[...document.querySelectorAll('.still svg')].filter(svg => svg.getBoundingClientRect().width > 300).length"
    )
    browser.call("Emulation.setScriptExecutionDisabled", value=False)
    assert shown == 4
