"""Which file of a folder is which split is read off the names that the public releases use; two claims are refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from oelm.data.corpora import folder_corpus
from oelm.data.local import find_splits, split_in_name
from oelm.data.sets import CORPORA
from oelm.errors import DataError

LM = ("train", "val", "test")
NLI = ("train", "val", "val_mismatched", "test")


def put(folder: Path, *names: str) -> Path:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"text of {name}\n")
    return folder


@pytest.mark.parametrize(
    ("name", "split"),
    [
        ("TinyStories-train.txt", "train"),
        ("TinyStories-valid.txt", "val"),
        ("TinyStoriesV2-GPT4-train.txt", "train"),
        ("TinyStoriesV2-GPT4-valid.txt", "val"),
        ("wiki.train.tokens", "train"),
        ("wiki.valid.tokens", "val"),
        ("wiki.test.tokens", "test"),
        ("wiki.train.raw", "train"),
        ("train-first-0.5pct.tokens.txt", "train"),
        ("train-00000-of-00004.parquet", "train"),
        ("validation-00000-of-00001.parquet", "val"),
        ("validation_matched-00000-of-00001.parquet", "val"),
        ("validation_mismatched-00000-of-00001.parquet", "val_mismatched"),
        ("test_matched-00000-of-00001.parquet", "test"),
        ("test_mismatched-00000-of-00001.parquet", "test"),
        ("multinli_1.0_train.jsonl", "train"),
        ("multinli_1.0_dev_matched.jsonl", "val"),
        ("multinli_1.0_dev_mismatched.jsonl", "val_mismatched"),
        ("dev-matched.jsonl", "val"),
        ("dev_mismatched.tsv", "val_mismatched"),
        ("xnli.dev.tsv", "val"),
        ("xnli.test.tsv", "test"),
        ("multinli.train.en.tsv", "train"),
        ("train.tsv", "train"),
        ("dev.tsv", "val"),
        ("TRAIN.TXT", "train"),
        ("training.txt", "train"),
        ("README.txt", None),
        ("latest.txt", None),
        ("trainer.txt", None),
        ("constraint.txt", None),
        ("devices.csv", None),
        ("validated.tsv", None),
    ],
)
def test_a_public_name_says_its_split(name: str, split: str | None) -> None:
    assert split_in_name(name) == split


def test_the_numbered_parts_of_a_split_stand_in_order(tmp_path: Path) -> None:
    names = [f"train-{number:05}-of-00012.parquet" for number in range(12)]
    put(tmp_path, *names[::-1])
    assert [path.name for path in find_splits(tmp_path, wanted=LM)["train"]] == names


def test_splits_are_found_in_folders_below(tmp_path: Path) -> None:
    put(tmp_path, "plain_text/train-00000-of-00002.parquet", "plain_text/train-00001-of-00002.parquet", "more/valid.txt")
    found = find_splits(tmp_path, wanted=LM)
    assert (len(found["train"]), len(found["val"])) == (2, 1)


def test_only_the_wanted_splits_are_looked_at(tmp_path: Path) -> None:
    put(tmp_path, "train.tsv", "dev_matched.tsv", "dev_mismatched.tsv", "test_matched.tsv", "test_mismatched.tsv")
    assert sorted(find_splits(tmp_path, wanted=NLI[:3])) == ["train", "val", "val_mismatched"]


def test_matched_and_mismatched_are_two_splits(tmp_path: Path) -> None:
    put(tmp_path, "dev_matched.tsv", "dev_mismatched.tsv")
    found = find_splits(tmp_path, wanted=NLI)
    assert [path.name for path in found["val"] + found["val_mismatched"]] == ["dev_matched.tsv", "dev_mismatched.tsv"]


def test_hidden_files_and_files_of_other_kinds_are_passed_over(tmp_path: Path) -> None:
    put(tmp_path, "train.txt", ".train.txt", ".cache/train.txt", "train.txt.gz", "train.md", "train.bin", "README.txt")
    assert find_splits(tmp_path, wanted=LM) == {"train": [tmp_path / "train.txt"]}


@pytest.mark.parametrize(
    "names",
    [
        ("train.txt", "TinyStories-train.txt"),
        ("train.txt", "copy/train.txt"),
        ("train.jsonl", "train.parquet"),
        ("a/train-00000-of-00001.parquet", "b/train-00000-of-00001.parquet"),
        ("valid.txt", "dev.txt", "train.txt"),
    ],
    ids="-".join,
)
def test_two_files_that_claim_one_split_are_refused_by_name(tmp_path: Path, names: tuple[str, ...]) -> None:
    put(tmp_path, *names)
    with pytest.raises(DataError, match="more than one file says it is the (train|val) split") as refusal:
        find_splits(tmp_path, wanted=LM)
    assert names[0] in str(refusal.value) and names[1] in str(refusal.value) and "leave one" in str(refusal.value)


def test_a_language_is_chosen_among_files_by_the_word_in_their_names(tmp_path: Path) -> None:
    put(tmp_path, "multinli.train.en.tsv", "multinli.train.de.tsv", "multinli.train.fr.tsv", "xnli.dev.tsv")
    found = find_splits(tmp_path, wanted=NLI, only="de")
    # The dev file holds every language, and its name none.
    assert {split: [path.name for path in paths] for split, paths in found.items()} == {
        "train": ["multinli.train.de.tsv"],
        "val": ["xnli.dev.tsv"],
    }


def test_a_language_is_chosen_among_folders_by_their_names(tmp_path: Path) -> None:
    put(tmp_path, "en/train-00000-of-00001.parquet", "de/train-00000-of-00001.parquet")
    assert find_splits(tmp_path, wanted=NLI, only="en")["train"] == [tmp_path / "en" / "train-00000-of-00001.parquet"]


def test_a_missing_folder_is_refused_by_path(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="gone: no such folder; give the folder that holds the files"):
        find_splits(tmp_path / "gone", wanted=LM)


def test_a_folder_without_a_training_file_is_refused_with_what_was_sought(tmp_path: Path) -> None:
    put(tmp_path, "valid.txt", "stories.txt")
    with pytest.raises(DataError, match="no training file of tinystories .*'train' in its name"):
        folder_corpus(CORPORA["tinystories"], tmp_path)


def test_a_folder_with_its_own_validation_is_split_as_it_says(tmp_path: Path) -> None:
    put(tmp_path, "wiki.train.tokens", "wiki.valid.tokens", "wiki.test.tokens")
    parts = folder_corpus(CORPORA["wikitext103"], tmp_path).parts
    assert [(part.label, part.split) for part in parts] == [
        ("wiki.train.tokens", "train"),
        ("wiki.valid.tokens", "val"),
        ("wiki.test.tokens", "test"),
    ]


def test_a_folder_without_validation_is_split_by_hash(tmp_path: Path) -> None:
    put(tmp_path, "train-00000-of-00002.jsonl", "train-00001-of-00002.jsonl")
    assert [part.split for part in folder_corpus(CORPORA["openwebtext"], tmp_path).parts] == [None, None]
