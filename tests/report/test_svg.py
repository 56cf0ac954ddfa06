"""Stills of charts are small, the same every time, and carry nothing that acts."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from typing import Any

import pytest

from oelm.report.charts import PAGE, PAPER, Target, chart_svg, forest_by_set
from tests.report.sample_document import curves, forest, heads, side_by_side

SVG = "{http://www.w3.org/2000/svg}"
LINKED: dict[str, Any] = {
    "data": {"values": [{"x": 1, "to": "https://evil.example", "at": "https://evil.example/p.png"}]},
    "layer": [
        {"mark": "point", "encoding": {"x": {"field": "x", "type": "quantitative"}, "href": {"field": "to"}}},
        {"mark": "image", "encoding": {"x": {"field": "x", "type": "quantitative"}, "url": {"field": "at"}}},
    ],
}


@pytest.mark.parametrize("chart", [curves(), forest(), heads(), side_by_side()], ids=lambda chart: chart.name)
def test_a_still_is_small(chart: Any) -> None:
    # Vega's own output takes two to four times as much.
    assert len(chart_svg(chart.spec, config=PAGE, prefix="still")) < 20_000


def test_a_chart_drawn_again_is_the_same_but_for_its_prefix() -> None:
    one, other = (chart_svg(heads().spec, config=PAGE, prefix=prefix) for prefix in ("one", "other"))
    assert one.replace("one-", "other-") == other and 'id="one-0"' in one


def test_every_reference_finds_its_definition() -> None:
    drawn = chart_svg(heads().spec, config=PAGE, prefix="still")
    ids = {element.attrib["id"] for element in ET.fromstring(drawn).iter() if "id" in element.attrib}
    assert set(re.findall(r"url\(#([^)]*)\)", drawn)) <= ids and ids


def painted(element: ET.Element, fill: str = "black", stroke: str = "none") -> bool:
    """Whether every path that a picture draws, other than those it clips by, has a colour of its own or of what it is in."""
    fill, stroke = element.get("fill", fill), element.get("stroke", stroke)
    if element.tag == SVG + "path" and {fill, stroke} <= {"none", "transparent"}:
        return False
    return element.tag == SVG + "clipPath" or all(painted(child, fill, stroke) for child in element)


@pytest.mark.parametrize("chart", [curves(), forest(), heads(), side_by_side()], ids=lambda chart: chart.name)
def test_nothing_is_drawn_without_a_colour(chart: Any) -> None:
    drawn = ET.fromstring(chart_svg(chart.spec, config=PAPER, prefix="still"))
    assert painted(drawn) and drawn.findall(f".//{SVG}path")


def test_how_wide_the_last_of_four_data_sets_is_moves_nothing() -> None:
    # Of two fonts of one name one sets "11" closer than the other: a picture must not tell which a machine has.
    pictures = []
    for last in ("set-11", "set-1111"):
        sets = ["one", "two", "three", last]
        rows = [{"name": "arm", "arm": name, "value": 1.0, "low": 0.9, "high": 1.1, "text": "", "verdict": ""} for name in sets]
        spec = forest_by_set(rows, sets, target=Target(1.05, "target", "the target", "baseline"), title="ratio")
        pictures.append(chart_svg(spec, config=PAPER, prefix="still").replace(last, "last"))
    assert pictures[0] == pictures[1]


def test_links_and_images_are_left_out() -> None:
    drawn = chart_svg(LINKED, config=PAPER, prefix="still")
    assert "evil" not in drawn and {element.tag for element in ET.fromstring(drawn).iter()} <= {
        SVG + tag for tag in ("svg", "g", "path", "rect", "line", "text")
    }


def test_figures_in_texts_keep_their_digits() -> None:
    spec = {"data": {"values": [{"x": 1, "label": "0.123456"}]}, "mark": "text", "encoding": {"text": {"field": "label"}}}
    assert ">0.123456<" in chart_svg(spec, config=PAPER, prefix="still")


def test_colours_of_a_page_are_left_to_its_style_sheet() -> None:
    drawn = chart_svg(curves().spec, config=PAGE, prefix="still")
    assert set(re.findall(r'(?:fill|stroke)="([^"]*)"', drawn)) <= {"none", "transparent", "currentColor"} | {
        f"var(--{name})" for name in ("muted", "rule", *(f"series-{n}" for n in range(1, 9)))
    }


def test_a_theme_that_a_chart_brings_along_does_not_show() -> None:
    assert "white" not in chart_svg(curves().spec | {"background": "white"}, config=PAGE, prefix="still")
