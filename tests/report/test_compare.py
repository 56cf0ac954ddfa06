"""A quick look sets finished runs of one kind side by side, and tells what the numbers do not."""

from __future__ import annotations

import json
import math
import statistics
from pathlib import Path

import numpy as np
import pytest

from oelm.errors import ConfigError
from oelm.report.compare import compare_runs
from tests.experiments.recorded import record
from tests.report.synthetic import Fate, audit_of, write_arm, write_plain, write_run

ONE_SEED = "one seed: no interval, so chance may explain the gap; train more seeds"


def write_pair(root: Path, seeds: int = 3) -> tuple[Path, Path]:
    """Write a baseline and an arm; return the folders of their seeds."""
    first = write_arm(root, "GPT-01", [30.0, 30.5, 29.5, 30.2][:seeds], seeds=range(seeds))
    second = write_arm(root, "GPT-02", [31.0, 31.2, 30.4, 31.1][:seeds], seeds=range(seeds), step_s=0.04)
    return first[0].parent, second[0].parent


def texts(first: Path, second: Path) -> tuple[list[list[str]], list[str]]:
    table, remarks = compare_runs([first, second])
    return [[cell.text for cell in row] for row in table.rows], remarks


def test_single_runs_are_set_side_by_side(tmp_path: Path) -> None:
    first, second = (folder / "seed-1" for folder in write_pair(tmp_path))
    shown, remarks = texts(first, second)
    whole, trained = audit_of("baseline")["trainable"], audit_of("oelm_freeze")["trainable"]
    assert shown == [
        ["GPT-01", "1", "30.50", "", f"{whole:,}", "50.0 ms"],
        ["GPT-02", "1", "31.20", f"{100 * (31.2 / 30.5 - 1):+.1f}%", f"{trained:,}", "40.0 ms"],
    ]
    assert len(remarks) == 2 and remarks[0].startswith(f"{second} differs from {first} in method.init (native / orthogonal)")
    assert remarks[1] == ONE_SEED


def test_runs_are_named_by_what_tells_their_paths_apart(tmp_path: Path) -> None:
    first, second = write_pair(tmp_path)
    assert [row[0] for row in texts(first / "seed-0", second / "seed-1")[0]] == [
        "GPT-01/laptop/default/seed-0",
        "GPT-02/laptop/default/seed-1",
    ]
    assert [row[0] for row in texts(first / "seed-0", first / "seed-1")[0]] == ["seed-0", "seed-1"]


def test_folders_of_seeds_are_paired_with_an_interval(tmp_path: Path) -> None:
    shown, remarks = texts(*write_pair(tmp_path))
    assert ONE_SEED not in remarks
    logs = [math.log(ours / theirs) for ours, theirs in ((31.0, 30.0), (31.2, 30.5), (30.4, 29.5))]
    half = 4.30265 * statistics.stdev(logs) / math.sqrt(3)
    mean = statistics.fmean(logs)
    value, low, high = (100 * (math.exp(end) - 1) for end in (mean, mean - half, mean + half))
    assert shown[1][1:4] == ["3", f"{(31.0 * 31.2 * 30.4) ** (1 / 3):.2f}", f"{value:+.1f}% [{low:+.1f}, {high:+.1f}]"]


def test_accuracies_are_compared_in_points(tmp_path: Path) -> None:
    first, second = (write_arm(tmp_path, name, figures, seeds=[0])[0] for name, figures in (("A", [0.9]), ("B", [0.85])))
    shown, remarks = texts(first, second)
    assert (shown[0][2], shown[1][2], shown[1][3]) == ("90.00%", "85.00%", "-5.00 points")
    assert remarks[0] == "always naming the largest class gives 50.00%" and len(remarks) == 3


def test_accuracies_are_compared_over_examples_too_and_it_is_said_what_could_be_seen(tmp_path: Path) -> None:
    first, second = (
        write_arm(tmp_path, name, figures, seeds=range(3))[0].parent
        for name, figures in (("A", [0.9, 0.91, 0.89]), ("B", [0.85, 0.87, 0.86]))
    )
    table, remarks = compare_runs([first, second])
    assert table.columns[-1] == "over examples, final models"
    assert [row[-1].text for row in table.rows][0] == ""
    # The first answers are right, as many as the accuracy says; an example counts with its mean over the seeds.
    ours, theirs = ([[n < right for n in range(100)] for right in shares] for shares in ((85, 87, 86), (90, 91, 89)))
    differences = [float(value) for value in np.mean(np.array(ours, dtype=float) - np.array(theirs, dtype=float), axis=0)]
    mean, error = statistics.fmean(differences), statistics.stdev(differences) / 10
    low, high = mean - 1.98422 * error, mean + 1.98422 * error
    assert table.rows[1][-1].text == f"{100 * mean:+.2f} [{100 * low:+.2f}, {100 * high:+.2f}]"
    (told,) = [remark for remark in remarks if "80% probability" in remark]
    assert told.startswith(f"{second} and {first}: ") and "points over seeds, " in told and "points over examples" in told


def test_single_classifiers_of_two_seeds_are_paired_by_their_examples(tmp_path: Path) -> None:
    first = write_arm(tmp_path, "A", [0.9], seeds=[0])[0]
    second = write_arm(tmp_path, "B", [0.85], seeds=[4])[0]
    shown, _ = texts(first, second)
    assert shown[1][-1].startswith("-5.00 [-9.35, -0.65]")


def test_on_test_the_answers_are_those_of_the_models_that_are_compared(tmp_path: Path) -> None:
    first, second = (
        write_arm(tmp_path, name, [0.9, 0.91], seeds=[0, 1], tests=tests)[0].parent
        for name, tests in (("A", [0.8, 0.82]), ("B", [0.78, 0.79]))
    )
    table, _ = compare_runs([first, second])
    assert table.columns[-1] == "over examples" and table.rows[1][-1].text.startswith("-2.50 [")


def test_answers_that_are_gone_leave_the_interval_over_seeds(tmp_path: Path) -> None:
    first, second = (write_arm(tmp_path, name, [0.9, 0.88], seeds=[0, 1])[0].parent for name in ("A", "B"))
    path = second / "seed-1" / "predictions.jsonl"
    path.write_text(path.read_text(encoding="utf-8").replace('"example": 0,', '"example": 1000,'), encoding="utf-8")
    shown, remarks = texts(first, second)
    # Two alike: no spread, so nothing is known of what could be seen.
    assert shown[1][-1] == "" and not [remark for remark in remarks if "probability" in remark]


def test_more_than_two_are_all_against_the_first(tmp_path: Path) -> None:
    runs = [write_arm(tmp_path, name, [figure], seeds=[0])[0] for name, figure in (("A", 20.0), ("B", 22.0), ("C", 18.0))]
    table, _ = compare_runs(runs)
    assert [row[3].text for row in table.rows] == ["", "+10.0%", "-10.0%"]


def test_one_run_alone_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="give two runs at least: oelm compare RUN RUN"):
        compare_runs([tmp_path])


def test_runs_of_different_kinds_are_refused(tmp_path: Path) -> None:
    runs = [write_arm(tmp_path, name, [figure], seeds=[0])[0] for name, figure in (("A", 20.0), ("B", 0.9))]
    with pytest.raises(ConfigError, match="perplexity and accuracy are different things"):
        compare_runs(runs)


@pytest.mark.parametrize("state", ["queued", "stopped", "failed"])
def test_an_unfinished_run_is_refused_with_its_state(tmp_path: Path, state: str) -> None:
    first, _ = write_pair(tmp_path)
    run = record(tmp_path, state, experiment="GPT-03", budget="laptop")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=f"seed-0: {state}; only finished runs can be compared"):
        compare_runs([first / "seed-0", run])


def test_a_damaged_run_is_refused_with_what_is_wrong(tmp_path: Path) -> None:
    first, second = (folder / "seed-0" for folder in write_pair(tmp_path))
    (second / "timing_stats.json").write_text("{}", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"timing_stats.json: .*only finished runs can be compared"):
        compare_runs([first, second])


@pytest.mark.parametrize(("name", "what"), [("nowhere", "no such folder"), ("empty", "is no run"), ("file", "is a file")])
def test_what_is_no_run_is_refused_with_what_to_give(tmp_path: Path, name: str, what: str) -> None:
    first, _ = write_pair(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("", encoding="utf-8")
    with pytest.raises(ConfigError, match=f"{name}: {what}.*; give a run's folder"):
        compare_runs([first, tmp_path / name])


def test_seeds_that_are_not_finished_are_left_out_and_it_is_said(tmp_path: Path) -> None:
    first, second = write_pair(tmp_path)
    status = json.loads((second / "seed-1" / "status.json").read_text(encoding="utf-8"))
    write_plain(second / "seed-1" / "status.json", status | {"status": "failed"})
    shown, remarks = texts(first, second)
    assert [row[1] for row in shown] == ["3", "2"]
    assert f"{second / 'seed-1'}: failed, so it is left out" in remarks
    assert f"{second} and {first}: the gap is over the seeds that both have, 0, 2" in remarks


def test_runs_without_common_seeds_have_no_interval_and_it_is_said(tmp_path: Path) -> None:
    first, second = write_pair(tmp_path)
    shown, remarks = texts(first / "seed-0", second / "seed-2")
    assert shown[1][3] == f"{100 * (30.4 / 30.0 - 1):+.1f}%"
    assert any("have not two seeds in common" in remark for remark in remarks)


def test_seeds_of_different_recipes_are_not_averaged(tmp_path: Path) -> None:
    first, second = write_pair(tmp_path)
    write_arm(tmp_path, "GPT-02", [31.0], seeds=[7], settings={"optim.lr": 5e-4})
    with pytest.raises(ConfigError, match=r"seed-0 and seed-7 differ in optim.lr \(0.001 / 0.0005\)"):
        compare_runs([first, second])


def test_a_seed_that_stands_twice_is_refused(tmp_path: Path) -> None:
    first, second = write_pair(tmp_path)
    copy = second / "seed-9"
    copy.mkdir()
    for path in (second / "seed-0").iterdir():
        (copy / path.name).write_bytes(path.read_bytes())
    with pytest.raises(ConfigError, match="seed-9: its seed, 0, is also that of .*seed-0"):
        compare_runs([first, second])


@pytest.mark.parametrize("config", ["[]", "{}", '{"seed": "one"}'])
def test_a_config_without_a_seed_is_refused(tmp_path: Path, config: str) -> None:
    first, second = (folder / "seed-0" for folder in write_pair(tmp_path))
    (second / "config.json").write_text(config, encoding="utf-8")
    with pytest.raises(ConfigError, match="config.json"):
        compare_runs([first, second])


def test_other_data_is_told(tmp_path: Path) -> None:
    first = write_run(tmp_path, "A", 0, Fate(ppl=30.0, fingerprint="a" * 64))
    second = write_run(tmp_path, "B", 0, Fate(ppl=30.0, fingerprint="b" * 64))
    told = f"{second} differs from {first} in data.fingerprint (aaaaaaaa / bbbbbbbb)"
    assert compare_runs([first, second])[1] == [told, ONE_SEED]


def test_the_same_weights_from_another_place_are_no_difference(tmp_path: Path) -> None:
    runs = [
        write_arm(tmp_path, name, [0.9], seeds=[0], settings={"model.source": f"/{name}", "model.sha256": "a" * 64})[0]
        for name in ("A", "B")
    ]
    assert not any("differ" in remark for remark in compare_runs(runs)[1])


def test_a_run_may_have_any_name(tmp_path: Path) -> None:
    first, second = (folder / "seed-0" for folder in write_pair(tmp_path))
    moved = second.rename(tmp_path / "[bold]\x1b[31m :x: run")
    shown, _ = texts(first, moved)
    assert shown[1][0] == moved.name
