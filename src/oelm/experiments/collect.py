"""Which runs are under a root, and what of each goes into an archive."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

from oelm.errors import ArchiveError, ConfigError, DataError, suggest
from oelm.experiments.inventory import (
    CHECKPOINT_FILES,
    POINTERS,
    RECORDS,
    SWEEP,
    ArchivedStatus,
    FileEntry,
    RunEntry,
    SweepEntry,
    budgets_of,
    final_figures,
    is_run_file,
    run_path_problem,
)
from oelm.experiments.portable import Machine, portable_chunks
from oelm.files import MAX_JSON_BYTES, read_json
from oelm.train.records import METRICS, Figures, read_as, read_judged
from oelm.train.status import STATUS, read_status

CONFIG, STATS = "config.json", "timing_stats.json"


def find_runs(root: Path, names: Iterable[str]) -> list[Path]:
    """Return the runs under a root that experiment ids and paths mean, each once; all of them where none is named."""
    if not root.is_dir():
        raise ConfigError(f"{root}: no such folder; --out must name the one that holds the runs")
    # Neither hidden folders nor links are runs; what has a name that cannot travel is told when it is archived.
    found_here = [path.relative_to(root) for path in root.glob(f"*/*/*/seed-*/{CONFIG}")]
    plain = [path for path in found_here if not path.parts[0].startswith(".") and is_plain(root, path.as_posix())]
    every = sorted(root / path.parent for path in plain)
    wanted = list(names)
    if not wanted:
        return every
    found: set[Path] = set()
    for name in wanted:
        # A path as the user sees it from here, or one below the root: an experiment's id is the shortest of those.
        places = [_absolute(Path(name)), _absolute(root / name)]
        runs = [run for run in every if any(_absolute(run).is_relative_to(place) for place in places)]
        if not runs or not name:
            hint = suggest(name, sorted({run.relative_to(root).parts[0] for run in every}))
            raise ConfigError(f"{name!r} is no experiment and no run under {root}{hint}")
        found.update(runs)
    return sorted(found)


def without_config(root: Path) -> list[str]:
    """Return a remark on every folder in a run's place that a run wrote to and that has no config.json."""
    written = {path.parent for name in (STATUS, METRICS) for path in root.glob(f"*/*/*/seed-*/{name}")}
    places = sorted(path.relative_to(root) for path in written if not (path / CONFIG).exists())
    return [
        f"{place.as_posix()}: left out, for its {CONFIG} is gone, so it cannot be told what it is; restore it from a copy"
        for place in places
        if not place.parts[0].startswith(".")
    ]


def _absolute(path: Path) -> Path:
    """Return a path without dots; links stay, for they are refused later and not followed."""
    return Path(os.path.abspath(path))


def run_place(root: Path, run: Path) -> str:
    """Return where a run is below its root; raise ArchiveError unless there is one, at a place that can travel."""
    try:
        path = _absolute(run).relative_to(_absolute(root)).as_posix()
    except ValueError:
        raise ArchiveError(f"{run}: is not under {root}; an archive holds runs of one root") from None
    if problem := run_path_problem(path):
        raise ArchiveError(f"{run}: {problem}; rename it, or archive the others by name")
    if not is_plain(root, f"{path}/{CONFIG}"):
        raise ArchiveError(f"{run}: no run there (no {CONFIG}, or a link on the way to it)")
    return path


def is_plain(folder: Path, name: str) -> bool:
    """Whether a name below a folder is a regular file that no link leads to."""
    path = folder
    for part in name.split("/"):
        path = path / part
        if path.is_symlink():
            return False
    return path.is_file()


def look_at_run(path: str, run: Path, machine: Machine, remarks: list[str], *, weights: bool) -> RunEntry | None:
    """Return what is to be archived of a run; leave out, with a remark, what cannot be."""
    status = _status(run)
    if status == "running":
        remarks.append(f"{path}: left out, for its status says running; wait for it, or repeat its command if it was killed")
        return None
    files: list[FileEntry] = []
    for name in _file_names(run, weights=weights):
        try:
            files.append(file_entry(name, portable_chunks(run, name, machine)))
        except ArchiveError:
            # A run without one of its records is still a run; a checkpoint without one of its files is none.
            if name not in RECORDS:
                raise
            remarks.append(f"{path}/{name}: left out, for it is damaged or too large")
    held = {file.path for file in files}
    if CONFIG not in held:
        remarks.append(f"{path}: left out whole, for without {CONFIG} it is no run")
        return None
    if status == "done":
        remarks += odds_of(path, run)
    figures = final_figures(read_json(run / STATS, error=ArchiveError)) if status == "done" and STATS in held else {}
    return RunEntry(path=path, seed=int(path.rsplit("-", 1)[1]), status=status, figures=figures, files=tuple(files))


def odds_of(path: str, run: Path) -> list[str]:
    """Return a remark where the figures of a finished run are not what its metrics and answers give."""
    try:
        read_as(Figures, run / STATS)
        config = read_json(run / CONFIG)
    except DataError:
        # A record without them is told by who needs them; here is nothing to compare.
        return []
    try:
        read_judged(run, steps=config.get("steps") if isinstance(config, dict) else None)
    except DataError as problem:
        return [f"{path}: its record does not add up, and a report refuses it: {problem}"]
    return []


def _status(run: Path) -> ArchivedStatus | Literal["running"]:
    status = read_status(run) if is_plain(run, STATUS) and (run / STATUS).stat().st_size <= MAX_JSON_BYTES else None
    return status.status if status is not None else "unknown"


def _file_names(run: Path, *, weights: bool) -> list[str]:
    names = list(RECORDS)
    if weights:
        names += POINTERS
        for step in run.glob("checkpoints/step-*"):
            own = [f"checkpoints/{step.name}/{name}" for name in CHECKPOINT_FILES]
            # Whole or not at all, here too.
            names += own if all(is_run_file(name) and is_plain(run, name) for name in own) else []
    return sorted(name for name in names if is_plain(run, name))


def look_at_sweeps(root: Path, runs: Iterable[str], machine: Machine, remarks: list[str]) -> tuple[SweepEntry, ...]:
    """Return the sweeps of the experiments and budgets that runs are of; leave out, with a remark, what cannot be read."""
    found = []
    for folder in sorted(budgets_of(runs)):
        if not is_plain(root / folder, SWEEP):
            continue
        try:
            size, digest = _measured(portable_chunks(root / folder, SWEEP, machine))
            found.append(SweepEntry(path=f"{folder}/{SWEEP}", size_bytes=size, sha256=digest))
        except ArchiveError:
            remarks.append(f"{folder}/{SWEEP}: left out, for it is damaged or too large")
    return tuple(found)


def file_entry(name: str, chunks: Iterable[bytes]) -> FileEntry:
    """Return the inventory's line on a file of this content."""
    size, digest = _measured(chunks)
    return FileEntry(path=name, size_bytes=size, sha256=digest)


def _measured(chunks: Iterable[bytes]) -> tuple[int, str]:
    size, digest = 0, hashlib.sha256()
    for chunk in chunks:
        size += len(chunk)
        digest.update(chunk)
    return size, digest.hexdigest()
