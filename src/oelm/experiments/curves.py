"""Learning curves in plain text: lines of Braille dots, eight to a character, with a letter where each one ends."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from oelm.experiments.monitor import RunView, evaluations, is_number

Point = tuple[float, float]
LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
_MIN_WIDTH, _MIN_HEIGHT, _MAX_LETTERS = 24, 4, 4
_BLANK = 0x2800
# The dot of a Braille character at (column, row): Unicode numbers the lowest row last, for it came later.
_DOTS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))


@dataclass(frozen=True)
class Drawing:
    """A plot as lines of text. `owners` gives the series of each place in them that shows one."""

    lines: tuple[str, ...]
    owners: Mapping[tuple[int, int], int]


@dataclass(frozen=True)
class Frame:
    """The window of values that a plot shows, and the number of dots it has for them."""

    left: float
    right: float
    low: float
    high: float
    columns: int
    rows: int

    def column(self, x: float) -> int:
        return _share(x, self.left, self.right, self.columns)

    def row(self, y: float) -> int:
        return self.rows - 1 - _share(y, self.low, self.high, self.rows)


def _share(value: float, low: float, high: float, count: int) -> int:
    # A single value has no span: it stands in the middle.
    part = 0.5 if high <= low else (value - low) / (high - low)
    return min(max(round(part * (count - 1)), 0), count - 1)


def plot(series: Mapping[str, Sequence[tuple[float, float | None]]], *, width: int, height: int) -> str:
    """Return a plot of named series of (x, y), `height` lines high beside axis and legend; what is no number is skipped."""
    return "\n".join(draw(series, width=width, height=height).lines)


def draw(series: Mapping[str, Sequence[tuple[float, float | None]]], *, width: int, height: int) -> Drawing:
    """Return the same plot with what is needed to colour it."""
    width, height = max(width, _MIN_WIDTH), max(height, _MIN_HEIGHT)
    curves = [_finite(points) for points in series.values()]
    shown = [point for curve in curves for point in curve]
    if not shown:
        return Drawing(("no evaluations yet",), {})
    xs, ys = [x for x, _ in shown], [y for _, y in shown]
    ticks = _ticks(min(ys), max(ys), height)
    margin = max(map(len, ticks.values()))
    # Right of the dots: a space and the letters of the lines that end there.
    inner = max(width - margin - 2 - min(len(curves), _MAX_LETTERS) - 1, 8)
    frame = Frame(min(xs), max(xs), min(ys), max(ys), 2 * inner, 4 * height)
    cells, owners = _cells(curves, frame)
    ends = _ends(curves, frame)
    lines = []
    for row in range(height):
        dots = "".join(chr(_BLANK + cells.get((row, column), 0)) for column in range(inner))
        letters = "".join(_letter(index) for index in ends.get(row, ()))
        lines.append(f"{ticks.get(row, ''):>{margin}} \u2502{dots} {letters}".rstrip())
    lines += [" " * (margin + 1) + "\u2514" + "\u2500" * inner, _x_axis(frame, margin, inner)]
    owned = {(row, column + margin + 2): index for (row, column), index in owners.items()}
    owned |= {(row, margin + inner + 3 + n): index for row, those in ends.items() for n, index in enumerate(those)}
    return _with_legend(lines, owned, list(series), curves)


def _finite(points: Iterable[tuple[Any, Any]]) -> list[Point]:
    return sorted((float(x), float(y)) for x, y in points if is_number(x) and is_number(y))


def _ticks(low: float, high: float, height: int) -> dict[int, str]:
    """Return what stands beside which line of the plot; a flat curve has one value only."""
    values = {0: high, height - 1: low} if high > low else {}
    return {row: f"{value:.4g}" for row, value in {**values, (height - 1) // 2: (low + high) / 2}.items()}


def _letter(index: int) -> str:
    return LETTERS[index % len(LETTERS)]


def _x_axis(frame: Frame, margin: int, inner: int) -> str:
    first, last = f"{frame.left:g}", f"{frame.right:g}"
    middle = "step" if first == last else f"step {last}".rjust(inner - len(first))
    return " " * (margin + 2) + first + (" " + middle if first == last else middle)


def _with_legend(
    lines: list[str], owned: dict[tuple[int, int], int], names: list[str], curves: Sequence[Sequence[Point]]
) -> Drawing:
    for index, (name, curve) in enumerate(zip(names, curves, strict=True)):
        owned[(len(lines), 2)] = index
        last = f"{curve[-1][1]:.4g} at step {curve[-1][0]:g}" if curve else "no evaluations yet"
        lines.append(f"  {_letter(index)}  {name}: {last}")
    return Drawing(tuple(lines), owned)


def _cells(curves: Sequence[Sequence[Point]], frame: Frame) -> tuple[dict[tuple[int, int], int], dict[tuple[int, int], int]]:
    """Return the dots of each character cell, and the last series that drew there."""
    cells: dict[tuple[int, int], int] = {}
    owners: dict[tuple[int, int], int] = {}
    for index, curve in enumerate(curves):
        for x, y in _dots(_bands(curve, frame)):
            place = (y // 4, x // 2)
            cells[place] = cells.get(place, 0) | _DOTS[x % 2][y % 4]
            owners[place] = index
    return cells, owners


def _bands(curve: Sequence[Point], frame: Frame) -> dict[int, list[int]]:
    """Return the rows that a curve passes in each column of dots, in its order: a long one costs no more to draw."""
    bands: dict[int, list[int]] = {}
    for x, y in curve:
        bands.setdefault(frame.column(x), []).append(frame.row(y))
    return bands


def _dots(bands: Mapping[int, Sequence[int]]) -> Iterator[tuple[int, int]]:
    """Yield the dots of a line; what is steep, or passes one column up and down, is closed, so that it has no holes."""
    for x, rows in bands.items():
        yield from ((x, row) for row in range(min(rows), max(rows) + 1))
    for (x0, before), (x1, after) in itertools.pairwise(bands.items()):
        rows = [round(before[-1] + (after[0] - before[-1]) * (x - x0) / (x1 - x0)) for x in range(x0, x1 + 1)]
        for x, (here, there) in enumerate(itertools.pairwise(rows), start=x0):
            yield from ((x, row) for row in range(min(here, there), max(here, there) + 1))


def _ends(curves: Sequence[Sequence[Point]], frame: Frame) -> dict[int, list[int]]:
    """Return which series end at each line of text, the last value of each being what it is read by."""
    ends: dict[int, list[int]] = {}
    for index, curve in enumerate(curves):
        if curve:
            ends.setdefault(frame.row(curve[-1][1]) // 4, []).append(index)
    return {row: those[:_MAX_LETTERS] for row, those in ends.items()}


def learning_curves(views: Sequence[RunView], baselines: Mapping[str, str]) -> dict[str, dict[str, list[Point]]]:
    """Return validation loss by step, averaged over seeds: for each budget and variant, a baseline's arms together."""
    runs: dict[str, dict[str, list[RunView]]] = {}
    for view in views:
        title = f"{baselines.get(view.experiment, view.experiment)} {view.budget} {view.variant}"
        runs.setdefault(title, {}).setdefault(view.experiment, []).append(view)
    found = {title: {name: _mean_curve(those) for name, those in arms.items()} for title, arms in sorted(runs.items())}
    return {title: dict(arms.values()) for title, arms in found.items() if any(curve for _, curve in arms.values())}


def _mean_curve(views: Sequence[RunView]) -> tuple[str, list[Point]]:
    losses: dict[int, list[float]] = {}
    for view in views:
        for step, row in evaluations(view.folder).items():
            if is_number(row.get("val_loss")):
                losses.setdefault(step, []).append(row["val_loss"])
    seeds = "" if len(views) == 1 else f", mean of up to {len(views)} seeds"
    curve = [(float(step), math.fsum(values) / len(values)) for step, values in sorted(losses.items())]
    return f"{views[0].experiment}{seeds}", curve
