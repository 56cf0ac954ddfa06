"""Token files that grow by whole shards: a killed writer continues after its last one."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import math
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Self

import numpy as np
from pydantic import BaseModel, ConfigDict, ValidationError

from oelm.data.encode import Ids
from oelm.data.survey import Item
from oelm.data.tokens import Split
from oelm.errors import DataError
from oelm.files import dump_json, read_json, room_checked, write_json

log = logging.getLogger(__name__)
JOURNAL = "journal.json"
SHARD_BYTES = 16 * 2**20


@dataclass(frozen=True)
class Limits:
    """How much of each split to take: at most `max_documents`, and no further document after `max_tokens`."""

    max_documents: int | None = None
    max_tokens: int | None = None

    def about_bytes(self) -> float:
        """Return about how much text the limits allow: five bytes a token, five thousand a document."""
        by_tokens = math.inf if self.max_tokens is None else 5.0 * self.max_tokens
        return min(by_tokens, math.inf if self.max_documents is None else 5000.0 * self.max_documents)

    def reached(self, documents: int, tokens: int) -> bool:
        by_documents = self.max_documents is not None and documents >= self.max_documents
        return by_documents or (self.max_tokens is not None and tokens >= self.max_tokens)


NO_LIMITS = Limits()


class Grown(BaseModel):
    """Contents of one split's file so far; `shards` are size and digest of each stretch. `is_open`: mid-document."""

    model_config = ConfigDict(strict=True, extra="forbid")

    tokens: int = 0
    documents: int = 0
    text_bytes: int = 0
    is_open: bool = False
    shards: list[tuple[int, str]] = []

    @property
    def size_bytes(self) -> int:
        return sum(size for size, _ in self.shards)


class Journal(BaseModel):
    """Progress of a preparation: the last piece whose tokens are on disk, and the contents of each file."""

    model_config = ConfigDict(strict=True, extra="forbid")

    at: tuple[int, int] = (-1, 0)
    splits: dict[Split, Grown] = {}


def read_journal(folder: Path) -> Journal:
    """Return the journal of the preparation in a folder; an empty one where the files do not agree with it."""
    path = folder / JOURNAL
    if not path.is_file():
        return Journal()
    try:
        record = read_json(path)
        journal = Journal.model_validate_json(dump_json(record["journal"]))
        if record != _signed(journal):
            raise DataError(f"{path}: does not have the digest it was written with")
        for split, grown in journal.splits.items():
            _check_shards(folder / f"{split}.bin", grown)
    except (DataError, ValidationError, OSError, KeyError, TypeError) as problem:
        log.warning("what was prepared before in %s is damaged (%s): starting over", folder, problem)
        return Journal()
    return journal


def _signed(journal: Journal) -> dict[str, Any]:
    content = journal.model_dump(mode="json")
    return {"journal": content, "sha256": hashlib.sha256(dump_json(content).encode()).hexdigest()}


def _check_shards(path: Path, grown: Grown) -> None:
    with path.open("rb") as file:
        for size, expected in grown.shards:
            if hashlib.sha256(file.read(size)).hexdigest() != expected:
                raise DataError(f"{path}: a shard does not have the digest it was written with")


@dataclass
class ShardWriter:
    """Appends documents to `<split>.bin` in a folder; what was committed survives a kill."""

    folder: Path
    dtype: np.dtype[np.unsignedinteger]
    end_of_text: int
    limits: Limits
    journal: Journal
    # Splits that take no more. None: no more documents are split by hash, as training is full and validation has some.
    full: set[Split | None] = field(default_factory=set)
    pending_bytes: int = 0
    _pending: dict[Split, list[bytes]] = field(default_factory=dict)
    _files: dict[Split, BinaryIO] = field(default_factory=dict)

    def __enter__(self) -> Self:
        for split in self.journal.splits:
            self._note_if_full(split)
        return self

    def __exit__(self, *_: object) -> None:
        for file in self._files.values():
            # After a full disk, closing tries to write again and fails again; only committed shards count.
            with contextlib.suppress(OSError):
                file.close()

    def append(self, item: Item, ids: Ids) -> None:
        """Add a piece's tokens, and the end mark after a document's last; skip what exceeds the limits."""
        split = item.split
        self.journal.at = item.at
        if split in self.full or (item.by_hash and None in self.full):
            return
        grown = self.journal.splits.setdefault(split, Grown())
        chunk = ids.astype(self.dtype).tobytes()
        if item.piece.ends:
            chunk += self.dtype.type(self.end_of_text).tobytes()
        self._pending.setdefault(split, []).append(chunk)
        grown.tokens += len(chunk) // self.dtype.itemsize
        grown.documents += item.piece.ends
        grown.is_open = not item.piece.ends
        grown.text_bytes += (text_bytes := len(item.piece.text.encode()))
        self.pending_bytes += text_bytes
        self._note_if_full(split)
        if self.pending_bytes >= SHARD_BYTES:
            self.commit()

    def commit(self) -> None:
        """Write the pending tokens to disk, then record them in the journal."""
        for split, chunks in self._pending.items():
            path, content = self.folder / f"{split}.bin", b"".join(chunks)
            with room_checked(path):
                file = self._file(path, split)
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            self.journal.splits[split].shards.append((len(content), hashlib.sha256(content).hexdigest()))
        self._pending, self.pending_bytes = {}, 0
        write_json(self.folder / JOURNAL, _signed(self.journal))

    def _file(self, path: Path, split: Split) -> BinaryIO:
        if split not in self._files:
            file = path.open("r+b" if path.is_file() else "xb")
            file.truncate(self.journal.splits[split].size_bytes)
            file.seek(0, os.SEEK_END)
            self._files[split] = file
        return self._files[split]

    def _note_if_full(self, split: Split) -> None:
        grown, val = self.journal.splits[split], self.journal.splits.get("val")
        if not grown.is_open and self.limits.reached(grown.documents, grown.tokens):
            self.full.add(split)
        if "train" in self.full and val is not None and val.documents:
            self.full.add(None)
