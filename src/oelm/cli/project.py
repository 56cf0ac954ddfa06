"""`oelm project`: what experiments would take on GPUs, calculated on paper."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from oelm.cli.run import Budget, CatalogFile, Ids, Overrides
from oelm.cli.shell import counted, out, reported, roughly


@reported
def project(
    ids: Ids = None,
    budget: Budget = "paper",
    gpu: Annotated[str, typer.Option(help="A5000, V100, L4, A100 or H100, by its data sheet.")] = "A100",
    count: Annotated[int, typer.Option(min=1, help="GPUs.")] = 8,
    efficiency: Annotated[
        float | None, typer.Option(help="Share of the data sheet's speed; default: what the earlier study's GPU reached.")
    ] = None,
    price: Annotated[float, typer.Option(min=0.0, help="Cost of one GPU for an hour, in whatever currency.")] = 2.0,
    seeds: Annotated[str | None, typer.Option(help="As for `oelm run`; default: as the catalog plans.")] = None,
    overrides: Overrides = None,
    catalog: CatalogFile = None,
) -> None:
    """Calculate time, memory and cost of experiments on GPUs; on paper, from operations and data sheets, never measured."""
    from rich.table import Table

    from oelm.config import parse_config, parse_overrides
    from oelm.experiments.budget import budget_settings
    from oelm.experiments.plan import parse_seeds
    from oelm.experiments.projection import Assumptions, Projection, gpu_named, queue_s, reported_efficiency
    from oelm.experiments.projection import project as on_paper
    from oelm.experiments.registry import load_catalog
    from oelm.experiments.study import Study
    from oelm.train.preflight import gibibytes

    chosen = parse_seeds(seeds) if seeds is not None else None
    changes = parse_overrides(overrides or [])
    study = Study(names=tuple(ids or ("study",)), budget=budget, root=Path("outputs"), seeds=chosen, changes=changes)
    runs = study.plan(load_catalog(catalog))
    share = efficiency if efficiency is not None else reported_efficiency(parse_config(budget_settings("paper"), where="paper"))
    on = Assumptions(gpu_named(gpu), count, share, price)
    table = Table(box=None, pad_edge=False)
    for name in ("experiment", "runs", "each alone", f"each on {count}", "memory", "summed a step"):
        table.add_column(name, justify="left" if name == "experiment" else "right")
    found: list[Projection] = []
    for name in dict.fromkeys(run.experiment.id for run in runs):
        own = [one for run in runs if run.experiment.id == name and (one := on_paper(run, on)) is not None]
        if own:
            first = own[0]
            memory, summed = gibibytes(first.memory_bytes), f"{first.summed_bytes / 1e6:.1f} MB"
            table.add_row(name, str(len(own)), roughly(first.alone_s), roughly(first.spread_s), memory, summed)
        found += own
    out.print(table)
    alone, queued, spread = sum(p.alone_s for p in found), queue_s(found, count), sum(p.spread_s for p in found)
    out.print(
        f"\n{counted(len(found), 'run')} at {budget}: {roughly(alone)} on 1 {on.gpu.name} (cost {_cost(alone, 1, on)}); "
        f"{roughly(queued)} on {count}, a run each ({_cost(alone, 1, on)}); "
        f"{roughly(spread)} on {count}, each run on all ({_cost(spread, count, on)})",
        soft_wrap=True,
    )
    unknown = f"; {len(runs) - len(found)} runs of models not known here are left out" if len(found) < len(runs) else ""
    out.print(
        f"calculated on paper, not measured: {100 * share:.1f}% of the data sheet's {on.gpu.operations_per_s / 1e12:.0f} "
        f"TFLOP/s, {price:g} per GPU and hour, gradients summed without overlap{unknown}",
        soft_wrap=True,
    )


def _cost(seconds: float, count: int, on: object) -> str:
    from oelm.experiments.projection import Assumptions

    assert isinstance(on, Assumptions)
    return f"{seconds / 3600 * count * on.price_per_hour:,.0f}"
