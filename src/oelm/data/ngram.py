"""Counting as a reference: n-gram models of a text, and their figures kept with its token set.

Interpolated modified Kneser-Ney (Chen and Goodman 1998, section 3): three discounts per order, lower orders by
continuation counts (how many different tokens an n-gram follows), order 1 interpolated with the uniform distribution.
The discounts follow from the counts, so nothing is tuned.

Only counts that the evaluated text needs are kept, and the training text is counted in parts, so that memory does not grow
with it. N-grams are compared by 64-bit keys: in a text of a hundred million tokens, two different n-grams share a key with
a probability of less than one in a thousand, and then one count is wrong by one n-gram.
"""

from __future__ import annotations

import hashlib
import logging
import math
import tempfile
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, ValidationError
from tokenizers import Tokenizer

from oelm.data.prepare import prepare_corpus
from oelm.data.readers import Piece, pieces
from oelm.data.sources import Corpus, Part
from oelm.data.tokenizer import load_tokenizer
from oelm.data.tokens import OnProgress, Split, TokenMeta, Tokens, TokenSet, no_progress
from oelm.errors import DataError, OelmError
from oelm.files import Strict, cache_root, dump_json, read_json, room_checked, write_json

Counts = NDArray[np.int64]
Floats = NDArray[np.float64]
Keys = NDArray[np.uint64]
Name = TypeVar("Name", bound=str)
# A larger training split is counted up to here: this takes minutes, more would take hours.
MOST_TOKENS = 2**27
# N-grams sorted at once: about 200 MiB.
_PART = 2**22
# Keys computed at once: they fit in a processor's cache, which is several times as fast.
_BLOCK = 2**16


def never() -> bool:
    """Never stop."""
    return False


def perplexities(
    train: Tokens,
    texts: Mapping[Name, Tokens],
    *,
    vocab_size: int,
    orders: int = 5,
    context: int | None = None,
    stopped: Callable[[], bool] = never,
) -> dict[Name, list[float]] | None:
    """Return the perplexity of every text under the models of order 1 to `orders` of `train`; None when stopped.

    Every token of a text but its first is predicted once, from all tokens before it; with `context`, only from those in the
    same window of that many tokens, as a language model does.
    """
    assert texts and len(train) and min(map(len, texts.values())) > 1
    words = np.concatenate([np.asarray(text).astype(np.int64) for text in texts.values()])
    history = np.concatenate([histories(len(text), context) for text in texts.values()])
    ends = np.cumsum([0, *map(len, texts.values())])
    found: dict[Name, list[float]] = {name: [] for name in texts}
    for chances in probabilities(train, words, history, vocab_size=vocab_size, orders=orders, stopped=stopped):
        for name, first, last in zip(texts, ends, ends[1:], strict=False):
            nats = -float(np.log(chances[first + 1 : last]).mean())
            # The mean may round to just below zero.
            found[name].append(math.exp(max(0.0, nats)))
    return found if all(len(values) == orders for values in found.values()) else None


def histories(length: int, context: int | None) -> Counts:
    """Return how many tokens before each token may be used; 0 for the first, which is not predicted."""
    place = np.arange(length)
    if context is None:
        return place
    return np.where(place > 0, (place - 1) % context + 1, 0)


def probabilities(
    train: Tokens,
    words: Counts,
    history: Counts,
    *,
    vocab_size: int,
    orders: int,
    stopped: Callable[[], bool] = never,
) -> Iterator[Floats]:
    """Yield, from order 1 on, the probability of every word given at most `history` words before it.

    With fewer than order - 1 words, the highest order that needs no more is used. Ends early when stopped.
    """
    train = train[:MOST_TOKENS]
    # `lower` by continuation counts, of the order before; `chances` by plain counts, of the highest order so far.
    lower, chances = np.full(len(words), 1 / vocab_size), np.empty(len(words))
    before: _Question | None = None
    for order in range(1, orders + 1):
        asked = _Question(words, history, order)
        counts, continuations = _Tally(asked), _Tally(before) if before is not None else None
        for part in _parts(train, order):
            if stopped():
                return
            _count(train, part, order, counts, continuations)
        if continuations is not None and before is not None:
            lower[before.places] = continuations.probabilities(lower[before.places])
        chances[asked.places] = counts.probabilities(lower[asked.places])
        yield chances.copy()
        before = asked


class _Question:
    """The n-grams of one order that end at the `places` of a text, and their distinct contexts."""

    def __init__(self, words: Counts, history: Counts, order: int) -> None:
        self.places = np.flatnonzero(history >= order - 1)
        self.keys = _keys(words, self.places, order)
        self.contexts, self.context_of = np.unique(_keys(words, self.places - 1, order - 1), return_inverse=True)


class _Tally:
    """Counts of the training text that a question needs."""

    def __init__(self, asked: _Question) -> None:
        self.asked = asked
        self.counts = np.zeros(len(asked.keys), dtype=np.int64)
        self.totals = np.zeros(len(asked.contexts), dtype=np.int64)
        self.may_ask = np.zeros(16 * len(asked.contexts) + 1, dtype=bool)
        self.may_ask[asked.contexts % np.uint64(len(self.may_ask))] = True
        # By context, how many different words follow it once, twice, and three times or more.
        self.kinds = np.zeros((3, len(asked.contexts)), dtype=np.int64)
        # How many n-grams of all the text were counted once, twice, three times and four times.
        self.counted = np.zeros(4, dtype=np.int64)

    def add(self, keys: Keys, counts: Counts, contexts: Keys) -> None:
        """Add distinct n-grams that were not added before, in the order of their keys."""
        self.counted += np.bincount(np.minimum(counts, 5), minlength=6)[1:5]
        place, is_there = _found(keys, self.asked.keys)
        self.counts[is_there] += counts[place]
        # Most contexts of a long text are not needed; a small table avoids the search for nearly all of them.
        is_asked = self.may_ask[contexts % np.uint64(len(self.may_ask))]
        counts, contexts = counts[is_asked], contexts[is_asked]
        place, is_there = _found(self.asked.contexts, contexts)
        counts = counts[is_there]
        self.totals += np.bincount(place, weights=counts, minlength=len(self.totals)).astype(np.int64)
        for number, kinds in enumerate(self.kinds, 1):
            kinds += np.bincount(place[np.minimum(counts, 3) == number], minlength=len(kinds))

    def probabilities(self, lower: Floats) -> Floats:
        """Return the probability at every place, given that of the order below."""
        taken = np.array([0.0, *discounts(*map(int, self.counted))])
        total = self.totals[self.asked.context_of]
        held_back = (taken[1:] @ self.kinds)[self.asked.context_of]
        kept = self.counts - taken[np.minimum(self.counts, 3)]
        # After an unseen context, the lower order decides.
        return np.where(total > 0, (kept + held_back * lower) / np.maximum(total, 1), lower)


def discounts(once: int, twice: int, thrice: int, four_times: int) -> tuple[float, float, float]:
    """Return the discounts of counts of one, two, and three or more, from how many n-grams have which count.

    Where a small or odd text gives no positive estimate, one discount serves all counts, as in plain Kneser-Ney; at least
    one n-gram counts as seen once, so that an unseen word stays possible.
    """
    share = max(1, once) / (max(1, once) + 2 * twice)
    if once and twice and thrice:
        three = (share, 2 - 3 * share * thrice / twice, 3 - 4 * share * four_times / thrice)
        if min(three) > 0:
            return three
    return (share, share, share)


def _count(train: Tokens, ends: Counts, order: int, counts: _Tally, continuations: _Tally | None) -> None:
    """Count the n-grams that end at these places, which must hold all those with the same last order - 1 tokens."""
    keys, times, first = _different(_keys(train, ends, order))
    ends = ends[first]
    counts.add(keys, times, _keys(train, ends - 1, order - 1))
    if continuations is not None:
        keys, times, first = _different(_keys(train, ends, order - 1))
        continuations.add(keys, times, _keys(train, ends[first] - 1, order - 2))


def _parts(train: Tokens, order: int) -> Iterator[Counts]:
    """Yield where n-grams end, in parts of about _PART; n-grams with the same last order - 1 tokens are in one part."""
    num_parts = -(-len(train) // _PART)
    if num_parts == 1:
        yield np.arange(order - 1, len(train))
        return
    # The part is chosen by the last token, or two from order 3 on.
    length = 2 if order > 2 else 1
    for part in range(num_parts):
        found = []
        for start in range(order - 1, len(train), _BLOCK):
            ends = np.arange(start, min(start + _BLOCK, len(train)))
            keys = _keys(train, ends, length)
            _mix(keys)
            found.append(ends[keys % np.uint64(num_parts) == part])
        yield np.concatenate(found)


def _keys(tokens: NDArray[Any], ends: Counts, length: int) -> Keys:
    """Return a key for the `length` tokens that end at each place."""
    keys = np.zeros(len(ends), dtype=np.uint64)
    for start in range(0, len(ends) if length else 0, _BLOCK):
        places, block = ends[start : start + _BLOCK], keys[start : start + _BLOCK]
        for back in reversed(range(length)):
            _mix(block)
            block += tokens[places - back].astype(np.uint64)
    return keys


def _mix(keys: Keys) -> None:
    """Mix the bits of keys in place, one to one (the finalizer of MurmurHash3)."""
    keys ^= keys >> np.uint64(33)
    for factor in (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53):
        keys *= np.uint64(factor)
        keys ^= keys >> np.uint64(33)


def _different(keys: Keys) -> tuple[Keys, Counts, Counts]:
    """Return the distinct keys in order, how often each occurs, and one place of each."""
    order = np.argsort(keys)
    keys = keys[order]
    starts = np.flatnonzero(np.concatenate([np.ones(min(1, len(keys)), dtype=bool), keys[1:] != keys[:-1]]))
    return keys[starts], np.diff(starts, append=len(keys)), order[starts]


def _found(sorted_keys: Keys, wanted: Keys) -> tuple[Counts, NDArray[np.bool_]]:
    """Return the place of each wanted key that exists, and which do."""
    if not len(sorted_keys):
        return np.zeros(0, dtype=np.int64), np.zeros(len(wanted), dtype=bool)
    place = np.minimum(np.searchsorted(sorted_keys, wanted), len(sorted_keys) - 1)
    is_there = sorted_keys[place] == wanted
    return place[is_there], is_there


log = logging.getLogger(__name__)
FILE = "ngram.json"
# Recorded with a run; a real baseline beats the last one.
ORDERS = 5
# Whether a baseline beats counting at all: the best of these orders and vocabularies, in bits per byte.
MOST_ORDERS = 8
VOCABULARIES = (512, 2048, 8192)
# By split, a figure for every order from 1 on.
ByOrder = dict[Split, list[float]]


class NgramFigures(Strict):
    """`ngram.json`: perplexities of n-gram models of the training split on the other splits.

    `tokens` is how many training tokens were counted. `counters` holds bits per byte by vocabulary, of the same text
    tokenized again; empty until requested.
    """

    format: Literal["oelm-ngram-1"] = "oelm-ngram-1"
    fingerprint: str
    tokens: int
    ppl: ByOrder
    counters: dict[int, ByOrder] = Field(default_factory=dict)

    def up_to(self, orders: int) -> ByOrder:
        """Return the perplexities of order 1 to `orders`."""
        return {split: values[:orders] for split, values in self.ppl.items()}

    def best_counter(self, split: Split) -> tuple[int, int, float] | None:
        """Return vocabulary, order and bits per byte of the best counter; None without counters."""
        found = [
            (value, vocabulary, order)
            for vocabulary, by_split in self.counters.items()
            for order, value in enumerate(by_split.get(split, []), 1)
        ]
        if not found:
            return None
        value, vocabulary, order = min(found)
        return vocabulary, order, value


def kept_figures(folder: Path, meta: TokenMeta) -> NgramFigures | None:
    """Return the figures kept with a token set; None where they are missing, damaged or of another set."""
    if not (folder / FILE).is_file():
        return None
    try:
        record = read_json(folder / FILE)
        digest = record.pop("sha256", None) if isinstance(record, dict) else None
        figures = NgramFigures.model_validate_json(dump_json(record))
    except (DataError, ValidationError) as problem:
        log.info("%s is not used: %s", folder / FILE, problem)
        return None
    is_complete = digest == _digest(figures) and figures.fingerprint == meta.fingerprint
    return figures if is_complete and figures.tokens == _counted(meta) else None


def ngram_figures(tokens: TokenSet, *, orders: int = ORDERS, stopped: Callable[[], bool] = never) -> NgramFigures | None:
    """Return the figures of a token set, kept in its folder or counted now; None when stopped."""
    kept = kept_figures(tokens.path, tokens.meta)
    if kept is not None and all(len(values) >= orders for values in kept.ppl.values()):
        return kept
    judged = judged_splits(tokens)
    found: ByOrder | None = {}
    if judged:
        found = perplexities(tokens.train, judged, vocab_size=tokens.meta.vocab_size, orders=orders, stopped=stopped)
    if found is None:
        return None
    figures = NgramFigures(
        fingerprint=tokens.meta.fingerprint,
        tokens=_counted(tokens.meta),
        ppl=found,
        counters=kept.counters if kept is not None else {},
    )
    _keep(tokens.path, figures)
    return figures


def judged_splits(tokens: TokenSet) -> dict[Split, Tokens]:
    """Return the splits that models are evaluated on; the first token of a split is not predicted."""
    return {name: split for name, split in tokens.splits.items() if name != "train" and len(split) > 1}


def count_vocabularies(
    tokens: TokenSet,
    *,
    vocabularies: tuple[int, ...] = VOCABULARIES,
    orders: int = MOST_ORDERS,
    progress: OnProgress = no_progress,
) -> NgramFigures:
    """Return the figures with `counters`: the set's own text, tokenized by a BPE of every vocabulary size and counted.

    Raises DataError where the set's tokenizer does not reproduce its text.
    """
    figures = ngram_figures(tokens)
    assert figures is not None
    missing = [size for size in vocabularies if size not in figures.counters]
    for size in missing:
        with room_checked(cache_root()):
            cache_root().mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache_root(), prefix=".counters-") as folder:
            corpus = text_of(tokens)
            made = prepare_corpus(corpus, tokenizer=f"bpe:{size}", out=Path(folder) / "tokens", progress=progress)
            _check_same_text(tokens, made)
            progress(f"counting {size:,} words", 0, 1, 0)
            counted = ngram_figures(made, orders=orders)
            assert counted is not None
            bits = {split: bits_per_byte(made.meta, split, values) for split, values in counted.ppl.items()}
        figures = figures.model_copy(update={"counters": dict(sorted({**figures.counters, size: bits}.items()))})
        _keep(tokens.path, figures)
    return figures


def bits_per_byte(meta: TokenMeta, split: Split, ppl: list[float]) -> list[float]:
    """Return perplexities over a split of a token set as bits per byte of its text."""
    known = meta.splits[split]
    return [math.log2(value) * (known.tokens - 1) / known.text_bytes for value in ppl]


def text_of(tokens: TokenSet) -> Corpus:
    """Return the text of a token set as a corpus with the same splits."""
    tokenizer = load_tokenizer(tokens.path)
    parts = (Part(split, split, partial(_decoded, tokens, split, tokenizer)) for split in tokens.splits)
    return Corpus(tokens.meta.name, f"the text of the token set {tokens.meta.name}", tuple(parts))


def _decoded(tokens: TokenSet, split: Split, tokenizer: Tokenizer) -> Iterator[Piece]:
    ids, end = tokens.splits[split], tokens.meta.end_of_text
    first = 0
    for last in [*np.flatnonzero(np.asarray(ids) == end), len(ids)]:
        text = tokenizer.decode(ids[first:last].tolist(), skip_special_tokens=False)
        yield from pieces([text, None], tidy=False)
        first = last + 1


def _check_same_text(tokens: TokenSet, made: TokenSet) -> None:
    for split, known in tokens.meta.splits.items():
        again = made.meta.splits.get(split)
        if again is None or (again.documents, again.text_bytes) != (known.documents, known.text_bytes):
            raise DataError(
                f"{tokens.path}: its tokenizer {tokens.meta.tokenizer} does not reproduce the {split} text, so it "
                "cannot be counted with other vocabularies; prepare the same text with --tokenizer bpe:512 and use that"
            )


def _counted(meta: TokenMeta) -> int:
    return min(meta.splits["train"].tokens, MOST_TOKENS)


def _keep(folder: Path, figures: NgramFigures) -> None:
    try:
        write_json(folder / FILE, {**figures.model_dump(mode="json"), "sha256": _digest(figures)})
    except OelmError as problem:
        # The figures are right; the next caller counts again.
        log.warning("the n-gram figures are not kept: %s", problem)


def _digest(figures: NgramFigures) -> str:
    return hashlib.sha256(figures.model_dump_json().encode()).hexdigest()
