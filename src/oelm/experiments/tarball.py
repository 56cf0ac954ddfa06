"""A .tar.gz of plain files: bytes that depend on the content alone, and a reader that trusts nothing it reads.

The reader takes single headers apart with `tarfile`, and never lets it walk an archive: extended headers, links and sparse
files, whose sizes and names an attacker chooses, are refused by their type before anything of theirs is read.
"""

from __future__ import annotations

import contextlib
import gzip
import tarfile
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from oelm.errors import ArchiveError

_BLOCK = tarfile.BLOCKSIZE
_CHUNK_BYTES = 2**20
# Weights hardly compress, and text compresses well at any level.
_LEVEL = 3
_KINDS = {
    tarfile.LNKTYPE: "a hard link",
    tarfile.SYMTYPE: "a symbolic link",
    tarfile.CHRTYPE: "a device",
    tarfile.BLKTYPE: "a device",
    tarfile.DIRTYPE: "a folder",
    tarfile.FIFOTYPE: "a pipe",
    tarfile.CONTTYPE: "a contiguous file",
    tarfile.GNUTYPE_SPARSE: "a sparse file",
    tarfile.GNUTYPE_LONGNAME: "an extended header",
    tarfile.GNUTYPE_LONGLINK: "an extended header",
    tarfile.XHDTYPE: "an extended header",
    tarfile.XGLTYPE: "an extended header",
}


@dataclass(frozen=True)
class Member:
    """The header of one regular file."""

    name: str
    size_bytes: int


class TarWriter:
    """Write members one after the other; the same members give the same bytes."""

    def __init__(self, file: BinaryIO) -> None:
        # No name and no time in the header: both would tell where and when.
        self._file = gzip.GzipFile(filename="", mode="wb", compresslevel=_LEVEL, fileobj=file, mtime=0)
        self._written = 0

    def add(self, member: Member, chunks: Iterable[bytes]) -> None:
        """Write one file; raise ArchiveError unless the chunks are as long as the header says."""
        self._write(_header(member))
        count = 0
        for chunk in chunks:
            count += len(chunk)
            if count > member.size_bytes:
                break
            self._write(chunk)
        if count != member.size_bytes:
            raise ArchiveError(f"{member.name}: changed while it was archived; wait until nothing writes to it, then repeat")
        self._write(bytes(-count % _BLOCK))

    def close(self) -> None:
        """Write the end; without it the archive is damaged."""
        self._write(bytes(2 * _BLOCK))
        self._write(bytes(-self._written % tarfile.RECORDSIZE))
        self._file.close()

    def _write(self, data: bytes) -> None:
        self._written += len(data)
        self._file.write(data)


def _header(member: Member) -> bytes:
    info = tarfile.TarInfo(member.name)
    info.size, info.mode = member.size_bytes, 0o644
    try:
        return info.tobuf(tarfile.USTAR_FORMAT, "utf-8", "strict")
    except ValueError as problem:  # a name over 255 or a file of 8 GiB: more than the plain format holds
        raise ArchiveError(f"{member.name}: {member.size_bytes:,} bytes, does not fit into a tar file ({problem})") from None


class TarReader:
    """Read members one after the other, each only as far as asked. Every fault is an ArchiveError that names the archive."""

    def __init__(self, file: BinaryIO, where: Path) -> None:
        self._file = gzip.GzipFile(fileobj=file, mode="rb")
        self.where = where
        self._place = "at its beginning"

    def next_member(self) -> Member | None:
        """Return the next header, or None at the end, behind which nothing may stand."""
        block = self._read(_BLOCK)
        if block == bytes(_BLOCK):
            self._check_end()
            return None
        try:
            info = tarfile.TarInfo.frombuf(block, "utf-8", "strict")
        except (tarfile.HeaderError, ValueError) as problem:
            raise self._problem(f"damaged {self._place} ({problem})") from None
        if info.type != tarfile.REGTYPE:
            kind = _KINDS.get(info.type, f"of the unknown type {info.type!r}")
            raise self._problem(f"{info.name!r} is {kind}; only regular files are allowed")
        if info.size < 0:
            raise self._problem(f"{info.name!r} has a size below zero")
        self._place = f"in {info.name!r}"
        return Member(info.name, info.size)

    def content(self, member: Member) -> Iterator[bytes]:
        """Yield the bytes of the member whose header was read last; call it once, and exhaust it."""
        left = member.size_bytes
        while left:
            chunk = self._read(min(left, _CHUNK_BYTES))
            left -= len(chunk)
            yield chunk
        self._read(-member.size_bytes % _BLOCK)
        self._place = f"after {member.name!r}"

    def _check_end(self) -> None:
        # To the very end of the file, for only there the checksum of the compression is compared.
        rest = self._read_some(tarfile.RECORDSIZE + 1)
        if len(rest) > tarfile.RECORDSIZE or rest.strip(b"\0"):
            raise self._problem("holds something behind its end")

    def _read(self, count: int) -> bytes:
        data = self._read_some(count)
        if len(data) < count:
            raise self._problem(f"ends too early, {self._place}; copy it again")
        return data

    def _read_some(self, count: int) -> bytes:
        try:
            return self._file.read(count)
        except (OSError, EOFError, zlib.error) as problem:
            raise self._problem(f"damaged {self._place}, or no archive of ours ({problem}); copy it again") from None

    def _problem(self, reason: str) -> ArchiveError:
        return ArchiveError(f"{self.where}: {reason}")


@contextlib.contextmanager
def opened(path: Path) -> Iterator[TarReader]:
    """Open an archive to read."""
    # A pipe of that name would be waited on for ever.
    if not path.is_file():
        raise ArchiveError(f"{path}: no such file; give the path of an archive that `oelm archive --to` made")
    try:
        file = path.open("rb")
    except OSError as problem:
        raise ArchiveError(f"{path}: cannot be read ({problem})") from problem
    with file:
        yield TarReader(file, path)
