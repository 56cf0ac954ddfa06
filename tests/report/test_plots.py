"""A report's charts read alike: one shape for each data set, and lines that say what they are."""

from __future__ import annotations

import xml.etree.ElementTree as ET

import pytest

from oelm.report.charts import PAPER, Target, chart_svg, forest_by_set

SVG = "{http://www.w3.org/2000/svg}"
TARGET = Target(1.05, "target 1.05x", "the target: 1.05 times", "baseline")


def texts(picture: ET.Element) -> list[str]:
    return ["".join(element.itertext()) for element in picture.iter(f"{SVG}text")]


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


def test_labels_of_several_lines_are_all_there() -> None:
    names = ["first", "second", "third"]
    rows = [{"name": name, "arm": "set", "value": 1, "low": 0.9, "high": 1.1, "text": "", "verdict": ""} for name in names]
    labels = {"first": ("one", "two"), "second": ("three", "four", "five")}
    spec = forest_by_set(rows, ["set"], target=TARGET, title="ratio", labels=labels)
    drawn = texts(ET.fromstring(chart_svg(spec, config=PAPER, prefix="still")))
    assert {"onetwo", "threefourfive", "third"} <= {"".join(text.split()) for text in drawn}


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


def test_data_sets_differ_in_shape_and_a_picture_of_many_methods_is_no_higher_than_a_window() -> None:
    sets = ["one", "two", "three"]
    rows = [
        {"name": f"arm-{n}", "arm": name, "value": 1.0, "low": 0.9, "high": 1.1, "text": "", "verdict": ""}
        for n in range(40)
        for name in sets
    ]
    spec = forest_by_set(rows, sets, target=TARGET, title="ratio")
    picture = ET.fromstring(chart_svg(spec, config=PAPER, prefix="still"))
    assert float(picture.attrib["height"]) < 700
    (scale,) = [layer["encoding"]["shape"]["scale"] for layer in spec["layer"] if "shape" in layer["encoding"]]
    assert len(set(scale["range"])) == len(sets)
