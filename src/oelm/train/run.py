"""`train`: start, resume or extend the run that a config describes."""

from __future__ import annotations

import contextlib
import logging
import platform
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from oelm.config import FinetuneConfig, InitFrom, RunConfig, TrainConfig
from oelm.errors import STOPPED, DataError, OelmError, OutOfMemoryError, RunDirError
from oelm.files import dump_json, read_json, sha256_file, write_bytes
from oelm.method.audit import audit
from oelm.process import StopFlag
from oelm.runs.finished import RESTORE, read_judged
from oelm.runs.layout import AUDIT, MANIFEST, SAVED_MODEL, TIMING, TOKENIZER
from oelm.runs.records import AuditRecord, DataRecord, Manifest, data_fingerprint, saved_step, write_record
from oelm.runs.rundir import RunDir
from oelm.runs.status import Progress, StatusName, read_status
from oelm.train.checkpoint import environment, open_checkpoint, source_revision
from oelm.train.device import Estimate, check_fits, choose_compute, gibibytes, is_out_of_memory, what_to_lower
from oelm.train.dist import ALONE, World
from oelm.train.finish import finish
from oelm.train.load import find_checkpoint
from oelm.train.loop import run_loop
from oelm.train.optim import shortened_warmup
from oelm.train.session import Session, build_session, open_run, resume
from oelm.train.task import Task
from oelm.train.watch import Watch

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Options:
    """How to run; none of these changes a result."""

    strict: bool = False
    exact_step: int | None = None
    preflight: bool = True


@dataclass(frozen=True)
class Result:
    """How a session ended; `figures` is timing_stats.json once done. 'found done': it was done before."""

    status: Literal["done", "found done", "stopped"]
    step: int
    path: Path
    figures: dict[str, Any] | None


def resolve_start(path: Path) -> InitFrom:
    """Return the checkpoint to start from: the best of a run directory, or the checkpoint directory itself."""
    checkpoint = open_checkpoint(find_checkpoint(path, which="best").resolve())
    return InitFrom(
        checkpoint=str(checkpoint.path),
        sha256=sha256_file(checkpoint.path / SAVED_MODEL),
        tokenizer_sha256=checkpoint.saved.tokenizer_sha256,
    )


def train(
    config: RunConfig | FinetuneConfig,
    out: Path,
    *,
    stop: StopFlag,
    watch: Watch,
    options: Options | None = None,
    world: World = ALONE,
) -> Result:
    """Run the run in `out` to its last step, from where it is; return early, resumable, if `stop` is set.

    Every process of a world makes the same call and gets the same result.
    """
    options = options or Options()
    with world.guarded(), contextlib.ExitStack() as held:
        compute = choose_compute(config.device, config.precision)
        with world.writer_first():
            folder, resolved, task = open_run(config, out, compute, stop=stop, watch=watch, world=world, held=held)
        if folder.is_done(resolved):
            if options.exact_step is not None:
                raise RunDirError(f"{out} is finished, so there is nothing to resume from step {options.exact_step}")
            _check_data_unchanged(out, task)
            _check_record(out, resolved)
            return Result("found done", resolved.steps, out, read_json(out / TIMING))
        folder.set_status("running", Progress(step=0, steps=resolved.steps), message="starting")
        with _failure_noted(folder, resolved), world.guarded():
            needs = task.estimate(compute.device)
            if options.preflight:
                check_fits(needs, resolved, run=out, device=compute.device)
            session = build_session(resolved, folder, task, compute, stop=stop, watch=watch, world=world)
            resume(session, strict=options.strict, exact_step=options.exact_step)
            if world.is_writer:
                _announce(session, needs)
            run_loop(session)
            # A stop may come during the last evaluations; the run is done only after them.
            figures = _finished(session) if session.state.evaluated_step >= resolved.steps else None
            if figures is None:
                log.info("stopped by %s at step %d", session.stop.reason or stop.reason, session.state.step)
                folder.set_status("stopped", session.progress(), message=session.stop.reason or stop.reason or "")
                return Result("stopped", session.state.step, out, None)
            log.info("done at step %d", resolved.steps)
            # Last of all: nothing after it may fail on a full disk.
            folder.set_status("done", session.progress())
            return Result("done", resolved.steps, out, figures)


def _finished(session: Session) -> dict[str, Any] | None:
    """Return the final figures in every process, once the writer has written them; None if a stop came first."""
    world, figures = session.world, None
    with world.writer_first():
        if world.is_writer:
            figures = finish(session)
    if not world.tell(figures is not None):
        return None
    return figures or read_json(session.folder.path / TIMING)


def _check_data_unchanged(run: Path, task: Task) -> None:
    """Raise DataError if a finished run was trained on other text than the present one."""
    then, now = data_fingerprint(run), task.data.fingerprint
    if not then:
        raise DataError(
            f"{run / MANIFEST}: is missing or names no data, so it is unknown what this finished run was trained on; "
            f"restore the file from a copy, or move {run} aside and repeat the same command"
        )
    if then != now:
        raise DataError(
            f"{run} was trained on other data (fingerprint {then[:12]}..., now {now[:12]}...): "
            "bring back the old text, or give --out a new folder"
        )


def _check_record(run: Path, config: TrainConfig) -> None:
    """Recompute a finished run's figures; raise DataError if its record was edited or damaged."""
    try:
        read_judged(run, steps=config.steps)
    except DataError as problem:
        raise DataError(
            f"{str(problem).removesuffix(f'; {RESTORE}')}. The run is finished, but its record was changed: restore "
            f"the file from a copy, or move {run} aside and repeat the same command"
        ) from None


@contextlib.contextmanager
def _failure_noted(folder: RunDir, config: TrainConfig) -> Iterator[None]:
    """Record in status.json how a run ended by an exception; out of memory, add what to lower."""
    try:
        try:
            yield
        except (RuntimeError, MemoryError) as problem:
            if not is_out_of_memory(problem):
                raise
            raise OutOfMemoryError(f"out of memory ({str(problem).splitlines()[0]}): {what_to_lower(config)}") from problem
    except BaseException as problem:
        resumable = isinstance(problem, KeyboardInterrupt) or getattr(problem, "exit_code", None) == STOPPED
        # An error while recording must not hide the error that ended the run.
        with contextlib.suppress(OelmError):
            log.error("%s: %s", type(problem).__name__, problem)
        with contextlib.suppress(OelmError):
            name: StatusName = "stopped" if resumable else "failed"
            folder.set_status(name, _last_progress(folder, config), message=f"{type(problem).__name__}: {problem}")
        raise


def _last_progress(folder: RunDir, config: TrainConfig) -> Progress:
    """Return the progress of a run that ended by an exception: that of its newest checkpoint."""
    status = read_status(folder.path)
    try:
        step = saved_step(folder.path)
    except OelmError:
        # Report the error that ended the run, not a damaged pointer.
        step = status.step if status is not None else 0
    known = status.model_dump(include={"loss", "best", "metric", "step_s", "device"}) if status is not None else {}
    return Progress(step=step, steps=config.steps, **known)


def _announce(session: Session, needs: Estimate) -> None:
    report = audit(session.model)
    # Of the start: what is thawed or frozen later, the method says.
    if session.state.step == 0 or not (session.folder.path / AUDIT).is_file():
        record = AuditRecord.model_validate_json(dump_json(report.as_dict()))
        write_record(session.folder.path / AUDIT, record, guard=session.folder.check_held)
    # A copy, so that a run can be read from, scored and exported without the data it was trained on.
    data = session.task.data
    tokenizer = data.tokenizer_path.read_bytes()
    write_bytes(session.folder.path / TOKENIZER, tokenizer, guard=session.folder.check_held)
    session.folder.write_manifest(_manifest(session))
    session.watch.on_remark(f"run directory: {session.folder.path}")
    session.watch.on_remark(data.summary)
    session.watch.on_remark(str(report))
    session.watch.on_remark(
        f"{session.compute.device}, {session.compute.precision} ({session.compute.reason}), "
        f"threads: {torch.get_num_threads()}; about {gibibytes(needs.memory)} of memory, "
        f"{gibibytes(needs.disk)} of disk"
    )
    log.info("%s", report)
    if remark := shortened_warmup(session.config):
        session.watch.on_remark(remark)
        log.info("%s", remark)
    method, config = session.config.method, session.config
    assert isinstance(config, RunConfig | FinetuneConfig)
    start = config.init_from if isinstance(config, RunConfig) else config.model.source
    if start is None and method.freeze and method.keeps_weights:
        log.warning("this method keeps the weights that it finds; without a trained model to start from, they are random")


def _manifest(session: Session) -> Manifest:
    data = session.task.data
    return Manifest(
        python=platform.python_version(),
        oelm=version("oelm"),
        source_revision=source_revision(),
        # A class of torch's own, which strict types refuse.
        torch=str(torch.__version__),
        numpy=np.__version__,
        environment=environment(session.compute, processes=session.world.size),
        data=DataRecord(name=data.name, source=data.source, fingerprint=data.fingerprint, tokenizer=data.tokenizer),
    )
