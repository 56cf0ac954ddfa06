"""The `oelm` command and its options that stand before any command."""

from __future__ import annotations

from importlib.metadata import version
from typing import Annotated

import typer

from oelm.cli.archive import archive
from oelm.cli.bench import bench
from oelm.cli.catalog import list_experiments, show
from oelm.cli.clean import clean
from oelm.cli.data import data_app
from oelm.cli.demo import demo
from oelm.cli.doctor import doctor
from oelm.cli.evaluate import evaluate
from oelm.cli.export import export
from oelm.cli.finetune import finetune
from oelm.cli.generate import generate
from oelm.cli.imports import import_runs
from oelm.cli.inspect import inspect
from oelm.cli.logs import logs
from oelm.cli.project import project
from oelm.cli.report import compare, log, report
from oelm.cli.run import run, sweep, work
from oelm.cli.status import status
from oelm.cli.stop import stop
from oelm.cli.train import train
from oelm.cli.watch import watch

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
app.command("list")(list_experiments)
app.command()(show)
app.command()(run)
app.command()(sweep)
app.command(hidden=True)(work)
app.command()(project)
app.command()(status)
app.command()(watch)
app.command()(logs)
app.command()(stop)
app.command()(clean)
app.command()(train)
app.command()(finetune)
app.add_typer(data_app)
app.command()(generate)
app.command("eval")(evaluate)
app.command()(inspect)
app.command()(export)
app.command()(bench)
app.command()(report)
app.command()(compare)
app.command()(log)
app.command("import")(import_runs)
app.command()(archive)
app.command()(doctor)
