"""The queue's promises, with stand-ins for the runs: launches, races, kills and stops in seconds."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from oelm.data.tokenizer import num_cores
from oelm.experiments.catalog import load_catalog
from oelm.experiments.queue import Job, Runner, RunSlot
from oelm.experiments.study import Study
from oelm.files import write_json
from oelm.process import StopFlag
from oelm.runs.layout import launch_lock_path
from oelm.runs.status import read_locks, read_status
from tests.faults.queues import (
    STEPS,
    Launch,
    Queue,
    digests,
    most_at_once,
    notes,
    queue_in,
    rows,
    sittings,
    steps_of,
    with_stand_ins,
)
from tests.faults.stand_in import HOLD_AT

COMMAND = ("run", "mine", "--budget", "smoke", "--seeds", "2", "--jobs", "2")
ALL = 4


@pytest.fixture
def queue(text_file: Path, tmp_path: Path) -> Iterator[Queue]:
    with queue_in(tmp_path / "queue", text_file, **with_stand_ins(tmp_path)) as queue:
        yield queue


def check_done(queue: Queue) -> None:
    """Every run is done, each step stands once, and no two processes ever held a run together."""
    assert len(queue.runs()) == ALL
    for run in queue.runs():
        status = read_status(run)
        assert status is not None and status.status == "done", f"{run}: {status}"
        assert steps_of(run) == list(range(1, STEPS + 1))
        assert most_at_once(sittings(run)) <= 1
    assert queue.workers() == {}


def refused(queue: Queue) -> int:
    """Return how many processes were started for a run that another held."""
    return sum(console.read_text().count("is in use") for run in queue.runs() if (console := run / "console.log").exists())


def begun(queue: Queue) -> int:
    """Return how many processes ever held a run."""
    return sum(len(sittings(run)) for run in queue.runs())


def started(launches: Sequence[Launch]) -> int:
    """Return how many runs launchers say they have started."""
    return sum(launch.text.count("started mine-") for launch in launches)


def status_names(queue: Queue) -> list[str]:
    return [status.status for run in queue.runs() if (status := read_status(run)) is not None]


def race(queue: Queue, *, launchers: int, gap_s: float) -> None:
    """Start launchers within moments of each other: each ends well, and every run was begun once."""
    launches = []
    for _ in range(launchers):
        launches.append(queue.launch(*COMMAND))
        time.sleep(gap_s)
    assert [launch.wait() for launch in launches] == [0] * launchers, "\n".join(launch.text for launch in launches)
    check_done(queue)
    assert started(launches) == begun(queue) == ALL
    assert refused(queue) == 0


@pytest.mark.parametrize(("launchers", "gap_s"), [pytest.param(2, 0.0, marks=pytest.mark.slow), (3, 0.02)])
def test_launchers_started_together_begin_every_run_once(launchers: int, gap_s: float, queue: Queue) -> None:
    race(queue, launchers=launchers, gap_s=gap_s)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(50))
def test_of_fifty_races_none_begins_a_run_twice(seed: int, queue: Queue) -> None:
    chance = random.Random(seed)
    launchers, gap_s = chance.choice((2, 3)), chance.choice((0.0, 0.05, 0.3)) * chance.random()
    print(f"seed {seed}: {launchers} launchers, {gap_s:.3f} s apart")
    race(queue, launchers=launchers, gap_s=gap_s)


def race_with_a_death(queue: Queue, *, seed: int) -> None:
    """Start three launchers together and kill one of them: the others finish everything, and say so."""
    chance = random.Random(seed)
    launches = [queue.launch(*COMMAND) for _ in range(3)]
    queue.wait_until(lambda: bool(queue.workers()))
    delay = chance.uniform(0, 1.2)
    time.sleep(delay)
    victim = launches.pop(chance.randrange(3))
    print(f"seed {seed}: killed {delay:.2f} s after the first start, with {len(queue.workers())} runs under way")
    victim.send(signal.SIGKILL)
    assert [launch.wait() for launch in launches] == [0, 0], "\n".join(launch.text for launch in launches)
    check_done(queue)
    # Nothing was killed but a launcher, so nothing was begun twice.
    assert begun(queue) == ALL


def test_of_three_launchers_one_is_killed_and_the_others_finish(queue: Queue) -> None:
    race_with_a_death(queue, seed=3)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20))
def test_whenever_a_launcher_dies_the_others_finish(seed: int, queue: Queue) -> None:
    race_with_a_death(queue, seed=seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(30))
def test_queue_that_is_killed_again_and_again_is_finished_exactly_once(seed: int, queue: Queue) -> None:
    chance = random.Random(seed)
    for _ in range(6):
        launches = [queue.launch(*COMMAND) for _ in range(chance.choice((1, 1, 2)))]
        time.sleep(chance.uniform(0, 2.0))
        match chance.randrange(3):
            case 0:
                queue.lose_everything()
            case 1:
                for launch in launches:
                    launch.send(signal.SIGKILL)
            case _:
                for pid in queue.workers():
                    os.kill(pid, signal.SIGKILL)
                    break
    launch = queue.launch(*COMMAND)
    assert launch.wait() in (0, 75), launch.text
    queue.finish(*COMMAND)
    check_done(queue)


def hold(queue: Queue, *, count: int = 2) -> tuple[Launch, Path]:
    """Launch the queue and wait until so many runs rest amid their steps, for as long as the file is there."""
    path = queue.folder / "hold"
    path.touch()
    queue.environment["STAND_IN_HOLD"] = str(path)
    launch = queue.launch(*COMMAND, "--jobs", str(count))
    queue.wait_until(lambda: sum(rows(run) == HOLD_AT for run in queue.runs()) == count)
    return launch, path


def adopted(queue: Queue, launch: Launch) -> int:
    """Return how many runs a launcher watches that it did not start: it holds the lock for launching each."""
    locks = read_locks()
    assert locks is not None, "the system does not list its locks"
    paths = [launch_lock_path(queue.outputs, queue.folder / folder) for folder in queue.workers().values()]
    return sum(locks.holder(path, expected=launch.process.pid) == launch.process.pid for path in paths)


@pytest.mark.slow
@pytest.mark.parametrize("close_s", [0.0, 1.0])
def test_run_whose_launcher_was_killed_is_adopted_and_not_begun_again(close_s: float, queue: Queue) -> None:
    queue.environment["STAND_IN_CLOSE_S"] = str(close_s)
    first, held = hold(queue)
    first.send(signal.SIGKILL)
    first.wait()
    orphans = queue.workers()
    second = queue.launch(*COMMAND)
    # Two at once are there already: until one of them has let go of its folder, none is begun.
    queue.wait_until(lambda: adopted(queue, second) == 2)
    time.sleep(0.5)
    assert queue.workers() == orphans and len(orphans) == 2
    held.unlink()
    assert second.wait() == 0, second.text
    check_done(queue)
    assert begun(queue) == ALL and refused(queue) == 0
    assert second.text.count("(in another process)") == 2 and started([second]) == 2
    assert most_at_once([span for run in queue.runs() for span in sittings(run)]) <= 2


def gate(queue: Queue, name: str) -> Path:
    """Let the runs of launchers started from now on wait at a gate: there they hold nothing and hear no signal."""
    path = queue.folder / name
    path.touch()
    queue.environment["STAND_IN_GATE"] = str(path)
    return path


def test_orphan_that_has_not_yet_taken_its_folder_is_not_doubled(queue: Queue) -> None:
    both = gate(queue, "both")
    first = queue.launch(*COMMAND)
    # A process that is there has not yet been told its run: one whose launcher is killed before that ends at once.
    queue.wait_until(lambda: started([first]) == 2 == len(queue.workers()))
    first.send(signal.SIGKILL)
    second = queue.launch(*COMMAND)
    queue.wait_until(lambda: len(queue.workers()) == 4)
    both.unlink()
    assert second.wait() == 0, second.text
    check_done(queue)
    assert begun(queue) == ALL and refused(queue) == 2


def test_launcher_asked_to_stop_while_its_run_finds_another_there_leaves_and_says_so(queue: Queue) -> None:
    queue.environment |= {"STAND_IN_STEP_S": "0.2", "STAND_IN_LEAVE_S": "1"}
    orphans = gate(queue, "orphans")
    first = queue.launch(*COMMAND)
    queue.wait_until(lambda: started([first]) == 2 == len(queue.workers()))
    first.send(signal.SIGKILL)
    late = gate(queue, "late")
    second = queue.launch(*COMMAND)
    queue.wait_until(lambda: len(queue.workers()) == 4)
    orphans.unlink()
    queue.wait_until(lambda: begun(queue) == 2)
    late.unlink()
    queue.wait_until(lambda: refused(queue) == 2)
    second.send(signal.SIGTERM)
    assert second.wait(timeout_s=30) == 75, second.text
    assert second.text.count("still running in another process") == 2
    assert len(queue.workers()) == 2


def test_dead_run_with_the_number_of_a_living_process_is_taken_up(queue: Queue) -> None:
    _, held = hold(queue)
    queue.lose_everything()
    held.unlink()
    for run in queue.runs():
        status = read_status(run)
        assert status is not None
        # After a reboot the number belongs to another process.
        write_json(run / "status.json", status.model_copy(update={"pid": os.getpid()}).model_dump(mode="json"))
    queue.finish(*COMMAND)
    check_done(queue)


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_stopped_queue_saves_leaves_75_and_is_continued(number: signal.Signals, queue: Queue) -> None:
    launch, held = hold(queue)
    launch.send(number)
    assert launch.wait() == 75
    assert sorted(status_names(queue)) == ["queued", "queued", "stopped", "stopped"]
    assert "4 of 4 runs are not finished; repeat the same command to continue" in launch.text
    assert queue.workers() == {}
    held.unlink()
    queue.finish(*COMMAND)
    check_done(queue)
    assert begun(queue) == ALL + 2


def test_stop_before_a_run_can_hear_it_is_a_stop_and_no_kill(queue: Queue) -> None:
    start = gate(queue, "start")
    launch = queue.launch(*COMMAND)
    queue.wait_until(lambda: len(queue.workers()) == 2)
    launch.send(signal.SIGINT)
    assert launch.wait() == 75
    assert launch.text.count("(before it began)") == 2 and "killed" not in launch.text
    start.unlink()
    queue.finish(*COMMAND)
    check_done(queue)


def test_second_interrupt_leaves_at_once_and_the_runs_are_found_again(queue: Queue) -> None:
    queue.environment["STAND_IN_STEP_S"] = "1"
    launch = queue.launch(*COMMAND)
    queue.wait_until(lambda: [name for name in status_names(queue) if name == "running"] == ["running"] * 2)
    launch.send(signal.SIGINT)
    time.sleep(0.2)
    launch.send(signal.SIGINT)
    assert launch.wait() == 75
    assert len(queue.workers()) == 2, "they were to end at their next step"
    assert "Traceback" not in launch.text
    queue.wait_until(lambda: not queue.workers())
    assert status_names(queue).count("stopped") == 2
    queue.environment["STAND_IN_STEP_S"] = "0.01"
    queue.finish(*COMMAND)
    check_done(queue)


def test_finished_queue_changes_no_byte(queue: Queue) -> None:
    queue.finish(*COMMAND)
    before = digests(queue.outputs)
    assert "4 of them done" in queue.finish(*COMMAND)
    assert digests(queue.outputs) == before


@pytest.mark.parametrize("jobs", [1, *(pytest.param(count, marks=pytest.mark.slow) for count in (2, 3))])
def test_no_more_runs_at_once_than_jobs_and_the_threads_are_divided(jobs: int, queue: Queue) -> None:
    queue.environment["OMP_NUM_THREADS"] = ""
    printed = queue.finish(*COMMAND, "--jobs", str(jobs))
    threads = max(1, num_cores() // jobs)
    assert most_at_once([span for run in queue.runs() for span in sittings(run)]) <= jobs
    assert {note["threads"] for run in queue.runs() for note in notes(run) if note["what"] == "began"} == {str(threads)}
    assert f"{jobs} at once on the CPU, {threads} thread" in printed


def test_failed_run_is_told_the_others_go_on_and_only_retry_takes_it_up(queue: Queue) -> None:
    queue.add("mine-bad", "{extends: mine-01, title: diverges, baseline: mine-01, settings: {optim.lr: 1000.0}}")
    printed = queue.finish(*COMMAND, code=3)
    message = "failed: NonFiniteError: step 1: loss inf at lr 1000.0"
    assert printed.count(message) == 2 and "2 of 6 runs failed" in printed and "--retry" in printed
    assert status_names(queue).count("done") == ALL and started(queue.launches) == 6
    # Not begun again without being asked to, and begun when asked.
    assert queue.finish(*COMMAND, code=3).count(message) == 2
    assert started(queue.launches) == 6
    assert queue.finish(*COMMAND, "--retry", code=3).count(message) == 2
    assert started(queue.launches) == 8


def test_run_that_fails_before_it_can_write_is_noted_as_failed(queue: Queue) -> None:
    cause = queue.folder / "cause"
    cause.touch()
    queue.environment["STAND_IN_EARLY_CAUSE"] = str(cause)
    assert queue.finish(*COMMAND, code=3).count("failed: DataError: the data is gone") == ALL
    assert status_names(queue) == ["failed"] * ALL
    # Mended or not: it is reported until somebody says --retry.
    cause.unlink()
    assert queue.finish(*COMMAND, code=3).count("failed: DataError: the data is gone") == ALL
    assert started(queue.launches) == ALL
    queue.finish(*COMMAND, "--retry")
    check_done(queue)


def test_queued_run_that_somebody_stopped_is_left_alone(queue: Queue) -> None:
    launch, held = hold(queue)
    waiting = next(run for run in queue.runs() if (status := read_status(run)) is not None and status.status == "queued")
    status = read_status(waiting)
    assert status is not None
    write_json(waiting / "status.json", status.model_copy(update={"status": "stopped"}).model_dump(mode="json"))
    held.unlink()
    assert launch.wait() == 75
    assert sorted(status_names(queue)) == ["done", "done", "done", "stopped"] and rows(waiting) == 0


class NoSlots:
    """A machine whose every GPU is in use by others."""

    count = 8

    def take(self, *, adopted: int) -> RunSlot | None:
        return None


class Nobody:
    def on_start(self, job: Job) -> None: ...

    def on_end(self, job: Job) -> None: ...

    def on_tick(self, jobs: Sequence[Job]) -> None: ...


def test_what_is_over_is_told_without_waiting_for_a_free_place(queue: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    cause = queue.folder / "cause"
    cause.touch()
    queue.environment["STAND_IN_CAUSE"] = str(cause)
    queue.finish("run", "mine-01", "--budget", "smoke", code=3)
    cause.unlink()
    queue.finish("run", "mine-02", "--no-baseline", "--budget", "smoke")
    monkeypatch.chdir(queue.folder)
    study = Study(names=("mine",), budget="smoke", root=Path("outputs"))
    stop = StopFlag()
    timer = threading.Timer(20, stop.request, ["it waits for a slot"])
    timer.start()
    jobs = Runner(study.plan(load_catalog()), study.root, NoSlots(), stop=stop, watch=Nobody()).run()
    timer.cancel()
    assert [job.state for job in jobs] == ["failed", "found done"]
