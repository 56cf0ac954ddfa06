"""A report's tables for other programs: CSV for spreadsheets, LaTeX for papers."""

from __future__ import annotations

import csv
import io
import re

from oelm.report.document import Cell, Document, Table
from oelm.text import distinct_names, on_one_line

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


_USAGE = """\
% Tables of a report by oelm, to be used in a paper by \\input{...}. In the preamble:
%   \\usepackage[T1]{fontenc}
%   \\usepackage{booktabs,longtable}
% Chinese text needs xelatex or lualatex and \\usepackage{ctex} in place of fontenc.
"""
# What fits on a page; longer ones break across pages, which two-column papers cannot do.
_ONE_PAGE_ROWS = 40
_SPECIAL = {
    "\\": r"\textbackslash{}",
    "^": r"\textasciicircum{}",
    "~": r"\textasciitilde{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    '"': r"\textquotedbl{}",
    "`": r"\textasciigrave{}",
    **{character: f"\\{character}" for character in "&%$#_{}"},
    "\u2212": "$-$",
    "\u00d7": r"$\times$",
    "\u00b1": r"$\pm$",
    "\u00b7": r"$\cdot$",
    "\u2264": r"$\leq$",
    "\u2265": r"$\geq$",
    "\u2248": r"$\approx$",
    "\u2192": r"$\rightarrow$",
    "\u0394": r"$\Delta$",
    "\u2013": "--",
    "\u2014": "---",
    "\u2026": r"\ldots{}",
    "\u2713": r"$\surd$",
    "\u2717": r"$\times$",
    "\ufffd": "?",
}
# Also the minus of a number, and what would become one sign where two of it follow each other.
_SPECIALS = re.compile(r"(?P<minus>(?<!\w)-(?=\d))|(?P<twin>[-,'])(?=(?P=twin))|" + "|".join(map(re.escape, _SPECIAL)))
_SIGNS = {"good": r"$\surd$ ", "bad": r"$\times$ ", "warn": r"$\triangle$ "}


def render_latex(document: Document) -> str:
    """Return every table of the report, each in its own environment with caption and label."""
    tables = [block for section in document.sections for block in section.blocks if isinstance(block, Table)]
    labels = distinct_names(table.name for table in tables)
    return "\n".join([_USAGE, *(_table(table, label) for table, label in zip(tables, labels, strict=True))])


def _table(table: Table, label: str) -> str:
    columns = "".join("r" if column in table.numeric else "l" for column in range(len(table.columns)))
    caption = f"\\caption{{{_escaped(table.caption)}}}\\label{{tab:{label}}}"
    head = _row([_escaped(column) for column in table.columns])
    rows = [_row([_cell(cell) for cell in row]) for row in table.rows]
    if len(rows) > _ONE_PAGE_ROWS:
        top = [f"\\begin{{longtable}}{{{columns}}}", f"{caption} \\\\", "\\toprule", head, "\\midrule", "\\endhead"]
        return "\n".join([*top, "\\bottomrule", "\\endfoot", *rows, "\\end{longtable}", ""])
    top = ["\\begin{table}", "\\centering", caption, f"\\begin{{tabular}}{{{columns}}}", "\\toprule", head, "\\midrule"]
    return "\n".join([*top, *rows, "\\bottomrule", "\\end{tabular}", "\\end{table}", ""])


def _row(cells: list[str]) -> str:
    # A rule or a row's end takes a bracket or a star that follows for its own.
    guard = "{}" if cells and cells[0].startswith(("[", "*")) else ""
    return f"{guard}{' & '.join(cells)} \\\\"


def _cell(cell: Cell) -> str:
    text = _escaped(cell.text)
    return _SIGNS.get(cell.mark, "") + (f"\\texttt{{{text}}}" if cell.is_code and text else text)


def _escaped(text: str) -> str:
    """Return text in which LaTeX finds no command, no special character and no ligature."""
    return _SPECIALS.sub(_replacement, on_one_line(text))


def _replacement(found: re.Match[str]) -> str:
    if found["minus"]:
        return "$-$"
    return f"{found[0]}{{}}" if found["twin"] else _SPECIAL[found[0]]
