"""Locks between processes: taken or not at once, and a clear refusal where a file system has none."""

from __future__ import annotations

import contextlib
import errno
import time
from collections.abc import Iterator
from pathlib import Path

from filelock import FileLock, SoftFileLock, Timeout

from oelm.errors import OelmError

# No such call, no lock service (NFS without lockd), or a file system that takes none.
_NO_LOCKS = {errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP}
# A process that begins to hold a lock file of its own names itself in it a moment later.
_NAMED_WITHIN_S = 1.0


def take(lock: FileLock, *, timeout_s: float = 0) -> bool:
    """Take a lock within a time; whether we have it now. Raises OelmError at once where nobody can ever take it.

    Where the system has no flock, filelock falls back to a file whose being there is the lock and which names its process.
    """
    path = Path(lock.lock_file)
    try:
        lock.acquire(timeout=timeout_s)
    except Timeout:
        if isinstance(lock, SoftFileLock) and not _is_named(path):
            raise OelmError(
                f"{path}: this file system has no locks (flock), and the file was left from where there were, so nobody "
                "can tell whether a process still uses it. If none does, delete that file and repeat the command; "
                "better, work on a local disk"
            ) from None
        return False
    except (OSError, NotImplementedError) as problem:
        if isinstance(problem, OSError) and problem.errno not in _NO_LOCKS:
            raise
        raise OelmError(
            f"{path}: cannot be locked ({problem}): this file system gives no locks (flock), so two processes could write "
            "the same files. Work on a local disk, or have its lock service started"
        ) from problem
    return True


@contextlib.contextmanager
def held(path: Path) -> Iterator[None]:
    """Hold the lock of a file, however long another process has it; refuse as `take` does."""
    lock = FileLock(path)
    while not take(lock, timeout_s=_NAMED_WITHIN_S):
        pass
    try:
        yield
    finally:
        lock.release()


def is_marker(lock: str | Path) -> bool:
    """Whether a lock file is itself the lock, which no system lists: filelock's, on disks without flock, names a process."""
    try:
        with open(lock, "rb") as file:
            return file.read(1).isdigit()
    except OSError:
        return False


def _is_named(path: Path) -> bool:
    deadline = time.monotonic() + _NAMED_WITHIN_S
    while not (is_marker(path) or not path.exists()) and time.monotonic() < deadline:
        time.sleep(0.01)
    return is_marker(path) or not path.exists()
