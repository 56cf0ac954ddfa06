"""The dated log of experiments, written from the records."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from oelm.report.collect import Run, collect
from oelm.train.status import read_status


def write_diary(roots: Sequence[Path]) -> str:
    """Return the log of all runs as Markdown, day by day, the newest day first."""
    days: dict[str, list[tuple[str, str]]] = {}
    for arm in collect(roots):
        for run in (*arm.runs, *arm.unfinished):
            status = read_status(run.path)
            moment = status.heartbeat if status is not None else ""
            days.setdefault(moment[:10] or "no date", []).append((moment, _line(run)))
    if not days:
        return "# Experiment log\n\nNo runs yet.\n"
    parts = ["# Experiment log"]
    for day in sorted(days, reverse=True):
        parts.append(f"## {day}\n\n" + "\n".join(f"- {line}" for _, line in sorted(days[day])))
    return "\n\n".join(parts) + "\n"


def _line(run: Run) -> str:
    name = f"`{_plain(run.name)}`"
    if not run.is_finished:
        why = _plain(run.problem or run.message)
        return f"{name}: {run.state}" + (f" ({why})" if why else "")
    assert run.figures is not None and run.manifest is not None and run.audit is not None
    figures = run.figures
    best = f"best PPL {figures.best_ppl:.2f}" if figures.best_ppl is not None else f"best accuracy {100 * figures.best:.2f}%"
    minutes = figures.wall_s["total"] / 60
    revision = (run.manifest.source_revision or "unknown")[:12]
    return (
        f"{name}: {best} at step {figures.best_step:,}, {figures.tokens / 1e6:.1f}M tokens in {minutes:.1f} min on "
        f"{run.manifest.environment.get('device', '?')}; {run.audit.trainable:,} trainable, {run.audit.frozen:,} frozen; "
        f"data {_plain(run.manifest.data.name)} ({run.manifest.data.fingerprint[:8]}), revision {revision}"
    )


def _plain(text: str) -> str:
    """Return text that stays within its line and its quotes."""
    return " ".join(text.replace("`", "'").replace("<", "&lt;").split())
