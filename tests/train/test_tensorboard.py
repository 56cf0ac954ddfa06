"""TensorBoard shows the numbers of metrics.jsonl, each step once, whatever happened to the run in between."""

from __future__ import annotations

import dataclasses
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator  # type: ignore[import-untyped]
from typer.testing import CliRunner

from oelm.cli.app import app
from oelm.errors import MissingExtraError, OelmError
from oelm.train.evaluate import Evaluation, Judged
from oelm.train.metrics import Metrics, read_metrics
from oelm.train.run import Result, train
from oelm.train.stop import StopFlag
from oelm.train.tensorboard import FOLDER, TensorBoardWatch, with_tensorboard
from oelm.train.watch import Silence, StepReport, Watch
from tests.conftest import run_here, tiny_config
from tests.train.test_resume import StopsAt

TRAINED = {"train/loss": "loss", "train/lr": "lr", "train/tokens_per_s": "tokens_per_s"}
EVALUATED = {"val/loss": "val_loss", "val/ppl": "val_ppl", "val/bits_per_byte": "bits_per_byte"}
Curves = dict[str, list[tuple[int, float]]]


class Interrupted(Exception):
    """What a power cut is in this process: nothing is saved after it."""


class BreaksAt(Silence):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_step(self, report: StepReport) -> None:
        if report.step == self.step:
            raise Interrupted


def shown(run: Path) -> Curves:
    """Return the curves that TensorBoard shows of a run."""
    # No sampling: every point counts here.
    events = EventAccumulator(str(run / FOLDER), size_guidance={"scalars": 0}).Reload()
    return {tag: [(point.step, point.value) for point in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def recorded(run: Path, names: dict[str, str] = TRAINED | EVALUATED) -> Curves:
    """Return the same from metrics.jsonl; event files hold float32."""
    rows = read_metrics(run / "metrics.jsonl")
    return {tag: [(row["step"], float(np.float32(row[name]))) for row in rows if name in row] for tag, name in names.items()}


def sit(run: Path, text: Path, inner: Watch | None = None, *, stop: StopFlag | None = None, **settings: Any) -> Result:
    """Train until the end, or until `inner` ends it, with TensorBoard listening."""
    with TensorBoardWatch(inner or Silence(), run) as watch:
        return train(tiny_config(text, **settings), run, stop=stop or StopFlag(), watch=watch)


def event_files(run: Path) -> list[Path]:
    return sorted((run / FOLDER).iterdir())


@pytest.fixture(scope="module")
def finished(text_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("finished") / "run"
    sit(run, text_file)
    return run


def test_the_curves_are_the_numbers_of_the_metrics_file(finished: Path) -> None:
    curves = shown(finished)
    assert curves == recorded(finished)
    assert [step for step, _ in curves["train/loss"]] == list(range(1, 13))
    assert [step for step, _ in curves["val/ppl"]] == [5, 10, 12]


def test_watching_changes_no_number_of_the_run(finished: Path, text_file: Path, tmp_path: Path) -> None:
    run_here(tiny_config(text_file), tmp_path / "unwatched")
    names = {"loss": "loss", "ppl": "val_ppl"}
    assert recorded(finished, names) == recorded(tmp_path / "unwatched", names)


@pytest.mark.parametrize(("step", "in_evaluation"), [(6, False), (5, False), (5, True), (12, True)])
def test_stopped_run_shows_every_step_once_when_it_goes_on(
    step: int, in_evaluation: bool, text_file: Path, tmp_path: Path
) -> None:
    stop = StopFlag()
    first = sit(tmp_path, text_file, StopsAt(stop, step=step, in_evaluation=in_evaluation), stop=stop)
    assert first.status == "stopped" and first.step == step
    assert sit(tmp_path, text_file).status == "done"
    assert len(event_files(tmp_path)) == 2 and shown(tmp_path) == recorded(tmp_path)


@pytest.mark.parametrize("breaks", [(2,), (7,), (7, 7, 11)])
def test_broken_run_shows_its_repeated_steps_once(breaks: tuple[int, ...], text_file: Path, tmp_path: Path) -> None:
    for step in breaks:
        with pytest.raises(Interrupted):
            sit(tmp_path, text_file, BreaksAt(step))
    sit(tmp_path, text_file)
    curves = shown(tmp_path)
    assert curves == recorded(tmp_path) and [step for step, _ in curves["train/lr"]] == list(range(1, 13))


def report(step: int) -> StepReport:
    return StepReport(step=step, steps=9, loss=step / 4, lr=0.5, tokens_per_s=64.0, eta_s=None)


EVALUATION = Evaluation(loss=1.5, perplexity=4.5, bits_per_byte=0.75, documents=[])


def test_evaluation_repeated_without_its_step_leaves_both_once(tmp_path: Path) -> None:
    """Stopped between step 5 and its evaluation, then killed after it, twice: the checkpoint is each time of step 5."""

    def tell_step(watch: Watch, metrics: Metrics, step: int) -> None:
        metrics.write(step=step, loss=step / 4, lr=0.5, tokens_per_s=64.0)
        watch.on_step(report(step))

    metrics = Metrics(tmp_path / "metrics.jsonl")
    with TensorBoardWatch(Silence(), tmp_path) as watch:
        for step in range(1, 6):
            tell_step(watch, metrics, step)
    for _ in range(2):
        metrics.rewind(step=5, evaluated=[])
        with TensorBoardWatch(Silence(), tmp_path) as watch:
            metrics.write(step=5, **EVALUATION.as_row())
            watch.on_evaluation(5, EVALUATION, is_best=True)
            tell_step(watch, metrics, 6)
    metrics.close()
    assert shown(tmp_path) == recorded(tmp_path)
    assert shown(tmp_path)["train/loss"] == [(step, step / 4) for step in range(1, 7)]
    assert shown(tmp_path)["val/loss"] == [(5, 1.5)]


def test_extended_run_goes_on_in_the_same_curves(text_file: Path, tmp_path: Path) -> None:
    for steps in (4, 7):
        sit(tmp_path, text_file, steps=steps)
    assert shown(tmp_path) == recorded(tmp_path)


def test_flag_given_later_shows_the_run_from_there(text_file: Path, tmp_path: Path) -> None:
    stop = StopFlag()
    train(tiny_config(text_file), tmp_path, stop=stop, watch=StopsAt(stop, step=6))
    sit(tmp_path, text_file)
    assert shown(tmp_path)["train/loss"] == recorded(tmp_path)["train/loss"][6:]


def test_run_found_done_is_not_written_to(text_file: Path, tmp_path: Path) -> None:
    run_here(tiny_config(text_file, steps=2), tmp_path)
    assert sit(tmp_path, text_file, steps=2).status == "found done"
    assert not (tmp_path / FOLDER).exists()


def test_a_number_is_in_the_file_before_the_run_goes_on(tmp_path: Path) -> None:
    with TensorBoardWatch(Silence(), tmp_path) as watch:
        watch.on_step(report(1))
        assert shown(tmp_path)["train/loss"] == [(1, 0.25)]
        watch.on_evaluation(1, EVALUATION, is_best=True)
        assert shown(tmp_path)["val/ppl"] == [(1, 4.5)]


def test_only_numbers_of_an_evaluation_are_written(tmp_path: Path) -> None:
    class Talkative(Evaluation):
        def as_row(self) -> dict[str, Any]:
            return {"val_loss": self.loss, "examples": 7, "verdict": "good", "is_whole": True, "rest": None}

    with TensorBoardWatch(Silence(), tmp_path) as watch:
        watch.on_evaluation(3, Talkative(*dataclasses.astuple(EVALUATION)), is_best=False)
    assert shown(tmp_path) == {"val/loss": [(3, 1.5)], "val/examples": [(3, 7.0)]}


def test_everything_is_told_to_the_watch_inside(tmp_path: Path) -> None:
    heard: list[tuple[Any, ...]] = []

    class Listener:
        def on_remark(self, text: str) -> None:
            heard.append(("remark", text))

        def on_preparing(self, what: str, done: int, total: int, tokens: int) -> None:
            heard.append(("preparing", what, done, total, tokens))

        def on_step(self, report: StepReport) -> None:
            heard.append(("step", report))

        def on_validating(self, done: int, total: int) -> None:
            heard.append(("validating", done, total))

        def on_evaluation(self, step: int, evaluation: Judged, *, is_best: bool) -> None:
            heard.append(("evaluation", step, evaluation, is_best))

    with with_tensorboard(Listener(), tmp_path, wanted=True) as watch:
        watch.on_remark("hello")
        watch.on_preparing("reading", 1, 2, 3)
        assert not (tmp_path / FOLDER).exists(), "nothing is written before there is a number"
        watch.on_step(report(1))
        watch.on_validating(4, 5)
        watch.on_evaluation(1, EVALUATION, is_best=True)
    assert heard == [
        ("remark", "hello"),
        ("preparing", "reading", 1, 2, 3),
        ("step", report(1)),
        ("validating", 4, 5),
        ("evaluation", 1, EVALUATION, True),
    ]


def test_unwanted_it_is_the_watch_itself(tmp_path: Path) -> None:
    inner = Silence()
    with with_tensorboard(inner, tmp_path, wanted=False) as watch:
        assert watch is inner


def test_a_file_in_the_way_is_told_as_ours(tmp_path: Path) -> None:
    (tmp_path / FOLDER).write_text("mine")
    with TensorBoardWatch(Silence(), tmp_path) as watch, pytest.raises(OelmError, match=f"{FOLDER}: cannot be written"):
        watch.on_step(report(1))


def test_a_new_file_is_read_after_those_of_the_same_second(tmp_path: Path) -> None:
    (tmp_path / FOLDER).mkdir()
    # A host and a process id that sort after any of ours.
    earlier = tmp_path / FOLDER / f"events.out.tfevents.{int(time.time())}.~.9.9"
    earlier.touch()
    with TensorBoardWatch(Silence(), tmp_path) as watch:
        watch.on_step(report(1))
    assert len(event_files(tmp_path)) == 2 and event_files(tmp_path)[0] == earlier


def test_files_from_the_future_are_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / FOLDER).mkdir()
    (tmp_path / FOLDER / "events.out.tfevents.9999999999.host.1.0").touch()
    with TensorBoardWatch(Silence(), tmp_path) as watch:
        watch.on_step(report(1))
    assert "in the future of this clock" in caplog.text and len(event_files(tmp_path)) == 2


def test_without_tensorboard_the_extra_is_named_before_anything_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.split(".")[:3] == ["torch", "utils", "tensorboard"]]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "tensorboard", None)  # what Python does for a package that is not installed
    with pytest.raises(MissingExtraError, match=r"'tensorboard'.*oelm\[track\]"):
        TensorBoardWatch(Silence(), tmp_path)
    assert os.listdir(tmp_path) == []


def training(text: Path, bert: Path, tables: Path) -> list[str]:
    return ["train", "--budget", "smoke", "--text", str(text), "--tokenizer", "bpe:300", "--steps", "4"]


def finetuning(text: Path, bert: Path, tables: Path) -> list[str]:
    task = ["--task", str(tables / "train.tsv"), "--dev", str(tables / "dev.tsv"), "--columns", "text=sentence,label=label"]
    return ["finetune", "--budget", "smoke", "--model", str(bert), *task, "--max-length", "16", "--steps", "4"]


@pytest.mark.parametrize(
    ("command", "tags"),
    [(training, TRAINED | EVALUATED), (finetuning, TRAINED | {"val/loss": "val_loss", "val/accuracy": "val_accuracy"})],
)
def test_both_commands_have_the_flag(
    command: Callable[[Path, Path, Path], list[str]],
    tags: dict[str, str],
    text_file: Path,
    bert: Path,
    tables: Path,
    tmp_path: Path,
) -> None:
    arguments = [*command(text_file, bert, tables), "--out", str(tmp_path / "run"), "--tensorboard"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert shown(tmp_path / "run") == recorded(tmp_path / "run", tags)
