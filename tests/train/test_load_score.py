"""Opening a run at any checkpoint, and scoring it on its own and on other data."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import oelm
from oelm.data.prepare import prepare
from oelm.errors import CheckpointError, DataError, FrozenMovedError
from oelm.method.audit import digest
from oelm.process import StopFlag
from oelm.runs.metrics import read_metrics
from oelm.train.load import _followed, find_checkpoint, load_run
from oelm.train.score import probe_windows, score_run
from oelm.train.watch import Silence
from tests.conftest import made_text, run_here, tiny_config


@pytest.fixture(scope="module")
def run(text_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "run"
    run_here(tiny_config(text_file, steps=8, eval_every=4, save_every=2, keep_checkpoints=4), out)
    return out


def score(path: Path, *, which: str = "best", **what: object) -> tuple[str, float, int]:
    settings = {"data": None, "text": None, "split": "val", "batch_size": 3} | what
    name, evaluation = score_run(load_run(path, which=which), stop=StopFlag(), watch=Silence(), **settings)  # type: ignore[arg-type]
    assert evaluation is not None
    return name, evaluation.loss, sum(row.tokens for row in evaluation.documents)


@pytest.mark.parametrize("which", ["latest", "8", "4"])
def test_score_on_the_runs_own_data_is_the_recorded_one(which: str, run: Path) -> None:
    step = 8 if which == "latest" else int(which)
    recorded = {row["step"]: row["val_loss"] for row in read_metrics(run / "metrics.jsonl") if "val_loss" in row}
    # Another batch size may sum in another order: float32 rounding of losses of about 6, averaged.
    assert score(run, which=which)[1] == pytest.approx(recorded[step], abs=1e-6)


def test_best_is_the_step_that_best_json_names(run: Path) -> None:
    assert load_run(run).step == json.loads((run / "best.json").read_text())["step"]


def test_a_checkpoint_directory_opens_by_itself(run: Path) -> None:
    assert load_run(run / "checkpoints" / "step-00000006").step == 6


def test_latest_is_followed_when_the_run_prunes_it_while_it_is_read(run: Path, tmp_path: Path) -> None:
    live = tmp_path / "live"
    shutil.copytree(run, live)
    point = json.loads((live / "latest.json").read_text())
    (live / "latest.json").write_text(json.dumps(point | {"checkpoint": "checkpoints/step-00000006", "step": 6}))
    read: list[str] = []

    def load(folder: Path) -> int:
        read.append(folder.name)
        if folder.name == "step-00000006":
            (live / "latest.json").write_text(json.dumps(point))
            (folder / "model.safetensors").unlink()
        return load_run(folder).step

    assert _followed(live, "latest", load) == 8 and read == ["step-00000006", "step-00000008"]


def test_a_damaged_checkpoint_is_refused_with_the_others_by_their_numbers(run: Path, tmp_path: Path) -> None:
    copy = tmp_path / "run"
    shutil.copytree(run, copy)
    for name in ("step-00000000", "step-00000010", "step-notes"):
        (copy / "checkpoints" / name).mkdir()
    (copy / "checkpoints" / "step-00000008" / "model.safetensors").write_bytes(b"cut")
    with pytest.raises(CheckpointError, match="; try --checkpoint 0 or 2 or 4 or 6 or 10$"):
        load_run(copy, which="8")


def test_loaded_model_has_the_checkpoints_bytes(run: Path) -> None:
    loaded = load_run(run, which="6")
    saved = loaded.checkpoint.saved
    assert {name: digest(loaded.model.get_parameter(name)) for name in saved.frozen} == saved.frozen


def test_run_with_something_learnt_on_top_opens_as_it_was_scored_and_folds(text_file: Path, tmp_path: Path) -> None:
    method = {"init": "orthogonal", "freeze": ["q", "k"], "correction": 0.125, "gain": "matrix"}
    run_here(tiny_config(text_file, steps=8, eval_every=4, optim__lr=0.01, method=method), tmp_path / "run")
    recorded = {row["step"]: row["val_loss"] for row in read_metrics(tmp_path / "run" / "metrics.jsonl") if "val_loss" in row}
    assert score(tmp_path / "run", which="8")[1] == pytest.approx(recorded[8], abs=1e-6)
    loaded = load_run(tmp_path / "run", which="8")
    tokens = torch.arange(16).unsqueeze(0)
    before = loaded.model.logits(tokens)
    # One float32 rounding of each folded weight, on logits of order one, as in test_gain.
    assert torch.allclose(loaded.folded().logits(tokens), before, rtol=0, atol=2e-5)
    assert torch.equal(loaded.model.logits(tokens), before)


def test_checkpoint_whose_frozen_digest_differs_is_refused(run: Path, tmp_path: Path) -> None:
    from oelm.train.checkpoint import _manifest_text

    copy = tmp_path / "run"
    shutil.copytree(run, copy)
    folder = copy / "checkpoints" / "step-00000008"
    state = json.loads((folder / "state.json").read_text())
    state["frozen"][next(iter(state["frozen"]))] = "0" * 64
    (folder / "state.json").write_text(json.dumps(state))
    (folder / "manifest.json").write_text(_manifest_text(folder))
    with pytest.raises(FrozenMovedError):
        load_run(copy, which="8")


@pytest.mark.parametrize(
    ("which", "words"),
    [("7", "no checkpoint of step 7; it has: 2, 4, 6, 8"), ("worst", "give 'best', 'latest' or the number")],
)
def test_checkpoint_that_is_not_there_is_refused_with_those_that_are(which: str, words: str, run: Path) -> None:
    with pytest.raises(CheckpointError, match=words):
        find_checkpoint(run, which=which)


def test_a_run_opens_by_its_name_and_gives_what_it_was_trained_to(run: Path) -> None:
    loaded = oelm.load_run(str(run), which="8")
    tokens = torch.tensor([loaded.tokenizer().encode("def main(").ids])
    with torch.no_grad():
        logits = loaded.model.logits(tokens)
        assert torch.equal(logits, loaded.folded().logits(tokens))
    assert logits.shape == (1, tokens.shape[1], loaded.config.model.vocab_size)


def test_run_that_never_saved_says_so(run: Path, tmp_path: Path) -> None:
    shutil.copy(run / "config.json", tmp_path)
    with pytest.raises(CheckpointError, match="has not saved a checkpoint yet"):
        load_run(tmp_path)
    # What a portable folder keeps of a finished run.
    shutil.copy(run / "status.json", tmp_path)
    with pytest.raises(CheckpointError, match=r"done, and its weights were not kept here .* train it again .oelm train"):
        load_run(tmp_path)


def test_something_that_is_no_run_says_so(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="neither a run directory nor a checkpoint"):
        load_run(tmp_path)


def test_any_text_is_scored_whole_with_the_runs_tokenizer(run: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.txt"
    other.write_text(made_text(200, seed=9))
    name, loss, tokens = score(run, text=other)
    # All of it and an end mark; the first token is given.
    ids = load_run(run).tokenizer().encode(other.read_text()).ids
    assert name == "all of 'other.txt'" and tokens == len(ids)
    assert 0 < loss < 20


def test_training_split_can_be_scored(run: Path, text_file: Path) -> None:
    tokens = prepare(str(text_file), tokenizer="bpe:300")
    assert score(run, split="train")[2] == len(tokens.train) - 1


def test_split_that_is_not_there_is_refused(run: Path) -> None:
    with pytest.raises(DataError, match=r"no split 'test'; it has: train, val"):
        score(run, split="test")


def test_data_of_another_tokenizer_is_refused(run: Path, text_file: Path) -> None:
    other = prepare(str(text_file), tokenizer="bpe:290")
    with pytest.raises(DataError, match=r"tokenized with another tokenizer \(bpe:290"):
        score(run, data=str(other.path))


def test_stop_ends_a_score(run: Path) -> None:
    stop = StopFlag()
    stop.request("test")
    settings = {"data": None, "text": None, "split": "val", "batch_size": 3}
    assert score_run(load_run(run), stop=stop, watch=Silence(), **settings)[1] is None  # type: ignore[arg-type]


def test_probe_windows_are_the_start_of_the_validation_split(run: Path, text_file: Path) -> None:
    values = prepare(str(text_file), tokenizer="bpe:300").val
    windows = probe_windows(load_run(run), watch=Silence(), most=2)
    assert torch.equal(windows.flatten(), torch.tensor(values[:32].astype("int64")))


@pytest.mark.parametrize("given", [None, 3, ["run"]], ids=repr)
def test_what_is_no_path_is_refused(given: Any) -> None:
    with pytest.raises(CheckpointError, match="load_run takes the path of a run"):
        load_run(given)


@pytest.mark.parametrize("which", [4, None, "9" * 5000, "\u0664\u0660"], ids=["number", "nothing", "long", "other digits"])
def test_a_checkpoint_that_is_no_step_is_refused(which: Any, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match="give 'best', 'latest' or the number of a step"):
        load_run(tmp_path, which=which)
