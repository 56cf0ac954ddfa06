"""A report's charts read alike: one look for each verdict, and lines that say what they are."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from collections.abc import Sequence
from typing import get_args

import pytest

from oelm.report.plots import SHAPES, Target, forest, forest_by_set
from oelm.report.svg import PAPER, chart_svg
from oelm.report.verdict import Verdict

SVG = "{http://www.w3.org/2000/svg}"
# What a comparison without an interval has, of which there is nothing to draw.
UNDRAWN = {"ONE_SEED", "NO_BASELINE", "UNFINISHED"}
TARGET = Target(1.05, "target 1.05x", "the target: 1.05 times", "baseline")
NAMES = {code: code.lower() for code in SHAPES}


def drawn(verdicts: Sequence[str]) -> ET.Element:
    """Return a picture of arms that were given these verdicts."""
    rows = [
        {"name": f"arm-{n}", "value": 1.02, "low": 1.0, "high": 1.1, "text": "", "verdict": NAMES[code]}
        for n, code in enumerate(verdicts)
    ]
    spec = forest(rows, NAMES, target=TARGET, title="ratio")
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


def of_intervals(*intervals: tuple[float, float], target: Target = TARGET) -> ET.Element:
    """Return a picture of intervals on one data set."""
    rows = [
        {"name": f"arm-{n}", "arm": "set", "value": low, "low": low, "high": high, "text": "", "verdict": ""}
        for n, (low, high) in enumerate(intervals)
    ]
    return ET.fromstring(chart_svg(forest_by_set(rows, ["set"], target=target, title="ratio"), config=PAPER, prefix="still"))


@pytest.mark.parametrize("interval", [(0.754, 1.372), (1.004, 1.053), (0.99, 1.01), (0.95, 1.12)], ids=str)
def test_no_difference_and_the_target_are_labelled_and_named(interval: tuple[float, float]) -> None:
    assert {"1.00", "1.05", "baseline", "target 1.05x"} <= set(texts(of_intervals(interval)))


def test_a_target_in_points_is_labelled_and_named_too() -> None:
    points_lost = Target(-0.05, "target -5 points", "the target: 5 points below", "baseline", nothing=0.0)
    assert {"0.00", "\u22120.05", "baseline", "target -5 points"} <= set(texts(of_intervals((-0.02, 0.01), target=points_lost)))


def test_ticks_stay_few_however_far_an_interval_reaches() -> None:
    assert len(texts(of_intervals((0.5, 90.0)))) < 20


@pytest.mark.parametrize("interval", [(0.754, 1.372), (1.004, 1.053), (0.7, 0.9)], ids=str)
def test_how_wide_the_name_of_a_line_is_moves_nothing(interval: tuple[float, float]) -> None:
    # As of the names of data sets: fonts of one name differ by a little.
    one, other = (
        ET.tostring(of_intervals(interval, target=TARGET._replace(name=name, none=none)), encoding="unicode")
        for name, none in (("target 1.05x", "baseline"), ("target 11.05x", "baselines"))
    )
    assert one == other.replace("11.05x", "1.05x").replace("baselines", "baseline")
