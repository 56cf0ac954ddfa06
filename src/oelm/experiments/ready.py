"""Prepare the data of runs before they start: each set once, in this process, with progress."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from oelm.config import FinetuneConfig, RunConfig
from oelm.data.request import Request
from oelm.data.sets import CORPORA, TASKS
from oelm.errors import REFUSED, OelmError
from oelm.experiments.plan import PlannedRun
from oelm.models.hub import model_folder
from oelm.train.device import choose_compute
from oelm.train.kinds import open_task, seen_progress
from oelm.train.preflight import Estimate
from oelm.train.stop import StopFlag
from oelm.train.watch import Watch


@dataclass
class Readiness:
    """What each run needs, or why it cannot start."""

    needs: dict[Path, Estimate] = field(default_factory=dict)
    problems: dict[Path, OelmError] = field(default_factory=dict)


def make_ready(runs: Sequence[PlannedRun], *, folder: Path | None, stop: StopFlag, watch: Watch) -> Readiness:
    """Prepare each data set that the runs read, from local copies in `folder` if it has them.

    A set that cannot be prepared (no network, a missing file) stops only the runs that read it.
    """
    found: dict[object, Estimate | OelmError] = {}
    ready = Readiness()
    for run in runs:
        # What decides which data a run reads and how large its model is.
        data = run.config.data if isinstance(run.config, RunConfig) else run.config.examples
        key = (data, run.config.model)
        if key not in found:
            try:
                found[key] = _open(run, folder=folder, stop=stop, watch=watch)
            except OelmError as problem:
                # A mistake in the command, a stop or a full disk concerns all runs.
                if problem.exit_code != REFUSED:
                    raise
                found[key] = problem if folder is not None else _with_way_out(problem, run.config)
        outcome = found[key]
        if isinstance(outcome, OelmError):
            ready.problems[run.path] = outcome
        else:
            ready.needs[run.path] = outcome
    return ready


def _with_way_out(problem: OelmError, config: RunConfig | FinetuneConfig) -> OelmError:
    """Add to an error how to use local copies."""
    source = config.data.source if isinstance(config, RunConfig) else config.examples.task
    if source not in CORPORA and source not in TASKS:
        return problem
    return type(problem)(
        f"{problem}. With local copies: repeat this command with --from FOLDER, and --model FOLDER for a pretrained classifier"
    )


def _open(run: PlannedRun, *, folder: Path | None, stop: StopFlag, watch: Watch) -> Estimate:
    if folder is not None:
        _shelve(run.config, folder, stop=stop, watch=watch)
    compute = choose_compute(run.config.device, run.config.precision)
    _, task = open_task(run.config, compute, run=run.path, stop=stop, watch=watch)
    watch.on_remark(task.data.summary)
    return task.estimate(compute.device)


def _shelve(config: RunConfig | FinetuneConfig, folder: Path, *, stop: StopFlag, watch: Watch) -> None:
    """Prepare a named set from local copies, so that runs find it by name."""
    progress = seen_progress(stop, watch)
    if isinstance(config, RunConfig):
        data = config.data
        if data.source in CORPORA:
            request = Request(name=data.source, folder=folder, tokenizer=data.tokenizer, max_tokens=data.max_tokens)
            request.prepare(progress)
        return
    examples = config.examples
    if examples.task in TASKS and examples.folder is None and config.model.source is not None:
        request = Request(
            name=examples.task,
            folder=folder,
            tokenizer=str(model_folder(config.model.source)),
            max_length=examples.max_length,
            language=examples.language,
        )
        request.prepare(progress)
