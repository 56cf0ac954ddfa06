"""Standard output that breaks: a run is asked to stop, other commands say so, and standard error never matters."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

import pytest

from oelm.cli.shell import TerminalWatch, err, out, print_problem, reported, stoppable
from oelm.errors import ConfigError, OelmError, StoppedError


@contextlib.contextmanager
def stdout(file: TextIO) -> Iterator[None]:
    """Put a file in the place of standard output; what it could not take must not make its closing fail."""
    with file, pytest.MonkeyPatch.context() as patch:
        # Not in a fixture: pytest puts its own there before each test is called.
        patch.setattr(sys, "stdout", file)
        yield


def full() -> TextIO:
    """Return a device that is full."""
    return open("/dev/full", "w", encoding="utf-8")


def left_pipe() -> TextIO:
    """Return a pipe whose reader has left."""
    reader, writer = os.pipe()
    os.close(reader)
    return open(writer, "w", encoding="utf-8")


def test_a_full_output_asks_for_a_stop_once_and_is_silent_after_that(capsys: pytest.CaptureFixture[str]) -> None:
    with stdout(full()):
        with stoppable() as stop:
            out.print("first")
            reason = stop.reason or ""
            out.print("second")
        out.print("third")
    assert "standard output /dev/full cannot be written" in reason and "bytes free on that disk" in reason
    assert capsys.readouterr().err.count("saving and stopping at the next step") == 1


def test_a_reader_that_left_asks_for_a_stop() -> None:
    with stdout(left_pipe()), stoppable() as stop:
        out.print("first")
    assert stop.reason == "standard output cannot be written ([Errno 32] Broken pipe)"


def test_a_command_that_trains_nothing_says_that_its_output_is_full() -> None:
    with stdout(full()), pytest.raises(OelmError, match="standard output /dev/full cannot be written"):
        out.print("a list")


def test_a_broken_error_stream_changes_no_exit_code(monkeypatch: pytest.MonkeyPatch) -> None:
    @reported
    def command() -> None:
        raise OelmError("what a user caused")

    with full() as device:
        monkeypatch.setattr(sys, "stderr", device)
        with pytest.raises(BaseException) as ended:
            command()
        monkeypatch.undo()
    assert getattr(ended.value, "exit_code", None) == 3


@pytest.mark.parametrize("name", ["stdout", "stderr"])
def test_a_stream_that_was_closed_at_the_start_takes_everything(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, name, None)
    (out if name == "stdout" else err).print("nobody reads this")


def test_output_that_holds_is_written_as_ever(tmp_path: Path) -> None:
    with stdout((tmp_path / "printed").open("w", encoding="utf-8")), stoppable() as stop:
        out.print("a [line] \u00fc")
    assert stop.reason is None and (tmp_path / "printed").read_text(encoding="utf-8") == "a [line] \u00fc\n"


def test_what_the_output_cannot_encode_is_written_as_an_escape(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with (tmp_path / "out.txt").open("w", encoding="ascii") as file:
        monkeypatch.setattr(sys, "stdout", file)
        out.print("na\u00efve \u4e2d, then plain", soft_wrap=True)
    assert (tmp_path / "out.txt").read_text() == "na\\xefve \\u4e2d, then plain\n"


@pytest.mark.parametrize(
    ("problem", "shown"),
    [
        (StoppedError("stopped while preparing the data; repeat"), "stopped while preparing the data; repeat\n"),
        (StoppedError("no room on the disk"), "stopped: no room on the disk\n"),
        (ConfigError("stopped is no method"), "error: stopped is no method\n"),
    ],
)
def test_a_stop_is_called_one_once(problem: OelmError, shown: str, capsys: pytest.CaptureFixture[str]) -> None:
    print_problem(problem)
    assert capsys.readouterr().err == shown


def test_no_rate_is_shown_before_it_is_known(capsys: pytest.CaptureFixture[str]) -> None:
    with TerminalWatch() as watch:
        watch.on_preparing("tokenizing", 100_000, 100_000, 21_171)
    shown = capsys.readouterr().out
    assert "21,171 tokens" in shown and "tokens/s" not in shown
