"""Print what does not add up in the earlier study's report, computed from its own figures.

python studies/contradictions.py

The figures of single experiments are in the catalog, the study's other claims in studies/reported.yaml.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import NamedTuple

from oelm.config import RunConfig
from oelm.experiments.catalog import load_catalog, parse_yaml
from oelm.experiments.forecast import count_parameters
from oelm.experiments.plan import known_vocabulary, make_config
from oelm.models.shape import method_work, step_work

CLAIMS = Path(__file__).with_name("reported.yaml")
CATALOG = load_catalog()
STUDIED = [experiment for experiment in CATALOG.select(["study"]) if experiment.reported is not None]
MIB = 2**20
# SST-2-03 came with a later write-up, after fifteen experiments had been announced.
LATER = "later write-up"


class Row(NamedTuple):
    """What is contradictory, what was reported, and what follows from the figures."""

    about: str
    reported: str
    computed: str


@cache
def claims() -> dict[str, float]:
    """Return the earlier study's claims by name."""
    return {name: float(entry["value"]) for name, entry in parse_yaml(CLAIMS.read_text(), where=CLAIMS.name).data.items()}


def figures(name: str) -> dict[str, float]:
    """Return what was reported of one experiment."""
    reported = CATALOG.get(name).reported
    assert reported is not None
    return reported.figures


@cache
def gpt(name: str) -> RunConfig:
    """Return the config of one of the earlier study's GPTs, at its size."""
    config = make_config(CATALOG.get(name), "paper", seed=0)
    assert isinstance(config, RunConfig)
    return config


def parameters() -> Row:
    counted = count_parameters(gpt("GPT-02"))
    assert counted is not None
    share = 100 * counted.frozen / counted.total
    # Weights and two moments of four bytes each; frozen weights have no moments.
    whole, smaller = 12 * counted.total / MIB, (12 * counted.total - 8 * counted.frozen) / MIB
    return Row(
        "parameters of the GPT",
        f"about {claims()['gpt_parameters'] / 1e6:.0f}M, {100 * claims()['gpt_saved_share']:.1f}% saved",
        f"the model described has {counted.total:,}, of which Q and K are {counted.frozen:,}: {share:.1f}%. Its checkpoints "
        f"agree: 12 bytes a parameter make {whole:.0f} MiB, {smaller:.0f} MiB without the moments of Q and K",
    )


def speed() -> Row:
    slow, fast = (figures(name)["step_s"] for name in ("XNLI-01", "XNLI-02"))
    config = gpt("GPT-02")
    shape = known_vocabulary(config).model
    whole = step_work(shape, batch_size=config.batch_size).total
    left = method_work(shape, {"freeze": ("q", "k")}, batch_size=config.batch_size).total
    # Of 12 D x D products a block, three times each (forward, two gradients), frozen Q and K leave out two.
    block, gpt_share = 100 * 2 / 36, 100 * (whole - left) / whole
    return Row(
        "training step",
        f"{100 * claims()['bert_faster_share']:.0f}% faster on BERT (step times {100 * (1 - fast / slow):.1f}% apart)",
        f"freezing Q and K leaves out their weight gradients: at most {block:.1f}% of a block's products, {gpt_share:.1f}% of "
        f"a whole step of the GPT. A later comparison in turns by the same authors found the frozen arm "
        f"{100 * claims()['later_slower_share']:.1f}% slower",
    )


def scale() -> Row:
    ours, theirs = gpt("GPT-02").model.model_dim ** -0.5, claims()["random_std"]
    frames, random = (figures(name)["best_ppl"] for name in ("GPT-02", "GPT-03"))
    return Row(
        "worth of orthogonality",
        f"{100 * claims()['orthogonality_worth']:.0f}% of the perplexity",
        f"orthonormal rows have entries of std {ours:.3f}, the random arm had {theirs}: the variance of the logits differs "
        f"{(ours / theirs) ** 4:.0f} times, so scale is compared, too. And the change is {100 * (frames / random - 1):.1f}% in "
        f"one direction, {100 * (random / frames - 1):+.1f}% in the other",
    )


def rates() -> Row:
    pairs = []
    for experiment in STUDIED:
        if experiment.baseline is not None:
            baseline = CATALOG.get(experiment.baseline)
            ours, theirs = (make_config(each, "paper", seed=0).optim.lr for each in (experiment, baseline))
            if ours != theirs:
                pairs.append(f"{experiment.id} {ours:g} / {baseline.id} {theirs:g}")
    return Row(
        "learning rates",
        "differences between methods, one seed each",
        f"{len(pairs)} arms have another rate than their baseline, so method and rate cannot be separated: {'; '.join(pairs)}",
    )


def clock() -> Row:
    reported, steps, other = figures("GPT-01"), gpt("GPT-01").steps, claims()["other_step_s"]
    stepping, wall = steps * reported["step_s"], reported["wall_s"]
    return Row(
        "time of GPT-01",
        f"{steps:,} steps of {reported['step_s']} s, {wall / 3600:.2f} h in all; elsewhere {other} s a step",
        f"the steps take {stepping / 3600:.2f} h: {100 * (1 - stepping / wall):.0f}% is unaccounted for. The other step time "
        f"would make {steps * other / 3600:.2f} h, more than the wall time",
    )


def sizes() -> Row:
    known = claims()
    low, high, file = known["openwebtext_tokens_low"], known["openwebtext_tokens_high"], known["openwebtext_file_bytes"]
    steps = f"{known['openwebtext_steps_low']:,.0f} and {known['openwebtext_steps_high']:,.0f} steps"
    stories = f"{known['tinystories_tokens_low'] / 1e6:.0f}M and {known['tinystories_tokens_high'] / 1e6:.0f}M"
    return Row(
        "sizes of the data",
        f"OpenWebText: {low / 1e6:.0f}M and {high / 1e9:.0f}B tokens, {steps}; TinyStories: {stories} tokens",
        f"OpenWebText's file of {file / 1e6:.0f} MB holds {file / 2 / 1e6:.1f}M tokens of two bytes. That the gap grows with "
        "the data rests on these sizes",
    )


def standard_errors(first: float, second: float, count: float) -> float:
    """Return how many standard errors two independent accuracies on `count` examples each are apart."""
    return (second - first) / math.sqrt((first * (1 - first) + second * (1 - second)) / count)


def chance() -> Row:
    gaps, errors = [], []
    for task, claim in (("XNLI", "xnli_dev_pairs"), ("SST-2", "sst2_dev_sentences")):
        first, second = (figures(f"{task}-{number}")["best_accuracy"] for number in ("01", "02"))
        count = claims()[claim]
        gaps.append(f"{100 * (second - first):+.2f} points on {task}'s {count:.0f} examples")
        errors.append(f"{abs(standard_errors(first, second, count)):.1f}")
    return Row("chance", ", ".join(gaps), f"{' and '.join(errors)} standard errors")


def same_pairs() -> Row:
    xnli, mnli = (100 * figures(name)["best_accuracy"] for name in ("XNLI-01", "MNLI-01"))
    return Row(
        "baselines of XNLI and MNLI",
        f"{xnli:.2f}% and {mnli:.2f}%",
        f"{mnli - xnli:.2f} points apart, though both train on the same pairs",
    )


def count() -> Row:
    listed = [each for each in STUDIED if each.reported is not None and LATER not in each.reported.source]
    return Row("experiments", f"{claims()['experiments_announced']:.0f} announced", f"{len(listed)} listed")


ROWS: tuple[Callable[[], Row], ...] = (parameters, speed, scale, rates, clock, sizes, chance, same_pairs, count)


def main() -> None:
    """Print the table as Markdown."""
    print("| about | reported | computed from its own figures |\n| --- | --- | --- |")
    for row in ROWS:
        print(f"| {' | '.join(row())} |")


if __name__ == "__main__":
    main()
