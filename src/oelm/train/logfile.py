"""training.log: what happened in a run, in words."""

from __future__ import annotations

import logging
from pathlib import Path

from oelm.files import room_checked, write_all


class LogFile(logging.Handler):
    """Append the log to a file. Raises DiskFullError where a line finds no room, as all other files of a run do.

    The handler of the standard library prints a traceback then, and drops the line.
    """

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path
        with room_checked(path):
            # Unbuffered: a line that found no room is not tried again when the file is closed.
            self._file = path.open("ab", buffering=0)
        self.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))

    def emit(self, record: logging.LogRecord) -> None:
        line = f"{self.format(record)}\n".encode(errors="backslashreplace")
        with room_checked(self.path):
            write_all(self._file, line)

    def close(self) -> None:
        self._file.close()
        super().close()
