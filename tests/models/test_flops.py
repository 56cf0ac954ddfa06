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
MEDIUM = GPTConfig(vocab_size=50257, seq_len=512, model_dim=512, num_layers=6, num_heads=8, ff_dim=2048, dropout=0.1)


def counted(method: str) -> int:
    """Return the operations of all matrix products of one step, attention's own left out."""
    model = build_gpt(CONFIG, seed=0)
    freeze(model, method)
    windows = torch.randint(CONFIG.vocab_size, (4, CONFIG.seq_len + 1))
    with FlopCounterMode(display=False) as counter:
        loss = mean_cross_entropy(model(windows[:, :-1]).flatten(0, 1), model.head_VD, windows[:, 1:].flatten())
        loss.backward()
    products = counter.get_flop_counts()["Global"]
    # The counter does not see a product that is written into a given tensor: the head's gradient to the hidden states.
    unseen = 2 * 4 * CONFIG.seq_len * CONFIG.vocab_size * CONFIG.model_dim
    return unseen + sum(int(count) for operation, count in products.items() if "mm" in str(operation))


def without_attention() -> int:
    attention = 6 * CONFIG.num_layers * 4 * CONFIG.seq_len * CONFIG.seq_len * CONFIG.model_dim
    return step_work(CONFIG, batch_size=4).matmuls - attention


def test_matmul_count_is_torchs_own() -> None:
    assert counted("baseline") == without_attention()


def test_frozen_saving_is_what_torch_no_longer_computes() -> None:
    work = step_work(CONFIG, batch_size=4)
    saved = counted("baseline") - counted("oelm_freeze")
    optimizer = 16 * CONFIG.num_layers * 2 * CONFIG.model_dim**2
    assert saved == work.frozen_saving - optimizer


def test_medium_512_can_gain_about_two_percent_only() -> None:
    work = step_work(MEDIUM, batch_size=8)
    # About 2.3% of all products, because of the 50k-token head; the optimizer's part is small beside it.
    assert work.frozen_saving / (work.matmuls + work.optimizer) == pytest.approx(0.023, abs=0.002)
    assert 1.02 < work.largest_speedup < 1.03
