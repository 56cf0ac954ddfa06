"""Others' runs get the verdict that the same figures would get as ours, with what their records cannot prove."""

from __future__ import annotations

import csv
import json
import math
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner, Result

import oelm
from oelm.cli.app import app
from oelm.errors import ConfigError, DataError, OelmError
from oelm.experiments.catalog import load_catalog
from oelm.report.arms import ImportedStudy, collect_imported
from oelm.report.build import build_report
from oelm.report.document import Table, Text
from oelm.report.foreign import Question, judge_arms, judge_study, parse_bound, parse_question
from oelm.report.sections.verdicts import JudgedPair
from tests.report.synthetic import write_arm

RESULTS = Path(__file__).parents[2] / "results" / "variants"
FAMILY = ("GPT-01", "GPT-01-thin", "GPT-02", "GPT-02-last-half", "GPT-02-lowrank", "GPT-02-matched", "GPT-02-scaled")
BASE = (3.0, 3.02, 2.99, 3.01, 3.005)
NOISE = (0.001, -0.002, 0.002, 0.0, -0.001)
UNPROVEN = "the record does not prove that the arms saw the same data in the same order"


def losses(shift: float, seeds: int = 5) -> list[float]:
    return [base + shift + noise for base, noise in zip(BASE[:seeds], NOISE, strict=False)]


def oelm_run(*arguments: object, code: int = 0) -> Result:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == code, result.output
    assert "Traceback" not in result.output
    return result


def write_table(path: Path, arms: Mapping[str, Sequence[float]], *, metric: str = "eval_loss", steps: int = 100) -> Path:
    rows = [(arm, seed, steps, value) for arm, values in arms.items() for seed, value in enumerate(values)]
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([("arm", "seed", "step", metric), *rows])
    return path


def imported(root: Path, arms: Mapping[str, Sequence[float]], name: str = "mine", **given: Any) -> ImportedStudy:
    """Import a table of one value a run under a root; return the study."""
    root.mkdir(exist_ok=True)
    oelm_run("import", write_table(root / f"{name}.csv", arms, **given), "--name", name, "--out", root)
    return next(study for study in collect_imported([root]) if study.name == name)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    return tmp_path / "outputs"


ASKED = ("--metric", "eval_loss", "--baseline", "base", "--at-most", "1.05x")


# --- The same verdict as on the originals


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> list[JudgedPair]:
    """Our own verdicts on a recorded family, as a first look at it."""
    root = tmp_path_factory.mktemp("own")
    for name in FAMILY:
        shutil.copytree(RESULTS / name, root / name)
    for path in root.rglob("timing_stats.json"):
        # Recorded before the 5-gram was measured: with a bigram alone there would be no verdict to compare.
        kept = {key: value for key, value in json.loads(path.read_text()).items() if "bigram" not in key}
        path.write_text(json.dumps(kept))
    judged = build_report([root], load_catalog()).judged
    family = [row for row in judged if row.pair.baseline.experiment == "GPT-01" and row.pair.arm.variant.startswith("tuned")]
    assert len(family) == len(FAMILY) - 1 and any(row.judgement.is_look for row in family)
    return family


@pytest.mark.parametrize("metric", ["val_loss", "val_ppl"])
def test_copies_of_our_own_runs_get_the_verdicts_of_the_originals(
    metric: str, originals: list[JudgedPair], tmp_path: Path
) -> None:
    """Exported from metrics.jsonl to CSV as anybody would, imported, and judged: same verdict, interval and level."""
    assert {row.pair.split for row in originals} == {"val"} and len({row.judgement.planned for row in originals}) == 1
    arms = {row.pair.arm.experiment: row.pair.arm for row in originals} | {"GPT-01": originals[0].pair.baseline}
    with (tmp_path / "ours.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["arm", "seed", "step", metric])
        for name, arm in arms.items():
            for run in arm.runs:
                rows = map(json.loads, (run.path / "metrics.jsonl").read_text().splitlines())
                writer.writerows([(name, run.seed, row["step"], row[metric]) for row in rows if metric in row])
    oelm_run("import", tmp_path / "ours.csv", "--name", "ours", "--out", tmp_path)
    (study,) = collect_imported([tmp_path])
    question = parse_question(metric, baseline="GPT-01", at_most="1.05x", planned=originals[0].judgement.planned)
    found = judge_study(study, question).judgements
    for row in originals:
        ours, theirs = row.judgement, found[row.pair.arm.experiment]
        assert (theirs.verdict, theirs.level, theirs.num_seeds) == (ours.verdict, ours.level, ours.num_seeds)
        assert theirs.interval == ours.interval and theirs.comparisons == ours.comparisons


# --- Judging


def test_arms_pass_fail_or_stay_open_and_what_is_unproven_is_said(tmp_path: Path) -> None:
    study = imported(tmp_path, {"base": BASE, "good": losses(0.01), "bad": losses(0.2), "near": losses(math.log(1.05))})
    found = judge_study(study, parse_question("eval_loss", baseline="base", at_most="1.05x")).judgements
    assert {arm: judgement.verdict for arm, judgement in found.items()} == {
        "good": "PASS",
        "bad": "FAIL",
        "near": "INCONCLUSIVE",
    }
    assert all(judgement.reasons[-1].code == "unproven" for judgement in found.values())
    # Holm: two are decided at three comparisons, so that the third is judged alone.
    assert found["good"].level == pytest.approx(1 - 0.05 / 3) and found["near"].level == pytest.approx(0.95)


def test_losses_are_compared_as_perplexities(tmp_path: Path) -> None:
    study = imported(tmp_path, {"base": BASE, "arm": losses(0.03)})
    judgement = judge_study(study, parse_question("eval_loss", baseline="base", at_most="1.05x")).judgements["arm"]
    assert judgement.interval is not None and judgement.interval.value == pytest.approx(math.exp(0.03))


def test_accuracies_are_compared_in_points_as_shares_or_percent(tmp_path: Path) -> None:
    arms = {"base": [0.8, 0.81, 0.79, 0.8, 0.805], "arm": [0.79, 0.802, 0.779, 0.791, 0.795]}
    shares = imported(tmp_path, arms, "shares", metric="eval_accuracy")
    found = judge_study(shares, parse_question("eval_accuracy", baseline="base", at_most="2pt")).judgements["arm"]
    assert found.verdict == "PASS" and found.interval is not None and found.interval.value == pytest.approx(-0.0096)
    hundredths = {arm: [100 * value for value in values] for arm, values in arms.items()}
    percent = imported(tmp_path, hundredths, "percent", metric="acc")
    with pytest.raises(DataError, match=r"percent: arm, seed 0: acc is 79; an accuracy is between 0 and 1"):
        judge_study(percent, parse_question("acc", baseline="base", at_most="2pt"))
    asked = parse_question("acc", baseline="base", at_most="2pt", scale="percent")
    again = judge_study(percent, asked).judgements["arm"].interval
    assert again is not None and (again.value, again.low) == pytest.approx((found.interval.value, found.interval.low))


def test_each_run_counts_with_its_best_value_or_its_last(tmp_path: Path) -> None:
    rows = [("arm", "seed", "step", "eval_loss")]
    rows += [(arm, seed, step, 2.0 + seed / 100 + step / 1000) for arm in "AB" for seed in (0, 1) for step in (1, 2)]  # type: ignore[misc]
    with (tmp_path / "t.csv").open("w", newline="") as file:
        csv.writer(file).writerows(rows)
    oelm_run("import", tmp_path / "t.csv", "--name", "s", "--out", tmp_path)
    (study,) = collect_imported([tmp_path])
    for take, step in (("best", 1), ("last", 2)):
        figures = judge_study(study, parse_question("eval_loss", baseline="A", take=take)).figures
        assert figures["B"] == pytest.approx({seed: math.exp(2.0 + seed / 100 + step / 1000) for seed in (0, 1)})


@pytest.mark.parametrize(
    ("arms", "planned", "verdict", "reason"),
    [
        ({"base": BASE, "arm": losses(0.01, 3)}, 5, "EXPLORATORY", "fewer_seeds"),
        ({"base": BASE, "arm": losses(0.01, 3)}, 3, "PASS", "interval_inside"),
        ({"base": BASE, "arm": losses(0.01, 1)}, 3, "ONE_SEED", "one_seed"),
        ({"base": BASE, "arm": [base + 0.01 for base in BASE]}, 5, "INCONCLUSIVE", "no_spread"),
    ],
)
def test_verdicts_need_the_planned_seeds(arms: Any, planned: int, verdict: str, reason: str, tmp_path: Path) -> None:
    study = imported(tmp_path, arms)
    found = judge_study(study, parse_question("eval_loss", baseline="base", at_most="1.05x", planned=planned)).judgements["arm"]
    assert (found.verdict, found.reasons[0].code) == (verdict, reason)


def test_runs_of_other_lengths_get_no_verdict(tmp_path: Path) -> None:
    imported(tmp_path, {"base": BASE}, steps=100)
    oelm_run("import", write_table(tmp_path / "b.csv", {"arm": losses(0.01)}, steps=200), "--name", "mine", "--out", tmp_path)
    (study,) = collect_imported([tmp_path])
    found = judge_study(study, parse_question("eval_loss", baseline="base", at_most="1.05x")).judgements["arm"]
    assert found.verdict == "CONFOUNDED" and found.reasons[0].values["settings"] == ("steps (200 / 100)",)


def test_a_seed_without_the_metric_is_refused_and_an_arm_without_it_left_out(tmp_path: Path) -> None:
    imported(tmp_path, {"base": BASE, "arm": losses(0.01)})
    write_table(tmp_path / "other.csv", {"other": [1.0]}, metric="reward")
    oelm_run("import", tmp_path / "other.csv", "--name", "mine", "--out", tmp_path)
    (study,) = collect_imported([tmp_path])
    question = parse_question("eval_loss", baseline="base", at_most="1.05x")
    assert set(judge_study(study, question).judgements) == {"arm"}
    write_table(tmp_path / "more.csv", {"arm": [1.0] * 6}, metric="reward")
    lines = (tmp_path / "more.csv").read_text().splitlines()
    (tmp_path / "more.csv").write_text("\n".join([lines[0], lines[-1]]) + "\n")
    oelm_run("import", tmp_path / "more.csv", "--name", "mine", "--out", tmp_path)
    (study,) = collect_imported([tmp_path])
    with pytest.raises(DataError, match=r"mine: arm, seed 5, has no metric 'eval_loss'; it has reward"):
        judge_study(study, question)


def test_the_name_of_a_metric_says_how_it_is_compared() -> None:
    for metric, scale in {
        "eval_loss": "loss",
        "eval/loss": "loss",
        "val_ppl": "perplexity",
        "test/perplexity": "perplexity",
        "eval_accuracy": "accuracy",
        "val-acc": "accuracy",
        "cross_entropy": "loss",
        "loss_of_accuracy": "accuracy",
    }.items():
        assert parse_question(metric).scale == scale, metric


def test_a_question_that_does_not_fit_is_refused() -> None:
    cases: list[tuple[str, dict[str, Any], str]] = [
        ("reward", {}, r"--metric 'reward': its name does not say how to compare it; add --as loss, perplexity"),
        ("eval_loss", {"at_most": "2pt"}, r"--at-most '2pt': eval_loss is compared as loss, which takes a ratio"),
        ("acc", {"at_most": "1.05x"}, r"which takes points, such as 2pt"),
        ("acc", {"at_most": "5%"}, r"--at-most '5%': write a ratio above 0 such as 1.05x"),
        ("eval_loss", {"at_most": "0x"}, r"write a ratio above 0"),
        ("acc", {"at_most": "100pt"}, r"points below 100"),
        ("acc", {"scale": "share"}, r"--as 'share': choose one of loss, perplexity, accuracy, percent"),
        ("acc", {"take": "mean"}, r"--take 'mean': choose one of best, last"),
    ]
    for metric, asked, told in cases:
        with pytest.raises(ConfigError, match=told):
            parse_question(metric, **asked)


def test_a_bound_is_parsed_with_its_unit() -> None:
    assert parse_bound("1.05x").ppl_ratio_at_most == 1.05 and parse_bound(" 2 points").accuracy_loss_at_most == 0.02


# --- The commands


def test_compare_gives_the_verdict_and_what_is_not_proven(place: Path) -> None:
    imported(place, {"base": BASE, "good": losses(0.01), "bad": losses(0.2)})
    shown = oelm_run("compare", place / "imported" / "mine", *ASKED).output
    assert "mine: eval_loss against base, bound 1.05x." in shown and "compared as perplexities" in shown
    (good,) = [line for line in shown.splitlines() if line.startswith("good ")]
    (bad,) = [line for line in shown.splitlines() if line.startswith("bad ")]
    assert "5/5" in good and "PASS" in good
    assert "FAIL" in bad and shown.count(UNPROVEN) == 1


def test_naming_arms_changes_no_verdict_and_the_first_is_the_baseline(place: Path) -> None:
    imported(place, {"base": BASE, "good": losses(0.01), "bad": losses(0.2)})
    study = place / "imported" / "mine"
    whole = oelm_run("compare", study, *ASKED).output
    part = oelm_run("compare", study / "base", study / "good", "--metric", "eval_loss", "--at-most", "1.05x").output
    rows = [next(line.split() for line in shown.splitlines() if line.startswith("good ")) for shown in (whole, part)]
    assert rows[0] == rows[1] and "\nbad" in whole and "\nbad" not in part


def test_our_own_runs_in_a_folder_called_imported_are_compared_as_ours(place: Path) -> None:
    first, second = (write_arm(place, name, [30.0, 31.0], seeds=[0, 1])[0].parent for name in ("GPT-01", "GPT-02"))
    (place / "imported").mkdir()
    moved = [folder.rename(place / "imported" / name) for name, folder in (("a", first), ("b", second))]
    assert "method.init" in oelm_run("compare", *moved).output


def test_without_a_bound_there_is_an_interval_and_no_verdict(place: Path) -> None:
    imported(place, {"base": BASE, "good": losses(0.01)})
    shown = oelm_run("compare", place / "imported" / "mine", *ASKED[:4]).output
    assert "no criterion" in shown and "No bound was given, so no verdict." in shown and "[" in shown
    assert not (place / "looks.json").exists()


def test_seeds_added_after_a_look_and_other_metrics_count_as_looks(place: Path) -> None:
    imported(place, {"base": BASE, "good": losses(0.01)})
    study = place / "imported" / "mine"
    assert "Look number" not in oelm_run("compare", study, *ASKED).output
    assert "Look number" not in oelm_run("compare", study, *ASKED).output, "the same seeds again are the same look"
    assert "Look number 2" in oelm_run("compare", study, *ASKED[:-1], "1.2x").output, "another bound is another try"
    more = write_table(place / "more.csv", {"base": (*BASE, 3.015), "good": (*losses(0.01), 3.026)})
    lines = more.read_text().splitlines()
    more.write_text("\n".join([line for line in lines if line.split(",")[1] in ("seed", "5")]) + "\n")
    oelm_run("import", more, "--name", "mine", "--out", place)
    assert "Look number 3" in oelm_run("compare", study, *ASKED).output


def test_a_wrong_comparison_is_refused_and_says_what_to_give(place: Path) -> None:
    for name in ("mine", "other"):
        imported(place, {"base": BASE, "good": losses(0.01)}, name)
    cases: list[tuple[tuple[str, ...], str]] = [
        (("outputs/imported/mine",), "imported runs are compared by --metric, one of eval_loss"),
        (
            ("outputs/imported/mine", "--metric", "eval_loss"),
            "name the arm that the others are compared with: --baseline, one of base, good",
        ),
        (
            ("outputs/imported/mine", "--metric", "eval_los", "--baseline", "base"),
            "'eval_los' is none of them (did you mean 'eval_loss'?)",
        ),
        (("outputs/imported/mine", *ASKED[:2], "--baseline", "bass"), "did you mean 'base'?"),
        (("outputs/imported/nothing", *ASKED), "nothing is imported there"),
        (("outputs/imported/mine/base", "outputs/imported/mine/god", *ASKED), "no such arm (did you mean 'good'?)"),
        (("outputs/imported/mine/base", "outputs/imported/other/base", *ASKED), "import them under one --name"),
        (("outputs/A", "outputs/B", *ASKED), "--metric and --at-most are for imported runs"),
        (("outputs/A", "outputs/B", "--at-most", "1.05x"), "add --metric"),
    ]
    for arguments, told in cases:
        assert told in oelm_run("compare", *arguments, code=2).output, arguments


def test_the_report_has_a_section_in_both_languages(place: Path) -> None:
    imported(place, {"base": BASE, "good": losses(0.01)})
    question = parse_question("eval_loss", baseline="base", at_most="1.05x")
    made = build_report([place], load_catalog(), question=question)
    for lang, title in (("en", "Others' runs"), ("zh", "\u4ed6\u4eba\u7684\u8fd0\u884c")):
        sections = {section.name: section for section in made.document(lang).sections}
        assert sections["imported"].title == title and "verdicts" not in sections
        tables = {block.name: block for block in sections["imported"].blocks if isinstance(block, Table)}
        assert [row[0].text for row in tables["imported-mine"].rows][1:] == ["good"]
        assert [cell.text for cell in tables["imported"].rows[0]][:2] == ["mine", "base"]
        assert tables["imported-mine"].rows[1][-1].mark == "good"
    notes = [block.text for block in sections["imported"].blocks if isinstance(block, Text) and block.kind == "note"]
    assert any("\u5bfc\u5165" in note for note in notes)


def test_the_report_command_judges_imported_runs_beside_our_own(place: Path) -> None:
    for experiment, figure in (("GPT-01", 30.0), ("GPT-02", 30.6)):
        write_arm(place, experiment, [figure + noise * 10 * seed for seed, noise in enumerate(NOISE)], seeds=range(5))
    imported(place, {"base": BASE, "good": losses(0.01)})
    shown = oelm_run("report", *ASKED, "--html", "r.html").output
    assert "GPT-02 / GPT-01" in shown and UNPROVEN in shown and "PASS" in shown
    assert "imported|mine|good" in (place / "looks.json").read_text()
    assert UNPROVEN in Path("r.html").read_text()
    alone = oelm_run("report", "GPT-02").output
    assert "mine" not in alone, "who names experiments asks for those"


def test_without_a_question_the_report_lists_what_was_imported_and_how_to_ask(place: Path) -> None:
    imported(place, {"base": BASE})
    shown = oelm_run("report").output
    assert "oelm report --metric eval_loss --baseline ARM --at-most 1.05x" in shown and "0, 1, 2, 3, 4" in shown


def test_a_wrong_question_ends_the_report(place: Path) -> None:
    imported(place, {"base": BASE})
    cases: list[tuple[tuple[str, ...], str]] = [
        (("--metric", "eval_loss"), "add --baseline ARM"),
        (("--baseline", "base"), "add --metric"),
        (
            ("--metric", "eval_loss", "--baseline", "bas"),
            "no imported study has an arm 'bas' and a metric 'eval_loss': mine has base",
        ),
    ]
    for arguments, told in cases:
        assert told in oelm_run("report", *arguments, code=2).output, arguments


def test_a_damaged_record_ends_the_report_with_its_file(place: Path) -> None:
    imported(place, {"base": BASE})
    (place / "imported" / "mine" / "base" / "seed-0.json").write_text("{}")
    assert "seed-0.json: cannot be read" in oelm_run("report", code=3).output


def test_hostile_names_are_harmless_in_the_terminal_and_the_page(place: Path) -> None:
    hostile = "<script>alert(1)</script>\x1b[2J"
    imported(place, {"base": BASE, hostile: losses(0.01)})
    shown = oelm_run("report", *ASKED, "--html", "r.html").output
    assert "\x1b[2J" not in shown and "<script>alert" not in Path("r.html").read_text()


def test_import_says_what_it_read_and_refuses_with_a_code(place: Path) -> None:
    place.mkdir()
    table = write_table(place / "t.csv", {"base": BASE})
    shown = oelm_run("import", table, "--name", "mine", "--out", place).output
    assert "base: table, seeds 0, 1, 2, 3, 4; eval_loss" in shown and "5 runs written to" in shown
    assert "0 runs written to" in oelm_run("import", table, "--name", "mine", "--out", place).output
    assert "choose one of table, tensorboard" in oelm_run("import", table, "--name", "m", "--format", "csv", code=2).output
    assert "no such file or folder" in oelm_run("import", "absent.csv", "--name", "m", code=3).output
    assert "no column 'sed'" in oelm_run("import", table, "--name", "m", "--columns", "seed=sed", code=3).output


def test_imported_runs_are_rows_of_load_runs(place: Path) -> None:
    imported(place, {"base": BASE})
    write_arm(place, "GPT-01", [30.0], seeds=[0])
    ours, *theirs = oelm.load_runs(place)
    assert ours["experiment"] == "GPT-01" and len(theirs) == 5
    assert theirs[1]["imported.eval_loss"] == 3.02 and Path(theirs[1]["path"]).is_file()
    assert (theirs[1]["experiment"], theirs[1]["variant"], theirs[1]["state"]) == ("mine", "base", "imported")


def test_import_compare_and_report_do_not_wait_for_torch(place: Path) -> None:
    imported(place, {"base": BASE, "good": losses(0.01)})
    commands = [
        ["import", str(place / "mine.csv"), "--name", "again"],
        ["compare", "outputs/imported/again", *ASKED],
        ["report", *ASKED, "--markdown", "r.md"],
    ]
    # One process for all: what a command loads stays loaded.
    program = (
        "import sys, runpy\n"
        f"for arguments in {commands!r}:\n"
        "    sys.argv = ['oelm', *arguments]\n"
        "    try: runpy.run_module('oelm', run_name='__main__')\n"
        "    except SystemExit as leaving: assert not leaving.code, arguments\n"
        "    assert 'torch' not in sys.modules, arguments"
    )
    subprocess.run([sys.executable, "-c", program], check=True, capture_output=True)
    assert Path("r.md").is_file()


# --- Any table in Python

ROWS = [
    {"model": arm, "rng": seed, "loss": value}
    for arm, values in (("A", BASE), ("B", losses(0.01)), ("C", losses(0.2)))
    for seed, value in enumerate(values)
]
NAMED: dict[str, Any] = {"arm": "model", "seed": "rng", "value": "loss", "baseline": "A"}


def test_a_list_of_dicts_a_dict_of_lists_and_a_frame_give_the_same_verdicts() -> None:
    found = oelm.verdict(ROWS, **NAMED)
    assert [(row.arm, row.verdict, row.seeds) for row in found] == [("B", "PASS", 5), ("C", "FAIL", 5)]
    columns = {name: [row[name] for row in ROWS] for name in ROWS[0]}
    assert oelm.verdict(columns, **NAMED) == found
    pandas = pytest.importorskip("pandas", reason="pandas is not installed")
    assert oelm.verdict(pandas.DataFrame(ROWS), **NAMED) == found


def test_a_verdict_holds_the_interval_its_level_and_what_is_not_proven() -> None:
    (found, _) = oelm.verdict(ROWS, **NAMED)
    assert found.low is not None and found.value is not None and found.high is not None
    assert found.low < found.value < found.high < 1.05 and found.value == pytest.approx(math.exp(0.01), rel=1e-3)
    assert found.level == pytest.approx(0.975) and any(UNPROVEN in reason for reason in found.reasons)
    assert str(found).startswith("B: PASS, 1.01 [1.00") and str(found).endswith("at 97.5%, 5 of 5 planned seeds")
    (second, _) = oelm.verdict(ROWS, **NAMED, look=2)
    assert second.level > found.level


def test_a_verdict_on_accuracies_is_in_points() -> None:
    shares = {"A": (0.9, 0.89, 0.88), "B": (0.89, 0.88, 0.871)}
    rows = [{"arm": arm, "seed": seed, "acc": value} for arm, own in shares.items() for seed, value in enumerate(own)]
    (found,) = oelm.verdict(rows, baseline="A", value="acc", at_most="2pt", planned=3)
    assert found.verdict == "PASS" and found.value == pytest.approx(-0.0097, abs=1e-4)


def test_a_wrong_table_is_refused() -> None:
    cases: list[tuple[Any, dict[str, Any], str]] = [
        ([], {}, "give a list of dicts"),
        (5, {}, "give a list of dicts"),
        ("text", {}, "give a list of dicts"),
        ({"model": ["A"], "rng": [0, 1], "loss": [1.0]}, {}, "different lengths"),
        (ROWS, {"value": "los"}, "no column 'los'"),
        (ROWS, {"baseline": "Z"}, "no arm is called 'Z'"),
        (ROWS, {"look": 0}, "counted from 1"),
        ([*ROWS, ROWS[0]], {}, "row 16: A has seed 0 twice"),
        ([{**ROWS[0], "loss": math.nan}], {}, "row 1: loss is nan"),
        ([{**ROWS[0], "loss": "low"}], {}, "row 1: loss is 'low', not a number"),
        ([{**ROWS[0], "rng": "a"}], {}, "row 1: the seed is 'a'"),
        ([{**ROWS[0], "rng": None}], {}, "row 1: the seed is None"),
        ([{**ROWS[0], "loss": 800.0}], {}, "too large for a loss"),
    ]
    for frame, changes, told in cases:
        scale = {"scale": "loss"} if changes.get("value") == "los" else {}
        with pytest.raises(OelmError, match=told):
            oelm.verdict(frame, **(NAMED | changes | scale))


@settings(deadline=None, max_examples=25)
@given(st.permutations(range(len(ROWS))))
def test_the_order_of_rows_changes_nothing(order: list[int]) -> None:
    found = {row.arm: row for row in oelm.verdict([ROWS[number] for number in order], **NAMED)}
    assert found == {row.arm: row for row in oelm.verdict(ROWS, **NAMED)}


def test_one_arm_more_makes_no_verdict_surer() -> None:
    figures = {"A": dict(enumerate(BASE)), "B": dict(enumerate(losses(0.01)))}
    question = Question("ppl", "perplexity", baseline="A", criterion=parse_bound("1.05x"))
    alone = judge_arms(figures, question)["B"]
    both = judge_arms(figures | {"C": dict(enumerate(losses(0.011)))}, question)["B"]
    assert both.level > alone.level
