"""The end of a run: its best model on the test split, whatever stopped it on the way, and the n-grams next to it."""

from __future__ import annotations

import json
import math
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

from oelm.config import RunConfig
from oelm.data.ngram import perplexities
from oelm.data.prepare import prepare
from oelm.errors import CheckpointError
from oelm.files import sha256_file
from oelm.process import StopFlag
from oelm.report.arms import read_run
from oelm.runs.find import look_at
from oelm.runs.records import DocumentRow, ExampleRow, majority_share
from oelm.runs.status import read_status
from oelm.train.device import Compute
from oelm.train.evaluate import evaluate_tokens
from oelm.train.load import load_run
from oelm.train.run import train
from oelm.train.watch import Silence
from tests.conftest import made_text, run_here, tiny_config
from tests.faults.harness import evidence, finish, start
from tests.runs.recomputed import figure_problems, read_record
from tests.train.finetuning import finetune_here, tiny_finetune

STEPS = 20
TESTED = ("test_step", "test_loss", "test_ppl", "test_bits_per_byte", "ngram", "ngram_tokens")


@pytest.fixture(scope="module")
def text_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A user's own folder with three splits."""
    folder = tmp_path_factory.mktemp("splits") / "own"
    folder.mkdir()
    for name, words, seed in (("train", 2500, 0), ("valid", 250, 1), ("test", 300, 2)):
        (folder / f"{name}.txt").write_text(made_text(words, seed=seed), encoding="utf-8")
    return folder


def ruined(folder: Path, **overrides: Any) -> RunConfig:
    """A run that a rate ruins after a good start: its best model is not its last."""
    chosen = {"steps": STEPS, "eval_every": 4, "save_every": 4, "optim__lr": 3.0, "schedule__warmup_steps": STEPS // 2}
    return tiny_config(folder, **(chosen | overrides))


@pytest.fixture(scope="module")
def finished(text_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("tested") / "run"
    run_here(ruined(text_folder), run)
    return run


def figures_of(run: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((run / "timing_stats.json").read_text())
    return found


def on_test(run: Path, which: str) -> float:
    """Evaluate a checkpoint on the run's test split, by the evaluation alone."""
    loaded = load_run(run, which=which)
    tokens = prepare(loaded.config.data.source, tokenizer=loaded.config.data.tokenizer)
    evaluation = evaluate_tokens(
        loaded.model,
        tokens.splits["test"],
        end_of_text=tokens.meta.end_of_text,
        text_bytes=tokens.meta.splits["test"].text_bytes,
        batch_size=2,
        compute=Compute("cpu", "float32", "test"),
        stop=StopFlag(),
        progress=Silence().on_validating,
    )
    assert evaluation is not None
    return evaluation.loss


def test_the_test_split_is_judged_by_the_best_model_and_not_by_the_last(finished: Path) -> None:
    figures = figures_of(finished)
    assert figures["test_step"] == figures["best_step"] < STEPS, "the premise: the best is not the last"
    assert figures["test_loss"] == on_test(finished, "best") != on_test(finished, "latest")
    assert figures["test_ppl"] == math.exp(figures["test_loss"])


def test_what_is_told_of_the_final_model_stays_its_own(finished: Path) -> None:
    record = read_record(finished)
    assert figure_problems(record) == [] and read_run(look_at(finished)).problem == ""
    assert record.attention is not None and record.attention.step == STEPS
    assert record.figures.final_val_loss == record.evaluations[-1].val_loss > record.figures.best_val_loss
    tokens = prepare(record.config["data"]["source"], tokenizer="bpe:300")
    documents = [row for row in record.test_predictions if isinstance(row, DocumentRow)]
    assert sum(row.tokens for row in documents) == len(tokens.splits["test"]) - 1


def test_the_n_grams_next_to_it_are_those_of_the_training_text(finished: Path) -> None:
    figures = figures_of(finished)
    tokens = prepare(read_record(finished).config["data"]["source"], tokenizer="bpe:300")
    judged = {"val": tokens.val, "test": tokens.splits["test"]}
    assert figures["ngram"] == perplexities(tokens.train, judged, vocab_size=tokens.meta.vocab_size)
    assert figures["ngram_tokens"] == len(tokens.train)
    record = read_record(finished).figures
    assert record.ngram["test"] == figures["ngram"]["test"]


def test_data_without_a_test_split_gives_no_test_figures(text_file: Path, tmp_path: Path) -> None:
    run_here(tiny_config(text_file), tmp_path / "run")
    figures = figures_of(tmp_path / "run")
    assert {name for name in TESTED if name in figures} == {"ngram", "ngram_tokens"}
    assert figures["ngram"].keys() == {"val"}
    assert not (tmp_path / "run" / "test_predictions.jsonl").exists()
    assert figure_problems(read_record(tmp_path / "run")) == []


class StopsInTest(Silence):
    """Asks for a stop once the test split is being evaluated."""

    def __init__(self, stop: StopFlag) -> None:
        self.stop, self.seen, self.is_on_test = stop, 0, False

    def on_remark(self, text: str) -> None:
        self.is_on_test = self.is_on_test or text.startswith("the test split")

    def on_validating(self, done: int, total: int) -> None:
        if self.is_on_test:
            self.seen += 1
            if self.seen == 2:
                self.stop.request("test")


@pytest.fixture(scope="module")
def untested(text_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run trained to its end and stopped while its test split was judged; nobody writes to it."""
    stop, run = StopFlag(), tmp_path_factory.mktemp("untested") / "run"
    watch = StopsInTest(stop)
    first = train(ruined(text_folder), run, stop=stop, watch=watch)
    assert watch.seen == 2 and first.status == "stopped" and first.figures is None
    return run


def test_a_stop_during_the_test_evaluation_leaves_a_run_that_goes_on_to_the_same_figures(
    text_folder: Path, finished: Path, untested: Path, tmp_path: Path
) -> None:
    run = shutil.copytree(untested, tmp_path / "run")
    status = read_status(run)
    assert status is not None and (status.status, status.step) == ("stopped", STEPS)
    assert not (run / "timing_stats.json").exists() and not (run / "test_predictions.jsonl").exists()
    assert run_here(ruined(text_folder), run).status == "done"
    assert {name: figures_of(run)[name] for name in TESTED} == {name: figures_of(finished)[name] for name in TESTED}
    for name in ("predictions.jsonl", "test_predictions.jsonl", "attention.json"):
        assert sha256_file(run / name) == sha256_file(finished / name)


def test_a_stop_while_n_grams_are_counted_leaves_a_run_that_goes_on(
    text_folder: Path, finished: Path, untested: Path, tmp_path: Path
) -> None:
    stop, run = StopFlag(), shutil.copytree(untested, tmp_path / "run")
    kept = prepare(str(text_folder), tokenizer="bpe:300").path / "ngram.json"
    kept.unlink()

    class StopsAfterTest(Silence):
        def on_remark(self, text: str) -> None:
            if text.startswith("test, model of step"):
                stop.request("test")

    assert train(ruined(text_folder), run, stop=stop, watch=StopsAfterTest()).status == "stopped"
    assert not kept.exists()
    assert run_here(ruined(text_folder), run).status == "done" and kept.exists()
    assert {name: figures_of(run)[name] for name in TESTED} == {name: figures_of(finished)[name] for name in TESTED}


def test_a_run_killed_during_the_test_evaluation_ends_with_the_same_figures(
    text_folder: Path, finished: Path, tmp_path: Path
) -> None:
    settings, run = ruined(text_folder).as_dict(), tmp_path / "run"
    child = start(settings, run, fault="in the test split")
    child.join(timeout=120)
    assert child.exitcode == -signal.SIGKILL, "the fault was never reached"
    assert not (run / "timing_stats.json").exists()
    finish(settings, run)
    assert evidence(run) == evidence(finished)
    whole, again = figures_of(finished), figures_of(run)
    assert {name: again[name] for name in TESTED} == {name: whole[name] for name in TESTED}
    assert sha256_file(run / "test_predictions.jsonl") == sha256_file(finished / "test_predictions.jsonl")


def best_of(run: Path) -> Path:
    return run / str(json.loads((run / "best.json").read_text())["checkpoint"])


def test_a_damaged_best_checkpoint_is_refused_and_gives_no_figure(text_folder: Path, untested: Path, tmp_path: Path) -> None:
    path = best_of(shutil.copytree(untested, tmp_path / "run")) / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(bytes(content))
    with pytest.raises(CheckpointError, match=r"model\.safetensors.*damaged"):
        run_here(ruined(text_folder), tmp_path / "run")
    assert not (tmp_path / "run" / "timing_stats.json").exists()


def test_without_the_best_checkpoint_there_are_no_test_figures_and_it_is_said(
    text_folder: Path, untested: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shutil.rmtree(best_of(shutil.copytree(untested, tmp_path / "run")))
    assert run_here(ruined(text_folder), tmp_path / "run").status == "done"
    assert not {"test_loss", "test_ppl"} & figures_of(tmp_path / "run").keys()
    assert "no figures of the test split" in caplog.text
    assert figure_problems(read_record(tmp_path / "run")) == []


def test_an_extended_run_is_tested_again(text_folder: Path, tmp_path: Path) -> None:
    for steps in (3, 6):
        run_here(tiny_config(text_folder, steps=steps, method="baseline"), tmp_path / "run")
        assert read_run(look_at(tmp_path / "run")).problem == ""
        assert figures_of(tmp_path / "run")["test_loss"] == on_test(tmp_path / "run", "best")
    assert figure_problems(read_record(tmp_path / "run")) == []


def test_a_classifier_whose_task_has_a_labelled_test_split_is_judged_on_it(bert: Path, tables: Path, tmp_path: Path) -> None:
    folder = tmp_path / "xnli"
    folder.mkdir()
    for name, count in (("train", 48), ("dev", 16), ("test", 12)):
        rows = [
            {"premise": f"good film {n % 5}", "hypothesis": f"bad {n % 3}", "label": ("entailment", "neutral", "-")[n % 3]}
            for n in range(count)
        ]
        (folder / f"{name}-en.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    examples: dict[str, Any] = {"task": "xnli", "folder": str(folder), "dev": None, "columns": None}
    settings = {f"examples__{name}": value for name, value in examples.items()}
    finetune_here(
        tiny_finetune(bert, tables, steps=6, eval_every=2, save_every=2, model__num_labels=3, **settings), tmp_path / "run"
    )
    record = read_record(tmp_path / "run")
    assert figure_problems(record) == [] and read_run(look_at(tmp_path / "run")).problem == ""
    assert record.figures.test_majority_accuracy == majority_share([n % 3 for n in range(12) if n % 3 < 2])
    answers = [row for row in record.test_predictions if isinstance(row, ExampleRow)]
    # One in three has no label.
    assert len(answers) == 8 and record.figures.test_step == record.figures.best_step
    assert record.figures.test_accuracy == sum(row.label == row.predicted for row in answers) / 8
    assert record.figures.bigram_ppl is None and record.figures.test_ppl is None


def test_progress_of_the_test_split_reaches_the_watch(text_folder: Path, tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    remarks: list[str] = []

    class Listens(Silence):
        def on_remark(self, text: str) -> None:
            remarks.append(text)

        def on_validating(self, done: int, total: int) -> None:
            seen.append((done, total))

    config = tiny_config(text_folder, steps=4)
    train(config, tmp_path / "run", stop=StopFlag(), watch=Listens())
    tokens = prepare(config.data.source, tokenizer=config.data.tokenizer)
    assert seen[-1] == (len(tokens.splits["test"]) - 1,) * 2
    assert remarks[-1].startswith("test, model of step 4: PPL")
