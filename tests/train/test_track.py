"""Trackers show the numbers of metrics.jsonl, each step once, whatever happened to the run in between."""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from typer.testing import CliRunner

from oelm.cli.app import app
from oelm.errors import ConfigError, DataError, MissingExtraError, OelmError
from oelm.process import StopFlag
from oelm.runs.manage import _survey
from oelm.runs.metrics import Metrics, read_metrics
from oelm.train.evaluate import Evaluation, TokenEvaluation
from oelm.train.run import Result, train
from oelm.train.track import TRACKERS, TrackerName, TrackWatch, read_trackio, read_wandb, tracked, tracker_named
from oelm.train.watch import Silence, StepReport, Watch
from tests.conftest import run_here, tiny_config
from tests.train.test_resume import StopsAt

FOLDER = "tensorboard"
TRAINED = {"train/loss": "loss", "train/lr": "lr", "train/tokens_per_s": "tokens_per_s"}
EVALUATED = {"val/loss": "val_loss", "val/ppl": "val_ppl", "val/bits_per_byte": "bits_per_byte"}
Curves = dict[str, list[tuple[int, float]]]


def needs(name: str) -> pytest.MarkDecorator:
    """Skip where a tracker's library is not installed; the extra of its name installs it."""
    return pytest.mark.skipif(importlib.util.find_spec(name) is None, reason=f"{name} is not installed")


EACH = pytest.mark.parametrize("to", [pytest.param(name, marks=needs(name)) for name in TRACKERS])


@pytest.fixture(autouse=True)
def _trackers_of_this_test(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep trackers off the network and out of the user's own folders."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.delenv("WANDB_PROJECT", raising=False)
    if importlib.util.find_spec("trackio") is not None:
        importlib.import_module("trackio")
        # Read from the environment when the library is imported, and kept as a constant in each of its modules.
        for name, module in list(sys.modules.items()):
            if name.split(".")[0] == "trackio" and hasattr(module, "TRACKIO_DIR"):
                monkeypatch.setattr(module, "TRACKIO_DIR", tmp_path / "trackio")


class Interrupted(Exception):
    """What a power cut is in this process: nothing is saved after it."""


class BreaksAt(Silence):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_step(self, report: StepReport) -> None:
        if report.step == self.step:
            raise Interrupted


def shown(run: Path, to: str = "tensorboard") -> Curves:
    """Return the curves that a tracker shows of a run, by step."""
    if to == "wandb":
        (found,) = read_wandb(sorted((run / "wandb").rglob("*.wandb")))
        return {tag: sorted(points) for tag, points in found.curves.items()}
    if to == "trackio":
        (found,) = read_trackio(run.parent / "trackio" / "oelm.db")
        return {tag: sorted(points) for tag, points in found.curves.items()}
    # No sampling: every point counts here.
    events = EventAccumulator(str(run / FOLDER), size_guidance={"scalars": 0}).Reload()
    curves = {tag: [(point.step, point.value) for point in events.Scalars(tag)] for tag in events.Tags()["scalars"]}
    return {tag: sorted(points) for tag, points in curves.items()}


def recorded(run: Path, names: dict[str, str] = TRAINED | EVALUATED, to: str = "tensorboard") -> Curves:
    """Return the same from metrics.jsonl; event files hold float32."""
    rows = read_metrics(run / "metrics.jsonl")
    kept: Callable[[float], float] = (lambda value: float(np.float32(value))) if to == "tensorboard" else float
    return {tag: [(row["step"], kept(row[name])) for row in rows if name in row] for tag, name in names.items()}


def sit(
    run: Path, text: Path, inner: Watch | None = None, *, to: Any = "tensorboard", stop: StopFlag | None = None, **settings: Any
) -> Result:
    """Train until the end, or until `inner` ends it, with a tracker listening."""
    with TrackWatch(inner or Silence(), run, to) as watch:
        return train(tiny_config(text, **settings), run, stop=stop or StopFlag(), watch=watch)


def without_pace(curves: Curves) -> Curves:
    """Return curves without the speed: the same steps, trained again, are as fast as they are that time."""
    return {tag: points for tag, points in curves.items() if tag != "train/tokens_per_s"}


@EACH
def test_the_curves_are_the_numbers_of_the_metrics_file_and_watching_changes_none(
    to: TrackerName, text_file: Path, tmp_path: Path
) -> None:
    sit(tmp_path / "run", text_file, to=to)
    curves = shown(tmp_path / "run", to)
    assert curves == recorded(tmp_path / "run", to=to)
    assert [step for step, _ in curves["train/loss"]] == list(range(1, 13))
    assert [step for step, _ in curves["val/ppl"]] == [5, 10, 12]
    run_here(tiny_config(text_file), tmp_path / "unwatched")
    names = {"loss": "loss", "ppl": "val_ppl"}
    assert recorded(tmp_path / "run", names) == recorded(tmp_path / "unwatched", names)


@EACH
@pytest.mark.parametrize(("step", "in_evaluation"), [(6, False), (5, True), (12, True)])
def test_stopped_run_shows_every_step_once_when_it_goes_on(
    to: TrackerName, step: int, in_evaluation: bool, text_file: Path, tmp_path: Path
) -> None:
    stop, run = StopFlag(), tmp_path / "run"
    first = sit(run, text_file, StopsAt(stop, step=step, in_evaluation=in_evaluation), stop=stop, to=to)
    assert first.status == "stopped" and first.step == step
    assert sit(run, text_file, to=to).status == "done"
    assert shown(run, to) == recorded(run, to=to)


@EACH
@pytest.mark.parametrize("breaks", [(2,), (7, 7, 11)])
def test_broken_run_shows_its_repeated_steps_once(
    to: TrackerName, breaks: tuple[int, ...], text_file: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    for step in breaks:
        with pytest.raises(Interrupted):
            sit(run, text_file, BreaksAt(step), to=to)
    sit(run, text_file, to=to)
    curves = shown(run, to)
    # Exact resume gives the same bits again, so that what the tracker kept from the first time is what the file holds.
    assert without_pace(curves) == without_pace(recorded(run, to=to))
    assert all([step for step, _ in curves[tag]] == list(range(1, 13)) for tag in TRAINED)


def report(step: int) -> StepReport:
    return StepReport(step=step, steps=9, loss=step / 4, lr=0.5, tokens_per_s=64.0, eta_s=None)


EVALUATION = TokenEvaluation(loss=1.5, perplexity=4.5, bits_per_byte=0.75, documents=[])


def test_evaluation_repeated_without_its_step_leaves_both_once(tmp_path: Path) -> None:
    """Stopped between step 5 and its evaluation, then killed after it, twice: the checkpoint is each time of step 5."""

    def tell_step(watch: Watch, metrics: Metrics, step: int) -> None:
        metrics.write(step=step, loss=step / 4, lr=0.5, tokens_per_s=64.0)
        watch.on_step(report(step))

    metrics = Metrics(tmp_path / "metrics.jsonl")
    with TrackWatch(Silence(), tmp_path, "tensorboard") as watch:
        for step in range(1, 6):
            tell_step(watch, metrics, step)
    for _ in range(2):
        metrics.rewind(step=5, evaluated=[])
        with TrackWatch(Silence(), tmp_path, "tensorboard") as watch:
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


@EACH
def test_flag_given_later_shows_the_whole_run(to: TrackerName, text_file: Path, tmp_path: Path) -> None:
    stop, run = StopFlag(), tmp_path / "run"
    train(tiny_config(text_file), run, stop=stop, watch=StopsAt(stop, step=6))
    sit(run, text_file, to=to)
    assert shown(run, to) == recorded(run, to=to)


def test_run_found_done_is_not_written_to(text_file: Path, tmp_path: Path) -> None:
    run_here(tiny_config(text_file, steps=2), tmp_path)
    assert sit(tmp_path, text_file, steps=2).status == "found done"
    assert not (tmp_path / FOLDER).exists()


def test_a_number_is_in_the_file_before_the_run_goes_on(tmp_path: Path) -> None:
    with TrackWatch(Silence(), tmp_path, "tensorboard") as watch:
        watch.on_step(report(1))
        assert shown(tmp_path)["train/loss"] == [(1, 0.25)]
        watch.on_evaluation(1, EVALUATION, is_best=True)
        assert shown(tmp_path)["val/ppl"] == [(1, 4.5)]


def test_only_numbers_of_an_evaluation_are_written(tmp_path: Path) -> None:
    class Talkative(TokenEvaluation):
        def as_row(self) -> dict[str, Any]:
            return {"val_loss": self.loss, "examples": 7, "verdict": "good", "is_whole": True, "rest": None}

    with TrackWatch(Silence(), tmp_path, "tensorboard") as watch:
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

        def on_evaluation(self, step: int, evaluation: Evaluation, *, is_best: bool) -> None:
            heard.append(("evaluation", step, evaluation, is_best))

    with tracked(Listener(), tmp_path, "tensorboard") as watch:
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


def test_untracked_it_is_the_watch_itself(tmp_path: Path) -> None:
    inner = Silence()
    with tracked(inner, tmp_path, None) as watch:
        assert watch is inner


def test_a_file_in_the_way_is_told_as_ours(tmp_path: Path) -> None:
    (tmp_path / FOLDER).write_text("mine")
    with (
        TrackWatch(Silence(), tmp_path, "tensorboard") as watch,
        pytest.raises(OelmError, match=f"{FOLDER}: cannot be written"),
    ):
        watch.on_step(report(1))


@pytest.mark.parametrize("name", TRACKERS)
def test_a_library_that_is_absent_is_named_with_its_extra(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, name, None)  # what Python does for a package that is not installed
    extra = {"tensorboard": "track"}.get(name, name)
    with pytest.raises(MissingExtraError, match=rf"'{name}'.*oelm\[{extra}\]"):
        tracker_named(name)


def test_an_unknown_tracker_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"--track 'tensorbord': choose one of tensorboard, wandb, trackio"):
        tracker_named("tensorbord")


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
    arguments = [*command(text_file, bert, tables), "--out", str(tmp_path / "run"), "--track", "tensorboard"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert shown(tmp_path / "run") == recorded(tmp_path / "run", tags)


def test_a_wrong_tracker_ends_the_command_before_a_run_begins(text_file: Path, tmp_path: Path) -> None:
    arguments = [*training(text_file, tmp_path, tmp_path), "--out", str(tmp_path / "run"), "--track", "mlflow"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2 and "choose one of tensorboard, wandb, trackio" in result.output
    assert not (tmp_path / "run").exists()


@needs("wandb")
def test_a_wandb_run_has_the_seed_and_the_group_of_its_arm(text_file: Path, tmp_path: Path) -> None:
    run = tmp_path / "GPT-02" / "smoke" / "default" / "seed-3"
    sit(run, text_file, to="wandb", steps=2, seed=3)
    (found,) = read_wandb(sorted(run.rglob("*.wandb")))
    assert (found.name, found.arm, found.seed) == ("GPT-02/smoke/default/seed-3", "GPT-02/smoke/default", 3)


@needs("wandb")
def test_what_wandb_writes_is_ours_to_clean(text_file: Path, tmp_path: Path) -> None:
    sit(tmp_path, text_file, to="wandb", steps=2)
    files, folders, kept = _survey(tmp_path, "")
    assert kept == [] and tmp_path / "wandb" in folders
    assert any(path.suffix == ".wandb" for path in files)


@needs("wandb")
def test_the_torn_end_of_a_wandb_file_is_left_out_and_a_damaged_one_is_refused(text_file: Path, tmp_path: Path) -> None:
    sit(tmp_path, text_file, to="wandb", steps=4)
    (path,) = tmp_path.rglob("*.wandb")
    whole = path.read_bytes()
    for cut in (0, 3, 400):
        path.write_bytes(whole[: -cut or None])
        (found,) = read_wandb([path])
        shown_then = found.curves["train/loss"]
        assert shown_then == recorded(tmp_path, to="wandb")["train/loss"][: len(shown_then)], cut
    content = bytearray(whole)
    content[100] ^= 1
    path.write_bytes(content)
    with pytest.raises(DataError, match="is damaged at byte"):
        read_wandb([path])
    path.write_text("no such thing")
    with pytest.raises(DataError, match=r"does not begin as W&B's files do"):
        read_wandb([path])


@needs("trackio")
def test_another_run_in_a_folder_of_the_same_name_is_another_run_of_trackio(text_file: Path, tmp_path: Path) -> None:
    sit(tmp_path / "run", text_file, to="trackio", steps=2)
    os.rename(tmp_path / "run", tmp_path / "aside")
    sit(tmp_path / "run", text_file, to="trackio", steps=2, seed=1)
    found = read_trackio(tmp_path / "trackio" / "oelm.db")
    assert [run.seed for run in found] == [0, 1] and len({run.name for run in found}) == 2


def test_a_file_that_is_no_trackio_database_is_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.db").write_text("not a database, and long enough to be looked at as one" * 20)
    with pytest.raises(DataError, match=r"notes\.db: cannot be read as trackio's database"):
        read_trackio(tmp_path / "notes.db")
