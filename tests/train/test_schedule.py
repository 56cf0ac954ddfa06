"""The learning rate warms up, follows its cosine, and an extended run keeps the rates it had."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oelm.config import RunConfig
from oelm.train.optim import learning_rate, shortened_warmup, warmup_steps
from tests.conftest import tiny_config

PEAK = 3e-4


def config(*, steps: int = 100, warmup: int = 10, final: float = 0.0, extended_at: tuple[int, ...] = ()) -> RunConfig:
    return tiny_config(
        Path("text.txt"),
        steps=steps,
        optim__lr=PEAK,
        schedule__warmup_steps=warmup,
        schedule__final_fraction=final,
        extended_at=list(extended_at),
    )


def rates(settings_: RunConfig) -> list[float]:
    return [learning_rate(settings_, step) for step in range(settings_.steps)]


def test_warm_up_is_linear_and_ends_at_the_peak() -> None:
    assert rates(config(warmup=10))[:10] == [PEAK * ((step + 1) / 10) for step in range(10)]


def test_the_cosine_starts_at_the_peak() -> None:
    assert learning_rate(config(warmup=10), 10) == PEAK


def test_without_warm_up_the_first_step_is_at_the_peak() -> None:
    assert learning_rate(config(warmup=0), 0) == PEAK


def test_a_warm_up_longer_than_half_the_run_is_cut_to_half() -> None:
    assert rates(config(steps=20, warmup=1000)) == rates(config(steps=20, warmup=10))


def test_a_run_of_one_step_is_at_the_peak() -> None:
    assert rates(config(steps=1, warmup=5)) == [PEAK]


# Relative: a cosine, a handful of products and sums, each within 1.1e-16 of a value that is not small.
ROUNDING = 1e-14


@pytest.mark.parametrize("final", [0.0, 0.1, 1.0])
def test_halfway_through_the_cosine_is_halfway_down(final: float) -> None:
    # 10 of warm-up, so step 55 is in the middle of the other 90.
    assert learning_rate(config(final=final), 55) == pytest.approx(PEAK * (1 + final) / 2, rel=ROUNDING)


@pytest.mark.parametrize("final", [0.0, 0.1, 1.0])
def test_the_last_step_is_one_cosine_step_above_the_final_fraction(final: float) -> None:
    above = math.sin(math.pi / 90 / 2) ** 2  # (1 + cos(pi (1 - 1/90))) / 2
    # 1 + cos cancels here: 1.1e-16 in 3e-4 of what is above the floor.
    assert rates(config(final=final))[-1] == pytest.approx(PEAK * (final + (1 - final) * above), rel=1e-12)


def test_a_final_fraction_of_one_keeps_the_peak() -> None:
    assert rates(config(final=1.0))[10:] == [PEAK] * 90


@settings(deadline=None, derandomize=True, max_examples=25)
@given(st.integers(1, 60), st.integers(0, 80), st.floats(0, 1))
def test_rates_rise_then_fall_within_floor_and_peak(steps: int, warmup: int, final: float) -> None:
    values = rates(config(steps=steps, warmup=warmup, final=final))
    top = min(warmup, steps // 2)
    slack = PEAK * ROUNDING
    assert all(earlier < later for earlier, later in zip(values[:top], values[1:top], strict=False))
    assert all(earlier >= later - slack for earlier, later in zip(values[top:], values[top + 1 :], strict=False))
    assert all(0 < value <= PEAK + slack for value in values)
    assert all(value >= PEAK * final - slack for value in values[top:])


def test_an_extended_run_keeps_the_rates_it_had() -> None:
    assert rates(config(steps=200, extended_at=(100,)))[:100] == rates(config(steps=100))


def test_an_extended_run_goes_on_with_the_rates_of_the_longer_one() -> None:
    assert rates(config(steps=200, extended_at=(100,)))[100:] == rates(config(steps=200))[100:]


def test_a_run_extended_twice_keeps_the_rates_of_both_legs() -> None:
    twice = rates(config(steps=300, extended_at=(100, 200)))
    assert twice[:200] == rates(config(steps=200, extended_at=(100,)))
    assert twice[200:] == rates(config(steps=300))[200:]


@pytest.mark.parametrize("own", [0, 3, 10, 1000])
def test_an_arm_s_own_warm_up_goes_before_the_schedule_s(own: int) -> None:
    method = {"freeze": ["q", "k"], "warmup_steps": own}
    arm = tiny_config(Path("text.txt"), steps=100, optim__lr=PEAK, schedule__warmup_steps=20, method=method)
    assert rates(arm) == rates(config(warmup=own))
    assert warmup_steps(arm, 100) == min(own, 50)


@pytest.mark.parametrize(("key", "own"), [("schedule.warmup_steps", None), ("method.warmup_steps", 60)])
def test_a_warm_up_that_is_cut_is_told_with_the_setting_that_asked_for_it(key: str, own: int | None) -> None:
    method = {"freeze": ["q", "k"], "warmup_steps": own}
    arm = tiny_config(Path("text.txt"), steps=100, schedule__warmup_steps=60 if own is None else 5, method=method)
    assert shortened_warmup(arm) == f"{key} 60 is cut to 50: a warm-up is at most half of the run's 100 steps"


def test_a_warm_up_of_half_the_run_is_not_cut_and_an_extended_run_s_is_cut_by_its_first_length() -> None:
    assert shortened_warmup(config(warmup=50)) == ""
    assert "60 is cut to 50" in shortened_warmup(config(steps=200, warmup=60, extended_at=(100,)))


def test_without_one_of_its_own_an_arm_warms_up_as_the_schedule_says() -> None:
    assert [warmup_steps(config(warmup=20), horizon) for horizon in (100, 40, 30, 1)] == [20, 20, 15, 0]
