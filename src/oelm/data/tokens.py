"""Token files: raw uint16 or uint32 `train.bin` and `val.bin` (as nanoGPT reads them) and the `meta.json` that knows them."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from oelm.errors import DataError
from oelm.files import cache_root, dump_json, read_json, sha256_file

FORMAT = "oelm-tokens-1"
Tokens = NDArray[np.unsignedinteger[Any]]
Split = Literal["train", "val", "test"]
# Every token set has these two; a test split is there where the source has one.
SPLITS: tuple[Split, ...] = ("train", "val")


class SplitMeta(BaseModel):
    """What is known of one split: its file, counts of what it holds, and its digest."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")

    tokens: int = Field(gt=0)
    documents: int = Field(gt=0)
    text_bytes: int = Field(gt=0)
    sha256: str


class LeftOut(BaseModel):
    """How many files of the source are not in the set for one reason, and how much text they hold."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")

    files: int = Field(ge=0)
    text_bytes: int = Field(ge=0)


class TokenMeta(BaseModel):
    """`meta.json`: enough to open, check, decode and cite a token set."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")

    format: Literal["oelm-tokens-1"]
    name: str
    source: str
    # What pins the text: the hub's commit, or the digest of every document.
    revision: str = ""
    dtype: Literal["uint16", "uint32"]
    vocab_size: int = Field(gt=0)
    end_of_text: int = Field(ge=0)
    tokenizer: str
    tokenizer_sha256: str
    max_documents: int | None = None
    max_tokens: int | None = None
    # Of text, tokenizer and limits: what the set is found by.
    key: str = ""
    splits: dict[Split, SplitMeta]
    # By reason: what the source holds and the set does not.
    left_out: dict[str, LeftOut] = {}

    @model_validator(mode="after")
    def _end_is_a_token(self) -> Self:
        if self.end_of_text >= self.vocab_size:
            raise ValueError(f"end_of_text {self.end_of_text} is outside the vocabulary of {self.vocab_size}")
        return self

    @property
    def is_extract(self) -> bool:
        """Whether limits were set, so that this is not all of the source."""
        return self.max_documents is not None or self.max_tokens is not None

    @property
    def fingerprint(self) -> str:
        """A digest of the tokens and their meaning; two sets with the same one train the same."""
        meaning: list[Any] = [self.dtype, self.vocab_size, self.end_of_text, self.tokenizer_sha256]
        meaning += [self.splits[split].sha256 for split in sorted(self.splits)]
        return hashlib.sha256(dump_json(meaning).encode()).hexdigest()


@dataclass(frozen=True)
class TokenSet:
    """An opened, verified token set."""

    path: Path
    meta: TokenMeta
    splits: dict[Split, Tokens]

    @property
    def train(self) -> Tokens:
        return self.splits["train"]

    @property
    def val(self) -> Tokens:
        return self.splits["val"]


def dtype_for(vocab_size: int) -> Literal["uint16", "uint32"]:
    """Return the smallest of the two dtypes that holds every id of the vocabulary."""
    return "uint16" if vocab_size <= 2**16 else "uint32"


def how_to_mend(path: Path) -> str:
    """Say what to do about a damaged set: one that we cached can be made again, one of the user's must not be deleted."""
    if path.resolve().is_relative_to(cache_root().resolve()):
        return f"delete the folder {path} and repeat the command to prepare it again"
    return "bring back the files as they were, or prepare the set again"


def open_tokens(path: Path) -> TokenSet:
    """Open a token set after checking size, digest and range of every file; raise DataError naming what differs."""
    try:
        meta = read_meta(path / "meta.json")
        check_digest(path / "tokenizer.json", meta.tokenizer_sha256, holds="a tokenizer")
        splits = {split: _open_split(path / f"{split}.bin", meta, split) for split in meta.splits}
    except DataError as problem:
        raise DataError(f"{problem}; {how_to_mend(path)}") from None
    return TokenSet(path, meta, splits)


def read_meta(path: Path) -> TokenMeta:
    """Read the record of a token set; raise DataError naming what is wrong with it."""
    if not path.is_file():
        raise DataError(f"{path.parent}: no meta.json, so this is no whole token set")
    try:
        meta = TokenMeta.model_validate_json(dump_json(read_json(path)))
    except ValidationError as problem:
        first = problem.errors()[0]
        raise DataError(f"{path}: {'.'.join(map(str, first['loc']))}: {first['msg']}") from None
    for split in SPLITS:
        if split not in meta.splits:
            raise DataError(f"{path}: nothing recorded for the {split} split")
    return meta


def check_digest(path: Path, expected: str, *, holds: str) -> None:
    """Raise DataError unless the file is there and has this sha256."""
    if not path.is_file():
        raise DataError(f"{path}: missing, though meta.json records {holds}")
    if (found := sha256_file(path)) != expected:
        raise DataError(f"{path}: sha256 {found[:12]}..., expected {expected[:12]}...: damaged")


def _open_split(path: Path, meta: TokenMeta, split: Split) -> Tokens:
    known, dtype = meta.splits[split], np.dtype(meta.dtype).newbyteorder("<")
    expected_bytes = known.tokens * dtype.itemsize
    # Size before anything maps the file: a map beyond its end would kill the process without a word.
    if path.is_file() and path.stat().st_size != expected_bytes:
        raise DataError(f"{path}: {path.stat().st_size:,} bytes, expected {expected_bytes:,} ({meta.dtype})")
    check_digest(path, known.sha256, holds=f"{known.tokens:,} tokens")
    if (largest := _largest(path, dtype)) >= meta.vocab_size:
        raise DataError(f"{path}: holds token id {largest}, but the vocabulary has {meta.vocab_size}")
    return np.memmap(path, dtype=dtype, mode="r")


def _largest(path: Path, dtype: np.dtype[Any]) -> int:
    # Read in blocks, not through the map: pages of a map count as memory of this process.
    with path.open("rb") as file:
        return max(int(np.frombuffer(block, dtype).max()) for block in iter(lambda: file.read(2**23), b""))
