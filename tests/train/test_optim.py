"""The optimizer holds what trains and nothing else, decays matrices only, and its state survives by name."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from oelm.config import OptimConfig
from oelm.errors import CheckpointError
from oelm.method.apply import Plan, freeze, hold
from oelm.method.audit import digest
from oelm.models.gpt import GPT, build_gpt
from oelm.train.optim import (
    build_optimizer,
    layer_factors,
    load_optimizer_tensors,
    optimizer_tensors,
    set_learning_rate,
)
from tests.conftest import tiny_gpt_config
from tests.method.tiny_models import BY_NAME, tiny_model

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
def trained() -> tuple[GPT, torch.optim.Optimizer]:
    model = frozen_gpt()
    optimizer = build_optimizer(model, CONFIG, device="cpu")
    train(model, optimizer, first=0, steps=2)
    return model, optimizer


Trained = tuple[GPT, torch.optim.Optimizer]


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


def torchs_own(model: nn.Module, *, fused: bool) -> torch.optim.AdamW:
    """The same groups and settings in torch's class, which our optimizer does not use."""
    named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for _, p in named if p.dim() >= 2], "weight_decay": CONFIG.weight_decay},
        {"params": [p for _, p in named if p.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=CONFIG.lr, betas=CONFIG.betas, fused=fused)


@pytest.mark.parametrize(("device", "fused"), [("cpu", True), ("mps", False)])
def test_updates_and_state_are_those_of_torchs_adamw_bit_for_bit(device: str, fused: bool) -> None:
    ours, theirs = frozen_gpt(), frozen_gpt()
    optimizer, reference = build_optimizer(ours, CONFIG, device=device), torchs_own(theirs, fused=fused)
    train(ours, optimizer, first=0, steps=4)
    train(theirs, reference, first=0, steps=4)
    assert all(torch.equal(p, theirs.get_parameter(name)) for name, p in ours.named_parameters())
    for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        state, expected = optimizer.state.get(one, {}), reference.state.get(other, {})
        assert state.keys() == expected.keys()
        assert all(torch.equal(value, expected[key]) for key, value in state.items())


def test_gradients_are_dropped() -> None:
    model = frozen_gpt()
    optimizer = build_optimizer(model, CONFIG, device="cpu")
    train(model, optimizer, first=0, steps=1)
    assert any(p.grad is not None for p in model.parameters())
    optimizer.zero_grad()
    assert all(p.grad is None for p in model.parameters())


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


def test_restored_state_is_a_copy_that_lets_the_file_go(trained: Trained) -> None:
    model, optimizer = trained
    twin, state = frozen_gpt(), saved(optimizer, model)
    restored = build_optimizer(twin, CONFIG, device="cpu")
    load_optimizer_tensors(restored, twin, state)
    given = {tensor.data_ptr() for tensor in state.values()}
    assert given.isdisjoint(tensor.data_ptr() for tensor in optimizer_tensors(restored, twin).values())


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


def test_without_decay_by_layer_there_are_the_two_groups_there_always_were() -> None:
    model = frozen_gpt()
    learns = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = build_optimizer(model, CONFIG, device="cpu", layer_lr_decay=1.0).param_groups
    assert [(group["weight_decay"], group["factor"], group["joined"]) for group in groups] == [(0.1, 1.0, 0), (0.0, 1.0, 0)]
    for group, members in zip(groups, ([p for p in learns if p.dim() > 1], [p for p in learns if p.dim() < 2]), strict=True):
        assert [id(parameter) for parameter in group["params"]] == [id(parameter) for parameter in members]
    assert layer_factors(model, 1.0) == {}


# By the beginning of a parameter's name: how many layers lie above it; the first that fits counts, and no other has any.
ABOVE: dict[str, dict[str, int]] = {
    "our_gpt": {"gpt.blocks.1.": 0, "gpt.blocks.0.": 1, "gpt.token_embedding": 2, "gpt.position_embedding": 2},
    # Norms of embeddings belong to them.
    "bert": {"bert.encoder.layer.1.": 0, "bert.encoder.layer.0.": 1, "bert.embeddings.": 2},
    "gpt2": {"transformer.h.1.": 0, "transformer.h.0.": 1, "transformer.wte": 2, "transformer.wpe": 2},
    # Two layers of encoder and one of decoder, each counted from its own end; T5's distances are embeddings inside a layer.
    "t5": {"encoder.block.1.": 0, "encoder.block.0.": 1, "decoder.block.0.": 0, "shared": 2},
    "bart": {
        "model.encoder.layers.0.": 0,
        "model.decoder.layers.1.": 0,
        "model.decoder.layers.0.": 1,
        "model.shared": 2,
        "model.encoder.embed_positions": 2,
        "model.decoder.embed_positions": 2,
    },
    "vit": {"vit.layers.1.": 0, "vit.layers.0.": 1, "vit.encoder.layer.1.": 0, "vit.encoder.layer.0.": 1, "vit.embeddings.": 2},
}


@pytest.mark.parametrize("frozen", [False, True], ids=["free", "frozen"])
@pytest.mark.parametrize("name", ABOVE)
def test_the_rate_falls_layer_by_layer_from_the_last_to_the_embeddings(name: str, frozen: bool) -> None:
    model = tiny_model(BY_NAME[name])
    if frozen:
        freeze(model, "oelm_freeze")
    powers = {
        parameter: next((power for prefix, power in ABOVE[name].items() if parameter.startswith(prefix)), 0)
        for parameter, _ in model.named_parameters()
    }
    assert set(powers.values()) == {0, 1, 2}
    assert layer_factors(model, 0.5) == {parameter: 0.5**power for parameter, power in powers.items() if power}
    optimizer = build_optimizer(model, CONFIG, device="cpu", layer_lr_decay=0.5)
    set_learning_rate(optimizer, 0.25)
    rates = {id(parameter): group["lr"] for group in optimizer.param_groups for parameter in group["params"]}
    learns = {parameter: p for parameter, p in model.named_parameters() if p.requires_grad}
    assert {parameter: rates[id(p)] for parameter, p in learns.items()} == {p: 0.25 * 0.5 ** powers[p] for p in learns}
    assert len(rates) == len(learns)
    expected = {parameter: 0.1 if p.dim() > 1 else 0.0 for parameter, p in learns.items()}
    assert decay_by_name(model, optimizer) == expected


LATE = "blocks.2.attention.q.weight"
PLAN = Plan({LATE: (0, 4)}, 10)


def thawed_without_a_step() -> tuple[GPT, torch.optim.Optimizer, dict[str, Tensor]]:
    """A model in which one weight was thawed, and the state of an optimizer whose update since then was skipped."""
    model = frozen_gpt()
    before = build_optimizer(model, CONFIG, device="cpu", plan=PLAN)
    train(model, before, first=0, steps=2)
    names = [name for name, parameter in model.named_parameters() if not parameter.requires_grad]
    hold(model, [name for name in names if name != LATE])
    optimizer = build_optimizer(model, CONFIG, device="cpu", plan=PLAN, before=before)
    return model, optimizer, saved(optimizer, model)


def test_what_joined_in_an_update_that_was_skipped_restores_to_no_state() -> None:
    model, optimizer, state = thawed_without_a_step()
    assert not any(LATE in name for name in state)
    restored = build_optimizer(model, CONFIG, device="cpu", plan=PLAN)
    load_optimizer_tensors(restored, model, state)
    assert {name: digest(tensor) for name, tensor in saved(restored, model).items()} == {
        name: digest(tensor) for name, tensor in state.items()
    }


@pytest.mark.parametrize("key", ["exp_avg", "exp_avg_sq", "step"])
def test_half_a_state_of_what_joined_late_is_refused(key: str) -> None:
    model, optimizer, _ = thawed_without_a_step()
    train(model, optimizer, first=2, steps=1)
    state = saved(optimizer, model)
    del state[f"{key}/{LATE}"]
    with pytest.raises(CheckpointError, match="does not fit what trains"):
        load_optimizer_tensors(build_optimizer(model, CONFIG, device="cpu", plan=PLAN), model, state)


def test_what_did_not_join_late_must_have_its_state() -> None:
    model, _, state = thawed_without_a_step()
    with pytest.raises(CheckpointError, match=LATE):
        load_optimizer_tensors(build_optimizer(model, CONFIG, device="cpu"), model, state)
