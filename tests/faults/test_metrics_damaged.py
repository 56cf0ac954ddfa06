"""metrics.jsonl damaged, edited or deleted: refused or repaired, never cut silently, and no wrong figure is published."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from oelm.config import parse_config
from oelm.errors import DataError
from oelm.runs.metrics import read_metrics
from oelm.runs.status import read_status
from tests.conftest import run_here, tiny_settings
from tests.faults.harness import evidence, finish, start, wait_for
from tests.faults.tally import Tally


@pytest.fixture(scope="module")
def settings(text_file: Path) -> dict[str, Any]:
    return tiny_settings(text_file, steps=20, eval_every=5, save_every=4)


@pytest.fixture(scope="module")
def oracle(settings: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("oracle") / "run"
    finish(settings, out)
    return out


@pytest.fixture(scope="module")
def killed(settings: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run killed at step 14: its newest checkpoint is of step 12, and holds the evaluations of steps 5 and 10."""
    out = tmp_path_factory.mktemp("killed") / "run"
    start(settings, out, die_at=14).join(timeout=60)
    return out


def line(number: int, text: str) -> Callable[[Path], None]:
    def damage(metrics: Path) -> None:
        lines = metrics.read_text().splitlines()
        lines[number - 1] = text
        metrics.write_text("\n".join(lines) + "\n")

    return damage


def without(key: str, step: int) -> Callable[[Path], None]:
    def damage(metrics: Path) -> None:
        rows = [row for row in read_metrics(metrics) if not (key in row and row["step"] == step)]
        metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))

    return damage


REFUSED: dict[str, tuple[Callable[[Path], None], str]] = {
    "torn in the middle": (line(2, '{"step": 2, "lo'), "the row of step 2 is missing (line 2 is damaged"),
    "a number": (line(3, "5"), "the row of step 3 is missing (line 3 is int, not an object)"),
    "a step in quotes": (line(13, '{"step":"12"}'), "the row of step 11 is missing (line 13 has the step '12'"),
    "a step gone": (without("loss", 7), "the row of step 7 is missing"),
    "an evaluation gone": (without("val_loss", 5), "the evaluation of step 5 is missing"),
    "emptied": (lambda metrics: os.truncate(metrics, 0), "the rows of steps 1 to 12 are missing"),
    "deleted": (lambda metrics: metrics.unlink(), "the rows of steps 1 to 12 are missing"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_run_whose_metrics_lost_a_row_is_refused_and_nothing_is_cut(
    case: str, settings: dict[str, Any], killed: Path, tmp_path: Path, tally: Tally
) -> None:
    run = tmp_path / "run"
    shutil.copytree(killed, run)
    metrics, (damage, message) = run / "metrics.jsonl", REFUSED[case]
    damage(metrics)
    damaged = metrics.read_bytes() if metrics.exists() else None
    with pytest.raises(DataError, match=re.escape(f"{metrics}: {message}")):
        run_here(parse_config(settings, where="test"), run)
    status = read_status(run)
    assert (metrics.read_bytes() if metrics.exists() else None) == damaged
    assert status is not None and status.status == "failed" and message in status.message
    tally("R15", "metrics that lost a row the checkpoint has seen", held=1, of=1)


def test_a_refused_run_resumes_bit_for_bit_once_its_metrics_are_back(
    settings: dict[str, Any], killed: Path, oracle: Path, tmp_path: Path
) -> None:
    run, told = tmp_path / "run", tmp_path / "told"
    shutil.copytree(killed, run)
    line(2, '{"step": 2, "lo')(run / "metrics.jsonl")
    child = start(settings, run, told=str(told))
    child.join(timeout=60)
    assert child.exitcode == 3 and "restore the file from a copy" in told.read_text()
    shutil.copy(killed / "metrics.jsonl", run / "metrics.jsonl")
    finish(settings, run)
    assert evidence(run) == evidence(oracle)


def test_damage_after_the_checkpoint_is_repaired_with_a_warning(
    settings: dict[str, Any], killed: Path, oracle: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    shutil.copytree(killed, run)
    line(15, '{"step": 13, "lo')(run / "metrics.jsonl")
    finish(settings, run)
    assert evidence(run) == evidence(oracle)
    assert "line 15 is damaged" in (run / "training.log").read_text()


def test_metrics_deleted_under_a_run_are_written_again_and_the_run_ends_as_ever(
    settings: dict[str, Any], oracle: Path, tmp_path: Path, tally: Tally
) -> None:
    run, sign, held = tmp_path / "run", tmp_path / "resting", tmp_path / "held"
    child = start(settings, run, rest_in="step", rest_at=9, phase=str(sign), rest_while=str(held))
    wait_for(sign.exists, child)
    (run / "metrics.jsonl").unlink()
    held.unlink()
    child.join(timeout=60)
    assert child.exitcode == 0
    assert evidence(run) == evidence(oracle)
    assert "metrics.jsonl was deleted" in (run / "training.log").read_text()
    tally("R15", "metrics deleted under a run", held=1, of=1)


def better(metrics: Path) -> None:
    rows = read_metrics(metrics)
    evaluation = next(row for row in rows if "val_loss" in row)
    evaluation["val_loss"] = 0.5
    metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))


def without_step_s(metrics: Path) -> None:
    rows = read_metrics(metrics)
    del rows[1]["step_s"]
    metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.mark.parametrize(
    ("damage", "message"),
    [(better, "the file was changed"), (lambda metrics: metrics.unlink(), "are missing"), (without_step_s, "row 2: step_s")],
    ids=["another best", "deleted", "no times"],
)
def test_no_figure_is_published_from_metrics_that_are_not_the_run_s(
    damage: Callable[[Path], None], message: str, settings: dict[str, Any], oracle: Path, tmp_path: Path
) -> None:
    run, config = tmp_path / "run", parse_config(settings, where="test")
    shutil.copytree(oracle, run)
    for name in ("status.json", "timing_stats.json"):
        (run / name).unlink()
    damage(run / "metrics.jsonl")
    for _ in range(2):
        with pytest.raises(DataError, match=message):
            run_here(config, run)
    assert not (run / "timing_stats.json").exists()
    shutil.copy(oracle / "metrics.jsonl", run / "metrics.jsonl")
    run_here(config, run)
    figures = [json.loads((path / "timing_stats.json").read_text())["best_ppl"] for path in (run, oracle)]
    assert figures[0] == figures[1]
