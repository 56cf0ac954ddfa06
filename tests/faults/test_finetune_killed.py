"""A classifier's run that is really killed, started again the same way, continues to the same bits."""

from __future__ import annotations

import multiprocessing as mp
import os
import shutil
import signal
import time
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import pytest

from oelm.runs.metrics import read_metrics
from tests.faults.harness import leftovers
from tests.models.test_hub import write_model
from tests.train.finetuning import evidence, tiny_finetune, write_tables

_SERVER = mp.get_context("forkserver")
# Loading transformers takes longer than a tiny run; the server does it once and every child is forked from it.
_SERVER.set_forkserver_preload(["oelm.train.run", "oelm.budget", "oelm.models.hub", "transformers.models.bert.modeling_bert"])
STEPS = 40


def _child(config: dict[str, Any], out: str) -> None:
    import torch

    from oelm.config import FinetuneConfig, parse_as
    from oelm.process import StopFlag
    from oelm.train.run import train
    from oelm.train.watch import Silence

    torch.set_num_threads(1)
    with StopFlag() as stop:
        result = train(parse_as(FinetuneConfig, config, where="test"), Path(out), stop=stop, watch=Silence())
    os._exit(75 if result.status == "stopped" else 0)


def start(config: dict[str, Any], out: Path) -> ForkServerProcess:
    child = _SERVER.Process(target=_child, args=(config, str(out)))
    child.start()
    return child


def finish(config: dict[str, Any], out: Path) -> None:
    child = start(config, out)
    child.join(timeout=120)
    assert child.exitcode == 0


def reach(run: Path, rows: int, child: ForkServerProcess) -> None:
    """Wait until the run has written so many rows, or is over."""
    metrics = run / "metrics.jsonl"
    while child.is_alive() and (not metrics.exists() or metrics.read_bytes().count(b"\n") < rows):
        time.sleep(0.002)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, tables, and the undisturbed run on them."""
    root = tmp_path_factory.mktemp("killed")
    write_tables(root / "tables")
    finish(settings(write_model(root / "model"), root), root / "oracle")
    return root


def settings(model: Path, root: Path) -> dict[str, Any]:
    return tiny_finetune(model, root / "tables", steps=STEPS, eval_every=9, save_every=5).as_dict()


def test_killed_run_continues_bit_for_bit_and_no_step_stands_twice(place: Path, tmp_path: Path) -> None:
    config, run = settings(place / "model", place), tmp_path / "run"
    # In the first save's stretch before any checkpoint, and thrice on the way.
    for rows in (2, 7, 20, 31):
        child = start(config, run)
        reach(run, rows, child)
        child.kill()
        child.join()
        assert child.exitcode == -signal.SIGKILL, "the run was over before the kill reached it"
    finish(config, run)
    assert evidence(run) == evidence(place / "oracle")
    assert leftovers(run) == []
    assert [row["step"] for row in read_metrics(run / "metrics.jsonl") if "loss" in row] == list(range(1, STEPS + 1))


def test_killed_run_continues_bit_for_bit_after_its_pretrained_model_is_gone(place: Path, tmp_path: Path) -> None:
    config, run = settings(Path(shutil.copytree(place / "model", tmp_path / "model")), place), tmp_path / "run"
    child = start(config, run)
    reach(run, 14, child)
    child.kill()
    child.join()
    shutil.rmtree(tmp_path / "model")
    finish(config, run)
    assert evidence(run) == evidence(place / "oracle")


def test_signalled_run_saves_leaves_75_and_continues_bit_for_bit(place: Path, tmp_path: Path) -> None:
    config, run = settings(place / "model", place), tmp_path / "run"
    for number, rows in ((signal.SIGTERM, 12), (signal.SIGINT, 25)):
        child = start(config, run)
        reach(run, rows, child)
        assert child.pid is not None
        os.kill(child.pid, number)
        child.join(timeout=60)
        assert child.exitcode == 75, number
    finish(config, run)
    assert evidence(run) == evidence(place / "oracle")
