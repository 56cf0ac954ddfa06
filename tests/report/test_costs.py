"""Recorded timings are shown in the reader's language, whatever version of `oelm bench` recorded them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from oelm.bench.speed import FOLDER, TimedShape, write_timing
from oelm.report.arms import load_runs
from oelm.report.build import build_report
from oelm.report.document import Document, Table
from tests.bench.test_record import OLD, timing
from tests.report.reading import rows
from tests.report.synthetic import package_catalog, write_arm

PLAIN = "4 layers, 128 wide, dropout 0.0, batch 32 x 64"
BEHIND = "4 layers, 128 wide, dropout 0.0, short convolution of 3, batch 32 x 64"
IN_CHINESE = {
    PLAIN: "4 层，宽度 128，dropout 0.0，批大小 32 x 64",
    BEHIND: "4 层，宽度 128，dropout 0.0，3 个词元的短卷积，批大小 32 x 64",
}


def document(root: Path, lang: str) -> Document:
    return build_report((root,), package_catalog()).document(lang)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for arm in ("GPT-01", "GPT-02"):
        write_arm(tmp_path, arm, [20.0, 20.2], seeds=[0, 1])
    (tmp_path / FOLDER).mkdir()
    return tmp_path


def write_old(root: Path, shape: str) -> None:
    (root / FOLDER / "old.json").write_text(json.dumps(OLD | {"shape": shape}))


@pytest.mark.parametrize("sentence", IN_CHINESE)
def test_the_shape_of_an_old_record_is_shown_in_the_readers_language(root: Path, sentence: str) -> None:
    write_old(root, sentence)
    assert [row["model"] for row in rows(document(root, "en"), "speed")] == [sentence]
    assert [row["模型"] for row in rows(document(root, "zh"), "speed")] == [IN_CHINESE[sentence]]


@pytest.mark.parametrize(
    ("more", "english", "chinese"),
    [
        ({}, "2 layers, 32 wide, dropout 0.1, batch 4 x 16", "2 层，宽度 32，dropout 0.1，批大小 4 x 16"),
        (
            {"short_conv": 2, "vocab_size": 50257},
            "2 layers, 32 wide, dropout 0.1, short convolution of 2, batch 4 x 16, vocabulary 50,257",
            "2 层，宽度 32，dropout 0.1，2 个词元的短卷积，批大小 4 x 16，词表 50,257",
        ),
    ],
)
def test_the_shape_of_a_record_is_shown_in_the_readers_language(
    root: Path, more: dict[str, Any], english: str, chinese: str
) -> None:
    shape = TimedShape(num_layers=2, model_dim=32, seq_len=16, batch_size=4, dropout=0.1, **more)
    write_timing(root, timing(shape=shape))
    assert [row["model"] for row in rows(document(root, "en"), "speed")] == [english]
    assert [row["模型"] for row in rows(document(root, "zh"), "speed")] == [chinese]


def add_energy(root: Path, arm: str, seed: int, energy: dict[str, float]) -> None:
    path = root / arm / "laptop" / "default" / f"seed-{seed}" / "timing_stats.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"energy_j": energy}))


def test_without_a_counter_there_is_time_and_no_column_of_energy(root: Path) -> None:
    (row, _) = rows(document(root, "en"), "costs")
    assert row["time of a run"] == "1 s" and "energy of a run" not in row
    assert all(row["energy_j"] is None for row in load_runs(root))


def test_energy_is_the_median_over_runs_of_what_all_of_them_measured(root: Path) -> None:
    add_energy(root, "GPT-02", 0, {"cpu": 1000.0, "gpu": 5000.0})
    add_energy(root, "GPT-02", 1, {"cpu": 3000.0})
    baseline, arm = rows(document(root, "en"), "costs")
    assert baseline["energy of a run"] == "" and arm["energy of a run"] == "CPU 2.00 kJ"
    assert [row["energy_j"] for row in load_runs(root)] == [None, None, 6000.0, 3000.0]
    assert rows(document(root, "zh"), "costs")[1]["单次运行能耗"] == "CPU 2.00 kJ"


@pytest.mark.parametrize("energy", [{"cpu": -1.0}, {"wind": 1.0}, {"cpu": "much"}])
def test_energy_that_no_counter_gives_makes_a_record_unusable(root: Path, energy: dict[str, Any]) -> None:
    add_energy(root, "GPT-02", 0, energy)
    assert "timing_stats.json" in next(row["problem"] for row in load_runs(root) if row["problem"])


def shape_of(root: Path) -> TimedShape:
    """Return the shape of the recorded runs, as `oelm bench` would record it."""
    config = json.loads((root / "GPT-01" / "laptop" / "default" / "seed-0" / "config.json").read_text())
    model = {key: value for key, value in config["model"].items() if key in TimedShape.model_fields}
    return TimedShape(**model, batch_size=config["batch_size"])


def seconds(root: Path) -> list[dict[str, str]]:
    return rows(document(root, "en"), "seconds") if "seconds" in table_names(root) else []


def table_names(root: Path) -> set[str]:
    sections = document(root, "en").sections
    return {block.name for section in sections for block in section.blocks if isinstance(block, Table)}


def test_an_arm_is_compared_with_a_baseline_of_as_many_seconds(root: Path) -> None:
    write_timing(root, timing(shape=shape_of(root), value=1.25, low=1.2, high=1.3, optimizer="adamw"))
    assert seconds(root) == []
    write_arm(root, "GPT-01", [24.0, 24.24], seeds=[0, 1], variant="steps-16-01234567", settings={"steps": 16})
    (row,) = seconds(root)
    assert row["steps, arm / baseline"] == "20 / 16"
    # 20 steps at 1.25 times the speed take as long as 16.
    assert row["time [95%]"] == "1.000x [0.962, 1.042]"
    assert row["gap at equal steps"].startswith("+0.0%") and row["gap at equal seconds"].startswith("-16.7%")


OTHERS: dict[str, dict[str, Any]] = {
    "another arm": {"second": "oelm_random"},
    "another reference": {"first": "oelm_random"},
    "another optimizer": {"optimizer": "muon"},
    "no optimizer": {"optimizer": None},
    "another shape": {"shape": {"model_dim": 128}},
}


@pytest.mark.parametrize("changes", OTHERS.values(), ids=OTHERS)
def test_a_timing_of_something_else_says_nothing_of_seconds(root: Path, changes: dict[str, Any]) -> None:
    write_arm(root, "GPT-01", [24.0, 24.24], seeds=[0, 1], variant="steps-16-01234567", settings={"steps": 16})
    shape = shape_of(root).model_copy(update=changes.get("shape", {}))
    write_timing(root, timing(**({"optimizer": "adamw"} | changes | {"shape": shape})))
    assert seconds(root) == []


def test_a_baseline_that_differs_in_more_than_its_steps_is_no_measure_of_seconds(root: Path) -> None:
    write_timing(root, timing(shape=shape_of(root), optimizer="adamw"))
    changed = {"steps": 16, "optim.lr": 0.5}
    write_arm(root, "GPT-01", [24.0, 24.24], seeds=[0, 1], variant="lr-0.5_steps-16-01234567", settings=changed)
    assert seconds(root) == []
