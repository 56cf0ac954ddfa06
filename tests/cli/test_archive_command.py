"""`oelm archive` as a user types it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from oelm.cli.app import app
from tests.report.synthetic import Fate, write_run, write_sweep


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for experiment in ("GPT-01", "GPT-02"):
        write_run(tmp_path / "outputs", experiment, 0, Fate(ppl=20.0))
        write_sweep(tmp_path / "outputs", experiment, 0)
    return tmp_path / "outputs"


def oelm_archive(*arguments: object, code: int = 0) -> str:
    result = CliRunner().invoke(app, ["archive", *(str(argument) for argument in arguments)])
    assert result.exit_code == code, result.output
    assert "Traceback" not in result.output
    return " ".join(result.output.split())


def test_the_command_writes_adds_and_checks(root: Path, tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    assert f"1 run written to {folder}, 0 already there" in oelm_archive(folder, "gpt-02", "--out", root)
    assert f"1 run written to {folder}, 1 already there" in oelm_archive(folder, "--out", root)
    assert "2 runs, 18 files" in (said := oelm_archive(folder, "--check")) and "every file is as listed" in said
    (folder / "GPT-02" / "laptop" / "default" / "seed-0" / "audit.json").unlink()
    said = oelm_archive(folder, "--check", code=3)
    assert "missing: GPT-02/laptop/default/seed-0/audit.json" in said
    assert f"error: {folder}: 1 difference from its inventory.json" in said


def test_the_other_commands_read_the_folder_as_out(root: Path, tmp_path: Path) -> None:
    # A name as long as that of the root: tables are as wide as their paths.
    folder = tmp_path / "records"
    oelm_archive(folder, "--out", root)
    place = "laptop/default/seed-0"
    for command in ("status --out {0}", "report --out {0}", f"compare {{0}}/GPT-01/{place} {{0}}/GPT-02/{place}"):
        here, there = (CliRunner().invoke(app, command.format(out).split()) for out in (root, folder))
        assert there.exit_code == 0 and here.output.count("\n") > 2
        assert there.output.replace("records", "outputs") == here.output


@pytest.mark.parametrize("arguments", [["x", "GPT-01", "--check"], ["x", "--check", "--weights"], []], ids=" ".join)
def test_a_check_takes_nothing_but_the_folder(arguments: list[str]) -> None:
    oelm_archive(*arguments, code=2)


def test_a_refusal_is_one_paragraph_and_says_what_is_missing(tmp_path: Path) -> None:
    assert "no inventory.json to check it by" in oelm_archive(tmp_path / "none", "--check", code=3)
    assert f"No runs under {tmp_path / 'none'}" in oelm_archive(tmp_path / "x", "--out", tmp_path / "none", code=2)
    assert not (tmp_path / "x").exists()


def test_archiving_does_not_wait_for_torch(root: Path, tmp_path: Path) -> None:
    program = (
        "import sys; from oelm.cli.app import app\n"
        "app(['archive', sys.argv[1], '--out', sys.argv[2]], standalone_mode=False)\n"
        "app(['archive', sys.argv[1], '--check'], standalone_mode=False)\n"
        "sys.exit('torch' in sys.modules)"
    )
    command = [sys.executable, "-c", program, str(tmp_path / "folder"), str(root)]
    child = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert child.returncode == 0, child.stderr


def test_a_file_in_the_place_of_a_folder_is_refused_first(root: Path, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").touch()
    assert "FOLDER" in (said := oelm_archive(tmp_path / "notes.txt", "--out", root, code=2)) and "notes.txt is a file" in said
    assert "notes.txt: is a file" in oelm_archive(tmp_path / "folder", "--out", tmp_path / "notes.txt", code=2)
