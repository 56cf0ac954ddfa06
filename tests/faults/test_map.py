"""The table of faults is whole: every row has tests, every test it names is there, and the page shows every row."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.faults.rows import ROWS, rows_of

pytestmark = pytest.mark.faults
TESTS = Path(__file__).parents[1]
PAGE = TESTS.parent / "docs" / "reliability.md"


def test_there_is_a_row_for_every_fault_and_attack() -> None:
    # S11 was hostile archives: nothing unpacks one any more.
    assert list(ROWS) == [*(f"R{n}" for n in range(1, 18)), *(f"S{n}" for n in range(1, 14) if n != 11)]


@pytest.mark.parametrize("row", ROWS)
def test_every_row_names_tests_that_are_there(row: str) -> None:
    assert ROWS[row].tests
    for name in ROWS[row].tests:
        file, _, test = name.partition("::")
        assert re.search(rf"^def {test}\(" if test else "^def test_", (TESTS / file).read_text(), re.MULTILINE), name
        assert row in rows_of(f"tests/{name}[case-0]" if test else f"tests/{name}::test_any")


def test_the_page_shows_every_row() -> None:
    assert re.findall(r"^\| ([RS]\d+) \|", PAGE.read_text(), re.MULTILINE) == list(ROWS)
