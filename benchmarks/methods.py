"""Training steps of methods that freeze or skip Q and K against the baseline's, with the arithmetic bound.

python benchmarks/methods.py --shape medium --record
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch
from record import add_speed_options, build_arm, build_record, chosen_shapes, finish, parse_speed_options
from speed_record import SpeedRecord

from oelm.bench.interleave import THIN, against, bound, interleave, shape_config, training_step

METHODS = ("oelm_freeze", "oelm_axes", "oelm_axes_lowrank", "oelm_axes_q", THIN)
# A step of Medium-512 takes about ten seconds on two cores.
ROUNDS = {"laptop": 60, "512": 12, "medium": 8, "tiny": 2}


def measure(shape: str, methods: Sequence[str], *, rounds: int) -> SpeedRecord:
    """Time the methods and the baseline in turn at a shape."""
    configs = {name: shape_config(shape, name) for name in ("baseline", *methods)}
    timed = against("baseline", interleave({name: training_step(config) for name, config in configs.items()}, rounds=rounds))
    arms = [build_arm(name, timed[name], config, bound=bound(configs["baseline"], config)) for name, config in configs.items()]
    return build_record("methods", shape, configs["baseline"], rounds=rounds, arms=arms)


def show(record: SpeedRecord) -> None:
    for arm in record.arms:
        counts = f"{arm.stored:>11,} stored, {arm.trainable:>11,} trainable"
        print(f"  {arm.name:18} {1000 * arm.median_s:10.1f} ms   {arm.ratio!s:24} bound {arm.bound:.3f}x   {counts}")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_speed_options(parser)
    methods = parser.add_argument("--method", action="append", help=f"may be repeated; default {', '.join(METHODS)}")
    options = parse_speed_options(parser, measured=[methods], arguments=arguments)
    for shape, rounds in chosen_shapes(options, ROUNDS):
        print(f"\nmethods, {shape}, {torch.get_num_threads()} threads, {rounds} interleaved rounds", flush=True)
        finish(measure(shape, options.method or METHODS, rounds=rounds), options, show)


if __name__ == "__main__":
    main()
