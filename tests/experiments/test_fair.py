"""What arms of a fair comparison may differ in: the method, or a control's shape; not how fast they learn."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from oelm.config import flatten
from oelm.experiments.catalog import load_catalog
from oelm.experiments.plan import confounding, make_config
from tests.cases import case

NEVER = {"optim.lr", "steps", "batch_size", "model.dropout", "model.seq_len", "data.source", "schedule.warmup_steps"}
METHOD = ("method.init", "method.freeze", "method.thaw", "method.correction")
SHAPE = ("model.model_dim", "model.num_layers", "model.num_heads", "model.ff_dim", "model.qk_dim")


def never_asked() -> bool:
    raise AssertionError("parameters are counted for controls of another shape only")


def smaller(keys: Sequence[str], *, tuned: Sequence[str] = ()) -> list[str]:
    return confounding(keys, tuned=tuned, is_larger=lambda: False)


def test_recipe_and_pace_must_be_shared() -> None:
    for key in sorted(NEVER | {"method.layer_lr_decay", "method.warmup_steps", "methods.init"}):
        with case(key):
            assert confounding([key], is_larger=never_asked) == [key]


@pytest.mark.parametrize("key", METHOD)
def test_the_method_may_differ(key: str) -> None:
    assert confounding([key], is_larger=never_asked) == []


def test_a_control_may_have_another_shape_unless_it_is_larger() -> None:
    for key in SHAPE:
        with case(key):
            assert smaller([key]) == []
            assert confounding([key], is_larger=lambda: True) == [key]


def test_an_arm_of_another_method_has_its_baselines_shape() -> None:
    for key in SHAPE:
        for method in [*METHOD, "method.warmup_steps"]:
            with case(key, method):
                apart = confounding([method, key], is_larger=never_asked)
                assert key in apart and (method in apart) == (method == "method.warmup_steps")


def test_a_control_is_confounded_by_the_rest_of_the_recipe_all_the_same() -> None:
    assert smaller(["model.ff_dim", "optim.lr", "model.seq_len"]) == ["optim.lr", "model.seq_len"]


@pytest.mark.parametrize("key", ["method.layer_lr_decay", "method.warmup_steps"])
def test_a_pace_that_each_has_from_the_same_sweep_may_differ(key: str) -> None:
    assert confounding([key, "method.init"], tuned=[key], is_larger=never_asked) == []


def test_what_each_has_from_the_same_sweep_may_differ_but_for_the_shape() -> None:
    keys = ["optim.lr", "method.init", "model.ff_dim"]
    assert confounding(keys, tuned=keys, is_larger=never_asked) == ["model.ff_dim"]
    assert smaller(["optim.lr", "model.ff_dim"], tuned=["optim.lr", "model.ff_dim"]) == []


def test_no_sweep_gives_an_arm_more_text_or_another_text() -> None:
    cases: list[str] = ["steps", "batch_size", "model.seq_len", "data.tokenizer", "data.max_tokens", "init_from"]
    for key in cases:
        with case(key):
            assert confounding([key, "schedule.warmup_steps"], tuned=[key, "schedule.warmup_steps"], is_larger=never_asked) == [
                key
            ]


def test_every_setting_named_here_is_one_of_a_run() -> None:
    config = make_config(load_catalog(None).get("GPT-02"), "laptop", seed=0)
    known = set(flatten(config.as_dict()))
    assert NEVER | {*METHOD, *SHAPE} | {"method.layer_lr_decay", "method.warmup_steps"} <= known
