"""Scores of a draw of frames: what was planted is found, what was not is not, and gaps in the design are refused."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from oelm.experiments.budget import budget_settings
from oelm.train.config import parse_config, with_overrides
from tests.test_figures import script

DRAWS, SEEDS = (11, 12, 13, 14, 15), (2, 3)


@pytest.fixture(scope="module")
def draws() -> ModuleType:
    return script("studies/draws.py")


def write_run(folder: Path, draw: int | None, seed: int, *, ppl: float, early: float = 5.0) -> None:
    """Write the record of one run of frames with a seed of their own; `early` is its loss before a fifth is done."""
    changes = {"method": "oelm_freeze", "seed": seed, "model.vocab_size": 64, "steps": 100}
    config = parse_config(with_overrides(budget_settings("smoke"), changes), where="here").as_dict()
    config["method"]["seed"] = draw
    place = folder / f"GPT-02/laptop/seed-{draw}/seed-{seed}"
    place.mkdir(parents=True)
    (place / "config.json").write_text(json.dumps(config))
    (place / "timing_stats.json").write_text(json.dumps({"best_ppl": ppl}))
    rows = [{"step": step, "loss": early if 10 < step <= 20 else 9.0} for step in range(10, 101, 10)]
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
    assert rows[0][1] == "draws x seeds" and len(rows) == 5 and {row[1] for row in rows[2:]} == {"5 x 2"}
    assert float(rows[4][2]) > 0.99 and float(rows[4][3]) < 0.01
    chinese = table(draws, tmp_path, monkeypatch, capsys, "--lang", "zh")
    assert [row[1:] for row in chinese[2:]] == [row[1:] for row in rows[2:]] and chinese[0][1] == "抽样 x 种子"


@pytest.mark.parametrize(
    "kept", [[], [(11, 2), (12, 2)], [(11, 2), (12, 2), (13, 2), (13, 3)], [(None, 2), (None, 3), (11, 2), (12, 2)]]
)
def test_too_few_draws_or_gaps_are_refused(
    draws: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], kept: list[Any]
) -> None:
    for draw, seed in kept:
        write_run(tmp_path, draw, seed, ppl=20.0)
    with pytest.raises(SystemExit, match="not three draws or more at the same seeds"):
        table(draws, tmp_path, monkeypatch, capsys)


def test_a_run_that_is_not_done_is_left_out(draws: ModuleType, tmp_path: Path) -> None:
    write_all(tmp_path, lambda draw, seed: 20.0)
    (tmp_path / "GPT-02/laptop/seed-11/seed-2/timing_stats.json").unlink()
    assert {(run.draw, run.seed) for run in draws.read(tmp_path)} == {(d, s) for d in DRAWS for s in SEEDS} - {(11, 2)}
