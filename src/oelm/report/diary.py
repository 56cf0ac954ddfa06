"""The dated log of experiments, written from the records."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from pathlib import Path

from oelm.decimals import fixed
from oelm.experiments.portable import this_machine
from oelm.report.collect import FinishedRun, Run, collect
from oelm.report.plain import on_one_line
from oelm.train.status import read_status

_NO_DATE = "no date"
_CHANGED = "+changes"


def write_diary(roots: Sequence[Path]) -> str:
    """Return the log of all runs as Markdown, day by day, the newest day first."""
    days: dict[str, list[tuple[str, str]]] = {}
    for arm in collect(roots):
        for run in (*arm.runs, *arm.unfinished):
            status = read_status(run.path)
            moment = status.heartbeat if status is not None else ""
            days.setdefault(_day(moment), []).append((moment, _line(run)))
    if not days:
        return "# Experiment log\n\nNo runs yet.\n"
    parts = ["# Experiment log"]
    for day in sorted(days, key=lambda day: (day != _NO_DATE, day), reverse=True):
        parts.append(f"## {day}\n\n" + "\n".join(f"- {line}" for _, line in sorted(days[day])))
    return "\n\n".join(parts) + "\n"


def _day(moment: str) -> str:
    try:
        return datetime.date.fromisoformat(moment[:10]).isoformat()
    except ValueError:
        return _NO_DATE


def _line(run: Run) -> str:
    name = _code(run.name)
    if run.problem or not isinstance(run, FinishedRun):
        why = this_machine().stripped(run.problem or run.message)
        return f"{name}: {run.state}" + (f" ({_code(why)})" if why.strip() else "")
    figures, data = run.figures, run.manifest.data
    best = (
        f"best PPL {fixed(figures.best_ppl, 2)}" if figures.best_ppl is not None else f"best accuracy {100 * figures.best:.2f}%"
    )
    if figures.test is not None:
        best += f", test {fixed(figures.test, 2)}" if figures.test_ppl is not None else f", test {100 * figures.test:.2f}%"
    minutes = figures.wall_s["total"] / 60
    device = run.manifest.environment.get("device", "unknown")
    return (
        f"{name}: {best} at step {figures.best_step:,}, {figures.tokens / 1e6:.1f}M tokens in {minutes:.1f} min on "
        f"{_code(device)}; {run.audit.trainable:,} trainable, {run.audit.frozen:,} frozen; "
        f"data {_code(data.name)} ({_code(data.fingerprint[:8])}), revision {_code(_revision(run.manifest.source_revision))}"
    )


def _revision(revision: str | None) -> str:
    if revision is None:
        return "unknown"
    return revision[:12] + (_CHANGED if revision.endswith(_CHANGED) else "")


def _code(text: str) -> str:
    """Return text as code, which Markdown shows as it is; within its line and its quotes."""
    return f"`{on_one_line(text).replace('`', chr(39)) or ' '}`"
