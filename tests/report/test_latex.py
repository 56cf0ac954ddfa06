"""A report's tables as LaTeX compile, whatever their texts hold, and show these texts."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from oelm.report.document import Cell, Document, Section, Table
from oelm.report.tables import render_latex
from tests.report.sample_document import ATTACKS, hostile_document, sample_document, wide_table

# All that may stand in the output with a meaning of its own.
KNOWN = (
    r"begin|end|centering|caption|label|toprule|midrule|bottomrule|endhead|endfoot|surd|times|triangle|textbackslash|textasciicircum"
    r"|textasciitilde|textless|textgreater|textbar|textquotedbl|textasciigrave|ldots|pm|cdot|leq|geq|approx|rightarrow|Delta"
)
PREAMBLE = r"\documentclass{article}\usepackage[T1]{fontenc}\usepackage{booktabs,longtable}\begin{document}"


def only(*texts: str) -> Document:
    table = Table("t", "caption", tuple("abcdefgh"[: len(texts)]), (tuple(Cell(text) for text in texts),))
    return Document("en", "", "", "", "", (Section("s", "s", (table,)),))


def body(latex: str) -> str:
    return "\n".join(line for line in latex.splitlines() if not line.startswith("%"))


def row(*texts: str) -> str:
    return body(render_latex(only(*texts))).split("\\midrule\n")[1].split("\n")[0]


def test_a_table_has_the_rules_of_booktabs_its_caption_and_label() -> None:
    latex = render_latex(sample_document())
    assert "\\caption{Verdict of each arm" in latex and "\\label{tab:verdicts}" in latex and "\\begin{tabular}{lrrl}" in latex
    assert "\\toprule\narm & perplexity & against baseline & verdict \\\\\n\\midrule\n" in latex


def test_the_file_says_how_to_use_it() -> None:
    assert "\\usepackage{booktabs,longtable}" in render_latex(sample_document()).split("\\begin")[0]


def test_a_long_table_breaks_across_pages() -> None:
    document = Document("en", "", "", "", "", (Section("s", "s", (wide_table(41),)),))
    assert "\\begin{longtable}" in render_latex(document) and "\\begin{tabular}" not in render_latex(document)


def test_a_text_is_written_so_that_it_shows_as_it_is() -> None:
    for text, latex in {
        "oelm_random": r"oelm\_random",
        "5% & more": r"5\% \& more",
        "-0.5": "$-$0.5",
        "GPT-02": "GPT-02",
        "a--b": "a-{}-b",
        "\\input{x}": r"\textbackslash{}input\{x\}",
        "1.05 \u00d7": r"1.05 $\times$",
        "[1] x": "{}[1] x",
        "* x": "{}* x",
        "a\nb": "a b",
    }.items():
        assert row(text) == f"{latex} \\\\"


def test_a_command_is_set_as_code() -> None:
    cells = (Cell("a_b \\c", is_code=True), Cell("", is_code=True))
    document = Document("en", "", "", "", "", (Section("s", "s", (Table("t", "caption", ("a", "b"), (cells,)),)),))
    assert "\\texttt{a\\_b \\textbackslash{}c} &  \\\\" in render_latex(document)


def test_no_text_holds_a_command_or_a_special_character() -> None:
    allowed = re.compile(rf"\\label{{tab:[A-Za-z0-9_-]+}}|\\(?:{KNOWN})(?![A-Za-z])|\\\\$|\\[&%$#_{{}}]", re.MULTILINE)
    for attack, text in ATTACKS.items():
        rest = allowed.sub("", body(render_latex(hostile_document(text))))
        assert not re.search(r"[\\%#_^~]|[\x00-\x09\x0b-\x1f\x7f-\x9f\u202e]", rest), attack


def test_braces_balance_and_each_row_has_its_cells() -> None:
    for attack, text in ATTACKS.items():
        bare = re.sub(r"\\[{}&$]", "", body(render_latex(hostile_document(text))))
        rows = [line for line in bare.splitlines() if line.endswith("\\\\")]
        assert bare.count("{") == bare.count("}") and bare.count("$") % 2 == 0, attack
        assert len(rows) == 6 and all(line.count("&") == 1 for line in rows), attack


@pytest.mark.skipif(shutil.which("pdflatex") is None, reason="no pdflatex on this machine")
@pytest.mark.parametrize("kind", ["sample", "long", "hostile"])
def test_the_tables_compile(kind: str, tmp_path: Path) -> None:
    long = Document("en", "", "", "", "", (Section("s", "s", (wide_table(90),)),))
    documents = {
        "sample": [sample_document()],
        "long": [long],
        "hostile": [hostile_document(text) for text in ATTACKS.values()],
    }
    # A dimension at the start of a row, and what follows a rule, are what a bracket would be taken for.
    tables = "\n".join(render_latex(document) for document in [*documents[kind], only("[9cm]", "*"), only("*[9cm]")])
    tables = re.sub(r"\\label\{[^}]*\}", "", tables)
    (tmp_path / "paper.tex").write_text(f"{PREAMBLE}\n\\extrafloats{{200}}\n{tables}\n\\end{{document}}\n", encoding="utf-8")
    command = ["pdflatex", "-no-shell-escape", "-interaction=nonstopmode", "-halt-on-error", "paper.tex"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, errors="replace", timeout=120)
    assert done.returncode == 0, done.stdout[-3000:]
