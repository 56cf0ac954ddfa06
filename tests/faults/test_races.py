"""Two processes on one run: exactly one trains, the other is told by whom, and a third takes over from a dead one at once."""

from __future__ import annotations

import json
import random
import re
import socket
import time
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import tiny_settings
from tests.faults.harness import finish, start, wait_for
from tests.faults.tally import Tally

RACES = 50
# The quick subset is a part of the same fifty.
CHUNKS = [pytest.param(range(0, 5)), *(pytest.param(range(n, n + 9), marks=pytest.mark.slow) for n in range(5, RACES, 9))]


@pytest.fixture(scope="module")
def settings(text_file: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A run far longer than any race, on data that is prepared."""
    longer = tiny_settings(text_file, steps=100_000, eval_every=100_000, save_every=100_000)
    finish({**longer, "steps": 1}, tmp_path_factory.mktemp("first") / "run")
    return longer


def holder(run: Path) -> int | None:
    """Return the process that has begun to train here."""
    status = run / "status.json"
    return int(json.loads(status.read_text())["pid"]) if status.exists() else None


def end(children: list[ForkServerProcess]) -> None:
    for child in children:
        child.kill()
        child.join()


def race(settings: dict[str, Any], folder: Path, *, seed: int) -> None:
    run, told, gap_s = folder / "run", folder / "told", random.Random(seed).uniform(0, 0.05)
    first = start(settings, run, told=str(told))
    time.sleep(gap_s)
    second = start(settings, run, told=str(told))
    children = [first, second]
    try:
        wait_for(lambda: not (first.is_alive() and second.is_alive()), first, timeout_s=60)
        (winner,) = [child for child in children if child.is_alive()]
        (loser,) = [child for child in children if child is not winner]
        loser.join()
        assert loser.exitcode == 3
        match = re.search(r"in use by process (\d+) on (\S+) since (20\d\d-\S+);", told.read_text())
        assert match, told.read_text()
        assert match[1] == str(winner.pid) and match[2] == socket.gethostname()
        wait_for(lambda: holder(run) == winner.pid, winner)
        winner.kill()
        winner.join()
        third = start(settings, run, told=str(told))
        children.append(third)
        began = time.monotonic()
        wait_for(lambda: holder(run) == third.pid, third)
        assert third.is_alive(), f"a stale lock is in the way: {told.read_text()}"
        assert time.monotonic() - began < 30
    finally:
        end(children)


@pytest.mark.parametrize("seeds", CHUNKS, ids=str)
def test_of_two_processes_one_trains_and_a_third_takes_over_from_the_dead(
    seeds: range, settings: dict[str, Any], tmp_path: Path, tally: Tally
) -> None:
    for seed in seeds:
        race(settings, tmp_path / str(seed), seed=seed)
        tally("R7", "races of two within 50 ms, the winner killed, a third started", held=1, of=1, seed=seed)


def test_process_refused_by_one_that_took_over_is_told_of_that_one(settings: dict[str, Any], tmp_path: Path) -> None:
    run, told = tmp_path / "run", tmp_path / "told"
    dead = start(settings, run)
    wait_for(lambda: holder(run) == dead.pid, dead)
    end([dead])
    # Whoever died here is still named in status.json when these two meet.
    children = [start(settings, run, told=str(told)) for _ in range(2)]
    try:
        wait_for(lambda: not all(child.is_alive() for child in children), children[0], timeout_s=60)
        (winner,) = [child for child in children if child.is_alive()]
        assert f"in use by process {winner.pid} on " in told.read_text()
    finally:
        end(children)
