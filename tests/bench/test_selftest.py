"""`oelm doctor --selftest`: it runs, kills and compares real runs, and says so where a promise is not kept."""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from oelm.bench import machine
from oelm.cli.app import app
from oelm.errors import OelmError
from tests.conftest import run_here, tiny_config

CHECKS = ["trains", "killed, resumes bit-exactly", "frozen weights stay", "precision", "two processes", "speed"]


def rows(output: str) -> dict[str, tuple[str, str]]:
    """Return a Markdown table's rows, by the first cell."""
    found = re.findall(r"^\| (.*?) \| (.*?) \| (.*?) \|$", output, flags=re.MULTILINE)
    return {name: (result, text) for name, result, text in found}


@pytest.mark.slow
def test_every_promise_holds_here() -> None:
    result = CliRunner().invoke(app, ["doctor", "--selftest"])
    table = rows(result.output)
    assert result.exit_code == 0, result.output
    assert [name for name, (outcome, _) in table.items() if outcome == "holds"] == CHECKS
    assert re.fullmatch(r"killed after step 5\d, resumed from step 45: .* are equal", table[CHECKS[1]][1])
    assert {"oelm", "python, torch", "device"} < table.keys() and "cache" not in table


def test_runs_that_cannot_start_fail_by_name_and_the_command_with_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", shutil.which("false"))
    result = CliRunner().invoke(app, ["doctor", "--selftest"])
    table = rows(result.output)
    assert result.exit_code == 3 and "6 of 6 checks failed" in result.output
    assert {name: table[name][0] for name in CHECKS} == dict.fromkeys(CHECKS, "FAILS")
    assert table["trains"][1] == "exit code 1: it printed nothing"
    assert table[CHECKS[1]][1] == "the run ended with exit code 1 before it could be killed"


def test_what_is_frozen_must_stay_and_all_else_must_move(text_file: Path, tmp_path: Path) -> None:
    run_here(tiny_config(text_file, model__dropout=0.0), tmp_path / "killed")
    assert machine._stays_frozen(tmp_path) == (
        True,
        "4 tensors of Q and K are as drawn, by sha256 and by value; all others moved",
    )
    shutil.rmtree(tmp_path / "killed")
    run_here(tiny_config(text_file, method="baseline"), tmp_path / "killed")
    with pytest.raises(OelmError, match="nothing is frozen"):
        machine._stays_frozen(tmp_path)
    shutil.rmtree(tmp_path / "killed")
    run_here(tiny_config(text_file, optim__lr=1e-30, optim__weight_decay=0.0), tmp_path / "killed")
    holds, found = machine._stays_frozen(tmp_path)
    assert not holds and "never trained: token_embedding.weight" in found


def test_a_run_without_a_step_is_no_reference(tmp_path: Path) -> None:
    with pytest.raises(OelmError, match="recorded no step"):
        machine._losses(tmp_path)
