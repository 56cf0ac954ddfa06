"""Names that do not exist are answered with the nearest that does, missing packages with the command that adds them."""

from __future__ import annotations

import shlex
import sys
import tomllib
from pathlib import Path

import pytest

from oelm.errors import MissingExtraError, install_command, suggest

KNOWN = ["GPT-01", "GPT-02", "SST-2-01", "laptop"]


@pytest.mark.parametrize(
    ("name", "near"),
    [("GPT2", "GPT-02"), ("sst201", "SST-2-01"), ("Labtop", "laptop"), ("lapto", "laptop")],
)
def test_the_nearest_name_is_suggested_whatever_its_case_signs_and_zeros(name: str, near: str) -> None:
    assert suggest(name, KNOWN) == f" (did you mean '{near}'?)"


@pytest.mark.parametrize("name", ["", "xyz", "bert"])
def test_nothing_is_suggested_where_nothing_is_near(name: str) -> None:
    assert suggest(name, KNOWN) == "" == suggest(name, [])


def test_every_extra_is_installed_by_its_packages_into_this_very_python() -> None:
    # Neither a wheel nor a checkout can be installed as 'oelm[...]': no registry has it, or another of that name.
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
    for extra, packages in project["optional-dependencies"].items():
        command = shlex.split(install_command(extra))
        assert command[:4] == [sys.executable, "-m", "pip", "install"]
        wanted = {package.lower() for package in packages if not package.startswith("oelm[")}
        assert wanted <= set(command[4:]) and not [part for part in command if part.startswith("oelm")], extra


def test_a_missing_package_is_named_with_the_command() -> None:
    told = str(MissingExtraError("transformers", "hf"))
    assert "package 'transformers'" in told and told.endswith(install_command("hf"))
    assert str(MissingExtraError("thing", "no-such-extra")).endswith("pip install thing")
