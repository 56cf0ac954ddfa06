"""The `oelm` command and its options that stand before any command."""

from __future__ import annotations

from importlib.metadata import version
from typing import Annotated

import typer

from oelm.cli.demo import demo
from oelm.cli.train import train

app = typer.Typer(
    name="oelm",
    help="A laboratory for transformers whose attention does not learn.",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"oelm {version('oelm')}")
        raise typer.Exit


@app.callback()
def _root(
    show_version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and leave.")
    ] = False,
) -> None:
    pass


app.command()(demo)
app.command()(train)
