"""What a user asks for is planned whole, or refused before anything is started."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from oelm.cli.app import app
from oelm.config import FinetuneConfig
from oelm.errors import ConfigError, RunDirError
from oelm.experiments.plan import variant_name
from oelm.experiments.study import Study, unfinished
from oelm.files import write_json
from tests.experiments.planned import PAIR, catalog_of, finish, plain_model
from tests.experiments.recorded import record

CATALOG = catalog_of(
    PAIR,
    """
bert: {kind: classifier, data: sst2, groups: [two], at: {laptop: {model.source: org/one@a, model.sha256: "11"}}}
bert-arm: {extends: bert, baseline: bert, method: oelm_freeze}
other: {kind: classifier, data: sst2, groups: [two], at: {laptop: {model.source: org/two@b}}}
fresh: {kind: classifier, data: sst2}
""",
)


def test_a_study_is_its_experiments_with_their_baselines_seed_by_seed(tmp_path: Path) -> None:
    runs = Study(("arm",), "smoke", tmp_path, seeds=[0, 1], changes={"optim.lr": 0.5}).plan(CATALOG)
    assert [(run.experiment.id, run.seed) for run in runs] == [("base", 0), ("arm", 0), ("base", 1), ("arm", 1)]
    assert {run.variant for run in runs} == {variant_name({"optim.lr": 0.5})} and {run.tuned for run in runs} == {()}
    assert list(tmp_path.iterdir()) == []


def test_without_baselines_only_what_is_named_is_planned(tmp_path: Path) -> None:
    assert [run.experiment.id for run in Study(("arm",), "smoke", tmp_path, baselines=False).plan(CATALOG)] == ["arm"]


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"names": ()}, "^name what to run: ids or groups"),
        ({"names": ("nothing",)}, "^no experiment or group called 'nothing'"),
        ({"budget": "lapto"}, r"^unknown budget 'lapto' \(did you mean 'laptop'\?\)"),
        ({"changes": {"optim.lrr": 1}}, "unknown key 'lrr'"),
        ({"changes": {"optim.lr": float("inf")}}, "must be finite"),
        ({"changes": {"seed": 3}}, "give seeds with --seeds"),
        ({"tuned": True}, "^--tuned: base was not swept at smoke"),
    ],
)
def test_what_cannot_be_is_refused_and_nothing_is_written(asked: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        replace(Study(("arm",), "smoke", tmp_path), **asked).plan(CATALOG)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_of_another_recipe_stops_the_whole_plan(tmp_path: Path) -> None:
    run = Study(("arm",), "smoke", tmp_path).plan(CATALOG)[-1]
    write_json(run.path / "config.json", run.config.as_dict() | {"batch_size": 16})
    with pytest.raises(RunDirError, match="another recipe"):
        Study(("arm",), "smoke", tmp_path).plan(CATALOG)
    with pytest.raises(RunDirError, match="another recipe"):
        Study(("arm",), "smoke", tmp_path, seeds=[0]).plan(CATALOG)


def test_a_model_s_folder_stands_for_the_pretrained_one_of_every_arm_and_keeps_its_digest(tmp_path: Path) -> None:
    folder = plain_model(tmp_path / "model", model_type="bert")
    runs = Study(("bert-arm", "fresh", "arm"), "laptop", tmp_path, seeds=[0], model=folder).plan(CATALOG)
    models = {run.experiment.id: run.config.model for run in runs if isinstance(run.config, FinetuneConfig)}
    assert {name: (model.source, model.sha256) for name, model in models.items()} == {
        "bert": (str(folder), "11"),
        "bert-arm": (str(folder), "11"),
        "fresh": (None, ""),
    }


def test_one_folder_cannot_stand_for_two_models(tmp_path: Path) -> None:
    folder = plain_model(tmp_path / "model", model_type="bert")
    with pytest.raises(
        ConfigError, match=r"would replace org/one@a \(bert\) and org/two@b \(other\); run their experiments separately$"
    ):
        Study(("two",), "laptop", tmp_path, model=folder).plan(CATALOG)
    with pytest.raises(ConfigError, match="run their experiments separately"):
        Study(("two",), "laptop", tmp_path, model=folder).plan_sweep(CATALOG, {"optim.lr": [1e-5, 1e-4]}, num_seeds=1)
    # Below, they are fresh ones, and a folder stands for none.
    assert Study(("two",), "smoke", tmp_path, model=folder).plan(CATALOG)


def test_a_model_s_folder_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such folder; give the one with config.json"):
        Study(("bert",), "laptop", tmp_path, model=tmp_path / "nowhere").plan(CATALOG)


def test_what_is_not_done_is_left(tmp_path: Path) -> None:
    runs = Study(("arm",), "smoke", tmp_path, seeds=[0, 1]).plan(CATALOG)
    finish(runs[0], 4.0)
    record(tmp_path, "failed", experiment="arm", seed=0)
    assert [(run.experiment.id, run.seed) for run in unfinished(runs)] == [("arm", 0), ("base", 1), ("arm", 1)]


def shown(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["show", *arguments])
    assert result.exit_code == 0, result.output
    return result.stdout


def test_show_tells_counts_confounds_and_reported_values_of_the_study(tmp_path: Path) -> None:
    text = shown("gpt-02", "--budget", "paper", "--out", str(tmp_path))
    assert "44,896,768" in text and "3,145,728" in text and "best_ppl 4.69" in text and "not a result of ours" in text
    assert "CONFOUNDED" in text and "optim.lr 0.001 against 0.0003" in text and "GPT-01" in text


def test_the_command_that_show_ends_with_can_be_pasted(tmp_path: Path) -> None:
    own = tmp_path / "my own.yaml"
    own.write_text("mine: " + json.dumps({"kind": "language_model", "data": "stdlib"}))
    text = shown("mine", "--budget", "smoke", "--catalog", str(own), "--set", "data.source=a b; c", "--out", str(tmp_path))
    assert text.rstrip().endswith(f"run it: oelm run mine --budget smoke --set 'data.source=a b; c' --catalog '{own}'")
