"""Arms side by side: what each cost and how far it is from its baseline."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from oelm.errors import ConfigError
from oelm.files import read_json
from oelm.intervals import Ratio, mean_ratio
from oelm.runs.layout import AUDIT, CONFIG, TIMING

# What arms of one comparison may differ in.
_FREE = ("method", "seed")


@dataclass(frozen=True)
class ArmRow:
    """One arm's figures over its seeds; `ratio` is its perplexity over the baseline's, paired by seed."""

    arm: str
    perplexity: float
    ratio: Ratio | None
    trainable: int
    frozen: int
    median_step_s: float


def arm_rows(runs: Mapping[str, Sequence[Path]], *, baseline: str) -> list[ArmRow]:
    """Read the figures of finished runs, the same seeds in the same order for each arm, and compare them in pairs."""
    _check_fair([path for paths in runs.values() for path in paths])
    figures = {arm: [read_json(path / TIMING) for path in paths] for arm, paths in runs.items()}
    reference = _perplexities(figures[baseline])
    return [
        ArmRow(
            arm=arm,
            perplexity=statistics.geometric_mean(_perplexities(figures[arm])),
            ratio=None if arm == baseline else mean_ratio(_perplexities(figures[arm]), reference),
            **_parameters(paths[0]),
            median_step_s=statistics.median(float(row["step_s"]["median"]) for row in figures[arm]),
        )
        for arm, paths in runs.items()
    ]


def _check_fair(runs: list[Path]) -> None:
    """Raise ConfigError unless the runs' configs differ in nothing but method and seed."""
    configs = [{key: value for key, value in read_json(run / CONFIG).items() if key not in _FREE} for run in runs]
    for run, config in zip(runs, configs, strict=True):
        for key in config.keys() | configs[0].keys():
            if config.get(key) != configs[0].get(key):
                raise ConfigError(f"{run} and {runs[0]} differ in '{key}', so they cannot be compared; give both the same")


def _perplexities(figures: list[dict[str, Any]]) -> list[float]:
    return [float(row["best_ppl"]) for row in figures]


def _parameters(run: Path) -> dict[str, int]:
    audit = read_json(run / AUDIT)
    return {"trainable": int(audit["trainable"]), "frozen": int(audit["frozen"])}
