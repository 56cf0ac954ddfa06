"""Tokenizers: a byte-level BPE trained on the corpus itself, and reading one back."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from oelm.errors import ConfigError, DataError

END_OF_TEXT = "<|endoftext|>"
_BPE = re.compile(r"bpe:([1-9][0-9]{0,6})")
_SMALLEST_VOCAB = 257  # 256 bytes and the end-of-text mark


def bpe_vocab_size(spec: str) -> int:
    """Return the vocabulary size that a tokenizer spec such as 'bpe:4096' asks for."""
    match = _BPE.fullmatch(spec)
    if match is None or int(match[1]) < _SMALLEST_VOCAB:
        raise ConfigError(f"tokenizer {spec!r}: must be 'bpe:N' with N >= {_SMALLEST_VOCAB}, for example bpe:4096")
    return int(match[1])


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


def load_tokenizer(token_set: Path) -> Tokenizer:
    """Read the tokenizer that a token set was made with."""
    path = token_set / "tokenizer.json"
    try:
        return Tokenizer.from_str(path.read_text(encoding="utf-8"))
    except Exception as problem:  # the library raises bare Exception
        raise DataError(f"{path}: cannot be read as a tokenizer ({problem})") from problem
