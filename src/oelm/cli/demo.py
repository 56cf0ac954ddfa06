"""`oelm demo`: learning and frozen attention side by side, in minutes, on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from oelm.cli.shell import TerminalWatch, out, reported, shown_warnings

if TYPE_CHECKING:
    from oelm.report.table import ArmRow


@reported
def demo(
    out_dir: Annotated[Path, typer.Option("--out", help="Where runs and pictures go.")] = Path("outputs"),
    seed: Annotated[int, typer.Option(help="Another seed, another draw of frames, weights and order.")] = 0,
    steps: Annotated[int | None, typer.Option(help="Fewer or more steps than the demo's own.")] = None,
) -> None:
    """Train four small GPTs that differ only in how Q and K start and whether they learn; compare them."""
    from oelm.errors import MissingExtraError
    from oelm.experiments.demo import ARMS, run_demo
    from oelm.report.charts import learning_curves, save_chart
    from oelm.report.table import arm_rows
    from oelm.train.stop import StopFlag

    out.print("Four GPTs on Python's standard library: same data order, steps and lr.", highlight=False)
    runs: dict[str, Path] = {}
    with StopFlag() as stop, shown_warnings(), TerminalWatch() as watch:
        arms = run_demo(out_dir, seed=seed, steps=steps, stop=stop, watch=watch)
        for number, arm in enumerate(ARMS, start=1):
            out.print(f"\n[bold]{arm}[/bold] ({number} of {len(ARMS)})", highlight=False)
            finished = next(arms)
            runs[arm] = finished.result.path
            assert finished.result.figures is not None
            out.print(f"{arm}: PPL {finished.result.figures['best_ppl']:.2f}", highlight=False)
    _print_table(arm_rows(runs, baseline="baseline"))
    try:
        subtitle = "small GPTs on Python's standard library; one seed: no verdict"
        chart = learning_curves(runs, baseline="baseline", title="Learning and frozen attention", subtitle=subtitle)
        svg, png = save_chart(chart, out_dir / "demo" / f"learning-curves-seed-{seed}")
        out.print(f"\nlearning curves: {svg} and {png.name}", highlight=False, soft_wrap=True)
    except MissingExtraError as problem:
        out.print(f"\nno picture: {problem}", highlight=False, markup=False)
    out.print(
        "\nNext:\n"
        f"  oelm demo --seed {seed + 1}                           the luck of the draw\n"
        "  oelm train --method oelm_freeze --text PATH   the method on your own text\n"
        "  oelm train --method uniform                   the floor: no Q and K at all\n"
        "  oelm train --help                             everything else",
        highlight=False,
        markup=False,
    )


def _print_table(rows: list[ArmRow]) -> None:
    from rich.table import Table

    table = Table(title="one seed: no verdict", title_justify="left", title_style="bold yellow")
    table.add_column("arm", no_wrap=True)
    for name in ("PPL", "vs baseline", "trainable", "frozen", "median step"):
        table.add_column(name, justify="right")
    for row in rows:
        gap = "" if row.gap is None else f"{100 * row.gap:+.1f}%"
        step = f"{1000 * row.median_step_s:.1f} ms"
        table.add_row(row.arm, f"{row.perplexity:.2f}", gap, f"{row.trainable:,}", f"{row.frozen:,}", step)
    out.print("\n", table, sep="")
