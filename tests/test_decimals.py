"""Figures as people read them, those of runs that diverged included: everywhere a perplexity is printed."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest

from oelm.cli.train import _perplexities
from oelm.report.build import build_report
from oelm.report.html import render_html
from oelm.report.markdown import render_markdown
from oelm.report.tables import render_csv, render_latex
from oelm.stats import exp_or_inf, paired_gap
from oelm.text import figure_text, fixed
from oelm.train.evaluate import TokenEvaluation
from tests.cases import case
from tests.report.synthetic import package_catalog, write_arm

# Its earlier evaluations are worse, and still within what an exponential may be.
WORST = math.exp(600.0)
# Before a decimal point: what stands behind one is read past.
LONG = re.compile(r"(?<![\w.])\d{12,}")


def test_a_figure_has_its_places_until_it_is_unreadable() -> None:
    cases: list[tuple[float, int, str]] = [
        (23.456, 2, "23.46"),
        (999_999.0, 1, "999999.0"),
        (1e6, 2, "1.0e+06"),
        (WORST, 2, "3.8e+260"),
        (math.inf, 2, "inf"),
    ]
    for value, places, text in cases:
        with case(value, places, text):
            assert fixed(value, places) == text
            assert fixed(value, places, sign=True) == f"+{text}" and fixed(-value, places, sign=True) == f"-{text}"


def test_an_exponential_beyond_a_float_is_infinite() -> None:
    assert exp_or_inf(1.5) == math.exp(1.5) and exp_or_inf(709.0) < math.inf and exp_or_inf(2000.0) == math.inf


def test_a_ratio_whose_interval_is_beyond_a_float_is_told() -> None:
    gap = paired_gap({0: 30.0, 1: WORST}, {0: 30.0, 1: 30.0}, "ppl")
    assert gap.interval is not None and gap.interval.high == math.inf and not LONG.search(gap.text)


def test_a_diverged_run_is_short_on_the_terminal_and_in_the_log() -> None:
    texts = [
        TokenEvaluation(loss=2000.0, perplexity=WORST, bits_per_byte=900.0, documents=[]).headline(),
        _perplexities({"best_ppl": WORST, "best_step": 3}),
        figure_text("ppl", WORST),
    ]
    assert [re.search(r"PPL 3\.8e\+260|^3\.8e\+260", text) is not None for text in texts] == [True] * 3
    assert not any(LONG.search(text) for text in texts)


@pytest.fixture(scope="module")
def diverged(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Baselines that hold beside arms that diverge at every seed and at one, and a baseline that diverges."""
    root = tmp_path_factory.mktemp("diverged")
    write_arm(root, "GPT-01", [30.0, 30.2, 29.9, 30.1, 30.05], bigram=50.0)
    write_arm(root, "GPT-02", [WORST] * 5)
    write_arm(root, "GPT-03", [30.0, 30.2, 29.9, 30.1, WORST])
    write_arm(root, "GPT-01", [WORST] * 5, budget="paper", bigram=50.0)
    write_arm(root, "GPT-02", [30.0, 30.2, 29.9, 30.1, 30.05], budget="paper")
    return {"root": root}


@pytest.mark.parametrize("lang", ["en", "zh"])
def test_no_format_of_a_report_spells_a_diverged_perplexity_out(diverged: dict[str, Any], lang: str) -> None:
    document = build_report([diverged["root"]], package_catalog()).document(lang)
    markdown, pictures = render_markdown(document, "pictures")
    texts = {"markdown": markdown, "latex": render_latex(document), **render_csv(document), **pictures}
    # The page of HTML holds libraries with numbers of their own: what is read stands outside of its scripts.
    page = re.sub(r"<script.*?</script>|<style.*?</style>", "", render_html(document), flags=re.DOTALL)
    texts["html"] = page
    assert "e+260" in markdown and "e+260" in page
    for name, text in texts.items():
        found = [text[max(0, match.start() - 60) : match.end()] for match in LONG.finditer(text)]
        assert found == [], name
