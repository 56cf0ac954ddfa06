"""The luck of the draw and the luck of training, told apart: the same frames under several seeds, several frames under one."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy import stats

from oelm.dotted import flatten
from oelm.report.collect import Arm, ArmKey, recipe_differences
from oelm.report.document import Cell, Section, Table, Text
from oelm.report.findings import Findings
from oelm.report.stats import LEVEL
from oelm.report.words import Words

_FINGERPRINT = "data.fingerprint"
# By (draw, seed): log PPL.
Crossed = Mapping[tuple[int, int], float]


@dataclass(frozen=True)
class Spread:
    """Standard deviations of log PPL over draws, over seeds of training, and what is left of both together.

    `p_value` is how often draws that make no difference would seem to make this much (F test against the rest); `low` and
    `high` are the ends of a 95% interval of the spread over draws (by Tukey and Williams, a little wide).
    """

    draws: int
    seeds: int
    over_draws: float
    over_seeds: float
    rest: float
    p_value: float
    low: float
    high: float


def spread(values: Crossed) -> Spread | None:
    """Estimate the two variances apart from a crossed design without gaps, two of each at least; None otherwise."""
    draws, seeds = (sorted({key[place] for key in values}) for place in (0, 1))
    if len(draws) < 2 or len(seeds) < 2 or len(values) != len(draws) * len(seeds):
        return None
    table = np.array([[values[draw, seed] for seed in seeds] for draw in draws])
    mean = table.mean()
    by_draw, by_seed = table.mean(axis=1), table.mean(axis=0)
    between_draws = len(seeds) * float(((by_draw - mean) ** 2).sum()) / (len(draws) - 1)
    between_seeds = len(draws) * float(((by_seed - mean) ** 2).sum()) / (len(seeds) - 1)
    left = table - by_draw[:, None] - by_seed[None, :] + mean
    freedom = (len(draws) - 1) * (len(seeds) - 1)
    rest = float((left**2).sum()) / freedom
    ratio = between_draws / rest if rest > 0 else math.inf if between_draws > 0 else 0.0
    low, high = _ends(between_draws, ratio, len(draws) - 1, freedom)
    return Spread(
        draws=len(draws),
        seeds=len(seeds),
        # A variance below what the rest explains is none: the moment estimate may fall below zero.
        over_draws=math.sqrt(max(0.0, (between_draws - rest) / len(seeds))),
        over_seeds=math.sqrt(max(0.0, (between_seeds - rest) / len(draws))),
        rest=math.sqrt(rest),
        p_value=float(stats.f.sf(ratio, len(draws) - 1, freedom)),
        low=low / math.sqrt(len(seeds)),
        high=high / math.sqrt(len(seeds)),
    )


def _ends(mean_square: float, ratio: float, freedom: int, rest_freedom: int) -> tuple[float, float]:
    """Return between what a factor's spread lies, times the root of how often each of its levels was seen."""
    if ratio == 0:
        return 0.0, 0.0
    outside = (1 - LEVEL) / 2
    quantiles = [(stats.f.ppf(q, freedom, rest_freedom), stats.chi2.ppf(q, freedom)) for q in (1 - outside, outside)]
    squares = [freedom * mean_square * max(0.0, 1 - f / ratio) / chi for f, chi in quantiles]
    return math.sqrt(squares[0]), math.sqrt(squares[1])


@dataclass(frozen=True)
class _Design:
    """Runs of one experiment that differ in the seed of their frames and in their own, and in nothing else."""

    experiment: str
    budget: str
    recipe: dict[str, Any]
    values: dict[tuple[int, int], float]
    arms: set[ArmKey]

    @property
    def steps(self) -> int:
        return int(self.recipe.get("steps", 0))


def draws_section(findings: Findings, words: Words) -> Section | None:
    """Return the two spreads of every experiment whose frames were drawn by seeds of their own, crossed with runs' seeds."""
    found = _estimated(findings)
    if not found:
        return None
    rows = tuple(_row(design, estimate, _apart(design, [other for other, _ in found])) for design, estimate in found)
    names = ("arm", "budget", "steps", "design", "draws", "seeds", "rest", "p")
    columns = tuple(words(f"draws.{name}") for name in names)
    table = Table("draws", words("draws.caption"), columns, rows, frozenset(range(2, len(columns))))
    return Section("draws", words("draws.title"), (Text(words("draws.text")), table))


def crossed_arms(findings: Findings) -> set[ArmKey]:
    """Return the arms whose luck is told; they are compared with each other, and need no baseline for that."""
    return {key for design, _ in _estimated(findings) for key in design.arms}


def _estimated(findings: Findings) -> list[tuple[_Design, Spread]]:
    return [(design, estimate) for design in _designs(findings.arms) if (estimate := _largest(design.values)) is not None]


def shared_recipe(config: Mapping[str, Any], fingerprint: str) -> dict[str, Any]:
    """Return what all runs of a design must share: their settings without the two seeds, and what they read."""
    method = {key: value for key, value in config["method"].items() if key != "seed"}
    rest = {key: value for key, value in config.items() if key != "seed"}
    return rest | {"method": method, _FINGERPRINT: fingerprint}


def _designs(arms: Sequence[Arm]) -> list[_Design]:
    """Return the crossed runs, of one recipe and one data set each: what else differs is no luck."""
    found: list[_Design] = []
    for arm in arms:
        draw = draw_of(arm) if arm.is_usable and arm.metric == "ppl" else None
        if draw is None:
            continue
        mine = _Design(arm.experiment, arm.budget, shared_recipe(arm.runs[0].recipe, arm.runs[0].fingerprint), {}, set())
        design = next((other for other in _rivals(mine, found) if not recipe_differences(mine.recipe, other.recipe)), None)
        if design is None:
            found.append(design := mine)
        design.arms.add(arm.key)
        for seed, value in arm.best.items():
            # The same run under the names of two variants counts once.
            design.values.setdefault((draw, seed), math.log(value))
    return sorted(found, key=lambda design: (design.experiment, design.budget, design.steps))


def _rivals(design: _Design, others: Sequence[_Design]) -> list[_Design]:
    return [other for other in others if (other.experiment, other.budget) == (design.experiment, design.budget)]


def _apart(design: _Design, others: Sequence[_Design]) -> str:
    """Return the settings that tell a design from the others of its experiment and budget, beside the number of steps."""
    changes = [change for other in _rivals(design, others) for change in recipe_differences(design.recipe, other.recipe)]
    keys = dict.fromkeys(change.split(" ", 1)[0] for change in changes)
    settings = flatten(design.recipe) | {_FINGERPRINT: str(design.recipe[_FINGERPRINT])[:8]}
    return ", ".join(f"{key}={settings.get(key)}" for key in keys if key != "steps")


def draw_of(arm: Arm) -> int | None:
    """Return the seed of an arm's frames where it is one of their own."""
    config = arm.runs[0].config
    assert config is not None
    method = config.get("method", {})
    # Weights that are kept, or made from those that were there, are not drawn.
    is_drawn = method.get("freeze") and method.get("init") not in (
        "native",
        "orthonormalized",
        "polar",
        "spectral",
        "spectral_flat",
    )
    seed = method.get("seed") if is_drawn else None
    return seed if isinstance(seed, int) else None


def _largest(values: Crossed) -> Spread | None:
    """Return the spread over the most runs that are crossed: all seeds of some draw, and the draws that have these too."""
    seeds_of: dict[int, set[int]] = {}
    for draw, seed in values:
        seeds_of.setdefault(draw, set()).add(seed)
    sets = [*seeds_of.values(), set.intersection(*seeds_of.values())]
    crossed = [[(draw, seed) for draw, own in seeds_of.items() if own >= seeds for seed in seeds] for seeds in sets]
    found = [spread({run: values[run] for run in runs}) for runs in crossed]
    return max((one for one in found if one is not None), key=lambda one: one.draws * one.seeds, default=None)


def _row(design: _Design, estimate: Spread, apart: str) -> tuple[Cell, ...]:
    return (
        Cell(f"{design.experiment} ({apart})" if apart else design.experiment),
        Cell(design.budget),
        Cell(f"{design.steps:,}"),
        Cell(f"{estimate.draws} x {estimate.seeds}"),
        # Of a logarithm, so about a share of the PPL itself.
        Cell(f"{100 * estimate.over_draws:.2f}% [{100 * estimate.low:.2f}, {100 * estimate.high:.2f}]", estimate.over_draws),
        *(Cell(f"{100 * value:.2f}%", value) for value in (estimate.over_seeds, estimate.rest)),
        Cell(f"{estimate.p_value:.3f}", estimate.p_value),
    )
