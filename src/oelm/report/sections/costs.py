"""What freezing saves: parameters, memory of the optimizer, bytes on disk, time."""

from __future__ import annotations

import statistics
from collections.abc import Iterable

from oelm.bench.speed import TimedShape, TimingRecord, read_timings
from oelm.experiments.catalog import Catalog
from oelm.report.arms import Arm, FinishedRun, differing_settings
from oelm.report.document import Block, Cell, Section, Table, Text
from oelm.report.pairs import Findings, Pair, change_later, gap_between, label, method_of, pair_text, rival_of
from oelm.report.words import Words

_MIB = 2**20


def costs_section(findings: Findings, words: Words) -> Section | None:
    """Return parameters, bytes and step times of every arm and its baseline, and interleaved timings if any were made."""
    arms = [arm for baseline, pairs in findings.families for arm in (baseline, *(pair.arm for pair in pairs))]
    if not arms:
        return None
    rows = [_row(arm, words) for arm in arms]
    names = ("arm", "budget", "trainable", "frozen", "share", "state", "checkpoint", "step", "wall")
    columns = [words(f"costs.{name}") for name in names]
    texts = [Text(words("costs.text"))]
    energies = [_energy(arm) for arm in arms]
    # A column of what no machine here measures would promise too much.
    if any(energies):
        texts_of = [[f"{name.upper()} {joules / 1000:,.2f} kJ" for name, joules in energy.items()] for energy in energies]
        rows = [(*row, Cell(words.listed(told))) for row, told in zip(rows, texts_of, strict=True)]
        columns.append(words("costs.energy"))
        texts.append(Text(words("costs.energy_text")))
    table = Table("costs", words("costs.caption"), tuple(columns), tuple(rows), frozenset(range(2, len(columns))))
    blocks: list[Block] = [*texts, table, *_speed(findings, words), *_at_equal_seconds(findings, words)]
    return Section("costs", words("costs.title"), tuple(blocks))


def _row(arm: Arm, words: Words) -> tuple[Cell, ...]:
    audit, change = arm.first.audit, change_later(arm)
    # The maximum over the run.
    state = 8 * max(audit.trainable, audit.trainable + change)
    checkpoint = 4 * audit.total + state
    step = median_step(arm.runs)
    wall = statistics.median(run.figures.wall_s["total"] for run in arm.runs)
    return (
        Cell(label(arm)),
        Cell(arm.budget),
        Cell(_counted(audit.trainable, change, words), audit.trainable),
        Cell(_counted(audit.frozen, -change, words), audit.frozen),
        Cell(f"{100 * audit.frozen / audit.total:.2f}%", audit.frozen / audit.total),
        Cell(f"{state / _MIB:,.1f} MiB", state),
        Cell(f"{checkpoint / _MIB:,.1f} MiB", checkpoint),
        Cell("" if step is None else f"{1000 * step:,.1f} ms", step),
        Cell(f"{wall:,.0f} s", wall),
    )


def _energy(arm: Arm) -> dict[str, float]:
    """Return the median over runs of the joules of each source that was measured in all of them."""
    found = [run.figures.energy_j for run in arm.runs]
    shared = [name for name in found[0] if all(name in energy for energy in found)]
    return {name: statistics.median(energy[name] for energy in found) for name in shared}


def _counted(first: int, change: int, words: Words) -> str:
    return words("counts.later", first=first, last=first + change) if change else f"{first:,}"


def median_step(runs: Iterable[FinishedRun]) -> float | None:
    """Return the median over runs of their median step, in seconds; None where none was measured."""
    medians = [run.figures.step_s.median for run in runs]
    known = [median for median in medians if median is not None]
    return statistics.median(known) if known else None


def _speed(findings: Findings, words: Words) -> list[Block]:
    """Return timings in which two arms took turns, with the arithmetic bound."""
    found = [timing for root in findings.roots for timing in read_timings(root)]
    if not found:
        return [Text(words("speed.none"), "note")]
    columns = tuple(words(f"speed.{name}") for name in ("arms", "shape", "ratio", "bound", "memory", "rounds"))
    rows = tuple(_speed_row(row, words) for row in found)
    # Memory is measured where it was asked for.
    shown = tuple(place for place in range(len(columns)) if place != 4 or any(row[4].text for row in rows))
    return [Table("speed", words("speed.caption"), columns, rows, frozenset({2, 3, 4, 5}), shown)]


def _speed_row(row: TimingRecord, words: Words) -> tuple[Cell, ...]:
    shape, first, second = shape_text(row.shape, words), row.first_peak_bytes, row.second_peak_bytes
    if row.optimizer is not None:
        shape = words("speed.trained", shape=shape, optimizer=row.optimizer, threads=row.threads)
    memory = "" if first is None or second is None else f"{first / _MIB:,.0f} / {second / _MIB:,.0f} MiB"
    return (
        Cell(f"{row.first} / {row.second}"),
        Cell(shape),
        Cell(f"{row.value:.3f}x [{row.low:.3f}, {row.high:.3f}]", row.value),
        Cell(f"{row.bound:.3f}x", row.bound),
        Cell(memory, second),
        Cell(str(row.rounds), row.rounds),
    )


def timing_of(pair: Pair, timings: Iterable[TimingRecord], catalog: Catalog) -> TimingRecord | None:
    """Return the timing of an arm's step against its baseline's, at their shape and with their optimizer, if there is one."""
    config = pair.baseline.first.config
    sizes = {"short_conv": 0, "qk_dim": None, **config.get("model", {}), "batch_size": config.get("batch_size")}
    sizes["is_classifier"] = False
    wanted = ("baseline", rival_of(pair) or method_of(pair.arm, catalog), config.get("optim", {}).get("name", "adamw"))
    for timing in timings:
        is_same_shape = all(value in (None, sizes.get(key)) for key, value in timing.shape.model_dump().items())
        if is_same_shape and (timing.first, timing.second, timing.optimizer) == wanted:
            return timing
    return None


def _at_equal_seconds(findings: Findings, words: Words) -> list[Block]:
    """Return gaps to baselines that were given as many seconds as the arm: as many steps fewer as its steps are faster."""
    timings = [timing for root in findings.roots for timing in read_timings(root)]
    rows: list[tuple[Cell, ...]] = []
    for pair in findings.pairs:
        timing = None if pair.confounded or pair.arm.metric != "ppl" else timing_of(pair, timings, findings.catalog)
        if timing is not None:
            lengths = _of_other_length(pair.baseline, findings.arms)
            rows += [_seconds_row(pair, shorter, timing, findings.catalog, words) for shorter in lengths]
    columns = tuple(words(f"seconds.{name}") for name in ("arm", "data", "steps", "time", "at_steps", "at_seconds"))
    return [Table("seconds", words("seconds.caption"), columns, tuple(rows), frozenset({2, 3, 4, 5}))] if rows else []


def _of_other_length(baseline: Arm, arms: Iterable[Arm]) -> list[Arm]:
    """Return the arms that differ from a baseline in the number of steps and in nothing else."""
    alike = [arm for arm in arms if arm.is_usable and (arm.experiment, arm.budget) == (baseline.experiment, baseline.budget)]
    return [arm for arm in alike if differing_settings(arm.first.recipe, baseline.first.recipe).keys() == {"steps"}]


def _seconds_row(pair: Pair, shorter: Arm, timing: TimingRecord, catalog: Catalog, words: Words) -> tuple[Cell, ...]:
    ours, theirs = (arm.first.config["steps"] for arm in (pair.arm, shorter))
    value, low, high = (ours / theirs / speed for speed in (timing.value, timing.high, timing.low))
    gap = gap_between(pair.arm, shorter, pair.split)
    return (
        Cell(pair_text(pair, catalog, words)),
        Cell(pair.arm.data),
        Cell(f"{ours:,} / {theirs:,}", theirs),
        Cell(f"{value:.3f}x [{low:.3f}, {high:.3f}]", value),
        Cell(pair.gap.text, pair.gap.value),
        Cell(gap.text, gap.value),
    )


def shape_text(shape: TimedShape, words: Words) -> str:
    """Return the model and batch of a timing in the reader's language."""
    shown = words(
        "speed.model",
        layers=shape.num_layers,
        width=shape.model_dim,
        dropout=shape.dropout,
        convolution=words("speed.convolution", tokens=shape.short_conv) if shape.short_conv else "",
        batch=shape.batch_size,
        length=shape.seq_len,
        vocabulary="" if shape.vocab_size is None else words("speed.vocabulary", size=shape.vocab_size),
    )
    return words("speed.classifier", shape=shown) if shape.is_classifier else shown
