"""A classifier's training step at the shape of bert-base: freezing Q and K, and another padding, against the baseline.

python benchmarks/classifier.py --record

The earlier study reported a step that takes 57% less time with Q and K frozen. This measures what freezing saves, next to the
arithmetic bound, and what padding alone saves: one run pads every example to 128 tokens, the other to the longest of its
batch.
"""

from __future__ import annotations

import argparse
import random
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from record import build_arm, build_record, finish, parse_speed_options
from speed_record import SpeedRecord

from oelm.bench.interleave import against, bound, classifier_config, interleave, training_step
from oelm.config import FinetuneConfig

ROUNDS = 12
FROZEN = "oelm_freeze_pretrained"
# Twenty quantiles (2.5%, 7.5%, ..., 97.5%) of the number of tokens of a training example, by bert-base's own tokenizer:
# sentences of SST-2, and pairs of MNLI, which XNLI's training pairs are in English.
LENGTHS = {
    "sentences": (3, 4, 5, 5, 6, 6, 7, 8, 9, 10, 11, 12, 13, 15, 17, 19, 22, 25, 30, 39),
    "pairs": (13, 17, 20, 22, 24, 27, 29, 31, 33, 35, 37, 40, 42, 45, 47, 50, 54, 59, 66, 83),
}
_TINY = {"vocab_size": 300, "model_dim": 32, "num_layers": 2, "num_heads": 2, "ff_dim": 64}


def batches(kind: str, config: FinetuneConfig, *, count: int) -> list[list[int]]:
    """Return the lengths of the examples in so many batches, drawn as if from a data set of this kind."""
    drawn, most = random.Random(0), config.examples.max_length
    return [[min(length, most) for length in drawn.choices(LENGTHS[kind], k=config.batch_size)] for _ in range(count)]


def padded(config: FinetuneConfig, length: int) -> FinetuneConfig:
    return config.model_copy(update={"examples": config.examples.model_copy(update={"max_length": length})})


def measure(configs: dict[str, FinetuneConfig], *, rounds: int, shape: str) -> SpeedRecord:
    """Time the methods, and the baseline with batches padded to their longest example, in turn."""
    baseline = configs["baseline"]
    contenders: dict[str, Callable[[], None]] = {name: training_step(config) for name, config in configs.items()}
    bounds = {name: bound(baseline, config) for name, config in configs.items()}
    for kind in LENGTHS:
        # One more for the warm-up.
        drawn = batches(kind, baseline, count=rounds + 1)
        contenders[kind] = training_step(baseline, lengths=drawn)
        bounds[kind] = 1 / statistics.fmean(1 / bound(baseline, padded(baseline, max(lengths))) for lengths in drawn)
    timed = against("baseline", interleave(contenders, rounds=rounds))
    arms = [build_arm(name, found, configs.get(name, baseline), bound=bounds[name]) for name, found in timed.items()]
    return build_record("classifier", shape, baseline, rounds=rounds, arms=arms)


def show(record: SpeedRecord) -> None:
    titles = {kind: f"baseline, {kind}, padded to the longest of a batch" for kind in LENGTHS}
    for arm in record.arms:
        less = f"{100 * (1 - 1 / arm.ratio.value):+.1f}% of the time saved"
        name = titles.get(arm.name, arm.name)
        print(f"  {name:54} {1000 * arm.median_s:10.1f} ms   {arm.ratio!s:24} bound {arm.bound:.3f}x   {less}")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, help=f"how often the contenders take turns; default {ROUNDS}")
    parser.add_argument("--out", type=Path, help="keep the figures in this folder")
    options = parse_speed_options(parser, measured=[], arguments=arguments)
    configs = {name: classifier_config(name) for name in ("baseline", FROZEN)}
    if options.quick:
        small = {name: config.model.model_copy(update=_TINY) for name, config in configs.items()}
        configs = {name: config.model_copy(update={"model": small[name]}) for name, config in configs.items()}
    shape, rounds = ("tiny", options.rounds or 2) if options.quick else ("bert", options.rounds or ROUNDS)
    print(f"\nclassifier, {shape}, {torch.get_num_threads()} threads, {rounds} interleaved rounds", flush=True)
    finish(measure(configs, rounds=rounds, shape=shape), options, show)


if __name__ == "__main__":
    main()
