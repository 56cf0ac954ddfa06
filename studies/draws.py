"""Can good frames be told before they are trained on? Scores of a draw against the perplexity that came of it.

    python studies/draws.py [--results results/draws] [--lang zh]

Reads the records of runs whose frames have a seed of their own (`method.seed`), crossed with seeds of training; builds the
frames of each anew, scores them, and correlates score and log PPL over draws, both meant over the seeds of training. What is
gained by training on the best of `CHOICE` draws instead of on any one: the mean over all choices among those that were run.
To make such records: `oelm run GPT-02 --no-baseline --set method.seed=11 --seeds 2`, and so on with 12, 13, ...
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from scipy import stats

import oelm
from oelm.config import parse_config
from oelm.method.sites import attention_sites
from oelm.report.collect import recipe_differences
from oelm.report.draws import shared_recipe
from oelm.train.schedule import warmup_steps

HEADINGS = {
    "en": "| score of a draw | better when | draws x seeds | correlation with log PPL | p | PPL, best of {choice} by it |",
    "zh": "| 抽样的评分 | 何者为佳 | 抽样 x 种子 | 与 log PPL 的相关系数 | p | 按其从 {choice} 个中取最佳的 PPL |",
}
# Of so many draws the best is taken.
CHOICE = 4


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
    """Return every finished run whose frames have a seed of their own; all must be of one recipe, on the same data."""
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


def refuse_mixture(recipes: dict[Path, dict[str, Any]]) -> None:
    """Stop where records are of several recipes: what a setting does would be taken for a draw's luck."""
    paths = list(recipes)
    for path in paths[1:]:
        if changes := recipe_differences(recipes[paths[0]], recipes[path]):
            raise SystemExit(
                f"{paths[0].parent} and {path.parent} are of two recipes: {'; '.join(changes)}; "
                "name a folder with records of one (--results)"
            )


def frames(run: Drawn) -> list[tuple[Any, Any]]:
    """Build a run's frames anew; return Q and K of every attention as float64, heads x rows x columns."""
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
    """The training loss from the end of the warm-up to a third of the run: what a third of the cost tells."""
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
    """A number for a draw; which of two draws it holds for the better one was said before any was trained on."""

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
    """Return the change in PPL from any one draw to the best by score among some, over all choices of so many draws."""
    ranked, log_ppls = by_draw(scores, runs), by_draw([run.log_ppl for run in runs], runs)
    order = np.argsort(ranked if is_better == "lower" else -ranked, kind="stable")
    # The draw in place n is the best of a choice where all others of the choice stand behind it.
    chances = [math.comb(len(order) - place - 1, choice - 1) / math.comb(len(order), choice) for place in range(len(order))]
    return math.exp(float(np.dot(chances, log_ppls[order]))) - 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=Path("results/draws"))
    parser.add_argument("--lang", choices=sorted(HEADINGS), default="en", help="of the table's headings")
    options = parser.parse_args()
    runs = read(options.results)
    draws, seeds = ({getattr(run, name) for run in runs} for name in ("draw", "seed"))
    if len(draws) < CHOICE or len(runs) != len(draws) * len(seeds):
        raise SystemExit(f"{options.results}: {len(runs)} runs, not {CHOICE} draws or more at the same seeds of training each")
    print(f"{HEADINGS[options.lang].format(choice=CHOICE)}\n|---|---|---|---|---|---|")
    for score in SCORES:
        scores = [score.of(run) for run in runs]
        r, p = correlation(scores, runs)
        known = f"{r:+.2f} | {p:.3f}" if score.of is not outcome else " | "
        gain = f"{100 * best_of(scores, runs, is_better=score.is_better):+.1f}%"
        better = WORDS[score.is_better][options.lang]
        print(f"| {score.names[options.lang]} | {better} | {len(draws)} x {len(seeds)} | {known} | {gain} |")


if __name__ == "__main__":
    main()
