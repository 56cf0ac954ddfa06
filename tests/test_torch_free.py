"""Commands that only read load neither torch nor transformers, and training does not load torch's compiler."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.report.synthetic import write_sweep, write_tuned

HEAVY = ("torch", "transformers")
COMMAND = """
from oelm.cli.app import app
assert not app({arguments!r}, standalone_mode=False)
"""
NUMPY = ("numpy", "scipy", "jinja2", "altair")


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two arms that were swept, and runs with the best of each."""
    root = tmp_path_factory.mktemp("study")
    for experiment, rate in (("GPT-01", 1e-3), ("GPT-02", 3e-3)):
        write_sweep(root, experiment, 1)
        write_tuned(root, experiment, rate)
    return root


def loaded_by(code: str, folder: Path, names: tuple[str, ...] = HEAVY) -> list[str]:
    """Return which of these modules a fresh process has loaded after some code."""
    told = f"import sys\n{code}\nprint('loaded:', *[name for name in {names!r} if name in sys.modules])"
    result = subprocess.run(
        [sys.executable, "-c", told], capture_output=True, text=True, cwd=folder, env={**os.environ, "COLUMNS": "200"}
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.splitlines()[-1].split()[1:]


@pytest.mark.parametrize(
    "arguments",
    [
        ["--version"],
        ["list"],
        ["show", "GPT-02", "--budget", "paper"],
        ["show", "MNLI-02"],
        ["status", "--out", "."],
        ["report", "--out", "."],
        ["report", "--out", ".", "--html", "report.html"],
        ["compare", *(f"{arm}/laptop/tuned-0123abcd/seed-0" for arm in ("GPT-01", "GPT-02"))],
        ["archive", "kept", "--out", "."],
    ],
    ids=" ".join,
)
def test_a_command_that_only_reads_loads_no_torch(arguments: list[str], study: Path) -> None:
    assert loaded_by(COMMAND.format(arguments=arguments), study) == []


@pytest.mark.parametrize("arguments", [["list"], ["status", "--out", "."]], ids=" ".join)
def test_what_answers_at_once_loads_no_numbers_and_no_charts(arguments: list[str], study: Path) -> None:
    assert loaded_by(COMMAND.format(arguments=arguments), study, NUMPY) == []


@pytest.mark.parametrize("code", ["oelm.load_runs('.')", "oelm.Method, oelm.GPTConfig, oelm.PRESETS"])
def test_nouns_and_records_load_no_torch(code: str, study: Path) -> None:
    assert loaded_by(f"import oelm\n{code}", study) == []


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_training_loads_no_compiler_and_no_transformers(optimizer: str, tmp_path: Path) -> None:
    """The compiler nearly doubles the time that a run takes to start."""
    arguments = ["train", "--budget", "smoke", "--method", "oelm_lowrank", "--out", "run", "--set", f"optim.name={optimizer}"]
    assert loaded_by(COMMAND.format(arguments=arguments), tmp_path, ("torch._dynamo", "sympy", "transformers")) == []
    assert (tmp_path / "run" / "latest.json").is_file()
