"""The n-gram figures of a token set: counted once, and kept with it in ngram.json."""

from __future__ import annotations

import hashlib
import logging
import math
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np
from pydantic import Field, ValidationError
from tokenizers import Tokenizer

from oelm.data.corpora import Corpus, Part
from oelm.data.ngram import MOST_TOKENS, never, perplexities
from oelm.data.pieces import Piece, pieces
from oelm.data.prepare import prepare_corpus
from oelm.data.tokenizer import load_tokenizer
from oelm.data.tokens import OnProgress, Split, TokenMeta, Tokens, TokenSet, no_progress
from oelm.errors import DataError, OelmError
from oelm.files import cache_root, dump_json, read_json, room_checked, write_json
from oelm.strict import Strict

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
