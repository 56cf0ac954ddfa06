"""Greedy text at batch 1: methods against the baseline, and all of them against transformers on the baseline's export."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch
from record import add_speed_options, build_record, chosen_shapes, finish, parse_speed_options
from speed_record import ArmFigures, SpeedRecord

from oelm.bench.greedy import compare_generation
from oelm.bench.interleave import shape_config

METHODS = ("oelm_axes", "oelm_axes_lowrank", "oelm_axes_q")
ROUNDS = {"laptop": 20, "512": 12, "medium": 8, "tiny": 2}


def measure(shape: str, methods: Sequence[str], *, rounds: int, num_tokens: int) -> SpeedRecord:
    """Time greedy text of the baseline, the methods and `transformers` in turn at a shape."""
    named = [(name, shape_config(shape, name)) for name in ("baseline", *methods)]
    arms = [
        ArmFigures(
            name=writer.name,
            median_s=num_tokens / writer.tokens_per_s,
            tokens_per_s=writer.tokens_per_s,
            ratio=writer.ratio,
            against_transformers=writer.against_transformers,
        )
        for writer in compare_generation(named, rounds=rounds, num_tokens=num_tokens, has_transformers=True)
    ]
    return build_record("generation", shape, named[0][1], rounds=rounds, arms=arms)


def show(record: SpeedRecord) -> None:
    for arm in record.arms:
        theirs = arm.against_transformers
        against = "" if theirs is None else f"   {theirs} as transformers"
        print(f"  {arm.name:18} {arm.tokens_per_s:8.0f} tokens/s   {arm.ratio} as baseline{against}")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add_speed_options(parser)
    measured = [
        parser.add_argument("--method", action="append", help=f"may be repeated; default {', '.join(METHODS)}"),
        parser.add_argument("--tokens", type=int, default=200),
    ]
    options = parse_speed_options(parser, measured=measured, arguments=arguments)
    for shape, rounds in chosen_shapes(options, ROUNDS):
        print(
            f"\ngeneration, {shape}, greedy, batch 1, {torch.get_num_threads()} threads, {rounds} interleaved rounds",
            flush=True,
        )
        record = measure(shape, options.method or METHODS, rounds=rounds, num_tokens=options.tokens)
        finish(record, options, show)


if __name__ == "__main__":
    main()
