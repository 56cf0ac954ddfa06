"""Commands that only read load neither torch nor transformers, and training does not load torch's compiler."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.report.synthetic import write_sweep, write_tuned

HEAVY = ("torch", "transformers")
NUMBERS = ("numpy", "scipy", "jinja2", "altair")
COMPILER = ("torch._dynamo", "sympy", "transformers")
COMMAND = "from oelm.cli.app import app; assert not app({arguments!r}, standalone_mode=False)"
# What answers at once, before what reads runs and draws: in one process, whatever a step loads stays loaded.
AT_ONCE = (["--version"], ["list"], ["status", "--out", "."])
READING = (
    ["show", "GPT-02", "--budget", "paper"],
    ["show", "MNLI-02"],
    ["report", "--out", "."],
    ["report", "--out", ".", "--html", "report.html"],
    ["compare", *(f"{arm}/laptop/tuned-0123abcd/seed-0" for arm in ("GPT-01", "GPT-02"))],
    ["archive", "kept", "--out", "."],
)
NOUNS = ("import oelm; oelm.load_runs('.')", "import oelm; oelm.Method, oelm.GPTConfig, oelm.PRESETS")


def command(arguments: list[str]) -> str:
    return COMMAND.format(arguments=arguments)


def loaded_by(steps: Sequence[tuple[str, tuple[str, ...]]], folder: Path) -> dict[str, list[str]]:
    """Return, for each step of code in one fresh process, which of its names are loaded after it."""
    lines = ["import json, sys", "loaded = {}"]
    for code, names in steps:
        lines += [code, f"loaded[{code!r}] = [name for name in {names!r} if name in sys.modules]"]
    told = folder / "loaded.json"
    lines += [f"open({str(told)!r}, 'w').write(json.dumps(loaded))"]
    result = subprocess.run(
        [sys.executable, "-c", "\n".join(lines)],
        capture_output=True,
        text=True,
        cwd=folder,
        env={**os.environ, "COLUMNS": "200"},
    )
    assert result.returncode == 0, result.stderr
    found: dict[str, list[str]] = json.loads(told.read_text())
    return found


def test_a_command_that_only_reads_loads_no_torch_and_what_answers_at_once_no_numbers(tmp_path: Path) -> None:
    # Two arms that were swept, and runs with the best of each.
    for experiment, rate in (("GPT-01", 1e-3), ("GPT-02", 3e-3)):
        write_sweep(tmp_path, experiment, 1)
        write_tuned(tmp_path, experiment, rate)
    at_once = [(command(arguments), HEAVY + NUMBERS) for arguments in AT_ONCE]
    steps = [*at_once, *((code, HEAVY) for code in (*NOUNS, *map(command, READING)))]
    found = loaded_by(steps, tmp_path)
    assert len(found) == len(steps) and not any(found.values()), found
    assert (tmp_path / "report.html").is_file() and (tmp_path / "kept").exists()


def test_training_loads_no_compiler_and_no_transformers(text_file: Path, tmp_path: Path) -> None:
    """The compiler nearly doubles the time that a run takes to start."""
    arguments = ["train", "--budget", "smoke", "--text", str(text_file), "--tokenizer", "bpe:300", "--steps", "2"]
    arguments += ["--method", "oelm_lowrank"]
    steps = [(command([*arguments, "--out", name, "--set", f"optim.name={name}"]), COMPILER) for name in ("adamw", "muon")]
    found = loaded_by(steps, tmp_path)
    assert len(found) == len(steps) and not any(found.values()), found
    assert all((tmp_path / name / "latest.json").is_file() for name in ("adamw", "muon"))
