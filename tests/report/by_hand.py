"""Arms with figures by seed, and the gap between two of them computed by hand."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from oelm.experiments.catalog import Catalog
from tests.experiments.planned import catalog_of
from tests.report.synthetic import package_catalog, write_arm

# Student's quantiles at 97.5%, from a printed table.
T = {1: 12.7062, 2: 4.30265, 4: 2.77645}
BASE = {0: 30.0, 1: 30.3, 2: 29.8}
LADDER = {
    "GPT-02-uniform": {0: 55.0, 1: 54.0, 2: 56.0},
    "GPT-03": {0: 40.0, 1: 41.0, 2: 40.5},
    "GPT-02-matched": {0: 33.0, 1: 33.5, 2: 32.5},
    "GPT-02": {0: 31.0, 1: 31.6, 2: 30.9},
    "GPT-01": BASE,
}


def write_by_seed(root: Path, experiment: str, figures: Mapping[int, float], **chosen: Any) -> None:
    """Write an arm of these seeds and figures."""
    write_arm(root, experiment, list(figures.values()), seeds=list(figures), **chosen)


def ratio_by_hand(ours: Mapping[int, float], theirs: Mapping[int, float]) -> str:
    """Return how a gap of perplexities is written: the geometric mean of paired ratios with its 95% interval."""
    logs = [math.log(ours[seed] / theirs[seed]) for seed in sorted(ours.keys() & theirs.keys())]
    half = T[len(logs) - 1] * statistics.stdev(logs) / math.sqrt(len(logs))
    mean = statistics.fmean(logs)
    value, low, high = (100 * (math.exp(end) - 1) for end in (mean, mean - half, mean + half))
    return f"{value:+.1f}% [{low:+.1f}, {high:+.1f}]"


def catalog_with(*entries: str) -> Catalog:
    """Return the package's catalog with entries of a user's own."""
    return Catalog(package_catalog().experiments | catalog_of("\n".join(entries)).experiments)
