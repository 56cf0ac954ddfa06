"""From labelled examples to an example set on disk: encoded once with the model's tokenizer, cached by content."""

from __future__ import annotations

import hashlib
from collections import Counter
from itertools import islice
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from oelm.data.encoded import FORMAT, ExampleMeta, ExampleSet, ExampleSplitMeta, open_examples
from oelm.data.examples import ExampleSource
from oelm.data.tokenizer import load_tokenizer, num_ids, tokenizer_recipe
from oelm.data.tokens import OnProgress, dtype_for, held_alone, no_progress
from oelm.errors import ConfigError, DataError
from oelm.files import cache_root, publish_dir, sha256_file, sweep_staging, write_json, write_text

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
