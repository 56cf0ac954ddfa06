"""A report's tables as CSV hold every text, and nothing in them runs in a spreadsheet."""

from __future__ import annotations

import csv
import io
import re

from oelm.report.document import Cell, Document, Section, Table
from oelm.report.tables import render_csv
from oelm.text import on_one_line
from tests.report.sample_document import ATTACKS, hostile_document, sample_document, verdicts

FIGURES = [
    "-0.5",
    "+9.8%",
    "-1,234,567",
    "-1e-05",
    "+0.0%",
    "-3.2 %",
    "+9.8% [+3.1%, +16.9%]",
    "-0.5 [-1.0, 0.1]",
    "-",
    "--",
    "---",
]
FORMULAS = [
    "=1+1",
    "+1+1",
    "-1-1",
    "@x",
    "\t=1",
    "\r=1",
    "\n=1",
    " =1",
    '"=1',
    "'=1",
    "-x",
    "+x",
    "-1|'x'!A",
    "-1(2)",
    "\uff1d1+1",
]


def read(text: str) -> list[list[str]]:
    return list(csv.reader(io.StringIO(text, newline=""), strict=True))


def with_cell(text: str) -> Document:
    table = Table("t", "caption", ("a",), ((Cell(text),),))
    return Document("en", "", "", "", "", (Section("s", "s", (table,)),))


def cell(text: str) -> str:
    return read(render_csv(with_cell(text))["t.csv"])[1][0]


def test_a_table_is_its_columns_and_then_its_rows() -> None:
    rows = read(render_csv(sample_document())["verdicts.csv"])
    assert rows == [list(verdicts().columns), *([cell.text for cell in row] for row in verdicts().rows)]


def test_every_table_is_a_file_of_its_own() -> None:
    assert list(render_csv(sample_document())) == ["verdicts.csv", "runs.csv"]


def test_tables_of_one_name_or_of_a_bad_one_get_names_that_are_safe() -> None:
    names = ["../../etc/passwd", "a b", "A-B", "", "con\x00.exe"]
    tables = tuple(Table(name, "", ("a",), ()) for name in names)
    files = list(render_csv(Document("en", "", "", "", "", (Section("s", "s", tables),))))
    assert files == ["etc-passwd.csv", "a-b.csv", "A-B-2.csv", "part.csv", "con-exe.csv"]


def test_lines_end_as_rfc_4180_says_and_no_byte_order_mark_begins_the_file() -> None:
    text = render_csv(with_cell("\ufeffx"))["t.csv"]
    assert re.findall(r"[^\r\n]+|\r?\n", text) == ["a", "\r\n", "\ufffdx", "\r\n"]


def test_texts_come_back_as_they_were() -> None:
    for text in ('a "quoted" word', "a, b", "\u51bb\u7ed3", "x;y", "", "'quoted' first"):
        assert cell(text) == text


def test_figures_come_back_as_they_were() -> None:
    for figure in FIGURES:
        assert cell(figure) == figure


def test_a_formula_is_text_to_a_spreadsheet() -> None:
    for formula in FORMULAS:
        assert cell(formula) == f"'{on_one_line(formula)}"


def attacked(text: str) -> list[list[str]]:
    """Return the rows of the first table with this text in every field."""
    return read(next(iter(render_csv(hostile_document(text)).values())))


def test_no_field_begins_a_formula_or_holds_a_control_character() -> None:
    for attack, text in ATTACKS.items():
        for field in [field for row in attacked(text) for field in row]:
            assert not re.match(r"[=+\-@]", field) and not re.search(r"[\x00-\x1f\x7f-\x9f\u202e]", field), attack


def test_every_text_stays_in_its_cell() -> None:
    for attack, text in ATTACKS.items():
        shown = on_one_line(text).removeprefix("'")
        rows = [[field.removeprefix("'") for field in row] for row in attacked(text)]
        assert rows == [[shown, "b"], [shown] * 2, ["x", shown]], attack
