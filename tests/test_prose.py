"""Help, messages, reports, README and docs use plain English words."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import typer.main
import yaml

from oelm.cli.app import app
from tests.cases import case

ROOT = Path(__file__).parents[1]
SRC = ROOT / "src" / "oelm"
FILES = sorted(SRC.rglob("*.py"))
PAGES = [*(ROOT / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md")), *sorted((ROOT / "docs").glob("*.md"))]

# Words that a plain sentence does without, as patterns of whole words, each with what to write instead.
PLAIN = {
    r"told|foretells?|foretold": "reported, given, estimated",
    r"anew": "again",
    r"sittings?": "session",
    r"mend(s|ed|ing)?": "fix",
    r"beside": "next to, compared with",
    r"stand(s|ing)?(?!-| for)|stood": "is",
    r"(to|by) the same bits": "bit-identical",
    r"(go(es)?|went|going) on": "continue, resume",
    r"as (it|they) comes?": "streamed, in order",
    r"what little": "the small part that",
    r"that shows": "measurable",
    r"said twice": "given twice",
    r"whose hours": "account to charge",
    r"worth (its|their) place": "help, beat",
    r"(what|all|run) there (is|are)": "name the thing",
}
MESSAGES = PLAIN | {
    r"of (its|their) own": "separate",
    # Not after a colon, where choices may follow: "no such budget: there are paper and smoke".
    r"(?:^|(?<=[.;!?] ))there (is|are|was|were)": "drop it",
}
# Phrases that the pages once had; help and messages may need some of the words.
PROSE = PLAIN | {
    r"thrice": "three times",
    r"(is|are) no numbers?": "is not finite",
    r"(be|is|are|really) had": "be available",
    r"unless said|(is|was|are|were) said": "unless noted, is reported",
    r"tells? (of|by)|tells? (its|their|arm|file|step|loss)": "describes, gives, reports",
    r"(hear|heard|hears) (of|that)": "is notified",
    r"reckon(s|ed|ing)?": "estimate, count",
    r"taken? up again|begun again|(finds?|found) done": "resume, restart, is skipped",
    r"as a rule": "by default",
    r"no torso": "no partial file",
    r"heart (stopped|beats?)": "without a recent heartbeat",
    r"(was|is|are|were) let loose": "ran",
    r"(?:^|(?<=[.;!?] ))who(ever)? (comes|came|lost|waits|is refused)": "name the process",
    r"so many (tokens|steps|bytes|rows)": "this many",
    r"to the very (step|bit|byte)": "up to the exact",
}


def compiled(words: dict[str, str]) -> dict[re.Pattern[str], str]:
    return {re.compile(rf"\b(?:{pattern})\b", re.IGNORECASE): plain for pattern, plain in words.items()}


IN_MESSAGES, IN_PROSE = compiled(MESSAGES), compiled(PROSE)


def complaints(text: str, patterns: dict[re.Pattern[str], str] = IN_MESSAGES) -> list[str]:
    """Return what a text should do without, and what to write instead: 'anew: again'."""
    line = " ".join(text.split())
    return [f"{match.group()}: {plain}" for pattern, plain in patterns.items() for match in pattern.finditer(line)]


def prose_of(page: str) -> str:
    """Return what people wrote on a page: its prose and the comments of commands, without output, Python and names in code."""
    return re.sub(r"<!-- \$ .*?<!-- end -->|```python\n.*?```|(?<!`)`[^`\n]+`(?!`)", " ", page, flags=re.DOTALL)


def help_texts() -> Iterator[tuple[str, str]]:
    """Yield the help of every command and parameter, with where it is from."""
    open_commands = [("oelm", typer.main.get_command(app))]
    while open_commands:
        name, command = open_commands.pop()
        yield name, command.help or ""
        for parameter in command.params:
            yield f"{name} {parameter.name}", getattr(parameter, "help", None) or ""
        for child, inner in getattr(command, "commands", {}).items():
            open_commands.append((f"{name} {child}", inner))


def strings_of(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the strings of a file that people may read, with their lines: of two words or more, and no docstrings."""
    tree = ast.parse(path.read_text())
    skipped = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
    skipped |= {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            text = "".join(str(part.value) if isinstance(part, ast.Constant) else "{}" for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            text = node.value
        else:
            continue
        if id(node) not in skipped and " " in text:
            yield node.lineno, text


def test_help_is_plain() -> None:
    texts = dict(help_texts())
    assert len(texts) > 150
    assert {where: found for where, text in texts.items() if (found := complaints(text))} == {}


def test_messages_are_plain() -> None:
    said = [(path.relative_to(SRC).as_posix(), line, text) for path in FILES for line, text in strings_of(path)]
    assert [(*where, text, found) for *where, text in said if (found := complaints(text))] == []


def test_reports_are_plain() -> None:
    words = yaml.safe_load((SRC / "report" / "words" / "en.yaml").read_text())
    assert {key: found for key, text in words.items() if (found := complaints(text))} == {}


def test_pages_are_plain() -> None:
    for path in PAGES:
        with case(path):
            text = prose_of(path.read_text(encoding="utf-8"))
            assert [found for line in text.split("\n\n") if (found := complaints(line, IN_PROSE))] == []


def test_only_what_people_wrote_on_a_page_is_checked() -> None:
    page = "It stands.\n\n```python\n# anew\n```\n`told` `x` mends\n```\noelm list  # thrice\n```\n"
    page += "<!-- $ oelm x -->\n\nbeside\n\n<!-- end -->\n"
    assert {line.split(":")[0] for line in complaints(prose_of(page), IN_PROSE)} == {"stands", "mends", "thrice"}


def test_whole_words_are_refused() -> None:
    cases: list[tuple[str, list[str]]] = [
        ("The run was told twice.", ["told: reported, given, estimated"]),
        ("--set stands\n  here and goes\n  on", ["stands: is", "goes on: continue, resume"]),
        ("There are no runs here; there is one elsewhere.", ["There are: drop it", "there is: drop it"]),
        ("no such budget: there are paper and smoke", []),
        ("BPE stands for byte pair encoding", []),
        ("an outstanding amendment of a stand-in, besides", []),
    ]
    for text, found in cases:
        with case(text, found):
            assert complaints(text) == found


def test_messages_are_found_in_code(tmp_path: Path) -> None:
    code = '''"""A docstring that stands."""\nraise OelmError(f"seed {seed} stands " f"twice")\nsay("word", "two words")\n'''
    (tmp_path / "code.py").write_text(code)
    assert sorted(strings_of(tmp_path / "code.py")) == [(2, "seed {} stands twice"), (3, "two words")]
