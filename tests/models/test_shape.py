"""The arithmetic bound against a count made by torch itself."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from oelm.method.apply import freeze
from oelm.method.audit import audit
from oelm.method.method import PRESETS, rank_within
from oelm.models.gpt import GPT, build_gpt
from oelm.models.shape import GPTConfig, StepWork, _learnt_on_top, method_work, step_work, weight_counts
from oelm.train.loss import mean_cross_entropy
from tests.cases import case

CONFIG = GPTConfig(vocab_size=211, seq_len=32, model_dim=48, num_layers=2, num_heads=3, ff_dim=96, dropout=0.0)
THIN = CONFIG.model_copy(update={"qk_dim": 4})
MEDIUM = GPTConfig(vocab_size=50257, seq_len=512, model_dim=512, num_layers=6, num_heads=8, ff_dim=2048, dropout=0.1)


def products(method: str, config: GPTConfig) -> dict[str, int]:
    """Return the operations of one step by kind of product, as torch counts them."""
    model = build_gpt(config, seed=0)
    freeze(model, method)
    windows = torch.randint(config.vocab_size, (4, config.seq_len + 1))
    with FlopCounterMode(display=False) as counter:
        loss = mean_cross_entropy(model(windows[:, :-1]).flatten(0, 1), model.head_VD, windows[:, 1:].flatten())
        loss.backward()
    return {str(operation): int(count) for operation, count in counter.get_flop_counts()["Global"].items()}


def counted(method: str, config: GPTConfig) -> int:
    """Return the operations of all matrix products of one step, attention's own left out."""
    # The counter does not see a product that is written into a given tensor: the head's gradient to the hidden states.
    unseen = 2 * 4 * config.seq_len * config.vocab_size * config.model_dim
    seen = products(method, config)
    return unseen + sum(count for operation, count in seen.items() if "mm" in operation and "bmm" not in operation)


def attention_work(config: GPTConfig) -> int:
    """Return what `step_work` counts for scores and mixed values: only the half of them that is no future."""
    return 3 * config.num_layers * 4 * config.seq_len * config.seq_len * (config.qk_rows + config.model_dim)


def test_matmul_count_is_torchs_own() -> None:
    cases: list[GPTConfig] = [CONFIG, THIN]
    for config in cases:
        with case(config):
            assert counted("baseline", config) == step_work(config, batch_size=4).matmuls - attention_work(config)


def test_frozen_saving_is_what_torch_no_longer_computes() -> None:
    cases: list[GPTConfig] = [CONFIG, THIN]
    for config in cases:
        with case(config):
            left = method_work(config, PRESETS["oelm_freeze"], batch_size=4)
            saved = counted("baseline", config) - counted("oelm_freeze", config)
            assert saved == step_work(config, batch_size=4).matmuls - left.matmuls


def test_thin_scores_cost_what_torch_computes_for_them() -> None:
    # With dropout torch multiplies whole matrices, the future too.
    seen = products("baseline", THIN.model_copy(update={"dropout": 0.1}))
    assert sum(count for operation, count in seen.items() if "bmm" in operation) == 2 * attention_work(THIN)


def test_thin_attention_is_fused_like_that_of_one_width() -> None:
    assert any("bmm" in operation for operation in products("baseline", THIN.model_copy(update={"dropout": 0.1})))
    assert not any("bmm" in operation for operation in products("baseline", THIN))


def test_medium_512_can_gain_about_two_percent_only() -> None:
    work, left = step_work(MEDIUM, batch_size=8), method_work(MEDIUM, PRESETS["oelm_freeze"], batch_size=8)
    # About 2.3% of all products, because of the 50k-token head; the optimizer's part is small beside it.
    assert (work.total - left.total) / work.total == pytest.approx(0.023, abs=0.002)
    assert 1.02 < work.total / left.total < 1.03


LAPTOP = GPTConfig(vocab_size=512, seq_len=64, model_dim=128, num_layers=4, num_heads=4, ff_dim=512, dropout=0.0)
WIDE = GPTConfig(vocab_size=2048, seq_len=256, model_dim=512, num_layers=6, num_heads=8, ff_dim=2048, dropout=0.0)
AXES: dict[str, Any] = {"init": "axes", "freeze": ("q", "k")}
AXES_Q: dict[str, Any] = {"init": "axes", "freeze": ("q",)}
AXES_LOWRANK: dict[str, Any] = {**AXES, "correction": 0.125}


def speedup(config: GPTConfig, method: dict[str, Any], *, batch_size: int) -> float:
    """Return the bound of a method against the baseline."""
    whole, left = (method_work(config, each, batch_size=batch_size) for each in ({}, method))
    return whole.total / left.total


@pytest.mark.parametrize(
    ("config", "batch_size", "share", "axes", "axes_q"),
    [(LAPTOP, 32, 0.148, 1.17, 1.08), (WIDE, 8, 0.152, 1.18, 1.08), (MEDIUM, 8, 0.068, 1.07, 1.035)],
    ids=["laptop", "512", "medium"],
)
def test_the_bound_of_axes_is_that_of_their_skipped_products(
    config: GPTConfig, batch_size: int, share: float, axes: float, axes_q: float
) -> None:
    bound = speedup(config, AXES, batch_size=batch_size)
    assert 1 - 1 / bound == pytest.approx(share, abs=0.0005) and bound == pytest.approx(axes, abs=0.005)
    assert speedup(config, AXES_Q, batch_size=batch_size) == pytest.approx(axes_q, abs=0.003)


def test_the_laptops_step_is_counted_by_hand() -> None:
    tokens = 32 * 64
    weights = 4 * (4 * 128 * 128 + 2 * 128 * 512) + 512 * 128
    # Scores and mixed values of the visible half: T/2 keys of 128 numbers each, twice, three times (forward, backward twice).
    attention = 4 * 3 * tokens * 2 * 2 * 32 * 128
    query_key = 4 * 2 * 128 * 128
    updated = 16 * (weights + 64 * 128)
    assert method_work(LAPTOP, {}, batch_size=32) == StepWork(6 * tokens * weights + attention, updated)
    assert method_work(LAPTOP, AXES, batch_size=32) == StepWork(
        6 * tokens * (weights - query_key) + attention, updated - 16 * query_key
    )
    # Rank 8: two thin products of 8 x 128 weights each instead of one of 128 x 128, for Q and K of four layers.
    thin = 4 * 2 * (8 * 128 + 128 * 8)
    assert method_work(LAPTOP, AXES_LOWRANK, batch_size=32) == StepWork(
        6 * tokens * (weights - query_key + thin) + attention, updated - 16 * (query_key - thin)
    )
    frozen = method_work(LAPTOP, {"init": "orthogonal", "freeze": ("q", "k")}, batch_size=32)
    assert frozen == StepWork((6 * weights - 2 * query_key) * tokens + attention, updated - 16 * query_key)


def test_axes_that_learn_or_freeze_later_save_nothing_in_the_first_step() -> None:
    whole = method_work(LAPTOP, {}, batch_size=32)
    assert method_work(LAPTOP, {"init": "axes", "freeze": ()}, batch_size=32) == whole
    assert method_work(LAPTOP, {"freeze": ("q", "k"), "freeze_at": 0.25}, batch_size=32) == whole


def test_axes_save_in_the_layers_they_are_in() -> None:
    whole, half, all_layers = (
        method_work(LAPTOP, AXES, batch_size=32, layers=layers).total for layers in ((), (2, 3), (0, 1, 2, 3))
    )
    assert whole == method_work(LAPTOP, {}, batch_size=32).total and whole - half == (whole - all_layers) / 2
    assert method_work(LAPTOP, AXES_LOWRANK, batch_size=32, learn_layers=()).total == all_layers


def test_skipped_products_are_the_products_of_q_and_k_that_torch_counts() -> None:
    def others(config: GPTConfig) -> int:
        whole = products("baseline", config)
        return sum(count for operation, count in whole.items() if "mm" in operation and "bmm" not in operation)

    size = CONFIG.num_layers * 2 * CONFIG.model_dim * CONFIG.qk_rows
    narrow = CONFIG.model_copy(update={"qk_dim": 8})
    saved = method_work(CONFIG, {}, batch_size=4).matmuls - method_work(CONFIG, AXES, batch_size=4).matmuls
    # Half of the rows make half of the products of Q and K, and change no other but attention's own.
    assert saved == 2 * (others(CONFIG) - others(narrow)) == 6 * 4 * CONFIG.seq_len * size


@pytest.mark.parametrize("config", [CONFIG, THIN, CONFIG.model_copy(update={"short_conv": 3})], ids=["whole", "thin", "conv"])
def test_weights_are_counted_as_the_audit_counts_them(config: GPTConfig) -> None:
    depth = config.num_layers
    for name, method in PRESETS.items():
        with case(name):
            with torch.device("meta"):
                model = GPT(config)
            freeze(model, method, seed=0)
            found = audit(model)
            layers = [layer for layer in range(depth) if method.selects(layer, depth)]
            learning = [layer for layer in layers if method.learns_in(layer, depth)]
            counted = weight_counts(config, method, layers=layers, learn_layers=learning)
            assert (counted.total, counted.trainable, counted.frozen, counted.selected) == (
                found.total,
                found.trainable,
                found.frozen,
                found.selected,
            )


def test_a_corrections_rank_is_the_methods_own() -> None:
    config_cases: list[GPTConfig] = [CONFIG, THIN, LAPTOP, WIDE]
    share_cases: list[float] = [0.125, 0.25, 0.3]
    for config in config_cases:
        for share in share_cases:
            with case(config, share):
                assert _learnt_on_top(config, {"correction": share}, "k").rank == rank_within(
                    share, config.qk_rows, config.model_dim
                )


def test_a_method_and_its_plain_data_have_one_bound() -> None:
    for method in PRESETS.values():
        assert method_work(LAPTOP, method, batch_size=32) == method_work(LAPTOP, method.model_dump(), batch_size=32)


def test_the_bound_needs_no_torch() -> None:
    program = "import sys, oelm.models.shape; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True)
