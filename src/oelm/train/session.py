"""Everything one session of a run works with: its task, built from the config, or continued from a checkpoint."""

from __future__ import annotations

import gc
import logging
import statistics
import time
from collections import deque
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import nn

from oelm.config import FinetuneConfig, RunConfig, TrainConfig
from oelm.data.tokens import OnProgress
from oelm.errors import DataError, OelmError
from oelm.method.apply import Plan, freeze_as_of, hold
from oelm.method.audit import record_of
from oelm.method.layers import selections
from oelm.process import StopFlag
from oelm.runs.records import checkpoint_folders, data_fingerprint
from oelm.runs.rundir import GuestRunDir, RunDir
from oelm.runs.status import Progress, StatusMetric
from oelm.train.checkpoint import (
    Checkpoint,
    Checkpoints,
    SavedState,
    TrainState,
    bound_settings,
    check_bound,
    check_frozen_saved,
    environment,
    load_model,
    load_optimizer,
    software,
)
from oelm.train.classify import ClassifierTask, open_classifier_task
from oelm.train.device import Compute, apply_determinism, device_name, gpu_uuid
from oelm.train.dist import ALONE, World, agreed
from oelm.train.evaluate import Evaluation
from oelm.train.optim import build_optimizer
from oelm.train.task import LanguageModelTask, Task, open_language_task, seen_progress
from oelm.train.timing import Clock, Meter, energy_counters
from oelm.train.watch import Watch

log = logging.getLogger(__name__)


@dataclass
class Session:
    """One session of a run. `state` is its position, `saved` that of the newest checkpoint."""

    config: TrainConfig
    folder: RunDir
    compute: Compute
    task: Task
    model: nn.Module
    plan: Plan
    forward: nn.Module
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler
    checkpoints: Checkpoints
    stop: StopFlag
    watch: Watch
    world: World = ALONE
    state: TrainState = field(default_factory=TrainState)
    saved: TrainState | None = None
    clock: Clock = field(default_factory=lambda: Clock({}))
    meter: Meter = field(default_factory=lambda: Meter({}))
    started_at: tuple[float, int] = (0.0, 0)
    last_evaluation: Evaluation | None = None
    last_loss: float | None = None
    recent_s: deque[float] = field(default_factory=lambda: deque(maxlen=20))

    def save(self) -> None:
        """Publish a checkpoint of the present state, after its metrics are durable."""
        if self.scaler.is_enabled():
            self.state = self.state.model_copy(update={"loss_scale": dict(self.scaler.state_dict())})
        with self.clock.phase("checkpoint"):
            self.world.check_same(self.model, self.state.step)
            with self.world.writer_first():
                if self.world.is_writer:
                    self.folder.check_held()
                    self.folder.metrics.sync()
                    self.checkpoints.publish(self.snapshot(), self.model, self.optimizer)
        self.saved = self.state
        self.folder.set_status("running", self.progress())

    def snapshot(self) -> SavedState:
        return SavedState(
            state=self.state,
            clock=self.clock.seconds(),
            energy_j=self.meter.joules(),
            frozen=record_of(self.model),
            data_fingerprint=self.task.data.fingerprint,
            tokenizer_sha256=self.task.data.tokenizer_sha256,
            environment=environment(self.compute, processes=self.world.size),
            software=software(),
            run=self.folder.run_id,
            config=bound_settings(self.config),
        )

    def evaluated_steps(self) -> list[int]:
        """Return the steps that were evaluated up to the present one: every step that was due."""
        last, config = self.state.evaluated_step, self.config
        due = {*range(config.eval_every, last + 1, config.eval_every), *config.extended_at, config.steps}
        return sorted(step for step in due if step <= last)

    def report_traffic(self) -> None:
        """Report the bytes of gradients that the last step summed over the processes, and what freezing saved."""
        picked = sum(each.out_features * each.in_features for each in selections(self.model).values())
        whole = sum(parameter.nbytes for parameter in self.model.parameters()) + 4 * picked
        summed = self.world.step_bytes
        text = (
            f"{summed:,} bytes of gradients summed in step {self.state.step} over {self.world.size} processes, "
            f"{100 * (1 - summed / whole):.2f}% less than if all {whole // 4:,} parameters trained"
        )
        log.info("%s", text)
        self.watch.on_remark(text)

    def report_validation(self, done: int, total: int) -> None:
        self.folder.heartbeat(self.progress)
        self.watch.on_validating(done, total)

    def eta_s(self) -> float | None:
        """Return the seconds left at this session's pace, including everything between the steps."""
        since, first = self.started_at
        done = self.state.step - first
        return (time.perf_counter() - since) / done * (self.config.steps - self.state.step) if done else None

    def progress(self) -> Progress:
        """Return how far the run is, for status.json."""
        # At every heartbeat: energy counters wrap around within minutes.
        self.meter.joules()
        metric: StatusMetric = ""
        best: float | None = None
        if self.state.best_value is not None:
            metric, best = self.task.reading(self.state.best_value)
        return Progress(
            step=self.state.step,
            steps=self.config.steps,
            eta_s=self.eta_s(),
            loss=self.last_loss,
            best=best,
            metric=metric,
            step_s=statistics.median(self.recent_s) if self.recent_s else None,
            device=device_name(self.compute.device) + (f" x{self.world.size}" if self.world.size > 1 else ""),
        )


def open_run(
    config: RunConfig | FinetuneConfig,
    out: Path,
    compute: Compute,
    *,
    stop: StopFlag,
    watch: Watch,
    world: World,
    held: ExitStack,
) -> tuple[RunDir, RunConfig | FinetuneConfig, Task]:
    """Prepare a run's data, then hold its folder until `held` is closed; return it, the config that is in it, and the task."""
    progress = seen_progress(stop, watch)
    folder = RunDir(out) if world.is_writer else GuestRunDir(out)
    resolved, task = open_task(config, compute, run=out, progress=progress)
    task.join(world)
    return folder, held.enter_context(folder).claim(resolved), task


def open_task(
    config: RunConfig | FinetuneConfig, compute: Compute, *, run: Path, progress: OnProgress
) -> tuple[RunConfig, LanguageModelTask] | tuple[FinetuneConfig, ClassifierTask]:
    """Prepare a run's data; return its config, completed from the data, and its task."""
    known = data_fingerprint(run)
    if isinstance(config, FinetuneConfig):
        return open_classifier_task(config, compute, run=run, known=known, progress=progress)
    return open_language_task(config, compute, known=known, progress=progress)


def build_session(
    config: TrainConfig,
    folder: RunDir,
    task: Task,
    compute: Compute,
    *,
    stop: StopFlag,
    watch: Watch,
    world: World = ALONE,
) -> Session:
    """Build model, optimizer and the rest as at step 0."""
    apply_determinism(deterministic=config.deterministic)
    folder.check_held()
    model = task.build_model(folder.path, is_new=not checkpoint_folders(folder.path))
    plan = freeze_as_of(model, config.method, seed=config.seed, steps=config.planned_steps, step=0)
    model.to(compute.device)
    return Session(
        config=config,
        folder=folder,
        compute=compute,
        task=task,
        model=model,
        plan=plan,
        forward=_forward(model, config, world),
        optimizer=_optimizer(model, config, plan, compute),
        scaler=torch.amp.GradScaler(compute.device, enabled=compute.precision == "fp16"),
        checkpoints=Checkpoints(folder.path, keep=config.keep_checkpoints, guard=folder.check_held),
        stop=agreed(stop, world),
        watch=watch,
        world=world,
        # Each of several processes would see only part of the GPUs, or another host.
        meter=Meter(energy_counters(gpu_uuid=gpu_uuid(compute.device)) if world.size == 1 else {}),
    )


def _forward(model: nn.Module, config: TrainConfig, world: World) -> nn.Module:
    """Return the module that a training step calls: the model, compiled if asked for, wrapped for several processes."""
    # Compiled inside the wrapper, which decides for each backward pass whether to sum gradients.
    called: nn.Module = torch.compile(model) if config.compile else model  # type: ignore[assignment]
    # A pretrained classifier may have weights that this task does not use.
    return world.wrap(called, may_skip=not isinstance(config, RunConfig))


def _optimizer(
    model: nn.Module, config: TrainConfig, plan: Plan, compute: Compute, *, before: torch.optim.Optimizer | None = None
) -> torch.optim.Optimizer:
    decay = config.method.layer_lr_decay
    return build_optimizer(model, config.optim, device=compute.device, layer_lr_decay=decay, plan=plan, before=before)


def follow_plan(session: Session) -> None:
    """Freeze and thaw what is due before the next update; the optimizer keeps the state of what still trains."""
    was = record_of(session.model)
    hold(session.model, session.plan.frozen_at(session.state.step))
    session.optimizer = _optimizer(session.model, session.config, session.plan, session.compute, before=session.optimizer)
    _rewrap(session)
    now = record_of(session.model)
    log.info("step %d: %d tensors are frozen from here on, %d were", session.state.step, len(now), len(was))


def _rewrap(session: Session) -> None:
    """Wrap again, so that only gradients of what trains now are summed."""
    if session.world.size > 1:
        # Drop the old wrapper first: it would wait for the gradients of what it knew.
        session.forward = session.model
        gc.collect()
        session.forward = _forward(session.model, session.config, session.world)


def resume(session: Session, *, strict: bool, exact_step: int | None) -> None:
    """Resume from the newest whole checkpoint, if any, and cut the metrics back to it."""
    with session.world.writer_first():
        _resume(session, strict=strict, exact_step=exact_step)
    session.world.check_same(session.model, session.state.step)


def _resume(session: Session, *, strict: bool, exact_step: int | None) -> None:
    checkpoint = session.checkpoints.newest(exact_step=exact_step)
    if checkpoint is not None:
        check_bound(checkpoint, session.folder.path, session.config)
        _check_same_setting(session, checkpoint, strict=strict)
        hold(session.model, session.plan.frozen_at(max(0, checkpoint.saved.state.step - 1)))
        session.optimizer = _optimizer(session.model, session.config, session.plan, session.compute)
        load_model(checkpoint, session.model)
        check_frozen_saved(session.model, checkpoint, session.folder.path)
        load_optimizer(checkpoint, session.model, session.optimizer)
        saved = checkpoint.saved
        # Equal, unless the manifest is missing.
        session.folder.run_id = saved.run or session.folder.run_id
        session.state = session.saved = saved.state
        session.clock = Clock(saved.clock)
        session.meter = session.meter.continued(saved.energy_j)
        if session.scaler.is_enabled() and saved.state.loss_scale:
            session.scaler.load_state_dict(dict(saved.state.loss_scale))
        if session.world.is_writer:
            session.checkpoints.point(saved)
            # After the pointers: a kill between the two must not leave them without a target.
            if exact_step is not None:
                session.checkpoints.forget_after(exact_step)
        _rewrap(session)
        session.watch.on_remark(f"continuing from step {saved.state.step:,}")
        log.info("continuing from %s", checkpoint.path.name)
    session.folder.check_held()
    session.folder.metrics.rewind(step=session.state.step, evaluated=session.evaluated_steps())
    session.started_at = (time.perf_counter(), session.state.step)


def _check_same_setting(session: Session, checkpoint: Checkpoint, *, strict: bool) -> None:
    saved, now = checkpoint.saved, session.task.data.fingerprint
    if saved.data_fingerprint != now:
        raise DataError(
            f"the data is not what this run began with (fingerprint {now[:12]}..., then {saved.data_fingerprint[:12]}...): "
            "bring back the old text or start a new run with another --out"
        )
    here = environment(session.compute, processes=session.world.size)
    # Older checkpoints do not name the CPU.
    there = {"processes": "1", "cpu": here["cpu"], **saved.environment}
    setting = _changes(there, here)
    code = _changes(saved.software, software()) if saved.software else []
    if (setting or code) and strict:
        raise OelmError(f"refused by --strict: {'; '.join(setting + code)}; restore the setting or leave --strict out")
    if setting:
        log.warning("same batches, but not the same bits as an undisturbed run: %s", "; ".join(setting))
    if code:
        log.warning("this run was begun with other code, and may compute something else now: %s", "; ".join(code))


def _changes(there: dict[str, str], here: dict[str, str]) -> list[str]:
    return [f"{key} was {there.get(key)}, is {value}" for key, value in here.items() if there.get(key) != value]
