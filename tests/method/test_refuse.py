"""What cannot be frozen is refused by an error of ours, and the model is then as it was; what is sharded is proven unmoved."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.utils import parametrizations, prune

import oelm
from oelm.errors import FrozenMovedError, MethodError, OelmError, SiteError
from oelm.method import sites as site_module
from oelm.method.audit import digest, record_of
from oelm.method.frames import start_of, whole
from oelm.method.sites import attention_sites
from oelm.models.gpt import build_gpt
from tests.cases import case
from tests.conftest import tiny_gpt_config
from tests.method.tiny_models import ARCHITECTURES, PackedTorch, outputs, tiny_inputs, tiny_model

# torch.ao is about to move; weight_norm has a successor; gloo has no GPU.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
NAMES = ["our_gpt", "bert", "gpt2", "gpt_neox", "t5", "qwen3", "torch"]
KINDS = {tiny.name: tiny for tiny in ARCHITECTURES}
CORRECTED = oelm.Method(init="orthogonal", freeze=("q", "k"), correction=0.25)
SLICED = oelm.Method(init="axes", freeze=("q", "k"), correction=0.25)
every = pytest.mark.parametrize("name", NAMES)


def built(name: str) -> nn.Module:
    return tiny_model(KINDS[name])


def look(model: nn.Module) -> dict[str, Any]:
    """Everything about a model that a refused call must leave alone."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    return {
        "bytes": {name: digest(parameter) for name, parameter in parameters.items()},
        "learns": {name: parameter.requires_grad for name, parameter in parameters.items()},
        "classes": [(path, type(module)) for path, module in model.named_modules()],
        "ids": {name: id(parameter) for name, parameter in parameters.items()},
        "record": record_of(model),
    }


def refused(
    model: nn.Module, match: str, *, method: Any = "oelm_freeze", kind: type[OelmError] = OelmError, **more: Any
) -> None:
    before = look(model)
    with pytest.raises(kind, match=match):
        oelm.freeze(model, method, **more)
    assert look(model) == before


def last_key(model: nn.Module) -> tuple[nn.Module, str]:
    """The layer that holds the keys of the last attention, and the name of their weight in it."""
    projection = attention_sites(model)[-1].k
    return projection.module, projection.weight_slot.parameter


WRAPPED: dict[str, Callable[[nn.Module, str], Any]] = {
    "weight_norm": parametrizations.weight_norm,
    "orthogonal": parametrizations.orthogonal,
    "spectral_norm": parametrizations.spectral_norm,
    "old weight_norm": nn.utils.weight_norm,
    "pruned": lambda module, name: prune.l1_unstructured(module, name, 0.5),
}


@every
def test_a_parametrized_weight_is_refused(name: str) -> None:
    # Every wrapper where maps are apart and where they are fused, and one of them elsewhere.
    for kind in WRAPPED if name in ("bert", "gpt2") else ["weight_norm"]:
        with case(kind):
            model = built(name)
            attention = attention_sites(model)[-1].name
            WRAPPED[kind](*last_key(model))
            refused(model, rf"^{attention}.*: it is parametrized, .* remove the parametrization", kind=SiteError)
            with pytest.raises(SiteError, match="it is parametrized"):
                oelm.audit(model)


def test_a_parametrized_bias_is_refused() -> None:
    model = built("bert")
    module, _ = last_key(model)
    parametrizations.weight_norm(module, "bias", dim=0)
    refused(
        model,
        r"layer\.1\.attention\.self\.key .* does not hold the parameter 'bias' itself: it is parametrized",
        kind=SiteError,
    )


def test_a_dynamically_quantized_model_is_refused() -> None:
    cases: list[str] = ["our_gpt", "bert", "gpt_neox", "t5", "qwen3"]
    for name in cases:
        with case(name):
            model = torch.ao.quantization.quantize_dynamic(built(name), {nn.Linear})
            before = [type(module) for module in model.modules()]
            with pytest.raises(
                SiteError, match=r"does not hold the parameter 'weight' itself: it is quantized; call oelm\.freeze before"
            ):
                oelm.freeze(model, "oelm_freeze")
            assert [type(module) for module in model.modules()] == before


def test_a_layer_without_weights_yet_is_refused() -> None:
    model: Any = build_gpt(tiny_gpt_config(), seed=0)
    model.blocks[1].attention.q = nn.LazyLinear(24)
    with pytest.raises(SiteError, match=r"attention\.q .* has no weights yet; run the model once"):
        oelm.freeze(model, "oelm_freeze")


def test_weights_made_under_inference_mode_are_refused() -> None:
    for name in NAMES:
        with case(name):
            with torch.inference_mode():
                model = built(name)
            refused(model, r"weight was made under torch\.inference_mode\(\) .* outside of it", kind=MethodError)


def test_one_weight_made_under_inference_mode_is_refused_before_another_is_written() -> None:
    model = built("bert")
    module, _ = last_key(model)
    with torch.inference_mode():
        module.weight = nn.Parameter(torch.randn(32, 32))
    refused(model, r"layer\.1\.attention\.self\.key\.weight was made under", kind=MethodError)


def test_freezing_under_inference_mode_is_refused() -> None:
    for name in NAMES:
        with case(name):
            model = built(name)
            with torch.inference_mode():
                refused(model, r"called under torch\.inference_mode\(\)", kind=MethodError)
            oelm.freeze(model, "oelm_freeze")


def tie_to_values(model: Any) -> None:
    model.blocks[1].attention.v.weight = model.blocks[1].attention.q.weight


def tie_across_layers(model: Any) -> None:
    model.blocks[2].attention.k.weight = model.blocks[0].attention.k.weight


def tie_to_keys(model: Any) -> None:
    model.blocks[0].attention.k.weight = model.blocks[0].attention.q.weight


def share_memory(model: Any) -> None:
    model.blocks[1].attention.v.weight.data = model.blocks[1].attention.q.weight.data


@pytest.mark.parametrize("tie", [tie_to_values, tie_across_layers, share_memory])
def test_a_weight_that_is_another_one_too_is_refused(tie: Callable[[Any], None]) -> None:
    model = build_gpt(tiny_gpt_config(), seed=0)
    tie(model)
    for method in ("oelm_freeze", "pretrained_freeze", CORRECTED):
        with case(method):
            told = r"attention\.[qk]\.weight and blocks\.\d\.attention\.[qkv]\.weight are one tensor"
            refused(model, told, method=method)


def test_queries_tied_to_their_keys_are_refused_unless_both_are_frozen_with_nothing_on_top() -> None:
    for method in (CORRECTED, oelm.Method(freeze=("q",)), oelm.Method(init="orthogonal")):
        model = build_gpt(tiny_gpt_config(), seed=0)
        tie_to_keys(model)
        refused(model, r"attention\.q\.weight and blocks\.0\.attention\.k\.weight are one tensor", method=method)
    for name in ("oelm_freeze", "pretrained_freeze"):
        model = build_gpt(tiny_gpt_config(), seed=0)
        tie_to_keys(model)
        oelm.freeze(model, name)
        oelm.assert_unmoved(model)


def test_a_bias_that_is_another_one_too_is_refused() -> None:
    model: Any = built("bert")
    layers = model.bert.encoder.layer
    layers[0].attention.self.value.bias = layers[1].attention.self.query.bias
    refused(model, r"layer\.1\.attention\.self\.query\.bias and .*layer\.0\.attention\.self\.value\.bias are one tensor")


def test_a_tie_between_weights_that_stay_is_no_obstacle() -> None:
    model: Any = build_gpt(tiny_gpt_config(), seed=0)
    model.blocks[2].attention.v.weight = model.blocks[0].attention.v.weight
    tie_across_layers(model)
    oelm.freeze(model, oelm.Method(freeze=("q",)))


def test_a_layer_that_is_used_twice_is_frozen_once() -> None:
    model: Any = build_gpt(tiny_gpt_config(), seed=0)
    model.blocks[2] = model.blocks[0]
    assert len(oelm.freeze(model, "oelm_freeze")) == 4
    oelm.assert_unmoved(model)


def test_a_seed_that_is_no_whole_number_is_refused() -> None:
    model = build_gpt(tiny_gpt_config(), seed=0)
    for seed in (None, "0", 1.5, 0.0, True):
        with case(repr(seed)):
            refused(model, rf"seed is {seed!r} \({type(seed).__name__}\)", kind=MethodError, seed=seed)


def test_whole_numbers_of_other_libraries_are_seeds() -> None:
    numpy = pytest.importorskip("numpy")
    models = [build_gpt(tiny_gpt_config(), seed=0) for _ in range(3)]
    for model, seed in zip(models, (3, numpy.int64(3), torch.tensor(3)), strict=True):
        oelm.freeze(model, "oelm_freeze", seed=seed)
    assert len({str(record_of(model)) for model in models}) == 1


NO_MODELS: list[Any] = ["gpt2", None, {}, nn.Linear]
CALLS: dict[str, Callable[[Any], object]] = {
    "freeze": lambda model: oelm.freeze(model, "oelm_freeze"),
    "hold": lambda model: oelm.hold(model, ()),
    "thaw": oelm.thaw,
    "restore": oelm.restore,
    "fold": oelm.fold,
    "cast": lambda model: oelm.cast(model, torch.bfloat16),
    "audit": oelm.audit,
    "assert_unmoved": oelm.assert_unmoved,
    "attention_sites": oelm.attention_sites,
}


def test_what_is_no_model_is_refused_by_name() -> None:
    for given in NO_MODELS:
        for name, call in CALLS.items():
            told = r"not a model \(torch\.nn\.Module\); build or load it first"
            with case(name, given), pytest.raises(MethodError, match=told):
                call(given)


def test_what_is_no_method_is_refused() -> None:
    model = build_gpt(tiny_gpt_config(), seed=0)
    for method in (None, 3, ["oelm_freeze"]):
        with case(repr(method)):
            refused(model, "give the name of a preset or an oelm.Method", kind=MethodError, method=method)


def test_nothing_is_proven_of_a_model_in_which_nothing_is_frozen() -> None:
    model = build_gpt(tiny_gpt_config(), seed=0)
    with pytest.raises(MethodError, match="nothing is frozen in this GPT, so nothing can be proven unmoved"):
        oelm.assert_unmoved(model)
    oelm.freeze(model, "oelm_freeze")
    oelm.assert_unmoved(model)
    # The record is on the model that was given: of a part of it nothing is known.
    with pytest.raises(MethodError, match="give the model that was frozen or one around it"):
        oelm.assert_unmoved(model.blocks[0])
    oelm.thaw(model)
    with pytest.raises(MethodError, match="nothing is frozen"):
        oelm.assert_unmoved(model)


@pytest.fixture
def mesh() -> Iterator[Any]:
    store: Any = torch._C._distributed_c10d.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def fully_shard(model: nn.Module, mesh: Any) -> None:
    from torch.distributed.fsdp import fully_shard

    fully_shard(model, mesh=mesh)


def methods_of(name: str) -> list[Any]:
    return ["oelm_freeze"] if name == "torch" else ["oelm_freeze", CORRECTED, SLICED]


@every
def test_a_sharded_model_is_refused_and_is_as_it_was(name: str, mesh: Any) -> None:
    model = built(name)
    fully_shard(model, mesh)
    for method in methods_of(name):
        refused(model, r"is sharded over processes .* Call oelm\.freeze before fully_shard", kind=MethodError, method=method)
    assert oelm.audit(model).frozen == 0


@every
def test_what_was_frozen_before_it_was_sharded_is_proven_unmoved_in_training(name: str, mesh: Any) -> None:
    for method in methods_of(name):
        model, inputs = built(name).train(), tiny_inputs(KINDS[name])
        oelm.freeze(model, method)
        errors = {each.name: each.orthonormality_error for each in oelm.audit(model).projections}
        fully_shard(model, mesh)
        oelm.assert_unmoved(model)
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, weight_decay=0.1)
        for _ in range(2):
            outputs(model, inputs).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            oelm.assert_unmoved(model)
        assert {each.name: each.orthonormality_error for each in oelm.audit(model).projections} == errors
        for call in (oelm.thaw, oelm.fold, lambda model: oelm.hold(model, ())):
            with pytest.raises(MethodError, match="is sharded over processes"):
                call(model)


@every
def test_a_shard_that_moved_is_found(name: str, mesh: Any) -> None:
    model = built(name)
    frozen = oelm.freeze(model, "oelm_freeze")
    fully_shard(model, mesh)
    shard: Any = model.get_parameter(frozen[-1])
    for is_gathered in (False, True):
        with case("gathered" if is_gathered else "sharded"):
            if is_gathered:
                # Whole copies for the forward pass, which are still there after it; the optimizer has the shards.
                with torch.no_grad():
                    outputs(model, tiny_inputs(KINDS[name]))
            first = shard.to_local().view(-1)[0].item()
            oelm.assert_unmoved(model)
            with torch.no_grad():
                shard.to_local().view(-1)[0] += 1e-3
            with pytest.raises(FrozenMovedError, match="has moved"):
                oelm.assert_unmoved(model)
            with torch.no_grad():
                shard.to_local().view(-1)[0] = first


@pytest.mark.parametrize("method", [CORRECTED, SLICED], ids=["frames", "slices"])
@pytest.mark.parametrize("name", ["bert", "gpt2"])
def test_what_learnt_on_top_of_a_sharded_model_is_saved(name: str, method: Any, mesh: Any, tmp_path: Path) -> None:
    model: Any = built(name)
    oelm.freeze(model, method)
    with torch.no_grad():
        for parameter in (p for key, p in model.named_parameters() if "correction" in key):
            parameter.add_(0.1)
    folded = copy.deepcopy(model)
    oelm.fold(folded)
    kind = type(model)
    fully_shard(model, mesh)
    gathered = {key: whole(tensor) for key, tensor in model.state_dict().items()}
    model.save_pretrained(tmp_path, state_dict=gathered)
    plain = kind.from_pretrained(tmp_path).eval()
    with torch.no_grad():
        assert torch.equal(outputs(plain, tiny_inputs(KINDS[name])), outputs(folded, tiny_inputs(KINDS[name])))


def test_a_parametrized_layer_of_another_kind_is_no_obstacle() -> None:
    model = PackedTorch()
    parametrizations.weight_norm(model.head)
    oelm.freeze(model, "oelm_freeze")
    oelm.assert_unmoved(model)


def share_across_layers(model: Any) -> None:
    model.blocks[1].attention.q = model.blocks[0].attention.q


def share_within(model: Any) -> None:
    model.blocks[0].attention.k = model.blocks[0].attention.q


@pytest.mark.parametrize("share", [share_across_layers, share_within])
def test_a_layer_that_is_another_one_too_is_refused(share: Callable[[Any], None]) -> None:
    model = build_gpt(tiny_gpt_config(), seed=0)
    share(model)
    told = r"attention\.q and blocks\.\d\.attention\.[qk] are one layer \(shared\)"
    for method in ("oelm_freeze", "oelm_axes", CORRECTED):
        with case(method):
            refused(model, told, method=method, kind=MethodError)


def test_a_fused_layer_of_two_attentions_is_refused() -> None:
    model: Any = built("gpt2")
    layers = model.transformer.h
    layers[1].attn.c_attn = layers[0].attn.c_attn
    refused(model, r"h\.0\.attn\.c_attn and .*h\.1\.attn\.c_attn are one layer", kind=MethodError)


def add_hook(module: nn.Module) -> None:
    module.register_forward_hook(lambda *_: None)


def add_pre_hook(module: nn.Module) -> None:
    module.register_forward_pre_hook(lambda *_: None)


def test_hooks_on_a_layer_that_is_replaced_are_refused() -> None:
    add_cases: list[Callable[[nn.Module], None]] = [add_hook, add_pre_hook]
    cases_1: list[tuple[str, str]] = [("our_gpt", "oelm_axes"), ("gpt2", "oelm_freeze")]
    for add in add_cases:
        for name, method in cases_1:
            with case(add, name, method):
                model = built(name)
                add(last_key(model)[0])
                refused(model, "has forward hooks, .* never be called again", method=method, kind=MethodError)


def test_hooks_on_a_layer_that_stays_are_called_as_before() -> None:
    model, calls = built("bert"), []
    last_key(model)[0].register_forward_hook(lambda *_: calls.append(1))
    oelm.freeze(model, "oelm_freeze")
    outputs(model, tiny_inputs(KINDS["bert"]))
    assert calls


def test_a_pruned_bias_is_refused() -> None:
    cases: list[str] = ["oelm_freeze", "oelm_axes"]
    for method in cases:
        with case(method):
            model = built("bert")
            prune.l1_unstructured(last_key(model)[0], "bias", 0.5)
            refused(model, r"does not hold the parameter 'bias' itself: it is parametrized", method=method, kind=SiteError)


def test_changing_a_model_under_inference_mode_is_refused() -> None:
    cases: list[str] = ["thaw", "fold", "restore", "hold"]
    for verb in cases:
        with case(verb):
            model = build_gpt(tiny_gpt_config(), seed=0)
            oelm.freeze(model, SLICED, keep_original=True)
            before = look(model)
            with torch.inference_mode(), pytest.raises(MethodError, match=rf"{verb} was called under torch.inference_mode"):
                getattr(oelm, verb)(model, *([[]] if verb == "hold" else []))
            assert look(model) == before


def test_names_to_hold_may_come_one_by_one() -> None:
    model = build_gpt(tiny_gpt_config(), seed=0)
    names = oelm.freeze(model, "oelm_freeze")
    oelm.hold(model, (name for name in names))
    record = record_of(model)
    assert record
    assert set(record) == set(names)
    oelm.assert_unmoved(model)


def test_what_is_no_list_of_names_is_not_held() -> None:
    model = build_gpt(tiny_gpt_config(), seed=0)
    oelm.freeze(model, "oelm_freeze")
    before = look(model)
    nothing: list[Any] = ["blocks.0.attention.q.weight", None, 3, [0, "x"], [None]]
    for names in nothing:
        with case(repr(names)), pytest.raises(MethodError, match="hold takes"):
            oelm.hold(model, names)
        assert look(model) == before


@pytest.mark.parametrize("verb", ["freeze", "thaw", "fold", "hold"])
def test_a_model_of_several_processes_is_refused_inside_another_wrapper_too(verb: str, mesh: Any) -> None:
    model = build_gpt(tiny_gpt_config(), seed=0)
    if verb != "freeze":
        oelm.freeze(model, CORRECTED)
    arguments: dict[str, list[Any]] = {"freeze": ["oelm_freeze"], "hold": [[]]}
    together = nn.parallel.DistributedDataParallel(model)
    for wrapped in (together, torch.compile(together, backend="eager")):
        before = look(model)
        with pytest.raises(MethodError, match="before DistributedDataParallel wraps it"):
            getattr(oelm, verb)(wrapped, *arguments.get(verb, []))
        assert look(model) == before


SPECTRAL = oelm.Method(init="spectral", freeze=("q", "k"))


def ungrouped(name: str) -> nn.Module:
    import transformers

    settings = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 48, "vocab_size": 37}
    model: nn.Module = getattr(transformers, f"{name}Model")(
        getattr(transformers, f"{name}Config")(**settings, num_key_value_heads=4)
    )
    return model


def test_a_change_of_basis_is_refused_where_the_product_comes_later() -> None:
    cases: list[tuple[str, str]] = [
        ("Llama", "positions rotate"),
        ("Mistral", "positions rotate"),
        ("Qwen2", "positions rotate"),
        ("Qwen3", "normalised"),
    ]
    for name, reason in cases:
        with case(name, reason):
            refused(ungrouped(name), rf"basis inside each head of layers\.0\.self_attn, and .*{reason}", method=SPECTRAL)


class Stranger(nn.Module):
    """An attention that nobody but its registration describes."""

    def __init__(self) -> None:
        super().__init__()
        self.to_q, self.to_k, self.to_v = (nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (layer(x).unflatten(-1, (2, 4)).transpose(-2, -3) for layer in (self.to_q, self.to_k, self.to_v))
        return nn.functional.scaled_dot_product_attention(q, k, v)


def test_a_change_of_basis_needs_to_know_how_a_strangers_logits_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(site_module, "ADAPTERS", dict(site_module.ADAPTERS))
    known: dict[str, Any] = {"q": "to_q", "k": "to_k", "num_heads": 2}
    oelm.register_sites(Stranger)(lambda module: oelm.SitePaths(**known))
    model, x = Stranger(), torch.randn(3, 5, 8)
    before = model(x).detach()
    refused(model, "it is not known what happens .* say logits='product'", method=SPECTRAL)
    known["logits"] = "product"
    oelm.freeze(model, SPECTRAL)
    assert torch.allclose(model(x), before, rtol=0, atol=1e-5)
    known["logits"] = "products"
    with pytest.raises(SiteError, match="logits is 'products'; give one of: unknown, product, rotary, normed"):
        attention_sites(model)


def test_a_key_that_torch_learns_besides_is_in_the_old_basis() -> None:
    refused(nn.MultiheadAttention(8, 2, add_bias_kv=True), "a key that is not projected", method=SPECTRAL)
    oelm.freeze(nn.MultiheadAttention(8, 2, add_bias_kv=True), "polar")


def test_a_form_takes_no_scale_from_the_layers() -> None:
    cases: list[Any] = ["spectral", "spectral_flat"]
    for init in cases:
        with case(init):
            with pytest.raises(ValueError, match=f"init '{init}' takes the size of Q and K from their product"):
                oelm.Method(init=init, freeze=("q", "k"), scale="layer")
            with pytest.raises(MethodError, match=f"init '{init}' is for a whole site, Q and K together"):
                start_of(oelm.Method(init=init), torch.ones(1, 2, 3), torch.Generator())


def test_weights_that_have_no_form_are_refused() -> None:
    model: Any = built("bert")
    with torch.no_grad():
        model.bert.encoder.layer[1].attention.self.key.weight[0, 0] = float("nan")
    refused(model, "layer.1.attention.self: Q or K has numbers that are not finite", method=SPECTRAL)
    with torch.no_grad():
        model.bert.encoder.layer[1].attention.self.key.weight.zero_()
    refused(model, "layer.1.attention.self.(query|key): .* no spectrum to flatten", method="spectral_flat")
    before = outputs(model, tiny_inputs(KINDS["bert"]))
    oelm.freeze(model, SPECTRAL)
    assert torch.allclose(outputs(model, tiny_inputs(KINDS["bert"])), before, rtol=0, atol=1e-5)


def test_queries_tied_to_their_keys_stay_one_tensor_in_another_basis() -> None:
    model = build_gpt(tiny_gpt_config(), seed=0)
    tie_to_keys(model)
    tokens = torch.arange(12).view(2, 6)
    before = model.logits(tokens)
    oelm.freeze(model, SPECTRAL)
    assert torch.allclose(model.logits(tokens), before, rtol=0, atol=1e-5)


def test_what_was_in_another_basis_is_restored_biases_included() -> None:
    model = built("bert")
    before = look(model)["bytes"]
    oelm.freeze(model, SPECTRAL, keep_original=True)
    assert look(model)["bytes"] != before
    oelm.restore(model)
    assert look(model)["bytes"] == before
