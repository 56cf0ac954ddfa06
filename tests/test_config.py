"""A config is strict, says what is wrong by dotted path, and alone is enough to repeat a run."""

from __future__ import annotations

import copy
import json
import math
from pathlib import Path
from typing import Any

import pytest

from oelm.budget import BUDGETS, budget_settings
from oelm.config import RunConfig, differences, parse_config, parse_override, with_overrides
from oelm.errors import ConfigError, MethodError
from oelm.method.method import PRESETS
from oelm.runs.records import read_config
from tests.cases import case


def config(overrides: dict[str, Any] | None = None) -> RunConfig:
    return parse_config(with_overrides(budget_settings("smoke"), overrides or {}), where="here")


def refusal_of(overrides: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as refusal:
        config(overrides)
    return str(refusal.value)


def test_an_unknown_key_is_refused_with_the_nearest() -> None:
    cases: list[tuple[str, str]] = [
        ("stepz", "unknown key 'stepz' (did you mean 'steps'?)"),
        ("optim.weigth_decay", "optim: unknown key 'weigth_decay' (did you mean 'weight_decay'?)"),
        ("model.model_dims", "model: unknown key 'model_dims' (did you mean 'model_dim'?)"),
        ("method.frieze", "method: unknown key 'frieze' (did you mean 'freeze'?)"),
        ("data.tokeniser", "data: unknown key 'tokeniser' (did you mean 'tokenizer'?)"),
        ("schedule.warmup", "schedule: unknown key 'warmup' (did you mean 'warmup_steps'?)"),
    ]
    for key, nearest in cases:
        with case(key, nearest):
            assert refusal_of({key: 1}) == f"here: {nearest}"


def test_an_unknown_key_of_an_optional_section_is_refused_with_the_nearest() -> None:
    message = refusal_of({"init_from": {"checkpoint": "a", "sha256": "b", "tokenizer_sha256": "d", "sha265": "c"}})
    assert message == "here: init_from: unknown key 'sha265' (did you mean 'sha256'?)"


def test_an_unknown_key_near_to_none_is_refused_with_all_there_are() -> None:
    assert refusal_of({"schedule.zzz": 1}) == "here: schedule: unknown key 'zzz'; known keys: warmup_steps, final_fraction"


def test_a_missing_key_is_named() -> None:
    settings = budget_settings("smoke")
    del settings["model"]["ff_dim"]
    with pytest.raises(ConfigError, match=r"^here: model\.ff_dim: missing, and it has no default$"):
        parse_config(settings, where="here")


WRONG_TYPES: list[tuple[str, Any]] = [
    ("optim.lr", "1e-3"),
    ("optim.lr", True),
    ("optim.lr", None),
    ("steps", "30"),
    ("steps", True),
    ("steps", 30.0),
    ("steps", 30.5),
    ("steps", None),
    ("seed", False),
    ("compile", 1),
    ("compile", "true"),
    ("data.source", 3),
    ("data", "stdlib"),
    ("model", 3),
    ("optim.betas", 0.9),
    ("optim.betas", [0.9]),
    ("optim.betas", [0.9, 0.99, 0.999]),
    ("extended_at", 4),
    ("method", 5),
    ("method.freeze", "q"),
    ("method.seed", True),
    ("device", 0),
]


def test_a_value_of_another_type_is_refused_by_key_and_never_coerced() -> None:
    for key, value in WRONG_TYPES:
        with case(key, value):
            assert refusal_of({key: value}).startswith(f"here: {key}")


OUT_OF_RANGE: list[tuple[str, Any]] = [
    ("steps", 0),
    ("steps", -1),
    ("seed", -1),
    ("seed", 2**31),
    ("batch_size", 0),
    ("keep_checkpoints", 1),
    ("optim.lr", 0),
    ("optim.lr", -1e-3),
    ("optim.betas", [0.9, 1.0]),
    ("optim.betas", [-0.1, 0.9]),
    ("optim.weight_decay", -0.1),
    ("optim.clip_norm", 0),
    ("schedule.warmup_steps", -1),
    ("schedule.final_fraction", 1.5),
    ("model.dropout", 1.0),
    ("model.num_layers", 0),
    ("method.std", -1),
    ("data.source", ""),
    ("device", "gpu"),
    ("precision", "int8"),
    ("method.layers", "some"),
    ("method.layers", []),
]


def test_a_value_out_of_range_is_refused_by_key() -> None:
    for key, value in OUT_OF_RANGE:
        with case(key, value):
            assert refusal_of({key: value}).startswith(f"here: {key}")


def test_a_number_that_is_none_is_refused_by_key() -> None:
    cases: list[float] = [math.nan, math.inf, -math.inf]
    for value in cases:
        for key in ("optim.lr", "optim.clip_norm", "model.dropout", "method.std"):
            with case(value, key):
                assert key in refusal_of({key: value})


def test_a_number_that_is_none_inside_a_list_is_refused_by_key() -> None:
    assert "optim.betas" in refusal_of({"optim.betas": [0.9, math.nan]})


@pytest.mark.parametrize(
    ("key", "value"), [("method.init", "orthgonal"), ("method.layers", 3), ("method.layers", [0.5]), ("method.freeze", ["v"])]
)
def test_a_refusal_speaks_of_settings_and_not_of_our_types(key: str, value: Any) -> None:
    message = refusal_of({key: value})
    assert not any(word in message for word in ("callable", ".str", "tuple", "literal", "function"))


def test_a_refusal_shows_the_value_given() -> None:
    assert refusal_of({"optim.lr": "1e-3"}).endswith("(given: '1e-3')")


def test_heads_that_do_not_divide_are_refused_with_those_that_do() -> None:
    message = refusal_of({"model.model_dim": 32, "model.num_heads": 5})
    assert message == "here: model: model_dim 32 does not split into 5 heads; nearest head counts that do: 4, 8"


def test_a_batch_that_does_not_split_is_refused_with_both_sizes() -> None:
    assert "batch_size 7 is not a multiple of micro_batch_size 2" in refusal_of({"batch_size": 7, "micro_batch_size": 2})


@pytest.mark.parametrize("stages", [[30], [40], [10, 10], [20, 10]], ids=str)
def test_extensions_must_rise_up_to_the_steps(stages: list[int]) -> None:
    assert "extended_at" in refusal_of({"steps": 30, "extended_at": stages})


def test_several_mistakes_are_told_together() -> None:
    message = refusal_of({"steps": 0, "optim.lr": "x", "sede": 1})
    assert all(word in message for word in ("steps", "optim.lr", "'sede'"))


def test_several_mistakes_stay_one_paragraph() -> None:
    assert "\n" not in refusal_of({"steps": 0, "optim.lr": "x", "sede": 1})


def test_a_right_name_in_the_wrong_place_is_refused_with_its_place() -> None:
    assert refusal_of({"lr": 1e-3}) == "here: unknown key 'lr' (did you mean 'optim.lr'?)"


def test_a_layer_that_the_model_does_not_have_is_refused() -> None:
    assert "names layer 7, but the model has 2" in refusal_of({"method.layers": [7], "model.num_layers": 2})


def test_a_config_cannot_be_changed_once_made() -> None:
    with pytest.raises(ValueError, match="frozen"):
        config().steps = 5  # type: ignore[misc]


def test_every_budget_and_preset_survives_json() -> None:
    for budget in BUDGETS:
        for preset in PRESETS:
            with case(budget, preset):
                made = parse_config({**budget_settings(budget), "method": preset}, where="here")
                assert parse_config(json.loads(json.dumps(made.as_dict())), where="there") == made


def test_a_config_with_every_field_set_survives_its_file(tmp_path: Path) -> None:
    made = config(
        {
            "method": {"init": "gaussian", "std": 0.1, "freeze": ["k"], "layers": [0, -1], "seed": 3},
            "optim": {"lr": 0.1, "betas": [0.8, 0.95], "weight_decay": 0.0, "clip_norm": 0.5},
            "schedule": {"warmup_steps": 0, "final_fraction": 1 / 3},
            "extended_at": [5, 20],
            "seed": 2**31 - 1,
            "init_from": {"checkpoint": "/a/b", "sha256": "00", "tokenizer_sha256": "11"},
            "device": "cpu",
            "precision": "bf16",
            "deterministic": True,
        }
    )
    (tmp_path / "config.json").write_text(json.dumps(made.as_dict()))
    assert read_config(tmp_path / "config.json") == made


def test_parsing_leaves_the_settings_alone() -> None:
    settings = {**budget_settings("smoke"), "method": "oelm_freeze"}
    before = copy.deepcopy(settings)
    parse_config(settings, where="here")
    assert settings == before


def test_a_method_may_be_given_by_the_name_of_a_preset() -> None:
    for preset in PRESETS:
        with case(preset):
            assert config({"method": preset}).method == PRESETS[preset]


def test_an_unknown_preset_is_refused_with_the_nearest() -> None:
    with pytest.raises(MethodError, match=r"unknown method 'oelm_freez' \(did you mean 'oelm_freeze'\?\)"):
        config({"method": "oelm_freez"})


@pytest.mark.parametrize("content", ["[]", "null", "3", '"smoke"'])
def test_a_file_that_is_no_object_is_refused_by_name(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ConfigError, match=r"config\.json: must be an object of settings"):
        read_config(tmp_path / "config.json")


def test_a_refusal_of_a_file_names_the_file(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**config().as_dict(), "stepz": 3}))
    with pytest.raises(ConfigError, match=r"config\.json: unknown key 'stepz' \(did you mean 'steps'\?\)"):
        read_config(tmp_path / "config.json")


def test_an_override_is_read_as() -> None:
    cases: list[tuple[str, str, Any]] = [
        ("steps=30", "steps", 30),
        ("optim.lr=1e-3", "optim.lr", 1e-3),
        ("optim.lr=0.001", "optim.lr", 0.001),
        ("compile=true", "compile", True),
        ("method.seed=null", "method.seed", None),
        ("method.layers=[0, 1]", "method.layers", [0, 1]),
        ("method=oelm_freeze", "method", "oelm_freeze"),
        ("method.layers=first 2", "method.layers", "first 2"),
        ('data.source="3"', "data.source", "3"),
        ("data.source=a=b", "data.source", "a=b"),
        ("data.source=", "data.source", ""),
        ("data.source=/tmp/a.b/c", "data.source", "/tmp/a.b/c"),
        # Not numbers of JSON: they stay text, which no numeric setting takes.
        ("optim.lr=NaN", "optim.lr", "NaN"),
        ("optim.lr=Infinity", "optim.lr", "Infinity"),
        ("steps=1_000", "steps", "1_000"),
        ("compile=True", "compile", "True"),
    ]
    for text, key, value in cases:
        with case(text, key, value):
            found = parse_override(text)
            assert found == (key, value) and type(found[1]) is type(value)


def test_an_override_without_key_or_value_is_refused_with_an_example() -> None:
    for text in ("", "steps", "=3", ".=3", "a..b=3", ".a=3", "a.=3"):
        with case(text):
            with pytest.raises(ConfigError, match=r"--set .* write it as key=value, for example --set optim\.lr=0\.001"):
                parse_override(text)


def test_overrides_replace_by_dotted_path() -> None:
    cases: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({}, {"a": 1, "b": {"c": 2, "d": {"e": 3}}}),
        ({"a": 9}, {"a": 9, "b": {"c": 2, "d": {"e": 3}}}),
        ({"b.c": 9}, {"a": 1, "b": {"c": 9, "d": {"e": 3}}}),
        ({"b.d.e": None}, {"a": 1, "b": {"c": 2, "d": {"e": None}}}),
        ({"b.d": {}}, {"a": 1, "b": {"c": 2, "d": {}}}),
        ({"b.new": 9}, {"a": 1, "b": {"c": 2, "d": {"e": 3}, "new": 9}}),
        ({"x.y.z": 9}, {"a": 1, "b": {"c": 2, "d": {"e": 3}}, "x": {"y": {"z": 9}}}),
        ({"b.c": 9, "b.d.e": 8}, {"a": 1, "b": {"c": 9, "d": {"e": 8}}}),
    ]
    for overrides, expected in cases:
        with case(overrides, expected):
            assert with_overrides({"a": 1, "b": {"c": 2, "d": {"e": 3}}}, overrides) == expected


def test_overrides_leave_the_settings_alone() -> None:
    settings = {"b": {"c": 2}}
    with_overrides(settings, {"b.c": 9})
    assert settings == {"b": {"c": 2}}


def test_an_override_inside_a_single_value_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"optim\.lr\.x: 'lr' is a single value"):
        with_overrides(budget_settings("smoke"), {"optim.lr.x": 1})


def test_equal_configs_differ_in_nothing() -> None:
    assert differences(config(), config()) == []


def test_differences_are_listed_by_dotted_path_with_both_values() -> None:
    found = differences(config(), config({"steps": 31, "optim.lr": 0.5, "method.freeze": ["q"]}))
    assert sorted(found) == [
        "method.freeze: [] there, ['q'] asked for",
        "optim.lr: 0.002 there, 0.5 asked for",
        "steps: 30 there, 31 asked for",
    ]


def test_the_variant_is_the_same_for_every_seed() -> None:
    assert len({config({"seed": seed}).variant for seed in (0, 1, 2**31 - 1)}) == 1


def test_the_variant_changes_with_every_other_setting() -> None:
    changes: list[dict[str, Any]] = [
        {},
        {"model.num_layers": 3},
        {"method": "oelm_freeze"},
        {"method.seed": 1},
        {"method.scale": 2.0},
        {"method.scale": "layer"},
        {"method.layer_lr_decay": 0.9},
        {"method.warmup_steps": 0},
        *({"method": {"freeze": ["q"], **more}} for more in ({}, {"freeze_at": 0.5}, {"correction": 0.1}, {"gain": "head"})),
        *({"method": {"freeze": ["q"], "thaw": {"start": 0.5, "end": end, "order": "last_first"}}} for end in (0.5, 0.6)),
        {"method": {"freeze": ["q"], "thaw": {"start": 0.5, "end": 0.5, "order": "first_first"}}},
        {"model.qk_dim": 2},
        {"data.source": "other"},
        {"data.tokenizer": "bpe:513"},
        {"optim.lr": 2.0000001e-3},
        {"optim.betas": [0.9, 0.99]},
        {"schedule.final_fraction": 0.1},
        {"steps": 31},
        {"extended_at": [5]},
        {"batch_size": 16},
        {"micro_batch_size": 4},
        {"eval_every": 14},
        {"init_from": {"checkpoint": "a", "sha256": "b", "tokenizer_sha256": "d"}},
        {"precision": "float32"},
        {"deterministic": True},
    ]
    assert len({config(change).variant for change in changes}) == len(changes)


def test_the_variant_begins_with_the_method() -> None:
    assert config({"method": "oelm_freeze"}).variant.startswith("oelm-freeze-")


# What a config.json written before these settings were there does not have.
ADDED = {"method": ("correction", "scale", "thaw", "freeze_at", "layer_lr_decay", "warmup_steps"), "model": ("qk_dim",)}


@pytest.mark.parametrize("preset", ["baseline", "oelm_freeze", "oelm_random", "uniform"])
def test_a_config_written_before_the_newer_settings_means_what_it_meant(preset: str, tmp_path: Path) -> None:
    made = config({"method": preset})
    data = made.as_dict()
    for section, keys in ADDED.items():
        for key in keys:
            del data[section][key]
    (tmp_path / "config.json").write_text(json.dumps(data))
    assert read_config(tmp_path / "config.json") == made


def test_naming_a_setting_at_its_default_renames_no_folder() -> None:
    plain = budget_settings("smoke") | {"method": {"init": "orthogonal", "freeze": ["q", "k"]}}
    named = parse_config(plain, where="here").variant
    for section in ("method", "model", "data", "optim", "schedule", None):
        whole = parse_config(plain, where="here").as_dict()
        for key, value in (whole[section] if section else whole).items():
            dotted = f"{section}.{key}" if section else key
            assert parse_config(with_overrides(plain, {dotted: value}), where="here").variant == named, dotted


def test_a_wrong_scale_is_refused_in_words_of_the_setting() -> None:
    for wrong in (0, -1.5, "unity"):
        message = refusal_of({"method.scale": wrong})
        assert message.startswith("here: method.scale: ") and f"(given: {wrong!r})" in message
        assert "Literal" not in message and "constrained" not in message


def test_what_does_not_go_together_is_refused_by_its_place() -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        (
            {"method": {"thaw": {"start": 0.5, "end": 0.5, "order": "first_first"}}},
            "method: thaw and freeze_at need",
        ),
        (
            {"method": {"freeze": ["q"], "thaw": {"start": 0.5, "end": 0.4, "order": "first_first"}}},
            "method.thaw: end 0.4 is before start 0.5",
        ),
        ({"method": {"freeze": ["q"], "thaw": {"stat": 0.5}}}, "method.thaw: unknown key 'stat' (did you mean 'start'?)"),
        ({"model.qk_dim": 17}, "model: qk_dim 17 is wider than a head (16); it is there to make Q and K thin"),
        ({"model.qk_dim": 0}, "model.qk_dim: Input should be greater than 0"),
    ]
    for overrides, words in cases:
        with case(overrides, words):
            assert words in refusal_of(overrides)
