"""Axis frames: which coordinates are chosen, that choosing equals multiplying, and that nothing of it is lost or mixed up."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from torch import Tensor, nn

from oelm.errors import FrozenMovedError, MethodError
from oelm.method.apply import adopt_record, cast, fold, freeze, hold, plan_of, restore, thaw
from oelm.method.audit import assert_unmoved, audit, digest, record_of
from oelm.method.frames import axis_rows, frame_generator, orthonormality_error, sample_axes, start_of
from oelm.method.layers import Selection, compact_states, selections
from oelm.method.method import PRESETS, Gain, Method, Thaw
from oelm.method.sites import SitePaths, attention_sites, register_sites
from tests.cases import case
from tests.conftest import lively_gpt
from tests.method.kinds import of_each_kind
from tests.method.tiny_models import ARCHITECTURES, BY_NAME, Tiny, loss, outputs, tiny_inputs, tiny_model

SLICED = [tiny for tiny in ARCHITECTURES if not tiny.name.startswith("torch")]
METHODS = ("oelm_axes", "oelm_axes_lowrank", "oelm_axes_q", "oelm_axes_q_lowrank")
# Outputs are of order one; a product with zeros and ones is exact, what learns on top is folded in float64 and rounded once.
ROUNDING = 1e-5

each_kind = of_each_kind(SLICED)
each_method = pytest.mark.parametrize("method", METHODS)


def methods_of(tiny: Tiny) -> tuple[str, ...]:
    """Every architecture has one method, and every method is where projections are apart, fused, grouped and our own."""
    return METHODS if tiny.name in ("bert", "gpt2", "llama", "our_gpt") else METHODS[:1]


def coordinates(heads: int, key_heads: int, head_dim: int, dims: tuple[int, int], seed: int = 0) -> tuple[Tensor, Tensor]:
    return sample_axes(heads, key_heads, head_dim, dims, generator=frame_generator(seed, "site", "axes"))


@cache
def _sliced(tiny: Tiny, method: str | Method) -> nn.Module:
    model = tiny_model(tiny)
    freeze(model, method)
    return model


def sliced(tiny: Tiny, method: str | Method = METHODS[0]) -> nn.Module:
    """A model with slices of the test's own: a copy, as drawing them takes longer."""
    return copy.deepcopy(_sliced(tiny, method))


def stirred(model: nn.Module) -> nn.Module:
    """Let what learns on top be something, as after training."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for selection in selections(model).values():
            for parameter in selection._parameters.values():
                if parameter is not None:
                    parameter.add_(torch.randn(parameter.shape, generator=generator).to(parameter) * 0.2)
    return model


def digests(model: nn.Module) -> dict[str, str]:
    return {name: digest(parameter) for name, parameter in model.named_parameters()}


def reads(model: nn.Module, tiny: Tiny) -> Tensor:
    with torch.no_grad():
        return outputs(model, tiny_inputs(tiny))


# Which coordinates


@given(
    group=st.integers(1, 4),
    key_heads=st.integers(1, 5),
    head_dim=st.integers(1, 6),
    dim=st.integers(2, 48),
    seed=st.integers(0, 9),
)
@settings(max_examples=100, deadline=None)
def test_a_key_head_shares_no_coordinate_with_the_query_heads_it_serves(
    group: int, key_heads: int, head_dim: int, dim: int, seed: int
) -> None:
    if dim < 2 * head_dim:
        return
    q_HK, k_HK = coordinates(group * key_heads, key_heads, head_dim, (dim, dim), seed)
    assert q_HK.shape == (group * key_heads, head_dim) and k_HK.shape == (key_heads, head_dim)
    for rows in (q_HK, k_HK):
        assert int(rows.min()) >= 0 and int(rows.max()) < dim
        # Orthonormal: no coordinate twice in a head.
        assert all(len(set(head.tolist())) == head_dim for head in rows)
    for head, key in enumerate(k_HK):
        served = q_HK[head * group : (head + 1) * group]
        assert not set(key.tolist()) & set(served.flatten().tolist())


def test_queries_are_the_slices_as_they_lie_and_keys_those_of_another_head() -> None:
    shifts = set()
    for seed in range(40):
        q_HK, k_HK = coordinates(4, 4, 8, (32, 32), seed)
        assert torch.equal(q_HK.flatten(), torch.arange(32))
        shift = int(k_HK[0, 0]) // 8
        assert torch.equal(k_HK.flatten(), torch.arange(32).roll(-8 * shift))
        shifts.add(shift)
    assert shifts == {1, 2, 3}


@given(dim=st.integers(2, 40), missing=st.integers(0, 39), heads=st.integers(1, 3), seed=st.integers(0, 9))
@settings(max_examples=50, deadline=None)
def test_where_there_is_one_slice_no_coordinate_meets_itself(dim: int, missing: int, heads: int, seed: int) -> None:
    head_dim = max(dim // 2 + 1, dim - missing)
    q_HK, k_HK = coordinates(heads, heads, head_dim, (dim, dim), seed)
    assert not bool((q_HK == k_HK).any())
    assert all(len(set(head.tolist())) == head_dim for head in k_HK)


def test_heads_wider_together_than_the_model_repeat_slices_with_other_pairs() -> None:
    # Eight heads of 16 in 32 dimensions, one key head for two: pairs (query coordinate, key coordinate) differ by head.
    q_HK, k_HK = coordinates(8, 4, 16, (32, 32))
    pairs = [tuple(zip(q_HK[head].tolist(), k_HK[head // 2].tolist(), strict=True)) for head in range(8)]
    assert len(set(pairs)) == 8


def test_thin_heads_leave_coordinates_out() -> None:
    q_HK, _ = coordinates(4, 4, 2, (32, 32))
    assert q_HK.flatten().tolist() == list(range(8))


@given(heads=st.integers(1, 6), head_dim=st.integers(1, 8), dims=st.tuples(st.integers(8, 40), st.integers(8, 40)))
@settings(max_examples=50, deadline=None)
def test_each_side_of_a_cross_attention_reads_its_own_width(heads: int, head_dim: int, dims: tuple[int, int]) -> None:
    if dims[0] == dims[1] or head_dim == 1:
        return
    for rows, dim in zip(coordinates(heads, heads, head_dim, dims), dims, strict=True):
        assert int(rows.max()) < dim
        assert all(len(set(head.tolist())) == head_dim for head in rows)


@pytest.mark.parametrize(
    ("shape", "told"),
    [
        ((1, 1, 9, (8, 8)), "9 rows, and only 8 coordinates"),
        ((2, 2, 4, (8, 3)), "4 rows, and only 3 coordinates"),
        ((4, 2, 6, (8, 8)), "4 query heads of 6 rows share 2 key heads in 8 dimensions"),
    ],
)
def test_more_rows_than_coordinates_in_a_head_and_keys_without_any_of_their_own_are_refused(
    shape: tuple[Any, ...], told: str
) -> None:
    with pytest.raises(MethodError, match=told):
        coordinates(*shape)


def test_axis_rows_are_orthonormal_and_scaled() -> None:
    q_HK, k_HK = coordinates(4, 4, 8, (32, 32))
    assert orthonormality_error(axis_rows(q_HK, 32)) == orthonormality_error(axis_rows(k_HK, 32)) == 0.0
    assert float(axis_rows(k_HK, 32, scale=1.5).max()) == 1.5


# On every architecture


@pytest.mark.parametrize("tiny", SLICED, ids=lambda tiny: tiny.name)
def test_picking_is_multiplying_by_the_weight_that_is_saved(tiny: Tiny) -> None:
    for method in methods_of(tiny):
        with case(method):
            model = stirred(sliced(tiny, method))
            picked = reads(model, tiny)
            dense = copy.deepcopy(model)
            fold(dense)
            assert not selections(dense)
            assert torch.allclose(reads(dense, tiny), picked, rtol=0, atol=ROUNDING)
            assert_unmoved(dense)
            if method == "oelm_axes":
                plain = tiny_model(tiny)
                assert set(model.state_dict()) == set(plain.state_dict())
                plain.load_state_dict(model.state_dict())
                assert torch.allclose(reads(plain, tiny), picked, rtol=0, atol=ROUNDING)


def test_nothing_dense_is_stored_and_everything_is_counted() -> None:
    for tiny in SLICED:
        with case(tiny.name):
            plain, model = tiny_model(tiny), sliced(tiny)
            counts = audit(model)
            assert counts.total == counts.trainable == sum(p.numel() for p in plain.parameters()) - tiny.frozen
            assert (counts.frozen, counts.selected) == (0, tiny.frozen)
            assert sum(parameter.numel() for parameter in model.parameters()) == counts.total
            assert all(each.is_frozen and each.is_selection and each.digest for each in counts.projections)
            assert all(each.orthonormality_error == 0.0 for each in counts.projections)
            assert "replaced by slices" in str(counts) and "none of" in counts.summary()
            with compact_states():
                stored = sum(tensor.numel() for tensor in model.state_dict().values() if tensor.is_floating_point())
            # Buffers of the architectures and tied weights are in both.
            assert stored == sum(t.numel() for t in plain.state_dict().values() if t.is_floating_point()) - tiny.frozen


@each_kind
def test_steps_with_decay_leave_every_selection_and_train_the_rest(tiny: Tiny) -> None:
    for method in methods_of(tiny):
        with case(method):
            model = sliced(tiny, method).train()
            record = record_of(model)
            before = digests(model)
            optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3, weight_decay=0.1)
            for step in range(3):
                optimizer.zero_grad()
                loss(model, tiny_inputs(tiny, seed=step)).backward()
                optimizer.step()
            assert_unmoved(model)
            assert record_of(model) == record and record
            moved = {name for name, parameter in model.named_parameters() if digest(parameter) != before[name]}
            # A key's bias shifts all logits of a query alike: its gradient is rounding.
            assert {name for name in before if name not in moved} <= {name for name in before if name.endswith("bias")}


@each_kind
def test_thawing_gives_the_architectures_own_layers_back_with_the_same_outputs(tiny: Tiny) -> None:
    plain = tiny_model(tiny)
    shapes = {name: parameter.shape for name, parameter in plain.named_parameters()}
    for method in methods_of(tiny):
        with case(method):
            model = stirred(sliced(tiny, method))
            before = reads(model, tiny)
            names = thaw(model)
            assert [type(module) for module in model.modules()] == [type(module) for module in plain.modules()]
            assert {name: parameter.shape for name, parameter in model.named_parameters()} == shapes
            assert all(parameter.requires_grad for parameter in model.parameters())
            assert set(names) <= set(plain.state_dict())
            assert torch.allclose(reads(model, tiny), before, rtol=0, atol=ROUNDING)
            loss(model, tiny_inputs(tiny)).backward()


@each_kind
def test_restoring_gives_back_the_bytes_there_were(tiny: Tiny) -> None:
    plain, model = tiny_model(tiny), tiny_model(tiny)
    freeze(model, "oelm_axes", keep_original=True)
    restore(model)
    assert digests(model) == digests(plain)


@each_kind
def test_weights_round_trip_and_others_are_refused(tiny: Tiny) -> None:
    model, other = sliced(tiny), tiny_model(tiny, seed=1)
    before = reads(model, tiny)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.add_(1.0)
    twin.load_state_dict(model.state_dict())
    assert torch.equal(reads(twin, tiny), before)
    with compact_states():
        compact = model.state_dict()
    assert any(name.endswith(".index") for name in compact)
    twin.load_state_dict(compact)
    assert torch.equal(reads(twin, tiny), before)
    with pytest.raises(MethodError, match="not that selection"):
        twin.load_state_dict(other.state_dict())


@each_kind
def test_bfloat16_leaves_the_coordinates_alone(tiny: Tiny) -> None:
    model = sliced(tiny, "oelm_axes_lowrank")
    record = record_of(model)
    cast(model, torch.bfloat16)
    assert record_of(model) == record
    assert all(each.index.dtype == torch.int64 and each.like.dtype == torch.bfloat16 for each in selections(model).values())
    assert all(t.dtype == torch.bfloat16 for name, t in model.state_dict().items() if name.endswith(("q.weight", "k.weight")))
    inputs = {name: value.bfloat16() if value.is_floating_point() else value for name, value in tiny_inputs(tiny).items()}
    loss(model, inputs).backward()


def gradients(model: nn.Module, tiny: Tiny) -> dict[str, Tensor]:
    model.zero_grad()
    loss(model, tiny_inputs(tiny)).backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}


@each_kind
def test_gradients_are_those_of_the_dense_weights(tiny: Tiny) -> None:
    model = sliced(tiny)
    got, dense = gradients(model, tiny), copy.deepcopy(model)
    fold(dense)
    expected = gradients(dense, tiny)
    assert got.keys() == expected.keys() == {name for name, p in model.named_parameters() if p.requires_grad}
    # Sums of up to a hundred terms of order one, added in another order.
    assert all(torch.allclose(got[name], value, rtol=1e-4, atol=1e-5) for name, value in expected.items())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["our_gpt", *(pytest.param(name, marks=pytest.mark.slow) for name in ("bert", "gpt2"))])
def test_a_compiled_model_gives_the_same_gradients_and_follows_a_thaw(name: str) -> None:
    tiny = BY_NAME[name]
    model = sliced(tiny, "oelm_axes_lowrank")
    torch.compiler.reset()
    compiled: Any = torch.compile(model, backend="aot_eager", fullgraph=True)
    for _ in range(2):
        plain = gradients(model, tiny)
        model.zero_grad()
        loss(compiled, tiny_inputs(tiny)).backward()
        got = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
        assert plain.keys() == got.keys()
        assert all(torch.allclose(got[name], expected, rtol=1e-3, atol=1e-5) for name, expected in plain.items())
        thaw(model)


@pytest.mark.parametrize("name", ["bert", "gpt2", "gpt_neox", "llama"])
def test_gradient_checkpointing_gives_the_same_gradients(name: str) -> None:
    tiny = BY_NAME[name]
    model: Any = sliced(tiny, "oelm_axes_lowrank")
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for dropout in ("dropout", "attention_dropout"):
            if isinstance(getattr(module, dropout, None), float):
                setattr(module, dropout, 0.0)
    plain = gradients(model.train(), tiny)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    again = gradients(model, tiny)
    assert plain.keys() == again.keys()
    assert all(torch.allclose(again[name], value, rtol=1e-4, atol=1e-6) for name, value in plain.items())


@pytest.mark.parametrize("name", ["bert", "gpt2", "llama", "t5"])
def test_autocast_gives_queries_the_dtype_of_values(name: str) -> None:
    tiny = BY_NAME[name]
    model = sliced(tiny)
    with torch.autocast("cpu", torch.bfloat16):
        selection = next(iter(selections(model).values()))
        assert selection(torch.zeros(1, 2, selection.in_features)).dtype == torch.bfloat16
        loss(model, tiny_inputs(tiny)).backward()


# What else a method may ask for


def test_without_freezing_axes_are_a_dense_start_that_learns() -> None:
    model, frozen = tiny_model(BY_NAME["our_gpt"]), sliced(BY_NAME["our_gpt"])
    assert freeze(model, Method(init="axes")) == () and not selections(model)
    for free, held in zip(attention_sites(model), attention_sites(frozen), strict=True):
        for (_, learns), (_, picks) in zip(free.projections(), held.projections(), strict=True):
            assert torch.equal(learns.weight_HKD(), picks.weight_HKD()) and not learns.is_frozen


def test_keys_of_axes_q_start_as_slices_and_learn() -> None:
    model = lively_gpt(num_layers=1)
    assert freeze(model, "oelm_axes_q") == ("blocks.0.attention.q.weight",)
    site = attention_sites(model)[0]
    assert site.q.selection is not None and site.k.selection is None and site.k.weight.requires_grad
    assert orthonormality_error(site.k.weight_HKD()) == 0.0


@pytest.mark.parametrize("gain", ["head", "matrix"])
def test_a_gain_learns_on_top_of_slices_and_folds(gain: Gain) -> None:
    tiny = BY_NAME["gpt2"]
    start = reads(sliced(tiny), tiny)
    model = sliced(tiny, Method(init="axes", freeze=("q", "k"), gain=gain, correction=0.2))
    assert torch.allclose(reads(model, tiny), start, rtol=0, atol=ROUNDING)
    stirred(model)
    before = reads(model, tiny)
    assert not torch.allclose(before, start, rtol=0, atol=ROUNDING)
    assert audit(model).by_role["gain"]["trainable"] > 0
    fold(model)
    assert torch.allclose(reads(model, tiny), before, rtol=0, atol=ROUNDING)


def test_a_scale_multiplies_what_is_picked() -> None:
    tiny = BY_NAME["our_gpt"]
    model = sliced(tiny, Method(init="axes", freeze=("q", "k"), scale=2**0.5))
    dense = copy.deepcopy(model)
    fold(dense)
    assert torch.allclose(reads(dense, tiny), reads(model, tiny), rtol=0, atol=ROUNDING)
    assert float(attention_sites(dense)[0].q.weight_HKD().max()) == pytest.approx(2**0.5)
    assert record_of(model) != record_of(sliced(tiny))


@pytest.mark.parametrize(
    ("method", "told"),
    [
        ({"scale": "layer", "freeze": ["q", "k"]}, "keeps nothing of them"),
        ({"freeze_at": 0.5, "freeze": ["q"]}, "would then replace what they learnt by slices"),
    ],
)
def test_what_slices_cannot_do_is_refused_with_the_reason(method: dict[str, Any], told: str) -> None:
    with pytest.raises(ValidationError, match=told):
        Method(init="axes", **method)


@pytest.mark.parametrize("name", ["torch", "torch_separate"])
def test_torchs_own_attention_is_refused_and_left_as_it_was(name: str) -> None:
    model = tiny_model(BY_NAME[name])
    before = digests(model)
    with pytest.raises(MethodError, match="multiplies by its weights inside torch"):
        freeze(model, "oelm_axes")
    assert digests(model) == before


def test_a_function_cannot_draw_slices_alone() -> None:
    with pytest.raises(MethodError, match="whole site"):
        start_of(PRESETS["oelm_axes"], torch.zeros(1, 2, 4), torch.Generator())


# Proof


def test_a_damaged_coordinate_is_found_by_its_digest() -> None:
    model = lively_gpt()
    freeze(model, "oelm_axes")
    selection = selections(model)["blocks.1.attention.k"]
    selection.index[3] ^= 1
    with pytest.raises(FrozenMovedError, match=r"blocks\.1\.attention\.k\.weight has moved"):
        assert_unmoved(model)


@pytest.mark.parametrize(
    "bad", [torch.zeros(3, dtype=torch.int64), torch.zeros(24), torch.full((24,), 24), torch.full((24,), -1)]
)
def test_coordinates_of_another_model_are_not_loaded(bad: Tensor) -> None:
    model = lively_gpt()
    freeze(model, "oelm_axes")
    with compact_states():
        state = model.state_dict()
    state["blocks.0.attention.q.index"] = bad
    with pytest.raises(MethodError, match="damaged, or of another model"):
        model.load_state_dict(state)


def test_stored_coordinates_count_not_a_new_draw() -> None:
    models = [lively_gpt() for _ in range(2)]
    for seed, model in enumerate(models):
        freeze(model, "oelm_axes", seed=seed)
    assert record_of(models[0]) != record_of(models[1])
    with compact_states():
        models[1].load_state_dict(models[0].state_dict())
    record = record_of(models[0])
    assert record
    adopt_record(models[1], record)
    tokens = torch.arange(12).unsqueeze(0)
    assert torch.equal(models[0].logits(tokens), models[1].logits(tokens))


def test_a_state_without_the_selection_is_reported_as_incomplete() -> None:
    model = lively_gpt()
    freeze(model, "oelm_axes")
    state = {name: t for name, t in model.state_dict().items() if name != "blocks.0.attention.q.weight"}
    with pytest.raises(RuntimeError, match=r"Missing key.*blocks\.0\.attention\.q\.weight"):
        model.load_state_dict(state)


def test_slices_thaw_layer_by_layer_by_the_plan() -> None:
    method = Method(init="axes", freeze=("q", "k"), thaw=Thaw(start=0.25, end=0.75, order="first_first"))
    model = lively_gpt()
    freeze(model, method)
    plan = plan_of(model, method, steps=12)
    tokens = torch.arange(12).unsqueeze(0)
    before = model.logits(tokens)
    for step in range(12):
        hold(model, plan.frozen_at(step))
        picking = {int(path.split(".")[1]) for path in selections(model)}
        assert picking == {layer for layer, moment in enumerate((3, 6, 9)) if step < moment}
        assert torch.allclose(model.logits(tokens), before, rtol=0, atol=ROUNDING)
        for name, parameter in model.named_parameters():
            assert parameter.requires_grad and plan.joined_at(name) == {0: 3, 1: 6, 2: 9}.get(_layer(name), 0)


def _layer(name: str) -> int:
    return int(name.split(".")[1]) if name.endswith(("attention.q.weight", "attention.k.weight")) else -1


def test_a_layer_that_is_used_twice_stays_one_layer() -> None:
    model = lively_gpt()
    model.blocks[1] = model.blocks[0]
    before = {name: p.shape for name, p in model.named_parameters()}
    freeze(model, "oelm_axes")
    assert len({id(each) for each in selections(model).values()}) < len(selections(model))
    thaw(model)
    assert {name: p.shape for name, p in model.named_parameters()} == before


def test_many_pieces_are_gathered_by_index() -> None:
    layer = nn.Linear(512, 512, bias=False)
    generator = torch.Generator().manual_seed(0)
    selection = Selection(layer, torch.randperm(512, generator=generator).reshape(8, 64), scale=1.0, is_transposed=False)
    x = torch.randn(2, 3, 512, generator=generator)
    assert len(selection.runs) > 64
    assert torch.equal(selection(x), x @ selection.rows_ED().T)


class OwnAttention(nn.Module):
    """An attention that scales its queries in place."""

    def __init__(self, query: type[nn.Linear] = nn.Linear) -> None:
        super().__init__()
        self.q, self.k, self.v = query(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x_BTD: Tensor) -> Tensor:
        q_BTD = self.q(x_BTD)
        q_BTD *= 0.5
        mixed: Tensor = (q_BTD @ self.k(x_BTD).mT).softmax(-1) @ self.v(x_BTD)
        return mixed


@register_sites(OwnAttention)
def _own(module: nn.Module) -> SitePaths:
    return SitePaths(q="q", k="k", num_heads=2)


def test_an_attention_may_write_to_its_queries_in_place() -> None:
    model, x = OwnAttention(), torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(0))
    before = x.clone()
    freeze(model, "oelm_axes")
    assert len(selections(model)["q"].runs) == 1
    out = model(x)
    assert torch.equal(x, before)
    fold(model)
    assert torch.allclose(model(x), out, rtol=0, atol=ROUNDING)


def test_our_own_attention_and_split_layers_read_their_slices_without_a_copy() -> None:
    for name in ("our_gpt", "gpt2"):
        found = selections(sliced(BY_NAME[name]))
        assert found and all(each.lends for each in found.values())
    freeze(model := OwnAttention(), "oelm_axes")
    assert not any(each.lends for each in selections(model).values())


class Tanh(nn.Linear):
    def forward(self, x_BTD: Tensor) -> Tensor:
        return super().forward(x_BTD).tanh()


@each_method
def test_a_layer_with_a_forward_of_its_own_does_not_become_a_slice(method: str) -> None:
    model = OwnAttention(Tanh)
    with pytest.raises(MethodError, match=r"q is a .*Tanh"):
        freeze(model, method)
    assert type(model.q) is Tanh and not record_of(model)


def on_meta(method: str | Method = "oelm_axes") -> Any:
    model = lively_gpt().to("meta")
    freeze(model, method)
    return model


@pytest.mark.parametrize("how", ["assigned", "emptied"])
def test_the_weights_of_another_selection_are_refused_after_the_meta_device(how: str) -> None:
    plain, model = lively_gpt(), on_meta()
    if how == "emptied":
        model.to_empty(device="cpu")
    with pytest.raises(MethodError, match="not that selection"):
        model.load_state_dict(plain.state_dict(), assign=how == "assigned")


@pytest.mark.parametrize("how", ["assigned", "emptied", "compact"])
def test_a_model_from_the_meta_device_is_the_one_it_was_loaded_from(how: str) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        with case(dtype):
            source, model = lively_gpt().to(dtype), on_meta()
            freeze(source, "oelm_axes")
            tokens = torch.arange(8).reshape(1, 8)
            with compact_states() if how == "compact" else nullcontext():
                if how == "emptied":
                    model.to_empty(device="cpu").to(dtype)
                model.load_state_dict(source.state_dict(), assign=how != "emptied")
            for path, selection in selections(model).items():
                assert torch.equal(selection.index, selections(source)[path].index)
                assert selection.like.device.type == "cpu"
                assert how == "compact" or selection.like.dtype is dtype
            assert torch.equal(model(tokens), source(tokens))
            if how != "compact":
                states = [{key: digest(each) for key, each in of.state_dict().items()} for of in (model, source)]
                assert states[0] == states[1]


@each_method
def test_slices_on_the_meta_device_thaw(method: str) -> None:
    model = on_meta(method)
    thaw(model)
    assert not selections(model)
    assert all(parameter.is_meta and parameter.requires_grad for parameter in model.parameters())


def test_the_pieces_that_are_picked_are_part_of_the_proof() -> None:
    model = lively_gpt()
    freeze(model, "oelm_axes")
    selection = next(iter(selections(model).values()))
    selection.runs = ((1, selection.out_features - 1), (0, 1))
    with pytest.raises(FrozenMovedError, match="has moved"):
        assert_unmoved(model)
