"""The commands that look after runs, as a user types them: in this process, in one of their own, and on a terminal."""

from __future__ import annotations

import contextlib
import os
import pty
import select
import subprocess
import sys
import time
from collections.abc import Iterator

import typer
from typer.testing import CliRunner, Result

from oelm.cli.manage import clean, stop
from oelm.cli.status import status

app = typer.Typer()
for command in (status, stop, clean):
    app.command()(command)
# The same in a process of their own.
PROGRAM = """
import signal, typer
# A shell that runs these tests in the background has its children ignore interrupts.
signal.signal(signal.SIGINT, signal.default_int_handler)
from oelm.cli.manage import clean
from oelm.cli.status import status
from oelm.cli.manage import stop
app = typer.Typer()
for command in (status, stop, clean):
    app.command()(command)
app()
"""


def oelm(*arguments: object, code: int = 0) -> Result:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == code, result.output
    assert "Traceback" not in result.output
    return result


class Screen:
    """A command on a terminal of its own, and what it has shown so far."""

    def __init__(self, *arguments: str, columns: int = 100, lines: int = 40) -> None:
        leader, follower = pty.openpty()
        environment = {**os.environ, "COLUMNS": str(columns), "LINES": str(lines), "TERM": "xterm"}
        self.process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, *arguments], stdin=follower, stdout=follower, stderr=follower, env=environment
        )
        os.close(follower)
        self._leader, self.shown = leader, ""

    def read(self, *, seconds: float) -> bool:
        """Take in what comes within some time; whether there may be more."""
        if not select.select([self._leader], [], [], seconds)[0]:
            return True
        try:
            self.shown += os.read(self._leader, 1 << 16).decode(errors="replace")
        except OSError:
            # Linux's way to say that the other end is closed.
            return False
        return True

    def wait_for(self, text: str, *, after: int = 0) -> int:
        """Wait until something is shown after a place; return the place where that ends."""
        deadline = time.monotonic() + 60
        while text not in self.shown[after:]:
            assert time.monotonic() < deadline and self.read(seconds=0.5), self.shown[after:]
        return self.shown.index(text, after) + len(text)

    def end(self) -> int:
        """Take in all the rest; return the exit code."""
        while self.read(seconds=10):
            pass
        os.close(self._leader)
        return self.process.wait(timeout=60)


@contextlib.contextmanager
def screen(*arguments: str, **size: int) -> Iterator[Screen]:
    shown = Screen(*arguments, **size)
    try:
        yield shown
    finally:
        shown.process.kill()
        shown.process.wait()
