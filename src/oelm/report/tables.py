"""A report's tables as CSV files, which spreadsheets open without running anything."""

from __future__ import annotations

import csv
import io
import re

from oelm.report.document import Document, Table
from oelm.report.plain import distinct_names, on_one_line

# A cell that begins so is a formula to a spreadsheet; the last four are what East Asian keyboards give.
_FORMULA = re.compile(r"['\"\s]*[=+\-@\uff1d\uff0b\uff0d\uff20]")
_NUMBER = r"[+-]?\d[\d,]*(?:\.\d+)?(?:[eE][+-]?\d+)?\s?%?"
# A sign makes no formula of a lone number, nor of one with its interval, as in "+9.8% [+3.1%, +16.9%]", nor of a dash.
_FIGURE = re.compile(rf"{_NUMBER}(?:\s\[{_NUMBER},\s{_NUMBER}\])?|-{{1,3}}")


def render_csv(document: Document) -> dict[str, str]:
    """Return each table as CSV by the name of its file: RFC 4180, to be written as UTF-8 without a byte order mark.

    What a spreadsheet would take for a formula gets an apostrophe in front, which shows it as text; numbers, signed or not,
    are left as they are. Line ends and tabs inside a cell become spaces.
    """
    tables = [block for section in document.sections for block in section.blocks if isinstance(block, Table)]
    names = distinct_names(table.name for table in tables)
    return {f"{name}.csv": _csv(table) for name, table in zip(names, tables, strict=True)}


def _csv(table: Table) -> str:
    file = io.StringIO(newline="")
    writer = csv.writer(file)
    writer.writerow([_inert(column) for column in table.columns])
    writer.writerows([_inert(cell.text) for cell in row] for row in table.rows)
    return file.getvalue()


def _inert(text: str) -> str:
    plain = on_one_line(text)
    return f"'{plain}" if _FORMULA.match(plain) and not _FIGURE.fullmatch(plain) else plain
