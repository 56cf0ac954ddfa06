"""One of two processes that train every tiny model together: `python -m tests.method.ddp_worker RANK FOLDER`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from tests.method.tiny_models import ARCHITECTURES, Tiny, loss, tiny_inputs, tiny_model

# Of each kind one: separate maps, fused ones, grouped keys, ours.
SLICED = ("bert", "gpt2", "gpt_neox", "llama", "our_gpt")


def run_pair(folder: Path, *, cwd: Path) -> list[list[str]]:
    """Run both processes and return what each one finished; raise with their own words when one failed."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    commands = [[sys.executable, "-m", "tests.method.ddp_worker", str(rank), str(folder)] for rank in (0, 1)]
    pair = [
        subprocess.Popen(command, cwd=cwd, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for command in commands
    ]
    try:
        said = [process.communicate(timeout=300) for process in pair]
    finally:
        for process in pair:
            process.kill()
    for process, (_, errors) in zip(pair, said, strict=True):
        assert process.returncode == 0, errors
    return [json.loads(out.splitlines()[-1]) for out, _ in said]


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


def main() -> None:
    rank, folder = int(sys.argv[1]), Path(sys.argv[2])
    torch.set_num_threads(1)
    meeting = f"file://{folder / 'meeting'}"
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=2, timeout=timedelta(seconds=120))
    finished = []
    for tiny in ARCHITECTURES:
        for method in ("oelm_freeze", *(("oelm_axes_lowrank",) if tiny.name in SLICED else ())):
            _train(tiny, rank, method)
        finished.append(tiny.name)
    dist.barrier()
    print(json.dumps(finished), flush=True)
    # Not through the interpreter's end: on a busy machine gloo's threads may then outlive what they belong to, and abort.
    os._exit(0)


if __name__ == "__main__":
    main()
