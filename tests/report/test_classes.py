"""Verdicts by what learns in Q and K: three classes and the controls, each under its own name and never mixed."""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from typer.testing import CliRunner

from oelm.cli.app import app
from oelm.files import read_json, write_json
from oelm.method.method import PRESETS, method_kind
from oelm.report.document import Chart, Document, Table
from tests.report.reading import blocks, english, names, rows, table, texts, values
from tests.report.synthetic import linked, write_arm

BASE = [20.0, 20.2, 19.9, 20.1, 20.3]
# Luck of the seed, the same for every arm: a gap without any spread is no measurement, and gets no verdict.
LUCK = [0.999, 1.001, 1.0, 1.002, 0.998]
QK = 131_072
SVG = "{http://www.w3.org/2000/svg}"
LEARNING = {"GPT-01": QK, "GPT-02": 0, "GPT-02-lowrank": 16_384, "GPT-02-last-half": QK // 2, "GPT-01-thin": 16_384}
LEARNING["GPT-01-thinner-thin"] = 4_096
METHODS = {"GPT-02": "oelm_freeze", "GPT-02-lowrank": "oelm_lowrank", "GPT-02-last-half": "oelm_last_half"}
RATIOS = {"GPT-01": 1.0, "GPT-02": 1.2, "GPT-02-lowrank": 1.01, "GPT-02-last-half": 1.03, "GPT-01-thin": 1.04}
RATIOS["GPT-01-thinner-thin"] = 1.1


def write_class(
    root: Path,
    like: str,
    *,
    name: str = "",
    data: str = "tinystories",
    more: dict[str, Any] | None = None,
    times: float = 1.0,
    **place: Any,
) -> list[Path]:
    """Write an arm of five seeds with its method and with what learns in Q and K, like one of TinyStories' arms."""
    luck = LUCK if like in METHODS or like.endswith("thin") else [1.0] * 5
    figures = [times * RATIOS[like] * value * chance for value, chance in zip(BASE, luck, strict=True)]
    method: dict[str, Any] = PRESETS[METHODS.get(like, "baseline")].model_dump(mode="json")
    thin = {"model.qk_dim": 4} if like.endswith("thin") else {}
    settings = {**{f"method.{key}": value for key, value in method.items()}, **thin, **(more or {})}
    written = write_arm(root, name or like, figures, data=data, settings=settings, entropies=None, **place)
    for run in written:
        audit = read_json(run / "audit.json")
        learns = LEARNING[like]
        where = "correction" if method["correction"] else "query"
        audit["by_role"] = {where: {"trainable": learns, "frozen": 0}, "feed_forward": {"trainable": 5, "frozen": 0}}
        write_json(run / "audit.json", audit, durable=False)
    return written


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A study of every class, to be read only."""
    root = tmp_path_factory.mktemp("study")
    for experiment in RATIOS:
        write_class(root, experiment)
    return root


@pytest.fixture(scope="module")
def whole(written: Path) -> Document:
    """The report on the study as it was written."""
    return english(written)


@pytest.fixture
def study(written: Path, tmp_path: Path) -> Path:
    """The same study for one test, which may change it."""
    return linked(written, tmp_path / "study")


def test_every_arm_stands_in_its_class_and_controls_come_last(whole: Document) -> None:
    assert [(row["class"], row["method"]) for row in rows(whole, "classes")] == [
        ("pure", "oelm_freeze"),
        ("a little", "oelm_lowrank"),
        ("partial", "oelm_last_half"),
        ("control", "thin"),
    ]


def test_what_learns_in_q_and_k_is_counted_and_compared_with_the_baseline(whole: Document) -> None:
    found = {row["method"]: (row["learns in Q/K"], row["share"]) for row in rows(whole, "classes")}
    assert found["oelm_freeze"] == ("0", "0.0%")
    assert found["oelm_lowrank"] == found["thin"] == ("16,384", "12.5%")
    assert found["oelm_last_half"] == ("65,536", "50.0%")


def test_each_class_has_its_own_verdict_with_its_interval(whole: Document) -> None:
    found = {row["method"]: row["tinystories"] for row in rows(whole, "classes")}
    assert found["oelm_freeze"].startswith("+20.0% [") and found["oelm_freeze"].endswith("FAIL")
    assert found["oelm_lowrank"].startswith("+1.0% [") and found["oelm_lowrank"].endswith("PASS")


def test_gaps_on_several_data_sets_stand_in_one_row(study: Path) -> None:
    write_class(study, "GPT-01", name="GPT-04", data="openwebtext")
    write_class(study, "GPT-02", name="GPT-05", data="openwebtext")
    document = english(study)
    (row,) = [row for row in rows(document, "classes") if row["method"] == "oelm_freeze"]
    assert row["tinystories"].endswith("FAIL") and row["openwebtext"].endswith("FAIL")
    assert table(document, "classes").columns[-2:] == ("tinystories", "openwebtext")


def test_a_gap_on_the_test_split_says_so(tmp_path: Path) -> None:
    for experiment, ratio in (("GPT-01", 1.0), ("GPT-02", 1.2)):
        figures = [ratio * value * (luck if ratio > 1 else 1.0) for value, luck in zip(BASE, LUCK, strict=True)]
        write_arm(tmp_path, experiment, figures, tests=figures)
    (row,) = rows(english(tmp_path), "classes")
    assert row["tinystories"].startswith("+20.0% [") and row["tinystories"].endswith("(test) FAIL")


def test_a_study_of_controls_alone_has_no_classes(tmp_path: Path) -> None:
    for experiment in ("GPT-01", "GPT-01-thin"):
        write_class(tmp_path, experiment)
    assert "classes" not in names(english(tmp_path))


@pytest.mark.parametrize("pace", ["layer_lr_decay", "warmup_steps"])
def test_an_arm_that_learns_at_another_pace_than_its_baseline_is_confounded(tmp_path: Path, pace: str) -> None:
    write_class(tmp_path, "GPT-01")
    write_class(tmp_path, "GPT-02")
    for run in (tmp_path / "GPT-02").glob("*/*/seed-*"):
        config = read_json(run / "config.json")
        config["method"][pace] = 7
        write_json(run / "config.json", config, durable=False)
    (row,) = rows(english(tmp_path), "verdicts")
    assert row["verdict"].startswith("CONFOUNDED")
    assert "classes" not in names(english(tmp_path))


def test_the_kind_of_a_record_is_that_of_its_method() -> None:
    for preset in PRESETS.values():
        assert method_kind(preset.model_dump(mode="json")) == preset.kind
    assert method_kind({"init": "native"}) == "free"


def test_one_table_is_printed_alone_as_markdown(study: Path) -> None:
    said = CliRunner().invoke(app, ["report", "--out", str(study), "--table", "classes"])
    assert said.exit_code == 0
    lines = said.output.strip().splitlines()
    assert lines[0].startswith("| method | class |") and len(lines) == 2 + 4
    # Verdicts seen in a table are verdicts seen.
    assert "GPT-02|laptop|default" in read_json(study / "looks.json")["looks"]
    chinese = CliRunner().invoke(app, ["report", "--out", str(study), "--table", "classes", "--lang", "zh"])
    assert chinese.output.startswith("| 方法 | 类别 |")


def test_an_unknown_table_or_picture_is_answered_with_those_there_are(study: Path) -> None:
    for asked, answer in (
        (["--table", "clases"], "--table 'clases' (did you mean 'classes'?): this report has no such table; it has classes"),
        (
            ["--picture", "clases"],
            "--picture 'clases' (did you mean 'classes'?): this report has no such picture; it has classes",
        ),
        (["--table", "classes", "--picture", "classes"], "one of them at a time"),
    ):
        said = CliRunner().invoke(app, ["report", "--out", str(study), *asked])
        assert said.exit_code == 2, asked
        assert answer in " ".join(said.output.split()) and not (study / "looks.json").exists(), asked


def test_the_picture_has_every_arm_on_every_data_set_with_the_gaps_of_the_table(study: Path) -> None:
    for like, name in (("GPT-01", "GPT-06"), ("GPT-02", "GPT-07"), ("GPT-02-lowrank", "GPT-07-lowrank")):
        write_class(study, like, name=name, data="wikitext103")
    document = english(study)
    drawn = values(document, "classes")
    assert [(row["name"], row["arm"]) for row in drawn] == [
        ("oelm_freeze (pure)", "tinystories"),
        ("oelm_freeze (pure)", "wikitext103"),
        ("oelm_lowrank (a little)", "tinystories"),
        ("oelm_lowrank (a little)", "wikitext103"),
        ("oelm_last_half (partial)", "tinystories"),
        ("thin (control)", "tinystories"),
    ]
    listed = {row["method"]: row for row in rows(document, "classes")}
    for row in drawn:
        assert row["low"] < row["value"] < row["high"] and row["text"] in listed[row["name"].partition(" ")[0]][row["arm"]]


def test_one_picture_is_printed_alone_as_svg(study: Path) -> None:
    said = CliRunner().invoke(app, ["report", "--out", str(study), "--picture", "classes"])
    assert said.exit_code == 0
    texts = [tuple(element.itertext()) for element in ElementTree.fromstring(said.output).iter(f"{SVG}text")]
    plain = {("both frozen at random", "oelm_freeze"), ("both learn, an eighth as wide", "thin")}
    assert {*plain, ("tinystories",)} <= {tuple(line.strip() for line in text if line.strip()) for text in texts}
    assert (study / "looks.json").exists()


def test_a_control_stands_beside_what_it_controls(study: Path, whole: Document) -> None:
    (row,) = rows(whole, "controls")
    assert (row["method"], row["control"]) == ("oelm_lowrank", "thin")
    # Seed by seed 1.01 / 1.04 of the same luck: a ratio without spread.
    assert row["tinystories"].startswith("-2.9% [-2.9, -2.9]")
    assert "controls" not in [block.name for block in blocks(_without(study, "GPT-01-thin")) if isinstance(block, Table)]


@pytest.mark.parametrize("learns", [QK // 2, QK // 4])
def test_a_partial_arm_stands_beside_a_control_of_as_few_parameters(study: Path, learns: int) -> None:
    for run in write_class(study, "GPT-01-thin", name="GPT-01-lean"):
        audit = read_json(run / "audit.json")
        audit["by_role"]["query"]["trainable"] = learns
        write_json(run / "audit.json", audit, durable=False)
    (row,) = [row for row in rows(english(study), "controls") if row["method"] == "oelm_last_half"]
    assert row["control"] == "lean" and row["tinystories"].startswith("-1.0% [")


def _without(root: Path, experiment: str) -> Document:
    shutil.rmtree(root / experiment)
    return english(root)


def test_sizes_stand_in_rows_of_their_own_with_their_own_counts(study: Path) -> None:
    for experiment in ("GPT-01", "GPT-02-lowrank"):
        for run in write_class(study, experiment, variant="model-dim-64"):
            audit = read_json(run / "audit.json")
            audit["by_role"]["query" if experiment == "GPT-01" else "correction"]["trainable"] //= 4
            write_json(run / "audit.json", audit, durable=False)
    document = english(study)
    found = [row for row in rows(document, "classes") if row["method"] == "oelm_lowrank"]
    assert [(row["learns in Q/K"], row["share"]) for row in found] == [("4,096", "12.5%"), ("16,384", "12.5%")]
    assert found[0]["tinystories"] == "" and found[0]["tinystories (model-dim-64)"].startswith("+1.0%")
    assert found[1]["tinystories"].startswith("+1.0%") and found[1]["tinystories (model-dim-64)"] == ""
    drawn = {row["name"] for row in values(document, "classes")}
    assert {"oelm_lowrank, 4,096 (a little)", "oelm_lowrank, 16,384 (a little)"} <= drawn


def test_budgets_stand_in_columns_of_their_own(study: Path) -> None:
    for experiment in ("GPT-01", "GPT-02-lowrank"):
        write_class(study, experiment, budget="paper")
    found = next(row for row in rows(english(study), "classes") if row["method"] == "oelm_lowrank")
    assert found["tinystories (laptop)"] and found["tinystories (paper)"] and "tinystories" not in found


def test_two_arms_of_one_method_on_one_data_set_do_not_hide_each_other(study: Path) -> None:
    for experiment in ("GPT-01", "GPT-02"):
        write_class(study, experiment, variant="tuned-1a2b3c4d")
    found = next(row for row in rows(english(study), "classes") if row["method"] == "oelm_freeze")
    assert sum(text.startswith("+20.0%") for text in found.values()) == 2


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"method.thaw": {"start": 0.5, "end": 0.5, "order": "first_first"}}, "0, later 131,072"),
        ({"method.freeze_at": 0.5}, "131,072, later 0"),
        ({"method.freeze_at": 0.5, "method.layers": "last half"}, "131,072, later 65,536"),
        ({"method.freeze_at": 0.5, "method.layers": [0], "method.freeze": ["k"]}, "131,072, later 98,304"),
        ({"method.freeze_at": 0.0}, "0"),
    ],
)
def test_what_learns_at_another_time_is_told(study: Path, settings: dict[str, Any], told: str) -> None:
    is_late = bool(settings.get("method.freeze_at"))
    for run in write_class(study, "GPT-02", more=settings):
        audit = read_json(run / "audit.json")
        frozen = 0 if is_late else QK
        audit["by_role"] = {"query": {"trainable": QK - frozen, "frozen": frozen}, "other": {"trainable": 1000, "frozen": 0}}
        audit |= {"total": QK + 1000, "trainable": QK - frozen + 1000, "frozen": frozen}
        for projection in audit["projections"]:
            projection |= {"num_parameters": QK // 4, "is_frozen": not is_late}
        write_json(run / "audit.json", audit, durable=False)
    document = english(study)
    assert told in [row["learns in Q/K"] for row in rows(document, "classes")]
    (cost,) = [row for row in rows(document, "costs") if row["arm"] == "GPT-02"]
    ends = [int(number.replace(",", "")) for number in told.split(", later ")]
    shares = ", later ".join(f"{100 * number / QK:.1f}%" for number in ends)
    assert shares in [row["share"] for row in rows(document, "classes")]
    assert cost["trainable"] == ", later ".join(f"{number + 1000:,}" for number in ends)
    assert cost["frozen"] == ", later ".join(f"{QK - number:,}" for number in ends)
    assert cost["optimizer state"] == f"{8 * (max(ends) + 1000) / 2**20:,.1f} MiB"


def test_tuned_arms_and_others_have_a_column_each(study: Path) -> None:
    for experiment in ("GPT-01", "GPT-02-lowrank", "GPT-01-thin"):
        write_class(study, experiment, variant="tuned-1a2b3c4d")
    document = english(study)
    (freeze,) = [row for row in rows(document, "classes") if row["method"] == "oelm_freeze"]
    assert freeze["tinystories (default)"] and not freeze["tinystories (tuned-1a2b3c4d)"] and "tinystories" not in freeze
    (against,) = rows(document, "controls")
    assert against["tinystories (default)"] == against["tinystories (tuned-1a2b3c4d)"] != ""


def test_a_control_in_which_more_learns_is_not_held_against_a_little(study: Path, whole: Document) -> None:
    write_class(study, "GPT-01", name="GPT-01-lean")
    assert rows(english(study), "controls") == rows(whole, "controls") != []


def test_intervals_that_are_wider_than_usual_say_at_which_level_and_why(whole: Document) -> None:
    assert "hold together, by Holm's rule" in table(whole, "classes").caption
    found = next(row for row in rows(whole, "classes") if row["method"] == "oelm_freeze")
    assert "] at 98.75% FAIL" in found["tinystories"]


@pytest.mark.parametrize(("five_gram", "verdict"), [(1.054, "PASS"), (1.05, "UNFIT BASELINE")])
def test_gaps_against_a_baseline_get_a_verdict_when_every_seed_beats_the_5_gram(
    study: Path, five_gram: float, verdict: str
) -> None:
    # The bigram of an earlier record of the same arm no longer counts.
    write_arm(study, "GPT-01", BASE, five_gram=five_gram * max(BASE), bigram=10 * max(BASE))
    found = next(row for row in rows(english(study), "classes") if row["method"] == "oelm_lowrank")
    assert found["tinystories"].endswith(verdict)


@pytest.mark.parametrize("edited", ["GPT-01", "GPT-02"])
def test_runs_of_one_text_that_disagree_on_counting_leave_no_verdict(study: Path, edited: str) -> None:
    for experiment in ("GPT-01", "GPT-02"):
        write_arm(
            study, experiment, BASE, five_gram=2 * max(BASE), method="baseline" if experiment == "GPT-01" else "oelm_freeze"
        )
    name = study / edited / "laptop" / "default" / "seed-1" / "timing_stats.json"

    def found() -> str:
        return next(row for row in rows(english(study), "classes") if row["method"] == "oelm_lowrank")["tinystories"]

    assert found().endswith("PASS")
    stats = read_json(name)
    stats["ngram"]["val"][4] *= 3
    write_json(name, stats, durable=False)
    assert found().endswith("UNFIT BASELINE")
    assert any("disagree on what counting gives" in text for text in texts(english(study), "verdicts", "warning"))


@pytest.mark.parametrize(("bigram", "verdict"), [(40.0, "UNFIT BASELINE"), (None, "PASS")])
def test_records_of_before_the_5_gram_have_no_verdict(study: Path, bigram: float | None, verdict: str) -> None:
    write_arm(study, "GPT-01", BASE, bigram=bigram)
    found = next(row for row in rows(english(study), "classes") if row["method"] == "oelm_lowrank")
    assert found["tinystories"].endswith(verdict)


@pytest.mark.parametrize(("above", "verdict"), [(1.005, "PASS"), (1.02, "UNFIT BASELINE")])
def test_gaps_against_an_overfitted_baseline_get_no_verdict(study: Path, above: float, verdict: str) -> None:
    shutil.rmtree(study / "GPT-01")
    for seed, ppl in enumerate(BASE):
        losses = (math.log(ppl), above * math.log(ppl))
        write_arm(study, "GPT-01", [ppl], seeds=[seed], losses=losses)
    found = next(row for row in rows(english(study), "classes") if row["method"] == "oelm_lowrank")
    assert found["tinystories"].endswith(verdict)


def test_one_seed_has_no_interval_to_draw(tmp_path: Path) -> None:
    for experiment in ("GPT-01", "GPT-02"):
        write_arm(tmp_path, experiment, [20.0 * RATIOS[experiment]], seeds=[0])
    assert "classes" not in [block.name for block in blocks(english(tmp_path)) if isinstance(block, Chart)]


@pytest.mark.parametrize(("learns", "named"), [(QK // 8, "a little"), (QK // 8 + 1, "over 1/8")])
def test_what_learns_over_an_eighth_is_no_little(study: Path, learns: int, named: str) -> None:
    for path in study.glob("GPT-02-lowrank/*/*/*/audit.json"):
        audit = read_json(path)
        audit["by_role"]["correction"]["trainable"] = learns
        write_json(path, audit, durable=False)
    document = english(study)
    found = {row["method"]: row["class"] for row in rows(document, "classes")}
    assert found["oelm_lowrank"] == named
    # It is still held against the control.
    assert [row["method"] for row in rows(document, "controls")] == ["oelm_lowrank"]


def test_tuned_arms_of_other_settings_stand_in_columns_of_their_own(tmp_path: Path) -> None:
    for variant, more in (("tuned-01234567", {}), ("tuned-steps-2000-89abcdef", {"steps": 2000})):
        for experiment in ("GPT-01", "GPT-02"):
            write_class(tmp_path, experiment, variant=variant, more=more)
    (row,) = rows(english(tmp_path), "classes")
    assert list(row)[4:] == ["tinystories", "tinystories (tuned-steps-2000)"]


def test_the_headline_never_counts_two_classes_together(whole: Document) -> None:
    passed = [f"{kind}: 1 pass, 0 fail, 0 inconclusive" for kind in ("a little", "partial", "control")]
    told = "; ".join(["pure: 0 pass, 1 fail, 0 inconclusive", *passed])
    assert f"By what learns in Q and K: {told}. " in texts(whole, "verdicts")[0]
    kinds = {row["arm / baseline"].split(" ")[0]: row["class"] for row in rows(whole, "verdicts")}
    assert kinds == {"GPT-02": "pure", "GPT-02-lowrank": "a little", "GPT-02-last-half": "partial", "GPT-01-thin": "control"}


def alone(root: Path) -> list[str]:
    return [text for text in texts(english(root), "classes") if text.startswith("No control")]


def test_a_little_learning_without_a_control_of_as_few_is_told(study: Path) -> None:
    assert alone(study) == []
    shutil.rmtree(study / "GPT-01-thin")
    (told,) = alone(study)
    assert told.endswith("whether the frames help: oelm_lowrank (a little): tinystories.")


def test_a_control_on_another_data_set_or_with_more_that_learns_is_no_control(study: Path) -> None:
    for like, name in (("GPT-01", "GPT-06"), ("GPT-02-lowrank", "GPT-07-lowrank")):
        write_class(study, like, name=name, data="wikitext103")
    assert alone(study)[0].endswith("oelm_lowrank (a little): wikitext103.")
    for run in study.glob("GPT-01-thin/*/*/*"):
        audit = read_json(run / "audit.json")
        audit["by_role"]["query"]["trainable"] += 1
        write_json(run / "audit.json", audit, durable=False)
    assert alone(study)[0].endswith("oelm_lowrank (a little): tinystories, wikitext103.")


def test_a_control_of_far_fewer_parameters_stands_beside_nothing(study: Path) -> None:
    write_class(study, "GPT-01-thinner-thin", name="GPT-01-thinner")
    assert [(row["method"], row["control"]) for row in rows(english(study), "controls")] == [("oelm_lowrank", "thin")]
    shutil.rmtree(study / "GPT-01-thin")
    assert alone(study)[0].endswith("oelm_lowrank (a little): tinystories.")
