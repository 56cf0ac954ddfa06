"""`oelm import`: runs that other tools made, as records that `oelm compare` and `oelm report` can judge."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from oelm.cli.shell import counted, out, printable, reported
from oelm.errors import ConfigError

if TYPE_CHECKING:
    from oelm.experiments.imported import ImportedRun
    from oelm.train.track import FormatName


@reported
def import_runs(
    sources: Annotated[list[Path], typer.Argument(metavar="SOURCE...", help="Files or folders of runs.")],
    name: Annotated[str, typer.Option(help="The study's name: runs go to OUT/imported/NAME.")],
    format: Annotated[
        str | None, typer.Option(help="table, tensorboard, wandb, trackio, trainer or study; default: by the files.")
    ] = None,
    columns: Annotated[
        str | None, typer.Option(help="Columns of a table, as arm=A,seed=B,step=C (also run, metric, value).")
    ] = None,
    metric: Annotated[list[str] | None, typer.Option(help="Import this metric only; may be repeated.")] = None,
    runs: Annotated[
        str | None, typer.Option(help="How run names tell arm and seed, as '{arm}-s{seed}'; * matches anything.")
    ] = None,
    arm: Annotated[str | None, typer.Option(help="The arm of every run read here, whatever the source says.")] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="The seed of the run read here, whatever the source says.")] = None,
    replace: Annotated[bool, typer.Option("--replace", help="Replace runs of the same arm and seed.")] = False,
    root: Annotated[Path, typer.Option("--out", help="Where runs are kept.")] = Path("outputs"),
) -> None:
    """Import runs that other tools made, so that they can be compared and judged over seeds.

    Reads CSV, TSV, JSON and JSONL tables, TensorBoard event files, W&B offline runs and exported charts, trackio databases,
    trainer_state.json of transformers, and the earlier study's folders. Then:

    oelm compare outputs/imported/NAME --metric eval_loss --baseline A --at-most 1.05x
    """
    from oelm.experiments.formats import FORMATS, Columns, read_sources
    from oelm.experiments.imported import Placing, imported_runs, write_imported

    chosen: FormatName | None = next((known for known in FORMATS if known == format), None)
    if format is not None and chosen is None:
        raise ConfigError(f"--format {format!r}: choose one of {', '.join(FORMATS)}")
    found = read_sources(sources, format=chosen, columns=Columns.parse(columns))
    read = imported_runs(found, study=name, placing=Placing(runs, arm, seed), metrics=metric or ())
    written, already = write_imported(read, root, replace=replace)
    _print_arms(read)
    out.print(
        f"{counted(len(written), 'run')} written to {root / 'imported' / name}, {len(already)} were there already",
        soft_wrap=True,
    )


def _print_arms(runs: list[ImportedRun]) -> None:
    arms: dict[str, list[ImportedRun]] = {}
    for run in runs:
        arms.setdefault(run.arm, []).append(run)
    for arm, own in arms.items():
        seeds = ", ".join(str(run.seed) for run in sorted(own, key=lambda run: run.seed))
        metrics = ", ".join(sorted({metric for run in own for metric in run.curves}))
        out.print(printable(f"{arm}: {own[0].format}, seeds {seeds}; {metrics}"), soft_wrap=True)
