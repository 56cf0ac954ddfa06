"""From experiments to runs: the same variant for every arm, a safe place for each, and never two recipes in one folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oelm.config import FinetuneConfig, RunConfig, TrainConfig, flatten
from oelm.errors import ConfigError, RunDirError
from oelm.experiments.catalog import Catalog, check_name
from oelm.experiments.plan import (
    PlannedRun,
    check_same_recipe,
    config_confounds,
    make_config,
    parse_seeds,
    plan_runs,
    recipe_changes,
    variant_name,
    with_baselines,
)
from oelm.files import write_json
from tests.cases import case
from tests.experiments.planned import PAIR, catalog_of

CATALOG = catalog_of(
    PAIR,
    """
late: {extends: arm, baseline: late-base, seeds: 2}
late-base: {extends: base}
bert:
  kind: classifier
  data: sst2
  at: {laptop: {model.source: org/small@abc, model.sha256: "1111"}}
""",
)
_JSON = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=80)
_CHANGES = st.dictionaries(st.text(max_size=80), _JSON | st.lists(_JSON, max_size=3), min_size=1, max_size=6)


def made(name: str, budget: str = "smoke", **changes: Any) -> RunConfig | FinetuneConfig:
    dotted = {key.replace("__", "."): value for key, value in changes.items()}
    return make_config(CATALOG.get(name), budget, seed=0, changes=dotted)


def begun(config: TrainConfig, **filled: Any) -> FinetuneConfig:
    """Return a classifier's config as a run that began writes it: with what only data and model could tell."""
    model = {"num_labels": 2, "sha256": "1111"}
    length = {"epochs": None, "steps": 750, "eval_every": 250, "save_every": 250}
    data = config.as_dict() | length | {key: value for key, value in filled.items() if "__" not in key}
    data["model"] |= model | {key.split("__")[1]: value for key, value in filled.items() if "__" in key}
    return FinetuneConfig.model_validate_json(json.dumps(data))


def test_without_changes_the_variant_is_default() -> None:
    assert variant_name({}) == "default"


def test_a_variant_names_its_changes_and_never_their_order() -> None:
    name = variant_name({"optim.lr": 1e-3, "steps": 500})
    assert name.startswith("lr-0.001-steps-500-") and name == variant_name({"steps": 500, "optim.lr": 1e-3})


@given(_CHANGES)
def test_a_variant_is_a_folder_s_name_on_every_system(changes: dict[str, Any]) -> None:
    name = variant_name(changes)
    check_name(name, where="here")
    assert len(name) <= 64 and name != "default" and name == variant_name(dict(reversed(changes.items())))


@given(_CHANGES, _CHANGES)
def test_other_changes_have_another_variant(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert (variant_name(one) == variant_name(other)) == (repr(sorted(one.items())) == repr(sorted(other.items())))


@pytest.mark.parametrize("value", [float("inf"), float("nan"), [1.0, float("-inf")], "\udcff"])
def test_a_change_that_no_config_can_hold_is_a_mistake_of_the_command(value: object) -> None:
    with pytest.raises(ConfigError, match="^--set .*must be finite"):
        variant_name({"optim.lr": value})


def test_all_arms_share_variant_and_seeds_and_each_run_has_its_own_place(tmp_path: Path) -> None:
    changes = {"optim.lr": 0.5}
    runs = planned(tmp_path, [2, 0], changes=changes)
    assert {run.variant for run in runs} == {variant_name(changes)}
    assert [(run.experiment.id, run.seed) for run in runs] == [("base", 2), ("arm", 2), ("base", 0), ("arm", 0)]
    assert [run.path for run in runs] == [
        tmp_path / run.experiment.id / "smoke" / variant_name(changes) / f"seed-{run.seed}" for run in runs
    ]
    assert all(run.config.optim.lr == 0.5 and run.config.seed == run.seed for run in runs)
    assert runs[0].name == f"base smoke {variant_name(changes)} seed 2"


def planned(
    root: Path, seeds: list[int] | None, *, budget: str = "smoke", changes: dict[str, Any] | None = None
) -> list[PlannedRun]:
    arms = [CATALOG.get("base"), CATALOG.get("arm")]
    by_arm = {arm.id: changes or {} for arm in arms}
    return plan_runs(arms, budget=budget, seeds=seeds, root=root, changes=by_arm, variant=variant_name(changes or {}))


def test_without_seeds_a_run_is_planned_for_each_of_the_catalog_s_and_one_at_smoke(tmp_path: Path) -> None:
    arms = [CATALOG.get("arm"), CATALOG.get("late")]
    for budget, seeds in (("smoke", {"arm": 1, "late": 1}), ("laptop", {"arm": 5, "late": 2})):
        runs = plan_runs(arms, budget=budget, seeds=None, root=tmp_path)
        assert {name: sum(run.experiment.id == name for run in runs) for name in seeds} == seeds
        assert [run.seed for run in runs] == sorted(run.seed for run in runs)


def test_seeds_are_a_number_a_range_or_a_list() -> None:
    cases: list[tuple[str, list[int]]] = [
        ("1", [0]),
        ("5", [0, 1, 2, 3, 4]),
        (" 3 ", [0, 1, 2]),
        ("5-9", [5, 6, 7, 8, 9]),
        ("7-7", [7]),
        ("0-0", [0]),
        ("0,3,7", [0, 3, 7]),
        ("9, 1-3", [9, 1, 2, 3]),
        ("999999999-999999999", [999_999_999]),
    ]
    for text, seeds in cases:
        with case(text, seeds):
            assert parse_seeds(text) == seeds


def test_seeds_that_could_be_misread_are_refused() -> None:
    for text in [
        "",
        " ",
        "0",
        "007",
        "10000",
        "9" * 5000,
        "-1",
        "5-",
        "-",
        "9-5",
        "1,,2",
        "1,",
        "3,3",
        "1-4,2",
        "1.5",
        "1e3",
        "five",
        "0-10000",
    ] + ["\u0665", "1\n2", "9999999999-9999999999"]:
        with case(text):
            with pytest.raises(ConfigError, match="^--seeds "):
                parse_seeds(text)


@given(st.integers(1, 9999))
def test_a_number_alone_is_how_many_and_never_which(count: int) -> None:
    assert parse_seeds(str(count)) == list(range(count))


def test_baselines_are_added_and_come_before_the_arms_that_need_them() -> None:
    def ids(*names: str) -> list[str]:
        return [found.id for found in with_baselines(CATALOG, CATALOG.select(names))]

    assert ids("arm") == ["base", "arm"]
    assert ids("late") == ["late-base", "late"]
    assert ids("late", "arm") == ["base", "late-base", "arm", "late"]
    assert ids("base") == ["base"] and ids("bert") == ["bert"]


def test_what_smoke_reads_is_on_every_machine_and_a_user_s_own_text_stays(tmp_path: Path) -> None:
    data = {"named": "tinystories", "code": "site-packages", "own": "/texts/a.txt"}
    catalog = catalog_of("\n".join(f"{name}: {{kind: language_model, data: {source}}}" for name, source in data.items()))
    sources = {name: made_of(catalog, name, "smoke").data.source for name in data}
    assert sources == {"named": "stdlib", "code": "stdlib", "own": "/texts/a.txt"}
    assert {name: made_of(catalog, name, "laptop").data.source for name in data} == data
    assert {made_of(catalog, name, "smoke").data.max_tokens for name in sources} == {50_000}
    limits = {
        (name, budget): made_of(catalog, name, budget).data.max_tokens for name in sources for budget in ("paper", "laptop")
    }
    assert limits["named", "laptop"] and limits["named", "paper"] is limits["own", "laptop"] is limits["own", "paper"] is None


def made_of(catalog: Catalog, name: str, budget: str) -> RunConfig:
    config = make_config(catalog.get(name), budget, seed=0)
    assert isinstance(config, RunConfig)
    return config


@pytest.mark.parametrize(("kind", "data"), [("language_model", "sst2"), ("classifier", "tinystories")])
def test_data_of_the_other_kind_is_refused_at_every_budget(kind: str, data: str) -> None:
    catalog = catalog_of(f"\nmine: {{kind: {kind}, data: {data}}}")
    for budget in ("paper", "laptop", "smoke"):
        with pytest.raises(ConfigError, match=rf"^0\.yaml:2: mine: {data} is not data for a {kind}$"):
            make_config(catalog.get("mine"), budget, seed=0)


def test_a_setting_that_cannot_be_is_told_with_the_option_that_gave_it() -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"optim.lrr": 1.0}, r"optim: unknown key 'lrr' \(did you mean 'lr'\?\)"),
        ({"lr": 1.0}, r"unknown key 'lr' \(did you mean 'optim.lr'\?\)"),
        ({"optim.lr": "fast"}, "optim.lr: .*valid number"),
        ({"optim.lr": float("inf")}, "optim.lr: must be a finite number"),
        ({"steps.x": 1}, "steps.x: 'steps' is a single value"),
        ({"method": "oelm_freez"}, "unknown method 'oelm_freez'"),
        ({"method.layers": "first 9"}, "method.layers = 'first 9' names layer 8, but the model has 2"),
        ({"method.init": "orthogonl"}, "method.init: .*'orthogonal'"),
        ({"_target_": "os.system"}, "unknown key '_target_'"),
    ]
    for changes, message in cases:
        with case(changes, message):
            [key] = changes
            for grid, option in ((), "--set"), ((key,), "--grid"):
                with pytest.raises(ConfigError, match=rf"^{option} {key} \(arm at smoke\): {message}"):
                    make_config(CATALOG.get("arm"), "smoke", seed=0, changes={"optim.weight_decay": 0.5, **changes}, grid=grid)


def test_a_fault_of_the_entry_is_told_with_its_line_whatever_the_user_changed() -> None:
    entry = catalog_of("x: {kind: language_model, data: stdlib, settings: {steps: 0}}").get("x")
    with pytest.raises(ConfigError, match=r"^x at smoke with your options \(its entry: 0\.yaml:1\): steps: "):
        make_config(entry, "smoke", seed=0, changes={"optim.lr": 0.5})


@pytest.mark.parametrize("key", ["seed", "seed.x"])
def test_a_seed_among_the_changes_is_refused_for_it_would_be_ignored(key: str) -> None:
    with pytest.raises(ConfigError, match="give seeds with --seeds"):
        make_config(CATALOG.get("arm"), "smoke", seed=0, changes={key: 5})


def test_a_part_of_the_method_can_be_changed_and_the_rest_stays() -> None:
    method = made("arm", method__layers="last 1").method
    assert (method.init, method.freeze, method.layers) == ("orthogonal", ("q", "k"), "last 1")


@pytest.mark.parametrize("said_in", ["settings", "at", "changes"])
def test_a_pretrained_model_is_tuned_gently_wherever_it_is_named(said_in: str) -> None:
    text = {"settings": "settings: {model.source: org/m}", "at": "at: {laptop: {model.source: org/m}}", "changes": "seeds: 5"}[
        said_in
    ]
    changes = {"model.source": "org/m"} if said_in == "changes" else {}
    catalog = catalog_of(f"mine: {{kind: classifier, data: sst2, {text}}}")
    config = make_config(catalog.get("mine"), "laptop", seed=0, changes=changes)
    assert isinstance(config, FinetuneConfig) and config.model.source == "org/m"
    assert (
        config.optim.lr
        == 5e-5
        < make_config(catalog_of("x: {kind: classifier, data: sst2}").get("x"), "laptop", seed=0).optim.lr
    )


def test_a_user_s_own_weights_are_not_held_to_the_catalog_s_digest() -> None:
    assert made("bert", "laptop").as_dict()["model"]["sha256"] == "1111"
    assert made("bert", "laptop", model__source="/my/bert").as_dict()["model"]["sha256"] == ""
    assert made("bert", "laptop", model__source="/my/bert", model__sha256="22").as_dict()["model"]["sha256"] == "22"


def test_a_run_that_began_is_the_run_that_was_planned() -> None:
    plan = made("bert", "laptop")
    assert recipe_changes(plan, plan) == [] == recipe_changes(plan, begun(plan))
    language = made("arm")
    resolved = language.model_copy(update={"model": language.model.model_copy(update={"vocab_size": 512})})
    assert recipe_changes(language, resolved) == []


def test_any_other_difference_of_a_run_on_disk_is_told() -> None:
    cases: list[tuple[dict[str, Any], list[str]]] = [
        ({"batch_size": 32}, ["batch_size: 32 there, 16 planned"]),
        ({"seed": 1}, ["seed: 1 there, 0 planned"]),
        ({"keep_checkpoints": 3}, ["keep_checkpoints: 3 there, 2 planned"]),
        ({"model__dropout": 0.5}, ["model.dropout: 0.5 there, None planned"]),
        ({"model__sha256": "2222"}, ["model.sha256: '2222' there, '1111' planned"]),
        ({"steps": 1250}, ["epochs: None there, 3.0 planned"]),
        ({"steps": 0, "epochs": 5.0, "eval_every": 0, "save_every": 0}, ["epochs: 5.0 there, 3.0 planned"]),
        ({"steps": 1000, "extended_at": [750]}, ["extended_at: [750] there, [] planned", "epochs: None there, 3.0 planned"]),
    ]
    for filled, told in cases:
        with case(filled, told):
            plan = made("bert", "laptop")
            assert sorted(recipe_changes(plan, begun(plan, **filled))) == sorted(told)


@pytest.mark.parametrize(
    ("key", "value"), [("optim.lr", 0.5), ("method.layers", "last 1"), ("data.max_tokens", 9), ("steps", 31)]
)
def test_a_changed_catalog_is_told_by_the_setting_that_changed(key: str, value: Any) -> None:
    held = make_config(CATALOG.get("arm"), "smoke", seed=0, changes={key: value})
    [change] = recipe_changes(made("arm"), held)
    assert change.startswith(f"{key}: {value!r} there, ")


def test_the_length_of_part_of_an_epoch_cannot_be_told_from_its_steps() -> None:
    plan = made("bert", "laptop", epochs=0.5)
    assert recipe_changes(plan, begun(plan, steps=125, eval_every=125, save_every=125)) == []


def test_a_model_moved_to_another_folder_is_the_same_recipe_while_its_digest_is() -> None:
    plan = made("bert", "laptop")
    assert recipe_changes(plan, begun(plan, model__source="/elsewhere/bert")) == []
    assert recipe_changes(plan, begun(plan, model__source="/elsewhere/bert", model__sha256="2222")) == [
        "model.sha256: '2222' there, '1111' planned"
    ]


def test_a_model_moved_is_another_recipe_where_no_digest_vouches_for_it() -> None:
    plan = made("bert", "laptop", model__source="/mine")
    assert recipe_changes(plan, begun(plan, model__source="/other")) == ["model.source: '/other' there, '/mine' planned"]


def test_a_fresh_model_is_not_a_pretrained_one_moved() -> None:
    plan = made("bert", "laptop")
    assert recipe_changes(plan, begun(plan, model__source=None)) == ["model.source: None there, 'org/small@abc' planned"]


def test_a_run_of_another_kind_is_told() -> None:
    assert recipe_changes(made("arm"), made("bert")) == ["it is of another kind"]


def test_a_folder_of_another_recipe_is_refused_with_what_to_do(tmp_path: Path) -> None:
    run = planned(tmp_path, [0])[1]
    check_same_recipe(run)
    write_json(run.path / "config.json", run.config.as_dict())
    check_same_recipe(run)
    write_json(run.path / "config.json", made("arm", optim__lr=0.5).as_dict())
    with pytest.raises(RunDirError, match=r"another recipe \(optim\.lr: 0\.5 there, 0\.002 planned\).*oelm clean arm"):
        check_same_recipe(run)


@pytest.mark.parametrize("content", [b"", b"[]", b"{", b'{"steps": NaN}', b"\xff", b"{}", b'{"examples": 5}'])
def test_a_folder_whose_config_is_damaged_is_refused_by_name(content: bytes, tmp_path: Path) -> None:
    run = planned(tmp_path, [0])[1]
    run.path.mkdir(parents=True)
    (run.path / "config.json").write_bytes(content)
    with pytest.raises(RunDirError, match=rf"config\.json.*Move {run.path} aside, or give another --out"):
        check_same_recipe(run)


def test_arms_are_confounded_by_all_that_is_not_the_method() -> None:
    cases: list[tuple[dict[str, Any], list[str]]] = [
        ({}, []),
        ({"method.layers": "last 1", "method.seed": 4}, []),
        ({"method.correction": 0.125, "method.scale": 2.0}, []),
        ({"optim.lr": 0.5}, ["optim.lr 0.5 against 0.002"]),
        ({"model.dropout": 0.5}, ["model.dropout 0.5 against 0.0"]),
        ({"model.seq_len": 16}, ["model.seq_len 16 against 32"]),
        ({"model.vocab_size": 300}, ["model.vocab_size 300 against 0"]),
        ({"data.source": "/x"}, ["data.source /x against stdlib"]),
        ({"steps": 5, "batch_size": 16}, ["steps 5 against 30", "batch_size 16 against 8"]),
    ]
    for changes, apart in cases:
        with case(changes, apart):
            arm = make_config(CATALOG.get("arm"), "smoke", seed=1, changes=changes)
            assert config_confounds(arm, made("base")) == apart
            # From a sweep each may have its own rate; more text, another text or another model it may not.
            is_tunable = all(key.startswith(("optim.", "method.", "model.dropout")) for key in changes)
            assert config_confounds(arm, made("base"), tuned=changes) == ([] if is_tunable else apart)


# At smoke a model is 32 wide, with 2 layers of 2 heads.
def test_a_control_may_have_another_shape_but_not_more_parameters() -> None:
    cases: list[tuple[str, int, bool]] = [
        ("model.ff_dim", 32, False),
        ("model.num_layers", 1, False),
        ("model.num_layers", 3, True),
        ("model.model_dim", 16, False),
        ("model.model_dim", 64, True),
        ("model.num_heads", 4, False),
        ("model.qk_dim", 2, False),
    ]
    for key, value, is_larger in cases:
        with case(key, value, is_larger):
            apart = [f"{key} {value} against {flatten(made('base').as_dict())[key]}"]
            control = make_config(CATALOG.get("late-base"), "smoke", seed=1, changes={key: value})
            assert config_confounds(control, made("base")) == (apart if is_larger else [])
            arm = make_config(CATALOG.get("arm"), "smoke", seed=1, changes={key: value})
            # Tuned or not: a gain by the size is none of the method.
            assert config_confounds(arm, made("base")) == config_confounds(arm, made("base"), tuned=[key]) == apart


def test_a_control_whose_parameters_nobody_can_count_here_is_confounded() -> None:
    # A pretrained model says its own shape, and is not on this machine.
    apart = config_confounds(made("bert", "laptop", model__source=None, model__num_layers=1), made("bert", "laptop"))
    assert "model.num_layers" in [text.split(" ")[0] for text in apart]


def test_arms_from_other_pretrained_weights_are_confounded() -> None:
    plan = made("bert", "laptop")
    assert config_confounds(made("bert", "laptop", model__source="/my/bert"), plan) == [
        "model.source /my/bert against org/small@abc",
        "model.sha256  against 1111",
    ]
