"""What does not add up in the earlier study's report, with the arithmetic done here, from its own figures."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from oelm.dotted import flatten
from oelm.experiments.budget import budget_settings, classifier_settings
from oelm.experiments.registry import Catalog, Experiment
from oelm.experiments.yamlfile import parse_yaml
from oelm.models.flops import step_work

_MIB = 2**20
_GPT2_VOCABULARY = 50257
# What the list of experiments had when fifteen were announced; SST-2-03 came with a later write-up.
_LATER = "later write-up"


@dataclass(frozen=True)
class Contradiction:
    """One claim against arithmetic: the key of its sentence, and the numbers in it."""

    key: str
    values: dict[str, Any]


@dataclass(frozen=True)
class Recipe:
    """An experiment's GPT at `paper`, read off the catalog as data: to parse it takes torch, and a report opens at once."""

    vocab_size: int
    seq_len: int
    model_dim: int
    num_layers: int
    ff_dim: int
    batch_size: int
    steps: int

    @property
    def total(self) -> int:
        """All parameters: tied embeddings, positions, and in each block Q, K, V, O, a feed-forward with biases, two norms."""
        width, inner = self.model_dim, self.ff_dim
        block = 4 * width * width + 2 * width * inner + inner + width + 4 * width
        return (self.vocab_size + self.seq_len) * width + self.num_layers * block + 2 * width

    @property
    def frozen(self) -> int:
        """Q and K of every block."""
        return self.num_layers * 2 * self.model_dim**2

    @property
    def qk_rows(self) -> int:
        return self.model_dim


@cache
def reported_values() -> dict[str, float]:
    """Return the earlier study's claims by name."""
    text = files("oelm.report").joinpath("reported.yaml").read_text(encoding="utf-8")
    return {name: float(entry["value"]) for name, entry in parse_yaml(text, where="reported.yaml").data.items()}


def contradictions(catalog: Catalog) -> list[Contradiction]:
    """Return what does not add up, one by one, computed from the catalog's reported figures and our own counts."""
    return [
        _parameters(catalog),
        _speed(catalog),
        _scale(catalog),
        _rates(catalog),
        _clock(catalog),
        _sizes(),
        _significance(catalog),
        _same_pairs(catalog),
        _count(catalog),
    ]


def _figures(catalog: Catalog, name: str) -> dict[str, float]:
    reported = catalog.get(name).reported
    assert reported is not None
    return reported.figures


def _studied(catalog: Catalog) -> list[Experiment]:
    """Return what the earlier study ran, from the package's own files: a user's entry that extends one is of the group too."""
    names = {entry.name for entry in files("oelm.experiments").joinpath("catalog").iterdir()}
    of_package = [experiment for experiment in catalog.select(["study"]) if experiment.where.rsplit(":", 1)[0] in names]
    return [experiment for experiment in of_package if experiment.reported is not None]


def _source(experiment: Experiment) -> str:
    return experiment.reported.source if experiment.reported is not None else ""


def paper_settings(experiment: Experiment) -> dict[str, Any]:
    """Return an experiment's settings at `paper` by dotted path."""
    is_gpt = experiment.kind == "language_model"
    base = budget_settings("paper") if is_gpt else classifier_settings("paper", model=None)
    return flatten(base) | flatten(experiment.settings) | flatten(experiment.at.get("paper", {}))


def gpt_recipe(catalog: Catalog, name: str) -> Recipe:
    """Return the recipe of one of the earlier study's GPTs."""
    settings = paper_settings(catalog.get(name))
    shape = {key: settings[f"model.{key}"] for key in ("seq_len", "model_dim", "num_layers", "ff_dim")}
    return Recipe(vocab_size=_GPT2_VOCABULARY, **shape, batch_size=settings["batch_size"], steps=settings["steps"])


def _parameters(catalog: Catalog) -> Contradiction:
    counted = gpt_recipe(catalog, "GPT-02")
    claims = reported_values()
    return Contradiction(
        "contradiction.parameters",
        {
            "claimed": claims["gpt_parameters"] / 1e6,
            "claimed_share": 100 * claims["gpt_saved_share"],
            "total": counted.total,
            "frozen": counted.frozen,
            "share": 100 * counted.frozen / counted.total,
            # Weights and two moments of four bytes each; frozen ones have no moments.
            "whole": 12 * counted.total / _MIB,
            "smaller": (12 * counted.total - 8 * counted.frozen) / _MIB,
        },
    )


def _speed(catalog: Catalog) -> Contradiction:
    slow, fast = (_figures(catalog, name)["step_s"] for name in ("XNLI-01", "XNLI-02"))
    recipe = gpt_recipe(catalog, "GPT-02")
    work = step_work(recipe, batch_size=recipe.batch_size)
    claims = reported_values()
    return Contradiction(
        "contradiction.speed",
        {
            "claimed": 100 * claims["bert_faster_share"],
            "measured": 100 * (1 - fast / slow),
            # Of 12 D x D products a block, three times each (forward, two gradients), frozen Q and K leave out two.
            "block": 100 * 2 / 36,
            "gpt": 100 * work.frozen_saving / (work.matmuls + work.optimizer),
            "slower": 100 * claims["later_slower_share"],
        },
    )


def _scale(catalog: Catalog) -> Contradiction:
    width = gpt_recipe(catalog, "GPT-02").model_dim
    ours, theirs = width**-0.5, reported_values()["random_std"]
    frames, random = (_figures(catalog, name)["best_ppl"] for name in ("GPT-02", "GPT-03"))
    return Contradiction(
        "contradiction.scale",
        {
            "claimed": 100 * reported_values()["orthogonality_worth"],
            "ours": ours,
            "theirs": theirs,
            "times": (ours / theirs) ** 4,
            "down": 100 * (frames / random - 1),
            "up": 100 * (random / frames - 1),
        },
    )


def _rates(catalog: Catalog) -> Contradiction:
    pairs = []
    for experiment in _studied(catalog):
        if experiment.baseline is not None:
            names = (experiment.id, experiment.baseline)
            ours, theirs = (paper_settings(catalog.get(name))["optim.lr"] for name in names)
            if ours != theirs:
                pairs.append(f"{experiment.id} {ours:g} / {experiment.baseline} {theirs:g}")
    return Contradiction("contradiction.rates", {"count": len(pairs), "pairs": "; ".join(pairs)})


def _clock(catalog: Catalog) -> Contradiction:
    figures, steps = _figures(catalog, "GPT-01"), gpt_recipe(catalog, "GPT-01").steps
    stepping, wall = steps * figures["step_s"], figures["wall_s"]
    other = reported_values()["other_step_s"]
    return Contradiction(
        "contradiction.clock",
        {
            "steps": steps,
            "step_s": figures["step_s"],
            "stepping": stepping / 3600,
            "wall": wall / 3600,
            "lost": 100 * (1 - stepping / wall),
            "other_step_s": other,
            "other": steps * other / 3600,
        },
    )


def _sizes() -> Contradiction:
    claims = reported_values()
    return Contradiction(
        "contradiction.sizes",
        {
            "low": claims["openwebtext_tokens_low"] / 1e6,
            "high": claims["openwebtext_tokens_high"] / 1e9,
            "file": claims["openwebtext_file_bytes"] / 1e6,
            "tokens": claims["openwebtext_file_bytes"] / 2 / 1e6,
            "steps_low": claims["openwebtext_steps_low"],
            "steps_high": claims["openwebtext_steps_high"],
            "stories_low": claims["tinystories_tokens_low"] / 1e6,
            "stories_high": claims["tinystories_tokens_high"] / 1e6,
        },
    )


def standard_errors(first: float, second: float, count: float) -> float:
    """Return how many standard errors two independent accuracies on `count` examples each are apart."""
    return (second - first) / math.sqrt((first * (1 - first) + second * (1 - second)) / count)


def _significance(catalog: Catalog) -> Contradiction:
    claims = reported_values()
    xnli = [_figures(catalog, name)["best_accuracy"] for name in ("XNLI-01", "XNLI-02")]
    sst2 = [_figures(catalog, name)["best_accuracy"] for name in ("SST-2-01", "SST-2-02")]
    return Contradiction(
        "contradiction.significance",
        {
            "xnli": 100 * (xnli[1] - xnli[0]),
            "xnli_pairs": claims["xnli_dev_pairs"],
            "xnli_errors": abs(standard_errors(xnli[0], xnli[1], claims["xnli_dev_pairs"])),
            "sst2": 100 * (sst2[1] - sst2[0]),
            "sst2_sentences": claims["sst2_dev_sentences"],
            "sst2_errors": abs(standard_errors(sst2[0], sst2[1], claims["sst2_dev_sentences"])),
        },
    )


def _same_pairs(catalog: Catalog) -> Contradiction:
    xnli, mnli = (100 * _figures(catalog, name)["best_accuracy"] for name in ("XNLI-01", "MNLI-01"))
    return Contradiction("contradiction.same_pairs", {"xnli": xnli, "mnli": mnli, "apart": mnli - xnli})


def _count(catalog: Catalog) -> Contradiction:
    listed = [experiment for experiment in _studied(catalog) if _LATER not in _source(experiment)]
    announced = reported_values()["experiments_announced"]
    return Contradiction("contradiction.count", {"announced": announced, "listed": len(listed)})
