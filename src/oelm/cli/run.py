"""`oelm run` and `oelm sweep`: experiments of the catalog as a queue of runs; `oelm work` is one of them."""

from __future__ import annotations

import shlex
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from oelm.cli.options import Cluster, NoPreflight, Queueing, Spread, Track, What, grouped
from oelm.cli.queue import QueueView
from oelm.cli.remote import How, code_of, refuse_worker, run_by_ranks, submit_study, work_together
from oelm.cli.shell import (
    TerminalWatch,
    out,
    print_next,
    print_table,
    printable,
    quiet_unless_first,
    reported,
    roughly,
    say,
    shown_warnings,
    stoppable,
    warn,
)
from oelm.errors import STOPPED, ConfigError
from oelm.process import is_one_of_many
from oelm.text import counted, figure_text

if TYPE_CHECKING:
    from oelm.experiments.catalog import Catalog
    from oelm.experiments.plan import PlannedRun
    from oelm.experiments.queue import Job, Slots
    from oelm.experiments.study import Study
    from oelm.experiments.sweep import SweepRecord


def print_plan(runs: Sequence[PlannedRun], slots: Slots, root: Path) -> None:
    """Print the arms of runs with their times, memory and disk, and how long the queue takes."""
    from oelm.experiments.forecast import START_S, Forecaster
    from oelm.experiments.slots import queue_seconds
    from oelm.experiments.study import unfinished
    from oelm.train.device import gibibytes

    forecaster = Forecaster(root, threads=int(getattr(slots, "threads", 1)))
    left = unfinished(runs)
    arms: dict[tuple[str, str], list[PlannedRun]] = {}
    for run in runs:
        arms.setdefault((run.experiment.id, run.variant), []).append(run)
    forecasts = {arm: forecaster.forecast(planned[0]) for arm, planned in arms.items()}
    cells = []
    for (name, variant), planned in arms.items():
        forecast, todo = forecasts[name, variant], sum(run in left for run in planned)
        needs = gibibytes(forecast.needs.memory), gibibytes(forecast.needs.disk)
        counts = _seeds(planned), str(len(planned) - todo), roughly(forecast.seconds)
        cells.append((name, variant, *counts, *needs, forecast.basis))
    headings = ("experiment", "variant", "seeds (which)", "done", "each about", "memory", "disk", "time from")
    print_table(headings, cells, left=("experiment", "variant", "time from"))
    seconds = [forecasts[run.experiment.id, run.variant].seconds for run in left]
    whole = queue_seconds([length for length in seconds if length is not None], slots.count)
    unknown = sum(length is None for length in seconds)
    rest = f", and {counted(unknown, 'run')} of unknown length" if unknown else ""
    say(f"{counted(len(left), 'run')} at budget {runs[0].budget}: about {roughly(whole)} in all{rest}; {slots}")
    if any(forecast.basis == "arithmetic" for forecast in forecasts.values()):
        start = f"and {roughly(START_S)} to start each"
        out.print(f"arithmetic: from the operations of a step, this machine's speed {start}; within a factor of two")
    print_shortened(runs)


def print_shortened(runs: Sequence[PlannedRun]) -> None:
    """Say once of each warm-up that it will be shorter than was asked for: two points of a sweep may be one then."""
    from oelm.train.optim import shortened_warmup

    for shown in dict.fromkeys(shortened_warmup(run.config) for run in runs):
        if shown:
            warn(shown)


def _seeds(runs: Sequence[PlannedRun]) -> str:
    seeds = [run.seed for run in runs]
    is_range = len(seeds) > 1 and seeds == list(range(seeds[0], seeds[-1] + 1))
    which = f"{seeds[0]}-{seeds[-1]}" if is_range else ",".join(map(str, seeds))
    return f"{len(seeds)} ({which})"


@reported
@grouped
def run(
    context: typer.Context,
    what: What,
    seeds: Annotated[str | None, typer.Option(help="How many (5: 0 to 4), a range (5-9) or a list.")] = None,
    tuned: Annotated[bool, typer.Option("--tuned", help="Each arm with the best of its `oelm sweep`.")] = False,
    no_baseline: Annotated[bool, typer.Option("--no-baseline", help="Only what is named, without baselines.")] = False,
    prepare_only: Annotated[bool, typer.Option("--prepare-only", help="Prepare the data; train nothing.")] = False,
    track: Track = None,
    *,
    queueing: Queueing,
    spread: Spread,
    cluster: Cluster,
) -> None:
    """Run experiments with their baselines. Rerun the command to resume; finished runs are skipped."""
    quiet_unless_first()
    with stoppable() as stop, shown_warnings():
        from oelm.experiments.plan import parse_seeds
        from oelm.train.track import tracker_named

        study = what.study(seeds=parse_seeds(seeds) if seeds is not None else None, tuned=tuned, baselines=not no_baseline)
        runs = study.plan(load(what.catalog))
        how = How(stop, retry=queueing.retry, preflight=not queueing.no_preflight, track=tracker_named(track))
        cluster.check()
        if prepare_only and (queueing.dry_run or cluster.slurm):
            raise ConfigError("--prepare-only prepares data here and now; give it without --dry-run and --slurm")
        if queueing.notify is not None and (cluster.slurm or is_one_of_many()):
            raise ConfigError("--notify is for the process that starts the runs; use `oelm watch --notify` next to the jobs")
        ranks = spread.ranks(queueing)
        if cluster.slurm:
            submit_study(context, study, runs, cluster.wishes, how, dry_run=queueing.dry_run)
            return
        if prepare_only or queueing.dry_run:
            _prepare(study, runs, how) if prepare_only else print_plan(runs, queueing.slots(what.budget), what.root)
            return
        if is_one_of_many():
            work_together(study, runs, how)
        if ranks is not None:
            ended = run_by_ranks(context, study, runs, ranks, how, notify=queueing.notify)
        else:
            ended = run_all(study, runs, queueing.slots(what.budget), how, notify=queueing.notify, catalog=what.catalog)
    print_summary(runs, what.budget)
    leave_by(ended)
    print_next(what.root, [_report_command(what)])


def _report_command(what: What) -> str:
    """Return the command that reports on the experiments just run."""
    options = ["--budget", what.budget, "--html", "report.html"]
    options += [] if what.root == Path("outputs") else ["--out", str(what.root)]
    options += [] if what.catalog is None else ["--catalog", str(what.catalog)]
    return shlex.join(["oelm", "report", *(what.ids or ()), *options])


def _prepare(study: Study, runs: Sequence[PlannedRun], how: How) -> None:
    """Prepare what runs read, and say what keeps some from starting; raise only where it keeps all of them."""
    from oelm.experiments.study import prepare_study

    with TerminalWatch() as watch:
        unready = prepare_study(runs, folder=study.copies, stop=how.stop, watch=watch, preflight=how.preflight, retry=how.retry)
    for problem, count in Counter(unready.values()).items():
        text = f"{count} of {len(runs)} runs cannot begin: {printable(problem)}"
        warn(text, style="bold red")


def load(catalog: Path | None) -> Catalog:
    from oelm.experiments.catalog import load_catalog

    return load_catalog(catalog)


def run_all(
    study: Study,
    runs: Sequence[PlannedRun],
    slots: Slots,
    how: How,
    *,
    notify: Path | None,
    catalog: Path | None,
) -> list[Job]:
    from oelm.experiments.forecast import expected_seconds
    from oelm.experiments.notify import NotifyingWatch, notify_ended, notifying
    from oelm.experiments.queue import Runner
    from oelm.experiments.study import prepare_study, unfinished

    done = len(runs) - len(unfinished(runs))
    where = printable(str(study.root))
    # First of all, so that a wrong file is refused before anything is prepared.
    with notifying(notify) as notifier:
        shown = f"{counted(len(runs), 'run')} at budget {study.budget}, {done} of them done; {slots}; in {where}"
        say(shown)
        print_shortened(runs)
        given: dict[str, Any] = {"stop": how.stop, "retry": how.retry}
        with TerminalWatch() as watch:
            unready = prepare_study(runs, folder=study.copies, watch=watch, preflight=how.preflight, **given)
        startable = [run for run in unfinished(runs) if run.path not in unready]
        expected = expected_seconds(startable, study.root, threads=getattr(slots, "threads", None))
        with QueueView(len(runs), slots.count, expected) as view:
            told_to = view if notifier is None else NotifyingWatch(view, notifier, _decisions(study, runs, catalog))
            jobs = Runner(runs, study.root, slots, watch=told_to, options=how.options, unready=unready, **given).run()
        if notifier is not None:
            notify_ended(notifier, jobs)
    return jobs


def _decisions(study: Study, runs: Sequence[PlannedRun], catalog: Path | None) -> Callable[[], list[tuple[str, str]]]:
    """Return a function that returns the verdicts decided since it was last called; none of them is recorded as a look."""
    from oelm.report.live import LiveRuns

    live = LiveRuns(study.root, load(catalog), only={run.path.parents[2].name for run in runs}, budget=study.budget)
    known = set(live.look().decided())

    def decided() -> list[tuple[str, str]]:
        new = {name: text for name, text in live.look().decided().items() if name not in known}
        known.update(new)
        return list(new.items())

    return decided


def print_summary(runs: Sequence[PlannedRun], budget: str, *, what: str = "experiment") -> None:
    """Print the figures of finished runs next to their baselines; `what` is the heading of their names."""
    from oelm.experiments.summary import split_note, summarize

    rows = summarize(runs)
    if not rows:
        return
    notes = ["a smoke test, never a result"] if budget == "smoke" else [split_note(rows)]
    measured = {row.gap.interval is not None for row in rows if row.gap.text}
    notes += ["95% intervals, paired by seed"] if True in measured else []
    notes += ["a gap without an interval has one seed: no verdict"] if False in measured else []
    shares = dict.fromkeys(row.majority for row in rows if row.majority is not None)
    notes += [f"always naming the largest class: {' or '.join(f'{100 * share:.2f}%' for share in shares)}"] if shares else []
    say(f"\nbudget {budget}: {'; '.join(notes)}", style="bold yellow")
    cells = []
    for row in rows:
        remark = f"CONFOUNDED: {'; '.join(row.confounded)}" if row.confounded else ""
        unit = "" if row.metric == "ppl" else " points"
        against = f"{row.gap.text}{unit} {row.experiment.baseline}" if row.gap.text else ""
        cells.append((row.experiment.id, str(len(row.best)), figure_text(row.metric, row.mean), against, remark))
    print_table((what, "seeds", "best", "against its baseline", ""), cells, left=(what, ""))


def leave_by(jobs: Sequence[Job], *, again: str = "repeat with --retry") -> None:
    """Leave with the exit code that tells how the queue ended; `again` says how failed runs are tried again."""
    failed = [job for job in jobs if job.state == "failed"]
    open_ = [job for job in jobs if job.state in ("stopped", "killed", "left")]
    if open_:
        warn(f"{len(open_)} of {len(jobs)} runs are not finished; repeat the same command to continue")
    if failed:
        warn(
            f"{len(failed)} of {len(jobs)} runs failed; `oelm status` shows why. Fix the cause and {again}",
            style="bold red",
        )
    if code := code_of(jobs):
        raise typer.Exit(code)


@reported
@grouped
def sweep(
    what: What,
    grid: Annotated[
        list[str] | None, typer.Option("--grid", metavar="KEY=A,B,...", help="A setting and its values; repeatable.")
    ] = None,
    like: Annotated[
        str | None, typer.Option(metavar="ID", help="Train nothing: take over the sweep of this experiment.")
    ] = None,
    seeds: Annotated[int | None, typer.Option(min=1, help="Seeds of each point, not those of `oelm run`; default: 1.")] = None,
    *,
    queueing: Queueing,
) -> None:
    """Try the same grid on every arm (experiments and their baselines), and mark the best of each by validation."""
    refuse_worker("sweep")
    if like is not None:
        given: dict[str, Any] = {
            "--grid": grid,
            "--seeds": seeds,
            "--set": what.overrides,
            "--from": what.folder,
            "--model": what.model,
        }
        given |= {"--gpus": queueing.gpus, "--jobs": queueing.jobs, "--retry": queueing.retry}
        _refuse_beside_like(like, given | {"--no-preflight": queueing.no_preflight})
        _take_over(what, like, dry_run=queueing.dry_run)
        return
    with stoppable() as stop, shown_warnings():
        from oelm.experiments.sweep import conclude_sweep, parse_grid, standing

        study = what.study()
        plan = study.plan_sweep(load(what.catalog), parse_grid(grid or []), num_seeds=seeds or 1)
        slots = queueing.slots(what.budget)
        if queueing.dry_run:
            print_plan(plan.runs, slots, what.root)
            return
        how = How(stop, retry=queueing.retry, preflight=not queueing.no_preflight)
        ended = run_all(study, plan.runs, slots, how, notify=queueing.notify, catalog=what.catalog)
        records = conclude_sweep(plan)
        for record in records:
            _print_sweep(record)
        _print_standing(standing(records, what.root))
    leave_by(ended)
    place = [] if what.root == Path("outputs") else ["--out", str(what.root)]
    print_next(what.root, [shlex.join(["oelm", "run", *(what.ids or ()), "--budget", what.budget, "--tuned", *place])])


def _refuse_beside_like(like: str, given: dict[str, Any]) -> None:
    for option, value in given.items():
        if value:
            raise ConfigError(f"--like {like}: nothing is trained, its sweep says what was tried; leave {option} out")


def _take_over(what: What, like: str, *, dry_run: bool) -> None:
    from oelm.experiments.sweep import take_over

    if not what.ids:
        raise ConfigError(f"--like {like}: say which experiments take over its sweep")
    catalog = load(what.catalog)
    chosen, other = catalog.select(what.ids), catalog.get(like)
    for record in take_over(chosen, other, budget=what.budget, root=what.root, dry_run=dry_run):
        assert record.best is not None
        say(f"{record.experiment} at {what.budget}: {record.points[record.best]}, the best of {record.like}")
    if dry_run:
        out.print("nothing was written")


def _print_sweep(record: SweepRecord) -> None:
    from oelm.experiments.sweep import value_text

    title = f"{record.experiment} at {record.budget}, {counted(len(record.points[0].seeds), 'seed')} a point"
    cells = []
    for number, point in enumerate(record.points):
        missing = "diverged" if point.has_failed else "failed" if point.problem else "unfinished"
        score = missing if point.score is None else f"{point.score:.4f}"
        remark = "best" if number == record.best else "close" if point in record.close else ""
        cells.append((*map(value_text, point.values.values()), score, remark))
    print_table((*record.grid, "score (less is better)", ""), cells, left=("",), title=title, boxed=True)
    if any(point.problem for point in record.points):
        warn(f"the sweep of {record.experiment} {record.why_no_best}", style="bold red")
    for key in record.at_edge:
        warn(f"warning: {record.experiment}: the best {key} lies at the edge of the grid: try values beyond it")
    if record.close:
        warn(
            f"{record.experiment}: other seeds may choose another of the close ones (within {record.margin:.2g} of the best); "
            "more --seeds, or tries as long as the runs that follow, tell better",
            style="yellow",
        )


def _print_standing(kept: Mapping[str, SweepRecord]) -> None:
    from oelm.experiments.sweep import value_text

    for name, record in kept.items():
        tried = "; ".join(f"{key} {', '.join(map(value_text, values))}" for key, values in record.grid.items())
        text = f"{name}: until this sweep is finished, --tuned goes by the one before ({tried})"
        warn(text)


@reported
def work(
    path: Annotated[Path, typer.Argument(help="The run's folder; its config is read from standard input.")],
    no_preflight: NoPreflight = False,
    track: Track = None,
) -> None:
    """Bring one run to its end: what `oelm run` starts, once for each."""
    with stoppable() as stop, shown_warnings():
        import json

        from oelm.config import parse_any
        from oelm.train.run import Options, train
        from oelm.train.track import tracked, tracker_named

        try:
            data = json.loads(sys.stdin.buffer.read())
        except ValueError as problem:
            raise ConfigError(f"standard input: must be a run's config as JSON ({problem}); use `oelm run`") from None
        config = parse_any(data, where="standard input")
        with TerminalWatch() as terminal, tracked(terminal, path, tracker_named(track)) as watch:
            result = train(config, path, stop=stop, watch=watch, options=Options(preflight=not no_preflight))
    if result.status == "stopped":
        raise typer.Exit(STOPPED)
