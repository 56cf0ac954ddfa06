"""The demo's arms differ in the method alone, and are what was recorded."""

from __future__ import annotations

from pathlib import Path

import pytest

from oelm.experiments.catalog import Catalog, load_catalog
from oelm.experiments.plan import make_config
from oelm.experiments.study import Study
from oelm.method.method import PRESETS
from oelm.runs.records import read_any_config

RESULTS = Path(__file__).parents[2] / "results" / "demo"
ARMS = {"demo-learn": "baseline", "demo-frozen": "oelm_freeze", "demo-lowrank": "oelm_lowrank", "demo-slices-q": "oelm_axes_q"}


@pytest.fixture(scope="module")
def catalog() -> Catalog:
    return load_catalog()


def test_the_arms_are_the_baseline_and_three_ways_to_freeze(catalog: Catalog) -> None:
    assert {experiment.id: experiment.method for experiment in catalog.select(["demo"])} == ARMS
    assert [PRESETS[method].kind for method in ARMS.values()][1:] == ["pure", "little", "partial"]


@pytest.mark.parametrize("budget", ["laptop", "smoke"])
def test_arms_differ_in_the_method_only(catalog: Catalog, budget: str) -> None:
    made = [make_config(experiment, budget, seed=0).as_dict() for experiment in catalog.select(["demo"])]
    methods = [config.pop("method") for config in made]
    assert all(config == made[0] for config in made) and len({str(method) for method in methods}) == len(ARMS)


def test_the_demo_plans_the_runs_that_are_recorded(catalog: Catalog) -> None:
    runs = Study(names=("demo",), budget="laptop", root=RESULTS).plan(catalog)
    assert [run.path.relative_to(RESULTS).parts[0] for run in runs] == list(ARMS)
    for run in runs:
        recorded = read_any_config(run.path / "config.json").as_dict()
        # The size of the vocabulary is filled in when a run begins.
        recorded["model"]["vocab_size"] = run.config.model.vocab_size
        assert recorded == run.config.as_dict()
