"""The bigram reference: probabilities that sum to one, and the perplexity that a naive dictionary gives."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import oelm.data.bigram as bigram
from oelm.data.bigram import Bigram, fit_bigram
from oelm.data.tokens import Tokens

VOCAB = 7
streams = st.lists(st.integers(0, VOCAB - 2), min_size=2, max_size=60)


def ids(values: Sequence[int]) -> Tokens:
    return np.array(values, dtype=np.uint16)


def fitted(values: Sequence[int], vocab_size: int = VOCAB) -> Bigram:
    model = fit_bigram(ids(values), vocab_size=vocab_size)
    assert model is not None
    return model


def discount(counts: Sequence[int]) -> float:
    once, twice = max(1, list(counts).count(1)), list(counts).count(2)
    return once / (once + 2 * twice)


def naive(train: Sequence[int], history: int, word: int, vocab_size: int) -> float:
    """Interpolated Kneser-Ney as the textbook has it, by dictionaries."""
    pairs = Counter(zip(train, train[1:], strict=False))
    follows = Counter(second for _, second in pairs)
    low = discount(list(follows.values()))
    kinds = sum(follows.values())
    fallback = max(follows[word] - low, 0) / kinds + low * len(follows) / kinds / vocab_size
    own = {second: count for (first, second), count in pairs.items() if first == history}
    if not own:
        return fallback
    high, total = discount(list(pairs.values())), sum(own.values())
    return max(own.get(word, 0) - high, 0) / total + high * len(own) / total * fallback


@given(streams)
def test_probabilities_sum_to_one_after_any_history_seen_or_not(train: list[int]) -> None:
    model = fitted(train)
    words = np.arange(VOCAB)
    # The last word of the vocabulary is in no stream.
    for history in range(VOCAB):
        found = model.probabilities(np.full(VOCAB, history), words)
        # Seven sums and products of numbers up to one, in double precision.
        assert found.sum() == pytest.approx(1, abs=1e-14) and (found > 0).all()


@settings(deadline=None)
@given(streams, streams)
def test_perplexity_is_that_of_a_naive_dictionary(train: list[int], other: list[int]) -> None:
    nats = -sum(math.log(naive(train, first, second, VOCAB)) for first, second in zip(other, other[1:], strict=False))
    assert fitted(train).perplexity(ids(other)) == pytest.approx(math.exp(nats / (len(other) - 1)), rel=1e-12)


def test_pieces_of_any_size_give_the_same_model(monkeypatch: pytest.MonkeyPatch) -> None:
    train = np.random.default_rng(0).zipf(1.3, size=5000) % 400
    whole = fitted(train.tolist(), 400)
    monkeypatch.setattr(bigram, "_CHUNK", 37)
    parts = fitted(train.tolist(), 400)
    for name in ("keys", "counts", "totals", "kinds", "fallback"):
        assert np.array_equal(getattr(whole, name), getattr(parts, name))
    assert int(whole.counts.sum()) == len(train) - 1
    # The sums of logarithms are grouped otherwise: rounding only.
    assert parts.perplexity(ids(train.tolist())) == pytest.approx(math.exp(mean_nats(whole, train)), rel=1e-12)


def mean_nats(model: Bigram, tokens: np.ndarray) -> float:
    return float(-np.log(model.probabilities(tokens[:-1], tokens[1:])).mean())


@pytest.mark.parametrize("vocab_size", [1, 2, 50_257])
def test_a_stream_of_one_word_is_nearly_certain(vocab_size: int) -> None:
    model = fitted([0] * 1000, vocab_size)
    # Of 999 pairs one is held back and shared by all words.
    expected = (998 + 1 / vocab_size) / 999
    assert model.perplexity(ids([0] * 10)) == pytest.approx(1 / expected, rel=1e-12)
    if vocab_size > 1:
        rare = model.perplexity(ids([0, 1]))
        assert rare is not None and math.isfinite(rare) and rare > 900


def test_two_tokens_are_enough() -> None:
    model = fitted([3, 4])
    assert model.perplexity(ids([3, 4])) == pytest.approx(VOCAB)


def test_every_token_but_the_first_counts_once() -> None:
    model = fitted([0, 1, 0, 1, 2, 0])
    one, two = model.probabilities(ids([1, 0]), ids([0, 2]))
    assert model.perplexity(ids([1, 0, 2])) == pytest.approx(math.exp(-(math.log(one) + math.log(two)) / 2))


def test_a_stop_leaves_without_a_figure() -> None:
    assert fit_bigram(ids([0, 1, 0]), vocab_size=VOCAB, stopped=lambda: True) is None
    assert fitted([0, 1, 0]).perplexity(ids([0, 1]), stopped=lambda: True) is None


def test_of_very_much_text_the_start_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bigram, "MOST_TOKENS", 4)
    assert fitted([0, 1, 2, 3, 5, 5, 5, 5]).counts.sum() == 3


def test_three_million_tokens_take_seconds() -> None:
    train = (np.random.default_rng(0).zipf(1.2, size=3_000_000) % 50_257).astype(np.uint16)
    began = time.perf_counter()
    model = fit_bigram(train, vocab_size=50_257)
    assert model is not None and model.perplexity(train[:100_000]) is not None
    # Half a second here; the bound leaves room for a machine that does something else too.
    assert time.perf_counter() - began < 6
