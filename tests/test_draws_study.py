"""Draws of frames: planted spreads and scores are found, others are not, and gaps in the design are refused."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import fmean
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from oelm.budget import budget_settings
from oelm.config import parse_config, with_overrides
from tests.test_figures import script

DRAWS, SEEDS = (11, 12, 13, 14, 15), (2, 3)


@pytest.fixture(scope="module")
def draws() -> ModuleType:
    return script("studies/draws.py")


# Of the 100 steps these are for warming up, and a third is 33.
WARMUP = 12


def write_run(
    folder: Path,
    draw: int | None,
    seed: int,
    *,
    ppl: float,
    early: float = 5.0,
    data: str = "0" * 64,
    settings: Mapping[str, Any] | None = None,
) -> None:
    """Write the record of one run of frames with a seed of their own; `early` is its loss before a third is done."""
    changes = {"method": "oelm_freeze", "seed": seed, "model.vocab_size": 64, "steps": 100, "schedule.warmup_steps": WARMUP}
    config = parse_config(with_overrides(budget_settings("smoke"), changes), where="here").as_dict()
    config = with_overrides(config, {"method.seed": draw, **(settings or {})})
    place = folder / f"GPT-02/laptop/seed-{draw}/seed-{seed}"
    place.mkdir(parents=True)
    (place / "config.json").write_text(json.dumps(config))
    (place / "timing_stats.json").write_text(json.dumps({"best_ppl": ppl}))
    (place / "manifest.json").write_text(json.dumps({"data": {"fingerprint": data}}))
    # Outside of the window losses differ by draw too, but say nothing.
    noise = (7 * (draw or 0)) % 5
    rows = [{"step": step, "loss": early if WARMUP < step <= 33 else 9.0 + noise} for step in range(2, 101, 2)]
    lines = [*rows, {"step": 100, "val_loss": math.log(ppl), "val_ppl": ppl}]
    (place / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def write_all(folder: Path, ppl: Callable[[int, int], float], early: Callable[[int], float] = lambda draw: 5.0) -> None:
    for draw in DRAWS:
        for seed in SEEDS:
            write_run(folder, draw, seed, ppl=ppl(draw, seed), early=early(draw))


def table(module: ModuleType, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any, *more: str) -> list[list[str]]:
    monkeypatch.setattr("sys.argv", ["draws.py", "--results", str(folder), *more])
    module.main()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in capsys.readouterr().out.splitlines()]


def test_the_frames_of_a_draw_do_not_depend_on_the_seed_of_training(draws: ModuleType, tmp_path: Path) -> None:
    write_all(tmp_path, lambda draw, seed: 20.0)
    runs = draws.read(tmp_path)
    scores = {(run.draw, run.seed): (draws.agreement(run), draws.overlap(run)) for run in runs}
    assert len(scores) == len(DRAWS) * len(SEEDS)
    assert all(scores[draw, SEEDS[0]] == scores[draw, SEEDS[1]] for draw in DRAWS)
    assert len({scores[draw, SEEDS[0]] for draw in DRAWS}) == len(DRAWS)
    # Two random spans of 16 rows in 32 columns: of the 16 squared cosines half is expected.
    assert all(6 < overlap < 10 for _, overlap in scores.values())


@pytest.mark.parametrize("place", [0, 1])
def test_a_score_that_decides_the_perplexity_is_found(draws: ModuleType, tmp_path: Path, place: int) -> None:
    write_all(tmp_path / "even", lambda draw, seed: 20.0)
    score = (draws.agreement, draws.overlap)[place]
    known = {run.draw: score(run) for run in draws.read(tmp_path / "even")}
    # What a seed does to all draws alike is no score's business.
    write_all(tmp_path / "bent", lambda draw, seed: math.exp(3 - 0.1 * known[draw] + 0.5 * seed))
    runs = draws.read(tmp_path / "bent")
    r, p = draws.correlation([score(run) for run in runs], runs)
    assert r == pytest.approx(-1.0) and p < 0.001


def test_the_table_tells_early_loss_from_what_says_nothing(
    draws: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_all(tmp_path, lambda draw, seed: 20.0 + draw + seed, early=lambda draw: 5 + math.log(20 + draw))
    rows = table(draws, tmp_path, monkeypatch, capsys)
    assert rows[0][2] == "draws x seeds" and len(rows) == 6 and {row[2] for row in rows[2:]} == {"5 x 2"}
    assert float(rows[4][3]) > 0.99 and float(rows[4][4]) < 0.01
    # Early loss knows the order of the draws: it gains what hindsight gains, and what knows nothing gains less.
    assert rows[4][5] == rows[5][5] and all(float(row[5].strip("%")) > float(rows[5][5].strip("%")) for row in rows[2:4])
    assert rows[5][3:5] == ["", ""] and rows[0][5] == "PPL, best of 4 by it"
    chinese = table(draws, tmp_path, monkeypatch, capsys, "--lang", "zh")
    assert [row[2:] for row in chinese[2:]] == [row[2:] for row in rows[2:]] and chinese[0][2] == "抽样 x 种子"


def test_what_the_best_of_some_gains_is_the_mean_over_all_choices(draws: ModuleType, tmp_path: Path) -> None:
    ppls = {11: 20.0, 12: 24.0, 13: 21.0, 14: 30.0, 15: 26.0}
    write_all(tmp_path, lambda draw, seed: ppls[draw])
    runs = draws.read(tmp_path)
    score = {11: 3.0, 12: 5.0, 13: 1.0, 14: 2.0, 15: 4.0}
    for choice, direction, best in [(1, "lower", min), (2, "lower", min), (4, "higher", max), (5, "higher", max)]:
        picked = [ppls[best(some, key=score.__getitem__)] for some in itertools.combinations(DRAWS, choice)]
        expected = math.exp(fmean(map(math.log, picked)) - fmean(map(math.log, ppls.values()))) - 1
        found = draws.best_of([score[run.draw] for run in runs], runs, is_better=direction, choice=choice)
        assert found == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(
    "kept",
    [[], [(11, 2), (12, 2), (13, 2)], [(11, 2), (12, 2), (13, 2), (14, 2), (14, 3)], [(None, 2), (None, 3), (11, 2), (12, 2)]],
)
def test_too_few_draws_or_gaps_are_refused(
    draws: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], kept: list[Any]
) -> None:
    for draw, seed in kept:
        write_run(tmp_path, draw, seed, ppl=20.0)
    with pytest.raises(SystemExit, match="not 4 draws or more at the same seeds"):
        table(draws, tmp_path, monkeypatch, capsys)


def test_a_run_that_is_not_done_is_left_out(draws: ModuleType, tmp_path: Path) -> None:
    write_all(tmp_path, lambda draw, seed: 20.0)
    (tmp_path / "GPT-02/laptop/seed-11/seed-2/timing_stats.json").unlink()
    assert {(run.draw, run.seed) for run in draws.read(tmp_path)} == {(d, s) for d in DRAWS for s in SEEDS} - {(11, 2)}


def test_the_early_loss_begins_where_the_warm_up_ends(draws: ModuleType, tmp_path: Path) -> None:
    write_run(tmp_path, 11, 2, ppl=20.0, early=5.0)
    write_run(tmp_path, 12, 2, ppl=20.0, early=4.0)
    assert [draws.early_loss(run) for run in draws.read(tmp_path)] == [5.0, 4.0]


def test_an_arms_own_warm_up_counts(draws: ModuleType, tmp_path: Path) -> None:
    write_run(tmp_path, 11, 2, ppl=20.0, settings={"schedule.warmup_steps": 0, "method.warmup_steps": WARMUP})
    (run,) = draws.read(tmp_path)
    assert draws.early_loss(run) == 5.0


@pytest.mark.parametrize("warmup", [33, 40])
def test_a_warm_up_that_lasts_a_third_of_the_run_leaves_no_early_loss(draws: ModuleType, tmp_path: Path, warmup: int) -> None:
    write_run(tmp_path, 11, 2, ppl=20.0, settings={"schedule.warmup_steps": warmup})
    (run,) = draws.read(tmp_path)
    with pytest.raises(SystemExit, match=rf"after the warm-up \({warmup} steps\) and up to a third of the run \(step 33\)"):
        draws.early_loss(run)


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ({"settings": {"optim.lr": 0.1}}, r"optim\.lr \(0\.002 / 0\.1\)"),
        ({"settings": {"method.scale": 2.0}}, r"method\.scale \(unit / 2\.0\)"),
        ({"data": "1" * 64}, r"data\.fingerprint \(0+ / 1+\)"),
    ],
)
def test_records_of_several_recipes_are_refused(draws: ModuleType, tmp_path: Path, other: dict[str, Any], said: str) -> None:
    write_run(tmp_path, 11, 2, ppl=20.0)
    write_run(tmp_path, 12, 2, ppl=20.0, **other)
    with pytest.raises(SystemExit, match=rf"seed-11/seed-2 and .*seed-12/seed-2 are of two recipes: {said}; name a folder"):
        draws.read(tmp_path)


def test_half_of_a_laptop_run_leaves_an_early_loss(draws: ModuleType) -> None:
    settings = with_overrides(budget_settings("laptop"), {"method": "oelm_freeze", "model.vocab_size": 64})
    config = parse_config(with_overrides(settings, {"steps": settings["steps"] // 2}), where="here")
    losses = {step: 9.0 if step <= 100 else 5.0 for step in range(10, config.steps + 1, 10)}
    assert draws.early_loss(draws.Drawn(11, 0, 3.0, config.as_dict(), losses)) == 5.0


def test_the_spread_of_a_folder_is_printed(
    draws: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # By draw, far apart; seeds of training make no difference.
    ppls = {11: 20.0, 12: 25.0, 13: 20.0, 14: 25.0, 15: 22.0}
    write_all(tmp_path, lambda draw, seed: ppls[draw])
    monkeypatch.setattr("sys.argv", ["draws.py", "spread", "--results", str(tmp_path)])
    draws.main()
    *_, row = capsys.readouterr().out.splitlines()
    expected = 100 * float(np.std([math.log(ppl) for ppl in ppls.values()], ddof=1))
    assert row.startswith(f"| 5 x 2 | {expected:.2f}% [") and "| 0.00% | 0.00% | 0.000 |" in row


def crossed(
    *, over_draws: float, over_seeds: float, rest: float, draws: int, seeds: int, seed: int
) -> dict[tuple[int, int], float]:
    """Return log PPLs of a study in which the spreads are known."""
    random = np.random.default_rng(seed)
    by_draw, by_seed = over_draws * random.standard_normal(draws), over_seeds * random.standard_normal(seeds)
    noise = rest * random.standard_normal((draws, seeds))
    return {(d, s): 3.0 + by_draw[d] + by_seed[s] + noise[d, s] for d in range(draws) for s in range(seeds)}


@pytest.mark.parametrize(("over_draws", "over_seeds"), [(0.03, 0.01), (0.01, 0.03), (0.02, 0.0)])
def test_many_studies_estimate_both_variances_without_bias(draws: ModuleType, over_draws: float, over_seeds: float) -> None:
    found = [
        draws.spread(crossed(over_draws=over_draws, over_seeds=over_seeds, rest=0.005, draws=40, seeds=40, seed=number))
        for number in range(40)
    ]
    # The mean of 40 estimates of a variance from 40 levels each has a relative error of about sqrt(2 / 1600) = 3.5%.
    for name, true in (("over_draws", over_draws), ("over_seeds", over_seeds), ("rest", 0.005)):
        mean = np.mean([getattr(each, name) ** 2 for each in found])
        assert mean == pytest.approx(true**2, rel=0.15, abs=1e-7)


def test_a_single_table_is_computed_as_by_hand(draws: ModuleType) -> None:
    found = draws.spread({(0, 0): 1.0, (0, 1): 2.0, (1, 0): 3.0, (1, 1): 6.0})
    assert found is not None
    # Means: draws 1.5 and 4.5, seeds 2 and 4, all 3. Squares: draws 9, seeds 4, rest 1, one degree of freedom each.
    assert found.rest == pytest.approx(1.0)
    assert found.over_draws == pytest.approx(2.0)
    assert found.over_seeds == pytest.approx((3 / 2) ** 0.5)


def test_a_table_of_more_draws_than_seeds_is_computed_as_by_hand(draws: ModuleType) -> None:
    found = draws.spread({(0, 0): 1.0, (0, 1): 2.0, (1, 0): 3.0, (1, 1): 6.0, (2, 0): 5.0, (2, 1): 7.0})
    assert found is not None
    # Means: draws 1.5, 4.5 and 6, seeds 3 and 5, all 4. Squares: draws 2 x 10.5 over 2, seeds 3 x 2 over 1; what is left is
    # 0.5, -0.5, -0.5, 0.5, 0 and 0, squared 1 over 2. F(2, 2) is above 10.5 / 0.5 = 21 with a chance of 1 / (1 + 21).
    expected = {"over_draws": 5.0**0.5, "over_seeds": (5.5 / 3) ** 0.5, "rest": 0.5**0.5, "p_value": 1 / 22}
    assert {name: getattr(found, name) for name in expected} == pytest.approx(expected)


@pytest.mark.parametrize(("over_draws", "num_draws", "num_seeds"), [(0.03, 12, 2), (0.01, 6, 3), (0.0, 4, 2)])
def test_the_interval_holds_the_spread_over_draws_nineteen_times_of_twenty(
    draws: ModuleType, over_draws: float, num_draws: int, num_seeds: int
) -> None:
    found = [
        draws.spread(crossed(over_draws=over_draws, over_seeds=0.02, rest=0.01, draws=num_draws, seeds=num_seeds, seed=number))
        for number in range(1000)
    ]
    held = np.mean([each is not None and each.low <= over_draws <= each.high for each in found])
    # Three standard errors of a share of 0.95 among 1000 are 0.021; at no spread at all only the lower end can miss.
    assert 0.95 - 0.021 < held < (0.95 + 0.021 if over_draws else 1.0)
    assert all(each is not None and each.low <= each.over_draws <= each.high for each in found)


def test_draws_that_make_no_difference_seem_to_in_one_of_twenty_studies(draws: ModuleType) -> None:
    studies = [
        draws.spread(crossed(over_draws=0.0, over_seeds=0.02, rest=0.01, draws=4, seeds=3, seed=number))
        for number in range(1000)
    ]
    share = np.mean([each is not None and each.p_value < 0.05 for each in studies])
    # Binomial with n = 1000 and p = 0.05: three standard errors are 0.021.
    assert share == pytest.approx(0.05, abs=0.021)


def test_a_variance_is_never_below_zero(draws: ModuleType) -> None:
    found = draws.spread({(0, 0): 1.0, (0, 1): 2.0, (1, 0): 2.0, (1, 1): 1.0})
    assert found is not None
    assert (found.over_draws, found.over_seeds) == (0.0, 0.0)


@pytest.mark.parametrize(
    "values",
    [{}, {(0, 0): 1.0}, {(0, 0): 1.0, (1, 0): 2.0}, {(0, 0): 1.0, (0, 1): 2.0}, {(0, 0): 1.0, (0, 1): 2.0, (1, 0): 3.0}],
)
def test_a_design_that_cannot_tell_them_apart_gives_nothing(draws: ModuleType, values: dict[tuple[int, int], float]) -> None:
    assert draws.spread(values) is None


def test_equal_figures_have_no_spread(draws: ModuleType) -> None:
    found = draws.spread(dict.fromkeys([(0, 0), (0, 1), (1, 0), (1, 1)], 2.0))
    assert found is not None
    assert (found.over_draws, found.over_seeds, found.rest, found.p_value) == (0.0, 0.0, 0.0, 1.0)
