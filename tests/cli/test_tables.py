"""Every table that a command prints fits 80 columns: no broken word, no column left out."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from oelm.cli import bench, catalog, data, demo, report, run, shell, use
from oelm.cli.app import app
from oelm.text import breadth, column_bands, shortened
from tests.conftest import run_here, tiny_config
from tests.experiments.recorded import record
from tests.report.synthetic import write_arm, write_sweep

ROOM = 80
CELLS = st.lists(
    st.sampled_from(["", "1.05x", "word", "two words", "+16.7% [+15.1, +18.3]", "a/b/c" * 9, "字" * 9]), min_size=3
)


class Printed(NamedTuple):
    """A table as a command gave it, and as it was printed."""

    headings: Sequence[str]
    rows: Sequence[Sequence[str]]
    shown: str


def tables_of(arguments: Sequence[object], monkeypatch: pytest.MonkeyPatch) -> list[Printed]:
    """Return every table that a command prints at 80 columns."""
    printed: list[Printed] = []
    real = shell.print_table

    def kept(headings: Sequence[str], rows: Iterable[Sequence[str]], **looks: Any) -> None:
        cells = [tuple(row) for row in rows]
        with shell.out.capture() as captured:
            real(headings, cells, **looks)
        printed.append(Printed(headings, cells, captured.get()))

    for module in (bench, catalog, data, demo, report, run, use):
        monkeypatch.setattr(module, "print_table", kept)
    result = CliRunner(env={"COLUMNS": str(ROOM)}).invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == 0, result.output
    return printed


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs under a long path, with names as long as the catalog's."""
    root = tmp_path_factory.mktemp("a-folder-with-a-long-name") / "and-another-one-inside-of-it" / "outputs"
    base = [20.0, 20.2, 19.9, 20.1, 20.3]
    for baseline, arms, text in (
        ("GPT-01", ("GPT-02", "GPT-02-lowrank", "GPT-02-last-half"), "tinystories"),
        ("GPT-08", ("GPT-09", "GPT-09-lowrank"), "stdlib-3.11.7"),
    ):
        write_arm(root, baseline, base, data=text)
        for number, arm in enumerate(arms):
            luck = (1.001, 0.999, 1.002, 0.998, 1.0)
            write_arm(root, arm, [(1.02 + number / 20) * each * by for each, by in zip(base, luck, strict=True)], data=text)
    write_sweep(root, "GPT-02", 1)
    record(root, "failed", experiment="GPT-02-conv-uniform", variant="learning-rate-0.00012345-abcdef01", seed=11)
    record(
        root,
        "running",
        experiment="GPT-02-conv-uniform",
        variant="learning-rate-0.00012345-abcdef01",
        seed=12,
        host="x",
        eta_s=3725.0,
    )
    return root


GRID = "schedule.final_fraction=0.01,0.02"
ARMS = ("baseline", "oelm_freeze", "oelm_last_half")
COMMANDS: dict[str, tuple[str, ...]] = {
    "report": ("report", "--out", "ROOT"),
    "report-zh": ("report", "--out", "ROOT", "--lang", "zh"),
    "compare": ("compare", "ROOT/GPT-01/laptop/default", "ROOT/GPT-02/laptop/default", "ROOT/GPT-02-lowrank/laptop/default"),
    "compare-far": ("compare", "ROOT/GPT-01/laptop/default/seed-0", "ROOT/GPT-02/laptop/default/seed-1"),
    "plan": ("run", "GPT-02", "GPT-09-lowrank", "--out", "ROOT", "--dry-run", "--budget", "smoke"),
    "sweep": (
        "sweep",
        "GPT-02",
        "--out",
        "ROOT",
        "--dry-run",
        "--budget",
        "smoke",
        "--grid",
        "schedule.final_fraction=0.01,0.02",
    ),
    "show-on": ("show", "GPT-02-conv-axes-lowrank", "--on", "8xA100"),
    "bench": (
        "bench",
        "baseline",
        "oelm_freeze",
        "oelm_last_half",
        "--shape",
        "tiny",
        "--rounds",
        "3",
        "--no-memory",
        "--out",
        ".",
    ),
    "generate": ("bench", "--generate", "--shape", "tiny", "--rounds", "3", "--tokens", "5"),
    "doctor": ("doctor", "--seconds", "0.01"),
}


def check(tables: list[Printed]) -> None:
    assert tables
    for headings, rows, shown in tables:
        assert max(map(breadth, shown.splitlines())) <= ROOM, shown
        words = {word for text in [*headings, *(cell for row in rows for cell in row)] for word in re.findall(r"[!-~]+", text)}
        missing = {word for word in words if word not in shown}
        # Long paths lose their beginning, and nothing else does.
        assert all("/" in word and word[-12:] in shown for word in missing), (missing, shown)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_table_of_a_command_fits_80_columns(
    name: str, study: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    check(tables_of([part.replace("ROOT", str(study)) for part in COMMANDS[name]], monkeypatch))


def test_every_table_of_a_run_and_of_its_data_fits(text_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OELM_CACHE", str(tmp_path / "cache"))
    run_here(tiny_config(text_file, method="oelm_lowrank", steps=3, eval_every=3, save_every=3), tmp_path / "run")
    check(tables_of(["inspect", tmp_path / "run", "--heads"], monkeypatch))
    prepared = ["data", "prepare", "--text", text_file, "--tokenizer", "bpe:300", "--out", tmp_path / "set"]
    check(tables_of(prepared, monkeypatch))
    check(tables_of(["data", "info", tmp_path / "set", "--counters"], monkeypatch))


@pytest.mark.parametrize("columns", [60, 80])
def test_the_table_of_runs_fits_and_says_once_what_is_the_same(study: Path, columns: int) -> None:
    shown = CliRunner(env={"COLUMNS": str(columns)}).invoke(app, ["status", "--out", str(study)]).output
    lines = re.split(r"\n\n\d+ runs:", shown)[0].splitlines()
    assert max(map(len, lines)) <= columns
    headings = "experiment budget variant seed state step best gap ETA loss s/step device".split()
    assert set(headings) <= set(" ".join(lines).split())


@given(columns=st.lists(CELLS, min_size=1, max_size=12), room=st.integers(30, 120), whole=st.sets(st.integers(0, 11)))
def test_bands_hold_every_column_and_fit(columns: list[list[str]], room: int, whole: set[int]) -> None:
    bands = column_bands(columns, room, whole=whole)
    assert {number for band in bands for number in band} == set(range(len(columns)))
    for band in bands:
        assert len(band) <= 2 or sum(band.values()) + 2 * (len(band) - 1) <= room
        for number, width in band.items():
            assert all(
                breadth(word) <= width for cell in columns[number] for word in shortened(cell, width).split() if cell.isascii()
            )


def test_a_path_loses_its_beginning_and_a_short_one_nothing() -> None:
    assert shortened("outputs/GPT-02/laptop/default/seed-0", 16) == "\u2026/default/seed-0"
    assert shortened("a/b and c/d", 5) == "a/b and c/d"
