"""metrics.jsonl: one JSON object a line, appended step by step, cut back to the checkpoint when a run resumes."""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import math
import os
from collections import Counter
from collections.abc import Sequence
from io import FileIO
from pathlib import Path
from typing import Any

from oelm.errors import DataError
from oelm.files import Guard, dump_json, refuse_constant, room_checked, write_all, write_bytes, write_text
from oelm.runs.layout import METRICS

log = logging.getLogger(__name__)

Row = dict[str, Any]
_EVALUATION = b'"val_loss"'


def read_jsonl(path: Path, *, only: str = "") -> list[Row]:
    """Return the rows of a .jsonl file. The last line may be torn by a kill, and is left out when it does not end.

    Raises DataError for any other line that is not a JSON object. With `only`, lines without this text are passed over
    unread: of thousands of steps, a report wants the evaluations.
    """
    rows, problems = _scan(path, only)
    if problems:
        raise DataError(f"{path}: {problems[0]}; restore the file from a copy")
    return rows


def read_metrics(path: Path, *, only: str = "") -> list[Row]:
    """Return the rows of a metrics file, as `read_jsonl` does. Raises DataError also where a row has no step."""
    rows, problems = _scan(path, only, is_metrics=True)
    if problems:
        raise DataError(f"{path}: {problems[0]}; restore the file from a copy")
    return rows


def _scan(path: Path, only: str, *, is_metrics: bool = False) -> tuple[list[Row], list[str]]:
    """Return the whole rows of a file, and what is wrong with its other lines."""
    if not path.is_file():
        return [], []
    rows: list[Row] = []
    problems: list[str] = []
    for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").split("\n")[:-1], start=1):
        if only not in line:
            continue
        try:
            row = json.loads(line, parse_constant=refuse_constant)
        except (ValueError, RecursionError) as problem:
            problems.append(f"line {number} is damaged ({problem})")
            continue
        if fault := _fault(row, is_metrics=is_metrics):
            problems.append(f"line {number} {fault}")
        else:
            rows.append(row)
    return rows, problems


def _fault(row: Any, *, is_metrics: bool) -> str:
    """Return what is wrong with a line that is JSON, or nothing."""
    if not isinstance(row, dict):
        return f"is {type(row).__name__}, not an object"
    if not is_metrics:
        return ""
    step = row.get("step")
    if type(step) is not int or step < 0:
        return f"has the step {step!r}, not a whole number from 0 on"
    for name in ("loss", "val_loss"):
        value = row.get(name, 0.0)
        if type(value) not in (int, float) or not math.isfinite(value):
            return f"has the {name} {value!r}, not a number"
    return ""


def evaluations(run: str | Path) -> dict[int, dict[str, Any]]:
    """Return the evaluations of a run by step, as far as they are written; a line torn by a kill is left out."""
    path = os.path.join(run, METRICS)
    try:
        facts = os.stat(path)
    except OSError:
        return {}
    return _evaluations(path, facts.st_size, facts.st_mtime_ns)


@functools.lru_cache(maxsize=4096)
def _evaluations(path: str, size_bytes: int, changed_ns: int) -> dict[int, dict[str, Any]]:
    try:
        with open(path, "rb") as file:
            content = file.read(size_bytes)
    except OSError:
        return {}
    rows: dict[int, dict[str, Any]] = {}
    # Nearly all lines are steps: to look for the others alone makes a long run's file a matter of milliseconds.
    found = content.find(_EVALUATION)
    while found >= 0 and (end := content.find(b"\n", found)) >= 0:
        row = _parsed(content[content.rfind(b"\n", 0, found) + 1 : end])
        if isinstance(row, dict) and isinstance(row.get("step"), int):
            rows[row["step"]] = row
        found = content.find(_EVALUATION, end)
    return rows


def _parsed(line: bytes) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None


def missing_rows(rows: Sequence[Row], *, step: int, evaluated: Sequence[int]) -> str:
    """Return what is wrong with the rows of a run that took `step` steps and evaluated at these, or nothing."""
    steps = [row["step"] for row in rows if "loss" in row]
    evaluations = [row["step"] for row in rows if "val_loss" in row]
    return _difference("row", steps, range(1, step + 1)) or _difference("evaluation", evaluations, evaluated)


def _difference(what: str, found: Sequence[int], expected: Sequence[int]) -> str:
    counts = Counter(found)
    if missing := [step for step in expected if step not in counts]:
        last = missing[0]
        while last + 1 in expected and last + 1 not in counts:
            last += 1
        if last == missing[0]:
            return f"the {what} of step {last} is missing"
        return f"the {what}s of steps {missing[0]} to {last} are missing"
    if twice := [step for step, count in counts.items() if count > 1]:
        return f"the {what} of step {twice[0]} occurs {counts[twice[0]]} times"
    return "" if list(found) == list(expected) else f"the {what}s are not in the order of their steps"


class Metrics:
    """The writer of one run's metrics. Training rows have 'loss', evaluations have 'val_loss'.

    The `guard` raises where the folder is no longer the run's; nothing is written there then.
    """

    def __init__(self, path: Path, *, guard: Guard | None = None) -> None:
        self.path, self._guard = path, guard
        self._file: FileIO | None = None
        self._size = 0

    def rewind(self, *, step: int, evaluated: Sequence[int]) -> None:
        """Drop what was written after the state that training continues from, so that no row is repeated.

        `evaluated` holds the steps that the state has evaluated. Raises DataError, and changes nothing, where a row that
        the state has seen is missing: to cut it silently would change the figures of the run.
        """
        self.close()
        rows, problems = _scan(self.path, "", is_metrics=True)
        last = evaluated[-1] if evaluated else 0
        kept = [row for row in rows if row["step"] <= (last if "val_loss" in row else step)]
        if fault := missing_rows(kept, step=step, evaluated=evaluated):
            why = f" ({problems[0]})" if problems else ""
            raise DataError(
                f"{self.path}: {fault}{why}, and the checkpoint of step {step} has seen it. Nothing was changed: restore the "
                "file from a copy, resume with --exact-step from a step before the damage, or train again in another --out"
            )
        if problems:
            log.warning(
                "%s: %s; nothing is lost: the steps after the checkpoint of step %d are trained again",
                self.path,
                "; ".join(problems[:3]),
                step,
            )
        write_text(self.path, "".join(dump_json(row, indent=None) + "\n" for row in kept), guard=self._guard)
        self._open()

    def write(self, **row: Any) -> None:
        line = (dump_json(row, indent=None) + "\n").encode()
        with room_checked(self.path, guard=self._guard):
            file = self._in_place()
            try:
                write_all(file, line)
                self._size += len(line)
            except OSError:
                # A part of the row may be there: that was us.
                self._size = os.fstat(file.fileno()).st_size
                raise

    def sync(self) -> None:
        """Make every row durable; a checkpoint is published only after this."""
        if self._file is not None:
            with room_checked(self.path, guard=self._guard):
                os.fsync(self._in_place().fileno())

    def close(self) -> None:
        if self._file is not None:
            # Every row went to the system when it was written: an error now is one that `write` or `sync` has raised.
            with contextlib.suppress(OSError):
                self._file.close()
            self._file = None

    def _open(self) -> FileIO:
        # Unbuffered, so that a row that found no room is not tried again when the file is closed.
        self._file = self.path.open("a+b", buffering=0)
        self._size = os.fstat(self._file.fileno()).st_size
        return self._file

    def _in_place(self) -> FileIO:
        """Return the open file once it is sure that its path still leads to it.

        Rows written to a file that was deleted would vanish with this process: the file is written again from the one that
        is open. Raises DataError, and touches nothing, where another file is in its place or somebody cut or lengthened it,
        and what the guard raises where the folder is another.
        """
        if self._file is None:
            return self._open()
        try:
            if os.path.samestat(ours := os.fstat(self._file.fileno()), os.stat(self.path)):
                self._check_size(ours.st_size)
                return self._file
        except FileNotFoundError:
            return self._written_again(self._file)
        if self._guard is not None:
            self._guard()
        raise DataError(
            f"{self.path}: another file took its place while the run was writing to it; leave the files of a run alone "
            "until it has ended, and repeat the same command"
        )

    def _check_size(self, size: int) -> None:
        if size != self._size:
            raise DataError(
                f"{self.path}: has {size:,} bytes, and the run wrote {self._size:,}: somebody changed it while the run was "
                "writing to it, so the run stopped before its next checkpoint. Restore the file from a copy and repeat the "
                "same command; leave the files of a run alone until it has ended"
            )

    def _written_again(self, file: FileIO) -> FileIO:
        file.seek(0)
        write_bytes(self.path, file.readall(), guard=self._guard)
        log.warning("%s was deleted while the run was writing to it; it is there again with every row", self.path)
        self.close()
        return self._open()


class NoMetrics(Metrics):
    """Of a process that is not the run's writer: nothing."""

    def rewind(self, *, step: int, evaluated: Sequence[int]) -> None: ...

    def write(self, **row: Any) -> None: ...

    def sync(self) -> None: ...
