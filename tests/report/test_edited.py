"""Nobody turns a FAIL into a PASS by editing a record: every judged figure is recomputed, and what disagrees is refused."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from oelm.method.method import PRESETS
from oelm.report.arms import FinishedRun, read_run
from oelm.report.build import Report, build_report
from oelm.report.document import Table, Text
from oelm.report.sections.verdicts import JudgedPair
from oelm.runs.find import look_at
from tests.conftest import one_of_each_kind, run_here, tiny_config
from tests.report.synthetic import Fate, package_catalog, write_arm, write_lines, write_plain, write_run

BASE = [20.0, 20.2, 19.9, 20.1, 20.3]
WORSE = [21.8, 22.1, 21.6, 21.9, 22.3]
ACCURATE, LESS_ACCURATE = [0.90, 0.91, 0.89, 0.92, 0.88], [0.80, 0.82, 0.79, 0.80, 0.78]


def write_failing(root: Path, **chosen: Any) -> list[Path]:
    """Write an arm that fails against its baseline; return the folders of its seeds."""
    write_arm(root, "GPT-01", BASE, **chosen)
    return write_arm(root, "GPT-02", WORSE, **chosen)


def report(root: Path) -> Report:
    return build_report([root], package_catalog())


def judged(root: Path) -> JudgedPair:
    (row,) = report(root).judged
    return row


def told(root: Path, *, lang: str = "en") -> str:
    """Return every sentence of the section of verdicts."""
    return sentences(report(root), lang=lang)


def sentences(found: Report, *, lang: str = "en") -> str:
    section = next(section for section in found.document(lang).sections if section.name == "verdicts")
    return "\n".join(block.text for block in section.blocks if isinstance(block, Text))


def edit(path: Path, **changes: Any) -> None:
    write_plain(path, json.loads(path.read_text(encoding="utf-8")) | changes)


@contextmanager
def kept(path: Path) -> Iterator[None]:
    """Put a file back as it was."""
    content = path.read_bytes()
    yield
    path.write_bytes(content)


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def edit_rows(path: Path, change: Callable[[list[dict[str, Any]]], list[dict[str, Any]]]) -> None:
    write_lines(path, change(rows_of(path)))


def test_one_edited_figure_of_a_language_model_is_refused_by_name_with_both_values(tmp_path: Path) -> None:
    run = write_failing(tmp_path)[2]
    assert judged(tmp_path).judgement.verdict == "FAIL"
    stored = run / "timing_stats.json"
    for name, value in (
        ("best_ppl", 15.0),
        ("best_ppl", 1e-300),
        ("best_val_loss", 2.0),
        ("best_step", 5),
        ("final_ppl", 15.0),
        ("final_val_loss", 2.0),
        ("final_bits_per_byte", 1.0),
    ):
        right = json.loads(stored.read_text())[name]
        with kept(stored):
            edit(stored, **{name: value})
            found = report(tmp_path)
        (row,), problem = found.judged, sentences(found)
        assert row.judgement.verdict == "EXPLORATORY", (name, value)
        assert f"timing_stats.json: {name} is {value}" in problem and f"gives {right}" in problem, (name, value)
        assert "seed-2" in problem, (name, value)


def test_a_fail_stays_one_however_many_figures_are_edited(tmp_path: Path) -> None:
    for run in write_failing(tmp_path):
        edit(run / "timing_stats.json", best_ppl=15.0)
    found = report(tmp_path)
    assert not any(row.judgement.is_look for row in found.judged)
    for seed in range(5):
        assert f"seed-{seed}/timing_stats.json" in sentences(found)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"gain": "head"}, "0 parameters of a gain learn; config.json has method.gain = 'head'"),
        ({"correction": 0.1}, "0 parameters of a correction learn; config.json has method.correction = 0.1"),
    ],
)
def test_a_method_edited_to_learn_on_top_is_refused_by_the_audit(tmp_path: Path, changes: dict[str, Any], problem: str) -> None:
    for run in write_failing(tmp_path):
        config = json.loads((run / "config.json").read_text())
        edit(run / "config.json", method=config["method"] | changes)
    assert not any(row.judgement.is_look for row in report(tmp_path).judged) and problem in told(tmp_path)


def test_a_correction_that_the_config_hides_is_refused(tmp_path: Path) -> None:
    runs = write_failing(tmp_path)
    audit = json.loads((runs[0] / "audit.json").read_text())
    more = {"correction": {"trainable": 7, "frozen": 0}}
    edit(
        runs[0] / "audit.json",
        total=audit["total"] + 7,
        trainable=audit["trainable"] + 7,
        by_role=audit["by_role"] | more,
    )
    assert "7 parameters of a correction learn" in told(tmp_path)


def test_one_edited_accuracy_is_refused(tmp_path: Path) -> None:
    write_arm(tmp_path, "SST-2-01", ACCURATE)
    stored = write_arm(tmp_path, "SST-2-02", LESS_ACCURATE)[0] / "timing_stats.json"
    assert judged(tmp_path).judgement.verdict == "FAIL"
    for name in ("best_accuracy", "final_accuracy"):
        with kept(stored):
            edit(stored, **{name: 0.97})
            assert judged(tmp_path).judgement.verdict == "EXPLORATORY", name
            assert f"{name} is 0.97" in told(tmp_path)


def test_one_edited_figure_of_the_test_split_is_refused(tmp_path: Path) -> None:
    stored = write_failing(tmp_path, tests=WORSE)[0] / "timing_stats.json"
    for name, value in (("test_loss", 2.5), ("test_ppl", 15.0), ("test_step", 5)):
        with kept(stored):
            edit(stored, **{name: value})
            assert judged(tmp_path).judgement.verdict == "EXPLORATORY" and name in told(tmp_path), name


def test_a_test_figure_that_agrees_with_itself_is_recomputed_from_the_answers(tmp_path: Path) -> None:
    run = write_failing(tmp_path, tests=WORSE)[0]
    edit(run / "timing_stats.json", test_loss=2.5, test_ppl=math.exp(2.5))
    assert judged(tmp_path).judgement.verdict == "EXPLORATORY"
    assert "test_loss is 2.5, test_predictions.jsonl gives 3.08" in told(tmp_path)


def test_a_test_accuracy_is_recomputed_from_the_answers(tmp_path: Path) -> None:
    write_arm(tmp_path, "SST-2-01", ACCURATE, tests=ACCURATE)
    runs = write_arm(tmp_path, "SST-2-02", LESS_ACCURATE, tests=LESS_ACCURATE)
    assert judged(tmp_path).judgement.verdict == "FAIL"
    edit(runs[0] / "timing_stats.json", test_accuracy=0.97)
    assert "test_accuracy is 0.97, test_predictions.jsonl gives 0.8" in told(tmp_path)


def test_the_share_of_the_largest_class_is_recomputed_from_the_answers(tmp_path: Path) -> None:
    (run,) = write_arm(tmp_path, "SST-2-01", ACCURATE[:1], seeds=[0])
    edit(run / "timing_stats.json", majority_accuracy=0.5)
    assert "cannot be used" not in told(tmp_path)
    edit(run / "timing_stats.json", majority_accuracy=0.2)
    assert "majority_accuracy is 0.2, predictions.jsonl gives 0.5" in told(tmp_path)


def test_metrics_and_figures_edited_alike_are_found_by_the_answers(tmp_path: Path) -> None:
    run = write_failing(tmp_path)[0]

    def better(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        rows[-1] |= {"val_loss": 2.5, "val_ppl": math.exp(2.5), "bits_per_byte": 1.25}
        return rows

    edit_rows(run / "metrics.jsonl", better)
    found = {"final_val_loss": 2.5, "best_val_loss": 2.5, "final_bits_per_byte": 1.25}
    edit(run / "timing_stats.json", **found, final_ppl=math.exp(2.5), best_ppl=math.exp(2.5))
    assert judged(tmp_path).judgement.verdict == "EXPLORATORY"
    assert "final_val_loss is 2.5, predictions.jsonl gives 3.08" in told(tmp_path)


def test_answers_that_were_cut_off_or_changed_are_refused(tmp_path: Path) -> None:
    write_arm(tmp_path, "SST-2-01", ACCURATE)
    path = write_arm(tmp_path, "SST-2-02", LESS_ACCURATE)[1] / "predictions.jsonl"
    text = path.read_text(encoding="utf-8")
    for damage, changed in {
        "short": text[: len(text) // 2],
        "other-labels": text.replace('"label": 1', '"label": 0'),
        "empty": "",
        "damaged": text.replace('"label": 1', '"label": "x"'),
    }.items():
        path.write_text(changed, encoding="utf-8")
        assert judged(tmp_path).judgement.verdict == "EXPLORATORY" and "predictions.jsonl" in told(tmp_path), damage


def test_records_without_answers_are_judged_by_their_metrics(tmp_path: Path) -> None:
    for run in write_failing(tmp_path):
        (run / "predictions.jsonl").unlink()
    assert judged(tmp_path).judgement.verdict == "FAIL" and "cannot be used" not in told(tmp_path)


def test_a_perplexity_of_a_row_that_its_loss_does_not_give_is_refused(tmp_path: Path) -> None:
    run = write_failing(tmp_path)[0]
    edit_rows(run / "metrics.jsonl", lambda rows: [row | {"val_ppl": 2.0} if row.get("step") == 5 else row for row in rows])
    edit_rows(run / "metrics.jsonl", lambda rows: [row for row in rows if "val_loss" in row])
    assert "val_ppl is 2.0 at step 5" in told(tmp_path)


def halved(run: Path) -> None:
    edit_rows(run / "metrics.jsonl", lambda rows: [row for row in rows if row["step"] <= 10])
    last = rows_of(run / "metrics.jsonl")[-1]
    loss = last["val_loss"]
    found = {"final_val_loss": loss, "best_val_loss": loss, "final_bits_per_byte": last["bits_per_byte"], "best_step": 10}
    edit(run / "timing_stats.json", **found, final_ppl=last["val_ppl"], best_ppl=math.exp(loss))
    (run / "predictions.jsonl").unlink()


def test_a_run_that_ends_at_half_of_its_steps_is_refused(tmp_path: Path) -> None:
    halved(write_failing(tmp_path)[1])
    assert judged(tmp_path).judgement.verdict == "EXPLORATORY"
    assert "metrics.jsonl: the last evaluation is of step 10, config.json has 20 steps" in told(tmp_path)


def test_a_step_evaluated_twice_is_refused(tmp_path: Path) -> None:
    run = write_failing(tmp_path)[1]

    def twice(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        place = next(number for number, row in enumerate(rows) if "val_loss" in row)
        return [*rows[:place], {**rows[place], "val_loss": 4.5, "val_ppl": math.exp(4.5)}, *rows[place:]]

    edit_rows(run / "metrics.jsonl", twice)
    assert judged(tmp_path).judgement.verdict == "EXPLORATORY"
    assert "metrics.jsonl: step 5 is evaluated twice" in told(tmp_path)


@pytest.mark.parametrize("method", one_of_each_kind(PRESETS))
def test_what_training_leaves_is_not_refused(text_file: Path, tmp_path: Path, method: str) -> None:
    run_here(tiny_config(text_file, steps=4, eval_every=2, save_every=2, method=method), tmp_path / "run")
    run = read_run(look_at(tmp_path / "run"))
    assert run.problem == "" and isinstance(run, FinishedRun)


@pytest.mark.parametrize(("method", "is_frozen"), [("oelm_freeze", False), ("baseline", True), ("train_then_freeze", True)])
def test_an_audit_that_contradicts_the_method_is_refused(tmp_path: Path, method: str, is_frozen: bool) -> None:
    run = write_run(tmp_path, "GPT-02", 0, Fate(ppl=30.0, method=method))
    assert "cannot be used" not in told(tmp_path)
    audit = json.loads((run / "audit.json").read_text())
    audit["projections"][1]["is_frozen"] = is_frozen
    write_plain(run / "audit.json", audit)
    state = "is frozen" if is_frozen else "learns"
    assert f"audit.json: blocks.0.attention.k {state} at the start" in told(tmp_path)


def copied(run: Path, seed: int) -> None:
    copy = run.with_name(f"seed-{seed}")
    shutil.rmtree(copy)
    shutil.copytree(run, copy)
    edit(copy / "config.json", seed=seed)


@pytest.mark.parametrize("experiment", ["GPT-01", "GPT-02"])
def test_seeds_that_are_copies_of_each_other_make_no_arm(tmp_path: Path, experiment: str) -> None:
    write_failing(tmp_path)
    copied(tmp_path / experiment / "laptop" / "default" / "seed-1", 4)
    found = report(tmp_path)
    problem = sentences(found)
    assert found.judged == []
    assert f"{experiment}/laptop/default: gives no figure" in problem
    assert "seed-1" in problem and "seed-4" in problem and "the same evaluations" in problem


def resettled(run: Path, name: str, value: str) -> None:
    """Let a run have been computed with something else."""
    manifest = json.loads((run / "manifest.json").read_text())
    if name == "threads":
        manifest["environment"]["threads"] = value
    else:
        manifest[{"revision": "source_revision"}.get(name, name)] = value
    write_plain(run / "manifest.json", manifest)


@pytest.mark.parametrize("experiment", ["GPT-01", "GPT-02"])
def test_a_seed_computed_with_something_else_is_said_at_the_verdict(tmp_path: Path, experiment: str) -> None:
    write_failing(tmp_path)
    run = tmp_path / experiment / "laptop" / "default" / "seed-3"
    for name, value, mark in (
        ("revision", "f" * 40, "mixed revisions"),
        ("torch", "2.12.0+cpu", "mixed torch versions"),
        ("threads", "7", "mixed thread counts"),
    ):
        with kept(run / "manifest.json"):
            resettled(run, name, value)
            found = report(tmp_path)
        made = found.document("en")
        (table,) = [
            block
            for section in made.sections
            for block in section.blocks
            if isinstance(block, Table) and block.name == "verdicts"
        ]
        assert f"FAIL ({mark})" in [cell.text for cell in table.rows[0]]
        note = next(line for line in sentences(found).splitlines() if line.startswith("GPT-02, laptop:"))
        assert f"{value.removesuffix(32 * 'f')}: 3" in note, mark
        assert "混" in sentences(found, lang="zh"), mark


def test_a_run_that_went_on_with_another_revision_is_said_at_the_verdict(tmp_path: Path) -> None:
    run = write_failing(tmp_path)[2]
    manifest = json.loads((run / "manifest.json").read_text())
    write_plain(run / "manifest.json", manifest | {"earlier": [{"source_revision": "e" * 40, "environment": {}}]})
    assert "mixed_arm" in [reason.code for reason in judged(tmp_path).judgement.reasons]


def test_a_refused_seed_beyond_the_plan_gives_no_verdict_on_the_others(tmp_path: Path) -> None:
    write_arm(tmp_path, "GPT-01", [*BASE, 20.0], seeds=range(6))
    write_arm(tmp_path, "GPT-02", [*(0.99 * ppl for ppl in WORSE[:5]), 40.0], seeds=range(6))
    edit(tmp_path / "GPT-02/laptop/default/seed-5/timing_stats.json", best_ppl=41.0)
    row = judged(tmp_path)
    assert (row.judgement.verdict, row.judgement.reasons[0].code) == ("EXPLORATORY", "seeds_refused")
    assert row.judgement.reasons[0].values == {"seeds": (5,)}
