"""A report's charts read alike: one look for each verdict, and lines that say what they are."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from collections.abc import Sequence
from typing import get_args

import pytest

from oelm.report.plots import SHAPES, forest
from oelm.report.svg import PAPER, chart_svg
from oelm.report.verdict import Verdict

SVG = "{http://www.w3.org/2000/svg}"
# What a comparison without an interval has, of which there is nothing to draw.
UNDRAWN = {"ONE_SEED", "NO_BASELINE", "UNFINISHED"}
NAMES = {code: code.lower() for code in SHAPES}


def drawn(verdicts: Sequence[str]) -> ET.Element:
    """Return a picture of arms that were given these verdicts."""
    rows = [
        {"name": f"arm-{n}", "value": 1.02, "low": 1.0, "high": 1.1, "text": "", "verdict": NAMES[code]}
        for n, code in enumerate(verdicts)
    ]
    spec = forest(rows, NAMES, bound=1.05, title="ratio", bound_title="target")
    return ET.fromstring(chart_svg(spec, config=PAPER, prefix="still"))


def texts(picture: ET.Element) -> list[str]:
    return ["".join(element.itertext()) for element in picture.iter(f"{SVG}text")]


def points(picture: ET.Element) -> list[tuple[str | None, str | None]]:
    """Return outline and colour of every filled mark, those of the legend behind those of the arms."""
    return [(mark.get("d"), mark.get("fill")) for mark in picture.iter(f"{SVG}path") if (mark.get("fill") or "")[0:1] == "#"]


def test_every_verdict_that_has_an_interval_has_a_look() -> None:
    assert {*get_args(Verdict), "SMOKE"} - UNDRAWN == set(SHAPES) and len(set(SHAPES.values())) == len(SHAPES)


@pytest.mark.parametrize(("code", "colour"), [("PASS", "#009E73"), ("FAIL", "#D55E00"), ("INCONCLUSIVE", "#0072B2")])
def test_a_verdict_looks_the_same_whatever_others_stand_beside_it(code: str, colour: str) -> None:
    alone = points(drawn([code]))[0]
    assert alone[1] == colour
    for others in (["PASS", "FAIL"], ["FAIL", "INCONCLUSIVE", "EXPLORATORY"], ["SMOKE"]):
        assert alone == points(drawn([*others, code]))[len(others)]


def test_the_legend_names_the_verdicts_of_the_picture_alone() -> None:
    assert set(NAMES.values()) & set(texts(drawn(["FAIL", "PASS", "FAIL"]))) == {"fail", "pass"}
