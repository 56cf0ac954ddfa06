"""`oelm train` and `oelm finetune` with several methods and seeds: trained, compared, and known to the other commands."""

from __future__ import annotations

import json
import re
import shlex
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from oelm.cli.app import app
from oelm.cli.shell import program

METHODS = "baseline,oelm_lowrank"
# 400 lines, so that the validation split is not empty.
TEXT = "".join(f"the cat number {number} sat on the mat and saw bird number {number * 7 % 31}\n" for number in range(400))


def oelm(*arguments: object, code: int = 0) -> str:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == code, result.output
    assert "Traceback" not in result.output
    return result.output


def pasted(output: str, start: str) -> list[str]:
    """Return the arguments of the command in an output that begins with `start`, as a shell would."""
    line = next(line for line in output.splitlines() if line.startswith(f"  oelm {start}"))
    return shlex.split(line, comments=True)[1:]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The folder in which two methods were trained on a text over two seeds, and what was printed.

    A run in a process of its own is mostly the loading of torch: one of each method is found done.
    """
    root = tmp_path_factory.mktemp("many")
    (root / "my.txt").write_text(TEXT)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(root)
        patch.setenv("COLUMNS", "140")
        for method, seed in zip(METHODS.split(","), (1, 0), strict=True):
            oelm(*ALONE, "--method", method, "--seed", seed)
        printed = oelm(*ASKED)
        assert "4 runs at budget smoke, 2 of them done" in printed
        return root, printed


ALONE = ("train", "--text", "my.txt", "--budget", "smoke", "--steps", 4)
ASKED = (*ALONE, "--method", METHODS, "--seeds", 2)


@pytest.fixture
def here(trained: tuple[Path, str], monkeypatch: pytest.MonkeyPatch) -> str:
    """Be in that folder; return what was printed."""
    monkeypatch.chdir(trained[0])
    return trained[1]


def test_all_methods_and_seeds_are_trained_and_compared_with_an_interval(here: str) -> None:
    runs = sorted(path.parent.relative_to("outputs").parts for path in Path("outputs").rglob("timing_stats.json"))
    assert [(command, size, variant[:-9], seed) for command, size, variant, seed in runs] == [
        ("train", "smoke", variant, f"seed-{seed}") for variant in ("baseline", "oelm-lowrank") for seed in (0, 1)
    ]
    assert re.search(r"^oelm_lowrank +2 +[0-9.]+ +[-+][0-9.]+% \[[-+0-9.]+, [-+0-9.]+\] baseline", here, re.MULTILINE)
    assert "folder: outputs/train/smoke\n" in here


def test_the_same_command_again_trains_nothing_and_shows_the_same_table(here: str) -> None:
    before = {path: path.stat().st_mtime_ns for path in Path("outputs").rglob("metrics.jsonl")}
    again = oelm(*ASKED)
    assert "4 of them done" in again and again.splitlines()[-9:] == here.splitlines()[-9:]
    assert {path: path.stat().st_mtime_ns for path in Path("outputs").rglob("metrics.jsonl")} == before


def test_one_of_the_runs_alone_is_the_same_run(here: str) -> None:
    assert "already done" in oelm(*ALONE, "--method", "oelm_lowrank", "--seed", 1)


def test_the_commands_that_come_next_work_as_they_are_printed(here: str) -> None:
    compared = oelm(*pasted(here, "compare"))
    assert re.search(r"oelm-lowrank-\w+ +2 .*%", compared)
    reported = oelm(*pasted(here, "report"))
    assert "oelm_lowrank" in reported and "Comparisons: 1." in reported and Path("report.html").is_file()


def test_one_run_ends_with_its_folder_and_a_comparison_to_paste(here: str) -> None:
    shown = oelm(*ALONE, "--method", "oelm_lowrank")
    assert re.search(r"folder: outputs/train/smoke/oelm-lowrank-\w{8}/seed-0\n", shown)
    again = pasted(shown, "train")
    assert again[-4:] == ["--method", METHODS, "--seeds", "3"] and "4 of them done" in oelm(*again[:-1], "2")


def test_one_folder_is_compared_with_its_baseline(here: str) -> None:
    (arm,) = Path("outputs/train/smoke").glob("oelm-lowrank-*")
    (baseline,) = Path("outputs/train/smoke").glob("baseline-*")
    assert oelm("compare", arm) == oelm("compare", baseline, arm)
    alone = oelm("compare", arm / "seed-0")
    assert f"{baseline}/seed-0" in alone and "one seed: no interval" in alone
    assert f"error: {baseline}: is itself a baseline; give two runs" in oelm("compare", baseline, code=2)


def test_status_shows_the_distance_to_the_baseline_of_the_same_config(here: str) -> None:
    lines = [line.split() for line in oelm("status", "train").splitlines()]
    # Experiment, budget, variant, seed, state, step, PPL and its figure, gap.
    gaps = {(line[2].split("-")[0], line[3]): line[8] for line in lines if line[:1] == ["train"] and line[3] in "01"}
    assert not gaps["baseline", "0"].endswith("%") and gaps["oelm", "0"].endswith("%") and gaps["oelm", "1"].endswith("%")


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (("--method", "baseline,baseline"), "--method: 'baseline' is given twice"),
        (("--method", "baseline,oelm_frz"), "unknown method 'oelm_frz' (did you mean 'oelm_freeze'?)"),
        (("--seeds", "2", "--seed", "1"), "--seed and --seeds both give seeds"),
        (("--seeds", "0"), "a number of seeds from 1 to 9,999"),
        (("--seeds", "2", "--exact-step", "3"), "--exact-step is for one run"),
        (("--seeds", "2", "--strict"), "--strict is for one run"),
    ],
)
def test_what_several_runs_cannot_have_is_refused_before_anything_is_written(
    arguments: tuple[str, ...], problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert problem in " ".join(oelm("train", "--budget", "smoke", *arguments, code=2).split())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("name", "on_path", "shown"),
    [("oelm", True, "oelm"), ("oelm", False, "{0}/oelm"), ("oelm/__main__.py", True, "{1} -m oelm")],
)
def test_commands_to_paste_start_as_this_one_was_started(
    name: str, on_path: bool, shown: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text("#!/bin/sh\n")
    (tmp_path / name).chmod(0o755)
    monkeypatch.setattr(sys, "argv", [str(tmp_path / name)])
    monkeypatch.setenv("PATH", str(tmp_path) if on_path else "/nowhere")
    assert program() == shown.format(tmp_path, sys.executable)


def write_reviews(path: Path) -> None:
    rows = [
        f"{'good' if number % 5 < 3 else 'bad'} film number {number},{'yes' if number % 5 < 3 else 'no'}\n"
        for number in range(300)
    ]
    path.write_text("review,verdict\n" + "".join(rows))


REVIEWS = ("--task", "mine.csv", "--columns", "text=review,label=verdict", "--budget", "smoke", "--steps", 4)


@pytest.mark.slow
def test_a_table_of_ones_own_trains_a_new_model_without_a_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub.constants

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OELM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    write_reviews(tmp_path / "mine.csv")
    shown = oelm("finetune", *REVIEWS)
    (run,) = Path("outputs/finetune/smoke").glob("baseline-*/seed-0")
    largest = f"{100 * json.loads((run / 'timing_stats.json').read_text())['majority_accuracy']:.2f}%"
    assert f"largest class {largest}" in shown and f"always naming the largest class: {largest}" in shown
    assert json.loads((run / "config.json").read_text())["model"]["source"] is None
    assert f"largest class {largest}" in oelm("eval", run)
    # Another table of the same name has another vocabulary.
    (tmp_path / "mine.csv").write_text((tmp_path / "mine.csv").read_text().replace("film", "zebra"))
    assert "data" in oelm("finetune", *REVIEWS, code=3)
    assert len(list((tmp_path / "cache" / "bert-bpe").glob("table-mine-1024-*.json"))) == 2
    compared = oelm("finetune", *REVIEWS, "--method", "baseline,oelm_freeze", "--seeds", "2", "--out", "all")
    assert (
        "always naming the largest class: " in compared and "] points " in compared and "folder: all/finetune/smoke" in compared
    )
    assert "Comparisons: 1." in oelm(*pasted(compared, "report"))


@pytest.mark.parametrize(
    ("table", "task", "problem"),
    [
        ("", "none.csv", "no file 'none.csv' here; give the path of a table"),
        ("a,b\nx,y\n", "own.csv", "columns 'a', 'b'; expected (review, verdict)"),
        ("review,verdict\ngood,yes\nfine,yes\n", "own.csv", "the column 'verdict' holds only the label 'yes'"),
        ("review,verdict\ngood,yes\nbad,no\n", "own.csv", "no labelled example for the val split"),
    ],
)
def test_a_table_that_cannot_be_used_is_refused_with_the_reason(
    table: str, task: str, problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("own.csv").write_text(table)
    result = CliRunner().invoke(app, ["finetune", "--task", task, *map(str, REVIEWS[2:])])
    assert result.exit_code in (2, 3) and problem in " ".join(result.output.split()), result.output


def test_a_single_run_tells_that_it_is_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("my.txt").write_text(TEXT)
    writing = "import sys; open('told.txt', 'a').write(sys.stdin.read())"
    Path("notify.json").write_text(json.dumps({"command": [sys.executable, "-c", writing], "timeout_s": 60}))
    oelm(*ALONE, "--out", "run", "--notify", "notify.json")
    assert Path("told.txt").read_text() == "oelm: run is done\n"
