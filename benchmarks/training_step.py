"""Medium-512 training steps side by side: ours, ours frozen, and transformers' GPT2LMHeadModel of the same shape.

Time: interleaved in one process on the same batch, as ratios with 95% intervals. Memory: each contender alone in a
child process, as the growth of its peak resident set over its imports (needs Linux).
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable

import torch
from record import keep, parse_options

from oelm.bench.ab import interleave
from oelm.bench.peak import PeakMeter
from oelm.intervals import Ratio, mean_ratio
from oelm.method.apply import freeze
from oelm.models.flops import step_work
from oelm.models.gpt import GPT, GPTConfig, build_gpt
from oelm.train.loss import mean_cross_entropy

CONTENDERS = ("ours baseline", "ours oelm_freeze", "transformers")


def shape(dropout: float, small: bool) -> GPTConfig:
    if small:
        return GPTConfig(vocab_size=512, seq_len=32, model_dim=32, num_layers=2, num_heads=2, ff_dim=64, dropout=dropout)
    return GPTConfig(vocab_size=50257, seq_len=512, model_dim=512, num_layers=6, num_heads=8, ff_dim=2048, dropout=dropout)


def fixed_windows(config: GPTConfig, batch_size: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(config.vocab_size, (batch_size, config.seq_len + 1), generator=generator)


def updater(model: torch.nn.Module, loss: Callable[[], torch.Tensor]) -> Callable[[], None]:
    """Return one whole training step: loss, gradients, clipping, fused AdamW; the same for every contender."""
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trainable, lr=3e-4, weight_decay=0.01, fused=True)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        loss().backward()
        torch.nn.utils.clip_grad_norm_(trainable, 1.0)
        optimizer.step()

    return step


def ours(config: GPTConfig, windows: torch.Tensor, method: str) -> Callable[[], None]:
    model: GPT = build_gpt(config, seed=0)
    freeze(model, method)

    def loss() -> torch.Tensor:
        return mean_cross_entropy(model(windows[:, :-1]).flatten(0, 1), model.head_VD, windows[:, 1:].flatten())

    return updater(model, loss)


def theirs(config: GPTConfig, windows: torch.Tensor) -> Callable[[], None]:
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=config.vocab_size,
            n_positions=config.seq_len + 1,
            n_embd=config.model_dim,
            n_layer=config.num_layers,
            n_head=config.num_heads,
            n_inner=config.ff_dim,
            activation_function="gelu",
            resid_pdrop=config.dropout,
            embd_pdrop=config.dropout,
            attn_pdrop=config.dropout,
            use_cache=False,
        )
    )
    model.train()
    tokens = windows[:, :-1].contiguous()
    # Their loss shifts inside, so one prediction a window is not made; labels are what a user would pass.
    return updater(model, lambda: model(tokens, labels=tokens).loss)


def build(name: str, dropout: float, small: bool) -> Callable[[], None]:
    config = shape(dropout, small)
    windows = fixed_windows(config, 8)
    return theirs(config, windows) if name == "transformers" else ours(config, windows, name.removeprefix("ours "))


def peak_growth(name: str, dropout: float, small: bool) -> int:
    """Return by how many bytes a contender's peak memory grows over two steps, in a process of its own."""
    arguments = [sys.executable, __file__, "--memory-of", name, "--dropout", str(dropout), *(["--small"] if small else [])]
    return int(json.loads(subprocess.run(arguments, check=True, capture_output=True, text=True).stdout)["bytes"])


def measure_memory(name: str, dropout: float, small: bool) -> None:
    import transformers  # noqa: F401  # loaded by every contender, so that the imports weigh the same

    meter = PeakMeter("cpu")
    step = build(name, dropout, small)
    step()
    step()
    print(json.dumps({"bytes": meter.growth_bytes()}))


def compare(dropout: float, rounds: int, small: bool) -> dict[str, Ratio | float]:
    name = "toy shape" if small else "Medium-512, batch 8 x 512"
    print(f"\n{name}, dropout {dropout}, {torch.get_num_threads()} threads, {rounds} interleaved rounds")
    seconds = interleave({name: build(name, dropout, small) for name in CONTENDERS}, rounds=rounds)
    memory = {name: peak_growth(name, dropout, small) for name in CONTENDERS}
    for name in CONTENDERS:
        median = sorted(seconds[name])[len(seconds[name]) // 2]
        print(f"  {name:18} {median:7.3f} s a step (median)   peak memory {memory[name] / 2**20:8.0f} MiB")
    bound = step_work(shape(dropout, small), batch_size=8).largest_speedup
    against = mean_ratio(seconds["transformers"], seconds["ours baseline"])
    frozen = mean_ratio(seconds["ours baseline"], seconds["ours oelm_freeze"])
    less = memory["ours baseline"] / memory["transformers"]
    print(f"  ours is {against} as fast as transformers, with {less:.2f}x its memory")
    print(f"  frozen is {frozen} as fast as baseline; arithmetic allows {bound:.3f}x at most")
    return {f"ours_{dropout}": against, f"memory_{dropout}": less, f"frozen_{dropout}": frozen, "bound": bound}


def help_time() -> None:
    best = min(_seconds([sys.executable, "-m", "oelm", "--help"]) for _ in range(5))
    print(f"\noelm --help answers in {best:.2f} s (best of 5)")


def _seconds(command: list[str]) -> float:
    started = time.perf_counter()
    subprocess.run(command, check=True, capture_output=True)
    return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=6)
    measured = [
        parser.add_argument("--dropout", type=float, action="append", help="may be repeated; default 0 and 0.1"),
        parser.add_argument("--small", action="store_true", help="a toy shape, to see that the benchmark itself works"),
    ]
    parser.add_argument("--memory-of", choices=CONTENDERS, help=argparse.SUPPRESS)
    arguments = parse_options(parser, measured=measured)
    if arguments.memory_of:
        measure_memory(arguments.memory_of, arguments.dropout[0], arguments.small)
        return
    figures: dict[str, Ratio | float] = {}
    for dropout in arguments.dropout or [0.0, 0.1]:
        figures |= compare(dropout, arguments.rounds, arguments.small)
    if arguments.record:
        keep("step", figures, rounds=arguments.rounds, threads=torch.get_num_threads())
    help_time()


if __name__ == "__main__":
    main()
