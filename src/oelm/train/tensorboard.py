"""A run's numbers as TensorBoard reads them, beside metrics.jsonl."""

from __future__ import annotations

import contextlib
import logging
import re
import time
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from oelm.errors import MissingExtraError
from oelm.files import room_checked
from oelm.train.evaluate import Judged
from oelm.train.metrics import read_metrics
from oelm.train.watch import StepReport, Watch

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

log = logging.getLogger(__name__)

FOLDER = "tensorboard"
_TRAINED = ("loss", "lr", "tokens_per_s")
_LONGEST_WAIT_S = 5.0


def with_tensorboard(watch: Watch, run: Path, *, wanted: bool) -> contextlib.AbstractContextManager[Watch]:
    """Return `watch`, wrapped so that the run's numbers go to TensorBoard too where that is wanted."""
    return TensorBoardWatch(watch, run) if wanted else contextlib.nullcontext(watch)


class TensorBoardWatch:
    """A `Watch` that tells another one everything and writes the numbers to `<run>/tensorboard/`.

    Raises MissingExtraError when made rather than at the first step. Until then nothing is written: the folder is not a
    run's before that, and only then is it known from where the run goes on.
    """

    def __init__(self, watch: Watch, run: Path) -> None:
        self._writer_class = _writer_class()
        self._writer: SummaryWriter | None = None
        self._watch, self._run = watch, run

    def __enter__(self) -> TensorBoardWatch:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        # What ended the run counts, not what goes wrong in closing a file on the same full disk.
        with contextlib.suppress(OSError) if error is not None else room_checked(self._run / FOLDER):
            self.close()

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def on_remark(self, text: str) -> None:
        self._watch.on_remark(text)

    def on_preparing(self, what: str, done: int, total: int, tokens: int) -> None:
        self._watch.on_preparing(what, done, total, tokens)

    def on_step(self, report: StepReport) -> None:
        self._write(report.step, {f"train/{name}": getattr(report, name) for name in _TRAINED})
        self._watch.on_step(report)

    def on_validating(self, done: int, total: int) -> None:
        self._watch.on_validating(done, total)

    def on_evaluation(self, step: int, evaluation: Judged, *, is_best: bool) -> None:
        row = evaluation.as_row()
        numbers = {f"val/{name.removeprefix('val_')}": value for name, value in row.items() if _is_number(value)}
        if self._writer is None:
            # A run stopped between a step and its evaluation goes on with the latter; the purge hides that step as well.
            numbers |= self._trained_at(step)
        self._write(step, numbers)
        self._watch.on_evaluation(step, evaluation, is_best=is_best)

    def _trained_at(self, step: int) -> dict[str, float]:
        rows = (row for row in read_metrics(self._run / "metrics.jsonl") if row["step"] == step and "loss" in row)
        return {f"train/{name}": row[name] for row in rows for name in _TRAINED}

    def _write(self, step: int, numbers: dict[str, float]) -> None:
        folder = self._run / FOLDER
        with room_checked(folder):
            if self._writer is None:
                _wait_for_a_later_name(folder)
                # A killed run repeats the steps after its checkpoint: readers drop what they saw from this one on.
                self._writer = self._writer_class(str(folder), purge_step=step)
            for tag, number in numbers.items():
                self._writer.add_scalar(tag, number, step)
            # As metrics.jsonl does: a kill loses nothing that a checkpoint may stand behind.
            self._writer.flush()


def _writer_class() -> type[SummaryWriter]:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise MissingExtraError("tensorboard", "track") from None
    return SummaryWriter


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _wait_for_a_later_name(folder: Path) -> None:
    """Let the second pass in which the newest event file was begun.

    Files are read in the order of their names, which start with that second; after it comes the process id, as text. One
    begun later but read earlier would purge nothing.
    """
    names = (re.match(r"events\.out\.tfevents\.(\d+)\.", path.name) for path in folder.glob("events.out.tfevents.*"))
    newest = max((int(name[1]) for name in names if name), default=0)
    behind_s = newest + 1 - time.time()
    if behind_s > _LONGEST_WAIT_S:
        log.warning(
            "%s was begun %.0f s in the future of this clock: TensorBoard may show steps twice, metrics.jsonl has them once",
            folder,
            behind_s,
        )
    elif behind_s > 0:
        time.sleep(behind_s)
