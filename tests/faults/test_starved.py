"""No room, no memory, NaN, two writers, damaged files: a clear refusal, and nothing lost."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from oelm.files import sha256_file
from oelm.runs.status import read_status
from oelm.train.checkpoint import open_checkpoint
from tests.conftest import tiny_settings
from tests.faults.harness import NOT_FINITE, evidence, finish, leftovers, start, wait_for
from tests.faults.tally import Tally


@pytest.fixture(scope="module")
def settings(text_file: Path) -> dict[str, Any]:
    return tiny_settings(text_file, steps=20, eval_every=10, save_every=4)


@pytest.fixture(scope="module")
def oracle(settings: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("oracle") / "run"
    finish(settings, out)
    return out


def test_file_size_limit_stops_resumable_and_loses_nothing(
    settings: dict[str, Any], oracle: Path, tmp_path: Path, tally: Tally
) -> None:
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
    tally("R4", "saves beyond a limit on a file's size", held=1, of=1)


@contextlib.contextmanager
def small_disk(folder: Path, size_bytes: int, *, files: int = 0) -> Iterator[Path]:
    """Yield a disk of its own of this size, for so many files, in memory; skip where this user may not make one."""
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={size_bytes},nr_inodes={files}", "tmpfs", str(folder)]
    if os.geteuid() != 0 or shutil.which("mount") is None or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("a disk of one's own takes root and the right to mount")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.parametrize(
    "left", [0, pytest.param(20_000, marks=pytest.mark.slow), pytest.param(200_000, marks=pytest.mark.slow)]
)
def test_full_disk_stops_resumable_and_loses_nothing(
    left: int, settings: dict[str, Any], oracle: Path, tmp_path: Path, tally: Tally
) -> None:
    told, sign = tmp_path / "told", tmp_path / "resting"
    with small_disk(tmp_path / "disk", 16 * 2**20) as disk:
        run, filler = disk / "run", disk / "filler"
        child = start(
            settings, run, told=str(told), rest_in="step", rest_at=9, phase=str(sign), rest_while=str(filler) + ".not"
        )
        wait_for(sign.exists, child)
        # Somebody else fills the disk but for `left` bytes, between the second save and the third.
        room = shutil.disk_usage(disk).free - left
        filler.write_bytes(bytes(room))
        (disk / "filler.not").unlink()
        child.join(timeout=60)
        assert child.exitcode == 75, told.read_text() if told.exists() else ""
        assert re.search(rf"no room to write {re.escape(str(run))}/\S+ .*[\d,]+ bytes free", told.read_text())
        assert "repeat the same command" in told.read_text()
        assert leftovers(run) == []
        assert open_checkpoint(run / "checkpoints" / "step-00000008").saved.state.step == 8
        filler.unlink()
        finish(settings, run)
        assert evidence(run) == evidence(oracle)
    tally("R4", "disks that were filled between two saves", held=1, of=1)


def test_out_of_memory_says_what_to_lower(settings: dict[str, Any], tmp_path: Path) -> None:
    told = tmp_path / "told"
    child = start(settings, tmp_path / "run", fault="no memory", told=str(told))
    child.join(timeout=60)
    assert child.exitcode == 3
    assert "lower micro_batch_size from 2 to 1" in told.read_text()


@pytest.mark.parametrize("fault", [NOT_FINITE[0], *(pytest.param(name, marks=pytest.mark.slow) for name in NOT_FINITE[1:])])
def test_what_is_not_finite_stops_before_the_update_and_names_the_batch(
    fault: str, settings: dict[str, Any], tmp_path: Path, tally: Tally
) -> None:
    run, told, config = tmp_path / "run", tmp_path / "told", {**settings, "save_every": 3}
    good = start(config, tmp_path / "good", die_at=4)
    good.join(timeout=60)
    child = start(config, run, fault=fault, told=str(told))
    child.join(timeout=60)
    assert child.exitcode == 3
    # Two micro-batches a step: the seventh is the first of step 4.
    assert re.search(r"step 4: loss \S+, gradient norm \S+: stopped before the update", told.read_text())
    assert re.search(r"The batch holds \[\d+(, \d+){3}\]", told.read_text())
    # The newest checkpoint is that of step 3, whole.
    assert json.loads((run / "latest.json").read_text())["step"] == 3
    checkpoints = [folder / "checkpoints" / "step-00000003" / "model.safetensors" for folder in (run, tmp_path / "good")]
    assert sha256_file(checkpoints[0]) == sha256_file(checkpoints[1])
    assert not any(word in (run / "metrics.jsonl").read_text() for word in ("NaN", "Infinity"))
    # What failed by accident goes on where it was.
    finish(config, run)
    tally("R9", "losses and gradients that are not finite", held=1, of=1)


@pytest.mark.parametrize("number", [0, *(pytest.param(number, marks=pytest.mark.slow) for number in range(1, 5))])
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
