"""The tables of docs/speed.md, from the records that `make bench` keeps under results/bench.

python benchmarks/tables.py methods [--lang zh]
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from speed_record import ArmFigures, SpeedRecord, inverse, read_speed

from oelm.bench.speed import TimedShape
from oelm.models.shape import method_work
from oelm.stats import Ratio

RESULTS = Path(__file__).resolve().parent.parent / "results" / "bench"
CLASSIFIER = "bert"
SHAPES = {"laptop": "laptop", "512": "6 x 512", "medium": "Medium-512"}
# As plain data: the bound needs neither a model nor torch.
_BOTH = ("q", "k")
BOUNDED: dict[str, dict[str, Any]] = {
    "oelm_freeze": {"init": "orthogonal", "freeze": _BOTH},
    "oelm_axes": {"init": "axes", "freeze": _BOTH},
    "oelm_axes_lowrank": {"init": "axes", "freeze": _BOTH, "correction": 0.125},
    "oelm_axes_q": {"init": "axes", "freeze": ("q",)},
}
WORDS = {
    "en": {
        "missing": "not measured yet; run: make bench",
        "machine": "{threads} threads on {cores} CPU cores ({capability})",
        "shape": "{name}, batch {batch} x {length}, vocabulary {vocabulary:,}",
        "ratio": "{value:.3f}x [{low:.3f}, {high:.3f}]",
        "bound": "{ratio}, bound {bound:.3f}x",
        "allowed": "{bound:.3f}x ({share:.1f}% of the work)",
        "method": "method",
        "step": "step",
        "gemm": "GEMM alone, GFLOP/s",
        "reached": "step, GFLOP/s",
        "limit": "share of the GEMM limit",
        "products": "products",
        "attention": "attention",
        "gelu": "GELU",
        "norms": "norms",
        "head": "head and loss",
        "optimizer": "optimizer",
        "rest": "rest",
        "transformers": "baseline against `transformers` [95%]",
        "plain": "baseline against a plain PyTorch step [95%]",
        "rounds": "rounds",
        "stored": "{stored:,} stored, {trainable:,} trainable",
        "arm": "arm",
        "tokens": "tokens/s",
        "of baseline": "against the baseline [95%]",
        "of transformers": "against `transformers` on the export [95%]",
        "classifier": "bert-base's shape, batch {batch} x {length}, {machine}",
        "saved": "time saved",
        "allows": "arithmetic allows",
        "sentences": "baseline, batches padded to their longest, lengths of SST-2",
        "pairs": "baseline, batches padded to their longest, lengths of MNLI",
    },
    "zh": {
        "missing": "尚未测量；请运行：make bench",
        "machine": "{cores} 个 CPU 核（{capability}），{threads} 个线程",
        "shape": "{name}，批大小 {batch} x {length}，词表 {vocabulary:,}",
        "ratio": "{value:.3f} 倍 [{low:.3f}, {high:.3f}]",
        "bound": "{ratio}，上限 {bound:.3f} 倍",
        "allowed": "{bound:.3f} 倍（运算量的 {share:.1f}%）",
        "method": "方法",
        "step": "训练步",
        "gemm": "单独矩阵乘法，GFLOP/s",
        "reached": "训练步，GFLOP/s",
        "limit": "达到矩阵乘法极限的比例",
        "products": "矩阵乘法",
        "attention": "注意力",
        "gelu": "GELU",
        "norms": "归一化",
        "head": "输出层与损失",
        "optimizer": "优化器",
        "rest": "其余",
        "transformers": "基线相比 `transformers` [95%]",
        "plain": "基线相比普通 PyTorch 训练步 [95%]",
        "rounds": "轮数",
        "stored": "存储 {stored:,}，可训练 {trainable:,}",
        "arm": "组",
        "tokens": "词元/秒",
        "of baseline": "相比基线 [95%]",
        "of transformers": "相比 `transformers`（运行导出的模型）[95%]",
        "classifier": "bert-base 的形状，批大小 {batch} x {length}，{machine}",
        "saved": "节省的时间",
        "allows": "运算量所允许的上限",
        "sentences": "基线，每批填充到其中最长的样本，长度取自 SST-2",
        "pairs": "基线，每批填充到其中最长的样本，长度取自 MNLI",
    },
}
Words = dict[str, str]
Records = dict[str, SpeedRecord]


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] + ["---:"] * (len(head) - 1), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def ratio_text(ratio: Ratio, words: Words) -> str:
    return words["ratio"].format(**vars(ratio))


def shape_label(shape: str, model: TimedShape, words: Words) -> str:
    return words["shape"].format(name=SHAPES[shape], batch=model.batch_size, length=model.seq_len, vocabulary=model.vocab_size)


def machine(records: Records, words: Words) -> str:
    """Return the common conditions of all records; SystemExit where they differ."""
    found = {record.conditions for record in records.values()}
    if len(found) > 1:
        raise SystemExit(f"measured under different conditions: {sorted(map(str, found))}; measure all with: make bench")
    (seen,) = found
    return words["machine"].format(threads=seen.threads, cores=seen.cpu_cores, capability=seen.cpu_capability)


def time_table(records: Records, words: Words, folder: Path) -> str:
    parts = ("products", "attention", "gelu", "norms", "head", "optimizer", "rest")
    head = [machine(records, words), *(words[name] for name in ("step", "gemm", "reached", "limit", *parts))]
    rows = []
    for shape, record in records.items():
        split = record.split
        assert split is not None
        figures = [f"{1000 * split.step_s:,.0f} ms", f"{split.gemm_gflops:.0f}", f"{split.step_gflops:.0f}"]
        shares = [split.limit_share, *(split.shares[part] for part in parts)]
        rows.append([shape_label(shape, record.model, words), *figures, *(f"{share:.0%}" for share in shares)])
    return markdown(head, rows)


def step_table(records: Records, words: Words, folder: Path) -> str:
    head = [machine(records, words), *(words[name] for name in ("transformers", "plain", "limit", "rounds"))]
    rows = []
    for shape, record in records.items():
        theirs = [inverse(arm.ratio) if (arm := record.arm(name)) else None for name in ("transformers", "plain")]
        split = timed.split if (timed := read_speed(folder, "time", shape)) else None
        limit = f"{split.limit_share:.0%}" if split else ""
        texts = ["" if ratio is None else ratio_text(ratio, words) for ratio in theirs]
        rows.append([shape_label(shape, record.model, words), *texts, limit, str(record.rounds)])
    return markdown(head, rows)


def _by_method(records: Records, words: Words, cell: Callable[[ArmFigures], str], *, skip: int) -> str:
    """Return a table with a row for each method and a column for each shape."""
    names = list(dict.fromkeys(arm.name for record in records.values() for arm in record.arms[skip:]))
    rows = [
        [f"`{name}`", *("" if (arm := record.arm(name)) is None else cell(arm) for record in records.values())]
        for name in names
    ]
    return markdown([machine(records, words), *(SHAPES[shape] for shape in records)], rows)


def methods_table(records: Records, words: Words, folder: Path) -> str:
    def cell(arm: ArmFigures) -> str:
        return words["bound"].format(ratio=ratio_text(arm.ratio, words), bound=arm.bound)

    rounds = [f"{words['rounds']}", *(str(record.rounds) for record in records.values())]
    return _by_method(records, words, cell, skip=1) + f"\n| {' | '.join(rounds)} |"


def parameters_table(records: Records, words: Words, folder: Path) -> str:
    def cell(arm: ArmFigures) -> str:
        return words["stored"].format(stored=arm.stored, trainable=arm.trainable)

    return _by_method(records, words, cell, skip=0)


def generation_table(records: Records, words: Words, folder: Path) -> str:
    names = ("arm", "tokens", "of baseline", "of transformers", "rounds")
    head = [machine(records, words), *(words[name] for name in names)]
    rows = [
        [
            SHAPES[shape],
            f"`{arm.name}`",
            f"{arm.tokens_per_s or 0:,.0f}",
            "" if arm is record.arms[0] else ratio_text(arm.ratio, words),
            ratio_text(theirs, words) if (theirs := arm.against_transformers) and arm.name != "transformers" else "",
            str(record.rounds),
        ]
        for shape, record in records.items()
        for arm in record.arms
    ]
    return markdown(head, rows)


def bounds_table(words: Words) -> str:
    """Return the arithmetic bounds, which need no measurement."""
    from oelm.bench.interleave import THIN, shape_config

    rows: dict[str, list[str]] = {name: [] for name in (*BOUNDED, THIN)}
    for shape in SHAPES:
        config = shape_config(shape, "baseline")
        whole = method_work(config.model, {}, batch_size=config.batch_size).total
        for name in rows:
            model = shape_config(shape, THIN).model if name == THIN else config.model
            left = method_work(model, BOUNDED.get(name, {}), batch_size=config.batch_size).total
            rows[name].append(words["allowed"].format(bound=whole / left, share=100 * (1 - left / whole)))
    return markdown([words["method"], *SHAPES.values()], [[f"`{name}`", *texts] for name, texts in rows.items()])


def classifier_table(records: Records, words: Words, folder: Path) -> str:
    """Return freezing and padding at the classifier's shape, against the baseline with all examples padded to one length."""
    (record,) = records.values()
    sizes = {"batch": record.model.batch_size, "length": record.model.seq_len}
    title = words["classifier"].format(**sizes, machine=machine(records, words))
    rows = [
        [
            words.get(arm.name, f"`{arm.name}`"),
            f"{1000 * arm.median_s:,.0f} ms",
            ratio_text(arm.ratio, words),
            f"{100 * (1 - 1 / arm.ratio.value):.1f}%",
            f"{arm.bound or 1:.3f}x",
        ]
        for arm in record.arms
    ]
    return markdown([title, words["step"], words["of baseline"], words["saved"], words["allows"]], rows)


# By name: the part whose records it shows, and the function that makes it.
TABLES: dict[str, tuple[str, Callable[[Records, Words, Path], str]]] = {
    "time": ("time", time_table),
    "step": ("step", step_table),
    "methods": ("methods", methods_table),
    "parameters": ("methods", parameters_table),
    "generation": ("generation", generation_table),
    "classifier": ("classifier", classifier_table),
}


def table(name: str, folder: Path, language: str) -> str:
    """Return a table as Markdown, or the command to run where nothing was measured."""
    words = WORDS[language]
    if name == "bounds":
        return bounds_table(words)
    part, make = TABLES[name]
    records = {shape: record for shape in (*SHAPES, CLASSIFIER) if (record := read_speed(folder, part, shape))}
    return make(records, words, folder) if records else words["missing"]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", choices=["bounds", *TABLES])
    parser.add_argument("--lang", choices=sorted(WORDS), default="en")
    options = parser.parse_args(arguments)
    print(table(options.table, RESULTS, options.lang))


if __name__ == "__main__":
    main()
