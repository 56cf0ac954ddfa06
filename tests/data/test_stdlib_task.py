"""The task that every machine has: snippets of the standard library, labelled with their package, that do not name it."""

from __future__ import annotations

import sysconfig
from dataclasses import replace
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from oelm.data.example_sets import pad_id
from oelm.data.examples import NUM_LABELS, Example, ExampleSource, own_tokenizer, stdlib_examples, train_bert_bpe
from oelm.data.prepare import corpus_of
from oelm.data.python_source import package_of, stdlib_corpus
from oelm.data.sources import Corpus

MARKS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]


@pytest.fixture(scope="module")
def source() -> ExampleSource:
    return stdlib_examples()


@pytest.fixture(scope="module")
def corpus() -> Corpus:
    return stdlib_corpus()


@pytest.fixture(scope="module")
def splits(source: ExampleSource) -> dict[str, list[Example]]:
    return {name: list(read()) for name, read in source.splits.items()}


def test_labels_are_packages_of_the_standard_library(source: ExampleSource) -> None:
    root = Path(sysconfig.get_path("stdlib"))
    assert len(set(source.names)) == NUM_LABELS and all((root / name).is_dir() for name in source.names)


def test_labels_are_the_packages_with_most_files(source: ExampleSource, corpus: Corpus) -> None:
    files = [package_of(part.label) for part in corpus.parts if "/" in part.label]
    left_out = max(files.count(name) for name in set(files) - set(source.names))
    assert min(files.count(name) for name in source.names) >= left_out


@pytest.mark.parametrize("split", ["train", "val"])
def test_every_package_has_examples(split: str, source: ExampleSource, splits: dict[str, list[Example]]) -> None:
    assert {example.label for example in splits[split]} == set(range(len(source.names)))


def test_no_snippet_names_its_package(source: ExampleSource, splits: dict[str, list[Example]]) -> None:
    named = [e for rows in splits.values() for e in rows if source.names[e.label].lower() in e.text.lower()]
    assert named == []


def test_no_snippet_of_dev_is_in_training(splits: dict[str, list[Example]]) -> None:
    assert not {example.text for example in splits["train"]} & {example.text for example in splits["val"]}


def test_the_name_means_this_corpus_next_to_a_folder(corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "stdlib").mkdir()
    monkeypatch.chdir(tmp_path)
    found = corpus_of("stdlib")
    assert found.name == corpus.name and [part.label for part in found.parts] == [part.label for part in corpus.parts]


def test_no_file_is_in_both_splits(corpus: Corpus, splits: dict[str, list[Example]]) -> None:
    # Found by the text, of snippets that one file alone has.
    files: dict[str, list[str]] = {}
    for part in corpus.parts:
        package = package_of(part.label)
        lines = [line.strip() for piece in part.read() for line in piece.text.split("\n")]
        lines = [line for line in lines if line and package.lower() not in line.lower()]
        for start in range(0, len(lines) - 7, 8):
            files.setdefault(" ".join(lines[start : start + 8]), []).append(part.label)
    owners = {
        name: {files[example.text][0] for example in rows if len(files.get(example.text, ())) == 1}
        for name, rows in splits.items()
    }
    assert owners["train"] and owners["val"] and not owners["train"] & owners["val"]


def test_dev_is_about_a_tenth(splits: dict[str, list[Example]]) -> None:
    assert 0.03 < len(splits["val"]) / len(splits["train"]) < 0.25


def test_the_examples_are_the_same_every_time(splits: dict[str, list[Example]]) -> None:
    assert list(stdlib_examples().splits["val"]()) == splits["val"]


@pytest.fixture(scope="module")
def texts(splits: dict[str, list[Example]]) -> list[str]:
    return [example.text for example in splits["val"][:200]]


@pytest.fixture(scope="module")
def tokenizer(texts: list[str]) -> Tokenizer:
    return train_bert_bpe(iter(texts), vocab_size=600)


def test_training_a_vocabulary_twice_gives_the_same_bytes(texts: list[str], tokenizer: Tokenizer) -> None:
    assert train_bert_bpe(iter(texts), vocab_size=600).to_str() == tokenizer.to_str()


def test_the_vocabulary_has_the_size_asked_for_and_berts_marks_first(tokenizer: Tokenizer) -> None:
    assert tokenizer.get_vocab_size() == 600
    assert [tokenizer.id_to_token(number) for number in range(5)] == MARKS and pad_id(tokenizer) == 0


def test_pairs_are_laid_out_as_bert_reads_them(tokenizer: Tokenizer) -> None:
    encoding = tokenizer.encode("if", "return")
    assert [token for token in encoding.tokens if token in MARKS] == ["[CLS]", "[SEP]", "[SEP]"]
    first = encoding.tokens.index("[SEP]") + 1
    assert encoding.type_ids == [0] * first + [1] * (len(encoding.ids) - first)


def test_text_is_read_in_lower_case(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode("RETURN Self").ids == tokenizer.encode("return self").ids


def test_a_trained_vocabulary_is_kept(
    source: ExampleSource, splits: dict[str, list[Example]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OELM_CACHE", str(tmp_path))
    heard: list[str] = []
    few = replace(source, splits={"train": lambda: iter(splits["train"][:200])})
    paths = [own_tokenizer(few, 400, lambda what, *_: heard.append(what)) for _ in range(2)]
    assert paths[0] == paths[1] and heard == ["training the tokenizer"]
