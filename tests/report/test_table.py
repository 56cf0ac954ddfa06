"""The table's figures are those of the run directories, and its gaps are plain arithmetic on them."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from oelm.errors import ConfigError, DataError
from oelm.report.table import arm_rows


def write_run(
    path: Path,
    *,
    best_ppl: float,
    median: float = 0.25,
    bits: float = 1.5,
    trainable: int = 100,
    frozen: int = 0,
    steps: int = 9,
) -> Path:
    """Write by hand the files of a finished run that the table reads."""
    path.mkdir(parents=True)
    figures: dict[str, Any] = {
        "step_s": {"median": median, "mean": 99.0},
        "best_ppl": best_ppl,
        "final_ppl": 99.0,
        "final_bits_per_byte": bits,
    }
    (path / "timing_stats.json").write_text(json.dumps(figures))
    (path / "config.json").write_text(json.dumps({"steps": steps, "seed": len(path.name), "method": {"init": path.name}}))
    (path / "audit.json").write_text(json.dumps({"total": trainable + frozen, "trainable": trainable, "frozen": frozen}))
    return path


def test_figures_are_those_of_the_run_directory(tmp_path: Path) -> None:
    run = write_run(tmp_path / "a", best_ppl=32.5, median=0.125, bits=1.75, trainable=1000, frozen=24)
    row = arm_rows({"a": [run]}, baseline="a")[0]
    # The geometric mean of one number goes through a logarithm and back.
    assert row.perplexity == pytest.approx(32.5, rel=1e-14)
    assert (row.arm, row.ratio, row.trainable, row.frozen, row.median_step_s) == ("a", None, 1000, 24, 0.125)


@pytest.mark.parametrize(("ppl", "ratio"), [(40.0, 1.25), (32.0, 1.0), (24.0, 0.75), (64.0, 2.0)])
def test_the_ratio_of_one_seed_is_plain_division_without_an_interval(tmp_path: Path, ppl: float, ratio: float) -> None:
    runs = {"base": [write_run(tmp_path / "base", best_ppl=32.0)], "frozen": [write_run(tmp_path / "frozen", best_ppl=ppl)]}
    base, frozen = arm_rows(runs, baseline="base")
    assert base.ratio is None and frozen.ratio is not None
    assert frozen.ratio.value == pytest.approx(ratio, rel=1e-14)
    assert (frozen.ratio.low, frozen.ratio.high, frozen.ratio.count) == (0.0, math.inf, 1)


def test_ratios_are_paired_by_seed(tmp_path: Path) -> None:
    # Seeds differ by a factor of four, arms by exactly a tenth in each: unpaired, the interval would be huge.
    base = [write_run(tmp_path / f"base-{n}", best_ppl=ppl) for n, ppl in enumerate((10.0, 20.0, 40.0))]
    frozen = [write_run(tmp_path / f"frozen-{n}", best_ppl=ppl) for n, ppl in enumerate((11.0, 22.0, 44.0))]
    ratio = arm_rows({"base": base, "frozen": frozen}, baseline="base")[1].ratio
    assert ratio is not None and ratio.count == 3
    assert (ratio.low, ratio.value, ratio.high) == pytest.approx((1.1, 1.1, 1.1), rel=1e-12)


def test_arms_of_unequal_seeds_are_refused(tmp_path: Path) -> None:
    base, other = write_run(tmp_path / "base", best_ppl=10.0), write_run(tmp_path / "other", best_ppl=10.0)
    with pytest.raises(ValueError, match="argument"):
        arm_rows({"base": [base, other], "frozen": [base]}, baseline="base")


def test_rows_keep_the_order_of_the_runs_wherever_the_baseline_stands(tmp_path: Path) -> None:
    runs = {name: [write_run(tmp_path / name, best_ppl=8.0)] for name in ("z", "base", "a")}
    assert [row.arm for row in arm_rows(runs, baseline="base")] == ["z", "base", "a"]


@pytest.mark.parametrize("name", ["timing_stats.json", "audit.json"])
def test_a_run_that_is_not_finished_is_refused_by_the_missing_file(tmp_path: Path, name: str) -> None:
    run = write_run(tmp_path / "a", best_ppl=8.0)
    (run / name).unlink()
    with pytest.raises(DataError) as refusal:
        arm_rows({"a": [run]}, baseline="a")
    assert str(run / name) in str(refusal.value)


def test_runs_that_differ_in_more_than_method_and_seed_are_refused(tmp_path: Path) -> None:
    base = write_run(tmp_path / "base", best_ppl=8.0)
    longer = write_run(tmp_path / "longer", best_ppl=8.0, steps=18)
    with pytest.raises(ConfigError, match="differ in 'steps', so they cannot be compared"):
        arm_rows({"base": [base], "longer": [longer]}, baseline="base")
