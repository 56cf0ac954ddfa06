"""Files that appear whole or not at all, and locks between processes."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator
from io import FileIO
from pathlib import Path
from typing import Any, TypeVar

from filelock import FileLock, Timeout
from pydantic import BaseModel, ConfigDict, ValidationError

from oelm.errors import ConfigError, DataError, DiskFullError, OelmError

STAGING_PREFIX = ".staging-"
_RETIRED = "-old"
MAX_JSON_BYTES = 64 * 2**20
# EFBIG is what a file-size limit gives (ulimit -f); EDQUOT a user's quota.
_NO_ROOM = {errno.ENOSPC, errno.EFBIG, errno.EDQUOT}
# Raises where the folder to write to no longer belongs to the caller; see RunDir.check_held.
Guard = Callable[[], None]
Parsed = TypeVar("Parsed", bound=BaseModel)


class Strict(BaseModel):
    """Frozen, no coercion, no unknown keys, no NaN."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", allow_inf_nan=False)


def sha256_file(path: Path) -> str:
    """Return the hex sha256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def dump_json(value: Any, *, indent: int | None = 2) -> str:
    """Return `value` as strict JSON: NaN and infinity are errors, never written as numbers."""
    return json.dumps(value, indent=indent, allow_nan=False, ensure_ascii=False)


def read_plain(path: Path) -> bytes:
    """Return the bytes of a file. Raises OSError for a pipe or a device too: opening one may never return."""
    mode = path.stat().st_mode
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
        raise OSError(errno.EINVAL, "a pipe, socket or device, not a file", str(path))
    return path.read_bytes()


def read_json(path: Path, *, error: type[OelmError] = DataError) -> Any:
    """Parse a JSON file of bounded size; raise `error` with the file and the reason when it cannot be read."""
    try:
        if path.stat().st_size > MAX_JSON_BYTES:
            raise error(f"{path}: {path.stat().st_size:,} bytes is too large for a JSON file of oelm; it is another file")
        return json.loads(read_plain(path).decode("utf-8"), parse_constant=refuse_constant)
    except (OSError, ValueError, RecursionError) as problem:
        raise error(f"{path}: cannot be read as JSON ({problem})") from problem


def check_can_hold(option: str, folder: Path) -> None:
    """Raise ConfigError unless a folder can be made, or written to, at the path that an option gave."""
    there = next(parent for parent in (folder, *folder.absolute().parents) if os.path.lexists(parent))
    if not there.is_dir():
        raise ConfigError(f"{option} {folder}: {there} is a file; give a folder, new or of runs")
    if not os.access(there, os.W_OK | os.X_OK):
        raise ConfigError(f"{option} {folder}: {there} cannot be written to; give another folder")


def read_as(kind: type[Parsed], path: Path) -> Parsed:
    """Read a JSON file into its type; DataError names the file and what is wrong in it."""
    try:
        if path.stat().st_size > MAX_JSON_BYTES:
            raise DataError(f"{path}: {path.stat().st_size:,} bytes is too large for a JSON file of oelm; it is another file")
        return kind.model_validate_json(read_plain(path))
    except OSError as problem:
        raise DataError(f"{path}: cannot be read ({problem})") from None
    except ValidationError as problem:
        raise DataError(f"{path}: {first_error(problem)}") from None


def first_error(problem: ValidationError) -> str:
    """Return the key and the message of the first thing that is wrong with a record."""
    error = problem.errors()[0]
    return f"{'.'.join(str(part) for part in error['loc']) or 'content'}: {error['msg']}"


def refuse_constant(name: str) -> float:
    """Refuse NaN and infinity as `parse_constant` of json.loads."""
    raise ValueError(f"{name} is not JSON")


def write_all(file: FileIO, content: bytes) -> None:
    """Write every byte to an unbuffered file; raise the system's error when the disk is full."""
    rest = memoryview(content)
    while rest:
        rest = rest[file.write(rest) :]


@contextlib.contextmanager
def room_checked(path: Path, *, guard: Guard | None = None) -> Iterator[None]:
    """Turn the system's error on writing `path` into ours: the guard's, or DiskFullError where the disk is full."""
    try:
        yield
    except OSError as problem:
        # First: a folder that is gone causes the system's error.
        if guard is not None:
            guard()
        if problem.errno in _NO_ROOM:
            raise disk_full(path, problem) from problem
        raise OelmError(f"{path}: cannot be written ({problem}); choose a folder you may write to") from problem


def disk_full(path: Path, problem: Exception) -> DiskFullError:
    folder = next((parent for parent in path.parents if parent.exists()), Path("."))
    free = shutil.disk_usage(folder).free
    return DiskFullError(
        f"no room to write {path} ({problem}; {free:,} bytes free on that disk). Nothing saved before is lost: "
        "make room (or raise the file-size limit or quota) and repeat the same command"
    )


def write_text(path: Path, text: str, *, durable: bool = True, guard: Guard | None = None) -> None:
    """Replace `path` by `text` in UTF-8, atomically; see `write_bytes`."""
    write_bytes(path, text.encode(), durable=durable, guard=guard)


def write_bytes(path: Path, content: bytes, *, durable: bool = True, guard: Guard | None = None) -> None:
    """Replace `path` by `content` atomically; with `durable`, it survives a power cut once this returns.

    With a `guard`, nothing appears in a folder for which it raises. Raises OelmError, and touches nothing, where the path
    names something other than a regular file: a rename would replace a device, a pipe or a link by a file.
    """
    with room_checked(path, guard=guard):
        _make_folder(path.parent, guard)
        refuse_special(path)
        # O_EXCL, readable by nobody else until complete, and in the target's folder, so that the rename is atomic.
        handle, staging = tempfile.mkstemp(prefix=STAGING_PREFIX, dir=path.parent)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(content)
                file.flush()
                if durable:
                    os.fsync(file.fileno())
            os.chmod(staging, 0o666 & ~_umask())
            move_within(path.parent, os.replace, Path(staging).name, path.name, guard=guard)
        except BaseException:
            Path(staging).unlink(missing_ok=True)
            raise
        if durable:
            fsync_dir(path.parent)


_SPECIAL = {
    stat.S_IFDIR: "a folder",
    stat.S_IFLNK: "a symbolic link",
    stat.S_IFIFO: "a named pipe",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
}


def refuse_special(path: Path) -> None:
    """Raise OelmError where a path to be written names anything but a regular file."""
    try:
        kind = stat.S_IFMT(os.lstat(path).st_mode)
    except FileNotFoundError:
        return
    if kind != stat.S_IFREG:
        raise OelmError(f"{path}: is {_SPECIAL.get(kind, 'no regular file')}, so nothing was written; give the name of a file")


def write_over(path: Path, content: bytes, *, guard: Guard | None = None) -> None:
    """Write `content` over the bytes of an existing file, and spaces over the rest.

    Only for a full disk, which has no room for the second file that an atomic write needs: a kill during this call
    damages the file. With a `guard`, nothing is written in a folder for which it raises.
    """
    with room_checked(path, guard=guard):
        handle = os.open(path, os.O_WRONLY | getattr(os, "O_NOFOLLOW", 0))
        with open(handle, "wb", buffering=0) as file:
            assert isinstance(file, FileIO)
            # After opening: whatever happens to the path from then on, this is the approved folder's file.
            if guard is not None:
                guard()
            write_all(file, content.ljust(os.fstat(handle).st_size))
            os.fsync(handle)


def write_json(path: Path, value: Any, *, durable: bool = True, guard: Guard | None = None) -> None:
    """Replace `path` by `value` as JSON, atomically."""
    write_text(path, dump_json(value) + "\n", durable=durable, guard=guard)


def _make_folder(folder: Path, guard: Guard | None) -> None:
    if guard is None:
        folder.mkdir(parents=True, exist_ok=True)
        return
    guard()
    # Its parents exist while it is the caller's; creating them would restart a run that was moved away.
    if not folder.is_dir():
        folder.mkdir()


def move_within(folder: Path, move: Callable[..., None], old: str, new: str, *, guard: Guard | None) -> None:
    """Rename `old` to `new` inside a folder by os.rename or os.replace, after the `guard` has approved the folder."""
    if guard is None or os.rename not in os.supports_dir_fd:
        if guard is not None:
            guard()
        move(folder / old, folder / new)
        return
    # Opened before it is approved: whatever happens to the path afterwards, the handle is the approved folder's.
    handle = os.open(folder, os.O_RDONLY)
    try:
        guard()
        move(old, new, src_dir_fd=handle, dst_dir_fd=handle)
    finally:
        os.close(handle)


def fsync_dir(path: Path) -> None:
    """Make the names in a directory durable (a no-op where directories cannot be opened)."""
    with contextlib.suppress(PermissionError):
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _umask() -> int:
    # The system returns the mask only in exchange for a new one.
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


def fsync_file(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())


@contextlib.contextmanager
def publish_dir(target: Path, *, guard: Guard | None = None) -> Iterator[Path]:
    """Yield a staging directory that becomes `target` when the block succeeds, and is removed when it fails.

    Every file is fsynced before the rename, and the parent after it, so that a directory with the final name is complete.
    An existing `target` is replaced only after the new one is complete. With a `guard`, nothing appears in a folder for
    which it raises.
    """
    with room_checked(target, guard=guard):
        _make_folder(target.parent, guard)
        staging = Path(tempfile.mkdtemp(prefix=f"{STAGING_PREFIX}{target.name}-", dir=target.parent))
        try:
            yield staging
            for path in staging.rglob("*"):
                if path.is_file():
                    fsync_file(path)
            fsync_dir(staging)
            os.chmod(staging, 0o777 & ~_umask())
            retired = target.with_name(f"{STAGING_PREFIX}{target.name}{_RETIRED}")
            if target.is_dir() and not target.is_symlink():
                move_within(target.parent, os.rename, target.name, retired.name, guard=guard)
            move_within(target.parent, os.rename, staging.name, target.name, guard=guard)
            fsync_dir(target.parent)
            shutil.rmtree(retired, ignore_errors=True)
        except BaseException:
            shutil.rmtree(staging, ignore_errors=True)
            raise


def sweep_staging(folder: Path, *, of: str = "") -> None:
    """Remove what killed writers (of the directory named `of`) left in `folder`. Call it only while holding the lock."""
    for path in folder.glob(f"{STAGING_PREFIX}{of}*"):
        # Killed between the two renames of a replacement: the old directory is the only complete one.
        target = folder / path.name.removeprefix(STAGING_PREFIX).removesuffix(_RETIRED)
        if path.name.endswith(_RETIRED) and not target.exists():
            os.rename(path, target)
            continue
        if path.is_symlink() or path.is_file():
            path.unlink(missing_ok=True)
        else:
            shutil.rmtree(path, ignore_errors=True)


def cache_root() -> Path:
    """Return where prepared data is kept: $OELM_CACHE, else the user's cache folder."""
    if chosen := os.environ.get("OELM_CACHE"):
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "oelm"


# No such call, no lock service (NFS without lockd), or a file system that takes none.
_NO_LOCKS = {errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP}


def lock_at(path: Path, *, thread_local: bool = True) -> FileLock:
    """Return the lock of a file, not taken yet. It is a kernel lock, which ends with its process."""
    # Without this, filelock falls back to a file whose existence is the lock: a killed process would leave it behind.
    return FileLock(path, thread_local=thread_local, fallback_to_soft=False)


def take(lock: FileLock, *, timeout_s: float = 0) -> bool:
    """Try to take a lock within a time (-1: no limit); return whether it was taken. Raises OelmError without lock support."""
    try:
        lock.acquire(timeout=timeout_s)
    except Timeout:
        return False
    except OSError as problem:
        if problem.errno not in _NO_LOCKS:
            raise
        raise OelmError(
            f"{lock.lock_file}: cannot be locked ({problem}): this file system has no locks (flock), so two processes could "
            "write the same files. Put the folder on a local disk (--out for runs, OELM_CACHE for prepared data), or start "
            "the file system's lock service"
        ) from problem
    return True


@contextlib.contextmanager
def held(path: Path, *, timeout_s: float = -1) -> Iterator[None]:
    """Hold the lock of a file. Raises Timeout when another process keeps it longer, and OelmError as `take` does."""
    lock = lock_at(path)
    if not take(lock, timeout_s=timeout_s):
        raise Timeout(str(path))
    try:
        yield
    finally:
        lock.release()
