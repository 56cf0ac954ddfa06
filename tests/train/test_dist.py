"""A run on several processes: the same batches, figures and frames whatever their number, and fewer bytes when frozen."""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

from oelm.config import FinetuneConfig, RunConfig, TrainConfig
from oelm.errors import ConfigError
from oelm.process import StopFlag
from oelm.runs.metrics import read_metrics
from oelm.runs.status import read_status
from oelm.train.dist import ALONE, World
from oelm.train.run import train
from tests.conftest import run_here, tiny_config
from tests.train.finetuning import tiny_finetune
from tests.train.rank_worker import forked, run_forked, told, wait_for
from tests.train.test_resume import StopsAt

EPSILON = 2.0**-24


def wide(text: Path, **overrides: Any) -> RunConfig:
    """Return a run whose batch can be dealt out to four processes, two micro-batches each at most."""
    return tiny_config(text, **{"model__dropout": 0.0, "batch_size": 8, "micro_batch_size": 2, **overrides})


def bound(config: TrainConfig, steps: int, num_parameters: int) -> float:
    """Return by how much a loss may differ after so many steps when gradients are summed in another order.

    Summing K micro-batches' gradients g_i of one element in another order changes the sum by e <= (K - 1) eps sum |g_i|.
    AdamW moves the element by lr * m / sqrt(v), whose slope in g is at most 2 / |g| (both moments are means of it), so by
    2 lr e / |g| more or less, and the loss, to first order, by |g| times that: 2 lr e. Over all elements that is at most
    2 lr (K - 1) eps * ||g||_1, with ||g||_1 <= sqrt(P) ||g||_2, and ||g||_2 <= 2 before clipping in these runs. What one step
    leaves behind changes the later gradients as well: each step's share is carried on by each later step, hence the square.
    The forward pass rounds the loss itself: K products of a mean, eps * loss each.
    """
    count = config.batch_size // config.micro_batch_size
    per_step = 2 * config.optim.lr * (count - 1) * EPSILON * math.sqrt(num_parameters) * 2.0
    return steps**2 * per_step + count * EPSILON * 6.0


def rows(run: Path, key: str) -> list[dict[str, Any]]:
    return [row for row in read_metrics(run / "metrics.jsonl") if key in row]


def frozen(run: Path) -> dict[str, str]:
    latest = json.loads((run / "latest.json").read_text())["checkpoint"]
    digests: dict[str, str] = json.loads((run / latest / "state.json").read_text())["frozen"]
    return digests


def assert_as_alone(run: Path, alone: Path, config: RunConfig) -> None:
    """Check losses against one process's, step by step, and frozen digests to the byte."""
    assert [row["step"] for row in rows(run, "loss")] == list(range(1, config.steps + 1))
    for key in ("loss", "val_loss"):
        for mine, its in zip(rows(run, key), rows(alone, key), strict=True):
            assert abs(mine[key] - its[key]) <= bound(config, mine["step"], 27_008), (key, mine["step"])
    assert rows(run, "loss")[0]["loss"] == rows(alone, "loss")[0]["loss"]
    assert frozen(run) == frozen(alone) != {}


def ids_alone(config: RunConfig | FinetuneConfig, out: Path) -> list[list[int]]:
    """Bring a run to its end in this process; return the ids of its batches."""
    from tests.train.rank_faults import Recorder

    with Recorder(ALONE) as watch:
        train(config, out, stop=StopFlag(), watch=watch)
    return watch.ids


@pytest.fixture(scope="module")
def alone(text_file: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[list[int]]]:
    """What one process makes of the run, and the ids of its batches."""
    run = tmp_path_factory.mktemp("one") / "alone"
    return run, ids_alone(wide(text_file), run)


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_two_and_four_processes_learn_from_the_same_batches_as_one(
    ranks: int, alone: tuple[Path, list[list[int]]], text_file: Path, tmp_path: Path
) -> None:
    config, run = wide(text_file), tmp_path / "together"
    ends = run_forked(config, run, ranks)
    assert [end["ids"] for end in ends] == [alone[1]] * ranks
    assert_as_alone(run, alone[0], config)
    # Seen from outside it is one run, held by one process.
    assert {path.name for path in run.iterdir()} == {path.name for path in alone[0].iterdir()}


def test_dropout_is_the_same_whichever_process_computes_it(text_file: Path, tmp_path: Path) -> None:
    config = wide(text_file, model__dropout=0.2, steps=3)
    run_here(config, tmp_path / "alone")
    run_forked(config, tmp_path / "on-2", 2)
    assert_as_alone(tmp_path / "on-2", tmp_path / "alone", config)


def test_bytes_summed_fall_by_exactly_the_frozen_share(text_file: Path, tmp_path: Path) -> None:
    summed = {}
    for method in ("baseline", "oelm_freeze", "oelm_axes"):
        (end, other) = run_forked(wide(text_file, method=method, steps=2), tmp_path / method, 2)
        assert end["bytes"] == other["bytes"] == [end["bytes"][0]] * 2
        summed[method] = end["bytes"][0]
    audit = json.loads((tmp_path / "oelm_freeze" / "audit.json").read_text())
    assert summed["baseline"] == 4 * audit["total"]
    assert summed["oelm_freeze"] == summed["oelm_axes"] == 4 * audit["trainable"]
    assert summed["baseline"] - summed["oelm_freeze"] == 4 * audit["frozen"] > 0
    for method in ("oelm_freeze", "oelm_axes"):
        told_there = (tmp_path / method / "training.log").read_text().replace(f"{summed[method]:,} ", "")
        assert "bytes of gradients summed in step 1 over 2 processes, 15.17% less" in told_there


def test_checkpoint_of_two_goes_on_with_one_and_back(
    alone: tuple[Path, list[list[int]]], text_file: Path, tmp_path: Path
) -> None:
    config, run = wide(text_file), tmp_path / "run"
    with forked(config, run, 2, fault="stop at 4") as children:
        for child in children:
            child.join(120)
        assert [child.exitcode for child in children] == [75, 75]
    stop = StopFlag()
    result = train(config, run, stop=stop, watch=StopsAt(stop, step=8))
    assert (result.status, result.step) == ("stopped", 8)
    run_forked(config, run, 2)
    assert_as_alone(run, alone[0], config)
    earlier = json.loads((run / "manifest.json").read_text())
    assert [sitting["environment"]["processes"] for sitting in [*earlier["earlier"], earlier]] == ["2", "1", "2"]


def test_validation_does_not_depend_on_the_number_of_processes(text_file: Path, tmp_path: Path) -> None:
    """From the very same weights: a run stopped before its last evaluation, finished by one, two and three processes."""
    config = wide(text_file, batch_size=6, steps=3, eval_every=3, save_every=3)
    stop = StopFlag()
    train(config, tmp_path / "run", stop=stop, watch=StopsAt(stop, step=3, in_evaluation=True))
    figures = set()
    for ranks in (1, 2, 3):
        copy = shutil.copytree(tmp_path / "run", tmp_path / f"on-{ranks}")
        if ranks == 1:
            run_here(config, copy)
        else:
            run_forked(config, copy, ranks)
        (row,) = rows(copy, "val_loss")
        figures.add((row["val_loss"].hex(), row["bits_per_byte"].hex(), (copy / "predictions.jsonl").read_text()))
    assert len(figures) == 1


@pytest.mark.parametrize("init", ["orthogonal", "axes"])
def test_thawing_on_two_processes_is_thawing_on_one(init: str, text_file: Path, tmp_path: Path) -> None:
    method = {"init": init, "freeze": ["q", "k"], "thaw": {"start": 0.3, "end": 0.7, "order": "last_first"}}
    config = wide(text_file, method=method, steps=6, eval_every=6, save_every=6)
    run_here(config, tmp_path / "alone")
    ends = run_forked(config, tmp_path / "on-2", 2)
    for mine, its in zip(rows(tmp_path / "on-2", "loss"), rows(tmp_path / "alone", "loss"), strict=True):
        assert abs(mine["loss"] - its["loss"]) <= bound(config, mine["step"], 27_008), mine["step"]
    # What is thawed joins the sums from its step on.
    counts = ends[0]["bytes"]
    assert counts == sorted(counts) and set(counts) == {4 * 22_912, 4 * 24_960, 4 * 27_008}


@pytest.mark.slow
def test_epochs_last_batch_may_leave_a_process_without_a_share(calm_bert: Path, tables: Path, tmp_path: Path) -> None:
    """95 examples by fours end with three, for four processes; evaluations take turns at batches of 64."""
    config = tiny_finetune(calm_bert, tables, batch_size=4, micro_batch_size=1, steps=24, eval_every=24, save_every=24)
    ids = ids_alone(config, tmp_path / "alone")
    assert min(map(len, ids)) == 3
    ends = run_forked(config, tmp_path / "on-4", 4)
    assert [end["ids"] for end in ends] == [ids] * 4
    alone, together = rows(tmp_path / "alone", "loss"), rows(tmp_path / "on-4", "loss")
    for mine, its in zip(together, alone, strict=True):
        # As derived for `bound`, with this model's 8,000 parameters; its gradients are not clipped below 2, so a step has 8.
        assert abs(mine["loss"] - its["loss"]) <= 4 * bound(config, mine["step"], 8_000), mine["step"]
    assert rows(tmp_path / "alone", "val_loss")[0]["val_accuracy"] == rows(tmp_path / "on-4", "val_loss")[0]["val_accuracy"]


@pytest.mark.parametrize("rank", [0, 1])
def test_signal_to_any_process_stops_all_at_one_step(rank: int, text_file: Path, tmp_path: Path) -> None:
    config, run = wide(text_file, steps=3000, save_every=3000, eval_every=3000), tmp_path / "run"
    with forked(config, run, 2) as children:
        wait_for(lambda: len(rows(run, "loss")) > 3)
        pid = children[rank].pid
        assert pid is not None
        os.kill(pid, signal.SIGTERM)
        for child in children:
            child.join(60)
        assert [child.exitcode for child in children] == [75, 75]
    first, second = told(run, "end")
    assert first["step"] == second["step"] > 3
    status = read_status(run)
    assert status is not None and status.status == "stopped" and status.step == first["step"] == len(rows(run, "loss"))


def test_not_a_number_on_one_process_stops_all_before_the_update(text_file: Path, tmp_path: Path) -> None:
    config, run = wide(text_file, save_every=3, eval_every=99), tmp_path / "run"
    with forked(config, run, 2, fault="nan on rank 1") as children:
        for child in children:
            child.join(60)
        assert [child.exitcode for child in children] == [3, 3]
    for end in told(run, "end"):
        assert end["error"] == "NonFiniteError" and "step 4: loss" in end["message"] and "norm nan" in end["message"]
    assert [row["step"] for row in rows(run, "loss")] == [1, 2, 3]
    status = read_status(run)
    assert status is not None and status.status == "failed" and status.step == 3


def test_writers_refusal_is_everybodys(text_file: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "letter.txt").write_text("not a run")
    with forked(wide(text_file), run, 2) as children:
        for child in children:
            child.join(60)
        assert [child.exitcode for child in children] == [3, 3]
    assert len({end["message"] for end in told(run, "end")}) == 1
    assert "not a run of ours" in told(run, "end")[1]["message"]


def test_batch_that_does_not_divide_is_refused_with_numbers_that_do() -> None:
    world = World(rank=0, size=3)
    with pytest.raises(ConfigError, match=r"batch_size 8 does not divide among 3 processes; numbers that do: 1, 2, 4, 8"):
        world.micro_batch_size(8, 2)
    assert [World(size=size).micro_batch_size(24, 8) for size in (1, 2, 3, 4, 6, 8)] == [8, 6, 8, 6, 4, 3]


def test_every_part_of_a_batch_is_one_processs() -> None:
    for count in range(1, 12):
        for size in range(1, 6):
            dealt = [part for rank in range(size) for part in World(rank=rank, size=size).share(count)]
            assert dealt == list(range(count))
