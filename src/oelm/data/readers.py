"""Readers of the usual public formats as streams of pieces; each refuses what it cannot read and says what to do."""

from __future__ import annotations

import codecs
import csv
import hashlib
import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from oelm.data.tokenizer import END_OF_TEXT
from oelm.errors import DataError, needing

PIECE_CHARS = 2**20
# GPT-2's pre-tokenizer never looks across a single space between two other characters: cut there, the pieces of a
# document give the same tokens as the whole.
_CUT = re.compile(r"\S(?= \S)")


@dataclass(frozen=True, slots=True)
class Piece:
    """Some text of a document; `ends` marks its last piece."""

    text: str
    ends: bool


def pieces(fragments: Iterable[str | None], *, tidy: bool) -> Iterator[Piece]:
    """Yield the pieces of documents given as fragments of text, each document closed by None.

    Blank documents are left out. With `tidy`, each begins without empty lines and ends with one line end.
    """
    held: list[str] = []
    size, begun = 0, False
    for fragment in fragments:
        if fragment is not None:
            held.append(fragment)
            size += len(fragment)
            while size > 2 * PIECE_CHARS and (cut := _cut(text := "".join(held))):
                if begun or text[:cut].strip():
                    yield Piece(text[:cut].lstrip("\n") if tidy and not begun else text[:cut], ends=False)
                    begun = True
                held, size = [text[cut:]], len(text) - cut
            continue
        text = "".join(held)
        if begun or text.strip():
            if tidy:
                text = (text if begun else text.lstrip("\n")).rstrip("\n") + "\n"
            yield Piece(text, ends=True)
        held, size, begun = [], 0, False


def _cut(text: str) -> int:
    found = _CUT.search(text, PIECE_CHARS)
    if found is not None:
        return found.end()
    # Without such a space for this long, other tokens at one place are better than unbounded memory.
    return PIECE_CHARS if len(text) > 16 * PIECE_CHARS else 0


def separated(blocks: Iterable[str]) -> Iterator[str | None]:
    """Yield the fragments of a text in which documents are separated by the end-of-text mark."""
    held = ""
    for block in blocks:
        *whole, held = (held + block).split(END_OF_TEXT)
        for text in whole:
            yield text
            yield None
        # The end may hold the beginning of a mark.
        sure = len(held) - len(END_OF_TEXT) + 1
        if sure > 0:
            yield held[:sure]
            held = held[sure:]
    yield held
    yield None


def articles(lines: Iterable[str]) -> Iterator[str | None]:
    """Yield the fragments of a WikiText file: an article begins with its title (' = Title = '), sections with more marks."""
    before = ""
    for line in lines:
        is_title = (
            len(line) > len(" =  = ")
            and line.startswith(" = ")
            and not line.startswith(" = = ")
            and line.rstrip("\n").endswith(" = ")
        )
        if is_title and not before.strip():
            yield None
        # Held back by one line: the empty line before a title belongs to the article it opens.
        yield before
        before = line
    yield before
    yield None


def fraction(text: str) -> float:
    """Return a number in [0, 1) that depends on the text alone, so that equal texts get the same split."""
    return fraction_of(hashlib.sha256(text.encode()).digest())


def fraction_of(digest: bytes) -> float:
    """Return the number in [0, 1) of a text's sha256."""
    return int.from_bytes(digest[:7]) / 2**56


_BLOCK_BYTES = 2**20
_MAX_LINE_BYTES = 64 * 2**20
# First bytes of files that are not text.
_MAGIC = {
    b"\x1f\x8b": "compressed with gzip: unpack it first (gunzip FILE)",
    b"PK\x03\x04": "a zip archive: unpack it first (unzip FILE)",
    b"BZh": "compressed with bzip2: unpack it first (bunzip2 FILE)",
    b"\xfd7zXZ": "compressed with xz: unpack it first (unxz FILE)",
    b"(\xb5/\xfd": "compressed with zstandard: unpack it first (unzstd FILE)",
    b"PAR1": "a Parquet file: let its name end in .parquet",
    b"version https://git-lfs": "a Git LFS pointer instead of the file: fetch it first (git lfs pull)",
}
Row = dict[str, Any]
# JSON can hold half of a surrogate pair, UTF-8 cannot.
_MAYBE_HALF = re.compile(r"\\u[dD][89a-fA-F]")


def check_file(path: Path, *, kind: str = "text") -> None:
    """Raise DataError unless the file can be read, is not empty and is no archive."""
    try:
        with path.open("rb") as file:
            start = file.read(32)
    except OSError as problem:
        raise DataError(f"{path}: cannot be read ({problem.strerror}); fix the path or its permissions") from None
    if not start:
        raise DataError(f"{path}: the file is empty; give one that holds {kind}, or leave it out")
    for magic, what in _MAGIC.items():
        if start.startswith(magic) and not (kind == "parquet" and magic == b"PAR1"):
            raise DataError(f"{path}: expected {kind}, found {what}")


def text_blocks(path: Path) -> Iterator[str]:
    """Yield a file's text in blocks, with every line end as a bare newline."""
    check_file(path)
    decoder = codecs.getincrementaldecoder("utf-8")()
    position, held = 0, ""
    with path.open("rb") as file:
        while block := file.read(_BLOCK_BYTES):
            if b"\0" in block:
                raise DataError(f"{path}: a zero byte near byte {position + block.index(0):,}: not text; leave the file out")
            text = held + _decoded(decoder, block, path, position)
            # The block may end between \r and \n.
            held = "\r" if text.endswith("\r") else ""
            text = text.removesuffix("\r")
            # Most files have no \r, and searching for one character is ten times as fast as for two.
            yield text.replace("\r\n", "\n") if "\r" in text else text
            position += len(block)
    yield held + _decoded(decoder, b"", path, position, final=True)


def _decoded(decoder: codecs.IncrementalDecoder, block: bytes, path: Path, position: int, *, final: bool = False) -> str:
    pending = len(decoder.getstate()[0])
    try:
        return decoder.decode(block, final)
    except UnicodeDecodeError as problem:
        raise DataError(
            f"{path}: not UTF-8 at byte {position - pending + problem.start:,}; convert it first "
            "(for example: iconv -f latin1 -t utf-8), or leave the file out"
        ) from None


def text_lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yield number and text of every line, its line end included."""
    held, number = "", 0
    for block in text_blocks(path):
        *whole, held = (held + block).split("\n")
        for line in whole:
            number += 1
            yield number, line + "\n"
        if len(held) > _MAX_LINE_BYTES:
            raise DataError(f"{path}: line {number + 1} is longer than {_MAX_LINE_BYTES >> 20} MiB: not a file of lines")
    if held:
        yield number + 1, held


def read_text(path: Path) -> Iterator[Piece]:
    """Read plain text: one document, or several separated by the end-of-text mark."""
    return pieces(separated(text_blocks(path)), tidy=True)


def read_wikitext(path: Path) -> Iterator[Piece]:
    """Read a WikiText file: one document an article, every character kept."""
    return pieces(articles(line for _, line in text_lines(path)), tidy=False)


def read_column(path: Path, column: str) -> Iterator[Piece]:
    """Read one column of text from a table: one document a row."""
    return pieces(_column(path, column), tidy=False)


def read_wikitext_rows(path: Path) -> Iterator[Piece]:
    """Read WikiText as the hub has it: one line of the file a row."""
    return pieces(articles(text for text in _column(path, "text") if text is not None), tidy=False)


def _column(path: Path, column: str) -> Iterator[str | None]:
    for number, row in rows(path, columns=(column,)):
        value = row[column]
        if not isinstance(value, str):
            raise DataError(f"{path}: row {number}: {column!r} is {type(value).__name__}, expected text; choose another column")
        yield value
        yield None


def rows(path: Path, *, columns: tuple[str, ...]) -> Iterator[tuple[int, Row]]:
    """Yield number (from 1) and content of every row of a JSONL, TSV, CSV or Parquet file, with at least these columns."""
    readers = {".parquet": _parquet_rows, ".tsv": _table_rows, ".csv": _table_rows, ".jsonl": _jsonl_rows, ".json": _jsonl_rows}
    if path.suffix.lower() not in readers:
        raise DataError(f"{path}: no table: give .jsonl, .tsv, .csv or .parquet")
    yield from readers[path.suffix.lower()](path, columns)


def column_names(path: Path) -> list[str]:
    """Return the columns of a table; for JSONL, those of its first row."""
    if path.suffix.lower() == ".parquet":
        return list(parquet_file(path).schema_arrow.names)
    for _, row in rows(path, columns=()):
        return list(row)
    raise DataError(f"{path}: no row in it; give a table with examples")


def parquet_label_names(path: Path, column: str) -> tuple[str, ...] | None:
    """Return the label names that `datasets` wrote into a Parquet file, if it did."""
    metadata = parquet_file(path).schema_arrow.metadata or {}
    try:
        features = json.loads(metadata.get(b"huggingface", b"{}"))["info"]["features"]
        return tuple(map(str, features[column]["names"]))
    except (KeyError, TypeError, ValueError):
        return None


def _missing(path: Path, where: str, column: str, found: list[str]) -> DataError:
    return DataError(
        f"{path}: {where}: no column {column!r}; columns: {', '.join(map(repr, found)) or 'none'}. "
        "Choose one (--column for text, --columns text=...,label=... for examples)"
    )


def _jsonl_rows(path: Path, columns: tuple[str, ...]) -> Iterator[tuple[int, Row]]:
    for number, line in text_lines(path):
        if not line.strip():
            continue
        try:
            row = json.loads(line, object_pairs_hook=_without_repeats)
            if _MAYBE_HALF.search(line):
                json.dumps(row, ensure_ascii=False).encode()
        except (ValueError, RecursionError) as problem:
            raise DataError(f"{path}: line {number} is not JSON ({problem}); expected one object a line (JSONL)") from None
        if not isinstance(row, dict):
            raise DataError(f"{path}: line {number}: found {type(row).__name__}, expected an object, one a line (JSONL)")
        for column in columns:
            if column not in row:
                raise _missing(path, f"line {number}", column, list(row))
        yield number, row


def _without_repeats(pairs: list[tuple[str, Any]]) -> Row:
    row = dict(pairs)
    if len(row) != len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"the name {next(name for name in names if names.count(name) > 1)!r} occurs twice")
    return row


def _table_rows(path: Path, columns: tuple[str, ...]) -> Iterator[tuple[int, Row]]:
    lines = (line for _, line in text_lines(path))
    # In the public TSV files a quote is an ordinary character; CSV has quoting rules.
    is_plain = path.suffix.lower() == ".tsv"
    table = csv.reader(lines, delimiter="\t", quoting=csv.QUOTE_NONE) if is_plain else csv.reader(lines, strict=True)
    csv.field_size_limit(_MAX_LINE_BYTES)
    records = _records(table, path)
    header = [name.strip().removeprefix("\ufeff") for name in next(records)]
    if repeated := [name for name in header if header.count(name) > 1]:
        raise DataError(f"{path}: the header names the column {repeated[0]!r} twice; rename one")
    for column in columns:
        if column not in header:
            raise _missing(path, "header", column, header)
    for number, fields in enumerate(records, start=1):
        if not fields:
            continue
        if len(fields) != len(header):
            raise DataError(f"{path}: row {number} (line {table.line_num}) has {len(fields)} fields, the header {len(header)}")
        yield number, dict(zip(header, fields, strict=True))


def _records(table: Any, path: Path) -> Iterator[list[str]]:
    try:
        yield from table
    except csv.Error as problem:
        raise DataError(f"{path}: line {table.line_num}: not a row of a table ({problem}); fix the line") from None


def parquet_file(path: Path) -> Any:
    """Open a Parquet file; raise DataError when it is not one, or truncated."""
    with needing("pyarrow", "data"):
        import pyarrow
        import pyarrow.parquet
    check_file(path, kind="parquet")
    try:
        return pyarrow.parquet.ParquetFile(path)
    except (pyarrow.ArrowException, OSError) as problem:
        raise DataError(f"{path}: not a complete Parquet file ({problem}); fetch it again") from None


def _parquet_rows(path: Path, columns: tuple[str, ...]) -> Iterator[tuple[int, Row]]:
    file = parquet_file(path)
    import pyarrow

    for column in columns:
        if column not in file.schema_arrow.names:
            raise _missing(path, "schema", column, list(file.schema_arrow.names))
        if file.schema_arrow.names.count(column) > 1:
            raise DataError(f"{path}: schema: two columns are called {column!r}; rename one")
    number = 0
    try:
        for batch in file.iter_batches(batch_size=1000, columns=list(columns)):
            for values in zip(*(batch.column(name).to_pylist() for name in columns), strict=True):
                number += 1
                yield number, dict(zip(columns, values, strict=True))
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as problem:
        raise DataError(f"{path}: damaged after row {number} ({problem}); fetch it again") from None
