"""A setting that came after a run was recorded has its default there: old and new records are compared, not confounded."""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from oelm.config import flatten, parse_any
from oelm.errors import ConfigError
from oelm.experiments.plan import make_config
from oelm.files import read_json
from oelm.report.arms import collect, recipe_differences
from oelm.report.compare import compare_runs
from oelm.report.pairs import find
from tests.report.synthetic import package_catalog, write_arm, write_plain

LATER = ("method.layer_lr_decay", "method.correction", "optim.betas", "compile", "model.qk_dim", "extended_at")


def without(config: dict[str, Any], *keys: str) -> dict[str, Any]:
    """Return a config as a version would have written it that did not know these settings."""
    older = copy.deepcopy(config)
    for key in keys:
        *parents, last = key.split(".")
        inner = older
        for parent in parents:
            inner = inner[parent]
        inner.pop(last, None)
    return older


def make_older(runs: Sequence[Path], *keys: str) -> None:
    for run in runs:
        write_plain(run / "config.json", without(read_json(run / "config.json"), *keys))


def confounded(root: Path) -> tuple[str, ...]:
    (pair,) = find(collect([root]), package_catalog(), [root]).pairs
    return pair.confounded


@pytest.mark.parametrize("experiment", ["GPT-02", "SST-2-02"])
def test_a_missing_setting_differs_where_the_config_read_back_differs(experiment: str) -> None:
    whole = make_config(package_catalog().get(experiment), "laptop", seed=0).as_dict()
    seen = 0
    for key in flatten(whole):
        older = without(whole, key)
        try:
            read_back = flatten(parse_any(older, where=key).as_dict())
        except ConfigError:
            continue
        changed = [name for name, value in flatten(whole).items() if read_back[name] != value]
        assert [text.split(" ")[0] for text in recipe_differences(whole, older)] == changed, key
        seen += not changed
    assert seen > 15


@pytest.mark.parametrize("key", LATER)
def test_an_older_record_is_a_seed_of_its_arm(tmp_path: Path, key: str) -> None:
    settings: dict[str, Any] = {"compile": False, "model.qk_dim": None, "extended_at": []}
    runs = write_arm(tmp_path, "GPT-02", [30.0, 31.0], seeds=range(2), settings=settings)
    make_older(runs[:1], key)
    (arm,) = collect([tmp_path])
    assert arm.refused is None and [run.seed for run in arm.runs] == [0, 1]


def test_an_older_baseline_does_not_confound(tmp_path: Path) -> None:
    make_older(write_arm(tmp_path, "GPT-01", [30.0] * 2, seeds=range(2)), *LATER[:2])
    write_arm(tmp_path, "GPT-02", [31.0] * 2, seeds=range(2))
    assert confounded(tmp_path) == ()


def test_what_an_older_record_could_not_have_had_is_still_found(tmp_path: Path) -> None:
    make_older(write_arm(tmp_path, "GPT-01", [30.0] * 2, seeds=range(2)), "method.layer_lr_decay")
    write_arm(tmp_path, "GPT-02", [31.0] * 2, seeds=range(2), settings={"method.layer_lr_decay": 0.5})
    assert confounded(tmp_path) == ("method.layer_lr_decay (0.5 / 1.0)",)


def test_seeds_that_differ_in_what_one_lacks_are_no_arm(tmp_path: Path) -> None:
    make_older(write_arm(tmp_path, "GPT-01", [30.0], seeds=[0]), "optim.clip_norm")
    write_arm(tmp_path, "GPT-01", [30.0], seeds=[1], settings={"optim.clip_norm": 0.25})
    (arm,) = collect([tmp_path])
    assert arm.refused is not None and arm.refused.values["settings"] == ("optim.clip_norm (1.0 / 0.25)",)


def test_a_quick_look_takes_defaults_for_granted(tmp_path: Path) -> None:
    first, second = (write_arm(tmp_path, name, [30.0], seeds=[0])[0] for name in ("A", "B"))
    make_older([first], *LATER)
    (note,) = compare_runs([first, second])[1]
    assert note.startswith("one seed: no interval")


def test_an_older_classifier_has_the_defaults_of_classifiers(tmp_path: Path) -> None:
    runs = write_arm(tmp_path, "SST-2-01", [0.9, 0.91], seeds=range(2), settings={"epochs": None, "examples.language": "en"})
    make_older(runs[:1], "epochs", "examples.language", "model.architecture")
    (arm,) = collect([tmp_path])
    assert arm.refused is None


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"model": 5, "method": "oelm_freeze", "optim": None},
        {"method": [], "data": {"source": {"a": {"b": 1}}}, "examples": "none"},
        {"examples": {}, "model": {"sha256": "a" * 64, "source": "/x"}, "": {"": 0}},
    ],
    ids=["empty", "no-sections", "wrong-types", "other-kind"],
)
def test_a_foreign_config_differs_and_is_no_crash(tmp_path: Path, config: dict[str, Any]) -> None:
    write_arm(tmp_path, "GPT-01", [30.0], seeds=[0])
    (second,) = write_arm(tmp_path, "GPT-01", [30.0], seeds=[1])
    (second / "config.json").write_text(json.dumps({**config, "seed": 1}), encoding="utf-8")
    (arm,) = collect([tmp_path])
    assert arm.refused is not None and arm.refused.code == "recipes_differ"
