"""What a run will take: counts exact, times measured where a run was, and the queue's length what its slots make of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from oelm.config import FinetuneConfig, RunConfig
from oelm.experiments.forecast import (
    START_S,
    Forecaster,
    count_parameters,
    expected_seconds,
    num_labels,
    step_operations,
)
from oelm.experiments.plan import PlannedRun, make_config, plan_runs
from oelm.experiments.slots import queue_seconds
from oelm.files import write_json
from oelm.method.apply import freeze
from oelm.models.gpt import GPT
from tests.cases import case
from tests.experiments.planned import PAIR, catalog_of

CATALOG = catalog_of(
    PAIR,
    """
bert: {kind: classifier, data: sst2}
three: {kind: classifier, data: mnli, at: {laptop: {model.source: google-bert/bert-base-uncased@x}}}
table: {kind: classifier, data: /tables/mine.csv}
labelled: {extends: table, settings: {examples.labels: "bad, middling, good, best"}}
unknown: {kind: classifier, data: sst2, at: {laptop: {model.source: org/nobody-knows@x}}}
""",
)


def run_of(root: Path, name: str, *, seed: int = 0, budget: str = "smoke", variant: str = "default") -> PlannedRun:
    [run] = plan_runs([CATALOG.get(name)], budget=budget, seeds=[seed], root=root, variant=variant)
    return run


def made(name: str, changes: dict[str, Any]) -> RunConfig | FinetuneConfig:
    return make_config(CATALOG.get(name), "smoke", seed=0, changes=changes)


def took(run: PlannedRun, seconds: Any) -> None:
    write_json(run.path / "timing_stats.json", {"wall_s": {"total": seconds}}, durable=False)


@given(st.lists(st.integers(0, 1000), max_size=12), st.integers(-1, 5))
def test_a_queue_takes_no_less_than_its_work_divided_and_no_more_than_that_and_the_longest(
    lengths: list[int], slots: int
) -> None:
    whole, real = queue_seconds(lengths, slots), max(1, slots)
    assert max([sum(lengths) / real, *lengths]) <= whole <= sum(lengths) / real + max(lengths, default=0)


def test_a_run_starts_as_soon_as_a_slot_is_free() -> None:
    cases: list[tuple[list[float], int, float]] = [
        ([], 3, 0),
        ([5, 5, 5], 1, 15),
        ([5, 5, 5], 2, 10),
        ([5, 5, 5], 9, 5),
        ([1, 9, 1, 1], 2, 9),
        ([9, 1, 1, 9], 2, 11),
        ([4], 0, 4),
    ]
    for lengths, slots, whole in cases:
        with case(lengths, slots, whole):
            assert queue_seconds(lengths, slots) == whole


def test_counts_are_those_of_the_real_model() -> None:
    cases: list[Any] = ["baseline", "oelm_freeze", "oelm_freeze_pretrained", "uniform", {"freeze": ["k"], "layers": "first 1"}]
    for method in cases:
        with case(method):
            changes = {"method": method, "model.vocab_size": 300}
            config = make_config(CATALOG.get("base"), "smoke", seed=0, changes=changes)
            assert isinstance(config, RunConfig)
            model = GPT(config.model)
            freeze(model, config.method, seed=0)
            counted = count_parameters(config)
            assert counted is not None
            assert counted.total == sum(parameter.numel() for parameter in model.parameters())
            assert counted.trainable == sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)


def test_counting_makes_no_numbers_and_leaves_the_generator_alone() -> None:
    config = make_config(CATALOG.get("arm"), "paper", seed=0)
    before = torch.random.get_rng_state()
    counted = count_parameters(config)
    assert counted is not None and counted.total == 44_896_768
    assert torch.equal(torch.random.get_rng_state(), before)


def test_the_vocabulary_of_a_plan_is_its_tokenizer_s() -> None:
    bare, larger = (count_parameters(made("base", {"data.tokenizer": f"bpe:{size}"})) for size in (512, 612))
    assert bare is not None and larger is not None and larger.total - bare.total == 100 * 32


def test_labels_are_the_task_s_own_or_those_that_are_named() -> None:
    cases: list[tuple[str, str, int]] = [
        ("bert", "laptop", 2),
        ("three", "laptop", 3),
        ("bert", "smoke", 8),
        ("table", "laptop", 2),
        ("labelled", "laptop", 4),
    ]
    for name, budget, labels in cases:
        with case(name, budget, labels):
            config = make_config(CATALOG.get(name), budget, seed=0)
            assert isinstance(config, FinetuneConfig) and num_labels(config) == labels


def test_a_model_that_is_not_known_here_is_neither_counted_nor_timed(tmp_path: Path) -> None:
    run = run_of(tmp_path, "unknown", budget="laptop")
    assert count_parameters(run.config) is None and step_operations(run.config, None) is None
    found = Forecaster(tmp_path, threads=1).forecast(run)
    assert (found.seconds, found.basis, found.needs.memory) == (None, "unknown here", 0)


def test_work_grows_with_batch_and_model() -> None:
    plain = step_operations(made("base", {}), None)
    doubled = step_operations(made("base", {"batch_size": 16, "micro_batch_size": 16}), None)
    deeper = step_operations(made("base", {"model.num_layers": 4}), None)
    assert plain is not None and doubled is not None and deeper is not None
    assert plain < doubled <= 2 * plain and plain < deeper


def test_a_run_is_expected_to_take_the_time_to_start_and_that_of_its_steps(tmp_path: Path) -> None:
    forecaster, run = Forecaster(tmp_path, threads=1), run_of(tmp_path, "arm")
    short, long = (forecaster.seconds(replace(run, config=made("arm", {"steps": steps}))) for steps in (30, 60))
    assert short is not None and long is not None and short > START_S
    # A sum and a difference of doubles near 8: errors of 1e-15, of seconds that are a thousandth and more.
    assert long - START_S == pytest.approx(2 * (short - START_S), rel=1e-9)


def test_a_measured_time_beats_arithmetic(tmp_path: Path) -> None:
    forecaster, run = Forecaster(tmp_path, threads=1), run_of(tmp_path, "arm")
    before = forecaster.forecast(run)
    assert before.basis == "arithmetic" and before.seconds is not None and before.seconds > 0
    took(run_of(tmp_path, "arm", seed=3), 123.0)
    after = forecaster.forecast(run)
    assert (after.seconds, after.basis, after.needs) == (123.0, "measured", before.needs)


def test_its_own_time_beats_its_baseline_s_and_that_beats_arithmetic(tmp_path: Path) -> None:
    forecaster, run = Forecaster(tmp_path, threads=1), run_of(tmp_path, "arm")
    took(run_of(tmp_path, "base"), 50.0)
    assert forecaster.forecast(run).seconds == 50.0
    took(run, 60.0)
    assert forecaster.forecast(run).seconds == 60.0
    assert forecaster.forecast(run_of(tmp_path, "base")).seconds == 50.0


@pytest.mark.parametrize("elsewhere", [{"budget": "laptop"}, {"variant": "steps-5-12345678"}])
def test_a_time_of_another_recipe_is_not_taken(elsewhere: dict[str, Any], tmp_path: Path) -> None:
    took(run_of(tmp_path, "arm", **elsewhere), 1.0)
    assert Forecaster(tmp_path, threads=1).forecast(run_of(tmp_path, "arm")).basis == "arithmetic"


@pytest.mark.parametrize(
    "content", ["", "{", "[]", "{}", '{"wall_s": 5}', '{"wall_s": {"total": "long"}}', '{"wall_s": {"total": null}}']
)
def test_a_damaged_time_is_passed_over(content: str, tmp_path: Path) -> None:
    run = run_of(tmp_path, "arm")
    run.path.mkdir(parents=True)
    (run.path / "timing_stats.json").write_text(content)
    assert Forecaster(tmp_path, threads=1).forecast(run).basis == "arithmetic"
    took(run_of(tmp_path, "arm", seed=1), 9.0)
    assert Forecaster(tmp_path, threads=1).forecast(run).seconds == 9.0


def test_the_probe_of_the_machine_leaves_its_threads_as_they_were(tmp_path: Path) -> None:
    before = torch.get_num_threads()
    Forecaster(tmp_path, threads=before + 1).forecast(run_of(tmp_path, "base"))
    assert torch.get_num_threads() == before


def test_a_frozen_arm_needs_less_disk_than_its_baseline_and_both_need_some(tmp_path: Path) -> None:
    forecaster = Forecaster(tmp_path, threads=1)
    base, arm = (forecaster.forecast(run_of(tmp_path, name)).needs for name in ("base", "arm"))
    assert 0 < arm.disk < base.disk and 0 < arm.memory <= base.memory


@pytest.mark.parametrize(("name", "budget"), [("arm", "smoke"), ("arm", "paper"), ("bert", "smoke"), ("three", "laptop")])
def test_seconds_alone_are_those_of_the_forecast(name: str, budget: str, tmp_path: Path) -> None:
    forecaster, run = Forecaster(tmp_path, threads=1), run_of(tmp_path, name, budget=budget)
    assert forecaster.seconds(run) == forecaster.forecast(run).seconds is not None
    took(run, 77.0)
    assert forecaster.seconds(run) == forecaster.measured(run) == 77.0


def test_a_queue_expects_of_every_run_what_its_arm_takes_and_leaves_out_what_nobody_knows(tmp_path: Path) -> None:
    runs = [run_of(tmp_path, name, seed=seed) for seed in (0, 1, 2) for name in ("base", "arm")]
    took(runs[0], 60.0)
    unknown = run_of(tmp_path, "unknown", budget="laptop")
    gone = replace(runs[0], config=made("base", {"data.tokenizer": str(tmp_path / "gone.json")}), variant="other")
    expected = expected_seconds([*runs, unknown, gone], tmp_path, threads=1)
    assert expected == {str(run.path): 60.0 for run in runs}


def test_on_a_gpu_only_what_was_measured_is_expected(tmp_path: Path) -> None:
    base, task = run_of(tmp_path, "base"), run_of(tmp_path, "bert")
    took(base, 60.0)
    assert list(expected_seconds([base, task], tmp_path, threads=1)) == [str(base.path), str(task.path)]
    assert expected_seconds([base, task], tmp_path, threads=None) == {str(base.path): 60.0}
