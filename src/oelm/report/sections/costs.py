"""What freezing saves: parameters, memory of the optimizer, bytes on disk, time; and what all of it took."""

from __future__ import annotations

import contextlib
import os
import stat
import statistics
from collections.abc import Iterable
from pathlib import Path

from oelm.bench.speed import TimedShape, TimingRecord, read_timings
from oelm.report.arms import Arm, FinishedRun
from oelm.report.document import Block, Cell, Section, Table, Text
from oelm.report.pairs import Findings, change_later, label
from oelm.report.words import Words

_MIB = 2**20
_CHANGED = "+changes"


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
        rows = [(*row, Cell(_energy_text(energy, words))) for row, energy in zip(rows, energies, strict=True)]
        columns.append(words("costs.energy"))
        texts.append(Text(words("costs.energy_text")))
    table = Table("costs", words("costs.caption"), tuple(columns), tuple(rows), frozenset(range(2, len(columns))))
    blocks: list[Block] = [*texts, table, *_speed(findings, words)]
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


def _energy_text(energy: dict[str, float], words: Words) -> str:
    return words.listed(f"{name.upper()} {joules / 1000:,.2f} kJ" for name, joules in energy.items())


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
    rows = tuple(
        (
            Cell(f"{row.first} / {row.second}"),
            Cell(_timed_text(row, words)),
            Cell(f"{row.value:.3f}x [{row.low:.3f}, {row.high:.3f}]", row.value),
            Cell(f"{row.bound:.3f}x", row.bound),
            Cell(_memory_text(row), row.second_peak_bytes),
            Cell(str(row.rounds), row.rounds),
        )
        for row in found
    )
    columns = tuple(words(f"speed.{name}") for name in ("arms", "shape", "ratio", "bound", "memory", "rounds"))
    return [Table("speed", words("speed.caption"), columns, rows, frozenset({2, 3, 4, 5}))]


def _timed_text(timing: TimingRecord, words: Words) -> str:
    shape = shape_text(timing.shape, words)
    if timing.optimizer is None:
        return shape
    return words("speed.trained", shape=shape, optimizer=timing.optimizer, threads=timing.threads)


def _memory_text(timing: TimingRecord) -> str:
    if timing.first_peak_bytes is None or timing.second_peak_bytes is None:
        return ""
    return f"{timing.first_peak_bytes / _MIB:,.0f} / {timing.second_peak_bytes / _MIB:,.0f} MiB"


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


def totals_section(findings: Findings, words: Words) -> Section:
    """Return what everything took: runs, hours, tokens, bytes."""
    runs = [run for arm in findings.arms for run in (*arm.runs, *arm.unfinished)]
    finished = [run for arm in findings.arms for run in arm.runs]
    hours = sum(run.figures.wall_s["total"] for run in finished) / 3600
    tokens = sum(run.figures.tokens for run in finished)
    size = sum(_bytes(run.path) for run in runs)
    # Of a sweep's points only what was also run apart is an arm; one without a finished run is whatever it was meant to be.
    done = [arm for arm in findings.arms if arm.runs]
    points = len(done) - len(findings.unswept(done))
    values = {
        "runs": f"{len(runs):,}",
        "finished": f"{len(finished):,}",
        "arms": f"{len(findings.arms) - points:,}",
        "points": f"{points:,}",
        "hours": f"{hours:,.2f}",
        "tokens": f"{tokens / 1e6:,.1f}M",
        "bytes": f"{size / _MIB:,.1f} MiB",
        "machines": "; ".join(sorted(_machines(finished, words))) or "-",
        "revisions": "; ".join(sorted(_revisions(finished, words))) or "-",
    }
    rows = tuple((Cell(words(f"totals.{name}")), Cell(text)) for name, text in values.items())
    table = Table("totals", words("totals.caption"), (words("totals.what"), words("totals.value")), rows, frozenset())
    return Section("totals", words("totals.title"), (table,))


def _bytes(run: Path) -> int:
    size = 0
    for folder, _, names in os.walk(run):
        for name in names:
            # A run under way replaces its files meanwhile.
            with contextlib.suppress(OSError):
                facts = os.lstat(os.path.join(folder, name))
                size += facts.st_size if stat.S_ISREG(facts.st_mode) else 0
    return size


def _machines(runs: Iterable[FinishedRun], words: Words) -> set[str]:
    """Return what runs were computed on, without naming a machine."""
    found = set()
    for run in runs:
        setting = run.manifest.environment
        kind = ", ".join(setting.get(name, "?") for name in ("device", "precision", "machine", "cpu_capability"))
        found.add(words("totals.machine", kind=kind, threads=setting.get("threads", "?"), torch=run.manifest.torch))
    return found


def _revisions(runs: Iterable[FinishedRun], words: Words) -> set[str]:
    return {_revision(run.manifest.source_revision, words) for run in runs}


def _revision(revision: str | None, words: Words) -> str:
    if revision is None:
        return words("totals.unknown")
    return words("totals.changed", revision=revision[:12]) if revision.endswith(_CHANGED) else revision[:12]
