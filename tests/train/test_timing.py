"""Every second is charged to one phase, and step statistics are those one works out by hand."""

from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oelm.train.timing import PHASES, Clock, step_statistics


class Seconds:
    """A clock that moves only when told to, in whole seconds, so that sums are exact."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    def wait(self, seconds: int) -> None:
        self.now += seconds


@pytest.fixture
def seconds(monkeypatch: pytest.MonkeyPatch) -> Seconds:
    moved = Seconds()
    monkeypatch.setattr(time, "perf_counter", moved)
    return moved


def spend(clock: Clock, seconds: Seconds, plan: list[tuple[str | None, int]]) -> None:
    for phase, duration in plan:
        if phase is None:
            seconds.wait(duration)
        else:
            with clock.phase(phase):
                seconds.wait(duration)


def test_a_phase_is_charged_what_passes_in_it_and_other_the_rest(seconds: Seconds) -> None:
    clock = Clock({})
    spend(clock, seconds, [(None, 2), ("data", 3), ("step", 5), (None, 1), ("step", 7), ("validation", 11)])
    assert clock.seconds() == {"step": 12.0, "data": 3.0, "validation": 11.0, "checkpoint": 0.0, "other": 3.0}


@settings(deadline=None, derandomize=True)
@given(st.lists(st.tuples(st.sampled_from([None, *PHASES]), st.integers(0, 1000))))
def test_phases_sum_to_the_wall_time(plan: list[tuple[str | None, int]]) -> None:
    seconds = Seconds()
    start = seconds.now
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(time, "perf_counter", seconds)
        clock = Clock({})
        spend(clock, seconds, plan)
        assert sum(clock.seconds().values()) == seconds.now - start


def test_phases_sum_to_the_wall_time_on_the_real_clock() -> None:
    before = time.perf_counter()
    clock = Clock({})
    started = time.perf_counter()
    with clock.phase("data"):
        time.sleep(0.01)
    ended = time.perf_counter()
    charged = sum(clock.seconds().values())
    after = time.perf_counter()
    # 1e-8: differences of readings below 10^7 seconds are good to 2e-9 each.
    assert ended - started - 1e-8 <= charged <= after - before + 1e-8


def test_asking_twice_charges_nothing_twice(seconds: Seconds) -> None:
    clock = Clock({})
    spend(clock, seconds, [("step", 5)])
    assert clock.seconds() == clock.seconds()


def test_earlier_sittings_are_counted(seconds: Seconds) -> None:
    clock = Clock({"step": 40.0, "other": 2.0})
    spend(clock, seconds, [("step", 5)])
    assert clock.seconds() == {"step": 45.0, "data": 0.0, "validation": 0.0, "checkpoint": 0.0, "other": 2.0}


def test_a_phase_that_ends_in_an_error_is_charged_too(seconds: Seconds) -> None:
    clock = Clock({})
    with pytest.raises(KeyboardInterrupt), clock.phase("step"):
        seconds.wait(5)
        raise KeyboardInterrupt
    assert clock.seconds()["step"] == 5.0


def test_what_is_returned_is_a_copy(seconds: Seconds) -> None:
    clock = Clock({})
    clock.seconds()["step"] = 99.0
    assert clock.seconds()["step"] == 0.0


# Twenty steps: 9 and 7 to warm up, then 18 measured, one of them beyond three medians of 2.
STEPS = [9.0, 7.0, 2.0, 1.0, 2.0, 3.0, 2.0, 1.0, 2.0, 3.0, 2.0, 2.0, 2.0, 1.0, 3.0, 2.0, 2.0, 4.0, 2.0, 50.0]


def test_statistics_are_those_worked_out_by_hand() -> None:
    statistics = step_statistics(STEPS, warmup_steps=2)
    # The 17 kept: three of 1, ten of 2, three of 3, one of 4. Sum 36; squared distances from 36/17 sum to
    # (3 + 40 + 27 + 16) - 36^2 / 17 = 86 - 76.235...
    assert statistics == {
        "measured_steps": 18,
        "warmup_steps": 2,
        "outliers": 1,
        "mean": pytest.approx(36 / 17, rel=1e-15),
        "median": 2.0,
        "std": pytest.approx(((86 - 36**2 / 17) / 16) ** 0.5, rel=1e-14),
        "min": 1.0,
        "max": 50.0,
        # The smallest values that at least 95% and 99% of 18 do not exceed: the 18th, both.
        "p95": 50.0,
        "p99": 50.0,
    }


def test_percentiles_are_values_that_occurred() -> None:
    statistics = step_statistics([float(n) for n in range(200, 0, -1)], warmup_steps=0)
    assert (statistics["p95"], statistics["p99"], statistics["median"]) == (190.0, 198.0, 100.5)


@pytest.mark.parametrize(
    ("num_steps", "warmup_steps", "skipped"), [(2000, 100, 100), (1000, 100, 100), (500, 100, 50), (9, 100, 0), (50, 0, 0)]
)
def test_warm_up_is_left_out_up_to_a_tenth_of_the_run(num_steps: int, warmup_steps: int, skipped: int) -> None:
    statistics = step_statistics([5.0] * skipped + [1.0] * (num_steps - skipped), warmup_steps=warmup_steps)
    assert (statistics["warmup_steps"], statistics["measured_steps"]) == (skipped, num_steps - skipped)
    assert statistics["max"] == 1.0


def test_a_step_of_exactly_three_medians_is_kept() -> None:
    assert step_statistics([1.0, 1.0, 3.0], warmup_steps=0)["outliers"] == 0


def test_one_step_has_no_spread() -> None:
    statistics = step_statistics([2.5], warmup_steps=0)
    assert (statistics["mean"], statistics["std"], statistics["p99"]) == (2.5, 0.0, 2.5)


def test_no_steps_give_no_figures() -> None:
    assert step_statistics([], warmup_steps=100) == {"measured_steps": 0, "warmup_steps": 0}
