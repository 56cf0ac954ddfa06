"""A run's directory: one writer at a time, one config for life, and a status that others may read."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import secrets
import socket
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

from pydantic import ValidationError

from oelm.config import Config, TrainConfig, differences
from oelm.errors import CheckpointError, ConfigError, OelmError, RunDirError, RunDirLostError
from oelm.files import STAGING_PREFIX, Strict, dump_json, lock_at, room_checked, sweep_staging, take, write_all, write_json
from oelm.runs.layout import CHECKPOINTS, CONFIG, HOLDER, LATEST, LOCK, LOG, MANIFEST, METRICS
from oelm.runs.metrics import Metrics, NoMetrics, read_metrics
from oelm.runs.records import Manifest, checkpoint_folders, read_any_config, read_manifest, run_id, write_record
from oelm.runs.status import HEARTBEAT_S, Progress, StatusName, is_alive, now_text, read_status, status_now, write_status

# A holder is named a moment after it has the lock.
_NAMED_WITHIN_S = 1.0


class Holder(Strict):
    """Who holds a run, for messages only. The lock itself is the kernel's."""

    pid: int
    host: str
    started: str


class LogFile(logging.Handler):
    """Append the log to a file. Raises DiskFullError where a line finds no room, as all other files of a run do.

    The handler of the standard library prints a traceback then, and drops the line.
    """

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path
        with room_checked(path):
            # Unbuffered: a line that found no room is not tried again when the file is closed.
            self._file = path.open("ab", buffering=0)
        self.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))

    def emit(self, record: logging.LogRecord) -> None:
        line = f"{self.format(record)}\n".encode(errors="backslashreplace")
        with room_checked(self.path):
            write_all(self._file, line)

    def close(self) -> None:
        self._file.close()
        super().close()


class RunDir:
    """Hold a run directory for the life of a process. Raises RunDirError where another process does.

    The lock belongs to a file, everything else is written by path. Whoever writes asks `check_held` first: the directory
    may be removed, renamed or replaced by another run meanwhile.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._started = now_text()
        self._last_heartbeat = -HEARTBEAT_S
        self._lock = lock_at(path / LOCK)
        self._handler: logging.Handler | None = None
        self._is_named = False
        self._held_fd: int | None = None
        self.run_id = ""
        self.metrics = Metrics(path / METRICS, guard=self.check_held)

    def __enter__(self) -> RunDir:
        with room_checked(self.path / LOCK):
            self._refuse_foreign()
            self.path.mkdir(parents=True, exist_ok=True)
            # A kernel lock: it ends with the process, however that ends, so there is no stale lock to clear.
            if not take(self._lock):
                raise RunDirError(self._in_use())
        # Of the lock's own file, which it keeps open: its number is nobody else's until it is released.
        self._held_fd = self._lock._context.lock_file_fd
        try:
            self.check_held()
            sweep_staging(self.path)
            sweep_staging(self.path / CHECKPOINTS)
            self._start_log()
        except BaseException:
            self._lock.release()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.metrics.close()
        if self._handler is not None:
            logging.getLogger("oelm").removeHandler(self._handler)
            self._handler.close()
        if self._is_named:
            with contextlib.suppress(OSError, RunDirLostError):
                self.check_held()
                (self.path / HOLDER).unlink(missing_ok=True)
        self._held_fd = None
        self._lock.release()

    def check_held(self) -> None:
        """Raise RunDirLostError unless the lock that is in the directory now is the one that this process holds."""
        assert self._held_fd is not None, "a run directory is written to only while it is held"
        try:
            ours, there = os.fstat(self._held_fd), os.stat(self.path / LOCK)
            is_ours = (there.st_dev, there.st_ino) == (ours.st_dev, ours.st_ino)
        except OSError as problem:
            # ESTALE: over NFS, another machine removed it.
            if problem.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ESTALE):
                raise OelmError(f"{self.path / LOCK}: cannot be read ({problem}), so nothing is written there") from problem
            is_ours = False
        if not is_ours:
            raise RunDirLostError(
                f"{self.path} was removed, renamed or replaced during this run, so it stopped and wrote nothing "
                "more there. What it had saved is in its own folder: if that was renamed, move it back, or give its new "
                "name as --out, and repeat the command; if it was removed, the same command starts again from step 0"
            )

    def _sign(self) -> None:
        holder = Holder(pid=os.getpid(), host=socket.gethostname(), started=self._started)
        # Not that there is no room to write it: the lock holds without it.
        with contextlib.suppress(OSError):
            (self.path / HOLDER).write_text(holder.model_dump_json(), encoding="utf-8")

    def _refuse_foreign(self) -> None:
        """Raise RunDirError, before anything is touched, when the path is somebody else's."""
        if self.path.exists() and not self.path.is_dir():
            raise RunDirError(f"{self.path}: is a file; --out must name a folder, new or of the same run")
        if (self.path / CHECKPOINTS).is_symlink():
            raise RunDirError(f"{self.path / CHECKPOINTS}: is a link; a run writes and prunes only inside its own folder")
        names = {path.name for path in self.path.iterdir()} if self.path.is_dir() else set()
        if CONFIG in names:
            return
        # A run of ours that was killed before it wrote its config has a lock, and may have begun a log or a file.
        if LOCK in names:
            names = {name for name in names - {LOCK, HOLDER, LOG} if not name.startswith(STAGING_PREFIX)}
        if names:
            raise RunDirError(f"{self.path} holds {min(names)!r} but no config.json: not a run of ours; choose an empty --out")

    def _in_use(self) -> str:
        deadline = time.monotonic() + _NAMED_WITHIN_S
        while (holder := _holder(self.path / HOLDER)) is None and time.monotonic() < deadline:
            time.sleep(0.01)
        who = f"by process {holder.pid} on {holder.host} since {holder.started}" if holder else "by another process"
        return f"{self.path} is in use {who}; wait for it, stop it, or choose another --out"

    def _start_log(self) -> None:
        self._handler = LogFile(self.path / LOG)
        logger = logging.getLogger("oelm")
        logger.setLevel(logging.INFO)
        logger.addHandler(self._handler)

    def claim(self, config: Config) -> Config:
        """Make the directory this config's own, or check that it is; return the config that holds from now on.

        A finished run asked for more steps is extended. Any other difference raises RunDirError with the list. A run that
        had saved and has lost its checkpoints raises CheckpointError: to begin again unasked would wipe its metrics.
        """
        held = self._agreed(config)
        self.run_id = run_id(self.path) or secrets.token_hex(16)
        if not self._has_saved() and not self.is_done(held):
            self._check_never_saved(held)
        return held

    def _has_saved(self) -> bool:
        return bool(checkpoint_folders(self.path))

    def _check_never_saved(self, config: TrainConfig) -> None:
        reached = max((row["step"] for row in read_metrics(self.path / METRICS)), default=0)
        # A step is taken only after the save that was due: up to the first, a run may have been killed before it saved.
        if reached > min(config.save_every, config.eval_every) or (self.path / LATEST).exists():
            raise CheckpointError(
                f"{self.path}: its checkpoints are gone, and it had come to step {reached:,}; bring its folder "
                "'checkpoints' back, or move the run aside to start again from step 0"
            )

    def _agreed(self, config: Config) -> Config:
        path = self.path / CONFIG
        begun = [*self.path.glob(f"{CHECKPOINTS}/step-*"), *self.path.glob(LATEST)]
        # Nothing was trained yet (it did not fit, say): the next attempt may ask for something else.
        if not path.exists() or not (begun or read_metrics(self.path / METRICS)):
            write_json(path, config.as_dict(), guard=self.check_held)
            return config
        try:
            held = read_any_config(path)
        except ConfigError as problem:
            raise RunDirError(f"{problem}. Move {self.path} aside, or choose another --out") from None
        if not isinstance(held, type(config)):
            raise RunDirError(f"{self.path} holds a run of another kind; choose another --out")
        same_but_length = {"steps": held.steps, "extended_at": held.extended_at}
        if held == config or (
            held.extended_at and held.steps == config.steps and held == config.model_copy(update=same_but_length)
        ):
            return held
        # The command that began a run which was extended since still means that run.
        if config.steps in held.extended_at and held == config.model_copy(update=same_but_length):
            return held
        if config.steps > held.steps and held == config.model_copy(update=same_but_length):
            return self._extend(held, config.steps)
        changes = "; ".join(differences(held, config)[:6])
        raise RunDirError(f"{self.path} holds a run of another config ({changes}); choose another --out")

    def _extend(self, held: Config, steps: int) -> Config:
        status = read_status(self.path)
        if status is None or status.status != "done":
            raise RunDirError(
                f"{self.path} is not finished ({held.steps} steps planned), so it cannot be extended to {steps}: "
                f"let it finish first (repeat its command), or choose another --out"
            )
        if not self._has_saved():
            raise CheckpointError(
                f"{self.path} is finished and its weights were not kept, so it cannot be extended to {steps}: "
                "choose another --out to train that from step 0"
            )
        longer = held.model_copy(update={"steps": steps, "extended_at": (*held.extended_at, held.steps)})
        write_json(self.path / CONFIG, longer.as_dict(), guard=self.check_held)
        return longer

    def is_done(self, config: TrainConfig) -> bool:
        status = read_status(self.path)
        return status is not None and status.status == "done" and status.step >= config.steps

    def set_status(self, status: StatusName, progress: Progress, *, message: str = "") -> None:
        """Replace status.json."""
        self.check_held()
        # Not before: whoever only finds a run finished leaves no trace.
        if not self._is_named:
            self._is_named = True
            self._sign()
        self._last_heartbeat = time.monotonic()
        row = status_now(status, progress, started=self._started, message=message)
        write_status(self.path, row, guard=self.check_held)

    def heartbeat(self, progress: Callable[[], Progress]) -> None:
        """Say that the run is alive, at most once per HEARTBEAT_S."""
        if time.monotonic() - self._last_heartbeat >= HEARTBEAT_S:
            self.set_status("running", progress())

    def write_manifest(self, manifest: Manifest) -> None:
        """Write manifest.json, with the run's id; a run continued in another setting keeps the earlier ones beside it."""
        facts = manifest.model_dump(mode="json", exclude={"earlier", "run"})
        earlier: list[Any] = []
        if old := read_manifest(self.path):
            sittings = old.pop("earlier", [])
            old.pop("run", None)
            earlier = sittings if dump_json(old) == dump_json(facts) else [*sittings, old]
        whole = manifest.model_copy(update={"earlier": earlier, "run": self.run_id})
        write_record(self.path / MANIFEST, whole, guard=self.check_held)


def _holder(path: Path) -> Holder | None:
    """Return who holds a run by the file that says so; None while nobody, or a process that is dead, is named in it."""
    try:
        holder = Holder.model_validate_json(path.read_bytes())
    except (OSError, ValidationError):
        return None
    return None if holder.host == socket.gethostname() and not is_alive(holder.pid) else holder


class GuestRunDir(RunDir):
    """A run directory as the processes beside its writer see it: they read what the writer decided, and write nothing."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.metrics = NoMetrics(path / METRICS)

    def __enter__(self) -> RunDir:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None: ...

    def check_held(self) -> None: ...

    def claim(self, config: Config) -> Config:
        if not (self.path / CONFIG).is_file():
            raise RunDirError(f"{self.path}: not to be seen from here; --out must be on a disk that all hosts of a run share")
        held = read_any_config(self.path)
        assert isinstance(held, type(config))
        return held

    def set_status(self, status: StatusName, progress: Progress, *, message: str = "") -> None: ...

    def heartbeat(self, progress: Callable[[], Progress]) -> None: ...
