"""A report as GitHub Markdown, with its charts as SVG files next to it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from urllib.parse import quote

from oelm.report.charts import PAPER, chart_svg
from oelm.report.document import Block, Cell, Chart, Document, Table, Text, gather
from oelm.text import distinct_names, on_one_line

SIGNS = {"good": "\u2713 ", "bad": "\u2717 ", "warn": "\u25b3 "}
_ALERTS = {"note": "NOTE", "warning": "WARNING"}
_ENTITIES = {"&": "&amp;", "<": "&lt;", ">": "&gt;"}
_SPECIAL = re.compile(r"[\\`*_\[\]|~$#&<>]")
# GitHub makes links of these without being asked.
_BARE_LINK = re.compile(r"(?i)(?<=\bwww)\.|:(?=//)|(?<=\bmailto):|(?<=\bxmpp):")
_OPENS_BLOCK = re.compile(r"^(?:[-+=](?=[\s\-+=]|$)|\d+(?=[.)](?:\s|$)))")


def render_markdown(document: Document, svg_folder_name: str) -> tuple[str, dict[str, str]]:
    """Return the Markdown and the SVG files it shows, by name in `svg_folder_name`, which is next to it.

    Pictures are white, so that they can be read in either theme. Raise MissingExtraError for charts without vl-convert.
    """
    charts = [block for section in document.sections for block in section.blocks if isinstance(block, Chart)]
    names = [f"{name}.svg" for name in distinct_names(chart.name for chart in charts)]
    pictures = {name: picture_text(chart) for name, chart in zip(names, charts, strict=True)}
    paths = iter([f"{quote(svg_folder_name)}/{name}" for name in names])
    parts = [f"# {_escaped(document.title)}", _paragraph(document.subtitle)]
    for section in document.sections:
        parts.append(f"## {_escaped(section.title)}")
        parts += [part for kind, blocks in gather(section.blocks) for part in _group(kind, blocks, paths)]
    parts += ["---", _paragraph(document.footer)]
    return "\n\n".join(part for part in parts if part) + "\n", pictures


def _group(kind: str, blocks: list[Block], paths: Iterator[str]) -> list[str]:
    texts = [_paragraph(block.text) for block in blocks if isinstance(block, Text)]
    if kind in _ALERTS:
        lines = texts if len(texts) == 1 else [f"- {text}" for text in texts]
        return ["\n".join(f"> {line}" for line in [f"[!{_ALERTS[kind]}]", *lines])]
    return texts or [part for block in blocks for part in _figure(block, paths)]


def _figure(block: Block, paths: Iterator[str]) -> list[str]:
    if isinstance(block, Table):
        return [_caption(block.caption), table_text(block)]
    assert isinstance(block, Chart)
    return [f"![{_escaped(block.alt)}]({next(paths)})", _caption(block.caption)]


def picture_text(chart: Chart) -> str:
    """Return a chart as SVG, on white."""
    return chart_svg(chart.spec, config=PAPER, prefix="chart")


def table_text(table: Table) -> str:
    """Return a table as Markdown."""
    rules = ["---:" if column in table.numeric else "---" for column in table.shown]
    head = [_escaped(table.columns[column]) for column in table.shown]
    rows = [head, rules, *([_cell(row[column]) for column in table.shown] for row in table.rows)]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _cell(cell: Cell) -> str:
    return SIGNS.get(cell.mark, "") + (_code(cell.text) if cell.is_code else _escaped(cell.text))


def _code(text: str) -> str:
    """Return what is to be typed with nothing in it changed, also to who reads the Markdown itself."""
    plain = on_one_line(text)
    # Tables cut at a bar even inside of code.
    return f"`{plain}`" if plain and not set("`|").intersection(plain) else _escaped(text)


def _caption(text: str) -> str:
    return f"*{_escaped(text)}*" if on_one_line(text) else ""


def _paragraph(text: str) -> str:
    """Return text that begins no list, rule, table or heading."""
    return _OPENS_BLOCK.sub(lambda found: f"{found[0]}\\" if found[0].isdigit() else f"\\{found[0]}", _escaped(text))


def _escaped(text: str) -> str:
    """Return text on one line in which nothing is markup, at any place in a line."""
    escaped = _SPECIAL.sub(lambda found: _ENTITIES.get(found[0], f"\\{found[0]}"), on_one_line(text))
    return _BARE_LINK.sub(lambda found: f"\\{found[0]}", escaped)
