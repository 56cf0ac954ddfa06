"""What arms of a fair comparison may differ in: the method, and the shape of a control; not how fast they learn."""

from __future__ import annotations

import pytest

from oelm.dotted import flatten
from oelm.experiments.fair import may_differ
from oelm.experiments.plan import make_config
from oelm.experiments.registry import load_catalog

NEVER = {"optim.lr", "steps", "batch_size", "model.dropout", "model.seq_len", "data.source", "schedule.warmup_steps"}


@pytest.mark.parametrize("key", sorted(NEVER | {"method.layer_lr_decay", "method.warmup_steps", "methods.init"}))
def test_recipe_and_pace_must_be_shared(key: str) -> None:
    assert not may_differ(key)


@pytest.mark.parametrize(
    "key", ["method.init", "method.freeze", "method.thaw", "method.correction", "model.qk_dim", "model.ff_dim"]
)
def test_method_and_shape_may_differ(key: str) -> None:
    assert may_differ(key)


def test_every_setting_named_here_is_one_of_a_run() -> None:
    config = make_config(load_catalog(None).get("GPT-02"), "laptop", seed=0)
    known = set(flatten(config.as_dict()))
    assert NEVER | {"method.layer_lr_decay", "method.warmup_steps", "model.qk_dim", "method.thaw"} <= known
