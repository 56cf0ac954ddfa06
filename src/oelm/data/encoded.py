"""Example files: the encoded examples of a task, described by `meta.json` and checked whenever they are opened."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from oelm.data.tokens import advised, check_tokenizer, compare_digests, missing_file, read_record
from oelm.errors import DataError
from oelm.files import dump_json
from oelm.strict import Strict

FORMAT = "oelm-examples-1"


class ExampleSplitMeta(Strict):
    """Counts and digests of one split. `cut` examples were longer than max_length; `unlabelled` ones were left out."""

    examples: int = Field(gt=0)
    tokens: int = Field(gt=0)
    longest: int = Field(gt=0)
    cut: int = Field(ge=0)
    unlabelled: int = Field(ge=0)
    label_counts: tuple[int, ...]
    text_bytes: int = Field(ge=0)
    ids_sha256: str
    rows_sha256: str


class ExampleMeta(Strict):
    """`meta.json` of an example set."""

    format: Literal["oelm-examples-1"]
    name: str
    source: str
    revision: str
    labels: tuple[str, ...] = Field(min_length=2)
    # What integer labels mean, by file: releases order them differently.
    integers: dict[str, str]
    dtype: Literal["uint16", "uint32"]
    vocab_size: int = Field(gt=0)
    pad: int = Field(ge=0)
    max_length: int = Field(gt=2)
    tokenizer: str
    tokenizer_sha256: str
    splits: dict[str, ExampleSplitMeta] = Field(min_length=1)

    @model_validator(mode="after")
    def _pad_is_a_token(self) -> Self:
        if self.pad >= self.vocab_size:
            raise ValueError(f"pad {self.pad} is outside the vocabulary of {self.vocab_size}")
        return self

    @property
    def fingerprint(self) -> str:
        """A digest of the examples and their meaning; two sets with the same one train the same."""
        meaning: list[Any] = [self.labels, self.vocab_size, self.pad, self.tokenizer_sha256]
        meaning += [(name, split.ids_sha256, split.rows_sha256) for name, split in sorted(self.splits.items())]
        return hashlib.sha256(dump_json(meaning).encode()).hexdigest()


@dataclass(frozen=True)
class ExampleSplit:
    """Encoded examples of one split: all `ids` in a row; per example its end, the start of its second text, its label."""

    ids: NDArray[Any]
    ends: NDArray[np.int64]
    seconds: NDArray[np.int64]
    labels: NDArray[np.int64]

    @property
    def lengths(self) -> NDArray[np.int64]:
        return np.diff(self.ends, prepend=0)

    def counts(self, token: int) -> NDArray[np.int64]:
        """Return how often a token is in each example."""
        return np.diff(np.concatenate(([0], np.cumsum(self.ids == token)))[self.ends], prepend=0)

    def padded(self, numbers: NDArray[np.int64], pad: int) -> PaddedExamples:
        """Return some examples as one rectangle, as wide as the longest of them."""
        lengths = self.lengths[numbers]
        shape = (len(numbers), int(lengths.max()))
        ids, types = np.full(shape, pad, dtype=np.int64), np.zeros(shape, dtype=np.int64)
        for row, number in enumerate(numbers):
            length, end = int(lengths[row]), int(self.ends[number])
            ids[row, :length] = self.ids[end - length : end]
            types[row, int(self.seconds[number]) : length] = 1
        mask = np.arange(shape[1]) < lengths[:, None]
        return PaddedExamples(ids, types, mask.astype(np.int64), self.labels[numbers])


@dataclass(frozen=True)
class PaddedExamples:
    """A rectangle of examples: ids, which of two texts each belongs to, a mask of the text, and the labels."""

    ids: NDArray[np.int64]
    types: NDArray[np.int64]
    mask: NDArray[np.int64]
    labels: NDArray[np.int64]


@dataclass(frozen=True)
class ExampleSet:
    """An opened, verified example set."""

    path: Path
    meta: ExampleMeta
    splits: dict[str, ExampleSplit]


def open_examples(path: Path) -> ExampleSet:
    """Open an example set after checking size, digest and range of every file; raise DataError naming what differs."""
    with advised(path):
        meta = read_record(path / "meta.json", ExampleMeta)
        check_tokenizer(path / "tokenizer.json", meta.tokenizer_sha256)
        return ExampleSet(path, meta, {split: _open_split(path, meta, split) for split in meta.splits})


def _open_split(path: Path, meta: ExampleMeta, split: str) -> ExampleSplit:
    known = meta.splits[split]
    ids_path, rows_path = path / f"{split}.ids.bin", path / f"{split}.rows.bin"
    dtype = np.dtype(meta.dtype).newbyteorder("<")
    holds = f"{known.examples:,} examples"
    ids = np.frombuffer(_content(ids_path, known.ids_sha256, known.tokens * dtype.itemsize, holds), dtype)
    rows = np.frombuffer(_content(rows_path, known.rows_sha256, known.examples * 3 * 8, holds), "<i8").reshape(-1, 3)
    lengths = np.diff(rows[:, 0], prepend=0)
    if int(lengths.min()) < 0 or int(rows[-1, 0]) != len(ids) or not ((rows[:, 1] >= 0) & (rows[:, 1] <= lengths)).all():
        raise DataError(f"{rows_path}: its rows do not cut the {len(ids):,} ids into examples")
    if (largest := int(ids.max())) >= meta.vocab_size:
        raise DataError(f"{ids_path}: holds token id {largest}, but the vocabulary has {meta.vocab_size}")
    if not 0 <= int(rows[:, 2].min()) <= int(rows[:, 2].max()) < len(meta.labels):
        raise DataError(f"{rows_path}: holds a label outside of the {len(meta.labels)} known ones")
    return ExampleSplit(ids, rows[:, 0], rows[:, 1], rows[:, 2])


def _content(path: Path, sha256: str, expected_bytes: int, holds: str) -> bytes:
    if not path.is_file():
        raise missing_file(path, holds)
    content = path.read_bytes()
    compare_digests(path, hashlib.sha256(content).hexdigest(), sha256)
    if len(content) != expected_bytes:
        raise DataError(f"{path}: {len(content):,} bytes, expected {expected_bytes:,}")
    return content
