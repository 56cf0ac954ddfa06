"""Portable archives of runs: made without a trace of the machine, checked without writing, unpacked run by run."""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import BinaryIO

from pydantic import ValidationError

from oelm.errors import ArchiveError
from oelm.experiments.collect import file_entry, is_plain, look_at_run, look_at_sweeps, run_place, without_config
from oelm.experiments.inventory import FORMAT, INVENTORY, FileEntry, Inventory, RunEntry, SweepEntry, case_problem, name_problem
from oelm.experiments.portable import Machine, portable_chunks, this_machine
from oelm.experiments.tarball import Member, TarReader, TarWriter, opened
from oelm.files import (
    MAX_JSON_BYTES,
    STAGING_PREFIX,
    dump_json,
    fsync_dir,
    publish_dir,
    room_checked,
    sha256_file,
    sweep_staging,
    write_bytes,
)
from oelm.locks import lock_at, take
from oelm.runs.layout import CONFIG, SWEEP, TIMING

MAX_ARCHIVE_BYTES = 64 * 2**30
_IMPORT_LOCK = ".import.lock"
_ELSEWHERE = "move it aside, or import into another --out"


@dataclass(frozen=True)
class Imported:
    """The runs that an import added, and those that were there before, alike."""

    added: tuple[str, ...]
    already_there: tuple[str, ...]


def make_archive(root: Path, target: Path, *, runs: Sequence[Path], weights: bool) -> Inventory:
    """Write the runs into one .tar.gz that appears whole or not at all; return what is in it, and remarks on what is not.

    The bytes depend on the runs alone. A run that says it is running is left out with a remark; an unfinished one is in.
    """
    _refuse_existing(target)
    machine, remarks = this_machine(), without_config(root)
    places = [(path, root / path) for path in sorted({run_place(root, run) for run in runs})]
    if problem := case_problem(path for path, _ in places):
        raise ArchiveError(f"{root}: {problem}: rename one, or archive them apart")
    entries = [entry for path, run in places if (entry := look_at_run(path, run, machine, remarks, weights=weights))]
    if not entries:
        raise ArchiveError(f"{root}: no run to archive" + "".join(f"; {remark}" for remark in remarks))
    sweeps = look_at_sweeps(root, [entry.path for entry in entries], machine, remarks)
    inventory = _inventory(entries, sweeps, remarks)
    with _published_file(target) as file:
        writer = TarWriter(file)
        text = _inventory_bytes(inventory)
        writer.add(Member(INVENTORY, len(text)), [text])
        for name, listed in inventory.members():
            # Of a run the place of a file below it is listed, of a sweep the whole.
            below = SWEEP if listed.path == name else listed.path
            chunks = portable_chunks(root / name.removesuffix(f"/{below}"), below, machine)
            writer.add(Member(name, listed.size_bytes), _checked(chunks, listed, where=str(root / name)))
        writer.close()
    return inventory


def _inventory(entries: list[RunEntry], sweeps: tuple[SweepEntry, ...], remarks: list[str]) -> Inventory:
    inventory = Inventory(format=FORMAT, oelm=version("oelm"), runs=tuple(entries), sweeps=sweeps, remarks=tuple(remarks))
    if inventory.size_bytes > MAX_ARCHIVE_BYTES:
        raise ArchiveError(
            f"{inventory.size_bytes:,} bytes are more than the {MAX_ARCHIVE_BYTES:,} that an archive may hold: "
            "archive fewer runs, or leave out --weights"
        )
    return inventory


def _inventory_bytes(inventory: Inventory) -> bytes:
    return (dump_json(inventory.model_dump(mode="json")) + "\n").encode()


def _checked(chunks: Iterable[bytes], listed: FileEntry | SweepEntry, *, where: str) -> Iterator[bytes]:
    """Pass chunks on; raise ArchiveError after the last unless together they are the file that was listed."""
    digest = hashlib.sha256()
    for chunk in chunks:
        digest.update(chunk)
        yield chunk
    if digest.hexdigest() != listed.sha256:
        raise ArchiveError(
            f"{where} is not as listed (sha256 {digest.hexdigest()[:12]}..., listed {listed.sha256[:12]}...): "
            "damaged, or changed meanwhile; repeat, or copy it again"
        )


@contextlib.contextmanager
def _published_file(target: Path) -> Iterator[BinaryIO]:
    """Yield a file that becomes `target` when the block ends well, and vanishes when it does not."""
    with room_checked(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        staging = target.with_name(STAGING_PREFIX + secrets.token_hex(8))
        try:
            with staging.open("xb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            _refuse_existing(target)
            os.rename(staging, target)
            fsync_dir(target.parent)
        finally:
            staging.unlink(missing_ok=True)


def _refuse_existing(target: Path) -> None:
    if os.path.lexists(target):
        raise ArchiveError(f"{target}: is there already; give --to a new name, or remove it first")


def check_archive(path: Path, *, max_bytes: int = MAX_ARCHIVE_BYTES) -> Inventory:
    """Verify every byte of an archive without writing any; raise ArchiveError with the member and the reason."""
    with opened(path) as reader:
        inventory = _read_inventory(reader, max_bytes=max_bytes)
        for _, chunks in _verified(reader, inventory):
            _read_through(chunks)
    return inventory


def _read_inventory(reader: TarReader, *, max_bytes: int) -> Inventory:
    member = reader.next_member()
    if member is None or member.name != INVENTORY:
        found = "is empty" if member is None else f"begins with {member.name!r}"
        raise ArchiveError(f"{reader.where}: {found} and not with {INVENTORY}: not an archive of ours")
    if member.size_bytes > MAX_JSON_BYTES:
        raise ArchiveError(
            f"{reader.where}: {INVENTORY} says it has {member.size_bytes:,} bytes; the most is {MAX_JSON_BYTES:,}"
        )
    try:
        inventory = Inventory.model_validate_json(b"".join(reader.content(member)))
    except ValidationError as problem:
        error = problem.errors()[0]
        field = ".".join(str(part) for part in error["loc"])[:200]
        raise ArchiveError(
            f"{reader.where}: {INVENTORY}: {field}: {str(error['msg']).removeprefix('Value error, ')} "
            "(damaged, hostile, or of a newer oelm: ask for it again, or update oelm)"
        ) from None
    if inventory.size_bytes > max_bytes:
        raise ArchiveError(f"{reader.where}: lists {inventory.size_bytes:,} bytes, over the limit of {max_bytes:,} (max_bytes)")
    return inventory


def _verified(reader: TarReader, inventory: Inventory) -> Iterator[tuple[FileEntry | SweepEntry, Iterator[bytes]]]:
    """Yield entry and content of every member, which must be the listed ones in their order and nothing else.

    The content is checked as it is read, and must be read to its end before the next member is asked for.
    """
    listed = dict(inventory.members())
    for name, entry in listed.items():
        member = reader.next_member()
        if member is None:
            raise ArchiveError(f"{reader.where}: {name!r} is listed and missing")
        if member.name != name:
            raise ArchiveError(f"{reader.where}: {_misplaced(member.name, name, listed)}")
        if member.size_bytes != entry.size_bytes:
            raise ArchiveError(f"{reader.where}: {name!r} has {member.size_bytes:,} bytes, listed are {entry.size_bytes:,}")
        yield entry, _checked(reader.content(member), entry, where=f"{reader.where}: {name!r}")
    if (member := reader.next_member()) is not None:
        raise ArchiveError(f"{reader.where}: {_misplaced(member.name, None, listed)}")


def _misplaced(found: str, expected: str | None, listed: Mapping[str, FileEntry | SweepEntry]) -> str:
    if problem := name_problem(found):
        return problem
    if found not in listed:
        return f"{found!r} is not listed in {INVENTORY}"
    return f"{found!r} is there twice or out of order" + (f", where {expected!r} should be" if expected else "")


def import_archive(path: Path, root: Path, *, max_bytes: int = MAX_ARCHIVE_BYTES) -> Imported:
    """Check an archive, then unpack its runs below a root, each whole or not at all; killed, it can be repeated.

    A run that is there with the same config and figures is left alone, and so is a sweep, whatever it holds. Raises
    ArchiveError, before anything is written, where another run, a link or a file is in the way.
    """
    inventory = check_archive(path, max_bytes=max_bytes)
    machine = this_machine()
    there = {run.path for run in inventory.runs if _is_there(root, run, machine)}
    new = tuple(run.path for run in inventory.runs if run.path not in there)
    if new or any(not os.path.lexists(root / sweep.path) for sweep in inventory.sweeps):
        with _sole_importer(root), opened(path) as reader:
            # The file may have been replaced since it was checked: it is checked again as it is unpacked.
            if _read_inventory(reader, max_bytes=max_bytes) != inventory:
                raise ArchiveError(f"{path}: changed while it was imported; repeat the same command")
            _unpack(reader, inventory, root, set(new))
    return Imported(added=new, already_there=tuple(sorted(there)))


def _unpack(reader: TarReader, inventory: Inventory, root: Path, new: set[str]) -> None:
    members = _verified(reader, inventory)
    for run in inventory.runs:
        if run.path not in new:
            for _ in range(len(run.files)):
                _read_through(next(members)[1])
            continue
        target = root / run.path
        sweep_staging(target.parent, of=f"{target.name}-")
        with publish_dir(target) as staging:
            for _ in range(len(run.files)):
                entry, chunks = next(members)
                _write_file(staging / entry.path, chunks)
            if os.path.lexists(target):
                raise ArchiveError(f"{target}: came to be while it was imported; repeat the same command")
    for sweep in inventory.sweeps:
        content = b"".join(next(members)[1])
        if not os.path.lexists(root / sweep.path):
            write_bytes(root / sweep.path, content)
    assert next(members, None) is None


def _read_through(chunks: Iterable[bytes]) -> None:
    for _ in chunks:
        pass


def _write_file(path: Path, chunks: Iterable[bytes]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("xb") as file:
        for chunk in chunks:
            file.write(chunk)


@contextlib.contextmanager
def _sole_importer(root: Path) -> Iterator[None]:
    """Hold the root against other imports, so that what a killed one left can be told from what one is writing."""
    with room_checked(root / _IMPORT_LOCK):
        root.mkdir(parents=True, exist_ok=True)
        lock = lock_at(root / _IMPORT_LOCK)
        if not take(lock):
            raise ArchiveError(f"{root}: another import is writing there; wait for it, then repeat")
    try:
        yield
    finally:
        lock.release()


def _is_there(root: Path, run: RunEntry, machine: Machine) -> bool:
    """Whether a run is there already, alike; raise ArchiveError where its place is taken by anything else."""
    place = root
    for part in run.path.split("/"):
        if not place.is_dir():
            return False
        for sibling in os.listdir(place):
            if sibling.lower() == part.lower() and sibling != part:
                raise ArchiveError(f"{place / sibling}: differs only in case from {part!r} of the archive; {_ELSEWHERE}")
        place = place / part
        if place.is_symlink() or (place.exists() and not place.is_dir()):
            raise ArchiveError(f"{place}: is a link or a file, and a run must go there; {_ELSEWHERE}")
    if not place.exists():
        return False
    for name in (CONFIG, TIMING):
        listed = next((file.sha256 for file in run.files if file.path == name), None)
        if not _is_same(place, name, listed, machine):
            raise ArchiveError(f"{place}: another run is there (its {name} is not the archive's); {_ELSEWHERE}")
    return True


def _is_same(run: Path, name: str, listed: str | None, machine: Machine) -> bool:
    if not is_plain(run, name):
        return listed is None and not os.path.lexists(run / name)
    # As imported, or as it was before it was stripped for the archive.
    try:
        stripped = file_entry(name, portable_chunks(run, name, machine)).sha256
    except ArchiveError:
        return False
    return listed in (sha256_file(run / name), stripped)
