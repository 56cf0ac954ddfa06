"""From a corpus to a token set on disk, once: cached by content, whole or absent."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import partial
from itertools import islice
from pathlib import Path

import numpy as np
from filelock import FileLock
from tokenizers import Tokenizer

from oelm.data.corpora import Corpus, stdlib_corpus, text_corpus
from oelm.data.tokenizer import TokenizerRecipe, end_of_text_id, load_tokenizer, tokenizer_recipe, train_bpe
from oelm.data.tokens import FORMAT, SPLITS, Split, SplitMeta, TokenMeta, TokenSet, dtype_for, open_tokens
from oelm.errors import DataError
from oelm.files import cache_root, publish_dir, room_checked, sha256_file, sweep_staging, write_json

# Called with what is being done, and how many of how many bytes of text are through.
Progress = Callable[[str, int, int], None]
_BATCH_DOCUMENTS = 64


def no_progress(what: str, done: int, total: int) -> None:
    """Show nothing."""


def prepare(data: str, *, tokenizer: str, progress: Progress = no_progress) -> TokenSet:
    """Return the token set of `data`: 'stdlib', a text file or folder, or a folder that holds a token set already.

    What is not there yet is made and kept under the cache folder, named by the content of text and tokenizer.
    """
    path = Path(data)
    if (path / "meta.json").is_file() and any(path.glob("*.bin")):
        return open_tokens(path)
    if data == "stdlib":
        corpus = stdlib_corpus()
    elif path.exists() or "/" in data:
        corpus = text_corpus(path)
    else:
        raise DataError(
            f"no data set called {data!r} here: use 'stdlib' (always there), the path of a text file or folder, "
            "or the folder of a prepared token set (train.bin, val.bin, meta.json, tokenizer.json)"
        )
    return prepare_corpus(corpus, tokenizer=tokenizer, progress=progress)


def prepare_corpus(corpus: Corpus, *, tokenizer: str, progress: Progress = no_progress) -> TokenSet:
    """Return the token set of a corpus, from the cache where its content was prepared before."""
    recipe = tokenizer_recipe(tokenizer)
    key = hashlib.sha256(f"{FORMAT}\0{recipe.label}\0{corpus.fingerprint()}".encode()).hexdigest()[:12]
    target = cache_root() / "tokens" / f"{corpus.name}-{recipe.label.replace(':', '')}-{key}"
    with room_checked(target):
        target.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(target.parent / f".{target.name}.lock"):
        if not target.is_dir():
            sweep_staging(target.parent, of=target.name)
            with publish_dir(target) as staging:
                _write_token_set(corpus, staging, recipe, progress)
    return open_tokens(target)


def _write_token_set(corpus: Corpus, folder: Path, recipe: TokenizerRecipe, progress: Progress) -> None:
    tokenizer_path = folder / "tokenizer.json"
    text = recipe.text
    if text is None:
        progress("training the tokenizer", 0, 1)
        text = train_bpe(corpus.texts("train"), vocab_size=recipe.vocab_size).to_str(pretty=True)
    tokenizer_path.write_bytes(text.encode())
    tokenizer = load_tokenizer(folder)
    total = sum(len(document.text) for document in corpus.documents)
    splits: dict[Split, SplitMeta] = {}
    done = 0
    for split in SPLITS:
        tell = partial(_offset, progress, f"tokenizing {split}", done, total)
        splits[split] = _write_split(corpus, split, folder / f"{split}.bin", tokenizer, tell)
        done += sum(len(text) for text in corpus.texts(split))
    meta_json = TokenMeta(
        format="oelm-tokens-1",
        name=corpus.name,
        source=corpus.source,
        dtype=dtype_for(tokenizer.get_vocab_size()),
        vocab_size=tokenizer.get_vocab_size(),
        end_of_text=end_of_text_id(tokenizer),
        tokenizer=recipe.label,
        tokenizer_sha256=sha256_file(tokenizer_path),
        splits=splits,
    )
    write_json(folder / "meta.json", meta_json.model_dump())


def _offset(progress: Progress, what: str, before: int, total: int, done: int) -> None:
    progress(what, before + done, total)


def _write_split(corpus: Corpus, split: Split, path: Path, tokenizer: Tokenizer, progress: Callable[[int], None]) -> SplitMeta:
    end, dtype = end_of_text_id(tokenizer), np.dtype(dtype_for(tokenizer.get_vocab_size())).newbyteorder("<")
    documents = tokens = text_bytes = characters = 0
    texts = corpus.texts(split)
    with path.open("xb") as file:
        while batch := list(islice(texts, _BATCH_DOCUMENTS)):
            for text, encoding in zip(batch, tokenizer.encode_batch(batch, add_special_tokens=False), strict=True):
                ids = np.array([*encoding.ids, end], dtype=dtype)
                file.write(ids.tobytes())
                documents, tokens = documents + 1, tokens + len(ids)
                text_bytes, characters = text_bytes + len(text.encode()), characters + len(text)
            progress(characters)
    return SplitMeta(tokens=tokens, documents=documents, text_bytes=text_bytes, sha256=sha256_file(path))
