"""SIGTERM and SIGINT in every phase, and SIGHUP: saved at the next boundary, exit code 75, and nothing lost."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from oelm.process import StopFlag
from oelm.runs.metrics import read_metrics
from oelm.runs.status import read_status
from tests.conftest import tiny_settings
from tests.faults.harness import evidence, finish, leftovers, rows, start, wait_for
from tests.faults.tally import Tally

STEPS = 40
PHASES = ("start-up", "warm-up", "step", "evaluation", "save", "final evaluation")
# Two of each signal in every phase, and as many at any moment as make thirty.
CASES = [(phase, number) for phase in PHASES for number in (signal.SIGTERM, signal.SIGINT) for _ in range(2)]
CASES += [("any moment", number) for number in (signal.SIGTERM, signal.SIGINT) for _ in range(3)]
# A closed terminal does what SIGTERM does.
CASES += [("step", signal.SIGHUP), ("any moment", signal.SIGHUP)]
QUICK = (9, 16, 22, 30)


@pytest.fixture(scope="module")
def settings(text_file: Path) -> dict[str, Any]:
    return tiny_settings(text_file, steps=STEPS, eval_every=9, save_every=7, schedule__warmup_steps=6)


@pytest.fixture(scope="module")
def oracle(settings: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("oracle") / "run"
    finish(settings, out)
    return out


def steps_of(run: Path) -> list[int]:
    return [row["step"] for row in read_metrics(run / "metrics.jsonl") if "loss" in row]


@pytest.mark.parametrize("seed", [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in range(len(CASES))])
def test_signalled_run_saves_at_the_next_boundary_and_continues_bit_for_bit(
    seed: int, settings: dict[str, Any], oracle: Path, tmp_path: Path, tally: Tally
) -> None:
    (phase, number), chance = CASES[seed], random.Random(seed)
    if signal.getsignal(number) is signal.SIG_IGN:
        pytest.skip("these tests were started with nohup, so that runs rightly ignore SIGHUP")
    run, sign = tmp_path / "run", tmp_path / "resting"
    at = chance.randrange(1, 6) if phase == "warm-up" else chance.randrange(6, 30)
    child = start(settings, run, rest_in=phase, rest_at=at, phase=str(sign))
    if phase == "any moment":
        wait_for(lambda: rows(run) >= at and read_status(run) is not None, child)
        time.sleep(chance.random() * 0.02)
    else:
        wait_for(sign.exists, child)
    assert child.pid is not None
    os.kill(child.pid, number)
    there = len(steps_of(run))
    child.join(timeout=60)
    status = read_status(run)
    assert child.exitcode == 75
    assert status is not None and status.status == "stopped" and status.message == number.name
    steps = steps_of(run)
    # The step under way is the last, and everything up to it is saved.
    assert there <= len(steps) <= there + 1
    assert json.loads((run / "latest.json").read_text())["step"] == len(steps) == status.step
    assert leftovers(run) == []
    finish(settings, run)
    assert evidence(run) == evidence(oracle)
    tally("R8", "signals in six phases and at any moment", held=1, of=1, seed=seed)


@pytest.mark.parametrize("phase", ["step", pytest.param("save", marks=pytest.mark.slow)])
def test_second_interrupt_leaves_at_once_and_loses_at_most_one_interval(
    phase: str, settings: dict[str, Any], oracle: Path, tmp_path: Path, tally: Tally
) -> None:
    run, sign = tmp_path / "run", tmp_path / "resting"
    child = start(settings, run, rest_in=phase, rest_at=17, phase=str(sign), deaf_once=True)
    wait_for(sign.exists, child)
    assert child.pid is not None
    os.kill(child.pid, signal.SIGINT)
    # Still resting: the first one asks, the second one does not wait for an answer.
    time.sleep(0.1)
    os.kill(child.pid, signal.SIGINT)
    child.join(timeout=60)
    status = read_status(run)
    assert child.exitcode == 130
    assert status is not None and status.status == "stopped"
    assert leftovers(run) == []
    finish(settings, run)
    assert evidence(run) == evidence(oracle)
    tally("R8", "second interrupts", held=1, of=1)


def test_a_run_started_with_nohup_outlives_its_terminal() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopFlag() as stop:
            os.kill(os.getpid(), signal.SIGHUP)
            assert not stop.requested()
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)
