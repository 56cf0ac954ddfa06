"""The table's figures are those of the run directories, and its gaps are plain arithmetic on them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from oelm.errors import DataError
from oelm.report.table import ArmRow, arm_rows


def write_run(
    path: Path, *, best_ppl: float, median: float = 0.25, bits: float = 1.5, trainable: int = 100, frozen: int = 0
) -> Path:
    """Write by hand the two files of a finished run that the table reads."""
    path.mkdir(parents=True)
    figures: dict[str, Any] = {
        "step_s": {"median": median, "mean": 99.0},
        "best_ppl": best_ppl,
        "final_ppl": 99.0,
        "final_bits_per_byte": bits,
    }
    (path / "timing_stats.json").write_text(json.dumps(figures))
    (path / "audit.json").write_text(json.dumps({"total": trainable + frozen, "trainable": trainable, "frozen": frozen}))
    return path


def test_figures_are_those_of_the_run_directory(tmp_path: Path) -> None:
    run = write_run(tmp_path / "a", best_ppl=32.5, median=0.125, bits=1.75, trainable=1000, frozen=24)
    assert arm_rows({"a": run}, baseline="a") == [
        ArmRow(arm="a", perplexity=32.5, gap=None, bits_per_byte=1.75, trainable=1000, frozen=24, median_step_s=0.125)
    ]


# Values whose quotients are exact in binary, so that equality is.
@pytest.mark.parametrize(("ppl", "gap"), [(40.0, 0.25), (32.0, 0.0), (24.0, -0.25), (64.0, 1.0)])
def test_the_gap_is_the_change_in_perplexity_against_the_baseline(tmp_path: Path, ppl: float, gap: float) -> None:
    runs = {"base": write_run(tmp_path / "base", best_ppl=32.0), "frozen": write_run(tmp_path / "frozen", best_ppl=ppl)}
    assert [row.gap for row in arm_rows(runs, baseline="base")] == [None, gap]


def test_rows_keep_the_order_of_the_runs_wherever_the_baseline_stands(tmp_path: Path) -> None:
    runs = {name: write_run(tmp_path / name, best_ppl=8.0) for name in ("z", "base", "a")}
    assert [row.arm for row in arm_rows(runs, baseline="base")] == ["z", "base", "a"]


@pytest.mark.parametrize("name", ["timing_stats.json", "audit.json"])
def test_a_run_that_is_not_finished_is_refused_by_the_missing_file(tmp_path: Path, name: str) -> None:
    run = write_run(tmp_path / "a", best_ppl=8.0)
    (run / name).unlink()
    with pytest.raises(DataError) as refusal:
        arm_rows({"a": run}, baseline="a")
    assert str(run / name) in str(refusal.value)
