"""The shipped catalog against the earlier study's own tables, and the fairness of every comparison in it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from oelm.budget import BUDGETS
from oelm.config import FinetuneConfig, RunConfig, flatten
from oelm.experiments.catalog import Catalog, load_catalog
from oelm.experiments.forecast import count_parameters
from oelm.experiments.plan import config_confounds, make_config
from oelm.method.method import PRESETS
from tests.cases import case

# id, data, method, lr, steps, then what was reported: best PPL, best loss, wall time as h, min, s, and seconds a step.
STUDY_GPT: list[tuple[str, str, str, float, int, float, float, tuple[int, int, int], float]] = [
    ("GPT-01", "tinystories", "baseline", 3e-4, 100_000, 4.27, 1.4516, (4, 31, 27), 0.0837),
    ("GPT-02", "tinystories", "oelm_freeze", 1e-3, 100_000, 4.69, 1.5456, (4, 32, 46), 0.0835),
    ("GPT-03", "tinystories", "oelm_random", 1e-3, 100_000, 4.97, 1.6038, (4, 15, 18), 0.0769),
    ("GPT-04", "openwebtext", "baseline", 3e-4, 150_000, 47.24, 3.855, (9, 10, 18), 0.184),
    ("GPT-05", "openwebtext", "oelm_freeze", 1e-3, 150_000, 54.29, 3.994, (9, 8, 46), 0.184),
    ("GPT-06", "wikitext103", "baseline", 3e-4, 200_000, 25.13, 3.224, (3, 49, 35), 0.06168),
    ("GPT-07", "wikitext103", "oelm_freeze", 1e-3, 200_000, 29.03, 3.368, (3, 47, 29), 0.06123),
]
_TIMED_1 = {"wall_s": 11971, "step_s": 0.162, "final_loss": 0.523}
_TIMED_2 = {"wall_s": 5138, "step_s": 0.069, "final_loss": 0.498}
# id, data, method, lr, best accuracy in percent, what else was reported.
STUDY_BERT: list[tuple[str, str, str, float, float, dict[str, float]]] = [
    ("XNLI-01", "xnli", "baseline", 2e-5, 76.71, _TIMED_1),
    ("XNLI-02", "xnli", "oelm_freeze_pretrained", 1e-4, 77.79, _TIMED_2),
    ("SST-2-01", "sst2", "baseline", 2e-5, 93.12, {}),
    ("SST-2-02", "sst2", "oelm_freeze_pretrained", 1e-4, 91.28, {}),
    ("SST-2-03", "sst2", "oelm_random", 1e-4, 82.11, {}),
    ("MNLI-01", "mnli", "baseline", 2e-5, 83.44, {}),
    ("MNLI-02", "mnli", "oelm_freeze_pretrained", 1e-4, 82.23, {}),
]
STUDY = [row[0] for row in STUDY_GPT] + [row[0] for row in STUDY_BERT]
# Controls of a study's arm keep that arm's learning rate at paper, so that they differ from it in the method alone.
KEEP_THEIR_ARM_S_LR = {
    *("GPT-02-matched", "GPT-02-global", "GPT-02-uniform"),
    *(f"SST-2-02-{end}" for end in ("fresh", "matched", "asis", "layer", "polar", "rotated", "flat", "lowrank")),
    "MNLI-02-asis",
}
# A thin control, and the low-rank arm of the same corpus.
THIN = {"GPT-01-thin": "GPT-02", "GPT-04-thin": "GPT-05", "GPT-06-thin": "GPT-07", "GPT-08-thin": "GPT-09"}
# The same for a correction of the first layer alone.
THINNER = {f"{name}ner": arm for name, arm in THIN.items()}
# Frozen arms and baselines of which there is one behind a short convolution, too.
CONV = {"GPT-02": "GPT-01", "GPT-05": "GPT-04", "GPT-07": "GPT-06", "GPT-09": "GPT-08"}
# Controls that train everything: what they have less of than their baseline.
SHAPE = {"GPT-01-lean": "model.ff_dim"} | dict.fromkeys([*THIN, *THINNER], "model.qk_dim")
# The data sets of the study's own arms, each of which is on all of them.
SETS = ("tinystories", "wikitext2", "wikipedia", "openwebtext", "stdlib", "site-packages")
SHAPE |= {f"{arm}.{name}": "model.qk_dim" for arm in ("thin", "conv-thin", "conv-half") for name in SETS}
ON_EVERY_CORPUS = {"scaled": "pure"} | dict.fromkeys(("matrix", "lowrank", "lowrank-first"), "little")
ON_EVERY_CORPUS |= dict.fromkeys(("last-half", "odd", "first-free"), "partial")
# Each variant, by what follows the frozen arm's name, and the class of its verdicts.
VARIANTS = {f"{arm}-{end}": kind for arm in THIN.values() for end, kind in ON_EVERY_CORPUS.items()}
VARIANTS |= {f"GPT-0{number}-matched": "pure" for number in (5, 7, 9)} | {"GPT-02-head-gain": "little"}
VARIANTS |= {f"GPT-02-{end}": "partial" for end in ("first-half", "even", "q-only", "k-only")}
SLICES = {"axes": "pure", "axes-lowrank": "little", "axes-q": "partial"}
VARIANTS |= {f"{arm}-{end}": kind for arm in ("GPT-02", "GPT-09") for end, kind in SLICES.items()}
# What stands behind a short convolution besides frames and uniform attention.
BEHIND_CONV = {f"{arm}-conv-{end}": kind for arm in ("GPT-02", "GPT-09") for end, kind in SLICES.items()}
BEHIND_CONV |= {"GPT-09-conv-lowrank": "little"}
VARIANTS |= {f"GPT-02-{end}": "partial" for end in ("thaw-first", "thaw-last", "thaw-all", "then-freeze")}


@pytest.fixture(scope="module")
def catalog() -> Catalog:
    return load_catalog()


# What does not change is made once for all tests.
MADE: dict[tuple[str, str], RunConfig | FinetuneConfig] = {}
TRAINABLE: dict[tuple[object, ...], int] = {}


def made(catalog: Catalog, name: str, budget: str) -> RunConfig | FinetuneConfig:
    if (name, budget) not in MADE:
        MADE[name, budget] = make_config(catalog.get(name), budget, seed=0)
    return MADE[name, budget]


def settings(catalog: Catalog, name: str, budget: str) -> dict[str, Any]:
    return flatten(made(catalog, name, budget).as_dict())


def trainable(catalog: Catalog, name: str, budget: str, **changes: Any) -> int:
    key = (name, budget, *changes.items())
    if key not in TRAINABLE:
        counted = count_parameters(make_config(catalog.get(name), budget, seed=0, changes=changes))
        assert counted is not None
        TRAINABLE[key] = counted.trainable
    return TRAINABLE[key]


def test_each_language_model_of_the_study_is_there_with_its_figures(catalog: Catalog) -> None:
    for row in STUDY_GPT:
        with case(row):
            name, data, method, lr, steps, ppl, loss, (hours, minutes, seconds), step_s = row
            experiment, config = catalog.get(name), made(catalog, name, "paper")
            assert isinstance(config, RunConfig)
            assert (config.data.source, config.data.max_tokens, config.data.tokenizer) == (data, None, "gpt2")
            assert (config.method, config.optim.lr, config.steps) == (PRESETS[method], lr, steps)
            assert experiment.reported is not None and "earlier study" in experiment.reported.source
            wall_s = 3600 * hours + 60 * minutes + seconds
            assert experiment.reported.figures == {"best_ppl": ppl, "best_val_loss": loss, "wall_s": wall_s, "step_s": step_s}


def test_each_classifier_of_the_study_is_there_with_its_figures(catalog: Catalog) -> None:
    for row in STUDY_BERT:
        with case(row):
            name, data, method, lr, percent, timed = row
            experiment, config = catalog.get(name), made(catalog, name, "paper")
            assert isinstance(config, FinetuneConfig)
            assert (config.examples.task, config.examples.language, config.examples.max_train) == (data, "en", 0)
            assert (config.method, config.optim.lr) == (PRESETS[method], lr)
            assert (config.batch_size, config.epochs, config.steps) == (16, 3, 0)
            assert config.model.source is not None and config.model.source.startswith("google-bert/bert-base-uncased@")
            assert experiment.reported is not None and "earlier study" in experiment.reported.source
            assert experiment.reported.figures == {"best_accuracy": round(percent / 100, 4)} | timed


def test_the_study_is_what_the_tables_list_and_reported_values_are_the_study_s_alone(catalog: Catalog) -> None:
    assert sorted(catalog.groups()["study"]) == sorted(STUDY)
    assert sorted(found.id for found in catalog if found.reported is not None) == sorted(STUDY)


def test_medium_512_is_the_study_s_recipe_to_the_last_setting(catalog: Catalog) -> None:
    assert made(catalog, "GPT-01", "paper").as_dict() == {
        "method": PRESETS["baseline"].model_dump(mode="json"),
        "model": {
            "vocab_size": 0,
            "seq_len": 512,
            "model_dim": 512,
            "num_layers": 6,
            "num_heads": 8,
            "ff_dim": 2048,
            "dropout": 0.1,
            "qk_dim": None,
            "short_conv": 0,
        },
        "data": {"source": "tinystories", "tokenizer": "gpt2", "max_tokens": None},
        "optim": {
            "lr": 3e-4,
            "name": "adamw",
            "matrix_rate": 5.0,
            "thin": "muon",
            "betas": [0.9, 0.999],
            "weight_decay": 0.01,
            "clip_norm": 1.0,
        },
        "schedule": {"warmup_steps": 1000, "final_fraction": 0.0},
        "steps": 100_000,
        "batch_size": 8,
        "micro_batch_size": 8,
        "eval_every": 1000,
        "save_every": 5000,
        "keep_checkpoints": 2,
        "timing_warmup_steps": 100,
        "seed": 0,
        "device": "auto",
        "precision": "auto",
        "compile": False,
        "deterministic": False,
        "extended_at": [],
        "init_from": None,
    }


def test_medium_512_s_arms_differ_in_data_method_lr_and_steps_alone(catalog: Catalog) -> None:
    for name in [row[0] for row in STUDY_GPT]:
        with case(name):
            ours, first = settings(catalog, name, "paper"), settings(catalog, "GPT-01", "paper")
            differing = {key for key in ours if ours[key] != first[key] and not key.startswith("method.")}
            assert differing <= {"data.source", "optim.lr", "steps"}


def test_medium_512_has_44_896_768_parameters_of_which_freezing_takes_3_145_728(catalog: Catalog) -> None:
    baseline, frozen = (count_parameters(made(catalog, name, "paper")) for name in ("GPT-01", "GPT-02"))
    assert baseline is not None and frozen is not None
    assert (baseline.total, baseline.trainable) == (44_896_768, 44_896_768)
    assert (frozen.total, frozen.total - frozen.trainable) == (44_896_768, 3_145_728)


@pytest.mark.parametrize("name", ["MNLI-02", "XNLI-02"])
def test_bert_with_three_labels_has_the_study_s_counts(name: str, catalog: Catalog) -> None:
    counted = count_parameters(made(catalog, name, "paper"))
    assert counted is not None
    assert (counted.total, counted.total - counted.trainable, counted.trainable) == (109_484_547, 14_174_208, 95_310_339)


@pytest.mark.parametrize("budget", BUDGETS)
def test_the_lean_control_has_as_many_trainable_parameters_as_its_feed_forward_allows(budget: str, catalog: Catalog) -> None:
    frozen, lean = (trainable(catalog, name, budget) for name in ("GPT-02", "GPT-01-lean"))
    config = made(catalog, "GPT-01-lean", budget)
    assert isinstance(config, RunConfig)
    one_more = trainable(catalog, "GPT-01-lean", budget, **{"model.ff_dim": config.model.ff_dim + 1})
    assert lean <= frozen < one_more
    # At smoke one unit of the feed-forward is 0.4% of all there is.
    assert budget == "smoke" or frozen - lean <= 0.001 * frozen


@pytest.mark.parametrize("budget", BUDGETS)
def test_every_experiment_is_a_config_at_every_budget(budget: str, catalog: Catalog) -> None:
    for experiment in catalog:
        config = make_config(experiment, budget, seed=3)
        assert config.seed == 3
        assert isinstance(config, RunConfig if experiment.kind == "language_model" else FinetuneConfig)


@pytest.mark.parametrize("budget", ["laptop", "smoke"])
def test_below_paper_an_arm_differs_from_its_baseline_in_its_method_or_a_control_s_shape_alone(
    budget: str, catalog: Catalog
) -> None:
    for name, baseline in catalog.baselines().items():
        ours, theirs = settings(catalog, name, budget), settings(catalog, baseline, budget)
        differing = {key for key in {**ours, **theirs} if ours.get(key) != theirs.get(key)}
        allowed = {SHAPE[name]} if name in SHAPE else {key for key in differing if key.startswith("method.")}
        assert differing and differing <= allowed, name
        assert config_confounds(made(catalog, name, budget), made(catalog, baseline, budget)) == []


def test_at_paper_the_study_s_arms_and_their_controls_are_confounded_and_by_the_lr_alone(catalog: Catalog) -> None:
    found = {
        name: config_confounds(made(catalog, name, "paper"), made(catalog, baseline, "paper"))
        for name, baseline in catalog.baselines().items()
    }
    confounded = {name for name, apart in found.items() if apart}
    assert confounded == ({*STUDY} & catalog.baselines().keys()) | KEEP_THEIR_ARM_S_LR
    for name in confounded:
        rates = "0.001 against 0.0003" if name.startswith("GPT") else "0.0001 against 2e-05"
        assert found[name] == [f"optim.lr {rates}"]


def test_workstation_s_classifiers_take_the_whole_set_once_with_the_model_s_own_dropout(catalog: Catalog) -> None:
    for name in catalog.groups()["bert"]:
        found = settings(catalog, name, "workstation")
        is_sst2 = name.startswith("SST-2")
        assert (found["epochs"], found["examples.max_train"]) == ((1, 0) if is_sst2 else (3, 24_511))
        assert found["model.dropout"] is None and "MiniLM" in found["model.source"] and found["optim.lr"] == 1e-4


def test_a_control_differs_from_the_arm_it_controls_in_the_method_alone(catalog: Catalog) -> None:
    for name in sorted(KEEP_THEIR_ARM_S_LR):
        with case(name):
            counterpart = name.rsplit("-", 1)[0]
            for budget in BUDGETS:
                assert catalog.get(name).baseline == catalog.get(counterpart).baseline
                ours, theirs = settings(catalog, name, budget), settings(catalog, counterpart, budget)
                differing = {key for key in ours if ours[key] != theirs[key]}
                assert differing and all(key.startswith("method.") for key in differing)


@pytest.mark.parametrize(
    ("name", "counterpart", "lr"),
    [("GPT-02-lr3e-4", "GPT-02", 3e-4), ("GPT-01-lr1e-3", "GPT-01", 1e-3), ("SST-2-02-lr2e-5", "SST-2-02", 2e-5)],
)
def test_the_arms_that_make_fair_pairs_at_paper_change_the_lr_there_and_nothing_below(
    name: str, counterpart: str, lr: float, catalog: Catalog
) -> None:
    ours, theirs = settings(catalog, name, "paper"), settings(catalog, counterpart, "paper")
    assert {key for key in ours if ours[key] != theirs[key]} == {"optim.lr"} and ours["optim.lr"] == lr
    for budget in ("laptop", "smoke"):
        assert settings(catalog, name, budget) == settings(catalog, counterpart, budget)


def test_every_arm_has_a_criterion_of_the_study_s_and_five_seeds_planned(catalog: Catalog) -> None:
    for experiment in catalog:
        # The floor of the study's families measures what attention is worth, and has no target; the demo gives no verdict.
        is_demo = experiment.groups == ("demo",)
        is_floor = experiment.id.split(".")[0] in ("uniform", "conv-uniform")
        has_target = experiment.baseline is not None and not is_floor and not is_demo
        assert experiment.seeds == (1 if is_demo else 5) and (experiment.criterion is not None) == has_target
        if experiment.criterion is not None:
            bound = experiment.criterion.ppl_ratio_at_most, experiment.criterion.accuracy_loss_at_most
            assert bound == ((1.05, None) if experiment.kind == "language_model" else (None, 0.05))


def test_every_baseline_and_control_of_shape_trains_everything_and_every_other_arm_freezes(catalog: Catalog) -> None:
    frozen = {"GPT-02-q-only": ("q",), "GPT-02-k-only": ("k",)}
    for experiment in catalog:
        is_free = experiment.baseline is None or experiment.id in SHAPE
        arm = experiment.id.split(".")[0]
        rest = ("q",) if arm.endswith(("-axes-q", "slices-q", "slices-q-lowrank")) else ("q", "k")
        rest = ("k",) if arm == "slices-k" else rest
        expected = () if is_free else frozen.get(experiment.id, rest)
        assert made(catalog, experiment.id, "smoke").method.freeze == expected, experiment.id


def test_a_thin_control_has_exactly_the_trainable_parameters_of_the_low_rank_arm(catalog: Catalog) -> None:
    for budget in BUDGETS:
        for thin in THIN:
            with case(budget, thin):
                assert trainable(catalog, thin, budget) == trainable(catalog, f"{THIN[thin]}-lowrank", budget)


def test_arms_behind_a_short_convolution_have_a_baseline_behind_one_and_differ_in_nothing_else(catalog: Catalog) -> None:
    for budget in BUDGETS:
        for frozen, plain in CONV.items():
            with case(budget, frozen, plain):
                baseline = settings(catalog, f"{plain}-conv", budget)
                others = [name for name in BEHIND_CONV if name.startswith(frozen)]
                for name in (f"{frozen}-conv", f"{frozen}-conv-uniform", *others):
                    assert catalog.get(name).baseline == f"{plain}-conv"
                    arm = settings(catalog, name, budget)
                    differing = {key for key in arm if arm[key] != baseline[key]}
                    assert differing and all(key.startswith("method.") for key in differing)
                without = settings(catalog, plain, budget)
                assert {key for key in baseline if baseline[key] != without[key]} == {"model.short_conv"}


@pytest.mark.parametrize("thinner", THINNER)
def test_a_thinner_control_has_as_many_as_a_correction_of_the_first_layer_or_the_most_that_are_no_more(
    thinner: str, catalog: Catalog
) -> None:
    for budget in BUDGETS:
        ours, theirs = (trainable(catalog, name, budget) for name in (thinner, f"{THINNER[thinner]}-lowrank-first"))
        wider = trainable(catalog, thinner, budget, **{"model.qk_dim": 2})
        assert ours <= theirs < wider and (ours == theirs or budget == "paper")


def test_what_learns_on_top_is_at_most_an_eighth_of_the_baseline_s_q_and_k(catalog: Catalog) -> None:
    for name in [name for name, kind in VARIANTS.items() if kind == "little"]:
        with case(name):
            # At smoke, which is never a result, two heads make a matrix of each a quarter.
            for budget in ("paper", "laptop"):
                counted = count_parameters(made(catalog, name, budget))
                assert counted is not None
                roles, without = counted.by_role, {"frozen": 0}
                replaced = sum(roles.get(role, without)["frozen"] for role in ("query", "key")) + counted.selected
                on_top = sum(roles.get(role, {"trainable": 0})["trainable"] for role in ("gain", "correction"))
                assert 0 < 8 * on_top <= replaced, budget


def test_each_variant_is_in_the_class_that_the_plan_of_the_study_says(catalog: Catalog) -> None:
    free = {"GPT-08": "free"} | dict.fromkeys([*THIN, *THINNER], "free")
    conv = {f"{name}-conv": kind for arms in CONV.items() for name, kind in zip(arms, ("pure", "free"), strict=True)}
    conv |= {f"{name}-conv-uniform": "pure" for name in CONV}
    expected = VARIANTS | BEHIND_CONV | free | conv | {"GPT-09": "pure"}
    assert {name: made(catalog, name, "laptop").method.kind for name in catalog.groups()["variants"]} == expected


def test_a_variant_differs_from_the_frozen_arm_of_its_corpus_in_the_method_and_at_paper_in_the_lr(catalog: Catalog) -> None:
    for name in VARIANTS:
        with case(name):
            arm = name[:6]
            assert catalog.get(name).baseline == catalog.get(arm).baseline
            for budget in BUDGETS:
                ours, theirs = settings(catalog, name, budget), settings(catalog, arm, budget)
                differing = {key for key in {**ours, **theirs} if ours.get(key) != theirs.get(key)}
                assert all(key.startswith("method.") or (key, budget) == ("optim.lr", "paper") for key in differing)
                assert any(key.startswith("method.") for key in differing)


def test_the_groups_are_those_of_the_docs_and_hold_what_they_say(catalog: Catalog) -> None:
    groups = catalog.groups()
    assert set(groups) >= {"gpt", "bert", "study", "ablation", "variants", "encoder-decoder", "all", "arms", "demo"}
    assert groups["all"] == list(catalog.experiments) and len(groups["demo"]) == 4
    assert len(groups["all"]) == 109 + len(groups["arms"]) + len(groups["demo"])
    assert {*groups["variants"]} <= {*groups["gpt"]} and len(groups["variants"]) == 75
    assert not {*groups["variants"]} & {*groups["study"], *groups["ablation"]}
    grouped = {*groups["gpt"], *groups["bert"], *groups["encoder-decoder"], *groups["arms"], *groups["demo"]}
    assert grouped == {*groups["all"]} >= {*groups["ablation"]}
    assert not {*groups["study"]} & {*groups["ablation"]}
    assert {catalog.get(name).kind for name in groups["gpt"]} == {"language_model"}
    assert {catalog.get(name).kind for name in groups["bert"] + groups["encoder-decoder"]} == {"classifier"}


def test_every_arm_of_the_study_is_on_every_data_set_beside_its_baseline_there(catalog: Catalog) -> None:
    groups = catalog.groups()
    arms = {name for name in groups if {f"{name}.{each}" for each in SETS} == {*groups[name]}}
    assert {"learn", "uniform", "thin", "lowrank", "slices-q", "conv-learn", "conv-uniform", "conv-slices-q"} <= arms
    for each in SETS:
        assert {*groups[f"arms.{each}"]} == {f"{arm}.{each}" for arm in arms}
    for name in groups["arms"]:
        experiment = catalog.get(name)
        arm, _, data = name.partition(".")
        family = "conv-learn" if arm.startswith("conv-") else "learn"
        assert experiment.data == data and experiment.baseline == (None if arm == family else f"{family}.{data}")
        assert experiment.title.startswith(f"{data}: ")
        is_behind = made(catalog, name, "workstation").model.model_dump()["short_conv"] == 3
        assert is_behind == arm.startswith("conv-")


@pytest.mark.parametrize("name", ["T5-01", "T5-02", "BART-01", "BART-02"])
def test_encoder_decoders_are_fresh_ones_below_paper_and_pinned_pretrained_ones_there(name: str, catalog: Catalog) -> None:
    architecture = name.split("-")[0].lower()
    for budget in ("laptop", "smoke"):
        found = settings(catalog, name, budget)
        assert (found["model.source"], found["model.architecture"], found["examples.task"]) == (None, architecture, "stdlib")
    repo, _, commit = settings(catalog, name, "paper")["model.source"].partition("@")
    assert architecture in repo and len(commit) == 40


def test_every_pretrained_model_is_pinned_by_commit(catalog: Catalog) -> None:
    found = {settings(catalog, experiment.id, budget).get("model.source") for experiment in catalog for budget in BUDGETS}
    sources = [str(source) for source in found if source is not None]
    assert len(sources) == 4
    for source in sources:
        commit = source.partition("@")[2]
        assert len(commit) == 40 and set(commit) <= set("0123456789abcdef")


def test_smoke_asks_for_nothing_that_a_machine_may_lack(catalog: Catalog) -> None:
    for experiment in catalog:
        found = settings(catalog, experiment.id, "smoke")
        assert found.get("data.source", "stdlib") == found.get("examples.task", "stdlib") == "stdlib"
        assert found.get("model.source") is None


def test_every_entry_says_what_it_is_and_the_catalog_is_plain_data(catalog: Catalog) -> None:
    rows = [experiment.model_dump(mode="json") for experiment in catalog]
    assert json.loads(json.dumps(rows, allow_nan=False)) == rows
    assert all(row["title"] for row in rows) and len({row["title"] for row in rows}) == len(rows)


# At smoke, which is never a result, two heads make a matrix per head a quarter.
def test_a_little_is_at_most_an_eighth_at_the_shapes_of_results(catalog: Catalog) -> None:
    for budget in ("paper", "laptop"):
        for name in [name for name, kind in VARIANTS.items() if kind == "little"]:
            with case(budget, name):
                baseline = catalog.get(name).baseline
                assert baseline is not None
                all_of_it, none_of_it, little = (trainable(catalog, each, budget) for each in (baseline, name[:6], name))
                assert 0 < little - none_of_it <= (all_of_it - none_of_it) / 8
