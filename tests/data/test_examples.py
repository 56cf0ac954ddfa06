"""A label means what its file says it means or is refused; tables of the usual public formats give their examples."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st

from oelm.data.examples import (
    Example,
    ExampleSource,
    LabelMap,
    folder_examples,
    hub_examples,
    read_examples,
)
from oelm.data.public_sets import NLI_LABELS, TASKS, HubSource, TaskEntry
from oelm.errors import DataError

SST2, MNLI, XNLI = TASKS["sst2"], TASKS["mnli"], TASKS["xnli"]
# As one release of an NLI set orders its integers, and not as the task does.
OTHER_ORDER = ("contradiction", "entailment", "neutral")
NLI = LabelMap(NLI_LABELS, NLI_LABELS)


def write_lines(path: Path, *lines: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return path


def write_jsonl(path: Path, *rows: dict[str, Any]) -> Path:
    return write_lines(path, *map(json.dumps, rows))


def write_parquet(path: Path, columns: dict[str, list[Any]], *, names: Sequence[str] | None = None) -> Path:
    """Write a Parquet file; `names` are recorded as `datasets` records the meaning of integer labels."""
    path.parent.mkdir(parents=True, exist_ok=True)
    table = pyarrow.table(columns)
    if names is not None:
        features = {"label": {"names": list(names), "_type": "ClassLabel"}}
        table = table.replace_schema_metadata({b"huggingface": json.dumps({"info": {"features": features}}).encode()})
    pyarrow.parquet.write_table(table, path)
    return path


def nli_parquet(path: Path, labels: list[Any], *, names: Sequence[str] | None = None) -> Path:
    texts = [f"text {n}" for n in range(len(labels))]
    return write_parquet(path, {"premise": texts, "hypothesis": texts, "label": labels}, names=names)


def from_folder(
    entry: TaskEntry, folder: Path, *, language: str = "en", labels: tuple[str, ...] | None = None
) -> ExampleSource:
    return folder_examples(entry, folder, language=language, labels=labels)


def words(source: ExampleSource, split: str = "train") -> list[str | None]:
    """Return the label of every example of a split by name; None where it has none."""
    return [None if example.label < 0 else source.names[example.label] for example in source.splits[split]()]


def refusal(source: ExampleSource, split: str = "train") -> str:
    with pytest.raises(DataError) as problem:
        list(source.splits[split]())
    return str(problem.value)


def test_a_label_is_read_as_text_as_an_integer_and_as_digits() -> None:
    cases: list[Any] = ["neutral", 1, "1", "01"]
    for raw in cases:
        assert NLI.position(raw, where="here") == NLI_LABELS.index("neutral"), raw


@given(order=st.permutations(NLI_LABELS), number=st.integers(0, 2))
def test_an_integer_means_the_name_at_its_place_in_the_file_s_order(order: list[str], number: int) -> None:
    labels = LabelMap(NLI_LABELS, tuple(order))
    assert NLI_LABELS[labels.position(number, where="here")] == order[number]


@given(order=st.permutations(NLI_LABELS), name=st.sampled_from(NLI_LABELS))
def test_a_name_means_itself_whatever_the_order_of_integers(order: list[str], name: str) -> None:
    assert NLI_LABELS[LabelMap(NLI_LABELS, tuple(order)).position(name, where="here")] == name


def test_what_says_that_there_is_no_label_is_unlabelled() -> None:
    cases: list[Any] = ["-", "", -1, "-1", None]
    for raw in cases:
        assert NLI.position(raw, where="here") == -1, raw


def test_an_unknown_label_is_refused_with_value_place_and_the_known_ones() -> None:
    cases: list[Any] = [
        3,
        "3",
        -2,
        "Neutral",
        " neutral",
        "1.0",
        1.0,
        "\u0661",
        "\u00b2",
        "9" * 5000,
        True,
        False,
        [1],
        {"a": 1},
    ]
    for raw in cases:
        with pytest.raises(DataError) as problem:
            NLI.position(raw, where="table.tsv: row 7")
        message = str(problem.value)
        assert message.startswith(f"table.tsv: row 7: unknown label {raw!r}; known: 0 or 'entailment', 1 or 'neutral'"), raw
        assert "--labels" in message, raw


def test_xnli_s_other_spelling_of_contradiction_is_known(tmp_path: Path) -> None:
    write_lines(tmp_path / "multinli.train.en.tsv", "premise\thypo\tlabel", "A cat.\tNo cat.\tcontradictory")
    assert words(from_folder(XNLI, tmp_path)) == ["contradiction"]


def test_that_spelling_is_not_mnli_s(tmp_path: Path) -> None:
    write_lines(tmp_path / "train.tsv", "premise\thypo\tlabel", "A cat.\tNo cat.\tcontradictory")
    assert "unknown label 'contradictory'" in refusal(from_folder(MNLI, tmp_path))


def test_integers_of_a_parquet_file_are_mapped_by_its_own_names(tmp_path: Path) -> None:
    nli_parquet(tmp_path / "train-00000-of-00001.parquet", [0, 1, 2, 0], names=OTHER_ORDER)
    assert words(from_folder(MNLI, tmp_path)) == ["contradiction", "entailment", "neutral", "contradiction"]


def test_integers_of_a_parquet_file_without_names_have_the_task_s_order(tmp_path: Path) -> None:
    nli_parquet(tmp_path / "train.parquet", [0, 1, 2])
    assert words(from_folder(MNLI, tmp_path)) == list(NLI_LABELS)


def test_each_part_of_a_split_has_its_own_order(tmp_path: Path) -> None:
    nli_parquet(tmp_path / "train-00000-of-00002.parquet", [0], names=OTHER_ORDER)
    nli_parquet(tmp_path / "train-00001-of-00002.parquet", [0], names=NLI_LABELS)
    assert words(from_folder(MNLI, tmp_path)) == ["contradiction", "entailment"]


def test_what_integers_were_taken_to_mean_is_recorded_by_file(tmp_path: Path) -> None:
    nli_parquet(tmp_path / "train.parquet", [0], names=OTHER_ORDER)
    write_jsonl(tmp_path / "dev-matched.jsonl", {"premise": "a", "hypothesis": "b", "label": 0})
    assert from_folder(MNLI, tmp_path).integers == {
        "train.parquet": "0=contradiction, 1=entailment, 2=neutral",
        "dev-matched.jsonl": "0=entailment, 1=neutral, 2=contradiction",
    }


def test_labels_given_by_the_user_overrule_those_of_the_file(tmp_path: Path) -> None:
    nli_parquet(tmp_path / "train.parquet", [0, 1], names=OTHER_ORDER)
    given_order = ("neutral", "contradiction", "entailment")
    assert words(from_folder(MNLI, tmp_path, labels=given_order)) == ["neutral", "contradiction"]


def test_labels_given_by_the_user_order_the_integers_of_text_tables(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "train.jsonl", *({"premise": "a", "hypothesis": "b", "label": n} for n in (0, 2)))
    assert words(from_folder(MNLI, tmp_path, labels=OTHER_ORDER)) == ["contradiction", "neutral"]


def test_names_in_a_file_that_are_not_the_task_s_are_refused(tmp_path: Path) -> None:
    cases: list[tuple[str, ...]] = [("yes", "no", "maybe"), NLI_LABELS[:2], (*NLI_LABELS, "hidden"), NLI_LABELS[:1] * 3]
    for names in cases:
        place = Path(mkdtemp(dir=tmp_path))
        nli_parquet(place / "train.parquet", [0], names=names)
        with pytest.raises(DataError) as problem:
            from_folder(MNLI, place)
        message = str(problem.value)
        assert (
            f"train.parquet: its labels are {', '.join(names)}; the task has entailment, neutral, contradiction" in message
        ), names
        assert "--labels" in message, names


def test_given_labels_that_are_not_the_task_s_are_refused(tmp_path: Path) -> None:
    nli_parquet(tmp_path / "train.parquet", [0])
    with pytest.raises(DataError, match="the task has entailment, neutral, contradiction"):
        from_folder(MNLI, tmp_path, labels=("yes", "no", "maybe"))


def test_names_of_a_file_may_be_spelled_otherwise(tmp_path: Path) -> None:
    nli_parquet(tmp_path / "en" / "train.parquet", [0, 1], names=("contradictory", "entailment", "neutral"))
    assert words(from_folder(XNLI, tmp_path)) == ["contradiction", "entailment"]


def test_a_glue_table_is_read_with_quotes_as_plain_characters(tmp_path: Path) -> None:
    write_lines(tmp_path / "train.tsv", "sentence\tlabel", 'he said "no\t0', '"quoted" \t1', 'it \'s ""fine\t1')
    assert list(from_folder(SST2, tmp_path).splits["train"]()) == [
        Example('he said "no', None, 0),
        Example('"quoted" ', None, 1),
        Example('it \'s ""fine', None, 1),
    ]


def test_glue_s_wide_nli_table_is_read_by_its_column_names(tmp_path: Path) -> None:
    header = "index\tpairID\tgenre\tsentence1\tsentence2\tlabel1\tgold_label"
    write_lines(tmp_path / "train.tsv", header, "0\t1e\tfiction\tA cat.\tAn animal.\tneutral\tentailment")
    assert list(from_folder(MNLI, tmp_path).splits["train"]()) == [Example("A cat.", "An animal.", 0)]


@pytest.mark.parametrize("labels", [["neutral", "contradiction"], [1, 2], ["1", "2"]], ids=["text", "integers", "digits"])
def test_nli_in_jsonl_is_read_with_labels_as_text_and_as_integers(labels: list[Any], tmp_path: Path) -> None:
    write_jsonl(tmp_path / "train.jsonl", *({"premise": "A.", "hypothesis": "B.", "label": label} for label in labels))
    assert list(from_folder(MNLI, tmp_path).splits["train"]()) == [Example("A.", "B.", 1), Example("A.", "B.", 2)]


def test_multinli_s_own_jsonl_is_read_and_pairs_without_agreement_have_no_label(tmp_path: Path) -> None:
    rows = ({"sentence1": "A.", "sentence2": "B.", "gold_label": label, "genre": "x"} for label in ("neutral", "-"))
    write_jsonl(tmp_path / "multinli_1.0_train.jsonl", *rows)
    assert words(from_folder(MNLI, tmp_path)) == ["neutral", None]


def xnli_table(folder: Path) -> Path:
    return write_lines(
        folder / "xnli.dev.tsv",
        "language\tgold_label\tsentence1\tsentence2",
        "en\tneutral\tA cat.\tA dog.",
        "de\tneutral\tEine Katze.\tEin Hund.",
        "en\tcontradiction\tA cat.\tNo cat.",
    )


@pytest.mark.parametrize(("language", "texts"), [("en", ["A cat.", "A cat."]), ("de", ["Eine Katze."])])
def test_xnli_s_table_gives_the_rows_of_one_language(language: str, texts: list[str], tmp_path: Path) -> None:
    xnli_table(tmp_path)
    assert [example.text for example in from_folder(XNLI, tmp_path, language=language).splits["val"]()] == texts


def test_the_language_is_part_of_the_name(tmp_path: Path) -> None:
    xnli_table(tmp_path)
    assert from_folder(XNLI, tmp_path, language="de").name == "xnli-de"


def test_xnli_trains_on_translated_pairs_of_the_language_asked_for(tmp_path: Path) -> None:
    for language, text in (("en", "A cat."), ("de", "Eine Katze.")):
        write_lines(tmp_path / f"multinli.train.{language}.tsv", "premise\thypo\tlabel", f"{text}\tX.\tneutral")
    assert [example.text for example in from_folder(XNLI, tmp_path, language="de").splits["train"]()] == ["Eine Katze."]


def test_a_file_named_after_another_language_is_refused(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "dev-de.jsonl", {"premise": "Eine Katze.", "hypothesis": "Ein Hund.", "label": 0})
    with pytest.raises(DataError, match=r"dev-de\.jsonl: its name says 'de', not 'en'; give --language de"):
        from_folder(XNLI, tmp_path)


def test_xnli_s_test_is_read_for_it_has_labels(tmp_path: Path) -> None:
    xnli_table(tmp_path).rename(tmp_path / "xnli.test.tsv")
    assert words(from_folder(XNLI, tmp_path), "test") == ["neutral", "contradiction"]


def glue_mnli(folder: Path) -> Path:
    """Write the files of GLUE's MNLI folder: two dev sets, and two tests without labels."""
    for name in ("train", "dev_matched", "dev_mismatched"):
        write_lines(folder / f"{name}.tsv", "sentence1\tsentence2\tgold_label", f"{name}\tB.\tneutral")
    for name in ("test_matched", "test_mismatched"):
        write_lines(folder / f"{name}.tsv", "sentence1\tsentence2", "A.\tB.")
    return folder


def test_both_dev_sets_of_mnli_are_splits_of_their_own(tmp_path: Path) -> None:
    splits = from_folder(MNLI, glue_mnli(tmp_path)).splits
    assert {split: [example.text for example in read()] for split, read in splits.items()} == {
        "train": ["train"],
        "val": ["dev_matched"],
        "val_mismatched": ["dev_mismatched"],
    }


def test_a_folder_without_files_of_the_task_says_what_it_looked_for(tmp_path: Path) -> None:
    write_lines(tmp_path / "notes.txt", "nothing")
    with pytest.raises(DataError, match=r"no file of sst2 \(a \.tsv, \.jsonl or \.parquet with 'train', 'dev'"):
        from_folder(SST2, tmp_path)


def test_an_unknown_label_in_a_file_is_told_with_its_row(tmp_path: Path) -> None:
    write_lines(tmp_path / "train.tsv", "sentence\tlabel", "fine\t1", "so so\t2")
    message = refusal(from_folder(SST2, tmp_path))
    assert f"{tmp_path / 'train.tsv'}: row 2: unknown label '2'; known: 0 or 'negative', 1 or 'positive'" in message


def test_a_text_that_is_none_is_refused_with_row_and_column(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "train.jsonl", {"sentence": "fine", "label": 1}, {"sentence": 5, "label": 1})
    assert "train.jsonl: row 2: 'sentence' is int, expected text" in refusal(from_folder(SST2, tmp_path))


def test_wrong_columns_of_a_task_are_refused_with_those_there_are(tmp_path: Path) -> None:
    write_lines(tmp_path / "train.tsv", "review\tstars", "fine\t1")
    with pytest.raises(DataError) as problem:
        from_folder(SST2, tmp_path)
    message = str(problem.value)
    assert "columns 'review', 'stars'; expected (sentence, label)" in message and "--columns text=...,label=..." in message


def hub_copy(entry: TaskEntry, folder: Path) -> TaskEntry:
    """Return the task as if its repository of the hub were a folder."""
    return replace(entry, hub=HubSource(str(folder), "main", "default", {"train": "train"}))


def test_integers_from_the_hub_are_mapped_by_the_hub_s_names(tmp_path: Path) -> None:
    nli_parquet(tmp_path / "data" / "train-00000-of-00001.parquet", [0, 1, 2], names=OTHER_ORDER)
    assert words(hub_examples(hub_copy(MNLI, tmp_path), language="en")) == list(OTHER_ORDER)


def test_names_of_the_hub_that_are_not_the_task_s_are_refused(tmp_path: Path) -> None:
    nli_parquet(tmp_path / "data" / "train-00000-of-00001.parquet", [0], names=("yes", "no", "maybe"))
    assert "its labels are yes, no, maybe" in refusal(hub_examples(hub_copy(MNLI, tmp_path), language="en"))


def test_xnli_from_the_hub_takes_the_configuration_of_its_language() -> None:
    assert hub_examples(XNLI, language="sw").revision == f"{XNLI.hub.revision}/sw"


def test_rows_of_other_languages_are_left_out_of_any_table(tmp_path: Path) -> None:
    columns = {"text": "sentence1", "pair": "sentence2", "label": "gold_label"}
    found = read_examples(xnli_table(tmp_path), columns, NLI, language="de")
    assert list(found) == [Example("Eine Katze.", "Ein Hund.", 1)]
