"""`oelm doctor`: what this machine offers, and what a run here would use."""

from __future__ import annotations

from typing import Annotated

import typer

from oelm.cli.shell import out, print_table, reported


@reported
def doctor(
    seconds: Annotated[float, typer.Option(min=0.0, help="How long the matrix test may take in all; 0 skips it.")] = 10.0,
) -> None:
    """Print device, precision and why, threads, memory, disk, versions, extras, and a matrix test in each precision."""
    from rich.table import Table

    from oelm.bench.machine import examine, matmul_speeds

    table = Table(show_header=False)
    for name, value in examine().items():
        table.add_row(name, value)
    out.print(table)
    if seconds > 0:
        headings = ("precision", "matrix product")
        print_table(headings, matmul_speeds(seconds).items(), left=headings, title="1024 x 1024 by 1024 x 1024", boxed=True)
