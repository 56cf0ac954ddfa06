"""Charts as Vega-Lite data, and still pictures of them: SVG and PNG, for pages, paper and Markdown."""

from __future__ import annotations

import itertools
import json
import math
import re
import xml.etree.ElementTree as ET
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from oelm.errors import needing
from oelm.files import write_bytes, write_text
from oelm.text import plain_values

_SCHEMA = "https://vega.github.io/schema/vega-lite/v5.json"
Rows = Sequence[dict[str, Any]]
# Circles for the first data set and so on: colour alone does not distinguish them for everyone.
_SHAPES = ("circle", "square", "triangle-up", "diamond", "cross", "triangle-down", "triangle-left", "triangle-right")
# A picture that opens a report shows whole in a window of 700 pixels, axis and legend included.
_MOST_HEIGHT = 520
# Of a label, in pixels.
_LINE_HEIGHT = 14


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


def forest_by_set(
    rows: Rows,
    sets: Sequence[str],
    *,
    target: Target,
    title: str,
    labels: Mapping[str, Sequence[str]] | None = None,
    faint: str = "",
) -> dict[str, Any]:
    """Return, for each name, a point with its interval on every data set. Rows have name, arm (the set), value, low, high.

    `labels` has the lines of a name's label, where that is not the name. `faint` names a field of the rows: where that is
    false, the row is drawn faintly.
    """
    order = list(dict.fromkeys(row["name"] for row in rows))
    shown = [(labels or {}).get(name, (name,)) for name in order]
    most_lines = max(map(len, shown))
    height = len(order) * max(12 * len(sets) + 16, _LINE_HEIGHT * most_lines + 12)
    axis: dict[str, Any] = {"labelLimit": 320, "grid": True}
    if height <= _MOST_HEIGHT:
        # Every label has room, though Vega takes lines this close for overlapping.
        axis["labelOverlap"] = False
    if most_lines > 1:
        # Vega puts the first line in the middle of the row; blank lines above put the middle line of every label there.
        lines = {name: [*[""] * ((most_lines - len(own)) // 2), *own] for name, own in zip(order, shown, strict=True)}
        axis |= {"labelExpr": f"{json.dumps(lines)}[datum.label]", "labelOffset": -_LINE_HEIGHT * (most_lines - 1) / 2}
    shared: dict[str, Any] = {
        "y": {"field": "name", "type": "nominal", "sort": order, "title": None, "axis": axis},
        "yOffset": {"field": "arm", "sort": list(sets)},
        # One name a row: next to each other, the width of a name, which differs from font to font, would move the others.
        "color": _colour(sets, columns=1),
        "tooltip": [{"field": name, "type": "nominal", "title": " "} for name in ("name", "arm", "text", "verdict")],
    }
    if faint:
        shared["opacity"] = {"condition": {"test": f"datum.{faint}", "value": 1}, "value": 0.3}
    shape = _colour(sets, columns=1)
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
    return _chart(rows, {"layer": [*_lines(rows, target), interval, point]}, height=min(_MOST_HEIGHT, height))


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
    # Names that do not lead away from each other are put one above the other.
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
    """Whether a line's name fits next to it: a fifth of a picture holds any."""
    return (place - low if is_left else high - place) >= 0.2 * (high - low)


def _at(place: float, told: str) -> dict[str, Any]:
    encoding = {"x": {"field": "place", "type": "quantitative"}, "tooltip": {"field": "told", "type": "nominal"}}
    return {"data": {"values": [{"place": place, "told": told}]}, "encoding": encoding}


def _name(place: float, name: str, *, is_left: bool, height: int) -> dict[str, Any]:
    # No part of the picture's size is what a name measures, by whatever font.
    mark = {"type": "text", "align": "right" if is_left else "left", "baseline": "bottom", "dy": height, "fontSize": 11}
    encoding = {"x": {"field": "place", "type": "quantitative"}, "y": {"value": 0}, "text": {"field": "name"}}
    return {"mark": mark, "data": {"values": [{"place": place, "name": name}]}, "encoding": encoding}


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


# The font that vl-convert brings along: "sans-serif" is another one from machine to machine, and so would the pictures be.
MEASURED = "Liberation Sans"
# Begins with one of the same widths, so that no text outgrows the room that was left for it.
FONTS = "Arial, 'Liberation Sans', Helvetica, 'PingFang SC', 'Microsoft YaHei', 'Noto Sans CJK SC', sans-serif"
# Okabe-Ito colours and a grey: distinct for readers who do not see red and green apart. The first is for the baseline.
_SERIES = ["#000000", "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#B97D00", "#2D8FC4", "#767676"]
_COMPOSED = ("hconcat", "vconcat", "concat", "facet", "repeat")
_SVG = "{http://www.w3.org/2000/svg}"
_ELEMENTS = {"svg", "g", "path", "rect", "text", "tspan", "line", "circle", "defs", "clipPath", "linearGradient", "stop"}
# These are set once for the whole picture, or are SVG's defaults.
_NEEDLESS = {"class", "role", "aria-hidden", "aria-label", "aria-roledescription", "pointer-events", "font-family", "version"}
_ASSUMED = {"opacity": "1", "stroke-width": "1", "transform": "translate(0,0)", "text-anchor": "start", "x2": "0", "y2": "0"}
_LONG_NUMBER = re.compile(r"-?\d*\.\d{2,}")
_REFERENCE = re.compile(r"url\(#([^)]+)\)")
_STILL_WIDTH = 760
_UNPAINTED = ("none", "transparent")


def chart_config(*, ink: str, muted: str, rule: str, series: list[str]) -> dict[str, Any]:
    """Return the look of all charts as a Vega-Lite config; colours may be anything that SVG in a page understands."""
    text = {"labelColor": ink, "titleColor": ink, "labelFontSize": 12, "titleFontSize": 12, "titleFontWeight": "normal"}
    axis = {"gridColor": rule, "domainColor": muted, "tickColor": muted, "titlePadding": 8, "labelOverlap": True}
    legend = {"orient": "bottom", "columns": 4, "columnPadding": 24, "symbolOpacity": 1, "gradientDirection": "horizontal"}
    title = {"color": ink, "subtitleColor": muted, "fontSize": 13, "fontWeight": 600, "anchor": "start", "limit": 700}
    return {
        "aria": False,  # the picture has one description as a whole
        "background": None,
        "font": MEASURED,  # measuring by a long list of fonts takes vl-convert three times as long
        "padding": 8,
        "view": {"stroke": None},
        "axis": text | axis | {"labelSeparation": 8, "labelLimit": 220, "titleLimit": 300},
        "axisX": {"titleLimit": 560},
        "legend": text | legend | {"labelLimit": 260, "gradientStrokeColor": rule},
        "header": text,
        "title": title,
        "mark": {"color": series[1]},
        "text": {"color": ink},
        "rule": {"color": ink},
        "point": {"opacity": 1},
        "range": {"category": series},
    }


# Paper is white whatever the reader's theme; in a page, colours follow its style sheet, and so its theme, without redrawing.
PAPER = chart_config(ink="#1d1f21", muted="#5c6066", rule="#dcdcdc", series=_SERIES) | {"background": "white"}
PAGE = chart_config(
    ink="currentColor", muted="var(--muted)", rule="var(--rule)", series=[f"var(--series-{n + 1})" for n in range(len(_SERIES))]
)


def unthemed(spec: dict[str, Any]) -> dict[str, Any]:
    """Return a chart's definition with plain texts, and without what would override the look or options of the page."""
    return {key: plain_values(value) for key, value in spec.items() if key not in ("background", "usermeta", "$schema")}


def is_single_view(spec: dict[str, Any]) -> bool:
    """Whether a chart is one view, whose width can follow the page."""
    return not any(key in spec for key in _COMPOSED) and not {"row", "column", "facet"} & set(spec.get("encoding", {}))


def chart_svg(spec: dict[str, Any], *, config: dict[str, Any], prefix: str) -> str:
    """Draw a chart as one small SVG element; `prefix` keeps its ids apart from those of other pictures in a page."""
    with needing("vl-convert-python", "report"):
        import vl_convert
    still = unthemed(spec)
    if is_single_view(still) and not isinstance(still.get("width"), dict):
        width = still["width"] if isinstance(still.get("width"), (int, float)) else _STILL_WIDTH
        still |= {"width": width, "autosize": {"type": "fit-x", "contains": "padding"}}
    # No base is allowed: a chart carries its data and never fetches any.
    root = ET.fromstring(vl_convert.vegalite_to_svg(still, config=config, allowed_base_urls=[]))
    # Vega counts ids over the whole process; ours depend on the chart only.
    ids = [element.attrib["id"] for element in root.iter() if "id" in element.attrib]
    _shrink(root, {name: f"{prefix}-{number}" for number, name in enumerate(ids)})
    root.set("xmlns", _SVG[1:-1])
    root.set("font-family", FONTS)
    return ET.tostring(root, encoding="unicode")


def _shrink(element: ET.Element, ids: dict[str, str], *, fill: str = "black", stroke: str = _UNPAINTED[0]) -> None:
    """Drop what does not show and digits below a hundredth of a pixel: it halves a picture."""
    element.tag = element.tag.removeprefix(_SVG)
    element.attrib = {
        name: _tidied(name, value, ids)
        for name, value in element.attrib.items()
        if name not in _NEEDLESS and value != _ASSUMED.get(name) and not name.endswith("href")
    }
    fill, stroke = element.get("fill", fill), element.get("stroke", stroke)
    for child in list(element):
        _shrink(child, ids, fill=fill, stroke=stroke)
        if child.tag not in _ELEMENTS or (element.tag != "clipPath" and _is_invisible(child, fill=fill, stroke=stroke)):
            element.remove(child)


def _tidied(name: str, value: str, ids: dict[str, str]) -> str:
    if name == "id":
        return ids[value]
    named = _REFERENCE.sub(lambda found: f"url(#{ids[found[1]]})", value)
    return _LONG_NUMBER.sub(lambda digits: f"{float(digits[0]):.2f}".rstrip("0").rstrip("."), named)


def _is_invisible(element: ET.Element, *, fill: str, stroke: str) -> bool:
    if element.tag == "path" and {element.get("fill", fill), element.get("stroke", stroke)} <= {*_UNPAINTED}:
        return True
    if element.get("display") == "none" or element.get("opacity") == "0" or element.get("d") in ("", "M0,0h0v0h0Z"):
        return True
    return element.tag in ("g", "defs") and len(element) == 0


def save_chart(chart: Any, path: Path) -> list[Path]:
    """Write a chart as `path`.svg and `path`.png; return both."""
    with needing("vl-convert-python", "report"):
        import vl_convert
    # What XML forbids would end this whole process in the library.
    spec = json.dumps(plain_values(chart.to_dict()))
    svg, png = path.with_name(f"{path.name}.svg"), path.with_name(f"{path.name}.png")
    config = {"font": MEASURED}
    drawn = vl_convert.vegalite_to_svg(spec, config=config)
    write_text(svg, drawn.replace(f'font-family="{MEASURED}"', f'font-family="{FONTS}"'))
    write_bytes(png, vl_convert.vegalite_to_png(spec, scale=2, config=config))
    return [svg, png]


_HEAD_MEASURES = {
    "entropy": "entropy (nats)",
    "effective_rank": "effective rank",
    "logit_std": "logit std",
    "mean_distance": "mean distance (tokens)",
    "induction": "induction",
}


def head_grid(heads: list[dict[str, Any]]) -> Any:
    """Return one small heat map of layers by heads for each measure of `models.heads`."""
    with needing("altair", "report"):
        import altair as alt
    size = 40
    width = size * (1 + max(int(head["head"]) for head in heads))
    height = size * (1 + max(int(head["layer"]) for head in heads))
    panels = []
    for measure, title in _HEAD_MEASURES.items():
        cells = alt.Chart(alt.Data(values=heads)).encode(
            x=alt.X("head:O", title="head", axis=alt.Axis(labelAngle=0)), y=alt.Y("layer:O", title="layer")
        )
        # From zero, so that a small difference looks small; the figures are in the cells.
        scale = alt.Scale(scheme="blues", domainMin=0)
        squares = cells.mark_rect(stroke="white").encode(color=alt.Color(f"{measure}:Q", scale=scale, legend=None))
        figures = cells.mark_text(fontSize=11).encode(
            text=alt.Text(f"{measure}:Q", format=".2~f"),
            color=alt.condition(
                f"datum.{measure} > {0.6 * max(float(head[measure]) for head in heads)}", alt.value("white"), alt.value("black")
            ),
        )
        panels.append((squares + figures).properties(width=width, height=height, title=title))
    return alt.concat(*panels, columns=3).resolve_scale(color="independent").properties(background="white", padding=12)
