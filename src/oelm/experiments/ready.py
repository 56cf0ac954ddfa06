"""What runs need before they start: their data prepared once, in this process, with its progress seen."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from oelm.data.prepare import Progress
from oelm.data.request import prepare_named
from oelm.data.sets import CORPORA, TASKS
from oelm.experiments.plan import PlannedRun
from oelm.files import dump_json
from oelm.models.hub import model_folder
from oelm.train.config import FinetuneConfig, RunConfig
from oelm.train.device import choose_compute, look
from oelm.train.kinds import open_task, seen_progress
from oelm.train.preflight import Estimate
from oelm.train.stop import StopFlag
from oelm.train.watch import Watch


def make_ready(runs: Sequence[PlannedRun], *, folder: Path | None, stop: StopFlag, watch: Watch) -> dict[Path, Estimate]:
    """Prepare each data set that the runs read, and return what each run will need of memory and disk.

    With `folder`, named sets are read from local copies under it; without, from what was prepared before or the hub.
    """
    needs: dict[str, Estimate] = {}
    for run in runs:
        key = _key(run.config)
        if key in needs:
            continue
        if folder is not None:
            _prepare_from(folder, run.config, seen_progress(stop, watch))
        compute = choose_compute(run.config.device, run.config.precision, look())
        _, task = open_task(run.config, compute, run=run.path, stop=stop, watch=watch)
        watch.on_remark(task.data.summary)
        needs[key] = task.estimate(compute.device)
    return {run.path: needs[_key(run.config)] for run in runs}


def _prepare_from(folder: Path, config: RunConfig | FinetuneConfig, progress: Progress) -> None:
    if isinstance(config, RunConfig):
        if config.data.source in CORPORA:
            limit = config.data.max_tokens
            prepare_named(config.data.source, folder, tokenizer=config.data.tokenizer, max_tokens=limit, progress=progress)
        return
    examples, source = config.examples, config.model.source
    if examples.task in TASKS and source is not None:
        prepare_named(
            examples.task,
            folder,
            tokenizer=str(model_folder(source)),
            max_length=examples.max_length,
            language=examples.language,
            progress=progress,
        )


def _key(config: RunConfig | FinetuneConfig) -> str:
    """Return what decides which data a run reads and how large its model is."""
    parts = config.data if isinstance(config, RunConfig) else config.examples
    return dump_json({"data": parts.model_dump(mode="json"), "model": config.model.model_dump(mode="json")})
