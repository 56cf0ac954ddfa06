"""The live page: what runs are doing now, with the report's own tables, charts and words."""

from __future__ import annotations

import contextlib
import datetime
import os
import shlex
import shutil
import statistics
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from oelm.errors import DataError, MissingExtraError
from oelm.experiments.catalog import Catalog
from oelm.experiments.importer import IMPORTED
from oelm.experiments.notify import Event
from oelm.experiments.portable import this_machine
from oelm.experiments.slots import queue_seconds, read_gpus
from oelm.files import read_json
from oelm.report.arms import Run, arms_of, read_run
from oelm.report.build import Report, report_on, with_imported
from oelm.report.document import Block, Cell, Chart, Document, Mark, Section, Table, Text
from oelm.report.foreign import MOST_ROWS, Question, first_rows, imported_section
from oelm.report.judge import LOOKS
from oelm.report.sections.classes import gap_charts
from oelm.report.sections.learning import small_chart
from oelm.report.sections.verdicts import decided_by, verdict_table
from oelm.report.words import Words
from oelm.runs.find import ArmKey, Gap, RunView, baselines_of, gaps, is_number, scan
from oelm.runs.layout import CONFIG, SWEEP
from oelm.runs.metrics import evaluations
from oelm.runs.status import ALIVE, STATES, now_text
from oelm.stats import interval_text
from oelm.text import duration, fixed, on_one_line

# Ended without being done: what a user must look at.
_TROUBLED = ("failed", "dead", "stale", "damaged", "stopped")
_MARKS: dict[str, Mark] = {"failed": "bad", "dead": "bad", "damaged": "bad", "stale": "warn", "stopped": "warn"}
# Over so many runs, only those under way and in trouble have a row each; the others one for each arm.
_MOST_RUNS = 60
# What keeps a page of a thousand runs under 200 KB, and readable.
_MOST_FAMILIES, _FAMILIES_OF_MANY, _MOST_IN_FOREST = 6, 2, 30
_ALL_RUNS = "oelm status --all"
_LONGEST_MESSAGE = 300
# Of the report's table of verdicts: arm, gap, level, verdict, seeds, best, split, budget.
_VERDICT_COLUMNS = (0, 4, 10, 5, 2, 3, 9, 1)
_KIB, _MIB, _GIB = 2**10, 2**20, 2**30


@dataclass(frozen=True)
class Moment:
    """What the page shows, as it was at one moment. `root` and `options` are what a command that continues a run needs."""

    views: tuple[RunView, ...]
    report: Report
    baselines: Mapping[str, str]
    load: Mapping[str, str]
    written: str
    root: Path
    options: tuple[str, ...] = ()

    @property
    def is_over(self) -> bool:
        """Whether nothing runs and nothing waits."""
        return not any(view.state in (*ALIVE, "queued") for view in self.views)

    def decided(self) -> dict[str, str]:
        """Return the comparisons with a PASS or a FAIL at their planned seeds, by name, each as one sentence."""
        found = {
            "/".join(row.pair.arm.key): (row.judgement, decided_by(row, Words("en")).text, row.pair.arm.experiment)
            for row in self.report.judged
        }
        for study in self.report.judged_imported:
            for arm, judged in study.judgements.items():
                gap = "" if judged.interval is None else interval_text(judged.interval, study.question.kind)
                found[f"{IMPORTED}/{study.study.name}/{arm}"] = judged, gap, "--metric"
        return {
            name: f"{name}: preliminary verdict {judged.verdict}, gap {gap}; `oelm report {what}` gives and records the verdict"
            for name, (judged, gap, what) in found.items()
            if judged.verdict in ("PASS", "FAIL")
        }


def news(before: Moment, now: Moment) -> list[tuple[Event, str, str]]:
    """Return what has happened between two moments: runs that failed or were killed, the end of all, verdicts."""
    known = {view.folder: view.state for view in before.views}
    found: list[tuple[Event, str, str]] = []
    for view in now.views:
        if view.state in ("failed", "dead") and known.get(view.folder) != view.state:
            said = view.status.message if view.status is not None and view.state == "failed" else ""
            word = "failed" if view.state == "failed" else "was killed"
            found.append(("failed", view.name, f"{view.name} {word}{f': {said}' if said else ''}"))
    earlier = before.decided()
    found += [("verdict", name, text) for name, text in now.decided().items() if name not in earlier]
    if now.is_over and not before.is_over:
        found.append(("ended", "queue", f"no run is left: {', '.join(f'{count} {s}' for s, count in _counted(now.views))}"))
    return found


def _counted(views: Iterable[RunView]) -> list[tuple[str, int]]:
    """Return how many runs are in each state that any is in."""
    counts = Counter(view.state for view in views)
    return [(state, counts[state]) for state in STATES if counts[state]]


def _states_text(views: Iterable[RunView], words: Words) -> str:
    return words.listed(f"{count} {words(f'live.state.{state}')}" for state, count in _counted(views))


class LiveRuns:
    """Runs of one folder, looked at again and again: finished ones are read once, and judged only when one more has ended.

    Nothing is recorded: a look at this page is no look that `oelm report` counts.
    """

    def __init__(
        self,
        root: Path,
        catalog: Catalog,
        *,
        only: Collection[str] = (),
        budget: str | None = None,
        options: tuple[str, ...] = (),
        question: Question | None = None,
    ) -> None:
        self._root, self._catalog, self._only, self._budget, self._options = root, catalog, only, budget, options
        self._question = question
        # As in a report: named experiments are all that the user asked for.
        self._has_imported = question is not None or not (only or budget)
        self._finished: dict[str, tuple[str, Run]] = {}
        self._known: object = None
        self._report: Report | None = None

    def look(self) -> Moment:
        """Return what the runs are doing now."""
        views = [view for view in scan(self._root) if self._budget in (None, view.budget)]
        shown = tuple(view for view in views if not self._only or view.experiment in self._only)
        report = self._judged(views)
        return Moment(shown, report, self._catalog.baselines(), machine_load(self._root), now_text(), self._root, self._options)

    def _judged(self, views: Sequence[RunView]) -> Report:
        known = (
            [(view.folder, view.status.heartbeat) for view in views if view.state == "done" and view.status is not None],
            [_changed(self._root / LOOKS)],
            [_changed(self._root / place / SWEEP) for place in sorted({f"{v.experiment}/{v.budget}" for v in views})],
            [(str(path), _changed(path)) for path in self._imported()],
        )
        if self._report is None or known != self._known:
            # Of all experiments, named or not: those of one baseline are judged together.
            arms = arms_of(self._read(view) for view in views)
            report = report_on(arms, [self._root], self._catalog, only=self._only)
            self._report = with_imported(report, [self._root], self._question) if self._has_imported else report
            self._known = known
        return self._report

    def _imported(self) -> list[Path]:
        return sorted((self._root / IMPORTED).glob("*/*/*.json")) if self._has_imported else []

    def _read(self, view: RunView) -> Run:
        if view.state != "done" or view.status is None:
            return read_run(view)
        when, run = self._finished.get(view.folder, ("", None))
        if run is None or when != view.status.heartbeat:
            run = read_run(view)
            self._finished[view.folder] = (view.status.heartbeat, run)
        return run


def _changed(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0


def live_document(moment: Moment, words: Words) -> Document:
    """Return the live page in one language; sections without anything to show are left out."""
    report = moment.report
    others = imported_section(report.imported, report.judged_imported, words, is_live=True)
    sections = (
        # Where only others' runs are, that none of ours is would be the first thing to read.
        _queue_section(moment, words) if moment.views or others is None else None,
        _trouble_section(moment, words),
        _verdict_section(moment, words) if moment.views or others is None else None,
        others,
        _learning_section(moment, words),
        _machine_section(moment, words),
    )
    return Document(
        lang=words.lang,
        title=words("live.title"),
        subtitle=words("live.subtitle", time=f"{moment.written[:19].replace('T', ' ')} UTC"),
        contents=words("report.contents"),
        footer=words("live.footer"),
        sections=tuple(section for section in sections if section is not None),
    )


def _queue_section(moment: Moment, words: Words) -> Section:
    views = moment.views
    if not views:
        return Section("queue", words("live.queue"), (Text(words("live.nothing")),))
    is_long = len(views) > _MOST_RUNS
    shown = [view for view in views if view.state in ALIVE]
    shown += [] if is_long else sorted((view for view in views if view not in shown), key=lambda view: view.state != "queued")
    blocks: list[Block] = [Text(_counts(moment, words))]
    if shown:
        table = _run_table(shown[:MOST_ROWS], moment.baselines, words)
        blocks += first_rows(table, words, command=_ALL_RUNS, total=len(shown))
    if is_long:
        blocks += first_rows(_arm_table(views, words), words, command=_ALL_RUNS)
    return Section("queue", words("live.queue"), tuple(blocks))


def _counts(moment: Moment, words: Words) -> str:
    sentences = [words("live.counts", runs=len(moment.views), states=_states_text(moment.views, words))]
    if moment.is_over:
        sentences.append(words("live.over"))
    elif (left := queue_eta_s(moment.views)) is not None:
        sentences.append(words("live.left", time=duration(left)))
    return words("sentence.separator").join(sentences)


def queue_eta_s(views: Sequence[RunView]) -> float | None:
    """Return the seconds until all runs have ended: by what runs under way report, and how long others took."""
    running = [view for view in views if view.state in ALIVE]
    waiting = [view for view in views if view.state == "queued"]
    lengths = [length for view in views if (length := _length_s(view)) is not None]
    left = [view.status.eta_s for view in running if view.status is not None and view.status.eta_s is not None]
    if len(left) < len(running) or (waiting and not lengths) or not (running or waiting):
        return None
    expected = []
    for view in waiting:
        alike = [_length_s(other) for other in views if (other.experiment, other.budget) == (view.experiment, view.budget)]
        expected.append(statistics.fmean([length for length in alike if length is not None] or lengths))
    return queue_seconds([*left, *expected], max(1, len(running)))


def _length_s(view: RunView) -> float | None:
    """Return how long a run takes from its start to its end, where it has one or expects one."""
    status = view.status
    if status is None or view.state not in (*ALIVE, "done"):
        return None
    with contextlib.suppress(ValueError):
        began, seen = (datetime.datetime.fromisoformat(text) for text in (status.started, status.heartbeat))
        spent = (seen - began).total_seconds()
        return max(0.0, spent) + (0.0 if view.state == "done" else status.eta_s or 0.0)
    return None


def _run_table(views: Sequence[RunView], baselines: Mapping[str, str], words: Words) -> Table:
    names = ("arm", "seed", "state", "step", "gap", "eta", "best", "loss", "pace", "budget", "device")
    rows = tuple(_run_row(view, gap, words) for view, gap in zip(views, gaps(views, baselines), strict=True))
    columns = tuple(words(f"live.{name}") for name in names)
    return Table("queue", words("live.queue_caption"), columns, rows, frozenset({1, 3, 4, 5, 6, 7, 8}))


def _run_row(view: RunView, gap: Gap | None, words: Words) -> tuple[Cell, ...]:
    status = view.status
    name = (Cell(_arm_name(view.arm)), Cell(str(view.seed), view.seed))
    state = Cell(words(f"live.state.{view.state}"), STATES.index(view.state), _MARKS.get(view.state, ""))
    if status is None:
        return (*name, state, *[Cell("")] * 6, Cell(view.budget), Cell(""))
    eta, best, is_accuracy = status.eta_s if view.state in ALIVE else None, status.best, status.metric == "accuracy"
    share = 100 * status.step // max(1, status.steps)
    return (
        *name,
        state,
        Cell(words("live.steps", step=status.step, steps=status.steps, percent=share), share),
        _gap_cell(gap, words),
        Cell("" if eta is None else duration(eta), eta),
        Cell("" if best is None else f"{fixed(100 * best, 2)}%" if is_accuracy else f"PPL {fixed(best, 2)}", best),
        Cell("" if status.loss is None else fixed(status.loss, 3), status.loss),
        Cell("" if status.step_s is None else f"{status.step_s:.3g}", status.step_s),
        Cell(view.budget),
        Cell(on_one_line(status.device)),
    )


def _gap_cell(gap: Gap | None, words: Words) -> Cell:
    if gap is None:
        return Cell("")
    value = fixed(gap.value, 1, sign=True)
    text = f"{value}%" if gap.unit == "%" else words("live.points", value=value)
    return Cell(words("live.gap_at", gap=text, step=gap.step), gap.value)


def _arm_name(arm: ArmKey) -> str:
    experiment, _, variant = arm
    return experiment if variant == "default" else f"{experiment} ({variant})"


def _arm_table(views: Sequence[RunView], words: Words) -> Table:
    """Return one row for each arm: how many of its runs are in which state."""
    arms: dict[tuple[str, str], list[RunView]] = {}
    for view in views:
        arms.setdefault((_arm_name(view.arm), view.budget), []).append(view)
    rows = []
    for (name, budget), runs in arms.items():
        done = sum(view.state == "done" for view in runs)
        share = Cell(f"{done}/{len(runs)}", done / len(runs))
        rows.append((Cell(name), Cell(budget), share, Cell(_states_text(runs, words))))
    columns = tuple(words(f"live.{name}") for name in ("arm", "budget", "done", "states"))
    return Table("arms", words("live.arms_caption"), columns, tuple(rows), frozenset({2}))


def _trouble_section(moment: Moment, words: Words) -> Section | None:
    """Return the runs that ended without being done, each with its last message and the command that continues it."""
    troubled = [view for state in _TROUBLED for view in moment.views if view.state == state]
    if not troubled:
        return None
    machine = this_machine()
    rows = []
    for view in troubled[:MOST_ROWS]:
        message = on_one_line(view.status.message)[:_LONGEST_MESSAGE] if view.status is not None else ""
        at = "" if view.status is None else words("live.steps_short", step=view.status.step, steps=view.status.steps)
        rows.append(
            (
                Cell(f"{_arm_name(view.arm)}, {view.budget}, {view.seed}"),
                Cell(words(f"live.state.{view.state}"), STATES.index(view.state), _MARKS[view.state]),
                Cell(at),
                Cell(machine.stripped(message)),
                Cell(continue_command(view, moment), is_code=True),
            )
        )
    columns = tuple(words(f"live.{name}") for name in ("run", "state", "step", "message", "command"))
    table = Table("trouble", words("live.trouble_caption"), columns, tuple(rows))
    blocks = (Text(words("live.trouble_text")), *first_rows(table, words, command=_ALL_RUNS, total=len(troubled)))
    return Section("trouble", words("live.trouble"), blocks)


def continue_command(view: RunView, moment: Moment) -> str:
    """Return what to type, in the folder where `oelm watch` was started, to continue a run from its last checkpoint."""
    catalog = moment.report.findings.catalog
    if view.variant == "default" and view.experiment in catalog.experiments:
        where = [] if moment.root == Path("outputs") else ["--out", str(moment.root)]
        retry = ["--retry"] if view.state == "failed" else []
        seed = ["--seeds", f"{view.seed}-{view.seed}"]
        command = ["oelm", "run", view.experiment, "--budget", view.budget, *seed, *where, *retry, *moment.options]
    else:
        config: object = None
        with contextlib.suppress(DataError):
            config = read_json(view.path / CONFIG)
        # A classifier's config has examples.
        trainer = "finetune" if isinstance(config, dict) and "examples" in config else "train"
        command = ["oelm", trainer, "--config", str(view.path / CONFIG), "--out", view.folder]
    # The home and the working folder are shortened; a word that is the host's name may be an experiment's.
    return replace(this_machine(), hosts=()).stripped(shlex.join(command))


def _verdict_section(moment: Moment, words: Words) -> Section:
    """Return the present verdicts, labelled as preliminary; nothing of this is recorded as a look."""
    report, title = moment.report, words("live.verdicts")
    if not report.judged:
        return Section("verdicts", title, (Text(words("verdict.nothing")),))
    whole = verdict_table(report.findings, report.judged, words)
    rows = tuple(tuple(row[number] for number in _VERDICT_COLUMNS) for row in whole.rows)
    columns = [whole.columns[number] for number in _VERDICT_COLUMNS]
    columns[_VERDICT_COLUMNS.index(5)] = words("live.verdict")
    numeric = frozenset(place for place, number in enumerate(_VERDICT_COLUMNS) if number in whole.numeric)
    table = Table("verdicts", words("live.verdict_caption"), tuple(columns), rows, numeric)
    pictures = gap_charts(report.findings, report.judged, words) if len(rows) <= _MOST_IN_FOREST else []
    return Section("verdicts", title, (Text(words("live.preliminary"), "warning"), *first_rows(table, words), *pictures))


def _learning_section(moment: Moment, words: Words) -> Section | None:
    """Return validation loss by step of every family, those with a run under way first."""
    families: dict[ArmKey, list[RunView]] = {}
    baselines = baselines_of(moment.views, moment.baselines)
    for view in moment.views:
        families.setdefault(baselines.get(view.arm, view.arm), []).append(view)
    ordered = sorted(families.items(), key=lambda item: not any(view.state in ALIVE for view in item[1]))
    blocks: list[Block] = []
    for number, (baseline, views) in enumerate(ordered):
        if len(blocks) >= (_MOST_FAMILIES if len(moment.views) <= _MOST_RUNS else _FAMILIES_OF_MANY):
            blocks.append(Text(words("pictures.left_out", count=len(ordered) - number), "note"))
            break
        caption = words("learning.caption", baseline=_arm_name(baseline), budget=baseline[1])
        chart = _curves(f"learning-{number}", views, caption, words, baseline)
        blocks += [chart] if chart is not None else []
    if not any(isinstance(block, Chart) for block in blocks):
        return None
    return Section("learning", words("learning.title"), (Text(words("live.learning")), *blocks))


def _curves(name: str, views: Sequence[RunView], caption: str, words: Words, baseline: ArmKey) -> Chart | None:
    arms: dict[str, list[dict[int, float]]] = {}
    # The baseline first, with the palette's first colour, then running arms.
    for view in sorted(views, key=lambda view: (view.arm != baseline, view.state not in ALIVE)):
        losses = {step: row["val_loss"] for step, row in evaluations(view.folder).items() if is_number(row.get("val_loss"))}
        if losses:
            arms.setdefault(_arm_name(view.arm), []).append(losses)
    is_accuracy = any(view.status is not None and view.status.metric == "accuracy" for view in views)
    return small_chart(name, arms, words, caption=caption, y=words("loss.example") if is_accuracy else words("loss.nats"))


def machine_load(root: Path) -> dict[str, str]:
    """Return how busy this machine is: load, memory, disk, GPUs, each as far as the system reports it."""
    found: dict[str, str] = {}
    if hasattr(os, "getloadavg"):
        found["load"] = " / ".join(f"{value:.2f}" for value in os.getloadavg())
    found["cores"] = str(os.cpu_count() or "?")
    with contextlib.suppress(OSError, ValueError, KeyError):
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        facts = {name: int(rest.split()[0]) * _KIB for name, _, rest in (line.partition(":") for line in lines)}
        used = facts["MemTotal"] - facts["MemAvailable"]
        found["memory"] = f"{used / _GIB:.1f} / {facts['MemTotal'] / _GIB:.1f} GiB"
    with contextlib.suppress(OSError):
        found["disk"] = f"{shutil.disk_usage(root if root.exists() else Path('.')).free / _GIB:.1f} GiB"
    with contextlib.suppress(MissingExtraError):
        for card in read_gpus():
            memory = f"{card.used_bytes / _MIB:,.0f} / {card.total_bytes / _MIB:,.0f} MiB"
            found[f"GPU {card.index}"] = f"{card.name}: {card.utilization}%, {memory}"
    return found


def _machine_section(moment: Moment, words: Words) -> Section:
    named = {name: words(f"live.{name}") for name in ("load", "cores", "memory", "disk")}
    rows = tuple((Cell(named.get(name, name)), Cell(on_one_line(value))) for name, value in moment.load.items())
    columns = (words("totals.what"), words("totals.value"))
    return Section("machine", words("live.machine"), (Table("machine", words("live.machine_caption"), columns, rows),))
