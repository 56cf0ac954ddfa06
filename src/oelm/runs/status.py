"""status.json: what a run says it is doing; and whether that is so: alive, stale or dead, by its lock and its heartbeat."""

from __future__ import annotations

import datetime
import math
import os
import re
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import ValidationError

from oelm.errors import DiskFullError
from oelm.files import Guard, Strict, dump_json, write_bytes, write_over
from oelm.runs.layout import LOCK, STATUS

StatusName = Literal["queued", "running", "stopped", "failed", "done"]
StatusMetric = Literal["", "ppl", "accuracy"]
HEARTBEAT_S = 5.0
State = Literal["running", "stale", "queued", "dead", "failed", "damaged", "stopped", "done"]
STATES: tuple[State, ...] = ("running", "stale", "queued", "dead", "failed", "damaged", "stopped", "done")
ALIVE: tuple[State, ...] = ("running", "stale")
_HELD = re.compile(r"^\d+: FLOCK +\S+ +\S+ +(-?\d+) ([0-9a-f]+):([0-9a-f]+):(\d+) ", re.MULTILINE)
# A heartbeat comes only between steps, and before the first of them a model is loaded and perhaps compiled.
_SILENCE_S, _SILENCE_STEPS, _SILENCE_AT_START_S = 6 * HEARTBEAT_S, 10, 120.0
# A run's status fits into the first of these; thousands are read at once.
_BLOCK_BYTES, _MAX_BYTES = 1 << 12, 1 << 20


class Progress(Strict):
    """How far a run is. `best` is the best evaluation so far, read as `metric`; `step_s` the pace of the last steps."""

    step: int
    steps: int
    eta_s: float | None = None
    loss: float | None = None
    best: float | None = None
    metric: StatusMetric = ""
    step_s: float | None = None
    device: str = ""


class Status(Progress):
    """`status.json`. Host and pid are for messages only and are stripped on export."""

    status: StatusName
    heartbeat: str
    pid: int
    host: str
    started: str
    message: str = ""


def status_now(name: StatusName, progress: Progress, *, started: str, message: str = "") -> Status:
    """Return the status of a run that this process holds, as of now."""
    return Status(
        **progress.model_dump(),
        status=name,
        heartbeat=now_text(),
        pid=os.getpid(),
        host=socket.gethostname(),
        started=started,
        message=message,
    )


def write_status(run: Path, status: Status, *, guard: Guard | None = None) -> None:
    """Replace a run's status.json.

    How a run ended is also written where the disk is full: over the status before it, with as much of the message as has
    room. Otherwise the run would be called running for ever.
    """
    path = run / STATUS
    try:
        write_bytes(path, _content(status) + b"\n", durable=status.status != "running", guard=guard)
    except DiskFullError:
        if status.status == "running" or not path.is_file():
            raise
        room = path.stat().st_size
        try:
            # A block of a disk is mostly larger than a status.
            write_over(path, _content(status), guard=guard)
        except DiskFullError:
            write_over(path, _content(_shortened(status, room)), guard=guard)


def _content(status: Status) -> bytes:
    return dump_json(status.model_dump(mode="json")).encode()


def _shortened(status: Status, size_bytes: int) -> Status:
    """Return a status with as much of its message as makes it no longer than this."""
    while status.message and (beyond := len(_content(status)) - size_bytes) > 0:
        # At most six bytes a character: never cuts more than it must by much.
        status = status.model_copy(update={"message": status.message[: -max(1, beyond // 6)]})
    return status


def read_status(run: str | Path) -> Status | None:
    """Return a run's status, or None where there is none to read."""
    try:
        # Without waiting, if it is a pipe, for somebody to write to it.
        flags = os.O_RDONLY | getattr(os, "O_BINARY", 0) | getattr(os, "O_NONBLOCK", 0)
        handle = os.open(os.path.join(run, STATUS), flags)
    except OSError:
        return None
    try:
        content = os.read(handle, _BLOCK_BYTES)
        if len(content) == _BLOCK_BYTES:
            content += os.read(handle, _MAX_BYTES)
        return Status.model_validate_json(content)
    except (OSError, ValidationError):
        return None
    finally:
        os.close(handle)


def now_text() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


@dataclass(frozen=True)
class Locks:
    """The kernel's table of held locks: for each inode, its device (major, minor) and the process that holds it."""

    holders: Mapping[int, Sequence[tuple[tuple[int, int], int]]]

    def holder(self, lock: str | Path, *, expected: int | None) -> int | None:
        """Return the process that holds a lock file, or None where none of this machine does."""
        try:
            facts = os.lstat(lock)
        except OSError:
            return None
        device = (os.major(facts.st_dev), os.minor(facts.st_dev))
        for held_on, pid in self.holders.get(facts.st_ino, ()):
            # btrfs and overlays show a file under another device than its locks: there the recorded process must agree.
            if held_on == device or pid == expected:
                return pid
        return None


def read_locks() -> Locks | None:
    """Return the locks held on this machine, or None where the system does not list them."""
    try:
        return parse_locks(Path("/proc/locks").read_text(encoding="ascii", errors="replace"))
    except OSError:
        return None


def parse_locks(text: str) -> Locks:
    """Parse /proc/locks: its flock entries, without the processes that wait for one ('->')."""
    holders: dict[int, list[tuple[tuple[int, int], int]]] = {}
    for pid, major, minor, inode in _HELD.findall(text):
        holders.setdefault(int(inode), []).append(((int(major, 16), int(minor, 16)), int(pid)))
    return Locks(holders)


def decide(status: Status | None, *, held: bool | None, age_s: float, same_host: bool) -> State:
    """Say what a run is doing from what it says, whether its lock is held (None: unknown) and since when it is silent.

    `held` says something of runs of this host only: no system lists the locks of another.
    """
    if status is None:
        # Somebody is in it, about to write its first status or to replace a damaged one.
        return "running" if held else "damaged"
    if status.status != "running":
        return status.status
    if held is False and same_host:
        return "dead"
    patience_s = _SILENCE_AT_START_S if status.step_s is None else max(_SILENCE_S, _SILENCE_STEPS * status.step_s)
    return "stale" if age_s > patience_s else "running"


def silent_s(status: Status | None, *, now: float) -> float:
    """Return the seconds since a run's last sign of life; below zero where a clock was set back meanwhile."""
    try:
        return now - datetime.datetime.fromisoformat(status.heartbeat).timestamp() if status is not None else math.inf
    except (ValueError, OverflowError, OSError):
        return math.inf


def is_held(run: str | Path, status: Status | None, locks: Locks | None, *, same_host: bool) -> bool | None:
    """Say whether a process of this machine holds a run, without touching the lock; None where that cannot be known."""
    lock = os.path.join(run, LOCK)
    if locks is not None:
        return locks.holder(lock, expected=None if status is None else status.pid) is not None
    # A dead process holds nothing; a living one of that number may be another.
    return False if status is not None and same_host and not is_alive(status.pid) else None


def is_alive(pid: int) -> bool:
    """Whether a process of this machine has this number."""
    if os.name != "posix" or pid <= 0:
        return True
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        # It lives, and is somebody else's.
        pass
    return True


def is_here(status: Status | None) -> bool:
    """Whether a run says that it is this host's."""
    return status is None or status.host == socket.gethostname()
