"""Two kinds of luck: estimated apart where they are apart, and not at all where the design cannot tell them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from oelm.report.draws import Crossed, spread
from oelm.report.verdict import Looks
from tests.report.reading import english, names, rows, texts
from tests.report.synthetic import write_arm


def crossed(*, over_draws: float, over_seeds: float, rest: float, draws: int, seeds: int, seed: int) -> Crossed:
    """Return log PPLs of a study in which the spreads are known."""
    random = np.random.default_rng(seed)
    by_draw, by_seed = over_draws * random.standard_normal(draws), over_seeds * random.standard_normal(seeds)
    noise = rest * random.standard_normal((draws, seeds))
    return {(d, s): 3.0 + by_draw[d] + by_seed[s] + noise[d, s] for d in range(draws) for s in range(seeds)}


@pytest.mark.parametrize(("over_draws", "over_seeds"), [(0.03, 0.01), (0.01, 0.03), (0.02, 0.0)])
def test_many_studies_estimate_both_variances_without_bias(over_draws: float, over_seeds: float) -> None:
    found = [
        spread(crossed(over_draws=over_draws, over_seeds=over_seeds, rest=0.005, draws=40, seeds=40, seed=number))
        for number in range(40)
    ]
    # The mean of 40 estimates of a variance from 40 levels each has a relative error of about sqrt(2 / 1600) = 3.5%.
    for name, true in (("over_draws", over_draws), ("over_seeds", over_seeds), ("rest", 0.005)):
        mean = np.mean([getattr(each, name) ** 2 for each in found])
        assert mean == pytest.approx(true**2, rel=0.15, abs=1e-7)


def test_a_single_table_is_computed_as_by_hand() -> None:
    found = spread({(0, 0): 1.0, (0, 1): 2.0, (1, 0): 3.0, (1, 1): 6.0})
    assert found is not None
    # Means: draws 1.5 and 4.5, seeds 2 and 4, all 3. Squares: draws 9, seeds 4, rest 1, one degree of freedom each.
    assert found.rest == pytest.approx(1.0)
    assert found.over_draws == pytest.approx(2.0)
    assert found.over_seeds == pytest.approx((3 / 2) ** 0.5)


def test_a_table_of_more_draws_than_seeds_is_computed_as_by_hand() -> None:
    found = spread({(0, 0): 1.0, (0, 1): 2.0, (1, 0): 3.0, (1, 1): 6.0, (2, 0): 5.0, (2, 1): 7.0})
    assert found is not None
    # Means: draws 1.5, 4.5 and 6, seeds 3 and 5, all 4. Squares: draws 2 x 10.5 over 2, seeds 3 x 2 over 1; what is left is
    # 0.5, -0.5, -0.5, 0.5, 0 and 0, squared 1 over 2. F(2, 2) is above 10.5 / 0.5 = 21 with a chance of 1 / (1 + 21).
    expected = {"over_draws": 5.0**0.5, "over_seeds": (5.5 / 3) ** 0.5, "rest": 0.5**0.5, "p_value": 1 / 22}
    assert {name: getattr(found, name) for name in expected} == pytest.approx(expected)


@pytest.mark.parametrize(("over_draws", "draws", "seeds"), [(0.03, 12, 2), (0.01, 6, 3), (0.0, 4, 2)])
def test_the_interval_holds_the_spread_over_draws_nineteen_times_of_twenty(over_draws: float, draws: int, seeds: int) -> None:
    found = [
        spread(crossed(over_draws=over_draws, over_seeds=0.02, rest=0.01, draws=draws, seeds=seeds, seed=number))
        for number in range(1000)
    ]
    held = np.mean([each is not None and each.low <= over_draws <= each.high for each in found])
    # Three standard errors of a share of 0.95 among 1000 are 0.021; at no spread at all only the lower end can miss.
    assert 0.95 - 0.021 < held < (0.95 + 0.021 if over_draws else 1.0)
    assert all(each is not None and each.low <= each.over_draws <= each.high for each in found)


def test_draws_that_make_no_difference_seem_to_in_one_of_twenty_studies() -> None:
    studies = [
        spread(crossed(over_draws=0.0, over_seeds=0.02, rest=0.01, draws=4, seeds=3, seed=number)) for number in range(1000)
    ]
    share = np.mean([each is not None and each.p_value < 0.05 for each in studies])
    # Binomial with n = 1000 and p = 0.05: three standard errors are 0.021.
    assert share == pytest.approx(0.05, abs=0.021)


def test_a_variance_is_never_below_zero() -> None:
    found = spread({(0, 0): 1.0, (0, 1): 2.0, (1, 0): 2.0, (1, 1): 1.0})
    assert found is not None
    assert (found.over_draws, found.over_seeds) == (0.0, 0.0)


@pytest.mark.parametrize(
    "values",
    [{}, {(0, 0): 1.0}, {(0, 0): 1.0, (1, 0): 2.0}, {(0, 0): 1.0, (0, 1): 2.0}, {(0, 0): 1.0, (0, 1): 2.0, (1, 0): 3.0}],
)
def test_a_design_that_cannot_tell_them_apart_gives_nothing(values: Crossed) -> None:
    assert spread(values) is None


def test_equal_figures_have_no_spread() -> None:
    found = spread(dict.fromkeys([(0, 0), (0, 1), (1, 0), (1, 1)], 2.0))
    assert found is not None
    assert (found.over_draws, found.over_seeds, found.rest, found.p_value) == (0.0, 0.0, 0.0, 1.0)


# By draw, a PPL for each of two seeds of training: means of 20 and 25, so 22% apart; seeds make no difference.
FAR_APART = {11: (20.0, 20.0), 12: (25.0, 25.0)}
ALIKE = {11: (30.0, 31.0), 12: (30.0, 31.0)}


def write_draws(root: Path, figures: dict[int, tuple[float, float]], *, name: str = "", **chosen: Any) -> None:
    """Write every draw of GPT-02 as a variant of its own."""
    settings = chosen.pop("settings", {})
    for draw, ppls in figures.items():
        variant = f"{name}seed-{draw}"
        write_arm(root, "GPT-02", ppls, seeds=(2, 3), variant=variant, settings={**settings, "method.seed": draw}, **chosen)


def spreads(root: Path) -> dict[str, tuple[str, str]]:
    """Return the table's spread over draws and over seeds by the name of the row."""
    return {row["arm"]: (row["over draws [95%]"].split(" ")[0], row["over seeds"]) for row in rows(english(root), "draws")}


def test_the_draws_of_one_recipe_make_one_row(tmp_path: Path) -> None:
    write_draws(tmp_path, FAR_APART)
    (row,) = rows(english(tmp_path), "draws")
    assert (row["arm"], row["budget"], row["steps"], row["draws x seeds"]) == ("GPT-02", "laptop", "20", "2 x 2")
    # |log(20 / 25)| / sqrt(2).
    assert row["over draws [95%]"].startswith("15.78% [")


def test_draws_that_are_compared_with_each_other_are_not_said_to_lack_a_baseline(tmp_path: Path) -> None:
    write_draws(tmp_path, FAR_APART)
    assert "compared with nothing" not in "".join(texts(english(tmp_path), "verdicts"))
    write_draws(tmp_path, {13: (22.0, 22.0)}, name="alone-", settings={"optim.lr": 0.1})
    assert "GPT-02/laptop/alone-seed-13: compared with nothing" in "".join(texts(english(tmp_path), "verdicts"))


def test_the_same_draws_at_another_rate_are_another_row(tmp_path: Path) -> None:
    write_draws(tmp_path, FAR_APART, settings={"optim.lr": 0.001})
    write_draws(tmp_path, ALIKE, name="lr-0.1-", settings={"optim.lr": 0.1})
    # |log(30 / 31)| / sqrt(2).
    expected = {"GPT-02 (optim.lr=0.001)": ("15.78%", "0.00%"), "GPT-02 (optim.lr=0.1)": ("0.00%", "2.32%")}
    assert spreads(tmp_path) == expected


def test_the_same_draws_on_other_data_are_another_row(tmp_path: Path) -> None:
    write_draws(tmp_path, FAR_APART, fingerprint="aaaaaaaa" + "0" * 56)
    write_draws(tmp_path, ALIKE, name="other-", fingerprint="bbbbbbbb" + "0" * 56)
    assert set(spreads(tmp_path)) == {"GPT-02 (data.fingerprint=aaaaaaaa)", "GPT-02 (data.fingerprint=bbbbbbbb)"}


def test_draws_at_two_lengths_are_told_apart_by_their_steps_alone(tmp_path: Path) -> None:
    write_draws(tmp_path, FAR_APART)
    write_draws(tmp_path, ALIKE, name="longer-", steps=40)
    assert [(row["arm"], row["steps"]) for row in rows(english(tmp_path), "draws")] == [("GPT-02", "20"), ("GPT-02", "40")]


def test_draws_at_a_rate_each_are_no_design(tmp_path: Path) -> None:
    for draw, ppls in FAR_APART.items():
        write_draws(tmp_path, {draw: ppls}, settings={"optim.lr": draw / 1000})
    assert "draws" not in names(english(tmp_path))


def test_a_stray_draw_takes_none_of_the_others_away(tmp_path: Path) -> None:
    write_draws(tmp_path, FAR_APART | {13: (22.0, 22.0)})
    write_arm(tmp_path, "GPT-02", (25.0, 25.5), seeds=(3, 9), variant="seed-14", settings={"method.seed": 14})
    assert [row["draws x seeds"] for row in rows(english(tmp_path), "draws")] == ["3 x 2"]


def test_a_run_under_two_names_counts_once(tmp_path: Path) -> None:
    write_draws(tmp_path, FAR_APART)
    write_draws(tmp_path, FAR_APART, name="again-")
    assert [row["draws x seeds"] for row in rows(english(tmp_path), "draws")] == ["2 x 2"]


def write_one_draw(root: Path, **settings: Any) -> None:
    write_arm(root, "GPT-01", (20.0, 20.2, 19.9, 20.1, 20.3))
    write_arm(root, "GPT-02", (20.1, 20.2, 20.0, 20.1, 20.4), settings={"method.seed": 11, **settings})


def test_all_seeds_on_one_draw_give_no_verdict_and_are_no_look(tmp_path: Path) -> None:
    write_one_draw(tmp_path)
    document = english(tmp_path)
    assert [row["verdict"] for row in rows(document, "verdicts")] == ["exploratory"]
    assert any("the same frames (method.seed is 11)" in text for text in texts(document, "verdicts"))
    assert Looks.read(tmp_path).entries == {}


@pytest.mark.parametrize("init", ["native", "orthonormalized"])
def test_what_is_not_drawn_is_judged_whatever_seed_its_frames_are_given(tmp_path: Path, init: str) -> None:
    write_one_draw(tmp_path, **{"method.init": init})
    assert [row["verdict"] for row in rows(english(tmp_path), "verdicts")] == ["PASS"]
