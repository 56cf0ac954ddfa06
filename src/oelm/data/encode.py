"""Texts to token ids on all cores, in order; the ids do not depend on the number of workers."""

from __future__ import annotations

import json
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from oelm.data.vocabularies import END_OF_TEXT, is_gpt2

Ids = NDArray[Any]
Encode = Callable[[list[str]], list[Ids]]
Item = TypeVar("Item")
Made = TypeVar("Made")


def encoder(tokenizer: Tokenizer) -> Encode:
    """Return the function that encodes texts with this tokenizer; special tokens written in a text stay text.

    GPT-2's uses tiktoken where that is installed: the same ids, several times as fast.
    """
    if is_gpt2(tokenizer) and (fast := _tiktoken_encoder(tokenizer)) is not None:
        return fast
    return _plain_encoder(tokenizer)


def _plain_encoder(tokenizer: Tokenizer) -> Encode:
    plain = Tokenizer.from_str(tokenizer.to_str())
    plain.encode_special_tokens = True
    plain.no_truncation()
    plain.no_padding()

    def encode(texts: list[str]) -> list[Ids]:
        encodings = plain.encode_batch_fast(texts, add_special_tokens=False)
        return [np.array(encoding.ids, dtype=np.uint32) for encoding in encodings]

    return encode


def _tiktoken_encoder(tokenizer: Tokenizer) -> Encode | None:
    try:
        import tiktoken
        from tiktoken_ext.openai_public import r50k_pat_str
    except ImportError:
        return None
    as_byte = {character: byte for byte, character in byte_characters().items()}
    vocab: dict[str, int] = json.loads(tokenizer.to_str())["model"]["vocab"]
    end = vocab[END_OF_TEXT]
    ranks = {bytes(as_byte[c] for c in word): rank for word, rank in vocab.items() if rank != end}
    encoding = tiktoken.Encoding("gpt2", pat_str=r50k_pat_str, mergeable_ranks=ranks, special_tokens={END_OF_TEXT: end})

    def encode_one(text: str) -> Ids:
        try:
            return encoding.encode_to_numpy(text, disallowed_special=())
        except ValueError:
            # A million spaces in a row are too many for its regular expression.
            return _plain_encoder(tokenizer)([text])[0]

    def encode(texts: list[str]) -> list[Ids]:
        return [encode_one(text) for text in texts]

    return encode


def byte_characters() -> dict[int, str]:
    """Return the character that byte-level BPE writes for each byte: itself if visible, else one from 256 up."""
    visible = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in visible]
    return {byte: chr(byte) for byte in visible} | {byte: chr(256 + n) for n, byte in enumerate(hidden)}


def num_cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def in_order(work: Callable[[Item], Made], items: Iterable[Item], *, workers: int) -> Iterator[tuple[Item, Made]]:
    """Yield every item with the result of `work`, in order, with a few in progress at a time.

    Uses threads: the tokenizers release Python's lock, and nothing is copied between processes.
    """
    waiting: deque[tuple[Item, Future[Made]]] = deque()
    with ThreadPoolExecutor(max_workers=workers, thread_name_prefix="encode") as pool:
        try:
            for item in items:
                waiting.append((item, pool.submit(work, item)))
                if len(waiting) > 2 * workers:
                    first, future = waiting.popleft()
                    yield first, future.result()
            while waiting:
                first, future = waiting.popleft()
                yield first, future.result()
        finally:
            for _, future in waiting:
                future.cancel()
