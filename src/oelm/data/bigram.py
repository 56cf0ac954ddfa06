"""What a bigram model makes of a token set: the perplexity that a language model must be well below to be called one.

Interpolated Kneser-Ney (Kneser and Ney 1995; Chen and Goodman 1998, section 2.7) without a parameter to tune.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from oelm.data.tokens import Tokens

Counts = NDArray[np.int64]
Floats = NDArray[np.float64]
# Pairs sorted at once: 64 MiB of keys. What stays is one row for every different pair.
_CHUNK = 2**23
# Of a larger training split, as much from its start: different pairs, and so memory, grow on with the text.
MOST_TOKENS = 2**27


def never() -> bool:
    """Nobody asks for a stop."""
    return False


@dataclass(frozen=True)
class Bigram:
    """A fitted model. `keys` are the pairs seen, history times vocabulary plus word, in order, and `counts` how often.

    By history, `totals` counts its pairs and `kinds` the different ones; `fallback` is each word's probability where the
    history tells nothing.
    """

    vocab_size: int
    keys: Counts
    counts: Counts
    totals: Counts
    kinds: Counts
    discount: float
    fallback: Floats

    def probabilities(self, histories: NDArray[Any], words: NDArray[Any]) -> Floats:
        """Return the probability of each word after its history; over all words they sum to one, seen history or not."""
        histories, words = histories.astype(np.int64), words.astype(np.int64)
        wanted = histories * self.vocab_size + words
        place = np.minimum(np.searchsorted(self.keys, wanted), len(self.keys) - 1)
        seen = np.where(self.keys[place] == wanted, self.counts[place] - self.discount, 0.0)
        total = self.totals[histories]
        held_back = np.where(total > 0, self.discount * self.kinds[histories], 1.0)
        return (seen + held_back * self.fallback[words]) / np.maximum(total, 1)

    def perplexity(self, tokens: Tokens, *, stopped: Callable[[], bool] = never) -> float | None:
        """Return the perplexity over tokens, every one but the first predicted once; None when a stop came first."""
        assert len(tokens) > 1
        nats = 0.0
        for histories, words in _pairs(tokens):
            if stopped():
                return None
            nats -= float(np.log(self.probabilities(histories, words)).sum())
        # Of a certainty the logarithm may round to just above nothing.
        return math.exp(max(0.0, nats) / (len(tokens) - 1))


def fit_bigram(tokens: Tokens, *, vocab_size: int, stopped: Callable[[], bool] = never) -> Bigram | None:
    """Return the bigram model of tokens, or of the first MOST_TOKENS; None when a stop was asked for meanwhile."""
    assert len(tokens) > 1
    keys, counts = np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64)
    for histories, words in _pairs(tokens[:MOST_TOKENS]):
        if stopped():
            return None
        keys, counts = _merged(keys, counts, *np.unique(histories * vocab_size + words, return_counts=True))
    histories, words = keys // vocab_size, keys % vocab_size
    return Bigram(
        vocab_size=vocab_size,
        keys=keys,
        counts=counts,
        totals=np.bincount(histories, weights=counts, minlength=vocab_size).astype(np.int64),
        kinds=np.bincount(histories, minlength=vocab_size),
        discount=_discount(counts),
        fallback=_continuations(np.bincount(words, minlength=vocab_size)),
    )


def _pairs(tokens: Tokens) -> Iterator[tuple[Counts, Counts]]:
    for start in range(0, len(tokens) - 1, _CHUNK):
        part = np.asarray(tokens[start : start + _CHUNK + 1]).astype(np.int64)
        yield part[:-1], part[1:]


def _merged(keys: Counts, counts: Counts, more: Counts, their_counts: Counts) -> tuple[Counts, Counts]:
    """Return two sorted tables of pairs as one."""
    if not len(keys):
        return more, their_counts
    both, both_counts = np.concatenate([keys, more]), np.concatenate([counts, their_counts])
    # Two runs in order: a stable sort merges them in one pass.
    order = np.argsort(both, kind="stable")
    both = both[order]
    starts = np.flatnonzero(np.diff(both, prepend=-1))
    return both[starts], np.add.reduceat(both_counts[order], starts)


def _discount(counts: Counts) -> float:
    """Return what is taken off every count: n1 / (n1 + 2 n2), by how many are one and how many are two."""
    # At least one pair counts as seen once: with no discount at all, a word not yet seen would be impossible.
    once, twice = max(1, int((counts == 1).sum())), int((counts == 2).sum())
    return once / (once + 2 * twice)


def _continuations(kinds: Counts) -> Floats:
    """Return each word's probability by how many different words it follows, the rest shared by all words alike."""
    seen = kinds[kinds > 0]
    discount, total = _discount(seen), int(seen.sum())
    return (np.maximum(kinds - discount, 0.0) + discount * len(seen) / len(kinds)) / total
