"""`oelm status`: what every recorded run is doing, from any terminal, without disturbing one."""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import os
import shlex
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from oelm.cli.options import OnlyBudget, Out, SomeIds
from oelm.cli.shell import echo, out, printable, reported, warn
from oelm.errors import ClusterError, ConfigError, OelmError
from oelm.runs.layout import CONFIG, SUBMISSIONS
from oelm.text import column_bands, duration, figure_text, fixed

if TYPE_CHECKING:
    from oelm.experiments.slurm import JobState
    from oelm.runs.find import Gap, RunView

_HEADINGS = ("experiment", "budget", "variant", "seed", "state", "step", "best", "gap", "ETA", "loss", "s/step", "device")
_RIGHT = {"seed", "step", "loss", "best", "gap", "ETA", "s/step"}
_STYLES = {"running": "green", "stale": "yellow", "dead": "red", "failed": "bold red", "damaged": "red", "done": "dim"}
_MAX_LINES, _MAX_MESSAGES, _REFRESH_S, _ASK_SLURM_S = 200, 5, 2.0, 30.0
_LONGEST_S = 1e8
_HINTS = {
    "stale": "stale: no sign of life for a while: suspended, hung, or its host is gone",
    "dead": "dead: killed; rerun the command that started them to resume from their last checkpoint",
    "damaged": "damaged: no readable status.json; rerun the command that started them to write it again",
}


@reported
def status(
    ids: SomeIds = None,
    out_dir: Out = Path("outputs"),
    budget: OnlyBudget = None,
    watch: Annotated[bool, typer.Option("--watch", help="Refresh every 2 s until Ctrl-C.")] = False,
    show_all: Annotated[bool, typer.Option("--all", help="A line for every run, however many there are.")] = False,
) -> None:
    """Show every run's state, step, loss, best figure, pace, time left, gap to its baseline so far, and where its log is."""
    baselines, groups = load_known()
    jobs = ShownJobs(out_dir)

    def page(lines: int | None) -> Text:
        views = find_runs(out_dir, ids or [], budget=budget, groups=groups, strict=not watch)
        if not views:
            return Text(no_answer(out_dir, ids or [], budget))
        return _page(views, baselines, jobs.of(views), lines=lines)

    if watch:
        _watch(page, show_all=show_all)
    else:
        _show(page(None if show_all or not out.is_terminal else _MAX_LINES))


def jobs_of(root: Path, views: Sequence[RunView]) -> dict[Path, JobState]:
    """Return what SLURM says of runs that were submitted to it and are not done; asked only where some were."""
    # Who never submitted a run does not wait for what plans and submits them.
    if not (root / SUBMISSIONS).is_dir():
        return {}
    from oelm.experiments.slurm import job_states

    return job_states(root, [view.path for view in views if view.state != "done"])


class ShownJobs:
    """What SLURM says of runs, for display: asked now and then, for all users share it; where it is silent, its last answer."""

    def __init__(self, root: Path, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._root, self._clock = root, clock
        self._asked = -math.inf
        self._known: dict[Path, JobState] = {}

    def of(self, views: Sequence[RunView]) -> dict[Path, JobState]:
        if self._clock() - self._asked >= _ASK_SLURM_S:
            with contextlib.suppress(ClusterError):
                self._known = jobs_of(self._root, views)
            self._asked = self._clock()
        return self._known


def load_known() -> tuple[dict[str, str], dict[str, list[str]]]:
    """Return the catalog's baselines and groups; none, with a remark, where the user's file is wrong."""
    from oelm.experiments.catalog import load_catalog

    try:
        catalog = load_catalog()
    except OelmError as problem:
        warn(f"no groups and no distances from baselines: {problem}", style="yellow")
        return {}, {}
    return catalog.baselines(), catalog.groups()


def find_runs(
    root: Path, ids: Sequence[str], *, budget: str | None, groups: Mapping[str, list[str]], strict: bool = True
) -> list[RunView]:
    """Return the runs that the user means; with `strict`, an id that has none is an error and not an empty list."""
    from oelm.runs.find import choose, scan

    chosen: list[str] = []
    for name in ids:
        try:
            chosen += choose(root, [name], groups=groups)
        except ConfigError:
            if strict:
                raise
    views = scan(root, only=chosen) if chosen or not ids else []
    return [view for view in views if budget is None or view.budget == budget]


def no_answer(root: Path, ids: Sequence[str], budget: str | None) -> str:
    """Say that there is nothing of what was asked for, and what to do next."""
    from oelm.runs.find import misplaced

    if remark := misplaced(root):
        return printable(remark)
    if not ids and budget is None:
        return f"No runs under {root}; begin with `oelm run GPT-02 --budget smoke`"
    what = (["of", ", ".join(ids)] if ids else []) + (["at", budget] if budget is not None else [])
    return printable(f"No runs {' '.join(what)} under {root}; `oelm status` shows all that are there")


def _show(page: Text) -> None:
    if out.is_terminal:
        out.print(page, no_wrap=True, overflow="ellipsis", crop=True)
    else:
        # Ten thousand lines in one piece: rich would measure each of them. Not every pipe can carry every character.
        encoding = sys.stdout.encoding or "utf-8"
        echo(page.plain.encode(encoding, "replace").decode(encoding))


def _watch(page: Callable[[int | None], Text], *, show_all: bool) -> None:
    try:
        if not out.is_terminal:
            while True:
                _show(page(None))
                echo()
                time.sleep(_REFRESH_S)
        from rich.live import Live

        with Live(console=out, auto_refresh=False, vertical_overflow="ellipsis") as live:
            while True:
                text = page(None if show_all else min(_MAX_LINES, max(out.height - 2 * _MAX_MESSAGES - 4, 8)))
                text.no_wrap, text.overflow = True, "ellipsis"
                live.update(text, refresh=True)
                time.sleep(_REFRESH_S)
    except KeyboardInterrupt:
        # How one leaves it, and no failure.
        return


def _page(
    views: Sequence[RunView],
    baselines: Mapping[str, str],
    jobs: Mapping[Path, JobState],
    *,
    lines: int | None,
) -> Text:
    """Return all that is shown; over `lines` runs, those under way and one line for each group of the others."""
    from oelm.runs.find import gaps
    from oelm.runs.status import ALIVE

    is_short = lines is not None and len(views) > lines
    shown = [view for view in views if view.state in ALIVE] if is_short else views
    parts = [_table(shown, gaps(shown, baselines), jobs)] if shown else []
    if is_short:
        parts.append(_summary(views))
    parts.append(_footer(views))
    return Text("\n\n").join(parts)


def _table(views: Sequence[RunView], distances: Sequence[Gap | None], jobs: Mapping[Path, JobState]) -> Text:
    rows = [_cells(view, gap) for view, gap in zip(views, distances, strict=True)]
    for number in _unreadable(views):
        rows[number][_HEADINGS.index("state")] += ", config unreadable"
    if not jobs:
        return _aligned(_HEADINGS, rows, keys=4, right=_RIGHT, styled="state")
    told = [str(jobs.get(view.path, "")) for view in views]
    with_jobs = [[*row, one_line(text)] for row, text in zip(rows, told, strict=True)]
    return _aligned((*_HEADINGS, "SLURM"), with_jobs, keys=4, right=_RIGHT, styled="state")


def _unreadable(views: Sequence[RunView]) -> list[int]:
    """Return which runs seem done and cannot be used, for their config.json is damaged."""
    from oelm.files import read_json

    # Reading ten thousand would take a fifth of a second; a report names them, too.
    found = []
    for number, view in enumerate(views if len(views) <= _MAX_LINES else ()):
        try:
            if view.state == "done":
                read_json(view.path / CONFIG)
        except OelmError:
            found.append(number)
    return found


def _aligned(headings: Sequence[str], rows: Sequence[Sequence[str]], *, keys: int, right: set[str], styled: str = "") -> Text:
    """Return columns as wide as they need to be; in a narrow terminal, what is the same in all rows is said once, below."""
    columns = {name: [name, *cells] for name, cells in zip(headings, zip(*rows, strict=True), strict=True)}
    # A pipe has no width unless it is given one.
    room = out.width if out.is_terminal or "COLUMNS" in os.environ else sys.maxsize
    told: dict[str, str] = {}
    if sum(max(map(len, cells)) + 2 for cells in columns.values()) - 2 > room and len(rows) > 1:
        told = {name: cells[1] for name, cells in columns.items() if len(set(cells[1:])) == 1 and name != styled}
        columns = {name: cells for name, cells in columns.items() if name not in told}
    names, keys = list(columns), sum(name not in told for name in headings[:keys])
    widest = room // 3
    # Next to what tells runs apart there is room for the longest of the others.
    while widest > 8 and sum(min(widest, max(map(len, columns[name]))) + 2 for name in names[:keys]) > room - 20:
        widest -= 1
    cells = [[_shortened(cell, widest) for cell in column] for column in columns.values()]
    bands = column_bands(cells, room, keys=keys, whole=range(len(names)))
    text = Text("\n\n").join(_band({names[n]: cells[n] for n in band}, right=right, styled=styled) for band in bands)
    said = ", ".join(f"{name} {value}" for name, value in told.items() if value)
    return text.append(f"\nall of them: {said}") if said else text


def _band(columns: Mapping[str, Sequence[str]], *, right: set[str], styled: str) -> Text:
    widths = {name: max(map(len, cells)) for name, cells in columns.items()}
    form = "  ".join(f"{{:{'>' if name in right else '<'}{width}}}" for name, width in widths.items())
    lines = [form.format(*row).rstrip() for row in zip(*columns.values(), strict=True)]
    text = Text("\n".join(lines))
    text.stylize("bold", 0, len(lines[0]))
    if out.is_terminal and styled in columns:
        before = list(columns)[: list(columns).index(styled)]
        start = sum(widths[name] + 2 for name in before)
        offsets = itertools.accumulate((len(line) + 1 for line in lines[:-1]), initial=0)
        for offset, state in zip(offsets, columns[styled], strict=True):
            text.stylize(_STYLES.get(state, ""), offset + start, offset + start + len(state))
    return text


def _shortened(cell: str, widest: int) -> str:
    return cell if len(cell) <= widest else f"{cell[: widest // 2]}\u2026{cell[widest // 2 - widest + 1 :]}"


def _cells(view: RunView, gap: Gap | None) -> list[str]:
    name = [view.experiment, view.budget, view.variant, str(view.seed), view.state]
    said = view.status
    if said is None:
        return [*name, *[""] * (len(_HEADINGS) - len(name))]
    has_eta = view.state in ("running", "stale") and said.eta_s is not None and said.eta_s < _LONGEST_S
    return [
        *name,
        f"{said.step}/{said.steps}",
        _best(said.metric, said.best),
        _gap_text(gap),
        duration(said.eta_s) if has_eta else "",
        "" if said.loss is None else fixed(said.loss, 3),
        "" if said.step_s is None else f"{said.step_s:.3g}",
        one_line(said.device),
    ]


def _best(metric: str, best: float | None) -> str:
    if best is None:
        return ""
    return ("PPL " if metric != "accuracy" else "") + figure_text(metric or "ppl", best)


def _gap_text(gap: Gap | None) -> str:
    if gap is None:
        return ""
    return fixed(gap.value, 1, sign=True) + ("%" if gap.unit == "%" else " pt")


@functools.lru_cache(maxsize=1024)
def one_line(text: str) -> str:
    """Return text of a file as one line that cannot drive a terminal."""
    return " ".join(printable(text).split())


def _summary(views: Sequence[RunView]) -> Text:
    groups: dict[tuple[str, str, str], list[RunView]] = {}
    for view in views:
        groups.setdefault(view.arm, []).append(view)
    rows = [[*name, str(len(those)), _counted(those)] for name, those in groups.items()]
    return _aligned(("experiment", "budget", "variant", "runs", "of these"), rows, keys=3, right={"runs"})


def _counted(views: Sequence[RunView]) -> str:
    from oelm.runs.status import STATES

    counts = Counter(view.state for view in views)
    return ", ".join(f"{counts[state]} {state}" for state in STATES if counts[state])


def _footer(views: Sequence[RunView]) -> Text:
    lines = [f"{len(views)} run{'s' if len(views) > 1 else ''}: {_counted(views)}"]
    there = {view.state for view in views}
    lines += [hint for state, hint in _HINTS.items() if state in there]
    lines += _largest_class(views)
    failed = [view for view in views if view.state == "failed"]
    for view in failed[:_MAX_MESSAGES]:
        said = one_line(view.status.message) if view.status is not None else ""
        where = f" (log: {one_line(str(view.log))})" if view.log is not None else ""
        lines.append(f"failed: {view.name}: {said or 'no message'}{where}")
    if len(failed) > _MAX_MESSAGES:
        lines.append(f"failed: and {len(failed) - _MAX_MESSAGES} more; `oelm status ID` shows those of one experiment")
    return Text("\n".join(lines + _logs(views)))


def _largest_class(views: Sequence[RunView]) -> list[str]:
    """Return what always naming the largest class comes to on the data of finished classifiers, one run of each arm asked."""
    from oelm.runs.records import recorded_figure

    done = [view for view in views if view.state == "done" and view.status is not None and view.status.metric == "accuracy"]
    first = {view.arm: view for view in reversed(done)}
    found = {recorded_figure(view.path, "majority_accuracy") for view in first.values()} - {None}
    shares = {figure_text("accuracy", share) for share in found}
    return [f"always naming the largest class: {' or '.join(sorted(shares))}"] if shares else []


def _logs(views: Sequence[RunView]) -> list[str]:
    """Return where the logs of running runs are, and that of a run that is alone."""
    from oelm.runs.status import ALIVE

    running = [view for view in views if view.state in ALIVE]
    if not running and len(views) == 1 and views[0].state != "failed":
        return [f"log: {one_line(str(views[0].log))}"] if views[0].log is not None else []
    paths = [path for view in running[:_MAX_MESSAGES] if (path := view.log) is not None]
    return [f"log: tail -f {one_line(shlex.quote(str(path)))}" for path in paths]
