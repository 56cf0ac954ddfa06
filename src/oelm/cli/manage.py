"""`oelm stop`, `clean` and `archive`: end runs, delete them, or copy their records."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from oelm.cli.options import OnlyBudget, Out
from oelm.cli.shell import echo, err, out, printable, reported, say, warn
from oelm.cli.status import find_runs, jobs_of, load_known, no_answer
from oelm.errors import ClusterError, ConfigError, DataError, RunDirError
from oelm.text import counted

if TYPE_CHECKING:
    from oelm.experiments.slurm import JobState
    from oelm.runs.find import RunView
    from oelm.runs.manage import Answers, Refusal, Removal

# Commands that only show runs take all by default; what ends or deletes runs must be named.
NamedIds = Annotated[list[str] | None, typer.Argument(metavar="[ID...]", help="Experiments or groups; or give --all.")]


@reported
def stop(
    ids: NamedIds = None,
    everything: Annotated[bool, typer.Option("--all", help="Every run.")] = False,
    out_dir: Out = Path("outputs"),
    timeout_s: Annotated[float, typer.Option("--timeout", min=0.0, help="Seconds to wait for runs to save and end.")] = 60.0,
) -> None:
    """Ask running runs to save and end, and take queued ones off the queue; the command that began them continues them."""
    from oelm.experiments.slurm import cancel
    from oelm.runs.manage import ask_to_stop

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


def _leave_to_slurm(asked: Answers, cancelled: Mapping[Path, JobState]) -> None:
    """Say which runs SLURM was asked to end; those on other hosts are not left alone then, but waited for."""
    for path, state in cancelled.items():
        say(f"{path}: SLURM job {state.job} ({state.state}) asked to end")
    reached = [view for view in asked.elsewhere if view.path in cancelled]
    asked.elsewhere = [view for view in asked.elsewhere if view.path not in cancelled]
    asked.signalled += reached


def named_runs(ids: list[str] | None, everything: bool, root: Path, *, budget: str | None) -> list[RunView]:
    """Return the runs that ids, or --all, name; ConfigError unless exactly one of the two is given."""
    if bool(ids) == everything:
        raise ConfigError("name experiments, as `oelm status` shows them, or give --all" + (", not both" if ids else ""))
    _, groups = load_known()
    return find_runs(root, ids or [], budget=budget, groups=groups)


def _tell(asked: Answers) -> None:
    for view in asked.elsewhere:
        host = printable(view.status.host) if view.status is not None else "?"
        say(f"{view.name}: runs on {host}, left alone; give the same command there")
    for view, reason in asked.refused:
        say(f"{view.name}: not asked: {reason}")
    for view in asked.unqueued:
        say(f"{view.name}: taken off the queue")
    if not (asked.signalled or asked.starting or asked.unqueued or asked.elsewhere or asked.refused):
        out.print("nothing to stop: none of these runs is running or queued")


def _wait(asked: Answers, timeout_s: float) -> list[RunView]:
    from oelm.runs.manage import wait_for_end

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


@reported
def clean(
    ids: NamedIds = None,
    everything: Annotated[bool, typer.Option("--all", help="Every run.")] = False,
    weights: Annotated[bool, typer.Option("--weights", help="Only the checkpoints of finished runs; figures stay.")] = False,
    budget: OnlyBudget = None,
    out_dir: Out = Path("outputs"),
    yes: Annotated[bool, typer.Option("--yes", help="Delete; without it, only list what would be deleted.")] = False,
) -> None:
    """Delete runs that oelm made and nobody uses. Without --yes nothing is deleted, only listed."""
    from oelm.runs.manage import Removal, check_root, plan_removal, remove

    check_root(out_dir)
    views = named_runs(ids, everything, out_dir, budget=budget)
    if not views:
        say(no_answer(out_dir, ids or [], budget))
        return
    act = remove if yes else plan_removal
    total = count = 0
    for view in views:
        done = act(out_dir, view, weights=weights)
        if line := _line(done):
            echo(line)
        if isinstance(done, Removal) and done.files:
            total, count = total + done.size_bytes, count + 1
    what = "the weights of " if weights else ""
    runs = f"{count} run{'' if count == 1 else 's'}"
    if yes:
        say(f"deleted {what}{runs}: {total:,} bytes")
    else:
        hint = "; nothing was deleted, --yes does it" if count else ""
        say(f"would delete {what}{runs}: {total:,} bytes{hint}")


def _line(done: Removal | Refusal) -> str:
    """Return the line of one run; none where there was nothing to delete."""
    from oelm.runs.manage import Refusal

    if isinstance(done, Refusal):
        return printable(f"{done.view.path}: left alone: {done.reason}")
    if not (done.files or done.kept):
        return ""
    names = ", ".join(printable(name) for name in done.kept[:5]) + (", ..." if len(done.kept) > 5 else "")
    remark = f"; left there, not written by oelm: {names}" if done.kept else ""
    return f"{done.view.path}: {done.size_bytes:,} bytes{remark}"


@reported
def archive(
    folder: Annotated[Path, typer.Argument(help="The portable folder to write to, or to check.")],
    ids: Annotated[list[str] | None, typer.Argument(help="Experiments or groups under --out; all by default.")] = None,
    out_dir: Annotated[Path, typer.Option("--out", help="Where the runs are.")] = Path("outputs"),
    weights: Annotated[bool, typer.Option("--weights", help="Also checkpoints, tokenizers, logs and all metrics.")] = False,
    check: Annotated[bool, typer.Option("--check", help="Compare FOLDER with its inventory.json; write nothing.")] = False,
) -> None:
    """Add the records of finished runs to a folder for another machine or a repository. To read it, give it as --out."""
    if check and (ids or weights):
        raise ConfigError("--check reads the whole folder: give it without experiments and without --weights")
    if check:
        _check(folder)
    else:
        _write(folder, ids or [], out_dir, weights=weights)


def _write(folder: Path, ids: list[str], root: Path, *, weights: bool) -> None:
    from oelm.experiments.portable import archive_runs
    from oelm.files import check_can_hold

    check_can_hold("FOLDER", folder)
    if root.exists() and not root.is_dir():
        raise ConfigError(f"--out {root}: is a file; give the folder that holds the runs")
    views = find_runs(root, ids, budget=None, groups=load_known()[1])
    if not views:
        raise ConfigError(no_answer(root, ids, None))
    archived = archive_runs(folder, views, weights=weights)
    for remark in archived.remarks:
        out.print(printable(remark), style="yellow", soft_wrap=True)
    out.print(
        f"{counted(len(archived.added), 'run')} written to {folder}, {len(archived.already_there)} already there",
        soft_wrap=True,
    )


def _check(folder: Path) -> None:
    from oelm.experiments.portable import check_folder

    inventory, problems = check_folder(folder)
    for problem in problems:
        out.print(printable(problem), style="red", soft_wrap=True)
    if problems:
        raise DataError(f"{folder}: {counted(len(problems), 'difference')} from its inventory.json; restore it from a copy")
    listed = f"{counted(len(inventory.runs), 'run')}, {counted(len(inventory.files), 'file')}, {inventory.size_bytes:,} bytes"
    out.print(f"{listed}: every file is as listed in {folder / 'inventory.json'}", soft_wrap=True)
