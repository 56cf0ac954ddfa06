"""A step's time is split into parts that add up, and its products are those that torch counts."""

from __future__ import annotations

import time

import pytest
import torch
from torch import nn
from where_time_goes import PARTS, gemm_speed, split_time

from oelm.bench.interleave import shape_config, training_step
from oelm.models.shape import step_work


def test_shares_of_a_training_step_add_up_and_every_part_is_found() -> None:
    step = training_step(shape_config("tiny", "baseline"))
    step()
    shares = split_time(step, steps=2)
    assert tuple(shares) == PARTS and sum(shares.values()) == pytest.approx(1)
    assert all(share > 0 for share in shares.values())


def test_time_between_operations_is_rest() -> None:
    shares = split_time(lambda: time.sleep(0.02), steps=1)
    assert shares["rest"] > 0.99


def test_a_step_of_products_alone_is_products() -> None:
    left = torch.ones(1024, 1024)
    shares = split_time(lambda: left @ left, steps=5)
    assert shares["products"] > 0.5 and shares["attention"] == shares["optimizer"] == 0


def test_norms_and_products_are_told_apart() -> None:
    norm, x = nn.LayerNorm(256), torch.ones(4096, 256)
    shares = split_time(lambda: norm(x), steps=10)
    assert shares["norms"] > 0 and shares["products"] == shares["head"] == 0


@pytest.mark.parametrize("micro_batch_size", [4, 2])
def test_the_products_that_are_timed_alone_are_those_of_a_step(micro_batch_size: int) -> None:
    config = shape_config("tiny", "baseline").model_copy(update={"micro_batch_size": micro_batch_size})
    products = gemm_speed(config, seconds=0.0)
    model = config.model
    attention = 3 * model.num_layers * 4 * model.seq_len**2 * (model.qk_rows + model.model_dim)
    expected = step_work(model, batch_size=4).matmuls - attention
    assert sum(product.operations for product in products) == expected
    assert len(products) == 15 and all(product.best_s > 0 for product in products)
