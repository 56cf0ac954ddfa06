"""Rewrite the figures of README and docs from the records under results/: every table by the command above it.

A block begins with a comment that holds a command and ends with `<!-- end -->`:

    <!-- $ oelm report --out results/variants --table classes -->

What is no table of Markdown's is fenced, with its command. `make demo` in a block is the end of what the demo prints, of the
runs recorded under results/demo (to renew them: `make demo`, then `oelm archive results/demo demo`); `make soak` what it
last recorded.

`make figures` writes all of them, and the pictures; `--check` writes nothing and fails if one is not what its command gives.
"""

from __future__ import annotations

import argparse
import io
import os
import re
import runpy
import shlex
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import chdir, contextmanager, redirect_stderr, redirect_stdout
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
_BLOCK = re.compile(r"(?P<head><!-- \$ (?P<command>[^\n]+?) -->\n)(?P<body>.*?)(?P<end><!-- end -->)", re.DOTALL)
# By their path in the project.
PICTURES = {
    "docs/images/demo.svg": "oelm report demo --out results/demo --picture learning-0",
    "docs/images/study.svg": "oelm report --out results/study --picture kept",
}
_SCRIPTS = (
    "benchmarks/record.py",
    "benchmarks/tables.py",
    "studies/contradictions.py",
    "studies/headline.py",
    "studies/log.py",
)
DEMO = "make demo"
# What these ended with when they were last run with RECORD=1.
RECORDED = {"make soak": "results/soak.txt"}


def pages() -> list[Path]:
    """Return the pages of the project that may hold figures."""
    return [ROOT / "README.md", ROOT / "README.zh-CN.md", *sorted((ROOT / "docs").glob("*.md"))]


@cache
def output(command: str) -> str:
    """Return the output of one of our commands; nothing else is run."""
    if command == DEMO:
        return demo()
    if command in RECORDED:
        return (ROOT / RECORDED[command]).read_text(encoding="utf-8")
    program, *arguments = shlex.split(command)
    if program == "oelm":
        return printed(command, arguments)
    if program != "python" or arguments[:1] not in [[script] for script in _SCRIPTS]:
        raise SystemExit(
            f"a block may only run oelm, {', '.join((DEMO, *RECORDED))}, or python with one of {', '.join(_SCRIPTS)}: {command}"
        )
    return printed(command, arguments[1:], script=arguments[0])


def printed(command: str, arguments: list[str], *, script: str | None = None) -> str:
    """Return the output of oelm or one of our scripts for these arguments; exit if it fails.

    All run in this process, because such a command spends most of its time on imports.
    """
    shown, said = io.StringIO(), io.StringIO()
    code: str | int | None = 0
    with as_if_typed([script or "oelm", *arguments]), redirect_stdout(shown), redirect_stderr(said):
        try:
            if script:
                runpy.run_path(script, run_name="__main__")
            else:
                runpy.run_module("oelm", run_name="__main__")
        except SystemExit as stop:
            code = stop.code
        except Exception as problem:
            raise SystemExit(f"{command}: {problem!r}\n{said.getvalue()}{shown.getvalue()}") from problem
    if code:
        raise SystemExit(f"{command}: exit code {code}\n{said.getvalue()}{shown.getvalue()}")
    return shown.getvalue()


@contextmanager
def as_if_typed(argv: list[str]) -> Iterator[None]:
    """Set these arguments, the program's folder for imports, the project's folder and a terminal of 130 columns."""
    arguments, places, columns = sys.argv, sys.path, os.environ.get("COLUMNS")
    sys.argv, sys.path, os.environ["COLUMNS"] = argv, [str((ROOT / argv[0]).parent), *places], "130"
    try:
        with chdir(ROOT):
            yield
    finally:
        sys.argv, sys.path = arguments, places
        if columns is None:
            del os.environ["COLUMNS"]
        else:
            os.environ["COLUMNS"] = columns


@cache
def demo() -> str:
    """Return the table of the demo. It finds its runs done in a copy of the records."""
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(ROOT / "results" / "demo", folder, dirs_exist_ok=True)
        lines = printed(DEMO, ["demo", "--out", folder]).splitlines()
        first, last = (next(n for n, line in enumerate(lines) if line.startswith(start)) for start in ("one seed:", "└"))
        return "\n".join(line.rstrip() for line in lines[first : last + 1])


def renewed(text: str) -> str:
    """Return a page with every block as its command prints it now; exit if a block has no end."""
    if torn := next((found["command"] for found in _BLOCK.finditer(text) if "<!-- $ " in found["body"]), None):
        raise SystemExit(f"the block of {torn} has no end: write <!-- end --> after it")
    return _BLOCK.sub(
        lambda found: f"{found['head']}\n{body(found['command'], output(found['command']).strip())}\n\n{found['end']}", text
    )


def body(command: str, shown: str) -> str:
    """Return an output as shown on a page: a table as it is, anything else fenced, below its command."""
    return shown if shown.startswith("|") else f"```\n$ {command}\n{shown}\n```"


def wanted() -> dict[Path, str]:
    """Return every page and picture as it should be."""
    drawn = {ROOT / path: output(command) for path, command in PICTURES.items()}
    return {page: renewed(page.read_text(encoding="utf-8")) for page in pages()} | drawn


def main() -> int:
    """Rewrite the pages, or print which are out of date."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; fail if a page would change")
    arguments = parser.parse_args()
    stale = []
    for path, text in wanted().items():
        if path.is_file() and path.read_text(encoding="utf-8") == text:
            continue
        stale.append(path.relative_to(ROOT))
        if not arguments.check:
            path.write_text(text, encoding="utf-8")
    for path in stale:
        print(f"{path}: {'out of date; run make figures' if arguments.check else 'rewritten'}")
    return 1 if stale and arguments.check else 0


if __name__ == "__main__":
    raise SystemExit(main())
