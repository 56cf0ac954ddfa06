"""Run a notebook's code cells in order in this process and write a copy with what they printed; Jupyter is not needed.

python examples/execute.py examples/freeze_to_verdict.ipynb examples/freeze_to_verdict.ipynb
"""

from __future__ import annotations

import contextlib
import io
import json
import sys
from pathlib import Path
from typing import Any


def execute(notebook: dict[str, Any]) -> None:
    """Run the code cells in one namespace and store their output and number in them."""
    names: dict[str, Any] = {"__name__": "__main__"}
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    for number, cell in enumerate(code, start=1):
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile("".join(cell["source"]), f"cell {number}", "exec"), names)
        lines = printed.getvalue().splitlines(keepends=True)
        cell["execution_count"] = number
        cell["outputs"] = [{"name": "stdout", "output_type": "stream", "text": lines}] if lines else []


if __name__ == "__main__":
    source, target = map(Path, sys.argv[1:])
    content = json.loads(source.read_text(encoding="utf-8"))
    execute(content)
    target.write_text(json.dumps(content, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
