"""What a user asks for means one thing or is refused: every rule of how names, files and options go together."""

from __future__ import annotations

from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest

from oelm.data.example_sets import ExampleSet
from oelm.data.request import Request
from oelm.data.sources import documents
from oelm.data.tokens import TokenSet
from oelm.errors import ConfigError, DataError, OelmError
from tests.conftest import made_text
from tests.data.test_examples import glue_mnli, write_lines
from tests.data.test_tasks import write_vocabulary

FILE = Path("some/file")


def refusal_of(**asked: Any) -> OelmError:
    with pytest.raises(OelmError) as problem:
        Request(**asked).prepare()
    return problem.value


def test_nothing_to_prepare_is_refused_with_what_could_be_given() -> None:
    problem = refusal_of()
    assert isinstance(problem, ConfigError)
    assert str(problem) == ("give one thing to prepare: a name of `oelm data list`, or one of --text, --examples")


@pytest.mark.parametrize(
    ("asked", "given"),
    [
        ({"name": "sst2", "text": FILE}, "--text, sst2"),
        ({"text": FILE, "examples": FILE}, "--text, --examples"),
    ],
)
def test_two_sources_are_refused_with_both(asked: dict[str, Any], given: str) -> None:
    with pytest.raises(ConfigError, match=rf"give one thing to prepare \(given: {given}\): a name"):
        Request(**asked)


WITHOUT_MEANING: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "--max-documents of a task": ({"name": "sst2"}, {"max_documents": 5}),
    "--max-tokens of a task": ({"name": "mnli"}, {"max_tokens": 5}),
    "--out of a task": ({"name": "xnli"}, {"out": FILE}),
    "--max-documents of examples": ({"examples": FILE}, {"max_documents": 5}),
    "--from of examples": ({"examples": FILE}, {"folder": FILE}),
    "--from of a text": ({"text": FILE}, {"folder": FILE}),
    "--dev of a text": ({"text": FILE}, {"dev": FILE}),
    "--dev of a named task": ({"name": "sst2", "folder": FILE}, {"dev": FILE}),
    "--columns of a text": ({"text": FILE}, {"columns": "text=a,label=b"}),
    "--columns of a corpus": ({"name": "tinystories"}, {"columns": "text=a,label=b"}),
    "--columns of the hub": ({"name": "sst2"}, {"columns": "text=a,label=b"}),
    "--labels of a corpus": ({"name": "wikitext103"}, {"labels": "a,b"}),
    "--labels of the hub": ({"name": "sst2"}, {"labels": "positive,negative"}),
    "--max-length of a corpus": ({"name": "openwebtext"}, {"max_length": 128}),
    "--max-length of documents": ({"text": Path("some/file.jsonl")}, {"max_length": 128}),
    "--column of a text": ({"text": FILE}, {"column": "body"}),
    "--column of a corpus": ({"name": "tinystories"}, {"column": "body"}),
    "--column of examples": ({"examples": FILE}, {"column": "body"}),
    "--language of sst2": ({"name": "sst2"}, {"language": "de"}),
    "--language of a corpus": ({"name": "tinystories"}, {"language": "de"}),
}


def test_an_option_without_meaning_is_refused_not_passed_over() -> None:
    for case in WITHOUT_MEANING:
        source, option = WITHOUT_MEANING[case]
        with pytest.raises(ConfigError, match=rf"^{case.split()[0]} has no meaning for \S+; leave it out$"):
            Request(**source, **option)


def test_the_same_source_without_the_option_is_taken() -> None:
    for case in WITHOUT_MEANING:
        Request(**WITHOUT_MEANING[case][0])


def test_documents_of_a_table_are_read_from_the_column_asked_for(tmp_path: Path) -> None:
    rows = [f'{{"body": "text {number}", "text": 0}}' for number in range(3)]
    path = write_lines(tmp_path / "own.jsonl", *rows)
    assert list(documents(Request(text=path, column="body").corpus())) == ["text 0", "text 1", "text 2"]


def test_an_unknown_language_is_refused_with_those_there_are(tmp_path: Path) -> None:
    problem = refusal_of(name="xnli", folder=tmp_path, language="nl", tokenizer="model")
    assert isinstance(problem, ConfigError)
    assert str(problem).startswith("--language 'nl': xnli has ar, bg, de,")


@pytest.mark.parametrize("source", [{"name": "sst2"}, {"name": "mnli", "folder": FILE}, {"examples": FILE}])
def test_a_task_without_a_tokenizer_is_refused_with_how_to_give_it(source: dict[str, Any]) -> None:
    problem = refusal_of(**source)
    assert isinstance(problem, ConfigError) and "--tokenizer FOLDER" in str(problem)


@pytest.mark.parametrize(("name", "near"), [("sst3", "sst2"), ("tinystory", "tinystories"), ("WikiText-103", "wikitext103")])
def test_an_unknown_name_is_refused_with_a_near_one(name: str, near: str) -> None:
    problem = refusal_of(name=name)
    assert isinstance(problem, DataError)
    assert str(problem).startswith(f"no data set called {name!r} (did you mean '{near}'?): `oelm data list`")


def test_an_unknown_name_that_is_like_none_gets_no_hint() -> None:
    assert str(refusal_of(name="qqqq")).startswith("no data set called 'qqqq': `oelm data list`")


def test_an_unknown_name_with_local_files_is_refused_alike(tmp_path: Path) -> None:
    assert "did you mean 'tinystories'?" in str(refusal_of(name="tinystorys", folder=tmp_path))


def test_the_standard_library_has_no_local_copies(tmp_path: Path) -> None:
    problem = refusal_of(name="stdlib", folder=tmp_path)
    assert isinstance(problem, ConfigError) and "--from has no meaning" in str(problem)


def test_columns_written_otherwise_are_refused_with_how_to_write_them(tmp_path: Path) -> None:
    for columns in ("", "text", "text=a", "label=b", "text=a,label", "text=a,label=b,extra=c", "a,b"):
        place = Path(mkdtemp(dir=tmp_path))
        table = write_lines(place / "own.tsv", "a\tb", "1\t2")
        problem = refusal_of(examples=table, columns=columns, tokenizer="model")
        assert isinstance(problem, ConfigError), columns
        assert str(problem) == f"--columns {columns!r}: write it as text=A,label=B, or text=A,pair=B,label=C for pairs", columns


@pytest.mark.parametrize("columns", ["text=a b,label=c", " text=a b , label=c ", "label=c,text=a b"])
def test_columns_may_hold_spaces_and_stand_in_any_order(columns: str, tmp_path: Path) -> None:
    table = write_lines(tmp_path / "own.tsv", "a b\tc", "one\tx", "two\ty")
    source = Request(examples=table, dev=table, columns=columns).example_source()
    assert [example.text for example in source.splits["train"]()] == ["one", "two"]


def test_columns_given_for_local_copies_of_a_task_are_read(tmp_path: Path) -> None:
    write_lines(tmp_path / "train.tsv", "review\tstars", "fine\t1")
    source = Request(name="sst2", folder=tmp_path, columns="text=review,label=stars").example_source()
    assert [(example.text, example.label) for example in source.splits["train"]()] == [("fine", 1)]


@pytest.mark.parametrize("labels", ["positive,negative", " positive , negative "])
def test_labels_given_for_local_copies_of_a_task_order_its_integers(labels: str, tmp_path: Path) -> None:
    write_lines(tmp_path / "train.tsv", "sentence\tlabel", "fine\t0")
    source = Request(name="sst2", folder=tmp_path, labels=labels).example_source()
    assert [source.names[example.label] for example in source.splits["train"]()] == ["positive"]


def test_labels_given_as_nothing_are_refused(tmp_path: Path) -> None:
    table = write_lines(tmp_path / "own.tsv", "text\tlabel", "one\tx", "two\ty")
    assert isinstance(refusal_of(examples=table, dev=table, labels="", tokenizer="model"), ConfigError)


def test_a_max_length_of_zero_is_refused_not_taken_for_the_default(tmp_path: Path) -> None:
    problem = refusal_of(
        name="mnli", folder=glue_mnli(tmp_path / "mnli"), tokenizer=str(write_vocabulary(tmp_path)), max_length=0
    )
    assert isinstance(problem, ConfigError) and "max_length 0" in str(problem)


def test_a_task_is_cut_at_128_tokens_unless_said(tmp_path: Path) -> None:
    request = Request(name="mnli", folder=glue_mnli(tmp_path / "mnli"), tokenizer=str(write_vocabulary(tmp_path)))
    prepared = request.prepare()
    assert isinstance(prepared, ExampleSet) and prepared.meta.max_length == 128


def test_a_task_says_what_its_labels_and_splits_are(tmp_path: Path) -> None:
    request = Request(name="mnli", folder=glue_mnli(tmp_path / "mnli"), tokenizer=str(write_vocabulary(tmp_path)))
    prepared = request.prepare()
    assert (prepared.meta.name, list(prepared.meta.splits)) == ("mnli", ["train", "val", "val_mismatched"])


def test_a_text_of_the_user_s_own_trains_its_own_tokenizer_unless_said(tmp_path: Path) -> None:
    (tmp_path / "own.txt").write_text(made_text(3000))
    prepared = Request(text=tmp_path / "own.txt", out=tmp_path / "out").prepare()
    assert isinstance(prepared, TokenSet) and prepared.meta.tokenizer == "bpe:4096"


def test_out_is_where_the_token_set_is_put(tmp_path: Path) -> None:
    (tmp_path / "own.txt").write_text(made_text(3000))
    prepared = Request(text=tmp_path / "own.txt", tokenizer="bpe:300", out=tmp_path / "out").prepare()
    assert prepared.path == tmp_path / "out" and (tmp_path / "out" / "train.bin").is_file()


def test_limits_are_kept_and_recorded(tmp_path: Path) -> None:
    for split in ("train", "valid"):
        write_lines(tmp_path / f"{split}.txt", *(f"{made_text(30, seed=n)}<|endoftext|>" for n in range(9)))
    request = Request(name="tinystories", folder=tmp_path, tokenizer="bpe:300", max_documents=4, out=tmp_path / "out")
    prepared = request.prepare()
    assert isinstance(prepared, TokenSet) and prepared.meta.max_documents == 4
    assert {split: known.documents for split, known in prepared.meta.splits.items()} == {"train": 4, "val": 4}


@pytest.fixture
def parent(tmp_path: Path) -> Path:
    """A folder of sets: two corpora, mnli, and xnli's dev pairs."""
    for name in ("tinystories", "openwebtext"):
        for split in ("train", "valid"):
            stories = (f"{name} {made_text(30, seed=n)}<|endoftext|>" for n in range(9))
            write_lines(tmp_path / "sets" / name / f"{split}.txt", *stories)
    glue_mnli(tmp_path / "sets" / "mnli")
    write_lines(tmp_path / "sets" / "XNLI" / "dev-en.tsv", "premise\thypothesis\tlabel", "A.\tB.\tneutral")
    return tmp_path / "sets"


@pytest.mark.parametrize("name", ["tinystories", "openwebtext"])
def test_a_named_corpus_is_prepared_from_a_folder_of_sets_as_from_its_own(name: str, parent: Path) -> None:
    found, own = (
        Request(name=name, folder=folder, tokenizer="bpe:300", max_tokens=90).prepare() for folder in (parent, parent / name)
    )
    assert isinstance(found, TokenSet) and found.path == own.path and found.meta.max_tokens == 90


def test_a_named_task_is_prepared_from_a_folder_of_sets_as_from_its_own(parent: Path, tmp_path: Path) -> None:
    tokenizer = str(write_vocabulary(tmp_path / "vocabulary"))
    found, own = (
        Request(name="mnli", folder=at, tokenizer=tokenizer, max_length=9).prepare() for at in (parent, parent / "mnli")
    )
    assert isinstance(found, ExampleSet) and found.path == own.path and found.meta.max_length == 9


def test_xnli_takes_mnli_s_training_pairs_from_beside_it(parent: Path, tmp_path: Path) -> None:
    tokenizer = str(write_vocabulary(tmp_path / "vocabulary"))
    found, own = (Request(name="xnli", folder=at, tokenizer=tokenizer).prepare() for at in (parent, parent / "XNLI"))
    assert (list(found.meta.splits), list(own.meta.splits)) == (["train", "val"], ["val"])
    assert found.meta.name == "xnli-en" and "(mnli/train.tsv, dev-en.tsv)" in found.meta.source


def test_english_pairs_are_not_another_language_s(parent: Path, tmp_path: Path) -> None:
    (parent / "XNLI" / "dev-en.tsv").rename(parent / "XNLI" / "dev-de.tsv")
    tokenizer = str(write_vocabulary(tmp_path / "vocabulary"))
    assert list(Request(name="xnli", folder=parent, tokenizer=tokenizer, language="de").prepare().meta.splits) == ["val"]


def test_xnli_s_own_training_pairs_come_before_mnli_s(parent: Path, tmp_path: Path) -> None:
    write_lines(parent / "XNLI" / "train-en.tsv", "premise\thypothesis\tlabel", "A cat.\tB.\tneutral")
    found = Request(name="xnli", folder=parent, tokenizer=str(write_vocabulary(tmp_path / "vocabulary"))).prepare()
    assert "(train-en.tsv, dev-en.tsv)" in found.meta.source


def test_a_set_that_the_folder_does_not_hold_is_refused_and_no_other_taken(parent: Path) -> None:
    with pytest.raises(DataError, match="none of wikitext103 .looked for 'wikitext103' or 'wikitext103v1'"):
        Request(name="wikitext103", folder=parent, tokenizer="bpe:300").prepare()


@pytest.mark.parametrize(("name", "option"), [("mnli", {"max_tokens": 9}), ("tinystories", {"max_length": 9})])
def test_a_limit_of_the_other_kind_is_refused(name: str, option: dict[str, int], parent: Path) -> None:
    with pytest.raises(ConfigError, match=f"has no meaning for {name}"):
        Request(name=name, folder=parent, tokenizer="bpe:300", **option).prepare()  # type: ignore[arg-type]
