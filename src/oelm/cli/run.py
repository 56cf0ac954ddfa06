"""`oelm run` and `oelm sweep`: experiments of the catalog as a queue of runs; `oelm work` is one of them."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from oelm.cli.cluster import Account, ArrayLimit, Gres, Partition, Slurm, Time, Wish, submit_study
from oelm.cli.many import How, Track, code_of, quiet_unless_first, ranks_of, refuse_worker, run_by_ranks, work_together
from oelm.cli.plan import print_plan, print_shortened
from oelm.cli.queue import QueueView
from oelm.cli.shell import Notify, TerminalWatch, counted, err, out, printable, reported, shown_warnings, stoppable
from oelm.errors import STOPPED, ConfigError
from oelm.ranks import is_one_of_many

if TYPE_CHECKING:
    from oelm.experiments.plan import PlannedRun
    from oelm.experiments.registry import Catalog
    from oelm.experiments.runner import Job, Slots
    from oelm.experiments.study import Study
    from oelm.experiments.sweep import SweepRecord

Ids = Annotated[list[str] | None, typer.Argument(metavar="ID...", help="Experiments or groups of `oelm list`.")]
Budget = Annotated[str, typer.Option(help="Size: paper, workstation, laptop or smoke.")]
Seeds = Annotated[
    str | None, typer.Option(help="How many (5: 0 to 4), a range (5-9) or a list; default: as the catalog plans.")
]
Gpus = Annotated[str | None, typer.Option(help="'2,3', 'auto' (those really free) or 'none'; default: auto if there are any.")]
Jobs = Annotated[int | None, typer.Option(help="Runs at once on the CPU; its threads are divided among them.")]
Overrides = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Any setting by dotted path, for every arm.")
]
From = Annotated[Path | None, typer.Option("--from", help="Folder with local copies of the data sets, instead of the hub.")]
Model = Annotated[Path | None, typer.Option(help="Folder with the pretrained classifier, instead of the hub.")]
CatalogFile = Annotated[Path | None, typer.Option("--catalog", help="Your own experiments; default: experiments.yaml here.")]
Out = Annotated[Path, typer.Option("--out", help="Where runs go.")]
Retry = Annotated[bool, typer.Option("--retry", help="Take up runs again that failed before.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Print the plan with times, and start nothing.")]
NoPreflight = Annotated[bool, typer.Option("--no-preflight", help="Skip the checks of memory and disk.")]
Nproc = Annotated[int | None, typer.Option(min=1, help="Processes for each run, by torchrun: one a GPU, or shares of the CPU.")]
Nnodes = Annotated[int, typer.Option(min=1, help="Hosts that work on each run; give the same command on each.")]
RdzvEndpoint = Annotated[str | None, typer.Option(metavar="HOST:PORT", help="Where the hosts meet.")]
RdzvId = Annotated[str | None, typer.Option(help="The name under which they meet.")]
MaxRestarts = Annotated[int, typer.Option(min=0, help="How often to go on by itself after a process was lost.")]


@reported
def run(
    context: typer.Context,
    ids: Ids = None,
    budget: Budget = "laptop",
    seeds: Seeds = None,
    gpus: Gpus = None,
    jobs: Jobs = None,
    overrides: Overrides = None,
    folder: From = None,
    model: Model = None,
    catalog: CatalogFile = None,
    root: Out = Path("outputs"),
    tuned: Annotated[bool, typer.Option("--tuned", help="Each arm with the best of its `oelm sweep`.")] = False,
    no_baseline: Annotated[bool, typer.Option("--no-baseline", help="Only what is named, not its baseline.")] = False,
    retry: Retry = False,
    notify: Notify = None,
    dry_run: DryRun = False,
    no_preflight: NoPreflight = False,
    track: Track = None,
    nproc: Nproc = None,
    nnodes: Nnodes = 1,
    rdzv_endpoint: RdzvEndpoint = None,
    rdzv_id: RdzvId = None,
    max_restarts: MaxRestarts = 3,
    slurm: Slurm = False,
    partition: Partition = None,
    account: Account = None,
    gres: Gres = None,
    time: Time = None,
    array_limit: ArrayLimit = None,
    prepare_only: Annotated[bool, typer.Option("--prepare-only", help="Prepare the data, and train nothing.")] = False,
) -> None:
    """Run experiments of the catalog with their baselines; repeat the command to continue, finished runs are skipped."""
    quiet_unless_first()
    with stoppable() as stop, shown_warnings():
        from oelm.train.track import tracker_named

        study = _study(ids, budget, seeds, overrides, folder, model, root, tuned=tuned, baselines=not no_baseline)
        runs = study.plan(load(catalog))
        how = How(stop, retry=retry, preflight=not no_preflight, track=tracker_named(track))
        is_for_slurm = (wish := Wish(partition, account, gres, time, array_limit)).is_for_slurm(slurm)
        if prepare_only and (dry_run or is_for_slurm):
            raise ConfigError("--prepare-only prepares data here and now; give it without --dry-run and --slurm")
        if notify is not None and (is_for_slurm or is_one_of_many()):
            raise ConfigError("--notify is for the process that starts the runs; use `oelm watch --notify` next to the jobs")
        ranks = ranks_of(nproc, nnodes, rdzv_endpoint, rdzv_id, max_restarts, gpus=gpus, jobs=jobs)
        if is_for_slurm:
            submit_study(context, study, runs, wish, how, dry_run=dry_run)
            return
        if prepare_only or dry_run:
            _prepare(study, runs, how) if prepare_only else print_plan(runs, _slots(gpus, jobs, budget), root)
            return
        if is_one_of_many():
            work_together(study, runs, how)
        if ranks is not None:
            ended = run_by_ranks(context, study, runs, ranks, how, notify=notify)
        else:
            ended = _run_all(study, runs, _slots(gpus, jobs, budget), how, notify=notify, catalog=catalog)
    _print_summary(runs, budget)
    _leave(ended)


def _study(
    ids: list[str] | None,
    budget: str,
    seeds: str | None,
    overrides: list[str] | None,
    folder: Path | None,
    model: Path | None,
    root: Path,
    *,
    tuned: bool,
    baselines: bool,
) -> Study:
    from oelm.experiments.plan import parse_seeds
    from oelm.experiments.study import Study
    from oelm.train.config import parse_overrides

    return Study(
        names=tuple(ids or ()),
        budget=budget,
        root=root,
        seeds=parse_seeds(seeds) if seeds is not None else None,
        changes=parse_overrides(overrides or []),
        model=model,
        copies=folder,
        tuned=tuned,
        baselines=baselines,
    )


def _prepare(study: Study, runs: Sequence[PlannedRun], how: How) -> None:
    """Prepare what runs read, and say what keeps some from starting; raise only where it keeps all of them."""
    from oelm.experiments.study import prepare_study

    with TerminalWatch() as watch:
        unready = prepare_study(runs, folder=study.copies, stop=how.stop, watch=watch, preflight=how.preflight, retry=how.retry)
    for problem, count in Counter(unready.values()).items():
        text = f"{count} of {len(runs)} runs cannot begin: {printable(problem)}"
        err.print(text, style="bold red", soft_wrap=True)


def _slots(gpus: str | None, jobs: int | None, budget: str) -> Slots:
    from oelm.experiments.slots import choose_slots

    return choose_slots(gpus, jobs, budget=budget)


def load(catalog: Path | None) -> Catalog:
    from oelm.experiments.registry import load_catalog

    return load_catalog(catalog)


def _run_all(
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
    from oelm.experiments.runner import Runner
    from oelm.experiments.study import prepare_study, unfinished

    done = len(runs) - len(unfinished(runs))
    where = printable(str(study.root))
    # First of all, so that a wrong file is refused before anything is prepared.
    with notifying(notify) as notifier:
        told = f"{counted(len(runs), 'run')} at budget {study.budget}, {done} of them done; {slots}; in {where}"
        out.print(told, soft_wrap=True)
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

    live = LiveRuns(study.root, load(catalog), only={run.experiment.id for run in runs}, budget=study.budget)
    known = set(live.look().decided())

    def decided() -> list[tuple[str, str]]:
        new = {name: text for name, text in live.look().decided().items() if name not in known}
        known.update(new)
        return list(new.items())

    return decided


def _print_summary(runs: Sequence[PlannedRun], budget: str) -> None:
    from rich.table import Table

    from oelm.experiments.summary import figure_text, gap_text, split_note, summarize

    rows = summarize(runs)
    if not rows:
        return
    notes = ["a smoke test, never a result"] if budget == "smoke" else [split_note(rows)]
    counts = {row.gap.count for row in rows if row.gap is not None}
    notes += ["95% intervals, paired by seed"] if max(counts, default=0) > 1 else []
    notes += ["a gap without an interval has one seed: no verdict"] if 1 in counts else []
    out.print(f"\nbudget {budget}: {'; '.join(notes)}", style="bold yellow", soft_wrap=True)
    table = Table(box=None, pad_edge=False)
    for name in ("experiment", "seeds", "best", "against its baseline", ""):
        table.add_column(name, justify="left" if name in ("experiment", "") else "right", no_wrap=name != "")
    for row in rows:
        remark = f"CONFOUNDED: {'; '.join(row.confounded)}" if row.confounded else ""
        against = f"{gap_text(row.gap)} {row.experiment.baseline}" if row.gap is not None else ""
        table.add_row(row.experiment.id, str(len(row.best)), figure_text(row.metric, row.mean), against, remark)
    out.print(table)


def _leave(jobs: Sequence[Job]) -> None:
    """Leave with the exit code that tells how the queue ended."""
    failed = [job for job in jobs if job.state == "failed"]
    open_ = [job for job in jobs if job.state in ("stopped", "killed", "left")]
    if open_:
        err.print(
            f"{len(open_)} of {len(jobs)} runs are not finished; repeat the same command to go on",
            style="bold yellow",
            soft_wrap=True,
        )
    if failed:
        err.print(
            f"{len(failed)} of {len(jobs)} runs failed (`oelm logs ID` tells why); mend the cause and repeat with --retry",
            style="bold red",
            soft_wrap=True,
        )
    if code := code_of(jobs):
        raise typer.Exit(code)


@reported
def sweep(
    ids: Ids = None,
    grid: Annotated[
        list[str] | None, typer.Option("--grid", metavar="KEY=A,B,...", help="A setting and its values; may be repeated.")
    ] = None,
    like: Annotated[
        str | None,
        typer.Option(metavar="ID", help="Train nothing: take over the sweep of this experiment."),
    ] = None,
    seeds: Annotated[
        int | None, typer.Option(min=1, help="Seeds of each point, apart from those of `oelm run`; default: 1.")
    ] = None,
    budget: Budget = "laptop",
    gpus: Gpus = None,
    jobs: Jobs = None,
    overrides: Overrides = None,
    folder: From = None,
    model: Model = None,
    catalog: CatalogFile = None,
    root: Out = Path("outputs"),
    retry: Retry = False,
    notify: Notify = None,
    dry_run: DryRun = False,
    no_preflight: NoPreflight = False,
) -> None:
    """Try the same grid on every arm (experiments and their baselines), and mark the best of each by validation."""
    refuse_worker("sweep")
    if like is not None:
        given = {"--grid": grid, "--seeds": seeds, "--set": overrides, "--from": folder, "--model": model}
        _refuse_beside_like(like, given | {"--gpus": gpus, "--jobs": jobs, "--retry": retry, "--no-preflight": no_preflight})
        _take_over(ids, like, budget=budget, catalog=load(catalog), root=root, dry_run=dry_run)
        return

    with stoppable() as stop, shown_warnings():
        from oelm.experiments.study import Study
        from oelm.experiments.sweep import conclude_sweep, parse_grid, standing
        from oelm.train.config import parse_overrides

        changes = parse_overrides(overrides or [])
        study = Study(names=tuple(ids or ()), budget=budget, root=root, changes=changes, model=model, copies=folder)
        plan = study.plan_sweep(load(catalog), parse_grid(grid or []), num_seeds=seeds or 1)
        slots = _slots(gpus, jobs, budget)
        if dry_run:
            print_plan(plan.runs, slots, root)
            return
        how = How(stop, retry=retry, preflight=not no_preflight)
        ended = _run_all(study, plan.runs, slots, how, notify=notify, catalog=catalog)
        records = conclude_sweep(plan)
        for record in records:
            _print_sweep(record)
        _print_standing(standing(records, root))
    _leave(ended)


def _refuse_beside_like(like: str, given: dict[str, Any]) -> None:
    for option, value in given.items():
        if value:
            raise ConfigError(f"--like {like}: nothing is trained, its sweep says what was tried; leave {option} out")


def _take_over(ids: list[str] | None, like: str, *, budget: str, catalog: Catalog, root: Path, dry_run: bool) -> None:
    from oelm.experiments.sweep import take_over

    if not ids:
        raise ConfigError(f"--like {like}: say which experiments take over its sweep")
    for record in take_over(catalog.select(ids), catalog.get(like), budget=budget, root=root, dry_run=dry_run):
        assert record.best is not None
        out.print(f"{record.experiment} at {budget}: {record.points[record.best]}, the best of {record.like}", soft_wrap=True)
    if dry_run:
        out.print("nothing was written")


def _print_sweep(record: SweepRecord) -> None:
    from rich.table import Table

    from oelm.experiments.sweep import value_text

    title = f"{record.experiment} at {record.budget}, {counted(len(record.points[0].seeds), 'seed')} a point"
    table = Table(title=title, title_justify="left", title_style="bold")
    for name in (*record.grid, "score (less is better)", ""):
        table.add_column(name, justify="right" if name else "left")
    for number, point in enumerate(record.points):
        missing = "diverged" if point.has_failed else "failed" if point.problem else "unfinished"
        score = missing if point.score is None else f"{point.score:.4f}"
        remark = "best" if number == record.best else "close" if point in record.close else ""
        table.add_row(*map(value_text, point.values.values()), score, remark)
    out.print(table)
    if any(point.problem for point in record.points):
        err.print(printable(f"the sweep of {record.experiment} {record.why_no_best}"), style="bold red", soft_wrap=True)
    for key in record.at_edge:
        err.print(
            f"warning: {record.experiment}: the best {key} lies at the edge of the grid: try values beyond it",
            style="bold yellow",
            soft_wrap=True,
        )
    if record.close:
        err.print(
            f"{record.experiment}: other seeds may choose another of the close ones (within {record.margin:.2g} of the best); "
            "more --seeds, or tries as long as the runs that follow, tell better",
            style="yellow",
            soft_wrap=True,
        )


def _print_standing(kept: Mapping[str, SweepRecord]) -> None:
    from oelm.experiments.sweep import value_text

    for name, record in kept.items():
        tried = "; ".join(f"{key} {', '.join(map(value_text, values))}" for key, values in record.grid.items())
        text = f"{name}: until this sweep is finished, --tuned goes by the one before ({tried})"
        err.print(printable(text), style="bold yellow", soft_wrap=True)


@reported
def work(
    path: Annotated[Path, typer.Argument(help="The run's folder; its config is read from standard input.")],
    no_preflight: NoPreflight = False,
    track: Track = None,
) -> None:
    """Bring one run to its end: what `oelm run` starts, once for each."""
    with stoppable() as stop, shown_warnings():
        import json

        from oelm.train.config import parse_any
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
