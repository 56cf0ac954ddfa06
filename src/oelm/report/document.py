"""A report as data, in one language: sections of text, tables and charts that every format is made from."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

Mark = Literal["", "good", "bad", "warn", "muted"]


@dataclass(frozen=True)
class Cell:
    """A cell of a table. `sort` orders where the text would not, `mark` says how it is meant, code is to be typed."""

    text: str
    sort: float | str | None = None
    mark: Mark = ""
    is_code: bool = False


@dataclass(frozen=True)
class Table:
    """Rows under columns. `name` is the file's where a table becomes one; `numeric` are columns set to the right.

    `on_page` are the columns that readers see, from left to right, where these are not all, or not in the order of CSV and
    LaTeX files.
    """

    name: str
    caption: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    numeric: frozenset[int] = frozenset()
    on_page: tuple[int, ...] = ()

    @property
    def shown(self) -> tuple[int, ...]:
        """The columns that readers see, from left to right."""
        return self.on_page or tuple(range(len(self.columns)))


@dataclass(frozen=True)
class Chart:
    """A Vega-Lite chart without a theme; `alt` describes it in words."""

    name: str
    caption: str
    spec: dict[str, Any]
    alt: str


@dataclass(frozen=True)
class Text:
    """A paragraph of plain text; nothing in it is markup."""

    text: str
    kind: Literal["paragraph", "note", "warning"] = "paragraph"


Block = Table | Chart | Text


@dataclass(frozen=True)
class Section:
    """A headed part of a report; `name` is its anchor."""

    name: str
    title: str
    blocks: tuple[Block, ...]


@dataclass(frozen=True)
class Document:
    """A whole report. `lang` is 'en' or 'zh'; `contents` heads the list of sections, `footer` says how it was made."""

    lang: str
    title: str
    subtitle: str
    contents: str
    footer: str
    sections: tuple[Section, ...]


def gather(blocks: Sequence[Block]) -> list[tuple[str, list[Block]]]:
    """Return neighbours of one kind together, in order; the kinds are those of texts, and 'figure' for tables and charts."""
    kinds = itertools.groupby(blocks, key=lambda block: block.kind if isinstance(block, Text) else "figure")
    return [(kind, list(group)) for kind, group in kinds]
