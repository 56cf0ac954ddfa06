"""Batch n as a pure function of (seed, n): nothing to save, nothing to skip, the same on any number of processes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from oelm.errors import DataError
from oelm.seeds import stream_seed

_ROUNDS = 6
_WORD = np.uint64(0xFFFFFFFFFFFFFFFF)


def permuted(positions: NDArray[np.int64], size: int, key: int) -> NDArray[np.int64]:
    """Map positions in [0, size) through a keyed pseudo-random permutation of [0, size), without building it.

    A Feistel network on the smallest even number of bits that holds `size`; values outside are mapped again until
    they are inside, which keeps it a bijection.
    """
    half_bits = max(1, ((size - 1).bit_length() + 1) // 2)
    values = positions.astype(np.uint64)
    outside = np.ones(values.shape, dtype=bool)
    while outside.any():
        values[outside] = _feistel(values[outside], half_bits, key)
        outside = values >= np.uint64(size)
    return values.astype(np.int64)


def _feistel(values: NDArray[np.uint64], half_bits: int, key: int) -> NDArray[np.uint64]:
    shift, mask = np.uint64(half_bits), np.uint64((1 << half_bits) - 1)
    left, right = values >> shift, values & mask
    for round_number in range(_ROUNDS):
        left, right = right, left ^ (_mixed(right, stream_seed(key, "round", round_number)) & mask)
    return (left << shift) | right


def _mixed(values: NDArray[np.uint64], salt: int) -> NDArray[np.uint64]:
    # The finaliser of splitmix64; wrap-around is meant.
    with np.errstate(over="ignore"):
        z = (values + np.uint64(salt)) & _WORD
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return z ^ (z >> np.uint64(31))


@dataclass(frozen=True)
class WindowOrder:
    """Which windows of a token stream make up batch n.

    The stream is cut into windows of `seq_len` targets; each epoch visits every window once, in its own order and
    cut at its own offset. A batch may hold the end of one epoch and the start of the next.
    """

    num_tokens: int
    seq_len: int
    batch_size: int
    seed: int

    def __post_init__(self) -> None:
        if self.num_tokens < self.seq_len + 1:
            raise DataError(
                f"{self.num_tokens:,} training tokens do not fill one window of seq_len {self.seq_len} + 1; "
                "give more text or lower model.seq_len"
            )

    @property
    def windows_per_epoch(self) -> int:
        # One window fewer than would fit leaves room to shift the cut by up to seq_len - 1.
        return max(1, self.num_tokens // self.seq_len - 1)

    def starts(self, batch: int) -> NDArray[np.int64]:
        """Return the token offsets at which the windows of batch `batch` begin, in order."""
        items = np.arange(self.batch_size, dtype=np.int64) + batch * self.batch_size
        epochs, positions = np.divmod(items, self.windows_per_epoch)
        starts = np.empty_like(items)
        for epoch in np.unique(epochs):
            here = epochs == epoch
            order_key = stream_seed(self.seed, "order", int(epoch))
            windows = permuted(positions[here], self.windows_per_epoch, order_key)
            starts[here] = windows * self.seq_len + self._shift(int(epoch))
        return starts

    def _shift(self, epoch: int) -> int:
        room = self.num_tokens - 1 - self.windows_per_epoch * self.seq_len
        return stream_seed(self.seed, "shift", epoch) % (min(room, self.seq_len - 1) + 1)


class BucketOrder:
    """Which examples make up batch n, so that a batch holds texts of similar length and little padding.

    Each epoch visits every example once: a keyed shuffle, cut into stretches of `_BUCKET_BATCHES` batches, each sorted
    by length and cut into batches, which are then shuffled among each other. The last batch of an epoch may be smaller.
    """

    _BUCKET_BATCHES = 50

    def __init__(self, lengths: NDArray[np.int64], batch_size: int, seed: int) -> None:
        if not len(lengths):
            raise DataError("no training examples; give a task with a training split")
        self.lengths, self.batch_size, self.seed = lengths, batch_size, seed
        self._epoch = -1
        self._batches: list[NDArray[np.int64]] = []

    @property
    def batches_per_epoch(self) -> int:
        return -(-len(self.lengths) // self.batch_size)

    def examples(self, batch: int) -> NDArray[np.int64]:
        """Return the numbers of the examples of batch `batch`, shortest first."""
        epoch, position = divmod(batch, self.batches_per_epoch)
        if epoch != self._epoch:
            self._epoch, self._batches = epoch, self._order(epoch)
        return self._batches[position]

    def _order(self, epoch: int) -> list[NDArray[np.int64]]:
        count, stretch = len(self.lengths), self._BUCKET_BATCHES * self.batch_size
        shuffled = permuted(np.arange(count, dtype=np.int64), count, stream_seed(self.seed, "order", epoch))
        # Sorted by stretch first and length second; a stable sort keeps the shuffle among equals.
        ranked = shuffled[np.lexsort((self.lengths[shuffled], np.arange(count) // stretch))]
        batches = [ranked[start : start + self.batch_size] for start in range(0, count, self.batch_size)]
        places = np.arange(len(batches), dtype=np.int64)
        order = permuted(places, len(batches), stream_seed(self.seed, "batches", epoch))
        return [batches[place] for place in order]
