"""`oelm run` and `oelm sweep` as users type them: mistakes start nothing, odd names arrive whole, failures are told."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from oelm.cli.app import app
from oelm.experiments.catalog import load_catalog
from oelm.experiments.slots import read_gpus
from oelm.experiments.study import Study
from oelm.files import write_json
from oelm.runs.status import read_status
from tests.cases import case
from tests.experiments.test_launch import NASTY
from tests.faults.queues import STEPS, Queue, notes, queue_in, rows, with_stand_ins, write_catalog
from tests.faults.stand_in import HOLD_AT

SMOKE = ("--budget", "smoke")
WORDS = "the cat sat on a mat and saw two birds near old trees while rain fell\n" * 60
needs_no_gpu = pytest.mark.skipif(bool(read_gpus()), reason="there is a GPU here")


@pytest.fixture
def place(text_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a catalog, and a cache of its own, so that anything that is written shows."""
    folder = write_catalog(tmp_path / "place", text_file)
    (folder / "notes.txt").write_text("a file of the user's\n")
    monkeypatch.chdir(folder)
    monkeypatch.setenv("OELM_CACHE", str(folder / "cache"))
    return folder


@pytest.fixture
def queue(text_file: Path, tmp_path: Path) -> Iterator[Queue]:
    """A queue whose runs are stand-ins, each over at once."""
    with queue_in(tmp_path / "queue", text_file, **with_stand_ins(tmp_path, STAND_IN_STEP_S="0")) as queue:
        yield queue


def everything_in(folder: Path) -> dict[str, bytes]:
    files = {str(path.relative_to(folder)): path for path in folder.rglob("*")}
    return {name: path.read_bytes() if path.is_file() else b"" for name, path in files.items()}


def oelm(*arguments: str, code: int = 0) -> str:
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == code, result.output
    assert "Traceback" not in result.output
    # Long lines are cut at the width of the window.
    return " ".join(result.output.split())


MISTAKES: list[tuple[tuple[str, ...], str]] = [
    ((), "name what to run"),
    (("mien-02",), "no experiment or group called 'mien-02' (did you mean 'mine-02'?)"),
    (("mine-02", "--budget", "smok"), "unknown budget 'smok' (did you mean 'smoke'?)"),
    (("mine-02", "--seeds", "three"), "--seeds 'three'"),
    (("mine-02", "--seeds", "0"), "--seeds 0"),
    (("mine-02", "--seeds", "5-3"), "5-3 ends before it begins; write 3-5"),
    (("mine-02", "--seeds", "1,2,1"), "a seed is given twice"),
    (("mine-02", "--set", "optim.lrr=1"), "unknown key 'lrr' (did you mean 'lr'?)"),
    (("mine-02", "--set", "stepz=1"), "unknown key 'stepz' (did you mean 'steps'?)"),
    (("mine-02", "--set", "steps"), "write it as key=value"),
    (("mine-02", "--set", "steps=many"), "steps: Input should be a valid integer"),
    (("mine-02", "--set", "batch_size=3"), "batch_size 3 is not a multiple of micro_batch_size 2"),
    (("mine-02", "--jobs", "0"), "--jobs 0: at least one run at a time"),
    (("mine-02", "--jobs", "-2"), "--jobs -2: at least one run at a time"),
    (("mine-02", "--gpus", "first"), "'first' is not a GPU number"),
    (("mine-02", "--jobs", "2", "--gpus", "0"), "--jobs divides the CPU"),
    (("mine-02", "--model", "nowhere"), "--model nowhere: no such folder"),
    (("mine-02", "--from", "nowhere"), "--from nowhere: no such folder"),
    (("mine-02", "--catalog", "nowhere.yaml"), "nowhere.yaml: cannot be read"),
    (("mine-02", "--notify", "nowhere.yaml"), "nowhere.yaml: cannot be read"),
    (("mine-02", "--notify", "notes.txt"), "notes.txt"),
    (("mine-02", "--out", "notes.txt"), "--out notes.txt: notes.txt is a file"),
    (("mine-02", "--out", "notes.txt/deeper"), "notes.txt is a file"),
    (("mine-02", "--tuned"), "oelm sweep mine-02 --budget smoke"),
    (("mine-01", "--tuned"), "oelm sweep mine-01 --budget smoke"),
    (
        ("mine-02", "--set", "method=oelm_random"),
        "--set method: it would change the method of every arm",
    ),
    (
        ("mine-02", "--set", "method.gain=head"),
        "method.layer_lr_decay, method.warmup_steps may be set for all",
    ),
    (("mine-02", "--set", "method.layer_lr_dacay=0.9"), "unknown key 'layer_lr_dacay' (did you mean 'layer_lr_decay'?)"),
    (("mine-02", "--set", "method.layers=first 1"), "Define an experiment with the other method"),
    (("mine-02", "--set", "steps=9", "--set", "steps=8"), "--set steps: given twice; remove one"),
    (("mine-02", "--prepare-only", "--dry-run"), "give it without --dry-run and --slurm"),
    (("mine-02", "--prepare-only", "--slurm"), "give it without --dry-run and --slurm"),
    (("mine-02", "--nnodes", "2", "--dry-run"), "--nnodes, --rdzv-endpoint and --rdzv-id need --nproc"),
    (("mine-02", "--nproc", "2", "--jobs", "2", "--dry-run"), "give one of the two"),
]


def test_mistake_starts_nothing_and_leaves_nothing(place: Path) -> None:
    before = everything_in(place)
    for arguments, words in MISTAKES:
        with case(*arguments):
            assert words in oelm("run", *SMOKE, *arguments, code=2)
            assert everything_in(place) == before


@needs_no_gpu
@pytest.mark.parametrize("gpus", ["9", "auto"])
def test_gpu_that_is_not_there_starts_nothing(gpus: str, place: Path) -> None:
    before = everything_in(place)
    assert f"--gpus {gpus}: this machine has no NVIDIA GPU" in oelm("run", "mine", *SMOKE, "--gpus", gpus, code=2)
    assert everything_in(place) == before


@needs_no_gpu
def test_cards_that_a_machine_does_not_have_but_the_environment_names_are_no_hindrance(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert "2 at once on the CPU" in oelm("run", "mine", *SMOKE, "--jobs", "2", "--dry-run")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_folder_that_cannot_be_written_to_starts_nothing(place: Path) -> None:
    (place / "closed").mkdir(mode=0o500)
    assert "closed cannot be written to" in oelm("run", "mine", *SMOKE, "--out", "closed/outputs", code=2)
    assert not (place / "cache").exists()


MISTAKES_IN_A_SWEEP: list[tuple[tuple[str, ...], str]] = [
    ((), "--grid optim.lr="),
    (("--grid", "optim.lr=1e-3"), "a sweep needs two values at least"),
    (("--grid", "optim.lr=1e-3,1e-3"), "twice"),
    (("--grid", "optim.lrr=1e-3,1e-2"), "unknown key 'lrr'"),
    (("--grid", "seed=1,2"), "seed cannot be tuned"),
    (("--grid", "optim.lr=0,1"), "--grid optim.lr (mine-01 at smoke): optim.lr: Input should be greater than 0"),
    (("--grid", "method.warmup=1,2"), "--grid method.warmup: method: unknown key 'warmup' (did you mean 'warmup_steps'?)"),
    (("--grid", "optim.betas=[0.9,0.95],[0.9,0.999]"), "a list cannot be tuned; give one with --set"),
    (("--grid", "optim.lr=1e-3,1e-2", "--set", "method.gain=head"), "it would change the method of every arm"),
    (("--grid", "optim.lr=1e-3,1e-2", "--out", "notes.txt"), "notes.txt is a file"),
    (("--like", "mine-01"), "mine-01 was not swept at smoke"),
    (("--like", "mine-99"), "mine-99"),
    (("--like", "mine-01", "--grid", "optim.lr=1e-3,1e-2"), "leave --grid out"),
    (("--like", "mine-01", "--set", "steps=9"), "leave --set out"),
    (("--like", "mine-01", "--seeds", "2"), "leave --seeds out"),
    (("--like", "mine-01", "--jobs", "2"), "leave --jobs out"),
    (("--like", "mine-01", "--retry"), "leave --retry out"),
]


def test_mistake_in_a_sweep_starts_nothing_and_leaves_nothing(place: Path) -> None:
    before = everything_in(place)
    for arguments, words in MISTAKES_IN_A_SWEEP:
        with case(*arguments):
            assert words in oelm("sweep", "mine-02", *SMOKE, *arguments, code=2)
            assert everything_in(place) == before


def test_folder_with_a_run_of_another_recipe_is_refused_with_the_difference(place: Path) -> None:
    planned = Study(names=("mine-01",), budget="smoke", root=Path("outputs")).plan(load_catalog())[0]
    write_json(planned.path / "config.json", planned.config.as_dict())
    catalog = place / "experiments.yaml"
    catalog.write_text(catalog.read_text().replace(f"steps: {STEPS}", "steps: 61\n    optim.weight_decay: 0.5"))
    before = everything_in(place)
    printed = oelm("run", "mine", *SMOKE, code=3)
    assert "outputs/mine-01/smoke/default/seed-0 holds a run of another recipe" in printed
    assert "steps: 60 there, 61 planned" in printed and "optim.weight_decay: 0.01 there, 0.5 planned" in printed
    assert "oelm clean mine-01" in printed and "another --out" in printed
    assert everything_in(place) == before


def test_dry_run_tells_the_plan_and_writes_nothing(place: Path) -> None:
    before = everything_in(place)
    printed = oelm("run", "mine", *SMOKE, "--seeds", "3", "--dry-run")
    assert "mine-01 default 3 (0-2) 0" in printed and "mine-02 default 3 (0-2) 0" in printed
    assert "mine-01 default 1 (0) 0" in oelm("run", "mine-01", *SMOKE, "--dry-run")
    assert "6 runs at budget smoke: about" in printed
    assert "8 runs" in oelm("sweep", "mine", *SMOKE, "--grid", "optim.lr=1e-3,1e-2", "--seeds", "2", "--dry-run")
    assert everything_in(place) == before


def test_points_of_a_sweep_can_be_told_apart_on_a_narrow_terminal(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    printed = oelm("sweep", "mine", *SMOKE, "--grid", "schedule.final_fraction=0.01,0.02", "--dry-run")
    assert "4 runs" in printed and "\u2026" not in printed


def test_plan_and_queue_say_which_warm_up_is_cut(place: Path, queue: Queue) -> None:
    told = f"method.warmup_steps 40 is cut to {STEPS // 2}"
    assert oelm(*SWEEP, "method.warmup_steps=5,40", "--dry-run").count(told) == 1
    assert queue.finish("run", "mine-01", *SMOKE, "--set", "method.warmup_steps=40").count(told) == 1


def test_data_that_is_gone_stops_only_the_runs_that_read_it(queue: Queue) -> None:
    queue.add("mine-gone", "{extends: mine-01, title: gone, data: ./gone.txt}")
    printed = queue.finish("run", "mine", *SMOKE, code=3)
    assert "mine-gone smoke seed 0: failed: " in printed and "gone.txt" in printed
    assert [run.parts[-4] for run in queue.runs()] == ["mine-01", "mine-02"]
    assert all((status := read_status(run)) is not None and status.status == "done" for run in queue.runs())
    # Nothing was begun, so there is nothing to retry: with the file back, the same command goes on.
    (queue.folder / "gone.txt").write_text(WORDS)
    queue.finish("run", "mine", *SMOKE)
    assert len(queue.runs()) == 3


def test_data_that_cannot_be_had_does_not_keep_the_rest_from_being_prepared(place: Path) -> None:
    """The data job of SLURM is this command: were it to fail, no member of the array would begin."""
    with (place / "experiments.yaml").open("a") as catalog:
        for name in ("gone", "gone-too"):
            catalog.write(f"mine-{name}: {{extends: mine-01, title: {name}, data: ./gone.txt}}\n")
    prepare = ("run", *SMOKE, "--prepare-only", "--seeds", "2")
    printed = oelm(*prepare, "mine")
    assert "4 of 8 runs cannot begin: " in printed and printed.count("gone.txt") == 1
    assert list((place / "cache").rglob("train.bin"))
    assert "gone.txt" in oelm(*prepare, "mine-gone", "mine-gone-too", code=3)
    assert "cannot begin" not in oelm(*prepare, "mine-01")


@pytest.mark.slow
def test_queue_tells_how_long_it_takes_before_its_first_run_has_ended(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("oelm.cli.queue._PLAIN_EVERY_S", 0.0)
    printed = oelm("run", "mine-01", *SMOKE, "--jobs", "1")
    assert "0 of 1 runs done, 1 running, ETA 0:" in printed and "ETA -:--; mine" not in printed


@pytest.mark.parametrize("name", ["--no-preflight", "red\x1b[31m"], ids=ascii)
def test_odd_names_of_folders_and_files_arrive_whole(name: str, queue: Queue) -> None:
    text = f"te{name}xt.txt"
    (queue.folder / text).write_text(WORDS)
    printed = queue.finish("run", "mine-01", *SMOKE, "--out", name, "--set", f"data.source=./{text}")
    assert "\x1b" not in printed
    (run,) = (queue.folder / name).glob("mine-01/smoke/*/seed-0")
    assert json.loads((run / "config.json").read_text())["data"]["source"] == f"./{text}"
    assert [note["source"] for note in notes(run) if note["what"] == "began"] == [f"./{text}"]
    assert list(queue.folder.rglob("pwned")) == []


@pytest.mark.slow
def test_real_runs_in_a_folder_of_an_odd_name_one_done_and_one_failed(text_file: Path, tmp_path: Path) -> None:
    name = "-" + "".join(NASTY)
    with queue_in(tmp_path / "queue", text_file) as queue:
        # Names of Python's and of ours, as a student's folder may hold them.
        for module in ("random", "json", "typer", "oelm"):
            (queue.folder / f"{module}.py").write_text("raise SystemExit('a file of the user ran instead of the module')\n")
        queue.add("mine-bad", "{extends: mine-01, title: diverges, settings: {optim.lr: 1.0e+30}}")
        command = ("run", "mine-01", "mine-bad", *SMOKE, "--jobs", "2", "--out", name)
        printed = queue.finish(*command, code=3)
        assert "mine-01 smoke seed 0: best PPL" in printed
        assert "mine-bad smoke seed 0: failed: NonFiniteError: step " in printed and "lower optim.lr" in printed
        assert "1 of 2 runs failed" in printed
        run = queue.folder / name / "mine-01" / "smoke" / "default" / "seed-0"
        assert json.loads((run / "manifest.json").read_text())["environment"]["threads"] == "1"
        assert "threads: 1;" in (run / "console.log").read_text()
        again = queue.finish(*command, code=3)
        assert "failed: NonFiniteError: step " in again and "started" not in again
        assert list(queue.folder.rglob("pwned")) == []


def test_full_disk_in_the_launcher_is_resumable(queue: Queue) -> None:
    queue.environment["FILE_BYTES"] = "500"
    assert "no room to write" in queue.finish("run", "mine", *SMOKE, code=75)
    del queue.environment["FILE_BYTES"]
    queue.finish("run", "mine", *SMOKE)


SWEEP = ("sweep", "mine-02", *SMOKE, "--grid")
TUNED = ("run", "mine-02", *SMOKE, "--tuned")


def test_sweep_marks_the_best_and_tuned_runs_take_it(queue: Queue) -> None:
    # Stand-ins do best at 0.01, amid the grid.
    printed = queue.finish(*SWEEP, "optim.lr=0.001,0.01,0.1")
    assert printed.count("best │") == 2 and "edge of the grid" not in printed and "close" not in printed
    assert printed.count(", 1 seed a point") == 2
    assert {run.name for run in queue.runs()} == {"seed-100"} and len(queue.runs()) == 6
    queue.finish(*TUNED, "--seeds", "2")
    tuned = [run for run in queue.runs() if run.parent.name.startswith("tuned-")]
    assert [run.name for run in tuned] == ["seed-0", "seed-1"] * 2
    assert {json.loads((run / "config.json").read_text())["optim"]["lr"] for run in tuned} == {0.01}


def test_sweep_says_where_another_seed_may_choose_another_point(queue: Queue) -> None:
    printed = queue.finish(*SWEEP, "optim.lr=0.001,0.0099,0.01,0.1")
    assert printed.count("close │") == 2
    for name in ("mine-01", "mine-02"):
        assert f"{name}: other seeds may choose another of the close ones (within 0.01 of the best)" in printed


def test_sweep_shows_values_as_they_are_given(queue: Queue) -> None:
    printed = queue.finish(*SWEEP, "method.warmup_steps=null,3")
    assert printed.count(" null │") == 2 and " None │" not in printed


@pytest.mark.slow
def test_sweep_of_another_is_taken_over_and_used(queue: Queue) -> None:
    queue.add("mine-03", "{extends: mine-02, title: elsewhere}")
    queue.finish(*SWEEP, "optim.lr=0.001,0.01,0.1")
    assert "neither the method nor the baseline of mine-01" in queue.finish(
        "sweep", "mine-01", *SMOKE, "--like", "mine-02", code=2
    )
    printed = queue.finish("sweep", "mine-03", *SMOKE, "--like", "mine-02", "--dry-run")
    assert "nothing was written" in printed and not (queue.outputs / "mine-03").exists()
    printed = queue.finish("sweep", "mine-03", *SMOKE, "--like", "mine-02")
    assert printed.strip() == "mine-03 at smoke: optim.lr 0.01, the best of mine-02"
    queue.finish("run", "mine-03", *SMOKE, "--tuned")
    tuned = [run for run in queue.runs() if run.parent.name.startswith("tuned-")]
    assert [run.parts[-4] for run in tuned] == ["mine-01", "mine-03"]


def test_sweep_with_a_failure_that_can_be_mended_has_no_best_until_it_is(queue: Queue) -> None:
    cause = queue.folder / "cause"
    cause.touch()
    queue.environment["STAND_IN_EARLY_CAUSE"] = str(cause)
    why = "is not finished: optim.lr 0.001 failed (seed 100: DataError: the data is gone); fix that, and repeat its command"
    printed = queue.finish(*SWEEP, "optim.lr=0.001,0.01", code=3)
    assert f"the sweep of mine-01 {why} with --retry" in printed and "diverged" not in printed
    assert f"--tuned: the sweep of mine-01 {why} with --retry" in queue.finish(*TUNED, code=2)
    cause.unlink()
    printed = queue.finish(*SWEEP, "optim.lr=0.001,0.01,1000", "--retry", code=3)
    assert printed.count("best │") == printed.count("diverged │") == 2 and "is not finished" not in printed
    queue.finish(*TUNED)


@pytest.mark.slow
def test_sweep_that_is_widened_and_interrupted_leaves_tuned_runs_what_they_had(queue: Queue) -> None:
    queue.finish(*SWEEP, "optim.lr=0.001,0.01")
    queue.finish(*TUNED)
    hold = queue.folder / "hold"
    hold.touch()
    queue.environment["STAND_IN_HOLD"] = str(hold)
    launch = queue.launch(*SWEEP, "optim.lr=0.001,0.01,0.1", "--jobs", "1")
    queue.wait_until(lambda: any(rows(run) == HOLD_AT for run in queue.runs()))
    launch.send(signal.SIGINT)
    assert launch.wait() == 75
    assert "mine-02: until this sweep is finished, --tuned goes by the one before (optim.lr 0.001, 0.01)" in launch.text
    assert "2 runs at budget smoke, 2 of them done" in queue.finish(*TUNED)
    hold.unlink()
    assert "until this sweep" not in queue.finish(*SWEEP, "optim.lr=0.001,0.01,0.1")
    assert "2 runs at budget smoke, 0 of them done" in queue.finish(*TUNED)


def test_interrupted_sweep_refuses_tuned_runs_until_it_is_finished(queue: Queue) -> None:
    hold = queue.folder / "hold"
    hold.touch()
    queue.environment["STAND_IN_HOLD"] = str(hold)
    launch = queue.launch(*SWEEP, "optim.lr=0.001,0.01", "--jobs", "1")
    queue.wait_until(lambda: any(rows(run) == HOLD_AT for run in queue.runs()))
    launch.send(signal.SIGINT)
    assert launch.wait() == 75
    assert "unfinished" in launch.text and "edge" not in launch.text
    assert "the sweep of mine-01 is not finished" in queue.finish(*TUNED, code=2)
    hold.unlink()
    printed = queue.finish(*SWEEP, "optim.lr=0.001,0.01")
    for name in ("mine-01", "mine-02"):
        assert f"warning: {name}: the best optim.lr lies at the edge of the grid: try values beyond it" in printed
    queue.finish(*TUNED)


def test_a_queue_tells_of_its_end_and_a_notifier_that_fails_stops_and_reveals_nothing(queue: Queue) -> None:
    secret = "hook-secret-4711"
    program = "import sys; open('told.txt', 'a').write(sys.stdin.read())"
    # Nobody listens at port 9 of this machine.
    config = {"webhook": f"http://127.0.0.1:9/{secret}", "headers": {"Authorization": secret}, "timeout_s": 20}
    write_json(queue.folder / "notify.json", config | {"command": [sys.executable, "-c", program]})
    printed = queue.finish("run", "mine-02", *SMOKE, "--seeds", "1", "--notify", "notify.json")
    assert (queue.folder / "told.txt").read_text() == "oelm: the queue has ended: 2 done\n"
    assert "warning: --notify: not sent: the webhook cannot be reached" in " ".join(printed.split())
    left = [path.read_bytes() for path in queue.outputs.rglob("*") if path.is_file()]
    assert left and not any(secret.encode() in content for content in [printed.encode(), *left])


def test_a_smoke_test_says_that_it_does_not_read_the_data_of_its_title(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert "data stdlib: a smoke test does not read tinystories" in oelm("show", "GPT-02", *SMOKE)
    assert "data tinystories" in oelm("show", "GPT-02", "--budget", "laptop")
