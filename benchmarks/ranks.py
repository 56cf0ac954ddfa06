"""Medium-512 training steps, batch 8 x 512: two processes of one thread each against one process of two threads.

Interleaved: all processes start first and then take turns at complete training steps, including the sum of gradients by
gloo. Prints a ratio with its 95% interval, and the bytes summed per step with and without freezing.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator

from record import keep, parse_options

from oelm.bench.interleave import interleave, training_step
from oelm.budget import budget_settings
from oelm.config import RunConfig, parse_config, with_overrides
from oelm.stats import Ratio, mean_ratio
from oelm.train.device import parameter_counts
from oelm.train.dist import joined

# Of each contender, over all its processes.
THREADS = 2
SMALL = {"model.seq_len": 32, "model.model_dim": 32, "model.num_layers": 2, "model.num_heads": 2, "model.ff_dim": 64}


def config_of(method: str, *, small: bool) -> RunConfig:
    changes = {"method": method, "model.dropout": 0.0, "model.vocab_size": 50257}
    return parse_config(with_overrides(budget_settings("paper"), changes | (SMALL if small else {})), where="benchmark")


def work(method: str, *, small: bool) -> None:
    """Run one process: take a step for every input line, and print its bytes."""
    with joined("cpu") as world:
        step = training_step(config_of(method, small=small), world=world)
        print("ready", flush=True)
        for _ in sys.stdin:
            step()
            print(world.step_bytes, flush=True)
    os._exit(0)


@contextlib.contextmanager
def contender(method: str, processes: int, *, threads: int, small: bool) -> Iterator[Callable[[], int]]:
    """Start a contender's processes; yield a function that lets all take a step and returns the bytes they summed."""
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
    measured = [
        parser.add_argument("--method", default="oelm_freeze"),
        parser.add_argument("--small", action="store_true", help="a toy shape: a smoke test of the benchmark"),
    ]
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    arguments = parse_options(parser, measured=measured)
    if arguments.worker:
        work(arguments.worker, small=arguments.small)
    names = ("one process, 2 threads", "two processes, 1 thread each")
    with (
        contender(arguments.method, 1, threads=THREADS, small=arguments.small) as one,
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
    ratio = mean_ratio(seconds[names[0]], seconds[names[1]])
    print(f"  two processes have {ratio} the throughput of one")
    config = config_of(arguments.method, small=arguments.small)
    total, trainable = parameter_counts(config)
    frozen = 4 * (total - trainable)
    print(
        f"  bytes of gradients summed a step: {whole_bytes:,} with nothing frozen, {frozen_bytes:,} with {arguments.method}: "
        f"{whole_bytes - frozen_bytes:,} less, and {frozen:,} bytes are frozen"
    )
    if arguments.record:
        figures: dict[str, Ratio | float] = {"two": ratio, "saved": (whole_bytes - frozen_bytes) / whole_bytes}
        keep("ranks", figures, rounds=arguments.rounds, threads=THREADS)


if __name__ == "__main__":
    main()
