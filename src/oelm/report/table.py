"""Arms side by side: what each cost and how far it is from its baseline."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from oelm.files import read_json


@dataclass(frozen=True)
class ArmRow:
    """One arm's figures; `gap` is the change in perplexity against the baseline of the same seed, as a fraction."""

    arm: str
    perplexity: float
    gap: float | None
    bits_per_byte: float
    trainable: int
    frozen: int
    median_step_s: float


def arm_rows(runs: dict[str, Path], *, baseline: str) -> list[ArmRow]:
    """Read the figures of finished runs, one per arm, and compare each with the baseline's best perplexity."""
    figures = {arm: read_json(path / "timing_stats.json") for arm, path in runs.items()}
    audits = {arm: read_json(path / "audit.json") for arm, path in runs.items()}
    reference = float(figures[baseline]["best_ppl"])
    return [
        ArmRow(
            arm=arm,
            perplexity=float(figures[arm]["best_ppl"]),
            gap=None if arm == baseline else float(figures[arm]["best_ppl"]) / reference - 1,
            bits_per_byte=float(figures[arm]["final_bits_per_byte"]),
            trainable=int(audits[arm]["trainable"]),
            frozen=int(audits[arm]["frozen"]),
            median_step_s=float(figures[arm]["step_s"]["median"]),
        )
        for arm in runs
    ]
