"""`oelm archive` as a user types it."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from oelm.cli.archive import archive
from tests.experiments.archived import FIRST, SECOND, in_child, write_run

app = typer.Typer()
app.command()(archive)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    write_run(tmp_path / "outputs", FIRST)
    write_run(tmp_path / "outputs", SECOND)
    return tmp_path / "outputs"


def oelm_archive(*arguments: object, code: int = 0) -> str:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == code, result.output
    assert "Traceback" not in result.output
    return result.output


def test_the_command_makes_checks_and_imports(root: Path, tmp_path: Path) -> None:
    target, there = tmp_path / "a.tar.gz", tmp_path / "there"
    said = oelm_archive("GPT-02", "--out", root, "--to", target, "--weights")
    digest = hashlib.sha256(target.read_bytes()).hexdigest()
    assert f"{SECOND}: done, best_ppl 5.27, 17 files" in said and "1 run, 17 files" in said and digest in said
    checked = oelm_archive("--check", target)
    assert "every byte is as listed" in checked and digest in checked
    assert f"1 run added to {there}, 0 were there already" in oelm_archive("--import", target, "--out", there)
    assert f"0 runs added to {there}, 1 were there already" in oelm_archive("--import", target, "--out", there)


@pytest.mark.parametrize(
    "arguments", [[], ["--to", "a", "--check", "b"], ["GPT-01", "--check", "a"], ["--weights", "--import", "a"]], ids=" ".join
)
def test_the_command_does_one_thing_at_a_time(arguments: list[str]) -> None:
    assert "error: " in oelm_archive(*arguments, code=2)


def test_a_refusal_has_its_exit_code_and_one_paragraph(tmp_path: Path) -> None:
    assert "no such file" in oelm_archive("--check", tmp_path / "none.tar.gz", code=3)


def test_archives_do_not_wait_for_torch(root: Path, tmp_path: Path) -> None:
    program = (
        "import typer; from oelm.cli.archive import archive; app = typer.Typer(); app.command()(archive)\n"
        "app(['--out', str(a[0]), '--to', str(a[1])], standalone_mode=False)\n"
        "app(['--out', str(a[2]), '--import', str(a[1])], standalone_mode=False)\n"
        "sys.exit('torch' in sys.modules)"
    )
    child = in_child(program, root, tmp_path / "a.tar.gz", tmp_path / "there")
    assert child.returncode == 0, child.stderr
