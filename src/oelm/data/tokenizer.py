"""Tokenizers: a byte-level BPE trained on the corpus, GPT-2's, or one from files."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from tokenizers.normalizers import Normalizer

from oelm.data.vocabularies import (
    END_OF_TEXT,
    GPT2,
    GPT2_VOCAB,
    find_gpt2,
    folder_tokenizer,
    is_gpt2,
    read_tokenizer,
    split_bytes,
)
from oelm.errors import ConfigError, DataError

_BPE = re.compile(r"bpe:([1-9][0-9]{0,6})")
_SMALLEST_VOCAB = 257  # 256 bytes and the end-of-text mark


@dataclass(frozen=True)
class TokenizerRecipe:
    """A tokenizer: to be trained to `vocab_size`, or given as the `text` of a tokenizer.json."""

    label: str
    vocab_size: int
    text: str | None


def tokenizer_recipe(spec: str) -> TokenizerRecipe:
    """Return the recipe of 'bpe:4096', 'gpt2', or the path of a tokenizer.json or of a folder of tokenizer files."""
    if spec == GPT2:
        return _given(find_gpt2())
    if spec.endswith(".json"):
        return _given(read_tokenizer(Path(spec)), text=Path(spec).read_bytes().decode())
    if spec and Path(spec).is_dir():
        return _given(folder_tokenizer(Path(spec)))
    match = _BPE.fullmatch(spec)
    if match is None or int(match[1]) < _SMALLEST_VOCAB:
        raise ConfigError(
            f"tokenizer {spec!r}: must be 'gpt2', 'bpe:N' with N >= {_SMALLEST_VOCAB}, for example bpe:4096, "
            "or the path of a tokenizer.json or of a folder with a tokenizer's files"
        )
    return TokenizerRecipe(spec, int(match[1]), None)


def vocab_size_of(spec: str) -> int:
    """Return the size of a tokenizer's vocabulary; for GPT-2's without its files."""
    return GPT2_VOCAB if spec == GPT2 else tokenizer_recipe(spec).vocab_size


def tokenizer_label(spec: str) -> str:
    """Return the name of a tokenizer in records; for GPT-2's without its files."""
    return GPT2 if spec == GPT2 else tokenizer_recipe(spec).label


def tokenizer_sha256(spec: str) -> str:
    """Return the digest of a given tokenizer's tokenizer.json; "" for one to be trained."""
    text = tokenizer_recipe(spec).text
    return "" if text is None else hashlib.sha256(text.encode()).hexdigest()


def _given(tokenizer: Tokenizer, *, text: str | None = None) -> TokenizerRecipe:
    text = text or tokenizer.to_str()
    label = GPT2 if is_gpt2(tokenizer) else f"file-{hashlib.sha256(text.encode()).hexdigest()[:12]}"
    return TokenizerRecipe(label, tokenizer.get_vocab_size(), text)


def train_bpe(
    texts: Iterable[str], *, vocab_size: int, marks: tuple[str, ...] = (END_OF_TEXT,), normalizer: Normalizer | None = None
) -> Tokenizer:
    """Train a byte-level BPE on the given texts; without a normalizer it decodes any text back exactly."""
    tokenizer = Tokenizer(models.BPE())
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    split_bytes(tokenizer)
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(marks),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def num_ids(tokenizer: Tokenizer) -> int:
    """Return one more than the largest id; some vocabularies have gaps."""
    return 1 + max(tokenizer.get_vocab().values())


def end_of_text_id(tokenizer: Tokenizer) -> int:
    """Return the id of the mark between documents."""
    token = tokenizer.token_to_id(END_OF_TEXT)
    if token is None:
        raise DataError(f"the tokenizer has no {END_OF_TEXT} token to put between documents")
    return int(token)


def load_tokenizer(folder: Path) -> Tokenizer:
    """Read the tokenizer of a token set or a run."""
    return read_tokenizer(folder / "tokenizer.json")
