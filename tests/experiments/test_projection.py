"""Projections are arithmetic: they follow from operations, data sheets and what was assumed, and say so."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from oelm.budget import budget_settings
from oelm.cli.app import app
from oelm.config import parse_config
from oelm.errors import ConfigError
from oelm.experiments.catalog import load_catalog
from oelm.experiments.forecast import GPUS, Assumptions, named_gpus, project, queue_s, reported_efficiency
from oelm.experiments.plan import PlannedRun
from oelm.experiments.study import Study


@pytest.fixture(scope="module")
def pair() -> list[PlannedRun]:
    runs = Study(names=("GPT-02",), budget="paper", root=Path("outputs"), seeds=[0]).plan(load_catalog())
    return sorted(runs, key=lambda run: run.experiment.id)


def test_efficiency_is_what_the_study_reached_on_its_gpu() -> None:
    share = reported_efficiency(parse_config(budget_settings("paper"), where="paper"))
    assert 0.05 < share < 0.2


def test_frozen_arm_sums_fewer_bytes_by_exactly_what_is_frozen(pair: list[PlannedRun]) -> None:
    on = Assumptions(GPUS["A100"], 8, 0.1, 2.0)
    baseline, frozen = (project(run, on) for run in pair)
    assert baseline is not None and frozen is not None
    # 6 layers of Q and K of 512 x 512, 4 bytes each.
    assert baseline.summed_bytes - frozen.summed_bytes == 4 * 6 * 2 * 512 * 512
    assert frozen.memory_bytes < baseline.memory_bytes < 24e9


def test_eight_gpus_take_an_eighth_and_the_exchange(pair: list[PlannedRun]) -> None:
    one, eight = (project(pair[0], Assumptions(GPUS["A100"], count, 0.1, 2.0)) for count in (1, 8))
    assert one is not None and eight is not None
    assert one.spread_s == one.alone_s == eight.alone_s
    exchange_s = 1.15 * 100_000 * 2 * 7 / 8 * eight.summed_bytes / GPUS["A100"].link_bytes_per_s
    assert eight.spread_s == pytest.approx(eight.alone_s / 8 + exchange_s)
    assert queue_s([one] * 8, 8) == one.alone_s


def test_unknown_gpus_and_shares_beyond_one_are_refused() -> None:
    for text in ("ZX-81", "8A100", "0xA100", "x"):
        with pytest.raises(ConfigError, match="give one of A5000"):
            named_gpus(text)
    with pytest.raises(ConfigError, match="a share from 0 to 1"):
        Assumptions(GPUS["A100"], 8, 1.5, 2.0)


def test_gpus_are_named_in_any_case_one_or_several() -> None:
    assert named_gpus("a100") == (GPUS["A100"], 1) and named_gpus("8xh100") == named_gpus("8XH100") == (GPUS["H100"], 8)


def test_command_says_that_it_is_paper() -> None:
    result = CliRunner().invoke(app, ["show", "GPT-02", "--on", "8xA100"])
    assert result.exit_code == 0, result.output
    assert "calculated on paper, not measured" in " ".join(result.output.split())
    assert "10 runs at paper" in result.output


def test_one_gpu_has_one_time_and_one_cost_with_its_price() -> None:
    printed = CliRunner(env={"COLUMNS": "140"}).invoke(app, ["show", "GPT-02", "--on", "A100", "--price", "3"]).output
    assert printed.splitlines()[0].split("  ")[2] == "each alone" and "each on 1" not in printed
    (summed,) = [line for line in printed.splitlines() if line.startswith("10 runs at paper: ")]
    assert re.fullmatch(r"10 runs at paper: \S+ h on 1 A100 \(cost \d+ at 3 per GPU and hour\)", summed)


def test_settings_change_what_is_projected() -> None:
    wide = ["--set", "model.model_dim=768", "--set", "model.num_layers=12", "--set", "model.num_heads=12"]
    small, large = (CliRunner().invoke(app, ["show", "GPT-01", "--on", "a100", *more]).output for more in ([], wide))
    assert "5 runs at paper" in small and "5 runs at paper" in large and small != large
    # 124M numbers instead of 45M.
    summed = [float(text.partition(" MB")[0].split()[-1]) for text in (small, large)]
    assert summed[1] > 2 * summed[0]
    wrong = CliRunner().invoke(app, ["show", "GPT-01", "--on", "A100", "--set", "model.width=3"])
    assert wrong.exit_code == 2 and "unknown key 'width'" in wrong.output
