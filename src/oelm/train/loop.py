"""The training loop: evaluate, save, step, until done or stopped."""

from __future__ import annotations

import logging
import math
import time

from oelm.errors import NonFiniteError
from oelm.runs.records import EvaluationRow, StepRow
from oelm.train.device import synchronize
from oelm.train.optim import learning_rate, set_learning_rate, warmup_steps
from oelm.train.session import Session, follow_plan
from oelm.train.step import Outcome, train_step
from oelm.train.task import Batch
from oelm.train.watch import StepReport

log = logging.getLogger(__name__)


def run_loop(run: Session) -> None:
    """Train from the session's state to the last step, or to a whole checkpoint at the first boundary after a stop."""
    try:
        _train(run)
    except NonFiniteError as problem:
        saved = "Nothing was saved" if run.saved is None else f"The checkpoint of step {run.saved.step} is good"
        advice = f"lower optim.lr (now {run.config.optim.lr:g}), raise schedule.warmup_steps or use precision float32"
        raise NonFiniteError(f"{problem}. {saved}; in a new run, {advice}") from None


def _train(run: Session) -> None:
    while True:
        if is_due(run, run.config.eval_every) and run.state.evaluated_step < run.state.step:
            evaluate(run)
        if run.state != run.saved and (is_due(run, run.config.save_every) or run.state.is_best_here or run.stop.requested()):
            run.save()
        # A stop may have come since the check above: return only after a save.
        if run.state.step >= run.config.steps or (run.state == run.saved and run.stop.requested()):
            return
        with run.clock.phase("data"):
            batch = run.task.batch(run.state.step)
        with run.clock.phase("step"):
            update(run, batch)


def is_due(run: Session, every: int) -> bool:
    """Whether something that happens every `every` steps, and at the end, is due at the present step."""
    step = run.state.step
    return step > 0 and (step % every == 0 or step in (run.config.steps, *run.config.extended_at))


def update(run: Session, batch: Batch) -> None:
    """Take one step and report it."""
    started = time.perf_counter()
    if run.state.step in run.plan.moments:
        follow_plan(run)
    lr = learning_rate(run.config, run.state.step)
    set_learning_rate(run.optimizer, lr, step=run.state.step, warmup_steps=warmup_steps(run.config, run.plan.steps))
    outcome = train_step(
        lambda micro_batch: run.task.loss(run.forward, run.model, batch, micro_batch),
        run.model,
        run.optimizer,
        run.scaler,
        num_micro_batches=batch.num_micro_batches,
        clip_norm=run.config.optim.clip_norm,
        noise_seed=run.config.seed,
        batch_ids=batch.ids,
        step=run.state.step,
        world=run.world,
        forward=run.forward,
        stop=run.stop,
    )
    synchronize(run.compute.device)
    run.state = run.state.advanced(tokens=batch.num_tokens)
    if run.world.size > 1 and run.state.step - 1 in (run.started_at[1], *run.plan.moments):
        run.report_traffic()
    report_step(run, outcome, lr=lr, seconds=time.perf_counter() - started, tokens=batch.num_tokens)


def report_step(run: Session, outcome: Outcome, *, lr: float, seconds: float, tokens: int) -> None:
    """Write the step to metrics.jsonl and report it to the watch."""
    step, steps = run.state.step, run.config.steps
    # At every step, as it costs microseconds: training on without a folder would lose hours.
    run.folder.check_held()
    row = StepRow(
        step=step,
        loss=outcome.loss,
        lr=lr,
        grad_norm=outcome.grad_norm if math.isfinite(outcome.grad_norm) else None,
        tokens_per_s=tokens / seconds,
        step_s=seconds,
    )
    run.folder.metrics.write(**row.model_dump())
    run.last_loss = outcome.loss
    run.recent_s.append(seconds)
    run.folder.heartbeat(run.progress)
    run.watch.on_step(StepReport(step, steps, outcome.loss, lr, tokens / seconds, run.eta_s()))


def evaluate(run: Session) -> None:
    """Evaluate on the whole validation split, unless a stop comes first."""
    with run.clock.phase("validation"):
        evaluation = run.task.evaluate(run.model, run.stop, progress=run.report_validation, world=run.world)
    if evaluation is None:
        return
    if not math.isfinite(evaluation.loss):
        raise NonFiniteError(f"step {run.state.step}: validation loss {evaluation.loss}: training diverged")
    run.last_evaluation = evaluation
    run.state = run.state.evaluated(evaluation.criterion)
    run.folder.check_held()
    row = EvaluationRow(step=run.state.step, **evaluation.as_row())
    run.folder.metrics.write(**row.model_dump(exclude_unset=True))
    log.info("step %d: %s", run.state.step, evaluation.headline())
    run.watch.on_evaluation(run.state.step, evaluation, is_best=run.state.is_best_here)
