"""The optimizer holds what trains and nothing else, decays matrices only, and its state survives by name."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from oelm.errors import CheckpointError
from oelm.method.apply import freeze
from oelm.method.record import digest
from oelm.models.gpt import GPT, build_gpt
from oelm.train.config import OptimConfig
from oelm.train.optim import build_optimizer, load_optimizer_tensors, optimizer_tensors, set_learning_rate
from tests.conftest import tiny_gpt_config

CONFIG = OptimConfig(lr=1e-3, betas=(0.8, 0.9), weight_decay=0.1)


def frozen_gpt() -> GPT:
    model = build_gpt(tiny_gpt_config(), seed=0)
    freeze(model, "oelm_freeze")
    return model


def train(model: GPT, optimizer: torch.optim.Optimizer, *, first: int, steps: int) -> None:
    for step in range(first, first + steps):
        tokens = torch.randint(61, (2, 17), generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        F.cross_entropy(model.logits(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()).backward()
        optimizer.step()


def saved(optimizer: torch.optim.Optimizer, model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in optimizer_tensors(optimizer, model).items()}


@pytest.fixture
def trained() -> tuple[GPT, torch.optim.AdamW]:
    model = frozen_gpt()
    optimizer = build_optimizer(model, CONFIG, device="cpu")
    train(model, optimizer, first=0, steps=2)
    return model, optimizer


Trained = tuple[GPT, torch.optim.AdamW]


def decay_by_name(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, float]:
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return {names[id(p)]: group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}


def test_matrices_decay_and_norms_and_biases_do_not() -> None:
    model = build_gpt(tiny_gpt_config(), seed=0)
    for name, decay in decay_by_name(model, build_optimizer(model, CONFIG, device="cpu")).items():
        assert decay == (0.0 if "norm" in name or name.endswith("bias") else 0.1), name


def test_the_optimizer_holds_exactly_what_trains() -> None:
    model = frozen_gpt()
    held = decay_by_name(model, build_optimizer(model, CONFIG, device="cpu"))
    assert held.keys() == {name for name, parameter in model.named_parameters() if parameter.requires_grad}


def test_betas_and_rate_are_those_of_the_config() -> None:
    for group in build_optimizer(frozen_gpt(), CONFIG, device="cpu").param_groups:
        assert (group["betas"], group["lr"]) == ((0.8, 0.9), 1e-3)


def test_the_learning_rate_is_set_for_all_groups() -> None:
    optimizer = build_optimizer(frozen_gpt(), CONFIG, device="cpu")
    set_learning_rate(optimizer, 0.25)
    assert [group["lr"] for group in optimizer.param_groups] == [0.25, 0.25]


def test_a_step_without_gradient_decays_a_matrix_by_the_product_of_rate_and_decay() -> None:
    model = nn.Linear(3, 2)
    before = model.weight.detach().clone(), model.bias.detach().clone()
    optimizer = build_optimizer(model, CONFIG, device="cpu")
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    # One product in float32, computed as p - lr * decay * p or p * (1 - lr * decay): two roundings apart.
    assert torch.allclose(model.weight.detach(), before[0] * (1 - 1e-3 * 0.1), rtol=2 * 2.0**-23, atol=0.0)
    assert torch.equal(model.bias.detach(), before[1])


def test_state_is_named_after_what_trains(trained: Trained) -> None:
    model, optimizer = trained
    names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    expected = {f"{key}/{name}" for key in ("exp_avg", "exp_avg_sq", "step") for name in names}
    assert optimizer_tensors(optimizer, model).keys() == expected


def test_there_is_no_state_before_the_first_step() -> None:
    model = frozen_gpt()
    assert optimizer_tensors(build_optimizer(model, CONFIG, device="cpu"), model) == {}


def test_no_state_restores_to_no_state() -> None:
    model = frozen_gpt()
    optimizer = build_optimizer(model, CONFIG, device="cpu")
    load_optimizer_tensors(optimizer, model, {})
    assert not optimizer.state


def test_restored_state_is_the_same_bytes(trained: Trained) -> None:
    model, optimizer = trained
    twin = frozen_gpt()
    restored = build_optimizer(twin, CONFIG, device="cpu")
    load_optimizer_tensors(restored, twin, saved(optimizer, model))
    state = {name: digest(tensor) for name, tensor in optimizer_tensors(restored, twin).items()}
    assert state == {name: digest(tensor) for name, tensor in optimizer_tensors(optimizer, model).items()}


def test_training_goes_on_from_restored_state_bit_for_bit(trained: Trained) -> None:
    model, optimizer = trained
    twin = frozen_gpt()
    twin.load_state_dict(model.state_dict())
    restored = build_optimizer(twin, CONFIG, device="cpu")
    load_optimizer_tensors(restored, twin, saved(optimizer, model))
    train(model, optimizer, first=2, steps=3)
    train(twin, restored, first=2, steps=3)
    assert all(torch.equal(parameter, twin.get_parameter(name)) for name, parameter in model.named_parameters())


def test_state_finds_its_parameter_by_name_not_by_order() -> None:
    def pair(*names: str) -> nn.ModuleDict:
        return nn.ModuleDict({name: nn.Linear(2, 2, bias=False) for name in names})

    model, turned = pair("a", "b"), pair("b", "a")
    optimizer, restored = (build_optimizer(m, CONFIG, device="cpu") for m in (model, turned))
    model["a"](torch.ones(2)).sum().backward()
    (3 * model["b"](torch.ones(2))).sum().backward()
    optimizer.step()
    load_optimizer_tensors(restored, turned, saved(optimizer, model))
    for name in ("a", "b"):
        weight = f"{name}.weight"
        there, here = optimizer.state[model.get_parameter(weight)], restored.state[turned.get_parameter(weight)]
        assert torch.equal(there["exp_avg"], here["exp_avg"])


SOME = "blocks.0.attention.v.weight"
MISFITS: dict[str, Callable[[dict[str, Tensor]], None]] = {
    "one missing": lambda state: state.__delitem__(f"exp_avg/{SOME}"),
    "one too many": lambda state: state.__setitem__("exp_avg/blocks.0.attention.q.weight", torch.zeros(24, 24)),
    "another name": lambda state: state.__setitem__("exp_avg/blocks.9.x", state.pop(f"exp_avg/{SOME}")),
    "first moment of another shape": lambda state: state.__setitem__(f"exp_avg/{SOME}", torch.zeros(24, 23)),
    "second moment of another shape": lambda state: state.__setitem__(f"exp_avg_sq/{SOME}", torch.zeros(24, 23)),
    "step of another shape": lambda state: state.__setitem__(f"step/{SOME}", torch.zeros(2)),
}


@pytest.mark.parametrize("spoil", MISFITS.values(), ids=MISFITS.keys())
def test_state_that_does_not_fit_is_refused(spoil: Callable[[dict[str, Tensor]], None], trained: Trained) -> None:
    model, optimizer = trained
    state = saved(optimizer, model)
    spoil(state)
    twin = frozen_gpt()
    with pytest.raises(CheckpointError, match=r"blocks\."):
        load_optimizer_tensors(build_optimizer(twin, CONFIG, device="cpu"), twin, state)


def test_state_of_a_frozen_model_does_not_fit_one_that_trains_everything(trained: Trained) -> None:
    model, optimizer = trained
    baseline = build_gpt(tiny_gpt_config(), seed=0)
    with pytest.raises(CheckpointError, match=r"does not fit what trains .*attention\.k\.weight"):
        load_optimizer_tensors(build_optimizer(baseline, CONFIG, device="cpu"), baseline, saved(optimizer, model))
