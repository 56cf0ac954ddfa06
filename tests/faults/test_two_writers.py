"""A run whose folder is removed, renamed or replaced under it: it stops, and writes nothing into what is there now."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import pytest

from oelm.errors import STOPPED
from oelm.files import sha256_file
from tests.conftest import tiny_settings
from tests.faults.harness import evidence, finish, rows, start, wait_for
from tests.faults.tally import Tally

Start = Callable[..., ForkServerProcess]
# What a process does while its folder is replaced: train, evaluate, or save, with its staging begun and not yet renamed.
PHASES: dict[str, dict[str, Any]] = {
    "stopped by SIGSTOP in a step": {},
    "in a step": {"rest_in": "step", "rest_at": 5},
    "in an evaluation": {"rest_in": "evaluation", "rest_at": 6},
    "in the last evaluation": {"rest_in": "final evaluation"},
    "in a save": {"rest_in": "save"},
}
SLOW = ("in a step", "in an evaluation")


@pytest.fixture(scope="module")
def text(text_file: Path) -> Callable[[int], dict[str, Any]]:
    return lambda seed: tiny_settings(text_file, seed=seed, steps=12, save_every=4, eval_every=6, keep_checkpoints=9)


@pytest.fixture(scope="module")
def oracle(text: Callable[[int], dict[str, Any]], tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], dict[str, Any]]:
    folder = tmp_path_factory.mktemp("oracles")
    for seed in (0, 1):
        finish(text(seed), folder / str(seed))
    return lambda seed: evidence(folder / str(seed))


@pytest.fixture
def started() -> Iterator[Start]:
    children: list[ForkServerProcess] = []

    def begin(config: dict[str, Any], run: Path, **settings: Any) -> ForkServerProcess:
        children.append(start(config, run, **settings))
        return children[-1]

    yield begin
    for child in children:
        child.kill()
        child.join()


def files(folder: Path) -> dict[str, str]:
    return {str(path.relative_to(folder)): sha256_file(path) for path in sorted(folder.rglob("*")) if path.is_file()}


def rest(child: ForkServerProcess) -> None:
    assert child.pid is not None
    os.kill(child.pid, signal.SIGSTOP)
    state = Path(f"/proc/{child.pid}/stat")
    wait_for(lambda: state.read_text().rpartition(")")[2].split()[0] == "T", child)


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="the system does not tell when a process is stopped")
@pytest.mark.parametrize("phase", [pytest.param(name, marks=[pytest.mark.slow] if name in SLOW else []) for name in PHASES])
def test_a_run_whose_folder_became_anothers_stops_and_leaves_that_one_alone(
    phase: str, text: Callable[[int], Any], oracle: Callable[[int], Any], started: Start, tmp_path: Path, tally: Tally
) -> None:
    run, told, sign, held = (tmp_path / name for name in ("run", "told", "sign", "held"))
    settings = {**PHASES[phase], "told": str(told)}
    if "rest_in" in settings:
        settings |= {"phase": str(sign), "rest_while": str(held)}
    first = started(text(0), run, **settings)
    wait_for(sign.exists if "rest_in" in settings else lambda: rows(run) > 2, first)
    rest(first)
    shutil.rmtree(run)
    second = started(text(1), run, rest_in="step", rest_at=5, phase=str(tmp_path / "two"), rest_while=str(tmp_path / "hold"))
    wait_for((tmp_path / "two").exists, second)
    rest(second)
    theirs = files(run)
    held.unlink(missing_ok=True)
    os.kill(first.pid or 0, signal.SIGCONT)
    first.join(timeout=60)
    assert first.exitcode == STOPPED
    assert "removed, renamed or replaced" in told.read_text()
    assert files(run) == theirs
    (tmp_path / "hold").unlink()
    os.kill(second.pid or 0, signal.SIGCONT)
    second.join(timeout=60)
    assert second.exitcode == 0 and evidence(run) == oracle(1)
    tally("R7", "a run's folder removed and begun again by another while it is stopped", held=1, of=1)


def test_a_run_whose_folder_is_renamed_stops_there_and_goes_on_under_the_new_name(
    text: Callable[[int], Any], oracle: Callable[[int], Any], started: Start, tmp_path: Path, tally: Tally
) -> None:
    run, told, moved = tmp_path / "run", tmp_path / "told", tmp_path / "moved"
    sign, held = tmp_path / "sign", tmp_path / "held"
    child = started(text(0), run, told=str(told), rest_in="step", rest_at=5, phase=str(sign), rest_while=str(held))
    wait_for(sign.exists, child)
    run.rename(moved)
    held.unlink()
    child.join(timeout=60)
    assert child.exitcode == STOPPED and not run.exists()
    assert "removed, renamed or replaced" in told.read_text()
    assert json.loads((moved / "status.json").read_text())["status"] == "running"
    finish(text(0), moved)
    assert evidence(moved) == oracle(0)
    tally("R7", "a live run's folder renamed", held=1, of=1)
