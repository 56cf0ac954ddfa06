"""Timings are read back as they were written, one file each, and what is no timing is passed over."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from oelm.bench.speed import FOLDER, TimedShape, TimingRecord, read_timings, write_timing

# As `oelm bench` wrote it before shapes were fields.
OLD: dict[str, Any] = {
    "first": "A baseline",
    "second": "B oelm_freeze",
    "shape": "6 layers, 512 wide, dropout 0.1, batch 8 x 512",
    "value": 1.01,
    "low": 0.99,
    "high": 1.03,
    "bound": 1.023,
    "rounds": 10,
    "first_step_s": 12.9,
    "second_step_s": 12.8,
    "first_peak_bytes": 4_400_000_000,
    "second_peak_bytes": 4_300_000_000,
}
MEDIUM: dict[str, Any] = {
    "num_layers": 6,
    "model_dim": 512,
    "num_heads": 8,
    "ff_dim": 2048,
    "seq_len": 512,
    "vocab_size": 50257,
    "batch_size": 8,
    "dropout": 0.1,
}


def timing(**changes: Any) -> TimingRecord:
    facts = OLD | {"first": "baseline", "second": "oelm_freeze", "shape": TimedShape(**MEDIUM)}
    return TimingRecord(**(facts | changes))


def test_a_timing_is_read_back_as_it_was_written(tmp_path: Path) -> None:
    path = write_timing(tmp_path, timing())
    assert path.parent == tmp_path / "bench" and read_timings(tmp_path) == [timing()]


def test_a_repeated_timing_replaces_its_forerunner(tmp_path: Path) -> None:
    assert write_timing(tmp_path, timing(value=1.5)) == write_timing(tmp_path, timing(value=1.25))
    assert [found.value for found in read_timings(tmp_path)] == [1.25]


@pytest.mark.parametrize(
    "other",
    [
        {"first": "oelm_random"},
        {"second": "oelm-freeze"},
        {"first": "baseline-oelm", "second": "freeze"},
        {"shape": TimedShape(**(MEDIUM | {"seq_len": 51}))},
        {"shape": TimedShape(**(MEDIUM | {"vocab_size": 2048}))},
        {"shape": TimedShape(**(MEDIUM | {"short_conv": 3}))},
        {"first": "a" * 150},
        {"first": "a" * 150, "shape": TimedShape(**(MEDIUM | {"num_layers": 2}))},
    ],
)
def test_a_timing_of_something_else_replaces_nothing(tmp_path: Path, other: dict[str, Any]) -> None:
    both = [timing(), timing(**other), timing(**other, second="third") if "second" not in other else timing(second="third")]
    for record in both:
        write_timing(tmp_path, record)
    assert {(found.first, found.second, found.shape) for found in read_timings(tmp_path)} == {
        (record.first, record.second, record.shape) for record in both
    }


@pytest.mark.parametrize("name", ["../../outside", "/etc/passwd", "..", "", "\x1b[31m", "\u7ecf\u7eb8", "con", "a\nb"])
def test_no_name_leaves_the_folder(tmp_path: Path, name: str) -> None:
    path = write_timing(tmp_path / "root", timing(first=name, second=name))
    assert path.resolve().parent == (tmp_path / "root" / "bench").resolve() and path.name.isascii() and path.name.isprintable()
    assert [found.first for found in read_timings(tmp_path / "root")] == [name]


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"{}", b"\xff", b'{"value": NaN}'])
def test_what_is_no_timing_is_passed_over(tmp_path: Path, content: bytes) -> None:
    write_timing(tmp_path, timing())
    (tmp_path / "bench" / "other.json").write_bytes(content)
    (tmp_path / "bench" / "folder.json").mkdir()
    assert read_timings(tmp_path) == [timing()]


@pytest.mark.parametrize(
    ("sentence", "more"),
    [
        ("6 layers, 512 wide, dropout 0.1, batch 8 x 512", {}),
        ("6 layers, 512 wide, dropout 0.1, short convolution of 3, batch 8 x 512", {"short_conv": 3}),
    ],
)
def test_the_sentence_of_an_old_record_is_read_as_fields(tmp_path: Path, sentence: str, more: dict[str, Any]) -> None:
    (tmp_path / FOLDER).mkdir()
    (tmp_path / FOLDER / "old.json").write_text(json.dumps(OLD | {"shape": sentence}))
    (found,) = read_timings(tmp_path)
    assert found.shape == TimedShape(num_layers=6, model_dim=512, dropout=0.1, batch_size=8, seq_len=512, **more)
    assert found.shape.vocab_size is None and (found.first, found.first_stored) == ("A baseline", None)


@pytest.mark.parametrize("shape", ["", "6 layers", "a shape of another kind", {"num_layers": 2}, 6, None])
def test_a_record_without_a_shape_is_no_timing(tmp_path: Path, shape: Any) -> None:
    with pytest.raises(ValidationError):
        TimingRecord(**(OLD | {"shape": shape}))


def test_the_file_holds_numbers_and_no_sentence(tmp_path: Path) -> None:
    kept = json.loads(write_timing(tmp_path, timing(first_stored=44_896_768)).read_text())
    assert (
        kept["shape"] == MEDIUM | {"short_conv": 0, "qk_dim": None, "is_classifier": False}
        and kept["first_stored"] == 44_896_768
    )


def test_nothing_recorded_is_nothing_read(tmp_path: Path) -> None:
    assert read_timings(tmp_path) == []


@pytest.mark.parametrize("value", [float("nan"), float("inf"), "1.0", None])
def test_a_timing_holds_numbers_that_were_measured(value: Any) -> None:
    with pytest.raises(ValidationError):
        timing(value=value)
