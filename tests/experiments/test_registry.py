"""The catalog reads entries as their author meant them, or says in which line they cannot be."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oelm.config import flatten
from oelm.errors import ConfigError
from oelm.experiments.catalog import Catalog, Criterion, check_name, load_catalog
from oelm.experiments.plan import make_config
from oelm.text import NAME
from tests.cases import case
from tests.experiments.planned import PAIR, catalog_of

PLAIN = "{kind: language_model, data: stdlib}"


def entry(**changes: Any) -> str:
    """Return an entry called `mine`, the third line of its file, with keys put in or replaced."""
    return "\n\nmine: " + json.dumps({"kind": "language_model", "data": "stdlib"} | changes)


def lr(catalog: Catalog, name: str, budget: str = "smoke") -> float:
    return make_config(catalog.get(name), budget, seed=0).optim.lr


def refused(text: str, message: str, *before: str) -> None:
    with pytest.raises(ConfigError, match=message):
        catalog_of(*before, text)


BAD_NAMES = [
    "../x",
    "/etc",
    "a/b",
    "",
    "x" * 65,
    "x" * 300,
    "a\x00b",
    "a\nb",
    "a\n",
    "-rf",
    ".hidden",
    "_a",
    "a b",
    "a.",
    "a\\b",
    "~",
] + [
    "con",
    "CON",
    "con.txt",
    "nul",
    "Aux",
    "com1",
    "LPT9.x",
    "\u0410GPT",
    "GP\u0422-02",
    "a\u200b",
    "caf\u00e9",
    "\uff27PT",
    "..",
    ".",
]


def test_a_name_that_is_no_folder_s_everywhere_is_refused_for_ids_and_groups() -> None:
    for name in BAD_NAMES:
        with case(name):
            refused(
                "\n" + json.dumps({name: {"kind": "language_model", "data": "stdlib"}}),
                r"^0\.yaml:2: the name .* is not allowed: ",
            )
            refused(entry(groups=[name]), r"^0\.yaml:3: the name .* is not allowed: ")


def test_a_name_of_the_pattern_is_allowed() -> None:
    cases: list[str] = ["a", "0a", "GPT-02-lr3e-4", "a.b_c-d", "x" * 64, "common", "console", "com10", "nullify"]
    for name in cases:
        with case(name):
            assert catalog_of(f"{name}: {PLAIN}").get(name).id == name


@given(st.text(max_size=70))
def test_an_allowed_name_stays_inside_its_parent(name: str) -> None:
    try:
        check_name(name, where="own.yaml:1")
    except ConfigError as problem:
        assert str(problem).startswith("own.yaml:1: ")
    else:
        assert NAME.fullmatch(name) and (Path("/root") / name).parent == Path("/root") and Path(name).name == name


def test_names_of_oelm_s_own_folders_and_of_all_are_refused() -> None:
    for name in ("train", "Finetune", "DEMO", "imported", "all", "All"):
        with case(name):
            refused(f"\n{name}: {PLAIN}", rf"^0\.yaml:2: '{name}' is reserved by oelm; choose another name$")


@pytest.mark.parametrize("second", ["mine", "Mine", "MINE"])
def test_an_id_of_another_file_cannot_be_taken_again_in_any_case(second: str) -> None:
    refused(f"\n\n{second}: {PLAIN}", rf"^1\.yaml:3: '{second}' is taken \(by 'mine'\); choose another name$", entry())


def test_ids_equal_but_for_case_are_refused_in_one_file() -> None:
    refused(f"mine: {PLAIN}\nMINE: {PLAIN}", r"^0\.yaml:2: 'MINE' is taken \(by 'mine'\)")


def test_a_name_cannot_be_an_experiment_and_a_group_and_the_later_of_the_two_is_told() -> None:
    group, name = entry(groups=["both"]), f"Both: {PLAIN}"
    refused(name, r"^1\.yaml:1: 'Both' is also the name of a group; rename one of them$", group)
    refused(group, r"^1\.yaml:3: 'Both' is also the name of a group; rename one of them$", name)


def test_groups_equal_but_for_case_are_refused() -> None:
    refused(
        "other: {kind: language_model, data: stdlib, groups: [Set]}",
        r"^1\.yaml:1: the group 'Set'.*'set'",
        entry(groups=["set"]),
    )


def test_all_cannot_be_joined_twice() -> None:
    refused(entry(groups=["ALL"]), r"^0\.yaml:3: every experiment is in the group 'all'; leave it out$")


def test_an_entry_that_is_no_mapping_is_refused() -> None:
    cases: list[Any] = [None, 5, "text", [1], True]
    for content in cases:
        with case(content):
            refused("\n" + json.dumps({"mine": content}), r"^0\.yaml:2: mine must be a mapping of settings, found ")


@pytest.mark.parametrize(
    ("key", "nearest"), [("metod", "method"), ("Baseline", "baseline"), ("setings", "settings"), ("extend", "extends")]
)
def test_an_unknown_key_is_refused_with_its_line_and_the_nearest(key: str, nearest: str) -> None:
    refused(
        f"\nmine:\n  kind: classifier\n  {key}: x\n", rf"^0\.yaml:4: mine: unknown key '{key}' \(did you mean '{nearest}'\?\)$"
    )


@pytest.mark.parametrize("key", ["id", "where", "_target_", "__class__"])
def test_a_key_that_is_ours_or_names_code_is_unknown(key: str) -> None:
    refused(f"mine:\n  kind: classifier\n  {key}: x\n", rf"^0\.yaml:3: mine: unknown key '{key}'")


def test_a_value_of_the_wrong_type_is_refused_with_file_line_and_key() -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"kind": "gpt"}, "kind: Input should be 'language_model' or 'classifier'"),
        ({"data": ""}, "data: .*at least 1 character"),
        ({"data": 5}, "data: Input should be a valid string"),
        ({"seeds": 0}, "seeds: .*greater than or equal to 1"),
        ({"seeds": 1.5}, "seeds: Input should be a valid integer"),
        ({"seeds": True}, "seeds: Input should be a valid integer"),
        ({"groups": "mine"}, "groups: "),
        ({"method": 5}, "method: must be the name of a preset, or a mapping"),
        ({"at": {"lapto": {}}}, "at.lapto: unknown budget 'lapto'; choose one of paper, workstation, laptop, smoke"),
        ({"at": {"laptop": 5}}, "at.laptop: "),
        ({"settings": [1]}, "settings: "),
        ({"reported": {"source": "x", "figures": {"ppl": "4"}}}, "reported.figures.ppl: Input should be a valid number"),
        (
            {"reported": {"source": "x", "figure": {}}},
            r"reported.figure: unknown key \(did you mean 'figures'\?\)",
        ),
        ({"criterion": {"ppl_ratio_at_most": 1.05}}, "entry: a criterion compares with a baseline"),
        ({"criterion": {}}, "criterion: give one of ppl_ratio_at_most and accuracy_loss_at_most"),
        ({"criterion": {"ppl_ratio_at_most": 0}}, "criterion.ppl_ratio_at_most: .*greater than 0"),
        (
            {"criterion": {"ppl_ratio_at_mst": 1.05}},
            r"criterion.ppl_ratio_at_mst: unknown key \(did you mean 'ppl_ratio_at_most'\?\)",
        ),
    ]
    for changes, message in cases:
        with case(changes, message):
            refused(entry(**changes), rf"^0\.yaml:3: mine: ({message})")


@pytest.mark.parametrize("key", ["kind", "data"])
def test_what_has_no_default_is_told_to_be_missing(key: str) -> None:
    both = {"kind": "classifier", "data": "sst2"}
    refused(
        json.dumps({"mine": {name: both[name] for name in both if name != key}}), f"mine: {key}: missing, and it has no default"
    )


def test_a_baseline_that_is_not_there_is_refused_with_the_nearest() -> None:
    refused(entry(baseline="bas"), r"^1\.yaml:3: mine: no baseline called 'bas' \(did you mean 'base'\?\)$", PAIR)


def test_a_baseline_with_a_baseline_of_its_own_is_refused() -> None:
    refused(entry(baseline="arm"), r"^1\.yaml:3: mine: its baseline arm has a baseline itself \(base\)$", PAIR)
    refused(entry(baseline="mine"), r"^0\.yaml:3: mine: its baseline mine has a baseline itself \(mine\)$")


def test_a_baseline_of_another_kind_is_refused() -> None:
    refused(entry(kind="classifier", baseline="base"), r"^1\.yaml:3: mine: its baseline base is of another kind$", PAIR)


@pytest.mark.parametrize(
    ("kind", "criterion"), [("language_model", "accuracy_loss_at_most"), ("classifier", "ppl_ratio_at_most")]
)
def test_a_criterion_of_the_other_kind_is_refused(kind: str, criterion: str) -> None:
    refused(entry(kind=kind, baseline="other", criterion={criterion: 0.5}), rf"the criterion does not fit a {kind}$")


def test_a_criterion_says_what_it_asks_for() -> None:
    assert str(Criterion(ppl_ratio_at_most=1.05)) == "PPL at most 1.05x the baseline's"
    assert str(Criterion(accuracy_loss_at_most=0.05)) == "accuracy at most 5 points below the baseline's"


def test_extends_takes_over_everything_but_title_note_and_reported() -> None:
    text = """
parent:
  {title: t, note: n, kind: language_model, data: stdlib, groups: [g], method: oelm_random, baseline: base, seeds: 3,
   criterion: {ppl_ratio_at_most: 1.1}, settings: {optim.lr: 0.5}, at: {smoke: {steps: 7}},
   reported: {source: s, figures: {a: 1}}}
child: {extends: parent}
"""
    catalog = catalog_of(PAIR, text)
    parent, child = catalog.get("parent"), catalog.get("child")
    own = {"id": "child", "title": "", "note": "", "reported": None, "where": "1.yaml:6"}
    assert child.model_dump() == parent.model_dump() | own


def test_an_own_value_replaces_the_inherited_one_and_null_takes_it_away() -> None:
    catalog = catalog_of(PAIR, "mine: {extends: arm, method: oelm_random, baseline: null, criterion: null}")
    mine = catalog.get("mine")
    assert (mine.method, mine.baseline, mine.criterion) == ("oelm_random", None, None)


def test_settings_are_inherited_key_by_key_and_methods_whole() -> None:
    text = """
a: {kind: language_model, data: stdlib, settings: {optim.lr: 0.1, steps: 9}, at: {smoke: {batch_size: 4, micro_batch_size: 2}},
    method: {init: orthogonal, freeze: [q, k]}}
b: {extends: a, settings: {optim.lr: 0.2}, at: {smoke: {micro_batch_size: 1}}, method: {layers: last 1}}
"""
    config = make_config(catalog_of(text).get("b"), "smoke", seed=0)
    assert (config.optim.lr, config.steps, config.batch_size, config.micro_batch_size) == (0.2, 9, 4, 1)
    assert (config.method.init, config.method.freeze, config.method.layers) == ("native", (), "last 1")


def test_the_nearest_entry_s_setting_wins_however_it_is_spelled() -> None:
    spellings = ["{optim.lr: %s}", "{optim: {lr: %s}}"]
    for first in spellings:
        for second in spellings:
            for third in spellings:
                text = f"a: {{kind: language_model, data: stdlib, settings: {first % 0.1}}}\n"
                text += f"b: {{extends: a, settings: {second % 0.2}}}\nc: {{extends: b, settings: {third % 0.3}}}"
                catalog = catalog_of(text)
                assert [lr(catalog, name) for name in "abc"] == [0.1, 0.2, 0.3]
                assert [lr(catalog_of(text.replace("settings: ", "at: {smoke: ").replace("}\n", "}}\n") + "}"), "c")] == [0.3]


def test_what_holds_at_one_budget_beats_what_holds_at_all() -> None:
    catalog = catalog_of(entry(settings={"optim.lr": 0.1}, at={"laptop": {"optim.lr": 0.2}}))
    assert (lr(catalog, "mine", "smoke"), lr(catalog, "mine", "laptop"), lr(catalog, "mine", "paper")) == (0.1, 0.2, 0.1)


def test_one_setting_in_two_spellings_is_refused() -> None:
    refused(
        entry(settings={"optim.lr": 1, "optim": {"lr": 2}}), r"^0\.yaml:3: mine: optim.lr is given twice in settings, in two"
    )
    refused(entry(at={"smoke": {"optim": {"lr": 2}, "optim.lr": 1}}), r"^0\.yaml:3: mine: optim.lr is given twice in at.smoke")


def test_method_and_seed_are_refused_where_they_would_be_ignored() -> None:
    cases_1: list[dict[str, Any]] = [{"method.layers": "last 1"}, {"method": "baseline"}, {"method": {"std": 1}}, {"seed": 3}]
    for place in ("settings", "at"):
        for setting in cases_1:
            with case(place, setting):
                changes = {"settings": setting} if place == "settings" else {"at": {"smoke": setting}}
                key = next(iter(flatten(setting)))
                refused(entry(**changes), rf"^0\.yaml:3: mine: {re.escape(key)} does not belong in (settings|at\.smoke); ")


def test_other_weights_do_not_inherit_the_digest_of_the_old_ones() -> None:
    weights = {"laptop": {"model.source": "a/b", "model.sha256": "0" * 64}}
    parent = json.dumps({"a": {"kind": "classifier", "data": "sst2", "at": weights}})
    text = "b: {extends: a, at: {laptop: {model.source: c/d}}}\nc: {extends: a, at: {laptop: {optim.lr: 1e-4}}}"
    catalog = catalog_of(parent, text)
    models = {name: make_config(catalog.get(name), "laptop", seed=0).as_dict()["model"] for name in "abc"}
    assert {name: (model["source"], model["sha256"]) for name, model in models.items()} == {
        "a": ("a/b", "0" * 64),
        "b": ("c/d", ""),
        "c": ("a/b", "0" * 64),
    }


def test_extending_what_is_not_there_is_refused_with_its_line() -> None:
    cases: list[Any] = ["nowhere", "BASE", "../base", "", 5, ["base"]]
    for parent in cases:
        with case(parent):
            refused("\nmine:\n  extends: " + json.dumps(parent), r"^1\.yaml:3: mine extends .*, which does not exist", PAIR)


def test_extending_nothing_is_the_same_as_not_extending() -> None:
    assert catalog_of("mine: {extends: null, kind: language_model, data: stdlib}").get("mine").kind == "language_model"


@pytest.mark.parametrize(
    ("text", "circle"),
    [
        ("a: {extends: a}", "a -> a"),
        ("a: {extends: b}\nb: {extends: a}", "a -> b -> a"),
        ("a: {extends: b}\nb: {extends: c}\nc: {extends: b}", "a -> b -> c -> b"),
    ],
)
def test_a_circle_of_extends_is_refused_and_shown(text: str, circle: str) -> None:
    refused(text, rf"^0\.yaml:\d: extends is circular: {circle}$")


def test_a_chain_of_extends_has_twenty_links_at_most() -> None:
    chain = [f"a0: {PLAIN}"] + [f"a{n}: {{extends: a{n - 1}}}" for n in range(1, 1100)]
    assert len(catalog_of("\n".join(chain[:21])).experiments) == 21
    for length in (22, 1100):
        refused("\n".join(chain[:length]), r": a21 extends a chain of more than 20 entries$")


def test_a_parent_may_stand_below_its_child() -> None:
    catalog = catalog_of(f"child: {{extends: parent, seeds: 2}}\nparent: {PLAIN}")
    assert [experiment.id for experiment in catalog] == ["child", "parent"] and catalog.get("child").seeds == 2


def test_ids_and_groups_are_chosen_whatever_their_case_each_once_in_the_catalog_s_order() -> None:
    text = "\n".join(f"e{n}: {{kind: language_model, data: stdlib, groups: [{'odd' if n % 2 else 'even'}]}}" for n in range(5))
    catalog = catalog_of(text)
    assert [found.id for found in catalog.select(["E4", "ODD", "e1"])] == ["e1", "e3", "e4"]
    assert [found.id for found in catalog.select(["all"])] == list(catalog.experiments)
    assert catalog.groups() == {"even": ["e0", "e2", "e4"], "all": ["e0", "e1", "e2", "e3", "e4"], "odd": ["e1", "e3"]}


def test_a_group_named_twice_by_an_entry_holds_it_once() -> None:
    assert catalog_of(entry(groups=["g", "g"])).groups() == {"g": ["mine"], "all": ["mine"]}


def test_an_unknown_id_is_refused_with_the_groups_and_what_is_near() -> None:
    catalog = load_catalog()
    cases: list[str] = ["GPT-2", "gpt_02", "studdy", "", "../GPT-02", "x" * 500]
    for name in cases:
        with case(name):
            for ask in (catalog.get, lambda name: catalog.select([name])):
                with pytest.raises(
                    ConfigError, match="^no experiment or group called .* groups are: demo, all, gpt, study, bert, "
                ) as caught:
                    ask(name)
                if name in ("GPT-2", "gpt_02", "studdy"):
                    assert "did you mean" in str(caught.value)


@pytest.mark.parametrize("name", ["GPT2", "gpt02", "GPT_002"])
def test_signs_and_zeros_that_were_left_out_are_found_before_a_group_of_a_similar_name(name: str) -> None:
    with pytest.raises(ConfigError, match=r"\(did you mean 'GPT-02'\?\)"):
        load_catalog().select([name])


def test_a_group_where_one_experiment_is_meant_is_told_to_be_one() -> None:
    with pytest.raises(ConfigError, match="^'encoder-decoder' is a group; name one of its experiments: T5-01, T5-02, BART-01"):
        load_catalog().get("encoder-decoder")


SEVERAL = """
plain: {kind: language_model, data: [stdlib, wikitext2], groups: [pair]}
frozen: {extends: plain, method: oelm_freeze, baseline: plain, title: frozen}
"""


def test_a_list_of_data_sets_makes_an_experiment_on_each_with_its_baseline_there() -> None:
    catalog = catalog_of(SEVERAL)
    assert list(catalog.experiments) == ["plain.stdlib", "plain.wikitext2", "frozen.stdlib", "frozen.wikitext2"]
    found = catalog.get("frozen.wikitext2")
    assert (found.data, found.baseline, found.title) == ("wikitext2", "plain.wikitext2", "wikitext2: frozen")


def test_groups_of_a_list_exist_on_all_sets_and_on_each_and_the_name_is_one() -> None:
    groups = catalog_of(SEVERAL).groups()
    assert groups["pair.stdlib"] == ["plain.stdlib", "frozen.stdlib"]
    assert groups["frozen"] == ["frozen.stdlib", "frozen.wikitext2"]
    assert len(groups["pair"]) == 4


def test_an_arm_on_several_sets_may_have_one_baseline_on_one() -> None:
    own = "mine: {kind: language_model, data: stdlib}\n"
    both = "both: {kind: language_model, data: [stdlib, wikitext2], baseline: mine}\n"
    assert {found.baseline for found in catalog_of(own + both) if found.id != "mine"} == {"mine"}


@pytest.mark.parametrize("data", ["[stdlib, 5]", "[stdlib, ../x]", "[stdlib, a/b.txt]", "['']"])
def test_a_list_of_data_takes_names_alone(data: str) -> None:
    refused(f"x: {{kind: language_model, data: {data}}}\n", r"x: a list of data takes names of data sets, not ")


def test_an_empty_list_of_data_is_refused() -> None:
    refused("x: {kind: language_model, data: []}\n", r"x: `data` is an empty list")
