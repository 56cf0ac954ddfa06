"""How the time of the baseline's training step splits, and the step's share of the machine's own GEMM speed.

The GEMM speed is measured at the step's own matrix sizes, each product alone and at its best. The split comes from torch's
profiler, the step's time from steps outside of it.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence

import torch
from record import add_speed_options, build_record, chosen_shapes, finish, parse_speed_options

from oelm.bench.interleave import interleave, shape_config, training_step
from oelm.bench.profile import gemm_speed, split_time
from oelm.bench.speed import SpeedRecord, TimeSplit
from oelm.models.shape import step_work

# Timed steps; half as many are profiled.
ROUNDS = {"laptop": 40, "512": 6, "medium": 4, "tiny": 2}
GEMM_SECONDS = 10.0


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
