"""Runs in other precisions and compiled: the same promises hold."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from oelm.errors import ConfigError
from oelm.process import StopFlag
from oelm.runs.metrics import read_metrics
from oelm.train.checkpoint import load_tensors
from oelm.train.watch import Silence, StepReport
from tests.conftest import run_here, tiny_config


def losses(run: Path) -> list[float]:
    return [row["loss"] for row in read_metrics(run / "metrics.jsonl") if "loss" in row]


def final_weights(run: Path) -> dict[str, torch.Tensor]:
    return load_tensors(run / json.loads((run / "latest.json").read_text())["checkpoint"] / "model.safetensors")


def test_bf16_trains_in_mixed_precision_with_float32_weights(text_file: Path, tmp_path: Path) -> None:
    for precision in ("float32", "bf16"):
        run_here(tiny_config(text_file, precision=precision, model__dropout=0.0), tmp_path / precision)
    assert all(tensor.dtype == torch.float32 for tensor in final_weights(tmp_path / "bf16").values())
    one, other = losses(tmp_path / "float32"), losses(tmp_path / "bf16")
    # bfloat16 keeps 8 bits: relative errors of 2^-8 a product on losses near 6, partly averaged over tokens.
    assert one != other and one == pytest.approx(other, rel=2**-7)


def test_fp16_on_a_cpu_is_refused_with_the_way_on(text_file: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="use 'auto' or 'float32' on a CPU"):
        run_here(tiny_config(text_file, precision="fp16", device="cpu"), tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None and shutil.which("c++") is None, reason="torch.compile needs a C++ compiler")
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning", "ignore::FutureWarning")
def test_compiled_run_stops_and_continues_to_its_own_bits(text_file: Path, tmp_path: Path) -> None:
    class Halfway(Silence):
        """Asks for a stop after six steps."""

        def __init__(self, stop: StopFlag) -> None:
            self.stop = stop

        def on_step(self, report: StepReport) -> None:
            if report.step == 6:
                self.stop.request("test")

    from oelm.train.run import train

    compiled = tiny_config(text_file, compile=True, model__dropout=0.0)
    run_here(compiled, tmp_path / "whole")
    stop = StopFlag()
    assert train(compiled, tmp_path / "halves", stop=stop, watch=Halfway(stop)).status == "stopped"
    run_here(compiled, tmp_path / "halves")
    assert losses(tmp_path / "whole") == losses(tmp_path / "halves")
    run_here(tiny_config(text_file, model__dropout=0.0), tmp_path / "eager")
    # Fused kernels round elsewhere: some float32 roundings on losses near 6, amplified over twelve steps of Adam.
    assert losses(tmp_path / "whole") == pytest.approx(losses(tmp_path / "eager"), rel=1e-4)
