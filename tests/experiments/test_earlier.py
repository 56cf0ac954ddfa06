"""The earlier study's folders become reported values with a source, and what does not add up in them is computed."""

from __future__ import annotations

import hashlib
import json
import math
import os
from pathlib import Path
from typing import Any

import pytest
import typer
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from oelm.cli.imports import import_runs
from oelm.errors import DataError
from oelm.experiments.earlier import inconsistencies, read_earlier, reported_runs
from oelm.experiments.formats import read_sources
from oelm.experiments.imported import ImportedRun, Placing, imported_runs
from oelm.files import MAX_JSON_BYTES
from oelm.report.words import Words

# As reported for GPT-01, and the rest invented so that it adds up to half of the wall time, as there.
TIMING: dict[str, Any] = {
    "model_type": "baseline",
    "init_method": "normal",
    "dataset": "tinystories",
    "total_wall_time": 16287.0,
    "total_formatted": "4h 31m 27s",
    "num_steps_measured": 99_900,
    "warmup_steps": 100,
    "mean_step_time": 0.0837,
    "std_step_time": 0.01,
    "median_step_time": 0.083,
    "min_step_time": 0.07,
    "max_step_time": 0.9,
    "p95_step_time": 0.09,
    "p99_step_time": 0.1,
    "total_validation_time": 500.0,
    "mean_validation_time": 5.0,
    "num_validations": 100,
    "epoch_times": [8000.0, 8287.0],
    "final_perplexity": 4.27,
    "best_val_loss": 1.4516,
}
BAR = "Training:  20%|##        | 20000/100000 [27:55<1:51:40, 11.94it/s]"
LOG = (
    f"{BAR}\r{BAR}[Step 20000] Validation - Loss: 1.7316, PPL: 5.65\n"
    f"[Step 61000] Validation - Loss: 1.5063, PPL: 4.51\r\n{BAR}\n"
    f"\r{BAR}\r[Step 100000] Validation - Loss: 1.4516, PPL: 4.27"
)
CURVE = [(20000, 1.7316, 5.65), (61000, 1.5063, 4.51), (100000, 1.4516, 4.27)]


def kept(folder: Path) -> list[ImportedRun]:
    """Return what an import keeps of the study's folders."""
    return imported_runs(read_sources([folder], format="study"), study="old", placing=Placing())


def lines(row: ImportedRun) -> list[tuple[int, float, float]]:
    """Return the evaluations of a row: step, loss and PPL."""
    losses, ppls = (row.curves.get(name, ()) for name in ("val_loss", "val_ppl"))
    return [(step, loss, ppl) for (step, loss), (_, ppl) in zip(losses, ppls, strict=True)]


def told_of(row: ImportedRun) -> list[str]:
    """Return a row's inconsistencies in the words of the command line."""
    words = Words("en")
    return [words(f"inconsistency.{problem.code}", **problem.values) for problem in inconsistencies(row)]


def write_study(root: Path, name: str = "GPT-01_baseline", *, log: str | bytes | None = LOG, **changes: Any) -> Path:
    folder = root / name
    folder.mkdir(parents=True)
    kept = {key: value for key, value in {**TIMING, **changes}.items() if value != "absent"}
    (folder / "timing_stats.json").write_text(json.dumps(kept))
    if log is not None:
        (folder / "training.log").write_bytes(log.encode() if isinstance(log, str) else log)
    return folder


def one(root: Path, **changes: Any) -> ImportedRun:
    (row,) = kept(write_study(root, **changes))
    return row


def test_figures_come_under_our_names(tmp_path: Path) -> None:
    row = one(tmp_path)
    assert (row.arm, row.about) == ("GPT-01", {"method": "baseline", "dataset": "tinystories"})
    assert row.figures == {
        "best_ppl": 4.27,
        "best_val_loss": 1.4516,
        "wall_s": 16287.0,
        "measured_steps": 99_900,
        "warmup_steps": 100,
        "step_s": 0.0837,
        "step_s_std": 0.01,
        "step_s_median": 0.083,
        "step_s_min": 0.07,
        "step_s_max": 0.9,
        "step_s_p95": 0.09,
        "step_s_p99": 0.1,
        "validation_s": 500.0,
        "validation_s_mean": 5.0,
        "validations": 100,
    }


def test_a_row_says_that_it_is_reported_and_from_which_bytes(tmp_path: Path) -> None:
    row = one(tmp_path)
    files = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in (tmp_path / "GPT-01_baseline").iterdir()}
    assert row.source == files and (row.label, row.format, row.name) == ("imported", "study", "GPT-01_baseline")


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [("baseline", "baseline"), ("oelm_v2", "oelm_freeze"), ("oelm_random", "oelm_random"), ("other", "other")],
)
def test_their_names_of_methods_become_ours(tmp_path: Path, theirs: str, ours: str) -> None:
    assert one(tmp_path, model_type=theirs).about["method"] == ours


def test_figures_that_are_null_and_keys_that_are_unknown_stay_out(tmp_path: Path) -> None:
    row = one(tmp_path, final_perplexity=None, best_val_loss=None, gpu="A5000", hook={"a": [1]})
    assert "best_ppl" not in row.figures and "best_val_loss" not in row.figures and "A5000" not in str(row)


def test_a_very_short_run_has_a_wall_time_alone(tmp_path: Path) -> None:
    folder = tmp_path / "GPT-02_oelm_freeze"
    folder.mkdir()
    short = {"model_type": "oelm_v2", "dataset": "tinystories", "total_wall_time": 12, "note": "too few steps"}
    (folder / "timing_stats.json").write_text(json.dumps(short))
    (row,) = kept(folder)
    assert row.figures == {"wall_s": 12.0} and row.curves == {} and inconsistencies(row) == []


def test_the_curve_is_found_among_progress_bars(tmp_path: Path) -> None:
    assert lines(one(tmp_path)) == CURVE


def test_a_line_in_two_logs_counts_once_and_lines_come_in_order(tmp_path: Path) -> None:
    folder = write_study(tmp_path)
    (folder / "a.txt").write_text("\n".join(reversed(LOG.split("\n"))))
    assert lines(kept(folder)[0]) == CURVE


def test_evaluations_that_are_not_finite_are_left_out(tmp_path: Path) -> None:
    told = ["Loss: nan, PPL: nan", "Loss: 800.0, PPL: inf", "Loss: 1e999, PPL: 1e999", "Loss: 1e1, PPL: 2.2e+4"]
    log = "\n".join(f"[Step {number}] Validation - {line}" for number, line in enumerate(told))
    assert lines(one(tmp_path, log=log)) == [(3, 10.0, 22000.0)]


def test_bytes_that_are_no_text_do_not_hide_a_line(tmp_path: Path) -> None:
    assert lines(one(tmp_path, log=b"\xff\xfe\x00\x1b[A" + LOG.encode() + b"\xff")) == CURVE


@pytest.mark.parametrize("shift", [-46, -45, -44, -43, -42, -41, -35, -7, -1, 0])
def test_a_line_across_the_end_of_a_chunk_is_read_whole(tmp_path: Path, shift: int) -> None:
    log = b"." * (2**20 + shift) + b"[Step 7] Validation - Loss: 1.4516, PPL: 4.27" + b"." * 2**20
    assert lines(one(tmp_path, log=log)) == [(7, 1.4516, 4.27)]


def test_a_folder_of_folders_gives_a_row_each_and_others_are_passed_over(tmp_path: Path) -> None:
    for name in ("GPT-04_openwebtext_baseline", "GPT-01_baseline", "SST-2-01"):
        write_study(tmp_path, name)
    (tmp_path / "notes").mkdir()
    (tmp_path / "GPT-99_a_file").write_text("")
    assert [row.arm for row in kept(tmp_path)] == ["GPT-01", "GPT-04", "SST-2-01"]


def test_the_same_id_twice_is_refused(tmp_path: Path) -> None:
    write_study(tmp_path, "GPT-01_baseline")
    write_study(tmp_path, "GPT-01_again")
    with pytest.raises(DataError, match="GPT-01_baseline: GPT-01, seed 0: the run 'GPT-01_again' has this arm and seed, too"):
        kept(tmp_path)


@pytest.mark.parametrize("make", [lambda path: None, lambda path: path.mkdir(), lambda path: path.write_text("")])
def test_a_folder_without_experiments_is_refused(tmp_path: Path, make: Any) -> None:
    make(tmp_path / "outputs")
    with pytest.raises(DataError, match=r"outputs: no (such )?folder"):
        read_earlier(tmp_path / "outputs")


def test_an_absent_timing_file_is_named(tmp_path: Path) -> None:
    (write_study(tmp_path) / "timing_stats.json").unlink()
    with pytest.raises(DataError, match=r"GPT-01_baseline/timing_stats\.json: missing"):
        read_earlier(tmp_path)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "cannot be read as JSON"),
        ('{"model_type": "base', "cannot be read as JSON"),
        (json.dumps(TIMING | {"best_val_loss": float("nan")}), "NaN is not JSON"),
        (json.dumps(TIMING).replace("16287.0", "1e999"), "total_wall_time: .*finite"),
        (json.dumps(TIMING | {"best_val_loss": -1.0}), "best_val_loss: .*greater than or equal to 0"),
        (json.dumps(TIMING | {"best_val_loss": "1.45"}), "best_val_loss: .*valid number"),
        (json.dumps(TIMING | {"num_validations": True}), "num_validations: .*valid number"),
        (json.dumps(TIMING | {"num_validations": 10**400}), "num_validations: "),
        (json.dumps(TIMING | {"dataset": "\x1b[31m"}), "dataset: "),
        (json.dumps(TIMING | {"dataset": "x" * 65}), "dataset: "),
        (json.dumps({"model_type": "baseline"}), "total_wall_time: Field required"),
        ("[1, 2]", "the whole: "),
        ("[" * 100_000, "cannot be read as JSON"),
    ],
)
def test_a_damaged_timing_file_is_refused_with_file_and_reason(tmp_path: Path, text: str, reason: str) -> None:
    (write_study(tmp_path) / "timing_stats.json").write_text(text)
    with pytest.raises(DataError, match=rf"timing_stats\.json: .*{reason}"):
        read_earlier(tmp_path)


@pytest.mark.parametrize(("name", "size"), [("timing_stats.json", MAX_JSON_BYTES + 1), ("huge.log", 2**30)])
def test_a_file_too_large_is_refused_unread(tmp_path: Path, name: str, size: int) -> None:
    folder = write_study(tmp_path)
    with (folder / name).open("ab") as file:
        file.truncate(size)
    with pytest.raises(DataError, match=rf"{name}: {size:,} bytes"):
        read_earlier(tmp_path)


def test_a_pipe_among_the_logs_is_passed_over(tmp_path: Path) -> None:
    os.mkfifo(write_study(tmp_path) / "pipe.log")
    assert lines(kept(tmp_path)[0]) == CURVE


def test_a_log_whose_name_cannot_be_printed_is_refused(tmp_path: Path) -> None:
    (write_study(tmp_path) / "a\x1b[31m.log").write_text("")
    with pytest.raises(DataError, match="cannot be printed; rename it"):
        read_earlier(tmp_path)


def test_the_unaccounted_share_of_the_wall_time_is_computed(tmp_path: Path) -> None:
    # 100,000 x 0.0837 s = 8,370 s, and 500 s of validation: 8,870 of 16,287 s.
    assert told_of(one(tmp_path)) == [
        "100,000 steps x 0.0837 s + 500 s of validation = 2h27m50s of 4h31m27s wall time: 45.5% of it is unaccounted for"
    ]


def test_steps_longer_than_the_wall_time_are_told(tmp_path: Path) -> None:
    (told,) = told_of(one(tmp_path, mean_step_time=0.184))
    assert told.endswith("= 5h15m00s, 16.0% more than the wall time of 4h31m27s")


def test_a_clock_that_adds_up_is_not_remarked_on(tmp_path: Path) -> None:
    assert inconsistencies(one(tmp_path, total_wall_time=9000.0)) == []


@pytest.mark.parametrize(
    ("ppl", "loss"),
    [(4.27, 1.4516), (4.69, 1.5456), (4.97, 1.6038), (47.24, 3.855), (54.29, 3.994), (25.13, 3.224), (29.03, 3.368)],
)
def test_reported_perplexities_are_those_of_their_losses_within_rounding(tmp_path: Path, ppl: float, loss: float) -> None:
    row = one(tmp_path, log=None, total_wall_time=9000.0, final_perplexity=ppl, best_val_loss=loss)
    assert inconsistencies(row) == []


@pytest.mark.parametrize(("ppl", "loss"), [(4.29, 1.4516), (4.25, 1.4516), (4.5, 1.5), (1e300, 1e5)])
def test_a_perplexity_that_is_not_of_its_loss_is_told(tmp_path: Path, ppl: float, loss: float) -> None:
    row = one(tmp_path, log=None, total_wall_time=9000.0, final_perplexity=ppl, best_val_loss=loss)
    assert len(told_of(row)) == 1 and "is not exp(best validation loss" in told_of(row)[0]


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"best_val_loss": 1.46, "final_perplexity": None}, "(loss 1.4516 at step 100,000) is below the best reported, 1.46"),
        ({"best_val_loss": 1.44, "final_perplexity": None}, "(loss 1.4516 at step 100,000) is above the best reported, 1.44"),
        ({"num_validations": 90}, "90 validations x 5 s = 450.0 s, but 500.0 s are reported"),
        ({"median_step_time": 0.095}, "step_s_median 0.095 s is more than step_s_p95 0.09 s"),
        ({"min_step_time": 0.084, "median_step_time": 0.085}, "the mean step of 0.0837 s is outside"),
        ({"log": LOG + "\n[Step 20000] Validation - Loss: 1.9, PPL: 6.69"}, "step 20,000 was evaluated twice"),
        ({"log": LOG.replace("5.65", "5.75")}, "step 20,000: PPL 5.75 is not exp(1.7316) = 5.65"),
        ({"log": LOG.replace("5.65", "5.75").replace("4.51", "4.61")}, "is not exp(1.7316) = 5.65 (and 1 more such lines)"),
    ],
)
def test_what_does_not_agree_is_told_with_its_numbers(tmp_path: Path, changes: dict[str, Any], told: str) -> None:
    found = told_of(one(tmp_path, total_wall_time=9000.0, **changes))
    assert len(found) == 1 and told in found[0]


@settings(deadline=None)
@given(st.floats(min_value=0.0, max_value=20.0))
def test_exact_perplexities_are_never_accused(loss: float) -> None:
    figures = {"best_val_loss": loss, "best_ppl": math.exp(loss), "wall_s": 1.0}
    run = ImportedRun(study="old", arm="GPT-01", seed=0, name="x", format="study", curves={}, figures=figures, source={})
    assert inconsistencies(run) == []


def test_the_command_imports_a_study_and_tells_what_does_not_add_up(tmp_path: Path) -> None:
    app = typer.Typer()
    app.command()(import_runs)
    write_study(tmp_path / "study")
    arguments = [str(tmp_path / "study"), "--name", "old", "--out", str(tmp_path / "outputs")]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert "GPT-01: study, seeds 0; best_ppl, " in result.output and "1 run written to" in result.output
    assert "GPT-01 does not add up: 100,000 steps" in result.output and "45.5%" in result.output
    assert reported_runs(tmp_path / "outputs")["GPT-01"].figures["best_ppl"] == 4.27
