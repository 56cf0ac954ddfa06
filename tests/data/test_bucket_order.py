"""Batches of examples: each example once an epoch, a pure function of seed and number, and little padding."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from oelm.data.order import BucketOrder, permuted
from oelm.errors import DataError

Lengths = NDArray[np.int64]
lengths_of_tasks = st.lists(st.integers(1, 128), min_size=1, max_size=400).map(lambda found: np.array(found, dtype=np.int64))
SEED = st.integers(0, 2**31 - 1)
BATCH_SIZE = st.integers(1, 9)


def epoch_batches(order: BucketOrder, epoch: int) -> list[list[int]]:
    first = epoch * order.batches_per_epoch
    return [order.examples(first + n).tolist() for n in range(order.batches_per_epoch)]


def padding(lengths: Lengths, batches: list[list[int]]) -> int:
    """Return how many places of the rectangles hold no token."""
    return sum(int(lengths[batch].max()) * len(batch) - int(lengths[batch].sum()) for batch in batches)


def skewed_lengths(count: int) -> Lengths:
    """Return lengths as tasks have them: most short, some long."""
    drawn = np.random.default_rng(0).lognormal(mean=3.0, sigma=0.7, size=count)
    return np.clip(drawn, 3, 128).astype(np.int64)


@given(lengths=lengths_of_tasks, batch_size=BATCH_SIZE, seed=SEED, epoch=st.integers(0, 5))
@settings(deadline=None)
def test_every_epoch_visits_every_example_exactly_once(lengths: Lengths, batch_size: int, seed: int, epoch: int) -> None:
    batches = epoch_batches(BucketOrder(lengths, batch_size, seed), epoch)
    assert sorted(number for batch in batches for number in batch) == list(range(len(lengths)))


@given(lengths=lengths_of_tasks, batch_size=BATCH_SIZE, seed=SEED)
@settings(deadline=None)
def test_all_batches_are_full_but_one_that_holds_the_rest(lengths: Lengths, batch_size: int, seed: int) -> None:
    sizes = sorted(map(len, epoch_batches(BucketOrder(lengths, batch_size, seed), 0)))
    rest = len(lengths) % batch_size
    assert sizes == ([rest] if rest else []) + [batch_size] * (len(lengths) // batch_size)


@given(lengths=lengths_of_tasks, batch_size=BATCH_SIZE, seed=SEED, data=st.data())
@settings(deadline=None)
def test_a_batch_is_the_same_whatever_was_asked_before(
    lengths: Lengths, batch_size: int, seed: int, data: st.DataObject
) -> None:
    order = BucketOrder(lengths, batch_size, seed)
    steps = data.draw(st.lists(st.integers(0, 3 * order.batches_per_epoch), min_size=1, max_size=12))
    in_this_order = [order.examples(step).tolist() for step in steps]
    assert in_this_order == [BucketOrder(lengths, batch_size, seed).examples(step).tolist() for step in steps]


@given(lengths=lengths_of_tasks, batch_size=BATCH_SIZE, seed=SEED)
@settings(deadline=None)
def test_a_batch_is_ordered_from_the_shortest_example(lengths: Lengths, batch_size: int, seed: int) -> None:
    for batch in epoch_batches(BucketOrder(lengths, batch_size, seed), 0):
        assert lengths[batch].tolist() == sorted(lengths[batch].tolist())


def test_epochs_differ() -> None:
    order = BucketOrder(skewed_lengths(1000), 8, seed=0)
    assert len({str(epoch_batches(order, epoch)) for epoch in range(4)}) == 4


def test_epochs_differ_in_which_examples_meet_in_a_batch() -> None:
    order = BucketOrder(skewed_lengths(1000), 8, seed=0)
    meetings = [{frozenset(batch) for batch in epoch_batches(order, epoch)} for epoch in range(2)]
    assert len(meetings[0] & meetings[1]) < 5


def test_seeds_differ() -> None:
    lengths = skewed_lengths(1000)
    assert len({str(epoch_batches(BucketOrder(lengths, 8, seed), 0)) for seed in range(4)}) == 4


def test_examples_of_one_length_are_shuffled_too() -> None:
    batches = epoch_batches(BucketOrder(np.full(100, 7, dtype=np.int64), 100, seed=0), 0)
    assert batches[0] != list(range(100))


def test_long_batches_do_not_come_last() -> None:
    lengths = skewed_lengths(4000)
    widths = [int(lengths[batch].max()) for batch in epoch_batches(BucketOrder(lengths, 8, seed=1), 0)]
    changes = np.diff(widths)
    # In no order, so as many steps up as down: the ascents of a random sequence of n have variance n / 12, and with n = 500
    # a share of a tenth beside one half is more than seven deviations away.
    assert 0.4 < (changes > 0).sum() / (changes != 0).sum() < 0.6


@pytest.mark.parametrize("batch_size", [8, 32])
@pytest.mark.parametrize("epoch", [0, 3])
def test_padding_is_less_than_half_of_that_of_a_plain_shuffle(batch_size: int, epoch: int) -> None:
    lengths = skewed_lengths(5000)
    shuffled = permuted(np.arange(len(lengths), dtype=np.int64), len(lengths), key=epoch).tolist()
    plain = [shuffled[start : start + batch_size] for start in range(0, len(lengths), batch_size)]
    ours = epoch_batches(BucketOrder(lengths, batch_size, seed=0), epoch)
    assert padding(lengths, ours) < padding(lengths, plain) / 2


def test_a_batch_larger_than_the_task_holds_all_of_it() -> None:
    assert sorted(BucketOrder(np.array([5, 3, 4], dtype=np.int64), 10, seed=0).examples(7).tolist()) == [0, 1, 2]


def test_the_lengths_are_left_as_they_were() -> None:
    lengths = skewed_lengths(100)
    before = lengths.copy()
    epoch_batches(BucketOrder(lengths, 8, seed=0), 0)
    assert np.array_equal(lengths, before)


def test_no_examples_are_refused() -> None:
    with pytest.raises(DataError, match="no training examples; give a task with a training split"):
        BucketOrder(np.array([], dtype=np.int64), 8, seed=0)
