"""A low-rank correction starts at nothing, learns within its share on top of frozen frames, and folds into plain weights."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from oelm.config import OptimConfig
from oelm.errors import MethodError
from oelm.method.apply import fold, freeze, restore, thaw
from oelm.method.audit import assert_unmoved, audit, digest, record_of
from oelm.method.fused import Layout
from oelm.method.layers import Adjusted, add_correction, correction_rank, learnt_on_top
from oelm.method.method import PRESETS, Gain, Method, QKPart
from oelm.method.sites import HeadProjection, ParameterSlot, attention_sites
from oelm.models.gpt import GPT, build_gpt
from oelm.train.loss import mean_cross_entropy
from oelm.train.optim import build_optimizer
from tests.cases import case
from tests.conftest import tiny_gpt_config
from tests.method.kinds import of_each_kind
from tests.method.tiny_models import ARCHITECTURES, BY_NAME, PackedTorch, Tiny, outputs, tiny_inputs, tiny_model

WINDOWS = torch.randint(61, (2, 17), generator=torch.Generator().manual_seed(1))
SHARE = PRESETS["oelm_lowrank"].correction
# Those whose queries are computed by a layer of their own.
CORRECTED = [tiny for tiny in ARCHITECTURES if not tiny.name.startswith("torch")]
GAINS: tuple[Gain, ...] = ("none", "head", "matrix")


def corrected(**more: object) -> GPT:
    model = build_gpt(tiny_gpt_config(), seed=0)
    freeze(model, PRESETS["oelm_lowrank"].model_copy(update=more), seed=3)
    return model


def trained(model: GPT, *, steps: int = 8) -> GPT:
    # Without decay, so that nothing moves but by its gradient.
    optimizer = build_optimizer(model, OptimConfig(lr=0.01, weight_decay=0.0), device="cpu")
    for _ in range(steps):
        optimizer.zero_grad()
        mean_cross_entropy(model(WINDOWS[:, :-1]).flatten(0, 1), model.head_VD, WINDOWS[:, 1:].flatten()).backward()
        optimizer.step()
    return model


def on_top(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: parameter for name, parameter in model.named_parameters() if learnt_on_top(name)}


def digests(model: nn.Module) -> dict[str, str]:
    return {name: digest(parameter) for name, parameter in model.named_parameters()}


def logits(model: GPT) -> Tensor:
    with torch.no_grad():
        return model.logits(WINDOWS[:, :-1])


def test_correction_starts_at_nothing() -> None:
    plain = build_gpt(tiny_gpt_config(), seed=0)
    freeze(plain, "oelm_freeze", seed=3)
    model = corrected()
    assert torch.equal(logits(model), logits(plain))
    assert {name: value for name, value in digests(model).items() if name not in on_top(model)} == digests(plain)


def test_draws_differ_between_projections_and_follow_the_seed() -> None:
    into = {name: value for name, value in digests(corrected()).items() if name.endswith("correction_in")}
    assert len(set(into.values())) == len(into) == 6
    again, other = (digests(corrected(seed=seed)) for seed in (3, 4))
    assert all(again[name] == value != other[name] for name, value in into.items())


def projection_of(num_heads: int, head_dim: int, model_dim: int) -> HeadProjection:
    slots = (ParameterSlot(parameter, Layout((("q", num_heads),))) for parameter in ("weight", "bias"))
    return HeadProjection("q", "q", nn.Linear(model_dim, num_heads * head_dim), "q", *slots)


@settings(deadline=None, derandomize=True, max_examples=50)
@given(st.integers(1, 8), st.integers(1, 16), st.integers(1, 96), st.floats(0.01, 0.99))
def test_correction_is_the_largest_within_its_share_of_the_weight(heads: int, dim: int, width: int, share: float) -> None:
    projection = projection_of(heads, dim, width)
    rank, rows = correction_rank(projection, share), heads * dim
    # The share is a float: three products and a quotient of it, each within 2^-53 of itself.
    rounding = 1 + 2.0**-50
    assert rank * (rows + width) <= share * rows * width * rounding
    assert (rank + 1) * (rows + width) * rounding > share * rows * width
    assume(rank)
    add_correction(projection, share, torch.Generator().manual_seed(0))
    learnt = {name: tuple(p.shape) for name, p in projection.module.named_parameters() if learnt_on_top(name)}
    assert learnt == {"correction_in": (rank, width), "correction_out": (rows, rank)}


@pytest.mark.parametrize(("rows", "rank"), [(512, 32), (128, 12)], ids=["square", "grouped keys"])
def test_rank_of_known_shapes(rows: int, rank: int) -> None:
    # 512 x 512 / 8 / 1024 = 32; 128 x 512 / 8 / 640 = 12.8.
    assert correction_rank(projection_of(rows // 64, 64, 512), SHARE) == rank


def test_a_correction_of_pretrained_weights_is_lora_on_queries_and_keys() -> None:
    """The same function of the same number of parameters as that of peft at the same rank, where its alpha is the rank."""
    peft = pytest.importorskip("peft")
    model, tiny = tiny_model(BY_NAME["bert"]), BY_NAME["bert"]
    freeze(model, "pretrained_lowrank", seed=3)
    assert torch.equal(reads(model), reads(tiny_model(tiny)))
    rank = correction_rank(attention_sites(model)[0].q, SHARE)
    config = peft.LoraConfig(r=rank, lora_alpha=rank, lora_dropout=0.0, target_modules=["query", "key"])
    wrapped = peft.get_peft_model(tiny_model(tiny), config)
    theirs = {name: parameter for name, parameter in wrapped.named_parameters() if parameter.requires_grad}
    ours = on_top(model)
    assert sum(p.numel() for p in theirs.values()) == sum(p.numel() for p in ours.values()) == 2 * 2 * 2 * rank * 32
    with torch.no_grad():
        for name, parameter in ours.items():
            parameter.normal_(std=0.3, generator=torch.Generator().manual_seed(len(name)))
            factor = {"correction_in": "lora_A", "correction_out": "lora_B"}[name.rpartition(".")[2]]
            theirs[f"base_model.model.{name.rpartition('.')[0]}.{factor}.default.weight"].copy_(parameter)
    assert not torch.allclose(reads(model), reads(tiny_model(tiny)), atol=0.1)
    # W x + B (A x) there, (W + B A) x here: sums of 32 products of order one in another order.
    assert torch.allclose(reads(model), reads(wrapped), rtol=0, atol=1e-5)


def reads(model: nn.Module) -> Tensor:
    with torch.no_grad():
        return outputs(model, tiny_inputs(BY_NAME["bert"]))


def test_in_every_architecture_no_more_learns_than_the_share() -> None:
    for tiny in CORRECTED:
        with case(tiny.name):
            model = tiny_model(tiny)
            freeze(model, "oelm_lowrank")
            for site in attention_sites(model):
                for _, projection in site.projections():
                    own = [p.numel() for name, p in projection.module.named_parameters() if learnt_on_top(name)]
                    assert len(own) == 2 and sum(own) <= SHARE * projection.weight_HKD().numel()
            counts = audit(model)
            assert counts.by_role["correction"] == {"trainable": sum(p.numel() for p in on_top(model).values()), "frozen": 0}
            assert counts.frozen == tiny.frozen


def test_projection_too_small_for_rank_one_is_refused_and_nothing_changed() -> None:
    model = build_gpt(tiny_gpt_config(model_dim=6), seed=0)
    before = digests(model)
    with pytest.raises(MethodError, match=r"correction 0\.125: blocks\.0\.attention\.q has 36 numbers"):
        freeze(model, "oelm_lowrank", keep_original=True)
    assert digests(model) == before and not record_of(model)
    with pytest.raises(MethodError, match="nothing was kept"):
        restore(model)


def test_correction_learns_while_the_frames_stay() -> None:
    model, start = trained(corrected()), digests(corrected())
    assert_unmoved(model)
    after = digests(model)
    assert len(on_top(model)) == 2 * 2 * 3
    assert all(after[name] != start[name] for name in on_top(model))
    assert {name for name in after if after[name] == start[name]} == set(
        freeze(build_gpt(tiny_gpt_config(), seed=0), "oelm_freeze")
    )


@pytest.mark.parametrize("parts", [("q",), ("k",)], ids="+".join)
def test_only_what_is_frozen_is_corrected(parts: tuple[QKPart, ...]) -> None:
    model = corrected(freeze=parts, layers="last 1")
    assert on_top(model).keys() == {f"blocks.2.attention.{parts[0]}.correction_{end}" for end in ("in", "out")}


def test_a_correction_may_learn_in_some_layers_while_all_are_frozen() -> None:
    model = trained(corrected(learn_layers="first 1"))
    assert_unmoved(model)
    assert on_top(model).keys() == {f"blocks.0.attention.{part}.correction_{end}" for part in "qk" for end in ("in", "out")}
    frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    assert frozen == {f"blocks.{layer}.attention.{part}.weight" for layer in range(3) for part in "qk"}
    # What is there starts as where all layers have it.
    start = corrected(learn_layers="first 1")
    assert all(torch.equal(parameter, on_top(corrected())[name]) for name, parameter in on_top(start).items())
    before = logits(model)
    fold(model)
    assert not on_top(model)
    # Float32 rounding of logits of order one, as in test_gain.
    assert torch.allclose(logits(model), before, rtol=0, atol=2e-5)


def test_a_gain_may_learn_in_some_layers_alone() -> None:
    assert on_top(corrected(correction=0.0, gain="head", learn_layers=(-1,))).keys() == {"blocks.2.attention.q.gain"}


@pytest.mark.parametrize(
    ("more", "problem"),
    [
        (
            {"learn_layers": "first 1", "layers": "last 1"},
            r"learn_layers is 'first 1', but the method freezes attention of GPT in layers 2;",
        ),
        ({"learn_layers": (0, 2), "layers": "last 2"}, r"learn_layers is \(0, 2\), but .* in layers 1, 2; choose"),
        ({"learn_layers": "first 4"}, r"method\.learn_layers = 'first 4' names layer 3, but the model has 3"),
    ],
    ids=["frozen elsewhere", "one of them not frozen", "not there"],
)
def test_layers_in_which_nothing_could_learn_are_refused_and_nothing_changed(more: dict[str, object], problem: str) -> None:
    model = build_gpt(tiny_gpt_config(), seed=0)
    before = digests(model)
    with pytest.raises(MethodError, match=problem):
        freeze(model, PRESETS["oelm_lowrank"].model_copy(update=more))
    assert digests(model) == before and not record_of(model)


def test_layers_of_what_does_not_learn_are_refused() -> None:
    with pytest.raises(ValidationError, match="learn_layers needs a gain or a correction"):
        Method(init="orthogonal", freeze=("q", "k"), learn_layers="first 1")


def test_both_factors_decay_like_the_matrices_they_are() -> None:
    model = corrected(gain="matrix")
    optimizer = build_optimizer(model, OptimConfig(lr=0.1, weight_decay=0.5), device="cpu")
    decays = {id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    for name, parameter in on_top(model).items():
        assert decays[id(parameter)] == (0.0 if name.endswith("gain") else 0.5)


def stirred(tiny: Tiny, gain: Gain) -> nn.Module:
    """A model with weights of its own in Q and K, and something learnt in all that is on top of them."""
    model = tiny_model(tiny)
    freeze(model, Method(freeze=("q", "k"), correction=SHARE, gain=gain))
    generator = torch.Generator().manual_seed(5)
    for parameter in on_top(model).values():
        parameter.data += torch.randn(parameter.shape, generator=generator) / 4
    return model


@of_each_kind(CORRECTED)
def test_correction_and_gain_fold_into_the_plain_weights_of_every_architecture(tiny: Tiny) -> None:
    plain, inputs = tiny_model(tiny), tiny_inputs(tiny)
    with torch.no_grad():
        untouched = outputs(plain, inputs)
    for gain in GAINS:
        with case(gain):
            model = stirred(tiny, gain)
            assert len(on_top(model)) == tiny.num_sites * (4 if gain == "none" else 5)
            with torch.no_grad():
                before = outputs(model, inputs)
                fold(model)
                after = outputs(model, inputs)
            # Folded in float64, rounded once to 2^-24. A query is then one sum of 32 products where it was three of at most
            # 33, so both are within 3 * 33 roundings; a logit doubles that, and what follows shrinks a relative error, or
            # keeps it.
            assert torch.allclose(after, before, rtol=0, atol=float(2 * 99 * 2.0**-24 * before.abs().max()))
            matters = not torch.allclose(before, untouched, rtol=0, atol=1e-3)
            assert matters, "what was learnt must matter, or folding proves nothing"
            assert_unmoved(model)
            thaw(model)
            assert [name for name, _ in model.named_parameters()] == [name for name, _ in plain.named_parameters()]


def test_folding_a_copy_leaves_the_original_alone() -> None:
    model = trained(corrected(gain="head"))
    before, start = logits(model), digests(model)
    twin = copy.deepcopy(model)
    fold(twin)
    assert torch.equal(logits(model), before) and digests(model) == start
    assert on_top(model) and not on_top(twin)
    # The twin is folded, not emptied: float32 rounding of logits of order one, as in test_gain.
    assert torch.allclose(logits(twin), before, rtol=0, atol=2e-5)
    thaw(model)
    assert torch.equal(logits(twin), logits(model))


def test_correction_inside_torchs_own_attention_is_refused_and_nothing_changed() -> None:
    model = PackedTorch()
    before, kinds = digests(model), [type(module) for module in model.modules()]
    with pytest.raises(
        MethodError, match=r"correction 0\.125: encoder\.layers\.0\.self_attn is a torch\.nn\.MultiheadAttention"
    ):
        freeze(model, "oelm_lowrank")
    assert digests(model) == before and [type(module) for module in model.modules()] == kinds
    assert all(parameter.requires_grad for parameter in model.parameters())


class Doubled(nn.Linear):
    """A layer that does more than its weight says."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


@pytest.mark.parametrize("method", ["oelm_lowrank", "oelm_matrix"])
def test_on_top_of_a_layer_that_is_more_than_linear_nothing_may_learn_and_nothing_changed(method: str) -> None:
    model = build_gpt(tiny_gpt_config(), seed=0)
    attention = attention_sites(model)[-1]
    object.__setattr__(attention.k.module, "__class__", Doubled)
    before, kinds = digests(model), [type(module) for module in model.modules()]
    with pytest.raises(MethodError, match=r"attention\.k is a tests\.method\.test_correction\.Doubled, and only on top"):
        freeze(model, method)
    assert digests(model) == before and [type(module) for module in model.modules()] == kinds
    freeze(model, "oelm_freeze")


def test_while_something_learns_the_module_keeps_its_names_and_then_its_class() -> None:
    model = corrected(gain="matrix")
    query = attention_sites(model)[0].q.module
    assert isinstance(query, nn.Linear) and isinstance(query, Adjusted)
    assert set(query._parameters) == {"weight", "bias", "gain", "correction_in", "correction_out"}
    fold(model)
    assert type(query) is nn.Linear and set(query._parameters) == {"weight", "bias"}


def test_the_outputs_are_those_of_correction_then_gain_on_the_activations() -> None:
    model = trained(corrected(gain="matrix"))
    query = attention_sites(model)[0].q.module
    own = {name: parameter.detach().double() for name, parameter in query._parameters.items() if parameter is not None}
    x_TD = torch.randn(5, own["weight"].shape[1], generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    plain_TE = x_TD @ own["weight"].T + x_TD @ own["correction_in"].T @ own["correction_out"].T
    heads_THK = plain_TE.unflatten(-1, (len(own["gain"]), -1))
    expected_TE = torch.einsum("thk,hkj->thj", heads_THK, own["gain"]).flatten(-2)
    assert torch.allclose(query(x_TD.float()).double(), expected_TE, rtol=0, atol=2e-5)


def test_no_gradient_reaches_the_frame_itself() -> None:
    model = trained(corrected(), steps=1)
    assert all(parameter.grad is not None for parameter in on_top(model).values())
    weights = [projection.weight for site in attention_sites(model) for _, projection in site.projections()]
    assert weights and all(weight.grad is None and not weight.requires_grad for weight in weights)


def test_correction_survives_a_file(tmp_path: Path) -> None:
    model = trained(corrected(gain="matrix"))
    save_file(model.state_dict(), tmp_path / "weights.safetensors")
    twin = corrected(gain="matrix", seed=9)
    twin.load_state_dict(load_file(tmp_path / "weights.safetensors"))
    assert torch.equal(logits(twin), logits(model))


def test_a_thawed_model_can_be_corrected_anew() -> None:
    model = trained(corrected())
    thaw(model)
    freeze(model, Method(freeze=("q", "k"), correction=SHARE, gain="matrix"))
    before = logits(model)
    fold(model)
    # At their start, one is nothing and the other the identity: the folded weights are the very same.
    assert torch.equal(logits(model), before)


def test_correction_of_nothing_frozen_is_refused() -> None:
    with pytest.raises(ValidationError, match="learns on top of frozen maps; add q or k to freeze"):
        Method(init="orthogonal", correction=0.1)
