"""A report as Markdown reads on GitHub as it was meant, and no text in it becomes markup."""

from __future__ import annotations

import functools
import re
import sys
import xml.etree.ElementTree as ET

import pytest
from markdown_it import MarkdownIt
from markdown_it.token import Token

from oelm.errors import MissingExtraError
from oelm.report.document import Cell, Chart, Document, Section, Table, Text
from oelm.report.markdown import render_markdown
from oelm.text import on_one_line
from tests.report.sample_document import ATTACKS, curves, hostile_document, sample_document, verdicts

STARTS = [
    "# x",
    "- x",
    "+ x",
    "1. x",
    "12) x",
    "> x",
    "---",
    "===",
    "+++",
    "```x",
    "    x",
    "|x|",
    "[a]: /b",
    "* x",
    "<!-- x",
    ":--",
]


def tokens(markdown: str) -> list[Token]:
    """Parse GitHub's Markdown, tables and strikethrough included."""
    return MarkdownIt("commonmark").enable(["table", "strikethrough"]).parse(markdown)


def structure(markdown: str) -> list[str]:
    """Return the kinds of blocks and of marks inside them, without the plain text."""
    inside = [child.type for token in tokens(markdown) for child in token.children or [] if child.type != "text"]
    return [token.type for token in tokens(markdown)] + inside


def texts(markdown: str) -> list[str]:
    return ["".join(child.content for child in token.children or []) for token in tokens(markdown) if token.type == "inline"]


def only(*blocks: Table | Chart | Text) -> Document:
    return Document("en", "title", "subtitle", "contents", "footer", (Section("part", "Part", blocks),))


@functools.cache
def attacked(text: str) -> tuple[str, dict[str, str]]:
    """Return the Markdown with this text in every field, and its files."""
    return render_markdown(hostile_document(text), "charts")


def test_no_text_changes_the_structure() -> None:
    harmless = structure(attacked("harmless")[0])
    for attack, text in ATTACKS.items():
        assert not text or structure(attacked(text)[0]) == harmless, attack


def test_every_text_is_shown_as_it_is() -> None:
    for attack, text in ATTACKS.items():
        shown = texts(attacked(text)[0])
        assert not text or (shown[0] == on_one_line(text) and shown[-1] == on_one_line(text)), attack


def test_a_paragraph_stays_a_paragraph_however_it_begins() -> None:
    plain = structure(render_markdown(only(Text("x")), "charts")[0])
    for start in STARTS:
        markdown, _ = render_markdown(only(Text(start)), "charts")
        assert on_one_line(start) in texts(markdown) and structure(markdown) == plain, start


def test_a_cell_stays_in_its_column() -> None:
    for text in ("a\\|b", "\\\\|", "|", "`|`", "a\\", "\n|\n"):
        markdown, _ = render_markdown(only(Table("t", "c", ("a", "b"), ((Cell(text), Cell("last")),))), "charts")
        assert texts(markdown)[-3:-1] == [on_one_line(text), "last"], text


COMMANDS = ["OMP_NUM_THREADS=1 oelm train --config 'a b/c_d/*.json'", "a\\_b", "$HOME <x> &amp; [y](z) ~~w~~ https://a.example"]


def test_a_command_can_be_typed_as_it_stands_in_the_file() -> None:
    for command in COMMANDS:
        row = (Cell(command, is_code=True), Cell("last"))
        markdown, _ = render_markdown(only(Table("t", "c", ("a", "b"), (row,))), "charts")
        assert f"| `{command}` | last |" in markdown
        assert texts(markdown)[-3:-1] == [command, "last"] and structure(markdown).count("code_inline") == 1, command


def test_no_command_breaks_its_row() -> None:
    for text in (*ATTACKS.values(), "a | b", "a`b", "a\\|b", "``", "\\"):
        row = (Cell(text, is_code=True), Cell("last"))
        markdown, _ = render_markdown(only(Table("t", "c", ("a", "b"), (row,))), "charts")
        assert texts(markdown)[-3:-1] == [on_one_line(text), "last"], text


def test_no_html_comes_from_a_text() -> None:
    markdown, _ = render_markdown(hostile_document(ATTACKS["html"] + ATTACKS["script"]), "charts")
    assert not re.search(r"(?m)(?<!^)<|^[^>]*<", markdown)


def test_no_address_in_a_text_becomes_a_link() -> None:
    markdown, _ = render_markdown(
        only(Text("see https://a.example, HTTP://b.example, www.c.example or mailto:d@e.example")), "charts"
    )
    assert not re.search(r"(?i)https?://|www\.|mailto:", markdown)


def test_figures_are_left_readable() -> None:
    assert (
        "\n\n3.1% [+1.9%] -0.5\n".replace("[", "\\[").replace("]", "\\]")
        in render_markdown(only(Text("3.1% [+1.9%] -0.5")), "c")[0]
    )


def test_a_table_aligns_its_figures_and_tells_marks_by_sign() -> None:
    markdown, _ = render_markdown(only(verdicts()), "charts")
    assert "| --- | ---: | ---: | --- |" in markdown and "| \u2713 PASS |" in markdown and "| \u2717 FAIL |" in markdown


def test_notes_and_warnings_are_githubs_alerts() -> None:
    markdown, _ = render_markdown(only(Text("n", "note"), Text("w", "warning")), "charts")
    assert "> [!NOTE]\n> n\n\n> [!WARNING]\n> w" in markdown


def test_notes_that_follow_each_other_are_a_list_in_one_alert() -> None:
    markdown, _ = render_markdown(only(Text("a", "note"), Text("- b", "note"), Text("c")), "charts")
    assert "> [!NOTE]\n> - a\n> - \\- b\n\nc\n" in markdown and texts(markdown).count("- b") == 1


def test_every_chart_is_a_file_that_the_text_shows() -> None:
    markdown, files = render_markdown(sample_document(), "my report (1)")
    assert list(files) == ["curves.svg", "forest.svg", "heads.svg"]
    assert [f"my%20report%20%281%29/{name}" for name in files] == re.findall(r"!\[[^\n]*\]\(([^)]*)\)", markdown)


def test_charts_of_one_name_are_different_files() -> None:
    _, files = render_markdown(only(curves("a/b"), curves("a b"), curves("../../etc/passwd")), "charts")
    assert list(files) == ["a-b.svg", "a-b-2.svg", "etc-passwd.svg"]


def test_every_picture_is_xml_without_scripts_links_or_images() -> None:
    for attack, text in ATTACKS.items():
        _, files = attacked(text)
        kinds = {element.tag.rpartition("}")[2] for element in ET.fromstring(next(iter(files.values()))).iter()}
        plain = {"svg", "g", "path", "rect", "text", "tspan", "line", "defs", "clipPath", "linearGradient", "stop"}
        assert kinds <= plain, attack


def test_pictures_are_white_so_that_they_can_be_read_in_the_dark() -> None:
    _, files = render_markdown(only(curves()), "charts")
    background = next(iter(ET.fromstring(files["curves.svg"])))
    assert background.tag.endswith("rect") and background.get("fill") == "white" and "var(" not in files["curves.svg"]


def test_a_picture_names_every_arm_in_full() -> None:
    _, files = render_markdown(only(curves()), "charts")
    shown = [
        "".join(element.itertext()) for element in ET.fromstring(files["curves.svg"]).iter("{http://www.w3.org/2000/svg}text")
    ]
    assert {"baseline", "oelm_freeze", "gaussian_matched", "oelm_random"} <= set(shown)


def test_the_same_document_gives_the_same_files() -> None:
    assert render_markdown(sample_document(), "charts") == render_markdown(sample_document(), "charts")


def test_without_vl_convert_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vl_convert", None)  # what Python does for a package that is not installed
    with pytest.raises(MissingExtraError, match=r"'vl-convert-python'.*oelm\[report\]"):
        render_markdown(only(curves()), "charts")


def test_without_charts_no_extra_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vl_convert", None)
    assert render_markdown(only(verdicts()), "charts")[1] == {}
