"""Golden losses: a change meant to be neutral leaves them untouched, to the last bit on the CPUs they name.

Record again, after a change that is meant to matter or on another CPU, with OELM_RECORD_GOLDEN=1.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from oelm.files import write_json
from oelm.runs.metrics import read_metrics
from oelm.train.checkpoint import environment
from oelm.train.device import Compute
from tests.conftest import run_here, tiny_config

GOLDEN = Path(__file__).parents[1] / "golden" / "tiny-losses.json"
METHODS = ("baseline", "oelm_freeze", "oelm_random", "gaussian_matched", "oelm_global", "uniform", "oelm_lowrank", "oelm_axes")


@pytest.fixture(scope="module")
def golden() -> dict[str, Any]:
    """What was recorded, by the name of the CPU: the environment, and the losses of each method."""
    data: dict[str, Any] = json.loads(GOLDEN.read_text()) if GOLDEN.exists() else {}
    return data


@pytest.mark.parametrize("method", METHODS)
def test_losses_are_golden(method: str, golden: dict[str, Any], text_file: Path, tmp_path: Path) -> None:
    run_here(tiny_config(text_file, method=method), tmp_path / "run")
    losses: list[float] = [
        row["loss" if "loss" in row else "val_loss"] for row in read_metrics(tmp_path / "run" / "metrics.jsonl")
    ]
    here = environment(Compute("cpu", "float32", "test"))
    if os.environ.get("OELM_RECORD_GOLDEN"):
        golden.setdefault(here["cpu"], {"losses": {}})["environment"] = here
        golden[here["cpu"]]["losses"][method] = [loss.hex() for loss in losses]
        write_json(GOLDEN, golden)
    of_cpu = golden.get(here["cpu"], next(iter(golden.values())))
    # Settings added to the environment since would make every machine another one, and no bit would ever be compared.
    assert here.keys() == of_cpu["environment"].keys()
    recorded = [float.fromhex(text) for text in of_cpu["losses"][method]]
    if here == of_cpu["environment"]:
        assert losses == recorded
    else:
        # Elsewhere every product may round its last bit the other way. Twelve steps of Adam at a rate of 2e-3 turn a
        # sign flip of a vanishing gradient into at most 2 * 12 * 2e-3 on a weight whose gradient vanishes: second order.
        assert losses == pytest.approx(recorded, rel=2e-3)
