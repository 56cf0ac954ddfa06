"""A run's files have types, and its figures can be computed once more from its metrics."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from oelm.errors import DataError
from oelm.runs.records import DocumentRow, ExampleRow
from tests.cases import case
from tests.conftest import run_here, tiny_config
from tests.runs.recomputed import figure_problems, read_record
from tests.train.finetuning import finetune_here, tiny_finetune


@pytest.fixture(scope="module")
def finished(text_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of a language model."""
    run = tmp_path_factory.mktemp("records") / "run"
    run_here(tiny_config(text_file), run)
    return run


@pytest.fixture
def copy(finished: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / "run"))


def changed(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data))


def test_a_finished_run_parses_into_its_types_and_its_figures_recompute(finished: Path) -> None:
    record = read_record(finished)
    assert figure_problems(record) == []
    assert [row.step for row in record.steps] == list(range(1, 13)) and [row.step for row in record.evaluations] == [5, 10, 12]
    assert all(isinstance(row, DocumentRow) for row in record.predictions) and record.attention is not None
    assert record.figures.on("val") == record.figures.best_ppl and record.status.metric == "ppl"
    assert record.audit.frozen == sum(row.num_parameters for row in record.audit.projections if row.is_frozen)


def test_a_finished_classifier_parses_into_its_types_and_its_figures_recompute(
    bert: Path, tables: Path, tmp_path: Path
) -> None:
    finetune_here(tiny_finetune(bert, tables, steps=4, eval_every=2, save_every=2), tmp_path / "run")
    record = read_record(tmp_path / "run")
    assert figure_problems(record) == []
    assert all(isinstance(row, ExampleRow) for row in record.predictions) and record.attention is None
    right = [row.label == row.predicted for row in record.predictions if isinstance(row, ExampleRow)]
    assert record.figures.final_accuracy == sum(right) / len(right)


@pytest.mark.parametrize("name", ["manifest.json", "audit.json", "status.json", "timing_stats.json", "attention.json"])
def test_an_unknown_key_is_told_with_its_file(copy: Path, name: str) -> None:
    changed(copy / name, lambda data: data.update(surprise=1))
    with pytest.raises(DataError, match=rf"{name}: surprise"):
        read_record(copy)


def test_a_damaged_file_is_told_by_its_name(copy: Path) -> None:
    for name in ("manifest.json", "audit.json", "status.json", "timing_stats.json", "config.json"):
        whole = (copy / name).read_text()
        for content in ("", "{", "[]", '{"step": NaN}'):
            with case(name, content):
                (copy / name).write_text(content)
                with pytest.raises(DataError, match=name):
                    read_record(copy)
        (copy / name).write_text(whole)
    assert read_record(copy)


def test_a_missing_file_is_told_by_its_name(copy: Path) -> None:
    (copy / "audit.json").unlink()
    with pytest.raises(DataError, match=r"audit\.json"):
        read_record(copy)


def test_a_row_of_another_type_is_told_by_its_number(copy: Path) -> None:
    lines = (copy / "metrics.jsonl").read_text().splitlines(keepends=True)
    lines[2] = lines[2].replace('"loss": ', '"loss": "x", "was": ')
    (copy / "metrics.jsonl").write_text("".join(lines))
    with pytest.raises(DataError, match=r"metrics\.jsonl: line 3"):
        read_record(copy)


@pytest.mark.parametrize(
    ("name", "told"),
    [("best_ppl", "best_ppl"), ("final_loss", "final_loss"), ("tokens", "tokens"), ("final_val_loss", "final_val_loss")],
)
def test_a_figure_that_its_metrics_do_not_give_is_told(copy: Path, name: str, told: str) -> None:
    changed(copy / "timing_stats.json", lambda data: data.update({name: data[name] + 1}))
    assert any(problem.startswith(told) for problem in figure_problems(read_record(copy)))


def test_a_phase_left_out_of_the_wall_time_is_told(copy: Path) -> None:
    changed(copy / "timing_stats.json", lambda data: data["wall_s"].update(step=data["wall_s"]["step"] + 1))
    assert any("add up" in problem for problem in figure_problems(read_record(copy)))


def test_a_step_that_is_missing_or_stands_twice_is_told(copy: Path) -> None:
    lines = (copy / "metrics.jsonl").read_text().splitlines(keepends=True)
    for rows in (lines[:3] + lines[4:], lines[:3] + lines[2:]):
        (copy / "metrics.jsonl").write_text("".join(rows))
        assert any("missing or twice" in problem for problem in figure_problems(read_record(copy)))


def test_predictions_that_do_not_make_up_the_loss_are_told(copy: Path) -> None:
    lines = (copy / "predictions.jsonl").read_text().splitlines(keepends=True)
    row = json.loads(lines[0])
    lines[0] = json.dumps({**row, "nats": row["nats"] + 1}) + "\n"
    (copy / "predictions.jsonl").write_text("".join(lines))
    assert any("predictions" in problem for problem in figure_problems(read_record(copy)))
