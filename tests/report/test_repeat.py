"""A report says how to repeat what it tells: its command, typed where the report was made, gives the same curve."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from oelm.runs.metrics import read_metrics
from tests.conftest import run_here, tiny_config
from tests.report.reading import english, names, rows
from tests.report.synthetic import write_arm, write_sweep, write_tuned


def losses(run: Path) -> dict[int, tuple[float | None, float | None]]:
    return {row["step"]: (row.get("loss"), row.get("val_loss")) for row in read_metrics(run / "metrics.jsonl")}


def test_the_command_gives_the_same_curve(text_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = tiny_config(text_file, method="oelm_lowrank", steps=9, eval_every=3, save_every=9, seed=7)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        run_here(config, Path("outputs/GPT-02-lowrank/laptop/default/seed-7"))
    finally:
        torch.set_num_threads(threads)
    (row,) = rows(english(Path("outputs")), "repeat")
    place = "outputs/GPT-02-lowrank/laptop/default/seed-7"
    again = "again/GPT-02-lowrank/laptop/default/seed-7"
    assert row["command"] == f"OMP_NUM_THREADS=1 oelm train --config {place}/config.json --out {again}"
    # A file of the user's own needs no preparing.
    assert row["data"] == ""
    assert (row["arm"], row["budget"], row["seed"]) == ("GPT-02-lowrank", "laptop", "7")
    setting, program, *arguments = shlex.split(row["command"])
    assert program == "oelm"
    argv = [sys.executable, "-m", "oelm", *arguments]
    subprocess.run(argv, env={**os.environ, **dict([setting.split("=")])}, check=True, capture_output=True)
    assert losses(Path(again)) == losses(Path(place)) and len(losses(Path(again))) == 9


def test_every_usable_arm_has_a_command_of_its_kind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_arm(Path("a b"), "GPT-01", [20.0, 20.1], seeds=[3, 4])
    write_arm(Path("a b"), "SST-2-01", [0.9, 0.91], seeds=[0, 1], data="sst2")
    found = {row["arm"]: row for row in rows(english(Path("a b")), "repeat")}
    train, finetune = (found[arm]["command"].split("oelm ", 1)[1] for arm in ("GPT-01", "SST-2-01"))
    place = "GPT-01/laptop/default/seed-3"
    assert train == f"train --config 'a b/{place}/config.json' --out again/{place}"
    assert finetune.startswith("finetune --config 'a b/SST-2-01/laptop/default/seed-0/config.json' --out again/SST-2-01/")
    assert found["GPT-01"]["data"].startswith("oelm data prepare tinystories --tokenizer ")
    assert found["SST-2-01"]["data"].startswith("oelm data prepare sst2")


def test_an_absolute_place_is_told_by_its_last_part(tmp_path: Path) -> None:
    write_arm(tmp_path / "outputs", "GPT-01", [20.0, 20.1], seeds=[0, 1])
    (row,) = rows(english(tmp_path / "outputs"), "repeat")
    assert "--config outputs/GPT-01/laptop/default/seed-0/config.json" in row["command"] and str(tmp_path) not in row["command"]


def test_without_a_usable_arm_there_is_nothing_to_repeat(tmp_path: Path) -> None:
    assert "repeat" not in names(english(tmp_path))


def test_the_points_of_a_sweep_are_left_out_and_the_arm_that_came_of_them_is_not(tmp_path: Path) -> None:
    sweep = write_sweep(tmp_path, "GPT-01", 1)
    for point in sweep.points:
        write_arm(tmp_path, "GPT-01", [20.0] * len(point.seeds), seeds=point.seeds, variant=point.variant)
    assert "repeat" not in names(english(tmp_path))
    write_tuned(tmp_path, "GPT-01", 1e-3)
    (row,) = rows(english(tmp_path), "repeat")
    assert row["arm"] == "GPT-01 (tuned)"
