"""`oelm clean`: delete runs, or the weights of finished ones, and nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from oelm.cli.shell import echo, out, printable, reported
from oelm.cli.status import no_answer
from oelm.cli.stop import named_runs

if TYPE_CHECKING:
    from oelm.runs.manage import Refusal, Removal


@reported
def clean(
    ids: Annotated[list[str] | None, typer.Argument(help="Experiments or groups.")] = None,
    everything: Annotated[bool, typer.Option("--all", help="Every run there is.")] = False,
    weights: Annotated[bool, typer.Option("--weights", help="Only the checkpoints of finished runs; figures stay.")] = False,
    budget: Annotated[str | None, typer.Option(help="Only runs of this budget.")] = None,
    out_dir: Annotated[Path, typer.Option("--out", help="Where the runs are.")] = Path("outputs"),
    yes: Annotated[bool, typer.Option("--yes", help="Delete; without it, only say what would go.")] = False,
) -> None:
    """Delete runs that oelm made and nobody uses. Without --yes nothing is deleted, only listed."""
    from oelm.runs.manage import Removal, check_root, plan_removal, remove

    check_root(out_dir)
    views = named_runs(ids, everything, out_dir, budget=budget)
    if not views:
        out.print(no_answer(out_dir, ids or [], budget), soft_wrap=True)
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
        out.print(f"deleted {what}{runs}: {total:,} bytes", soft_wrap=True)
    else:
        hint = "; nothing was deleted, --yes does it" if count else ""
        out.print(f"would delete {what}{runs}: {total:,} bytes{hint}", soft_wrap=True)


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
