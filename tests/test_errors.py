"""Names that do not exist are answered with the nearest that does."""

from __future__ import annotations

import pytest

from oelm.errors import suggest

KNOWN = ["GPT-01", "GPT-02", "SST-2-01", "laptop"]


@pytest.mark.parametrize(
    ("name", "near"),
    [("GPT2", "GPT-02"), ("sst201", "SST-2-01"), ("Labtop", "laptop"), ("lapto", "laptop")],
)
def test_the_nearest_name_is_suggested_whatever_its_case_signs_and_zeros(name: str, near: str) -> None:
    assert suggest(name, KNOWN) == f" (did you mean '{near}'?)"


@pytest.mark.parametrize("name", ["", "xyz", "bert"])
def test_nothing_is_suggested_where_nothing_is_near(name: str) -> None:
    assert suggest(name, KNOWN) == "" == suggest(name, [])
