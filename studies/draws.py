"""How much depends on the draw of the frames, and can good frames be recognized before training?

    python studies/draws.py [scores] [--results results/draws] [--lang zh]
    python studies/draws.py spread [--results results/draws]

Reads the records of runs whose frames have a seed of their own (`method.seed`), crossed with seeds of training. `spread`
separates the two kinds of luck: the same frames under several seeds, several frames under one. `scores` builds the frames
of each run again, scores them, and correlates score and log PPL over draws, both averaged over the seeds of training. What is
gained by training on the best of `CHOICE` draws instead of on any one: the mean over all choices among those that were run.
To make such records: `oelm run GPT-02 --no-baseline --set method.seed=11 --seeds 2`, and so on with 12, 13, ...
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from scipy import stats

import oelm
from oelm.config import parse_config
from oelm.method.sites import attention_sites
from oelm.report.arms import recipe_differences
from oelm.stats import LEVEL
from oelm.train.optim import warmup_steps

HEADINGS = {
    "en": "| score of a draw | better when | draws x seeds | correlation with log PPL | p | PPL, best of {choice} by it |",
    "zh": "| 抽样的评分 | 何者为佳 | 抽样 x 种子 | 与 log PPL 的相关系数 | p | 按其从 {choice} 个中取最佳的 PPL |",
}
# Of so many draws the best is taken.
CHOICE = 4


# By (draw, seed): log PPL.
Crossed = Mapping[tuple[int, int], float]


@dataclass(frozen=True)
class Drawn:
    """A run of one draw of the frames at one seed of training."""

    draw: int
    seed: int
    log_ppl: float
    config: dict[str, Any]
    # Of the training loss, by step.
    losses: dict[int, float]


def read(results: Path) -> list[Drawn]:
    """Return every finished run with its own `method.seed`; all must have one recipe and the same data."""
    found = []
    recipes: dict[Path, dict[str, Any]] = {}
    for path in sorted(results.glob("**/config.json")):
        config = json.loads(path.read_text())
        draw, figures = config["method"].get("seed"), path.with_name("timing_stats.json")
        if draw is None or not figures.is_file():
            continue
        recipes[path] = shared_recipe(config, json.loads(path.with_name("manifest.json").read_text())["data"]["fingerprint"])
        rows = [json.loads(line) for line in path.with_name("metrics.jsonl").read_text().splitlines()]
        losses = {row["step"]: row["loss"] for row in rows if "loss" in row}
        found.append(Drawn(draw, config["seed"], math.log(json.loads(figures.read_text())["best_ppl"]), config, losses))
    refuse_mixture(recipes)
    return found


def shared_recipe(config: Mapping[str, Any], fingerprint: str) -> dict[str, Any]:
    """Return what all runs must share: their settings without the two seeds, and what they read."""
    method = {key: value for key, value in config["method"].items() if key != "seed"}
    rest = {key: value for key, value in config.items() if key != "seed"}
    return rest | {"method": method, "data.fingerprint": fingerprint}


def refuse_mixture(recipes: dict[Path, dict[str, Any]]) -> None:
    """Exit if records have several recipes: the effect of a setting would look like the luck of a draw."""
    paths = list(recipes)
    for path in paths[1:]:
        if changes := recipe_differences(recipes[paths[0]], recipes[path]):
            raise SystemExit(
                f"{paths[0].parent} and {path.parent} are of two recipes: {'; '.join(changes)}; "
                "name a folder with records of one (--results)"
            )


def frames(run: Drawn) -> list[tuple[Any, Any]]:
    """Rebuild a run's frames; return Q and K of every attention as float64, heads x rows x columns."""
    config = parse_config(run.config, where="a record")
    model = oelm.build_gpt(config.model, seed=config.seed)
    oelm.freeze(model, config.method, seed=config.seed)
    sites = attention_sites(model)
    return [(site.q.weight_HKD().double().numpy(), site.k.weight_HKD().double().numpy()) for site in sites]


def agreement(run: Drawn) -> float:
    """How much a token's query is like its own key, before anything is learnt: the mean of <Q_h, K_h>."""
    return float(np.mean([(q * k).sum(axis=(1, 2)).mean() for q, k in frames(run)]))


def overlap(run: Drawn) -> float:
    """How much of a head's query space its key space covers: the mean of |Q_h K_h'|^2."""
    return float(np.mean([((q @ k.swapaxes(1, 2)) ** 2).sum(axis=(1, 2)).mean() for q, k in frames(run)]))


def early_loss(run: Drawn) -> float:
    """The training loss from the end of the warm-up to a third of the run: what a third of the cost reveals."""
    config = parse_config(run.config, where="a record")
    warm, third = warmup_steps(config, config.steps), config.steps // 3
    losses = [loss for step, loss in run.losses.items() if warm < step <= third]
    if not losses:
        raise SystemExit(
            f"draw {run.draw}, seed {run.seed}: no training loss is recorded after the warm-up ({warm} steps) and up to "
            f"a third of the run (step {third}); early losses cannot be compared"
        )
    return float(np.mean(losses))


def outcome(run: Drawn) -> float:
    """What came of a draw: no score can do better."""
    return run.log_ppl


@dataclass(frozen=True)
class Score:
    """A number for a draw; which direction is better was fixed before any draw was trained."""

    of: Callable[[Drawn], float]
    is_better: Literal["higher", "lower"]
    names: dict[str, str]


WORDS = {"higher": {"en": "higher", "zh": "较高"}, "lower": {"en": "lower", "zh": "较低"}}
SCORES = (
    # Like attends to like from the start.
    Score(
        agreement,
        "higher",
        {"en": "before training: a token's query against its own key", "zh": "训练前：词元的查询与其自身键的相似度"},
    ),
    # What a query asks for, more of the key can answer.
    Score(
        overlap,
        "higher",
        {"en": "before training: how far the spans of Q and K overlap", "zh": "训练前：Q 与 K 张成空间的重叠程度"},
    ),
    Score(
        early_loss,
        "lower",
        {
            "en": "training loss from the end of the warm-up to a third of the run",
            "zh": "预热结束到训练进行三分之一之间的训练损失",
        },
    ),
    Score(outcome, "lower", {"en": "in hindsight: what came of it", "zh": "事后：最终结果本身"}),
)


def by_draw(values: list[float], runs: list[Drawn]) -> Any:
    """Return the mean of each draw over the seeds of training, less the mean of its seeds: draws are what is compared."""
    found: dict[int, dict[int, float]] = {}
    for run, value in zip(runs, values, strict=True):
        found.setdefault(run.draw, {})[run.seed] = value
    table = np.array([[found[draw][seed] for seed in sorted(found[draw])] for draw in sorted(found)])
    return table.mean(axis=1) - table.mean()


def correlation(scores: list[float], runs: list[Drawn]) -> tuple[float, float]:
    """Return Pearson's r over draws and its p."""
    found = stats.pearsonr(by_draw(scores, runs), by_draw([run.log_ppl for run in runs], runs))
    return float(found.statistic), float(found.pvalue)


def best_of(scores: list[float], runs: list[Drawn], *, is_better: Literal["higher", "lower"], choice: int = CHOICE) -> float:
    """Return the change in PPL from any one draw to the best by score among some, over all choices of this many draws."""
    ranked, log_ppls = by_draw(scores, runs), by_draw([run.log_ppl for run in runs], runs)
    order = np.argsort(ranked if is_better == "lower" else -ranked, kind="stable")
    # The draw in place n is the best of a choice if all others of the choice come after it.
    chances = [math.comb(len(order) - place - 1, choice - 1) / math.comb(len(order), choice) for place in range(len(order))]
    return math.exp(float(np.dot(chances, log_ppls[order]))) - 1


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
    """Estimate both variances from a complete crossed design with at least two of each; None otherwise."""
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
    """Return the interval of a factor's spread, times the root of the number of observations per level."""
    if ratio == 0:
        return 0.0, 0.0
    outside = (1 - LEVEL) / 2
    quantiles = [(stats.f.ppf(q, freedom, rest_freedom), stats.chi2.ppf(q, freedom)) for q in (1 - outside, outside)]
    squares = [freedom * mean_square * max(0.0, 1 - f / ratio) / chi for f, chi in quantiles]
    return math.sqrt(squares[0]), math.sqrt(squares[1])


def print_spread(runs: list[Drawn]) -> None:
    """Print the standard deviation of the perplexity over draws, over seeds of training, and what neither explains."""
    found = spread({(run.draw, run.seed): run.log_ppl for run in runs})
    assert found is not None
    # Of a logarithm, so about a share of the PPL itself.
    over_draws = f"{100 * found.over_draws:.2f}% [{100 * found.low:.2f}, {100 * found.high:.2f}]"
    rest = f"{100 * found.over_seeds:.2f}% | {100 * found.rest:.2f}% | {found.p_value:.3f}"
    print("| draws x seeds | over draws [95%] | over seeds | rest | p |\n|---|---|---|---|---|")
    print(f"| {found.draws} x {found.seeds} | {over_draws} | {rest} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", nargs="?", choices=("scores", "spread"), default="scores")
    parser.add_argument("--results", type=Path, default=Path("results/draws"))
    parser.add_argument("--lang", choices=sorted(HEADINGS), default="en", help="of the table's headings")
    options = parser.parse_args()
    runs = read(options.results)
    draws, seeds = ({getattr(run, name) for run in runs} for name in ("draw", "seed"))
    if len(draws) < CHOICE or len(runs) != len(draws) * len(seeds):
        raise SystemExit(f"{options.results}: {len(runs)} runs, not {CHOICE} draws or more at the same seeds of training each")
    if options.table == "scores":
        print_scores(runs, options.lang, design=f"{len(draws)} x {len(seeds)}")
    elif len(seeds) > 1:
        print_spread(runs)
    else:
        raise SystemExit(f"{options.results}: one seed of training; two or more separate its luck from that of the draw")


def print_scores(runs: list[Drawn], lang: str, *, design: str) -> None:
    """Print how well each score predicts the perplexity that came of a draw."""
    print(f"{HEADINGS[lang].format(choice=CHOICE)}\n|---|---|---|---|---|---|")
    for score in SCORES:
        scores = [score.of(run) for run in runs]
        r, p = correlation(scores, runs)
        known = f"{r:+.2f} | {p:.3f}" if score.of is not outcome else " | "
        gain = f"{100 * best_of(scores, runs, is_better=score.is_better):+.1f}%"
        print(f"| {score.names[lang]} | {WORDS[score.is_better][lang]} | {design} | {known} | {gain} |")


if __name__ == "__main__":
    main()
