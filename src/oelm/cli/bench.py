"""`oelm bench`: what a method costs and saves on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from oelm.cli.shell import out, reported
from oelm.errors import ConfigError

if TYPE_CHECKING:
    from oelm.bench.compare import Comparison
    from oelm.train.config import RunConfig


@reported
def bench(
    first: Annotated[str, typer.Argument(help="A: a method's name, or a run's config.json.")] = "baseline",
    second: Annotated[str, typer.Argument(help="B: likewise.")] = "oelm_freeze",
    budget: Annotated[str, typer.Option(help="The size for methods: paper (Medium-512), laptop or smoke.")] = "paper",
    rounds: Annotated[int, typer.Option(min=3, help="How often A and B take turns.")] = 10,
    overrides: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Any setting, for both; may be repeated.")
    ] = None,
    root: Annotated[Path, typer.Option("--out", help="Where the record goes, for `oelm report`.")] = Path("outputs"),
) -> None:
    """Compare the training step of two methods or configs: A and B in turn, with an interval and the arithmetic bound."""
    from oelm.bench.compare import compare

    sides = [
        (Path(name).parent.name if Path(name).is_file() else name, _config(name, budget, overrides or []))
        for name in (first, second)
    ]
    comparison = compare(sides[0], sides[1], rounds=rounds, progress=lambda text: out.print(text))
    _print(comparison, sides[0][1])
    out.print(f"recorded in {_record(comparison, sides[0][1], root)}", soft_wrap=True)


def _config(name: str, budget: str, overrides: list[str]) -> RunConfig:
    from oelm.data.tokenizer import vocab_size_of
    from oelm.experiments.budget import budget_settings
    from oelm.train.config import parse_config, parse_overrides, read_config, with_overrides

    if Path(name).is_file():
        settings = read_config(Path(name)).as_dict()
    elif "/" in name or name.endswith(".json"):
        raise ConfigError(f"{name}: no such file; give a method or a run's config.json")
    else:
        settings = {**budget_settings(budget), "method": name}
        # No data is read here, so the tokenizer's size stands in for what it would give.
        settings["model"]["vocab_size"] = vocab_size_of(settings["data"]["tokenizer"])
    settings = parse_config(settings, where=name).as_dict()
    return parse_config(with_overrides(settings, parse_overrides(overrides)), where=name)


def _shape(config: RunConfig) -> str:
    model = config.model
    shape = f"{model.num_layers} layers, {model.model_dim} wide, dropout {model.dropout}"
    shape += f", short convolution of {model.short_conv}" if model.short_conv else ""
    return f"{shape}, batch {config.batch_size} x {model.seq_len}"


def _record(comparison: Comparison, config: RunConfig, root: Path) -> Path:
    from oelm.bench.record import TimingRecord, write_timing

    first, second, ratio = comparison.first, comparison.second, comparison.ratio
    record = TimingRecord(
        first=first.name,
        second=second.name,
        shape=_shape(config),
        value=ratio.value,
        low=ratio.low,
        high=ratio.high,
        bound=comparison.bound,
        rounds=ratio.count,
        first_step_s=first.median_s,
        second_step_s=second.median_s,
        first_peak_bytes=first.peak_bytes,
        second_peak_bytes=second.peak_bytes,
    )
    return write_timing(root, record)


def _print(comparison: Comparison, config: RunConfig) -> None:
    from rich.table import Table

    from oelm.bench.compare import verdict

    table = Table("", title=_shape(config), title_justify="left")
    for side in (comparison.first, comparison.second):
        table.add_column(side.name, justify="right")
    table.add_column("B / A", justify="right")
    for label, attribute, unit, scale in (
        ("median step", "median_s", "ms", 1e3),
        ("peak memory", "peak_bytes", "MiB", 2**-20),
        ("optimizer state", "optimizer_bytes", "MiB", 2**-20),
        ("checkpoint", "checkpoint_bytes", "MiB", 2**-20),
        ("all-reduced a step (DDP)", "all_reduced_bytes", "MiB", 2**-20),
    ):
        a, b = getattr(comparison.first, attribute), getattr(comparison.second, attribute)
        table.add_row(label, f"{a * scale:,.1f} {unit}", f"{b * scale:,.1f} {unit}", f"{b / a:.3f}")
    out.print(table)
    ratio = comparison.ratio
    out.print(f"speed of B against A: {ratio}, 95% interval over {ratio.count} rounds")
    out.print(verdict(comparison))
