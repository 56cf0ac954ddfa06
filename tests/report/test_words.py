"""A report says everything in the reader's language: the same sentences in both, each used, and no English in a Chinese one."""

from __future__ import annotations

import ast
import re
import string
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest

from oelm.errors import ConfigError
from oelm.experiments.catalog import load_catalog
from oelm.method.method import PRESETS
from oelm.report.arms import MIXED, MixtureCode
from oelm.report.build import Report, build_report
from oelm.report.document import Chart, Document, Table, Text
from oelm.report.foreign import _COMMAND, SCALES, TAKES
from oelm.report.judge import ReasonCode, Verdict
from oelm.report.pairs import CLASSES
from oelm.report.sections.reported import source_text
from oelm.report.words import LANGUAGES, Words, templates
from oelm.runs.status import State
from tests.report.recorded_study import MESSAGE, OWN_SOURCE, arm, own_catalog, record_study, second_root

SRC = Path(__file__).parents[2] / "src" / "oelm"
SOURCES = sorted([*(SRC / "report").rglob("*.py"), *(SRC / "cli").glob("*.py")])
CATALOG_SOURCES = {entry.reported.source for entry in load_catalog() if entry.reported is not None}
# Keys that are put together from values which no loop over a tuple shows: the f-string as it stands, and its values.
TYPED = re.compile(r"\boelm (train|finetune|data) ")
FAMILIES: dict[str, tuple[str, ...]] = {
    "f'verdict.{judgement.verdict}'": get_args(Verdict),
    "f'forest.{kind}'": ("ppl", "accuracy"),
    "f'forest.caption.{kind}'": ("ppl", "accuracy"),
    "f'verdict.{row.judgement.verdict}'": get_args(Verdict),
    # Arms that are judged together are told of together.
    "f'reason.{reason.code}'": tuple({*get_args(ReasonCode)} - {"many_comparisons"}),
    "f'mixture.{mixture.code}'": get_args(MixtureCode),
    "f'mixed.{name}'": MIXED,
    "f'figures.{name}'": ("arm", "budget", "best", "majority", "seeds", "test", "test_majority", "test_seeds"),
    "f'state.{state}'": get_args(State),
    "f'live.state.{state}'": get_args(State),
    "f'live.state.{view.state}'": get_args(State),
    "f'classes.{kind}'": CLASSES,
    "f'classes.{CLASSES[line.place]}'": CLASSES,
    "f'classes.{later}'": ("thawed", "frozen"),
    "f'across.{metric}'": ("ppl", "accuracy"),
    "f'answer.{name}'": ("passed", "failed", "open"),
    "f'forest.{metric}'": ("ppl", "accuracy"),
    "f'forest.caption.{metric}'": ("ppl", "accuracy"),
    "f'forest.bound.{metric}'": ("ppl", "accuracy"),
    "f'forest.target.{metric}'": ("ppl", "accuracy"),
    "f'imported.as.{question.scale}'": SCALES,
    "f'imported.take.{question.take}'": TAKES,
}
# A source is found by its English text.
ELSEWHERE = {"keys[source]": {key for key in templates("en") if key.startswith("source.")}}

# Every word of ASCII letters that a Chinese report may hold: names, units, and what researchers write in English.
NAMES = {
    "oelm",
    "report",
    "watch",
    "status",
    "bench",
    "GPT",
    "BERT",
    "RTX",
    "XNLI",
    "MNLI",
    "OpenWebText",
    "TinyStories",
    "Transformer",
    "torch",
    "Holm",
    "Kneser",
    "Ney",
}
TERMS = {
    "CPU",
    "GPU",
    "kJ",
    "PASS",
    "FAIL",
    "INCONCLUSIVE",
    "CONFOUNDED",
    "PPL",
    "exp",
    "logit",
    "dropout",
    "nat",
    "MiB",
    "MB",
    "ms",
}
IDS = {"baseline", "lean", "uniform", "laptop", "smoke", "cpu", "tinystories", "openwebtext", "mnli", "old", "study"}
# Each is there on purpose: what users and records said stays as it was said.
SAID = (OWN_SOURCE, MESSAGE, _COMMAND)


def holes(template: str) -> list[tuple[str, str, str]]:
    """Return a template's places, each with its format and conversion, in the order of their names."""
    parts = string.Formatter().parse(template)
    return sorted((name, spec or "", conversion or "") for _, name, spec, conversion in parts if name is not None)


def without_holes(template: str) -> str:
    return " ".join(text for text, *_ in string.Formatter().parse(template))


def english_words(text: str) -> set[str]:
    """Return the words of ASCII letters in a text; with a digit, dot, slash or underscore inside it is an id or a path."""
    words = {token.strip("()[]{}<>,.;:!?%+-=*'\"`^") for token in re.findall(r"[!-~]+", text)}
    return {part for word in words if not re.search(r"[0-9_./=]", word) for part in re.findall(r"[A-Za-z]{2,}", word)}


def test_both_languages_have_the_same_keys() -> None:
    assert list(templates("zh")) == list(templates("en"))


def test_both_languages_have_the_same_places_in_a_sentence() -> None:
    both = {key: (holes(template), holes(templates("zh")[key])) for key, template in templates("en").items()}
    assert {key: (english, chinese) for key, (english, chinese) in both.items() if english != chinese} == {}


@pytest.mark.parametrize("lang", LANGUAGES)
def test_every_sentence_takes_its_values(lang: str) -> None:
    for key, template in templates(lang).items():
        values: dict[str, Any] = {name: 2 if spec else "\u503c {x}" for name, spec, _ in holes(template)}
        said = Words(lang)(key, **values)
        assert said.count("\u503c {x}") == sum(not spec for _, spec, _ in holes(template)), key


def test_no_sentence_of_the_chinese_words_is_english() -> None:
    for key, template in templates("zh").items():
        assert english_words(without_holes(template)) <= NAMES | TERMS | IDS, key


def test_the_english_words_are_ascii() -> None:
    assert all(template.isascii() for template in templates("en").values())


def test_an_unknown_language_is_refused() -> None:
    with pytest.raises(ConfigError, match="--lang 'de': choose one of en, zh"):
        Words("de")


def test_every_key_in_the_source_has_words_and_all_words_are_used() -> None:
    used = {key for path in SOURCES for key in keys_in(path)}
    assert used - set(templates("en")) == set(), "no words for these"
    # Methods that have plain words, and the controls.
    optional = {f"plain.{name}" for name in (*PRESETS, "thin", "half")}
    assert set(templates("en")) - used - optional == set(), "nothing says these"


def keys_in(path: Path) -> Iterator[str]:
    """Yield the keys that a module's calls of `words` name; an unknown way to name one fails."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for function in [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]:
        loops = _loops(tree, function)
        for call in [node for node in ast.walk(function) if isinstance(node, ast.Call) and _says(node)]:
            yield from _keys(call.args[0], loops, where=f"{path.name}:{call.lineno}")


def _says(call: ast.Call) -> bool:
    return isinstance(call.func, ast.Name) and call.func.id in ("words", "self", "Contradiction") and bool(call.args)


def _keys(named: ast.expr, loops: dict[str, set[str]], *, where: str) -> set[str]:
    text = ast.unparse(named)
    if isinstance(named, ast.Constant):
        return {str(named.value)}
    if isinstance(named, ast.JoinedStr):
        prefix, last = named.values[0], named.values[-1]
        assert isinstance(prefix, ast.Constant) and isinstance(last, ast.FormattedValue), f"{where}: {text}"
        values = FAMILIES.get(text) or loops.get(ast.unparse(last.value))
        assert values, f"{where}: add {text} and its values to FAMILIES"
        return {f"{prefix.value!s}{value}" for value in values}
    assert text in ELSEWHERE, f"{where}: {text} names a key in a way that cannot be followed"
    return ELSEWHERE[text]


def _loops(tree: ast.Module, function: ast.FunctionDef) -> dict[str, set[str]]:
    """Return the texts that each loop variable of a function runs over, where they stand in the source."""
    constants = {
        target.id: node.value
        for scope in (tree.body, list(ast.walk(function)))
        for node in scope
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    loops: dict[str, set[str]] = {}
    for node in ast.walk(function):
        if isinstance(node, ast.For | ast.comprehension):
            over = _without_items(node.iter)
            over = constants.get(over.id, over) if isinstance(over, ast.Name) else over
            listed = over.keys if isinstance(over, ast.Dict) else over.elts if isinstance(over, ast.Tuple) else []
            texts = {item.value for item in listed if isinstance(item, ast.Constant) and isinstance(item.value, str)}
            variable = node.target.elts[0] if isinstance(node.target, ast.Tuple) else node.target
            loops.setdefault(ast.unparse(variable), set()).update(texts)
    return loops


def _without_items(over: ast.expr) -> ast.expr:
    is_items = isinstance(over, ast.Call) and isinstance(over.func, ast.Attribute) and over.func.attr == "items"
    return over.func.value if is_items else over  # type: ignore[attr-defined]


def texts_of(document: Document) -> Iterator[str]:
    """Yield every text that a reader of any format may see."""
    yield from (document.title, document.subtitle, document.contents, document.footer)
    for section in document.sections:
        yield section.title
        for block in section.blocks:
            if isinstance(block, Text):
                yield block.text
            elif isinstance(block, Table):
                # What is to be typed is the same in every language.
                cells = (
                    cell.text
                    for row in block.rows
                    for cell in row
                    if not re.search(r"\boelm (train|finetune|data) ", cell.text)
                )
                yield from (block.caption, *block.columns, *cells)
            else:
                yield from _chart_texts(block)


def _chart_texts(chart: Chart) -> Iterator[str]:
    yield from (chart.caption, chart.alt)
    stack: list[Any] = [chart.spec]
    while stack:
        part = stack.pop()
        if isinstance(part, dict):
            stack += part.values()
            # Rows of data, or what an axis or a legend is to show.
            rows = part.get("values", [])
            values = [value for row in rows for value in (row.values() if isinstance(row, dict) else [row])]
            shown = [part.get("title"), *values]
            yield from (text for text in shown if isinstance(text, str))
        elif isinstance(part, list):
            stack += part


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a recorded study."""
    root = tmp_path_factory.mktemp("study") / "runs"
    record_study(root)
    return root


@pytest.fixture(scope="module")
def report(root: Path) -> Report:
    return build_report([root, second_root(root)], own_catalog(root))


def test_a_chinese_report_holds_no_english_beside_names_units_and_ids(report: Report) -> None:
    document = report.document("zh")
    assert len(document.sections) == 9, "the study lacks something that a section is about"
    for text in texts_of(document):
        # What a record said is quoted, in its own language.
        ours = re.sub("\u8bb0\u5f55\u539f\u6587\uff1a\u201c.*\u201d", "", text)
        for said in SAID:
            ours = ours.replace(said, "")
        assert english_words(ours) <= NAMES | TERMS | IDS, text
    assert any(MESSAGE in text for text in texts_of(document)) and OWN_SOURCE in texts_of(document)


@pytest.mark.parametrize("experiments", [(), ("GPT-01",), ("GPT-01", "GPT-02")], ids=["nothing", "a-baseline", "one-seed"])
def test_a_chinese_report_on_hardly_any_runs_holds_no_english(tmp_path: Path, experiments: tuple[str, ...]) -> None:
    for experiment in experiments:
        arm(tmp_path, experiment, 30.0, seeds=range(1))
    for text in texts_of(build_report([tmp_path], load_catalog()).document("zh")):
        assert english_words(text) <= NAMES | TERMS | IDS, text


def test_an_english_report_holds_no_chinese(report: Report) -> None:
    assert all(text.isascii() for text in texts_of(report.document("en")))


def test_every_source_of_the_catalog_has_words() -> None:
    for source in sorted(CATALOG_SOURCES):
        assert source_text(source, Words("en")) == source, source
        assert not english_words(source_text(source, Words("zh"))) - NAMES, source


def test_a_source_that_a_user_gives_stays_as_it_is() -> None:
    assert source_text(OWN_SOURCE, Words("zh")) == OWN_SOURCE


@pytest.mark.parametrize("lang", LANGUAGES)
def test_how_little_learns_is_left_to_the_column_that_counts_it(lang: str) -> None:
    words = Words(lang)
    assert words("classes.share") in words("classes.text")
