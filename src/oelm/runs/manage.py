"""Stop runs and clear them away: the only code outside a run that signals one or deletes what it wrote."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from filelock import Timeout

from oelm.errors import OelmError, RunDirError
from oelm.files import held, lock_at, read_json, take
from oelm.runs.find import RunView, look
from oelm.runs.layout import (
    CHECKPOINT_FILES,
    CHECKPOINTS,
    CONFIG,
    CONSOLE,
    HOLDER,
    LOCK,
    MODEL_FOLDER,
    POINTERS,
    RECORDS,
    STATUS,
    heads_picture,
    launch_lock_path,
)
from oelm.runs.status import ALIVE, is_here, read_locks, read_status, silent_s, write_status

STOPPED_WHILE_QUEUED = "asked to stop while queued"
_POLL_S = 0.1
# A lock may not reach across hosts: a run of another one is believed to live for this long after its last word.
_OTHER_HOST_S = 3600.0
_WEIGHTS = re.compile(r"checkpoints(?:/.*)?|(?:best|latest)\.json", re.DOTALL)
_CHECKPOINT = re.compile(r"checkpoints/(?:step-[0-9]{8,}|\.staging-[^/]+)")
_PICTURE = re.compile(rf"{heads_picture(0)[:-1]}[0-9]+\.(?:png|svg)")
_STAGING = re.compile(r"\.staging-[^/]+")
_OUR_FILES = {*RECORDS, *POINTERS, LOCK, HOLDER, CONSOLE, f"{MODEL_FOLDER}/generation_config.json"}
# What tells that a run is finished goes first and what tells that it is ours last, so that a clean that was itself
# killed leaves a run that passes for no other and that the next clean takes up.
_FIRST, _LAST = (STATUS, *POINTERS), (CONFIG, LOCK)


@dataclass
class Answers:
    """What became of a request to stop, run by run; `refused` says why, `starting` are those that cannot hear it yet."""

    signalled: list[RunView] = field(default_factory=list)
    starting: list[RunView] = field(default_factory=list)
    unqueued: list[RunView] = field(default_factory=list)
    elsewhere: list[RunView] = field(default_factory=list)
    refused: list[tuple[RunView, str]] = field(default_factory=list)


def ask_to_stop(views: Sequence[RunView]) -> Answers:
    """Ask the runs of this host that are under way to save and end, and take queued ones off the queue."""
    asked = Answers()
    # The queue first: else a runner fills the places of those that end with those that are to be stopped next.
    for view in sorted(views, key=lambda view: view.state != "queued"):
        if view.state == "queued" and _unqueue(view):
            # Looked for after the mark: whoever launches it from now on reads that first.
            (asked.starting if _is_being_launched(view) else asked.unqueued).append(view)
            continue
        now = look(view)
        # Whatever its status says: it may be about to write the first of its own, or we may have written over that.
        began_meanwhile = view.state == "queued" and _holder(now) is not None
        if now.state not in ALIVE and not began_meanwhile:
            continue
        if not began_meanwhile and not is_here(now.status):
            asked.elsewhere.append(now)
        elif reason := _signal(now):
            asked.refused.append((now, reason))
        else:
            asked.signalled.append(now)
    return asked


def _unqueue(view: RunView) -> bool:
    """Mark a queued run as stopped; False where it began meanwhile."""
    status = read_status(view.path)
    if status is None or status.status != "queued" or _holder(view) is not None:
        return False
    marked = status.model_copy(update={"status": "stopped", "message": STOPPED_WHILE_QUEUED})
    write_status(view.path, marked)
    return _holder(view) is None


def _signal(view: RunView) -> str:
    """Ask the process that holds a run to stop; return what stands against it, or nothing."""
    # The lock's holder and no other: the number in the status may have passed to somebody else's process.
    pid = _holder(view)
    if pid is None:
        return "" if look(view).state not in ALIVE else "no process of this machine holds its lock"
    try:
        os.kill(pid, signal.SIGTERM)
        # A run that was suspended hears of it only when it goes on.
        os.kill(pid, signal.SIGCONT)
    except ProcessLookupError:
        return ""
    except PermissionError:
        return f"process {pid} belongs to another user"
    return ""


def _holder(view: RunView) -> int | None:
    """Return the process that holds a run's lock."""
    status, locks = read_status(view.path), read_locks()
    expected = None if status is None else status.pid
    if locks is not None:
        return locks.holder(view.path / LOCK, expected=expected)
    # Where the system does not list the lock there is no other way to know than to try.
    return expected if _is_locked(view.path / LOCK) else None


def _is_being_launched(view: RunView) -> bool:
    """Whether a launcher has begun with a run, which is some time before the run itself holds its folder."""
    lock, locks = _launch_lock(view), read_locks()
    return _is_locked(lock) if locks is None else locks.holder(lock, expected=None) is not None


def _launch_lock(view: RunView) -> Path:
    return launch_lock_path(view.root, view.path)


def _is_locked(lock: Path) -> bool:
    if not lock.is_file():
        return False
    probe = lock_at(lock)
    if not take(probe):
        return True
    probe.release()
    return False


def wait_for_end(
    asked: Answers, *, timeout_s: float, on_wait: Callable[[list[RunView], float], None]
) -> tuple[list[RunView], list[RunView]]:
    """Wait until the runs that were asked have ended; return those that have and those that have not, as they are then."""
    began = time.monotonic()
    ended: list[RunView] = []
    waiting, deaf = [*asked.signalled, *asked.starting], {view.folder for view in asked.starting}
    while True:
        seen = [look(view) for view in waiting]
        over = [view for view in seen if _is_over(view, deaf)]
        ended += over
        waiting = [view for view in seen if view not in over]
        elapsed = time.monotonic() - began
        if not waiting or elapsed >= timeout_s:
            return ended, waiting
        on_wait(waiting, elapsed)
        time.sleep(_POLL_S)


def _is_over(view: RunView, deaf: set[str]) -> bool:
    """Whether a run has ended; one of the `deaf` is asked, and taken off them, as soon as it can hear."""
    if _holder(view) is None:
        # A run writes how it ended a moment before it lets go of its lock.
        return view.state not in ALIVE and not (view.folder in deaf and _is_being_launched(view))
    if view.folder in deaf:
        deaf.discard(view.folder)
        _signal(view)
    return False


@dataclass(frozen=True)
class Removal:
    """What goes of one run, in that order, and what stays because it is not ours."""

    view: RunView
    files: tuple[Path, ...]
    folders: tuple[Path, ...]
    kept: tuple[str, ...]
    size_bytes: int


@dataclass(frozen=True)
class Refusal:
    """A run that stays whole, and why."""

    view: RunView
    reason: str


def check_root(root: Path) -> None:
    """Raise RunDirError unless `root` is a folder that runs can be in."""
    if not root.is_dir():
        what = "is a file" if root.exists() else "is not there"
        raise RunDirError(f"{root}: {what}; --out must name the folder that runs are kept in")


def plan_removal(root: Path, view: RunView, *, weights: bool) -> Removal | Refusal:
    """Say what cleaning a run would delete, or why it would not touch it; with `weights`, only a finished run's weights."""
    if reason := _objection(root, view, weights=weights):
        return Refusal(view, reason)
    try:
        files, folders, kept = _survey(view.path, "")
        size_of = {path: path.lstat().st_size for path in files}
    except OSError as problem:
        return Refusal(view, f"cannot be read ({problem})")
    if weights:
        weight = _WEIGHTS.fullmatch
        files, folders = ([p for p in paths if weight(p.relative_to(view.path).as_posix())] for paths in (files, folders))
        kept = [name for name in kept if _WEIGHTS.fullmatch(name)]
    else:
        folders.append(view.path)
    files.sort(key=lambda path: _turn(path.relative_to(view.path).as_posix()))
    return Removal(view, tuple(files), tuple(folders), tuple(kept), sum(size_of[path] for path in files))


def remove(root: Path, view: RunView, *, weights: bool) -> Removal | Refusal:
    """Delete what `plan_removal` names, while holding the run's lock; then its parents that are empty, never the root."""
    if isinstance(refusal := plan_removal(root, view, weights=weights), Refusal):
        return refusal
    try:
        with _launches_held(view), held(view.path / LOCK, timeout_s=0):
            # Only now can nobody begin to write in it; what was written since it was looked at would be lost unseen.
            if read_status(view.path) != view.status:
                return Refusal(view, "it was resumed meanwhile; check it and repeat the command")
            plan = plan_removal(root, view, weights=weights)
            if isinstance(plan, Removal):
                _delete(plan)
    except Timeout:
        return Refusal(view, "in use; stop it first")
    except OSError as problem:
        return Refusal(view, f"cannot be deleted whole ({problem})")
    if not weights:
        _drop_empty(root, view.path)
    return plan


def _launches_held(view: RunView) -> contextlib.AbstractContextManager[object]:
    lock = _launch_lock(view)
    return held(lock, timeout_s=0) if lock.is_file() and not lock.is_symlink() else contextlib.nullcontext()


def _objection(root: Path, view: RunView, *, weights: bool) -> str:
    """Return why a run must not be touched, or nothing."""
    parts = view.path.relative_to(root).parts
    if len(parts) != 4 or any((root / Path(*parts[:depth])).is_symlink() for depth in range(1, 5)):
        return "not a folder of ours: there is a link on the way to it"
    if (view.path / LOCK).is_symlink():
        return "not a run of ours: its lock is a link"
    may_live = is_here(view.status) or silent_s(view.status, now=time.time()) < _OTHER_HOST_S
    if view.state == "running" or (view.state == "stale" and may_live):
        return "in use; stop it first"
    if weights and view.state != "done":
        return f"{view.state}, not done: it needs its checkpoints to resume"
    try:
        config = read_json(view.path / CONFIG)
    except OelmError:
        return "not a run of ours: no readable config.json"
    is_ours = isinstance(config, dict) and {"method", "seed"} <= config.keys()
    return "" if is_ours else "not a run of ours: its config.json names no method and seed"


def _survey(folder: Path, prefix: str) -> tuple[list[Path], list[Path], list[str]]:
    """Return our files and folders below a folder, inner ones first, and the names of all else; links are never ours."""
    files: list[Path] = []
    folders: list[Path] = []
    kept: list[str] = []
    with os.scandir(folder) as entries:
        found = sorted(entries, key=lambda entry: entry.name)
    for entry in found:
        name, path = prefix + entry.name, folder / entry.name
        if entry.is_dir(follow_symlinks=False) and _is_our_folder(name):
            below = _survey(path, f"{name}/")
            files, folders, kept = files + below[0], [*folders, *below[1], path], kept + below[2]
        # W&B links to logs of its own elsewhere: the link goes, what it leads to stays.
        elif (entry.is_file(follow_symlinks=False) or (entry.is_symlink() and _is_wandb(prefix[:-1]))) and _is_our_file(name):
            files.append(path)
        else:
            kept.append(name)
    return files, folders, kept


def _is_our_folder(name: str) -> bool:
    return name in (MODEL_FOLDER, CHECKPOINTS, "tensorboard") or _is_wandb(name) or _CHECKPOINT.fullmatch(name) is not None


def _is_wandb(name: str) -> bool:
    """Whether something is among what W&B writes into a run's folder."""
    return name == "wandb" or name.startswith("wandb/")


def _is_our_file(name: str) -> bool:
    """Whether a run writes a file of this name, seen from its folder."""
    folder, _, last = name.rpartition("/")
    if name in _OUR_FILES or _PICTURE.fullmatch(name):
        return True
    if _STAGING.fullmatch(last) and (folder in ("", CHECKPOINTS) or _CHECKPOINT.fullmatch(folder)):
        return True
    if _is_wandb(folder):
        return True
    if folder == "tensorboard":
        return last.startswith("events.out.tfevents.")
    return last in CHECKPOINT_FILES and _CHECKPOINT.fullmatch(folder) is not None


def _turn(name: str) -> tuple[int, str]:
    return (0 if name in _FIRST else 1 + (_LAST.index(name) + 1 if name in _LAST else 0), name)


def _delete(plan: Removal) -> None:
    for path in plan.files:
        path.unlink(missing_ok=True)
    for path in plan.folders:
        # Not empty where something of the user's own is in it.
        with contextlib.suppress(OSError):
            path.rmdir()


def _drop_empty(root: Path, run: Path) -> None:
    for parent in list(run.parents)[:3]:
        if parent == root:
            return
        with contextlib.suppress(OSError):
            parent.rmdir()
