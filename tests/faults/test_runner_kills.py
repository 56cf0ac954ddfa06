"""Launchers and runs that are really killed, raced and stopped: the same command finishes every run exactly once."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from oelm.runs.metrics import read_metrics
from oelm.runs.status import read_status
from tests.faults.harness import evidence, leftovers
from tests.faults.queues import STEPS, Launch, Queue, digests, preload, queue_in, rows
from tests.faults.tally import Tally

BOTH = ("run", "mine", "--budget", "smoke", "--jobs", "2")
ONE = ("run", "mine-02", "--no-baseline", "--budget", "smoke", "--jobs", "2")
RUNS = ("mine-01/smoke/default/seed-0", "mine-02/smoke/default/seed-0")
KINDS = ("the launcher", "a run", "everything")
MOMENTS = ("launch", "start", "steps", "steps")
CASES = 20
# Once more, behind the other modules of this folder.
preload()
Evidence = dict[str, Any]


@pytest.fixture(scope="module")
def undisturbed(text_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Queue]:
    """A queue of one run that nobody disturbs."""
    with queue_in(tmp_path_factory.mktemp("undisturbed"), text_file) as queue:
        queue.finish(*ONE)
        yield queue


@pytest.fixture(scope="module")
def oracle(undisturbed: Queue) -> Evidence:
    """What the run comes to when nobody disturbs it."""
    return {RUNS[1]: evidence(undisturbed.outputs / RUNS[1])}


@pytest.fixture(scope="module")
def oracles(text_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Evidence:
    """What each of two runs comes to when nobody disturbs them."""
    with queue_in(tmp_path_factory.mktemp("oracles"), text_file) as queue:
        queue.finish(*BOTH)
        return {name: evidence(queue.outputs / name) for name in RUNS}


def check_exactly_once(queue: Queue, oracle: Evidence) -> None:
    """Every run is done, by one process in the end, without a gap or a repeat, to the oracle's bits; nothing is left."""
    assert [str(run.relative_to(queue.outputs)) for run in queue.runs()] == list(oracle)
    for name, expected in oracle.items():
        run = queue.outputs / name
        status = read_status(run)
        assert status is not None and status.status == "done" and status.step == STEPS
        assert [row["step"] for row in read_metrics(run / "metrics.jsonl") if "loss" in row] == list(range(1, STEPS + 1))
        assert evidence(run) == expected
        assert (run / "training.log").read_text().count("done at step") == 1
        assert leftovers(run) == []
    # One that was adopted may still be putting torch away.
    queue.wait_until(lambda: not queue.workers(), timeout_s=30)


def wait_for_moment(queue: Queue, launch: Launch, names: Sequence[str], chance: random.Random) -> str:
    """Wait for a moment of a launch that chance chooses: while it starts, while runs start, or amid their steps."""
    match chance.choice(MOMENTS):
        case "launch":
            delay = chance.uniform(0, 1.5)
            time.sleep(delay)
            return f"{delay:.2f} s after the launch"
        case "start":
            queue.wait_until(lambda: launch.is_over or bool(queue.workers()))
            delay = chance.uniform(0, 3)
            time.sleep(delay)
            return f"{delay:.2f} s after the first run's start"
    name, step = chance.choice(names), chance.randrange(STEPS + 5)
    queue.wait_until(lambda: launch.is_over or rows(queue.outputs / name) >= step)
    time.sleep(chance.random() * 0.03)
    return f"row {step} of {name}"


def kill(queue: Queue, launch: Launch, kind: str, chance: random.Random) -> bool:
    """Kill what `kind` says; whether there was something to kill."""
    if launch.is_over:
        return False
    if kind == "everything":
        queue.lose_everything()
    elif kind == "the launcher":
        launch.send(signal.SIGKILL)
        launch.wait()
    else:
        queue.wait_until(lambda: launch.is_over or bool(queue.workers()))
        if not (workers := sorted(queue.workers())):
            return False
        os.kill(chance.choice(workers), signal.SIGKILL)
        assert launch.wait() in (0, 75), launch.text
    return True


def kill_at(queue: Queue, run: str, kind: str, step: int) -> bool:
    """Launch a queue of one run and kill once that has so many rows; whether there was something to kill."""
    launch = queue.launch(*ONE)
    queue.wait_until(lambda: launch.is_over or rows(queue.outputs / run) >= step)
    return kill(queue, launch, kind, random.Random(step))


def kill_and_repeat(queue: Queue, command: Sequence[str], names: Sequence[str], kinds: Sequence[str], seed: int) -> None:
    """Launch the queue and kill as often as there are kinds, then repeat the command once."""
    chance = random.Random(seed)
    for kind in kinds:
        launch = queue.launch(*command)
        moment = wait_for_moment(queue, launch, names, chance)
        is_hit = kill(queue, launch, kind, chance)
        print(f"seed {seed}: {kind} {'killed' if is_hit else 'over'} at {moment}")
    queue.finish(*command)


def test_queue_whose_launcher_and_run_are_killed_finishes_exactly_once(
    oracle: Evidence, text_file: Path, tmp_path: Path
) -> None:
    (run,) = oracle
    with queue_in(tmp_path / "queue", text_file) as queue:
        # Amid the first steps, which comes before the end on every machine; other moments are in the slow test.
        for kind, step in (("everything", 9), ("a run", 20), ("the launcher", 31)):
            assert kill_at(queue, run, kind, step), f"the run was over before {kind} was killed"
        queue.finish(*ONE)
        check_exactly_once(queue, oracle)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(CASES))
def test_queue_killed_at_random_moments_finishes_exactly_once(
    seed: int, oracles: Evidence, text_file: Path, tmp_path: Path, tally: Tally
) -> None:
    kinds = [KINDS[seed % len(KINDS)], random.Random(seed).choice(KINDS)]
    with queue_in(tmp_path / "queue", text_file) as queue:
        kill_and_repeat(queue, BOTH, RUNS, kinds, seed)
        check_exactly_once(queue, oracles)
    tally("R16", "queues killed twice at random moments", held=1, of=1, seed=seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10))
def test_launchers_started_together_and_one_of_them_killed_finish_exactly_once(
    seed: int, oracles: Evidence, text_file: Path, tmp_path: Path
) -> None:
    chance = random.Random(1000 + seed)
    with queue_in(tmp_path / "queue", text_file) as queue:
        launches = [queue.launch(*BOTH) for _ in range(chance.choice((2, 3)))]
        if is_killed := seed % 2 == 1:
            victim = launches.pop(chance.randrange(len(launches)))
            moment = wait_for_moment(queue, victim, RUNS, chance)
            victim.send(signal.SIGKILL)
            print(f"seed {1000 + seed}: {len(launches) + 1} launchers, one killed at {moment}")
        assert [launch.wait() for launch in launches] == [0] * len(launches), "\n".join(launch.text for launch in launches)
        check_exactly_once(queue, oracles)
        # Not even begun twice, unless a launcher died before its run had taken its folder.
        refused = [(queue.outputs / name / "console.log").read_text().count("is in use") for name in RUNS]
        assert is_killed or refused == [0, 0]


def stop_and_repeat(queue: Queue, command: Sequence[str], names: Sequence[str], number: signal.Signals, seed: int) -> None:
    """Ask a launcher to stop at a random moment: it and its runs leave soon and say so; then repeat the command."""
    chance = random.Random(seed)
    launch = queue.launch(*command)
    moment = wait_for_moment(queue, launch, names, chance)
    # Until then it is Python that starts, and any signal ends it.
    queue.wait_until(lambda: launch.is_over or "at budget smoke" in launch.text)
    launch.send(number)
    code = launch.wait()
    print(f"seed {seed}: {number.name} at {moment}, exit code {code}")
    assert code in (0, 75) and "Traceback" not in launch.text, launch.text
    assert queue.workers() == {}
    for name in names:
        status = read_status(queue.outputs / name)
        assert status is None or status.status in (("done",) if code == 0 else ("done", "stopped", "queued"))
    queue.finish(*command)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("seed", range(2000, 2010))
def test_queue_stopped_at_random_moments_finishes_exactly_once(
    seed: int, number: signal.Signals, oracles: Evidence, text_file: Path, tmp_path: Path
) -> None:
    with queue_in(tmp_path / "queue", text_file) as queue:
        stop_and_repeat(queue, BOTH, RUNS, number, seed)
        check_exactly_once(queue, oracles)


@pytest.mark.slow
def test_full_disk_stops_the_queue_resumable(oracle: Evidence, text_file: Path, tmp_path: Path) -> None:
    with queue_in(tmp_path / "queue", text_file) as queue:
        # Room for every small file, not for the weights.
        queue.environment["FILE_BYTES"] = str(60_000)
        printed = queue.finish(*ONE, code=75)
        assert "no room to write" in printed and "repeat the same command" in printed
        del queue.environment["FILE_BYTES"]
        queue.finish(*ONE)
        check_exactly_once(queue, oracle)


def test_finished_queue_says_so_and_changes_no_byte(undisturbed: Queue) -> None:
    before = digests(undisturbed.outputs)
    assert "1 of them done" in undisturbed.finish(*ONE)
    assert digests(undisturbed.outputs) == before
