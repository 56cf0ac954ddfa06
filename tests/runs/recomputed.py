"""A finished run's figures, computed once more from everything that it wrote."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from oelm.errors import DataError
from oelm.files import read_as, read_json
from oelm.runs.finished import agrees, answers_weight, recomputed, tested_problems
from oelm.runs.layout import ATTENTION, AUDIT, CONFIG, MANIFEST, METRICS, PREDICTIONS, STATUS, TIMING
from oelm.runs.metrics import read_metrics
from oelm.runs.records import (
    AttentionRecord,
    AuditRecord,
    EvaluationRow,
    Figures,
    Manifest,
    Predictions,
    StepRow,
    StepTimes,
    read_predictions,
    read_rows,
)
from oelm.runs.status import Status
from oelm.train.timing import PHASES, step_statistics


@dataclass(frozen=True)
class RunRecord:
    """Everything a finished run wrote, each file in its type; `config` stays plain data, for it names a method."""

    path: Path
    config: dict[str, Any]
    manifest: Manifest
    audit: AuditRecord
    status: Status
    figures: Figures
    steps: list[StepRow]
    evaluations: list[EvaluationRow]
    predictions: Predictions
    attention: AttentionRecord | None
    test_predictions: Predictions = field(default_factory=list)


def read_record(run: Path) -> RunRecord:
    """Read a finished run's files; DataError names the first that is missing, damaged or of another type."""
    config = read_json(run / CONFIG)
    if not isinstance(config, dict):
        raise DataError(f"{run / CONFIG}: must be an object, found {type(config).__name__}")
    metrics = read_metrics(run / METRICS)
    looked = run / ATTENTION
    return RunRecord(
        path=run,
        config=config,
        manifest=read_as(Manifest, run / MANIFEST),
        audit=read_as(AuditRecord, run / AUDIT),
        status=read_as(Status, run / STATUS),
        figures=read_as(Figures, run / TIMING),
        steps=read_rows(StepRow, run / METRICS, [row for row in metrics if "loss" in row]),
        evaluations=read_rows(EvaluationRow, run / METRICS, [row for row in metrics if "loss" not in row]),
        predictions=read_predictions(run / PREDICTIONS["val"]),
        attention=read_as(AttentionRecord, looked) if looked.is_file() else None,
        test_predictions=read_predictions(run / PREDICTIONS["test"]),
    )


def figure_problems(record: RunRecord) -> list[str]:
    """Compute a run's figures once more from its metrics and predictions, and tell which are not what stands there."""
    steps, evaluations, figures = record.steps, record.evaluations, record.figures
    if not steps or not evaluations:
        return ["metrics.jsonl holds no steps or no evaluations"]
    expected: dict[str, Any] = {
        "final_loss": steps[-1].loss,
        "tokens": round(sum(row.tokens_per_s * row.step_s for row in steps)),
        "step_s": StepTimes.model_validate(
            step_statistics([row.step_s for row in steps], warmup_steps=int(record.config.get("timing_warmup_steps", 0)))
        ),
    }
    expected |= recomputed(figures, evaluations)
    problems = [
        f"{name} is {getattr(figures, name)}, its metrics give {value}"
        for name, value in expected.items()
        if not agrees(getattr(figures, name), value)
    ]
    return problems + tested_problems(figures) + _gaps(record) + _sums(record)


def _gaps(record: RunRecord) -> list[str]:
    """Tell steps that are missing or stand twice."""
    numbers = [row.step for row in record.steps]
    return [] if numbers == list(range(1, len(numbers) + 1)) else ["metrics.jsonl has steps missing or twice"]


def _sums(record: RunRecord) -> list[str]:
    """Tell where parts do not make up their whole."""
    problems = []
    wall = record.figures.wall_s
    # Sums of a few hundred numbers in double precision, in another order.
    if not math.isclose(sum(wall[phase] for phase in PHASES), wall["total"], rel_tol=1e-9):
        problems.append("wall_s: the phases do not add up to the total")
    if record.predictions and not _give(record.predictions, record.evaluations[-1].val_loss):
        problems.append("predictions.jsonl does not give the final validation loss")
    tested = record.figures.test_loss
    if (tested is None) != (not record.test_predictions) or (tested is not None and not _give(record.test_predictions, tested)):
        problems.append("test_predictions.jsonl does not give the test loss")
    if record.audit.trainable + record.audit.frozen != record.audit.total:
        problems.append("audit.json: trainable and frozen do not add up to the total")
    return problems


def _give(rows: Predictions, loss: float) -> bool:
    return math.isclose(sum(row.nats for row in rows) / answers_weight(rows), loss, rel_tol=1e-9)
