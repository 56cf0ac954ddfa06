"""Sites are found by class, in our GPT and in a stranger's model with biases and grouped keys."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from oelm.errors import SiteError
from oelm.method import sites as site_module
from oelm.method.apply import freeze, thaw
from oelm.method.audit import assert_unmoved, audit
from oelm.method.frames import orthonormality_error
from oelm.method.method import PRESETS, Method
from oelm.method.sites import SitePaths, attention_sites, register_sites
from oelm.models.gpt import build_gpt
from tests.cases import case
from tests.conftest import tiny_gpt_config

MODEL_DIM, NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 16, 4, 2, 3
FRESH = [name for name, preset in PRESETS.items() if preset.freeze and not preset.keeps_weights]
# Those that change the basis take the biases along: test_architectures.
KEPT = [name for name, preset in PRESETS.items() if preset.freeze and preset.keeps_weights and not preset.balances]


def roomy(method: Method) -> Method:
    """Return the method with room for a correction in projections as small as these."""
    return method.model_copy(update={"correction": 0.25}) if method.correction else method


class GroupedAttention(nn.Module):
    """An attention as a user would bring it: biases, other names, two query heads to a key head."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.ModuleDict(
            {
                "query": nn.Linear(MODEL_DIM, NUM_HEADS * HEAD_DIM),
                "key": nn.Linear(MODEL_DIM, NUM_KV_HEADS * HEAD_DIM),
                "value": nn.Linear(MODEL_DIM, NUM_KV_HEADS * HEAD_DIM),
            }
        )
        self.back = nn.Linear(NUM_HEADS * HEAD_DIM, MODEL_DIM)

    def forward(self, x: Tensor, memory: Tensor | None = None) -> Tensor:
        memory = x if memory is None else memory
        q = self.inner["query"](x).unflatten(-1, (NUM_HEADS, HEAD_DIM)).transpose(-2, -3)
        k, v = (self.inner[name](memory).unflatten(-1, (NUM_KV_HEADS, HEAD_DIM)).transpose(-2, -3) for name in ("key", "value"))
        out: Tensor = self.back(F.scaled_dot_product_attention(q, k, v, enable_gqa=True).transpose(-2, -3).flatten(-2))
        return out


class GroupedBlock(nn.Module):
    def __init__(self, *, crossed: bool) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(MODEL_DIM)
        self.attend = GroupedAttention()
        self.cross = GroupedAttention() if crossed else None
        self.mlp = nn.Linear(MODEL_DIM, MODEL_DIM)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attend(self.norm(x))
        if self.cross is not None:
            x = x + self.cross(self.norm(x), x.flip(-2))
        out: Tensor = x + self.mlp(x).relu()
        return out


class StrangersModel(nn.Module):
    def __init__(self, *, num_layers: int = 2, crossed: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, MODEL_DIM)
        self.layers = nn.ModuleList(GroupedBlock(crossed=crossed) for _ in range(num_layers))
        self.read_out = nn.Linear(MODEL_DIM, 1)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        out: Tensor = self.read_out(x).mean()
        return out


@pytest.fixture
def _registered() -> Iterator[None]:
    path = f"{GroupedAttention.__module__}.{GroupedAttention.__qualname__}"

    @register_sites(path)
    def _(module: nn.Module) -> SitePaths:
        return SitePaths(q="inner.query", k="inner.key", num_heads=NUM_HEADS, num_kv_heads=NUM_KV_HEADS)

    yield
    site_module.ADAPTERS.pop(path)


registered = pytest.mark.usefixtures("_registered")


@pytest.fixture
def model() -> StrangersModel:
    torch.manual_seed(0)
    return StrangersModel()


def train(model: nn.Module, *, steps: int = 3) -> None:
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, weight_decay=0.1)
    for step in range(steps):
        optimizer.zero_grad()
        model(torch.arange(8).roll(step)).backward()
        optimizer.step()


def test_every_layer_of_our_gpt_is_a_site() -> None:
    found = attention_sites(build_gpt(tiny_gpt_config(), seed=0))
    assert [(s.name, s.layer) for s in found] == [(f"blocks.{n}.attention", n) for n in range(3)]


def test_a_projection_is_seen_by_heads_as_the_attention_sees_it() -> None:
    model = build_gpt(tiny_gpt_config(), seed=0)
    weight_HKD = attention_sites(model)[1].k.weight_HKD()
    weight = model.get_parameter("blocks.1.attention.k.weight")
    assert torch.equal(weight_HKD[2, 5], weight[2 * 8 + 5])


def test_a_projection_names_its_parameters_as_the_model_does() -> None:
    model = build_gpt(tiny_gpt_config(), seed=0)
    for site in attention_sites(model):
        for _, projection in site.projections():
            for name, parameter in projection.parameters():
                assert model.get_parameter(name) is parameter


def test_a_model_of_no_known_kind_is_refused_with_the_known_ones_and_the_way_out() -> None:
    with pytest.raises(SiteError) as refusal:
        attention_sites(StrangersModel())
    said = str(refusal.value)
    assert said.startswith("no attention found in StrangersModel:")
    assert all(known in said for known in ("our GPT", "BERT", "GPT-NeoX/Pythia", "T5", "torch.nn.MultiheadAttention"))
    assert "@oelm.register_sites(MyAttention)" in said and "oelm.SitePaths(q='to_q'" in said


@registered
def test_a_registered_class_is_found(model: StrangersModel) -> None:
    found = attention_sites(model)
    assert [(s.name, s.layer, s.q.name, s.k.name) for s in found] == [
        (f"layers.{n}.attend", n, f"layers.{n}.attend.inner.query", f"layers.{n}.attend.inner.key") for n in range(2)
    ]


@registered
def test_a_registered_class_is_listed_among_the_known() -> None:
    with pytest.raises(SiteError, match="GroupedAttention"):
        attention_sites(nn.Linear(2, 2))


@registered
def test_an_attention_that_is_the_whole_model_is_found() -> None:
    alone = GroupedAttention()
    assert freeze(alone, "oelm_freeze") == ("inner.query.weight", "inner.query.bias", "inner.key.weight", "inner.key.bias")


@registered
def test_grouped_keys_get_a_frame_for_each_of_their_own_heads(model: StrangersModel) -> None:
    freeze(model, "oelm_freeze")
    # Row-orthonormal by heads of three; 2^-22 as in test_frames: rounding to float32 gives 2^-23, the rest is slack.
    for site in attention_sites(model):
        assert (site.q.num_heads, site.k.num_heads) == (NUM_HEADS, NUM_KV_HEADS)
        assert site.k.weight_HKD().shape == (NUM_KV_HEADS, HEAD_DIM, MODEL_DIM)
        assert max(orthonormality_error(p.weight_HKD()) for _, p in site.projections()) <= 2.0**-22


@registered
def test_biases_are_frozen_with_their_projection(model: StrangersModel) -> None:
    names = [f"layers.{n}.attend.inner.{m}.{p}" for n in range(2) for m in ("query", "key") for p in ("weight", "bias")]
    assert list(freeze(model, "oelm_freeze")) == names
    assert [name for name, parameter in model.named_parameters() if not parameter.requires_grad] == names


@registered
def test_biases_are_zero_where_queries_and_keys_start_fresh_and_nowhere_else(model: StrangersModel) -> None:
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    for preset in FRESH:
        frozen = copy.deepcopy(model)
        freeze(frozen, roomy(PRESETS[preset]))
        for site in attention_sites(frozen):
            for _, projection in site.projections():
                with case(preset, projection.name):
                    saved_bias = frozen.state_dict()[f"{projection.name}.bias"]
                    concerned = PRESETS[preset].selects(site.layer, 2)
                    kept = before[f"{projection.name}.bias"]
                    assert torch.equal(saved_bias, torch.zeros_like(kept) if concerned else kept)


@registered
def test_biases_are_kept_where_queries_and_keys_come_from_weights(model: StrangersModel) -> None:
    before = {name: parameter.clone() for name, parameter in model.named_parameters() if name.endswith("bias")}
    for preset in KEPT:
        with case(preset):
            frozen = copy.deepcopy(model)
            freeze(frozen, roomy(PRESETS[preset]))
            assert all(torch.equal(frozen.get_parameter(name), value) for name, value in before.items())


@registered
def test_a_strangers_frozen_model_trains_and_what_is_frozen_stays(model: StrangersModel) -> None:
    names = freeze(model, "oelm_freeze")
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    train(model)
    assert_unmoved(model)
    assert {n for n, p in model.named_parameters() if torch.equal(p, before[n])} == set(names)


@registered
def test_audit_counts_a_strangers_parameters_by_role(model: StrangersModel) -> None:
    freeze(model, "oelm_freeze")
    counts = audit(model)
    query, key = NUM_HEADS * HEAD_DIM * (MODEL_DIM + 1), NUM_KV_HEADS * HEAD_DIM * (MODEL_DIM + 1)
    assert counts.by_role == {
        "embedding": {"trainable": 11 * MODEL_DIM, "frozen": 0},
        "norm": {"trainable": 2 * MODEL_DIM, "frozen": 0},
        "query": {"trainable": 0, "frozen": 2 * query},
        "key": {"trainable": 0, "frozen": 2 * key},
        "value_output": {"trainable": 2 * (key + MODEL_DIM * (NUM_HEADS * HEAD_DIM + 1)), "frozen": 0},
        "feed_forward": {"trainable": 2 * MODEL_DIM * (MODEL_DIM + 1), "frozen": 0},
        "other": {"trainable": MODEL_DIM + 1, "frozen": 0},
    }


@registered
def test_a_strangers_thawed_model_learns_its_queries_and_keys(model: StrangersModel) -> None:
    names = freeze(model, "oelm_freeze")
    assert thaw(model) == names
    before = {name: model.get_parameter(name).clone() for name in names}
    train(model)
    # A key's bias shifts all of a query's logits alike, so softmax leaves it without a gradient; the rest must move.
    assert {n for n in names if torch.equal(model.get_parameter(n), before[n])} <= {n for n in names if n.endswith("key.bias")}


@registered
def test_two_attentions_of_one_layer_get_frames_of_their_own() -> None:
    model = StrangersModel(num_layers=1, crossed=True)
    freeze(model, "oelm_freeze")
    first, second = attention_sites(model)
    assert not torch.equal(first.q.weight, second.q.weight)


def test_layers_are_counted_right_inside_a_numbered_wrapper() -> None:
    """sentence-transformers keeps its model so: everything is under '0.'."""
    wrapped = nn.Sequential(build_gpt(tiny_gpt_config(), seed=0))
    assert [site.layer for site in attention_sites(wrapped)] == [0, 1, 2]


class Grouped(nn.Module):
    """Two key heads for four query heads."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k = nn.Linear(32, 32), nn.Linear(32, 16)


@pytest.mark.parametrize("method", ["oelm_freeze", "oelm_axes"])
def test_a_forgotten_number_of_key_heads_is_refused(method: str) -> None:
    register_sites(Grouped)(lambda module: SitePaths(q="q", k="k", num_heads=4))
    with pytest.raises(SiteError, match=r"a query head has 8 rows .* a key head 4 .* num_kv_heads"):
        freeze(Grouped(), method)
    register_sites(Grouped)(lambda module: SitePaths(q="q", k="k", num_heads=4, num_kv_heads=2))
    freeze(Grouped(), method)


def test_key_heads_that_do_not_divide_the_query_heads_are_refused() -> None:
    cases: list[int] = [3, 8]
    for key_heads in cases:
        with case(key_heads):
            with pytest.raises(SiteError, match=f"4 query heads cannot share {key_heads} key heads"):
                SitePaths(q="q", k="k", num_heads=4, num_kv_heads=key_heads)


def test_a_number_of_heads_that_is_none_is_refused() -> None:
    cases: list[object] = [4.0, "4", None, True]
    for number in cases:
        with case(number):
            with pytest.raises(SiteError, match="as a whole number"):
                SitePaths(q="q", k="k", num_heads=number)  # type: ignore[arg-type]


def test_what_is_registered_must_return_paths() -> None:
    register_sites(Grouped)(lambda module: {"q": "q"})  # type: ignore[arg-type, return-value]
    with pytest.raises(SiteError, match=r"gave \{'q': 'q'\}; it must return an oelm\.SitePaths"):
        attention_sites(Grouped())


def test_what_is_registered_and_raises_is_named_with_its_error() -> None:
    cases: list[Any] = [lambda m: m.nowhere, lambda m: 1 / 0, lambda: None]
    for call in cases:
        with case(call):
            register_sites(Grouped)(call)
            told = r"what is registered for .*Grouped raised \w+Error: .*must return an oelm\.SitePaths"
            with pytest.raises(SiteError, match=told) as raised:
                attention_sites(Grouped())
            assert raised.value.__cause__ is not None


def test_what_is_no_class_is_not_registered() -> None:
    cases: list[object] = [5, None, nn.Linear(2, 2)]
    for given in cases:
        with case(given):
            with pytest.raises(SiteError, match="register_sites takes a class"):
                register_sites(given)  # type: ignore[arg-type]


def test_what_cannot_be_called_is_not_registered() -> None:
    with pytest.raises(SiteError, match="None cannot be called"):
        register_sites(Grouped)(None)  # type: ignore[arg-type]


def test_one_layer_for_queries_and_keys_must_be_called_fused() -> None:
    with pytest.raises(SiteError, match="q and k are both 'qk'; where one layer holds both, say fused='qk'"):
        SitePaths(q="qk", k="qk", num_heads=4)
