"""Runs of other tools become records: from files that the real libraries wrote, and every wrong file is refused by name."""

from __future__ import annotations

import csv
import importlib.util
import json
import math
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oelm.errors import ConfigError, DataError, MissingExtraError
from oelm.experiments.importer import (
    Columns,
    ImportedRun,
    Placing,
    imported_runs,
    load_imported,
    read_sources,
    record_path,
    write_imported,
)
from oelm.train.track import SourceRun

HEADER = ("arm", "seed", "step", "eval_loss")
ROWS = [(arm, seed, step, 3.0 - step / 100 + seed / 10) for arm in ("A", "B") for seed in (0, 1) for step in (50, 100)]


def write_csv(path: Path, rows: Sequence[Sequence[Any]] = ROWS, header: Sequence[str] = HEADER) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([header, *rows])
    return path


def read(*sources: Path, columns: str | None = None, placing: Placing | None = None, **given: Any) -> list[ImportedRun]:
    """Return what an import would keep."""
    metrics = given.pop("metrics", ())
    found = read_sources(sources, columns=Columns.parse(columns), **given)
    return imported_runs(found, study="s", placing=placing or Placing(), metrics=metrics)


def short(runs: Sequence[ImportedRun]) -> dict[tuple[str, int], dict[str, tuple[tuple[int, float], ...]]]:
    return {(run.arm, run.seed): run.curves for run in runs}


EXPECTED = {
    (arm, seed): {"eval_loss": ((50, 2.5 + seed / 10), (100, 2.0 + seed / 10))} for arm in ("A", "B") for seed in (0, 1)
}


def test_a_table_of_arms_seeds_and_steps(tmp_path: Path) -> None:
    runs = read(write_csv(tmp_path / "runs.csv"))
    assert short(runs) == EXPECTED
    assert {(run.format, run.study, run.label) for run in runs} == {("table", "s", "imported")}
    assert all(list(run.source) == ["runs.csv"] and len(run.source["runs.csv"]) == 64 for run in runs)


@pytest.mark.parametrize(
    ("header", "columns"),
    [
        (("run", "seed", "step", "eval_loss"), None),
        (("run_name", "seed", "_step", "eval_loss"), None),
        (("model", "rng", "updates", "eval_loss"), "arm=model,seed=rng,step=updates"),
    ],
)
def test_columns_are_found_by_their_usual_names_or_by_those_given(
    header: Sequence[str], columns: str | None, tmp_path: Path
) -> None:
    assert short(read(write_csv(tmp_path / "runs.csv", header=header), columns=columns)) == EXPECTED


def test_json_jsonl_tsv_and_long_tables_give_the_same_runs(tmp_path: Path) -> None:
    rows = [dict(zip(HEADER, row, strict=True)) for row in ROWS]
    (tmp_path / "runs.json").write_text(json.dumps(rows))
    (tmp_path / "runs.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    (tmp_path / "runs.tsv").write_text("\n".join("\t".join(map(str, row)) for row in (HEADER, *ROWS)))
    long = [(arm, seed, step, "eval_loss", loss) for arm, seed, step, loss in ROWS]
    write_csv(tmp_path / "long.csv", long, ("arm", "seed", "step", "metric", "value"))
    for name in ("runs.json", "runs.jsonl", "runs.tsv", "long.csv"):
        assert short(read(tmp_path / name)) == EXPECTED, name


def test_cells_left_empty_and_columns_of_text_are_no_metrics(tmp_path: Path) -> None:
    rows = [("A", 0, 1, "2.0", "", "fine"), ("A", 0, 2, "", "0.5", "fine")]
    (run,) = read(write_csv(tmp_path / "t.csv", rows, (*HEADER[:3], "loss", "acc", "note")))
    assert run.curves == {"loss": ((1, 2.0),), "acc": ((2, 0.5),)}


def test_one_file_for_each_run_is_named_by_its_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for arm in ("A", "B"):
        for seed in (0, 1):
            own = [row[2:] for row in ROWS if row[:2] == (arm, seed)]
            write_csv(Path("logs") / arm / f"seed_{seed}" / "metrics.csv", own, HEADER[2:])
    assert short(read(Path("logs"))) == EXPECTED
    assert short(read(*Path("logs").glob("*/*"))) == EXPECTED


def test_a_table_without_steps_has_one_value_a_run(tmp_path: Path) -> None:
    runs = read(write_csv(tmp_path / "t.csv", [("A", 0, 0.9), ("A", 1, 0.8)], ("arm", "seed", "accuracy")))
    assert [run.curves for run in runs] == [{"accuracy": ((0, 0.9),)}, {"accuracy": ((0, 0.8),)}]


@pytest.mark.parametrize(
    ("rows", "header", "told"),
    [
        ([("A", "", 1, 2.0)], HEADER, r"line 2: the column 'seed' is empty; every row needs its seed"),
        ([("A", "x", 1, 2.0)], HEADER, r"line 2: the column 'seed' is 'x'; a seed is a whole number"),
        ([("A", 0.5, 1, 2.0)], HEADER, r"the column 'seed' is '0\.5'"),
        ([("A", 0, -1, 2.0)], HEADER, r"the column 'step' is '-1'; a step is a whole number from 0 on"),
        ([("A", 0, 1, 2.0), ("A", 0, 1, 2.0)], HEADER, r"A, seed 0: eval_loss has two values at step 1, 2\.0 and 2\.0"),
        ([("A", 0, 1, "nan")], HEADER, r"A, seed 0: eval_loss is nan at step 1\. A run that diverged"),
        ([("A", 0, 1, "-inf")], HEADER, r"eval_loss is -inf at step 1"),
        ([("A", 0, 1)], HEADER, r"line 2 has not as many cells as the header"),
        ([], HEADER, r"runs\.csv: has no row"),
        ([("A", 0, 1, "")], HEADER, r"A, seed 0: holds no number at all"),
        ([("A", 1, 2.0)], ("arm", "step", "eval_loss"), r"no seed is known for the run 'A'; give --runs"),
        ([("A-0", 1, 2.0)], ("run", "step", "eval_loss"), r"no seed is known for the run 'A-0'"),
    ],
)
def test_a_wrong_table_is_refused_with_its_place(rows: Any, header: Sequence[str], told: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=rf"runs\.csv.*{told}" if not told.startswith("runs") else told):
        read(write_csv(tmp_path / "runs.csv", rows, header))


def test_a_wrong_column_is_refused_with_those_there_are(tmp_path: Path) -> None:
    table = write_csv(tmp_path / "runs.csv")
    with pytest.raises(DataError, match=r"no column 'sed' \(did you mean 'seed'\?\); it has: arm, seed, step, eval_loss"):
        read(table, columns="seed=sed")
    with pytest.raises(ConfigError, match="write pairs such as arm=model,seed=rng"):
        read(table, columns="sead=seed")
    with pytest.raises(DataError, match=r"A, seed 0: has no metric 'loss' \(did you mean 'eval_loss'\?\); it has eval_loss"):
        read(table, metrics=["loss"])


@pytest.mark.parametrize("text", ["", "{", "[1]", "{}", "[" * 100_000])
def test_damaged_json_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "runs.json").write_text(text)
    with pytest.raises(DataError, match=r"runs\.json: (cannot be read as JSON|must hold a list|has no row)"):
        read(tmp_path / "runs.json")


def test_bytes_that_are_no_text_are_refused(tmp_path: Path) -> None:
    (tmp_path / "runs.csv").write_bytes(b"arm,seed\n\xff\xfe,0\n")
    with pytest.raises(DataError, match=r"runs\.csv: cannot be read as text"):
        read(tmp_path / "runs.csv")


def test_what_is_absent_unknown_or_of_two_formats_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no such file or folder"):
        read(tmp_path / "absent")
    (tmp_path / "notes.md").write_text("x")
    with pytest.raises(ConfigError, match=r"holds no file of a known format; choose one with --format: table, tensorboard"):
        read(tmp_path)
    (tmp_path / "trainer_state.json").write_text("{}")
    (tmp_path / "events.out.tfevents.1").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"several formats \(tensorboard, trainer\); choose one with --format"):
        read(tmp_path)


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("base-seed-3", ("base", 3)),
        ("out/base/seed-3", ("base", 3)),
        ("out/base_seed3/tensorboard", ("base", 3)),
        ("lr=0.1 Seed=12", ("lr=0.1", 12)),
    ],
)
def test_arm_and_seed_are_read_from_usual_names(name: str, found: tuple[str, int]) -> None:
    assert Placing().place(SourceRun(name, Path("x"), "table", [])) == found


def test_a_pattern_tells_arm_and_seed() -> None:
    run = SourceRun("exp7/base-s3-final", Path("x"), "table", [])
    assert Placing("*/{arm}-s{seed}-*").place(run) == ("base", 3)
    with pytest.raises(DataError, match=r"run 'exp7/base-s3-final' does not match --runs '\{arm\}\+\{seed\}'"):
        Placing("{arm}+{seed}").place(run)
    with pytest.raises(ConfigError, match=r"write \{seed\} once"):
        Placing("{arm}").place(run)


@settings(deadline=None)
@given(st.text(alphabet="abcxyz0123456789-_./", min_size=1, max_size=20), st.integers(0, 10**6))
def test_a_name_made_by_a_pattern_is_read_by_it(arm: str, seed: int) -> None:
    run = SourceRun(f"{arm}+{seed}", Path("x"), "table", [])
    assert Placing("{arm}+{seed}").place(run) == (arm, seed)


def test_a_copied_run_is_refused_as_another_seed(tmp_path: Path) -> None:
    rows = [("A", seed, step, math.sin(step)) for seed in (0, 1) for step in range(12)]
    with pytest.raises(DataError, match=r"A: the seeds 0 and 1 have the same values at every step"):
        read(write_csv(tmp_path / "runs.csv", rows))


def test_records_survive_writing_and_are_never_replaced_unasked(tmp_path: Path) -> None:
    runs = read(write_csv(tmp_path / "runs.csv"))
    written, already = write_imported(runs, tmp_path / "out")
    assert len(written) == 4 and already == [] and load_imported(tmp_path / "out") == sorted(runs, key=lambda run: run.arm)
    assert write_imported(runs, tmp_path / "out") == ([], written)
    other = read(write_csv(tmp_path / "runs.csv", [(*row[:3], row[3] + 1) for row in ROWS]))
    with pytest.raises(DataError, match=r"holds another run of this arm and seed; give another --name, or --replace"):
        write_imported(other, tmp_path / "out")
    assert load_imported(tmp_path / "out") == runs
    write_imported(other, tmp_path / "out", replace=True)
    assert load_imported(tmp_path / "out") == other


@pytest.mark.parametrize("arm", ["lr = 0.1, frozen", "../../etc", "a/b", "-", "con" * 40, "\u57fa\u7ebf"])
def test_an_arm_of_any_name_stays_inside_its_study(arm: str, tmp_path: Path) -> None:
    (run,) = read(write_csv(tmp_path / "runs.csv", [(arm, 0, 1, 2.0)]))
    ((path,), _) = write_imported([run], tmp_path / "out")
    assert path.resolve().parent.parent == (tmp_path / "out" / "imported" / "s").resolve()
    assert load_imported(tmp_path / "out") == [run] and run.arm == arm


@pytest.mark.parametrize("name", ["", "../up", "a/b", ".hidden", "a b"])
def test_a_study_needs_a_name_that_can_be_a_folder(name: str, tmp_path: Path) -> None:
    found = read_sources([write_csv(tmp_path / "runs.csv")])
    with pytest.raises(ConfigError, match="use letters, digits"):
        imported_runs(found, study=name, placing=Placing())


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"study": "s", "arm": "A", "seed": 0}', "nan"])
def test_a_damaged_record_is_refused_with_its_file(text: str, tmp_path: Path) -> None:
    write_imported(read(write_csv(tmp_path / "runs.csv")), tmp_path)
    (tmp_path / "imported" / "s" / "A" / "seed-0.json").write_text(text)
    with pytest.raises(DataError, match=r"A/seed-0\.json: cannot be read .*import it again"):
        load_imported(tmp_path)


def test_a_record_in_anothers_place_is_refused(tmp_path: Path) -> None:
    written, _ = write_imported(read(write_csv(tmp_path / "runs.csv")), tmp_path)
    written[0].rename(written[0].with_name("seed-7.json"))
    with pytest.raises(DataError, match=r"seed-7\.json: holds seed 0 of A in s"):
        load_imported(tmp_path)


def test_nothing_is_written_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "imported").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(DataError, match="is a link"):
        write_imported(read(write_csv(tmp_path / "runs.csv")), tmp_path)
    assert not list((tmp_path / "elsewhere").iterdir())


def write_events(folder: Path, points: Sequence[tuple[int, float]], **given: Any) -> None:
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(folder), **given) as writer:
        for step, value in points:
            writer.add_scalar("eval/loss", value, step)


def test_tensorboard_files_of_the_real_library(tmp_path: Path) -> None:
    for arm in ("A", "B"):
        for seed in (0, 1):
            write_events(tmp_path / f"{arm}-seed{seed}", [(1, 2.5), (2, 2.0 + seed / 2)])
    found = short(read(tmp_path))
    assert found == {(arm, seed): {"eval/loss": ((1, 2.5), (2, 2 + seed / 2))} for arm in ("A", "B") for seed in (0, 1)}


def test_tensorboard_scalars_kept_as_tensors(tmp_path: Path) -> None:
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.plugins.scalar.summary_v2 import scalar_pb
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    writer = EventFileWriter(str(tmp_path / "A" / "seed-4"))
    for step in (1, 2):
        writer.add_event(Event(step=step, summary=scalar_pb("accuracy", step / 4)))
    writer.close()
    assert short(read(tmp_path)) == {("A", 4): {"accuracy": ((1, 0.25), (2, 0.5))}}


def test_a_tensorboard_run_that_was_resumed_counts_each_step_once(tmp_path: Path) -> None:
    write_events(tmp_path / "A-seed0", [(1, 2.5), (2, 2.0)], filename_suffix=".0")
    write_events(tmp_path / "A-seed0", [(2, 2.0), (3, 1.5)], filename_suffix=".1")
    assert short(read(tmp_path)) == {("A", 0): {"eval/loss": ((1, 2.5), (2, 2.0), (3, 1.5))}}
    write_events(tmp_path / "A-seed0", [(3, 1.25)], filename_suffix=".2")
    with pytest.raises(DataError, match=r"A, seed 0: eval/loss has two values at step 3"):
        read(tmp_path)


def test_without_tensorboard_its_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_events(tmp_path / "A-seed0", [(1, 2.5)])
    for name in [name for name in sys.modules if name.split(".")[0] == "tensorboard"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    with pytest.raises(MissingExtraError, match=r"oelm\[track\]"):
        read(tmp_path)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `transformers.Trainer` leaves of two seeds of a model of one weight."""
    import torch
    from transformers import Trainer, TrainingArguments

    class Scale(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(1))

        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"loss": ((self.weight * x - labels) ** 2).mean(), "logits": self.weight * x}

    root = tmp_path_factory.mktemp("trainer")
    for seed in (0, 1):
        rows = [{"x": torch.tensor([float(n + seed)]), "labels": torch.tensor([2.0 * n])} for n in range(8)]
        arguments = TrainingArguments(
            output_dir=str(root / "base" / f"seed-{seed}"),
            max_steps=6,
            logging_steps=2,
            eval_strategy="steps",
            eval_steps=3,
            save_steps=3,
            seed=seed,
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
        )
        Trainer(model=Scale(), args=arguments, train_dataset=rows, eval_dataset=rows).train()  # type: ignore[arg-type,unused-ignore]
    return root


def test_trainer_states_of_the_real_library(trained: Path) -> None:
    states = sorted(trained.rglob("trainer_state.json"))
    assert len(states) == 4, "two checkpoints of each run"
    runs = read(trained)
    for run in runs:
        history = json.loads((trained / "base" / f"seed-{run.seed}" / "checkpoint-6" / "trainer_state.json").read_text())
        rows = [row for row in history["log_history"] if "eval_loss" in row]
        assert run.curves["eval_loss"] == tuple((row["step"], row["eval_loss"]) for row in rows) and len(rows) == 2
    assert [(run.arm, run.seed, run.format) for run in runs] == [("base", 0, "trainer"), ("base", 1, "trainer")]


def test_a_trainer_state_with_nan_is_refused_unless_other_metrics_are_named(trained: Path, tmp_path: Path) -> None:
    state = json.loads(next(trained.rglob("checkpoint-6/trainer_state.json")).read_text())
    state["log_history"][0]["grad_norm"] = math.nan
    path = tmp_path / "base" / "seed-0" / "trainer_state.json"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(state))
    with pytest.raises(DataError, match=r"base, seed 0: grad_norm is nan at step 2.*--metric"):
        read(path)
    assert list(read(path, metrics=["eval_loss"])[0].curves) == ["eval_loss"]


@pytest.mark.parametrize("text", ["{}", "[]", '{"log_history": [1]}', '{"log_history": [{"loss": 1}]}', "{"])
def test_a_damaged_trainer_state_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "trainer_state.json").write_text(text)
    with pytest.raises(DataError, match=r"trainer_state\.json: (has no log_history|log_history has a row|cannot be read)"):
        read(tmp_path / "trainer_state.json")


def in_child(program: str, folder: Path) -> None:
    """Run a program that logs with a tracker, offline, in a process of its own: they keep global state."""
    environment = {**os.environ, "WANDB_MODE": "offline", "WANDB_SILENT": "true", "TRACKIO_DIR": str(folder)}
    child = subprocess.run([sys.executable, "-c", program], cwd=folder, env=environment, capture_output=True, text=True)
    assert child.returncode == 0, child.stderr


@pytest.mark.skipif(importlib.util.find_spec("trackio") is None, reason="trackio is not installed")
def test_a_trackio_database_of_the_real_library(tmp_path: Path) -> None:
    program = """
import trackio
for arm in ("A", "B"):
    for seed in (0, 1):
        trackio.init(project="p", name=f"{arm}-seed-{seed}", config={"lr": 0.1}, embed=False)
        for step in (50, 100):
            trackio.log({"eval_loss": 3.0 - step / 100 + seed / 10, "note": "text"}, step=step)
        trackio.finish()
trackio.init(project="q", name="one", group="G", config={"seed": 7}, embed=False)
trackio.log({"acc": float("nan")}, step=1)
trackio.finish()
"""
    in_child(program, tmp_path)
    assert short(read(tmp_path / "p.db")) == EXPECTED
    with pytest.raises(DataError, match=r"q\.db: G, seed 7: acc is nan at step 1"):
        read(tmp_path / "q.db")


@pytest.mark.skipif(importlib.util.find_spec("wandb") is None, reason="wandb is not installed")
def test_offline_runs_of_the_real_wandb(tmp_path: Path) -> None:
    program = """
import time, wandb
for arm in ("A", "B"):
    for seed in (0, 1):
        run = wandb.init(project="p", name=f"{arm}-seed-{seed}", config={"lr": 0.1})
        for step in (50, 100):
            run.log({"eval_loss": 3.0 - step / 100 + seed / 10, "note": "text"}, step=step)
        run.finish()
# Its own process writes the files.
time.sleep(2)
"""
    in_child(program, tmp_path)
    assert short(read(tmp_path)) == EXPECTED


def test_a_chart_exported_from_the_page_of_wandb(tmp_path: Path) -> None:
    header = ["Step"]
    for run in ("A-seed-0", "A-seed-1"):
        header += [f"{run} - eval/loss", f"{run} - eval/loss__MIN", f"{run} - eval/loss__MAX"]
    rows = [(1, 2.0, 1.9, 2.1, "", "", ""), (2, 1.5, 1.5, 1.5, 1.75, 1.75, 1.75)]
    runs = read(write_csv(tmp_path / "chart.csv", rows, header))
    assert short(runs) == {("A", 0): {"eval/loss": ((1, 2.0), (2, 1.5))}, ("A", 1): {"eval/loss": ((2, 1.75),)}}
    assert {run.format for run in runs} == {"wandb"}


def test_importing_does_not_wait_for_torch(tmp_path: Path) -> None:
    write_csv(tmp_path / "runs.csv")
    write_events(tmp_path / "tb" / "A-seed0", [(1, 2.5)])
    program = f"""
import sys
from pathlib import Path
from oelm.experiments.importer import read_sources
from oelm.experiments.importer import Placing, imported_runs, write_imported
for name in ("runs.csv", "tb"):
    found = read_sources([Path({str(tmp_path)!r}) / name])
    write_imported(imported_runs(found, study=name, placing=Placing()), Path({str(tmp_path)!r}))
assert "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", program], check=True)
    assert len(load_imported(tmp_path)) == 5 and record_path(tmp_path, load_imported(tmp_path)[0]).is_file()


# --- The earlier study's folders

# As reported for GPT-01; the figures of steps and validation are invented.
TIMING: dict[str, Any] = {
    "model_type": "baseline",
    "dataset": "tinystories",
    "total_wall_time": 16287.0,
    "num_steps_measured": 99_900,
    "warmup_steps": 100,
    "mean_step_time": 0.0837,
    "median_step_time": 0.083,
    "total_validation_time": 500.0,
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
LOSSES = ((20000, 1.7316), (61000, 1.5063), (100000, 1.4516))


def write_study(root: Path, name: str = "GPT-01_baseline", *, log: bytes = LOG.encode(), **changes: Any) -> Path:
    folder = root / name
    folder.mkdir(parents=True)
    (folder / "timing_stats.json").write_text(json.dumps(TIMING | changes))
    (folder / "training.log").write_bytes(log)
    return folder


def test_the_earlier_studys_folder_is_a_run_with_figures_and_the_curve_among_progress_bars(tmp_path: Path) -> None:
    (run,) = read(write_study(tmp_path))
    assert (run.arm, run.seed, run.name, run.format) == ("GPT-01", 0, "GPT-01_baseline", "study")
    assert run.curves["val_loss"] == LOSSES and run.curves["val_ppl"][0] == (20000, 5.65)
    figures = {metric: points[0] for metric, points in run.curves.items() if len(points) == 1}
    values = {"wall_s": 16287.0, "measured_steps": 99_900, "warmup_steps": 100, "step_s": 0.0837, "step_s_median": 0.083}
    values |= {"validation_s": 500.0, "validations": 100, "best_ppl": 4.27, "best_val_loss": 1.4516}
    assert figures == {name: (100_000, value) for name, value in values.items()}
    assert set(run.source) == {"timing_stats.json", "training.log"}


def test_a_folder_of_the_studys_folders_gives_a_run_each(tmp_path: Path) -> None:
    for name in ("GPT-04_openwebtext_baseline", "GPT-01_baseline", "SST-2-01"):
        write_study(tmp_path, name)
    (tmp_path / "notes").mkdir()
    assert [run.arm for run in read(tmp_path)] == ["GPT-01", "GPT-04", "SST-2-01"]
    write_study(tmp_path, "GPT-01_again")
    with pytest.raises(DataError, match="GPT-01, seed 0: the run 'GPT-01_again' has this arm and seed, too"):
        read(tmp_path)


def test_figures_that_are_null_and_lines_that_are_not_finite_are_left_out(tmp_path: Path) -> None:
    told = [
        "Loss: nan, PPL: nan",
        "Loss: 800.0, PPL: inf",
        "Loss: 1e999, PPL: 1e999",
        "Loss: 1e1, PPL: 2.2e+4",
        "Loss: 1-2, PPL: 3",
    ]
    log = "\n".join(f"[Step {number}] Validation - {line}" for number, line in enumerate(told)).encode()
    (run,) = read(write_study(tmp_path, log=b"\xff\xfe\x00\x1b[A" + log, final_perplexity=None))
    assert "best_ppl" not in run.curves and run.curves["val_ppl"] == ((3, 22000.0),)


def test_a_line_in_two_logs_counts_once_and_two_runs_in_one_log_are_refused(tmp_path: Path) -> None:
    folder = write_study(tmp_path)
    (folder / "a.txt").write_text("\n".join(reversed(LOG.split("\n"))))
    os.mkfifo(folder / "pipe.log")
    assert read(folder)[0].curves["val_loss"] == LOSSES
    (folder / "a.txt").write_text("[Step 20000] Validation - Loss: 1.9, PPL: 6.69")
    with pytest.raises(DataError, match="GPT-01, seed 0: val_loss has two values at step 20000, 1.9 and 1.7316"):
        read(folder)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "cannot be read as JSON"),
        ('{"model_type": "base', "cannot be read as JSON"),
        ("[" * 100_000, "cannot be read as JSON"),
        ("[1, 2]", "has no total_wall_time"),
        ('{"model_type": "baseline"}', "has no total_wall_time"),
        (json.dumps(TIMING | {"best_val_loss": math.nan}), "best_val_loss is nan"),
        (json.dumps(TIMING).replace("16287.0", "1e999"), "total_wall_time is inf"),
        (json.dumps(TIMING | {"best_val_loss": -1.0}), "best_val_loss is -1.0, not a number from 0 on"),
        (json.dumps(TIMING | {"best_val_loss": "1.45"}), "best_val_loss is '1.45'"),
        (json.dumps(TIMING | {"num_validations": True}), "num_validations is True"),
        (json.dumps(TIMING | {"num_validations": 10**400}), "num_validations is 1000"),
    ],
)
def test_a_damaged_timing_file_is_refused_with_file_and_reason(tmp_path: Path, text: str, reason: str) -> None:
    (write_study(tmp_path) / "timing_stats.json").write_text(text)
    with pytest.raises(DataError, match=rf"timing_stats\.json: .*{reason}"):
        read(tmp_path)


def test_a_log_too_large_is_refused_unread(tmp_path: Path) -> None:
    with (write_study(tmp_path) / "huge.log").open("ab") as file:
        file.truncate(2**30 + 1)
    with pytest.raises(DataError, match=r"huge\.log: 1,073,741,825 bytes"):
        read(tmp_path)
