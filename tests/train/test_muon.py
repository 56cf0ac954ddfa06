"""Muon is torch's formula in full precision, holds exactly the matrices of the layers, and resumes like AdamW."""

from __future__ import annotations

import copy
import io
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from torch import Tensor, nn
from torch.optim._muon import _adjust_lr

from oelm.config import OptimConfig, RunConfig
from oelm.errors import CheckpointError
from oelm.method.apply import Plan, freeze, hold
from oelm.method.audit import digest
from oelm.models.gpt import GPT, build_gpt
from oelm.train.optim import (
    MOMENTUM,
    Optimizer,
    build_optimizer,
    load_optimizer_tensors,
    muon_parameters,
    optimizer_tensors,
    orthogonalized,
    set_learning_rate,
    shape_factor,
)
from tests.conftest import run_here, tiny_config, tiny_gpt_config
from tests.method.tiny_models import BY_NAME, tiny_model
from tests.train.test_optim import train
from tests.train.test_plan_runs import disturb, evidence

MUON = OptimConfig(lr=1e-3, name="muon", weight_decay=0.1)


def matrix(rows: int, columns: int, *, seed: int = 0, like: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(like)


def reference(matrix_RC: Tensor) -> Tensor:
    """The same polynomial on singular values, in float64: what the iteration does to a matrix, without iterating on it."""
    u, values, v = torch.linalg.svd(matrix_RC.double(), full_matrices=False)
    values = values / matrix_RC.double().norm()
    for _ in range(5):
        values = 3.4445 * values - 4.7750 * values**3 + 2.0315 * values**5
    return u @ values.diag() @ v


@settings(max_examples=40, deadline=None, derandomize=True)
@given(rows=st.integers(1, 24), columns=st.integers(1, 24), seed=st.integers(0, 99))
def test_each_matrix_is_made_nearly_orthogonal_by_torchs_polynomial(rows: int, columns: int, seed: int) -> None:
    given_RC = matrix(rows, columns, seed=seed)
    # Five rounds of products of norm about one, in float32.
    assert torch.allclose(orthogonalized(given_RC.unsqueeze(0))[0].double(), reference(given_RC), rtol=0, atol=1e-4)


def test_matrices_of_one_shape_are_made_orthogonal_apart_from_each_other() -> None:
    stack = torch.stack([matrix(6, 4, seed=seed) * 10**seed for seed in range(3)])
    for alone, together in zip(stack, orthogonalized(stack), strict=True):
        assert torch.allclose(orthogonalized(alone.unsqueeze(0))[0], together, rtol=0, atol=1e-5)


@pytest.mark.parametrize("shape", [(8, 8), (16, 4), (4, 16)])
def test_updates_are_torchs_own_up_to_its_bfloat16(shape: tuple[int, int]) -> None:
    ours, theirs = (nn.Parameter(matrix(*shape)) for _ in range(2))
    group = {"params": [ours], "matrices": True, "weight_decay": 0.1, "lr": 0.02}
    optimizers = (
        Optimizer([group], fused=False),
        torch.optim.Muon([theirs], lr=0.02, weight_decay=0.1, momentum=MOMENTUM),
    )
    for step in range(3):
        for parameter, optimizer in zip((ours, theirs), optimizers, strict=True):
            parameter.grad = matrix(*shape, seed=step + 1)
            optimizer.step()
    # An entry of an update is at most the rate, times sqrt(4) where rows outnumber columns; bfloat16 has 8 bits of it.
    assert torch.allclose(ours, theirs, rtol=0, atol=3 * 0.02 * 2 * 2**-6)
    assert not torch.equal(ours, theirs)


@pytest.mark.parametrize("shape", [(8, 8), (16, 4), (4, 16), (512, 128)])
def test_the_rate_of_tall_matrices_is_torchs_own(shape: tuple[int, int]) -> None:
    assert shape_factor(*shape) == pytest.approx(_adjust_lr(1.0, "original", torch.Size(shape)))


def gpt(method: str = "baseline", **shape: Any) -> GPT:
    model = build_gpt(tiny_gpt_config(**shape), seed=0)
    freeze(model, method)
    return model


def named(model: nn.Module, optimizer: torch.optim.Optimizer, *, matrices: bool) -> set[str]:
    members = {p for group in optimizer.param_groups if group["matrices"] == matrices for p in group["params"]}
    return {name for name, parameter in model.named_parameters() if parameter in members}


def test_muon_has_the_matrices_of_the_layers_and_adamw_the_rest() -> None:
    model = gpt(short_conv=2)
    optimizer = build_optimizer(model, MUON, device="cpu")
    of_layers = {name for name, p in model.named_parameters() if name.startswith("blocks.") and p.dim() == 2}
    assert len(of_layers) == 3 * 6
    assert named(model, optimizer, matrices=True) == of_layers
    assert named(model, optimizer, matrices=False) == {name for name, _ in model.named_parameters()} - of_layers


@pytest.mark.parametrize("method", ["oelm_freeze", "oelm_axes", "uniform"])
def test_what_is_frozen_is_in_neither(method: str) -> None:
    model = gpt(method)
    optimizer = build_optimizer(model, MUON, device="cpu")
    both = named(model, optimizer, matrices=True) | named(model, optimizer, matrices=False)
    assert both == {name for name, p in model.named_parameters() if p.requires_grad}
    assert not any(".q." in name or ".k." in name for name in both)


@pytest.mark.parametrize("arm", ["oelm_lowrank", "oelm_axes_lowrank", "thin"])
def test_thin_matrices_of_queries_and_keys_go_where_the_config_says(arm: str) -> None:
    model = gpt(qk_dim=1) if arm == "thin" else gpt(arm, model_dim=32, num_heads=2)
    thin = {name for name, p in model.named_parameters() if (".q." in name or ".k." in name) and p.requires_grad}
    assert thin
    assert thin <= muon_parameters(model, MUON)
    assert not thin & muon_parameters(model, MUON.model_copy(update={"thin": "adamw"}))


@pytest.mark.parametrize("name", ["bert", "gpt2", "t5", "llama"])
def test_other_architectures_train_with_muon(name: str) -> None:
    model = tiny_model(BY_NAME[name])
    freeze(model, "oelm_freeze")
    chosen = muon_parameters(model, MUON)
    assert chosen and not any("emb" in each or "norm" in each.lower() or "shared" in each for each in chosen)
    assert all(model.get_parameter(each).dim() == 2 for each in chosen)


def test_rates_are_scaled_together_and_by_layer() -> None:
    model = gpt()
    optimizer = build_optimizer(model, MUON.model_copy(update={"matrix_rate": 4.0}), device="cpu", layer_lr_decay=0.5)
    set_learning_rate(optimizer, 0.01)
    rates = {
        name: group["lr"]
        for group in optimizer.param_groups
        for name, p in model.named_parameters()
        if any(p is each for each in group["params"])
    }
    assert rates["blocks.2.ff_in.weight"] == pytest.approx(0.04) and rates["blocks.2.ff_in.bias"] == pytest.approx(0.01)
    assert rates["blocks.0.attention.q.weight"] == pytest.approx(0.01)
    assert rates["token_embedding.weight"] == pytest.approx(0.01 / 8)


def test_matrices_decay_by_their_own_rate_and_nothing_else_moves_them_without_a_gradient() -> None:
    model = gpt()
    optimizer = build_optimizer(model, MUON, device="cpu")
    set_learning_rate(optimizer, 0.01)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    shrunk = model.get_parameter("blocks.1.ff_out.weight")
    assert torch.allclose(shrunk, before["blocks.1.ff_out.weight"] * (1 - 0.01 * 5 * 0.1), rtol=1e-6, atol=0)
    assert torch.equal(model.get_parameter("blocks.1.ff_out.bias"), before["blocks.1.ff_out.bias"])


def test_the_state_survives_by_name_and_continues_to_the_same_bits() -> None:
    models = [gpt("oelm_axes_q") for _ in range(2)]
    optimizers = [build_optimizer(model, MUON, device="cpu") for model in models]
    train(models[0], optimizers[0], first=0, steps=4)
    train(models[1], optimizers[1], first=0, steps=2)
    again = gpt("oelm_axes_q")
    again.load_state_dict(models[1].state_dict())
    optimizer = build_optimizer(again, MUON, device="cpu")
    load_optimizer_tensors(optimizer, again, optimizer_tensors(optimizers[1], models[1]))
    train(again, optimizer, first=2, steps=2)
    assert all(torch.equal(p, again.get_parameter(name)) for name, p in models[0].named_parameters())


def test_the_state_of_the_other_optimizer_is_refused() -> None:
    model = gpt()
    adamw, muon = (build_optimizer(model, config, device="cpu") for config in (OptimConfig(lr=1e-3), MUON))
    train(model, adamw, first=0, steps=1)
    with pytest.raises(CheckpointError, match="does not fit what trains"):
        load_optimizer_tensors(muon, model, optimizer_tensors(adamw, model))


def test_what_is_thawed_starts_without_momentum_and_the_rest_keeps_it() -> None:
    model = gpt("oelm_axes")
    optimizer = build_optimizer(model, MUON, device="cpu")
    train(model, optimizer, first=0, steps=2)
    kept = {name: tensor.clone() for name, tensor in optimizer_tensors(optimizer, model).items()}
    hold(model, [])
    spans = {name: (0, 2) for name, _ in model.named_parameters() if ".q." in name or ".k." in name}
    after = build_optimizer(model, MUON, device="cpu", plan=Plan(spans, 9), before=optimizer)
    assert optimizer_tensors(after, model).keys() == kept.keys()
    train(model, after, first=2, steps=1)
    assert {f"momentum/{name}" for name in spans} < optimizer_tensors(after, model).keys()


@pytest.mark.parametrize("settings", [{"thin": "adamw"}, {"matrix_rate": 2.0}, {"name": "sgd"}, {"matrix_rate": 0.0}])
def test_settings_of_muon_without_it_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        OptimConfig(lr=1e-3, **settings)


def run_config(text: Path, method: Any) -> RunConfig:
    return tiny_config(text, method=method, optim__name="muon", save_every=3, eval_every=6, keep_checkpoints=9)


@pytest.mark.parametrize("method", [pytest.param("baseline", marks=pytest.mark.slow), "oelm_lowrank", "thaw_first_first"])
def test_a_disturbed_run_ends_in_the_same_bits(method: str, text_file: Path, tmp_path: Path) -> None:
    config = run_config(text_file, method)
    run_here(config, tmp_path / "whole")
    assert evidence(disturb(config, tmp_path / "run", stop_at=(2, 5), die_at=(8,))) == evidence(tmp_path / "whole")


@pytest.mark.parametrize("how", ["load_state_dict", "deepcopy", "saved whole"])
def test_a_copy_goes_on_as_the_original_does(how: str) -> None:
    model = build_gpt(tiny_gpt_config(), seed=0)
    optimizer = build_optimizer(model, MUON, device="cpu")
    train(model, optimizer, first=0, steps=3)
    if how == "load_state_dict":
        other = copy.deepcopy(model)
        twin = build_optimizer(other, MUON, device="cpu")
        twin.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    elif how == "deepcopy":
        other, twin = copy.deepcopy((model, optimizer))
    else:
        torch.save((model, optimizer), buffer := io.BytesIO())
        buffer.seek(0)
        other, twin = torch.load(buffer, weights_only=False)
    for each in (optimizer, twin):
        set_learning_rate(each, 0.01)
    train(model, optimizer, first=3, steps=3)
    train(other, twin, first=3, steps=3)
    for (name, one), two in zip(model.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(one, two), name
    assert {name: digest(each) for name, each in optimizer_tensors(optimizer, model).items()} == {
        name: digest(each) for name, each in optimizer_tensors(twin, other).items()
    }
