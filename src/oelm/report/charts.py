"""Pictures: one definition each, written as SVG and PNG."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from oelm.errors import MissingExtraError
from oelm.files import write_bytes, write_text
from oelm.report.plain import plain_values
from oelm.report.svg import FONTS, MEASURED


def save_chart(chart: Any, path: Path) -> list[Path]:
    """Write a chart as `path`.svg and `path`.png; return both."""
    try:
        import vl_convert
    except ImportError:
        raise MissingExtraError("vl-convert-python", "report") from None
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
    try:
        import altair as alt
    except ImportError:
        raise MissingExtraError("altair", "report") from None
    size = 40
    width = size * (1 + max(int(head["head"]) for head in heads))
    height = size * (1 + max(int(head["layer"]) for head in heads))
    panels = []
    for measure, title in _HEAD_MEASURES.items():
        cells = alt.Chart(alt.Data(values=heads)).encode(
            x=alt.X("head:O", title="head", axis=alt.Axis(labelAngle=0)), y=alt.Y("layer:O", title="layer")
        )
        # From zero, so that a small difference looks small; the figures stand in the cells.
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
