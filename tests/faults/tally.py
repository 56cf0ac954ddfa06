"""Counts of faults: each test says what it tried and what held, and the end of the output shows it row by row."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any, Protocol

import pytest

from tests.faults.rows import ROWS, rows_of

_ROW, _TRIED = "fault_row", "faults_tried"


class Tally(Protocol):
    def __call__(self, row: str, what: str, *, held: int, of: int, seed: int | None = None) -> None: ...


class Counts:
    """What was tried, by row and kind of fault."""

    def __init__(self) -> None:
        self.held: Counter[tuple[str, str]] = Counter()
        self.tried: Counter[tuple[str, str]] = Counter()
        self.seeds: dict[tuple[str, str], list[int]] = {}
        self.outcomes: dict[str, Counter[str]] = {}

    def add(self, row: str, what: str, *, held: int, of: int, seed: int | None = None) -> None:
        self.held[row, what] += held
        self.tried[row, what] += of
        if seed is not None:
            self.seeds.setdefault((row, what), []).append(seed)

    def lines(self) -> Iterator[str]:
        for row, facts in ROWS.items():
            if not (outcomes := self.outcomes.get(row)):
                continue
            told = ", ".join(f"{count} {outcome}" for outcome, count in sorted(outcomes.items()))
            yield f"{row:4} {facts.title}: tests {told}"
            for (other, what), tried in self.tried.items():
                if other == row:
                    yield f"       {self.held[row, what]} of {tried} {what}{_spoken(self.seeds.get((row, what), []))}"


def _spoken(seeds: list[int]) -> str:
    if not seeds:
        return ""
    ordered = sorted(set(seeds))
    if len(ordered) > 2 and ordered == list(range(ordered[0], ordered[-1] + 1)):
        return f" (seeds {ordered[0]} to {ordered[-1]})"
    return f" (seed{'s' if len(ordered) > 1 else ''} {', '.join(map(str, ordered))})"


_COUNTS = Counts()


@pytest.fixture
def tally(request: pytest.FixtureRequest) -> Tally:
    """Note how often a fault was tried and how often everything held."""

    def note(row: str, what: str, *, held: int, of: int, seed: int | None = None) -> None:
        assert row in ROWS, f"no row {row!r}"
        # With the report of the test: tests may run in other processes than the one that prints the table.
        request.node.user_properties.append((_TRIED, [row, what, held, of, seed]))

    return note


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        for row in rows_of(item.nodeid):
            item.user_properties.append((_ROW, row))
        if rows_of(item.nodeid):
            item.add_marker(pytest.mark.faults)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "call" or report.outcome != "passed":
        for name, value in report.user_properties:
            if name == _ROW:
                _COUNTS.outcomes.setdefault(str(value), Counter())[report.outcome] += 1
            elif name == _TRIED and isinstance(value, list | tuple):
                row, what, held, tried, seed = value
                _COUNTS.add(row, what, held=held, of=tried, seed=seed)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    lines = list(_COUNTS.lines())
    # Of a few tests chosen by hand nobody wants a table.
    if len(lines) > 5 or _COUNTS.tried:
        terminalreporter.section("faults and attacks")
        for line in lines:
            terminalreporter.write_line(line)
