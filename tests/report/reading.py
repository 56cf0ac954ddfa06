"""What stands in a document, as a reader finds it: tables by column, the data behind charts, and every text and number."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from oelm.experiments.catalog import Catalog
from oelm.report.build import build_report
from oelm.report.document import Cell, Chart, Document, Section, Table, Text
from tests.report.synthetic import package_catalog


def english(*roots: Path, catalog: Catalog | None = None, **chosen: Any) -> Document:
    """Return the English report on the runs under the roots."""
    return build_report(roots, catalog or package_catalog(), **chosen).document("en")


def names(document: Document) -> list[str]:
    return [section.name for section in document.sections]


def section(document: Document, name: str) -> Section:
    (found,) = [section for section in document.sections if section.name == name]
    return found


def table(document: Document, name: str) -> Table:
    (found,) = [block for block in blocks(document) if isinstance(block, Table) and block.name == name]
    return found


def rows(document: Document, name: str) -> list[dict[str, str]]:
    """Return a table's rows, each cell's text under its column."""
    found = table(document, name)
    return [dict(zip(found.columns, (cell.text for cell in row), strict=True)) for row in found.rows]


def cells(document: Document, name: str, column: str) -> list[Cell]:
    found = table(document, name)
    return [row[found.columns.index(column)] for row in found.rows]


def chart(document: Document, name: str) -> Chart:
    (found,) = [block for block in blocks(document) if isinstance(block, Chart) and block.name == name]
    return found


def values(document: Document, name: str) -> list[dict[str, Any]]:
    """Return the data behind a chart."""
    data: list[dict[str, Any]] = chart(document, name).spec["data"]["values"]
    return data


def texts(document: Document, name: str, kind: str | None = None) -> list[str]:
    """Return the paragraphs of a section, of one kind where it is given."""
    found = [block for block in section(document, name).blocks if isinstance(block, Text)]
    return [block.text for block in found if kind is None or block.kind == kind]


def blocks(document: Document) -> Iterator[Table | Chart | Text]:
    for part in document.sections:
        yield from part.blocks


def everything(document: Document) -> str:
    """Return all that a document holds, charts with their data, one thing a line."""
    return "\n".join(map(str, _leaves(document)))


def _leaves(part: Any) -> Iterator[Any]:
    if isinstance(part, dict):
        for inner in part.values():
            yield from _leaves(inner)
    elif isinstance(part, list | tuple):
        for inner in part:
            yield from _leaves(inner)
    elif isinstance(part, Document | Section | Table | Chart | Text | Cell):
        yield from _leaves(vars(part))
    else:
        yield part
