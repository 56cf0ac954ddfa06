"""Pictures: one definition each, written as SVG and PNG."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from oelm.errors import MissingExtraError
from oelm.files import write_bytes, write_text
from oelm.report.plain import plain_values
from oelm.report.svg import FONTS, MEASURED
from oelm.runs.layout import METRICS
from oelm.runs.metrics import read_metrics

# Okabe-Ito colours: distinct for readers who do not see red and green apart.
_COLOURS = ["#000000", "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9"]


def learning_curves(runs: dict[str, Path], *, baseline: str, title: str, subtitle: str) -> Any:
    """Return two panels: every run's loss against steps, and its perplexity against the baseline's at each evaluation."""
    try:
        import altair as alt
    except ImportError:
        raise MissingExtraError("altair", "report") from None
    arms = list(runs)
    losses = [row for arm, path in runs.items() for row in _losses(arm, path)]
    colour = alt.Color(
        "arm:N",
        title=None,
        sort=arms,
        scale=alt.Scale(domain=arms, range=_COLOURS[: len(arms)]),
        legend=alt.Legend(orient="bottom"),
    )
    loss = alt.Chart(alt.Data(values=losses)).encode(
        x=alt.X("step:Q", title="step"),
        y=alt.Y("loss:Q", title="loss (nats per token)", scale=alt.Scale(zero=False)),
        color=colour,
    )
    training = loss.transform_filter("datum.kind == 'training'").mark_line(opacity=0.5, strokeWidth=1.5)
    validation = loss.transform_filter("datum.kind == 'validation'").mark_point(filled=True, size=70, opacity=1)
    left = (training + validation).properties(width=400, height=300, title="lines: training; points: whole validation split")
    gaps = alt.Chart(alt.Data(values=_gaps(runs, baseline))).encode(
        x=alt.X("step:Q", title="step"), y=alt.Y("gap:Q", title="perplexity against baseline (%)"), color=colour
    )
    target = alt.Chart(alt.Data(values=[{"gap": 5}])).mark_rule(strokeDash=[6, 4], color="#666").encode(y="gap:Q")
    right = (target + gaps.mark_line(point=alt.OverlayMarkDef(filled=True, size=70), strokeWidth=2)).properties(
        width=260, height=300, title="gap; dashed: the target, +5%"
    )
    return (
        alt.hconcat(left, right)
        .properties(title=alt.TitleParams(title, subtitle=subtitle, anchor="start"), background="white", padding=12)
        .configure_axis(labelFontSize=12, titleFontSize=12)
        .configure_legend(labelLimit=0, labelFontSize=13, symbolSize=140, symbolOpacity=1)
        .configure_title(fontSize=13, subtitleFontSize=12)
    )


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


def _losses(arm: str, run: Path) -> list[dict[str, Any]]:
    rows = read_metrics(run / METRICS)
    losses = [(row["step"], row["loss"]) for row in rows if "loss" in row]
    # Means over about fifty stretches: single batches jump more than the arms differ.
    width = max(1, math.ceil(len(losses) / 50))
    stretches = [losses[start : start + width] for start in range(0, len(losses), width)]
    training = [
        {"arm": arm, "kind": "training", "step": part[-1][0], "loss": sum(loss for _, loss in part) / len(part)}
        for part in stretches
    ]
    return training + [{"arm": arm, "kind": "validation", **point} for point in _validation(run)]


def _validation(run: Path) -> list[dict[str, Any]]:
    rows = read_metrics(run / METRICS)
    return [{"step": row["step"], "loss": row["val_loss"]} for row in rows if "val_loss" in row]


def _gaps(runs: dict[str, Path], baseline: str) -> list[dict[str, Any]]:
    reference = {point["step"]: point["loss"] for point in _validation(runs[baseline])}
    return [
        {"arm": arm, "step": point["step"], "gap": 100 * math.expm1(min(point["loss"] - reference[point["step"]], 700.0))}
        for arm, path in runs.items()
        if arm != baseline
        for point in _validation(path)
        if point["step"] in reference
    ]


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
