"""Seeds on which a sweep chose a setting never enter the verdict on it, and the report says that they were left out."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from oelm.report.arms import collect
from oelm.report.build import build_report
from oelm.report.pairs import Findings, find
from tests.report.reading import english, rows, texts
from tests.report.synthetic import package_catalog, write_arm, write_sweep, write_tuned

# Of the sweep's second point.
VARIANT, RATE, CHOSEN = "lr-0.001-01", {"optim.lr": 1e-3}, (100, 101)
BASE = [20.0, 20.2, 19.9, 20.1, 20.3]
LUCKY = 10.0


def found(*roots: Path) -> Findings:
    return find(collect(roots), package_catalog(), roots)


def write_swept(root: Path, experiment: str, seeds: Sequence[int], *, is_swept: bool = True) -> None:
    """Write an arm at a point of its sweep: seeds from 100 on are far better than the others, whatever the arm."""
    if is_swept:
        write_sweep(root, experiment, 1)
    slower = 1.0 if experiment == "GPT-01" else 1.1
    figures = [slower * BASE[seed] + seed / 100 if seed < 100 else LUCKY + seed % 3 for seed in seeds]
    write_arm(root, experiment, figures, seeds=seeds, variant=VARIANT, settings=RATE)


def write_both(root: Path) -> None:
    for experiment in ("GPT-01", "GPT-02"):
        write_swept(root, experiment, [0, 1, 2, 3, 4, *CHOSEN])


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An arm and its baseline at a point of their sweeps, to be read only."""
    root = tmp_path_factory.mktemp("both")
    write_both(root)
    return root


def test_an_arm_and_its_baseline_are_compared_without_the_seeds_of_the_sweep(both: Path) -> None:
    (pair,) = found(both).pairs
    assert pair.seeds == [0, 1, 2, 3, 4]
    assert [sorted(arm.best) for arm in (pair.arm, pair.baseline)] == [[0, 1, 2, 3, 4]] * 2


def test_the_verdict_is_that_of_the_other_seeds(both: Path, tmp_path: Path) -> None:
    for experiment in ("GPT-01", "GPT-02"):
        write_swept(tmp_path, experiment, range(5), is_swept=False)
    ours, plain = (rows(english(root), "verdicts") for root in (both, tmp_path))
    assert ours == plain and ours[0]["verdict"] == "FAIL" and ours[0]["seeds / planned"] == "5/5"


@pytest.mark.parametrize(
    ("lang", "told"),
    [
        ("en", "{arm}: compared without the seeds 100, 101, because a sweep chose its setting on them."),
        ("zh", "{arm}\uff1a\u6bd4\u8f83\u65f6\u4e0d\u8ba1\u79cd\u5b50 100\u3001101"),
    ],
)
def test_the_report_says_which_seeds_are_left_out_and_why(both: Path, lang: str, told: str) -> None:
    warnings = texts(build_report([both], package_catalog()).document(lang), "verdicts", "warning")
    for experiment in ("GPT-01", "GPT-02"):
        expected = told.format(arm=f"{experiment}/laptop/{VARIANT}")
        assert sum(text.startswith(expected) for text in warnings) == 1


def test_the_headline_stays_the_first_thing_that_is_said(both: Path) -> None:
    assert texts(english(both), "verdicts")[0].startswith("Comparisons: 1.")


def test_a_sweep_alone_is_left_out_without_a_word(tmp_path: Path) -> None:
    for experiment in ("GPT-01", "GPT-02"):
        write_swept(tmp_path, experiment, CHOSEN)
    findings = found(tmp_path)
    assert findings.pairs == () and findings.swept == {}


def test_a_baseline_that_has_the_sweeps_seeds_alone_is_none_and_it_is_said(tmp_path: Path) -> None:
    write_swept(tmp_path, "GPT-01", CHOSEN)
    write_swept(tmp_path, "GPT-02", [0, 1, *CHOSEN], is_swept=False)
    findings = found(tmp_path)
    assert findings.pairs == () and findings.swept == {("GPT-01", "laptop", VARIANT): CHOSEN}


def test_each_side_lacks_the_seeds_of_its_own_sweep(tmp_path: Path) -> None:
    write_swept(tmp_path, "GPT-01", [0, 1, *CHOSEN], is_swept=False)
    write_swept(tmp_path, "GPT-02", [0, 1, *CHOSEN])
    findings = found(tmp_path)
    assert findings.pairs[0].seeds == [0, 1] and findings.swept == {("GPT-02", "laptop", VARIANT): CHOSEN}


def test_seeds_of_a_sweep_at_another_setting_stay(tmp_path: Path) -> None:
    for experiment in ("GPT-01", "GPT-02"):
        write_sweep(tmp_path, experiment, 1)
        write_arm(tmp_path, experiment, [30.0, 31.0], seeds=CHOSEN)
    findings = found(tmp_path)
    assert findings.pairs[0].seeds == [*CHOSEN] and findings.swept == {}


def test_the_best_of_a_sweep_is_not_judged_on_the_sweeps_seeds_either(tmp_path: Path) -> None:
    for experiment in ("GPT-01", "GPT-02"):
        write_sweep(tmp_path, experiment, 1)
        write_tuned(tmp_path, experiment, 1e-3)
        write_arm(tmp_path, experiment, [LUCKY], seeds=CHOSEN[:1], variant="tuned-0123abcd", settings=RATE)
    (pair,) = found(tmp_path).pairs
    assert pair.seeds == [0, 1] and pair.confounded == ()


def test_a_sweep_counts_in_whichever_folder_it_was_made(tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    for experiment in ("GPT-01", "GPT-02"):
        write_sweep(here, experiment, 0, rates=(1e-4, 2e-4))
        write_swept(there, experiment, [0, 1, *CHOSEN])
    (pair,) = found(here, there).pairs
    assert pair.seeds == [0, 1]


def test_figures_are_of_the_seeds_that_are_compared(both: Path) -> None:
    document = english(both)
    first = next(row for row in rows(document, "figures") if row["arm"].startswith("GPT-01 "))
    assert first["by seed"] == "0: 20.00, 1: 20.21, 2: 19.92, 3: 20.13, 4: 20.34" and first["mean"] == "20.12"
    told = next(row["measured"] for row in rows(document, "reported") if row["experiment"] == "GPT-01")
    assert told == f"20.12 (laptop, {VARIANT}, n=5)"


def test_tries_are_no_measurements_beside_what_was_reported(tmp_path: Path) -> None:
    for point in write_sweep(tmp_path, "GPT-01", 1).points:
        write_arm(tmp_path, "GPT-01", [20.0] * len(point.seeds), seeds=point.seeds, variant=point.variant)
    write_tuned(tmp_path, "GPT-01", 1e-3)
    told = next(row["measured"] for row in rows(english(tmp_path), "reported") if row["experiment"] == "GPT-01")
    assert told == "30.50 (laptop, tuned, n=2)"


def test_each_folders_runs_have_the_sweep_that_lies_beside_them(tmp_path: Path) -> None:
    first, second = tmp_path / "a", tmp_path / "b"
    for experiment, best, rate in (("GPT-01", 1, 1e-3), ("GPT-02", 2, 3e-3)):
        write_sweep(first, experiment, best)
        write_sweep(second, experiment, 0)
        write_tuned(first, experiment, rate)
    for roots in ((first, second), (second, first)):
        (pair,) = found(*roots).pairs
        assert pair.confounded == ()


def test_points_of_a_sweep_stand_in_its_table_and_not_among_the_figures(tmp_path: Path) -> None:
    for point in write_sweep(tmp_path, "GPT-01", 1).points:
        write_arm(tmp_path, "GPT-01", [20.0] * len(point.seeds), seeds=point.seeds, variant=point.variant)
    # All there is, as long as nothing else is.
    assert len(rows(english(tmp_path), "figures")) == 3
    write_tuned(tmp_path, "GPT-01", 1e-3)
    document = english(tmp_path)
    assert [row["arm"] for row in rows(document, "figures")] == ["GPT-01 (tuned)"]
    assert len(rows(document, "tuning")) == 3


def test_a_tuned_arm_has_its_digest_where_another_is_to_be_told_from_it(tmp_path: Path) -> None:
    write_tuned(tmp_path, "GPT-01", 1e-3)
    write_arm(tmp_path, "GPT-01", [30.0, 31.0], seeds=[0, 1], variant="tuned-steps-8-89abcdef", settings={"steps": 8})
    assert {row["arm"] for row in rows(english(tmp_path), "figures")} == {"GPT-01 (tuned)", "GPT-01 (tuned-steps-8)"}
    write_arm(tmp_path, "GPT-01", [30.0, 31.0], seeds=[0, 1], variant="tuned-89abcdef", settings={"optim.lr": 3e-3})
    names = {row["arm"] for row in rows(english(tmp_path), "figures")}
    assert names == {"GPT-01 (tuned-0123abcd)", "GPT-01 (tuned-89abcdef)", "GPT-01 (tuned-steps-8)"}
