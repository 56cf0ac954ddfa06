"""Checkpoints that go, whole or not at all, without ending a run; no state left that was given up, no pointer to nowhere."""

from __future__ import annotations

import errno
import json
import logging
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from oelm.config import OptimConfig, RunConfig
from oelm.errors import CheckpointError
from oelm.files import STAGING_PREFIX, sweep_staging
from oelm.process import StopFlag
from oelm.train.checkpoint import Checkpoints, SavedState, TrainState
from oelm.train.optim import build_optimizer
from oelm.train.run import Options, train
from oelm.train.watch import Silence, StepReport
from tests.conftest import run_here, tiny_config

MAPS = Path("/proc/self/maps")


def publish(checkpoints: Checkpoints, step: int, *, best: int | None = None) -> SavedState:
    """Publish the checkpoint of a step of a model that has nothing to learn."""
    model = nn.Linear(2, 2)
    state = TrainState(step=step, evaluated_step=step, best_step=best, best_value=None if best is None else 1.0 / best)
    saved = SavedState(state=state, clock={}, frozen={}, data_fingerprint="", tokenizer_sha256="", environment={})
    checkpoints.publish(saved, model, build_optimizer(model, OptimConfig(lr=1e-3), device="cpu"))
    return saved


def steps_in(run: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("step-")) for path in run.glob("checkpoints/step-*"))


class Mapped(Silence):
    """Notes after every step which files of checkpoints are mapped into this process, and stops at one step."""

    def __init__(self, stop: StopFlag, *, stop_at: int = 0) -> None:
        self.stop, self.stop_at = stop, stop_at
        self.seen: set[str] = set()

    def on_step(self, report: StepReport) -> None:
        self.seen |= {line.split(maxsplit=5)[-1] for line in MAPS.read_text().splitlines() if "/checkpoints/" in line}
        if report.step == self.stop_at:
            self.stop.request("test")


def sitting(config: RunConfig, run: Path, *, stop_at: int = 0, options: Options | None = None) -> set[str]:
    """Train until a step, or to the end; return the checkpoints' files that were mapped meanwhile."""
    stop = StopFlag()
    watch = Mapped(stop, stop_at=stop_at)
    train(config, run, stop=stop, watch=watch, options=options)
    return watch.seen


@pytest.mark.skipif(not MAPS.is_file(), reason="the system does not tell which files are mapped")
def test_a_resumed_run_keeps_no_file_of_its_checkpoint_open(text_file: Path, tmp_path: Path) -> None:
    sitting(tiny_config(text_file), tmp_path / "run", stop_at=6)
    assert steps_in(tmp_path / "run") == [5, 6]
    assert sitting(tiny_config(text_file), tmp_path / "run") == set()


def keep_open_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let files be open elsewhere, on NFS: a file is renamed when it is deleted, and its folder stays."""

    def stays(path: Any, ignore_errors: bool = False, **options: Any) -> None:
        files = sorted(Path(path).glob("*"))
        for number, file in enumerate(files):
            file.rename(file.with_name(f".nfs{number:04d}"))
        if not ignore_errors:
            raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), str(path))

    monkeypatch.setattr(shutil, "rmtree", stays)


@pytest.fixture
def like_nfs(monkeypatch: pytest.MonkeyPatch) -> None:
    keep_open_files(monkeypatch)


@pytest.fixture
def immovable(monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk on which no checkpoint that is there can be renamed or removed."""
    rename = os.rename

    def refuse(source: Any, target: Any, **options: Any) -> None:
        if Path(source).name.startswith("step-"):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(source))
        rename(source, target, **options)

    monkeypatch.setattr(os, "rename", refuse)


@pytest.mark.usefixtures("like_nfs")
def test_an_old_checkpoint_whose_files_are_open_elsewhere_does_not_end_the_run(text_file: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert run_here(tiny_config(text_file, save_every=2, eval_every=99, keep_checkpoints=2), run).status == "done"
    assert steps_in(run) == [10, 12]
    assert (run / "training.log").read_text().count("could not be deleted entirely") == 4


def test_what_stayed_of_a_removed_checkpoint_is_swept_at_the_next_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        keep_open_files(patched)
        checkpoints = Checkpoints(tmp_path, keep=2)
        for step in (1, 2, 3):
            publish(checkpoints, step)
        assert [path.name for path in (tmp_path / "checkpoints").glob(f"{STAGING_PREFIX}*")] != []
    sweep_staging(tmp_path / "checkpoints")
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["step-00000002", "step-00000003"]


@pytest.mark.usefixtures("immovable")
def test_an_old_checkpoint_that_cannot_be_removed_is_told_and_does_not_end_the_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoints = Checkpoints(tmp_path, keep=2)
    with caplog.at_level(logging.WARNING, "oelm"):
        for step in (1, 2, 3):
            publish(checkpoints, step)
    assert steps_in(tmp_path) == [1, 2, 3]
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "step-00000001: an old checkpoint cannot be removed" in caplog.text


@pytest.mark.usefixtures("like_nfs")
def test_a_state_that_was_given_up_is_not_gone_on_from_though_its_files_stay(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=9)
    for step in (1, 2, 3):
        publish(checkpoints, step)
    checkpoints.forget_after(1)
    newest = checkpoints.newest(exact_step=None)
    assert newest is not None and newest.saved.state.step == 1


def test_going_back_is_refused_where_a_later_state_cannot_be_removed(
    text_file: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    config, run = tiny_config(text_file, keep_checkpoints=9), tmp_path / "run"
    sitting(config, run, stop_at=10)
    request.getfixturevalue("immovable")
    with pytest.raises(CheckpointError, match=r"step-00000010 cannot be removed .* cannot go back to step 4: remove that"):
        sitting(config, run, options=Options(exact_step=4))
    assert steps_in(run) == [4, 5, 8, 10]


def pointed(run: Path, name: str) -> int | None:
    """Return the step that a pointer names, whose checkpoint must be there; None where there is no pointer."""
    if not (run / name).is_file():
        return None
    pointer = json.loads((run / name).read_text())
    assert (run / pointer["checkpoint"]).is_dir(), name
    return int(pointer["step"])


@pytest.mark.parametrize(("back_to", "best"), [(2, 2), (3, None), (1, None)], ids=["kept", "pruned since", "not yet"])
def test_an_older_state_has_the_best_it_had_or_none(back_to: int, best: int | None, tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=9)
    bests = {1: None, 2: 2, 3: 2, 4: 4}
    states = {step: publish(checkpoints, step, best=at) for step, at in bests.items()}
    if best is None:
        shutil.rmtree(tmp_path / "checkpoints" / "step-00000002")
    checkpoints.point(states[back_to])
    checkpoints.forget_after(back_to)
    assert (pointed(tmp_path, "latest.json"), pointed(tmp_path, "best.json")) == (back_to, best)


def test_going_back_to_a_step_points_to_it_before_a_later_one_goes(
    text_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, run = tiny_config(text_file, keep_checkpoints=9), tmp_path / "run"
    sitting(config, run, stop_at=10)
    assert (pointed(run, "latest.json"), pointed(run, "best.json")) == (10, 5)
    rmtree, seen = shutil.rmtree, []

    def noted(path: Any, *args: Any, **options: Any) -> None:
        if Path(path).is_dir():
            seen.append((pointed(run, "latest.json"), pointed(run, "best.json")))
        rmtree(path, *args, **options)

    monkeypatch.setattr(shutil, "rmtree", noted)
    sitting(config, run, stop_at=5, options=Options(exact_step=4))
    # Steps 5, 8 and 10 go; step 4 comes before the first evaluation.
    assert seen == [(4, None)] * 3
