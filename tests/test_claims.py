"""What README and docs say in words is what their tables say: where a test fails, write its sentence anew in both languages."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
STUDY, PAGE = "oelm report --out results/variants --table classes", "docs/study.md"
STDLIB = "stdlib-3.11.7"
CORPORA = ["tinystories", "openwebtext", "wikitext103", STDLIB]


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


@pytest.fixture(scope="module")
def selected() -> dict[str, float]:
    """The gaps of the arms that were selected among."""
    found = gaps(PAGE, "oelm report --out results/selection --table classes", on="tinystories (steps-500)")
    return {arm: value(gap) for arm, gap in found.items()}


def test_it_is_the_first_layer_that_needs_to_learn(selected: dict[str, float]) -> None:
    everywhere = selected["oelm_freeze"]
    assert all(abs(selected[arm] - everywhere) < 3 for arm in ("oelm_first_half", "oelm_even"))
    assert all(selected[arm] < 2 for arm in ("oelm_last_half", "oelm_odd", "oelm_first_free"))


def test_the_later_it_begins_to_learn_the_more_it_costs_and_a_quarter_is_too_short(selected: dict[str, float]) -> None:
    # The first layer begins at a quarter, at half and at three quarters of the training.
    early, half, late = (selected[arm] for arm in ("thaw_first_first", "thaw_together", "thaw_last_first"))
    assert early < half < late
    assert abs(selected["train_then_freeze"] - selected["oelm_freeze"]) < 3


def test_entries_as_small_as_the_earlier_studys_are_worth_no_more_than_no_attention(selected: dict[str, float]) -> None:
    assert abs(selected["oelm_random"] - selected["uniform"]) < 2 and selected["uniform"] > selected["oelm_freeze"] + 10
    assert selected["oelm_global"] > selected["oelm_freeze"] > selected["oelm_scaled"]


def test_a_gain_per_head_helps_nothing_and_a_matrix_less_than_a_correction(selected: dict[str, float]) -> None:
    assert selected["oelm_head_gain"] > selected["oelm_freeze"] - 1
    assert selected["oelm_lowrank"] + 3 < selected["oelm_matrix"] < selected["oelm_freeze"] / 2


def test_one_of_the_two_may_be_frozen_at_a_small_cost(selected: dict[str, float]) -> None:
    assert all(1 < selected[arm] < 5 for arm in ("oelm_q_only", "oelm_k_only"))


def test_a_correction_of_the_first_layer_does_about_as_well_as_one_of_all(selected: dict[str, float]) -> None:
    # Within a point; on the two seeds that were selected on it was 0.3, and 'about' is all that is said of three.
    assert abs(selected["oelm_lowrank_first"] - selected["oelm_lowrank"]) < 1
    found = gaps(PAGE, "oelm report --out results/selection --table controls", on="tinystories (steps-500)")
    assert ends(found["oelm_lowrank_first"])[1] < 0 < ends(found["oelm_matrix"])[0]


def test_the_longer_it_is_trained_the_less_pure_freezing_loses_and_the_others_lose_no_more_that_shows() -> None:
    command = "--out results/variants --out results/selection --table sizes"
    text = (ROOT / PAGE).read_text(encoding="utf-8").replace("\\", "")
    head, _, short, long = re.search(rf"{re.escape(command)} -->\n\n(.*?)\n\n", text, re.DOTALL)[1].splitlines()  # type: ignore[index]
    cells = {name: (short.split("|")[n], long.split("|")[n]) for n, name in enumerate(map(str.strip, head.split("|")))}
    assert ends(cells["oelm_freeze"][1])[1] < ends(cells["oelm_freeze"][0])[0] and ends(cells["oelm_freeze"][1])[0] > 5
    for arm in ("oelm_lowrank", "oelm_last_half"):
        assert ends(cells[arm][1])[0] < value(cells[arm][0])


def test_the_draw_makes_no_difference_that_shows_and_good_frames_cannot_be_told() -> None:
    _, (*_, over_draws, _, _, p) = rows(PAGE, "oelm report --out results/draws --table draws")
    low, high = re.findall(r"\d+\.\d+", over_draws)[1:]
    assert float(low) == 0 and float(high) < 1.1 and float(p) > 0.05
    _, agreement, overlap, early, _ = rows(PAGE, "python studies/draws.py")
    assert all(float(row[4]) > 0.05 for row in (agreement, overlap))
    assert float(early[4]) < 0.05 and -1 < value(early[5]) < 0


def test_the_wider_the_model_the_less_freezing_costs_and_the_correction_may_miss_the_target_at_64_alone() -> None:
    folders = "--out results/width-64 --out results/variants --out results/width-192"
    _, *widths = rows(PAGE, f"oelm report GPT-09 GPT-09-lowrank {folders} --table sizes")
    assert [row[1] for row in widths] == ["4 x 64", "4 x 128", "4 x 192"]
    frozen, corrected = ([row[place] for row in widths] for place in (-2, -1))
    for arm in (frozen, corrected):
        assert value(arm[0]) > value(arm[1]) > value(arm[2])
    assert ends(frozen[2])[1] < ends(frozen[0])[0] and all(ends(gap)[0] > 5 for gap in frozen)
    assert [ends(gap)[1] > 5 for gap in corrected] == [True, False, False]


@pytest.mark.parametrize("corpus", CORPORA)
@pytest.mark.parametrize(("page", "command"), [("README.md", STUDY), ("README.zh-CN.md", f"{STUDY} --lang zh"), (PAGE, STUDY)])
def test_pure_freezing_misses_the_target_and_a_little_learning_meets_it(page: str, command: str, corpus: str) -> None:
    found = gaps(page, command, on=corpus)
    assert {arm: found[arm][0] for arm in ("oelm_freeze", "gaussian_matched")} == {"oelm_freeze": "✗", "gaussian_matched": "✗"}
    assert found["oelm_lowrank"][0] == "✓"


@pytest.mark.parametrize("corpus", CORPORA)
def test_frozen_in_the_last_half_of_the_layers_alone_the_target_is_met(corpus: str) -> None:
    assert gaps(PAGE, STUDY, on=corpus)["oelm_last_half"][0] == "✓"


@pytest.mark.parametrize("corpus", CORPORA)
def test_what_a_little_learning_costs_shows_on_the_standard_library_alone(corpus: str) -> None:
    gap = gaps(PAGE, STUDY, on=corpus)["oelm_lowrank"]
    low, high = ends(gap)
    # "About 2%": the interval is that of a verdict among six, at 99.17%.
    assert low > 1 and abs(value(gap) - 2) < 0.5 if corpus == STDLIB else low < 0 < high


@pytest.mark.parametrize("corpus", CORPORA)
def test_a_little_learning_loses_less_than_the_thin_control(corpus: str) -> None:
    assert ends(gaps(PAGE, "oelm report --out results/variants --table controls", on=corpus)["oelm_lowrank"])[1] < 0


BEHIND, UNIFORM = "oelm_freeze after a short convolution", "uniform after a short convolution"


def test_behind_a_short_convolution_pure_freezing_meets_the_target_or_is_at_its_edge() -> None:
    assert {corpus: gaps(PAGE, STUDY, on=corpus)[BEHIND][:1] for corpus in CORPORA} == {
        "tinystories": "△",
        "openwebtext": "",
        "wikitext103": "△",
        STDLIB: "✓",
    }


SECOND = "oelm report --out results/short-conv --table classes"


@pytest.mark.parametrize(("corpus", "of_uniform"), [("tinystories", "△"), ("openwebtext", "✓"), ("wikitext103", "✓")])
@pytest.mark.parametrize(("page", "lang"), [("README.md", ""), ("README.zh-CN.md", " --lang zh"), (PAGE, "")])
def test_behind_a_short_convolution_frames_meet_the_target_and_uniform_attention_does_on_two_corpora(
    page: str, lang: str, corpus: str, of_uniform: str
) -> None:
    found = [gap[0] for gap in gaps(page, SECOND + lang, on=corpus).values()]
    assert found == ["✓", of_uniform]


@pytest.mark.parametrize("arm", ["GPT-05", "GPT-07"])
def test_behind_a_short_convolution_frames_add_nothing_to_uniform_attention_on_two_corpora(arm: str) -> None:
    steps = [row for row in rows(PAGE, "oelm report --out results/short-conv --table ladder") if row[1].startswith(arm)]
    added, learnt = (ends(row[4]) for row in steps)
    assert -0.7 < added[0] < 0 < added[1] < 0.7 and -2 < learnt[0] < learnt[1] < 0


def test_behind_a_short_convolution_frames_gain_over_uniform_attention_about_three_fifths_of_what_learning_does() -> None:
    rows = [
        line.replace("\\", "") for line in (ROOT / PAGE).read_text().splitlines() if line.startswith("| GPT-01-conv (tuned), ")
    ]
    frames, learning = (ends(row) for row in rows)
    assert frames[1] < 0 and learning[1] < 0
    ours, theirs = (value(row.split("|")[5]) for row in rows)
    assert 0.55 < ours / (ours + theirs) < 0.65


def test_behind_a_short_convolution_frames_are_worth_their_place_on_the_standard_library() -> None:
    assert {page: gaps(page, STUDY, on=STDLIB)[UNIFORM][0] for page in ("README.md", PAGE)} == {"README.md": "✗", PAGE: "✗"}
    _, added, learnt = rows(PAGE, "oelm report GPT-09-conv GPT-09-conv-uniform --out results/variants --table ladder")
    assert ends(added[4])[1] < 0 and 0.65 < value(added[4]) / (value(added[4]) + value(learnt[4])) < 0.75


@pytest.mark.parametrize(("corpus", "is_told"), [("tinystories", True), ("wikitext103", False), (STDLIB, True)])
def test_behind_a_short_convolution_it_does_better_than_the_plain_baseline(corpus: str, is_told: bool) -> None:
    found = gaps(PAGE, "oelm report --out results/variants --table plain", on=corpus)
    # Baselines that began badly hide on one corpus what the convolution does for them.
    assert ends(found[BEHIND])[1] < 0 and (ends(found["baseline after a short convolution"])[1] < 0) == is_told


def test_behind_a_short_convolution_the_first_layer_looks_at_everything() -> None:
    text = (ROOT / "docs/log.md").read_text(encoding="utf-8")
    for arm in ("GPT-01-conv", "GPT-02-conv"):
        row = next(line for line in text.splitlines() if line.startswith(f"| {arm} (tuned)") and "logits" in line)
        first, *others = [float(cell) for cell in row.strip("|").split("|")[4:]]
        assert first < 0.3 and all(first < other / 4 for other in others)


@pytest.mark.parametrize("corpus", CORPORA)
def test_logits_twice_as_large_lose_less_in_the_mean_and_meet_the_target_nowhere(corpus: str) -> None:
    found = gaps(PAGE, STUDY, on=corpus)
    assert found["oelm_scaled"][0] in "✗△" and value(found["oelm_scaled"]) < value(found["oelm_freeze"])


@pytest.mark.parametrize("frozen", ["GPT-02", "GPT-05", "GPT-07", "GPT-09"])
def test_orthonormal_rows_add_nothing_that_shows(frozen: str) -> None:
    step = f"{frozen}-matched (tuned) | {frozen} (tuned)"
    row = next(line for line in (ROOT / PAGE).read_text().splitlines() if step in line)
    low, high = ends(row.replace("\\", ""))
    assert low < 0 < high and (frozen != "GPT-02" or (low > -3.5 and high < 3.5))


def test_the_thin_control_meets_the_target_on_tinystories_and_may_or_may_not_elsewhere() -> None:
    assert [gaps(PAGE, STUDY, on=corpus)["thin"][0] for corpus in CORPORA] == ["✓", "△", "△", "△"]


def test_the_pages_name_every_corpus_that_the_table_has() -> None:
    text = (ROOT / PAGE).read_text(encoding="utf-8")
    head = next(line for line in text.splitlines() if line.startswith("| class | method |"))
    assert [cell.strip() for cell in head.strip("|").split("|")][4:] == CORPORA


def test_freezing_what_was_pretrained_costs_nothing_that_shows_and_replacing_it_does() -> None:
    found = gaps("docs/bert-study.md", "python studies/bert.py table")
    low, high = ends(found["pretrained_freeze"])
    assert low < 0 < high
    assert all(ends(found[arm])[1] < 0 for arm in ("oelm_freeze_pretrained", "oelm_freeze", "gaussian_matched", "oelm_random"))


def test_keeping_the_row_space_helps_and_orthogonality_does_not() -> None:
    found = gaps("docs/bert-study.md", "python studies/bert.py pairs")
    assert ends(found["oelm_freeze_pretrained"])[0] > 0
    assert all(low < 0 < high for low, high in (ends(found[arm]) for arm in ("gaussian_matched", "oelm_random")))
