"""The tables of README and docs are what their commands give from the records under results/, to the last digit."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tests.report.synthetic import write_arm

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def figures() -> ModuleType:
    spec = importlib.util.spec_from_file_location("figures", ROOT / "studies" / "figures.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["figures"] = module
    spec.loader.exec_module(module)
    return module


def test_every_table_is_what_its_command_gives(figures: ModuleType) -> None:
    for page in figures.pages():
        text = page.read_text(encoding="utf-8")
        assert figures.renewed(text) == text, f"{page.name} is not what its commands give; run make figures"


def test_a_figure_that_was_changed_by_hand_is_found(figures: ModuleType, tmp_path: Path) -> None:
    write_arm(tmp_path, "GPT-01", [20.0, 20.2, 19.9, 20.1, 20.3])
    write_arm(tmp_path, "GPT-02", [21.0, 21.3, 20.8, 21.1, 21.4])
    block = f"<!-- $ oelm report --out {tmp_path} --table verdicts -->\n"
    page = f"before\n\n{block}\n| a |\n\n<!-- end -->\n\nafter\n"
    renewed = figures.renewed(page)
    assert "| GPT-02 / GPT-01 | laptop |" in renewed and "| a |" not in renewed
    assert renewed.startswith("before") and renewed.endswith("after\n")
    assert figures.renewed(renewed) == renewed


@pytest.mark.parametrize("command", ["rm -rf x", "python -c pass", "oelmx report"])
def test_no_command_but_ours_is_run(figures: ModuleType, command: str) -> None:
    with pytest.raises(SystemExit, match="may only run oelm"):
        figures.renewed(f"<!-- $ {command} -->\n<!-- end -->")


def test_a_command_that_fails_says_so(figures: ModuleType) -> None:
    with pytest.raises(SystemExit, match="no such folder"):
        figures.renewed("<!-- $ oelm report --out results/nowhere --table classes -->\n<!-- end -->")
