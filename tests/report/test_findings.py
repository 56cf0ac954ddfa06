"""Arms are set beside the right baseline, and what differs besides the method is told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from oelm.config import with_overrides
from oelm.experiments.catalog import Catalog
from oelm.experiments.plan import config_confounds as planned_confounds
from oelm.experiments.plan import make_config
from oelm.files import read_json
from oelm.report.arms import collect
from oelm.report.pairs import Findings, Pair, find, label, method_of
from oelm.report.sections.verdicts import judge_all
from tests.experiments.planned import PAIR, catalog_of
from tests.experiments.recorded import record
from tests.report.synthetic import package_catalog, write_arm, write_plain, write_sweep, write_tuned


def found(*roots: Path, catalog: Catalog | None = None) -> Findings:
    return find(collect(roots), catalog or package_catalog(), roots)


def only_pair(*roots: Path, catalog: Catalog | None = None) -> Pair:
    (pair,) = found(*roots, catalog=catalog).pairs
    return pair


def test_an_arm_is_paired_with_the_baseline_that_the_catalog_names(tmp_path: Path) -> None:
    for experiment in ("GPT-01", "GPT-02", "GPT-04", "GPT-05", "SST-2-01", "SST-2-02"):
        figure = 0.9 if experiment.startswith("SST") else 30.0
        write_arm(tmp_path, experiment, [figure] * 2, seeds=range(2))
    pairs = {pair.arm.experiment: pair.baseline.experiment for pair in found(tmp_path).pairs}
    assert pairs == {"GPT-02": "GPT-01", "GPT-05": "GPT-04", "SST-2-02": "SST-2-01"}


@pytest.mark.parametrize("place", [{"budget": "smoke"}, {"variant": "lr-0.002-abcd1234"}], ids=["budget", "variant"])
def test_arms_of_another_budget_or_variant_are_never_compared(tmp_path: Path, place: dict[str, Any]) -> None:
    write_arm(tmp_path, "GPT-01", [30.0] * 2, seeds=range(2))
    write_arm(tmp_path, "GPT-02", [31.0] * 2, seeds=range(2), **place)
    findings = found(tmp_path)
    assert findings.pairs == ()
    (lonely,) = findings.without_baseline()
    assert lonely[0].experiment == "GPT-02" and lonely[1][0] == "GPT-01"


def test_only_seeds_that_both_have_are_compared(tmp_path: Path) -> None:
    write_arm(tmp_path, "GPT-01", [30.0] * 3, seeds=[0, 1, 5])
    write_arm(tmp_path, "GPT-02", [30.0] * 3, seeds=[5, 1, 7])
    assert only_pair(tmp_path).seeds == [1, 5]


def test_an_experiment_that_no_catalog_knows_is_kept_and_not_compared(tmp_path: Path) -> None:
    write_arm(tmp_path, "MINE", [30.0] * 2, seeds=range(2))
    findings = found(tmp_path)
    assert [arm.experiment for arm in findings.arms] == ["MINE"]
    assert findings.pairs == () and findings.without_baseline() == []


def test_a_mixed_baseline_is_no_baseline(tmp_path: Path) -> None:
    write_arm(tmp_path, "GPT-01", [30.0], seeds=[0])
    write_arm(tmp_path, "GPT-01", [30.0], seeds=[1], settings={"steps": 40})
    write_arm(tmp_path, "GPT-02", [31.0] * 2, seeds=range(2))
    findings = found(tmp_path)
    assert findings.pairs == () and [arm.experiment for arm, _ in findings.without_baseline()] == ["GPT-02"]


def test_an_unfinished_baseline_is_no_baseline(tmp_path: Path) -> None:
    record(tmp_path, "failed", experiment="GPT-01", budget="laptop")
    write_arm(tmp_path, "GPT-02", [31.0] * 2, seeds=range(2))
    assert found(tmp_path).pairs == ()


def test_arms_that_differ_in_the_method_alone_are_not_confounded(tmp_path: Path) -> None:
    write_arm(tmp_path, "GPT-01", [30.0] * 2, seeds=range(2))
    write_arm(tmp_path, "GPT-02", [31.0] * 2, seeds=range(2))
    assert only_pair(tmp_path).confounded == ()


SETTINGS: dict[str, tuple[Any, bool]] = {
    "optim.lr": (3e-4, True),
    "steps": (40, True),
    "batch_size": (64, True),
    "schedule.warmup_steps": (5, True),
    "data.tokenizer": ("bpe:600", True),
    "model.seq_len": (32, True),
    "model.dropout": (0.1, True),
    "model.ff_dim": (192, True),
    "model.model_dim": (96, True),
    "model.num_layers": (3, True),
    "model.num_heads": (8, True),
    "model.qk_dim": (4, True),
    "method.std": (0.05, False),
}


def test_what_else_differs_than_the_method_confounds(tmp_path: Path) -> None:
    write_arm(tmp_path, "GPT-01", [30.0], seeds=[0])
    for key, (value, is_confound) in SETTINGS.items():
        write_arm(tmp_path, "GPT-02", [31.0], seeds=[0], settings={key: value})
        told = only_pair(tmp_path).confounded
        assert [change.split(" ")[0] for change in told] == ([key] if is_confound else [])
        assert all(str(value) in change for change in told), key


def test_the_report_and_the_runner_agree_on_what_confounds() -> None:
    plain = make_config(package_catalog().get("GPT-01"), "laptop", seed=0)
    for key, (value, is_confound) in SETTINGS.items():
        changed = make_config(package_catalog().get("GPT-02"), "laptop", seed=0, changes={key: value})
        assert bool(planned_confounds(changed, plain)) == is_confound, key


SHAPES = [key for key in SETTINGS if key in ("model.ff_dim", "model.model_dim", "model.num_layers", "model.qk_dim")]


def test_a_control_may_have_another_shape_but_not_more_parameters_than_its_baseline(tmp_path: Path) -> None:
    write_arm(tmp_path, "GPT-01", [30.0], seeds=[0])
    for key in SHAPES:
        (run,) = write_arm(tmp_path, "GPT-01-thin", [31.0], seeds=[0], settings={key: SETTINGS[key][0]})
        audit = read_json(run / "audit.json")
        for more in (-100, 0, 1):
            write_plain(run / "audit.json", audit | {name: audit[name] + more for name in ("total", "trainable")})
            told = [change.split(" ")[0] for change in only_pair(tmp_path).confounded]
            assert told == ([key] if more > 0 else []), (key, more)


def test_tuning_alike_is_no_excuse_for_another_shape(tmp_path: Path) -> None:
    widths = (256, 512, 512)
    for experiment, best, rate in (("GPT-01", 0, 3e-4), ("GPT-02", 1, 1e-3)):
        sweep = write_sweep(tmp_path, experiment, best).model_dump(mode="json")
        for point, width in zip(sweep["points"], widths, strict=True):
            point["values"]["model.ff_dim"] = width
        sweep["grid"]["model.ff_dim"] = [256, 512]
        write_plain(tmp_path / experiment / "laptop" / "sweep.json", sweep)
        settings = {"optim.lr": rate, "model.ff_dim": widths[best]}
        write_arm(tmp_path, experiment, [30.0] * 2, seeds=range(2), variant="tuned-0123abcd", settings=settings)
    assert only_pair(tmp_path).confounded == ("model.ff_dim (512 / 256)",)


def test_other_weights_to_start_from_confound(tmp_path: Path) -> None:
    for experiment, digest in (("SST-2-01", "a" * 64), ("SST-2-02", "b" * 64)):
        write_arm(tmp_path, experiment, [0.9] * 2, seeds=range(2), settings={"model.sha256": digest})
    assert [change.split(" ")[0] for change in only_pair(tmp_path).confounded] == ["model.sha256"]


def test_other_data_confounds(tmp_path: Path) -> None:
    write_arm(tmp_path, "GPT-01", [30.0] * 2, seeds=range(2), fingerprint="a" * 64)
    write_arm(tmp_path, "GPT-02", [31.0] * 2, seeds=range(2), fingerprint="b" * 64)
    assert only_pair(tmp_path).confounded == ("data.fingerprint (bbbbbbbb / aaaaaaaa)",)


def test_the_papers_own_rates_are_confounded(tmp_path: Path) -> None:
    for experiment in ("GPT-01", "GPT-02"):
        rate = make_config(package_catalog().get(experiment), "paper", seed=0).optim.lr
        write_arm(tmp_path, experiment, [30.0] * 2, seeds=range(2), budget="paper", settings={"optim.lr": rate})
    assert only_pair(tmp_path).confounded == ("optim.lr (0.001 / 0.0003)",)


def test_arms_tuned_by_the_same_sweep_are_not_confounded(tmp_path: Path) -> None:
    for experiment, best, rate in (("GPT-01", 0, 3e-4), ("GPT-02", 1, 1e-3)):
        write_sweep(tmp_path, experiment, best)
        write_tuned(tmp_path, experiment, rate)
    assert only_pair(tmp_path).confounded == ()


@pytest.mark.parametrize(
    "other",
    [{"rates": (1e-4, 1e-3, 3e-3)}, {"seeds": (100,)}, {"changes": {"steps": 40}}],
    ids=["grid", "seeds", "other-settings"],
)
def test_arms_tuned_by_different_sweeps_are_confounded(tmp_path: Path, other: dict[str, Any]) -> None:
    write_sweep(tmp_path, "GPT-01", 0, **other)
    write_sweep(tmp_path, "GPT-02", 1)
    write_tuned(tmp_path, "GPT-01", 1e-4 if "rates" in other else 3e-4)
    write_tuned(tmp_path, "GPT-02", 1e-3)
    assert [change.split(" ")[0] for change in only_pair(tmp_path).confounded] == ["optim.lr"]


def test_a_tuned_arm_that_has_not_its_sweeps_best_is_confounded(tmp_path: Path) -> None:
    for experiment in ("GPT-01", "GPT-02"):
        write_sweep(tmp_path, experiment, 1)
    write_tuned(tmp_path, "GPT-01", 1e-3)
    write_tuned(tmp_path, "GPT-02", 3e-3)
    assert only_pair(tmp_path).confounded == ("optim.lr (0.003 / 0.001)",)


@pytest.mark.parametrize("content", [None, "{", '{"best": 7}'], ids=["missing", "torn", "other"])
def test_tuned_arms_without_a_readable_sweep_are_confounded(tmp_path: Path, content: str | None) -> None:
    write_sweep(tmp_path, "GPT-02", 1)
    if content is not None:
        path = tmp_path / "GPT-01" / "laptop" / "sweep.json"
        path.parent.mkdir(parents=True)
        path.write_text(content, encoding="utf-8")
    write_tuned(tmp_path, "GPT-01", 3e-4)
    write_tuned(tmp_path, "GPT-02", 1e-3)
    pair = only_pair(tmp_path)
    assert pair.confounded == ("optim.lr (0.001 / 0.0003)",) and not found(tmp_path).sweeps.of(pair.baseline)


def test_an_arm_and_its_baseline_are_tuned_alike_or_confounded(tmp_path: Path) -> None:
    write_tuned(tmp_path, "GPT-01", 3e-4)
    write_tuned(tmp_path, "GPT-02", 1e-3)
    for arm, baseline, is_fair in (
        ("GPT-05", "GPT-04", True),
        # An arm that stands for others of the same baseline, which was swept itself.
        ("GPT-02-matched", None, True),
        ("GPT-05", None, False),
        (None, "GPT-04", False),
        ("GPT-05", "GPT-08", False),
        ("GPT-05", "GPT-05-matched", False),
    ):
        write_sweep(tmp_path, "GPT-01", 0, like=baseline)
        write_sweep(tmp_path, "GPT-02", 1, like=arm)
        told = only_pair(tmp_path).confounded
        assert told == (() if is_fair else ("optim.lr (0.001 / 0.0003)",)), (arm, baseline)


def test_untuned_arms_are_confounded_whatever_was_swept(tmp_path: Path) -> None:
    for experiment, best, rate in (("GPT-01", 0, 3e-4), ("GPT-02", 1, 1e-3)):
        write_sweep(tmp_path, experiment, best)
        write_arm(tmp_path, experiment, [30.0] * 2, seeds=range(2), settings={"optim.lr": rate})
    assert only_pair(tmp_path).confounded == ("optim.lr (0.001 / 0.0003)",)


def test_the_runs_of_a_sweep_are_no_comparison(tmp_path: Path) -> None:
    for experiment in ("GPT-01", "GPT-02"):
        for point in write_sweep(tmp_path, experiment, 1).points:
            write_arm(tmp_path, experiment, [30.0, 31.0], seeds=point.seeds, variant=point.variant, settings=point.values)
    findings = found(tmp_path)
    assert len(findings.arms) == 6 and findings.pairs == () and findings.without_baseline() == []


def test_seeds_of_its_own_make_a_swept_setting_a_comparison(tmp_path: Path) -> None:
    for experiment in ("GPT-01", "GPT-02"):
        point = write_sweep(tmp_path, experiment, 1).points[0]
        write_arm(tmp_path, experiment, [30.0] * 2, seeds=range(2), variant=point.variant, settings=point.values)
    assert only_pair(tmp_path).seeds == [0, 1]


def test_a_run_of_another_kind_than_its_entry_is_not_compared(tmp_path: Path) -> None:
    catalog = catalog_of(PAIR)
    for experiment in ("base", "arm"):
        write_arm(tmp_path, experiment, [0.9] * 2, seeds=range(2))
    assert found(tmp_path, catalog=catalog).pairs == ()


def test_perplexity_is_never_compared_with_accuracy(tmp_path: Path) -> None:
    write_arm(tmp_path, "GPT-01", [0.9] * 2, seeds=range(2))
    write_arm(tmp_path, "GPT-02", [30.0] * 2, seeds=range(2))
    assert found(tmp_path).pairs == ()


def test_a_family_is_a_baseline_and_all_that_is_compared_with_it(tmp_path: Path) -> None:
    for experiment in ("GPT-01", "GPT-02", "GPT-03", "GPT-04", "GPT-05"):
        write_arm(tmp_path, experiment, [30.0] * 2, seeds=range(2))
    families = {baseline.experiment: [pair.arm.experiment for pair in pairs] for baseline, pairs in found(tmp_path).families}
    assert families == {"GPT-01": ["GPT-02", "GPT-03"], "GPT-04": ["GPT-05"]}


def test_a_variant_shows_in_an_arms_name(tmp_path: Path) -> None:
    write_arm(tmp_path, "GPT-02", [30.0], seeds=[0])
    write_arm(tmp_path, "GPT-02", [30.0], seeds=[0], variant="lr-0.002-abcd1234")
    assert [label(arm) for arm in found(tmp_path).arms] == ["GPT-02", "GPT-02 (lr-0.002)"]


def test_the_digest_of_a_variant_shows_where_it_tells_two_apart(tmp_path: Path) -> None:
    for experiment, variant in (("GPT-01", "steps-9-abcd1234"), ("GPT-02", "steps-9-abcd1234"), ("GPT-02", "steps-9-01234567")):
        write_arm(tmp_path, experiment, [30.0], seeds=[0], variant=variant)
    ends = ("steps-9-abcd1234", "steps-9-01234567", "steps-9-abcd1234")
    names = ("GPT-01", "GPT-02", "GPT-02")
    assert [label(arm) for arm in found(tmp_path).arms] == [f"{name} ({end})" for name, end in zip(names, ends, strict=True)]


def test_a_method_of_the_users_own_has_no_name(tmp_path: Path) -> None:
    catalog = catalog_of(PAIR.replace("method: oelm_freeze", "method: {init: orthogonal, freeze: [q]}"))
    write_arm(tmp_path, "arm", [30.0], seeds=[0])
    (arm,) = found(tmp_path, catalog=catalog).arms
    assert method_of(arm, catalog) is None


def test_settings_of_the_test_can_be_set() -> None:
    """Each key above is one that a config has, so that none of the tests passes by a misspelling."""
    for key, (value, _) in SETTINGS.items():
        config = make_config(package_catalog().get("GPT-02"), "laptop", seed=0, changes={key: value})
        assert with_overrides(config.as_dict(), {key: value}) == config.as_dict()


def test_runs_of_oelm_train_are_paired_by_their_config_and_judged_like_the_studys(tmp_path: Path) -> None:
    base, arm = (30.0, 30.2, 29.9, 30.1, 30.05), (30.63, 30.77, 30.56, 30.64, 30.65)
    write_arm(tmp_path, "train", base, variant="baseline-00000001", five_gram=60.0)
    write_arm(tmp_path, "train", arm, variant="oelm-freeze-00000002", method="oelm_freeze", five_gram=60.0)
    write_arm(tmp_path, "train", arm, variant="oelm-freeze-00000003", method="oelm_freeze", settings={"steps": 40})
    findings = found(tmp_path)
    (pair,) = findings.pairs
    assert (pair.arm.variant, pair.baseline.variant) == ("oelm-freeze-00000002", "baseline-00000001")
    assert method_of(pair.arm, findings.catalog) == "oelm_freeze" and pair.confounded == ()
    assert pair.experiment is not None and pair.experiment.criterion is not None
    assert pair.experiment.criterion.ppl_ratio_at_most == 1.05
    ((lonely, place),) = findings.without_baseline()
    assert lonely.variant == "oelm-freeze-00000003" and place == ("train", "laptop", "baseline")
    (judged,) = judge_all(findings)
    assert judged.judgement.verdict == "PASS"
