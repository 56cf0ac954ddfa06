"""Portable folders: the records of finished runs without a trace of the machine, and an inventory to check them by."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from oelm.errors import ConfigError, DataError, RunDirError
from oelm.experiments.sweep import SweepPoint, read_sweep
from oelm.files import (
    MAX_JSON_BYTES,
    Strict,
    dump_json,
    held,
    publish_dir,
    read_as,
    read_json,
    room_checked,
    sha256_file,
    sweep_staging,
    write_bytes,
    write_json,
)
from oelm.runs.find import RunView, scan
from oelm.runs.finished import read_judged
from oelm.runs.layout import (
    ATTENTION,
    AUDIT,
    CHECKPOINT_FILES,
    CONFIG,
    LOG,
    MANIFEST,
    METRICS,
    MODEL_CONFIG,
    POINTERS,
    PREDICTIONS,
    RECORDS,
    STATUS,
    SWEEP,
    TIMING,
)
from oelm.runs.metrics import read_metrics
from oelm.runs.records import Figures
from oelm.runs.status import read_status
from oelm.text import NAME, is_device, is_safe

INVENTORY = "inventory.json"
# What a report needs of a run: small enough for a repository.
_SMALL = (CONFIG, TIMING, STATUS, METRICS, MANIFEST, AUDIT, ATTENTION, *PREDICTIONS.values())
# Settings, where a word that happens to be the host's name (a host called 'cpu') is still a setting.
_SETTINGS = (CONFIG, MODEL_CONFIG, AUDIT, ATTENTION, TIMING, STATUS, SWEEP)
_STRIPPED = (*_SETTINGS, MANIFEST, LOG)
# Without weights, about this many training rows of metrics.jsonl are kept, enough to draw a curve; and all evaluations.
_KEPT_STEPS = 100
_CHUNK_BYTES = 2**20
_LOCK = ".archive.lock"
_ELSEWHERE = "move it aside, or archive into another folder"
# A line end or tab as a quoted text shows it: its letter is no part of the word that follows.
_ESCAPE = r"(?<=\\[nrt])"


@dataclass(frozen=True)
class Machine:
    """What a portable folder must not contain: paths, with their replacements, and host names."""

    paths: tuple[tuple[str, str], ...]
    hosts: tuple[str, ...]

    @cached_property
    def _rules(self) -> tuple[re.Pattern[str], list[str]]:
        # Longest first: a working folder below the home is a working folder.
        ordered = sorted(self.paths, key=lambda pair: len(pair[0]), reverse=True)
        rules = [(_path_pattern(path), stand_in) for path, stand_in in ordered]
        rules += [(_host_pattern(host), "host") for host in sorted(self.hosts, key=len, reverse=True)]
        kept = [(pattern, stand_in) for pattern, stand_in in rules if pattern]
        # One pass over the text, so that nothing put in is replaced again. (?!) matches nothing.
        whole = "|".join(f"({pattern})" for pattern, _ in kept) or "((?!))"
        return re.compile(whole), [stand_in for _, stand_in in kept]

    def stripped(self, text: str) -> str:
        """Return text with every path of this machine shortened to its stand-in, and every name of the host gone."""
        pattern, stand_ins = self._rules
        return pattern.sub(lambda found: stand_ins[(found.lastindex or 1) - 1], text)

    def stripped_json(self, value: Any, *, keep_words: bool) -> Any:
        """Return JSON data with every string stripped; with `keep_words`, a string that is just the host's name stays."""
        if isinstance(value, str):
            is_word = keep_words and value.lower() in {host.lower() for host in self.hosts}
            return value if is_word else self.stripped(value)
        if isinstance(value, list):
            return [self.stripped_json(item, keep_words=keep_words) for item in value]
        if isinstance(value, dict):
            # A key is a name of ours, never a host; but it may be a file's.
            return {
                self.stripped_json(key, keep_words=True): self.stripped_json(item, keep_words=keep_words)
                for key, item in value.items()
            }
        return value


def this_machine() -> Machine:
    """Return what must not travel from here."""
    paths: dict[str, str] = {}
    # A folder may be gone, and a home unknown: then nothing can name it either.
    for find, stand_in in ((Path.cwd, "."), (Path.home, "~")):
        try:
            path = find()
            paths |= {str(path): stand_in, str(path.resolve()): stand_in}
        except (OSError, RuntimeError):
            continue
    host = socket.gethostname()
    return Machine(tuple(paths.items()), tuple({host, host.split(".")[0]} - {"", "localhost"}))


def _path_pattern(path: str) -> str | None:
    """Return a pattern for an absolute path as a whole prefix; None for the root of a disk."""
    parts = [part for part in re.split(r"[/\\]+", path) if part]
    if path.startswith("/"):
        body = "".join(f"/+{re.escape(part)}" for part in parts)
    else:
        body = r"[/\\]+".join(re.escape(part) for part in parts) if len(parts) > 1 else ""
    # Before it no part of a longer path (./root, x/root), after it no longer name (/rootfs, /root-2, /root.old).
    return rf"(?:(?<![\w.~/])|{_ESCAPE}){body}(?![\w+@~%#-]|\.+\w)" if body else None


def _host_pattern(host: str) -> str:
    return rf"(?i:(?:(?<![\w.-])|{_ESCAPE}){re.escape(host)}(?![\w-]|\.\w))"


def _portable_chunks(folder: Path, name: str, machine: Machine, *, is_whole: bool = True) -> Iterator[bytes]:
    """Yield a file of a run, or a sweep.json, without the machine; numbers, tokenizers and weights byte for byte.

    Only where not `is_whole`, training rows are left out of metrics. Raises DataError where a file cannot be read as what
    it is.
    """
    path = folder / name
    try:
        if name == METRICS and not is_whole:
            yield _thinned_metrics(path)
        elif name in _STRIPPED:
            yield _stripped_file(path, name, machine)
        else:
            with path.open("rb") as file:
                while chunk := file.read(_CHUNK_BYTES):
                    yield chunk
    except OSError as problem:
        raise DataError(f"{path}: cannot be read ({problem})") from problem


def _thinned_metrics(path: Path) -> bytes:
    rows = read_metrics(path)
    every = max(1, sum("loss" in row for row in rows) // _KEPT_STEPS)
    kept = [row for row in rows if "val_loss" in row or row["step"] % every == 0]
    return "".join(dump_json(row, indent=None) + "\n" for row in kept).encode()


def _stripped_file(path: Path, name: str, machine: Machine) -> bytes:
    if path.stat().st_size > MAX_JSON_BYTES:
        raise DataError(f"{path}: {path.stat().st_size:,} bytes is too large to strip of this machine")
    if name == LOG:
        # Escaped, so that a byte that is no text stays what it is.
        text = path.read_bytes().decode("utf-8", "surrogateescape")
        return machine.stripped(text).encode("utf-8", "surrogateescape")
    if name == STATUS:
        status = read_status(path.parent)
        if status is None:
            raise DataError(f"{path}: is not a status of ours")
        stripped = {"host": "", "pid": 0, "message": machine.stripped(status.message)}
        value = status.model_copy(update=stripped).model_dump(mode="json")
    else:
        value = read_json(path)
    try:
        return (dump_json(machine.stripped_json(value, keep_words=name in _SETTINGS)) + "\n").encode()
    except (ValueError, RecursionError) as problem:  # a number too large for JSON, half a character, or a deep nest
        raise DataError(f"{path}: cannot be written as JSON again ({problem})") from problem


def _link_to(folder: Path, name: str) -> Path | None:
    """Return the first link on the way from a folder to a name below it."""
    parts = name.split("/")
    ways = (folder.joinpath(*parts[:count]) for count in range(1, len(parts) + 1))
    return next((way for way in ways if way.is_symlink()), None)


def _is_plain(folder: Path, name: str) -> bool:
    return _link_to(folder, name) is None and (folder / name).is_file()


def _is_portable(name: str) -> bool:
    """Whether every system can write a name with '/' between its parts, inside the folder that it is below."""
    return all(is_safe(part) and not is_device(part) for part in name.split("/"))


# Below the folder: neither absolute nor with '..' in it.
_Name = Annotated[str, Field(pattern=rf"^{NAME.pattern}(/{NAME.pattern})*$")]


class FileEntry(Strict):
    """Size and digest of one file."""

    size_bytes: Annotated[int, Field(ge=0)]
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class Inventory(Strict):
    """`inventory.json` of a portable folder: the final figures of every run, and every file of runs and sweeps."""

    format: Literal["oelm-folder-1"] = "oelm-folder-1"
    runs: dict[_Name, dict[str, int | float]] = Field(default_factory=dict)
    files: dict[_Name, FileEntry] = Field(default_factory=dict)

    @property
    def size_bytes(self) -> int:
        return sum(file.size_bytes for file in self.files.values())


@dataclass(frozen=True)
class Archived:
    """Which runs were written, which were in the folder before, and remarks on runs that were left out or are odd."""

    added: tuple[str, ...]
    already_there: tuple[str, ...]
    remarks: tuple[str, ...]


def archive_runs(folder: Path, views: Sequence[RunView], *, weights: bool) -> Archived:
    """Add the finished ones of these runs, and the sweeps next to them, to a portable folder; overwrite nothing.

    A run that is in the folder must be the same one, and a sweep gives way only to one that holds all of its points:
    RunDirError otherwise, before anything is written. Each run appears whole or not at all; if killed, repeat the call.
    """
    machine, remarks = this_machine(), list[str]()
    finished = _finished(views, remarks)
    if not finished:
        raise DataError("no finished run to archive" + "".join(f"; {remark}" for remark in remarks))
    if folder.exists() and folder.samefile(finished[0].root):
        raise ConfigError(f"{folder}: holds the runs themselves; archive them into another folder")
    with room_checked(folder):
        folder.mkdir(parents=True, exist_ok=True)
        with held(folder / _LOCK):
            inventory = read_as(Inventory, folder / INVENTORY) if os.path.lexists(folder / INVENTORY) else Inventory()
            there = {view.name for view in finished if _is_there(folder, view, machine, weights=weights)}
            sweeps = _sweeps_to_keep(folder, finished, machine, remarks)
            added = list[str]()
            for view in finished:
                if view.name not in there:
                    try:
                        _write_run(view, folder / view.name, machine, weights=weights)
                        added.append(view.name)
                    except DataError as problem:
                        remarks.append(f"{view.name}: left out: {problem}")
            for name, content in sweeps.items():
                if not (folder / name).exists() or (folder / name).read_bytes() != content:
                    write_bytes(folder / name, content)
            listed = _with_what_is_there(inventory, folder, {*added, *sweeps})
            if listed != inventory:
                write_json(folder / INVENTORY, listed.model_dump(mode="json"))
    return Archived(tuple(added), tuple(sorted(there)), tuple(remarks))


def _finished(views: Sequence[RunView], remarks: list[str]) -> list[RunView]:
    finished = []
    for view in views:
        if view.state != "done":
            remarks.append(f"{view.name}: left out: not finished ({view.state})")
        elif not _is_plain(view.path, CONFIG):
            remarks.append(f"{view.name}: left out: its {CONFIG} is missing; restore it from a copy")
        elif not _is_portable(view.name):
            remarks.append(f"{view.name}: left out: not every system can write this name; rename it")
        else:
            finished.append(view)
            try:
                config = read_json(view.path / CONFIG)
                read_judged(view.path, steps=config.get("steps") if isinstance(config, dict) else None)
            except DataError as problem:
                remarks.append(f"{view.name}: its record does not add up, and a report refuses it: {problem}")
    return finished


def _place_in(folder: Path, name: str) -> Path:
    if (link := _link_to(folder, name)) is not None:
        raise RunDirError(f"{link}: is a link, and links are not followed; {_ELSEWHERE}")
    return folder / name


def _is_there(folder: Path, view: RunView, machine: Machine, *, weights: bool) -> bool:
    """Whether a run is in the folder; raise RunDirError where its place is taken by anything else."""
    place = _place_in(folder, view.name)
    if not place.exists():
        return False
    for name in (CONFIG, TIMING, METRICS):
        is_ours, is_theirs = _is_plain(view.path, name), _is_plain(place, name)
        ours = (b"".join(_portable_chunks(view.path, name, machine, is_whole=whole)) for whole in (True, False))
        if is_ours != is_theirs or (is_ours and (place / name).read_bytes() not in ours):
            raise RunDirError(f"{place / name}: is not that of {view.path}; {_ELSEWHERE}")
    if weights and not (place / "checkpoints").exists() and (view.path / "checkpoints").exists():
        raise RunDirError(f"{place}: was archived without weights; {_ELSEWHERE}")
    return True


def _write_run(view: RunView, target: Path, machine: Machine, *, weights: bool) -> None:
    sweep_staging(target.parent, of=f"{target.name}-")
    with publish_dir(target) as staging:
        for name in _file_names(view.path, weights=weights):
            (staging / name).parent.mkdir(parents=True, exist_ok=True)
            with (staging / name).open("xb") as file:
                for chunk in _portable_chunks(view.path, name, machine, is_whole=weights):
                    file.write(chunk)
        if os.path.lexists(target):
            raise RunDirError(f"{target}: was created by another process meanwhile; repeat the same command")


def _file_names(run: Path, *, weights: bool) -> list[str]:
    names = [name for name in ((*RECORDS, *POINTERS) if weights else _SMALL) if _is_plain(run, name)]
    for step in run.glob("checkpoints/step-*") if weights else ():
        own = [f"checkpoints/{step.name}/{name}" for name in CHECKPOINT_FILES]
        # A checkpoint without one of its files is none.
        names += own if all(_is_portable(name) and _is_plain(run, name) for name in own) else []
    return names


def _sweeps_to_keep(folder: Path, views: Sequence[RunView], machine: Machine, remarks: list[str]) -> dict[str, bytes]:
    """Return the sweeps next to these runs to store, unless the folder already has a larger one."""
    found: dict[str, bytes] = {}
    for experiment, budget in sorted({(view.experiment, view.budget) for view in views}):
        root, name = views[0].root, f"{experiment}/{budget}/{SWEEP}"
        if not _is_plain(root, name):
            continue
        try:
            content = b"".join(_portable_chunks((root / name).parent, SWEEP, machine))
        except DataError as problem:
            remarks.append(f"{name}: left out: {problem}")
            continue
        there = _place_in(folder, name)
        if not there.exists() or there.read_bytes() == content:
            found[name] = content
            continue
        new, kept = (read_sweep(experiment, budget, place, asked="archive") for place in (root, folder))
        lost = next((point for point in kept.points if not any(_holds(other, point) for other in new.points)), None)
        # A sweep taken over from another experiment has no measurements.
        if lost is not None and kept.like is None and new.like is None:
            raise RunDirError(
                f"{there}: holds the point {lost.variant}, which {root / name} lacks or scores otherwise; {_ELSEWHERE}"
            )
        if (kept.like is None and new.like is not None) or (kept.best is not None and new.best is None):
            why = "new points are not done" if new.like is None else f"here it is only taken over from {new.like}"
            remarks.append(f"{name}: left as it is in {folder}: {why}")
        elif new != kept.model_copy(update={"written": new.written}):
            found[name] = content
    return found


def _holds(new: SweepPoint, kept: SweepPoint) -> bool:
    """Whether a point contains a stored one: it may have more seeds, or be done where the other was not."""
    if (new.variant, new.values) != (kept.variant, kept.values) or not set(kept.seeds) <= set(new.seeds):
        return False
    if kept.score is None:
        return True
    return new.score == kept.score if set(new.seeds) == set(kept.seeds) else new.score is not None


def _with_what_is_there(inventory: Inventory, folder: Path, fresh: Collection[str]) -> Inventory:
    """Return the inventory with what is fresh, and with portable runs and sweeps of the folder that were not listed.

    Those come from older versions, which wrote no inventory, or from an archiving that was killed before it wrote its own.
    """
    portable = {view.name for view in scan(folder) if view.state == "done" and view.status and not view.status.host}
    known = {_owner(name) for name in inventory.files}
    names = [name for name in _present(folder) if _is_portable(name) and _is_plain(folder, name)]
    owners = {owner for name in names if (owner := _owner(name)) in portable or owner == name}
    new = {owner for owner in owners if owner in fresh or owner not in known}
    files = {name: entry for name, entry in inventory.files.items() if _owner(name) not in new}
    for name in names:
        if _owner(name) in new:
            files[name] = FileEntry(size_bytes=(folder / name).stat().st_size, sha256=sha256_file(folder / name))
    runs = inventory.runs | {run: _figures(folder / run) for run in new & portable}
    return Inventory(runs=dict(sorted(runs.items())), files=dict(sorted(files.items())))


def _owner(name: str) -> str:
    """Return the run that a file is of; a sweep.json is its own."""
    return "/".join(name.split("/")[:4])


def _present(folder: Path) -> list[str]:
    """Return the files in the places of runs and sweeps; hidden ones are locks, or what a killed writer left."""
    paths = [path for pattern in ("*/*/*/seed-*/**/*", f"*/*/{SWEEP}") for path in folder.glob(pattern)]
    names = [path.relative_to(folder) for path in paths if path.is_symlink() or not path.is_dir()]
    return sorted({name.as_posix() for name in names if not any(part.startswith(".") for part in name.parts)})


def _figures(run: Path) -> dict[str, int | float]:
    try:
        return {name: value for name, value in read_as(Figures, run / TIMING) if isinstance(value, int | float)}
    except DataError:
        return {}


def check_folder(folder: Path) -> tuple[Inventory, list[str]]:
    """Compare a portable folder with its inventory; return what is damaged, missing or not listed. Writes nothing."""
    if not os.path.lexists(folder / INVENTORY):
        raise DataError(f"{folder}: has no {INVENTORY} to check it by; `oelm archive` writes one when it adds runs")
    inventory = read_as(Inventory, folder / INVENTORY)
    problems: dict[str, str] = {}
    for name, entry in inventory.files.items():
        path = folder / name
        if not _is_plain(folder, name):
            problems[name] = f"missing: {name}" + (" (a link or a folder is in its place)" if path.exists() else "")
        elif (size := path.stat().st_size) != entry.size_bytes:
            problems[name] = f"damaged: {name} has {size:,} bytes, {entry.size_bytes:,} are listed"
        elif (digest := sha256_file(path)) != entry.sha256:
            problems[name] = f"damaged: {name} has the sha256 {digest[:12]}..., {entry.sha256[:12]}... is listed"
    problems |= {name: f"not listed: {name}" for name in _present(folder) if name not in inventory.files}
    for run, figures in inventory.runs.items():
        if f"{run}/{TIMING}" not in problems and figures != _figures(folder / run):
            problems[run] = f"damaged: the figures of {run} in {INVENTORY} are not those of its {TIMING}"
    return inventory, list(problems.values())
