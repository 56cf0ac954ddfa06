"""Still pictures of charts: for pages before or without JavaScript, for paper, and for Markdown."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from typing import Any

from oelm.errors import MissingExtraError
from oelm.report.plain import plain_values

# The font that vl-convert brings along: "sans-serif" is another one from machine to machine, and so would the pictures be.
MEASURED = "Liberation Sans"
# Begins with one of the same widths, so that no text outgrows the room that was left for it.
FONTS = "Arial, 'Liberation Sans', Helvetica, 'PingFang SC', 'Microsoft YaHei', 'Noto Sans CJK SC', sans-serif"
# Okabe-Ito colours and a grey: distinct for readers who do not see red and green apart. The first is for the baseline.
_SERIES = ["#000000", "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#B97D00", "#2D8FC4", "#767676"]
_COMPOSED = ("hconcat", "vconcat", "concat", "facet", "repeat")
_SVG = "{http://www.w3.org/2000/svg}"
_ELEMENTS = {"svg", "g", "path", "rect", "text", "tspan", "line", "circle", "defs", "clipPath", "linearGradient", "stop"}
# The page says these once, for the picture as a whole, or they are what SVG assumes.
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
    """Tell whether a chart is one view, whose width can follow its surroundings."""
    return not any(key in spec for key in _COMPOSED) and not {"row", "column", "facet"} & set(spec.get("encoding", {}))


def chart_svg(spec: dict[str, Any], *, config: dict[str, Any], prefix: str) -> str:
    """Draw a chart as one small SVG element; `prefix` keeps its ids apart from those of other pictures in a page."""
    try:
        import vl_convert
    except ImportError:
        raise MissingExtraError("vl-convert-python", "report") from None
    still = unthemed(spec)
    if is_single_view(still) and not isinstance(still.get("width"), dict):
        width = still["width"] if isinstance(still.get("width"), (int, float)) else _STILL_WIDTH
        still |= {"width": width, "autosize": {"type": "fit-x", "contains": "padding"}}
    # No base is allowed: a chart carries its data and never fetches any.
    root = ET.fromstring(vl_convert.vegalite_to_svg(still, config=config, allowed_base_urls=[]))
    # Vega numbers its ids through the life of the process; ours depend on the chart alone.
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
