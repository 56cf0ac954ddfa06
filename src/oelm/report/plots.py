"""Charts of a report as Vega-Lite data: one definition gives the interactive and the printed picture."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

_SCHEMA = "https://vega.github.io/schema/vega-lite/v5.json"
Rows = Sequence[dict[str, Any]]
# Circles for the first data set and so on: colours alone do not tell them apart for everyone.
_SHAPES = ("circle", "square", "triangle-up", "diamond", "cross", "triangle-down", "triangle-left", "triangle-right")
# A picture that opens a report shows whole in a window of 700 pixels, axis and legend included.
_MOST_HEIGHT = 520


def curves(rows: Rows, arms: Sequence[str], *, x: str, y: str, points: bool = True) -> dict[str, Any]:
    """Return mean lines with bands from the lowest to the highest seed. Rows have step, arm, mean, low and high."""
    colour = _colour(arms)
    shared: dict[str, Any] = {"x": _axis("step", x), "color": colour}
    tooltip = [
        {"field": "arm", "type": "nominal", "title": " "},
        {"field": "step", "type": "quantitative", "title": x},
        {"field": "mean", "type": "quantitative", "title": y, "format": ".4f"},
        {"field": "seeds", "type": "quantitative", "title": "n"},
    ]
    band = {
        "mark": {"type": "area", "opacity": 0.2},
        "encoding": {**shared, "y": _axis("low", y, zero=False), "y2": {"field": "high"}},
    }
    line = {
        "mark": {"type": "line", "point": points},
        "encoding": {**shared, "y": _axis("mean", y, zero=False), "tooltip": tooltip},
        # Drag, or scroll with shift held, to look closer; a double click brings the whole back.
        "params": [{"name": "look", "select": {"type": "interval", "zoom": "wheel![event.shiftKey]"}, "bind": "scales"}],
    }
    return _chart(rows, {"layer": [band, line]}, height=320)


class Target(NamedTuple):
    """What arms are held against: where its line is, its name in a picture, and the whole of it; `none` names no difference."""

    bound: float
    name: str
    told: str
    none: str
    # Of ratios one, of differences zero.
    nothing: float = 1.0


def forest_by_set(rows: Rows, sets: Sequence[str], *, target: Target, title: str, faint: str = "") -> dict[str, Any]:
    """Return, for each name, a point with its interval on every data set. Rows have name, arm (the set), value, low, high.

    `faint` names a field of the rows: where that is false, the row is drawn faintly.
    """
    order = list(dict.fromkeys(row["name"] for row in rows))
    shared: dict[str, Any] = {
        "y": {"field": "name", "type": "nominal", "sort": order, "title": None, "axis": {"labelLimit": 320, "grid": True}},
        "yOffset": {"field": "arm", "sort": list(sets)},
        # Names of data sets are short: a row holds four, and what the last of them measures, by whatever font, moves nothing.
        "color": _colour(sets, columns=4),
        "tooltip": [{"field": name, "type": "nominal", "title": " "} for name in ("name", "arm", "text", "verdict")],
    }
    if faint:
        shared["opacity"] = {"condition": {"test": f"datum.{faint}", "value": 1}, "value": 0.3}
    shape = _colour(sets, columns=4)
    shape["scale"] = {"domain": list(sets), "range": [_SHAPES[number % len(_SHAPES)] for number in range(len(sets))]}
    ticks = _ticks(rows, target)
    interval = {
        "mark": {"type": "rule", "strokeWidth": 2},
        "encoding": {**shared, "x": _axis("low", title, zero=False) | ticks, "x2": {"field": "high"}},
    }
    point = {
        "mark": {"type": "point", "filled": True, "size": 60, "opacity": 1},
        "encoding": {**shared, "shape": shape, "x": _axis("value", title, zero=False) | ticks},
    }
    height = min(_MOST_HEIGHT, len(order) * (12 * len(sets) + 16))
    return _chart(rows, {"layer": [*_lines(rows, target), interval, point]}, height=height)


def _ends(rows: Rows, target: Target) -> tuple[float, float]:
    """Return from where to where a picture of these intervals reaches."""
    ends = [float(row[end]) for row in rows for end in ("low", "high")]
    reached = [target.bound, target.nothing, *(end for end in ends if math.isfinite(end))]
    return min(reached), max(reached)


def _ticks(rows: Rows, target: Target) -> dict[str, Any]:
    """Return an axis with a label at both lines, where Vega's own ticks may leave out the very one that is no difference."""
    low, high = _ends(rows, target)
    step = next(step for n in itertools.count() if (high - low) / (step := (0.01, 0.02, 0.05)[n % 3] * 10 ** (n // 3)) <= 8)
    first, last = math.ceil((low - target.nothing) / step), math.floor((high - target.nothing) / step)
    regular = [round(target.nothing + n * step, 2) for n in range(first, last + 1)]
    # None so near the target that their labels would touch.
    apart = [tick for tick in regular if tick == target.nothing or abs(tick - target.bound) > 0.49 * step]
    values = sorted({*apart, target.bound})
    # Of labels that would touch on a narrow page the first stays, and that of no difference comes before its target's.
    return {"axis": {"values": values, "format": ".2f", "labelOverlap": "greedy", "labelSeparation": 2}}


def _lines(rows: Rows, target: Target) -> list[dict[str, Any]]:
    """Return two lines with their names above them: no difference, and the target."""
    low, high = _ends(rows, target)
    is_first = target.nothing < target.bound
    none_left = is_first if _has_room(target.nothing, low, high, is_left=is_first) else not is_first
    bound_left = not is_first if _has_room(target.bound, low, high, is_left=not is_first) else is_first
    # Names that do not lead away from each other stand one above the other.
    height = -4 if none_left is is_first and bound_left is not is_first else -17
    none = {"mark": {"type": "rule", "color": "#999999"}, **_at(target.nothing, target.none)}
    limit = {"mark": {"type": "rule", "strokeDash": [6, 4], "color": "#D55E00"}, **_at(target.bound, target.told)}
    return [
        none,
        limit,
        _name(target.nothing, target.none, is_left=none_left, height=height),
        _name(target.bound, target.name, is_left=bound_left, height=-4),
    ]


def _has_room(place: float, low: float, high: float, *, is_left: bool) -> bool:
    """Whether a line's name fits beside it: a fifth of a picture holds any."""
    return (place - low if is_left else high - place) >= 0.2 * (high - low)


def _at(place: float, told: str) -> dict[str, Any]:
    encoding = {"x": {"field": "place", "type": "quantitative"}, "tooltip": {"field": "told", "type": "nominal"}}
    return {"data": {"values": [{"place": place, "told": told}]}, "encoding": encoding}


def _name(place: float, name: str, *, is_left: bool, height: int) -> dict[str, Any]:
    # No part of the picture's size is what a name measures, by whatever font.
    mark = {"type": "text", "align": "right" if is_left else "left", "baseline": "bottom", "dy": height, "fontSize": 11}
    encoding = {"x": {"field": "place", "type": "quantitative"}, "y": {"value": 0}, "text": {"field": "name"}}
    return {"mark": mark, "data": {"values": [{"place": place, "name": name}]}, "encoding": encoding}


def grouped(rows: Rows, arms: Sequence[str], *, x: str, y: str) -> dict[str, Any]:
    """Return a value for each arm in each group, with its spread. Rows have group, arm, mean, low and high."""
    shared: dict[str, Any] = {
        "x": {"field": "group", "type": "ordinal", "title": x, "axis": {"labelAngle": 0}},
        "xOffset": {"field": "arm", "sort": list(arms)},
        "color": _colour(arms),
    }
    spread = {"mark": {"type": "rule", "strokeWidth": 2}, "encoding": {**shared, "y": _axis("low", y), "y2": {"field": "high"}}}
    tooltip = [
        {"field": "arm", "type": "nominal", "title": " "},
        {"field": "group", "type": "nominal", "title": x},
        {"field": "mean", "type": "quantitative", "title": y, "format": ".3f"},
    ]
    point = {
        "mark": {"type": "point", "filled": True, "size": 60},
        "encoding": {**shared, "y": _axis("mean", y), "tooltip": tooltip},
    }
    return _chart(rows, {"layer": [spread, point]}, height=240)


def _chart(rows: Rows, body: dict[str, Any], *, height: Any) -> dict[str, Any]:
    return {"$schema": _SCHEMA, "data": {"values": list(rows)}, "width": "container", "height": height, **body}


def _axis(field: str, title: str, *, zero: bool = True) -> dict[str, Any]:
    return {"field": field, "type": "quantitative", "title": title, "scale": {"zero": zero}}


def _colour(arms: Sequence[str], *, columns: int = 3) -> dict[str, Any]:
    # The page's own palette, which follows its theme; its first colour is for the baseline.
    return {
        "field": "arm",
        "type": "nominal",
        "sort": list(arms),
        "title": None,
        "scale": {"domain": list(arms)},
        "legend": {"orient": "bottom", "columns": columns, "labelLimit": 260},
    }
