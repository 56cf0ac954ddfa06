"""The names on the first page resolve, and asking for them or for help does not wait for torch."""

from __future__ import annotations

import subprocess
import sys

import pytest

import oelm

HEAVY = ("torch", "numpy", "tokenizers", "transformers")


def modules_after(program: str) -> set[str]:
    """Return the top-level modules that a fresh Python holds after running a program."""
    listing = "\nimport sys; print('\\n' + ' '.join(sorted({name.split('.')[0] for name in sys.modules})))"
    child = subprocess.run([sys.executable, "-c", program + listing], capture_output=True, text=True, check=True)
    return set(child.stdout.splitlines()[-1].split())


@pytest.mark.parametrize("name", oelm.__all__)
def test_every_public_name_resolves(name: str) -> None:
    assert getattr(oelm, name) is not None


@pytest.mark.parametrize("name", oelm.__all__)
def test_a_public_name_is_the_thing_of_that_name(name: str) -> None:
    assert getattr(getattr(oelm, name), "__name__", name) == name


def test_dir_shows_the_public_names() -> None:
    assert set(dir(oelm)) == set(oelm.__all__)


def test_an_unknown_name_is_an_attribute_error_that_names_it() -> None:
    with pytest.raises(AttributeError, match="'frieze'"):
        oelm.frieze  # noqa: B018


def test_importing_oelm_imports_nothing_heavy() -> None:
    assert not modules_after("import oelm").intersection(HEAVY)


@pytest.mark.parametrize("arguments", [["--help"], ["train", "--help"], ["demo", "--help"], ["--version"]], ids=" ".join)
def test_help_does_not_wait_for_torch(arguments: list[str]) -> None:
    program = (
        f"import sys, runpy; sys.argv = {['oelm', *arguments]!r}\n"
        "try: runpy.run_module('oelm', run_name='__main__')\n"
        "except SystemExit as leaving: assert not leaving.code\n"
    )
    assert not modules_after(program).intersection(HEAVY)
