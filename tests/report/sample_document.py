"""Documents that every format is tried on: one as a reader would get it, one that attacks, one that is large."""

from __future__ import annotations

import math
from typing import Any

from oelm.report.document import Block, Cell, Chart, Document, Mark, Section, Table, Text

ARMS = ("baseline", "oelm_freeze", "gaussian_matched", "oelm_random")
LONG_WORD = "pneumonoultramicroscopicsilicovolcanoconiosis_" * 3
# "Freezing queries and keys costs little perplexity, with intervals; the target is met."
CHINESE = (
    "\u51bb\u7ed3\u67e5\u8be2\u4e0e\u952e\u53ea\u589e\u52a0\u5f88\u5c11\u7684\u56f0\u60d1\u5ea6\uff0c"
    "\u9644\u7f6e\u4fe1\u533a\u95f4\uff1b\u8fbe\u5230\u76ee\u6807\u3002"
)
CHINESE_TITLE = "\u51bb\u7ed3\u6ce8\u610f\u529b\u7684\u7814\u7a76\u62a5\u544a"

# What a name, a note or a metric may hold. Each would do something in at least one of the formats, were it not escaped.
ATTACKS = {
    "html": '<img src=x onerror="window.pwned=1"><b>bold</b>&lt;ok&gt;\'"',
    "script": "</script><script>window.pwned=1</script><!--<script>",
    "svg": "]]></text></svg><svg onload=window.pwned=1>",
    "template": "{{ 7 * 7 }}{% raw %}${7*7}#{7}",
    "vega": "');window.pwned=1;//' + constructor.constructor('window.pwned=1')()",
    "markdown": "# x | y ` **b** _i_ ~~s~~ [l](javascript:alert(1)) ![p](x) <u>h</u> https://evil.example www.evil.example",
    "markdown_start": "- item",
    "markdown_fence": "```\nx\n```\n\n---\n> q\n\n1. one\n\n| a | b |\n|---|---|\n",
    "latex": "\\input{/etc/passwd} $x$ 100% a_b a^b {c} #1 ~ & \\end{document} \\write18{id}",
    "latex_comment": "a\n\\input{/etc/passwd}\n^^5cinput{x}",
    "ansi": "\x1b[31mred\x1b[0m\x1b]0;title\x07\x9b1m",
    "bidi": "user\u202e\u2066// gpj.exe\u2069\u2066",
    "formula": "=cmd|' /C calc'!A0",
    "formula_plus": "+SUM(1+1)*cmd|' /C calc'!A0",
    "formula_minus": "-2+3+cmd|' /C calc'!A0",
    "formula_at": "@SUM(1,1)",
    "formula_tab": "\t=1+1",
    "formula_return": "\r=1+1",
    "formula_space": ' "=1+1',
    "nul": "a\x00b\x00",
    "lines": "a\u2028b\u2029c\u0085d\ne",
    "not_unicode": "a\ud800b\ufffe\uffff",
    "empty": "",
}


def sample_document(lang: str = "en") -> Document:
    """Return a report like a real one: text, warnings, a table of 40 rows with every mark, three kinds of chart."""
    return Document(
        lang=lang,
        title=CHINESE_TITLE if lang == "zh" else "Frozen attention: what it costs and what it saves",
        subtitle="GPT-02 at budget laptop, 4 arms, 5 seeds each",
        contents="\u76ee\u5f55" if lang == "zh" else "Contents",
        footer="Made by oelm 0.1.0 from 20 finished runs.",
        sections=(
            Section("summary", "Summary", _summary()),
            Section("quality", "What it costs: perplexity against the baseline, paired by seed", (curves(), forest())),
            Section("why", "Why: attention entropy of every head", (heads(), Text("Low entropy is a sharp head.", "note"))),
            Section("runs", "All runs", (Text("Every run that was read."), wide_table(40))),
        ),
    )


def _summary() -> tuple[Block, ...]:
    return (
        Text("Freezing queries and keys at orthogonal frames raises perplexity by 3.1% [+1.9%, +4.3%], inside the target."),
        Text(CHINESE),
        Text("Only 3 of 5 planned seeds are finished for oelm_random: its verdict is exploratory.", "warning"),
        Text(f"The longest name among the runs is {LONG_WORD}.", "note"),
        verdicts(),
    )


def verdicts() -> Table:
    """Return a small table with every mark."""
    rows: list[tuple[str, str, float, str, Mark]] = [
        ("baseline", "32.61", 32.61, "reference", "muted"),
        ("oelm_freeze", "33.62", 33.62, "PASS", "good"),
        ("gaussian_matched", "34.70", 34.70, "INCONCLUSIVE", "warn"),
        ("oelm_random", "44.63", 44.63, "FAIL", "bad"),
    ]
    return Table(
        name="verdicts",
        caption="Verdict of each arm against the criterion: perplexity at most 1.05 x the baseline's",
        columns=("arm", "perplexity", "against baseline", "verdict"),
        rows=tuple(
            (Cell(arm), Cell(text, ppl), Cell(f"{100 * (ppl / 32.61 - 1):+.1f}%", ppl), Cell(verdict, mark=mark))
            for arm, text, ppl, verdict, mark in rows
        ),
        numeric=frozenset({1, 2}),
    )


def wide_table(num_rows: int, *, name: str = "runs") -> Table:
    """Return a table wider than a phone, with a missing figure now and then."""
    rows = []
    for n in range(num_rows):
        ppl = 32 + 10 * math.sin(n) ** 2
        figure = Cell(f"{ppl:.2f}", ppl) if n % 9 else Cell("not measured", mark="muted")
        step = Cell(f"{40 + n % 7} ms", 40 + n % 7)
        parameters = Cell(f"{1_000_000 + 977 * n:,}", 1_000_000 + 977 * n)
        state = Cell("done") if n % 11 else Cell("failed", mark="bad")
        rows.append((Cell(f"GPT-02/laptop/default/seed-{n}"), Cell(ARMS[n % 4]), figure, step, parameters, state))
    columns = ("run", "arm", "perplexity", "median step", "trainable parameters", "state")
    return Table(name, f"{num_rows} runs with their figures", columns, tuple(rows), frozenset({2, 3, 4}))


def curves(name: str = "curves", *, points: int = 40, arms: tuple[str, ...] = ARMS) -> Chart:
    """Return learning curves with a band over seeds."""
    rows: list[dict[str, Any]] = []
    for n, arm in enumerate(arms):
        for point in range(points):
            mean = 3.4 + 0.06 * n + 3 * math.exp(-point / 8) + 0.01 * math.sin(7.1 * point + n)
            rows.append({"arm": arm, "step": 50 * point, "mean": mean, "low": mean - 0.05, "high": mean + 0.05})
    colour = {"field": "arm", "type": "nominal", "title": None, "sort": None}
    x = {"field": "step", "type": "quantitative", "title": "step"}
    y = {"type": "quantitative", "title": "validation loss (nats per token)", "scale": {"zero": False}}
    band = {"x": x, "y": {"field": "low", **y}, "y2": {"field": "high"}, "color": colour}
    line = {"x": x, "y": {"field": "mean", **y}, "color": colour}
    spec = {
        "data": {"values": rows},
        "height": 320,
        "layer": [
            {"mark": {"type": "area", "opacity": 0.18}, "encoding": band},
            {"mark": {"type": "line", "strokeWidth": 2}, "encoding": line},
            {"mark": {"type": "point", "opacity": 0, "size": 80, "tooltip": {"content": "data"}}, "encoding": line},
        ],
    }
    caption = "Learning curves; bands are 95% intervals over seeds"
    return Chart(name, caption, spec, "Four falling curves; the baseline ends lowest.")


def forest(name: str = "forest", *, arms: tuple[str, ...] = ARMS[1:]) -> Chart:
    """Return ratios with their intervals and the line of the target."""
    figures = [{"ratio": 1.03 + 0.08 * n, "low": 1.01 + 0.07 * n, "high": 1.05 + 0.1 * n} for n in range(len(arms))]
    rows = [{"arm": arm, **figure} for arm, figure in zip(arms, figures, strict=True)]
    y = {"field": "arm", "type": "nominal", "title": None, "sort": None}
    scale = {"type": "log", "nice": False, "domain": [0.97, 1.3]}
    x = {"type": "quantitative", "title": "perplexity against baseline (ratio)", "scale": scale}
    interval = {"y": y, "x": {"field": "low", **x}, "x2": {"field": "high"}}
    point = {"y": y, "x": {"field": "ratio", **x}, "tooltip": [{"field": "arm"}, {"field": "ratio", "format": ".3f"}]}
    target = {"mark": {"type": "rule", "strokeDash": [6, 4]}, "data": {"values": [{"target": 1.05}]}}
    spec = {
        "data": {"values": rows},
        "height": {"step": 36},
        "layer": [
            {**target, "encoding": {"x": {"field": "target", **x}}},
            {"mark": {"type": "rule", "strokeWidth": 2}, "encoding": interval},
            {"mark": {"type": "point", "filled": True, "size": 90}, "encoding": point},
        ],
    }
    caption = "Ratio of perplexities; dashed: the target, 1.05"
    return Chart(name, caption, spec, "oelm_freeze lies left of the target, oelm_random right.")


def heads(name: str = "heads", *, layers: int = 6, heads: int = 8) -> Chart:
    """Return a heat map with its figures in the cells; the colour of a figure is an expression over data."""
    places = [(layer, head) for layer in range(layers) for head in range(heads)]
    rows = [{"layer": layer, "head": head, "entropy": round(1.5 + math.sin(layer + head), 3)} for layer, head in places]
    colour = {"field": "entropy", "type": "quantitative", "scale": {"scheme": "blues"}, "title": "entropy (nats)"}
    white_on_dark = {"condition": {"test": "datum.entropy > 1.6", "value": "white"}, "value": "black"}
    text = {"field": "entropy", "type": "quantitative", "format": ".1f"}
    spec = {
        "data": {"values": rows},
        "width": 480,
        "height": {"step": 34},
        "encoding": {
            "x": {"field": "head", "type": "ordinal", "axis": {"labelAngle": 0}},
            "y": {"field": "layer", "type": "ordinal"},
        },
        "layer": [
            {"mark": {"type": "rect", "tooltip": {"content": "data"}}, "encoding": {"color": colour}},
            {"mark": {"type": "text", "fontSize": 12}, "encoding": {"text": text, "color": white_on_dark}},
        ],
    }
    return Chart(name, "Entropy of attention by layer and head", spec, "Entropy goes in waves over layers and heads.")


def side_by_side(name: str = "pair") -> Chart:
    """Return two views in a row, which a phone has no room for."""
    views = [{**curves().spec, "width": 400, "title": "loss"}, {**forest().spec, "width": 260, "title": "ratio"}]
    return Chart(name, "Loss and ratio", {"hconcat": views}, "Loss on the left, ratios on the right.")


def hostile_document(text: str) -> Document:
    """Return a document with `text` in every field that holds text."""
    rows = ((Cell(text, text, "good"), Cell(text)), (Cell("x", 1.0, "bad"), Cell(text, mark="warn")))
    table = Table(text, text, (text, "b"), rows)
    chart = Chart(text, text, _hostile_spec(text), text)
    texts = (Text(text), Text(text, "note"), Text(text, "warning"))
    sections = (Section(text, text, (*texts, table, chart)), Section(text, text, (table,)))
    return Document(lang="en", title=text, subtitle=text, contents=text, footer=text, sections=sections)


def _hostile_spec(text: str) -> dict[str, Any]:
    encoding = {
        "x": {"field": "size", "type": "quantitative", "title": text},
        "y": {"field": "arm", "type": "nominal", "title": text},
        "color": {"field": "arm", "type": "nominal", "title": text},
    }
    mark = {"type": "bar", "tooltip": {"content": "data"}}
    values = [{"arm": text, "size": 1}, {"arm": "b", "size": 2}]
    return {"title": text, "data": {"values": values}, "mark": mark, "encoding": encoding}


def large_document() -> Document:
    """Return 60 charts and 60 tables that share 1,020 rows."""
    sections = []
    for n in range(60):
        chart = (curves, forest, heads)[n % 3](f"chart-{n}")
        sections.append(Section(f"part-{n}", f"Experiment {n}", (chart, wide_table(17, name=f"table-{n}"))))
    return Document("en", "A large study", "1,020 runs", "Contents", "Made by a test.", tuple(sections))
