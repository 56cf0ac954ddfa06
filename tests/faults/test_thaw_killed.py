"""A run whose queries and keys thaw on the way, killed around the thaw: frozen to the very step, and the same bits after."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from tests.conftest import tiny_settings
from tests.faults.harness import evidence, finish, start
from tests.faults.tally import Tally

STEPS = 20
# Two layers: the last thaws at 0.5, the first at 0.8.
THAWS = {1: 10, 0: 16}


@pytest.fixture(scope="module")
def settings(text_file: Path) -> dict[str, Any]:
    method = {"init": "orthogonal", "freeze": ["q", "k"], "thaw": {"start": 0.5, "end": 0.8, "order": "last_first"}}
    return tiny_settings(text_file, steps=STEPS, eval_every=99, save_every=1, keep_checkpoints=99, method=method)


@pytest.fixture(scope="module")
def oracle(settings: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("oracle") / "run"
    finish(settings, out)
    return out


def test_frozen_bytes_stay_to_the_very_step_of_their_thaw(oracle: Path, tally: Tally) -> None:
    tensors = [load_file(oracle / "checkpoints" / f"step-{step:08d}" / "model.safetensors") for step in range(1, STEPS + 1)]
    for layer, thaws in THAWS.items():
        for part in ("q", "k"):
            name = f"blocks.{layer}.attention.{part}.weight"
            moved = [step + 1 for step in range(1, STEPS) if not tensors[step - 1][name].equal(tensors[step][name])]
            assert moved == list(range(thaws + 1, STEPS + 1)), name
            recorded = [
                json.loads((oracle / "checkpoints" / f"step-{step:08d}" / "state.json").read_text())["frozen"].get(name)
                for step in (1, thaws, thaws + 1)
            ]
            assert recorded[0] == recorded[1] and recorded[0] is not None and recorded[2] is None
    tally("R13", "frozen tensors unmoved to the step of their thaw", held=4, of=4)


@pytest.mark.parametrize("kills", [(10,), pytest.param((9, 11, 16, 17), marks=pytest.mark.slow)], ids=str)
def test_run_killed_around_its_thaws_continues_bit_for_bit(
    kills: tuple[int, ...], settings: dict[str, Any], oracle: Path, tmp_path: Path, tally: Tally
) -> None:
    run = tmp_path / "run"
    for step in kills:
        child = start(settings, run, die_at=step)
        child.join(timeout=120)
        assert child.exitcode == -signal.SIGKILL
    finish(settings, run)
    assert evidence(run) == evidence(oracle)
    tally("R13", "kills around a thaw", held=len(kills), of=len(kills))
