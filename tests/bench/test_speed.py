"""Records of speed are read back as they were written, and tables are made of them alone."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from speed_record import PUBLISHED, ArmFigures, Conditions, Product, SpeedRecord, TimeSplit, inverse, read_speed, write_speed

from oelm.bench.interleave import shape_config
from oelm.bench.speed import TimedShape
from oelm.errors import DataError
from oelm.method.method import PRESETS
from oelm.stats import Ratio

RATIO = Ratio(value=1.25, low=1.2, high=1.3, count=8)
CONDITIONS = Conditions(threads=2, cpu_cores=2, cpu_capability="AVX512", torch="2.13.0")
SHARES = {"products": 0.5, "attention": 0.2, "gelu": 0.1, "norms": 0.05, "head": 0.1, "optimizer": 0.03, "rest": 0.02}


def arm(name: str, **more: Any) -> ArmFigures:
    return ArmFigures(name=name, median_s=0.1, ratio=RATIO, **more)


ARMS = {
    "step": (arm("baseline", peak_bytes=50), arm("transformers", peak_bytes=100), arm("plain")),
    "methods": (
        arm("baseline", bound=1.0, stored=2000, trainable=2000),
        arm("oelm_freeze", bound=1.05, stored=2000, trainable=1500),
    ),
    "generation": (
        arm("baseline", tokens_per_s=100.0, against_transformers=RATIO),
        arm("transformers", tokens_per_s=80.0, against_transformers=RATIO),
    ),
}


def record(part: str, shape: str, **changes: Any) -> SpeedRecord:
    config = shape_config(shape.removesuffix("-dropout"), "baseline")
    product = Product(name="head, forward", rows=2, columns=3, inner=4, count=5, best_s=1e-6)
    split = TimeSplit(step_s=0.1, operations=8 * 10**9, gemm_gflops=100.0, shares=SHARES, products=(product,))
    return SpeedRecord(
        part=part,
        shape=shape,
        model=TimedShape(**config.model.model_dump(), batch_size=config.batch_size),
        rounds=8,
        arms=ARMS.get(part, ()),
        split=split if part == "time" else None,
        conditions=changes.get("conditions", CONDITIONS),
    )


def write_all(folder: Path) -> None:
    for part in ("time", *ARMS):
        for shape in PUBLISHED:
            write_speed(folder, record(part, shape))


@pytest.mark.parametrize("part", ["time", *ARMS])
def test_a_record_is_read_back_as_it_was_written(tmp_path: Path, part: str) -> None:
    path = write_speed(tmp_path, record(part, "laptop"))
    assert path.name == f"{part}-laptop.json" and read_speed(tmp_path, part, "laptop") == record(part, "laptop")
    assert read_speed(tmp_path, part, "512") is None


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"part": "step"}', b"\xff"])
def test_a_damaged_record_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "step-512.json").write_bytes(content)
    with pytest.raises(DataError, match=r"step-512\.json: no record of speed .*; measure it again with make bench"):
        read_speed(tmp_path, "step", "512")


def test_a_ratio_turned_round_has_its_interval_turned_round() -> None:
    assert inverse(RATIO) == Ratio(value=0.8, low=1 / 1.3, high=1 / 1.2, count=8)


def test_the_share_of_the_limit_is_the_steps_speed_over_that_of_products_alone() -> None:
    split = record("time", "512").split
    # 8e9 operations in a tenth of a second, where the products alone would reach 100 GFLOP/s.
    assert split is not None and split.step_gflops == pytest.approx(80) and split.limit_share == pytest.approx(0.8)


@pytest.fixture
def tables() -> ModuleType:
    return importlib.import_module("tables")


@pytest.mark.parametrize("language", ["en", "zh"])
def test_every_table_has_a_row_of_the_same_length_for_each_record(tables: ModuleType, tmp_path: Path, language: str) -> None:
    write_all(tmp_path)
    rows = {"bounds": 5, "time": 3, "step": 3, "methods": 2, "parameters": 2, "generation": 6}
    for name, count in rows.items():
        lines = tables.table(name, tmp_path, language).splitlines()
        assert len(lines) == 2 + count and len({line.count("|") for line in lines}) == 1, name
        assert all(line.startswith("| ") for line in lines)


def test_tables_hold_the_figures_of_the_records(tables: ModuleType, tmp_path: Path) -> None:
    write_all(tmp_path)
    assert "1.250x [1.200, 1.300], bound 1.050x" in tables.table("methods", tmp_path, "en")
    assert "2,000 stored, 1,500 trainable" in tables.table("parameters", tmp_path, "en")
    # The baseline against the others: the records hold them against the baseline.
    assert "| 0.800x [0.769, 0.833] | 0.800x [0.769, 0.833] | 80% | 8 |" in tables.table("step", tmp_path, "en")
    assert "| 100 ms | 100 | 80 | 80% | 50% | 20% |" in tables.table("time", tmp_path, "en")
    assert "1.250 \u500d [1.200, 1.300]" in tables.table("generation", tmp_path, "zh")


def test_a_shape_that_was_not_measured_is_left_out(tables: ModuleType, tmp_path: Path) -> None:
    write_speed(tmp_path, record("methods", "512"))
    head = tables.table("methods", tmp_path, "en").splitlines()[0]
    assert head == "| 2 threads on 2 CPU cores (AVX512) | 6 x 512 |"
    assert tables.table("time", tmp_path, "en") == "not measured yet; run: make bench"


def test_records_of_different_machines_make_no_table(tables: ModuleType, tmp_path: Path) -> None:
    write_all(tmp_path)
    write_speed(tmp_path, record("time", "512", conditions=CONDITIONS.model_copy(update={"threads": 1})))
    with pytest.raises(SystemExit, match="measured under different conditions"):
        tables.table("time", tmp_path, "en")


def test_bounds_are_of_the_presets(tables: ModuleType) -> None:
    for name, fields in tables.BOUNDED.items():
        assert PRESETS[name].model_dump(exclude_defaults=True) == fields, name


def test_both_languages_have_the_same_words(tables: ModuleType) -> None:
    assert list(tables.WORDS["en"]) == list(tables.WORDS["zh"])


def test_the_readmes_table_takes_new_records_before_old_figures(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    kept = importlib.import_module("record")
    monkeypatch.setattr(kept, "RESULTS", tmp_path)
    kept.keep("step", {"ours_0.0": 7.0}, rounds=2, threads=2)
    assert kept._kept(tmp_path)["step"]["ours_0.0"] == 7.0
    write_all(tmp_path)
    assert kept._kept(tmp_path)["step"]["ours_0.0"] == 7.0, "one of the three records is missing"
    write_speed(tmp_path, record("step", "medium-dropout"))
    found = kept._kept(tmp_path)
    assert found["step"]["ours_0.0"]["value"] == found["step"]["ours_0.1"]["value"] == 0.8
    assert (found["step"]["memory_0.0"], found["step"]["bound"]) == (0.5, 1.05)
    assert found["step"]["conditions"]["cpu_cores"] == 2 and found["generation"]["Medium-512"]["value"] == 1.25
