"""A quick look: run folders side by side, whatever they are."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from oelm.errors import ConfigError, DataError
from oelm.files import read_json
from oelm.report.collect import recipe_differences
from oelm.report.document import Cell, Table
from oelm.report.ladder import points_text, ratio_text
from oelm.report.stats import paired_difference, paired_log_ratio
from oelm.train.records import AuditRecord, Figures, read_as
from oelm.train.status import read_status


def compare_runs(paths: Sequence[Path]) -> tuple[Table, list[str]]:
    """Return a table of finished runs beside the first of them, and what their configs differ in.

    A folder that holds seeds (seed-0, seed-1, ...) stands for all of them, paired by seed with those of the first.
    """
    if len(paths) < 2:
        raise ConfigError("give two runs at least: oelm compare RUN RUN")
    sides = [_seeds(path) for path in paths]
    kinds = {("ppl" if figures.best_ppl is not None else "accuracy") for side in sides for figures, _ in side.values()}
    if len(kinds) > 1:
        raise ConfigError("language models and classifiers cannot be compared: perplexity and accuracy are different things")
    metric = kinds.pop()
    rows = tuple(_row(path, side, sides[0], metric) for path, side in zip(paths, sides, strict=True))
    columns = ("run", "seeds", "best PPL" if metric == "ppl" else "best accuracy", "against the first", "trainable", "step")
    remarks = [remark for path in paths[1:] for remark in _differences(paths[0], path)]
    return Table("compare", "", columns, rows, frozenset({1, 2, 3, 4, 5})), remarks


def _seeds(path: Path) -> dict[int, tuple[Figures, AuditRecord]]:
    runs = [path] if (path / "config.json").is_file() else sorted(path.glob("seed-*"))
    found = {}
    for run in runs:
        status = read_status(run)
        if status is None or status.status != "done":
            state = status.status if status is not None else "not a run"
            if len(runs) > 1:
                continue
            raise ConfigError(f"{run}: {state}; only finished runs can be compared")
        seed = int(read_json(run / "config.json")["seed"])
        found[seed] = (read_as(Figures, run / "timing_stats.json"), read_as(AuditRecord, run / "audit.json"))
    if not found:
        raise ConfigError(f"{path}: no finished run there; give a run's folder, or one that holds seed-0, seed-1, ...")
    return found


def _row(
    path: Path,
    side: dict[int, tuple[Figures, AuditRecord]],
    first: dict[int, tuple[Figures, AuditRecord]],
    metric: str,
) -> tuple[Cell, ...]:
    best = {seed: figures.best for seed, (figures, _) in side.items()}
    mean = sum(best.values()) / len(best)
    medians = [figures.step_s.median for figures, _ in side.values() if figures.step_s.median is not None]
    audit = next(iter(side.values()))[1]
    gap = "" if side is first else _gap(best, {seed: figures.best for seed, (figures, _) in first.items()}, metric)
    return (
        Cell(str(path)),
        Cell(str(len(side))),
        Cell(f"{mean:.2f}" if metric == "ppl" else f"{100 * mean:.2f}%"),
        Cell(gap),
        Cell(f"{audit.trainable:,}"),
        Cell(f"{1000 * min(medians):.1f} ms" if medians else ""),
    )


def _gap(ours: dict[int, float], theirs: dict[int, float], metric: str) -> str:
    if metric == "ppl":
        interval = paired_log_ratio(ours, theirs)
        if interval is not None:
            return ratio_text(interval)
    else:
        interval = paired_difference(ours, theirs)
        if interval is not None:
            return points_text(interval)
    # Single runs are set side by side whatever their seeds; a reader sees from the number of seeds that there is no interval.
    mine, reference = (sum(values.values()) / len(values) for values in (ours, theirs))
    return f"{100 * (mine / reference - 1):+.1f}%" if metric == "ppl" else f"{100 * (mine - reference):+.2f} points"


def _differences(first: Path, second: Path) -> list[str]:
    """Return a line on what two runs' configs differ in, their seeds aside."""
    configs = []
    for path in (first, second):
        run = path if (path / "config.json").is_file() else next(path.glob("seed-*"))
        try:
            configs.append({key: value for key, value in read_json(run / "config.json").items() if key != "seed"})
        except DataError as problem:
            return [str(problem)]
    changes = recipe_differences(configs[0], configs[1])
    return [f"{second} differs from {first} in {'; '.join(changes)}"] if changes else []
