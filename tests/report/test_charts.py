"""The picture of heads shows every head's figures, as whole files that are the same every time."""

from __future__ import annotations

import struct
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest

from oelm.report.charts import FONTS, MEASURED, PAGE, PAPER, head_grid, save_chart

_TEXT = "{http://www.w3.org/2000/svg}text"
MEASURES = ("entropy", "effective_rank", "logit_std", "mean_distance", "induction")
HEADS: list[dict[str, Any]] = [
    {"layer": layer, "head": head, **{name: 1.25 + layer + head / 2 for name in MEASURES}}
    for layer in (0, 1)
    for head in (0, 1)
]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return save_chart(head_grid(HEADS), tmp_path_factory.mktemp("charts") / "new" / "gpt-02.heads")


def test_a_chart_becomes_an_svg_and_a_png_under_a_name_with_a_dot(files: list[Path]) -> None:
    assert [path.name for path in files] == ["gpt-02.heads.svg", "gpt-02.heads.png"] and all(path.is_file() for path in files)


def test_every_head_has_its_figure_in_every_panel(files: list[Path]) -> None:
    assert ET.parse(files[0]).getroot().tag == "{http://www.w3.org/2000/svg}svg"
    shown = ["".join(element.itertext()) for element in ET.parse(files[0]).iter(_TEXT)]
    assert [shown.count(f"{value:g}") for value in (1.25, 1.75, 2.25, 2.75)] == [len(MEASURES)] * 4


def test_the_png_is_a_png_of_some_size(files: list[Path]) -> None:
    content = files[1].read_bytes()
    width, height = struct.unpack(">II", content[16:24])
    assert content[:8] == b"\x89PNG\r\n\x1a\n" and width > 500 and height > 300


def test_the_same_heads_give_the_same_svg(files: list[Path], tmp_path: Path) -> None:
    assert save_chart(head_grid(HEADS), tmp_path / "other")[0].read_bytes() == files[0].read_bytes()


def test_texts_are_measured_by_a_font_that_every_machine_has(files: list[Path]) -> None:
    texts = list(ET.parse(files[0]).iter(_TEXT))
    assert texts and {element.get("font-family") for element in texts} == {FONTS}
    # What vl-convert brings along; its widths are Arial's, which readers have.
    assert PAPER["font"] == PAGE["font"] == MEASURED and FONTS.startswith("Arial, 'Liberation Sans'")
