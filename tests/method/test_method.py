"""A method is plain data: its presets, its JSON, which layers it selects, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from pydantic_core import PydanticSerializationError
from torch import Tensor

from oelm.config import parse_config
from oelm.errors import ConfigError, MethodError
from oelm.method.apply import freeze
from oelm.method.frames import frame_generator
from oelm.method.method import PRESETS, Method, Thaw, method_name, resolve_method
from oelm.method.sites import attention_sites
from oelm.models.gpt import build_gpt
from tests.cases import case
from tests.conftest import tiny_gpt_config, tiny_settings

QK = ["q", "k"]
FRAMES: dict[str, Any] = {"init": "orthogonal", "freeze": QK}
AS_DESIGNED: dict[str, dict[str, Any]] = {
    "baseline": {"init": "native", "std": 0.02, "freeze": []},
    "oelm_freeze": {"init": "orthogonal", "std": 0.02, "freeze": QK},
    "oelm_freeze_pretrained": {"init": "orthonormalized", "std": 0.02, "freeze": QK},
    "oelm_random": {"init": "gaussian", "std": 0.02, "freeze": QK},
    "oelm_global": {"init": "orthogonal_global", "std": 0.02, "freeze": QK},
    "gaussian_matched": {"init": "gaussian_matched", "std": 0.02, "freeze": QK},
    "pretrained_freeze": {"init": "native", "std": 0.02, "freeze": QK},
    "rotated": {"init": "rotated", "freeze": QK, "scale": "layer"},
    "qr_layer": {"init": "orthonormalized", "freeze": QK, "scale": "layer"},
    "polar": {"init": "polar", "freeze": QK, "scale": "layer"},
    "spectral_flat": {"init": "spectral_flat", "freeze": QK},
    "pretrained_lowrank": {"init": "native", "freeze": QK, "correction": 0.125},
    "uniform": {"init": "gaussian", "std": 0.0, "freeze": QK},
    "oelm_scaled": FRAMES | {"scale": 2**0.5},
    "oelm_head_gain": FRAMES | {"gain": "head"},
    "oelm_matrix": FRAMES | {"gain": "matrix"},
    "oelm_lowrank": FRAMES | {"correction": 0.125},
    "oelm_lowrank_first": FRAMES | {"correction": 0.125, "learn_layers": "first 1"},
    "oelm_axes": {"init": "axes", "freeze": QK},
    "oelm_axes_lowrank": {"init": "axes", "freeze": QK, "correction": 0.125},
    "oelm_axes_q": {"init": "axes", "freeze": ["q"]},
    "oelm_axes_k": {"init": "axes", "freeze": ["k"]},
    "oelm_axes_q_lowrank": {"init": "axes", "freeze": ["q"], "correction": 0.125},
    "oelm_first_half": FRAMES | {"layers": "first half"},
    "oelm_last_half": FRAMES | {"layers": "last half"},
    "oelm_first_free": FRAMES | {"layers": "all but first 1"},
    "oelm_even": FRAMES | {"layers": "even"},
    "oelm_odd": FRAMES | {"layers": "odd"},
    "oelm_q_only": FRAMES | {"freeze": ["q"]},
    "oelm_k_only": FRAMES | {"freeze": ["k"]},
    "thaw_first_first": FRAMES | {"thaw": {"start": 0.25, "end": 0.75, "order": "first_first"}},
    "thaw_last_first": FRAMES | {"thaw": {"start": 0.25, "end": 0.75, "order": "last_first"}},
    "thaw_together": FRAMES | {"thaw": {"start": 0.5, "end": 0.5, "order": "first_first"}},
    "train_then_freeze": {"init": "native", "freeze": QK, "freeze_at": 0.25},
}
# The class of a preset's verdicts, where it is not that nothing of Q and K learns.
NOT_PURE = {"baseline": "free"} | dict.fromkeys(
    ("oelm_head_gain", "oelm_matrix", "oelm_lowrank", "oelm_lowrank_first", "oelm_axes_lowrank", "pretrained_lowrank"), "little"
)
NOT_PURE |= dict.fromkeys(
    [
        name
        for name in AS_DESIGNED
        if name.endswith(("half", "even", "odd", "only", "free", "axes_q", "axes_k", "axes_q_lowrank"))
    ],
    "partial",
)
NOT_PURE |= dict.fromkeys([name for name in AS_DESIGNED if name.startswith(("thaw", "train"))], "partial")

_fractions = st.floats(0.001, 0.999)
_layers = st.one_of(
    st.sampled_from(["all", "even", "odd", "first half", "last half", "all but last half"]),
    st.builds("{} {}".format, st.sampled_from(["first", "last", "all but first", "all but last"]), st.integers(1, 99)),
    st.lists(st.integers(-50, 50), min_size=1).map(tuple),
)
_thaws = st.builds(
    lambda ends, order: Thaw(start=min(ends), end=max(ends), order=order),
    ends=st.tuples(_fractions, _fractions),
    order=st.sampled_from(["first_first", "last_first"]),
)
# What needs something frozen, and does not go together.
_on_frozen = st.one_of(
    st.fixed_dictionaries({"gain": st.sampled_from(["none", "head", "matrix"]), "correction": st.floats(0, 0.99)}),
    st.fixed_dictionaries({"correction": st.floats(0.01, 0.99), "learn_layers": _layers}),
    st.fixed_dictionaries({"thaw": _thaws}),
    st.fixed_dictionaries({"freeze_at": _fractions}),
).map(lambda times: Method(freeze=("q", "k"), **times))
methods = st.builds(
    Method,
    scale=st.sampled_from(["unit", "layer"]) | st.floats(1e-6, 1e6),
    layer_lr_decay=st.floats(0.01, 10),
    warmup_steps=st.none() | st.integers(0, 10**6),
    init=st.sampled_from(
        ["native", "orthogonal", "orthogonal_global", "gaussian", "gaussian_matched", "orthonormalized", "polar", "rotated"]
    ),
    std=st.floats(0, 1e6),
    freeze=st.lists(st.sampled_from(["q", "k"])).map(tuple),
    layers=_layers,
    seed=st.none() | st.integers(0, 2**62),
)


def test_preset_is_as_designed() -> None:
    for name in AS_DESIGNED:
        with case(name):
            assert PRESETS[name] == Method.model_validate_json(json.dumps(AS_DESIGNED[name]))


def test_what_is_not_said_means_the_baseline() -> None:
    plain = Method()
    assert (plain.init, plain.freeze, plain.layers, plain.seed) == ("native", (), "all", None)
    assert (plain.gain, plain.correction, plain.scale, plain.thaw, plain.freeze_at) == ("none", 0, "unit", None, 0)
    assert (plain.layer_lr_decay, plain.warmup_steps, plain.learn_layers) == (1, None, "all")


def test_there_are_no_other_presets() -> None:
    assert PRESETS.keys() == AS_DESIGNED.keys()


@settings(deadline=None, derandomize=True, max_examples=50)
@given(methods | _on_frozen)
def test_a_method_survives_json(method: Method) -> None:
    assert Method.model_validate_json(method.model_dump_json()) == method


def test_a_preset_is_known_by_its_name_whatever_its_seed() -> None:
    for name in AS_DESIGNED:
        with case(name):
            assert method_name(resolve_method(name).model_copy(update={"seed": 7})) == name


def test_a_preset_s_class_is_by_what_learns_of_q_and_k() -> None:
    for name in AS_DESIGNED:
        with case(name):
            assert PRESETS[name].kind == NOT_PURE.get(name, "pure")


def test_a_class_is_never_mixed() -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"init": "orthogonal"}, "free"),
        ({"layer_lr_decay": 0.5, "warmup_steps": 3}, "free"),
        (FRAMES | {"scale": 3.0, "layer_lr_decay": 0.5, "warmup_steps": 3, "seed": 1}, "pure"),
        (FRAMES | {"gain": "matrix", "correction": 0.1}, "little"),
        # Where it learns, not how much.
        (FRAMES | {"gain": "matrix", "correction": 0.9}, "little"),
        (FRAMES | {"gain": "head", "layers": "odd"}, "partial"),
        (FRAMES | {"freeze": ["k"], "correction": 0.1}, "partial"),
        (FRAMES | {"layers": [0]}, "partial"),
    ]
    for fields, kind in cases:
        with case(fields, kind):
            assert Method.model_validate_json(json.dumps(fields)).kind == kind


def test_a_method_of_ones_own_is_described_in_words() -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"init": "gaussian", "std": 0.1, "freeze": ["k"], "layers": [0, 2]}, "gaussian, k frozen, layers 0,2"),
        ({"init": "orthogonal"}, "orthogonal, nothing frozen, layers all"),
        (FRAMES | {"layers": "last 2", "gain": "head"}, "orthogonal, q+k frozen, layers last 2, gain head"),
        (
            FRAMES | {"gain": "matrix", "correction": 0.0625, "scale": 3**0.5},
            "orthogonal, q+k frozen, layers all, gain matrix, correction 0.0625, scale 1.73205",
        ),
        (FRAMES | {"scale": "layer"}, "orthogonal, q+k frozen, layers all, scale layer"),
        (FRAMES | {"freeze_at": 0.1}, "orthogonal, q+k frozen from 0.1 of training on, layers all"),
        (
            FRAMES | {"thaw": {"start": 0.1, "end": 0.9, "order": "last_first"}},
            "orthogonal, q+k frozen until 0.1 to 0.9 of training (last_first), layers all",
        ),
        (
            FRAMES | {"freeze": ["q"], "thaw": {"start": 0.3, "end": 0.3, "order": "first_first"}},
            "orthogonal, q frozen until 0.3 of training (first_first), layers all",
        ),
        (
            FRAMES | {"layer_lr_decay": 0.9, "warmup_steps": 40},
            "orthogonal, q+k frozen, layers all, lr x 0.9 a layer, warm-up of 40 steps",
        ),
    ]
    for fields, name in cases:
        with case(fields, name):
            assert method_name(Method.model_validate_json(json.dumps(fields))) == name


_THAW = {"start": 0.5, "end": 0.5, "order": "first_first"}


def test_what_does_not_go_together_is_refused_with_the_way_out() -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"thaw": _THAW}, "thaw and freeze_at need something to freeze; add q or k to freeze"),
        ({"freeze_at": 0.5}, "thaw and freeze_at need something to freeze; add q or k to freeze"),
        (FRAMES | {"thaw": _THAW, "freeze_at": 0.5}, "give either thaw .* or freeze_at"),
        (FRAMES | {"thaw": _THAW, "gain": "head"}, "gain and correction need Q and K frozen throughout"),
        (FRAMES | {"freeze_at": 0.5, "correction": 0.1}, "gain and correction need Q and K frozen throughout"),
        (FRAMES | {"thaw": _THAW | {"end": 0.4}}, r"end 0\.4 is before start 0\.5; give both the same value"),
        (FRAMES | {"thaw": _THAW | {"order": "random"}}, "'first_first' or 'last_first'"),
        ({"correction": 0.1}, r"correction 0\.1 learns on top of frozen maps"),
        ({"freeze": ["k"], "gain": "head"}, "gain 'head' is learnt on top of frozen queries; add q to freeze"),
    ]
    for fields, words in cases:
        with case(fields, words):
            with pytest.raises(ValidationError, match=words):
                Method.model_validate_json(json.dumps(fields))


def test_a_number_as_scale_multiplies_the_start() -> None:
    cases: list[float] = [2, 2.0, 0.5, 2**0.5]
    for scale in cases:
        with case(scale):
            model, unit = build_gpt(tiny_gpt_config(), seed=0), build_gpt(tiny_gpt_config(), seed=0)
            freeze(model, Method.model_validate_json(json.dumps(FRAMES | {"scale": scale})))
            freeze(unit, "oelm_freeze")
            for site, other in zip(attention_sites(model), attention_sites(unit), strict=True):
                assert torch.equal(site.q.weight, other.q.weight * scale) and torch.equal(site.k.weight, other.k.weight * scale)


def test_a_number_as_scale_multiplies_the_weights_that_are_there() -> None:
    model, before = build_gpt(tiny_gpt_config(), seed=0), build_gpt(tiny_gpt_config(), seed=0)
    freeze(model, Method(freeze=("q", "k"), scale=3.0))
    for name, parameter in model.named_parameters():
        is_scaled = name.endswith((".q.weight", ".k.weight"))
        assert torch.equal(parameter, before.get_parameter(name) * (3.0 if is_scaled else 1.0))


def test_a_method_resolves_to_itself() -> None:
    method = Method(init="gaussian", std=0.5)
    assert resolve_method(method) is method


def test_an_unknown_preset_is_refused_with_the_nearest_name() -> None:
    cases: list[tuple[str, str]] = [("oelm_frezee", "oelm_freeze"), ("base_line", "baseline")]
    for wrong, right in cases:
        with case(wrong, right):
            with pytest.raises(MethodError, match=f"unknown method '{wrong}' \\(did you mean '{right}'\\?\\)"):
                resolve_method(wrong)


def test_an_unknown_preset_near_none_is_refused_with_all_names() -> None:
    with pytest.raises(MethodError) as problem:
        resolve_method("zzz")
    assert all(name in str(problem.value) for name in PRESETS)


def test_unknown_keys_are_refused() -> None:
    with pytest.raises(ValidationError, match="extra_forbidden"):
        Method.model_validate_json('{"init": "native", "frezee": ["q"]}')


def test_an_unknown_key_in_a_config_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(ConfigError, match=r"here: method: unknown key 'frezee' \(did you mean 'freeze'\?\)"):
        parse_config(tiny_settings(Path("text.txt"), method={"frezee": ["q"]}), where="here")


def test_a_value_that_makes_no_sense_is_refused() -> None:
    cases: list[dict[str, Any]] = [
        {"init": "orthgonal"},
        {"std": -0.1},
        {"std": float("nan")},
        {"std": float("inf")},
        {"std": "0.02"},
        {"freeze": ["v"]},
        {"freeze": "q"},
        {"layers": []},
        {"layers": "middle"},
        {"layers": "first 0"},
        {"layers": "first -1"},
        {"layers": "first 01"},
        {"layers": "First 2"},
        {"layers": "last 2 "},
        {"layers": ""},
        {"layers": [True]},
        {"layers": [0.5]},
        {"seed": -1},
        *({"scale": scale} for scale in (0, -1.0, float("nan"), float("inf"), "unity", True, None, "2")),
        *({"freeze": QK, "correction": share} for share in (-0.1, 1, 1.5, float("nan"), "0.1")),
        *({"freeze": QK, "freeze_at": at} for at in (-0.1, 1, float("nan"))),
        *({"freeze": QK, "thaw": _THAW | {"start": at}} for at in (0, -0.1, float("nan"), "0.1")),
        *({"freeze": QK, "thaw": _THAW | {"end": at}} for at in (1, 1.5, float("nan"))),
        {"freeze": QK, "thaw": {"start": 0.5, "end": 0.5}},
        {"freeze": QK, "thaw": _THAW | {"at": 1}},
        {"freeze": QK, "thaw": 0.5},
        *({"layer_lr_decay": decay} for decay in (0, -1, 10.5, float("nan"))),
        *({"warmup_steps": steps} for steps in (-1, 0.5, True)),
        *({"layers": layers} for layers in ("half", "first halves", "middle half", "first  half")),
    ]
    for wrong in cases:
        with case(wrong):
            with pytest.raises(ValidationError):
                Method.model_validate_json(json.dumps(wrong))


def test_a_method_cannot_be_changed() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        PRESETS["baseline"].std = 1.0  # type: ignore[misc]


def test_the_order_of_freeze_does_not_matter() -> None:
    cases: list[tuple[list[str], tuple[str, ...]]] = [(["k", "q"], ("q", "k")), (["q", "q"], ("q",)), (["k"], ("k",)), ([], ())]
    for said, normal in cases:
        with case(said, normal):
            assert Method.model_validate_json(json.dumps({"freeze": said})).freeze == normal


def test_the_order_of_layers_does_not_matter() -> None:
    assert Method(layers=(2, 0, 2)) == Method(layers=(0, 2))


def test_layers_select() -> None:
    cases: list[tuple[str | tuple[int, ...], int, list[int]]] = [
        ("all", 3, [0, 1, 2]),
        ("first 2", 5, [0, 1]),
        ("first 5", 5, [0, 1, 2, 3, 4]),
        ("first 10", 12, list(range(10))),
        ("last 2", 5, [3, 4]),
        ("last 5", 5, [0, 1, 2, 3, 4]),
        ("even", 5, [0, 2, 4]),
        ("odd", 5, [1, 3]),
        ("even", 1, [0]),
        ((1, 3), 5, [1, 3]),
        ((-1,), 5, [4]),
        ((0, -5), 5, [0]),
        ((-2, 0), 5, [0, 3]),
        ("first half", 4, [0, 1]),
        ("last half", 4, [2, 3]),
        ("first half", 5, [0, 1]),
        ("last half", 5, [3, 4]),
        ("first half", 2, [0]),
        ("all but first 1", 4, [1, 2, 3]),
        ("all but last 2", 5, [0, 1, 2]),
        ("all but first half", 5, [2, 3, 4]),
        ("all but last half", 1, [0]),
    ]
    for layers, num_layers, selected in cases:
        with case(layers, num_layers, selected):
            method = Method(layers=layers)
            method.check_layers(num_layers)
            assert [layer for layer in range(num_layers) if method.selects(layer, num_layers)] == selected


def test_layers_that_do_not_exist_are_refused_by_number() -> None:
    cases: list[tuple[str | tuple[int, ...], int, int]] = [
        ((0, 5), 5, 5),
        ((-6,), 5, -6),
        ("first 6", 5, 5),
        ("last 6", 5, 5),
        ("odd", 1, 1),
        ("last half", 1, 1),
    ]
    for layers, num_layers, missing in cases:
        with case(layers, num_layers, missing):
            with pytest.raises(
                MethodError, match=f"names layer {missing}, but the model has {num_layers} \\(0 to {num_layers - 1}\\)"
            ):
                Method(layers=layers).check_layers(num_layers)


def test_layers_that_leave_none_are_refused() -> None:
    cases: list[str] = ["all but first 5", "all but last 7"]
    for layers in cases:
        with case(layers):
            with pytest.raises(MethodError, match=f"method.layers = '{layers}' leaves none of the model's 5 layers; choose"):
                Method(layers=layers).check_layers(5)


def _halves(weight_HKD: Tensor, generator: torch.Generator) -> Tensor:
    return weight_HKD / 2 + torch.rand(1, generator=generator)


def test_a_function_of_ones_own_gives_the_start_through_freeze() -> None:
    model, fresh = build_gpt(tiny_gpt_config(), seed=0), build_gpt(tiny_gpt_config(), seed=0)
    freeze(model, Method(init=_halves, freeze=("q",)))
    for site, before in zip(attention_sites(model), attention_sites(fresh), strict=True):
        expected = _halves(before.q.weight_HKD(), frame_generator(0, site.key, "q"))
        assert torch.equal(site.q.weight_HKD(), expected)


def test_a_function_that_gives_no_start_is_refused_by_the_place_it_was_for() -> None:
    cases: list[Any] = [
        lambda weight, _: weight[:, :-1],
        lambda weight, _: weight.flatten(),
        lambda weight, _: weight * float("nan"),
    ]
    for init in cases:
        with case(init):
            with pytest.raises(MethodError, match=r"the init of blocks\.0\.attention\.q gave .* \(3, 8, 24\)"):
                freeze(build_gpt(tiny_gpt_config(), seed=0), Method(init=init, freeze=("q", "k")))


def test_a_method_with_a_function_cannot_be_written_to_a_file() -> None:
    cases: list[str] = ["json", "python"]
    for mode in cases:
        with case(mode):
            # pydantic wraps what a serializer raises; either way the explanation must arrive.
            with pytest.raises((MethodError, PydanticSerializationError), match="cannot be written to a file"):
                Method(init=_halves).model_dump(mode=mode)
