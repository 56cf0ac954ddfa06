"""Tokenizers: a byte-level BPE trained on the corpus itself, GPT-2's, or one from files; and reading one back."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from oelm.data.vocabularies import END_OF_TEXT, GPT2, GPT2_VOCAB, find_gpt2, folder_tokenizer, is_gpt2
from oelm.errors import ConfigError, DataError

_BPE = re.compile(r"bpe:([1-9][0-9]{0,6})")
_SMALLEST_VOCAB = 257  # 256 bytes and the end-of-text mark


@dataclass(frozen=True)
class TokenizerRecipe:
    """How a tokenizer comes about: trained to `vocab_size`, or given as the `text` of a tokenizer.json."""

    label: str
    vocab_size: int
    text: str | None


def tokenizer_recipe(spec: str) -> TokenizerRecipe:
    """Return what 'bpe:4096', 'gpt2', or the path of a tokenizer.json or of a folder of tokenizer files asks for."""
    if spec == GPT2:
        return _given(find_gpt2())
    if spec.endswith(".json"):
        return _given(load_tokenizer(Path(spec).parent, name=Path(spec).name), text=_read(Path(spec)))
    if spec and Path(spec).is_dir():
        return _given(folder_tokenizer(Path(spec)))
    match = _BPE.fullmatch(spec)
    if match is None or int(match[1]) < _SMALLEST_VOCAB:
        raise ConfigError(
            f"tokenizer {spec!r}: must be 'gpt2', 'bpe:N' with N >= {_SMALLEST_VOCAB}, for example bpe:4096, "
            "or the path of a tokenizer.json (another run's, say) or of a folder with a tokenizer's files"
        )
    return TokenizerRecipe(spec, int(match[1]), None)


def vocab_size_of(spec: str) -> int:
    """Return how many tokens a tokenizer will have, without its files where that is known."""
    return GPT2_VOCAB if spec == GPT2 else tokenizer_recipe(spec).vocab_size


def tokenizer_label(spec: str) -> str:
    """Return what a tokenizer is called in records, without its files where that is known."""
    return GPT2 if spec == GPT2 else tokenizer_recipe(spec).label


def tokenizer_sha256(spec: str) -> str:
    """Return the digest of the tokenizer.json that a spec asks for; "" for one that is yet to be trained."""
    text = tokenizer_recipe(spec).text
    return "" if text is None else hashlib.sha256(text.encode()).hexdigest()


def _given(tokenizer: Tokenizer, *, text: str | None = None) -> TokenizerRecipe:
    text = text or tokenizer.to_str()
    label = GPT2 if is_gpt2(tokenizer) else f"file-{hashlib.sha256(text.encode()).hexdigest()[:12]}"
    return TokenizerRecipe(label, tokenizer.get_vocab_size(), text)


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


def num_ids(tokenizer: Tokenizer) -> int:
    """Return one more than the largest id: not how many words there are, some vocabularies have holes."""
    return 1 + max(tokenizer.get_vocab().values())


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
