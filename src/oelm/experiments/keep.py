"""The records of finished runs as plain files small enough for a repository: without weights, tokenizer and machine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from oelm.errors import ArchiveError
from oelm.experiments.collect import is_plain, odds_of, run_place, without_config
from oelm.experiments.portable import Machine, portable_chunks, this_machine
from oelm.experiments.sweep import SweepPoint, SweepRecord
from oelm.files import dump_json, publish_dir, write_bytes
from oelm.runs.layout import ATTENTION, AUDIT, CONFIG, MANIFEST, METRICS, PREDICTIONS, STATUS, SWEEP, TIMING
from oelm.runs.metrics import read_metrics
from oelm.runs.status import read_status

_KEPT = (CONFIG, TIMING, STATUS, MANIFEST, AUDIT, ATTENTION)
# Of the training rows so many are kept, enough to draw a curve; of the evaluations all.
_KEPT_STEPS = 100


@dataclass(frozen=True)
class Kept:
    """What was written, what stood there already, and why the rest was left out."""

    added: tuple[str, ...]
    already_there: tuple[str, ...]
    remarks: tuple[str, ...]


def keep_records(root: Path, target: Path, *, runs: Sequence[Path]) -> Kept:
    """Write the records of finished runs below `target`, run by run, and what was learnt from sweeps; overwrite nothing.

    A run that is there already must be the same one, and a sweep gives way only to one that holds all of its points:
    ArchiveError otherwise.
    """
    machine = this_machine()
    added, already, remarks, finished = list[str](), list[str](), without_config(root), list[str]()
    for place in sorted({run_place(root, run) for run in runs}):
        status = read_status(root / place)
        if status is not None and status.status == "done":
            finished.append(place)
            remarks += odds_of(place, root / place)
        else:
            remarks.append(f"{place}: left out, for it is not done ({status.status if status else 'no status'})")
    # Before the first run is written: a sweep that is refused leaves everything as it was.
    sweeps = _new_sweeps(root, target, finished, machine, remarks)
    for place in finished:
        content = _content(root / place, machine)
        if (target / place).exists():
            _refuse_other(target / place, content)
            already.append(place)
            continue
        with publish_dir(target / place) as staging:
            for name, data in content.items():
                write_bytes(staging / name, data)
        added.append(place)
    for path, data in sweeps.items():
        write_bytes(path, data)
    return Kept(tuple(added), tuple(already), tuple(remarks))


def _new_sweeps(root: Path, target: Path, places: Sequence[str], machine: Machine, remarks: list[str]) -> dict[Path, bytes]:
    """Return the sweeps of these runs that are not kept yet, or say more than what is kept, by where they go."""
    found: dict[Path, bytes] = {}
    for folder in sorted({Path(*Path(place).parts[:2]) for place in places}):
        ours, theirs = root / folder / SWEEP, target / folder / SWEEP
        if not is_plain(ours.parent, SWEEP):
            continue
        content = b"".join(portable_chunks(ours.parent, SWEEP, machine))
        if not theirs.exists():
            found[theirs] = content
        elif content != theirs.read_bytes():
            new, kept = _read_sweep(ours), _read_sweep(theirs)
            if kept.like is None and new.like is not None:
                remarks.append(f"{folder / SWEEP}: left as it was kept, for here it is only taken over from {new.like}")
                continue
            # One that was taken over gives way to any: nothing of it was measured there.
            if kept.like is None:
                _refuse_fewer(kept, theirs, new, ours)
            if kept.best is not None and new.best is None:
                remarks.append(f"{folder / SWEEP}: left as it was kept, for the sweep has new points that are not done")
            elif new != kept.model_copy(update={"written": new.written}):
                found[theirs] = content
    return found


def _read_sweep(path: Path) -> SweepRecord:
    try:
        return SweepRecord.model_validate_json(path.read_bytes())
    except ValidationError as problem:
        raise ArchiveError(f"{path}: is no record of a sweep ({problem.errors()[0]['msg']}); move it aside") from None


def _refuse_fewer(kept: SweepRecord, there: Path, new: SweepRecord, here: Path) -> None:
    for point in kept.points:
        if not any(_holds(other, point) for other in new.points):
            raise ArchiveError(
                f"{there}: holds the point {point.variant}, which {here} lacks or scores otherwise; "
                f"move {there} aside, or keep these records elsewhere"
            )


def _holds(new: SweepPoint, kept: SweepPoint) -> bool:
    """Whether a point says all that a kept one says: it may have more seeds, or be done where the other was not."""
    if (new.variant, new.values) != (kept.variant, kept.values) or not set(kept.seeds) <= set(new.seeds):
        return False
    if kept.score is None:
        return True
    return new.score == kept.score if set(new.seeds) == set(kept.seeds) else new.score is not None


def _content(run: Path, machine: Machine) -> dict[str, bytes]:
    content = {name: b"".join(portable_chunks(run, name, machine)) for name in _KEPT if is_plain(run, name)}
    # For intervals over examples or documents.
    answers = [name for name in PREDICTIONS.values() if is_plain(run, name)]
    content |= {name: b"".join(portable_chunks(run, name, machine)) for name in answers}
    rows = read_metrics(run / METRICS)
    every = max(1, sum("loss" in row for row in rows) // _KEPT_STEPS)
    kept = [row for row in rows if "val_loss" in row or row["step"] % every == 0]
    return content | {METRICS: "".join(dump_json(row, indent=None) + "\n" for row in kept).encode()}


def _refuse_other(there: Path, content: dict[str, bytes]) -> None:
    for name in (CONFIG, TIMING, METRICS):
        if name in content and (there / name).read_bytes() != content[name]:
            raise ArchiveError(f"{there / name}: is that of another run; move {there} aside, or keep these records elsewhere")
