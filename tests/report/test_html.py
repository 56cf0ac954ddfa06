"""A report as HTML is one file that fetches nothing, runs nothing but its own script, and shows every text as it is."""

from __future__ import annotations

import base64
import functools
import hashlib
import json
import re
import sys
from collections import Counter
from dataclasses import replace
from html.parser import HTMLParser

import pytest

from oelm.errors import MissingExtraError
from oelm.report import html
from oelm.report.charts import unthemed
from oelm.report.document import Cell, Chart, Document, Section, Table, Text
from oelm.report.html import render_html
from oelm.text import on_one_line, plain_text
from tests.report.sample_document import ATTACKS, curves, hostile_document, large_document, sample_document, verdicts

MAX_BYTES = 3_000_000


class Page(HTMLParser):
    """What a parser makes of a page: elements with their attributes, and the text of each kind of element."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str]]] = []
        self.texts: list[tuple[str, str]] = []
        self._open: list[int] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, {name: value or "" for name, value in attrs}))
        if tag not in ("meta", "link", "img", "br"):
            self._open.append(len(self.texts))
            self.texts.append((tag, ""))

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, {name: value or "" for name, value in attrs}))

    def handle_endtag(self, tag: str) -> None:
        assert self._open and self.texts[self._open.pop()][0] == tag, f"</{tag}> closes nothing"

    def handle_data(self, data: str) -> None:
        if self._open:
            tag, text = self.texts[self._open[-1]]
            self.texts[self._open[-1]] = (tag, text + data)

    def attributes(self, name: str) -> list[str]:
        return [attributes[name] for _, attributes in self.elements if name in attributes]

    def all_text(self, tag: str) -> list[str]:
        return [text for of, text in self.texts if of == tag]


@pytest.fixture(scope="module")
def sample() -> str:
    return render_html(sample_document())


@pytest.fixture(scope="module")
def page(sample: str) -> Page:
    return Page(sample)


def only(*blocks: Table | Chart | Text) -> Document:
    return Document("en", "title", "subtitle", "contents", "footer", (Section("part", "Part", blocks),))


def shape(page: Page) -> Counter[tuple[str, ...]]:
    """Return how often each element stands with which attributes, outside the drawings."""
    drawn = {"svg", "g", "path", "text", "line", "rect", "lineargradient", "stop", "defs", "clippath", "tspan", "circle"}
    return Counter((tag, *sorted(attributes)) for tag, attributes in page.elements if tag not in drawn)


def definitions(page: Page) -> list[str]:
    scripts = [attributes for tag, attributes in page.elements if tag == "script"]
    texts = page.all_text("script")
    return [text for attributes, text in zip(scripts, texts, strict=True) if attributes == {"type": "application/json"}]


def policy(page: Page) -> str:
    return next(a["content"] for tag, a in page.elements if tag == "meta" and a.get("http-equiv") == "Content-Security-Policy")


def test_every_address_in_the_page_is_inside_it(page: Page) -> None:
    addresses = [*page.attributes("href"), *page.attributes("src"), *page.attributes("xlink:href"), *page.attributes("action")]
    assert addresses and all(address.startswith("#") for address in addresses)


def test_the_style_sheet_loads_nothing(page: Page) -> None:
    assert not re.search(r"url\(|@import|@font-face", "".join(page.all_text("style")))


def test_the_policy_allows_nothing_but_the_pages_own_scripts_and_style(page: Page) -> None:
    executable = [
        text
        for (_, attributes), text in zip([e for e in page.elements if e[0] == "script"], page.all_text("script"), strict=True)
        if "type" not in attributes
    ]
    digests = {f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'" for text in executable}
    style = f"'sha256-{base64.b64encode(hashlib.sha256(page.all_text('style')[0].encode()).digest()).decode()}'"
    rules = dict(rule.strip().split(" ", 1) for rule in policy(page).split(";"))
    assert rules["default-src"] == "'none'" and set(rules["script-src"].split()) == digests and rules["style-src"] == style


def test_the_policy_allows_no_eval_and_nothing_inline_by_default(page: Page) -> None:
    assert "unsafe" not in policy(page) and "http" not in policy(page)


def test_every_link_has_its_target_and_no_id_is_given_twice(page: Page) -> None:
    ids = Counter(page.attributes("id"))
    assert {address[1:] for address in page.attributes("href")} <= set(ids) and max(ids.values()) == 1


def test_sections_of_one_name_keep_anchors_apart() -> None:
    twice = replace(only(Text("x")), sections=(Section("a b", "A", ()), Section("A-b", "B", ())))
    ids = Page(render_html(twice)).attributes("id")
    assert len(ids) == len({name.lower() for name in ids})


@functools.cache
def attacked(text: str) -> tuple[str, Page]:
    """Return the page with this text in every field, as a file and parsed."""
    made = render_html(hostile_document(text))
    return made, Page(made)


def test_no_text_changes_the_elements_of_the_page() -> None:
    harmless = shape(attacked("harmless")[1])
    for attack, text in ATTACKS.items():
        assert shape(attacked(text)[1]) == harmless, attack


def test_every_text_is_shown_as_it_is() -> None:
    for attack, hostile in ATTACKS.items():
        page, text = attacked(hostile)[1], plain_text(hostile)
        assert page.all_text("h1") == [text] and page.all_text("figcaption") == [text] * 3, attack
        assert page.attributes("aria-label") == [text], attack


def test_a_command_is_code_and_nothing_else() -> None:
    for attack, text in ATTACKS.items():
        row = (Cell("x"), Cell(text, is_code=True), Cell("", is_code=True))
        page = Page(render_html(only(Table("t", "c", ("a", "b", "c"), (row,)))))
        shown = [" ".join(code.split()) for code in page.all_text("code")]
        assert shown == ([on_one_line(text)] if text else []), attack


def test_what_does_not_print_is_shown_as_a_mark() -> None:
    for attack in ("ansi", "bidi", "nul", "not_unicode"):
        page = attacked(ATTACKS[attack])[0]
        assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]", page), attack
        assert "\ufffd" in page, attack


def test_a_charts_definition_survives_its_way_through_the_page() -> None:
    for attack, text in ATTACKS.items():
        chart = next(block for block in hostile_document(text).sections[0].blocks if isinstance(block, Chart))
        assert [json.loads(text) for text in definitions(attacked(text)[1])] == [unthemed(chart.spec)], attack


def test_drawings_hold_no_script_link_or_image(page: Page) -> None:
    assert not {"a", "image", "foreignobject", "use", "animate"} & {tag for tag, _ in page.elements if tag != "a"}
    assert all(set(attributes) == {"href"} for tag, attributes in page.elements if tag == "a" and "class" not in attributes)


def test_a_number_that_was_not_measured_is_left_out_of_a_chart() -> None:
    values = [{"x": float("nan")}, {"x": float("inf")}, {"x": 1.5}]
    page = Page(render_html(only(Chart("c", "", {"data": {"values": values}, "mark": "point"}, ""))))
    assert json.loads(definitions(page)[0])["data"]["values"] == [{"x": None}, {"x": None}, {"x": 1.5}]


def test_a_chart_has_a_still_and_a_description(page: Page) -> None:
    assert [tag for tag, _ in page.elements].count("svg") == 3
    assert [a["aria-label"] for _, a in page.elements if a.get("role") == "img"] == [
        "Four falling curves; the baseline ends lowest.",
        "oelm_freeze lies left of the target, oelm_random right.",
        "Entropy goes in waves over layers and heads.",
    ]


def test_charts_past_the_limit_for_stills_are_only_live(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(html, "_STILLS_MAX_BYTES", 1)
    page = Page(render_html(only(curves("one"), curves("two"))))
    assert [tag for tag, _ in page.elements].count("svg") == 1 and len(definitions(page)) == 2


def test_a_report_without_charts_carries_no_bundle_and_needs_no_vl_convert(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vl_convert", None)  # what Python does for a package that is not installed
    assert len(render_html(only(verdicts(), Text("x")))) < 40_000


def test_without_vl_convert_a_report_with_charts_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vl_convert", None)
    with pytest.raises(MissingExtraError, match=r"'vl-convert-python'.*oelm\[report\]"):
        render_html(only(curves()))


def test_the_page_names_its_language() -> None:
    for lang, tag in (("en", "en"), ("zh", "zh-CN"), ('"><script>', "en")):
        assert Page(render_html(replace(only(Text("x")), lang=lang))).elements[0] == ("html", {"lang": tag})


def test_the_pages_own_words_are_chinese_in_a_chinese_report() -> None:
    english, chinese = (render_html(replace(only(Text("x", "warning")), lang=lang)) for lang in ("en", "zh"))
    assert "Skip to" in english and ">Warning<" in english
    assert "Skip to" not in chinese and ">Warning<" not in chinese


def test_a_mark_is_told_in_words_as_well_as_in_colour() -> None:
    page = Page(render_html(only(verdicts())))
    unseen = [text for text in page.all_text("span") if text.endswith(": ")]
    assert unseen == ["good: ", "caution: ", "bad: "]


def test_a_cell_carries_what_it_is_sorted_by() -> None:
    cases: list[tuple[float | str, str]] = [(1.5, "1.5"), (0, "0"), (1e-9, "1e-09"), ('a"b', 'a"b'), (float("nan"), "nan")]
    for value, kept in cases:
        table = Table("t", "c", ("a", "b"), ((Cell("x"), Cell("shown", value)),))
        assert Page(render_html(only(table))).attributes("data-sort") == [kept]


def test_a_table_without_rows_is_still_a_table() -> None:
    page = Page(render_html(only(Table("t", "nothing was run", ("a", "b"), ()))))
    assert page.all_text("th") == ["a", "b"] and page.all_text("td") == []


def test_warnings_that_follow_each_other_share_a_box() -> None:
    page = Page(render_html(only(Text("a", "warning"), Text("b", "warning"), Text("c"), Text("d", "warning"))))
    boxes = [attributes for tag, attributes in page.elements if attributes.get("class") == "warning"]
    assert len(boxes) == 2 and page.all_text("li")[-2:] == ["a", "b"] and page.all_text("p")[1:] == ["c", "d"]


def test_the_same_document_gives_the_same_page(sample: str) -> None:
    assert render_html(sample_document()) == sample


def test_a_document_without_sections_is_a_page() -> None:
    assert Page(render_html(replace(only(), sections=()))).all_text("h1") == ["title"]


@pytest.mark.slow
def test_sixty_charts_and_a_thousand_rows_stay_under_three_megabytes() -> None:
    assert len(render_html(large_document()).encode()) < MAX_BYTES


def wide_table(order: tuple[int, ...] = ()) -> Table:
    cells = (
        Cell("pure"),
        Cell("oelm_freeze"),
        Cell("a method of a much longer name"),
        Cell("+1.0% [+0.5, +1.5] (test) PASS", 1.0),
    )
    return Table("wide", "caption", ("class", "method", "long", "gap"), (cells,), frozenset({3}), order)


def test_a_page_sets_columns_in_the_order_that_is_meant_for_it() -> None:
    page = Page(render_html(only(wide_table((1, 3, 0, 2)))))
    heads = [text for text in page.all_text("th") if text]
    assert heads == ["method", "gap", "class", "long", "oelm_freeze"]
    sorts = [attributes.get("data-sort") for tag, attributes in page.elements if tag == "td"]
    assert sorts == ["1.0", None, None]


def test_short_cells_stay_whole_and_intervals_do_not_break() -> None:
    page = Page(render_html(only(wide_table())))
    kinds = [attributes["class"] for tag, attributes in page.elements if tag in ("th", "td") and "class" in attributes]
    assert kinds == ["number", "short", "short", "long", "number wide"]
    assert page.all_text("td")[-1] == "+1.0% [+0.5,\u00a0+1.5] (test) PASS"
