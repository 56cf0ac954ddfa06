"""Batch n is a pure function of (seed, n), every epoch visits every window once, and no window leaves the stream."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oelm.data.order import WindowOrder, permuted
from oelm.errors import DataError

KEY = st.integers(0, 2**63 - 1)
SEED = st.integers(0, 2**31 - 1)


@st.composite
def orders(draw: st.DrawFn) -> WindowOrder:
    """Streams from the shortest that is allowed to a few hundred windows."""
    seq_len = draw(st.integers(1, 40))
    num_tokens = draw(st.integers(seq_len + 1, 60 * seq_len + 1))
    return WindowOrder(num_tokens, seq_len, draw(st.integers(1, 9)), draw(SEED))


def epoch_starts(order: WindowOrder, epoch: int) -> list[int]:
    """Return the starts of one epoch, taken out of the batches that hold it."""
    first, last = epoch * order.windows_per_epoch, (epoch + 1) * order.windows_per_epoch
    batches = range(first // order.batch_size, math.ceil(last / order.batch_size))
    items = {n * order.batch_size + i: start for n in batches for i, start in enumerate(order.starts(n).tolist())}
    return [items[n] for n in range(first, last)]


@given(size=st.integers(1, 3000), key=KEY)
@settings(deadline=None)
def test_permuted_is_a_bijection_for_any_size_and_key(size: int, key: int) -> None:
    image = permuted(np.arange(size, dtype=np.int64), size, key)
    assert np.array_equal(np.sort(image), np.arange(size))


def test_permuted_is_a_bijection_around_every_power_of_two() -> None:
    for size in sorted({max(1, 2**bits + beside) for bits in range(13) for beside in (-1, 0, 1)}):
        assert np.array_equal(np.sort(permuted(np.arange(size, dtype=np.int64), size, 7)), np.arange(size)), size


@given(size=st.integers(1, 2**50), key=KEY, part=st.floats(0, 1, exclude_max=True))
@settings(deadline=None)
def test_permuted_stays_inside_at_any_size(size: int, key: int, part: float) -> None:
    (value,) = permuted(np.array([int(part * size)], dtype=np.int64), size, key).tolist()
    assert 0 <= value < size


@given(size=st.integers(2, 500), key=KEY)
@settings(deadline=None)
def test_permuted_maps_a_position_alike_alone_and_among_others(size: int, key: int) -> None:
    alone = [int(permuted(np.array([n], dtype=np.int64), size, key)[0]) for n in (0, size // 2, size - 1)]
    together = permuted(np.arange(size, dtype=np.int64), size, key)
    assert alone == together[[0, size // 2, size - 1]].tolist()


def test_permuted_leaves_its_argument_alone() -> None:
    positions = np.arange(10, dtype=np.int64)
    permuted(positions, 10, 3)
    assert np.array_equal(positions, np.arange(10))


@pytest.mark.parametrize("size", [3, 11])
def test_permuted_sends_pairs_of_positions_everywhere_alike(size: int) -> None:
    # Over many keys the images of positions (0, 1) must be uniform over the ordered pairs of distinct values, and
    # Pearson's statistic then follows chi-square with k = pairs - 1 degrees of freedom. Laurent and Massart (2000):
    # P(chi2_k >= k + 2 sqrt(k t) + 2 t) <= exp(-t); with t = 20 a fair shuffle fails here once in 5e8. The keys are
    # fixed, so the test gives the same answer every time; 50 expected per pair keep the approximation good.
    pairs = size * (size - 1)
    keys = 50 * pairs
    first_two = np.arange(2, dtype=np.int64)
    counts = Counter(tuple(permuted(first_two, size, key).tolist()) for key in range(keys))
    expected = keys / pairs
    statistic = sum(count**2 for count in counts.values()) / expected - keys
    degrees, t = pairs - 1, 20.0
    assert statistic < degrees + 2 * math.sqrt(degrees * t) + 2 * t


@given(order=orders(), epoch=st.integers(0, 5))
@settings(max_examples=50)
def test_every_epoch_visits_every_window_exactly_once(order: WindowOrder, epoch: int) -> None:
    starts = sorted(epoch_starts(order, epoch))
    shift = starts[0]
    assert starts == [shift + n * order.seq_len for n in range(order.windows_per_epoch)]


@given(order=orders(), batch=st.integers(0, 10**6))
@settings(deadline=None)
def test_windows_never_leave_the_stream(order: WindowOrder, batch: int) -> None:
    starts = order.starts(batch)
    # A window reads one token more than seq_len: the last target.
    assert starts.min() >= 0 and starts.max() + order.seq_len + 1 <= order.num_tokens


@given(order=orders(), epoch=st.integers(0, 5))
@settings(max_examples=50)
def test_an_epoch_leaves_out_fewer_than_two_windows_of_targets(order: WindowOrder, epoch: int) -> None:
    covered = len(epoch_starts(order, epoch)) * order.seq_len
    assert 0 <= (order.num_tokens - 1) - covered < 2 * order.seq_len


@given(order=orders(), asked=st.permutations(range(6)))
@settings(max_examples=50)
def test_a_batch_is_the_same_whatever_was_asked_before(order: WindowOrder, asked: list[int]) -> None:
    in_turn = {n: order.starts(n).tolist() for n in range(6)}
    fresh = WindowOrder(order.num_tokens, order.seq_len, order.batch_size, order.seed)
    assert {n: fresh.starts(n).tolist() for n in asked} == in_turn


@given(order=orders(), other_size=st.integers(1, 9))
@settings(max_examples=50)
def test_the_sequence_of_windows_does_not_depend_on_the_batch_size(order: WindowOrder, other_size: int) -> None:
    other = WindowOrder(order.num_tokens, order.seq_len, other_size, order.seed)
    assert epoch_starts(order, 1) == epoch_starts(other, 1)


def test_a_batch_may_hold_the_end_of_one_epoch_and_the_start_of_the_next() -> None:
    order = WindowOrder(num_tokens=101, seq_len=10, batch_size=4, seed=5)
    assert order.windows_per_epoch == 9
    assert order.starts(2).tolist() == [epoch_starts(order, 0)[8], *epoch_starts(order, 1)[:3]]


def test_a_batch_may_span_more_than_two_epochs() -> None:
    order = WindowOrder(num_tokens=31, seq_len=10, batch_size=7, seed=5)
    assert order.windows_per_epoch == 2
    joined = [start for epoch in range(4) for start in epoch_starts(order, epoch)]
    assert order.starts(0).tolist() == joined[:7]


def test_epochs_differ_in_order_and_cut() -> None:
    order = WindowOrder(num_tokens=100_000, seq_len=100, batch_size=8, seed=0)
    epochs = [epoch_starts(order, epoch) for epoch in range(3)]
    assert len({tuple(start // order.seq_len for start in epoch) for epoch in epochs}) == 3
    assert len({epoch[0] % order.seq_len for epoch in epochs}) == 3


def test_seeds_differ_in_order_and_cut() -> None:
    made = [WindowOrder(num_tokens=100_000, seq_len=100, batch_size=8, seed=seed) for seed in range(3)]
    assert len({tuple(order.starts(0).tolist()) for order in made}) == 3


def test_an_epoch_is_not_visited_in_the_order_of_the_text() -> None:
    starts = epoch_starts(WindowOrder(num_tokens=100_000, seq_len=100, batch_size=8, seed=0), 0)
    steps_forward = sum(later > earlier for earlier, later in zip(starts, starts[1:], strict=False))
    # Ascents of a random permutation of n: mean (n - 1) / 2, variance (n + 1) / 12; eight deviations are never seen.
    assert abs(steps_forward - (len(starts) - 1) / 2) < 8 * math.sqrt((len(starts) + 1) / 12)


@given(seq_len=st.integers(1, 100), seed=SEED)
@settings(deadline=None)
def test_the_shortest_stream_gives_its_one_window_for_ever(seq_len: int, seed: int) -> None:
    order = WindowOrder(seq_len + 1, seq_len, 3, seed)
    assert [order.starts(n).tolist() for n in range(3)] == [[0, 0, 0]] * 3


@pytest.mark.parametrize("num_tokens", [0, 1, 16])
def test_too_few_tokens_are_refused_with_both_numbers(num_tokens: int) -> None:
    with pytest.raises(DataError, match=rf"{num_tokens} training tokens .* seq_len 16 .*lower model\.seq_len"):
        WindowOrder(num_tokens, 16, 2, 0)
