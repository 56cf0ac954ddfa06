"""`oelm demo`: learning and frozen attention side by side, in minutes, on this machine."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from oelm.cli.shell import TerminalWatch, out, reported, shown_warnings, stoppable
from oelm.decimals import fixed

if TYPE_CHECKING:
    from oelm.report.table import ArmRow


@reported
def demo(
    out_dir: Annotated[Path, typer.Option("--out", help="Where runs and pictures go.")] = Path("outputs"),
    seed: Annotated[int, typer.Option(min=0, help="Another seed, another draw of frames, weights and order.")] = 0,
    seeds: Annotated[int, typer.Option(min=1, help="How many seeds, from --seed on; two or more give intervals.")] = 1,
    steps: Annotated[int | None, typer.Option(min=1, help="Fewer or more steps than the demo's own.")] = None,
) -> None:
    """Train four small GPTs that differ only in how Q and K start and whether they learn; compare them."""
    from oelm.errors import MissingExtraError
    from oelm.experiments.demo import ARMS, run_demo
    from oelm.report.charts import learning_curves, save_chart
    from oelm.report.table import arm_rows

    out.print("Four GPTs on Python's standard library: same data order, steps and lr.")
    runs: dict[str, list[Path]] = {arm: [] for arm in ARMS}
    with stoppable() as stop, shown_warnings(), TerminalWatch() as watch:
        results = run_demo(out_dir, seeds=range(seed, seed + seeds), steps=steps, stop=stop, watch=watch)
        for number, arm in enumerate([*ARMS] * seeds, start=1):
            out.print(f"\n{arm} ({number} of {len(ARMS) * seeds}): {ARMS[arm]}", style="bold")
            finished = next(results)
            runs[arm].append(finished.result.path)
            assert finished.result.figures is not None
            out.print(f"{arm}, seed {finished.seed}: PPL {fixed(finished.result.figures['best_ppl'], 2)}")
    note = "one seed: no verdict" if seeds == 1 else f"{seeds} seeds; 95% intervals, paired by seed"
    rows = arm_rows(runs, baseline="baseline")
    _print_table(rows, note)
    _print_story(rows)
    try:
        first = {arm: paths[0] for arm, paths in runs.items()}
        subtitle = f"small GPTs on Python's standard library; seed {seed} alone: no verdict"
        chart = learning_curves(first, baseline="baseline", title="Learning and frozen attention", subtitle=subtitle)
        svg, png = save_chart(chart, out_dir / "demo" / f"learning-curves-seed-{seed}")
        out.print(f"\nlearning curves: {svg} and {png.name}", soft_wrap=True)
    except MissingExtraError as problem:
        out.print(f"\nno picture: {problem}")
    oelm = shlex.quote(str(Path(sys.argv[0]))) if Path(sys.argv[0]).name == "oelm" else "oelm"
    out.print(
        "\nNext:\n"
        f"  {oelm} demo --seeds 3                            # intervals instead of one seed\n"
        f"  {oelm} train --method oelm_axes_q --text PATH    # the method on your own text\n"
        f"  {oelm} list                                      # every experiment of the study",
        soft_wrap=True,
    )


def _print_story(rows: list[ArmRow]) -> None:
    """Say what happened, and what the names mean."""
    costs = {row.arm: 100 * (row.ratio.value - 1) for row in rows if row.ratio is not None}
    base = next(row for row in rows if row.ratio is None)
    smaller = {row.arm: base.trainable - row.trainable for row in rows}
    out.print(
        f"\nFreezing queries and keys (oelm_freeze) costs {fixed(costs['oelm_freeze'], 1, sign=True)}% perplexity; an eighth "
        f"of their parameters, learning on top (oelm_lowrank), brings that to {fixed(costs['oelm_lowrank'], 1, sign=True)}%.\n"
        "Taking the queries as slices of what the layer reads (oelm_axes_q) skips their product and its "
        f"{smaller['oelm_axes_q']:,} parameters, and costs {fixed(costs['oelm_axes_q'], 1, sign=True)}%.",
        soft_wrap=True,
    )


def _print_table(rows: list[ArmRow], note: str) -> None:
    from rich.table import Table

    table = Table(title=note, title_justify="left", title_style="bold yellow")
    table.add_column("arm", no_wrap=True)
    for name in ("PPL", "vs baseline", "stored", "trainable"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        # No time: runs one after another are no fair measure of it, `oelm bench` is.
        counts = (f"{row.trainable + row.frozen:,}", f"{row.trainable:,}")
        table.add_row(row.arm, fixed(row.perplexity, 2), _gap(row), *counts)
    out.print("\n", table, sep="")


def _gap(row: ArmRow) -> str:
    if row.ratio is None:
        return ""
    value, low, high = (fixed(100 * (end - 1), 1, sign=True) for end in (row.ratio.value, row.ratio.low, row.ratio.high))
    return f"{value}%" if row.ratio.count < 2 else f"{value}% [{low}, {high}]"
