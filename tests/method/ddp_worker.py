"""Two processes that train tiny models together, forked from the server that has torch loaded."""

from __future__ import annotations

import json
import multiprocessing as mp
import os
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import tests.faults.harness  # noqa: F401  what it has the server load is enough here
from tests.method.tiny_models import BY_NAME, Tiny, loss, tiny_inputs, tiny_model

SERVER = mp.get_context("forkserver")
# Of each kind one: separate maps, fused ones, grouped keys, ours.
SLICED = ("bert", "gpt2", "gpt_neox", "llama", "our_gpt")


def run_pair(folder: Path, names: Sequence[str]) -> list[list[str]]:
    """Train on two processes and return what each one finished; a failed one says why on standard error."""
    pair = [SERVER.Process(target=_trained, args=(rank, folder, names)) for rank in (0, 1)]
    for process in pair:
        process.start()
    try:
        for process in pair:
            process.join(timeout=300)
        assert [process.exitcode for process in pair] == [0, 0]
    finally:
        for process in pair:
            process.kill()
    return [json.loads((folder / f"finished-{rank}.json").read_text()) for rank in (0, 1)]


def _train(tiny: Tiny, rank: int, method: str) -> None:
    import oelm

    model = tiny_model(tiny)
    oelm.freeze(model, method)
    # As docs/method.md says of slices, whose coordinates are buffers.
    together = DistributedDataParallel(model, broadcast_buffers=method == "oelm_freeze")
    for change in (lambda: oelm.thaw(together), lambda: oelm.freeze(together, "baseline")):
        try:
            change()
        except oelm.OelmError as refusal:
            assert "then wrap it again" in str(refusal)
        else:
            raise AssertionError("a model inside DistributedDataParallel was changed")
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, weight_decay=0.1)
    for step in range(2):
        optimizer.zero_grad()
        loss(together, tiny_inputs(tiny, seed=2 * step + rank)).backward()
        optimizer.step()
    oelm.assert_unmoved(together)
    for name, parameter in model.named_parameters():
        others = parameter.detach().clone()
        dist.broadcast(others, src=0)
        assert torch.equal(parameter, others), f"{tiny.name}: {name} differs between the processes"
        assert (parameter.grad is not None) == parameter.requires_grad, f"{tiny.name}: {name}"


def _trained(rank: int, folder: Path, names: Sequence[str]) -> None:
    torch.set_num_threads(1)
    meeting = f"file://{folder / 'meeting'}"
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=2, timeout=timedelta(seconds=120))
    finished = []
    for name in names:
        for method in ("oelm_freeze", *(("oelm_axes_lowrank",) if name in SLICED else ())):
            _train(BY_NAME[name], rank, method)
        finished.append(name)
    dist.barrier()
    (folder / f"finished-{rank}.json").write_text(json.dumps(finished))
    # Not through the interpreter's end: on a busy machine gloo's threads may then outlive what they belong to, and abort.
    os._exit(0)
