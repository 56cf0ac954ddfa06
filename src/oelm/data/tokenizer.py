"""Tokenizers: a byte-level BPE trained on the corpus itself, and reading one back."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from oelm.errors import ConfigError, DataError

END_OF_TEXT = "<|endoftext|>"
_BPE = re.compile(r"bpe:([1-9][0-9]{0,6})")
_SMALLEST_VOCAB = 257  # 256 bytes and the end-of-text mark


@dataclass(frozen=True)
class TokenizerRecipe:
    """How a tokenizer comes about: trained to `vocab_size`, or given as the `text` of a tokenizer.json."""

    label: str
    vocab_size: int
    text: str | None


def tokenizer_recipe(spec: str) -> TokenizerRecipe:
    """Return what 'bpe:4096', or the path of a tokenizer.json such as another run's, asks for."""
    if spec.endswith(".json"):
        text = _read(Path(spec))
        label = f"file-{hashlib.sha256(text.encode()).hexdigest()[:12]}"
        return TokenizerRecipe(label, load_tokenizer(Path(spec).parent, name=Path(spec).name).get_vocab_size(), text)
    match = _BPE.fullmatch(spec)
    if match is None or int(match[1]) < _SMALLEST_VOCAB:
        raise ConfigError(
            f"tokenizer {spec!r}: must be 'bpe:N' with N >= {_SMALLEST_VOCAB}, for example bpe:4096, "
            "or the path of a tokenizer.json, for example another run's"
        )
    return TokenizerRecipe(spec, int(match[1]), None)


def train_bpe(texts: Iterable[str], *, vocab_size: int) -> Tokenizer:
    """Train a byte-level BPE on the given texts; any text can be encoded with it and decoded back exactly."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def end_of_text_id(tokenizer: Tokenizer) -> int:
    """Return the id of the mark between documents."""
    token = tokenizer.token_to_id(END_OF_TEXT)
    if token is None:
        raise DataError(f"the tokenizer has no {END_OF_TEXT} token to put between documents")
    return int(token)


def load_tokenizer(folder: Path, *, name: str = "tokenizer.json") -> Tokenizer:
    """Read the tokenizer of a token set or a run."""
    path = folder / name
    text = _read(path)
    try:
        return Tokenizer.from_str(text)
    except Exception as problem:  # the library raises bare Exception
        raise DataError(f"{path}: cannot be read as a tokenizer ({problem})") from problem


def _read(path: Path) -> str:
    try:
        return path.read_bytes().decode()
    except (OSError, UnicodeDecodeError) as problem:
        raise DataError(f"{path}: cannot be read as a tokenizer ({problem})") from None
