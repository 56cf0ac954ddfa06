"""A quick look: run folders side by side, whatever they are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from oelm.errors import ConfigError
from oelm.report.arms import Arm, FinishedRun, common_split, read_run, run_differences
from oelm.report.document import Cell, Table
from oelm.report.pairs import over_examples
from oelm.report.sections.costs import median_step
from oelm.report.sections.verdicts import power_text
from oelm.report.words import Words
from oelm.runs.find import look_at
from oelm.runs.layout import CONFIG, EvaluatedSplit
from oelm.stats import Interval, common_seeds, gap_text, interval_text, paired_interval
from oelm.text import figure_text


@dataclass(frozen=True)
class RunFolder:
    """The finished runs of one path as an arm, and what in the folder was left out."""

    path: Path
    arm: Arm
    left_out: tuple[str, ...]


def compare_runs(paths: Sequence[Path]) -> tuple[Table, list[str]]:
    """Return a table of finished runs next to the first of them, and remarks: left-out seeds, what their configs differ in.

    A folder that holds seeds (seed-0, seed-1, ...) means all of them, paired by seed with those of the first.
    """
    if len(paths) < 2:
        raise ConfigError("give two runs at least: oelm compare RUN RUN")
    folders = [read_folder(path) for path in paths]
    if len({folder.arm.metric for folder in folders}) > 1:
        raise ConfigError("language models and classifiers cannot be compared: perplexity and accuracy are different things")
    first, others = folders[0], folders[1:]
    metric, split = first.arm.metric, common_split(*(folder.arm for folder in folders))
    names = _told_apart(paths)
    rows = tuple(
        _row(name, folder, None if folder is first else first, split) for name, folder in zip(names, folders, strict=True)
    )
    unit = "PPL" if metric == "ppl" else "accuracy"
    figure = f"{unit} on test" if split == "test" else f"best {unit} on validation"
    columns: tuple[str, ...] = ("run", "seeds", figure, "against the first", "trainable", "step")
    if metric == "accuracy":
        # On validation the answers that a run keeps are those of its last step, and its figure is that of its best.
        columns += ("over examples" if split == "test" else "over examples, final models",)
    remarks = _some_tested(folders) + [remark for folder in folders for remark in folder.left_out]
    share = next((share for folder in folders if (share := folder.arm.majority(split)) is not None), None)
    remarks += [] if share is None else [f"always naming the largest class gives {100 * share:.2f}%"]
    remarks += [remark for folder in others for remark in (*_seeds_apart(folder, first), *_differences(folder, first))]
    remarks += [remark for folder in others for remark in _power(folder, first, split)]
    if any(len(folder.arm.best) == 1 and folder.arm.best.keys() == first.arm.best.keys() for folder in others):
        remarks.append("one seed: no interval, so chance may explain the gap; train more seeds")
    return Table("compare", "", columns, rows, frozenset(range(1, len(columns)))), remarks


def _some_tested(folders: Sequence[RunFolder]) -> list[str]:
    """Return why the folders are compared on validation although some have test figures."""
    without = [str(folder.path) for folder in folders if common_split(folder.arm) == "val"]
    if not without or not any(folder.arm.on("test") for folder in folders):
        return []
    return [f"compared on validation, because not every run of {', '.join(without)} has figures on test"]


def read_folder(path: Path) -> RunFolder:
    """Return the finished runs of a run's folder, or of one that holds its seeds; ConfigError where no figure can be had."""
    folders = _run_folders(path)
    runs: dict[int, FinishedRun] = {}
    left_out = []
    for folder in folders:
        run = read_run(look_at(folder))
        if not isinstance(run, FinishedRun):
            why = run.problem or run.state
            if len(folders) == 1:
                raise ConfigError(f"{folder}: {why}; only finished runs can be compared")
            left_out.append(f"{folder}: {why}, so it is left out")
            continue
        seed = run.config.get("seed")
        if not isinstance(seed, int) or seed in runs:
            shown = f"its seed, {seed}, is also that of {runs[seed].path}" if seed in runs else "its config.json has no seed"
            raise ConfigError(f"{folder}: {shown}; give folders in which each seed occurs once")
        runs[seed] = replace(run, seed=seed)
    if not runs:
        raise ConfigError(f"{path}: none of its {len(folders)} runs can be used: {'; '.join(left_out)}")
    arm = Arm("", "", str(path), tuple(runs.values()), ())
    for run in arm.runs[1:]:
        if changes := run_differences(arm.first, run):
            names = f"{arm.first.path.name} and {run.path.name}"
            raise ConfigError(f"{path}: {names} differ in {'; '.join(changes[:4])}; compare them one by one")
    return RunFolder(path, arm, tuple(left_out))


def _run_folders(path: Path) -> list[Path]:
    """Return the folders of the runs that a path names; ConfigError says what is there instead."""
    wanted = "give a run's folder, or one that holds seed-0, seed-1, ..."
    if not path.is_dir():
        raise ConfigError(f"{path}: {'is a file' if path.exists() else 'no such folder'}; {wanted}")
    if (path / CONFIG).is_file():
        return [path]
    if found := sorted(path.glob("seed-*"), key=lambda folder: (len(folder.name), folder.name)):
        return found
    below = next((seed.parent for depth in range(1, 4) for seed in path.glob("*/" * depth + "seed-*")), None)
    hint = wanted if below is None else f"give one below it, such as {below}"
    raise ConfigError(f"{path}: is no run, and holds no seed-0, seed-1, ...; {hint}")


def _told_apart(paths: Sequence[Path]) -> list[str]:
    """Return paths without the parts that all of them begin or end with."""
    parts = [path.parts for path in paths]
    most = min(map(len, parts)) - 1
    start = next((n for n in range(most) if len({each[n] for each in parts}) > 1), most)
    end = next((n for n in range(most - start) if len({each[-1 - n] for each in parts}) > 1), most - start)
    return ["/".join(each[start : len(each) - end]) for each in parts]


def _row(name: str, folder: RunFolder, first: RunFolder | None, split: EvaluatedSplit) -> tuple[Cell, ...]:
    arm, mean, step = folder.arm, folder.arm.mean(split), median_step(folder.arm.runs)
    examples = None if first is None else _over_examples(arm, first.arm, split)
    return (
        Cell(name),
        Cell(str(len(arm.runs))),
        Cell(figure_text(arm.metric, mean)),
        Cell(_gap(arm, first.arm, split) if first is not None else ""),
        Cell(f"{arm.first.audit.trainable:,}"),
        Cell("" if step is None else f"{1000 * step:.1f} ms"),
        *([Cell("" if examples is None else interval_text(examples, "accuracy"))] if arm.metric == "accuracy" else []),
    )


def _gap(arm: Arm, first: Arm, split: EvaluatedSplit) -> str:
    interval = paired_interval(arm.on(split), first.on(split), arm.metric)
    if interval is not None:
        return interval_text(interval, arm.metric)
    # Single runs are compared whatever their seeds.
    return gap_text(arm.mean(split), first.mean(split), arm.metric) + ("" if arm.metric == "ppl" else " points")


def _over_examples(arm: Arm, first: Arm, split: EvaluatedSplit) -> Interval | None:
    """Return a classifier's interval over examples: of the common seeds, or of two single runs whatever their seeds."""
    if arm.metric != "accuracy":
        return None
    if len(arm.runs) == len(first.runs) == 1:
        return over_examples(arm.runs, first.runs, split)
    seeds = common_seeds(arm.on(split), first.on(split))
    ours, theirs = ({run.seed: run for run in each.runs} for each in (arm, first))
    return over_examples([ours[seed] for seed in seeds], [theirs[seed] for seed in seeds], split)


def _power(folder: RunFolder, first: RunFolder, split: EvaluatedSplit) -> list[str]:
    """Return the smallest difference of accuracies that the comparison would detect."""
    arm, other = folder.arm, first.arm
    if arm.metric != "accuracy":
        return []
    over_seeds = paired_interval(arm.on(split), other.on(split), arm.metric)
    told = power_text(over_seeds, _over_examples(arm, other, split), Words("en"))
    return [f"{folder.path} and {first.path}: {text}" for text in told]


def _seeds_apart(folder: RunFolder, first: RunFolder) -> list[str]:
    """Return a line on what the gap is made of, where the two have not the same seeds."""
    ours, theirs = folder.arm.best, first.arm.best
    if ours.keys() == theirs.keys():
        return []
    names, common = f"{folder.path} and {first.path}", common_seeds(ours, theirs)
    if len(common) < 2:
        return [f"{names} have not two seeds in common: the gap is that of their means, without an interval"]
    return [f"{names}: the gap is over the seeds that both have, {', '.join(map(str, common))}"]


def _differences(folder: RunFolder, first: RunFolder) -> list[str]:
    """Return a line on what two folders' configs and data differ in, their seeds aside."""
    changes = run_differences(first.arm.first, folder.arm.first)
    return [f"{folder.path} differs from {first.path} in {'; '.join(changes)}"] if changes else []
