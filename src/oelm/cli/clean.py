"""`oelm clean`: delete runs, or the weights of finished ones, and nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from oelm.cli.options import OnlyBudget, Out, SomeIds
from oelm.cli.shell import echo, printable, reported, say
from oelm.cli.status import no_answer
from oelm.cli.stop import named_runs

if TYPE_CHECKING:
    from oelm.experiments.upkeep import Refusal, Removal


@reported
def clean(
    ids: SomeIds = None,
    everything: Annotated[bool, typer.Option("--all", help="Every run there is.")] = False,
    weights: Annotated[bool, typer.Option("--weights", help="Only the checkpoints of finished runs; figures stay.")] = False,
    budget: OnlyBudget = None,
    out_dir: Out = Path("outputs"),
    yes: Annotated[bool, typer.Option("--yes", help="Delete; without it, only say what would go.")] = False,
) -> None:
    """Delete runs that oelm made and nobody uses. Without --yes nothing is deleted, only listed."""
    from oelm.experiments.upkeep import Removal, check_root, plan_removal, remove

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
    from oelm.experiments.upkeep import Refusal

    if isinstance(done, Refusal):
        return printable(f"{done.view.path}: left alone: {done.reason}")
    if not (done.files or done.kept):
        return ""
    names = ", ".join(printable(name) for name in done.kept[:5]) + (", ..." if len(done.kept) > 5 else "")
    remark = f"; left there, not written by oelm: {names}" if done.kept else ""
    return f"{done.view.path}: {done.size_bytes:,} bytes{remark}"
