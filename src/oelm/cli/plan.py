"""What `--dry-run` prints: the plan, and about what it takes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from oelm.cli.shell import counted, out, print_table, roughly, say, warn

if TYPE_CHECKING:
    from oelm.experiments.plan import PlannedRun
    from oelm.experiments.runner import Slots


def print_plan(runs: Sequence[PlannedRun], slots: Slots, root: Path) -> None:
    """Print the arms of runs with their times, memory and disk, and how long the queue takes."""
    from oelm.experiments.forecast import START_S, Forecaster
    from oelm.experiments.monitor import queue_seconds
    from oelm.experiments.study import unfinished
    from oelm.train.preflight import gibibytes

    forecaster = Forecaster(root, threads=int(getattr(slots, "threads", 1)))
    left = unfinished(runs)
    arms: dict[tuple[str, str], list[PlannedRun]] = {}
    for run in runs:
        arms.setdefault((run.experiment.id, run.variant), []).append(run)
    forecasts = {arm: forecaster.forecast(planned[0]) for arm, planned in arms.items()}
    cells = []
    for (name, variant), planned in arms.items():
        forecast, todo = forecasts[name, variant], sum(run in left for run in planned)
        needs = gibibytes(forecast.needs.memory), gibibytes(forecast.needs.disk)
        counts = _seeds(planned), str(len(planned) - todo), roughly(forecast.seconds)
        cells.append((name, variant, *counts, *needs, forecast.basis))
    headings = ("experiment", "variant", "seeds (which)", "done", "each about", "memory", "disk", "time from")
    print_table(headings, cells, left=("experiment", "variant", "time from"))
    seconds = [forecasts[run.experiment.id, run.variant].seconds for run in left]
    whole = queue_seconds([length for length in seconds if length is not None], slots.count)
    unknown = sum(length is None for length in seconds)
    rest = f", and {counted(unknown, 'run')} of unknown length" if unknown else ""
    say(f"{counted(len(left), 'run')} at budget {runs[0].budget}: about {roughly(whole)} in all{rest}; {slots}")
    if any(forecast.basis == "arithmetic" for forecast in forecasts.values()):
        start = f"and {roughly(START_S)} to start each"
        out.print(f"arithmetic: from the operations of a step, this machine's speed {start}; within a factor of two")
    print_shortened(runs)


def print_shortened(runs: Sequence[PlannedRun]) -> None:
    """Say once of each warm-up that it will be shorter than was asked for: two points of a sweep may be one then."""
    from oelm.train.schedule import shortened_warmup

    for told in dict.fromkeys(shortened_warmup(run.config) for run in runs):
        if told:
            warn(told)


def _seeds(runs: Sequence[PlannedRun]) -> str:
    seeds = [run.seed for run in runs]
    is_range = len(seeds) > 1 and seeds == list(range(seeds[0], seeds[-1] + 1))
    which = f"{seeds[0]}-{seeds[-1]}" if is_range else ",".join(map(str, seeds))
    return f"{len(seeds)} ({which})"
