"""What each ingredient is worth, and the same method on other data, computed once more by hand."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from oelm.report.sections.spread import RUNGS, added
from oelm.report.words import LANGUAGES, Words
from tests.report.by_hand import BASE, LADDER, ratio_by_hand, write_by_seed
from tests.report.reading import english, names, rows


@pytest.fixture(scope="module")
def ladder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("ladder")
    for experiment, figures in LADDER.items():
        write_by_seed(root, experiment, figures)
    return root


def test_the_ladder_climbs_in_order_and_each_step_is_against_the_one_below(ladder: Path) -> None:
    found = rows(english(ladder), "ladder")
    climb = list(LADDER)
    assert [(row["from"], row["to"]) for row in found] == list(zip(climb, climb[1:], strict=False))
    for row in found:
        assert row["gap [95%]"] == ratio_by_hand(LADDER[row["to"]], LADDER[row["from"]])
        assert row["seeds"] == "3"
    assert [row["what it adds"] for row in found] == [
        "random Q and K",
        "the scale of orthonormal rows",
        "orthonormal rows in every head",
        "learning Q and K",
    ]


def test_a_confounded_arm_is_no_rung(tmp_path: Path) -> None:
    for experiment, figures in LADDER.items():
        settings = {"optim.lr": 5e-4} if experiment == "GPT-02-matched" else {}
        write_by_seed(tmp_path, experiment, figures, settings=settings)
    assert [row["to"] for row in rows(english(tmp_path), "ladder")] == ["GPT-03", "GPT-02", "GPT-01"]


def test_a_step_over_a_missing_rung_adds_what_that_one_had_too(tmp_path: Path) -> None:
    for experiment in ("GPT-02-uniform", "GPT-02-matched", "GPT-01"):
        write_by_seed(tmp_path, experiment, LADDER[experiment])
    assert [(row["from"], row["to"], row["what it adds"]) for row in rows(english(tmp_path), "ladder")] == [
        ("GPT-02-uniform", "GPT-02-matched", "random Q and K, the scale of orthonormal rows"),
        ("GPT-02-matched", "GPT-01", "learning Q and K"),
    ]


def test_frames_across_all_heads_are_no_rung(tmp_path: Path) -> None:
    for experiment, figures in (LADDER | {"GPT-02-global": {0: 35.0, 1: 35.5, 2: 34.5}}).items():
        write_by_seed(tmp_path, experiment, figures)
    found = rows(english(tmp_path), "ladder")
    assert [row["from"] for row in found] + [found[-1]["to"]] == list(LADDER)


@pytest.mark.parametrize(("lower", "upper"), list(itertools.combinations(RUNGS, 2)))
def test_every_step_adds_something_that_its_lower_end_has_not(lower: str, upper: str) -> None:
    for lang in LANGUAGES:
        words = Words(lang)
        has = {words(f"rung.{ingredient}") for ingredient in RUNGS[lower]}
        told = added(lower, upper, words).split(words("list.separator"))
        assert all(told) and not has & set(told)


@pytest.mark.parametrize(
    ("lower", "upper", "told"),
    [
        ("gaussian_matched", "oelm_freeze_pretrained", "orthonormal rows in every head, the row space that was pretrained"),
        ("oelm_freeze", "oelm_freeze_pretrained", "the row space that was pretrained"),
        ("oelm_random", "pretrained_freeze", "the pretrained Q and K themselves"),
        ("oelm_freeze_pretrained", "baseline", "learning Q and K"),
    ],
)
def test_a_step_says_what_lies_between_its_ends(lower: str, upper: str, told: str) -> None:
    assert added(lower, upper, Words("en")) == told


def test_the_lean_baseline_is_no_rung(tmp_path: Path) -> None:
    for experiment, figures in (LADDER | {"GPT-01-lean": {0: 99.0, 1: 98.0, 2: 97.0}}).items():
        write_by_seed(tmp_path, experiment, figures)
    assert "GPT-01-lean" not in {name for row in rows(english(tmp_path), "ladder") for name in (row["from"], row["to"])}


def test_two_arms_make_no_ladder(tmp_path: Path) -> None:
    write_by_seed(tmp_path, "GPT-01", BASE)
    write_by_seed(tmp_path, "GPT-02", LADDER["GPT-02"])
    assert "ladder" not in names(english(tmp_path))


def test_the_same_method_across_data_sets(tmp_path: Path) -> None:
    first, second = LADDER["GPT-02"], {0: 52.0, 1: 53.0, 2: 51.0}
    write_by_seed(tmp_path, "GPT-01", BASE)
    write_by_seed(tmp_path, "GPT-02", first)
    write_by_seed(tmp_path, "GPT-04", {0: 50.0, 1: 50.5, 2: 49.5}, data="openwebtext")
    write_by_seed(tmp_path, "GPT-05", second, data="openwebtext")
    (row,) = rows(english(tmp_path), "classes")
    assert row["method"] == "oelm_freeze"
    assert row["tinystories"] == ratio_by_hand(first, BASE)
    assert row["openwebtext"] == ratio_by_hand(second, {0: 50.0, 1: 50.5, 2: 49.5})


def test_a_control_has_one_row_across_data_sets(tmp_path: Path) -> None:
    thin = {0: 31.5, 1: 31.9, 2: 31.4}
    for baseline, data in (("GPT-01", "tinystories"), ("GPT-04", "openwebtext")):
        write_by_seed(tmp_path, baseline, BASE, data=data)
        write_by_seed(tmp_path, f"{baseline}-thin", thin, data=data, settings={"model.qk_dim": 4})
    gap = ratio_by_hand(thin, BASE)
    (row,) = rows(english(tmp_path), "classes")
    assert (row["method"], row["openwebtext"], row["tinystories"]) == ("thin", gap, gap)
