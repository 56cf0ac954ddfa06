"""The demo's arms differ in the method alone, and an arm once finished is found, not trained again."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from oelm.errors import StoppedError
from oelm.experiments.demo import ARMS, ArmResult, arm_path, demo_config, run_demo
from oelm.method.method import PRESETS
from oelm.train.stop import StopFlag
from oelm.train.watch import Silence


def demo(out: Path, *, steps: int = 2, stop: StopFlag | None = None) -> Iterator[ArmResult]:
    return run_demo(out, seeds=range(1), steps=steps, stop=stop or StopFlag(), watch=Silence())


def digests(folder: Path) -> dict[str, str]:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


@pytest.fixture(scope="module")
def first_arm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which the demo was broken off after its first arm: one arm shows what four would."""
    out = tmp_path_factory.mktemp("demo")
    next(demo(out))
    return out


def test_the_arms_are_the_baseline_and_three_ways_to_freeze() -> None:
    first, *others = ARMS
    assert first == "baseline" and all("q" in PRESETS[arm].freeze for arm in others)
    assert [PRESETS[arm].kind for arm in others] == ["pure", "little", "partial"]


@pytest.mark.parametrize("seed", [0, 7])
def test_arms_differ_in_the_method_only(seed: int) -> None:
    made = [demo_config(arm, seed=seed).as_dict() for arm in ARMS]
    methods = [config.pop("method") for config in made]
    assert all(config == made[0] for config in made) and len({str(method) for method in methods}) == len(ARMS)


@pytest.mark.parametrize("arm", ARMS)
def test_an_arm_is_the_preset_of_its_name(arm: str) -> None:
    assert demo_config(arm, seed=0).method == PRESETS[arm]


def test_another_seed_changes_the_seed_only() -> None:
    one, other = demo_config("oelm_freeze", seed=0), demo_config("oelm_freeze", seed=1)
    assert other == one.model_copy(update={"seed": 1})


def test_other_steps_change_the_steps_only() -> None:
    one, other = demo_config("oelm_freeze", seed=0), demo_config("oelm_freeze", seed=0, steps=3)
    assert other == one.model_copy(update={"steps": 3})


def test_every_arm_seed_and_length_has_a_place_of_its_own(tmp_path: Path) -> None:
    places = {
        arm_path(tmp_path, arm, demo_config(arm, seed=seed, steps=steps))
        for arm in ARMS
        for seed in range(3)
        for steps in (2, 3)
    }
    assert len(places) == 6 * len(ARMS)


def test_an_arm_ends_up_in_its_place(first_arm: Path) -> None:
    assert [path.parent for path in first_arm.rglob("timing_stats.json")] == [
        arm_path(first_arm, "baseline", demo_config("baseline", seed=0, steps=2))
    ]


def test_a_finished_arm_is_found_and_not_a_byte_of_it_changes(first_arm: Path) -> None:
    before = digests(first_arm)
    again = next(demo(first_arm))
    assert again.arm == "baseline" and again.result.step == 2
    assert digests(first_arm) == before


def test_a_stopped_demo_says_in_which_arm_and_how_to_go_on(tmp_path: Path) -> None:
    stop = StopFlag()
    stop.request("SIGTERM")
    with pytest.raises(StoppedError, match="stopped in arm 'baseline' at step 0: repeat the same command"):
        next(demo(tmp_path, stop=stop))
