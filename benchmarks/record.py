"""The figures of the benchmarks, kept under results/bench, and the README's table of them.

    python benchmarks/record.py [--lang zh]      # print that table

A benchmark keeps its figures when it runs with `--record`, as `make bench` does, and only at the settings of the table.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from speed_record import PUBLISHED, ArmFigures, Conditions, SpeedRecord, TimeSplit, inverse, read_speed, write_speed

from oelm.bench.interleave import Timed
from oelm.bench.speed import TimedShape
from oelm.stats import Ratio

if TYPE_CHECKING:
    from oelm.bench.interleave import BenchConfig

RESULTS = Path(__file__).resolve().parent.parent / "results" / "bench"
# The key of a benchmark's settings, next to its figures.
CONDITIONS = "conditions"

# Rows of the table: what was compared, and the result, from the figures of one benchmark.
ROWS: dict[str, list[tuple[str, str]]] = {
    "en": [
        ("`make bench`, Medium-512 (44.9M parameters, batch 8 x 512), {cores} CPU cores, interleaved", "ratio [95%]"),
        (
            "training step, ours against `transformers`' GPT-2, dropout 0",
            "{step[ours_0.0]} as fast, {step[memory_0.0]:.2f}x the peak memory",
        ),
        ("the same, dropout 0.1", "{step[ours_0.1]} as fast, {step[memory_0.1]:.2f}x the peak memory"),
        (
            "frozen against baseline, dropout 0",
            "{step[frozen_0.0]} as fast; arithmetic allows {step[bound]:.3f}x at most",
        ),
        (
            "two processes of one thread against one process of two threads",
            "{ranks[two]} as fast; frozen weights are not sent: {ranks[saved]:.2%} fewer bytes",
        ),
        ("greedy text, ours against `transformers` on the export", "{generation[Medium-512]} as fast, the same tokens"),
        (
            "text to token files ({preparation[input]:.0f} MB), ours against a plain `tiktoken` script on two processes",
            "{preparation[ours]} as fast; peak memory {preparation[memory_1]:.0f} MiB at {preparation[input_1]:.0f} MB of input"
            " and {preparation[memory_10]:.0f} MiB at {preparation[input_10]:.0f} MB",
        ),
        (
            "fine-tuning a BERT of 6 x 384, batch 16, on the standard library's packages, ours against `transformers.Trainer`",
            "{finetuning[plain]} as fast; {finetuning[grouped]} when it groups by length",
        ),
    ],
    "zh": [
        ("`make bench`，Medium-512（44.9M 参数，批大小 8 x 512），{cores} 个 CPU 核，交替执行", "比值 [95%]"),
        (
            "训练步，本项目相比 `transformers` 的 GPT-2，dropout 0",
            "速度为 {step[ours_0.0]}，峰值内存为 {step[memory_0.0]:.2f} 倍",
        ),
        ("同上，dropout 0.1", "速度为 {step[ours_0.1]}，峰值内存为 {step[memory_0.1]:.2f} 倍"),
        ("冻结组相比基线，dropout 0", "速度为 {step[frozen_0.0]}；运算量所允许的上限为 {step[bound]:.3f} 倍"),
        (
            "两个单线程进程，相对一个双线程进程",
            "速度为 {ranks[two]}；冻结的权重不参与传输：字节数减少 {ranks[saved]:.2%}",
        ),
        ("贪心解码生成文本，本项目相比 `transformers`（运行导出的模型）", "速度为 {generation[Medium-512]}，词元完全相同"),
        (
            "文本转为词元文件（{preparation[input]:.0f} MB），本项目相比双进程的普通 `tiktoken` 脚本",
            "速度为 {preparation[ours]}；峰值内存为 {preparation[memory_1]:.0f} MiB（输入 {preparation[input_1]:.0f} MB）"
            "和 {preparation[memory_10]:.0f} MiB（输入 {preparation[input_10]:.0f} MB）",
        ),
        (
            "微调 6 x 384 的 BERT，批大小 16，标准库各包的分类任务，本项目相比 `transformers.Trainer`",
            "速度为 {finetuning[plain]}；对方按长度分组时为 {finetuning[grouped]}",
        ),
    ],
}
_RATIO = {"en": "{value:.3f}x [{low:.3f}, {high:.3f}]", "zh": "{value:.3f} 倍 [{low:.3f}, {high:.3f}]"}


def parse_options(
    parser: argparse.ArgumentParser, *, measured: Sequence[argparse.Action], arguments: Sequence[str] | None = None
) -> argparse.Namespace:
    """Read a benchmark's options, `--record` among them.

    It is refused together with any of the options in `measured`, which change what is measured.
    """
    parser.add_argument("--record", action="store_true", help="keep the figures under results/bench")
    options = parser.parse_args(arguments)
    changed = [action.option_strings[0] for action in measured if getattr(options, action.dest) != action.default]
    if options.record and changed:
        parser.error(f"--record keeps the figures of the table; {', '.join(changed)} would measure something else")
    return options


def add_speed_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of every benchmark of speed."""
    parser.add_argument("--shape", action="append", choices=PUBLISHED, help="may be repeated; default all three")
    parser.add_argument("--rounds", type=int, help="how often the contenders take turns; default by shape")
    parser.add_argument("--out", type=Path, help="keep the figures in this folder")


def parse_speed_options(
    parser: argparse.ArgumentParser, *, measured: Sequence[argparse.Action], arguments: Sequence[str] | None
) -> argparse.Namespace:
    """Read the options of a benchmark of speed."""
    quick = parser.add_argument("--quick", action="store_true", help="a toy shape: a smoke test of the benchmark")
    options = parse_options(parser, measured=[*measured, quick], arguments=arguments)
    if options.rounds is not None and options.rounds < 2:
        parser.error(f"--rounds {options.rounds}: an interval needs at least two")
    return options


def chosen_shapes(options: argparse.Namespace, rounds: Mapping[str, int]) -> Iterator[tuple[str, int]]:
    """Yield the requested shapes, each with its rounds."""
    published = [shape for shape in rounds if shape != "tiny"]
    for shape in ["tiny"] if options.quick else options.shape or published:
        yield shape, options.rounds or rounds.get(shape, 2)


def build_arm(name: str, timed: Timed, config: BenchConfig, *, bound: float) -> ArmFigures:
    """Return the figures of one arm with its bound and the size of its model."""
    from oelm.bench.interleave import model_size

    stored, trainable, _ = model_size(config)
    return ArmFigures(name=name, median_s=timed.median_s, ratio=timed.ratio, bound=bound, stored=stored, trainable=trainable)


def build_record(
    part: str, shape: str, config: BenchConfig, *, rounds: int, arms: Sequence[ArmFigures] = (), split: TimeSplit | None = None
) -> SpeedRecord:
    """Return the record of a benchmark of speed, with its conditions."""
    import torch

    from oelm.bench.interleave import timed_shape
    from oelm.config import FinetuneConfig

    conditions = Conditions(
        threads=torch.get_num_threads(),
        cpu_cores=os.cpu_count() or 1,
        cpu_capability=torch.backends.cpu.get_cpu_capability(),
        torch=importlib.metadata.version("torch"),
    )
    is_classifier = isinstance(config, FinetuneConfig)
    model = TimedShape(**timed_shape(config).model_dump(), batch_size=config.batch_size, is_classifier=is_classifier)
    return SpeedRecord(part=part, shape=shape, model=model, rounds=rounds, arms=tuple(arms), split=split, conditions=conditions)


def finish(record: SpeedRecord, options: argparse.Namespace, show: Callable[[SpeedRecord], None]) -> None:
    """Show a record, and keep it if requested."""
    show(record)
    if options.out is not None or options.record:
        folder = options.out or RESULTS
        folder.mkdir(parents=True, exist_ok=True)
        print(f"  kept in {write_speed(folder, record).name}", flush=True)


def keep(benchmark: str, figures: Mapping[str, Ratio | float], *, rounds: int, threads: int) -> None:
    """Write a benchmark's figures with their conditions, in place of the earlier ones."""
    RESULTS.mkdir(parents=True, exist_ok=True)
    plain: dict[str, Any] = {name: asdict(figure) if isinstance(figure, Ratio) else figure for name, figure in figures.items()}
    plain[CONDITIONS] = {
        "rounds": rounds,
        "threads": threads,
        "cpu_cores": os.cpu_count(),
        "torch": importlib.metadata.version("torch"),
    }
    (RESULTS / f"{benchmark}.json").write_text(json.dumps(plain, indent=2) + "\n", encoding="utf-8")


def table(folder: Path, language: str) -> str:
    """Return the table as Markdown, in one of the README's languages; SystemExit where a figure is missing."""
    figures: dict[str, Any] = {}
    cores: dict[int, str] = {}
    for name, kept in _kept(folder).items():
        cores.setdefault(kept.pop(CONDITIONS)["cpu_cores"], f"{name}.json")
        figures[name] = {
            key: _RATIO[language].format_map(figure) if isinstance(figure, dict) else figure for key, figure in kept.items()
        }
    if len(cores) > 1:
        raise SystemExit(f"{folder}: measured on machines of {cores} cores; measure them all on one with: make bench")
    figures["cores"] = next(iter(cores), None)
    try:
        lines = [f"| {what.format_map(figures)} | {came.format_map(figures)} |" for what, came in ROWS[language]]
    except KeyError as missing:
        raise SystemExit(f"{folder}: no figures of {missing}; measure and keep them all with: make bench") from None
    return "\n".join([lines[0], "|---|---|", *lines[1:]])


def _kept(folder: Path) -> dict[str, dict[str, Any]]:
    """Return the figures of every benchmark in the table, from their files or, for speed, their records."""
    paths = {name: folder / f"{name}.json" for name in ("finetuning", "generation", "preparation", "ranks", "step")}
    kept = {name: json.loads(path.read_text(encoding="utf-8")) for name, path in paths.items() if path.is_file()}
    return kept | _speed_figures(folder)


def _speed_figures(folder: Path) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    plain, dropped, methods = (
        read_speed(folder, part, shape)
        for part, shape in (("step", "medium"), ("step", "medium-dropout"), ("methods", "medium"))
    )
    if plain and dropped and methods:
        (frozen,) = [arm for arm in methods.arms if arm.name == "oelm_freeze"]
        found["step"] = {"frozen_0.0": asdict(frozen.ratio), "bound": frozen.bound}
        for name, record in (("0.0", plain), ("0.1", dropped)):
            ours, theirs = record.arms[:2]
            found["step"][f"ours_{name}"] = asdict(inverse(theirs.ratio))
            if ours.peak_bytes and theirs.peak_bytes:
                found["step"][f"memory_{name}"] = ours.peak_bytes / theirs.peak_bytes
        found["step"][CONDITIONS] = plain.conditions.model_dump()
    written = read_speed(folder, "generation", "medium")
    if written and (against := written.arms[0].against_transformers):
        found["generation"] = {"Medium-512": asdict(against), CONDITIONS: written.conditions.model_dump()}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lang", choices=sorted(ROWS), default="en")
    print(table(RESULTS, parser.parse_args().lang))


if __name__ == "__main__":
    main()
