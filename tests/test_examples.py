"""The notebook under examples/ runs from top to bottom in a fresh process, and prints what is stored in it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"
NOTEBOOKS = sorted(EXAMPLES.glob("*.ipynb"))
NUMBER = re.compile(r"\d+(?:\.\d+)?")


def code_cells(path: Path) -> list[dict[str, Any]]:
    return [cell for cell in json.loads(path.read_text(encoding="utf-8"))["cells"] if cell["cell_type"] == "code"]


def printed(path: Path) -> list[str]:
    return ["".join(line for output in cell["outputs"] for line in output["text"]) for cell in code_cells(path)]


@pytest.mark.slow
@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.name)
def test_a_notebook_prints_what_is_stored_in_it(notebook: Path, tmp_path: Path) -> None:
    copy = tmp_path / notebook.name
    command = [sys.executable, str(EXAMPLES / "execute.py"), str(notebook), str(copy)]
    child = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert child.returncode == 0, child.stderr
    # Up to the freezing all is exact. Losses differ on another CPU, which rounds differently: many steps carry that on.
    exact = [0.0] * 5 + [0.2] * len(code_cells(notebook))
    for stored, now, apart in zip(printed(notebook), printed(copy), exact, strict=False):
        assert NUMBER.sub("#", now) == NUMBER.sub("#", stored)
        found, wanted = ([float(text) for text in NUMBER.findall(each)] for each in (now, stored))
        assert found == pytest.approx(wanted, rel=apart, abs=0)


def test_from_freeze_to_verdict_takes_ten_cells_and_all_were_run() -> None:
    cells = code_cells(EXAMPLES / "freeze_to_verdict.ipynb")
    assert [cell["execution_count"] for cell in cells] == list(range(1, 11))
    code = ["".join(cell["source"]) for cell in cells]
    first = [next(number for number, text in enumerate(code) if call in text) for call in ("oelm.freeze(", "oelm.verdict(")]
    assert first[0] < first[1]
