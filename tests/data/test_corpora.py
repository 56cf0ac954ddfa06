"""The user's own text becomes documents; what is in no way text is passed over or refused."""

from __future__ import annotations

import gzip
import json
import logging
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from oelm.data.sources import documents, file_corpus
from oelm.data.tokenizer import END_OF_TEXT
from oelm.errors import DataError
from tests.conftest import made_text


def test_end_of_text_marks_separate_documents(tmp_path: Path) -> None:
    made = [made_text(20, seed=seed) for seed in range(30)]
    (tmp_path / "a.txt").write_text(END_OF_TEXT.join(made))
    assert list(documents(file_corpus(tmp_path / "a.txt"))) == made


def test_no_document_holds_an_end_of_text_mark(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(f"{END_OF_TEXT}one\n{END_OF_TEXT}{END_OF_TEXT}\ntwo\n{END_OF_TEXT}\n  \n{END_OF_TEXT}three")
    assert list(documents(file_corpus(tmp_path / "a.txt"))) == ["one\n", "two\n", "three\n"]


def test_a_folder_gives_every_text_file_below_it(tmp_path: Path) -> None:
    (tmp_path / "deep" / "er").mkdir(parents=True)
    for number, place in enumerate(["a.txt", "b.md", "no_suffix", "deep/c.txt", "deep/er/d.py"]):
        (tmp_path / place).write_text(f"text number {number}\n")
    assert sorted(documents(file_corpus(tmp_path))) == [f"text number {n}\n" for n in range(5)]


def splits_of(folder: Path) -> dict[str, str | None]:
    return {Path(part.label).name: part.split for part in file_corpus(folder).parts}


def write_files(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"text of {name}\n")


def test_a_folder_of_files_called_after_splits_has_these_splits(tmp_path: Path) -> None:
    write_files(tmp_path, "train.txt", "valid.txt", "test.txt", "README.md", "LICENSE", ".hidden")
    (tmp_path / "picture.png").write_bytes(b"\x89PNG\r\n\x1a\n\0\0")
    assert splits_of(tmp_path) == {"train.txt": "train", "valid.txt": "val", "test.txt": "test"}
    assert list(documents(file_corpus(tmp_path))) == [f"text of {name}.txt\n" for name in ("test", "train", "valid")]


def test_without_a_validation_file_training_gives_some_and_the_test_stays_apart(tmp_path: Path) -> None:
    write_files(tmp_path, "train-00000-of-00002.jsonl", "train-00001-of-00002.jsonl", "test.jsonl")
    assert set(splits_of(tmp_path).values()) == {None, "test"} and splits_of(tmp_path)["test.jsonl"] == "test"


@pytest.mark.parametrize("beside", ["notes.txt", "more/train.txt", "model.py", "dev-mismatched.txt"])
def test_one_file_of_another_name_and_it_is_a_folder_of_text_like_any_other(
    tmp_path: Path, beside: str, caplog: pytest.LogCaptureFixture
) -> None:
    write_files(tmp_path, "train.txt", "test.txt", beside)
    assert set(splits_of(tmp_path).values()) == {None}
    assert "are not used as splits" in caplog.text and Path(beside).name in caplog.text


@pytest.mark.parametrize("names", [("train.txt",), ("test.txt",), ("valid.txt", "test.txt"), ("a.txt", "b.txt")])
def test_files_without_training_or_with_nothing_to_judge_by_are_no_splits(tmp_path: Path, names: tuple[str, ...]) -> None:
    write_files(tmp_path, *names)
    assert set(splits_of(tmp_path).values()) == {None}


def test_hidden_binary_and_empty_files_of_a_folder_are_passed_over(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "a.txt").write_text("kept one\n")
    (tmp_path / "b.txt").write_text("kept two\n")
    (tmp_path / ".hidden.txt").write_text("hidden\n")
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "config").write_text("hidden\n")
    (tmp_path / "image.png").write_bytes(b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR")
    (tmp_path / "zeros.bin").write_bytes(bytes(100))
    (tmp_path / "packed.gz").write_bytes(gzip.compress(b"packed\n"))
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "blank.txt").write_text(" \n\n")
    with caplog.at_level(logging.WARNING):
        assert list(documents(file_corpus(tmp_path))) == ["kept one\n", "kept two\n"]
    # Hidden and empty files go without a word; of the others the user should hear.
    assert "left out 4 of 7 files" in caplog.text and "image.png" in caplog.text


def test_a_hidden_folder_above_the_text_hides_nothing(tmp_path: Path) -> None:
    folder = tmp_path / ".cache" / "text"
    folder.mkdir(parents=True)
    (folder / "a.txt").write_text("one\n")
    (folder / "b.txt").write_text("two\n")
    assert len(list(documents(file_corpus(folder)))) == 2


def test_the_order_of_documents_does_not_depend_on_the_order_of_creation(tmp_path: Path) -> None:
    names = [f"{n:02}.txt" for n in range(20)]
    for folder, order in (("up", names), ("down", names[::-1])):
        (tmp_path / folder / "same").mkdir(parents=True)
        for name in order:
            (tmp_path / folder / "same" / name).write_text(f"text of {name}\n")
    up, down = (list(documents(file_corpus(tmp_path / folder / "same"))) for folder in ("up", "down"))
    assert up == down


def test_the_documents_of_a_folder_stand_in_the_order_of_their_paths(tmp_path: Path) -> None:
    for number in (9, 2, 7, 0, 5, 1, 8, 3, 6, 4):
        (tmp_path / f"{number}.txt").write_text(f"text {number}\n")
    assert list(documents(file_corpus(tmp_path))) == [f"text {n}\n" for n in range(10)]


def test_a_name_that_would_not_do_as_a_file_name_is_made_plain(tmp_path: Path) -> None:
    path = tmp_path / "m\u00fc \u4e2d;$(id)<b>.txt"
    path.write_text(made_text(100))
    name = file_corpus(path).name
    assert name.startswith("text-") and name.isascii() and not set(name) & set(" ;$()<>/\\")


def test_text_that_is_missing_is_refused_by_path(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"gone\.txt: no such file or folder"):
        file_corpus(tmp_path / "gone.txt")


def test_a_folder_without_text_is_refused_with_how_many_files_were_seen(tmp_path: Path) -> None:
    (tmp_path / "a.bin").write_bytes(b"\xff\xfe\0")
    (tmp_path / "b.bin").write_bytes(bytes(9))
    with pytest.raises(DataError, match=r"no text in it \(2 files looked at\)"):
        file_corpus(tmp_path)


FOLDER_TEXTS = {"notes.json": '{\n  "title": "precious"\n}\n', "table.csv": "a,b\n1,2\n", "table.tsv": "a\tb\n1\t2\n"}


@pytest.mark.parametrize("name", FOLDER_TEXTS)
def test_in_a_folder_of_text_other_files_of_text_are_text(tmp_path: Path, name: str) -> None:
    (tmp_path / "chapter.txt").write_text("chapter\n")
    (tmp_path / name).write_text(FOLDER_TEXTS[name])
    assert sorted(documents(file_corpus(tmp_path))) == sorted(["chapter\n", FOLDER_TEXTS[name]])


def test_in_a_folder_of_text_tables_of_documents_are_read_by_column(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\n{"text": "two"}\n')
    pyarrow.parquet.write_table(pyarrow.table({"text": ["three"]}), tmp_path / "b.parquet")
    assert list(documents(file_corpus(tmp_path))) == ["one", "two", "three"]


@pytest.mark.parametrize("name", ["a.jsonl", "a.json"])
def test_a_file_of_json_lines_has_a_document_a_line_from_the_column_asked_for(tmp_path: Path, name: str) -> None:
    made = [made_text(10, seed=seed) for seed in range(5)]
    (tmp_path / name).write_text("".join(json.dumps({"body": text, "id": 1}) + "\n" for text in made))
    assert list(documents(file_corpus(tmp_path / name, column="body"))) == made


def test_documents_of_a_table_are_kept_as_they_are(tmp_path: Path) -> None:
    made = ["\n\nspaced\n\n\n", f"with {END_OF_TEXT} inside", "crlf\r\n"]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in made))
    assert list(documents(file_corpus(tmp_path / "a.jsonl"))) == made


@pytest.mark.parametrize("kind", ["latin1", "gzip", "zeros"])
def test_a_file_that_is_no_text_is_refused_by_path(tmp_path: Path, kind: str) -> None:
    contents = {"latin1": b"M\xfcller\n", "gzip": gzip.compress(b"text"), "zeros": bytes(100)}
    (tmp_path / "a.txt").write_bytes(contents[kind])
    with pytest.raises(DataError, match=r"a\.txt: "):
        list(documents(file_corpus(tmp_path / "a.txt")))


def test_a_file_in_a_folder_that_stops_being_text_is_refused_by_path(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("good\n")
    (tmp_path / "b.txt").write_bytes(made_text(10_000).encode() * 80 + b"\xff")
    with pytest.raises(DataError, match=r"b\.txt: not UTF-8 at byte"):
        list(documents(file_corpus(tmp_path)))


@pytest.mark.skipif(not Path("/proc/self/mem").exists(), reason="no file here that fails on reading")
def test_a_file_that_cannot_be_read_is_refused_by_path() -> None:
    with pytest.raises(DataError, match="/proc/self/mem"):
        file_corpus(Path("/proc/self/mem"))
