"""N-gram figures kept with a token set: counted once, never from a damaged file, and under other vocabularies."""

from __future__ import annotations

import json
import logging
import math
from pathlib import Path
from typing import Any

import pytest

import oelm.data.ngram as counters
from oelm.data.ngram import (
    FILE,
    NgramFigures,
    bits_per_byte,
    count_vocabularies,
    kept_figures,
    ngram_figures,
    perplexities,
    text_of,
)
from oelm.data.prepare import prepare
from oelm.data.sources import documents
from oelm.data.tokens import TokenSet
from oelm.errors import DataError
from tests.conftest import made_text


@pytest.fixture
def tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TokenSet:
    """A set with three splits, of several documents each."""
    monkeypatch.setenv("OELM_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "own"
    folder.mkdir()
    for name, count, seed in (("train", 6, 0), ("valid", 2, 10), ("test", 3, 20)):
        texts = [made_text(300, seed=seed + number) + "Zoë says: \U0001f600\n" for number in range(count)]
        (folder / f"{name}.txt").write_text("<|endoftext|>".join(texts), encoding="utf-8")
    return prepare(str(folder), tokenizer="bpe:300")


def counted(tokens: TokenSet, *, orders: int = 5) -> NgramFigures:
    figures = ngram_figures(tokens, orders=orders)
    assert figures is not None
    return figures


def forbid_counting(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("counted again")

    monkeypatch.setattr(counters, "perplexities", refuse)


def test_figures_are_those_of_every_split_that_is_judged(tokens: TokenSet) -> None:
    judged = {"val": tokens.val, "test": tokens.splits["test"]}
    assert counted(tokens).ppl == perplexities(tokens.train, judged, vocab_size=tokens.meta.vocab_size)
    assert counted(tokens).tokens == len(tokens.train)


def test_figures_are_counted_once_and_kept_with_the_set(tokens: TokenSet, monkeypatch: pytest.MonkeyPatch) -> None:
    assert kept_figures(tokens.path, tokens.meta) is None
    first = counted(tokens)
    forbid_counting(monkeypatch)
    assert counted(tokens) == first == kept_figures(tokens.path, tokens.meta)


def test_more_orders_are_counted_when_asked_for_and_serve_fewer(tokens: TokenSet, monkeypatch: pytest.MonkeyPatch) -> None:
    five, seven = counted(tokens), counted(tokens, orders=7)
    assert seven.up_to(5) == five.ppl and len(seven.ppl["val"]) == 7
    forbid_counting(monkeypatch)
    assert counted(tokens).up_to(5) == five.ppl


def broken_digit(text: str) -> str:
    # A figure that could be one: only the digest tells.
    place = text.index(".") + 1
    return text[:place] + str((int(text[place]) + 1) % 10) + text[place + 1 :]


@pytest.mark.parametrize(
    "damage",
    [
        broken_digit,
        lambda text: text[: len(text) // 2],
        lambda text: "",
        lambda text: "[]",
        lambda text: text.replace("oelm-ngram-1", "oelm-ngram-0"),
        lambda text: text.replace('"val"', '"else"'),
    ],
    ids=["digit", "torn", "empty", "list", "format", "split"],
)
def test_a_damaged_file_is_counted_again_and_replaced(tokens: TokenSet, damage: Any) -> None:
    first, path = counted(tokens), tokens.path / FILE
    whole = path.read_text()
    path.write_text(damage(whole))
    assert path.read_text() != whole and kept_figures(tokens.path, tokens.meta) is None
    assert counted(tokens) == first and path.read_text() == whole


def test_figures_of_another_set_are_not_taken(tokens: TokenSet) -> None:
    first = counted(tokens)
    other = prepare(str(tokens.path.parents[1] / ".." / "own"), tokenizer="bpe:310")
    (tokens.path / FILE).rename(other.path / FILE)
    assert counted(other).fingerprint == other.meta.fingerprint != first.fingerprint
    assert counted(other).ppl != first.ppl


def test_a_stop_keeps_nothing(tokens: TokenSet) -> None:
    assert ngram_figures(tokens, stopped=lambda: True) is None
    assert not (tokens.path / FILE).exists()


def test_a_folder_that_cannot_be_written_gives_figures_all_the_same(tokens: TokenSet, caplog: pytest.LogCaptureFixture) -> None:
    # Not by permissions: root may write everywhere.
    (tokens.path / FILE).mkdir()
    with caplog.at_level(logging.WARNING):
        assert counted(tokens).ppl
    assert "not kept" in caplog.text and (tokens.path / FILE).is_dir()


def test_the_text_of_a_set_comes_back_as_it_was(tokens: TokenSet) -> None:
    texts = list(documents(text_of(tokens)))
    assert len(texts) == 11
    assert sum(len(text.encode()) for text in texts) == sum(split.text_bytes for split in tokens.meta.splits.values())
    assert all(text.endswith("Zoë says: \U0001f600\n") for text in texts)


def test_counters_of_the_sets_own_vocabulary_are_its_own_figures(tokens: TokenSet) -> None:
    own = counted(tokens, orders=6)
    figures = count_vocabularies(tokens, vocabularies=(300, 400), orders=6)
    assert figures.counters.keys() == {300, 400}
    for split in ("val", "test"):
        assert figures.counters[300][split] == bits_per_byte(tokens.meta, split, own.ppl[split])
    known = tokens.meta.splits["val"]
    assert figures.counters[300]["val"][1] == math.log2(own.ppl["val"][1]) * (known.tokens - 1) / known.text_bytes


def test_the_best_counter_is_the_one_of_fewest_bits(tokens: TokenSet) -> None:
    assert counted(tokens).best_counter("val") is None
    figures = count_vocabularies(tokens, vocabularies=(300, 400), orders=3)
    best = figures.best_counter("val")
    assert best is not None
    vocabulary, order, value = best
    assert value == figures.counters[vocabulary]["val"][order - 1]
    assert value == min(value for by_split in figures.counters.values() for value in by_split["val"])


def test_counters_are_kept_and_nothing_else_is_left_in_the_cache(tokens: TokenSet, monkeypatch: pytest.MonkeyPatch) -> None:
    first = count_vocabularies(tokens, vocabularies=(300,), orders=3)
    assert [path.name for path in tokens.path.parents[1].iterdir()] == ["tokens"]
    assert [path for path in tokens.path.parent.iterdir() if path.is_dir()] == [tokens.path]
    forbid_counting(monkeypatch)
    assert count_vocabularies(tokens, vocabularies=(300,), orders=3) == first


def test_counting_more_orders_later_keeps_the_counters(tokens: TokenSet) -> None:
    first = count_vocabularies(tokens, vocabularies=(300,), orders=3)
    assert counted(tokens, orders=6).counters == first.counters


def test_a_tokenizer_that_loses_text_is_refused(tokens: TokenSet) -> None:
    path = tokens.path / "tokenizer.json"
    spec = json.loads(path.read_text())
    spec["decoder"] = {"type": "Replace", "pattern": {"String": "e"}, "content": ""}
    path.write_text(json.dumps(spec))
    with pytest.raises(DataError, match=r"does not reproduce the \w+ text"):
        count_vocabularies(tokens, vocabularies=(300,), orders=2)
