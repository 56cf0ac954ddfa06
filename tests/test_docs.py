"""What the README and the docs print is true: their Python runs, their links lead somewhere, their commands exist."""

from __future__ import annotations

import contextlib
import io
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer.main
from typer.testing import CliRunner

from oelm.budget import BUDGETS, budget_settings
from oelm.cli.app import app
from tests.cases import case
from tests.conftest import run_here, tiny_config

ROOT = Path(__file__).parents[1]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md"))]
OWN_LOOP = ROOT / "docs" / "your-own-loop.md"
# The pages with Python, and who runs it. The Chinese README has the English one's code, which test_readmes.py compares.
TESTED = {
    "README.md": "here",
    "README.zh-CN.md": "as README.md",
    "architectures.md": "method/test_foreign.py",
    "method.md": "here",
    "report.md": "here",
    "study.md": "test_claims.py",
    "using.md": "here",
    "your-own-loop.md": "here",
}
COMMAND = re.compile(r"^\s*(?:\$ )?oelm ([a-z]+)(.*)$", re.MULTILINE)


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), flags=re.MULTILINE | re.DOTALL)


def printed_by(code: str, names: dict[str, Any]) -> list[str]:
    """Run code and return the lines that it printed."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(code, "a block of the docs", "exec"), names)
    return printed.getvalue().splitlines()


def test_every_page_with_python_is_run_by_a_test() -> None:
    assert {page.name for page in PAGES if blocks(page, "python")} == set(TESTED)


@pytest.mark.parametrize("page", [ROOT / "README.md", ROOT / "docs" / "method.md"], ids=lambda page: page.name)
def test_the_examples_run_and_print_what_they_say(page: Path) -> None:
    if "transformers" in "".join(blocks(page, "python")):
        pytest.importorskip("transformers")
    names: dict[str, Any] = {}
    for number, code in enumerate(blocks(page, "python")):
        said = [line.removeprefix("# ") for line in code.splitlines() if line.startswith("# parameters:")]
        assert printed_by(code, names) == said and (said or number)


@pytest.fixture(scope="module")
def own_loop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, list[tuple[str, list[str]]]]]:
    """The page's blocks, each run in a fresh namespace, with what they printed, and the folder that they wrote to."""
    for needed in ("transformers", "accelerate", "peft"):
        pytest.importorskip(needed)
    folder = tmp_path_factory.mktemp("own-loop")
    with contextlib.chdir(folder):
        ran = [(code, printed_by(code, {})) for code in blocks(OWN_LOOP, "python")]
    yield folder, ran


def test_your_own_loop_runs_and_prints_what_it_says(own_loop: tuple[Path, list[tuple[str, list[str]]]]) -> None:
    _, ran = own_loop
    assert len(ran) == 5
    for code, printed in ran:
        said = [line[2:] for line in code.splitlines() if re.match(r"# (trainable params:|frozen [qk]:|step \d)", line)]
        # A Trainer prints its own figures.
        assert [line for line in printed if not line.startswith("{")] == said


OPEN_WITHOUT_OELM = """
import sys
sys.modules["oelm"] = None
import transformers
for folder in sys.argv[1:]:
    (name,) = transformers.AutoConfig.from_pretrained(folder).architectures
    model, found = getattr(transformers, name).from_pretrained(folder, output_loading_info=True)
    print(folder, sorted(found["missing_keys"]), sorted(found["mismatched_keys"]))
"""


@pytest.mark.slow
def test_what_your_own_loop_saved_opens_without_oelm(own_loop: tuple[Path, list[tuple[str, list[str]]]]) -> None:
    root, _ = own_loop
    folders = sorted(str(path.parent.relative_to(root)) for path in root.rglob("config.json"))
    assert {"from-loop", "thawed", "from-trainer", "base", "merged", "from-accelerate"} < set(folders)
    command = [sys.executable, "-c", OPEN_WITHOUT_OELM, *folders]
    child = subprocess.run(command, cwd=root, capture_output=True, text=True)
    assert child.stdout.splitlines() == [f"{folder} [] []" for folder in folders], child.stderr


@pytest.fixture(scope="module")
def used(text_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run, its export and a folder of runs, under the names that the pages use."""
    pytest.importorskip("transformers")
    root = tmp_path_factory.mktemp("used")
    run_here(tiny_config(text_file, steps=2, model__seq_len=96), root / "RUN")
    run_here(tiny_config(text_file, steps=2), root / "outputs" / "mine")
    exported = CliRunner().invoke(app, ["export", str(root / "RUN"), str(root / "DIR")])
    assert exported.exit_code == 0, exported.output
    return root


@pytest.mark.parametrize("page", ["using.md", "report.md"])
def test_the_examples_run_on_a_trained_run(page: str, used: Path) -> None:
    if page == "report.md":
        pytest.importorskip("pandas")
    with contextlib.chdir(used):
        for code in blocks(ROOT / "docs" / page, "python"):
            said = [line.removeprefix("# ") for line in code.splitlines() if line.startswith("# B:")]
            assert printed_by(code, {}) == said


def test_links_lead_to_files_that_are_there() -> None:
    for page in PAGES:
        with case(page):
            targets = re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text())
            assert [target for target in targets if not (page.parent / target).exists()] == []


def anchors(page: Path) -> set[str]:
    """Return what a page's headings can be linked by: letters in lower case, digits, hyphens, and a hyphen for each space."""
    prose = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    titles = re.findall(r"^#+ (.*)$", prose, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles}


def test_links_lead_to_headings_that_are_there() -> None:
    for page in PAGES:
        with case(page):
            targets = re.findall(r"\]\(((?!https?:)[^)#]*)#([^)]+)\)", page.read_text())
            found = [(page.parent / path if path else page, anchor) for path, anchor in targets]
            assert [f"{path.name}#{anchor}" for path, anchor in found if anchor not in anchors(path)] == []


def test_commands_and_their_options_exist() -> None:
    group = typer.main.get_command(app)
    commands = group.commands  # type: ignore[attr-defined]
    for page in PAGES:
        with case(page):
            for name, rest in COMMAND.findall("\n".join(blocks(page, "") + blocks(page, "sh"))):
                command = commands[name]
                # A group's options are those of the command in it that is named next.
                command = getattr(command, "commands", {}).get(rest.split()[0] if rest.split() else "", command)
                known = {option for parameter in command.params for option in parameter.opts} | {"--help"}
                used = set(re.findall(r"(?<=\s)--[a-z_-]+", rest.split("#")[0]))
                assert used <= known, f"{page.name}: oelm {name}{rest}"


def test_the_table_of_budgets_is_what_they_are() -> None:
    rows = re.findall(r"^\| `(\w+)` \| (\d.*) \|.*\|$", (ROOT / "docs" / "training.md").read_text(), flags=re.MULTILINE)
    vocabularies = {"gpt2": 50257, "bpe:512": 512}
    said = {}
    for name in BUDGETS:
        settings = budget_settings(name)
        model, size = settings["model"], vocabularies[settings["data"]["tokenizer"]]
        shape = f"{model['model_dim']} x {model['num_layers']} | {model['seq_len']} | {size:,}"
        said[name] = f"{shape} | {settings['steps']:,} x {settings['batch_size']}"
    assert dict(rows) == said
