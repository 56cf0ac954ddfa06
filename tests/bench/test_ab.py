"""Interleaving is fair."""

from __future__ import annotations

import time

from oelm.bench.interleave import interleave


def test_contenders_take_turns_and_the_order_reverses() -> None:
    calls: list[str] = []
    seconds = interleave({"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}, rounds=3, warmup=1)
    assert "".join(calls) in ("abbaabba", "baabbaab")
    assert {name: len(values) for name, values in seconds.items()} == {"a": 3, "b": 3}


def test_warm_up_rounds_are_left_out() -> None:
    delays = iter([0.05, 0.0, 0.0])
    seconds = interleave({"a": lambda: time.sleep(next(delays))}, rounds=2, warmup=1)
    assert max(seconds["a"]) < 0.05
