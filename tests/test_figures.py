"""The tables of README and docs are what their commands give from the records under results/, to the last digit."""

from __future__ import annotations

import argparse
import importlib.util
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from string import Formatter
from types import ModuleType
from typing import Any

import pytest

from oelm.experiments.catalog import Catalog
from oelm.report import build
from oelm.stats import Ratio, mean_ratio
from tests.cases import case
from tests.report.synthetic import write_arm

ROOT = Path(__file__).resolve().parent.parent


def script(path: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(Path(path).stem, ROOT / path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[Path(path).stem] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def figures() -> ModuleType:
    return script("studies/figures.py")


@pytest.fixture(scope="module")
def record() -> ModuleType:
    return script("benchmarks/record.py")


@pytest.fixture
def _one_report_for_all_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    """Build the report on a folder once: commands that print another part of it, or in another language, share it."""
    made: dict[str, build.Report] = {}
    real = build.build_report

    def built(roots: Sequence[Path], catalog: Catalog, **asked: Any) -> build.Report:
        name = f"{[root.resolve() for root in roots]} {asked}"
        if name not in made:
            made[name] = real(roots, catalog, **asked)
        return made[name]

    monkeypatch.setattr(build, "build_report", built)


@pytest.mark.usefixtures("_one_report_for_all_tables")
def test_every_table_and_picture_is_what_its_command_gives(figures: ModuleType) -> None:
    for path, text in figures.wanted().items():
        assert path.read_text(encoding="utf-8") == text, f"{path.name} is not what its command gives; run make figures"


# What is measured is written so: a share or change with a decimal, an interval, a ratio with its interval.
FIGURE = re.compile(
    r"[+-]?\d+\.\d+%|\[[+-]?\d+\.\d+, [+-]?\d+\.\d+\]|\d\.\d+(?:x| 倍)|PPL \d+"
    r"|\d+\.\d+ (?:s|ms|minutes|hours|days|points)\b"
)
# Rules of the plan, the target, and figures of the earlier study, which src/oelm/report/reported.yaml has with their source.
TYPED = {"0.3%", "1.05x", "1.05 倍", "93.12%", "91.28%", "82.11%", "+9.8%", "+15.5%", "0.162 s", "0.069 s"}


def typed_figures(page: str) -> list[str]:
    """Return what looks measured and stands outside of blocks and of code."""
    prose = re.sub(r"<!-- \$ .*?<!-- end -->|```.*?```", "", page, flags=re.DOTALL)
    return [found for found in FIGURE.findall(prose) if found not in TYPED]


def test_no_measured_figure_is_typed(figures: ModuleType) -> None:
    typed = {page.name: found for page in figures.pages() if (found := typed_figures(page.read_text(encoding="utf-8")))}
    assert not typed, f"put these into a block that a command writes: {typed}"


def test_a_typed_figure_is_found_in_prose_and_not_in_blocks() -> None:
    for figure in ("+15.7%", "84.72%", "[+0.0, +1.6]", "1.026x [1.012, 1.040]", "1.58 倍 [1.54, 1.63]"):
        with case(figure):
            assert typed_figures(f"it came to {figure} here")
            assert not typed_figures(f"<!-- $ oelm x -->\n\n{figure}\n\n<!-- end -->\n\nand\n```\n{figure}\n```\n")


def test_the_demo_is_shown_as_it_prints_its_recorded_runs(figures: ModuleType) -> None:
    before = {path: path.stat().st_mtime_ns for path in (ROOT / "results" / "demo").rglob("*")}
    lines = figures.demo().splitlines()
    assert lines[0] == "one seed: no verdict" and len(lines) == 9 and lines[-1].startswith("└")
    perplexities = [line.split("│")[2].strip() for line in lines if line.startswith("│")]
    recorded = [
        json.loads((ROOT / "results/demo" / arm / "laptop/default/seed-0/timing_stats.json").read_text())["best_ppl"]
        for arm in ("demo-learn", "demo-frozen", "demo-lowrank", "demo-slices-q")
    ]
    assert perplexities == [f"{ppl:.2f}" for ppl in recorded]
    # It was let loose on a copy.
    assert {path: path.stat().st_mtime_ns for path in (ROOT / "results" / "demo").rglob("*")} == before


def test_what_is_no_table_is_fenced(figures: ModuleType) -> None:
    assert figures.body("oelm x", "| a |\n|---|") == "| a |\n|---|"
    assert figures.body("oelm x", "plain") == "```\n$ oelm x\nplain\n```"
    assert "```\n$ make soak\nsoak: " in figures.renewed("<!-- $ make soak -->\n<!-- end -->")


def test_a_figure_that_was_changed_by_hand_is_found(figures: ModuleType, tmp_path: Path) -> None:
    write_arm(tmp_path, "GPT-01", [20.0, 20.2, 19.9, 20.1, 20.3])
    write_arm(tmp_path, "GPT-02", [21.0, 21.3, 20.8, 21.1, 21.4])
    block = f"<!-- $ oelm report --out {tmp_path} --table verdicts -->\n"
    page = f"before\n\n{block}\n| a |\n\n<!-- end -->\n\nafter\n"
    renewed = figures.renewed(page)
    assert "| GPT-02 / GPT-01 |" in renewed and "| a |" not in renewed
    assert renewed.startswith("before") and renewed.endswith("after\n")
    assert figures.renewed(renewed) == renewed


@pytest.mark.parametrize("command", ["rm -rf x", "python -c pass", "python", "python studies/figures.py", "oelmx report"])
def test_no_command_but_ours_is_run(figures: ModuleType, command: str) -> None:
    with pytest.raises(SystemExit, match="may only run oelm"):
        figures.renewed(f"<!-- $ {command} -->\n<!-- end -->")


def test_a_block_without_an_end_swallows_nothing(figures: ModuleType) -> None:
    page = "<!-- $ make soak -->\n\nprose\n\n<!-- $ make demo -->\n<!-- end -->\n"
    with pytest.raises(SystemExit, match="the block of make soak has no end"):
        figures.renewed(page)


def test_a_command_that_fails_says_so(figures: ModuleType) -> None:
    with pytest.raises(SystemExit, match="no such folder"):
        figures.renewed("<!-- $ oelm report --out results/nowhere --table classes -->\n<!-- end -->")


RATIO = mean_ratio([2.0, 2.2, 2.1], [1.0, 1.0, 1.0])
BENCHMARKS: dict[str, dict[str, Ratio | float]] = {
    "step": {f"{what}_{dropout}": RATIO for what in ("ours", "frozen") for dropout in (0.0, 0.1)}
    | {"memory_0.0": 0.456, "memory_0.1": 0.6, "bound": 1.0234},
    "ranks": {"two": RATIO, "saved": 0.0701},
    "generation": {"Medium-512": RATIO},
    "preparation": {
        "ours": RATIO,
        "input": 177.4,
        "input_1": 11.1,
        "input_10": 110.9,
        "memory_1": 190.6,
        "memory_10": 191.2,
    },
    "finetuning": {"plain": RATIO, "grouped": RATIO},
}


@pytest.mark.parametrize(
    ("language", "ratio", "memory"), [("en", "2.098x [1.864, 2.362]", "0.46x"), ("zh", "2.098 倍 [1.864, 2.362]", "0.46 倍")]
)
def test_the_table_of_the_benchmarks_is_made_of_what_they_kept(
    record: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, language: str, ratio: str, memory: str
) -> None:
    monkeypatch.setattr(record, "RESULTS", tmp_path)
    for name, kept in BENCHMARKS.items():
        record.keep(name, kept, rounds=3, threads=2)
    lines = record.table(tmp_path, language).splitlines()
    assert len(lines) == 9 and lines[1] == "|---|---|" and all(line.count("|") == 3 for line in lines)
    assert [line.count(ratio) for line in lines] == [0, 0, 1, 1, 1, 1, 1, 1, 2]
    assert memory in lines[2] and "7.01%" in lines[5] and "177 MB" in lines[7] and "191" in lines[7]


def test_the_tables_of_both_languages_have_the_same_rows_and_figures(record: ModuleType) -> None:
    english, chinese = (
        [sorted(field for _, field, _, _ in Formatter().parse(" ".join(row)) if field) for row in record.ROWS[language]]
        for language in ("en", "zh")
    )
    assert english == chinese and sum(map(len, english)) == 18


def test_figures_are_kept_with_what_they_were_measured_on(
    record: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(record, "RESULTS", tmp_path)
    record.keep("ranks", BENCHMARKS["ranks"], rounds=8, threads=2)
    kept = json.loads((tmp_path / "ranks.json").read_text())
    assert set(kept) == {"two", "saved", "conditions"} and kept["saved"] == 0.0701
    assert set(kept["conditions"]) == {"rounds", "threads", "cpu_cores", "torch"}
    assert (kept["conditions"]["rounds"], kept["conditions"]["threads"]) == (8, 2)


def test_figures_of_different_machines_make_no_table(
    record: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(record, "RESULTS", tmp_path)
    for name, kept in BENCHMARKS.items():
        record.keep(name, kept, rounds=3, threads=2)
    kept = json.loads((tmp_path / "ranks.json").read_text())
    assert f", {kept['conditions']['cpu_cores']} CPU cores," in record.table(tmp_path, "en").splitlines()[0]
    kept["conditions"]["cpu_cores"] += 1
    (tmp_path / "ranks.json").write_text(json.dumps(kept))
    with pytest.raises(SystemExit, match="measure them all on one with: make bench"):
        record.table(tmp_path, "en")


@pytest.mark.parametrize("missing", [tuple(BENCHMARKS), ("ranks",), ("finetuning",)])
def test_a_table_without_figures_says_what_to_run(
    record: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, missing: tuple[str, ...]
) -> None:
    monkeypatch.setattr(record, "RESULTS", tmp_path)
    for name in BENCHMARKS.keys() - set(missing):
        record.keep(name, BENCHMARKS[name], rounds=3, threads=2)
    with pytest.raises(SystemExit, match=rf"no figures of '{missing[0]}'; measure and keep them all with: make bench"):
        record.table(tmp_path, "en")


@pytest.mark.parametrize(
    ("benchmark", "options"),
    [
        ("training_step", ["--quick"]),
        ("training_step", ["--dropout", "0.1"]),
        ("training_step", ["--dropout", "0.1", "--quick", "--rounds", "2"]),
        ("methods", ["--method", "oelm_freeze", "--shape", "laptop"]),
        ("methods", ["--quick"]),
        ("where_time_goes", ["--quick"]),
        ("ranks", ["--small"]),
        ("ranks", ["--method", "baseline"]),
        ("generation", ["--tokens", "20"]),
        ("preparation", ["--copies", "1"]),
        ("finetuning", ["--steps", "2"]),
        ("finetuning", ["--from", "sst2"]),
    ],
)
def test_figures_of_something_else_are_not_kept(
    record: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    benchmark: str,
    options: list[str],
) -> None:
    monkeypatch.setattr("sys.argv", [f"{benchmark}.py", *options, "--record"])
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    with pytest.raises(SystemExit, match="2"):
        script(f"benchmarks/{benchmark}.py").main()
    said = capsys.readouterr()
    changed = [option for option in options if option.startswith("--") and option not in ("--rounds", "--shape")]
    assert f"{', '.join(changed)} would measure something else" in said.err.replace("\n", " ")
    assert said.out == ""


@pytest.mark.parametrize("arguments", [["--rounds", "3", "--record"], ["--size", "2"], ["--size", "1", "--record"], []])
def test_rounds_may_vary_and_anything_may_be_tried_without_keeping_it(record: ModuleType, arguments: list[str]) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=8)
    measured = [parser.add_argument("--size", type=int, default=1)]
    options = record.parse_options(parser, measured=measured, arguments=arguments)
    assert options.record == ("--record" in arguments)
