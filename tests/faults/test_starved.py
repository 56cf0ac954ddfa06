"""No room, no memory, NaN, two writers, damaged files: a clear refusal, and nothing lost."""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path
from typing import Any

import pytest

from oelm.train.status import read_status
from tests.conftest import tiny_settings
from tests.faults.harness import evidence, finish, leftovers, start


@pytest.fixture(scope="module")
def settings(text_file: Path) -> dict[str, Any]:
    return tiny_settings(text_file, steps=20, eval_every=10, save_every=4)


@pytest.fixture(scope="module")
def oracle(settings: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("oracle") / "run"
    finish(settings, out)
    return out


def test_full_disk_stops_resumable_and_loses_nothing(settings: dict[str, Any], oracle: Path, tmp_path: Path) -> None:
    run, told = tmp_path / "run", tmp_path / "told"
    # Enough for every small file and the weights, not for the optimizer's state beside them.
    weights = next(oracle.glob("checkpoints/*/model.safetensors")).stat().st_size
    child = start(settings, run, file_bytes=weights + 4096, told=str(told))
    child.join(timeout=60)
    status = read_status(run)
    assert child.exitcode == 75
    assert "no room to write" in told.read_text() and "bytes free" in told.read_text()
    assert status is not None and status.status == "stopped"
    assert leftovers(run) == []
    finish(settings, run)
    assert evidence(run) == evidence(oracle)


def test_out_of_memory_says_what_to_lower(settings: dict[str, Any], tmp_path: Path) -> None:
    told = tmp_path / "told"
    child = start(settings, tmp_path / "run", fault="no memory", told=str(told))
    child.join(timeout=60)
    assert child.exitcode == 3
    assert "lower micro_batch_size from 2 to 1" in told.read_text()


def test_nan_gradient_stops_before_the_update_and_names_the_batch(settings: dict[str, Any], tmp_path: Path) -> None:
    run, told = tmp_path / "run", tmp_path / "told"
    child = start({**settings, "save_every": 3}, run, fault="nan in one gradient", told=str(told))
    child.join(timeout=60)
    assert child.exitcode == 3
    # Two micro-batches a step: the seventh backward pass is the first of step 4.
    assert "step 4:" in told.read_text() and "The batch holds [" in told.read_text()
    assert json.loads((run / "latest.json").read_text())["step"] == 3
    assert "NaN" not in (run / "metrics.jsonl").read_text()
    # What failed by accident goes on where it was.
    finish({**settings, "save_every": 3}, run)


def test_only_one_of_two_processes_trains_and_a_third_takes_over_at_once(settings: dict[str, Any], tmp_path: Path) -> None:
    longer = {**settings, "steps": 400, "eval_every": 400}
    run, told = tmp_path / "run", tmp_path / "told"
    first = start(longer, run)
    while not (run / "status.json").exists():
        time.sleep(0.002)
    second = start(longer, run, told=str(told))
    second.join(timeout=60)
    assert second.exitcode == 3
    assert f"in use by process {first.pid} on " in told.read_text()
    first.kill()
    first.join()
    third = start(longer, run)
    deadline = time.monotonic() + 60
    while (status := read_status(run)) is None or status.pid != third.pid:
        assert third.is_alive() and time.monotonic() < deadline, "a stale lock is in the way"
        time.sleep(0.002)
    third.kill()
    third.join()


@pytest.mark.parametrize("number", range(5))
def test_of_processes_started_together_exactly_one_trains(number: int, settings: dict[str, Any], tmp_path: Path) -> None:
    longer = {**settings, "steps": 60, "eval_every": 60}
    children = [start(longer, tmp_path / "run") for _ in range(3)]
    for child in children:
        child.join(timeout=60)
    codes = sorted(child.exitcode or 0 for child in children)
    # A process that comes after the winner has finished finds the run done.
    assert codes[0] == 0 and set(codes) <= {0, 3}
    steps = [json.loads(line)["step"] for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert steps == [*range(1, 61), 60]


def _damage(folder: Path, kind: str) -> None:
    name, _, how = kind.partition(": ")
    path = folder / name
    raw = bytearray(path.read_bytes()) if path.is_file() else bytearray()
    match how.split():
        case ["cut", percent]:
            path.write_bytes(raw[: len(raw) * int(percent) // 100])
        case ["flip", percent]:
            raw[min(len(raw) - 1, len(raw) * int(percent) // 100)] ^= 4
            path.write_bytes(raw)
        case ["missing"]:
            path.unlink()
        case ["garbage"]:
            path.write_text("{not json")
        case _:
            for file in folder.iterdir():
                file.unlink()


FILES = ("model.safetensors", "optimizer.safetensors", "state.json", "manifest.json")
DAMAGE = [
    f"{name}: {how}" for name in FILES for how in ("cut 0", "cut 50", "cut 99", "flip 0", "flip 50", "flip 100", "missing")
]
DAMAGE += ["manifest.json: garbage", "empty directory"]


@pytest.mark.parametrize("kind", DAMAGE)
def test_damaged_checkpoint_is_never_loaded(kind: str, oracle: Path, tmp_path: Path) -> None:
    from oelm.errors import CheckpointError
    from oelm.train.checkpoint import Checkpoints, open_checkpoint

    run = tmp_path / "run"
    shutil.copytree(oracle, run)
    newest, older = sorted(run.glob("checkpoints/step-*"))[::-1]
    _damage(newest, kind)
    with pytest.raises(CheckpointError, match=newest.name):
        open_checkpoint(newest)
    fallback = Checkpoints(run, keep=2).newest(exact_step=None)
    assert fallback is not None and fallback.path == older
    with pytest.raises(CheckpointError, match=newest.name):
        Checkpoints(run, keep=2).newest(exact_step=20)


def test_run_with_a_damaged_checkpoint_goes_back_and_ends_the_same(
    settings: dict[str, Any], oracle: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    shutil.copytree(oracle, run)
    _damage(run / "checkpoints" / "step-00000020", "model.safetensors: flip 50")
    status = json.loads((run / "status.json").read_text())
    (run / "status.json").write_text(json.dumps(status | {"status": "running", "step": 20}))
    finish(settings, run)
    assert evidence(run) == evidence(oracle)
    assert "damaged; going back to step 16" in (run / "training.log").read_text()


def test_run_whose_every_checkpoint_is_damaged_is_refused(settings: dict[str, Any], oracle: Path, tmp_path: Path) -> None:
    run, told = tmp_path / "run", tmp_path / "told"
    shutil.copytree(oracle, run)
    for checkpoint in run.glob("checkpoints/step-*"):
        _damage(checkpoint, "state.json: missing")
    (run / "status.json").unlink()
    child = start(settings, run, told=str(told))
    child.join(timeout=60)
    assert child.exitcode == 3
    assert "no checkpoint of" in told.read_text() and "Move the folder aside" in told.read_text()


def test_resume_on_other_data_is_refused(settings: dict[str, Any], tmp_path: Path, text_file: Path) -> None:
    text, run, told = tmp_path / "text.txt", tmp_path / "run", tmp_path / "told"
    text.write_text(text_file.read_text())
    mine = {**settings, "data": {**settings["data"], "source": str(text)}}
    finish(mine, run)
    text.write_text(text_file.read_text().replace("cat", "dog"))
    (run / "status.json").unlink()
    child = start(mine, run, told=str(told))
    child.join(timeout=60)
    assert child.exitcode == 3
    assert "the data is not what this run began with" in told.read_text()


def test_other_thread_count_warns_and_strict_refuses(settings: dict[str, Any], oracle: Path, tmp_path: Path) -> None:
    run, told = tmp_path / "run", tmp_path / "told"
    shutil.copytree(oracle, run)
    shutil.rmtree(run / "checkpoints" / "step-00000020")
    (run / "status.json").unlink()
    strict = start(settings, run, threads=2, strict=True, told=str(told))
    strict.join(timeout=60)
    assert strict.exitcode == 3 and "threads was 1, is 2" in told.read_text()
    finish(settings, run, threads=2)
    assert "not the same bits as an undisturbed run: threads was 1, is 2" in (run / "training.log").read_text()
