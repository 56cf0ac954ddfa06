"""The demo: four arms that differ in one thing, on text that every Python carries."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from oelm.config import RunConfig, parse_config, with_overrides
from oelm.errors import StoppedError
from oelm.experiments.budget import budget_settings
from oelm.train.run import Result, train
from oelm.train.stop import StopFlag
from oelm.train.watch import Watch

# What learns in Q and K of each arm, in plain words.
ARMS = {
    "baseline": "queries and keys learn",
    "oelm_freeze": "frozen at random orthonormal rows",
    "oelm_lowrank": "frozen, with a small part that learns (1/8)",
    "oelm_axes_q": "queries are slices of the input (no product), keys learn",
}
# Sized so that four arms, tokenizer included, take under five minutes on two CPU cores. Behind a short convolution attention
# is learnt in fewer steps.
_SIZE = {
    "model.model_dim": 96,
    "model.ff_dim": 384,
    "model.short_conv": 3,
    "steps": 500,
    "schedule.warmup_steps": 50,
    "eval_every": 100,
    "save_every": 250,
    "timing_warmup_steps": 50,
}


@dataclass(frozen=True)
class ArmResult:
    """One arm of the demo at one seed, and how its run ended."""

    arm: str
    seed: int
    result: Result


def demo_config(arm: str, *, seed: int, steps: int | None = None) -> RunConfig:
    """Return the config of one arm: same data, order, steps and lr as the others, only the method differs."""
    overrides = {**_SIZE, "method": arm, "seed": seed} | ({} if steps is None else {"steps": steps})
    return parse_config(with_overrides(budget_settings("laptop"), overrides), where="demo")


def run_demo(out: Path, *, seeds: range, steps: int | None, stop: StopFlag, watch: Watch) -> Iterator[ArmResult]:
    """Train all arms seed by seed, yielding each run as it ends; finished ones are found, not trained again."""
    for seed in seeds:
        for arm in ARMS:
            config = demo_config(arm, seed=seed, steps=steps)
            result = train(config, arm_path(out, arm, config), stop=stop, watch=watch)
            if result.status == "stopped":
                raise StoppedError(f"stopped in arm '{arm}' at step {result.step}: repeat the same command to go on from there")
            yield ArmResult(arm, seed, result)


def arm_path(out: Path, arm: str, config: RunConfig) -> Path:
    """Return an arm's place; a demo of other steps has its own, for an extended arm is no match for a fresh one."""
    return out / "demo" / f"{config.steps}-steps" / arm / f"seed-{config.seed}"
