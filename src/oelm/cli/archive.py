"""`oelm archive`: the records of finished runs as a portable folder, and its check."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from oelm.cli.shell import counted, out, printable, reported
from oelm.cli.status import find_runs, load_known, no_answer
from oelm.errors import ConfigError, DataError


@reported
def archive(
    folder: Annotated[Path, typer.Argument(help="The portable folder to write to, or to check.")],
    ids: Annotated[list[str] | None, typer.Argument(help="Experiments or groups under --out; all by default.")] = None,
    out_dir: Annotated[Path, typer.Option("--out", help="Where the runs are.")] = Path("outputs"),
    weights: Annotated[bool, typer.Option("--weights", help="Also checkpoints, tokenizers, logs and all metrics.")] = False,
    check: Annotated[bool, typer.Option("--check", help="Compare FOLDER with its inventory.json; write nothing.")] = False,
) -> None:
    """Add the records of finished runs to a folder for another machine or a repository. To read it, give it as --out."""
    if check and (ids or weights):
        raise ConfigError("--check reads the whole folder: give it without experiments and without --weights")
    if check:
        _check(folder)
    else:
        _write(folder, ids or [], out_dir, weights=weights)


def _write(folder: Path, ids: list[str], root: Path, *, weights: bool) -> None:
    from oelm.experiments.portable import archive_runs

    views = find_runs(root, ids, budget=None, groups=load_known()[1])
    if not views:
        raise ConfigError(no_answer(root, ids, None))
    archived = archive_runs(folder, views, weights=weights)
    for remark in archived.remarks:
        out.print(printable(remark), style="yellow", soft_wrap=True)
    out.print(
        f"{counted(len(archived.added), 'run')} written to {folder}, {len(archived.already_there)} already there",
        soft_wrap=True,
    )


def _check(folder: Path) -> None:
    from oelm.experiments.portable import check_folder

    inventory, problems = check_folder(folder)
    for problem in problems:
        out.print(printable(problem), style="red", soft_wrap=True)
    if problems:
        raise DataError(f"{folder}: {counted(len(problems), 'difference')} from its inventory.json; restore it from a copy")
    listed = f"{counted(len(inventory.runs), 'run')}, {counted(len(inventory.files), 'file')}, {inventory.size_bytes:,} bytes"
    out.print(f"{listed}: every file is as listed in {folder / 'inventory.json'}", soft_wrap=True)
