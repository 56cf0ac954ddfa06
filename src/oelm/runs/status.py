"""status.json: what a run is doing, written by whoever holds it and read by anyone, without loading torch."""

from __future__ import annotations

import datetime
import os
import socket
from pathlib import Path
from typing import Literal

from pydantic import ValidationError

from oelm.errors import DiskFullError
from oelm.files import Guard, Strict, dump_json, write_bytes, write_over
from oelm.runs.layout import STATUS

StatusName = Literal["queued", "running", "stopped", "failed", "done"]
Metric = Literal["", "ppl", "accuracy"]
HEARTBEAT_S = 5.0
# A run's status fits into the first of these; thousands are read at once.
_BLOCK_BYTES, _MAX_BYTES = 1 << 12, 1 << 20


class Progress(Strict):
    """How far a run is. `best` is the best evaluation so far, read as `metric`; `step_s` the pace of the last steps."""

    step: int
    steps: int
    eta_s: float | None = None
    loss: float | None = None
    best: float | None = None
    metric: Metric = ""
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
