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

from oelm.errors import ConfigError, MethodError
from oelm.method.apply import freeze
from oelm.method.frames import frame_generator
from oelm.method.method import PRESETS, Method, method_name, resolve_method
from oelm.method.sites import attention_sites
from oelm.models.gpt import build_gpt
from oelm.train.config import parse_config
from tests.conftest import tiny_gpt_config, tiny_settings

QK = ["q", "k"]
AS_DESIGNED = {
    "baseline": {"init": "native", "std": 0.02, "freeze": []},
    "oelm_freeze": {"init": "orthogonal", "std": 0.02, "freeze": QK},
    "oelm_freeze_pretrained": {"init": "orthonormalized", "std": 0.02, "freeze": QK},
    "oelm_random": {"init": "gaussian", "std": 0.02, "freeze": QK},
    "oelm_global": {"init": "orthogonal_global", "std": 0.02, "freeze": QK},
    "gaussian_matched": {"init": "gaussian_matched", "std": 0.02, "freeze": QK},
    "pretrained_freeze": {"init": "native", "std": 0.02, "freeze": QK},
    "uniform": {"init": "gaussian", "std": 0.0, "freeze": QK},
}

methods = st.builds(
    Method,
    init=st.sampled_from(["native", "orthogonal", "orthogonal_global", "gaussian", "gaussian_matched", "orthonormalized"]),
    std=st.floats(0, 1e6),
    freeze=st.lists(st.sampled_from(["q", "k"])).map(tuple),
    layers=st.one_of(
        st.sampled_from(["all", "even", "odd"]),
        st.builds("{} {}".format, st.sampled_from(["first", "last"]), st.integers(1, 99)),
        st.lists(st.integers(-50, 50), min_size=1).map(tuple),
    ),
    seed=st.none() | st.integers(0, 2**62),
)


@pytest.mark.parametrize("name", AS_DESIGNED)
def test_preset_is_as_designed(name: str) -> None:
    assert PRESETS[name] == Method.model_validate_json(json.dumps(AS_DESIGNED[name]))


def test_what_is_not_said_means_the_baseline() -> None:
    plain = Method()
    assert (plain.init, plain.freeze, plain.layers, plain.seed) == ("native", (), "all", None)


def test_there_are_no_other_presets() -> None:
    assert PRESETS.keys() == AS_DESIGNED.keys()


@settings(deadline=None, derandomize=True)
@given(methods)
def test_a_method_survives_json(method: Method) -> None:
    assert Method.model_validate_json(method.model_dump_json()) == method


@pytest.mark.parametrize("name", AS_DESIGNED)
def test_a_preset_is_known_by_its_name_whatever_its_seed(name: str) -> None:
    assert method_name(resolve_method(name).model_copy(update={"seed": 7})) == name


def test_a_method_of_ones_own_is_described_in_words() -> None:
    method = Method(init="gaussian", std=0.1, freeze=("k",), layers=(0, 2))
    assert method_name(method) == "gaussian, k frozen, layers 0,2"


def test_a_method_resolves_to_itself() -> None:
    method = Method(init="gaussian", std=0.5)
    assert resolve_method(method) is method


@pytest.mark.parametrize(("wrong", "right"), [("oelm_frezee", "oelm_freeze"), ("base_line", "baseline")])
def test_an_unknown_preset_is_refused_with_the_nearest_name(wrong: str, right: str) -> None:
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


@pytest.mark.parametrize(
    "wrong",
    [
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
    ],
    ids=str,
)
def test_a_value_that_makes_no_sense_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        Method.model_validate_json(json.dumps(wrong))


def test_a_method_cannot_be_changed() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        PRESETS["baseline"].std = 1.0  # type: ignore[misc]


@pytest.mark.parametrize(
    ("given", "normal"), [(["k", "q"], ("q", "k")), (["q", "q"], ("q",)), (["k"], ("k",)), ([], ())], ids=str
)
def test_the_order_of_freeze_does_not_matter(given: list[str], normal: tuple[str, ...]) -> None:
    assert Method.model_validate_json(json.dumps({"freeze": given})).freeze == normal


def test_the_order_of_layers_does_not_matter() -> None:
    assert Method(layers=(2, 0, 2)) == Method(layers=(0, 2))


@pytest.mark.parametrize(
    ("layers", "num_layers", "selected"),
    [
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
    ],
    ids=str,
)
def test_layers_select(layers: str | tuple[int, ...], num_layers: int, selected: list[int]) -> None:
    method = Method(layers=layers)
    method.check_layers(num_layers)
    assert [layer for layer in range(num_layers) if method.selects(layer, num_layers)] == selected


@pytest.mark.parametrize(
    ("layers", "num_layers", "missing"),
    [((0, 5), 5, 5), ((-6,), 5, -6), ("first 6", 5, 5), ("last 6", 5, 5), ("odd", 1, 1)],
    ids=str,
)
def test_layers_that_do_not_exist_are_refused_by_number(layers: str | tuple[int, ...], num_layers: int, missing: int) -> None:
    with pytest.raises(MethodError, match=f"names layer {missing}, but the model has {num_layers} \\(0 to {num_layers - 1}\\)"):
        Method(layers=layers).check_layers(num_layers)


def _halves(weight_HKD: Tensor, generator: torch.Generator) -> Tensor:
    return weight_HKD / 2 + torch.rand(1, generator=generator)


def test_a_function_of_ones_own_gives_the_start_through_freeze() -> None:
    model, fresh = build_gpt(tiny_gpt_config(), seed=0), build_gpt(tiny_gpt_config(), seed=0)
    freeze(model, Method(init=_halves, freeze=("q",)))
    for site, before in zip(attention_sites(model), attention_sites(fresh), strict=True):
        expected = _halves(before.q.weight_HKD(), frame_generator(0, site.key, "q"))
        assert torch.equal(site.q.weight_HKD(), expected)


@pytest.mark.parametrize(
    "init",
    [lambda weight, _: weight[:, :-1], lambda weight, _: weight.flatten(), lambda weight, _: weight * float("nan")],
    ids=["too few rows", "flat", "not finite"],
)
def test_a_function_that_gives_no_start_is_refused_by_the_place_it_was_for(init: Any) -> None:
    with pytest.raises(MethodError, match=r"the init of blocks\.0\.attention\.q gave .* \(3, 8, 24\)"):
        freeze(build_gpt(tiny_gpt_config(), seed=0), Method(init=init, freeze=("q", "k")))


@pytest.mark.parametrize("mode", ["json", "python"])
def test_a_method_with_a_function_cannot_be_written_to_a_file(mode: str) -> None:
    # pydantic wraps what a serializer raises; either way the explanation must arrive.
    with pytest.raises((MethodError, PydanticSerializationError), match="cannot be written to a file"):
        Method(init=_halves).model_dump(mode=mode)
