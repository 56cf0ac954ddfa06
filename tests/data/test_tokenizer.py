"""A tokenizer trained on any text encodes every text and gives it back exactly, and training repeats itself."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models

from oelm.data.tokenizer import END_OF_TEXT, end_of_text_id, load_tokenizer, tokenizer_recipe, train_bpe
from oelm.errors import ConfigError, DataError
from tests.conftest import made_text

TOKENIZER = train_bpe([made_text(300)], vocab_size=300)


def test_a_spec_names_its_vocabulary_size() -> None:
    cases: list[tuple[str, int]] = [("bpe:257", 257), ("bpe:4096", 4096), ("bpe:50257", 50257)]
    for spec, size in cases:
        recipe = tokenizer_recipe(spec)
        assert (recipe.label, recipe.vocab_size, recipe.text) == (spec, size, None), (spec, size)


def test_a_spec_that_is_none_is_refused_with_a_right_one() -> None:
    cases: list[str] = [
        "gpt3",
        "GPT2",
        "bpe",
        "bpe:",
        "bpe:0",
        "bpe:256",
        "bpe:-5",
        "bpe:1e4",
        "bpe:300 ",
        "BPE:300",
        "bpe:0300",
        "bpe:12345678",
        "bpe:\u0663\u0660\u0660",
    ]
    for spec in cases:
        with pytest.raises(ConfigError) as refusal:
            tokenizer_recipe(spec)
        assert repr(spec) in str(refusal.value) and "bpe:4096" in str(refusal.value), spec


@given(st.text())
@settings(deadline=None)
def test_any_text_is_decoded_back_exactly(text: str) -> None:
    ids = TOKENIZER.encode(text, add_special_tokens=False).ids
    assert TOKENIZER.decode(ids, skip_special_tokens=False) == text


@given(st.text())
@settings(deadline=None)
def test_every_id_is_inside_the_vocabulary(text: str) -> None:
    assert all(0 <= token < TOKENIZER.get_vocab_size() for token in TOKENIZER.encode(text, add_special_tokens=False).ids)


def test_text_that_trips_tokenizers_is_decoded_back_exactly() -> None:
    for text in (
        " leading",
        "trailing ",
        "a\r\nb",
        "\t\n\v\f",
        "\ufeffbom",
        "e\u0301",
        "\U0001f468\u200d\U0001f469",
        "\x00\x7f",
    ):
        ids = TOKENIZER.encode(text, add_special_tokens=False).ids
        assert TOKENIZER.decode(ids, skip_special_tokens=False) == text, text


def test_the_vocabulary_has_the_size_asked_for() -> None:
    assert TOKENIZER.get_vocab_size() == 300


def test_a_text_with_too_few_pairs_gives_a_smaller_vocabulary() -> None:
    assert 257 <= train_bpe(["ab"], vocab_size=4096).get_vocab_size() < 300


def test_training_shortens_the_text_it_was_trained_on() -> None:
    text = made_text(300)
    assert len(TOKENIZER.encode(text).ids) < len(text.encode())


def test_the_end_of_text_mark_is_one_token() -> None:
    assert TOKENIZER.encode(END_OF_TEXT, add_special_tokens=False).ids == [end_of_text_id(TOKENIZER)]


def test_a_tokenizer_without_an_end_mark_is_refused() -> None:
    with pytest.raises(DataError, match="endoftext"):
        end_of_text_id(Tokenizer(models.BPE()))


def test_training_gives_the_same_bytes_on_any_number_of_threads() -> None:
    text = made_text(5000)
    program = (
        "import sys, hashlib; from oelm.data.tokenizer import train_bpe\n"
        "tokenizer = train_bpe(sys.stdin.read().split('.'), vocab_size=400)\n"
        "print(hashlib.sha256(tokenizer.to_str().encode()).hexdigest())"
    )
    digests = {hashlib.sha256(train_bpe(text.split("."), vocab_size=400).to_str().encode()).hexdigest()}
    for parallel, threads in (("false", "1"), ("true", "1"), ("true", "5")):
        environment = {
            **os.environ,
            "TOKENIZERS_PARALLELISM": parallel,
            "RAYON_NUM_THREADS": threads,
            "PYTHONHASHSEED": threads,
        }
        child = subprocess.run(
            [sys.executable, "-c", program], input=text, capture_output=True, text=True, check=True, env=environment
        )
        digests.add(child.stdout.strip())
    assert len(digests) == 1


def test_a_tokenizer_is_read_back_as_it_was_written(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(TOKENIZER.to_str(), encoding="utf-8")
    assert load_tokenizer(tmp_path).to_str() == TOKENIZER.to_str()


@pytest.mark.parametrize("content", [b"", b"{}", b"\xff", b'{"version": "1.0"}'], ids=repr)
def test_a_damaged_tokenizer_is_refused_by_file(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(DataError, match=r"tokenizer\.json: cannot be read as a tokenizer"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("spec", ["mine/tokenizer.json", "mine"], ids=["file", "folder"])
def test_a_tokenizer_given_by_path_is_taken_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spec: str) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "tokenizer.json").write_text(TOKENIZER.to_str(), encoding="utf-8")
    recipe = tokenizer_recipe(spec)
    assert (recipe.text, recipe.vocab_size) == (TOKENIZER.to_str(), 300)


def test_tokenizers_given_by_path_are_told_apart_by_content(tmp_path: Path) -> None:
    labels = []
    for number, size in enumerate((300, 301, 300)):
        path = tmp_path / f"{number}.json"
        path.write_text(train_bpe([made_text(300)], vocab_size=size).to_str(), encoding="utf-8")
        labels.append(tokenizer_recipe(str(path)).label)
    assert labels[0] == labels[2] != labels[1]


def test_a_missing_tokenizer_is_refused_by_file(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"tokenizer\.json"):
        load_tokenizer(tmp_path)
