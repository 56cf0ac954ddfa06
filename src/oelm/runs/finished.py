"""What a finished run left, read whole: every figure that a verdict may rest on is computed once more from its files."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from oelm.errors import DataError
from oelm.files import read_as, read_json
from oelm.method.method import starts_otherwise, tops_otherwise
from oelm.runs.layout import ATTENTION, AUDIT, CONFIG, MANIFEST, METRICS, PREDICTIONS, TIMING, EvaluatedSplit
from oelm.runs.metrics import read_metrics
from oelm.runs.records import (
    AttentionRecord,
    AuditRecord,
    DocumentRow,
    EvaluationRow,
    ExampleRow,
    Figures,
    HeadRecord,
    Manifest,
    Predictions,
    majority_share,
    read_predictions,
    read_rows,
)

RESTORE = "restore the record from a copy, or repeat the run"
_TESTED = ("test_step", "test_loss", "test_ppl", "test_bits_per_byte", "test_accuracy")
_PPLS = ("test_ppl", "bigram_ppl", "test_bigram_ppl")


@dataclass(frozen=True, kw_only=True)
class Finished:
    """What a report needs of a finished run: `curve` is its validation loss by step, `heads` each measure's mean by layer."""

    manifest: Manifest
    audit: AuditRecord
    figures: Figures
    curve: dict[int, float]
    heads: dict[str, dict[int, float]]


def read_settings(run: Path) -> dict[str, Any]:
    """Read a run's config as plain data: a report shows runs of other versions, too. DataError where it is damaged."""
    config = read_json(run / CONFIG)
    if not isinstance(config, dict):
        raise DataError(f"{run / CONFIG}: must be an object, found {type(config).__name__}")
    return config


def read_finished(run: Path, config: Mapping[str, Any]) -> Finished:
    """Return what a finished run left; DataError where a file is missing, damaged, or at odds with another."""
    figures, evaluations = read_judged(run, steps=config.get("steps"))
    return Finished(
        manifest=read_as(Manifest, run / MANIFEST),
        audit=_read_audit(run / AUDIT, config.get("method")),
        figures=figures,
        curve={row.step: row.val_loss for row in evaluations},
        heads=_read_heads(run / ATTENTION),
    )


def _read_audit(path: Path, method: object) -> AuditRecord:
    """Return a run's audit; DataError where its counts do not add up, or its start is not what the method says."""
    audit = read_as(AuditRecord, path)
    if audit.total < 1 or audit.trainable + audit.frozen != audit.total:
        raise DataError(f"{path}: trainable and frozen parameters do not add up to the total")
    if isinstance(method, dict) and (other := starts_otherwise(method, audit.projections)) is not None:
        found, wanted = ("is frozen", "learns") if other.is_frozen else ("learns", "is frozen")
        raise DataError(f"{path}: {other.name} {found} at the start; by the method of {CONFIG} it {wanted} then")
    if isinstance(method, dict) and (role := tops_otherwise(method, audit.by_role)) is not None:
        count = audit.by_role.get(role, {}).get("trainable", 0)
        raise DataError(
            f"{path}: {count:,} parameters of a {role} learn; {CONFIG} has method.{role} = {method.get(role, 'none')!r}, "
            f"which is another model; {RESTORE}"
        )
    return audit


def _read_heads(path: Path) -> dict[str, dict[int, float]]:
    """Return what the heads of the trained model do, where that was looked at."""
    if not path.is_file():
        return {}
    layers: dict[int, list[HeadRecord]] = defaultdict(list)
    for head in read_as(AttentionRecord, path).heads:
        layers[head.layer].append(head)
    measures = [name for name in HeadRecord.model_fields if name not in ("layer", "head")]
    return {
        name: {layer: statistics.fmean(getattr(head, name) for head in heads) for layer, heads in layers.items()}
        for name in measures
    }


def read_judged(run: Path, *, steps: object) -> tuple[Figures, list[EvaluationRow]]:
    """Read a finished run's figures and evaluations; DataError where one is missing, damaged, or at odds with another file."""
    figures = read_as(Figures, run / TIMING)
    if (figures.best_ppl is None) == (figures.best_accuracy is None):
        raise DataError(f"{run / TIMING}: must have one of best_ppl and best_accuracy")
    if "total" not in figures.wall_s:
        raise DataError(f"{run / TIMING}: wall_s has no total")
    evaluations = _read_evaluations(run / METRICS)
    if problems := judged_problems(run, figures, evaluations, steps=steps):
        raise DataError(f"{run}/{problems[0]}; {RESTORE}")
    return figures, evaluations


def _read_evaluations(path: Path) -> list[EvaluationRow]:
    try:
        rows = [row for row in read_metrics(path, only='"val_loss"') if "val_loss" in row]
    except OSError as problem:
        raise DataError(f"{path}: cannot be read ({problem})") from None
    evaluations = read_rows(EvaluationRow, path, rows)
    if max((row.step for row in evaluations), default=0) < 1:
        raise DataError(f"{path}: holds no evaluation")
    return evaluations


def judged_problems(run: Path, figures: Figures, evaluations: list[EvaluationRow], *, steps: object) -> list[str]:
    """Compute every figure that a verdict may rest on once more, from the evaluations and from the answers that are stored.

    Return what disagrees: the file, what it has, and what the others give. `steps` is how many the config has, if it says so.
    """
    problems = _curve_problems(evaluations, steps)
    if problems:
        return problems
    stored = f"{TIMING}: "
    for name, value in recomputed(figures, evaluations).items():
        if not agrees(getattr(figures, name), value):
            problems.append(f"{stored}{name} is {getattr(figures, name)}, {METRICS} gives {value}")
    ranks = {row.step: row.val_loss if figures.best_ppl is not None else -(row.val_accuracy or 0.0) for row in evaluations}
    best = min(ranks, key=ranks.__getitem__)
    if ranks.get(figures.best_step) != ranks[best]:
        problems.append(f"{stored}best_step is {figures.best_step}, {METRICS} gives {best}")
    problems += [stored + problem for problem in tested_problems(figures)]
    for split in PREDICTIONS:
        problems += _answer_problems(run, figures, split)
    return problems


def _curve_problems(evaluations: list[EvaluationRow], steps: object) -> list[str]:
    """Tell what is wrong with the evaluations themselves: each step once, in order, to the last one, losses that can be."""
    for before, row in pairwise(evaluations):
        if row.step <= before.step:
            told = "is evaluated twice" if row.step == before.step else f"is evaluated after step {before.step}"
            return [f"{METRICS}: step {row.step} {told}"]
    if isinstance(steps, int) and evaluations[-1].step != steps:
        return [f"{METRICS}: the last evaluation is of step {evaluations[-1].step}, config.json has {steps} steps"]
    for row in evaluations:
        if row.val_loss < 0:
            return [f"{METRICS}: val_loss is {row.val_loss} at step {row.step}: a cross entropy is never below 0"]
        if row.val_ppl is not None and not agrees(row.val_ppl, _perplexity(row.val_loss)):
            return [f"{METRICS}: val_ppl is {row.val_ppl} at step {row.step}, its val_loss gives {_perplexity(row.val_loss)}"]
        if row.val_accuracy is not None and not 0 <= row.val_accuracy <= 1:
            return [f"{METRICS}: val_accuracy is {row.val_accuracy} at step {row.step}: no share of examples"]
    return []


def recomputed(figures: Figures, evaluations: list[EvaluationRow]) -> dict[str, float | None]:
    """Return the figures that follow from the evaluations of a run of this kind."""
    last, best = evaluations[-1], min(row.val_loss for row in evaluations)
    found: dict[str, float | None] = {"final_val_loss": last.val_loss, "best_val_loss": best}
    if figures.best_ppl is not None:
        found |= {"final_ppl": _perplexity(last.val_loss), "best_ppl": _perplexity(best)}
        found |= {"final_bits_per_byte": last.bits_per_byte}
    if figures.best_accuracy is not None:
        accuracies = [row.val_accuracy for row in evaluations if row.val_accuracy is not None]
        found |= {"final_accuracy": last.val_accuracy, "best_accuracy": max(accuracies, default=None)}
    return found


def _perplexity(loss: float) -> float:
    return math.exp(min(loss, 700.0))


def agrees(stored: object, value: object) -> bool:
    """Whether two figures are the same but for the last bits, which another machine's exp and order of sums may differ in."""
    if isinstance(stored, float | int) and isinstance(value, float | int):
        return math.isclose(stored, value, rel_tol=1e-9)
    return stored == value


def _answer_problems(run: Path, figures: Figures, split: EvaluatedSplit) -> list[str]:
    """Tell which figures the stored answers do not give: of the final model on validation, of the best on test."""
    path = run / PREDICTIONS[split]
    if not path.is_file():
        return []
    rows = read_predictions(path)
    on_test = ("test_loss", "test_accuracy", "test_majority_accuracy")
    names = ("final_val_loss", "final_accuracy", "majority_accuracy") if split == "val" else on_test
    if not rows or not answers_weight(rows):
        return [f"{path.name}: holds no whole answer"]
    found: dict[str, float] = {names[0]: sum(row.nats for row in rows) / answers_weight(rows)}
    answers = [row for row in rows if isinstance(row, ExampleRow)]
    if answers and figures.best_accuracy is not None:
        found[names[1]] = sum(row.label == row.predicted for row in answers) / len(answers)
        # Records of before it was measured have none.
        if figures.majority_on(split) is not None:
            found[names[2]] = majority_share([row.label for row in answers])
    return [
        f"{TIMING}: {name} is {getattr(figures, name)}, {path.name} gives {value}"
        for name, value in found.items()
        if not agrees(getattr(figures, name), value)
    ]


def tested_problems(figures: Figures) -> list[str]:
    """Tell which figures of the test split, and of n-gram models, cannot be: half of them there, or at odds."""
    named = ("test_step", "test_loss", *(("test_ppl", "test_bits_per_byte") if figures.best_ppl is not None else ()))
    named += ("test_accuracy",) if figures.best_accuracy is not None else ()
    there = [name for name in _TESTED if getattr(figures, name) is not None]
    problems = [f"{name} is {getattr(figures, name)}: no perplexity" for name in _PPLS if (getattr(figures, name) or 1) < 1]
    odd = [(split, values) for split, values in figures.ngram.items() if len(values) != 5 or min(values) < 1]
    problems += [f"ngram: {values} on {split}: no perplexities of order 1 to 5" for split, values in odd]
    if not there:
        return problems
    if set(there) != set(named):
        return [*problems, f"of the test split there are {', '.join(there)}; expected {', '.join(named)}"]
    if figures.test_step != figures.best_step:
        problems.append(f"test_step is {figures.test_step}, the best on validation was {figures.best_step}")
    if figures.test_ppl is not None and not agrees(figures.test_ppl, _perplexity(figures.test_loss or 0.0)):
        problems.append(f"test_ppl is {figures.test_ppl}, its test_loss {figures.test_loss} gives another")
    if figures.test_accuracy is not None and not 0 <= figures.test_accuracy <= 1:
        problems.append(f"test_accuracy is {figures.test_accuracy}: no share of examples")
    return problems


def answers_weight(rows: Predictions) -> int:
    """Return by what the sum of the answers' losses is divided: tokens, or examples."""
    return sum(row.tokens if isinstance(row, DocumentRow) else 1 for row in rows)
