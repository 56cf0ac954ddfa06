"""The `oelm` command and the options before any command."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

import typer

from oelm.cli.bench import bench, doctor
from oelm.cli.catalog import list_experiments, show
from oelm.cli.data import data_app
from oelm.cli.demo import demo
from oelm.cli.manage import archive, clean, stop
from oelm.cli.report import compare, import_runs, report
from oelm.cli.run import run, sweep, work
from oelm.cli.shell import Command, Group
from oelm.cli.status import status
from oelm.cli.train import finetune, train
from oelm.cli.use import evaluate, export, generate, inspect
from oelm.cli.watch import watch

app = typer.Typer(
    name="oelm",
    cls=Group,
    help="A laboratory for transformers whose attention does not learn.",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(f"oelm {version('oelm')}")
        raise typer.Exit


@app.callback()
def _root(
    show_version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


# By the panels of `oelm --help`, in their order.
_PANELS: dict[str, dict[str, Callable[..., Any]]] = {
    "Start": {"demo": demo, "train": train, "finetune": finetune},
    "Study": {
        "list": list_experiments,
        "show": show,
        "run": run,
        "sweep": sweep,
        "status": status,
        "watch": watch,
        "stop": stop,
        "clean": clean,
    },
    "Look": {
        "report": report,
        "compare": compare,
        "import": import_runs,
        "eval": evaluate,
        "inspect": inspect,
        "generate": generate,
        "export": export,
    },
    "Machine": {"bench": bench, "doctor": doctor, "archive": archive},
}
for _panel, _commands in _PANELS.items():
    for _name, _command in _commands.items():
        app.command(_name, cls=Command, rich_help_panel=_panel)(_command)
app.command(hidden=True, cls=Command)(work)
app.add_typer(data_app, rich_help_panel="Machine")
