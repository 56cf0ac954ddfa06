"""The earlier study's own output folders, one of the formats that are imported, and what in them does not add up."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from decimal import Decimal
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from oelm.errors import DataError
from oelm.experiments.imported import ImportedRun, SourceRun, load_imported
from oelm.files import read_json
from oelm.runs.layout import TIMING

LOSS, PPL = "val_loss", "val_ppl"
_MAX_LOG_BYTES = 256 * 2**20
_MAX_EVALUATIONS = 100_000
_CHUNK_BYTES = 2**20
# An evaluation line is shorter than half of this, so one that lies across two chunks is still seen whole.
_OVERLAP_BYTES = 2048
_ID = r"[A-Z0-9][A-Z0-9-]{0,59}-[0-9]{2}"
_FOLDER = re.compile(rf"({_ID})(_.*)?")
_NUMBER = rb"([0-9]{1,320}(?:\.[0-9]{1,20})?(?:e[+-]?[0-9]{1,3})?)"
# Progress bars stand before and behind it on the same line: it is searched for, not matched.
_EVALUATION = re.compile(rb"\[Step ([0-9]{1,15})\] Validation - Loss: " + _NUMBER + rb", PPL: " + _NUMBER)
_METHODS = {"baseline": "baseline", "oelm_v2": "oelm_freeze", "oelm_random": "oelm_random"}
# A larger share of the wall time than this that neither steps nor validation took is worth a remark.
_MAX_UNACCOUNTED = 0.05
# Losses were computed in single precision.
_FLOAT32 = 1e-6

InconsistencyCode = Literal[
    "ppl_not_exp",
    "times_crossed",
    "mean_outside",
    "validations_apart",
    "clock_over",
    "clock_under",
    "line_not_exp",
    "lines_not_exp",
    "step_twice",
    "curve_below",
    "curve_above",
]
Word = Annotated[str, Field(max_length=64, pattern=r"^[ -~]*$")]
Figure = Annotated[float, Field(ge=0)]


@dataclass(frozen=True)
class Inconsistency:
    """What does not agree in a reported row: a code and the numbers of its arithmetic, put into words elsewhere."""

    code: InconsistencyCode
    values: Mapping[str, int | float | str]


class _Line(NamedTuple):
    """One evaluation line of a log."""

    step: int
    val_loss: float
    val_ppl: float


class _Timing(BaseModel):
    """Their timing_stats.json: our names, with theirs as aliases. Keys that are not here stay out."""

    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)

    method: Word = Field(alias="model_type")
    dataset: Word = ""
    wall_s: Figure = Field(alias="total_wall_time")
    # They computed it from the best validation loss, whatever the word says.
    best_ppl: Figure | None = Field(default=None, alias="final_perplexity")
    best_val_loss: Figure | None = None
    measured_steps: Figure | None = Field(default=None, alias="num_steps_measured")
    warmup_steps: Figure | None = None
    step_s: Figure | None = Field(default=None, alias="mean_step_time")
    step_s_std: Figure | None = Field(default=None, alias="std_step_time")
    step_s_min: Figure | None = Field(default=None, alias="min_step_time")
    step_s_median: Figure | None = Field(default=None, alias="median_step_time")
    step_s_p95: Figure | None = Field(default=None, alias="p95_step_time")
    step_s_p99: Figure | None = Field(default=None, alias="p99_step_time")
    step_s_max: Figure | None = Field(default=None, alias="max_step_time")
    validation_s: Figure | None = Field(default=None, alias="total_validation_time")
    validation_s_mean: Figure | None = Field(default=None, alias="mean_validation_time")
    validations: Figure | None = Field(default=None, alias="num_validations")


def read_earlier(folder: Path) -> list[SourceRun]:
    """Return what the earlier study reports in a folder: one experiment's own, or the one that holds them all.

    Raises DataError, with the file and the reason, where a file is absent, damaged or too large.
    """
    folder = folder.parent if folder.name == TIMING else folder
    if not folder.is_dir():
        raise DataError(f"{folder}: no such folder; give the one that holds the earlier study's outputs")
    if _FOLDER.fullmatch(folder.resolve().name):
        return [_read_experiment(folder)]
    found = sorted(path for path in folder.iterdir() if path.is_dir() and _FOLDER.fullmatch(path.name))
    if not found:
        raise DataError(f"{folder}: no folder in it begins with an experiment's id, as GPT-01_baseline does")
    return [_read_experiment(path) for path in found]


def _read_experiment(folder: Path) -> SourceRun:
    name = _FOLDER.fullmatch(folder.resolve().name)
    assert name is not None
    if not (folder / TIMING).is_file():
        raise DataError(f"{folder / TIMING}: missing; bring it back, or move the folder aside")
    timing = _parse_timing(folder / TIMING)
    logs = [path for path in sorted([*folder.glob("*.log"), *folder.glob("*.txt")]) if path.is_file()]
    for path in logs:
        if not path.name.isprintable():
            raise DataError(f"{folder}: the name of the log {path.name!r} cannot be printed; rename it")
    lines = sorted({line for path in logs for line in _evaluations(path)})
    if len(lines) > _MAX_EVALUATIONS:
        raise DataError(f"{folder}: {len(lines):,} evaluation lines in its logs; more than {_MAX_EVALUATIONS:,} are no run's")
    return SourceRun(
        folder.resolve().name,
        folder,
        "study",
        {LOSS: [(step, loss) for step, loss, _ in lines], PPL: [(step, ppl) for step, _, ppl in lines]} if lines else {},
        [folder / TIMING, *logs],
        arm=name[1],
        # It had one seed for each experiment, and does not say which.
        seed=0,
        figures=timing.model_dump(exclude={"method", "dataset"}, exclude_none=True),
        about={"method": _METHODS.get(timing.method, timing.method), "dataset": timing.dataset},
    )


def _parse_timing(path: Path) -> _Timing:
    try:
        return _Timing.model_validate(read_json(path))
    except ValidationError as problem:
        error = problem.errors()[0]
        field = ".".join(str(part) for part in error["loc"]) or "the whole"
        raise DataError(f"{path}: {field}: {error['msg']}; null stands for a figure that is not there") from None


def _evaluations(path: Path) -> Iterator[_Line]:
    """Yield the evaluation lines of a log, some of them twice; lines whose numbers are not finite are left out."""
    try:
        if path.stat().st_size > _MAX_LOG_BYTES:
            raise DataError(
                f"{path}: {path.stat().st_size:,} bytes, over the limit of {_MAX_LOG_BYTES:,}; cut it or move it aside"
            )
        with path.open("rb") as file:
            tail = b""
            while chunk := file.read(_CHUNK_BYTES):
                text = tail + chunk
                # A number may go on in the next chunk: what ends near the end is left to the next round.
                yield from _matches(text, end=len(text) - _OVERLAP_BYTES // 2)
                tail = text[-_OVERLAP_BYTES:]
            yield from _matches(tail, end=len(tail))
    except OSError as problem:
        raise DataError(f"{path}: cannot be read ({problem})") from problem


def _matches(text: bytes, *, end: int) -> Iterator[_Line]:
    for found in _EVALUATION.finditer(text):
        evaluation = _Line(int(found[1]), float(found[2]), float(found[3]))
        if found.end() <= end and math.isfinite(evaluation.val_loss) and math.isfinite(evaluation.val_ppl):
            yield evaluation


def reported_runs(root: Path) -> dict[str, ImportedRun]:
    """Return what was imported of the earlier study under an outputs folder, by its experiments' ids."""
    return {run.arm: run for run in load_imported(root) if run.format == "study"}


def inconsistencies(reported: ImportedRun) -> list[Inconsistency]:
    """Return, each with its arithmetic, what in a reported row does not agree with the rest of it beyond rounding."""
    return [*_figures_apart(reported.figures), *_clock_apart(reported.figures), *_curve_apart(reported)]


def _figures_apart(figures: dict[str, float]) -> Iterator[Inconsistency]:
    loss, ppl = figures.get("best_val_loss"), figures.get("best_ppl")
    if loss is not None and ppl is not None and not _is_exp(loss, ppl):
        yield Inconsistency("ppl_not_exp", {"ppl": ppl, "loss": loss, "exp": _exp(loss)})
    names = [name for name in ("step_s_min", "step_s_median", "step_s_p95", "step_s_p99", "step_s_max") if name in figures]
    for low, high in pairwise(names):
        if figures[low] > figures[high]:
            yield Inconsistency("times_crossed", {"low": low, "low_s": figures[low], "high": high, "high_s": figures[high]})
    mean, least, most = (figures.get(name) for name in ("step_s", "step_s_min", "step_s_max"))
    if mean is not None and least is not None and most is not None and not least <= mean <= most:
        yield Inconsistency("mean_outside", {"mean": mean, "least": least, "most": most})


def _clock_apart(figures: dict[str, float]) -> Iterator[Inconsistency]:
    validation, wall = figures.get("validation_s", 0.0), figures.get("wall_s", 0.0)
    count, each = figures.get("validations"), figures.get("validation_s_mean")
    # Beyond rounding: a mean is given to three digits at least.
    if count is not None and each is not None and validation and abs(count * each - validation) > 0.005 * validation:
        values = {"count": count, "each": each, "product": count * each, "reported": validation}
        yield Inconsistency("validations_apart", values)
    if "measured_steps" not in figures or "step_s" not in figures or not wall:
        return
    steps = figures["measured_steps"] + figures.get("warmup_steps", 0.0)
    spent = steps * figures["step_s"] + validation
    addends = {"steps": steps, "step_s": figures["step_s"], "validation": validation}
    clocks = {"spent": _clock(spent), "wall": _clock(wall)}
    if spent > wall * (1 + _MAX_UNACCOUNTED):
        yield Inconsistency("clock_over", {**addends, **clocks, "share": spent / wall - 1})
    elif spent < wall * (1 - _MAX_UNACCOUNTED):
        yield Inconsistency("clock_under", {**addends, **clocks, "share": 1 - spent / wall})


def _curve_apart(reported: ImportedRun) -> Iterator[Inconsistency]:
    losses, ppls = (reported.curves.get(metric, ()) for metric in (LOSS, PPL))
    curve = [_Line(step, loss, ppl) for (step, loss), (_, ppl) in zip(losses, ppls, strict=True)]
    best = reported.figures.get("best_val_loss")
    odd = [line for line in curve if not _is_exp(line.val_loss, line.val_ppl)]
    if odd:
        first = odd[0]
        values = {"step": first.step, "ppl": first.val_ppl, "loss": first.val_loss, "exp": _exp(first.val_loss)}
        if len(odd) == 1:
            yield Inconsistency("line_not_exp", values)
        else:
            yield Inconsistency("lines_not_exp", {**values, "more": len(odd) - 1})
    for one, other in pairwise(curve):
        if one.step == other.step:
            yield Inconsistency("step_twice", {"step": one.step, "first": one.val_loss, "second": other.val_loss})
            break
    if not curve or best is None:
        return
    least = min(curve, key=lambda line: line.val_loss)
    if abs(least.val_loss - best) > _half_unit(least.val_loss, decimals=3) + _half_unit(best, decimals=3):
        code: InconsistencyCode = "curve_below" if least.val_loss < best else "curve_above"
        yield Inconsistency(code, {"loss": least.val_loss, "step": least.step, "best": best})


def _is_exp(loss: float, ppl: float) -> bool:
    """Whether some number that rounds to `ppl` is exp of some number that rounds to `loss`."""
    loss_unit, ppl_unit = _half_unit(loss, decimals=3), _half_unit(ppl, decimals=2)
    low, high = _exp(loss - loss_unit) * (1 - _FLOAT32), _exp(loss + loss_unit) * (1 + _FLOAT32)
    return ppl + ppl_unit >= low and ppl - ppl_unit <= high


def _half_unit(value: float, *, decimals: int) -> float:
    """Return half a unit of the last decimal that a number shows; at least `decimals` count, for zeros are not shown."""
    exponent = Decimal(repr(value)).as_tuple().exponent
    assert isinstance(exponent, int)
    return 0.5 * 10.0 ** -max(-exponent, decimals)


def _exp(loss: float) -> float:
    return math.exp(min(loss, 700.0))


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}h{minutes % 60:02d}m{rest:02d}s"
