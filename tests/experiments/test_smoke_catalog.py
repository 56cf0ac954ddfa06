"""Every experiment of the catalog runs to its end at smoke, and what it leaves is whole."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from oelm.experiments.catalog import load_catalog
from oelm.runs.records import read_any_config
from tests.conftest import oelm_command
from tests.runs.recomputed import figure_problems, read_record


@pytest.mark.slow
def test_the_whole_catalog_runs_at_smoke_and_every_figure_recomputes(tmp_path: Path) -> None:
    command = oelm_command("run", "all", "--budget", "smoke", "--out", str(tmp_path / "outputs"))
    child = subprocess.run(command, cwd=tmp_path, env=os.environ, capture_output=True, text=True)
    assert child.returncode == 0, child.stdout + child.stderr
    runs = sorted((tmp_path / "outputs").glob("*/smoke/default/seed-0"))
    assert {run.parts[-4] for run in runs} == set(load_catalog().experiments)
    for run in runs:
        record = read_record(run)
        assert record.status.status == "done" and figure_problems(record) == [], run
        assert read_any_config(run).as_dict() == record.config


@pytest.mark.slow
def test_one_experiment_and_its_baseline_run_at_smoke(tmp_path: Path) -> None:
    command = oelm_command("run", "GPT-02", "--budget", "smoke", "--out", str(tmp_path / "outputs"))
    child = subprocess.run(command, cwd=tmp_path, env=os.environ, capture_output=True, text=True)
    assert child.returncode == 0, child.stdout + child.stderr
    for name in ("GPT-01", "GPT-02"):
        assert figure_problems(read_record(tmp_path / "outputs" / name / "smoke" / "default" / "seed-0")) == []
    assert "GPT-02" in child.stdout and "budget smoke" in child.stdout and "never a result" in child.stdout
