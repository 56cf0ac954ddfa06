"""A table of the user's own becomes a task: columns and labels are named or found, and what has two meanings is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from oelm.data.examples import Example, ExampleSource, file_examples
from oelm.errors import ConfigError, DataError
from tests.data.test_examples import refusal, words, write_jsonl, write_lines, write_parquet

OWN = [{"review": f"number {n}", "stars": "good" if n % 3 else "bad"} for n in range(60)]
OWN_COLUMNS = {"text": "review", "label": "stars"}


def from_file(
    path: Path,
    dev: Path | None = None,
    *,
    columns: dict[str, str] | None = None,
    labels: tuple[str, ...] | None = None,
) -> ExampleSource:
    return file_examples(path, dev, columns=columns, labels=labels)


def whole(source: ExampleSource) -> list[Example]:
    """Return the examples of training and hold-out together."""
    return [*source.splits["train"](), *source.splits["val"]()]


def own_table(path: Path) -> Path:
    if path.suffix == ".jsonl":
        return write_jsonl(path, *OWN)
    if path.suffix == ".parquet":
        return write_parquet(path, {name: [row[name] for row in OWN] for name in ("review", "stars")})
    mark = "\t" if path.suffix == ".tsv" else ","
    return write_lines(path, mark.join(OWN[0]), *(mark.join(row.values()) for row in OWN))


@pytest.mark.parametrize("suffix", ["tsv", "csv", "jsonl", "parquet"])
def test_a_table_of_the_user_s_own_is_read_by_the_columns_named(suffix: str, tmp_path: Path) -> None:
    table = own_table(tmp_path / f"own.{suffix}")
    source = from_file(table, table, columns=OWN_COLUMNS)
    assert [(example.text, source.names[example.label]) for example in source.splits["train"]()] == [
        (row["review"], row["stars"]) for row in OWN
    ]


def test_pairs_are_read_when_a_second_column_is_named(tmp_path: Path) -> None:
    table = write_lines(tmp_path / "own.csv", "q,a,ok", "why,because,yes", "when,no,no")
    source = from_file(table, table, columns={"text": "q", "pair": "a", "label": "ok"})
    assert list(source.splits["train"]()) == [Example("why", "because", 1), Example("when", "no", 0)]


def test_a_csv_follows_its_own_rules_of_quoting(tmp_path: Path) -> None:
    table = write_lines(tmp_path / "own.csv", "text,label", '"one, two ""three""\nfour",a', "five,b")
    assert [example.text for example in from_file(table, table).splits["train"]()] == ['one, two "three"\nfour', "five"]


@pytest.mark.parametrize("text_column", ["text", "sentence"])
def test_usual_column_names_need_not_be_said(text_column: str, tmp_path: Path) -> None:
    table = write_lines(tmp_path / "own.tsv", f"{text_column}\tlabel", "one\ta", "two\tb")
    assert [example.text for example in from_file(table, table).splits["train"]()] == ["one", "two"]


def test_wrong_columns_are_refused_with_those_there_are_and_how_to_name_them(tmp_path: Path) -> None:
    with pytest.raises(DataError) as problem:
        from_file(own_table(tmp_path / "own.tsv"))
    message = str(problem.value)
    assert "columns 'review', 'stars'; expected (text, label)" in message and "--columns text=...,label=..." in message


def test_a_dev_file_with_other_columns_is_refused(tmp_path: Path) -> None:
    dev = write_lines(tmp_path / "dev.tsv", "text\tlabel", "one\tgood")
    with pytest.raises(DataError, match=r"dev\.tsv: columns 'text', 'label'; expected \(review, stars\)"):
        from_file(own_table(tmp_path / "own.tsv"), dev, columns=OWN_COLUMNS)


def test_a_dev_label_that_training_does_not_have_is_refused(tmp_path: Path) -> None:
    dev = write_lines(tmp_path / "dev.tsv", "review\tstars", "one\tugly")
    source = from_file(own_table(tmp_path / "own.tsv"), dev, columns=OWN_COLUMNS)
    assert "dev.tsv: row 1: unknown label 'ugly'; known: 0 or 'bad', 1 or 'good'" in refusal(source, "val")


@pytest.mark.parametrize("suffix", ["tsv", "csv", "jsonl", "parquet"])
def test_an_empty_file_is_refused(suffix: str, tmp_path: Path) -> None:
    (tmp_path / f"own.{suffix}").write_bytes(b"")
    with pytest.raises(DataError, match=rf"own\.{suffix}: the file is empty"):
        from_file(tmp_path / f"own.{suffix}")


def test_a_file_of_a_header_only_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"own\.tsv: no row in it"):
        from_file(write_lines(tmp_path / "own.tsv", "text\tlabel"))


def test_a_column_named_twice_in_a_header_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="the header names the column 'text' twice"):
        from_file(write_lines(tmp_path / "own.tsv", "text\ttext\tlabel", "a\tb\tc"))


def test_a_name_that_stands_twice_in_a_json_object_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"line 1 .*the name 'text' occurs twice"):
        from_file(write_lines(tmp_path / "own.jsonl", '{"text": "a", "text": "b", "label": 0}'))


def test_a_row_with_too_few_fields_is_refused_with_its_line(tmp_path: Path) -> None:
    table = write_lines(tmp_path / "own.tsv", "text\tlabel", "a\tx", "b\ty", "half")
    with pytest.raises(DataError, match=r"own\.tsv: row 3 \(line 4\) has 1 fields, the header 2"):
        from_file(table)


def test_labels_of_a_user_s_table_are_found_and_sorted(tmp_path: Path) -> None:
    table = write_lines(tmp_path / "own.tsv", "text\tlabel", "1\tsad", "2\tangry", "3\tglad", "4\tangry")
    assert from_file(table).names == ("angry", "glad", "sad")


def test_integers_of_a_user_s_table_are_sorted_as_numbers(tmp_path: Path) -> None:
    table = write_lines(tmp_path / "own.tsv", "text\tlabel", *(f"{n}\t{n}" for n in reversed(range(12))))
    assert from_file(table).names == tuple(map(str, range(12)))


def test_rows_without_a_label_are_no_class_of_their_own(tmp_path: Path) -> None:
    table = write_lines(tmp_path / "own.tsv", "text\tlabel", "a\tx", "b\t-", "c\ty")
    assert from_file(table).names == ("x", "y")


@pytest.mark.parametrize("labels", [[0, 2], [1, 2], ["0", "2"], [0, 1, -2], ["0", "1", "-2"]])
def test_integers_with_a_gap_are_refused(labels: list[Any], tmp_path: Path) -> None:
    table = write_jsonl(tmp_path / "own.jsonl", *({"text": "a", "label": label} for label in labels))
    with pytest.raises(DataError, match=r"holds the integers \[.*\]; classes count from 0 without a gap"):
        from_file(table)


def test_integers_among_words_are_refused(tmp_path: Path) -> None:
    table = write_jsonl(tmp_path / "own.jsonl", *({"text": "a", "label": label} for label in ("bad", 1)))
    with pytest.raises(DataError, match="the label '1' would be class 0 of 1, bad; labels are words, or integers"):
        from_file(table)


def test_signs_that_only_look_like_digits_are_words(tmp_path: Path) -> None:
    table = write_lines(tmp_path / "own.tsv", "text\tlabel", "a\t\u00b3", "b\t\u00b2")
    assert from_file(table).names == ("\u00b2", "\u00b3")


@pytest.mark.parametrize("value", [1.5, [1], {"a": 1}])
def test_values_that_cannot_be_labels_are_refused(value: Any, tmp_path: Path) -> None:
    table = write_jsonl(tmp_path / "own.jsonl", {"text": "a", "label": "x"}, {"text": "a", "label": value})
    with pytest.raises(DataError, match=r"row 2: 'label' holds .*, neither text nor an integer; choose another column"):
        from_file(table)


def test_a_table_with_a_single_label_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="holds only the label"):
        from_file(write_lines(tmp_path / "own.tsv", "text\tlabel", "a\tx", "b\tx"))


def test_labels_given_for_a_user_s_table_name_its_integers(tmp_path: Path) -> None:
    table = write_jsonl(tmp_path / "own.jsonl", {"text": "a", "label": 1}, {"text": "b", "label": 0})
    assert words(from_file(table, table, labels=("no", "yes"))) == ["yes", "no"]


@pytest.mark.parametrize("labels", [("only",), ("a", "a"), ("a", "")])
def test_given_labels_that_are_not_two_different_names_are_refused(labels: tuple[str, ...], tmp_path: Path) -> None:
    table = write_lines(tmp_path / "own.tsv", "text\tlabel", "a\t0", "b\t1")
    with pytest.raises(ConfigError, match=r"--labels .*: give each of two or more labels once"):
        from_file(table, labels=labels)


def test_given_labels_that_would_give_digits_two_meanings_are_refused(tmp_path: Path) -> None:
    table = write_lines(tmp_path / "own.tsv", "text\tlabel", "a\t0", "b\t1")
    with pytest.raises(DataError, match="the label '1' would be class 0 of 1, 0"):
        from_file(table, labels=("1", "0"))


def test_training_and_dev_parquet_of_different_order_are_mapped_by_name(tmp_path: Path) -> None:
    columns: dict[str, list[Any]] = {"text": ["a", "b"], "label": [0, 1]}
    train = write_parquet(tmp_path / "one.parquet", columns, names=("bad", "good"))
    dev = write_parquet(tmp_path / "two.parquet", columns, names=("good", "bad"))
    source = from_file(train, dev)
    assert (words(source), words(source, "val")) == (["bad", "good"], ["good", "bad"])


def test_without_a_dev_file_every_example_falls_on_one_side_only(tmp_path: Path) -> None:
    table = write_lines(tmp_path / "own.tsv", "text\tlabel", *(f"number {n}\t{n % 2}" for n in range(500)))
    assert sorted(int(example.text.split()[1]) for example in whole(from_file(table))) == list(range(500))


def test_about_one_example_in_twenty_is_held_out(tmp_path: Path) -> None:
    table = write_lines(tmp_path / "own.tsv", "text\tlabel", *(f"number {n}\t{n % 2}" for n in range(2000)))
    held_out = len(list(from_file(table).splits["val"]()))
    # Binomial of 2000 at 1/20: mean 100, deviation under 10; the hash is fixed, so the answer is the same every time.
    assert 50 < held_out < 150


def test_the_hold_out_depends_on_the_texts_alone(tmp_path: Path) -> None:
    lines = [f"number {n}\t{n % 2}" for n in range(300)]
    one = from_file(write_lines(tmp_path / "own.tsv", "text\tlabel", *lines))
    other = from_file(write_lines(tmp_path / "other.tsv", "text\tlabel", *reversed(lines), "one more\t1"))
    assert {example.text for example in one.splits["val"]()} == {example.text for example in other.splits["val"]()} - {
        "one more"
    }


def test_equal_texts_fall_on_the_same_side(tmp_path: Path) -> None:
    table = write_lines(tmp_path / "own.tsv", "text\tlabel", *(f"number {n % 100}\t{n % 2}" for n in range(400)))
    source = from_file(table)
    train, val = ({example.text for example in source.splits[split]()} for split in ("train", "val"))
    assert val and not train & val


def test_booleans_are_no_labels_of_a_user_s_table(tmp_path: Path) -> None:
    table = write_jsonl(tmp_path / "own.jsonl", {"text": "a", "label": True}, {"text": "b", "label": False})
    with pytest.raises(DataError, match=r"own\.jsonl: row 1: 'label' holds True, neither text nor an integer"):
        from_file(table)
