"""N-gram references: probabilities that sum to one, and those that dictionaries give by the textbook."""

from __future__ import annotations

import math
import time
import tracemalloc
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import oelm.data.ngram as ngram
from oelm.data.ngram import discounts, histories, perplexities, probabilities
from oelm.data.request import Request
from oelm.data.tokens import Tokens, TokenSet

VOCAB = 5
ORDERS = 4
streams = st.lists(st.integers(0, VOCAB - 2), min_size=2, max_size=60)
SHARED = Path(__file__).parents[3] / "shared" / "data"
Gram = tuple[int, ...]


def ids(values: Sequence[int]) -> Tokens:
    return np.array(values, dtype=np.uint16)


def found(
    train: Sequence[int], text: Sequence[int], vocab_size: int = VOCAB, *, orders: int = 5, context: int | None = None
) -> list[float]:
    values = perplexities(ids(train), {"text": ids(text)}, vocab_size=vocab_size, orders=orders, context=context)
    assert values is not None
    return values["text"]


class Dictionaries:
    """Interpolated modified Kneser-Ney as Chen and Goodman write it, by dictionaries."""

    def __init__(self, train: Sequence[int], vocab_size: int = VOCAB) -> None:
        self.train, self.vocab_size = tuple(train), vocab_size
        self.grams = {n: Counter(self.train[i : i + n] for i in range(len(train) - n + 1)) for n in range(1, 9)}
        self.followed: dict[int, dict[Gram, int]] = defaultdict(lambda: defaultdict(int))
        for n in range(2, 9):
            for gram in self.grams[n]:
                self.followed[n - 1][gram[1:]] += 1

    def chance(self, context: Gram, word: int, *, is_highest: bool = True) -> float:
        """The probability of a word after all of a context."""
        order = len(context) + 1
        counts = dict(self.grams[order] if is_highest else self.followed[order])
        lower = self.chance(context[1:], word, is_highest=False) if context else 1 / self.vocab_size
        own = {gram[-1]: count for gram, count in counts.items() if gram[:-1] == context}
        if not own:
            return lower
        taken = self.discounts(list(counts.values()))
        kept = own[word] - taken[min(own[word], 3)] if word in own else 0.0
        held_back = sum(taken[min(count, 3)] for count in own.values())
        return (kept + held_back * lower) / sum(own.values())

    def discounts(self, counts: list[int]) -> dict[int, float]:
        n = {k: counts.count(k) for k in (1, 2, 3, 4)}
        if n[1] and n[2] and n[3]:
            y = n[1] / (n[1] + 2 * n[2])
            three = {k: k - (k + 1) * y * n[k + 1] / n[k] for k in (1, 2, 3)}
            if min(three.values()) > 0:
                return three
        once = max(1, n[1])
        return dict.fromkeys((1, 2, 3), once / (once + 2 * n[2]))


@settings(deadline=None, max_examples=60)
@given(streams, st.lists(st.integers(0, VOCAB - 1), max_size=ORDERS + 1))
def test_probabilities_sum_to_one_after_any_context_seen_or_not(train: list[int], context: list[int]) -> None:
    # The last word of the vocabulary is in no stream.
    words = np.array([[*context, word] for word in range(VOCAB)]).ravel()
    history = np.tile(np.arange(len(context) + 1), VOCAB)
    for chances in probabilities(ids(train), words, history, vocab_size=VOCAB, orders=ORDERS):
        last = chances[len(context) :: len(context) + 1]
        # Sums and products of a few dozen numbers up to one, in double precision.
        assert last.sum() == pytest.approx(1, abs=1e-13) and (last > 0).all()


@settings(deadline=None, max_examples=60)
@given(streams, streams)
def test_probabilities_are_those_of_the_dictionaries(train: list[int], text: list[int]) -> None:
    naive = Dictionaries(train)
    all_orders = probabilities(ids(train), np.array(text), np.arange(len(text)), vocab_size=VOCAB, orders=ORDERS)
    for order, chances in enumerate(all_orders, 1):
        for place, word in enumerate(text):
            context = tuple(text[max(0, place - order + 1) : place])
            assert chances[place] == pytest.approx(naive.chance(context, word), rel=1e-12)


def realistic(length: int, vocab_size: int, seed: int = 0) -> list[int]:
    """A stream with counts of every size, repeated stretches and words never seen elsewhere."""
    made = np.random.default_rng(seed)
    words = made.zipf(1.5, size=length) % (vocab_size - 1)
    for start in made.integers(0, length - 60, size=length // 100):
        words[start : start + 20] = words[start + 30 : start + 50]
    return [int(word) for word in words]


def test_with_three_different_discounts_too_every_order_up_to_8_is_that_of_the_dictionaries() -> None:
    train, text = realistic(3000, 12), realistic(60, 12, seed=1)
    naive = Dictionaries(train, 12)
    for order in (2, 3, 5):
        assert len(set(naive.discounts(list(naive.grams[order].values())).values())) == 3, "the premise: no fallback"
    expected = [
        -np.mean([math.log(naive.chance(tuple(text[max(0, i - n + 1) : i]), text[i])) for i in range(1, len(text))])
        for n in range(1, 9)
    ]
    assert np.log(found(train, text, 12, orders=8)) == pytest.approx(expected, rel=1e-12)


def test_discounts_are_those_of_chen_and_goodman() -> None:
    # Y = 10 / (10 + 2 * 5) = 1/2; 1 - 2Y 5/10, 2 - 3Y 4/5, 3 - 4Y 3/4.
    assert discounts(10, 5, 4, 3) == pytest.approx((0.5, 0.8, 1.5))


def test_where_counts_give_no_three_discounts_one_in_range_serves_all() -> None:
    cases: list[tuple[int, int, int, int]] = [
        (0, 0, 0, 0),
        (0, 5, 4, 3),
        (10, 0, 4, 3),
        (10, 5, 0, 3),
        (10, 5, 9, 0),
        (9, 9, 1, 9),
    ]
    for counted in cases:
        assert len(set(discounts(*counted))) == 1 and 0 < discounts(*counted)[0] <= 1, counted


def test_a_context_is_what_the_windows_of_a_model_see() -> None:
    assert histories(8, None).tolist() == [0, 1, 2, 3, 4, 5, 6, 7]
    # Windows [0..3], [3..6], [6..]: the first token of each is only looked at.
    assert histories(8, 3).tolist() == [0, 1, 2, 3, 1, 2, 3, 1]


def test_a_context_changes_what_is_looked_at_and_nothing_else() -> None:
    train, text = realistic(3000, 12), realistic(61, 12, seed=1)
    naive = Dictionaries(train, 12)
    nats = [-math.log(naive.chance(tuple(text[i - min(2, (i - 1) % 4 + 1) : i]), text[i])) for i in range(1, len(text))]
    assert math.log(found(train, text, 12, orders=3, context=4)[2]) == pytest.approx(np.mean(nats), rel=1e-12)
    assert found(train, text, 12, orders=3, context=60) == found(train, text, 12, orders=3)


def test_texts_are_scored_apart() -> None:
    train, one, two = realistic(3000, 12), realistic(50, 12, seed=1), realistic(70, 12, seed=2)
    both = perplexities(ids(train), {"one": ids(one), "two": ids(two)}, vocab_size=12)
    assert both == {"one": found(train, one, 12), "two": found(train, two, 12)}


def test_parts_of_any_size_give_the_same_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    train, text = realistic(5000, 400), realistic(300, 400, seed=1)
    whole = found(train, text, 400)
    monkeypatch.setattr(ngram, "_PART", 700)
    monkeypatch.setattr(ngram, "_BLOCK", 37)
    assert found(train, text, 400) == whole


@pytest.mark.parametrize("vocab_size", [1, 2, 50_257])
def test_a_stream_of_one_word_is_nearly_certain(vocab_size: int) -> None:
    values = found([0] * 1000, [0] * 10, vocab_size)
    # Of 1000 words one is held back and shared by all.
    assert values[0] == pytest.approx(1000 / (999 + 1 / vocab_size), rel=1e-12)
    assert all(1 <= value < 1.002 for value in values)
    if vocab_size > 1:
        assert all(math.isfinite(value) and value > 500 for value in found([0] * 1000, [0, 1], vocab_size))


def test_very_short_texts_have_figures_of_every_order() -> None:
    # One word, counted once and held back: nothing is known.
    assert found([3], [3, 4]) == pytest.approx([VOCAB] * 5)
    assert len(found([3, 4], [3, 4])) == 5


def test_a_stop_leaves_without_a_figure() -> None:
    asked: list[int] = []

    def stopped() -> bool:
        asked.append(1)
        return len(asked) > 3

    assert perplexities(ids([0, 1, 0]), {"text": ids([0, 1])}, vocab_size=VOCAB, stopped=stopped) is None
    assert len(asked) == 4


def test_of_very_much_text_the_start_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    train = realistic(400, 12)
    expected = found(train[:300], train, 12)
    monkeypatch.setattr(ngram, "MOST_TOKENS", 300)
    assert found(train, train, 12) == expected


@pytest.mark.slow
def test_memory_does_not_grow_with_the_training_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ngram, "_PART", 2**13)
    monkeypatch.setattr(ngram, "_BLOCK", 2**13)
    text = np.array(realistic(500, 500, seed=1), dtype=np.uint16)
    peaks = []
    for length in (2**15, 2**18):
        train = np.random.default_rng(0).integers(0, 500, size=length).astype(np.uint16)
        tracemalloc.start()
        assert perplexities(train, {"text": text}, vocab_size=500, orders=3) is not None
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    # Eight times the text; parts differ in size by chance.
    assert peaks[1] < 1.5 * peaks[0]


@pytest.mark.slow
def test_ten_million_tokens_take_seconds() -> None:
    train = (np.random.default_rng(0).zipf(1.2, size=10_000_000) % 50_257).astype(np.uint16)
    began = time.process_time()
    assert perplexities(train, {"text": train[:100_000]}, vocab_size=50_257) is not None
    # 20 s of one core of a busy machine; the bound leaves room for a slower one.
    assert time.process_time() - began < 60


@pytest.mark.slow
def test_tinystories_at_vocabulary_512(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not (SHARED / "tinystories").is_dir():
        pytest.skip(f"no extracts of real data under {SHARED}")
    monkeypatch.setenv("OELM_CACHE", str(tmp_path))
    tokens = Request(name="tinystories", folder=SHARED, tokenizer="bpe:512").prepare()
    assert isinstance(tokens, TokenSet)
    values = perplexities(tokens.train, {"val": tokens.val}, vocab_size=512)
    assert values is not None and values["val"][4] == pytest.approx(6.28, abs=0.01)
    # An independent implementation with one discount an order came to 6.40.
    monkeypatch.setattr(ngram, "discounts", lambda once, twice, *_: (max(1, once) / (max(1, once) + 2 * twice),) * 3)
    values = perplexities(tokens.train, {"val": tokens.val}, vocab_size=512)
    assert values is not None and values["val"][4] == pytest.approx(6.40, abs=0.01)
