"""SIGKILL at random moments and at the worst ones: nothing more than a save's interval is lost, no bit of the end differs."""

from __future__ import annotations

import json
import random
import re
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from oelm.data.order import WindowOrder
from oelm.data.prepare import prepare
from tests.conftest import made_text, tiny_settings
from tests.faults.harness import evidence, finish, leftovers, rows, start, wait_for
from tests.faults.tally import Tally

SAVE_EVERY, STEPS = 7, 60


@pytest.fixture(scope="module")
def settings(text_file: Path) -> dict[str, Any]:
    return tiny_settings(text_file, steps=STEPS, eval_every=13, save_every=SAVE_EVERY)


@pytest.fixture(scope="module")
def oracle(settings: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("oracle") / "run"
    finish(settings, out)
    return out


def steps_written(run: Path) -> int:
    lines = (run / "metrics.jsonl").read_text().split("\n")[:-1] if (run / "metrics.jsonl").exists() else []
    return max((json.loads(line)["step"] for line in lines), default=0)


def continued_from(run: Path) -> int:
    """Return the step that the last sitting of a run went on from; 0 where nothing had been saved."""
    found = re.findall(r"continuing from step-(\d+)", (run / "training.log").read_text())
    return int(found[-1]) if found else 0


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20))
def test_run_killed_at_a_random_moment_loses_at_most_one_interval_and_no_bit(
    seed: int, settings: dict[str, Any], oracle: Path, tmp_path: Path, tally: Tally
) -> None:
    chance, run = random.Random(seed), tmp_path / "run"
    # Three moments in four are in its steps, the others while it starts; then a moment more, into whatever comes.
    goal = max(0, chance.randrange(-STEPS // 3, STEPS))
    child = start(settings, run)
    wait_for(lambda: rows(run) >= goal, child)
    time.sleep(chance.random() * 0.05)
    child.kill()
    child.join()
    assert child.exitcode == -signal.SIGKILL, "the run was over before the kill reached it"
    reached = steps_written(run)
    finish(settings, run)
    assert evidence(run) == evidence(oracle)
    assert reached - continued_from(run) <= SAVE_EVERY
    assert leftovers(run) == []
    tally("R1", "kills at random moments", held=1, of=1, seed=seed)


@pytest.fixture(scope="module")
def short(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A run of 60 steps over a text so short that it sees it more than once; epochs end amid a batch."""
    text = tmp_path_factory.mktemp("text") / "short.txt"
    text.write_text(made_text(900))
    return tiny_settings(text, steps=STEPS, eval_every=13, save_every=SAVE_EVERY)


@pytest.fixture(scope="module")
def epoch(short: dict[str, Any]) -> int:
    """How many whole steps an epoch has."""
    tokens = prepare(short["data"]["source"], tokenizer=short["data"]["tokenizer"])
    order = WindowOrder(len(tokens.train), short["model"]["seq_len"], short["batch_size"], seed=0)
    steps = order.windows_per_epoch // short["batch_size"]
    assert 15 <= steps <= 40, "the run is to see its text more than once, and some of it between three kills"
    return steps


@pytest.fixture(scope="module")
def short_oracle(short: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("oracle") / "run"
    finish(short, out, ids=str(out.parent / "ids"))
    return out


def batches(path: Path) -> dict[int, list[int]]:
    """Return what every step learnt from; a step that was repeated after a kill must have had the same batch."""
    seen: dict[int, list[int]] = {}
    for row in map(json.loads, path.read_text().splitlines()):
        assert seen.setdefault(row["step"], row["ids"]) == row["ids"], f"step {row['step']} had another batch the second time"
    return seen


@pytest.mark.slow
@pytest.mark.parametrize(
    "case", ["third of an epoch", "two thirds", "thrice in an epoch", "epoch's end", "before the first save"]
)
def test_batches_of_a_killed_run_are_the_same_in_order(
    case: str, epoch: int, short: dict[str, Any], short_oracle: Path, tmp_path: Path, tally: Tally
) -> None:
    third = epoch // 3
    kills = {
        "third of an epoch": [third],
        "two thirds": [2 * third],
        "thrice in an epoch": [third, 2 * third, epoch - 1],
        "epoch's end": [epoch],
        "before the first save": [SAVE_EVERY - 2],
    }[case]
    run, ids = tmp_path / "run", tmp_path / "ids"
    for step in kills:
        child = start(short, run, die_at=step, ids=str(ids))
        child.join(timeout=120)
        assert child.exitcode == -signal.SIGKILL and steps_written(run) == step
    finish(short, run, ids=str(ids))
    expected = batches(short_oracle.parent / "ids")
    assert list(expected) == list(range(STEPS)) and batches(ids) == expected
    assert evidence(run) == evidence(short_oracle)
    tally("R2", "kills within an epoch, at its end, and before the first save", held=1, of=1)
