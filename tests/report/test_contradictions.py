"""Each number by which the earlier study contradicts itself, as FACTS.md section 6 gives it, comes out of the arithmetic."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from oelm.config import RunConfig
from oelm.experiments.forecast import count_parameters
from oelm.experiments.plan import make_config
from oelm.experiments.registry import Catalog
from oelm.models.shape import step_work
from oelm.report.contradictions import contradictions, gpt_recipe, paper_settings, standard_errors
from oelm.report.words import Words
from tests.experiments.planned import catalog_of
from tests.report.reading import english, texts
from tests.report.synthetic import package_catalog


@pytest.fixture(scope="module")
def found() -> dict[str, dict[str, Any]]:
    return {entry.key.removeprefix("contradiction."): entry.values for entry in contradictions(package_catalog())}


def told(found: dict[str, dict[str, Any]], name: str) -> str:
    return Words("en")(f"contradiction.{name}", **found[name])


# 1. "~82M parameters" and "12.9% saved" against 44,896,768 and 3,145,728, 7.0%; checkpoints of 514 and 490 MiB.
def test_parameters(found: dict[str, dict[str, Any]]) -> None:
    values = found["parameters"]
    assert (values["claimed"], values["claimed_share"]) == (82.0, pytest.approx(12.9))
    assert (values["total"], values["frozen"]) == (44_896_768, 3_145_728)
    assert round(values["share"], 1) == 7.0
    assert (round(values["whole"]), round(values["smaller"])) == (514, 490)
    for number in ("82M", "12.9%", "44,896,768", "3,145,728", "7.0%", "514 MiB", "490 MiB"):
        assert number in told(found, "parameters")


def test_the_counted_parameters_are_those_of_the_real_model() -> None:
    config = make_config(package_catalog().get("GPT-02"), "paper", seed=0)
    audit = count_parameters(config)
    recipe = gpt_recipe(package_catalog(), "GPT-02")
    assert audit is not None and (recipe.total, recipe.frozen) == (audit.total, audit.frozen)


@pytest.mark.parametrize("name", ["GPT-01", "GPT-02", "GPT-04", "GPT-07"])
def test_a_recipe_is_what_the_config_says(name: str) -> None:
    config = make_config(package_catalog().get(name), "paper", seed=0)
    assert isinstance(config, RunConfig)
    recipe, model = gpt_recipe(package_catalog(), name), config.model
    assert (recipe.seq_len, recipe.model_dim, recipe.num_layers, recipe.ff_dim) == (
        model.seq_len,
        model.model_dim,
        model.num_layers,
        model.ff_dim,
    )
    assert (recipe.steps, recipe.batch_size) == (config.steps, config.batch_size)


@pytest.mark.parametrize("name", [experiment.id for experiment in package_catalog().select(["study"])])
def test_learning_rates_are_those_of_the_config(name: str) -> None:
    experiment = package_catalog().get(name)
    assert paper_settings(experiment)["optim.lr"] == make_config(experiment, "paper", seed=0).optim.lr


# 2. "57% faster"; at most 1/18 = 5.6% of a block, about 2.3% of Medium-512; later 1.4% slower.
def test_speed(found: dict[str, dict[str, Any]]) -> None:
    values = found["speed"]
    assert values["claimed"] == pytest.approx(57.0) and round(values["measured"], 1) == 57.4
    assert values["block"] == pytest.approx(100 / 18) and round(values["block"], 1) == 5.6
    assert round(values["gpt"], 1) == 2.3 and values["slower"] == pytest.approx(1.4)
    for number in ("57% faster", "5.6%", "2.3%", "1.4% slower"):
        assert number in told(found, "speed")


def test_the_bound_is_that_of_the_real_shape(found: dict[str, dict[str, Any]]) -> None:
    config = make_config(package_catalog().get("GPT-02"), "paper", seed=0)
    assert isinstance(config, RunConfig)
    work = step_work(config.model.model_copy(update={"vocab_size": 50257}), batch_size=8)
    assert found["speed"]["gpt"] == 100 * work.frozen_saving / (work.matmuls + work.optimizer)


# 3. std 1/sqrt(512) = 0.044 against 0.02, logit variance about 24 times; 4.97 -> 4.69 is -5.6%, +6.0% the other way round.
def test_scale(found: dict[str, dict[str, Any]]) -> None:
    values = found["scale"]
    assert values["claimed"] == pytest.approx(6.0)
    assert (round(values["ours"], 3), values["theirs"]) == (0.044, 0.02)
    assert round(values["times"]) == 24
    assert (round(values["down"], 1), round(values["up"], 1)) == (-5.6, 6.0)
    for number in ("6%", "0.044", "0.02", "24 times", "-5.6%", "+6.0%"):
        assert number in told(found, "scale")


# 4. 3e-4 against 1e-3, 2e-5 against 1e-4.
def test_rates(found: dict[str, dict[str, Any]]) -> None:
    pairs = found["rates"]["pairs"].split("; ")
    assert found["rates"]["count"] == len(pairs) == 8
    assert {tuple(re.findall(r" (\S+) / \S+ (\S+)", pair)[0]) for pair in pairs} == {("0.001", "0.0003"), ("0.0001", "2e-05")}
    assert {pair.split(" ")[0] for pair in pairs} == {
        *("GPT-02", "GPT-03", "GPT-05", "GPT-07"),
        *("SST-2-02", "SST-2-03", "MNLI-02", "XNLI-02"),
    }


# 5. 100k steps x 0.0837 s = 2h20m of 4h31m; 0.184 s a step would exceed the wall time.
def test_clock(found: dict[str, dict[str, Any]]) -> None:
    values = found["clock"]
    assert (values["steps"], values["step_s"], values["other_step_s"]) == (100_000, 0.0837, 0.184)
    assert abs(60 * values["stepping"] - (2 * 60 + 20)) < 1 and abs(60 * values["wall"] - (4 * 60 + 31)) < 1
    # Half of it is unaccounted for: 1 - 8,370 / 16,287.
    assert values["lost"] == pytest.approx(100 * (1 - 8370 / 16287)) and round(values["lost"]) == 49
    assert values["other"] == pytest.approx(18_400 / 3600) and values["other"] > values["wall"]
    for number in ("100,000 steps", "0.0837 s", "2.33 h", "4.52 h", "49%", "0.184 s", "5.11 h"):
        assert number in told(found, "clock")


# 5. OpenWebText with 100k and 150k steps, 40M and 40B tokens (the file says 94M); TinyStories with 2M and 50M.
def test_sizes(found: dict[str, dict[str, Any]]) -> None:
    assert found["sizes"] == {
        "low": 40.0,
        "high": 40.0,
        "file": 189.0,
        "tokens": 94.5,
        "steps_low": 100_000.0,
        "steps_high": 150_000.0,
        "stories_low": 2.0,
        "stories_high": 50.0,
    }
    for number in ("40M", "40B", "100,000", "150,000", "189 MB", "94.5M", "2M", "50M"):
        assert number in told(found, "sizes")


# 6. +1.08 points on 2,490 pairs is about 0.9 standard errors, -1.84 on 872 about 1.4.
def test_chance(found: dict[str, dict[str, Any]]) -> None:
    values = found["significance"]
    assert (round(values["xnli"], 2), values["xnli_pairs"], round(values["xnli_errors"], 1)) == (1.08, 2490, 0.9)
    assert (round(values["sst2"], 2), values["sst2_sentences"], round(values["sst2_errors"], 1)) == (-1.84, 872, 1.4)
    for number in ("+1.08", "2490", "0.9", "-1.84", "872", "1.4"):
        assert number in told(found, "significance")


def test_standard_errors_by_hand() -> None:
    # sqrt(0.25/100 + 0.24/100) = 0.07; a tenth is 1.43 of them.
    assert standard_errors(0.5, 0.6, 100) == pytest.approx(0.1 / 0.07)


# 6. 76.71% is far below 83.44% from the same training pairs.
def test_same_pairs(found: dict[str, dict[str, Any]]) -> None:
    values = found["same_pairs"]
    assert (round(values["xnli"], 2), round(values["mnli"], 2), round(values["apart"], 2)) == (76.71, 83.44, 6.73)


# 7. 15 announced, 13 listed.
def test_count(found: dict[str, dict[str, Any]]) -> None:
    assert found["count"] == {"announced": 15.0, "listed": 13}
    assert told(found, "count") == "15 experiments were announced, 13 are listed."


def test_a_users_own_entries_are_not_the_earlier_studys(found: dict[str, dict[str, Any]]) -> None:
    own = catalog_of(
        """
MINE-01: {kind: language_model, data: stdlib, groups: [study], at: {paper: {optim.lr: 1.0e-2}}}
MINE-02: {extends: MINE-01, baseline: MINE-01, at: {paper: {optim.lr: 2.0e-2}}, reported: {source: me, figures: {best_ppl: 4}}}
"""
    )
    both = Catalog(package_catalog().experiments | own.experiments)
    assert {entry.key.removeprefix("contradiction."): entry.values for entry in contradictions(both)} == found


def test_a_report_says_all_of_them_whatever_was_run(tmp_path: Path, found: dict[str, dict[str, Any]]) -> None:
    shown = texts(english(tmp_path), "reported")
    assert [text for text in shown if text in {told(found, name) for name in found}] == [told(found, name) for name in found]
    assert len(found) == 9
