"""Our baseline's training step against transformers' GPT-2 and against a plain PyTorch step, at the published shapes.

Time: interleaved in one process, as ratios with 95% intervals. At Medium-512 also with dropout 0.1, and the memory of each
contender alone in a child process, as the growth of its peak resident set over its imports (needs Linux).
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from plain_gpt import PlainGPT
from record import add_speed_options, build_record, chosen_shapes, finish, parse_speed_options
from speed_record import ArmFigures, SpeedRecord, inverse

from oelm.bench.interleave import against, interleave, shape_config, training_step
from oelm.bench.machine import PeakMeter
from oelm.config import RunConfig

CONTENDERS = ("baseline", "transformers", "plain")
# A step of Medium-512 takes about ten seconds on two cores.
ROUNDS = {"laptop": 60, "512": 12, "medium": 6, "tiny": 2}
MEMORY_OF = ("baseline", "transformers")
DROPOUT = 0.1


def fixed_windows(config: RunConfig) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    shape = (config.batch_size, config.model.seq_len + 1)
    return torch.randint(config.model.vocab_size, shape, generator=generator)


def updater(model: torch.nn.Module, loss: Callable[[], torch.Tensor]) -> Callable[[], None]:
    """Return a complete training step of another implementation: loss, gradients, clipping, fused AdamW."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, weight_decay=0.01, fused=True)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        loss().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return step


def plain(config: RunConfig) -> Callable[[], None]:
    windows = fixed_windows(config)
    shape = config.model.model_dump(exclude={"qk_dim", "short_conv"})
    model = PlainGPT(**shape)
    tokens, targets = windows[:, :-1].contiguous(), windows[:, 1:].contiguous()
    return updater(model, lambda: model(tokens, targets))


def transformers(config: RunConfig) -> Callable[[], None]:
    from transformers import GPT2Config, GPT2LMHeadModel

    shape = config.model
    model = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=shape.vocab_size,
            n_positions=shape.seq_len + 1,
            n_embd=shape.model_dim,
            n_layer=shape.num_layers,
            n_head=shape.num_heads,
            n_inner=shape.ff_dim,
            activation_function="gelu",
            resid_pdrop=shape.dropout,
            embd_pdrop=shape.dropout,
            attn_pdrop=shape.dropout,
            use_cache=False,
            bos_token_id=0,
            eos_token_id=0,
        )
    )
    model.train()
    tokens = fixed_windows(config)[:, :-1].contiguous()
    # Their loss shifts the labels itself, so each window has one prediction less; this is what a user would pass.
    return updater(model, lambda: model(tokens, labels=tokens).loss)


def build(name: str, config: RunConfig) -> Callable[[], None]:
    if name == "baseline":
        return training_step(config)
    return transformers(config) if name == "transformers" else plain(config)


def peak_growth(name: str, shape: str, dropout: float) -> int:
    """Return by how many bytes a contender's peak memory grows over two steps, in a separate process."""
    arguments = [sys.executable, __file__, "--memory-of", name, "--shape", shape, "--dropout", str(dropout)]
    return int(json.loads(subprocess.run(arguments, check=True, capture_output=True, text=True).stdout)["bytes"])


def measure_memory(name: str, config: RunConfig) -> None:
    import transformers  # noqa: F401  # loaded by every contender, so that the imports weigh the same

    meter = PeakMeter("cpu")
    step = build(name, config)
    step()
    step()
    print(json.dumps({"bytes": meter.growth_bytes()}))


def measure(shape: str, *, rounds: int, dropout: float, has_memory: bool) -> SpeedRecord:
    """Time the contenders at a shape; with dropout without the plain one."""
    config = shape_config(shape, "baseline", dropout=dropout)
    names = CONTENDERS[:2] if dropout else CONTENDERS
    timed = against("baseline", interleave({name: build(name, config) for name in names}, rounds=rounds))
    memory = {name: peak_growth(name, shape, dropout) for name in MEMORY_OF} if has_memory else {}
    arms = [
        ArmFigures(name=name, median_s=timed[name].median_s, ratio=timed[name].ratio, peak_bytes=memory.get(name))
        for name in names
    ]
    return build_record("step", f"{shape}-dropout" if dropout else shape, config, rounds=rounds, arms=arms)


def show(record: SpeedRecord) -> None:
    ours = record.arms[0]
    for arm in record.arms:
        memory = "" if arm.peak_bytes is None else f"   peak memory {arm.peak_bytes / 2**20:8.0f} MiB"
        print(f"  {arm.name:13} {1000 * arm.median_s:10.1f} ms a step (median){memory}")
    for arm in record.arms[1:]:
        print(f"  {ours.name} is {inverse(arm.ratio)} as fast as {arm.name}")


def help_time() -> None:
    best = min(_seconds([sys.executable, "-m", "oelm", "--help"]) for _ in range(5))
    print(f"\noelm --help answers in {best:.2f} s (best of 5)")


def _seconds(command: list[str]) -> float:
    started = time.perf_counter()
    subprocess.run(command, check=True, capture_output=True)
    return time.perf_counter() - started


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add_speed_options(parser)
    dropout = parser.add_argument("--dropout", type=float, help="only this rate; default 0, and at medium 0.1 as well")
    parser.add_argument("--memory-of", choices=CONTENDERS, help=argparse.SUPPRESS)
    options = parse_speed_options(parser, measured=[dropout], arguments=arguments)
    if options.memory_of:
        measure_memory(options.memory_of, shape_config(options.shape[0], "baseline", dropout=options.dropout))
        return
    for shape, rounds in chosen_shapes(options, ROUNDS):
        for each in _dropouts(options, shape):
            print(
                f"\nstep, {shape}, dropout {each}, {torch.get_num_threads()} threads, {rounds} interleaved rounds", flush=True
            )
            record = measure(shape, rounds=rounds, dropout=each, has_memory=shape == "medium")
            finish(record, options, show)
    if not options.shape and not options.quick:
        help_time()


def _dropouts(options: Any, shape: str) -> list[float]:
    if options.dropout is not None:
        return [options.dropout]
    return [0.0, DROPOUT] if shape == "medium" else [0.0]


if __name__ == "__main__":
    main()
