"""Locks between processes, with a clear error where a file system has none."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterator
from pathlib import Path

from filelock import FileLock, Timeout

from oelm.errors import OelmError

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
