"""Example sets on disk: encoded once with the model's tokenizer, checked whenever they are opened."""

from __future__ import annotations

import hashlib
from collections import Counter
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator
from tokenizers import Tokenizer

from oelm.data.examples import ExampleSource
from oelm.data.tokenizer import load_tokenizer, num_ids, tokenizer_recipe
from oelm.data.tokens import (
    OnProgress,
    advised,
    check_tokenizer,
    compare_digests,
    dtype_for,
    held_alone,
    missing_file,
    no_progress,
)
from oelm.errors import ConfigError, DataError
from oelm.files import Strict, cache_root, dump_json, publish_dir, read_as, sha256_file, sweep_staging, write_json, write_text

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
        meta = read_as(ExampleMeta, path / "meta.json")
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


_BATCH_EXAMPLES = 1000
_PAD_WORDS = ("[PAD]", "<pad>", "<|endoftext|>", "</s>")


def prepare_examples(
    source: ExampleSource, *, tokenizer: str, max_length: int, progress: OnProgress = no_progress
) -> ExampleSet:
    """Return the encoded examples of a task, from the cache where the same examples were encoded before."""
    recipe = tokenizer_recipe(tokenizer)
    if recipe.text is None:
        raise ConfigError(
            f"tokenizer {tokenizer!r}: a classifier's is given by its model's files: the folder, or tokenizer.json"
        )
    if max_length < 3:
        raise ConfigError(f"max_length {max_length}: room for two marks and one word needs 3 at least")
    fingerprint = source.revision or _fingerprint(source, progress)
    key_text = f"{FORMAT}\0{hashlib.sha256(recipe.text.encode()).hexdigest()}\0{max_length}\0{source.names}\0{fingerprint}"
    key = hashlib.sha256(key_text.encode()).hexdigest()[:12]
    target = cache_root() / "tasks" / f"{source.name}-{max_length}-{key}"
    with held_alone(target, progress):
        if not target.is_dir():
            sweep_staging(target.parent, of=target.name)
            with publish_dir(target) as staging:
                write_text(staging / "tokenizer.json", recipe.text)
                meta = _write(source, staging, recipe.label, max_length, fingerprint, progress)
                write_json(staging / "meta.json", meta.model_dump(mode="json"))
    return open_examples(target)


def _fingerprint(source: ExampleSource, progress: OnProgress) -> str:
    state = hashlib.sha256(source.name.encode())
    done = 0
    for split, read in source.splits.items():
        state.update(f"\0{split}\0".encode())
        for example in read():
            content = f"{len(example.text)}.{example.text}{example.pair or ''}\0{example.label}".encode()
            state.update(content)
            done += len(content)
            progress("reading", done, 0, 0)
    return f"sha256:{state.hexdigest()}"


def pad_id(tokenizer: Tokenizer) -> int:
    """Return the id that fills the end of short rows."""
    if tokenizer.padding is not None:
        pad = int(tokenizer.padding["pad_id"])
        if pad >= num_ids(tokenizer):
            raise DataError(f"the tokenizer pads with id {pad}, but the vocabulary has {num_ids(tokenizer)}; fix its padding")
        return pad
    for word in _PAD_WORDS:
        if (found := tokenizer.token_to_id(word)) is not None:
            return int(found)
    raise DataError(f"the tokenizer has no token to pad with (looked for {', '.join(_PAD_WORDS)})")


def _write(
    source: ExampleSource, folder: Path, label: str, max_length: int, fingerprint: str, progress: OnProgress
) -> ExampleMeta:
    tokenizer = load_tokenizer(folder)
    pad, vocab_size = pad_id(tokenizer), num_ids(tokenizer)
    tokenizer.no_padding()
    tokenizer.enable_truncation(max_length)
    return ExampleMeta(
        format="oelm-examples-1",
        name=source.name,
        source=source.source,
        revision=fingerprint,
        labels=source.names,
        integers=source.integers,
        dtype=dtype_for(vocab_size),
        vocab_size=vocab_size,
        pad=pad,
        max_length=max_length,
        tokenizer=label,
        tokenizer_sha256=sha256_file(folder / "tokenizer.json"),
        splits={split: _write_split(source, split, folder, tokenizer, max_length, progress) for split in source.splits},
    )


def _write_split(
    source: ExampleSource, split: str, folder: Path, tokenizer: Tokenizer, max_length: int, progress: OnProgress
) -> ExampleSplitMeta:
    dtype = np.dtype(dtype_for(num_ids(tokenizer))).newbyteorder("<")
    ids_path, rows_path = folder / f"{split}.ids.bin", folder / f"{split}.rows.bin"
    count: Counter[str] = Counter(dict.fromkeys(("examples", "tokens", "longest", "cut", "unlabelled", "text_bytes"), 0))
    labels: Counter[int] = Counter()
    examples = source.splits[split]()
    with ids_path.open("xb") as ids_file, rows_path.open("xb") as rows_file:
        while batch := list(islice(examples, _BATCH_EXAMPLES)):
            labelled = [example for example in batch if example.label >= 0]
            count["unlabelled"] += len(batch) - len(labelled)
            texts = [example.text if example.pair is None else (example.text, example.pair) for example in labelled]
            for example, encoding in zip(labelled, tokenizer.encode_batch(texts), strict=True):
                ids = np.array(encoding.ids, dtype=dtype)
                # With less room than the marks alone take, the library does not cut at all.
                if len(ids) > max_length:
                    marks = tokenizer.num_special_tokens_to_add(example.pair is not None)
                    raise ConfigError(f"max_length {max_length}: this tokenizer's marks alone need {marks}; give more")
                if not len(ids):
                    raise DataError(f"example {count['examples'] + 1} of {split} gives no token at all; leave empty texts out")
                labels[example.label] += 1
                text_bytes = len(example.text.encode()) + len((example.pair or "").encode())
                count.update(examples=1, tokens=len(ids), cut=bool(encoding.overflowing), text_bytes=text_bytes)
                count["longest"] = max(count["longest"], len(ids))
                ids_file.write(ids.tobytes())
                second = len(ids) - sum(encoding.type_ids)
                rows_file.write(np.array([count["tokens"], second, example.label], dtype="<i8").tobytes())
            progress(f"encoding {split}", count["text_bytes"], 0, count["tokens"])
    if not count["examples"]:
        raise DataError(
            f"{source.source}: no labelled example for the {split} split; leave its file out, or give more examples "
            "(and a dev file: --dev)"
        )
    return ExampleSplitMeta(
        **count,
        label_counts=tuple(labels[number] for number in range(len(source.names))),
        ids_sha256=sha256_file(ids_path),
        rows_sha256=sha256_file(rows_path),
    )
