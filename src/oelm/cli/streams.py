"""Standard output and error as the commands write to them: a reader that has gone ends no training."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any, Literal

from oelm.errors import OelmError

Broken = Callable[[str], None]


# Not a BrokenPipeError: rich answers one with an exit code of its own.
class ReaderLeftError(Exception):
    """Whoever read standard output needs no more of it (`oelm report | head -1`)."""


class Stream(io.TextIOBase):
    """A standard stream, looked up anew for each write, whose errors are handed to whoever listens.

    The first error silences the stream for good: what is written later goes nowhere, and Python's own flush at the end
    does not turn the exit code into another. Without a listener, standard output raises it, and standard error drops it:
    the exit code still says how the command ended.
    """

    def __init__(self, name: Literal["stdout", "stderr"]) -> None:
        super().__init__()
        self._name: Literal["stdout", "stderr"] = name
        self._listener: Broken | None = None

    @contextlib.contextmanager
    def heard_by(self, listener: Broken) -> Iterator[None]:
        """Tell `listener` why the stream broke, instead of raising it, while the block runs."""
        self._listener = listener
        try:
            yield
        finally:
            self._listener = None

    def write(self, text: str) -> int:
        self._try(lambda file: file.write(_encodable(text, file)))
        return len(text)

    def flush(self) -> None:
        self._try(lambda file: file.flush())

    def isatty(self) -> bool:
        return self._file is not None and bool(self._file.isatty())

    def fileno(self) -> int:
        if self._file is None:
            raise io.UnsupportedOperation("fileno")
        return int(self._file.fileno())

    def writable(self) -> bool:
        return True

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return getattr(self._file, "encoding", None) or "utf-8"

    @property
    def _file(self) -> Any:
        # None where the command was started with this stream closed.
        file = getattr(sys, self._name)
        # A bar on the screen takes the stream's place meanwhile, to print above itself.
        return getattr(file, "rich_proxied_file", file)

    def _try(self, act: Callable[[Any], object]) -> None:
        if (file := self._file) is None:
            return
        try:
            act(file)
        except OSError as problem:
            text = _why(file, problem)
            _silence(file)
            if self._listener is not None:
                self._listener(text)
            elif self._name == "stdout" and isinstance(problem, BrokenPipeError):
                raise ReaderLeftError(text) from None
            elif self._name == "stdout":
                raise OelmError(text) from problem


def _encodable(text: str, file: Any) -> str:
    """Return text as a stream can write it: what its encoding lacks is written as an escape, such as \\u2026."""
    encoding = getattr(file, "encoding", None) or "utf-8"
    try:
        text.encode(encoding, getattr(file, "errors", None) or "strict")
    except UnicodeEncodeError:
        return text.encode(encoding, "backslashreplace").decode(encoding)
    return text


def _why(file: Any, problem: OSError) -> str:
    """Return why a stream cannot be written, with its file and the free bytes of that disk where they can be known."""
    where, room = "standard output", ""
    with contextlib.suppress(OSError, AttributeError):
        facts = os.fstatvfs(file.fileno())
        room = f"; {facts.f_bavail * facts.f_frsize:,} bytes free on that disk"
        path = os.readlink(f"/proc/self/fd/{file.fileno()}")
        # A pipe has no path, and no disk.
        where, room = (f"{where} {path}", room) if path.startswith("/") else (where, "")
    return f"{where} cannot be written ({problem}{room})"


def _silence(file: Any) -> None:
    """Let everything that is written to a stream from here on go nowhere."""
    with contextlib.suppress(OSError):
        target = file.fileno()
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, target)
        os.close(nowhere)
