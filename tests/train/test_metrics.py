"""Metrics are whole lines: a torn tail is dropped, and a run that goes on repeats nothing and skips nothing."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from oelm.train.metrics import Metrics, read_metrics

ROWS: list[dict[str, Any]] = [
    {"step": 1, "loss": 3.25, "lr": 1e-3},
    {"step": 2, "loss": 0.1, "lr": 1e-3},
    {"step": 2, "val_loss": 3.0},
    {"step": 3, "loss": 2.5, "lr": 1e-3},
    {"step": 4, "loss": 1 / 3, "lr": 1e-3},
    {"step": 4, "val_loss": 2.0},
    {"step": 5, "loss": 1.5, "lr": 1e-3},
]


def written(path: Path, rows: list[dict[str, Any]]) -> Metrics:
    metrics = Metrics(path)
    for row in rows:
        metrics.write(**row)
    return metrics


def test_rows_come_back_as_written(tmp_path: Path) -> None:
    written(tmp_path / "metrics.jsonl", ROWS).close()
    assert read_metrics(tmp_path / "metrics.jsonl") == ROWS


def test_rows_are_there_for_a_reader_while_the_writer_goes_on(tmp_path: Path) -> None:
    metrics = written(tmp_path / "metrics.jsonl", ROWS[:2])
    assert read_metrics(tmp_path / "metrics.jsonl") == ROWS[:2]
    metrics.write(**ROWS[2])
    assert read_metrics(tmp_path / "metrics.jsonl") == ROWS[:3]
    metrics.close()


def test_no_file_is_no_rows(tmp_path: Path) -> None:
    assert read_metrics(tmp_path / "metrics.jsonl") == []


def test_a_tail_torn_at_any_byte_costs_only_its_own_row(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    last = {"step": 8, "loss": 1.0, "note": "\u00fc\U0001f426"}
    written(path, [*ROWS, last]).close()
    whole = path.read_bytes()
    end_of_others = whole[:-1].rindex(b"\n") + 1
    for cut in range(end_of_others, len(whole)):
        path.write_bytes(whole[:cut])
        assert read_metrics(path) == ROWS, cut


def test_text_in_a_row_may_hold_any_kind_of_line_end(tmp_path: Path) -> None:
    row = {"step": 1, "note": "a\nb\r\nc\x0bd\x85e\u2028f\u2029g"}
    written(tmp_path / "metrics.jsonl", [row, *ROWS]).close()
    assert read_metrics(tmp_path / "metrics.jsonl") == [row, *ROWS]


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_number_that_is_none_is_never_written(tmp_path: Path, value: float) -> None:
    metrics = written(tmp_path / "metrics.jsonl", ROWS)
    with pytest.raises(ValueError):
        metrics.write(step=6, loss=value)
    metrics.close()
    assert read_metrics(tmp_path / "metrics.jsonl") == ROWS


@pytest.mark.parametrize(
    ("step", "evaluated_step", "kept"),
    [
        (0, 0, []),
        (1, 0, [0]),
        (2, 0, [0, 1]),
        (2, 2, [0, 1, 2]),
        (3, 2, [0, 1, 2, 3]),
        # Saved at step 4 by a stop, before its evaluation: that one will be made again.
        (4, 2, [0, 1, 2, 3, 4]),
        (4, 4, [0, 1, 2, 3, 4, 5]),
        (5, 4, [0, 1, 2, 3, 4, 5, 6]),
        (99, 99, [0, 1, 2, 3, 4, 5, 6]),
    ],
)
def test_rewinding_keeps_what_the_state_has_seen(tmp_path: Path, step: int, evaluated_step: int, kept: list[int]) -> None:
    metrics = written(tmp_path / "metrics.jsonl", ROWS)
    metrics.rewind(step=step, evaluated_step=evaluated_step)
    assert read_metrics(tmp_path / "metrics.jsonl") == [ROWS[index] for index in kept]


def test_rewinding_keeps_every_bit_of_the_numbers(tmp_path: Path) -> None:
    metrics = written(tmp_path / "metrics.jsonl", ROWS)
    before = (tmp_path / "metrics.jsonl").read_bytes()
    metrics.rewind(step=5, evaluated_step=4)
    assert (tmp_path / "metrics.jsonl").read_bytes() == before


def test_writing_goes_on_after_a_rewind_without_gap_or_repeat(tmp_path: Path) -> None:
    metrics = written(tmp_path / "metrics.jsonl", ROWS)
    metrics.rewind(step=2, evaluated_step=2)
    for row in ROWS[3:]:
        metrics.write(**row)
    metrics.close()
    assert read_metrics(tmp_path / "metrics.jsonl") == ROWS


def test_writing_goes_on_after_a_torn_tail_was_rewound(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    written(path, ROWS).close()
    path.write_bytes(path.read_bytes()[:-7])
    metrics = Metrics(path)
    metrics.rewind(step=4, evaluated_step=4)
    metrics.write(**ROWS[6])
    metrics.close()
    assert read_metrics(path) == ROWS


def test_rewinding_where_nothing_was_written_gives_an_empty_file(tmp_path: Path) -> None:
    Metrics(tmp_path / "metrics.jsonl").rewind(step=0, evaluated_step=0)
    assert read_metrics(tmp_path / "metrics.jsonl") == []
