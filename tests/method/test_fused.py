"""Fused weights: their layouts, what splitting saves, and what it must not lose."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from oelm.errors import FrozenMovedError, MethodError, SiteError
from oelm.method import sites as site_module
from oelm.method.apply import adopt_record, fold, freeze, restore, thaw
from oelm.method.audit import assert_unmoved, audit, digest, record_of
from oelm.method.fused import Layout, SplitProjection, WeightOrder
from oelm.method.layers import class_path
from oelm.method.method import Gain, Method
from oelm.method.sites import SitePaths, attention_sites, register_sites
from tests.cases import case
from tests.method.tiny_models import BY_NAME, PackedTorch, loss, outputs, tiny_inputs, tiny_model

GAINED = ("gpt2", "gpt2_cross", "gpt_neox")
ROUNDING = 1e-5


def digests(model: nn.Module) -> dict[str, str]:
    return {name: digest(parameter) for name, parameter in model.named_parameters()}


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    order: WeightOrder = draw(st.sampled_from(["rows", "columns", "per_head_rows"]))
    parts = draw(st.sampled_from(["qkv", "kv", "qk", "q"]))
    num_heads, kv_heads = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    same = order == "per_head_rows"
    return Layout(tuple((part, num_heads if part == "q" or same else kv_heads) for part in parts), order)


@settings(deadline=None, derandomize=True, max_examples=40)
@given(layout=layouts(), head_dim=st.integers(1, 4), model_dim=st.integers(1, 5))
def test_parts_taken_and_fused_again_are_the_weight_there_was(layout: Layout, head_dim: int, model_dim: int) -> None:
    rows = layout.total_heads * head_dim
    shape = (model_dim, rows) if layout.order == "columns" else (rows, model_dim)
    for tensor in (torch.randn(shape), torch.randn(rows)):
        parts = [layout.take(tensor, part).flatten(0, 1) for part in layout.parts]
        assert torch.equal(layout.fuse(parts), tensor)


@settings(deadline=None, derandomize=True, max_examples=40)
@given(layout=layouts(), head_dim=st.integers(1, 4))
def test_outputs_of_the_parts_join_to_the_output_of_the_whole(layout: Layout, head_dim: int) -> None:
    weight = torch.randn(layout.total_heads * head_dim, 3, dtype=torch.float64)
    x = torch.randn(2, 5, 3, dtype=torch.float64)
    fused = layout.rows(weight).contiguous()
    parts = [F.linear(x, layout.take(fused, part).flatten(0, 1)) for part in layout.parts]
    # Sums of three products in float64.
    assert torch.allclose(layout.join(parts, dim=2), F.linear(x, weight), rtol=0, atol=1e-13)


def test_gpt_neox_keeps_the_parts_of_a_head_together() -> None:
    model = tiny_model(BY_NAME["gpt_neox"])
    weight = model.get_parameter("gpt_neox.layers.1.attention.query_key_value.weight")
    site = attention_sites(model)[1]
    # Head 2 of heads of 8: its q, k and v rows begin at 2 x 24.
    assert torch.equal(site.q.weight_HKD()[2], weight[48:56]) and torch.equal(site.k.weight_HKD()[2], weight[56:64])


def test_a_fresh_start_without_freezing_needs_no_split() -> None:
    model, plain = tiny_model(BY_NAME["gpt2"]), tiny_model(BY_NAME["gpt2"])
    assert freeze(model, Method(init="orthogonal")) == ()
    assert [type(module) for module in model.modules()] == [type(module) for module in plain.modules()]
    for site, before in zip(attention_sites(model), attention_sites(plain), strict=True):
        assert not torch.equal(site.q.weight_HKD(), before.q.weight_HKD())
        assert site.q.bias is not None and before.q.bias is not None
        assert torch.equal(site.q.bias[64:], before.q.bias[64:]) and not bool(site.q.bias[:64].any())
        assert torch.equal(site.q.weight[:, 64:], before.q.weight[:, 64:])


def test_frozen_parts_are_named_after_the_fused_layer() -> None:
    names = freeze(tiny_model(BY_NAME["gpt2"]), Method(freeze=("k",), layers=(1,)))
    assert names == ("transformer.h.1.attn.c_attn.k.weight", "transformer.h.1.attn.c_attn.k.bias")


def test_only_the_layers_that_freeze_are_split() -> None:
    model = tiny_model(BY_NAME["gpt2"])
    freeze(model, Method(init="orthogonal", freeze=("q",), layers="first 1"))
    assert [path for path, module in model.named_modules() if isinstance(module, SplitProjection)] == [
        "transformer.h.0.attn.c_attn"
    ]


def test_unsplit_weights_have_a_role_of_their_own() -> None:
    assert audit(tiny_model(BY_NAME["gpt2"])).by_role["query_key_value"] == {"trainable": 2 * 3 * 32 * 33, "frozen": 0}


def flops(model: nn.Module, name: str) -> int:
    with FlopCounterMode(display=False) as counter:
        loss(model, tiny_inputs(BY_NAME[name])).backward()
    return counter.get_total_flops()


def test_the_gradient_of_a_frozen_part_is_never_computed() -> None:
    cases: list[tuple[str, int]] = [("gpt2", 12), ("gpt_neox", 12), ("bert", 12)]
    for name, tokens in cases:
        with case(name, tokens):
            model = tiny_model(BY_NAME[name]).train()
            before = flops(model, name)
            freeze(model, "pretrained_freeze")
            # Two layers, Q and K: a product of tokens x 32 x 32, two operations each.
            assert before - flops(model, name) == 2 * 2 * 2 * tokens * 32 * 32


def test_multi_head_attention_computes_no_gradient_of_a_frozen_part() -> None:
    model = tiny_model(BY_NAME["torch"]).train()
    before = flops(model, "torch")
    freeze(model, "pretrained_freeze")
    assert before - flops(model, "torch") == 3 * 2 * 2 * 12 * 32 * 32


def test_what_learns_gets_the_gradient_it_would_have_had() -> None:
    cases: list[str] = ["gpt2", "gpt2_cross", "gpt_neox", "torch"]
    for name in cases:
        with case(name):
            tiny = BY_NAME[name]
            plain, model = tiny_model(tiny), tiny_model(tiny)
            freeze(model, Method(freeze=("k",)))
            for each in (plain, model):
                loss(each, tiny_inputs(tiny)).backward()
            # Put together as weights are: the parts' gradients lie where the fused gradient has them, K's is none.
            for parameter in model.parameters():
                parameter.data = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            expected = {parameter_name: parameter.grad for parameter_name, parameter in plain.named_parameters()}
            for site in attention_sites(plain):
                for slot, held in ((site.k.weight_slot, site.k.weight), (site.k.bias_slot, site.k.bias)):
                    assert held is not None and held.grad is not None
                    slot.layout.take(held.grad, "k").zero_()
            for saved_name, gradient in model.state_dict().items():
                if saved_name in expected:
                    assert torch.allclose(gradient, expected[saved_name], rtol=1e-4, atol=1e-6), saved_name  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["head", "matrix"])
@pytest.mark.parametrize("name", GAINED)
def test_a_gain_learns_on_a_split_query_and_folds_into_the_fused_weight(name: str, kind: Gain) -> None:
    tiny = BY_NAME[name]
    plain, model = tiny_model(tiny), tiny_model(tiny)
    freeze(plain, "pretrained_freeze")
    freeze(model, Method(freeze=("q", "k"), gain=kind))
    inputs = tiny_inputs(tiny)
    assert torch.allclose(outputs(model, inputs), outputs(plain, inputs), rtol=0, atol=ROUNDING)
    gains = [parameter for parameter_name, parameter in model.named_parameters() if parameter_name.endswith(".gain")]
    assert len(gains) == tiny.num_sites
    for gain in gains:
        gain.data += torch.randn_like(gain) / 4
    expected = outputs(model, inputs)
    assert not torch.allclose(expected, outputs(plain, inputs), rtol=0, atol=1e-2)
    fold(model)
    assert_unmoved(model)
    assert list(model.state_dict()) == list(tiny_model(tiny).state_dict())
    assert torch.allclose(outputs(model, inputs), expected, rtol=0, atol=2e-5)
    thaw(model)
    assert torch.allclose(outputs(model, inputs), expected, rtol=0, atol=2e-5)


def test_a_gain_inside_torchs_own_attention_is_refused_and_nothing_changed() -> None:
    model = tiny_model(BY_NAME["torch"])
    before = digests(model)
    with pytest.raises(MethodError, match=r"gain 'head': encoder\.layers\.0\.self_attn is a torch\.nn\.MultiheadAttention"):
        freeze(model, Method(init="orthogonal", freeze=("q", "k"), gain="head"))
    assert digests(model) == before


def test_stored_weights_and_digests_are_adopted_by_another_frozen_model() -> None:
    model, other = tiny_model(BY_NAME["gpt2"]), tiny_model(BY_NAME["gpt2"], seed=1)
    freeze(model, "oelm_freeze", seed=3)
    freeze(other, "oelm_freeze", seed=4)
    record = record_of(model)
    assert record
    other.load_state_dict(model.state_dict())
    adopt_record(other, record)
    assert_unmoved(other)
    other.get_parameter("transformer.h.0.attn.c_attn.q.weight").data[0, 0] += 1
    with pytest.raises(FrozenMovedError, match=r"h\.0\.attn\.c_attn\.q\.weight has moved"):
        assert_unmoved(other)


@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
def test_torchs_fast_paths_for_inference_still_hold(padded: bool) -> None:
    plain = PackedTorch().eval()
    model = copy.deepcopy(plain)
    freeze(model, "pretrained_freeze")
    tokens, padding = tiny_inputs(BY_NAME["torch"])["input_ids"], torch.zeros(2, 6, dtype=torch.bool)
    padding[1, 4:] = True
    with torch.no_grad():
        first, second = (each.encoder.layers[0].self_attn for each in (plain, model))
        x = plain.embedding(tokens)
        assert second._qkv_same_embed_dim and torch.equal(second.in_proj_weight, first.in_proj_weight)
        given = {"src_key_padding_mask": padding} if padded else {}
        with pytest.warns(UserWarning, match="nested tensors") if padded else _no_warning():
            expected = plain.encoder(x, **given)
        assert torch.allclose(model.encoder(x, **given), expected, rtol=0, atol=ROUNDING)
    assert not second._qkv_same_embed_dim


class _no_warning:
    def __enter__(self) -> None: ...

    def __exit__(self, *others: Any) -> None: ...


def test_every_kind_of_torchs_attention_splits_and_merges() -> None:
    cases: list[dict[str, Any]] = [
        {"bias": False},
        {"add_bias_kv": True},
        {"batch_first": True, "add_zero_attn": True},
        {"kdim": 24, "vdim": 24, "bias": False},
    ]
    for options in cases:
        with case(options):
            torch.manual_seed(0)
            plain = nn.MultiheadAttention(32, 4, **options)
            model = copy.deepcopy(plain)
            width = options.get("kdim", 32)
            x, memory = torch.randn(5, 3, 32), torch.randn(5, 3, width)
            freeze(model, "pretrained_freeze")
            assert torch.allclose(model(x, memory, memory)[0], plain(x, memory, memory)[0], rtol=0, atol=ROUNDING)
            assert set(model.state_dict()) == set(plain.state_dict())
            model.load_state_dict(plain.state_dict())
            thaw(model)
            assert type(model) is nn.MultiheadAttention
            assert digests(model) == digests(plain) and list(digests(model)) == list(digests(plain))


class CountedAttention(nn.MultiheadAttention):
    """An attention derived from torch's, with a forward of its own."""

    calls = 0

    def forward(self, *given: Any, **named: Any) -> Any:
        self.calls += 1
        return super().forward(*given, **named)


def test_a_class_derived_from_torchs_attention_keeps_its_own_forward() -> None:
    model = CountedAttention(32, 4)
    freeze(model, "oelm_freeze")
    x = torch.randn(5, 3, 32)
    model(x, x, x)
    assert model.calls == 1 and isinstance(model, CountedAttention)
    thaw(model)
    assert type(model) is CountedAttention


class FusedAttention(nn.Module):
    """A user's attention: one layer for all, grouped keys and values, heads of 5."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(16, (4 + 2 + 2) * 5)
        self.back = nn.Linear(20, 16)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).split([20, 10, 10], dim=-1)
        q, k, v = (each.unflatten(-1, (-1, 5)).transpose(-2, -3) for each in (q, k, v))
        out: Tensor = self.back(F.scaled_dot_product_attention(q, k, v, enable_gqa=True).transpose(-2, -3).flatten(-2))
        return out


@pytest.fixture
def _registered() -> Iterator[None]:
    @register_sites(FusedAttention)
    def _(module: nn.Module) -> SitePaths:
        return SitePaths(fused="qkv", num_heads=4, num_kv_heads=2)

    yield
    site_module.ADAPTERS.pop(class_path(FusedAttention))


@pytest.mark.usefixtures("_registered")
def test_a_users_own_fused_attention_needs_one_line() -> None:
    torch.manual_seed(0)
    model = nn.ModuleList([FusedAttention(), FusedAttention()])
    plain, x = copy.deepcopy(model), torch.randn(3, 16)
    assert len(freeze(model, "pretrained_freeze")) == 8
    assert audit(model).frozen == 2 * (20 + 10) * 17
    assert torch.allclose(model[0](x), plain[0](x), rtol=0, atol=ROUNDING)
    assert digests(nn.ModuleList(plain)) == {name: digest(value) for name, value in model.state_dict().items()}


@pytest.mark.usefixtures("_registered")
def test_fused_weights_that_two_layers_share_are_refused() -> None:
    model = nn.ModuleList([FusedAttention(), FusedAttention()])
    model[1].get_submodule("qkv").register_parameter("weight", model[0].get_parameter("qkv.weight"))
    with pytest.raises(MethodError, match=r"0\.qkv\.weight and 1\.qkv\.weight are one tensor"):
        freeze(model, "oelm_freeze")


@pytest.mark.usefixtures("_registered")
def test_an_attention_used_in_two_places_is_split_once() -> None:
    attention = FusedAttention()
    model = nn.Sequential(attention, attention)
    x = torch.randn(3, 16)
    before = model(x)
    freeze(model, "pretrained_freeze")
    assert torch.allclose(model(x), before, rtol=0, atol=ROUNDING)


@pytest.mark.usefixtures("_registered")
def test_what_another_library_wrapped_is_refused_with_the_order_to_do_it_in() -> None:
    model = FusedAttention()
    nn.utils.parametrizations.weight_norm(model.qkv)
    with pytest.raises(SiteError, match=r"qkv .* does not hold the parameter 'weight' itself.*call oelm\.freeze before"):
        freeze(model, "oelm_freeze")


@pytest.mark.usefixtures("_registered")
def test_weights_that_are_not_floating_point_are_refused() -> None:
    model = FusedAttention()
    model.qkv.weight = nn.Parameter(torch.zeros(40, 16, dtype=torch.int8), requires_grad=False)
    with pytest.raises(MethodError, match=r"qkv\.q holds torch\.int8 numbers"):
        freeze(model, "oelm_freeze")


def test_a_site_that_says_too_little_or_too_much_is_refused() -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"q": "a", "k": "b"}, "num_heads is 0"),
        ({"q": "a", "num_heads": 2}, "say once where k is"),
        ({"q": "a", "k": "b", "fused": "c", "num_heads": 2}, "say once where q is"),
        ({"num_heads": 2}, "say once where q is"),
        ({"fused": "c", "layout": "diagonal", "num_heads": 2}, "layout is 'diagonal'"),
        ({"fused": "c", "layout": "per_head_rows", "num_heads": 4, "num_kv_heads": 2}, "num_kv_heads must not differ"),
    ]
    for paths, said in cases:
        with case(paths, said):
            with pytest.raises(SiteError, match=said):
                SitePaths(**paths)


def always(paths: SitePaths) -> Callable[[nn.Module], SitePaths]:
    return lambda module: paths


def test_a_site_that_does_not_fit_is_refused_by_what_is_there() -> None:
    cases: list[tuple[SitePaths, str]] = [
        (SitePaths(fused="kvq", num_heads=4), "has no layer 'kvq', where its SitePaths puts q; it has: qkv, back"),
        (SitePaths(fused="qkv", num_heads=7), r"shape \(40, 16\) does not hold 21 heads of q and k and v"),
    ]
    for paths, said in cases:
        with case(paths, said):
            register_sites(FusedAttention)(always(paths))
            try:
                with pytest.raises(SiteError, match=said):
                    attention_sites(FusedAttention())
            finally:
                site_module.ADAPTERS.pop(class_path(FusedAttention))


def test_restoring_leaves_what_was_trained_beside_queries_and_keys() -> None:
    tiny = BY_NAME["gpt2"]
    plain, model = tiny_model(tiny), tiny_model(tiny)
    freeze(model, "oelm_freeze", keep_original=True)
    model.get_parameter("transformer.h.0.attn.c_attn.v.weight").data += 1
    restored = restore(nn.Sequential(model))
    assert restored == tuple(f"0.transformer.h.{n}.attn.c_attn.{kind}" for n in range(2) for kind in ("weight", "bias"))
    name = "transformer.h.0.attn.c_attn.weight"
    now, before = model.get_parameter(name), plain.get_parameter(name)
    assert torch.equal(now[:, :64], before[:, :64]) and torch.equal(now[:, 64:], before[:, 64:] + 1)
    with pytest.raises(MethodError, match="nothing was kept"):
        restore(model)


def test_what_was_kept_survives_a_thaw_and_training() -> None:
    tiny = BY_NAME["bert"]
    plain, model = tiny_model(tiny), tiny_model(tiny)
    freeze(model, "oelm_random", keep_original=True)
    thaw(model)
    for parameter in model.parameters():
        parameter.data += 1
    names = restore(model)
    assert len(names) == 8
    assert all(torch.equal(model.get_parameter(name), plain.get_parameter(name)) for name in names)


def value_names(model: nn.Module) -> set[str]:
    return {name for name, _ in model.named_parameters() if ".v." in name or ".v_proj" in name}


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("name", ["gpt2", "gpt_neox", "torch"])
def test_values_that_the_user_froze_do_not_learn_after_a_thaw(name: str, when: str) -> None:
    model, inputs = tiny_model(BY_NAME[name]), tiny_inputs(BY_NAME[name])
    names = model.state_dict().keys()
    fused = ("c_attn.", "query_key_value.", "in_proj_")
    if when == "before":
        for _, parameter in (entry for entry in model.named_parameters() if any(word in entry[0] for word in fused)):
            parameter.requires_grad_(False)
    freeze(model, "oelm_freeze")
    values = value_names(model)
    if when == "after":
        for value in values:
            model.get_parameter(value).requires_grad_(False)
    thawed = thaw(model)
    before = digests(model)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, weight_decay=0.1)
    loss(model, inputs).backward()
    optimizer.step()
    moved = {name for name, held in digests(model).items() if held != before[name]}
    assert values and values <= before.keys() - moved
    assert {name for name in thawed if name.endswith("weight")} <= moved
    assert model.state_dict().keys() == names
