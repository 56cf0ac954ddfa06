"""The end of a run: predictions, the best model on the test split, and the final figures."""

from __future__ import annotations

import logging
import math
from typing import Any

from torch import nn

from oelm.errors import DataError, NonFiniteError
from oelm.runs.layout import ATTENTION, PREDICTIONS, TIMING, checkpoint_name
from oelm.runs.metrics import missing_rows, read_metrics
from oelm.runs.records import (
    AttentionRecord,
    EvaluationRow,
    Figures,
    StepRow,
    read_rows,
    write_record,
    write_records,
)
from oelm.text import figure_text
from oelm.train.dist import own_stop
from oelm.train.evaluate import Evaluation
from oelm.train.load import load_any
from oelm.train.session import Session
from oelm.train.task import Judging
from oelm.train.timing import step_statistics

log = logging.getLogger(__name__)


def finish(session: Session) -> dict[str, Any] | None:
    """Write predictions, attention, the figures on the test split, and timing; return timing_stats.json.

    None if a stop came first: the same command then repeats all of this, without training.
    """
    path, guard = session.folder.path, session.folder.check_held
    with session.clock.phase("validation"):
        # Known, unless the process ended between the last evaluation and here.
        evaluation = session.last_evaluation or _evaluated(session, session.model, "val")
        if evaluation is None:
            return None
        write_records(path / PREDICTIONS["val"], evaluation.predictions, guard=guard)
        if (heads := session.task.look_at_heads(session.model)) is not None:
            write_record(path / ATTENTION, AttentionRecord.model_validate({"step": session.state.step, **heads}), guard=guard)
        tested = judge_best_on_test(session)
        references = None if tested is None else session.task.references(own_stop(session.stop))
    if tested is None or references is None:
        return None
    figures = {**training_figures(session), **tested, **references}
    write_record(path / TIMING, Figures.model_validate(figures), guard=guard)
    return figures


def judge_best_on_test(session: Session) -> dict[str, Any] | None:
    """Return the figures of the best model on the test split: {} without such a split, None if a stop came first.

    The best model by validation is loaded next to the final one. Raises CheckpointError if its checkpoint is damaged.
    """
    path, step = session.folder.path, session.state.best_step
    session.folder.check_held()
    (path / PREDICTIONS["test"]).unlink(missing_ok=True)
    if not session.task.has_test:
        return {}
    # After going back to a step, the best before it may have been pruned.
    if step is None or not (path / checkpoint_name(step)).is_dir():
        log.warning("no figures of the test split: the checkpoint of the best step, %s, was pruned", step)
        return {}
    session.watch.on_remark(f"the test split, with the model of step {step:,}, the best on validation")
    best = load_any(path, which=str(step)).model.to(session.compute.device)
    evaluation = _evaluated(session, best, "test")
    if evaluation is None:
        return None
    if not math.isfinite(evaluation.loss):
        raise NonFiniteError(f"step {step}: loss {evaluation.loss} on the test split, though finite on validation: no figure")
    write_records(path / PREDICTIONS["test"], evaluation.predictions, guard=session.folder.check_held)
    metric, value = session.task.reading(evaluation.criterion)
    text = f"{'PPL' if metric == 'ppl' else 'accuracy'} {figure_text(metric, value)}"
    log.info("test, model of step %s: %s", f"{step:,}", text)
    session.watch.on_remark(f"test, model of step {step:,}: {text}")
    figures = {f"test_{name.removeprefix('val_')}": value for name, value in evaluation.as_row().items()}
    return {"test_step": step, **figures}


def _evaluated(session: Session, model: nn.Module, split: Judging) -> Evaluation | None:
    return session.task.evaluate(model, own_stop(session.stop), progress=session.report_validation, split=split)


def training_figures(session: Session) -> dict[str, Any]:
    """Return the figures that can be computed again from metrics.jsonl and the clock.

    Raises DataError if the file lacks rows of this run, or has another best than the run's state.
    """
    path, state = session.folder.metrics.path, session.state
    rows = read_metrics(path)
    if fault := missing_rows(rows, step=state.step, evaluated=session.evaluated_steps()):
        raise DataError(f"{path}: {fault}; its figures need them. Restore the file from a copy")
    steps = read_rows(StepRow, path, [row for row in rows if "loss" in row])
    evaluations = [row for row in rows if "val_loss" in row]
    read_rows(EvaluationRow, path, evaluations)
    clock = session.clock.seconds()
    figures = session.task.figures(evaluations)
    _check_best(session, figures)
    return {
        "step_s": step_statistics([row.step_s for row in steps], warmup_steps=session.config.timing_warmup_steps),
        "wall_s": {**clock, "total": sum(clock.values())},
        # Energy is measured or absent, never estimated.
        **({"energy_j": energy} if (energy := session.meter.joules()) else {}),
        "tokens": state.tokens,
        "final_loss": steps[-1].loss,
        **figures,
        "best_step": state.best_step,
    }


def _check_best(session: Session, figures: dict[str, Any]) -> None:
    """Raise DataError if the metrics have another best than the state, which a checkpoint's digest protects."""
    assert session.state.best_value is not None
    metric, best = session.task.reading(session.state.best_value)
    found = figures[f"best_{metric}"]
    # The state holds an accuracy as the share of errors, and 1 - (1 - a) is a up to one rounding.
    if not math.isclose(found, best, rel_tol=1e-12, abs_tol=1e-12):
        raise DataError(
            f"{session.folder.metrics.path}: gives the best {metric} {found!r}, and the checkpoint {best!r} at step "
            f"{session.state.best_step}: the file was changed. Restore it from a copy"
        )
