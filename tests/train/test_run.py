"""Whole runs in this process: their files, extension, starting from another run, and what they refuse."""

from __future__ import annotations

import contextlib
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from oelm.data.prepare import prepare
from oelm.errors import CheckpointError, FrozenMovedError, OutOfMemoryError, RunDirError
from oelm.files import sha256_file
from oelm.method.method import PRESETS
from oelm.models.gpt import build_gpt
from oelm.process import StopFlag
from oelm.runs.metrics import read_metrics
from oelm.runs.rundir import RunDir
from oelm.train.checkpoint import load_tensors
from oelm.train.device import Compute
from oelm.train.load import load_run
from oelm.train.loop import run_loop
from oelm.train.run import resolve_start
from oelm.train.session import build_session
from oelm.train.task import LanguageModelTask, resolve
from oelm.train.timing import step_statistics
from oelm.train.watch import Silence, StepReport
from tests.conftest import one_of_each_kind, run_here, tiny_config


@pytest.fixture(scope="module")
def finished(text_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("finished") / "run"
    run_here(tiny_config(text_file), out)
    return out


def weights(run: Path) -> dict[str, torch.Tensor]:
    latest = json.loads((run / "latest.json").read_text())["checkpoint"]
    return load_tensors(run / latest / "model.safetensors")


def test_a_run_s_log_says_that_its_warm_up_was_cut_and_says_nothing_where_it_was_not(
    finished: Path, text_file: Path, tmp_path: Path
) -> None:
    config = tiny_config(text_file, steps=4, schedule__warmup_steps=9)
    run_here(config, tmp_path / "run")
    told = f"schedule.warmup_steps 9 is cut to {config.steps // 2}"
    assert (tmp_path / "run" / "training.log").read_text().count(told) == 1
    assert "is cut to" not in (finished / "training.log").read_text()


def test_a_run_leaves_every_file_of_the_design(finished: Path) -> None:
    names = {path.name for path in finished.iterdir()} - {".lock"}
    assert names == {
        "config.json",
        "manifest.json",
        "audit.json",
        "status.json",
        "tokenizer.json",
        "metrics.jsonl",
        "training.log",
        "timing_stats.json",
        "predictions.jsonl",
        "attention.json",
        "checkpoints",
        "best.json",
        "latest.json",
    }


def test_metrics_have_every_step_once_and_evaluations_where_due(finished: Path) -> None:
    rows = read_metrics(finished / "metrics.jsonl")
    assert [row["step"] for row in rows if "loss" in row] == list(range(1, 13))
    assert [row["step"] for row in rows if "val_loss" in row] == [5, 10, 12]


def test_figures_recompute_from_metrics(finished: Path) -> None:
    rows = read_metrics(finished / "metrics.jsonl")
    figures = json.loads((finished / "timing_stats.json").read_text())
    best = min(row["val_loss"] for row in rows if "val_loss" in row)
    assert figures["best_val_loss"] == best and figures["best_ppl"] == math.exp(best)
    assert figures["step_s"] == step_statistics([row["step_s"] for row in rows if "loss" in row], warmup_steps=100)
    phases = {key: value for key, value in figures["wall_s"].items() if key != "total"}
    assert set(phases) == {"step", "data", "validation", "checkpoint", "other"}
    assert figures["wall_s"]["total"] == pytest.approx(sum(phases.values()), rel=1e-12)
    assert figures["tokens"] == 12 * 4 * 16


def test_document_losses_add_up_to_the_evaluation(finished: Path) -> None:
    documents = [json.loads(line) for line in (finished / "predictions.jsonl").read_text().splitlines()]
    final = read_metrics(finished / "metrics.jsonl")[-1]
    total, count = sum(row["nats"] for row in documents), sum(row["tokens"] for row in documents)
    # Sums of the same float64 numbers in another order: some thousand additions of relative error 2^-53.
    assert total / count == pytest.approx(final["val_loss"], rel=1e-12)
    assert final["val_ppl"] == math.exp(final["val_loss"])


def test_validation_does_not_depend_on_the_batch_size(text_file: Path) -> None:
    losses = []
    for size in (1, 3, 64):
        config = tiny_config(text_file, batch_size=size, micro_batch_size=size)
        tokens = prepare(config.data.source, tokenizer=config.data.tokenizer)
        config = resolve(config, tokens)
        task = LanguageModelTask(tokens, config, Compute("cpu", "float32", "test"))
        evaluation = task.evaluate(build_gpt(config.model, seed=0), StopFlag(), progress=Silence().on_validating)
        assert evaluation is not None
        assert sum(document.tokens for document in evaluation.documents) == len(tokens.val) - 1
        losses.append(evaluation.loss)
    # Products of other shapes may sum in another order: float32 rounding of losses of about 6, averaged.
    assert max(losses) - min(losses) < 1e-6


def test_best_checkpoint_is_the_one_of_the_best_evaluation_and_is_kept(text_file: Path, tmp_path: Path) -> None:
    # A rate that ruins the model after a good start: the best evaluation is the first.
    run_here(
        tiny_config(text_file, steps=24, eval_every=3, save_every=3, optim__lr=3.0, schedule__warmup_steps=12), tmp_path / "r"
    )
    evaluations = [row for row in read_metrics(tmp_path / "r" / "metrics.jsonl") if "val_loss" in row]
    lowest = min(evaluations, key=lambda row: row["val_loss"])
    best = json.loads((tmp_path / "r" / "best.json").read_text())
    assert lowest["step"] < 18, "the premise: a late best would be kept anyway"
    assert best["step"] == lowest["step"] and best["value"] == lowest["val_loss"]
    assert (tmp_path / "r" / best["checkpoint"] / "manifest.json").is_file()
    assert len(list((tmp_path / "r" / "checkpoints").iterdir())) == 3


def test_extended_run_equals_its_config_run_from_scratch(text_file: Path, tmp_path: Path) -> None:
    run_here(tiny_config(text_file, steps=6), tmp_path / "extended")
    result = run_here(tiny_config(text_file, steps=14), tmp_path / "extended")
    again = run_here(tiny_config(text_file, steps=14, extended_at=[6]), tmp_path / "scratch")
    assert result.step == again.step == 14
    losses = [[r.get("loss") for r in read_metrics(tmp_path / n / "metrics.jsonl")] for n in ("extended", "scratch")]
    assert losses[0] == losses[1]
    assert json.loads((tmp_path / "extended" / "config.json").read_text())["extended_at"] == [6]


def test_extended_run_repeats_and_extends_again(text_file: Path, tmp_path: Path) -> None:
    for steps in (2, 3, 3, 4):
        result = run_here(tiny_config(text_file, steps=steps), tmp_path / "run")
        assert result.status in ("done", "found done") and result.step == steps


def test_unfinished_run_cannot_be_extended(text_file: Path, tmp_path: Path) -> None:
    stop = StopFlag()
    stop.request("test")
    run_here(tiny_config(text_file, steps=6), tmp_path / "run", stop=stop)
    with pytest.raises(RunDirError, match="not finished"):
        run_here(tiny_config(text_file, steps=14), tmp_path / "run")


def test_directory_of_another_config_is_refused_with_the_difference(text_file: Path, finished: Path) -> None:
    before = sha256_file(finished / "config.json")
    with pytest.raises(RunDirError, match=r"optim.lr: 0.002 there, 0.5 asked for"):
        run_here(tiny_config(text_file, optim__lr=0.5), finished)
    assert sha256_file(finished / "config.json") == before


def test_init_from_a_run_starts_with_its_best_weights(text_file: Path, finished: Path, tmp_path: Path) -> None:
    start = resolve_start(finished)
    stop = StopFlag()
    stop.request("test")
    config = tiny_config(text_file, method="baseline", init_from=start.model_dump())
    run_here(config, tmp_path / "run", stop=stop)
    theirs, ours = load_tensors(Path(start.checkpoint) / "model.safetensors"), weights(tmp_path / "run")
    assert all(torch.equal(theirs[name], ours[name]) for name in theirs)


@pytest.mark.parametrize("method", ["oelm_lowrank", "oelm_matrix"])
def test_init_from_a_run_on_which_a_little_learnt_starts_with_all_that_it_learnt(
    text_file: Path, tmp_path: Path, method: str
) -> None:
    run_here(tiny_config(text_file, method=method, optim__lr=0.1, steps=4), tmp_path / "source")
    stop = StopFlag()
    stop.request("test")
    start = resolve_start(tmp_path / "source").model_dump()
    run_here(tiny_config(text_file, method="pretrained_freeze", init_from=start), tmp_path / "run", stop=stop)
    source = load_run(tmp_path / "source")
    theirs, ours = source.folded().state_dict(), weights(tmp_path / "run")
    assert theirs.keys() == ours.keys() and all(torch.equal(theirs[name], ours[name]) for name in theirs)
    moved = [
        name for name, tensor in source.model.state_dict().items() if name in theirs and not torch.equal(tensor, theirs[name])
    ]
    assert moved and all(name.endswith((".q.weight", ".k.weight")) for name in moved)


def test_init_from_weights_that_changed_is_refused(text_file: Path, finished: Path, tmp_path: Path) -> None:
    start = resolve_start(finished).model_dump() | {"sha256": "0" * 64}
    with pytest.raises(CheckpointError, match="this run started from 000000000000"):
        run_here(tiny_config(text_file, init_from=start), tmp_path / "run")


# Those that thaw or freeze on the way have tests of their own, in test_plan_runs.
LASTING = [name for name, method in PRESETS.items() if method.thaw is None and not method.freeze_at]


@pytest.mark.parametrize("method", one_of_each_kind(LASTING))
def test_every_preset_trains_and_its_frozen_weights_do_not_move(method: str, text_file: Path, tmp_path: Path) -> None:
    stop = StopFlag()
    stop.request("test")
    config = tiny_config(text_file, method=method, optim__weight_decay=0.1, steps=4)
    run_here(config, tmp_path / "run", stop=stop)
    before = weights(tmp_path / "run")
    run_here(config, tmp_path / "run")
    after = weights(tmp_path / "run")
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    layers = [n for n in range(config.model.num_layers) if PRESETS[method].selects(n, config.model.num_layers)]
    held = "index" if PRESETS[method].init == "axes" else "weight"
    frozen = {f"blocks.{layer}.attention.{part}.{held}" for layer in layers for part in PRESETS[method].freeze}
    assert moved == set(before) - frozen


def test_arms_of_one_seed_see_the_same_first_batch_and_share_their_other_weights(text_file: Path, tmp_path: Path) -> None:
    stop = StopFlag()
    stop.request("test")
    for method in ("baseline", "oelm_freeze"):
        run_here(tiny_config(text_file, method=method), tmp_path / method, stop=stop)
    one, other = weights(tmp_path / "baseline"), weights(tmp_path / "oelm_freeze")
    differ = {name for name in one if not torch.equal(one[name], other[name])}
    assert differ == {name for name in one if name.endswith((".q.weight", ".k.weight"))}


def test_weights_that_moved_never_reach_a_checkpoint(text_file: Path, tmp_path: Path) -> None:
    class Vandal(Silence):
        """Writes to a frozen weight in the middle of training, as a bug elsewhere might."""

        def on_step(self, report: StepReport) -> None:
            if report.step == 6:
                session.model.get_parameter("blocks.0.attention.q.weight").data[0, 0] += 1e-3

    config = tiny_config(text_file, steps=12, save_every=4)
    tokens = prepare(config.data.source, tokenizer=config.data.tokenizer)
    config, compute = resolve(config, tokens), Compute("cpu", "float32", "test")
    with RunDir(tmp_path / "run") as folder:
        session = build_session(
            config, folder, LanguageModelTask(tokens, config, compute), compute, stop=StopFlag(), watch=Vandal()
        )
        with (
            contextlib.closing(session.folder.metrics),
            pytest.raises(FrozenMovedError, match=r"blocks.0.attention.q.weight has moved"),
        ):
            run_loop(session)
    assert json.loads((tmp_path / "run" / "latest.json").read_text())["step"] == 5


def test_a_run_that_cannot_fit_is_refused_before_it_starts(text_file: Path, tmp_path: Path) -> None:
    config = tiny_config(text_file, batch_size=2**22, micro_batch_size=2**22, model__num_layers=1)
    with pytest.raises(OutOfMemoryError, match=r"lower micro_batch_size from 4194304 to 2097152"):
        run_here(config, tmp_path / "run")


def test_status_tells_a_finished_run(finished: Path) -> None:
    status: dict[str, Any] = json.loads((finished / "status.json").read_text())
    assert (status["status"], status["step"], status["steps"]) == ("done", 12, 12)
