"""The arithmetic bound against a count made by torch itself."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from oelm.method.apply import freeze
from oelm.models.flops import step_work
from oelm.models.gpt import GPTConfig, build_gpt
from oelm.train.loss import mean_cross_entropy

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


@pytest.mark.parametrize("config", [CONFIG, THIN], ids=["whole", "thin"])
def test_matmul_count_is_torchs_own(config: GPTConfig) -> None:
    assert counted("baseline", config) == step_work(config, batch_size=4).matmuls - attention_work(config)


@pytest.mark.parametrize("config", [CONFIG, THIN], ids=["whole", "thin"])
def test_frozen_saving_is_what_torch_no_longer_computes(config: GPTConfig) -> None:
    work = step_work(config, batch_size=4)
    saved = counted("baseline", config) - counted("oelm_freeze", config)
    optimizer = 16 * config.num_layers * 2 * config.model_dim * config.qk_rows
    assert saved == work.frozen_saving - optimizer


def test_thin_scores_cost_what_torch_computes_for_them() -> None:
    # For heads of two widths torch multiplies whole matrices, the future too.
    seen = products("baseline", THIN)
    assert sum(count for operation, count in seen.items() if "bmm" in operation) == 2 * attention_work(THIN)


def test_medium_512_can_gain_about_two_percent_only() -> None:
    work = step_work(MEDIUM, batch_size=8)
    # About 2.3% of all products, because of the 50k-token head; the optimizer's part is small beside it.
    assert work.frozen_saving / (work.matmuls + work.optimizer) == pytest.approx(0.023, abs=0.002)
    assert 1.02 < work.largest_speedup < 1.03
