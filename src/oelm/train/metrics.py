"""metrics.jsonl: one JSON object a line, appended step by step, cut back to the checkpoint when a run resumes."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, TextIO

from oelm.files import dump_json, room_checked, write_text


def read_metrics(path: Path, *, only: str = "") -> list[dict[str, Any]]:
    """Return the whole lines of a metrics file; a line torn by a kill can only be the last, and is left out.

    With `only`, lines without this text are passed over unread: of thousands of steps, a report wants the evaluations.
    """
    if not path.is_file():
        return []
    rows: list[dict[str, Any]] = []
    for line in path.read_text(encoding="utf-8", errors="replace").split("\n")[:-1]:
        if only not in line:
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            break
        rows.append(row)
    return rows


class Metrics:
    """The writer of one run's metrics. Training rows have 'loss', evaluations have 'val_loss'."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: TextIO | None = None

    def rewind(self, *, step: int, evaluated_step: int) -> None:
        """Drop what was written after the state that training continues from, so that nothing stands twice."""
        self.close()
        kept = [row for row in read_metrics(self.path) if row["step"] <= (evaluated_step if "val_loss" in row else step)]
        write_text(self.path, "".join(dump_json(row, indent=None) + "\n" for row in kept))

    def write(self, **row: Any) -> None:
        with room_checked(self.path):
            if self._file is None:
                self._file = self.path.open("a", encoding="utf-8")
            self._file.write(dump_json(row, indent=None) + "\n")
            self._file.flush()

    def sync(self) -> None:
        """Make every row durable; a checkpoint is published only after this."""
        if self._file is not None:
            with room_checked(self.path):
                os.fsync(self._file.fileno())

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


class NoMetrics(Metrics):
    """Of a process that is not the run's writer: nothing."""

    def rewind(self, *, step: int, evaluated_step: int) -> None: ...

    def write(self, **row: Any) -> None: ...

    def sync(self) -> None: ...
