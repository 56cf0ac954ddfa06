"""Which file of a folder is which split is read off the names that the public releases use; two claims are refused."""

from __future__ import annotations

from pathlib import Path
from tempfile import mkdtemp

import pytest

from oelm.data.public_sets import CORPORA, set_called
from oelm.data.sources import find_splits, folder_corpus, set_folder, split_in_name
from oelm.errors import DataError

LM = ("train", "val", "test")
NLI = ("train", "val", "val_mismatched", "test")


def put(folder: Path, *names: str) -> Path:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"text of {name}\n")
    return folder


def test_a_public_name_says_its_split() -> None:
    cases: list[tuple[str, str | None]] = [
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
    ]
    for name, split in cases:
        assert split_in_name(name) == split, (name, split)


def test_the_numbered_parts_of_a_split_stand_in_order(tmp_path: Path) -> None:
    names = [f"train-{number:05}-of-00012.parquet" for number in range(12)]
    put(tmp_path, *names[::-1])
    assert [path.name for path in find_splits(tmp_path, wanted=LM)["train"]] == names


@pytest.mark.parametrize("end", [".jsonl", ".txt", "-00000-of-00001.parquet"])
def test_a_file_called_more_continues_the_split_behind_its_first_file(tmp_path: Path, end: str) -> None:
    first, more = f"train{end}", f"train{end}".replace(".", "-more.")
    put(tmp_path, more, first, "valid.txt")
    assert [path.name for path in find_splits(tmp_path, wanted=LM)["train"]] == [first, more]


def test_a_file_called_more_continues_no_file_of_another_kind(tmp_path: Path) -> None:
    put(tmp_path, "train.txt", "train-more.jsonl")
    with pytest.raises(DataError, match="more than one file is named as the train split"):
        find_splits(tmp_path, wanted=LM)


def test_a_file_without_a_split_is_training_text_where_its_name_holds_the_word_for_everything(tmp_path: Path) -> None:
    cases: list[tuple[tuple[str, ...], list[str] | None]] = [
        (("articles.jsonl", "other.jsonl"), ["articles.jsonl"]),
        (("en-articles-00000-of-00002.parquet", "en-articles-00001-of-00002.parquet"), None),
        (("particles.jsonl",), []),
        (("articles-test.jsonl",), []),
    ]
    for names, train in cases:
        place = Path(mkdtemp(dir=tmp_path))
        found = find_splits(put(place, *names), wanted=LM, whole="articles")
        assert [path.name for path in found.get("train", [])] == (list(names) if train is None else train), names


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


def test_two_files_that_claim_one_split_are_refused_by_name(tmp_path: Path) -> None:
    cases: list[tuple[str, ...]] = [
        ("train.txt", "TinyStories-train.txt"),
        ("train.txt", "copy/train.txt"),
        ("train.jsonl", "train.parquet"),
        ("a/train-00000-of-00001.parquet", "b/train-00000-of-00001.parquet"),
        ("valid.txt", "dev.txt", "train.txt"),
    ]
    for names in cases:
        place = Path(mkdtemp(dir=tmp_path))
        put(place, *names)
        with pytest.raises(DataError, match="more than one file is named as the (train|val) split") as refusal:
            find_splits(place, wanted=LM)
        assert names[0] in str(refusal.value) and names[1] in str(refusal.value) and "keep one" in str(refusal.value), names


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


def test_the_articles_of_wikipedia_are_split_by_hash(tmp_path: Path) -> None:
    put(tmp_path, "wikipedia/articles.jsonl", "wikitext103/train.txt")
    parts = folder_corpus(CORPORA["wikipedia"], tmp_path).parts
    assert [(part.label, part.split) for part in parts] == [("articles.jsonl", None)]


def test_wikipedia_without_its_articles_is_refused_with_both_words_looked_for(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no training file of wikipedia .*'train' or 'articles' in its name"):
        folder_corpus(CORPORA["wikipedia"], put(tmp_path, "pages.jsonl"))


BESIDE = ("wikitext103/train.txt", "wikitext103/valid.txt", "wikitext103/test.txt")


@pytest.mark.parametrize("given", [".", "wikitext-2"])
def test_wikitext2_is_judged_on_the_files_of_wikitext103_beside_it(tmp_path: Path, given: str) -> None:
    put(tmp_path, "wikitext-2/train.tokens.txt", *BESIDE)
    assert [(part.label, part.split) for part in folder_corpus(CORPORA["wikitext2"], tmp_path / given).parts] == [
        ("train.tokens.txt", "train"),
        ("wikitext103/valid.txt", "val"),
        ("wikitext103/test.txt", "test"),
    ]


def test_wikitext2_in_the_working_folder_is_judged_on_the_files_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(put(tmp_path, "wikitext2/train.txt", *BESIDE) / "wikitext2")
    assert [part.split for part in folder_corpus(CORPORA["wikitext2"], Path(".")).parts] == ["train", "val", "test"]


def test_wikitext2_is_judged_on_its_own_files_where_it_has_them(tmp_path: Path) -> None:
    put(tmp_path, *BESIDE, *(f"wikitext2/{name}.txt" for name in ("train", "valid", "test")))
    parts = folder_corpus(CORPORA["wikitext2"], tmp_path).parts
    assert [part.label for part in parts] == ["train.txt", "valid.txt", "test.txt"]


def test_wikitext103_takes_nothing_from_wikitext2(tmp_path: Path) -> None:
    put(tmp_path, "wikitext103/train.txt", "wikitext2/valid.txt", "wikitext2/test.txt")
    assert [part.split for part in folder_corpus(CORPORA["wikitext103"], tmp_path).parts] == [None]


def test_a_folder_s_name_says_whose_it_is() -> None:
    cases: list[tuple[str, str]] = [
        ("SST-2", "sst2"),
        ("sst2", "sst2"),
        ("TinyStories", "tinystories"),
        ("wikitext-103", "wikitext103"),
        ("wikitext-103-v1", "wikitext103"),
        ("wikitext-2-v1", "wikitext2"),
        ("OpenWebText", "openwebtext"),
        ("owt", "openwebtext"),
        ("Wikipedia", "wikipedia"),
        ("MNLI", "mnli"),
        ("multinli_1.0", "mnli"),
        ("XNLI", "xnli"),
        # The raw texts are others: they have no <unk>.
        ("wikitext-103-raw-v1", ""),
        ("CoLA", ""),
        ("gpt2_bpe", ""),
    ]
    for folder, name in cases:
        assert set_called(folder) == name, (folder, name)


@pytest.mark.parametrize("files", [("train.tsv", "dev.tsv"), ("data/train.tsv",), ("sst2/train.tsv", "train.tsv")], ids=str)
def test_a_folder_with_files_of_the_set_is_its_own(files: tuple[str, ...], tmp_path: Path) -> None:
    assert set_folder("sst2", put(tmp_path / "SomeName", *files)) == tmp_path / "SomeName"


def test_a_folder_of_the_set_s_name_is_its_own_whatever_lies_in_it(tmp_path: Path) -> None:
    folder = put(tmp_path / "XNLI", "multinli/multinli.train.en.tsv", "xnli/xnli.dev.tsv")
    assert set_folder("xnli", folder) == folder


def test_the_working_folder_is_known_by_its_own_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(put(tmp_path / "XNLI", "mnli/train.tsv", "xnli/xnli.dev.tsv"))
    assert set_folder("xnli", Path(".")) == Path(".")


@pytest.mark.parametrize(("name", "inside"), [("sst2", "SST-2"), ("mnli", "multinli_1.0"), ("tinystories", "TinyStories")])
def test_a_set_is_found_inside_a_folder_of_sets(name: str, inside: str, tmp_path: Path) -> None:
    put(tmp_path, "SST-2/train.tsv", "multinli_1.0/train.tsv", "TinyStories/train.txt", "README.md")
    assert set_folder(name, tmp_path) == tmp_path / inside


def test_a_set_missing_among_others_is_refused_with_what_was_looked_for(tmp_path: Path) -> None:
    put(tmp_path, "SST-2/train.tsv", "tinystories/train.txt")
    with pytest.raises(DataError, match="of sst2, tinystories but none of mnli .looked for 'mnli' or 'multinli' or"):
        set_folder("mnli", tmp_path)


def test_two_folders_of_one_set_are_refused_with_both(tmp_path: Path) -> None:
    put(tmp_path, "SST-2/train.tsv", "sst2/train.tsv")
    with pytest.raises(DataError, match=r"more than one folder is named like sst2 \(SST-2, sst2\)"):
        set_folder("sst2", tmp_path)


def test_a_folder_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no such folder"):
        set_folder("sst2", tmp_path / "none")
