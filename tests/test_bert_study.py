"""The records of the BERT study are taken for what they are: of one task, one model, so many examples and epochs."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from types import ModuleType

import pytest

from tests.test_figures import ROOT, script

SST2 = ROOT / "results" / "bert-sst2"


@pytest.fixture(scope="module")
def bert() -> ModuleType:
    return script("studies/bert.py")


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of its own with the committed records, from which nothing could be trained."""
    shutil.copytree(SST2, tmp_path / "results" / "bert-sst2")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def call(bert: ModuleType, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    monkeypatch.setattr("sys.argv", ["bert.py", *arguments])
    bert.main()


def test_an_accuracy_that_the_answers_do_not_give_is_refused(
    bert: ModuleType, here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    call(bert, monkeypatch, "table")
    assert "| `majority_class` |  |  | 50.92% |  | 50.92% |" in capsys.readouterr().out
    path = here / "results/bert-sst2/oelm_freeze/lr-3e-05/seed-1.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"final_accuracy": 0.9}))
    with pytest.raises(SystemExit, match=r"seed-1\.json: final_accuracy is 0\.9, its answers give 0\.7"):
        call(bert, monkeypatch, "table")


RUNS = ("--model", "minilm", "--from", "nowhere")


@pytest.mark.parametrize("what", ["sweep", "seeds"])
def test_what_is_recorded_is_not_run_again(
    bert: ModuleType, here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], what: str
) -> None:
    call(bert, monkeypatch, what, *RUNS)
    (told,) = capsys.readouterr().out.splitlines()
    assert re.fullmatch(
        r"(\d+) of \1 runs are recorded in results/bert-sst2; use --results FOLDER to start in another folder", told
    )
    assert not (here / "outputs").exists()


@pytest.mark.parametrize("what", ["seeds", "table"])
def test_another_task_has_a_folder_of_its_own(bert: ModuleType, here: Path, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    with pytest.raises(SystemExit, match=r"results/bert-mnli/baseline/.*: not found; sweep every arm first: .* --task mnli"):
        call(bert, monkeypatch, what, "--task", "mnli", *RUNS)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("sweep", "--task", "mnli"), "task is sst2, but you asked for mnli"),
        (("seeds", "--task", "mnli"), "task is sst2, but you asked for mnli"),
        (("table", "--task", "mnli"), "task is sst2, but you asked for mnli"),
        (("sweep", "--max-train", "8000"), "train_examples is 1000, but you asked for 2000"),
        (("seeds", "--max-train", "400"), "train_examples is 1000, but you asked for 100"),
        (("seeds", "--epochs", "10"), "epochs is 3, but you asked for 10"),
    ],
)
def test_a_record_of_something_else_is_refused(
    bert: ModuleType, here: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], said: str
) -> None:
    with pytest.raises(SystemExit, match=rf"seed-100\.json: {said}.*; use another folder with --results"):
        call(bert, monkeypatch, *arguments, *RUNS, "--results", "results/bert-sst2")


def test_a_record_of_another_size_is_refused_at_the_seeds_too(
    bert: ModuleType, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = here / "results" / "bert-sst2" / "oelm_freeze" / "lr-3e-05" / "seed-4.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"train_examples": 67349}))
    with pytest.raises(SystemExit, match=r"seed-4\.json: train_examples is 67349, but you asked for 4000"):
        call(bert, monkeypatch, "seeds", *RUNS)


def test_a_record_of_another_model_is_refused(bert: ModuleType, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = here / "results" / "bert-sst2" / "baseline" / "lr-0.0001" / "seed-0.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"model": "bert-base-uncased"}))
    with pytest.raises(SystemExit, match=r"seed-0\.json: model is bert-base-uncased, but you asked for minilm"):
        call(bert, monkeypatch, "seeds", *RUNS)


def test_runs_need_a_model_and_data(bert: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SystemExit, match="2"):
        call(bert, monkeypatch, "sweep")
