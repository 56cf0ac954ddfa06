"""Files are read as they are, cut anywhere; what cannot be read is refused with the file, the place and the way on."""

from __future__ import annotations

import bz2
import csv
import gzip
import io
import json
import lzma
import zipfile
from collections.abc import Callable
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oelm.data import readers
from oelm.data.readers import (
    column_names,
    parquet_label_names,
    read_column,
    read_text,
    read_wikitext_rows,
    rows,
    text_blocks,
    text_lines,
)
from oelm.errors import DataError
from tests.conftest import made_text


def refusal_of(read: Callable[..., Any], *given: Any, **options: Any) -> str:
    with pytest.raises(DataError) as refusal:
        list(read(*given, **options))
    return str(refusal.value)


def written(path: Path, content: bytes | str) -> Path:
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def parquet(path: Path, **columns: list[Any]) -> Path:
    pyarrow.parquet.write_table(pyarrow.table(columns), path, row_group_size=100)
    return path


def with_small_blocks(size: int) -> pytest.MonkeyPatch:
    patch = pytest.MonkeyPatch()
    patch.setattr(readers, "_BLOCK_BYTES", size)
    return patch


@given(st.text(st.sampled_from("ab\n\r\u00fc\u4e2d\U0001f426")).filter(bool), st.integers(1, 7))
@settings(deadline=None)
def test_text_is_the_same_in_blocks_of_any_size(tmp_path_factory: pytest.TempPathFactory, text: str, size: int) -> None:
    path = written(tmp_path_factory.getbasetemp() / "blocks.txt", text)
    patch = with_small_blocks(size)
    try:
        assert "".join(text_blocks(path)) == text.replace("\r\n", "\n")
    finally:
        patch.undo()


@given(st.text(st.sampled_from("ab\n \u4e2d\x0b\x85\u2028")).filter(bool), st.integers(1, 7))
@settings(deadline=None)
def test_lines_end_at_newlines_only_and_are_the_text(tmp_path_factory: pytest.TempPathFactory, text: str, size: int) -> None:
    path = written(tmp_path_factory.getbasetemp() / "lines.txt", text)
    patch = with_small_blocks(size)
    try:
        found = list(text_lines(path))
    finally:
        patch.undo()
    assert "".join(line for _, line in found) == text
    assert [number for number, _ in found] == list(range(1, text.removesuffix("\n").count("\n") + 2))


def test_a_windows_line_end_across_two_real_blocks_is_one(tmp_path: Path) -> None:
    start = "x" * (readers._BLOCK_BYTES - 1)
    path = written(tmp_path / "a.txt", f"{start}\r\nend\r\n")
    assert "".join(text_blocks(path)) == f"{start}\nend\n"


def test_a_character_across_two_real_blocks_is_one(tmp_path: Path) -> None:
    start = "x" * (readers._BLOCK_BYTES - 1)
    assert "".join(text_blocks(written(tmp_path / "a.txt", f"{start}\u4e2d"))) == f"{start}\u4e2d"


def test_an_empty_file_is_refused_with_what_to_do(tmp_path: Path) -> None:
    message = refusal_of(read_text, written(tmp_path / "a.txt", ""))
    assert message == f"{tmp_path}/a.txt: the file is empty; give one that holds text, or leave it out"


def test_an_empty_table_is_refused_by_file(tmp_path: Path) -> None:
    for name in ("a.jsonl", "a.parquet", "a.tsv", "a.csv"):
        place = Path(mkdtemp(dir=tmp_path))
        path = written(place / name, "")
        assert refusal_of(rows, path, columns=("text",)).startswith(f"{path}: the file is empty"), name


def test_a_missing_file_is_refused_by_file_with_the_reason(tmp_path: Path) -> None:
    assert refusal_of(read_text, tmp_path / "a.txt").startswith(f"{tmp_path}/a.txt: cannot be read (No such file")


FIRST = made_text(20).encode()
SECOND = b"x" * (2**20 + 7)
NOT_UTF8 = {
    "latin1": ("M\u00fcller".encode("latin-1"), 1),
    "later": (FIRST + b"\xff" + FIRST, len(FIRST)),
    "second-block": (SECOND + b"\xff", len(SECOND)),
    "cut-at-the-end": (b"abc" + "\u4e2d".encode()[:2], 3),
    "cut-at-the-end-of-a-block": (b"x" * (2**20 - 2) + "\u4e2d".encode()[:2], 2**20 - 2),
    "cut-across-blocks": (b"x" * (2**20 - 1) + b"\xe4" + b"abc", 2**20 - 1),
}


def test_what_is_not_utf8_is_refused_at_its_byte(tmp_path: Path) -> None:
    for content, offset in NOT_UTF8.values():
        place = Path(mkdtemp(dir=tmp_path))
        message = refusal_of(read_text, written(place / "a.txt", content))
        assert message.startswith(f"{place}/a.txt: not UTF-8 at byte {offset:,}; convert it first") and "iconv" in message, (
            offset
        )


def test_a_table_that_is_not_utf8_is_refused_at_its_byte(tmp_path: Path) -> None:
    content = b'{"text": "M\xfcller"}\n'
    message = refusal_of(read_column, written(tmp_path / "a.jsonl", content), "text")
    assert message.startswith(f"{tmp_path}/a.jsonl: not UTF-8 at byte 11;")


@pytest.mark.parametrize("before", [0, 5, 2**20 + 5])
def test_a_zero_byte_is_refused_at_its_byte(tmp_path: Path, before: int) -> None:
    message = refusal_of(read_text, written(tmp_path / "a.txt", b"x" * before + b"\0" + b"more"))
    assert f"a.txt: a zero byte near byte {before:,}: not text; leave the file out" in message


def zipped(content: bytes) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("a.txt", content)
    return buffer.getvalue()


PACKED = {
    "gzip": (gzip.compress(FIRST), "gunzip"),
    "zip": (zipped(FIRST), "unzip"),
    "bzip2": (bz2.compress(FIRST), "bunzip2"),
    "xz": (lzma.compress(FIRST), "unxz"),
    # What `zstd` writes for two letters; the standard library cannot.
    "zstandard": (bytes.fromhex("28b52ffd2002110000 6869".replace(" ", "")), "unzstd"),
    "git-lfs": (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n", "git lfs pull"),
}


def test_a_packed_file_is_refused_with_how_to_unpack_it(tmp_path: Path) -> None:
    for kind in PACKED:
        for name in ("a.txt", "a.jsonl", "a.tsv", "a.parquet"):
            place = Path(mkdtemp(dir=tmp_path))
            content, tool = PACKED[kind]
            path = written(place / name, content)
            message = refusal_of(read_text, path) if name == "a.txt" else refusal_of(rows, path, columns=("text",))
            assert message.startswith(f"{path}: expected ") and f"({tool}" in message, (name, kind)


def test_parquet_given_as_text_is_refused_with_the_right_option(tmp_path: Path) -> None:
    path = parquet(tmp_path / "a.parquet", text=["one"]).rename(tmp_path / "a.txt")
    assert refusal_of(read_text, path).endswith("a.txt: expected text, found a Parquet file: let its name end in .parquet")


def test_a_line_without_end_is_refused_before_it_fills_the_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readers, "_MAX_LINE_BYTES", 2**21)
    path = written(tmp_path / "a.jsonl", b"\n" + b"x" * 2**22)
    assert "a.jsonl: line 2 is longer than 2 MiB: not a file of lines" in refusal_of(rows, path, columns=("text",))


CONTENT = [{"text": "one \u00fc", "label": "0"}, {"text": 'two "quoted"', "label": "1"}]


def write_table(path: Path, found: list[dict[str, str]]) -> Path:
    match path.suffix:
        case ".jsonl":
            path.write_text("".join(json.dumps(row) + "\n" for row in found))
        case ".tsv":
            path.write_text("".join("\t".join(fields) + "\n" for fields in ([*found[0]], *(row.values() for row in found))))
        case ".csv":
            with path.open("w", newline="") as file:
                csv.writer(file).writerows([[*found[0]], *([*row.values()] for row in found)])
        case _:
            pyarrow.parquet.write_table(pyarrow.Table.from_pylist(found), path)
    return path


TABLES = ["a.jsonl", "a.tsv", "a.csv", "a.parquet"]


def test_rows_come_back_with_their_numbers(tmp_path: Path) -> None:
    for name in TABLES:
        place = Path(mkdtemp(dir=tmp_path))
        path = write_table(place / name, CONTENT)
        assert list(rows(path, columns=("text", "label"))) == [(1, CONTENT[0]), (2, CONTENT[1])], name


def test_a_table_tells_its_columns(tmp_path: Path) -> None:
    for name in TABLES:
        place = Path(mkdtemp(dir=tmp_path))
        assert column_names(write_table(place / name, CONTENT)) == ["text", "label"], name


def test_a_wrong_column_is_refused_with_those_there_are(tmp_path: Path) -> None:
    for name in TABLES:
        place = Path(mkdtemp(dir=tmp_path))
        path = write_table(place / name, CONTENT)
        message = refusal_of(rows, path, columns=("content",))
        assert message.startswith(f"{path}: ") and "no column 'content'; columns: 'text', 'label'" in message, name
        assert "--column" in message, name


def test_a_column_missing_further_down_is_refused_at_its_line(tmp_path: Path) -> None:
    path = written(tmp_path / "a.jsonl", '{"text": "one"}\n\n{"txt": "two"}\n')
    assert f"{path}: line 3: no column 'text'; columns: 'txt'" in refusal_of(read_column, path, "text")


def test_the_end_of_a_name_counts_in_any_case(tmp_path: Path) -> None:
    for suffix in (".TSV", ".JSONL", ".Csv", ".PARQUET"):
        place = Path(mkdtemp(dir=tmp_path))
        path = write_table(place / f"a{suffix.lower()}", CONTENT).rename(place / f"b{suffix}")
        assert [row for _, row in rows(path, columns=("text", "label"))] == CONTENT, suffix


def test_a_file_that_is_no_table_is_refused_with_those_that_are(tmp_path: Path) -> None:
    path = written(tmp_path / "a.txt", "one\n")
    assert refusal_of(rows, path, columns=("text",)) == f"{path}: no table: give .jsonl, .tsv, .csv or .parquet"


def test_a_line_that_is_not_json_is_refused_at_its_line(tmp_path: Path) -> None:
    cases: list[str] = ["{", "one", '{"text": "a"', '{"text": "a"} {"text": "b"}', "[" * 100_000]
    for line in cases:
        place = Path(mkdtemp(dir=tmp_path))
        path = written(place / "a.jsonl", f'{{"text": "good"}}\n{line}\n')
        message = refusal_of(read_column, path, "text")
        assert message.startswith(f"{path}: line 2 is not JSON (") and "one object a line (JSONL)" in message, line


def test_a_line_that_is_no_object_is_refused_at_its_line(tmp_path: Path) -> None:
    for line in ("[1]", '"text"', "3", "null"):
        place = Path(mkdtemp(dir=tmp_path))
        path = written(place / "a.jsonl", line)
        assert f"{path}: line 1: found " in refusal_of(read_column, path, "text"), line


def test_a_value_that_is_not_text_is_refused_at_its_row(tmp_path: Path) -> None:
    for value in ("3", "null", '["a"]', '{"a": "b"}', "true"):
        place = Path(mkdtemp(dir=tmp_path))
        path = written(place / "a.jsonl", f'{{"text": {value}}}\n')
        assert f"{path}: row 1: 'text' is " in refusal_of(read_column, path, "text"), value


def test_half_a_character_in_json_is_refused_at_its_line(tmp_path: Path) -> None:
    path = written(tmp_path / "a.jsonl", '{"text": "good \\ud83d\\udc26"}\n{"text": "half \\ud83d"}\n')
    assert refusal_of(read_column, path, "text").startswith(f"{path}: line 2 ")


def test_a_whole_character_written_as_two_escapes_is_read(tmp_path: Path) -> None:
    path = written(tmp_path / "a.jsonl", '{"text": "good \\ud83d\\udc26"}\n')
    assert [piece.text for piece in read_column(path, "text")] == ["good \U0001f426"]


def test_a_name_that_stands_twice_in_a_json_object_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path / "a.jsonl", '{"text": "a", "label": 1, "text": "b"}\n')
    message = refusal_of(read_column, path, "text")
    assert message.startswith(f"{path}: line 1 ") and "the name 'text' occurs twice" in message


@pytest.mark.parametrize(("name", "mark"), [("a.tsv", "\t"), ("a.csv", ",")])
def test_a_column_named_twice_in_a_header_is_refused(tmp_path: Path, name: str, mark: str) -> None:
    path = written(tmp_path / name, mark.join(["text", "label", "text"]) + "\n" + mark.join("abc") + "\n")
    message = refusal_of(rows, path, columns=("text",))
    assert message == f"{path}: the header names the column 'text' twice; rename one"


def test_a_column_that_a_parquet_file_has_twice_is_refused(tmp_path: Path) -> None:
    table = pyarrow.Table.from_arrays([pyarrow.array(["a"]), pyarrow.array(["b"])], names=["text", "text"])
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    message = refusal_of(read_column, tmp_path / "a.parquet", "text")
    assert message == f"{tmp_path}/a.parquet: schema: two columns are called 'text'; rename one"


@pytest.mark.parametrize("line", ["a", "a\tb\tc"], ids=["few", "many"])
def test_a_row_of_another_length_is_refused_at_its_line(tmp_path: Path, line: str) -> None:
    path = written(tmp_path / "a.tsv", f"text\tlabel\ngood\t1\n{line}\n")
    message = refusal_of(rows, path, columns=("text",))
    assert message == f"{path}: row 2 (line 3) has {line.count(chr(9)) + 1} fields, the header 2"


def test_a_quote_in_tsv_is_a_character_like_any_other(tmp_path: Path) -> None:
    path = written(tmp_path / "a.tsv", 'text\tlabel\n"open\t1\nan " inside\t0\n')
    assert [row["text"] for _, row in rows(path, columns=("text",))] == ['"open', 'an " inside']


def test_a_quoted_field_of_csv_may_hold_commas_and_lines(tmp_path: Path) -> None:
    path = written(tmp_path / "a.csv", 'text,label\n"one,\ntwo ""three""",1\n')
    assert list(rows(path, columns=("text",))) == [(1, {"text": 'one,\ntwo "three"', "label": "1"})]


@pytest.mark.parametrize("name", ["a.tsv", "a.csv"])
def test_a_bare_carriage_return_in_a_table_is_refused_at_its_line(tmp_path: Path, name: str) -> None:
    mark = "\t" if name == "a.tsv" else ","
    path = written(tmp_path / name, f"text{mark}label\ngood{mark}1\nbro\rken{mark}0\n")
    assert refusal_of(rows, path, columns=("text",)).startswith(f"{path}: line 3: ")


def test_a_byte_order_mark_is_no_part_of_a_columns_name(tmp_path: Path) -> None:
    path = written(tmp_path / "a.csv", b"\xef\xbb\xbftext,label\none,1\n")
    assert column_names(path) == ["text", "label"]


def test_a_table_of_a_header_only_has_no_columns_to_tell(tmp_path: Path) -> None:
    path = written(tmp_path / "a.csv", "text,label\n")
    assert refusal_of(column_names, path) == f"{path}: no row in it; give a table with examples"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = parquet(tmp_path_factory.mktemp("parquet") / "a.parquet", text=[made_text(30, seed=n) for n in range(500)])
    return path.read_bytes()


def test_a_truncated_parquet_file_is_refused_by_file(tmp_path: Path, whole: bytes) -> None:
    for share in (0.0001, 0.1, 0.5, 0.9, 0.99, 0.9999):
        place = Path(mkdtemp(dir=tmp_path))
        path = written(place / "a.parquet", whole[: int(len(whole) * share)])
        message = refusal_of(read_column, path, "text")
        assert message.startswith(f"{path}: not a complete Parquet file (") and message.endswith("fetch it again"), share


def test_a_parquet_file_cut_in_the_middle_and_closed_again_is_refused(tmp_path: Path, whole: bytes) -> None:
    # The footer is whole, so that only reading the rows can tell.
    path = written(tmp_path / "a.parquet", whole[:1000] + bytes(len(whole) // 2 - 1000) + whole[len(whole) // 2 :])
    message = refusal_of(read_column, path, "text")
    assert message.startswith(f"{path}: damaged after row ") and message.endswith("fetch it again")


def test_a_parquet_file_with_text_that_is_not_utf8_is_refused(tmp_path: Path) -> None:
    offsets, content = pyarrow.py_buffer(b"\0\0\0\0\2\0\0\0\4\0\0\0"), pyarrow.py_buffer(b"ab\xff\xfe")
    column = pyarrow.StringArray.from_buffers(2, offsets, content)
    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"text": column}), path)
    assert refusal_of(read_column, path, "text").startswith(f"{path}: damaged after row")


def test_text_called_parquet_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path / "a.parquet", made_text(100))
    assert refusal_of(read_column, path, "text").startswith(f"{path}: not a complete Parquet file")


def test_a_missing_value_in_parquet_is_refused_at_its_row(tmp_path: Path) -> None:
    path = parquet(tmp_path / "a.parquet", text=["one", None])
    assert refusal_of(read_column, path, "text").startswith(f"{path}: row 2: 'text' is NoneType, expected text")


def test_only_the_columns_asked_for_are_read_from_parquet(tmp_path: Path) -> None:
    path = parquet(tmp_path / "a.parquet", text=["one"], huge=["x" * 1000])
    assert list(rows(path, columns=("text",))) == [(1, {"text": "one"})]


def test_what_datasets_wrote_about_labels_is_found(tmp_path: Path) -> None:
    import datasets

    features = datasets.Features({"text": datasets.Value("string"), "label": datasets.ClassLabel(names=["no", "yes"])})
    datasets.Dataset.from_dict({"text": ["a"], "label": [1]}, features=features).to_parquet(str(tmp_path / "a.parquet"))
    assert parquet_label_names(tmp_path / "a.parquet", "label") == ("no", "yes")


def test_a_parquet_file_that_says_nothing_of_labels_has_no_names(tmp_path: Path) -> None:
    assert parquet_label_names(parquet(tmp_path / "a.parquet", label=[1]), "label") is None


def test_wikitext_in_rows_has_the_articles_of_its_lines(tmp_path: Path) -> None:
    # As the hub has it: a line a row, an empty one as an empty text.
    found = ["", " = One = \n", "", " Text . \n", "", " = Two = \n", " Text . \n"]
    path = parquet(tmp_path / "a.parquet", text=found)
    assert [piece.text for piece in read_wikitext_rows(path)] == [" = One = \n Text . \n", " = Two = \n Text . \n"]


def test_an_unclosed_quote_in_a_csv_does_not_swallow_the_rest(tmp_path: Path) -> None:
    path = tmp_path / "quote.csv"
    path.write_text('label,text\n1,"never closed\n0,a\n1,b\n')
    with pytest.raises(DataError, match="quote.csv"):
        list(rows(path, columns=("label", "text")))
