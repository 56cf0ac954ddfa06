"""Runs are read robustly, grouped by everything but the seed, and never mixed."""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import oelm
from oelm.errors import ConfigError
from oelm.report.arms import Arm, FinishedRun, collect, load_runs
from oelm.runs.records import Figures
from tests.experiments.recorded import record
from tests.report.synthetic import TOKENS_PER_STEP, Fate, audit_of, write_arm, write_plain, write_run
from tests.runs.recomputed import figure_problems, read_record


def only_arm(*roots: Path) -> Arm:
    (arm,) = collect(roots)
    return arm


def edit(path: Path, **changes: Any) -> None:
    """Change top-level keys of a JSON file; None takes one away."""
    value = json.loads(path.read_text(encoding="utf-8")) | changes
    write_plain(path, {key: inner for key, inner in value.items() if inner is not None})


@pytest.mark.parametrize("figure", [31.4, 0.88], ids=["language-model", "classifier"])
def test_synthetic_runs_are_what_training_leaves(tmp_path: Path, figure: float) -> None:
    (run,) = write_arm(tmp_path, "GPT-02", [figure], seeds=[3])
    assert figure_problems(read_record(run)) == []


def test_a_classifier_that_was_best_before_its_end_is_whole_too(tmp_path: Path) -> None:
    run = write_run(tmp_path, "SST-2-01", 0, Fate(accuracy=0.9, right=(True, False, True, True), entropies=None))
    assert figure_problems(read_record(run)) == []


def test_runs_are_grouped_by_everything_but_the_seed(tmp_path: Path) -> None:
    write_arm(tmp_path, "GPT-01", [30.0, 31.0, 32.0], seeds=[2, 0, 10])
    write_arm(tmp_path, "GPT-01", [30.0], seeds=[0], budget="smoke")
    write_arm(tmp_path, "GPT-01", [30.0], seeds=[0], variant="lr-0.001-abcd1234")
    write_arm(tmp_path, "GPT-02", [30.0], seeds=[0])
    found = {arm.key: [run.seed for run in arm.runs] for arm in collect([tmp_path])}
    assert found == {
        ("GPT-01", "laptop", "default"): [0, 2, 10],
        ("GPT-01", "laptop", "lr-0.001-abcd1234"): [0],
        ("GPT-01", "smoke", "default"): [0],
        ("GPT-02", "laptop", "default"): [0],
    }


def test_each_seed_keeps_its_own_figure(tmp_path: Path) -> None:
    write_arm(tmp_path, "GPT-01", [30.0, 31.0], seeds=[4, 7])
    assert only_arm(tmp_path).best == pytest.approx({4: 30.0, 7: 31.0}, rel=1e-12)


def test_only_the_experiments_and_budgets_asked_for_are_read(tmp_path: Path) -> None:
    for experiment in ("GPT-01", "GPT-02"):
        for budget in ("laptop", "smoke"):
            write_arm(tmp_path, experiment, [30.0], seeds=[0], budget=budget)
    assert [arm.key[:2] for arm in collect([tmp_path], only=["GPT-02"], budgets=["smoke"])] == [("GPT-02", "smoke")]


def test_runs_of_different_recipes_are_no_arm_and_it_says_what_differs(tmp_path: Path) -> None:
    first = write_run(tmp_path, "GPT-01", 0, Fate(ppl=30.0))
    cases: list[tuple[dict[str, Any], str]] = [
        ({"optim.lr": 2e-3}, "optim.lr (0.001 / 0.002)"),
        ({"steps": 40}, "steps (20 / 40)"),
        ({"model.dropout": 0.1}, "model.dropout (0.0 / 0.1)"),
        ({"data.tokenizer": "bpe:2048"}, "data.tokenizer (bpe:1024 / bpe:2048)"),
    ]
    for changes, told in cases:
        second = write_run(tmp_path, "GPT-01", 1, Fate(ppl=30.0, settings=changes))
        arm = only_arm(tmp_path)
        assert not arm.is_usable and arm.refused is not None, told
        assert arm.refused.code == "recipes_differ", told
        assert arm.refused.values == {"first": first, "second": second, "settings": (told,)}


def test_runs_on_different_data_are_no_arm(tmp_path: Path) -> None:
    first = write_run(tmp_path, "GPT-01", 0, Fate(ppl=30.0))
    second = write_run(tmp_path, "GPT-01", 1, Fate(ppl=30.0, fingerprint="f" * 64))
    arm = only_arm(tmp_path)
    assert not arm.is_usable and arm.refused is not None
    assert (arm.refused.code, arm.refused.values) == ("data_differ", {"first": first, "second": second})


def test_a_seed_in_two_folders_is_refused_and_both_are_named(tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    write_arm(here, "GPT-01", [30.0, 31.0], seeds=[0, 1])
    write_arm(there, "GPT-01", [30.5, 32.0], seeds=[1, 2])
    arm = only_arm(here, there)
    assert not arm.is_usable and arm.refused is not None and arm.refused.code == "seed_twice"
    place = Path("GPT-01/laptop/default/seed-1")
    assert arm.refused.values == {"seed": 1, "first": here / place, "second": there / place}


def test_seeds_of_two_folders_make_one_arm_where_they_differ(tmp_path: Path) -> None:
    write_arm(tmp_path / "here", "GPT-01", [30.0], seeds=[1])
    write_arm(tmp_path / "there", "GPT-01", [31.0], seeds=[0])
    assert [run.seed for run in only_arm(tmp_path / "here", tmp_path / "there").runs] == [0, 1]


def test_a_copy_of_a_run_under_another_seed_does_not_count(tmp_path: Path) -> None:
    run = write_run(tmp_path, "GPT-01", 0, Fate(ppl=30.0))
    copy = run.with_name("seed-1")
    copy.mkdir()
    for path in run.iterdir():
        (copy / path.name).write_bytes(path.read_bytes())
    arm = only_arm(tmp_path)
    assert [run.seed for run in arm.runs] == [0]
    assert [(run.seed, "seed" in run.problem) for run in arm.unfinished] == [(1, True)]


def test_the_same_weights_from_another_folder_are_the_same_recipe(tmp_path: Path) -> None:
    for seed, folder in enumerate(("/here/bert", "/there/copy-of-bert")):
        settings = {"model.source": folder, "model.sha256": "a" * 64, "examples.folder": f"{folder}/tables"}
        write_arm(tmp_path, "SST-2-01", [0.9], seeds=[seed], settings=settings)
    assert only_arm(tmp_path).is_usable


def test_other_weights_from_the_same_folder_are_another_recipe(tmp_path: Path) -> None:
    for seed, digest in enumerate(("a" * 64, "b" * 64)):
        write_arm(tmp_path, "SST-2-01", [0.9], seeds=[seed], settings={"model.source": "/here", "model.sha256": digest})
    refused = only_arm(tmp_path).refused
    assert refused is not None and refused.values["settings"] == (f"model.sha256 ({'a' * 64} / {'b' * 64})",)


def test_models_without_a_digest_are_told_apart_by_their_place(tmp_path: Path) -> None:
    for seed, folder in enumerate(("/here/bert", "/there/bert")):
        write_arm(tmp_path, "SST-2-01", [0.9], seeds=[seed], settings={"model.source": folder})
    assert not only_arm(tmp_path).is_usable


def test_a_missing_folder_is_refused_with_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere: no such folder; give the one that holds the runs \(--out\)"):
        collect([tmp_path / "nowhere"])


@pytest.mark.parametrize("state", ["queued", "running", "stopped", "failed"])
def test_a_run_that_is_not_done_gives_no_figure(tmp_path: Path, state: Any) -> None:
    run = write_run(tmp_path, "GPT-01", 0, Fate(ppl=30.0))
    edit(run / "status.json", status=state, message="out of memory")
    arm = only_arm(tmp_path)
    assert (arm.runs, arm.best, arm.is_usable) == ((), {}, False)
    # It says that it is on another host, and was not heard of for long.
    seen = "stale" if state == "running" else state
    assert [(each.state, each.message) for each in arm.unfinished] == [(seen, "out of memory")]


def test_a_killed_run_gives_no_figure(tmp_path: Path) -> None:
    run = write_run(tmp_path, "GPT-01", 0, Fate(ppl=30.0))
    edit(run / "status.json", status="running", host=socket.gethostname(), pid=2**22 + 1)
    assert [(each.state, isinstance(each, FinishedRun)) for each in only_arm(tmp_path).unfinished] == [("dead", False)]


BROKEN: dict[str, Any] = {
    "empty": b"",
    "torn": b'{"total": 12',
    "not-utf8": b"\xff\xfe\x00",
    "a-list": b"[1, 2]",
    "null": b"null",
    "not-a-number": b'{"best_ppl": NaN}',
    "deep": b"[" * 100_000,
}


@pytest.mark.parametrize("name", ["config.json", "manifest.json", "audit.json", "timing_stats.json", "attention.json"])
def test_a_damaged_file_makes_a_run_unused_and_is_named(tmp_path: Path, name: str) -> None:
    write_run(tmp_path, "GPT-01", 0, Fate(ppl=30.0))
    run = write_run(tmp_path, "GPT-01", 1, Fate(ppl=30.0))
    for damage, content in BROKEN.items():
        (run / name).write_bytes(content)
        arm = only_arm(tmp_path)
        assert [each.seed for each in arm.runs] == [0], damage
        assert [name in each.problem for each in arm.unfinished] == [True], damage
        assert len(load_runs(tmp_path)) == 2, damage


def test_a_missing_file_makes_a_run_unused_and_is_named(tmp_path: Path) -> None:
    run = write_run(tmp_path / "runs", "GPT-01", 1, Fate(ppl=30.0))
    for name in ("config.json", "manifest.json", "audit.json", "timing_stats.json", "metrics.jsonl"):
        away = (run / name).rename(tmp_path / "away")
        assert [name in each.problem for each in only_arm(tmp_path / "runs").unfinished] == [True], name
        away.rename(run / name)
    assert only_arm(tmp_path / "runs").is_usable


def test_figures_that_cannot_be_are_not_used(tmp_path: Path) -> None:
    stored = write_run(tmp_path, "GPT-01", 0, Fate(ppl=30.0)) / "timing_stats.json"
    whole = stored.read_bytes()
    cases: list[tuple[dict[str, Any], str]] = [
        ({"best_ppl": None, "final_ppl": None}, "best"),
        ({"best_ppl": 0.0}, "best_ppl"),
        ({"best_ppl": -3.0}, "best_ppl"),
        ({"best_accuracy": 0.5}, "best"),
        ({"wall_s": {"step": 1.0}}, "wall_s"),
        ({"best_val_loss": 1.0}, "metrics.jsonl"),
    ]
    for changes, named in cases:
        edit(stored, **changes)
        arm = only_arm(tmp_path)
        assert arm.runs == () and named in arm.unfinished[0].problem, changes
        stored.write_bytes(whole)


def test_an_accuracy_above_one_is_not_used(tmp_path: Path) -> None:
    (run,) = write_arm(tmp_path, "SST-2-01", [0.9], seeds=[0])
    edit(run / "timing_stats.json", best_accuracy=90.0)
    assert "best_accuracy" in only_arm(tmp_path).unfinished[0].problem


@pytest.mark.parametrize("losses", [(4.0, 3.0, 2.0, 1.0), (4.0, 1.0, 3.0, 2.0)], ids=["best-lost", "final-lost"])
def test_a_run_whose_evaluations_are_cut_off_is_not_used(tmp_path: Path, losses: tuple[float, ...]) -> None:
    run = write_run(tmp_path, "GPT-01", 0, Fate(ppl=math.e, losses=losses))
    assert only_arm(tmp_path).is_usable
    lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    (run / "metrics.jsonl").write_text("".join(lines[:-1]), encoding="utf-8")
    assert "metrics.jsonl" in only_arm(tmp_path).unfinished[0].problem


@pytest.mark.parametrize(
    "line", ['{"step": 5, "val_loss": "high"}', '{"step": 5, "val_loss": NaN}', '"val_loss"', '["val_loss"]']
)
def test_an_evaluation_that_is_none_makes_a_run_unused(tmp_path: Path, line: str) -> None:
    run = write_run(tmp_path, "GPT-01", 0, Fate(ppl=30.0))
    text = (run / "metrics.jsonl").read_text(encoding="utf-8")
    (run / "metrics.jsonl").write_text(f"{line}\n{text}", encoding="utf-8")
    assert "metrics.jsonl" in only_arm(tmp_path).unfinished[0].problem


def test_files_beside_the_runs_are_no_runs(tmp_path: Path) -> None:
    write_run(tmp_path, "GPT-01", 0, Fate(ppl=30.0))
    write_plain(tmp_path / "bench" / "one.json", {})
    write_plain(tmp_path / "looks.json", {"looks": {}})
    (tmp_path / "GPT-01" / "laptop" / "default" / "seed-00").mkdir()
    (tmp_path / "GPT-01" / "laptop" / "default" / "notes").mkdir()
    (tmp_path / "GPT-01" / "laptop" / "default" / "seed-5").mkdir()
    assert [run.seed for run in only_arm(tmp_path).runs] == [0] and only_arm(tmp_path).unfinished == ()


def test_rows_for_a_data_frame_hold_settings_figures_and_parameters(tmp_path: Path) -> None:
    write_run(tmp_path, "GPT-02", 3, Fate(ppl=31.5, method="oelm_freeze", steps=40, step_s=0.25, overhead_s=2.0))
    (row,) = oelm.load_runs(tmp_path)
    assert {name: row[name] for name in ("experiment", "budget", "variant", "seed", "state", "problem")} == {
        "experiment": "GPT-02",
        "budget": "laptop",
        "variant": "default",
        "seed": 3,
        "state": "done",
        "problem": None,
    }
    assert row["best_ppl"] == pytest.approx(31.5, rel=1e-12) and row["best_accuracy"] is None
    assert (row["tokens"], row["step_s"], row["wall_s"]) == (40 * TOKENS_PER_STEP, 0.25, 40 * 0.25 + 2.0)
    counted = audit_of("oelm_freeze")
    assert {name: row[name] for name in ("total", "trainable", "frozen")} == {
        name: counted[name] for name in ("total", "trainable", "frozen")
    }
    assert (row["config.optim.lr"], row["config.method.init"], row["config.data.source"]) == (1e-3, "orthogonal", "tinystories")
    assert "config.seed" not in row and set(Figures.model_fields) <= set(row)


def test_what_a_run_has_not_measured_is_none(tmp_path: Path) -> None:
    record(tmp_path, "failed", experiment="GPT-01", budget="laptop", seed=2, message="no room")
    (row,) = load_runs(tmp_path)
    assert row["state"] == "failed" and row["problem"] == "no room"
    measured = [*Figures.model_fields, "total", "trainable", "frozen", "data"]
    assert {row[name] for name in measured} == {None}


def test_a_data_frame_gives_back_what_the_runs_hold(tmp_path: Path) -> None:
    pandas = pytest.importorskip("pandas")
    write_arm(tmp_path, "GPT-01", [30.0, 31.0, 32.0], seeds=[0, 1, 2])
    write_arm(tmp_path, "GPT-02", [33.0, 34.0], seeds=[0, 1])
    write_arm(tmp_path, "SST-2-01", [0.9], seeds=[0])
    record(tmp_path, "running", experiment="GPT-02", budget="laptop", seed=2, host="elsewhere")
    frame = pandas.DataFrame(load_runs(tmp_path))
    assert len(frame) == 7
    means = frame.groupby("experiment")["best_ppl"].mean()
    assert means["GPT-01"] == pytest.approx(31.0) and means["GPT-02"] == pytest.approx(33.5)
    assert math.isnan(means["SST-2-01"]) and frame["best_accuracy"].count() == 1
    unfinished = frame[frame["state"] != "done"]
    assert list(unfinished["seed"]) == [2] and unfinished["best_ppl"].isna().all()
    # A column of one kind each, so that a notebook can filter and sum.
    assert frame["seed"].dtype == "int64" and frame["best_ppl"].dtype == "float64"


def test_a_line_torn_by_a_kill_does_not_count_as_damage(tmp_path: Path) -> None:
    run = write_run(tmp_path, "GPT-01", 0, Fate(ppl=30.0))
    with (run / "metrics.jsonl").open("a", encoding="utf-8") as file:
        file.write('{"step": 21, "val_loss": 3.')
    assert only_arm(tmp_path).is_usable


def test_a_classifier_of_many_examples_reads_its_predictions_whole(tmp_path: Path) -> None:
    right = tuple(number % 2 == 0 for number in range(500))
    write_run(tmp_path, "SST-2-01", 0, Fate(accuracy=0.9, right=right, entropies=None))
    (found,) = only_arm(tmp_path).runs
    assert sum(row.label == row.predicted for row in found.predictions("val")) == 250


@pytest.mark.parametrize("given", [None, 3, ["outputs"]], ids=repr)
def test_what_is_no_path_is_refused(given: Any) -> None:
    with pytest.raises(ConfigError, match="load_runs takes the path of a folder"):
        load_runs(given)


def test_runs_that_lie_directly_in_a_folder_have_rows_and_so_has_a_run_itself(tmp_path: Path) -> None:
    write_run(tmp_path / "outputs", "GPT-02", 3, Fate(ppl=31.5))
    placed = tmp_path / "outputs" / "GPT-02" / "laptop" / "default" / "seed-3"
    shutil.copytree(placed, tmp_path / "flat" / "mine")
    write_plain(tmp_path / "flat" / "exported" / "config.json", {"model_type": "gpt2"})
    (row,) = load_runs(tmp_path / "flat")
    facts = ("experiment", "budget", "variant", "seed", "state", "problem")
    assert [row[name] for name in facts] == ["", "", "", 3, "done", None] and row["best_ppl"] == pytest.approx(31.5)
    assert load_runs(tmp_path / "flat" / "mine") == [row]
    assert load_runs(placed) == load_runs(tmp_path / "outputs") != []


@pytest.fixture
def _alarm() -> Iterator[None]:
    """Fail instead of waiting for ever."""

    def rang(*_: Any) -> None:
        # Not an OSError, which a reader may take for damage.
        pytest.fail("it waits")

    before = signal.signal(signal.SIGALRM, rang)
    signal.alarm(20)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


FILES = ("config", "status", "manifest", "audit", "timing_stats", "attention")


@pytest.mark.usefixtures("_alarm")
@pytest.mark.parametrize("name", [*(f"{name}.json" for name in FILES), "metrics.jsonl", "predictions.jsonl"])
def test_a_pipe_in_the_place_of_a_file_is_damage_and_not_waited_for(name: str, tmp_path: Path) -> None:
    run = write_run(tmp_path, "GPT-02", 3, Fate(ppl=31.5))
    (run / name).unlink(missing_ok=True)
    os.mkfifo(run / name)
    rows = load_runs(tmp_path)
    assert name in ("predictions.jsonl", "attention.json") or not rows or rows[0]["problem"] or rows[0]["state"] != "done"
