"""`oelm bench` and `oelm doctor`: what methods cost and save on this machine, and what it offers."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from oelm.cli.options import Out, Overrides
from oelm.cli.shell import err, out, print_table, reported, say
from oelm.errors import ConfigError, OelmError

if TYPE_CHECKING:
    from oelm.bench.interleave import Comparison
    from oelm.bench.speed import TimedShape
    from oelm.config import FinetuneConfig, RunConfig


_SECOND = "oelm_freeze"


@reported
def bench(
    arms: Annotated[
        list[str] | None,
        typer.Argument(help="A, the reference, then the others: methods, 'thin', 'half', or config.json files of runs."),
    ] = None,
    budget: Annotated[str, typer.Option(help="Size for methods: paper (Medium-512), workstation, laptop or smoke.")] = "paper",
    shape: Annotated[
        str | None, typer.Option(help="Instead of --budget, a published shape: laptop, 512, medium or bert.")
    ] = None,
    rounds: Annotated[int, typer.Option(min=3, help="How often the arms take turns.")] = 10,
    generate: Annotated[
        bool, typer.Option("--generate", help="Time greedy text at batch 1 instead of training steps.")
    ] = False,
    tokens: Annotated[int, typer.Option(min=1, help="With --generate: how many tokens each arm writes a round.")] = 200,
    memory: Annotated[bool, typer.Option(help="Measure peak memory, each arm in a separate process.")] = True,
    overrides: Overrides = None,
    root: Out = Path("outputs"),
) -> None:
    """Compare training steps of methods or configs: in turn, against the first, with intervals and the arithmetic bound."""
    names = arms or ["baseline"]
    names = [*names, _SECOND] if len(names) == 1 else names
    sides = [
        (Path(name).parent.name if Path(name).is_file() else name, _config(name, budget, shape, overrides or []))
        for name in names
    ]
    texts = [(name, config) for name, config in sides if not hasattr(config, "examples")]
    if texts and len(texts) < len(sides):
        raise ConfigError("a language model and a classifier have no step in common; give arms of one kind")
    if generate:
        if not texts:
            raise ConfigError(f"--generate: shape '{shape}' is a classifier and writes no text; leave one of the two out")
        _generate(texts, rounds=rounds, tokens=tokens)
        return
    from oelm.bench.interleave import compare_arms

    comparisons = compare_arms(sides, rounds=rounds, progress=say, has_memory=memory)
    timed = _timed_shape(sides[0][1])
    _print(comparisons, timed)
    for comparison in comparisons:
        say(f"recorded in {_record(comparison, timed, sides[0][1].optim.name, root)}")


def _config(name: str, budget: str, shape: str | None, overrides: list[str]) -> RunConfig | FinetuneConfig:
    from oelm.bench.interleave import shape_settings, with_arm
    from oelm.budget import budget_settings
    from oelm.config import parse_any, parse_overrides, with_overrides
    from oelm.data.tokenizer import vocab_size_of
    from oelm.runs.records import read_config

    if Path(name).is_file():
        settings = read_config(Path(name)).as_dict()
    elif "/" in name or name.endswith(".json"):
        raise ConfigError(f"{name}: no such file; give a method or a run's config.json")
    elif shape is not None:
        settings = with_arm(shape_settings(shape), name)
    else:
        settings = with_arm(budget_settings(budget), name)
        # No data is read here, so the vocabulary is the tokenizer's.
        settings["model"]["vocab_size"] = vocab_size_of(settings["data"]["tokenizer"])
    settings = parse_any(settings, where=name).as_dict()
    return parse_any(with_overrides(settings, parse_overrides(overrides)), where=name)


def _timed_shape(config: RunConfig | FinetuneConfig) -> TimedShape:
    from oelm.bench.interleave import timed_shape
    from oelm.bench.speed import TimedShape

    sizes = timed_shape(config).model_dump()
    return TimedShape(**sizes, batch_size=config.batch_size, is_classifier=hasattr(config, "examples"))


def _record(comparison: Comparison, shape: TimedShape, optimizer: str, root: Path) -> Path:
    import torch

    from oelm.bench.speed import TimingRecord, write_timing

    first, second, ratio = comparison.first, comparison.second, comparison.ratio
    record = TimingRecord(
        first=first.name,
        second=second.name,
        shape=shape,
        value=ratio.value,
        low=ratio.low,
        high=ratio.high,
        bound=comparison.bound,
        rounds=ratio.count,
        first_step_s=first.median_s,
        second_step_s=second.median_s,
        first_peak_bytes=first.peak_bytes,
        second_peak_bytes=second.peak_bytes,
        first_stored=first.stored,
        second_stored=second.stored,
        first_trainable=first.trainable,
        second_trainable=second.trainable,
        optimizer=optimizer,
        threads=torch.get_num_threads(),
    )
    return write_timing(root, record)


def _print(comparisons: list[Comparison], shape: TimedShape) -> None:
    from oelm.bench.interleave import conclusion
    from oelm.report.sections.costs import shape_text
    from oelm.report.words import Words

    sides = [comparisons[0].first, *(comparison.second for comparison in comparisons)]
    rows = [
        ("speed against A", "", *(f"{comparison.ratio.value:.3f}x" for comparison in comparisons)),
        ("95% interval", "", *(f"{each.ratio.low:.3f} to {each.ratio.high:.3f}" for each in comparisons)),
        ("arithmetic bound", "", *(f"{comparison.bound:.3f}x" for comparison in comparisons)),
    ]
    for label, attribute, unit, scale in (
        ("median step", "median_s", " ms", 1e3),
        ("parameters stored", "stored", "", 1),
        ("parameters trainable", "trainable", "", 1),
        ("peak memory", "peak_bytes", " MiB", 2**-20),
        ("optimizer state", "optimizer_bytes", " MiB", 2**-20),
        ("checkpoint", "checkpoint_bytes", " MiB", 2**-20),
        ("all-reduced a step (DDP)", "all_reduced_bytes", " MiB", 2**-20),
    ):
        values = [getattr(side, attribute) for side in sides]
        if None not in values:
            rows.append((label, *(f"{value * scale:,.1f}{unit}" if unit else f"{value:,}" for value in values)))
    title = shape_text(shape, Words("en"))
    print_table(("", *(side.title for side in sides)), rows, left=("",), title=title, boxed=True)
    for comparison in comparisons:
        ratio, title = comparison.ratio, comparison.second.title
        out.print(f"speed of {title} against {comparison.first.title}: {ratio}, 95% interval over {ratio.count} rounds")
        out.print(conclusion(comparison))


def _generate(sides: list[tuple[str, RunConfig]], *, rounds: int, tokens: int) -> None:
    from oelm.bench.greedy import can_export, compare_generation

    has_transformers = can_export(sides[0][1])
    writers = compare_generation(sides, rounds=rounds, num_tokens=tokens, has_transformers=has_transformers, progress=say)
    headings = ("greedy text, batch 1", "tokens/s", f"against {sides[0][0]} [95%]", "against transformers [95%]")
    rows = [(each.name, f"{each.tokens_per_s:,.0f}", str(each.ratio), str(each.against_transformers or "")) for each in writers]
    print_table(headings, rows, left=headings, boxed=True)
    if not has_transformers:
        out.print("not compared with transformers: it is not installed, or GPT-2's format has no place for this model")


@reported
def doctor(
    seconds: Annotated[float, typer.Option(min=0.0, help="How long the matrix test may take in all; 0 skips it.")] = 10.0,
    selftest: Annotated[
        bool, typer.Option("--selftest", help="Train, kill, resume and compare small runs; prints a table for an issue.")
    ] = False,
) -> None:
    """Print device, precision and why, threads, memory, disk, versions, extras, and a matrix test in each precision."""
    from rich.table import Table

    from oelm.bench.machine import examine, matmul_speeds

    if selftest:
        _selftest(examine())
        return
    table = Table(show_header=False)
    for name, value in examine().items():
        table.add_row(name, value)
    out.print(table)
    if seconds > 0:
        headings = ("precision", "matrix product")
        print_table(headings, matmul_speeds(seconds).items(), left=headings, title="1024 x 1024 by 1024 x 1024", boxed=True)


def _selftest(machine: dict[str, str]) -> None:
    """Print a Markdown table of the machine and of what held on it; raise OelmError where something did not."""
    from oelm.bench.machine import selftest

    checks = selftest(lambda name: err.print(f"{name} ...", style="dim"))
    # Where the cache is, is nobody's business.
    rows = [(name, "", value) for name, value in machine.items() if name != "cache"]
    rows += [(check.name, "holds" if check.holds else "FAILS", check.found) for check in checks]
    cells = [tuple(" ".join(cell.replace("|", "/").split()) for cell in row) for row in rows]
    say("\n".join(["| check | result | found |", "| --- | --- | --- |", *(f"| {' | '.join(row)} |" for row in cells)]))
    if failed := sum(not check.holds for check in checks):
        raise OelmError(f"{failed} of {len(checks)} checks failed: please report the table")
