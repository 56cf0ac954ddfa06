"""One dial sets the size of it all, and every position of it is a config that holds together."""

from __future__ import annotations

import pytest

from oelm.budget import BUDGETS, budget_settings
from oelm.config import parse_config
from oelm.errors import ConfigError


@pytest.mark.parametrize("budget", BUDGETS)
def test_every_budget_is_a_config(budget: str) -> None:
    assert parse_config(budget_settings(budget), where=budget).steps > 0


def test_the_budgets_are_the_four_of_the_design() -> None:
    assert BUDGETS == ("paper", "workstation", "laptop", "smoke")


def test_budgets_shrink_in_work_from_paper_to_smoke() -> None:
    made = [parse_config(budget_settings(budget), where=budget) for budget in BUDGETS]
    tokens = [config.steps * config.batch_size * config.model.seq_len for config in made]
    assert tokens == sorted(tokens, reverse=True) and len(set(tokens)) == len(tokens)


def test_paper_is_the_earlier_study_s_medium_512() -> None:
    model = budget_settings("paper")["model"]
    assert {key: value for key, value in model.items() if key != "vocab_size"} == {
        "seq_len": 512,
        "model_dim": 512,
        "num_layers": 6,
        "num_heads": 8,
        "ff_dim": 2048,
        "dropout": 0.1,
    }


@pytest.mark.parametrize("budget", BUDGETS)
def test_the_vocabulary_follows_the_data(budget: str) -> None:
    assert budget_settings(budget)["model"]["vocab_size"] == 0


@pytest.mark.parametrize("budget", BUDGETS)
def test_no_budget_has_thin_queries_and_keys(budget: str) -> None:
    shape = parse_config(budget_settings(budget), where=budget).model
    assert shape.qk_dim is None and shape.qk_rows == shape.model_dim


@pytest.mark.parametrize("budget", BUDGETS)
def test_no_budget_chooses_a_method(budget: str) -> None:
    assert "method" not in budget_settings(budget)


def test_changing_the_settings_changes_no_budget() -> None:
    budget_settings("smoke")["model"]["model_dim"] = 7
    assert budget_settings("smoke")["model"]["model_dim"] == 32


def test_an_unknown_budget_is_refused_with_the_nearest_and_all() -> None:
    with pytest.raises(
        ConfigError,
        match=r"^unknown budget 'lapto' \(did you mean 'laptop'\?\); choose one of paper, workstation, laptop, smoke$",
    ):
        budget_settings("lapto")
