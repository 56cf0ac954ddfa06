"""`oelm list` and `oelm show`: what the catalog has, and what one experiment is in full."""

from __future__ import annotations

import platform
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from oelm.cli.options import CatalogFile, Out, Overrides, SomeIds
from oelm.cli.shell import out, print_table, printable, reported, roughly, say
from oelm.text import counted

if TYPE_CHECKING:
    from oelm.config import FinetuneConfig, RunConfig
    from oelm.experiments.catalog import Experiment
    from oelm.experiments.forecast import Assumptions, Projection
    from oelm.experiments.plan import PlannedRun
    from oelm.method.audit import Audit
    from oelm.models.shape import WeightCounts


@reported
def list_experiments(names: SomeIds = None, catalog: CatalogFile = None) -> None:
    """List the experiments of the catalog."""
    from oelm.experiments.catalog import load_catalog

    found = load_catalog(catalog)
    chosen = found.select(names) if names else list(found)
    groups, ids = found.groups(), {experiment.id for experiment in chosen}
    rows, sets = dict[str, str](), dict[str, None]()
    for experiment in chosen:
        arm, _, data = experiment.id.partition(".")
        if data and {*groups.get(arm, [""])} <= ids:
            # One line for an arm on all of its data sets.
            sets[data] = None
            rows.setdefault(f"{arm}.SET", experiment.title.removeprefix(f"{data}: "))
        else:
            rows[experiment.id] = experiment.title + _reported(experiment)
    width = max(map(len, rows), default=0)
    for name, what in rows.items():
        line = f"{name:{width}}  {printable(what)}"
        say(line if len(line) <= out.width else f"{line[: out.width - 3]}...")
    if sets:
        out.print(f"\nSET: {', '.join(sets)}")
    named = [f"{name} ({len(members)})" for name, members in found.named_groups().items()]
    out.print(f"groups: {', '.join(named)}")
    out.print("next: `oelm show ID` for one experiment, `oelm run ID --budget smoke` to try it")


def _reported(experiment: Experiment) -> str:
    figures = experiment.reported.figures if experiment.reported else {}
    if "best_ppl" in figures:
        return f" (reported: PPL {figures['best_ppl']:g})"
    return f" (reported: {100 * figures['best_accuracy']:.2f}%)" if "best_accuracy" in figures else ""


@reported
def show(
    name: Annotated[str, typer.Argument(metavar="ID", help="An experiment of `oelm list`; with --on also a group.")],
    budget: Annotated[str | None, typer.Option(help="Size: paper, workstation, laptop (default) or smoke.")] = None,
    overrides: Overrides = None,
    on: Annotated[
        str | None,
        typer.Option(metavar="GPU", help="Estimate time and cost on A5000, V100, L4, A100, H100, or 8xA100."),
    ] = None,
    price: Annotated[float, typer.Option(min=0.0, help="With --on: cost of one GPU for an hour.")] = 2.0,
    catalog: CatalogFile = None,
    root: Out = Path("outputs"),
    cost: Annotated[bool, typer.Option("--cost", help="Also estimate time, memory and disk here; this loads torch.")] = False,
) -> None:
    """Show one experiment: its recipe at a budget, its parameters, and what was reported.

    With --on, estimate it and its baseline on GPUs at budget paper, from operations and data sheets, never measured.
    """
    if on is not None:
        _print_projection(name, on, budget or "paper", price, overrides or [], catalog)
        return
    _show(name, budget or "laptop", overrides or [], catalog, root, cost=cost)


def _show(name: str, budget: str, overrides: list[str], catalog: Path | None, root: Path, *, cost: bool) -> None:
    from oelm.config import flatten, parse_overrides
    from oelm.experiments.catalog import load_catalog
    from oelm.experiments.plan import check_changes, plan_runs, variant_name

    found = load_catalog(catalog)
    experiment = found.get(name)
    changes = parse_overrides(overrides)
    check_changes(changes)
    arms = [experiment] + ([found.get(experiment.baseline)] if experiment.baseline else [])
    runs = plan_runs(
        arms,
        budget=budget,
        seeds=[0],
        root=root,
        changes={arm.id: changes for arm in arms},
        variant=variant_name(changes),
    )
    own = next(run for run in runs if run.experiment.id == experiment.id)
    _print_facts(own, [run for run in runs if run is not own], root, costs=_costs(own, root) if cost else {})
    out.print("\nrecipe:", style="bold")
    for key, value in flatten(own.config.as_dict()).items():
        say(f"  {key}: {value}")
    command = ["oelm", "run", experiment.id, "--budget", budget]
    command += [part for text in overrides for part in ("--set", text)]
    command += ["--catalog", str(catalog)] if catalog is not None else []
    say(f"\nrun it: {shlex.join(command)}")


def _print_projection(name: str, gpus: str, budget: str, price: float, overrides: list[str], catalog: Path | None) -> None:
    """Print what an experiment, or a group, takes on GPUs according to their data sheets."""
    from oelm.budget import budget_settings
    from oelm.config import parse_config, parse_overrides
    from oelm.experiments.catalog import load_catalog
    from oelm.experiments.forecast import Assumptions, named_gpus, project, reported_efficiency
    from oelm.experiments.study import Study
    from oelm.train.device import gibibytes

    gpu, count = named_gpus(gpus)
    share = reported_efficiency(parse_config(budget_settings("paper"), where="paper"))
    assumed = Assumptions(gpu, count, share, price)
    study = Study(names=(name,), budget=budget, root=Path("outputs"), changes=parse_overrides(overrides))
    runs = study.plan(load_catalog(catalog))
    cells = []
    found: list[Projection] = []
    for each in dict.fromkeys(run.experiment.id for run in runs):
        own = [one for run in runs if run.experiment.id == each and (one := project(run, assumed)) is not None]
        if own:
            first = own[0]
            memory, summed = gibibytes(first.memory_bytes), f"{first.summed_bytes / 1e6:.1f} MB"
            times = [roughly(first.alone_s), roughly(first.spread_s)][: 1 if count == 1 else 2]
            cells.append((each, str(len(own)), *times, memory, summed))
        found += own
    on_all = [f"each on {count}"] if count > 1 else []
    print_table(("experiment", "runs", "each alone", *on_all, "memory", "summed a step"), cells, left=("experiment",))
    say(f"\n{counted(len(found), 'run')} at {budget}: {_times_and_costs(found, assumed)}")
    unknown = f"; {len(runs) - len(found)} runs of models not known here are left out" if len(found) < len(runs) else ""
    say(
        f"calculated on paper, not measured: {100 * share:.1f}% of the data sheet's {gpu.operations_per_s / 1e12:.0f} "
        f"TFLOP/s, gradients summed without overlap{unknown}"
    )


def _times_and_costs(found: list[Projection], assumed: Assumptions) -> str:
    """Return the hours of all runs on one GPU and, with several, in a queue and with each run on all, with their costs."""
    from oelm.experiments.forecast import queue_s

    count, price = assumed.count, assumed.price_per_hour
    alone, queued, spread = sum(p.alone_s for p in found), queue_s(found, count), sum(p.spread_s for p in found)
    cost, cost_of_all = (f"{seconds / 3600 * price:,.0f}" for seconds in (alone, spread * count))
    on_one = f"{roughly(alone)} on 1 {assumed.gpu.name} (cost {cost} at {price:g} per GPU and hour)"
    if count == 1:
        return on_one
    queue = f"{roughly(queued)} on {count}, a run each ({cost})"
    return f"{on_one}; {queue}; {roughly(spread)} on {count}, each run on all ({cost_of_all})"


def _costs(run: PlannedRun, root: Path) -> dict[str, str]:
    """Return what one run takes here, and the parameters of a classifier."""
    from oelm.config import RunConfig
    from oelm.data.tokenizer import num_cores
    from oelm.experiments.forecast import Forecaster, count_parameters
    from oelm.method.method import learning_later
    from oelm.train.device import gibibytes

    threads = max(1, num_cores() // min(num_cores(), 8)) if run.budget != "paper" else num_cores()
    forecast = Forecaster(root, threads=threads).forecast(run)
    facts = {
        "one run here": f"about {roughly(forecast.seconds)} on the CPU ({forecast.basis}, threads: {threads})",
        "memory, disk": f"about {gibibytes(forecast.needs.memory)} and {gibibytes(forecast.needs.disk)}",
    }
    if isinstance(run.config, RunConfig):
        return facts
    if (counted := count_parameters(run.config)) is None:
        return {
            "parameters": "the model is not known here; fetch it, or give its folder with --set model.source=FOLDER",
            **facts,
        }
    later = learning_later(run.config.method.model_dump(mode="json"), counted.projections)
    return {"parameters": _counts(counted, later), **facts}


def _counts(counted: Audit | WeightCounts, later: int) -> str:
    """Return what trains, what is frozen, and of how many parameters that changes `later`."""
    slices = f" || replaced by slices: {counted.selected:,}" if counted.selected else ""
    shown = f"; {abs(later):,} of Q and K {'thaw' if later > 0 else 'freeze'} on the way" if later else ""
    share = 100 * counted.frozen / counted.total
    numbers = f"{counted.total:,} || trainable: {counted.trainable:,} || frozen: {counted.frozen:,} ({share:.2f}%)"
    return numbers + slices + shown


def _calculated(config: RunConfig | FinetuneConfig) -> str:
    """Return the parameters of a GPT by arithmetic; those of a classifier take its library."""
    from oelm.config import RunConfig
    from oelm.experiments.plan import known_vocabulary

    if not isinstance(config, RunConfig):
        return "counted with --cost"
    config = known_vocabulary(config)
    counts, method = config.weight_counts(), config.method
    if method.thaw:
        return _counts(counts, counts.frozen + counts.selected)
    at_once = config.model_copy(update={"method": method.model_copy(update={"freeze_at": 0.0})}).weight_counts()
    return _counts(counts, counts.frozen - at_once.frozen)


def _print_facts(run: PlannedRun, baseline: list[PlannedRun], root: Path, *, costs: dict[str, str]) -> None:
    from oelm.config import RunConfig
    from oelm.experiments.plan import config_confounds

    experiment = run.experiment
    data = run.config.data.source if isinstance(run.config, RunConfig) else run.config.examples.task
    facts = {
        "what": f"{experiment.title} ({experiment.kind.replace('_', ' ')})",
        "data": data if data == experiment.data else f"{data}: a smoke test does not read {experiment.data}",
        "budget": run.budget,
        "baseline": experiment.baseline or "none: it is one",
        "success": str(experiment.criterion) if experiment.criterion else "no criterion",
        "seeds planned": str(experiment.seeds),
        "parameters": _calculated(run.config),
    }
    facts |= costs | _counted(run.config)
    if experiment.reported is not None:
        figures = ", ".join(f"{name} {value:g}" for name, value in experiment.reported.figures.items())
        facts["reported"] = f"{figures} ({experiment.reported.source}; not a result of ours)"
    if experiment.note:
        facts["note"] = experiment.note
    if baseline and (apart := config_confounds(run.config, baseline[0].config)):
        facts["CONFOUNDED"] = f"differs from its baseline in {'; '.join(apart)}: a gap between them proves nothing"
    out.print(experiment.id, style="bold")
    width = max(map(len, facts))
    for name, text in facts.items():
        say(f"  {name:{width}}  {text}")


def _counted(config: RunConfig | FinetuneConfig) -> dict[str, str]:
    """Return what n-gram models make of a language model's text, where that is prepared here and was counted."""
    from oelm.config import RunConfig
    from oelm.data.ngram import ORDERS, kept_figures
    from oelm.data.prepare import is_token_set
    from oelm.data.prepared import find_tokens
    from oelm.data.tokens import read_meta
    from oelm.errors import DataError
    from oelm.report.sections.baselines import MOST_OF_FIVE_GRAM

    if not isinstance(config, RunConfig):
        return {}
    data, rule = config.data, f"a real baseline has at most {MOST_OF_FIVE_GRAM:g} times its perplexity"
    name = f"stdlib-{platform.python_version()}" if data.source == "stdlib" else data.source
    try:
        path = Path(data.source) if is_token_set(data.source) else None
        path = path or find_tokens(name, data.tokenizer, max_tokens=data.max_tokens)
        figures = kept_figures(path, read_meta(path / "meta.json")) if path is not None else None
    except DataError:
        # Not prepared so, or several times: the run itself says what to do.
        path, figures = None, None
    if figures is None:
        how = f"oelm data info {path} --ngram" if path is not None else "no set of its data is found here by name"
        return {"5-gram": f"not counted yet ({how}); {rule}"}
    shown = ", ".join(f"{split} PPL {values[-1]:.2f}" for split, values in figures.up_to(ORDERS).items())
    return {"5-gram": f"{shown}; {rule}"}
