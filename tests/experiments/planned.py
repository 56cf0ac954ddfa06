"""Catalogs from text, and planned runs that look finished, without training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from oelm.config import RunConfig
from oelm.experiments.catalog import Catalog, build_catalog, parse_yaml
from oelm.experiments.plan import PlannedRun
from oelm.files import write_json
from tests.experiments.recorded import status_of

# A baseline and an arm, as a user would write them.
PAIR = """
base:
  kind: language_model
  data: stdlib
arm:
  extends: base
  method: oelm_freeze
  baseline: base
  criterion: {ppl_ratio_at_most: 1.05}
"""


def catalog_of(*texts: str) -> Catalog:
    """Return the catalog of files called 0.yaml, 1.yaml, ..."""
    return build_catalog([parse_yaml(text, where=f"{number}.yaml") for number, text in enumerate(texts)])


def finish(run: PlannedRun, best: float, *, test: float | None = None) -> None:
    """Leave behind what a finished run would: a PPL of `best` (its loss the same number here), or an accuracy; one on test."""
    is_ppl = isinstance(run.config, RunConfig)
    status = status_of("done", best=best, metric="ppl" if is_ppl else "accuracy")
    figures: dict[str, Any] = {"best_val_loss": best} if is_ppl else {"best_accuracy": best}
    figures |= {} if test is None else {"test_ppl" if is_ppl else "test_accuracy": test}
    write_json(run.path / "config.json", run.config.as_dict(), durable=False)
    write_json(run.path / "status.json", status.model_dump(mode="json"), durable=False)
    write_json(run.path / "timing_stats.json", {**figures, "wall_s": {"total": 100.0}}, durable=False)


def plain_model(folder: Path, **facts: Any) -> Path:
    """Write a model's folder without weights: its config.json alone."""
    write_json(folder / "config.json", facts, durable=False)
    return folder
