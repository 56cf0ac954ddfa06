"""Every second is charged to one phase, and step statistics are those one works out by hand."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oelm.process import StopFlag
from oelm.runs.records import Figures
from oelm.train.run import train
from oelm.train.timing import PHASES, Clock, Meter, NvmlCounter, RaplCounter, energy_counters, step_statistics
from oelm.train.watch import Silence, StepReport
from tests.conftest import run_here, tiny_config


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


class Powercap:
    """A powercap tree as Linux shows it: packages, memory, cores, the platform, and a second driver's view of the same."""

    def __init__(self, root: Path, *, range_uj: int = 1_000_000) -> None:
        self.root = root
        for name, kind in (
            ("intel-rapl:0", "package-0"),
            ("intel-rapl:0:0", "core"),
            ("intel-rapl:0:1", "dram"),
            ("intel-rapl:1", "package-1"),
            ("intel-rapl:2", "psys"),
            ("intel-rapl-mmio:0", "package-0"),
        ):
            (root / name).mkdir(parents=True)
            (root / name / "name").write_text(f"{kind}\n")
            (root / name / "max_energy_range_uj").write_text(f"{range_uj}\n")
            self.set(name, 0)
        (root / "intel-rapl").mkdir()

    def set(self, zone: str, microjoules: int) -> None:
        (self.root / zone / "energy_uj").write_text(f"{microjoules}\n")


def test_packages_and_memory_are_counted_and_nothing_twice(tmp_path: Path) -> None:
    tree = Powercap(tmp_path)
    counter = RaplCounter(tmp_path, clock=lambda: 0.0)
    for zone, microjoules in (("0", 100_000), ("0:0", 90_000), ("0:1", 20_000), ("1", 3_000), ("2", 500_000)):
        tree.set(f"intel-rapl:{zone}", microjoules)
    tree.set("intel-rapl-mmio:0", 100_000)
    assert counter.spent_j() == pytest.approx(0.123)
    assert counter.spent_j() == 0.0


def test_a_counter_that_comes_round_goes_on(tmp_path: Path) -> None:
    tree = Powercap(tmp_path)
    tree.set("intel-rapl:0", 999_000)
    counter = RaplCounter(tmp_path, clock=lambda: 0.0)
    tree.set("intel-rapl:0", 4_000)
    assert counter.spent_j() == pytest.approx(0.005)


def test_a_counter_that_may_have_come_round_unseen_is_given_up(tmp_path: Path) -> None:
    Powercap(tmp_path, range_uj=262_143_328_850)
    times = iter([0.0, 262.0, 262.0 + 263.0])
    counter = RaplCounter(tmp_path, clock=lambda: next(times))
    assert counter.spent_j() == 0.0
    assert counter.spent_j() is None


@pytest.mark.parametrize("change", ["none", "no-package", "unreadable", "no-number"])
def test_a_machine_without_a_counter_that_can_be_read_has_none(tmp_path: Path, change: str) -> None:
    tree = Powercap(tmp_path / "powercap")
    if change == "none":
        assert energy_counters(gpu_uuid=None, powercap=tmp_path / "not-there") == {}
        return
    for zone in ("intel-rapl:0", "intel-rapl:0:1", "intel-rapl:1"):
        if change == "no-package":
            (tree.root / zone / "name").write_text("psys\n")
        elif change == "unreadable":
            # As after CVE-2020-8694, where the file is root's alone; root itself reads everything, so there is none here.
            (tree.root / zone / "energy_uj").unlink()
        else:
            (tree.root / zone / "energy_uj").write_text("plenty\n")
    assert energy_counters(gpu_uuid=None, powercap=tree.root) == {}


class _Nvml:
    """NVML as far as a counter needs it."""

    class NVMLError(Exception):
        pass

    def __init__(self, *readings: int | None) -> None:
        self._readings = list(readings)

    def nvmlDeviceGetTotalEnergyConsumption(self, card: str) -> int:
        reading = self._readings.pop(0)
        if reading is None:
            raise self.NVMLError
        return reading


def test_a_gpu_counts_millijoules_and_is_given_up_after_a_reset_or_an_error() -> None:
    counter = NvmlCounter(_Nvml(5_000, 7_500, 100, 200, None), "card")
    assert [counter.spent_j() for _ in range(4)] == [2.5, None, 0.1, None]


class _Spending:
    """A counter that spends what it is told to."""

    def __init__(self, *spent: float | None) -> None:
        self._spent = list(spent)

    def spent_j(self) -> float | None:
        return self._spent.pop(0)


def test_energy_adds_up_over_sittings() -> None:
    first = Meter({"cpu": _Spending(1.0, 2.0)})
    assert [first.joules(), first.joules()] == [{"cpu": 1.0}, {"cpu": 3.0}]
    assert Meter({"cpu": _Spending(4.0)}).continued({"cpu": 3.0}).joules() == {"cpu": 7.0}


def test_what_one_sitting_did_not_count_is_left_out_for_good() -> None:
    assert Meter({"cpu": _Spending(4.0), "gpu": _Spending(1.0)}).continued({"gpu": 3.0}).joules() == {"gpu": 4.0}
    assert Meter({"cpu": _Spending(4.0)}).continued({}).joules() == {}
    assert Meter({}).continued({"cpu": 3.0}).joules() == {}


def test_a_counter_that_fails_in_the_middle_leaves_no_figure() -> None:
    meter = Meter({"cpu": _Spending(1.0, None), "gpu": _Spending(1.0, 1.0, 1.0)})
    assert [meter.joules(), meter.joules(), meter.joules()] == [{"cpu": 1.0, "gpu": 1.0}, {"gpu": 2.0}, {"gpu": 3.0}]


class _Heater(Silence):
    """A watch that has the first package spend a joule with every step, and stops the run after some."""

    def __init__(self, tree: Powercap, stop: StopFlag, *, stop_at: int) -> None:
        self._tree, self._stop, self._stop_at = tree, stop, stop_at

    def on_step(self, report: StepReport) -> None:
        self._tree.set("intel-rapl:0", 1_000_000 * report.step)
        if report.step == self._stop_at:
            self._stop.request("test")


def test_a_run_records_what_its_sittings_spent_together(
    tmp_path: Path, text_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree = Powercap(tmp_path / "powercap", range_uj=262_143_328_850)
    monkeypatch.setattr("oelm.train.timing.POWERCAP", tree.root)
    config, out = tiny_config(text_file), tmp_path / "run"
    for stop_at, status in ((6, "stopped"), (99, "done")):
        stop = StopFlag()
        result = train(config, out, stop=stop, watch=_Heater(tree, stop, stop_at=stop_at))
        assert result.status == status
    assert result.figures is not None and result.figures["energy_j"] == {"cpu": pytest.approx(12.0)}
    assert Figures.model_validate(result.figures).energy_j == result.figures["energy_j"]


def test_a_run_without_a_counter_records_no_energy(tmp_path: Path, text_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("oelm.train.timing.POWERCAP", tmp_path / "not-there")
    figures = run_here(tiny_config(text_file, steps=4), tmp_path / "run").figures
    assert figures is not None and "energy_j" not in figures
