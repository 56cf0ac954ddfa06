"""Stopping reaches the process that holds a run and no other; cleaning deletes what oelm wrote and nothing else."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock

from oelm.errors import RunDirError
from oelm.files import write_json
from oelm.runs.find import RunView, scan
from oelm.runs.layout import LOCK
from oelm.runs.manage import (
    STOPPED_WHILE_QUEUED,
    Answers,
    Refusal,
    Removal,
    ask_to_stop,
    check_root,
    plan_removal,
    remove,
    wait_for_end,
)
from oelm.runs.status import read_status
from tests.conftest import run_here, tiny_config, tiny_settings
from tests.experiments.recorded import record
from tests.faults.harness import start

# A process that holds a run and does not care for signals.
DEAF = """
import signal, sys, time, filelock
signal.signal(signal.SIGTERM, signal.SIG_IGN)
with filelock.FileLock(sys.argv[1], timeout=0):
    print("held", flush=True)
    time.sleep(60)
"""
Training = Callable[[Path], ForkServerProcess]


@pytest.fixture
def training(text_file: Path) -> Iterator[Training]:
    """Start real runs that would take long, and leave none behind."""
    started: list[ForkServerProcess] = []

    def begin(run: Path) -> ForkServerProcess:
        child = start(tiny_settings(text_file, steps=100_000, eval_every=1000, save_every=1000), run)
        started.append(child)
        return child

    yield begin
    for child in started:
        child.kill()
        child.join()


def place(root: Path, *, seed: int = 0) -> Path:
    return root / "GPT-02" / "smoke" / "default" / f"seed-{seed}"


def wait_for_steps(run: Path, steps: int = 3) -> None:
    deadline = time.monotonic() + 60
    metrics = run / "metrics.jsonl"
    while not metrics.exists() or metrics.read_bytes().count(b"\n") < steps:
        assert time.monotonic() < deadline, "the run did not begin"
        time.sleep(0.01)


def ended(asked: Answers, *, timeout_s: float = 60.0) -> tuple[list[str], list[str]]:
    over, left = wait_for_end(asked, timeout_s=timeout_s, on_wait=lambda waiting, elapsed_s: None)
    return [f"{view.name} {view.state}" for view in over], [view.name for view in left]


def one(root: Path) -> RunView:
    (view,) = scan(root)
    return view


def test_a_running_run_that_is_asked_saves_and_ends_stopped(tmp_path: Path, training: Training) -> None:
    run = place(tmp_path)
    child = training(run)
    wait_for_steps(run)
    asked = ask_to_stop(scan(tmp_path))
    assert [view.state for view in asked.signalled] == ["running"]
    assert ended(asked) == (["GPT-02/smoke/default/seed-0 stopped"], [])
    child.join(timeout=30)
    status = read_status(run)
    assert child.exitcode == 75 and status is not None and (status.status, status.message) == ("stopped", "SIGTERM")
    assert list((run / "checkpoints").glob("step-*"))


def test_a_suspended_run_hears_it_too(tmp_path: Path, training: Training) -> None:
    run = place(tmp_path)
    child = training(run)
    wait_for_steps(run)
    assert child.pid is not None
    os.kill(child.pid, signal.SIGSTOP)
    assert ended(ask_to_stop(scan(tmp_path))) == (["GPT-02/smoke/default/seed-0 stopped"], [])


def test_a_run_between_its_launch_and_its_first_sign_is_stopped_once_it_hears(tmp_path: Path, training: Training) -> None:
    run = record(tmp_path, "queued")
    (tmp_path / ".launch").mkdir()
    with FileLock(tmp_path / ".launch" / "GPT-02--smoke--default--seed-0.lock"):
        asked = ask_to_stop(scan(tmp_path))
        assert [view.state for view in asked.starting] == ["queued"] and not asked.unqueued
        training(run)
        assert ended(asked) == (["GPT-02/smoke/default/seed-0 stopped"], [])
    status = read_status(run)
    assert status is not None and status.message == "SIGTERM"


def test_a_launch_that_comes_to_nothing_is_not_waited_for(tmp_path: Path) -> None:
    record(tmp_path, "queued")
    (tmp_path / ".launch").mkdir()
    with FileLock(tmp_path / ".launch" / "GPT-02--smoke--default--seed-0.lock"):
        asked = ask_to_stop(scan(tmp_path))
        assert ended(asked, timeout_s=0.2) == ([], ["GPT-02/smoke/default/seed-0"])
    assert ended(asked) == (["GPT-02/smoke/default/seed-0 stopped"], [])


def test_a_queued_run_is_marked_and_keeps_everything_else(tmp_path: Path) -> None:
    run = record(tmp_path, "queued", best=31.5, metric="ppl", host="elsewhere", pid=7)
    before = read_status(run)
    asked = ask_to_stop(scan(tmp_path))
    after = read_status(run)
    assert [view.name for view in asked.unqueued] == ["GPT-02/smoke/default/seed-0"]
    assert before is not None and after is not None
    assert after == before.model_copy(update={"status": "stopped", "message": STOPPED_WHILE_QUEUED})


def test_a_run_that_took_its_lock_while_it_said_queued_is_asked_and_not_marked(tmp_path: Path, training: Training) -> None:
    run = place(tmp_path)
    child = training(run)
    wait_for_steps(run)
    # As it looks between the lock and the first status of its own.
    assert child.pid is not None
    os.kill(child.pid, signal.SIGSTOP)
    record(tmp_path, "queued")
    assert ended(ask_to_stop(scan(tmp_path))) == (["GPT-02/smoke/default/seed-0 stopped"], [])
    child.join(timeout=30)
    assert child.exitcode == 75


def test_a_process_that_took_over_a_dead_runs_number_is_left_alone(tmp_path: Path) -> None:
    innocent = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        run = record(tmp_path, "running", pid=innocent.pid)
        (run / LOCK).touch()
        # As it looked when it still lived: even then only the lock's holder is asked.
        view = one(tmp_path)
        assert view.state == "dead"
        seemed_alive = RunView(view.experiment, view.budget, view.variant, view.seed, view.folder, view.status, "running")
        for views in ([view], [seemed_alive]):
            assert ask_to_stop(views) == Answers()
        time.sleep(0.2)
        assert innocent.poll() is None
    finally:
        innocent.kill()
        innocent.wait()


def test_a_run_of_another_host_is_named_and_left_alone(tmp_path: Path) -> None:
    run = record(tmp_path, "running", host="elsewhere", pid=os.getpid())
    before = (run / "status.json").read_bytes()
    asked = ask_to_stop(scan(tmp_path))
    assert [view.name for view in asked.elsewhere] == ["GPT-02/smoke/default/seed-0"] and not asked.signalled
    assert (run / "status.json").read_bytes() == before


@pytest.mark.parametrize("said", ["done", "failed", "stopped"])
def test_what_has_ended_is_not_asked(tmp_path: Path, said: Any) -> None:
    record(tmp_path, said)
    assert ask_to_stop(scan(tmp_path)) == Answers()


def test_a_run_that_does_not_end_is_told_of_after_the_timeout(tmp_path: Path) -> None:
    run = record(tmp_path, "running")
    deaf = subprocess.Popen([sys.executable, "-c", DEAF, str(run / LOCK)], stdout=subprocess.PIPE, text=True)
    try:
        assert deaf.stdout is not None and deaf.stdout.readline() == "held\n"
        asked = ask_to_stop(scan(tmp_path))
        assert ended(asked, timeout_s=0.3) == ([], ["GPT-02/smoke/default/seed-0"])
    finally:
        deaf.kill()
        deaf.communicate()


@pytest.fixture(scope="module")
def finished(text_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A root with one real run, done, that nobody may change."""
    root = tmp_path_factory.mktemp("finished")
    run_here(tiny_config(text_file), place(root))
    return root


@pytest.fixture
def root(finished: Path, tmp_path: Path) -> Path:
    """A copy of it, to be cleaned."""
    target = tmp_path / "outputs"
    subprocess.run(["cp", "-a", str(finished), str(target)], check=True)
    return target


def tree(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


def test_a_plan_names_every_byte_and_deletes_none(root: Path) -> None:
    before = tree(root)
    size = sum(path.stat().st_size for path in root.rglob("*") if path.is_file())
    plan = plan_removal(root, one(root), weights=False)
    assert isinstance(plan, Removal) and plan.kept == () and plan.size_bytes == size and tree(root) == before


def test_a_real_run_is_removed_whole_with_its_empty_parents_and_never_the_root(root: Path) -> None:
    (place(root) / "console.log").write_text("x")
    (place(root) / "tensorboard").mkdir()
    (place(root) / "tensorboard" / "events.out.tfevents.1.vm.2.0").write_text("x")
    (place(root) / ".staging-abc").write_text("left by a kill")
    (place(root) / "checkpoints" / ".staging-step-00000012-x").mkdir()
    (place(root) / "checkpoints" / ".staging-step-00000012-x" / "model.safetensors").write_text("half")
    assert isinstance(remove(root, one(root), weights=False), Removal)
    assert root.is_dir() and tree(root) == set()


def test_parents_with_other_runs_stay(root: Path) -> None:
    record(root, "done", seed=1)
    record(root, "done", experiment="GPT-01")
    remove(root, next(view for view in scan(root) if view.name == "GPT-02/smoke/default/seed-0"), weights=False)
    assert [view.name for view in scan(root)] == ["GPT-01/smoke/default/seed-0", "GPT-02/smoke/default/seed-1"]


def test_weights_go_and_every_figure_stays(root: Path) -> None:
    before = tree(root)
    plan = remove(root, one(root), weights=True)
    gone = {str(Path(name).relative_to("GPT-02/smoke/default/seed-0")) for name in before - tree(root)}
    assert isinstance(plan, Removal) and plan.size_bytes > 0 and one(root).state == "done"
    assert {"checkpoints", "best.json", "latest.json"} <= gone
    assert all(name.startswith("checkpoints") or name in ("best.json", "latest.json") for name in gone)


@pytest.mark.parametrize("said", ["stopped", "failed", "queued"])
def test_weights_of_a_run_that_can_go_on_stay(tmp_path: Path, said: Any) -> None:
    record(tmp_path, said)
    refusal = remove(tmp_path, one(tmp_path), weights=True)
    assert isinstance(refusal, Refusal) and "not done" in refusal.reason


def test_foreign_files_stay_where_they_are_and_are_named(root: Path) -> None:
    run = place(root)
    step = next((run / "checkpoints").glob("step-*"))
    for path in (run / "thesis.tex", run / "checkpoints" / "mine.txt", step / "notes.md", run / "model.safetensors"):
        path.write_text("precious")
    (run / "pictures").mkdir()
    (run / "pictures" / "a.png").write_text("precious")
    plan = remove(root, one(root), weights=False)
    assert isinstance(plan, Removal)
    kept = {"thesis.tex", "checkpoints/mine.txt", f"checkpoints/{step.name}/notes.md", "model.safetensors", "pictures"}
    assert set(plan.kept) == kept
    assert {path.read_text() for path in run.rglob("*") if path.is_file()} == {"precious"}
    assert {str(path.relative_to(run)) for path in run.rglob("*") if path.is_file()} == (kept - {"pictures"}) | {
        "pictures/a.png"
    }


def outside(tmp_path: Path) -> Path:
    """Return a folder that looks like checkpoints and is not below the root."""
    folder = tmp_path / "outside" / "step-00000004"
    folder.mkdir(parents=True)
    (folder / "model.safetensors").write_text("precious")
    return folder.parent


@pytest.mark.parametrize("weights", [False, True])
def test_linked_checkpoints_are_not_followed(tmp_path: Path, weights: bool) -> None:
    run = record(tmp_path / "root", "done")
    (run / "checkpoints").symlink_to(outside(tmp_path))
    plan = remove(tmp_path / "root", one(tmp_path / "root"), weights=weights)
    assert isinstance(plan, Removal) and plan.kept == ("checkpoints",)
    assert (tmp_path / "outside" / "step-00000004" / "model.safetensors").read_text() == "precious"
    assert (run / "checkpoints").is_symlink()


@pytest.mark.parametrize("weights", [False, True])
def test_a_linked_checkpoint_is_not_followed(tmp_path: Path, weights: bool) -> None:
    run = record(tmp_path / "root", "done")
    (run / "checkpoints").mkdir()
    (run / "checkpoints" / "step-00000004").symlink_to(outside(tmp_path) / "step-00000004")
    plan = remove(tmp_path / "root", one(tmp_path / "root"), weights=weights)
    assert isinstance(plan, Removal) and plan.kept == ("checkpoints/step-00000004",)
    assert (tmp_path / "outside" / "step-00000004" / "model.safetensors").read_text() == "precious"


@pytest.mark.parametrize("depth", range(4))
def test_a_link_on_the_way_to_a_run_refuses_it(tmp_path: Path, depth: int) -> None:
    run = record(tmp_path / "root", "done")
    view = one(tmp_path / "root")
    # Put there after it was listed: listing does not see linked runs at all.
    linked = [run, *run.parents][depth]
    linked.rename(tmp_path / "moved")
    linked.symlink_to(tmp_path / "moved")
    before = tree(tmp_path / "moved")
    assert scan(tmp_path / "root") == []
    assert isinstance(remove(tmp_path / "root", view, weights=False), Refusal)
    assert tree(tmp_path / "moved") == before


def test_a_linked_lock_refuses_the_run(tmp_path: Path) -> None:
    run = record(tmp_path / "root", "done")
    (tmp_path / "precious").write_text("precious")
    (run / LOCK).symlink_to(tmp_path / "precious")
    assert isinstance(remove(tmp_path / "root", one(tmp_path / "root"), weights=False), Refusal)
    assert (tmp_path / "precious").read_text() == "precious" and (run / "config.json").exists()


@pytest.mark.parametrize("config", ["", "[]", "{", '{"seed": 1}', '{"method": {}}', '"method seed"', None])
def test_a_folder_without_a_runs_config_is_not_ours(tmp_path: Path, config: str | None) -> None:
    run = record(tmp_path, "done")
    (run / "config.json").unlink()
    if config is not None:
        (run / "config.json").write_text(config)
    before = tree(tmp_path)
    refusal = remove(tmp_path, one(tmp_path), weights=False)
    assert isinstance(refusal, Refusal) and "not a run of ours" in refusal.reason and tree(tmp_path) == before


def test_a_running_run_is_left_alone(tmp_path: Path, training: Training) -> None:
    run = place(tmp_path)
    child = training(run)
    wait_for_steps(run)
    view = one(tmp_path)
    assert remove(tmp_path, view, weights=False) == Refusal(view, "in use; stop it first")
    assert child.is_alive() and (run / "config.json").exists()


@pytest.mark.parametrize("lock", [f"GPT-02/smoke/default/seed-0/{LOCK}", ".launch/GPT-02--smoke--default--seed-0.lock"])
def test_a_run_in_somebodys_hands_is_left_alone_whatever_it_says(tmp_path: Path, lock: str) -> None:
    record(tmp_path, "stopped")
    (tmp_path / ".launch").mkdir()
    before = tree(tmp_path)
    with FileLock(tmp_path / lock):
        refusal = remove(tmp_path, one(tmp_path), weights=False)
    assert isinstance(refusal, Refusal) and "in use" in refusal.reason
    assert tree(tmp_path) - {lock} == before


def test_a_dead_run_can_be_cleaned(tmp_path: Path) -> None:
    run = record(tmp_path, "running")
    (run / LOCK).touch()
    assert one(tmp_path).state == "dead"
    assert isinstance(remove(tmp_path, one(tmp_path), weights=False), Removal)
    assert tree(tmp_path) == set()


def test_a_run_that_went_on_since_it_was_looked_at_is_left_alone(tmp_path: Path) -> None:
    run = record(tmp_path, "stopped")
    view = one(tmp_path)
    record(tmp_path, "done")
    refusal = remove(tmp_path, view, weights=False)
    assert isinstance(refusal, Refusal) and "resumed meanwhile" in refusal.reason and (run / "config.json").exists()


@pytest.mark.parametrize(("hours", "goes"), [(0.5, False), (2, True)])
def test_a_silent_run_of_another_host_can_be_cleaned_after_an_hour(tmp_path: Path, hours: float, goes: bool) -> None:
    beat = time.strftime("%Y-%m-%dT%H:%M:%S+00:00", time.gmtime(time.time() - 3600 * hours))
    record(tmp_path, "running", host="elsewhere", heartbeat=beat)
    assert isinstance(remove(tmp_path, one(tmp_path), weights=False), Removal) is goes


def test_a_clean_killed_halfway_is_taken_up_by_the_next(root: Path) -> None:
    plan = plan_removal(root, one(root), weights=False)
    assert isinstance(plan, Removal)
    names = [str(path.relative_to(place(root))) for path in plan.files]
    assert names[0] in ("status.json", "best.json", "latest.json") and names[-2:] == ["config.json", LOCK]
    for path in plan.files[: len(plan.files) // 2]:
        path.unlink()
    assert one(root).state == "damaged"
    assert isinstance(remove(root, one(root), weights=False), Removal) and tree(root) == set()


def test_a_root_that_is_no_folder_is_refused(tmp_path: Path) -> None:
    write_json(tmp_path / "file", {})
    for path, words in ((tmp_path / "gone", "is not there"), (tmp_path / "file", "is a file")):
        with pytest.raises(RunDirError, match=words):
            check_root(path)
