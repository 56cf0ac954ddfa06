"""Find held-out texts that share a run of words with the training text, in memory independent of the training text."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

Key = TypeVar("Key")
_WORD = re.compile(r"\w+")
# Odd, so that no power of it loses bits modulo 2**64.
_FACTOR = np.uint64(0x9E3779B97F4A7C15)
_Hashes = NDArray[np.uint64]


def sharing(held_out: Iterable[tuple[Key, str]], training: Iterable[str], *, words: int) -> set[Key]:
    """Return the keys of the held-out texts that share `words` successive words with any training text.

    A word is a run of letters, digits and underscores. Runs are compared by a 64-bit hash: a wrong match has a probability
    of about 1 in 10**6 for a million held-out and 10**7 training words.
    """
    ids: dict[str, int] = {}
    runs = {key: _runs([ids.setdefault(word, len(ids) + 1) for word in _WORD.findall(text)], words) for key, text in held_out}
    known = np.unique(np.concatenate([*runs.values(), np.zeros(0, dtype=np.uint64)]))
    if not len(known):
        return set()
    is_shared = np.zeros(len(known), dtype=np.bool_)
    for text in training:
        # Other words are 0, so that the table of words does not grow.
        found = _runs([ids.get(word, 0) for word in _WORD.findall(text)], words)
        at = np.minimum(np.searchsorted(known, found), len(known) - 1)
        is_shared[at[known[at] == found]] = True
    shared = known[is_shared]
    return {key for key, hashes in runs.items() if np.isin(hashes, shared).any()}


def _runs(ids: list[int], words: int) -> _Hashes:
    """Return the hash of every run of `words` ids: a polynomial in them, modulo 2**64."""
    numbers: NDArray[Any] = np.asarray(ids, dtype=np.uint64)
    count = max(0, len(numbers) - words + 1)
    hashes = np.zeros(count, dtype=np.uint64)
    for offset in range(words):
        hashes = hashes * _FACTOR + numbers[offset : offset + count]
    return hashes
