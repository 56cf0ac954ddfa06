"""Texts of users lose what drives a terminal, turns the reading direction or is no character, and nothing else."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from oelm.text import distinct_names, on_one_line, plain_text, plain_values


def test_what_prints_is_kept() -> None:
    for text in ("plain", "\u51bb\u7ed3", "e\u0301", "\U0001f600", "a\tb\nc", "\u05e9\u05dc", "<&>'\"\\"):
        assert plain_text(text) == text, text


def test_what_does_not_print_becomes_a_mark() -> None:
    for bad in ("\x00", "\x1b", "\x7f", "\x9b", "\u202e", "\u2066", "\ud800", "\ufeff", "\ufffe", "\uffff"):
        assert plain_text(f"a{bad}b") == "a\ufffdb", bad


def test_every_kind_of_line_end_is_one_newline() -> None:
    for end in ("\n", "\r\n", "\r", "\u2028", "\u2029", "\x85"):
        assert plain_text(f"a{end}b") == "a\nb" and on_one_line(f" a{end}b ") == "a b", end


@given(st.text(st.characters(exclude_categories=())))
def test_any_text_can_be_written_as_utf_8_and_is_plain_after_one_pass(text: str) -> None:
    assert plain_text(plain_text(text)) == plain_text(text) and isinstance(plain_text(text).encode(), bytes)


def test_data_keeps_its_shape_and_numbers_that_json_cannot_hold_become_null() -> None:
    value = {"a": [1, 2.5, math.nan, -math.inf, True, None], "b": ({"c": "x\x00"},)}
    assert plain_values(value) == {"a": [1, 2.5, None, None, True, None], "b": [{"c": "x\ufffd"}]}


@given(st.lists(st.text(max_size=8), max_size=12))
def test_names_are_distinct_and_safe_whatever_they_were(names: list[str]) -> None:
    safe = distinct_names(names)
    assert len({name.lower() for name in safe}) == len(names)
    assert all(name.isascii() and name.replace("-", "").replace("_", "").isalnum() or set(name) <= set("-_") for name in safe)
