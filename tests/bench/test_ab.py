"""Interleaving is fair."""

from __future__ import annotations

import time

import pytest

from oelm.bench import interleave as interleaving
from oelm.bench.interleave import interleave, round_lines


def test_contenders_take_turns_and_the_order_reverses() -> None:
    calls: list[str] = []
    seconds = interleave({"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}, rounds=3, warmup=1)
    assert "".join(calls) in ("abbaabba", "baabbaab")
    assert {name: len(values) for name, values in seconds.items()} == {"a": 3, "b": 3}


def test_warm_up_rounds_are_left_out() -> None:
    delays = iter([0.05, 0.0, 0.0])
    seconds = interleave({"a": lambda: time.sleep(next(delays))}, rounds=2, warmup=1)
    assert max(seconds["a"]) < 0.05


def test_a_line_after_each_round_has_the_time_left_at_most_once_a_second() -> None:
    times, told = iter([0.0, 2.0, 2.5, 3.0, 60.0, 75.0]), list[str]()
    on_round = round_lines(told.append, 5, clock=lambda: next(times))
    for done in range(1, 6):
        on_round(done)
    assert told == ["round 1 of 5, ETA 0:08", "round 3 of 5, ETA 0:02", "round 4 of 5, ETA 0:15"]


def test_progress_is_printed_between_rounds_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interleaving, "_LINE_EVERY_S", 0.0)
    said: list[str] = []
    contenders = {"a": lambda: said.append("a"), "b": lambda: said.append("b")}
    interleave(contenders, rounds=2, warmup=1, progress=lambda text: said.append(text.partition(",")[0]))
    assert said == ["a", "b", "round 1 of 3", "b", "a", "round 2 of 3", "a", "b"]
