"""Curves as text: every number drawn is shown, and no series, however odd, is a crash."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from oelm.experiments.curves import draw, learning_curves, plot
from oelm.experiments.monitor import scan
from tests.experiments.recorded import record

BLANK = "\u2800"


def dots(text: str) -> int:
    return sum((ord(c) - ord(BLANK)).bit_count() for c in text if BLANK <= c <= "\u28ff")


def grid(text: str) -> list[str]:
    """Return the lines of the plot itself, from the axis on."""
    return [line.split("\u2502")[1] for line in text.splitlines() if "\u2502" in line]


def test_a_single_point_is_one_dot_with_its_value() -> None:
    text = plot({"one": [(5, 2.5)]}, width=40, height=6)
    assert dots(text) == 1 and "A  one: 2.5 at step 5" in text
    # A scale from 2.5 to 2.5 would say nothing: the value stands once, beside the dot.
    assert [line for line in text.splitlines() if line.startswith("2.5")] == [text.splitlines()[2]]


def test_a_flat_line_is_one_row_of_dots_in_the_middle() -> None:
    rows = grid(plot({"flat": [(step, 2.0) for step in range(10)]}, width=40, height=5))
    assert [dots(row) > 0 for row in rows] == [False, False, True, False, False]
    assert BLANK not in rows[2]


def test_a_falling_line_falls_from_the_top_left_to_the_bottom_right() -> None:
    rows = grid(plot({"loss": [(0, 4.0), (100, 1.0)]}, width=60, height=8))
    first = [min(index for index, c in enumerate(row) if c not in (BLANK, " ")) for row in rows]
    assert first == sorted(first) and first[0] == 0 and dots(rows[-1][-4:]) > 0


def test_a_steep_line_has_no_holes() -> None:
    rows = grid(plot({"loss": [(0, 1.0), (1, 100.0), (1000, 1.0)]}, width=60, height=8))
    assert all(dots(row) > 0 for row in rows)


@pytest.mark.parametrize("odd", [math.nan, math.inf, -math.inf, None, 1e301])
def test_what_is_no_number_is_skipped(odd: float | None) -> None:
    good = [(1.0, 3.0), (2.0, 2.0), (4.0, 1.0)]
    assert plot({"a": [*good[:2], (3.0, odd), good[2]]}, width=40, height=6) == plot({"a": good}, width=40, height=6)


@pytest.mark.parametrize("series", [{}, {"a": []}, {"a": [(1, None)], "b": [(math.nan, 1.0)]}])
def test_nothing_to_draw_is_said(series: dict[str, list[tuple[float, float | None]]]) -> None:
    assert plot(series, width=80, height=10) == "no evaluations yet"


def test_a_series_without_numbers_beside_another_is_named() -> None:
    text = plot({"a": [(1, 2.0)], "b": []}, width=40, height=5)
    assert "B  b: no evaluations yet" in text


def test_a_million_points_fit_the_same_place_as_ten() -> None:
    long = plot({"long": [(step, 1 + 1e6 / (step + 1e5)) for step in range(10**6)]}, width=70, height=10)
    short = plot({"long": [(step, 1 + 1e6 / (step + 1e5)) for step in range(0, 10**6, 10**5)]}, width=70, height=10)
    assert len(long.splitlines()) == len(short.splitlines()) and max(map(len, long.splitlines())) <= 70


@pytest.mark.parametrize("width", [0, 24, 40, 80, 200])
@pytest.mark.parametrize("count", [1, 3, 60])
def test_a_plot_keeps_to_its_width(width: int, count: int) -> None:
    series = {f"arm-{n}": [(step, 3.0 + n + 1 / step) for step in (1, 10, 100)] for n in range(count)}
    lines = plot(series, width=width, height=6).splitlines()
    assert max(map(len, lines[:8])) <= max(width, 24)
    assert len(lines) == 6 + 2 + count


def test_each_line_ends_in_the_letter_of_its_series() -> None:
    rows = grid(plot({"high": [(1, 5.0), (9, 4.0)], "low": [(1, 5.0), (9, 1.0)]}, width=50, height=10))
    ends = "".join(row.split(" ")[1] for row in rows if " " in row)
    assert ends == "AB"


def test_the_places_to_colour_are_those_that_show_a_series() -> None:
    drawing = draw({"a": [(1, 5.0), (9, 4.0)], "b": [(1, 5.0), (9, 1.0)]}, width=50, height=10)
    shown = {drawing.lines[line][column] for line, column in drawing.owners}
    assert {"A", "B"} < shown and BLANK not in shown and " " not in shown
    assert set(drawing.owners.values()) == {0, 1}


def test_arms_stand_beside_their_baseline_and_seeds_are_averaged(tmp_path: Path) -> None:
    for experiment, seed, loss in (("GPT-01", 0, 3.0), ("GPT-02", 0, 3.5), ("GPT-02", 1, 4.5), ("GPT-09", 0, 1.0)):
        run = record(tmp_path, "done", experiment=experiment, seed=seed)
        rows = [{"step": 10, "val_loss": loss}, {"step": 20, "val_loss": loss - 1}, {"step": 30, "val_loss": "low"}]
        (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    record(tmp_path, "queued", experiment="GPT-09", variant="other")
    assert learning_curves(scan(tmp_path), {"GPT-02": "GPT-01"}) == {
        "GPT-01 smoke default": {
            "GPT-01": [(10.0, 3.0), (20.0, 2.0)],
            "GPT-02, mean of up to 2 seeds": [(10.0, 4.0), (20.0, 3.0)],
        },
        "GPT-09 smoke default": {"GPT-09": [(10.0, 1.0), (20.0, 0.0)]},
    }
