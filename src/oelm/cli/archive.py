"""`oelm archive`: runs as one portable file, there and back."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from oelm.cli.shell import counted, out, printable, reported
from oelm.errors import ConfigError

if TYPE_CHECKING:
    from oelm.experiments.inventory import Inventory


@reported
def archive(
    ids: Annotated[list[str] | None, typer.Argument(help="Experiments or runs under --out; none means all.")] = None,
    out_dir: Annotated[Path, typer.Option("--out", help="Where the runs are, or go to.")] = Path("outputs"),
    to: Annotated[Path | None, typer.Option(help="Write a portable .tar.gz, stripped of this machine.")] = None,
    records: Annotated[
        Path | None, typer.Option(help="Write what a report needs of finished runs as small plain files into this folder.")
    ] = None,
    weights: Annotated[bool, typer.Option("--weights", help="With --to: checkpoints too.")] = False,
    check: Annotated[Path | None, typer.Option(help="Verify every byte of an archive; write nothing.")] = None,
    import_: Annotated[Path | None, typer.Option("--import", help="Verify an archive and add its runs to --out.")] = None,
) -> None:
    """Take runs to another machine as one file, check such a file, or add its runs to those here."""
    chosen = [mode for mode in (to, records, check, import_) if mode is not None]
    if len(chosen) != 1:
        raise ConfigError("give one of --to FILE, --records FOLDER, --check FILE and --import FILE")
    if (to is None and weights) or (to is None and records is None and ids):
        raise ConfigError("--weights belongs to --to, names of experiments to --to and --records; the others take all there is")
    if records is not None:
        _keep(out_dir, records, ids or [])
    elif to is not None:
        _make(out_dir, to, ids or [], weights=weights)
    elif check is not None:
        _check(check)
    elif import_ is not None:
        _import(import_, out_dir)


def _make(root: Path, target: Path, names: list[str], *, weights: bool) -> None:
    from oelm.experiments.archive import make_archive
    from oelm.experiments.collect import find_runs

    _print_inventory(make_archive(root, target, runs=find_runs(root, names), weights=weights))
    _print_file(target)


def _keep(root: Path, target: Path, names: list[str]) -> None:
    from oelm.experiments.collect import find_runs
    from oelm.experiments.keep import keep_records

    kept = keep_records(root, target, runs=find_runs(root, names))
    for remark in kept.remarks:
        out.print(printable(remark), style="yellow", soft_wrap=True)
    out.print(
        f"{counted(len(kept.added), 'run')} written to {target}, {len(kept.already_there)} were there already", soft_wrap=True
    )


def _check(path: Path) -> None:
    from oelm.experiments.archive import check_archive

    _print_inventory(check_archive(path))
    _print_file(path)
    out.print("every byte is as listed")


def _import(path: Path, root: Path) -> None:
    from oelm.experiments.archive import import_archive

    imported = import_archive(path, root)
    for run in imported.added:
        out.print(f"added {root / run}", soft_wrap=True)
    out.print(
        f"{counted(len(imported.added), 'run')} added to {root}, {len(imported.already_there)} were there already",
        soft_wrap=True,
    )


def _print_inventory(inventory: Inventory) -> None:
    for run in inventory.runs:
        figures = [f"{name} {run.figures[name]:.4g}" for name in ("best_ppl", "best_accuracy") if name in run.figures]
        words = ", ".join([run.status, *figures, f"{len(run.files)} files", f"{run.size_bytes:,} bytes"])
        out.print(f"{run.path}: {words}", soft_wrap=True)
    for remark in inventory.remarks:
        out.print(printable(remark), style="yellow", soft_wrap=True)
    out.print(f"{counted(len(inventory.runs), 'run')}, {inventory.num_files} files, {inventory.size_bytes:,} bytes unpacked")


def _print_file(path: Path) -> None:
    from oelm.files import sha256_file

    out.print(f"{path}: {path.stat().st_size:,} bytes, sha256 {sha256_file(path)}", soft_wrap=True)
