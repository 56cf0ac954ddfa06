"""Token files: raw uint16 or uint32 `train.bin` and `val.bin` (as nanoGPT reads them) and the `meta.json` that knows them."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from oelm.errors import DataError
from oelm.files import dump_json, read_json, sha256_file

FORMAT = "oelm-tokens-1"
Tokens = NDArray[np.unsignedinteger[Any]]
Split = Literal["train", "val", "test"]
# Every token set has these two; a test split is there where the source has one.
SPLITS: tuple[Split, ...] = ("train", "val")
_HOW_TO_MEND = "delete this folder and repeat the command to prepare it again"


class SplitMeta(BaseModel):
    """What is known of one split: its file, counts of what it holds, and its digest."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")

    tokens: int = Field(gt=0)
    documents: int = Field(gt=0)
    text_bytes: int = Field(gt=0)
    max_id: int = Field(ge=0)
    sha256: str


class TokenMeta(BaseModel):
    """`meta.json`: enough to open, check, decode and cite a token set."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")

    format: Literal["oelm-tokens-1"]
    name: str
    source: str
    dtype: Literal["uint16", "uint32"]
    vocab_size: int = Field(gt=0)
    end_of_text: int = Field(ge=0)
    tokenizer: str
    tokenizer_sha256: str
    splits: dict[Split, SplitMeta]

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


def open_tokens(path: Path) -> TokenSet:
    """Open a token set after checking size, digest and range of every file; raise DataError naming what differs."""
    meta_path = path / "meta.json"
    if not meta_path.is_file():
        raise DataError(f"{path}: no meta.json, so this is no token set of ours; prepare one, or give --text PATH")
    try:
        meta = TokenMeta.model_validate_json(dump_json(read_json(meta_path)))
    except ValidationError as problem:
        first = problem.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise DataError(f"{meta_path}: {where}: {first['msg']}; {_HOW_TO_MEND}") from None
    for split in SPLITS:
        if split not in meta.splits:
            raise DataError(f"{meta_path}: nothing recorded for the {split} split; {_HOW_TO_MEND}")
    return TokenSet(path, meta, {split: _open_split(path / f"{split}.bin", meta, split) for split in meta.splits})


def _open_split(path: Path, meta: TokenMeta, split: Split) -> Tokens:
    known, dtype = meta.splits[split], np.dtype(meta.dtype).newbyteorder("<")
    if not path.is_file():
        raise DataError(f"{path}: missing, though meta.json records {known.tokens:,} tokens; {_HOW_TO_MEND}")
    expected_bytes, found_bytes = known.tokens * dtype.itemsize, path.stat().st_size
    # Size before anything maps the file: a map beyond its end would kill the process without a word.
    if found_bytes != expected_bytes:
        raise DataError(f"{path}: {found_bytes:,} bytes, expected {expected_bytes:,} ({meta.dtype}); {_HOW_TO_MEND}")
    if (found := sha256_file(path)) != known.sha256:
        raise DataError(f"{path}: sha256 {found[:12]}..., expected {known.sha256[:12]}...: damaged; {_HOW_TO_MEND}")
    if known.max_id >= meta.vocab_size:
        raise DataError(f"{path}: holds token id {known.max_id}, but the vocabulary has {meta.vocab_size}; {_HOW_TO_MEND}")
    return np.memmap(path, dtype=dtype, mode="r")
