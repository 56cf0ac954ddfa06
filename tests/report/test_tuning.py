"""What a report tells of the sweeps behind its arms."""

from __future__ import annotations

from pathlib import Path

from tests.report.reading import cells, english, rows, texts
from tests.report.synthetic import write_arm, write_plain, write_sweep, write_tuned


def test_a_sweep_shows_every_point_and_marks_the_best_and_the_edge(tmp_path: Path) -> None:
    write_sweep(tmp_path, "GPT-01", 1)
    write_sweep(tmp_path, "GPT-02", 2)
    for experiment, rate in (("GPT-01", 1e-3), ("GPT-02", 3e-3)):
        write_tuned(tmp_path, experiment, rate)
    document = english(tmp_path)
    found = rows(document, "tuning")
    assert [row["setting"] for row in found] == ["optim.lr 0.0003", "optim.lr 0.001", "optim.lr 0.003"] * 2
    assert [row["score (less is better)"] for row in found] == ["4.0000", "3.0000", "4.0000", "5.0000", "4.0000", "3.0000"]
    assert [row["remark"] for row in found] == ["", "best", "", "", "", "best, at the edge of the grid"]
    assert [cell.mark for cell in cells(document, "tuning", "remark")] == ["", "", "", "", "", "warn"]


def test_a_sweep_says_which_points_another_seed_may_choose(tmp_path: Path) -> None:
    for experiment in ("GPT-01", "GPT-02"):
        write_sweep(tmp_path, experiment, 0, apart=0.006)
        write_tuned(tmp_path, experiment, 3e-4)
    remarks = [row["remark"] for row in rows(english(tmp_path), "tuning")]
    assert remarks == ["best, at the edge of the grid", "close to the best", ""] * 2


def test_a_sweep_taken_over_shows_its_best_alone_and_whose_it_is(tmp_path: Path) -> None:
    write_sweep(tmp_path, "GPT-01", 1)
    write_sweep(tmp_path, "GPT-02", 2, like="GPT-05")
    for experiment, rate in (("GPT-01", 1e-3), ("GPT-02", 3e-3)):
        write_tuned(tmp_path, experiment, rate)
    document = english(tmp_path)
    row = rows(document, "tuning")[3:][0]
    assert (row["arm"], row["setting"], row["score (less is better)"]) == ("GPT-02", "optim.lr 0.003", "")
    assert row["remark"] == "the best of GPT-05, at the edge of the grid"


def test_what_a_sweep_had_changed_and_arms_have_besides_is_told(tmp_path: Path) -> None:
    for experiment in ("GPT-01", "GPT-02"):
        sweep = write_sweep(tmp_path, experiment, 1).model_dump(mode="json")
        changes = {"steps": 500} if experiment == "GPT-02" else {}
        write_plain(tmp_path / experiment / "laptop" / "sweep.json", sweep | {"changes": changes})
        write_tuned(tmp_path, experiment, 1e-3)
    assert texts(english(tmp_path), "tuning", "note") == ["GPT-02, laptop: swept with steps 500."]
    wider = {"optim.lr": 1e-3, "model.model_dim": 256}
    write_arm(tmp_path, "GPT-01", [30.0, 31.0], seeds=[0, 1], variant="tuned-model-dim-256-0123abcd", settings=wider)
    (_, told) = texts(english(tmp_path), "tuning", "note")
    assert told.startswith("GPT-01 (tuned-model-dim-256), laptop: the best of a sweep that was made without")


def test_what_a_sweep_was_made_with_is_no_change_to_its_best(tmp_path: Path) -> None:
    wider = {"model.model_dim": 256, "model.ff_dim": 1024}
    sweep = write_sweep(tmp_path, "GPT-01", 1).model_dump(mode="json")
    write_plain(tmp_path / "GPT-01" / "laptop" / "sweep.json", sweep | {"changes": wider | {"steps": 10}})
    variant = "tuned-ff-dim-1024-model-dim-256-0123abcd"
    write_arm(tmp_path, "GPT-01", [30.0, 31.0], seeds=[0, 1], variant=variant, settings={"optim.lr": 1e-3, **wider})
    (told,) = texts(english(tmp_path), "tuning", "note")
    assert told == "GPT-01, laptop: swept with model.model_dim 256, model.ff_dim 1024, steps 10."


def test_arms_that_were_not_swept_are_told_beside_those_that_were(tmp_path: Path) -> None:
    for experiment in ("GPT-01", "GPT-02"):
        write_sweep(tmp_path, experiment, 1)
        write_tuned(tmp_path, experiment, 1e-3)
    assert not any("Not swept" in told for told in texts(english(tmp_path), "tuning", "note"))
    write_arm(tmp_path, "GPT-06", [30.0, 31.0], seeds=[0, 1], data="wikitext103")
    write_arm(tmp_path, "GPT-07", [30.5, 31.4], seeds=[0, 1], data="wikitext103")
    assert "Not swept, and with the settings of their baselines: GPT-07, laptop." in texts(english(tmp_path), "tuning", "note")
