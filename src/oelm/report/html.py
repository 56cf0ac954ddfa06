"""A report as one HTML file that needs no network: tables that sort, charts that answer, readable on a phone and on paper."""

from __future__ import annotations

import base64
import functools
import hashlib
import importlib.resources
import itertools
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import yaml

from oelm.errors import needing
from oelm.report.charts import PAGE, chart_svg, is_single_view, unthemed
from oelm.report.document import Chart, Document, Table, gather
from oelm.text import breadth, distinct_names, plain_text

if TYPE_CHECKING:
    from jinja2 import Template

# Stills are for paper and for readers without JavaScript. Past this, charts go without, so that a page can still be mailed.
_STILLS_MAX_BYTES = 1_200_000
# Cells of so many letters stay on one line: next to columns of figures, which never break, a browser breaks them at every word.
_UNBROKEN = 20
# An interval with its value. What has a verdict besides may break before either, so that many data sets fit one table.
_UNBROKEN_FIGURE = 24
_IN_INTERVAL = re.compile(r"(?<=,) (?=[+-]?\d)")
# No section holds another, and every text in one is escaped.
_SECTION = re.compile(r'<section id="(?P<id>[^"]+)".*?</section>', re.DOTALL)
_PHONE_WIDTH = 320
# More notes or warnings than these are folded away.
_FEW_NOTES = 3
_LANGUAGE_TAGS = {"en": "en", "zh": "zh-CN"}
# A page may run our own scripts, known by their digest, and nothing else: no other script, no eval, no request of any kind.
_POLICY = "default-src 'none'; script-src {scripts}; style-src {styles}; base-uri 'none'; form-action 'none'"


@dataclass(frozen=True)
class _Picture:
    """What the browser draws a chart from, and what is seen before that and on paper; all safe inside HTML.

    A live page has no definition: it is drawn here, for a wide and for a narrow window.
    """

    definition: str
    still: str
    narrow: str = ""


@dataclass(frozen=True)
class Live:
    """How a page is kept up to date: by reloading its file, or in parts from the server it came from.

    `every_s` is when to look again, `updated_s` the time of its content in seconds since 1970. 'over' looks no more.
    """

    source: Literal["file", "server", "over"]
    every_s: float
    updated_s: float


@dataclass(frozen=True)
class LivePage:
    """A live page, its sections by id as they are in it, and a digest of each, by which a browser sees what is new."""

    html: str
    parts: Mapping[str, str]
    digests: Mapping[str, str]


def render_html(document: Document) -> str:
    """Return the report as one page with everything in it; raise MissingExtraError without jinja2 or, for charts, vl-convert.

    A chart's `width`, where it is a number, is the most it takes; without one it fills its column.
    """
    pictures = _pictures(_charts(document))
    return _rendered(document, pictures, _asset("report.js"), bundle=_bundle() if pictures else "")


def render_live(document: Document, live: Live) -> LivePage:
    """Return a page that keeps itself up to date; its charts are pictures, so that an update is small."""
    pictures = [_Picture("", *_stills(_json_in_html(chart.spec), number)) for number, chart in enumerate(_charts(document))]
    page = _rendered(document, pictures, _asset("report.js") + _asset("live.js"), live=live)
    parts = {found["id"]: found[0] for found in _SECTION.finditer(page)}
    digests = {name: hashlib.sha256(part.encode()).hexdigest()[:16] for name, part in parts.items()}
    # Ids and digests need no escaping, and the first such place is in the head, before any text of users.
    told = " ".join(f"{name}={digest}" for name, digest in digests.items())
    return LivePage(page.replace('data-parts=""', f'data-parts="{told}"', 1), parts, digests)


def _charts(document: Document) -> list[Chart]:
    return [block for section in document.sections for block in section.blocks if isinstance(block, Chart)]


# Most charts of a live page are the same as a moment ago, and each takes a tenth of a second.
@functools.lru_cache(maxsize=64)
def _stills(spec: str, number: int) -> tuple[str, str]:
    """Return a chart as it is drawn for a wide window and for a phone."""
    wide = json.loads(spec)
    narrow = _narrowed(wide) | ({"width": _PHONE_WIDTH} if is_single_view(wide) else {})
    # The space left of an axis title, below the other axis's labels, is free.
    look = PAGE | {"axisX": {"titleAnchor": "end", "titleLimit": _PHONE_WIDTH - 30}}
    drawn = (
        chart_svg(wide, config=PAGE, prefix=f"wide-{number}"),
        chart_svg(narrow, config=look, prefix=f"narrow-{number}"),
    )
    return _safe(drawn[0]), _safe(drawn[1])


def _narrowed(part: Any) -> Any:
    """Return a chart's definition with legends and labels that fit a phone, as report.js does in the browser."""
    if isinstance(part, list):
        return [_narrowed(inner) for inner in part]
    if not isinstance(part, dict):
        return part
    result = {key: value if key in ("data", "values") else _narrowed(value) for key, value in part.items()}
    if isinstance(result.get("legend"), dict):
        result["legend"] |= {"columns": 1, "labelLimit": _PHONE_WIDTH - 60}
    if isinstance(axis := result.get("axis"), dict) and "labelLimit" in axis:
        axis["labelLimit"] = _PHONE_WIDTH // 3
    return result


def _rendered(document: Document, pictures: list[_Picture], script: str, *, bundle: str = "", live: Live | None = None) -> str:
    template, style = _template(), _asset("report.css")
    scripts = " ".join(_source(text) for text in (script, bundle) if text)
    policy = _POLICY + ("; connect-src 'self'" if live is not None and live.source == "server" else "")
    words: dict[str, dict[str, str]] = yaml.safe_load(_asset("words.yaml"))
    anchors = distinct_names(section.name for section in document.sections)
    return template.render(
        document=document,
        parts=[
            (f"part-{anchor}", section, gather(section.blocks))
            for anchor, section in zip(anchors, document.sections, strict=True)
        ],
        language=_LANGUAGE_TAGS.get(document.lang, "en"),
        words=words.get(document.lang, words["en"]),
        policy=policy.format(scripts=scripts, styles=_source(style)),
        style=_safe(style),
        script=_safe(script),
        bundle=_safe(bundle),
        config=_safe(_json_in_html(PAGE)),
        columns_of=_columns_of,
        glued=_glued,
        few=_FEW_NOTES,
        next_picture=iter(pictures).__next__,
        next_number=itertools.count(1).__next__,
        live=live,
    )


# A live page is made again and again.
@functools.cache
def _template() -> Template:
    import jinja2

    environment = jinja2.Environment(
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        # What is printed passes here, so no field can be forgotten. `Markup`, a child of str, is ours and already safe.
        finalize=lambda value: plain_text(value) if type(value) is str else value,
    )
    environment.tests |= {"table": lambda block: isinstance(block, Table), "chart": lambda block: isinstance(block, Chart)}
    return environment.from_string(_asset("report.html.j2"))


def _columns_of(table: Table) -> list[tuple[int, str]]:
    """Return the numbers of the columns that a page shows, and how their cells may break."""
    return [(number, _column_kind(table, number)) for number in table.shown]


def _column_kind(table: Table, number: int) -> str:
    longest = max((breadth(row[number].text) for row in table.rows), default=0)
    if number in table.numeric:
        return "number" if longest <= _UNBROKEN_FIGURE else "number wide"
    return "short" if longest <= _UNBROKEN else "long"


def _glued(text: str) -> str:
    """Return a figure whose interval does not break; interval and verdict may be below the value."""
    return _IN_INTERVAL.sub("\u00a0", text)


def _safe(text: str) -> Any:
    """Exempt from escaping what is safe in its place: our own scripts and style, and JSON and SVG made for the place."""
    from markupsafe import Markup

    return Markup(text)


def _asset(name: str) -> str:
    return (importlib.resources.files("oelm.report") / "templates" / name).read_text(encoding="utf-8")


@functools.cache
def _bundle() -> str:
    """Return Vega, Vega-Lite and vega-embed as one script."""
    with needing("vl-convert-python", "report"):
        import vl_convert
    bundle: str = vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;")
    # The first two would end its element early; a parser turns CR into LF, and the digest would not be the script's.
    assert not any(mark in bundle.lower() for mark in ("</script", "<!--", "\r")), "the bundle cannot be put into a page"
    return bundle


def _pictures(charts: list[Chart]) -> list[_Picture]:
    pictures = []
    room = _STILLS_MAX_BYTES
    for number, chart in enumerate(charts):
        still = chart_svg(chart.spec, config=PAGE, prefix=f"still-{number}") if room > 0 else ""
        room -= len(still.encode())
        pictures.append(_Picture(_safe(_json_in_html(unthemed(chart.spec))), _safe(still)))
    return pictures


def _source(text: str) -> str:
    """Return how a content security policy names a script or a style by its content."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _json_in_html(value: Any) -> str:
    """Return JSON in which no parser of HTML finds the end of the element around it."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
