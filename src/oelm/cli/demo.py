"""`oelm demo`: the group `demo` of the catalog, trained and explained in minutes."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from oelm.cli.options import Budget, Out, Queueing
from oelm.cli.remote import How
from oelm.cli.run import leave_by, load, run_all
from oelm.cli.shell import print_next, print_table, reported, say, shown_warnings, stoppable
from oelm.text import figure_text

if TYPE_CHECKING:
    from oelm.experiments.plan import PlannedRun
    from oelm.experiments.summary import SummaryRow
    from oelm.runs.records import AuditRecord

GROUP = "demo"


@reported
def demo(
    root: Out = Path("outputs"),
    seeds: Annotated[int, typer.Option(min=1, help="How many seeds; two or more give intervals.")] = 1,
    budget: Budget = "laptop",
) -> None:
    """Train four small GPTs that differ in what learns of queries and keys, and compare them.

    Takes about 5 minutes on two cores. Rerun it to resume.
    """
    with stoppable() as stop, shown_warnings():
        from oelm.experiments.study import Study

        study = Study(names=(GROUP,), budget=budget, root=root, seeds=list(range(seeds)))
        runs = study.plan(load(None))
        for run in runs[: len({run.experiment.id for run in runs})]:
            say(f"{run.experiment.method}: {run.experiment.title}")
        ended = run_all(study, runs, Queueing().slots(budget), How(stop, retry=True), notify=None, catalog=None)
    leave_by(ended, again="repeat the command")
    _print_results(runs, budget)
    _print_next(root, budget)


def _print_results(runs: Sequence[PlannedRun], budget: str) -> None:
    """Print the table of arms, and in two sentences what it says."""
    from oelm.experiments.summary import summarize

    rows = summarize(runs)
    audits = {row.experiment.id: _audit(runs, row) for row in rows}
    count = len(rows[0].best)
    note = "one seed: no verdict" if count == 1 else f"{count} seeds; 95% intervals, paired by seed"
    note += "; a smoke test, never a result" if budget == "smoke" else ""
    # No time: runs that share a machine are no fair measure of it, `oelm bench` is.
    cells = []
    for row in rows:
        counts = audits[row.experiment.id].total, audits[row.experiment.id].trainable
        figures = figure_text(row.metric, row.mean), row.gap.text, *(f"{count:,}" for count in counts)
        cells.append((str(row.experiment.method), *figures))
    say("")
    print_table(("arm", "PPL", "vs baseline", "stored", "trainable"), cells, left=("arm",), title=note, boxed=True)
    costs = {str(row.experiment.method): row.gap.text.partition("%")[0] for row in rows}
    saved = audits["demo-learn"].total - audits["demo-slices-q"].total
    say(
        f"\nFreezing queries and keys at random (oelm_freeze) changes the perplexity by {costs['oelm_freeze']}%; a small part "
        f"that learns on top, an eighth of their parameters (oelm_lowrank), makes that {costs['oelm_lowrank']}%.\n"
        f"Taking queries as slices of the layer's input (oelm_axes_q) saves their product and {saved:,} parameters, at "
        f"{costs['oelm_axes_q']}%."
    )


def _audit(runs: Sequence[PlannedRun], row: SummaryRow) -> AuditRecord:
    from oelm.files import read_as
    from oelm.runs.layout import AUDIT
    from oelm.runs.records import AuditRecord

    return read_as(AuditRecord, next(run.path for run in runs if run.experiment.id == row.experiment.id) / AUDIT)


def _print_next(root: Path, budget: str) -> None:
    """Print where the runs are, and commands to paste."""
    place = "" if root == Path("outputs") else f" --out {shlex.quote(str(root))}"
    size = "" if budget == "laptop" else f" --budget {budget}"
    commands = {
        f"oelm report demo --html demo.html{place}": "a page with learning curves",
        f"oelm demo --seeds 3{size}{place}": "intervals instead of one seed",
        "oelm train --method baseline,oelm_axes_q --seeds 3": "a larger model; your own text: --text PATH",
        "oelm list": "every experiment of the study",
    }
    width = max(map(len, commands))
    print_next(root, [f"{command:{width}}  # {what}" for command, what in commands.items()])
