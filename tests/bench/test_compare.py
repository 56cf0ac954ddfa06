"""`oelm bench` measures what it says, and its sentence says what the interval means."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.flop_counter import FlopCounterMode

from oelm.bench.interleave import (
    Comparison,
    Side,
    _work,
    bound,
    compare_arms,
    conclusion,
    model_size,
    shape_config,
    training_step,
)
from oelm.bench.machine import examine, matmul_speeds
from oelm.config import FinetuneConfig, RunConfig, parse_as, parse_config
from oelm.errors import ConfigError
from oelm.method.apply import freeze
from oelm.method.method import PRESETS
from oelm.models.gpt import build_gpt
from oelm.models.shape import method_work
from oelm.stats import Ratio
from oelm.train.optim import build_optimizer, optimizer_tensors
from tests.cases import case
from tests.conftest import tiny_config


def side(name: str) -> Side:
    return Side(name, "arm", 1.0, 1, 1, 1, 1)


@pytest.mark.parametrize(
    ("low", "high", "words"),
    [
        (0.90, 1.10, "too noisy to compare"),
        (1.01, 1.02, "B arm is faster than A arm, by 1.0% to 2.0%"),
        (0.95, 0.99, "B arm is slower than A arm, by 1.0% to 5.0%"),
        (0.99, 1.01, "No measurable difference between B arm and A arm"),
    ],
)
def test_sentence_follows_the_interval(low: float, high: float, words: str) -> None:
    comparison = Comparison(side("A"), side("B"), Ratio(1.0, low, high, 5), bound=1.03)
    assert words in conclusion(comparison) and "arithmetic allows at most 1.030x" in conclusion(comparison)


def test_bound_of_a_method_against_itself_is_one_and_of_freezing_is_flops_own(text_file: Path) -> None:
    settings = {"model__vocab_size": 300, "micro_batch_size": 4}
    baseline = tiny_config(text_file, method="baseline", **settings)
    frozen = tiny_config(text_file, method="oelm_freeze", **settings)
    assert bound(baseline, baseline) == 1.0
    whole, left = (method_work(baseline.model, PRESETS[name], batch_size=4).total for name in ("baseline", "oelm_freeze"))
    assert bound(baseline, frozen) == pytest.approx(whole / left, rel=1e-12)


def small_bert(method: str, **model: Any) -> FinetuneConfig:
    settings = {
        "model": {"vocab_size": 300, "model_dim": 32, "num_layers": 2, "num_heads": 2, "ff_dim": 48, "dropout": 0.0, **model},
        "examples": {"task": "stdlib", "max_length": 12},
        "optim": {"lr": 1e-3},
        "schedule": {"warmup_steps": 0},
        "steps": 10,
        "batch_size": 4,
        "micro_batch_size": 4,
        "method": method,
    }
    return parse_as(FinetuneConfig, settings, where="test")


def counted_operations(config: FinetuneConfig) -> int:
    step = training_step(config)
    with FlopCounterMode(display=False) as counter:
        step()
    return counter.get_total_flops()


@pytest.mark.parametrize("method", ["oelm_freeze", "oelm_axes", "pretrained_lowrank"])
def test_what_a_classifier_s_method_saves_is_what_torch_counts(method: str) -> None:
    baseline, arm = (small_bert(name) for name in ("baseline", method))
    counts = [counted_operations(config) for config in (baseline, arm)]
    assert _work(baseline).matmuls - _work(arm).matmuls == counts[0] - counts[1]
    # Torch does not count attention's own products on a CPU: forward two of T x T a head dimension, and twice that backward.
    attention = 2 * 4 * 12 * 12 * (6 * 32 + 6 * 32)
    # The last layer, of two labels, is the one that the shape does not tell of.
    assert _work(baseline).matmuls - attention + 6 * 4 * 32 * 2 == counts[0]
    assert bound(baseline, arm) > 1


def test_a_classifier_s_batch_is_padded_to_its_longest_example() -> None:
    config = small_bert("baseline")
    step = training_step(config, lengths=[[3, 5, 2, 1], [12, 1, 1, 1]])
    found = []
    for _ in range(3):
        with FlopCounterMode(display=False) as counter:
            step()
        found.append(counter.get_total_flops())
    assert found[0] == found[2] < found[1] == counted_operations(config)


@pytest.mark.slow
def test_classifiers_are_compared_and_their_sizes_are_those_of_the_model() -> None:
    arms = [(name, small_bert(name)) for name in ("baseline", "oelm_freeze")]
    (found,) = compare_arms(arms, rounds=2, progress=lambda text: None)
    assert found.first.stored == found.second.stored and found.first.trainable - found.second.trainable == 2 * 2 * (
        32 * 32 + 32
    )
    assert found.first.peak_bytes and found.first.checkpoint_bytes == 12 * found.first.stored
    with pytest.raises(ConfigError, match="model.source = somewhere: fresh weights are timed"):
        fresh = ("architecture", "vocab_size", "model_dim", "num_layers", "num_heads", "ff_dim")
        given = {name: type(arms[0][1].model).model_fields[name].default for name in fresh}
        model_size(small_bert("baseline", **given, source="somewhere"))


def test_where_arithmetic_expects_no_difference_none_that_shows_is_no_noise() -> None:
    comparison = Comparison(side("A"), side("B"), Ratio(1.0, 0.98, 1.02, 5), bound=0.9996)
    assert conclusion(comparison).startswith("No measurable difference between B arm and A arm: between 0.980x and 1.020x")


LEARNT: list[dict[str, Any]] = [
    {"gain": "head"},
    {"gain": "matrix"},
    {"correction": 0.25},
    {"gain": "matrix", "correction": 0.25},
    {"freeze": ["k"], "correction": 0.25},
    {"freeze": ["q"], "gain": "matrix", "layers": "last 1"},
]
AXES: list[dict[str, Any]] = [
    {"init": "axes", **more}
    for more in ({}, {"freeze": ["q"]}, {"layers": "last 1"}, {"correction": 0.25}, {"gain": "head"}, {"gain": "matrix"})
]


def test_what_a_step_multiplies_is_torchs_own_count(text_file: Path) -> None:
    for micro, more in [
        (2, {}),
        *((4, more) for more in [{}, *LEARNT, *AXES, {"init": "axes", "gain": "matrix", "correction": 0.25}]),
    ]:
        with case(micro, more):
            method = {"init": "orthogonal", "freeze": ["q", "k"], **more}
            settings = {"model__vocab_size": 300, "batch_size": 4, "micro_batch_size": micro}
            configs = [tiny_config(text_file, method=each, **settings) for each in ("baseline", method)]
            baseline, ours = (counted(config) for config in configs)
            assert _work(configs[0]).matmuls - _work(configs[1]).matmuls == baseline - ours


def counted(config: RunConfig) -> int:
    """Return the operations of all matrix products of one whole step, as torch counts them."""
    step = training_step(config)
    with FlopCounterMode(display=False) as counter:
        step()
    return int(counter.get_total_flops())


def test_a_correction_allows_no_gain_in_speed_and_pure_freezing_does(text_file: Path) -> None:
    laptop = {"model__vocab_size": 512, "model__seq_len": 64, "batch_size": 32, "micro_batch_size": 32}
    shape = {"model__model_dim": 128, "model__num_layers": 4, "model__num_heads": 4, "model__ff_dim": 512}
    arms = {arm: tiny_config(text_file, method=arm, **laptop, **shape) for arm in ("baseline", "oelm_freeze", "oelm_lowrank")}
    assert bound(arms["baseline"], arms["oelm_freeze"]) == pytest.approx(1.052, abs=0.001)
    assert bound(arms["baseline"], arms["oelm_lowrank"]) == pytest.approx(1.000, abs=0.001)


def test_bytes_fall_by_exactly_the_frozen_share(text_file: Path) -> None:
    settings = {"model__vocab_size": 300}
    arms = [(name, tiny_config(text_file, method=name, **settings)) for name in ("baseline", "oelm_freeze", "oelm_q_only")]
    both, queries = compare_arms(arms, rounds=3, progress=lambda text: None, has_memory=False)
    titles = [side.title for side in (both.first, both.second, queries.second)]
    assert titles == ["A baseline", "B oelm_freeze", "C oelm_q_only"] and both.first == queries.first
    for result, weights in ((both, 2 * 2 * 32 * 32), (queries, 2 * 32 * 32)):  # Q and K of two layers, or Q alone
        assert result.first.all_reduced_bytes - result.second.all_reduced_bytes == 4 * weights
        assert result.first.optimizer_bytes - result.second.optimizer_bytes == 8 * weights
        assert result.first.checkpoint_bytes - result.second.checkpoint_bytes == 8 * weights
        assert result.first.trainable - result.second.trainable == weights and result.first.stored == result.second.stored
        assert result.ratio.low <= result.ratio.value <= result.ratio.high and result.ratio.count == 3
    assert both.bound > queries.bound > 1 and both.first.peak_bytes is None


@pytest.mark.slow
def test_memory_is_measured_of_each_arm_alone() -> None:
    told: list[str] = []
    arms = [(name, shape_config("tiny", name)) for name in ("baseline", "oelm_freeze")]
    (result,) = compare_arms(arms, rounds=3, progress=told.append)
    assert told[0] == "timing training steps of A baseline, B oelm_freeze in turn: 3 rounds after 2 to warm up"
    told = [text for text in told if not text.startswith("round ")]
    assert (result.first.peak_bytes or 0) > 0 and (result.second.peak_bytes or 0) > 0 and len(told) == 3


def test_the_optimizers_bytes_are_those_of_its_state_after_a_step() -> None:
    for method in ("baseline", "oelm_freeze", "oelm_axes_q_lowrank"):
        for optimizer in ("adamw", "muon"):
            with case(method, optimizer):
                settings = shape_config("tiny", method).as_dict()
                settings["optim"]["name"] = optimizer
                config = parse_config(settings, where="here")
                model = build_gpt(config.model, seed=0)
                freeze(model, config.method)
                built = build_optimizer(model, config.optim, device="cpu")
                model.logits(torch.zeros(1, 4, dtype=torch.long)).sum().backward()
                built.step()
                tensors = optimizer_tensors(built, model).items()
                # Every step counter is one number more, for AdamW alone.
                assert model_size(config).state_bytes == sum(
                    tensor.nbytes for name, tensor in tensors if not name.startswith("step/")
                )


def test_stored_and_trainable_parameters_are_the_models_own() -> None:
    assert model_size(shape_config("medium", "oelm_freeze"))[:2] == (44_896_768, 41_751_040)
    # A selection is stored nowhere.
    assert model_size(shape_config("medium", "oelm_axes"))[:2] == (41_751_040, 41_751_040)
    # An eighth of Q's and K's rows learns: what remains of 2 x 512 x 512 weights in six layers.
    whole, thin = (model_size(shape_config("512", arm))[0] for arm in ("baseline", "thin"))
    assert whole - thin == 6 * 2 * 512 * (512 - 64)


def test_more_arms_than_letters_are_refused() -> None:
    with pytest.raises(ConfigError, match="27 arms are too many to take turns; give 26 at most"):
        compare_arms([("baseline", shape_config("tiny", "baseline"))] * 27, rounds=3, progress=print)


def test_benchmarked_step_really_trains(text_file: Path) -> None:
    updates: list[int] = []
    hook = register_optimizer_step_post_hook(lambda optimizer, args, kwargs: updates.append(len(optimizer.state)))
    try:
        step = training_step(tiny_config(text_file, model__vocab_size=300))
        step()
        step()
    finally:
        hook.remove()
    assert len(updates) == 2 and updates[-1] > 0


def test_peak_meter_sees_a_passing_allocation() -> None:
    # In a process of its own, as it is used: elsewhere the allocator may hold pages from before.
    program = (
        "import torch; from oelm.bench.machine import PeakMeter\n"
        "meter = PeakMeter('cpu'); block = torch.ones(2**24); del block; print(meter.growth_bytes())"
    )
    child = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    # 64 MiB came and went; what else a process does in between is a few MiB.
    assert 60 * 2**20 < int(child.stdout) < 80 * 2**20


def test_machine_is_described_and_every_precision_has_an_answer() -> None:
    facts = examine()
    assert {"device", "precision", "threads", "memory free", "disk free here", "extras"} <= set(facts)
    speeds = matmul_speeds(0.3)
    assert set(speeds) == {"float32", "bf16", "fp16"}
    assert all(("GFLOP/s" in text or "not supported" in text) for text in speeds.values())
