"""The luck of the draw and the luck of training, told apart: the same frames under several seeds, several frames under one."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats

from oelm.report.collect import Arm
from oelm.report.document import Cell, Section, Table, Text
from oelm.report.findings import Findings
from oelm.report.words import Words

# By (draw, seed): log PPL.
Crossed = Mapping[tuple[int, int], float]


@dataclass(frozen=True)
class Spread:
    """Standard deviations of log PPL over draws, over seeds of training, and what is left of both together.

    `p_value` is how often draws that make no difference would seem to make this much (F test against the rest).
    """

    draws: int
    seeds: int
    over_draws: float
    over_seeds: float
    rest: float
    p_value: float


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
    return Spread(
        draws=len(draws),
        seeds=len(seeds),
        # A variance below what the rest explains is none: the moment estimate may fall below zero.
        over_draws=math.sqrt(max(0.0, (between_draws - rest) / len(seeds))),
        over_seeds=math.sqrt(max(0.0, (between_seeds - rest) / len(draws))),
        rest=math.sqrt(rest),
        p_value=float(stats.f.sf(ratio, len(draws) - 1, freedom)),
    )


def draws_section(findings: Findings, words: Words) -> Section | None:
    """Return the two spreads of every experiment whose frames were drawn by seeds of their own, crossed with runs' seeds."""
    found: dict[tuple[str, str, int], dict[tuple[int, int], float]] = defaultdict(dict)
    for arm in findings.arms:
        draw = _draw(arm)
        if draw is not None:
            length = int((arm.runs[0].config or {}).get("steps", 0))
            logs = {(draw, seed): math.log(value) for seed, value in arm.best.items()}
            found[arm.experiment, arm.budget, length].update(logs)
    rows = tuple(_row(key, estimate) for key, values in sorted(found.items()) if (estimate := _largest(values)) is not None)
    if not rows:
        return None
    names = ("arm", "budget", "steps", "design", "draws", "seeds", "rest", "p")
    columns = tuple(words(f"draws.{name}") for name in names)
    table = Table("draws", words("draws.caption"), columns, rows, frozenset(range(2, len(columns))))
    return Section("draws", words("draws.title"), (Text(words("draws.text")), table))


def _draw(arm: Arm) -> int | None:
    """Return the seed of an arm's frames where it is one of their own."""
    config = arm.runs[0].config if arm.is_usable else None
    if config is None or arm.metric != "ppl":
        return None
    method = config.get("method", {})
    seed = method.get("seed") if method.get("freeze") else None
    return seed if isinstance(seed, int) else None


def _largest(values: Crossed) -> Spread | None:
    """Return the spread over the seeds that every draw has."""
    draws = {draw for draw, _ in values}
    seeds = [seed for seed in {seed for _, seed in values} if all((draw, seed) in values for draw in draws)]
    return spread({(draw, seed): values[draw, seed] for draw in draws for seed in seeds})


def _row(key: Sequence[object], estimate: Spread) -> tuple[Cell, ...]:
    experiment, budget, steps = key
    shares = (estimate.over_draws, estimate.over_seeds, estimate.rest)
    return (
        Cell(str(experiment)),
        Cell(str(budget)),
        Cell(f"{steps:,}"),
        Cell(f"{estimate.draws} x {estimate.seeds}"),
        # Of a logarithm, so about a share of the PPL itself.
        *(Cell(f"{100 * value:.2f}%", value) for value in shares),
        Cell(f"{estimate.p_value:.3f}", estimate.p_value),
    )
