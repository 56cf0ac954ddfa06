"""Runs on another kind of device or in another precision are no seeds of one arm and no fair pair, whatever was asked for."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from oelm.errors import ConfigError
from oelm.files import read_json
from oelm.report.arms import Arm, collect
from oelm.report.compare import compare_runs
from oelm.report.pairs import Pair, find
from tests.report.reading import english, rows
from tests.report.synthetic import package_catalog, write_arm, write_plain, write_sweep

CPU = {"device": "cpu", "precision": "float32"}
# CUDA's devices stand in a manifest under the name of the product.
GPU = {"device": "NVIDIA A100-SXM4-80GB", "precision": "bf16"}


def computed(runs: Sequence[Path], environment: dict[str, str], earlier: Sequence[Any] = ()) -> None:
    """Make runs out to have been computed with this, and with that before."""
    for run in runs:
        changed = {"environment": environment, "earlier": list(earlier)}
        write_plain(run / "manifest.json", read_json(run / "manifest.json") | changed)


def arm_of(root: Path, *environments: dict[str, str]) -> Arm:
    for seed, environment in enumerate(environments):
        computed(write_arm(root, "GPT-01", [30.0 + seed], seeds=[seed]), environment)
    (arm,) = collect([root])
    return arm


def pair_of(root: Path, ours: Sequence[dict[str, str]], theirs: Sequence[dict[str, str]]) -> Pair:
    for experiment, environments in (("GPT-01", theirs), ("GPT-02", ours)):
        for seed, environment in enumerate(environments):
            computed(write_arm(root, experiment, [30.0 + seed], seeds=[seed]), environment)
    (pair,) = find(collect([root]), package_catalog(), [root]).pairs
    return pair


def test_seeds_on_another_kind_of_device_are_no_arm_and_both_are_named(tmp_path: Path) -> None:
    arm = arm_of(tmp_path, CPU, CPU, GPU)
    assert arm.refused is not None and arm.refused.code == "recipes_differ"
    assert arm.refused.values == {
        "first": arm.runs[0].path,
        "second": arm.runs[2].path,
        "settings": ("device (cpu / cuda)", "precision (float32 / bf16)"),
    }


def test_seeds_in_another_precision_are_no_arm(tmp_path: Path) -> None:
    arm = arm_of(tmp_path, GPU, GPU | {"precision": "fp16"})
    assert arm.refused is not None and arm.refused.values["settings"] == ("precision (bf16 / fp16)",)


@pytest.mark.parametrize("device", ["NVIDIA H100 80GB HBM3", "cuda", "cuda:3", "AMD Instinct MI250X"])
def test_which_gpu_it_was_does_not_matter(tmp_path: Path, device: str) -> None:
    assert arm_of(tmp_path, GPU, GPU | {"device": device}).is_usable


@pytest.mark.parametrize("known", [CPU, GPU, {"device": "mps"}], ids=["cpu", "cuda", "mps"])
@pytest.mark.parametrize("unknown", [{}, {"device": ""}, {"machine": "x86_64"}], ids=["nothing", "empty", "other"])
def test_what_a_record_does_not_tell_does_not_differ(tmp_path: Path, known: dict[str, str], unknown: dict[str, str]) -> None:
    assert arm_of(tmp_path / "arm", unknown, known, unknown).is_usable
    assert pair_of(tmp_path / "pair", [unknown, known], [unknown, unknown]).confounded == ()


def test_a_first_seed_that_tells_nothing_hides_no_difference(tmp_path: Path) -> None:
    arm = arm_of(tmp_path / "arm", {}, CPU, GPU)
    assert arm.refused is not None and arm.refused.values["first"] == arm.runs[1].path
    assert pair_of(tmp_path / "pair", [{}, CPU], [{}, GPU]).confounded == (
        "device (cpu / cuda)",
        "precision (float32 / bf16)",
    )


@pytest.mark.parametrize(
    ("ours", "told"),
    [
        (GPU, ("device (cuda / cpu)", "precision (bf16 / float32)")),
        (CPU | {"precision": "bf16"}, ("precision (bf16 / float32)",)),
        ({"device": "mps", "precision": "float32"}, ("device (mps / cpu)",)),
        (CPU | {"threads": "64", "cpu_capability": "AVX512"}, ()),
    ],
    ids=["both", "precision", "device", "neither"],
)
def test_another_device_or_precision_confounds(tmp_path: Path, ours: dict[str, str], told: tuple[str, ...]) -> None:
    assert pair_of(tmp_path, [ours, ours], [CPU, CPU]).confounded == told


def test_a_confounded_device_gets_no_verdict(tmp_path: Path) -> None:
    pair_of(tmp_path, [GPU] * 5, [CPU] * 5)
    (row,) = rows(english(tmp_path), "verdicts")
    assert row["verdict"].startswith("CONFOUNDED")


def test_what_was_asked_for_is_nothing_where_the_machine_gave_the_same(tmp_path: Path) -> None:
    write_arm(tmp_path, "GPT-01", [30.0], seeds=[0], settings={"device": "auto", "precision": "auto"})
    write_arm(tmp_path, "GPT-01", [30.0], seeds=[1], settings={"device": "cpu", "precision": "float32"})
    (arm,) = collect([tmp_path])
    assert arm.is_usable


@pytest.mark.parametrize(("asked", "is_usable"), [("cuda", False), ("auto", True), (None, True), ({"kind": 3}, True)], ids=str)
def test_where_the_manifest_is_silent_a_config_that_names_a_device_is_believed(
    tmp_path: Path, asked: object, is_usable: bool
) -> None:
    write_arm(tmp_path, "GPT-01", [30.0], seeds=[0])
    computed(write_arm(tmp_path, "GPT-01", [30.0], seeds=[1], settings={"device": asked}), {})
    (arm,) = collect([tmp_path])
    assert arm.is_usable == is_usable


def test_a_run_that_went_on_elsewhere_is_not_like_one_that_stayed(tmp_path: Path) -> None:
    computed(write_arm(tmp_path, "GPT-01", [30.0], seeds=[0]), CPU, earlier=[{"environment": CPU}])
    computed(write_arm(tmp_path, "GPT-01", [30.0], seeds=[1]), CPU, earlier=[{"environment": GPU}])
    (arm,) = collect([tmp_path])
    assert arm.refused is not None
    assert arm.refused.values["settings"] == ("device (cpu / cpu+cuda)", "precision (float32 / bf16+float32)")


@pytest.mark.parametrize("sitting", [{}, {"environment": None}, {"environment": []}, {"environment": {"device": 7}}], ids=str)
def test_an_earlier_sitting_that_tells_nothing_is_no_crash(tmp_path: Path, sitting: dict[str, Any]) -> None:
    write_arm(tmp_path, "GPT-01", [30.0], seeds=[0])
    computed(write_arm(tmp_path, "GPT-01", [30.0], seeds=[1]), CPU, earlier=[sitting])
    (arm,) = collect([tmp_path])
    assert arm.is_usable


def test_a_quick_look_tells_the_device(tmp_path: Path) -> None:
    first, second = (write_arm(tmp_path, name, [30.0], seeds=[0])[0] for name in ("A", "B"))
    computed([second], GPU)
    assert compare_runs([first, second])[1] == [
        f"{second} differs from {first} in device (cpu / cuda); precision (float32 / bf16)",
        "one seed: no interval, so chance may explain the gap; train more seeds",
    ]
    computed(write_arm(tmp_path, "B", [30.0], seeds=[1]), CPU)
    with pytest.raises(ConfigError, match=r"seed-0 and seed-1 differ in device \(cuda / cpu\)"):
        compare_runs([first, second.parent])


def test_a_precision_that_both_were_tuned_in_is_their_own(tmp_path: Path) -> None:
    precisions = ("float32", "bf16", "bf16")
    for experiment, best, rate in (("GPT-01", 0, 3e-4), ("GPT-02", 1, 1e-3)):
        sweep = write_sweep(tmp_path, experiment, best).model_dump(mode="json")
        for point, precision in zip(sweep["points"], precisions, strict=True):
            point["values"]["precision"] = precision
        sweep["grid"]["precision"] = ["float32", "bf16"]
        write_plain(tmp_path / experiment / "laptop" / "sweep.json", sweep)
        settings = {"optim.lr": rate, "precision": precisions[best]}
        runs = write_arm(tmp_path, experiment, [30.0] * 2, seeds=range(2), variant="tuned-0123abcd", settings=settings)
        computed(runs, CPU | {"precision": precisions[best]})
    (pair,) = find(collect([tmp_path]), package_catalog(), [tmp_path]).pairs
    assert pair.confounded == ()
