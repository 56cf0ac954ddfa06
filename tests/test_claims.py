"""What README and docs say in words is what their tables say: where a test fails, write its sentence anew in both languages."""

from __future__ import annotations

import contextlib
import io
import json
import math
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


def rows(page: str, command: str) -> list[list[str]]:
    """Return the cells of the table that a command wrote into a page, its head first."""
    text = (ROOT / page).read_text(encoding="utf-8").replace("\\", "").replace("`", "")
    block = re.search(rf"<!-- \$ {re.escape(command)} -->(.*?)<!-- end -->", text, re.DOTALL)
    assert block is not None, f"{page} has no block of {command}"
    head, _, *others = [[cell.strip() for cell in line.strip("|").split("|")] for line in block[1].strip().splitlines()]
    return [head, *others]


def gaps(page: str, command: str, *, on: str = "") -> dict[str, str]:
    """Return the gaps of the table that a command wrote into a page, on one data set or in the only such column, by arm."""
    head, *found = rows(page, command)
    where = head.index(on) if on else next(n for n, name in enumerate(head) if "[95%]" in name)
    words = ("thin", "half", "baseline", "uniform")
    names = [next(cell for cell in row if "_" in cell or cell.startswith(words)) for row in found]
    assert len({*names}) == len(names), "two rows of one name: which of them is meant?"
    return {name: row[where] for name, row in zip(names, found, strict=True)}


def ends(gap: str) -> tuple[float, float]:
    """Return the two ends of a gap's interval."""
    found = re.search(r"\[([+-][\d.]+), ([+-][\d.]+)\]", gap)
    assert found is not None, gap
    return float(found[1]), float(found[2])


def value(gap: str) -> float:
    """Return a gap without its interval."""
    found = re.search(r"[+-][\d.]+", gap)
    assert found is not None, gap
    return float(found[0])


def test_behind_a_short_convolution_the_first_layer_looks_at_everything() -> None:
    text = (ROOT / "docs/log.md").read_text(encoding="utf-8")
    for arm in ("GPT-01-conv", "GPT-02-conv"):
        row = next(line for line in text.splitlines() if line.startswith(f"| {arm} (tuned)") and "logits" in line)
        first, *others = [float(cell) for cell in row.strip("|").split("|")[4:]]
        assert first < 0.3 and all(first < other / 4 for other in others)


def bert_gaps() -> list[dict[str, tuple[str, str]]]:
    """Return what each table of the page says of each arm but the first: its difference over seeds and over examples."""
    page = (ROOT / "docs/bert-study.md").read_text(encoding="utf-8")
    gap = r"([+-][\d.]+ \[[^]]*\])"
    tables = re.findall(r"<!-- \$ oelm compare .*?<!-- end -->", page, re.DOTALL)
    lines = rf"^(SST-2-02\S*) .*?{gap}.*?{gap}$"
    return [{arm: (first, second) for arm, first, second in re.findall(lines, table, re.MULTILINE)} for table in tables]


def test_the_bert_page_says_what_its_tables_say_and_gives_the_verdicts_of_the_plan() -> None:
    page = (ROOT / "docs/bert-study.md").read_text(encoding="utf-8")
    found, frames = bert_gaps()
    assert found.keys() == {"SST-2-02", "SST-2-02-asis", "SST-2-02-fresh"}
    assert f"about {value(found['SST-2-02'][0]):.0f} points; both intervals, over seeds and over examples, lie below -2" in page
    assert all(ends(gap)[1] < -2 for gap in found["SST-2-02"])
    assert all(-1 < ends(gap)[0] < 0 < ends(gap)[1] < 1 for gap in found["SST-2-02-asis"])
    assert all(ends(gap)[0] < 0 < ends(gap)[1] < 1 for gap in frames["SST-2-02-fresh"])
    cost, cost_at_random = (f"lose about {abs(value(found[arm][0])):.0f}" for arm in ("SST-2-02", "SST-2-02-fresh"))
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert f"{cost} points" in readme and f"Replaced at random they {cost_at_random}, orthonormal or Gaussian" in readme


def study_ppls(arm: str, data: str) -> dict[int, float]:
    """Return the perplexities of an arm of the study by seed, from its records alone."""
    runs = (ROOT / "results" / "study").glob(f"{arm}.{data}/workstation/default/seed-*/timing_stats.json")
    return {int(run.parent.name[5:]): json.loads(run.read_text(encoding="utf-8"))["best_ppl"] for run in runs}


def test_the_twenty_lines_of_the_study_recompute_its_headline(monkeypatch: pytest.MonkeyPatch) -> None:
    page = (ROOT / "docs/study.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"^```python\n(.*?)^```", page, flags=re.MULTILINE | re.DOTALL)
    monkeypatch.chdir(ROOT)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(code, "study.md", "exec"), {})
    _, *found = rows("docs/study.md", "python studies/headline.py")
    arm = next(row for row in found if row[0].startswith("queries are slices"))
    gap, share = printed.getvalue().splitlines()
    head, *kept = rows("docs/study.md", "oelm report --out results/study --table kept")
    share_of = next(row for row in kept if row[0].startswith("oelm_axes_q"))[head.index("tinystories")]
    assert gap.startswith(arm[1]) and share == f"share kept {share_of.split()[0]}"


def shown(gap: str) -> str:
    """Return a gap as a sentence has it: in whole percents, without sign and interval."""
    return f"about {abs(value(gap)):.0f}%"


def pages() -> tuple[str, str]:
    """Return the study's page and README, each on one line."""
    study, readme = (" ".join((ROOT / name).read_text(encoding="utf-8").split()) for name in ("docs/study.md", "README.md"))
    return study, readme


def arms() -> dict[str, list[str]]:
    """Return the rows of the study's first table by what they say of Q and K."""
    _, *found = rows("docs/study.md", "python studies/headline.py")
    return {row[0]: row for row in found}


def test_the_pages_say_what_freezing_and_slices_cost_and_save() -> None:
    whole, sliced = arms()["both learn (the baseline)"], arms()["queries are slices of the input; keys learn"]
    frozen = arms()["both frozen at random"]
    assert frozen[-1] == "no" and sliced[-1] == "yes"
    gaps_of = sliced[1:3]
    assert all(0 < low < high < 5 for low, high in map(ends, gaps_of))
    stored = [int(row[-3].replace(",", "")) for row in (whole, sliced)]
    low, high = (100 * (float(end) - 1) for end in re.findall(r"\d\.\d+", sliced[-2])[1:])
    assert low > 0
    for page in pages():
        assert f"perplexity is {shown(frozen[1])} higher on stories" in page
        assert f"{shown(gaps_of[0])} higher on stories and {shown(gaps_of[1])} higher on code" in page
        assert f"stores {100 * (1 - stored[1] / stored[0]):.0f}% fewer parameters" in page
        assert f"training step is about {low:.0f}% to {high:.0f}% faster" in page


def test_the_pages_say_that_half_of_the_rows_do_as_well_as_slices() -> None:
    half, sliced = arms()["both learn, half as wide"], arms()["queries are slices of the input; keys learn"]
    assert half[-3] == sliced[-3] and half[-1] == "yes"
    head, *found = rows("docs/study.md", "oelm report --out results/study --table controls")
    (against,) = [row for row in found if row[0].startswith("oelm_axes_q ") and row[2].startswith("half")]
    stories, code = (ends(against[head.index(data)]) for data in ("tinystories", "stdlib-3.11.7"))
    assert stories[0] > 0 and code[0] < 0 < code[1]
    for page in pages():
        assert f"{shown(half[1])} on stories and {shown(half[2])} on code" in page
        assert "Slices are worse than that on stories and not measurably different on code" in page


def test_the_pages_say_what_an_eighth_costs() -> None:
    lowrank = arms()["both are slices of the input; a small part learns on top"]
    thin = arms()["both learn, an eighth as wide"]
    assert lowrank[-3] == thin[-3] and lowrank[-1] == "undecided"
    assert thin[-1] == "Python's standard library: no; TinyStories: undecided"
    _, *found = rows("docs/study.md", "oelm report --out results/study --table controls")
    (against,) = [row for row in found if row[0].startswith("oelm_axes_lowrank ") and row[2].startswith("thin")]
    gap = next(cell for cell in against[4:] if cell)
    assert ends(gap)[1] <= 0
    study, readme = pages()
    assert f"cost {shown(lowrank[1])} on stories" in study and f"cost {shown(thin[1])}" in study
    assert all(f"On code, narrow queries and keys cost {shown(thin[2])}" in page for page in (study, readme))


def test_the_pages_say_what_is_left_of_the_faster_step_at_equal_seconds() -> None:
    found = gaps("docs/study.md", "oelm report --out results/study --table seconds", on="gap at equal seconds")
    sliced, half = found["oelm_axes_q after a short convolution"], found["half after a short convolution"]
    assert ends(sliced)[0] > 0 and ends(half)[0] < 0 < ends(half)[1]
    for page in pages():
        assert f"ahead of them by {shown(sliced)}" in page or f"ahead of the slices, by {shown(sliced)}" in page
        assert "not measurably ahead of queries and keys of half the width" in page


def test_the_pages_count_the_seeds_and_the_length_of_tokens() -> None:
    for data in ("tinystories", "stdlib"):
        base, arm = study_ppls("conv-learn", data), study_ppls("conv-slices-q", data)
        assert base.keys() & arm.keys() == {0, 1, 2, 3, 4}
    # The same nats per byte are twice as much per token where tokens are twice as long.
    doubled = []
    for data in ("tinystories", "stdlib"):
        base, arm = study_ppls("conv-learn", data), study_ppls("conv-slices-q", data)
        doubled.append(100 * (math.prod(arm[seed] / base[seed] for seed in arm) ** (2 / len(arm)) - 1))
    for page in pages():
        assert "five seeds" in page
        assert f"about {doubled[0]:.0f}% and {doubled[1]:.0f}%" in page
