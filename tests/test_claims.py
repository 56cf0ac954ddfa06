"""What README and docs say in words is what their tables say: where a test fails, write its sentence anew in both languages."""

from __future__ import annotations

import contextlib
import io
import json
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
    names = [next(cell for cell in row if "_" in cell or cell.startswith(("thin", "baseline", "uniform"))) for row in found]
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


def test_freezing_what_was_pretrained_costs_nothing_that_shows_and_replacing_it_does() -> None:
    found = gaps("docs/bert-study.md", "python studies/bert.py table")
    low, high = ends(found["pretrained_freeze"])
    assert low < 0 < high
    assert all(ends(found[arm])[1] < 0 for arm in ("oelm_freeze_pretrained", "oelm_freeze", "gaussian_matched", "oelm_random"))


def test_keeping_the_row_space_helps_and_orthogonality_does_not() -> None:
    found = gaps("docs/bert-study.md", "python studies/bert.py pairs")
    assert ends(found["oelm_freeze_pretrained"])[0] > 0
    assert all(low < 0 < high for low, high in (ends(found[arm]) for arm in ("gaussian_matched", "oelm_random")))


def study_ppls(arm: str, data: str) -> dict[int, float]:
    """Return the perplexities of an arm of the study by seed, from its records alone."""
    runs = (ROOT / "results" / "study").glob(f"{arm}.{data}/workstation/*/seed-*/timing_stats.json")
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


def test_the_study_says_what_its_records_say() -> None:
    page, readme = (" ".join((ROOT / name).read_text(encoding="utf-8").split()) for name in ("docs/study.md", "README.md"))
    _, *found = rows("docs/study.md", "python studies/headline.py")
    whole, sliced = (next(row for row in found if row[0].startswith(start)) for start in ("both learn", "queries are slices"))
    gaps_of = sliced[1:-3]
    assert len(gaps_of) == 2 and "**two corpora**" in page and "two texts" in readme
    assert all(0 < low < high < 5 for low, high in map(ends, gaps_of))
    for gap, text in zip(gaps_of, ("on stories", "on Python code"), strict=True):
        assert all(f"about {value(gap):.0f}% higher {text}" in told for told in (page, readme))
    frozen, thin = (
        next(row for row in found if row[0].startswith(start)) for start in ("both frozen", "both learn, an eighth")
    )
    assert frozen[-1] == "no" and value(thin[1]) > value(sliced[1])
    assert all(f"perplexity is about {value(frozen[1]):.0f}% higher on stories" in told for told in (page, readme))
    assert all(f"at about {value(thin[1]):.0f}% on stories" in told for told in (page, readme))
    stored = [int(row[-3].replace(",", "")) for row in (whole, sliced)]
    faster = [100 * (float(end) - 1) for end in re.findall(r"\d\.\d+", sliced[-2])[1:]]
    assert faster[0] > 0
    for text in (page, readme):
        assert f"stores {100 * (1 - stored[1] / stored[0]):.0f}% fewer parameters" in text
        assert f"training step is about {faster[0]:.0f}% to {faster[1]:.0f}% faster" in text
    counts = {}
    for data, text in {"tinystories": "stories", "stdlib": "Python code"}.items():
        base, arm = study_ppls("conv-learn", data), study_ppls("conv-slices-q", data)
        counts[data] = len(base.keys() & arm.keys())
        named = f"{text} ({ {3: 'three', 4: 'four', 5: 'five'}[counts[data]] } seeds)"
        assert named in page and named in readme
    assert (sliced[-1] == "yes") == (set(counts.values()) == {5})
