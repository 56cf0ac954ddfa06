"""The records of finished runs as plain files small enough for a repository: without weights, tokenizer and machine."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from oelm.errors import ArchiveError
from oelm.experiments.collect import CONFIG, STATS, is_plain, run_place
from oelm.experiments.portable import Machine, portable_chunks, this_machine
from oelm.experiments.sweep import SWEEP
from oelm.files import dump_json, publish_dir, write_bytes
from oelm.train.metrics import read_metrics
from oelm.train.status import STATUS, read_status

_KEPT = (CONFIG, STATS, STATUS, "manifest.json", "audit.json", "attention.json")
METRICS, PREDICTIONS = "metrics.jsonl", "predictions.jsonl"
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

    A run that is there already must be the same one: ArchiveError otherwise.
    """
    machine = this_machine()
    added, already, remarks = list[str](), list[str](), list[str]()
    for place in sorted({run_place(root, run) for run in runs}):
        status = read_status(root / place)
        if status is None or status.status != "done":
            remarks.append(f"{place}: left out, for it is not done ({status.status if status else 'no status'})")
            continue
        content = _content(root / place, machine)
        if (target / place).exists():
            _refuse_other(target / place, content)
            already.append(place)
            continue
        with publish_dir(target / place) as staging:
            for name, data in content.items():
                write_bytes(staging / name, data)
        added.append(place)
    for sweep in {root.joinpath(*Path(place).parts[:2], SWEEP) for place in (*added, *already)}:
        if is_plain(sweep.parent, SWEEP):
            write_bytes(target / sweep.relative_to(root), sweep.read_bytes())
    return Kept(tuple(added), tuple(already), tuple(remarks))


def _content(run: Path, machine: Machine) -> dict[str, bytes]:
    content = {name: b"".join(portable_chunks(run, name, machine)) for name in _KEPT if is_plain(run, name)}
    # Of a classifier each example counts, for the interval over examples; of a language model it is its documents' losses.
    if "examples" in json.loads(content[CONFIG]) and is_plain(run, PREDICTIONS):
        content[PREDICTIONS] = b"".join(portable_chunks(run, PREDICTIONS, machine))
    rows = read_metrics(run / METRICS)
    every = max(1, sum("loss" in row for row in rows) // _KEPT_STEPS)
    kept = [row for row in rows if "val_loss" in row or row["step"] % every == 0]
    return content | {METRICS: "".join(dump_json(row, indent=None) + "\n" for row in kept).encode()}


def _refuse_other(there: Path, content: dict[str, bytes]) -> None:
    for name in (CONFIG, STATS, METRICS):
        if name in content and (there / name).read_bytes() != content[name]:
            raise ArchiveError(f"{there / name}: is that of another run; move {there} aside, or keep these records elsewhere")
