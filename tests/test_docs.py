"""What the README and the docs print is true: their Python runs, their links lead somewhere, their commands exist."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

import pytest
import typer.main

from oelm.cli.app import app

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "README.zh-CN.md", *sorted((ROOT / "docs").glob("*.md"))]
COMMAND = re.compile(r"^\s*(?:\$ )?oelm ([a-z]+)(.*)$", re.MULTILINE)


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), flags=re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("page", [ROOT / "README.md", ROOT / "docs" / "method.md"], ids=lambda page: page.name)
def test_the_first_example_runs_and_prints_what_it_says(page: Path) -> None:
    code = blocks(page, "python")[0]
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(code, page.name, "exec"), {})
    expected = [line.removeprefix("# ") for line in code.splitlines() if line.startswith("# parameters:")]
    assert expected and printed.getvalue().splitlines() == expected


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files_that_are_there(page: Path) -> None:
    targets = re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text())
    assert [target for target in targets if not (page.parent / target).exists()] == []


def anchors(page: Path) -> set[str]:
    """Return what a page's headings can be linked by: letters in lower case, digits, hyphens, and a hyphen for each space."""
    prose = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    titles = re.findall(r"^#+ (.*)$", prose, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_headings_that_are_there(page: Path) -> None:
    targets = re.findall(r"\]\(((?!https?:)[^)#]*)#([^)]+)\)", page.read_text())
    found = [(page.parent / path if path else page, anchor) for path, anchor in targets]
    assert [f"{path.name}#{anchor}" for path, anchor in found if anchor not in anchors(path)] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_and_their_options_exist(page: Path) -> None:
    group = typer.main.get_command(app)
    commands = group.commands  # type: ignore[attr-defined]
    for name, rest in COMMAND.findall("\n".join(blocks(page, "") + blocks(page, "sh"))):
        command = commands[name]
        # A group's options are those of the command in it that is named next.
        command = getattr(command, "commands", {}).get(rest.split()[0] if rest.split() else "", command)
        known = {option for parameter in command.params for option in parameter.opts} | {"--help"}
        used = set(re.findall(r"(?<=\s)--[a-z_-]+", rest.split("#")[0]))
        assert used <= known, f"{page.name}: oelm {name}{rest}"
