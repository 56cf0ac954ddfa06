"""Gains start as the identity, learn on top of frozen queries, and fold into plain weights."""

from __future__ import annotations

import copy
from functools import cache

import pytest
import torch
from pydantic import ValidationError

from oelm.config import OptimConfig
from oelm.method.apply import fold, freeze, thaw
from oelm.method.audit import assert_unmoved, audit, digest, record_of
from oelm.method.method import Gain, Method
from oelm.models.gpt import GPT, build_gpt
from oelm.train.loss import mean_cross_entropy
from oelm.train.optim import build_optimizer
from tests.conftest import tiny_gpt_config

KINDS: tuple[Gain, ...] = ("head", "matrix")
WINDOWS = torch.randint(61, (2, 17), generator=torch.Generator().manual_seed(1))


def gained(kind: Gain, *, layers: str = "all") -> GPT:
    model = build_gpt(tiny_gpt_config(), seed=0)
    freeze(model, Method(init="orthogonal", freeze=("q", "k"), gain=kind, layers=layers))
    return model


def trained(kind: Gain) -> GPT:
    """A trained model of the test's own."""
    return copy.deepcopy(_trained(kind))


@cache
def _trained(kind: Gain) -> GPT:
    model = gained(kind)
    optimizer = build_optimizer(model, OptimConfig(lr=0.01, weight_decay=0.1), device="cpu")
    for _ in range(8):
        optimizer.zero_grad()
        mean_cross_entropy(model(WINDOWS[:, :-1]).flatten(0, 1), model.head_VD, WINDOWS[:, 1:].flatten()).backward()
        optimizer.step()
    return model


@pytest.mark.parametrize("kind", KINDS)
def test_gain_starts_as_the_identity(kind: Gain) -> None:
    plain = build_gpt(tiny_gpt_config(), seed=0)
    freeze(plain, "oelm_freeze")
    assert torch.equal(gained(kind).logits(WINDOWS[:, :-1]), plain.logits(WINDOWS[:, :-1]))


@pytest.mark.parametrize(("kind", "per_layer"), [("head", 3), ("matrix", 3 * 8 * 8)])
def test_gain_counts_are_exact_and_have_their_own_role(kind: Gain, per_layer: int) -> None:
    assert audit(gained(kind)).by_role["gain"] == {"trainable": 3 * per_layer, "frozen": 0}


@pytest.mark.parametrize("kind", KINDS)
def test_gain_learns_while_the_frames_stay(kind: Gain) -> None:
    model = trained(kind)
    assert_unmoved(model)
    start = gained(kind)
    for layer in range(3):
        name = f"blocks.{layer}.attention.q.gain"
        assert not torch.equal(model.get_parameter(name), start.get_parameter(name))


@pytest.mark.parametrize("kind", KINDS)
def test_folding_changes_no_output_and_leaves_plain_weights(kind: Gain) -> None:
    model = trained(kind)
    before = model.logits(WINDOWS[:, :-1])
    fold(model)
    names = {name for name, _ in model.named_parameters()}
    assert names == {name for name, _ in build_gpt(tiny_gpt_config(), seed=0).named_parameters()}
    # Folded in float64 and rounded once: a few float32 roundings on logits of order one.
    assert torch.allclose(model.logits(WINDOWS[:, :-1]), before, rtol=0, atol=2e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_folded_weights_are_recorded_anew(kind: Gain) -> None:
    model = trained(kind)
    fold(model)
    assert_unmoved(model)
    record = record_of(model)
    assert record
    assert record["blocks.0.attention.q.weight"] == digest(model.get_parameter("blocks.0.attention.q.weight"))


def test_folding_a_copy_leaves_the_original_alone() -> None:
    model = trained("matrix")
    before = model.logits(WINDOWS[:, :-1])
    fold(copy.deepcopy(model))
    assert torch.equal(model.logits(WINDOWS[:, :-1]), before)
    assert "blocks.0.attention.q.gain" in dict(model.named_parameters())


def test_thaw_folds_and_lets_the_queries_learn() -> None:
    model = trained("matrix")
    before = model.logits(WINDOWS[:, :-1])
    thaw(model)
    assert torch.allclose(model.logits(WINDOWS[:, :-1]), before, rtol=0, atol=2e-5)
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_gain_respects_the_chosen_layers() -> None:
    names = {name for name, _ in gained("head", layers="first 1").named_parameters() if name.endswith("gain")}
    assert names == {"blocks.0.attention.q.gain"}


def test_gain_does_not_decay() -> None:
    model = gained("matrix")
    optimizer = build_optimizer(model, OptimConfig(lr=0.1, weight_decay=0.5), device="cpu")
    undecayed = {id(p) for group in optimizer.param_groups if group["weight_decay"] == 0 for p in group["params"]}
    assert all(id(p) in undecayed for name, p in model.named_parameters() if name.endswith("gain"))


def test_gain_without_frozen_queries_is_refused() -> None:
    with pytest.raises(ValidationError, match="add q to freeze"):
        Method(init="orthogonal", freeze=("k",), gain="head")
