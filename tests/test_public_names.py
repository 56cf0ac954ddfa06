"""The names on the first page resolve, and asking for them or for help does not wait for torch."""

from __future__ import annotations

import subprocess
import sys

import pytest

import oelm
from tests.cases import case

HEAVY = ("torch", "numpy", "tokenizers", "transformers")


def modules_after(program: str) -> set[str]:
    """Return the top-level modules that a fresh Python holds after running a program."""
    listing = "\nimport sys; print('\\n' + ' '.join(sorted({name.split('.')[0] for name in sys.modules})))"
    child = subprocess.run([sys.executable, "-c", program + listing], capture_output=True, text=True, check=True)
    return set(child.stdout.splitlines()[-1].split())


def test_every_public_name_resolves() -> None:
    for name in oelm.__all__:
        with case(name):
            assert getattr(oelm, name) is not None


def test_a_public_name_is_the_thing_of_that_name() -> None:
    for name in oelm.__all__:
        with case(name):
            assert getattr(getattr(oelm, name), "__name__", name) == name


def test_dir_shows_the_public_names() -> None:
    assert set(dir(oelm)) == set(oelm.__all__)


def test_an_unknown_name_is_an_attribute_error_that_names_it() -> None:
    with pytest.raises(AttributeError, match="'frieze'"):
        oelm.frieze  # noqa: B018


def test_importing_oelm_imports_nothing_heavy() -> None:
    assert not modules_after("import oelm").intersection(HEAVY)


HELP = f"""
import sys, runpy
for line in ("--version", "--help", "train --help", "demo --help"):
    sys.argv = ["oelm", *line.split()]
    try:
        runpy.run_module("oelm", run_name="__main__")
    except SystemExit as leaving:
        assert not leaving.code, line
    assert not sys.modules.keys() & {set(HEAVY)}, line
"""


def test_help_does_not_wait_for_torch() -> None:
    assert "oelm" in modules_after(HELP)
