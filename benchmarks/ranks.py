"""Medium-512 training steps, batch 8 x 512: two processes of one thread each against one process of two threads.

Interleaved: all processes are there from the first to the last, and take turns at whole steps of the product's own path,
the sum of gradients by gloo included. A ratio with its 95% interval, and the bytes summed a step with and without freezing.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator

import torch

from oelm.bench.ab import interleave
from oelm.experiments.budget import budget_settings
from oelm.intervals import mean_ratio
from oelm.method.apply import freeze
from oelm.models.gpt import build_gpt
from oelm.train.config import RunConfig, parse_config, with_overrides
from oelm.train.dist import World, joined
from oelm.train.loss import mean_cross_entropy
from oelm.train.optim import build_optimizer
from oelm.train.step import train_step

SMALL = {"model.seq_len": 32, "model.model_dim": 32, "model.num_layers": 2, "model.num_heads": 2, "model.ff_dim": 64}


def config_of(method: str, *, small: bool) -> RunConfig:
    changes = {"method": method, "model.dropout": 0.0, "model.vocab_size": 50257}
    return parse_config(with_overrides(budget_settings("paper"), changes | (SMALL if small else {})), where="benchmark")


def stepper(config: RunConfig, world: World) -> Callable[[], None]:
    """Return one whole training step of this process: its share of the batch, the sum of gradients, clipping, AdamW."""
    model = build_gpt(config.model, seed=0)
    freeze(model, config.method)
    optimizer = build_optimizer(model, config.optim, device="cpu")
    forward = world.wrap(model)
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    size = world.micro_batch_size(config.batch_size, config.micro_batch_size)
    generator = torch.Generator().manual_seed(0)
    windows = torch.randint(config.model.vocab_size, (config.batch_size, config.model.seq_len + 1), generator=generator)

    def loss(part: int) -> torch.Tensor:
        rows = windows[part * size : (part + 1) * size]
        return mean_cross_entropy(forward(rows[:, :-1]).flatten(0, 1), model.head_VD, rows[:, 1:].flatten())

    def step() -> None:
        train_step(
            loss,
            model,
            optimizer,
            scaler,
            num_micro_batches=config.batch_size // size,
            clip_norm=config.optim.clip_norm,
            noise_seed=0,
            batch_ids=[],
            step=0,
            world=world,
            forward=forward,
        )

    return step


def work(method: str, *, small: bool) -> None:
    """Be one process: a step for every line that is read, its bytes for an answer."""
    with joined("cpu") as world:
        step = stepper(config_of(method, small=small), world)
        print("ready", flush=True)
        for _ in sys.stdin:
            step()
            print(world.step_bytes, flush=True)
    os._exit(0)


@contextlib.contextmanager
def contender(method: str, processes: int, *, threads: int, small: bool) -> Iterator[Callable[[], int]]:
    """Start a contender's processes; yield what makes all of them take a step and returns the bytes they summed."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(processes)}
    command = [sys.executable, __file__, "--worker", method, *(["--small"] if small else [])]
    children = [
        subprocess.Popen(
            command,
            env={
                **os.environ,
                **place,
                "RANK": str(rank),
                "OMP_NUM_THREADS": str(threads),
                "MKL_NUM_THREADS": str(threads),
                "GOMP_SPINCOUNT": "1000",
            },
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(processes)
    ]

    def answers() -> list[str]:
        return [child.stdout.readline().strip() for child in children if child.stdout is not None]

    def step() -> int:
        for child in children:
            assert child.stdin is not None
            child.stdin.write("step\n")
            child.stdin.flush()
        return int(answers()[0])

    try:
        assert answers() == ["ready"] * processes
        yield step
    finally:
        for child in children:
            child.kill()
            child.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--method", default="oelm_freeze")
    parser.add_argument("--small", action="store_true", help="a toy shape, to see that the benchmark itself works")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        work(arguments.worker, small=arguments.small)
    names = ("one process, 2 threads", "two processes, 1 thread each")
    with (
        contender(arguments.method, 1, threads=2, small=arguments.small) as one,
        contender(arguments.method, 2, threads=1, small=arguments.small) as two,
    ):
        seconds = interleave({names[0]: one, names[1]: two}, rounds=arguments.rounds, warmup=1)
        frozen_bytes = two()
    with contender("baseline", 2, threads=1, small=arguments.small) as whole:
        whole_bytes = whole()
    shape = "toy shape" if arguments.small else "Medium-512, batch 8 x 512"
    print(f"{shape}, {arguments.method}, {arguments.rounds} interleaved rounds")
    for name in names:
        print(f"  {name:30} {sorted(seconds[name])[len(seconds[name]) // 2]:7.3f} s a step (median)")
    print(f"  two processes have {mean_ratio(seconds[names[0]], seconds[names[1]])} the throughput of one")
    config = config_of(arguments.method, small=arguments.small)
    model = build_gpt(config.model, seed=0)
    freeze(model, config.method)
    frozen = sum(parameter.nbytes for parameter in model.parameters() if not parameter.requires_grad)
    print(
        f"  bytes of gradients summed a step: {whole_bytes:,} with nothing frozen, {frozen_bytes:,} with {arguments.method}: "
        f"{whole_bytes - frozen_bytes:,} less, and {frozen:,} bytes are frozen"
    )


if __name__ == "__main__":
    main()
