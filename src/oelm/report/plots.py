"""Charts of a report as Vega-Lite data: one definition gives the interactive and the printed picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

_SCHEMA = "https://vega.github.io/schema/vega-lite/v5.json"
Rows = Sequence[dict[str, Any]]
# The shape of every verdict that has an interval, in all pictures alike. Their order is that of the page's palette: blue, red
# and green fall to the three that decide something, and the shape tells them apart where colours do not.
SHAPES = {
    "EXPLORATORY": "diamond",
    "INCONCLUSIVE": "triangle-up",
    "FAIL": "square",
    "PASS": "circle",
    "CONFOUNDED": "triangle-down",
    "NO_CRITERION": "cross",
    "UNFIT_BASELINE": "triangle-left",
    "SMOKE": "triangle-right",
}


def curves(rows: Rows, arms: Sequence[str], *, x: str, y: str) -> dict[str, Any]:
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
        "mark": {"type": "line", "point": True},
        "encoding": {**shared, "y": _axis("mean", y, zero=False), "tooltip": tooltip},
        # Drag, or scroll with shift held, to look closer; a double click brings the whole back.
        "params": [{"name": "look", "select": {"type": "interval", "zoom": "wheel![event.shiftKey]"}, "bind": "scales"}],
    }
    return _chart(rows, {"layer": [band, line]}, height=320)


def forest(rows: Rows, verdicts: Mapping[str, str], *, bound: float, title: str, bound_title: str) -> dict[str, Any]:
    """Return points with intervals and a line at the bound. Rows have name, value, low, high, verdict; in this order.

    `verdicts` are the names of those of `SHAPES`, whether they stand in a row or not.
    """
    order = [row["name"] for row in rows]
    y = {"field": "name", "type": "nominal", "sort": order, "title": None, "axis": {"labelLimit": 320}}
    tooltip = [{"field": name, "type": "nominal", "title": " "} for name in ("name", "text", "verdict")]
    interval = {
        "mark": {"type": "rule", "strokeWidth": 2},
        "encoding": {"y": y, "x": _axis("low", title, zero=False), "x2": {"field": "high"}, "tooltip": tooltip},
    }
    point = {
        "mark": {"type": "point", "filled": True, "size": 90},
        "encoding": {
            "y": y,
            "x": _axis("value", title, zero=False),
            **_verdict_look(rows, verdicts),
            "tooltip": tooltip,
        },
    }
    return _chart(rows, {"layer": [*_bounds(bound, bound_title), interval, point]}, height={"step": 26})


def _verdict_look(rows: Rows, verdicts: Mapping[str, str]) -> dict[str, Any]:
    """Return shape and colour by verdict: the same whichever others a picture shows, and a legend of those alone."""
    named = [verdicts[code] for code in SHAPES]
    seen = {row["verdict"] for row in rows}
    field = {
        "field": "verdict",
        "type": "nominal",
        "title": None,
        "legend": {"values": [name for name in named if name in seen]},
    }
    return {
        "shape": {**field, "scale": {"domain": named, "range": list(SHAPES.values())}},
        "color": {**field, "scale": {"domain": named}},
    }


def forest_by_set(rows: Rows, sets: Sequence[str], *, bound: float, title: str, bound_title: str) -> dict[str, Any]:
    """Return, for each name, a point with its interval on every data set. Rows have name, arm (the set), value, low, high."""
    order = list(dict.fromkeys(row["name"] for row in rows))
    shared: dict[str, Any] = {
        "y": {"field": "name", "type": "nominal", "sort": order, "title": None, "axis": {"labelLimit": 320, "grid": True}},
        "yOffset": {"field": "arm", "sort": list(sets)},
        # Names of data sets are short: a row holds four, and what the last of them measures, by whatever font, moves nothing.
        "color": _colour(sets, columns=4),
        "tooltip": [{"field": name, "type": "nominal", "title": " "} for name in ("name", "arm", "text", "verdict")],
    }
    interval = {
        "mark": {"type": "rule", "strokeWidth": 2},
        "encoding": {**shared, "x": _axis("low", title, zero=False), "x2": {"field": "high"}},
    }
    point = {
        "mark": {"type": "point", "filled": True, "size": 60, "opacity": 1},
        "encoding": {**shared, "x": _axis("value", title, zero=False)},
    }
    height = len(order) * (12 * len(sets) + 16)
    return _chart(rows, {"layer": [*_bounds(bound, bound_title), interval, point]}, height=height)


def _bounds(bound: float, title: str) -> list[dict[str, Any]]:
    """Return two lines: no difference, and the target."""
    limit = {
        "mark": {"type": "rule", "strokeDash": [6, 4], "color": "#D55E00"},
        "data": {"values": [{"bound": bound, "text": title}]},
        "encoding": {"x": {"field": "bound", "type": "quantitative"}, "tooltip": {"field": "text", "type": "nominal"}},
    }
    none = {
        "mark": {"type": "rule", "color": "#999999"},
        "data": {"values": [{"bound": 1.0 if bound > 0.5 else 0.0}]},
        "encoding": {"x": {"field": "bound", "type": "quantitative"}},
    }
    return [none, limit]


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


def rates(rows: Rows, arms: Sequence[str], *, x: str, y: str) -> dict[str, Any]:
    """Return the score of every point of a sweep against a rate on a logarithmic axis. Rows have rate, arm, score, best."""
    layer = {
        "mark": {"type": "line", "point": False},
        "encoding": {
            "x": {"field": "rate", "type": "quantitative", "scale": {"type": "log"}, "title": x, "axis": {"format": ".0e"}},
            "y": _axis("score", y, zero=False),
            "color": _colour(arms),
        },
    }
    points = {
        "mark": {"type": "point", "filled": True},
        "encoding": {**layer["encoding"], "size": {"condition": {"test": "datum.best", "value": 160}, "value": 40}},  # type: ignore[dict-item]
    }
    return _chart(rows, {"layer": [layer, points]}, height=240)


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
