"""A killed run, started again the same way, continues to the same bits."""

from __future__ import annotations

import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import tiny_settings
from tests.faults.harness import SAVE_POINTS, evidence, finish, leftovers, start
from tests.faults.tally import Tally

KILLS = 10


@pytest.fixture(scope="module")
def settings(text_file: Path) -> dict[str, Any]:
    return tiny_settings(text_file, steps=60, eval_every=13, save_every=7)


@pytest.fixture(scope="module")
def oracle(settings: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same run, never disturbed."""
    out = tmp_path_factory.mktemp("oracle") / "run"
    finish(settings, out)
    return out


def wait_for_step(run: Path, step: int, child: Any) -> None:
    """Wait until the run has written this many steps, or is over."""
    metrics = run / "metrics.jsonl"
    while child.is_alive() and (not metrics.exists() or metrics.read_bytes().count(b"\n") < step):
        time.sleep(0.002)


def test_the_oracle_repeats_itself_bit_for_bit(settings: dict[str, Any], oracle: Path, tmp_path: Path) -> None:
    finish(settings, tmp_path / "run")
    assert evidence(tmp_path / "run") == evidence(oracle)


def test_run_killed_at_ten_random_points_continues_bit_for_bit(settings: dict[str, Any], oracle: Path, tmp_path: Path) -> None:
    chance = random.Random(20261115)
    run = tmp_path / "run"
    killed = 0
    for kill in range(KILLS):
        child = start(settings, run)
        # Aim anywhere in what is left, and a little more: inside a step, an evaluation, a save, the closing files.
        wait_for_step(run, chance.randrange(6 * kill, 6 * kill + 9), child)
        time.sleep(chance.random() * 0.03)
        child.kill()
        child.join()
        killed += child.exitcode == -signal.SIGKILL
    finish(settings, run)
    assert evidence(run) == evidence(oracle)
    assert killed >= KILLS - 2, "the run was over before most kills reached it"
    assert leftovers(run) == []


@pytest.mark.parametrize("point", SAVE_POINTS)
def test_run_killed_inside_a_save_continues_bit_for_bit(
    point: str, settings: dict[str, Any], oracle: Path, tmp_path: Path, tally: Tally
) -> None:
    run = tmp_path / "run"
    child = start(settings, run, fault=point)
    child.join(timeout=120)
    assert child.exitcode == -signal.SIGKILL, f"the fault {point!r} was never reached"
    finish(settings, run)
    assert evidence(run) == evidence(oracle)
    assert leftovers(run) == []
    tally("R1", "kills at named points of a save", held=1, of=1)


def test_finished_run_says_so_and_changes_no_byte(settings: dict[str, Any], oracle: Path) -> None:
    before = {path: path.read_bytes() for path in oracle.rglob("*") if path.is_file() and path.name != "training.log"}
    finish(settings, oracle)
    assert before == {path: path.read_bytes() for path in oracle.rglob("*") if path.is_file() and path.name != "training.log"}
