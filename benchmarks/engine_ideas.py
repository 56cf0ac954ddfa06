"""Two ideas for the engine, measured: `torch.compile` on a CPU, and attention with dropout computed block by block.

python benchmarks/engine_ideas.py [--record]      # results/probes/engine-ideas.json, shown in docs/log.md

Compiling is paid once per process: the second figure of its seconds is a process that finds the first one's cache.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from oelm.bench.interleave import against, interleave, shape_config, training_step
from oelm.models.gpt import attend_by_blocks

RECORD = Path(__file__).resolve().parent.parent / "results" / "probes" / "engine-ideas.json"
ROUNDS = {"laptop": 60, "512": 12}
DROPOUT = 0.1


def compiled(shape: str) -> dict[str, Any]:
    """Time the baseline's step as it is and compiled; the compiled one's first call is left out of the ratio."""
    config = shape_config(shape, "baseline")
    steps = {"eager": training_step(config), "compiled": training_step(config.model_copy(update={"compile": True}))}
    timed = against("eager", interleave(steps, rounds=ROUNDS[shape]))
    saved_s = timed["eager"].median_s - timed["compiled"].median_s
    first_s = _first_calls(shape)
    # What a run of many steps must gain to earn the warm start back.
    steps_to_pay = round(first_s[1] / saved_s) if saved_s > 0 else None
    return {"ratio": asdict(timed["compiled"].ratio), "first_call_s": first_s, "steps_to_pay": steps_to_pay}


def _first_calls(shape: str) -> list[float]:
    """Return the seconds of the first compiled step in a process without a cache, and in the next one with it."""
    with tempfile.TemporaryDirectory() as cache:
        environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": cache}
        command = [sys.executable, __file__, "--first-call", shape]
        return [float(subprocess.run(command, env=environment, check=True, capture_output=True).stdout) for _ in range(2)]


def dropped(shape: str) -> dict[str, Any]:
    """Time attention with dropout alone, forward and backward: PyTorch's against blocks."""
    model = shape_config(shape, "baseline").model
    generator = torch.Generator().manual_seed(0)
    size = (8, model.num_heads, model.seq_len, model.head_dim)
    inputs = [torch.randn(size, generator=generator).requires_grad_() for _ in range(3)]

    def timed_once(attend: Callable[..., Tensor]) -> Callable[[], None]:
        return lambda: attend(*inputs).sum().backward()

    def sdpa(q_BHTK: Tensor, k_BHTK: Tensor, v_BHTK: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q_BHTK, k_BHTK, v_BHTK, dropout_p=DROPOUT, is_causal=True)

    attends: Mapping[str, Callable[[], None]] = {
        "sdpa": timed_once(sdpa),
        "blocks": timed_once(partial(attend_by_blocks, dropout=DROPOUT)),
    }
    timed = against("sdpa", interleave(attends, rounds=20))
    return {"ratio": asdict(timed["blocks"].ratio), "sdpa_ms": 1000 * timed["sdpa"].median_s}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", action="store_true", help="keep the figures under results/probes")
    parser.add_argument("--first-call", choices=ROUNDS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.first_call:
        step = training_step(shape_config(options.first_call, "baseline").model_copy(update={"compile": True}))
        started = time.perf_counter()
        step()
        print(time.perf_counter() - started)
        return
    figures = {"compile": {shape: compiled(shape) for shape in ROUNDS}, "dropout": {s: dropped(s) for s in ("512", "medium")}}
    print(json.dumps(figures, indent=2))
    if options.record:
        RECORD.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
