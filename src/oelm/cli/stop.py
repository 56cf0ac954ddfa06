"""`oelm stop`: ask runs to save and end."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from oelm.cli.options import Out, SomeIds
from oelm.cli.shell import err, out, printable, reported, say, warn
from oelm.cli.status import find_runs, jobs_of, load_known, no_answer
from oelm.errors import ClusterError, ConfigError, RunDirError

if TYPE_CHECKING:
    from oelm.experiments.monitor import RunView
    from oelm.experiments.slurm import JobState
    from oelm.experiments.upkeep import Asked


@reported
def stop(
    ids: SomeIds = None,
    everything: Annotated[bool, typer.Option("--all", help="Every run there is.")] = False,
    out_dir: Out = Path("outputs"),
    timeout_s: Annotated[float, typer.Option("--timeout", min=0.0, help="Seconds to wait for runs to save and end.")] = 60.0,
) -> None:
    """Ask running runs to save and end, and take queued ones off the queue; the command that began them continues them."""
    from oelm.experiments.slurm import cancel
    from oelm.experiments.upkeep import ask_to_stop

    views = named_runs(ids, everything, out_dir, budget=None)
    if not views:
        say(no_answer(out_dir, ids or [], None))
        return
    cancelled = cancel(_jobs(out_dir, views), {view.path for view in views})
    asked = ask_to_stop(views)
    _leave_to_slurm(asked, cancelled)
    _tell(asked)
    left = _wait(asked, timeout_s)
    if left or asked.refused:
        names = ", ".join(view.name for view in [*left, *(view for view, _ in asked.refused)][:5])
        raise RunDirError(
            f"{len(left) + len(asked.refused)} run(s) still there: {names}. They end at their next step once saved: "
            "`oelm status` shows when; `oelm stop` again with a longer --timeout waits for it"
        )


def _jobs(root: Path, views: Sequence[RunView]) -> dict[Path, JobState]:
    try:
        return jobs_of(root, views)
    except ClusterError as problem:
        warn(f"jobs of SLURM are left alone: {problem}")
        return {}


def _leave_to_slurm(asked: Asked, cancelled: Mapping[Path, JobState]) -> None:
    """Say which runs SLURM was asked to end; those on other hosts are not left alone then, but waited for."""
    for path, state in cancelled.items():
        say(f"{path}: SLURM job {state.job} ({state.state}) asked to end")
    reached = [view for view in asked.elsewhere if view.path in cancelled]
    asked.elsewhere = [view for view in asked.elsewhere if view.path not in cancelled]
    asked.signalled += reached


def named_runs(ids: list[str] | None, everything: bool, root: Path, *, budget: str | None) -> list[RunView]:
    """Return the runs that ids, or --all, stand for; ConfigError unless it is one of the two."""
    if bool(ids) == everything:
        raise ConfigError("name experiments, as `oelm status` shows them, or give --all" + (", not both" if ids else ""))
    _, groups = load_known()
    return find_runs(root, ids or [], budget=budget, groups=groups)


def _tell(asked: Asked) -> None:
    for view in asked.elsewhere:
        host = printable(view.status.host) if view.status is not None else "?"
        say(f"{view.name}: runs on {host}, left alone; give the same command there")
    for view, reason in asked.refused:
        say(f"{view.name}: not asked: {reason}")
    for view in asked.unqueued:
        say(f"{view.name}: taken off the queue")
    if not (asked.signalled or asked.starting or asked.unqueued or asked.elsewhere or asked.refused):
        out.print("nothing to stop: none of these runs is running or queued")


def _wait(asked: Asked, timeout_s: float) -> list[RunView]:
    from oelm.experiments.upkeep import wait_for_end

    if not (count := len(asked.signalled) + len(asked.starting)):
        return []
    out.print(f"asked {count} to stop; waiting for {'it' if count == 1 else 'them'} to save and end, {timeout_s:g} s at most")
    with err.status("") if err.is_terminal else contextlib.nullcontext() as line:

        def show(waiting: list[RunView], elapsed_s: float) -> None:
            if line is not None:
                line.update(f"{len(waiting)} of {count} still saving ({elapsed_s:.0f} s)")

        ended, left = wait_for_end(asked, timeout_s=timeout_s, on_wait=show)
    for view in ended:
        step = f" at step {view.status.step}" if view.status is not None else ""
        say(f"{view.name}: {view.state}{step}")
    for view in left:
        say(f"{view.name}: asked, but still running after {timeout_s:g} s")
    return left
