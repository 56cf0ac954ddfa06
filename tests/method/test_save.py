"""`save_pretrained` writes what learnt on top of Q and K into plain weights; a Trainer's checkpoint keeps it apart as well."""

from __future__ import annotations

import copy
import io
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from oelm.errors import MethodError
from oelm.method.apply import fold, freeze, thaw
from oelm.method.audit import assert_unmoved, digest
from oelm.method.layers import learnt_on_top
from oelm.method.method import Gain, Method
from tests.cases import case
from tests.method.kinds import of_each_kind
from tests.method.tiny_models import ARCHITECTURES, BY_NAME, Tiny, outputs, tiny_inputs, tiny_model

transformers = pytest.importorskip("transformers")
SAVED = [tiny for tiny in ARCHITECTURES if tiny.is_from_transformers]
ONE_OF_EACH = [tiny for tiny in SAVED if tiny.name in ("bert", "gpt2", "gpt_neox")]
each_kind = of_each_kind(SAVED)
inits = pytest.mark.parametrize("init", ["native", "axes"])
some = pytest.mark.parametrize("tiny", ONE_OF_EACH, ids=lambda tiny: tiny.name)


def stir(model: nn.Module, *, seed: int = 5) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if learnt_on_top(name):
                parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.25)


def learnt(tiny: Tiny, *, init: Any = "native", gain: Gain = "matrix", seed: int = 0, stirred: bool = True) -> Any:
    """A model in which a correction and a gain learnt something, on top of its own weights and biases or of slices."""
    model = tiny_model(tiny)
    freeze(model, Method(init=init, freeze=("q", "k"), correction=0.25, gain=gain), seed=seed)
    if stirred:
        stir(model)
    return model


def digests(model: nn.Module) -> dict[str, str]:
    return {name: digest(parameter) for name, parameter in model.named_parameters()}


def state_digests(model: nn.Module) -> dict[str, str]:
    return {name: digest(tensor) for name, tensor in model.state_dict().items()}


@inits
@each_kind
def test_what_learnt_on_top_is_in_the_plain_weights_that_are_saved(tiny: Tiny, init: str, tmp_path: Path) -> None:
    model, inputs = learnt(tiny, init=init), tiny_inputs(tiny)
    before, started = digests(model), state_digests(model)
    model.save_pretrained(tmp_path / "plain")
    plain, told = type(model).from_pretrained(tmp_path / "plain", output_loading_info=True)
    assert not any(told.values()), told
    folded = copy.deepcopy(model)
    fold(folded)
    with torch.no_grad():
        expected, without = outputs(folded, inputs), outputs(tiny_model(tiny), inputs)
        assert torch.equal(outputs(plain.eval(), inputs), expected)
        assert not torch.allclose(expected, without, rtol=0, atol=1e-3), "what was learnt must matter"
    # The model that was saved goes on learning as if it had not been.
    assert digests(model) == before and state_digests(model) == started
    assert_unmoved(model)
    # A checkpoint opens without us too, and continues with what was learnt.
    model.save_pretrained(tmp_path / "checkpoint-4")
    plain = type(model).from_pretrained(tmp_path / "checkpoint-4")
    with torch.no_grad():
        assert torch.equal(outputs(plain.eval(), inputs), expected)
    twin = learnt(tiny, init=init, stirred=False, seed=0 if init == "axes" else 9)
    told = twin.load_state_dict(load_file(tmp_path / "checkpoint-4" / "model.safetensors"), strict=False)
    assert not told.unexpected_keys
    assert digests(twin) == before


@some
def test_a_state_dict_that_is_given_is_folded_too_and_stays_as_it_is(tiny: Tiny, tmp_path: Path) -> None:
    model = learnt(tiny)
    state = model.state_dict()
    before = {name: digest(tensor) for name, tensor in state.items()}
    model.save_pretrained(tmp_path / "given", state_dict=dict(state))
    model.save_pretrained(tmp_path / "own")
    assert {name: digest(tensor) for name, tensor in state.items()} == before
    files = [tmp_path / folder / "model.safetensors" for folder in ("given", "own")]
    assert files[0].read_bytes() == files[1].read_bytes()


@some
def test_a_model_around_the_one_that_was_frozen_is_saved_folded_too(tiny: Tiny, tmp_path: Path) -> None:
    model: Any = tiny_model(tiny)
    freeze(model.base_model, Method(freeze=("q", "k"), correction=0.25, gain="head"))
    stir(model)
    model.save_pretrained(tmp_path)
    plain, told = type(model).from_pretrained(tmp_path, output_loading_info=True)
    assert not any(told.values()), told
    fold(model)
    with torch.no_grad():
        assert torch.equal(outputs(plain.eval(), tiny_inputs(tiny)), outputs(model, tiny_inputs(tiny)))


@some
def test_a_checkpoint_is_one_file_whatever_its_size(tiny: Tiny, tmp_path: Path) -> None:
    # The library loads shards in any order, each by itself: a frame and the weight it is part of must come together.
    model = learnt(tiny)
    model.save_pretrained(tmp_path / "checkpoint-4", max_shard_size="20KB")
    model.save_pretrained(tmp_path / "plain", max_shard_size="20KB")
    assert [path.name for path in (tmp_path / "checkpoint-4").glob("*.safetensors")] == ["model.safetensors"]
    assert len(list((tmp_path / "plain").glob("*.safetensors"))) > 1


@some
def test_weights_without_what_learnt_on_top_are_refused_by_a_model_that_has_it(tiny: Tiny, tmp_path: Path) -> None:
    told = r"these weights have none of what learns on top of .*[.](q|query): gain, correction_in"
    for init in ("native", "axes"):
        model = learnt(tiny, init=init)
        model.save_pretrained(tmp_path / init)
        for strict in (True, False):
            with case(init, strict), pytest.raises(MethodError, match=told):
                model.load_state_dict(load_file(tmp_path / init / "model.safetensors"), strict=strict)


def test_adapters_alone_cannot_hold_what_learnt_on_top_so_saving_them_is_refused(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    model = learnt(next(tiny for tiny in SAVED if tiny.name == "bert"))
    model.add_adapter(peft.LoraConfig(r=2, target_modules=["value"]))
    with pytest.raises(MethodError, match=r"saves adapters alone.* oelm\.fold\(model\)"):
        model.save_pretrained(tmp_path)
    fold(model)
    model.save_pretrained(tmp_path)


@some
def test_a_model_on_top_of_which_nothing_learns_is_saved_as_before(tiny: Tiny, tmp_path: Path) -> None:
    learnt(tiny)
    for folder, method in (("frozen", "pretrained_freeze"), ("plain", None), ("checkpoint-1", "pretrained_freeze")):
        model: Any = tiny_model(tiny)
        if method is not None:
            freeze(model, method)
        model.save_pretrained(tmp_path / folder)
    files = [tmp_path / folder / "model.safetensors" for folder in ("frozen", "plain", "checkpoint-1")]
    assert files[0].read_bytes() == files[1].read_bytes() == files[2].read_bytes()


ON_TOP = ("oelm_lowrank", "oelm_head_gain", "oelm_axes_lowrank")


@pytest.mark.parametrize(
    ("name", "method"), [("torch", "oelm_freeze"), *((name, method) for name in ("our_gpt", "gpt2") for method in ON_TOP)]
)
def test_a_whole_model_can_be_saved_and_opened_again(name: str, method: str) -> None:
    model, inputs = tiny_model(BY_NAME[name]), tiny_inputs(BY_NAME[name])
    freeze(model, method)
    torch.save(model, buffer := io.BytesIO())
    buffer.seek(0)
    opened = torch.load(buffer, weights_only=False)
    assert_unmoved(opened)
    assert torch.equal(outputs(opened, inputs), outputs(model, inputs))
    assert [type(module) for module in opened.modules()] == [type(module) for module in model.modules()]
    for each in (model, opened):
        thaw(each)
    assert torch.equal(outputs(opened, inputs), outputs(model, inputs))


def test_adapters_of_peft_around_the_model_are_not_saved_without_what_learnt(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    tiny = next(tiny for tiny in SAVED if tiny.name == "bert")
    model = peft.get_peft_model(learnt(tiny), peft.LoraConfig(r=2, target_modules=["value"]))
    with pytest.raises(MethodError, match=r"saves adapters alone.* oelm\.fold\(model\)"):
        model.save_pretrained(tmp_path)
    assert not list(tmp_path.iterdir())
    fold(model)
    model.save_pretrained(tmp_path)
    assert (tmp_path / "adapter_model.safetensors").is_file()


PEFT_LATER = """
import sys, transformers, oelm.errors
config = transformers.BertConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=32)
model = transformers.BertForSequenceClassification(config)
oelm.freeze(model, "oelm_head_gain")
import peft
wrapped = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["value"]))
try:
    wrapped.save_pretrained(sys.argv[1])
except oelm.errors.MethodError as problem:
    print("refused" if "saves adapters alone" in str(problem) else problem)
"""


@pytest.mark.slow
def test_peft_that_is_imported_after_freezing_is_guarded_too(tmp_path: Path) -> None:
    pytest.importorskip("peft")
    ended = subprocess.run([sys.executable, "-c", PEFT_LATER, str(tmp_path)], capture_output=True, text=True)
    assert ended.stdout == "refused\n", ended.stderr
    assert not list(tmp_path.iterdir())


def scaled(weight_HKD: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    return weight_HKD * 0.5


def test_an_init_function_is_pickled_by_its_name_and_one_without_is_refused() -> None:
    named, nameless = (tiny_model(BY_NAME["our_gpt"]) for _ in range(2))
    freeze(named, Method(init=scaled, freeze=("q", "k")))
    torch.save(named, io.BytesIO())
    freeze(nameless, Method(init=lambda weight, generator: weight * 0.5, freeze=("q", "k")))
    with pytest.raises((AttributeError, pickle.PicklingError), match="lambda"):
        torch.save(nameless, io.BytesIO())
    assert_unmoved(copy.deepcopy(nameless))
    torch.save(nameless.state_dict(), io.BytesIO())
