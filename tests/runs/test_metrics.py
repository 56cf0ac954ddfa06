"""Metrics are whole lines: only a torn tail is dropped, and a run that resumes repeats nothing and skips nothing."""

from __future__ import annotations

import logging
import math
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from oelm.errors import DataError, RunDirLostError
from oelm.runs.metrics import Metrics, read_metrics
from oelm.runs.rundir import RunDir
from tests.cases import case

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


def test_rewinding_keeps_what_the_state_has_seen(tmp_path: Path) -> None:
    cases: list[tuple[int, list[int], list[int]]] = [
        (0, [], []),
        (1, [], [0]),
        (2, [], [0, 1]),
        (2, [2], [0, 1, 2]),
        (3, [2], [0, 1, 2, 3]),
        # Saved at step 4 by a stop, before its evaluation: that one will be made again.
        (4, [2], [0, 1, 2, 3, 4]),
        (4, [2, 4], [0, 1, 2, 3, 4, 5]),
        (5, [2, 4], [0, 1, 2, 3, 4, 5, 6]),
    ]
    for step, evaluated, kept in cases:
        with case(step, evaluated, kept):
            (tmp_path / "metrics.jsonl").unlink(missing_ok=True)
            metrics = written(tmp_path / "metrics.jsonl", ROWS)
            metrics.rewind(step=step, evaluated=evaluated)
            metrics.close()
            assert read_metrics(tmp_path / "metrics.jsonl") == [ROWS[index] for index in kept]


def test_rewinding_keeps_every_bit_of_the_numbers(tmp_path: Path) -> None:
    metrics = written(tmp_path / "metrics.jsonl", ROWS)
    before = (tmp_path / "metrics.jsonl").read_bytes()
    metrics.rewind(step=5, evaluated=[2, 4])
    metrics.close()
    assert (tmp_path / "metrics.jsonl").read_bytes() == before


def test_writing_goes_on_after_a_rewind_without_gap_or_repeat(tmp_path: Path) -> None:
    metrics = written(tmp_path / "metrics.jsonl", ROWS)
    metrics.rewind(step=2, evaluated=[2])
    for row in ROWS[3:]:
        metrics.write(**row)
    metrics.close()
    assert read_metrics(tmp_path / "metrics.jsonl") == ROWS


def test_writing_goes_on_after_a_torn_tail_was_rewound(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    written(path, ROWS).close()
    path.write_bytes(path.read_bytes()[:-7])
    metrics = Metrics(path)
    metrics.rewind(step=4, evaluated=[2, 4])
    metrics.write(**ROWS[6])
    metrics.close()
    assert read_metrics(path) == ROWS


def test_rewinding_where_nothing_was_written_gives_an_empty_file(tmp_path: Path) -> None:
    metrics = Metrics(tmp_path / "metrics.jsonl")
    metrics.rewind(step=0, evaluated=[])
    metrics.close()
    assert read_metrics(tmp_path / "metrics.jsonl") == []


DAMAGED = ['{"step": 2, "lo', "5", "[1]", "null", '{"step":"12"}', '{"step": true}', '{"step": -1}', '{"loss": 1.0}']
DAMAGED += ['{"step": 2, "loss": "low"}', '{"step": 2, "loss": NaN}', '{"step": 2, "val_loss": 1e999}', "", "[" * 100_000]


def damage(path: Path, number: int, line: str) -> bytes:
    """Replace a line of a file, counted from 1; return its bytes."""
    lines = path.read_text().split("\n")
    lines[number - 1] = line
    path.write_text("\n".join(lines))
    return path.read_bytes()


def test_a_whole_line_that_is_no_row_is_refused_with_its_number(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    for line in DAMAGED:
        for number in (2, len(ROWS)):
            with case(line, number):
                path.unlink(missing_ok=True)
                written(path, ROWS).close()
                damage(path, number, line)
                with pytest.raises(DataError, match=rf"metrics.jsonl: line {number} "):
                    read_metrics(path)


def test_rewinding_refuses_to_cut_a_row_that_the_state_has_seen(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    for line in DAMAGED:
        with case(line):
            path.unlink(missing_ok=True)
            written(path, ROWS).close()
            damaged = damage(path, 2, line)
            with pytest.raises(DataError, match=r"metrics.jsonl: the row of step 2 is missing \(line 2 "):
                Metrics(path).rewind(step=4, evaluated=[2, 4])
            assert path.read_bytes() == damaged


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ([], "the rows of steps 1 to 4 are missing"),
        (ROWS[:1] + ROWS[2:], "the row of step 2 is missing"),
        (ROWS[:1] + ROWS[2:3] + ROWS[5:], "the rows of steps 2 to 4 are missing"),
        (ROWS[:2] + ROWS[3:], "the evaluation of step 2 is missing"),
        (ROWS[:2] + ROWS[1:], "the row of step 2 occurs 2 times"),
        (ROWS[:3] + ROWS[2:], "the evaluation of step 2 occurs 2 times"),
        ([ROWS[1], ROWS[0], *ROWS[2:]], "the rows are not in the order of their steps"),
    ],
)
def test_rewinding_refuses_rows_that_are_missing_or_repeated(tmp_path: Path, changed: list[dict[str, Any]], named: str) -> None:
    path = tmp_path / "metrics.jsonl"
    path.touch()
    written(path, changed).close()
    before = path.read_bytes()
    with pytest.raises(DataError, match=named):
        Metrics(path).rewind(step=4, evaluated=[2, 4])
    assert path.read_bytes() == before


def test_damage_in_rows_that_are_cut_anyway_is_repaired_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "metrics.jsonl"
    written(path, ROWS).close()
    damage(path, 5, '{"step": 4, "lo')
    metrics = Metrics(path)
    with caplog.at_level(logging.WARNING, logger="oelm"):
        metrics.rewind(step=3, evaluated=[2])
    metrics.close()
    assert read_metrics(path) == ROWS[:4]
    assert [record.levelname for record in caplog.records] == ["WARNING"] and "line 5 " in caplog.text


def test_a_file_that_is_deleted_under_the_writer_is_written_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "metrics.jsonl"
    metrics = written(path, ROWS[:3])
    path.unlink()
    metrics.write(**ROWS[3])
    assert read_metrics(path) == ROWS[:4] and "was deleted" in caplog.text
    path.unlink()
    metrics.sync()
    assert read_metrics(path) == ROWS[:4]
    metrics.write(**ROWS[4])
    metrics.close()
    assert read_metrics(path) == ROWS[:5]


def test_a_file_deleted_between_a_rewind_and_the_first_row_is_written_again(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    metrics = written(path, ROWS)
    metrics.rewind(step=4, evaluated=[2, 4])
    path.unlink()
    metrics.write(**ROWS[6])
    metrics.close()
    assert read_metrics(path) == ROWS


@pytest.mark.parametrize("size", [0, 10])
@pytest.mark.parametrize("is_sync", [True, False])
def test_a_file_that_is_cut_under_the_writer_stops_the_run_before_it_saves(tmp_path: Path, size: int, is_sync: bool) -> None:
    metrics = Metrics(tmp_path / "metrics.jsonl")
    metrics.rewind(step=0, evaluated=[])
    for step in (1, 2):
        metrics.write(step=step, loss=1.0)
    os.truncate(metrics.path, size)
    with pytest.raises(DataError, match=rf"metrics\.jsonl: has {size} bytes, and the run wrote \d+.*Restore the file"):
        if is_sync:
            metrics.sync()
        else:
            metrics.write(step=3, loss=1.0)
    assert metrics.path.stat().st_size == size
    metrics.close()


def test_a_file_that_another_took_the_place_of_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    metrics = written(path, ROWS[:3])
    path.rename(tmp_path / "moved.jsonl")
    path.write_text("somebody's\n")
    with pytest.raises(DataError, match="another file took its place"):
        metrics.write(**ROWS[3])
    assert path.read_text() == "somebody's\n"
    metrics.close()


@pytest.mark.parametrize("is_remade", [False, True])
def test_nothing_is_written_into_a_folder_that_is_no_longer_the_run_s(tmp_path: Path, is_remade: bool) -> None:
    folder = tmp_path / "run"
    with RunDir(folder) as held:
        metrics = Metrics(folder / "metrics.jsonl", guard=held.check_held)
        metrics.write(**ROWS[0])
        shutil.move(folder, tmp_path / "kept")
        if is_remade:
            folder.mkdir()
        with pytest.raises(RunDirLostError):
            metrics.write(**ROWS[1])
        assert not (folder / "metrics.jsonl").exists()
        metrics.close()
