"""Nothing that a folder, a file or an option is called becomes a command in a script that SLURM runs."""

from __future__ import annotations

import os
import shlex
import subprocess
from pathlib import Path

import pytest
from typer.testing import CliRunner

from oelm.cli.app import app
from oelm.errors import ConfigError
from oelm.experiments.slurm import ClusterConfig, runs_script, single_script
from tests.faults.queues import write_catalog

RUN = ("run", "mine", "--budget", "smoke", "--slurm", "--dry-run")
EVIL = "x\ntouch PWNED #"
# A line's end, a return, an escape of the terminal, a delete, Unicode's own ends of line, a byte that is no text.
CONTROLS = ["\n", "\r", "\t", "\x1b", "\x7f", "\x85", "\u2028", "\u2029", "\udcff"]


def refused(*arguments: str) -> str:
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2, result.output
    assert "Traceback" not in result.output
    return " ".join(result.output.split())


def scripts_under(folder: Path) -> list[str]:
    return [path.name for path in folder.rglob("*.sbatch")]


def test_a_working_folder_with_a_line_end_in_its_name_is_refused(
    text_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = write_catalog(tmp_path / EVIL, text_file)
    monkeypatch.chdir(place)
    said = refused(*RUN)
    assert "the working folder" in said and "control character" in said and r"\n" in said
    assert not scripts_under(tmp_path)


@pytest.mark.parametrize("option", ["--out", "--catalog", "--set"])
def test_an_option_with_a_line_end_in_it_is_refused(
    option: str, text_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = write_catalog(tmp_path / "place", text_file)
    monkeypatch.chdir(place)
    value = {"--out": EVIL, "--catalog": f"{EVIL}.yaml", "--set": f"name={EVIL}"}[option]
    if option == "--catalog":
        (place / "experiments.yaml").rename(place / value)
    said = refused(*RUN, option, value)
    assert option == "--set" or "control character" in said
    assert not scripts_under(tmp_path)


@pytest.mark.parametrize("control", CONTROLS, ids=ascii)
def test_every_control_character_is_refused_wherever_it_would_reach_a_script(control: str, tmp_path: Path) -> None:
    config, plain = ClusterConfig(), tmp_path / "logs"
    for folder, arguments in ((tmp_path / f"a{control}b", ["report"]), (plain, ["report", f"--out=a{control}b"])):
        with pytest.raises(ConfigError, match="control character"):
            single_script("report", "Reports.", arguments, config, folder=folder)
    with pytest.raises(ConfigError, match="control character"):
        runs_script([], [f"--out=a{control}b"], config, folder=plain)
    with pytest.raises(ConfigError, match="control character"):
        runs_script([], [], config, folder=tmp_path / f"a{control}b")


HARMLESS = [
    "a b",
    "a;touch PWNED",
    "$(touch PWNED)",
    "`touch PWNED`",
    "a'b\"c",
    "#PWNED",
    "&& touch PWNED",
    "..\\n",
    "\u4e2d\u6587",
]


@pytest.mark.parametrize("name", HARMLESS, ids=ascii)
def test_other_odd_names_reach_the_command_as_they_are_and_run_nothing(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / name)
    text = single_script("report", "Reports.", ["report", f"--out={name}"], ClusterConfig(), folder=tmp_path / name)
    *_, command = text.strip().splitlines()
    told = tmp_path / "told.sbatch"
    told.write_text(text.replace(command, "printf '%s\\n' " + shlex.join(shlex.split(command)[-1:])), encoding="utf-8")
    done = subprocess.run(["/bin/bash", str(told)], capture_output=True, text=True, env={**os.environ, "LC_ALL": "C.UTF-8"})
    assert done.returncode == 0 and done.stdout == f"--out={name}\n"
    assert not list(tmp_path.rglob("PWNED"))
