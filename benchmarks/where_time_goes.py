"""How the time of the baseline's training step splits, and the step's share of the machine's own GEMM speed.

The GEMM speed is measured at the step's own matrix sizes, each product alone and at its best. The split comes from torch's
profiler, the step's time from steps outside of it.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from record import add_speed_options, build_record, chosen_shapes, finish, parse_speed_options
from speed_record import Product, SpeedRecord, TimeSplit
from torch.profiler import ProfilerActivity, profile, record_function

from oelm.bench.interleave import interleave, shape_config, training_step
from oelm.config import RunConfig
from oelm.models.shape import GPTConfig, chunk_rows, step_work

# Timed steps; half as many are profiled.
ROUNDS = {"laptop": 40, "512": 6, "medium": 4, "tiny": 2}
GEMM_SECONDS = 10.0
PARTS = ("products", "attention", "gelu", "norms", "head", "optimizer", "rest")
_STEP = "oelm step"
# By the beginning of an operation's name after 'aten::'.
_OPERATIONS = {
    "products": ("mm", "addmm", "linear", "matmul"),
    "attention": ("_scaled_dot_product", "scaled_dot_product", "bmm", "baddbmm", "_softmax", "softmax"),
    "gelu": ("gelu",),
    "norms": ("native_layer_norm", "layer_norm"),
    # Clipping belongs to the update: it reads the same memory.
    "optimizer": ("_fused_adam", "_foreach_", "linalg_vector_norm", "clamp"),
}


def gemm_speed(config: RunConfig, *, seconds: float) -> list[Product]:
    """Time each distinct product of a baseline's step alone, in turn for so many seconds.

    Forward, input gradient and weight gradient have the layouts of a linear layer. Q, K and V are one product, and the head
    is computed in the chunks of our loss.
    """
    micro_batches = config.batch_size // config.micro_batch_size
    operands: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
    described = []
    for name, rows, columns, inner, count in _layers(config.model, config.micro_batch_size * config.model.seq_len):
        x, weight, grad = torch.randn(rows, inner), torch.randn(columns, inner), torch.randn(rows, columns)
        for pass_name, left, right in (
            ("forward", x, weight.T),
            ("input gradient", grad, weight),
            ("weight gradient", grad.T, x),
        ):
            operands.append((left, right, torch.empty(left.shape[0], right.shape[1])))
            described.append((f"{name}, {pass_name}", left.shape[0], right.shape[1], left.shape[1], count * micro_batches))
    best = _best_seconds(operands, seconds)
    return [
        Product(name=name, rows=rows, columns=columns, inner=inner, count=count, best_s=best_s)
        for (name, rows, columns, inner, count), best_s in zip(described, best, strict=True)
    ]


def _layers(model: GPTConfig, tokens: int) -> list[tuple[str, int, int, int, int]]:
    """Return name, rows, columns, inner size and count of the products of one micro-batch's forward pass."""
    width, depth, inner = model.model_dim, model.num_layers, model.ff_dim
    chunk = min(tokens, chunk_rows(model.vocab_size))
    return [
        ("Q, K and V", tokens, 2 * model.qk_rows + width, width, depth),
        ("attention's output", tokens, width, width, depth),
        ("feed-forward in", tokens, inner, width, depth),
        ("feed-forward out", tokens, width, inner, depth),
        # The last chunk may be shorter; so may its time.
        ("head", chunk, model.vocab_size, width, -(-tokens // chunk)),
    ]


def _best_seconds(operands: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]], seconds: float) -> list[float]:
    """Return the best time of each product. They take turns, so that a disturbance affects no product every time."""
    best = [float("inf")] * len(operands)
    started, rounds = time.perf_counter(), 0
    while rounds < 2 or time.perf_counter() - started < seconds:
        for number, (left, right, out) in enumerate(operands):
            # Several times in a row: at first the cache holds another product's operands.
            for _ in range(3):
                began = time.perf_counter()
                torch.mm(left, right, out=out)
                best[number] = min(best[number], time.perf_counter() - began)
        rounds += 1
    return best


def split_time(step: Callable[[], object], *, steps: int) -> dict[str, float]:
    """Return each of PARTS' share of a step's time, over several steps in torch's profiler; the shares add up to 1."""
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        for _ in range(steps):
            with record_function(_STEP):
                step()
    spent = dict.fromkeys(PARTS, 0.0)
    # Time of a scope outside operations is Python's: it counts as rest.
    for event in profiler.events() or ():
        if _is_inside_step(event):
            spent[_part(event)] += float(event.self_cpu_time_total)
    total = sum(spent.values())
    return {part: value / total for part, value in spent.items()}


def _is_inside_step(event: Any) -> bool:
    return event.name == _STEP or any(above.name == _STEP for above in _above(event))


def _above(event: Any) -> list[Any]:
    found = []
    while event.cpu_parent is not None:
        event = event.cpu_parent
        found.append(event)
    return found


def _part(event: Any) -> str:
    names = [event.name, *(above.name for above in _above(event))]
    # The loss computes the head's products.
    if any("CrossEntropy" in name for name in names):
        return "head"
    if any(name.startswith("Optimizer.") for name in names):
        return "optimizer"
    own = str(event.name).removeprefix("aten::")
    if own == event.name:
        return "rest"
    return next((part for part, starts in _OPERATIONS.items() if own.startswith(starts)), "rest")


def measure(shape: str, *, rounds: int, gemm_seconds: float) -> SpeedRecord:
    """Time the baseline's step, its products alone, and split it."""
    config = shape_config(shape, "baseline")
    step = training_step(config)
    seconds = interleave({"step": step}, rounds=rounds, warmup=2)["step"]
    products = gemm_speed(config, seconds=gemm_seconds)
    alone_s = sum(product.count * product.best_s for product in products)
    split = TimeSplit(
        step_s=statistics.median(seconds),
        operations=step_work(config.model, batch_size=config.batch_size).matmuls,
        gemm_gflops=sum(product.operations for product in products) / alone_s / 1e9,
        shares=split_time(step, steps=max(1, rounds // 2)),
        products=tuple(products),
    )
    return build_record("time", shape, config, rounds=rounds, split=split)


def show(record: SpeedRecord) -> None:
    split = record.split
    assert split is not None
    print(f"  {1000 * split.step_s:.1f} ms a step (median), {split.step_gflops:.1f} GFLOP/s in products, attention's included")
    print(f"  GEMM alone at these sizes: {split.gemm_gflops:.1f} GFLOP/s; the step reaches {split.limit_share:.1%} of it")
    print("  " + ", ".join(f"{part} {share:.1%}" for part, share in split.shares.items()))
    for product in split.products:
        rate = 2 * product.rows * product.columns * product.inner / product.best_s / 1e9
        sizes = f"{product.rows} x {product.inner} x {product.columns}"
        print(f"    {product.name:36} {sizes:22} {rate:7.1f} GFLOP/s, {product.count} a step")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add_speed_options(parser)
    options = parse_speed_options(parser, measured=[], arguments=arguments)
    for shape, rounds in chosen_shapes(options, ROUNDS):
        print(f"\nwhere the time goes, {shape}, {torch.get_num_threads()} threads, {rounds} steps", flush=True)
        finish(measure(shape, rounds=rounds, gemm_seconds=0.2 if options.quick else GEMM_SECONDS), options, show)


if __name__ == "__main__":
    main()
