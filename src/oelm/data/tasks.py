"""From labelled examples to an example set on disk: encoded once with the model's own tokenizer, cached by content."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from oelm.data.encoded import FORMAT, ExampleMeta, ExampleSet, ExampleSplitMeta, open_examples
from oelm.data.examples import Example, ExampleSource
from oelm.data.prepare import Progress, held_alone, no_progress
from oelm.data.tokenizer import TokenizerRecipe, load_tokenizer, num_ids, tokenizer_recipe
from oelm.data.tokens import dtype_for
from oelm.errors import ConfigError, DataError
from oelm.files import (
    cache_root,
    publish_dir,
    room_checked,
    sha256_file,
    sweep_staging,
    write_json,
    write_text,
)

_BATCH_EXAMPLES = 1000
_PAD_WORDS = ("[PAD]", "<pad>", "<|endoftext|>", "</s>")


def prepare_examples(source: ExampleSource, *, tokenizer: str, max_length: int, progress: Progress = no_progress) -> ExampleSet:
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
    with room_checked(target):
        target.parent.mkdir(parents=True, exist_ok=True)
    with held_alone(target, progress):
        if not target.is_dir():
            sweep_staging(target.parent, of=target.name)
            with publish_dir(target) as staging:
                _write(source, staging, recipe, recipe.text, max_length, fingerprint, progress)
    return open_examples(target)


def _fingerprint(source: ExampleSource, progress: Progress) -> str:
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
            raise DataError(f"the tokenizer pads with id {pad}, but the vocabulary has {num_ids(tokenizer)}; mend it")
        return pad
    for word in _PAD_WORDS:
        if (found := tokenizer.token_to_id(word)) is not None:
            return int(found)
    raise DataError(f"the tokenizer has no token to pad with (looked for {', '.join(_PAD_WORDS)})")


def _write(
    source: ExampleSource,
    folder: Path,
    recipe: TokenizerRecipe,
    text: str,
    max_length: int,
    fingerprint: str,
    progress: Progress,
) -> None:
    write_text(folder / "tokenizer.json", text)
    tokenizer = load_tokenizer(folder)
    pad = pad_id(tokenizer)
    tokenizer.no_padding()
    tokenizer.enable_truncation(max_length)
    vocab_size = num_ids(tokenizer)
    splits: dict[str, ExampleSplitMeta] = {}
    for split, read in source.splits.items():
        grown = _write_split(read(), folder, split, tokenizer, progress)
        if not grown.examples:
            raise DataError(
                f"{source.source}: no labelled example for the {split} split; leave its file out, or give more examples "
                "(of your own, a dev file beside them: --dev)"
            )
        splits[split] = ExampleSplitMeta(
            examples=grown.examples,
            tokens=grown.tokens,
            longest=grown.longest,
            cut=grown.cut,
            unlabelled=grown.unlabelled,
            label_counts=tuple(grown.labels[n] for n in range(len(source.names))),
            text_bytes=grown.text_bytes,
            ids_sha256=sha256_file(folder / f"{split}.ids.bin"),
            rows_sha256=sha256_file(folder / f"{split}.rows.bin"),
        )
    meta = ExampleMeta(
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
        tokenizer=recipe.label,
        tokenizer_sha256=sha256_file(folder / "tokenizer.json"),
        splits=splits,
    )
    write_json(folder / "meta.json", meta.model_dump(mode="json"))


@dataclass
class _Grown:
    examples: int = 0
    tokens: int = 0
    longest: int = 0
    cut: int = 0
    unlabelled: int = 0
    text_bytes: int = 0
    labels: Counter[int] = field(default_factory=Counter)


def _write_split(examples: Iterator[Example], folder: Path, split: str, tokenizer: Tokenizer, progress: Progress) -> _Grown:
    assert tokenizer.truncation is not None
    longest = int(tokenizer.truncation["max_length"])
    dtype, grown = np.dtype(dtype_for(num_ids(tokenizer))).newbyteorder("<"), _Grown()
    with (folder / f"{split}.ids.bin").open("xb") as ids_file, (folder / f"{split}.rows.bin").open("xb") as rows_file:
        while batch := list(islice(examples, _BATCH_EXAMPLES)):
            labelled = [example for example in batch if example.label >= 0]
            grown.unlabelled += len(batch) - len(labelled)
            texts = [example.text if example.pair is None else (example.text, example.pair) for example in labelled]
            for example, encoding in zip(labelled, tokenizer.encode_batch(texts), strict=True):
                ids = np.array(encoding.ids, dtype=dtype)
                # With less room than the marks alone take, the library does not cut at all.
                if len(ids) > longest:
                    marks = tokenizer.num_special_tokens_to_add(example.pair is not None)
                    raise ConfigError(f"max_length {longest}: this tokenizer's marks alone need {marks}; give more")
                if not len(ids):
                    raise DataError(f"example {grown.examples + 1} of {split} gives no token at all; leave empty texts out")
                grown.examples, grown.tokens = grown.examples + 1, grown.tokens + len(ids)
                grown.longest, grown.cut = max(grown.longest, len(ids)), grown.cut + bool(encoding.overflowing)
                grown.labels[example.label] += 1
                grown.text_bytes += len(example.text.encode()) + len((example.pair or "").encode())
                ids_file.write(ids.tobytes())
                second = len(ids) - sum(encoding.type_ids)
                rows_file.write(np.array([grown.tokens, second, example.label], dtype="<i8").tobytes())
            progress(f"encoding {split}", grown.text_bytes, 0, grown.tokens)
    return grown
