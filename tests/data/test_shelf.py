"""What is prepared on this machine is found by name and by path, damaged or not, and never guessed at."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from oelm.data.example_sets import ExampleMeta, ExampleSet
from oelm.data.prepared import (
    examples_there,
    find_examples,
    find_sets,
    find_tokens,
    prepared_sets,
    read_any_meta,
    verify_any,
)
from oelm.data.public_sets import NLI_LABELS
from oelm.data.request import Request
from oelm.data.tokens import TokenMeta, TokenSet
from oelm.errors import DataError
from tests.conftest import made_text
from tests.data.test_examples import glue_mnli, write_lines
from tests.data.test_tasks import write_vocabulary


def write_stories(folder: Path, *, count: int = 12) -> Path:
    """Write a corpus under the names that the public files have."""
    for seed, split in enumerate(("train", "valid")):
        stories = (made_text(60, seed=100 * seed + number) for number in range(count))
        write_lines(folder / f"{split}.txt", *(f"{story}<|endoftext|>" for story in stories))
    return folder


@pytest.fixture(scope="module")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache with one corpus and two tasks."""
    root = tmp_path_factory.mktemp("shelf")
    files, vocabulary = tmp_path_factory.mktemp("files"), str(write_vocabulary(tmp_path_factory.mktemp("vocabulary")))
    write_lines(files / "xnli" / "xnli.dev.tsv", "language\tgold_label\tsentence1\tsentence2", "en\tneutral\tA.\tB.")
    requests = (
        Request(name="tinystories", folder=write_stories(files / "stories"), tokenizer="bpe:300"),
        Request(name="mnli", folder=glue_mnli(files / "mnli"), tokenizer=vocabulary),
        Request(name="xnli", folder=files / "xnli", tokenizer=vocabulary),
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OELM_CACHE", str(root))
        for request in requests:
            request.prepare()
    return root


@pytest.fixture
def cache(shelf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the filled cache, to be damaged."""
    shutil.copytree(shelf, tmp_path / "cache")
    monkeypatch.setenv("OELM_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "cache"


def set_called(cache: Path, start: str) -> Path:
    (found,) = (path for path in cache.glob(f"*/{start}-*") if path.is_dir())
    return found


def test_every_prepared_set_is_on_the_shelf_with_its_record(cache: Path) -> None:
    found = {meta.name: type(meta) for _, meta in prepared_sets()}
    assert found == {"tinystories": TokenMeta, "mnli": ExampleMeta, "xnli-en": ExampleMeta}


def test_an_empty_cache_is_an_empty_shelf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OELM_CACHE", str(tmp_path / "none"))
    assert (list(prepared_sets()), find_sets([])) == ([], [])


def test_what_is_still_being_prepared_is_not_on_the_shelf(cache: Path) -> None:
    shutil.copytree(set_called(cache, "tinystories"), cache / "tokens" / ".partial-tinystories-bpe300-000000000000")
    assert [meta.name for _, meta in prepared_sets()].count("tinystories") == 1


def test_a_set_whose_record_cannot_be_read_is_passed_over_when_listed(cache: Path) -> None:
    (set_called(cache, "mnli") / "meta.json").write_text("{")
    assert sorted(meta.name for _, meta in prepared_sets()) == ["tinystories", "xnli-en"]


def test_without_a_name_all_sets_are_found(cache: Path) -> None:
    assert sorted(find_sets([])) == sorted(set_called(cache, name) for name in ("tinystories", "mnli", "xnli"))


@pytest.mark.parametrize("name", ["tinystories", "mnli", "xnli-en"])
def test_a_set_is_found_by_its_name(name: str, cache: Path) -> None:
    assert find_sets([name]) == [set_called(cache, name)]


def test_a_task_with_languages_is_found_without_the_language(cache: Path) -> None:
    assert find_sets(["xnli"]) == [set_called(cache, "xnli-en")]


def test_a_set_is_found_by_its_path(cache: Path) -> None:
    path = set_called(cache, "mnli")
    assert find_sets([str(path)]) == [path]


def test_what_is_not_there_is_refused_with_where_to_look(cache: Path) -> None:
    with pytest.raises(DataError, match="nothing is prepared under the name or path 'sst2'; `oelm data list`"):
        find_sets(["mnli", "sst2"])


@pytest.mark.parametrize("name", ["tinystories", "mnli"])
def test_a_set_with_a_damaged_record_is_found_by_name_still(name: str, cache: Path) -> None:
    (set_called(cache, name) / "meta.json").write_text("{")
    assert find_sets([name]) == [set_called(cache, name)]


def test_a_damaged_set_is_found_beside_a_whole_one_of_its_name(cache: Path) -> None:
    whole = set_called(cache, "mnli")
    damaged = whole.with_name("mnli-64-000000000000")
    shutil.copytree(whole, damaged)
    (damaged / "meta.json").write_text("{")
    assert sorted(find_sets(["mnli"])) == sorted([whole, damaged])


def test_a_folder_of_other_files_does_not_hide_the_set_of_its_name(cache: Path, tmp_path: Path) -> None:
    glue_mnli(tmp_path / "mnli")
    assert find_sets(["mnli"]) == [set_called(cache, "mnli")]


def test_a_folder_with_a_record_is_meant_rather_than_a_name(cache: Path, tmp_path: Path) -> None:
    shutil.copytree(set_called(cache, "mnli"), tmp_path / "mnli")
    assert find_sets(["mnli"]) == [Path("mnli")]


@pytest.mark.parametrize(("name", "kind"), [("tinystories", TokenSet), ("mnli", ExampleSet)])
def test_a_set_of_either_kind_is_opened(name: str, kind: type, cache: Path) -> None:
    assert isinstance(verify_any(set_called(cache, name)), kind)


@pytest.mark.parametrize("name", ["tinystories", "mnli"])
def test_the_record_of_either_kind_is_read(name: str, cache: Path) -> None:
    assert read_any_meta(set_called(cache, name)).name == name


@pytest.mark.parametrize("name", ["tinystories", "mnli"])
def test_a_set_without_a_record_is_refused_by_its_folder(name: str, cache: Path) -> None:
    folder = set_called(cache, name)
    (folder / "meta.json").unlink()
    with pytest.raises(DataError, match=str(folder)):
        verify_any(folder)


def test_tokens_are_found_by_name_and_tokenizer(cache: Path) -> None:
    assert find_tokens("tinystories", "bpe:300") == set_called(cache, "tinystories")


@pytest.mark.parametrize("name", ["openwebtext", "mnli"])
def test_tokens_of_another_name_are_not_found(name: str, cache: Path) -> None:
    assert find_tokens(name, "bpe:300") is None


def test_a_name_prepared_with_another_tokenizer_is_told_so(cache: Path) -> None:
    with pytest.raises(DataError, match="is prepared here with --tokenizer bpe:300, not with --tokenizer gpt2: "):
        find_tokens("tinystories", "gpt2")


def test_of_two_sets_of_a_name_a_run_finds_the_one_it_knows(cache: Path, tmp_path: Path) -> None:
    first = set_called(cache, "tinystories")
    files = write_stories(tmp_path / "stories")
    second = Request(name="tinystories", folder=files, tokenizer="bpe:300", max_documents=5).prepare()
    try:
        for path in (first, second.path):
            assert find_tokens("tinystories", "bpe:300", known=read_any_meta(path).fingerprint) == path
    finally:
        shutil.rmtree(second.path)


def test_a_name_prepared_twice_is_refused_with_both_paths(cache: Path, tmp_path: Path) -> None:
    first = set_called(cache, "tinystories")
    files = write_stories(tmp_path / "stories")
    second = Request(name="tinystories", folder=files, tokenizer="bpe:300", max_documents=5).prepare()
    with pytest.raises(DataError, match="tinystories was prepared 2 times with tokenizer bpe:300") as problem:
        find_tokens("tinystories", "bpe:300")
    assert str(first) in str(problem.value) and str(second.path) in str(problem.value) and "--data PATH" in str(problem.value)


def test_a_limit_finds_the_extract_prepared_to_it_and_no_other(cache: Path, tmp_path: Path) -> None:
    files, paths = write_stories(tmp_path / "stories"), {}
    for limit in (150, 250):
        paths[limit] = Request(name="tinystories", folder=files, tokenizer="bpe:300", max_tokens=limit).prepare().path
    assert {limit: find_tokens("tinystories", "bpe:300", max_tokens=limit) for limit in paths} == paths


def test_without_a_limit_an_extract_of_the_name_is_found(cache: Path, tmp_path: Path) -> None:
    shutil.rmtree(set_called(cache, "tinystories"))
    files = write_stories(tmp_path / "stories")
    made = Request(name="tinystories", folder=files, tokenizer="bpe:300", max_tokens=150).prepare()
    assert find_tokens("tinystories", "bpe:300") == made.path


def test_an_extract_to_another_limit_is_refused_with_what_there_is_and_the_command(cache: Path, tmp_path: Path) -> None:
    files = write_stories(tmp_path / "stories")
    Request(name="tinystories", folder=files, tokenizer="bpe:300", max_tokens=150).prepare()
    with pytest.raises(DataError) as problem:
        find_tokens("tinystories", "bpe:300", max_tokens=200)
    assert "with --tokenizer bpe:300 and with --tokenizer bpe:300 --max-tokens 150, not with" in str(problem.value)
    assert str(problem.value).endswith("oelm data prepare tinystories --tokenizer bpe:300 --max-tokens 200")


def test_an_extract_that_a_number_of_documents_limits_too_is_another_one(cache: Path, tmp_path: Path) -> None:
    files = write_stories(tmp_path / "stories")
    Request(name="tinystories", folder=files, tokenizer="bpe:300", max_tokens=150, max_documents=1).prepare()
    with pytest.raises(DataError, match="--max-documents 1 --max-tokens 150, not with --tokenizer bpe:300 --max-tokens 150"):
        find_tokens("tinystories", "bpe:300", max_tokens=150)


def test_two_sets_of_the_same_tokens_are_one(cache: Path, tmp_path: Path) -> None:
    first, files = set_called(cache, "tinystories"), write_stories(tmp_path / "stories")
    # A limit that is never reached.
    second = Request(name="tinystories", folder=files, tokenizer="bpe:300", max_tokens=10**6).prepare().path
    assert first != second and find_tokens("tinystories", "bpe:300") in (first, second)


def test_a_set_in_gpt2_s_tokens_is_looked_for_without_its_vocabulary(
    cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "none"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert find_tokens("openwebtext", "gpt2") is None


def find_mnli(vocabulary: Path, *, max_length: int = 128, splits: tuple[str, ...] = ("train", "val"), known: str = "") -> Any:
    return find_examples("mnli", str(vocabulary), max_length=max_length, labels=NLI_LABELS, splits=splits, known=known)


@pytest.fixture
def vocabulary(tmp_path: Path) -> Path:
    """The tokenizer that the shelf's tasks were prepared with, elsewhere."""
    return write_vocabulary(tmp_path / "vocabulary")


def test_examples_are_found_by_name_tokenizer_and_length(cache: Path, vocabulary: Path) -> None:
    assert find_mnli(vocabulary) == set_called(cache, "mnli")


def test_examples_are_found_by_the_tokenizer_that_lies_beside_them(cache: Path) -> None:
    assert find_mnli(set_called(cache, "mnli") / "tokenizer.json") == set_called(cache, "mnli")


def test_examples_cut_at_another_length_are_not_found(cache: Path, vocabulary: Path) -> None:
    assert find_mnli(vocabulary, max_length=64) is None


def test_examples_in_another_tokenizer_s_ids_are_not_found(cache: Path, vocabulary: Path) -> None:
    with (vocabulary / "vocab.txt").open("a") as file:
        file.write("more\n")
    assert find_mnli(vocabulary) is None


def test_examples_with_other_labels_are_not_found(cache: Path, vocabulary: Path) -> None:
    other = ("neutral", "entailment", "contradiction")
    assert find_examples("mnli", str(vocabulary), max_length=128, labels=other, splits=("val",)) is None


def test_examples_without_a_split_that_is_needed_are_not_found(cache: Path, vocabulary: Path) -> None:
    found = [
        find_examples("xnli-en", str(vocabulary), max_length=128, labels=NLI_LABELS, splits=splits)
        for splits in (("val",), ("train", "val"))
    ]
    assert found == [set_called(cache, "xnli-en"), None]


@pytest.fixture
def other_mnli(cache: Path, vocabulary: Path, tmp_path: Path) -> Path:
    """A second set of the name, with one more training example."""
    files = glue_mnli(tmp_path / "files")
    with next(files.glob("train*")).open("a") as file:
        file.write(next(files.glob("train*")).read_text().splitlines()[-1].replace("neutral", "entailment") + "\n")
    return Request(name="mnli", folder=files, tokenizer=str(vocabulary)).prepare().path


def test_examples_prepared_twice_are_refused_with_both_paths(cache: Path, vocabulary: Path, other_mnli: Path) -> None:
    with pytest.raises(DataError, match="mnli was prepared 2 times for this model") as problem:
        find_mnli(vocabulary)
    assert str(other_mnli) in str(problem.value) and "--from FOLDER" in str(problem.value)


def test_of_two_example_sets_a_run_finds_the_one_it_knows(cache: Path, vocabulary: Path, other_mnli: Path) -> None:
    for path, meta in prepared_sets():
        if meta.name == "mnli":
            assert find_mnli(vocabulary, known=meta.fingerprint) == path


def test_examples_that_differ_elsewhere_only_are_one(cache: Path, vocabulary: Path, other_mnli: Path) -> None:
    assert find_mnli(vocabulary, splits=("val",)) in [path for path, meta in prepared_sets() if meta.name == "mnli"]


def test_what_is_prepared_under_a_task_s_name_is_told(cache: Path, vocabulary: Path) -> None:
    told = "train, val, val_mismatched with this tokenizer, cut at 128 tokens"
    assert examples_there("mnli", str(vocabulary)) == told and examples_there("sst2", str(vocabulary)) == ""
