"""The command that repeats a run of each arm: on the same hardware it gives the same curve."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from pathlib import Path

from oelm.report.arms import FinishedRun
from oelm.report.document import Cell, Section, Table, Text
from oelm.report.pairs import Findings, label
from oelm.report.words import Words
from oelm.runs.layout import CONFIG

# A name of `oelm data list`, and no place.
_NAME = re.compile(r"[a-z0-9][a-z0-9-]*")


def repeat_section(findings: Findings, words: Words) -> Section | None:
    """Return for every usable arm that is more than a sweep's point the commands that prepare its data and repeat a seed."""
    rows = tuple(
        (
            Cell(label(arm)),
            Cell(arm.budget),
            Cell(str(arm.first.seed), arm.first.seed),
            Cell(data_command(arm.first), is_code=True),
            Cell(run_command(arm.first, findings.roots), is_code=True),
        )
        for arm in findings.unswept(arm for arm in findings.arms if arm.is_usable)
    )
    if not rows:
        return None
    columns = tuple(words(f"repeat.{name}") for name in ("arm", "budget", "seed", "data", "command"))
    table = Table("repeat", words("repeat.caption"), columns, rows, frozenset({2}))
    return Section("repeat", words("repeat.title"), (Text(words("repeat.text")), table))


def data_command(run: FinishedRun) -> str:
    """Return the command that prepares a run's data, if it has a name; other data is named by path in the config."""
    task, data = run.config.get("examples"), run.config.get("data") or {}
    named = task.get("task") if isinstance(task, dict) else data.get("source")
    if not isinstance(named, str) or not _NAME.fullmatch(named):
        return ""
    options = [("--tokenizer", data.get("tokenizer")), ("--max-tokens", data.get("max_tokens"))]
    given = [text for option, value in options if value is not None for text in (option, str(value))]
    return shlex.join(["oelm", "data", "prepare", named, *given])


def run_command(run: FinishedRun, roots: Sequence[Path]) -> str:
    """Return what to type, in the folder that the report was made in, to repeat a run next to the original."""
    kind = "train" if run.metric == "ppl" else "finetune"
    setting = run.manifest.environment
    # On a CPU the number of threads decides the order of sums.
    is_cpu = setting.get("device") == "cpu" and "threads" in setting
    threads = f"OMP_NUM_THREADS={shlex.quote(setting['threads'])} " if is_cpu else ""
    place = _told(run.path, roots)
    again = Path("again", run.experiment, run.budget, run.variant, run.path.name)
    return threads + shlex.join(["oelm", kind, "--config", str(place / CONFIG), "--out", again.as_posix()])


def _told(path: Path, roots: Sequence[Path]) -> Path:
    """Return a run's folder as shown to readers: a relative path, or only its last part if it is outside."""
    root = next(root for root in roots if path.is_relative_to(root))
    inside, here = path.relative_to(root), Path.cwd()
    if not root.is_absolute():
        return root / inside
    return (root.relative_to(here) if root.is_relative_to(here) else Path(root.name)) / inside
