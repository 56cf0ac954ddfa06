"""A quick look: run folders side by side, whatever they are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from oelm.decimals import fixed
from oelm.errors import ConfigError
from oelm.report.collect import Run, difference_text, mean_figure, read_run, recipe_differences
from oelm.report.computed import known_differences
from oelm.report.costs import median_step
from oelm.report.document import Cell, Table
from oelm.report.ladder import detectable_text, over_examples, points_text, ratio_text
from oelm.report.stats import POWER, Interval, common_seeds, paired_difference, paired_log_ratio
from oelm.runs.find import look_at
from oelm.runs.layout import CONFIG, Split


@dataclass(frozen=True)
class Side:
    """What one path stands for: finished runs by seed, and what is in the folder beside them."""

    path: Path
    runs: dict[int, Run]
    left_out: tuple[str, ...]

    @property
    def first(self) -> Run:
        return next(iter(self.runs.values()))

    def on(self, split: Split) -> dict[int, float]:
        """Return each seed's figure on a split, where it was measured."""
        found = {seed: run.figures.on(split) for seed, run in self.runs.items() if run.figures is not None}
        return {seed: value for seed, value in found.items() if value is not None}

    @property
    def metric(self) -> str:
        assert self.first.figures is not None
        return "ppl" if self.first.figures.best_ppl is not None else "accuracy"


def compare_runs(paths: Sequence[Path]) -> tuple[Table, list[str]]:
    """Return a table of finished runs beside the first of them, and what to know: left-out seeds, what their configs differ in.

    A folder that holds seeds (seed-0, seed-1, ...) stands for all of them, paired by seed with those of the first.
    """
    if len(paths) < 2:
        raise ConfigError("give two runs at least: oelm compare RUN RUN")
    sides = [_side(path) for path in paths]
    if len({side.metric for side in sides}) > 1:
        raise ConfigError("language models and classifiers cannot be compared: perplexity and accuracy are different things")
    first, metric = sides[0], sides[0].metric
    tested = [side for side in sides if len(side.on("test")) == len(side.runs)]
    split: Split = "test" if len(tested) == len(sides) else "val"
    rows = tuple(_row(side, None if side is first else first, split) for side in sides)
    unit = "PPL" if metric == "ppl" else "accuracy"
    figure = f"{unit} on test" if split == "test" else f"best {unit} on validation"
    columns: tuple[str, ...] = ("run", "seeds", figure, "against the first", "trainable", "step")
    if metric == "accuracy":
        # On validation the answers that a run keeps are those of its last step, and its figure is that of its best.
        columns += ("over examples" if split == "test" else "over examples, final models",)
    remarks = _some_tested(sides, tested) + [remark for side in sides for remark in side.left_out]
    share = next((share for side in sides if (share := side.first.majority(split)) is not None), None)
    remarks += [] if share is None else [f"naming the largest class always comes to {100 * share:.2f}%"]
    remarks += [remark for side in sides[1:] for remark in (*_seeds_apart(side, first), *_differences(side, first))]
    remarks += [remark for side in sides[1:] for remark in _power(side, first, split)]
    return Table("compare", "", columns, rows, frozenset(range(1, len(columns)))), remarks


def _some_tested(sides: list[Side], tested: list[Side]) -> list[str]:
    """Say why the sides are compared on validation though some have figures on test."""
    without = [str(side.path) for side in sides if side not in tested]
    if not without or not any(side.on("test") for side in sides):
        return []
    return [f"compared on validation, for not every run of {', '.join(without)} has figures on test"]


def _side(path: Path) -> Side:
    is_run = (path / CONFIG).is_file()
    folders = [path] if is_run else sorted(path.glob("seed-*"), key=lambda folder: (len(folder.name), folder.name))
    runs: dict[int, Run] = {}
    left_out = []
    for folder in folders:
        run = read_run(look_at(folder))
        if not run.is_finished:
            why = run.problem or run.state
            if len(folders) == 1:
                raise ConfigError(f"{folder}: {why}; only finished runs can be compared")
            left_out.append(f"{folder}: {why}, so it is left out")
            continue
        seed = (run.config or {}).get("seed")
        if not isinstance(seed, int) or seed in runs:
            told = f"its seed, {seed}, is also that of {runs[seed].path}" if seed in runs else "its config.json has no seed"
            raise ConfigError(f"{folder}: {told}; give folders in which each seed stands once")
        runs[seed] = run
    if not runs:
        raise ConfigError(f"{path}: no finished run there; give a run's folder, or one that holds seed-0, seed-1, ...")
    _check_alike(path, list(runs.values()))
    return Side(path, runs, tuple(left_out))


def _check_alike(path: Path, runs: list[Run]) -> None:
    for run in runs[1:]:
        if changes := _changes(runs[0], run):
            raise ConfigError(
                f"{path}: {runs[0].path.name} and {run.path.name} differ in {'; '.join(changes[:4])}; compare them one by one"
            )


def _changes(first: Run, second: Run) -> list[str]:
    changes = recipe_differences(first.recipe, second.recipe)
    apart = known_differences(first.computed_with, second.computed_with)
    changes += [difference_text(name, values) for name, values in apart.items()]
    if first.fingerprint != second.fingerprint:
        changes.append(f"data.fingerprint ({first.fingerprint[:8]} / {second.fingerprint[:8]})")
    return changes


def _row(side: Side, first: Side | None, split: Split) -> tuple[Cell, ...]:
    mean = mean_figure(side.on(split).values(), side.metric)
    step = median_step(side.runs.values())
    audit = side.first.audit
    assert audit is not None
    examples = None if first is None else _over_examples(side, first, split)
    return (
        Cell(str(side.path)),
        Cell(str(len(side.runs))),
        Cell(fixed(mean, 2) if side.metric == "ppl" else f"{100 * mean:.2f}%"),
        Cell(_gap(side, first, split) if first is not None else ""),
        Cell(f"{audit.trainable:,}"),
        Cell("" if step is None else f"{1000 * step:.1f} ms"),
        *([Cell("" if examples is None else points_text(examples))] if side.metric == "accuracy" else []),
    )


def _over_examples(side: Side, first: Side, split: Split) -> Interval | None:
    """Return a classifier's interval over examples: of the common seeds, or of two single runs whatever their seeds."""
    if side.metric != "accuracy":
        return None
    seeds = common_seeds(side.on(split), first.on(split))
    ours, theirs = ([each.runs[seed] for seed in seeds] for each in (side, first))
    if len(side.runs) == len(first.runs) == 1:
        ours, theirs = [side.first], [first.first]
    return over_examples(ours, theirs, split)


def _power(side: Side, first: Side, split: Split) -> list[str]:
    """Say what difference of accuracies a comparison could have seen."""
    if side.metric != "accuracy":
        return []
    over_seeds = detectable_text(paired_difference(side.on(split), first.on(split)))
    found = {"seeds": over_seeds, "examples": detectable_text(_over_examples(side, first, split))}
    told = [f"{points} points over {name}" for name, points in found.items() if points is not None]
    if not told:
        return []
    power = f"the smallest difference that this comparison would detect with {100 * POWER:g}% probability"
    return [f"{side.path} and {first.path}: {power}: {', '.join(told)}"]


def _gap(side: Side, first: Side, split: Split) -> str:
    ours, theirs = side.on(split), first.on(split)
    if side.metric == "ppl":
        interval = paired_log_ratio(ours, theirs)
        if interval is not None:
            return ratio_text(interval)
    else:
        interval = paired_difference(ours, theirs)
        if interval is not None:
            return points_text(interval)
    # Single runs are set side by side whatever their seeds; a reader sees from the number of seeds that there is no interval.
    mine, reference = (mean_figure(values.values(), side.metric) for values in (ours, theirs))
    if side.metric == "ppl":
        return f"{fixed(100 * (mine / reference - 1), 1, sign=True)}%"
    return f"{100 * (mine - reference):+.2f} points"


def _seeds_apart(side: Side, first: Side) -> list[str]:
    """Return a line on what the gap is made of, where the two have not the same seeds."""
    if side.runs.keys() == first.runs.keys():
        return []
    common = common_seeds(side.on("val"), first.on("val"))
    if len(common) < 2:
        return [
            f"{side.path} and {first.path} have not two seeds in common: the gap is that of their means, without an interval"
        ]
    return [f"{side.path} and {first.path}: the gap is over the seeds that both have, {', '.join(map(str, common))}"]


def _differences(side: Side, first: Side) -> list[str]:
    """Return a line on what two sides' configs and data differ in, their seeds aside."""
    changes = _changes(first.first, side.first)
    return [f"{side.path} differs from {first.path} in {'; '.join(changes)}"] if changes else []
