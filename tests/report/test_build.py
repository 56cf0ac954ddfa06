"""A whole report: verdicts on studies whose truth is known, looks counted, and plain words where there is nothing to tell."""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from oelm.report import build
from oelm.report.build import Report, build_report
from oelm.report.document import Chart, Document
from oelm.report.html import render_html
from oelm.report.judge import Looks
from oelm.report.sections.verdicts import record_looks
from oelm.stats import interval_text, paired_log_ratio
from tests.experiments.recorded import status_of
from tests.report.reading import cells, english, everything, names, rows, section, table, texts, values
from tests.report.synthetic import Fate, package_catalog, write_arm, write_plain, write_run

BASE = (30.0, 30.2, 29.9, 30.1, 30.05, 29.95, 30.15)
# Chance, a tenth of a percent or so, that makes an interval of some width.
LUCK = (1.001, 0.999, 1.002, 0.998, 1.0, 1.0015, 0.9985)


def write_study(root: Path, ratio: float, *, seeds: int = 5, arm: str = "GPT-02", **place: Any) -> None:
    """Write a baseline and an arm whose true ratio of perplexities is known."""
    write_arm(root, "GPT-01", BASE[:seeds], seeds=range(seeds), **place)
    write_arm(root, arm, arm_figures(ratio)[:seeds], seeds=range(seeds), **place)


def arm_figures(ratio: float) -> list[float]:
    return [ratio * base * luck for base, luck in zip(BASE, LUCK, strict=True)]


def built(*roots: Path, **chosen: Any) -> Report:
    return build_report(roots, package_catalog(), **chosen)


def verdicts(report: Report) -> dict[str, str]:
    return {row.pair.arm.experiment: row.judgement.verdict for row in report.judged}


def look(root: Path) -> Report:
    """Report, and have the look counted, as the command does."""
    report = built(root)
    record_looks(report.judged, [root])
    return report


@pytest.mark.parametrize(("ratio", "verdict"), [(1.02, "PASS"), (0.9, "PASS"), (1.10, "FAIL"), (1.05, "INCONCLUSIVE")], ids=str)
def test_a_language_models_verdict_is_the_truth(tmp_path: Path, ratio: float, verdict: str) -> None:
    write_study(tmp_path, ratio)
    report = built(tmp_path)
    assert verdicts(report) == {"GPT-02": verdict}
    (row,) = rows(report.document("en"), "verdicts")
    assert (row["verdict"], row["seeds / planned"]) == (verdict, "5/5")


@pytest.mark.parametrize(("lost", "verdict"), [(0.01, "PASS"), (0.10, "FAIL"), (0.05, "INCONCLUSIVE")], ids=str)
def test_a_classifiers_verdict_is_the_truth(tmp_path: Path, lost: float, verdict: str) -> None:
    luck = (0.001, -0.002, 0.0, 0.002, -0.001)
    write_arm(tmp_path, "SST-2-01", [0.9] * 5)
    write_arm(tmp_path, "SST-2-02", [0.9 - lost + chance for chance in luck])
    assert verdicts(built(tmp_path)) == {"SST-2-02": verdict}


def test_three_seeds_are_exploratory_and_give_an_interval(tmp_path: Path) -> None:
    write_study(tmp_path, 1.02, seeds=3)
    document = english(tmp_path)
    (row,) = rows(document, "verdicts")
    assert row["verdict"] == "exploratory" and "[" in row["gap [interval]"]
    assert any("3 of 5 planned seeds" in text for text in texts(document, "verdicts", "note"))


def test_one_seed_gives_a_gap_and_no_interval(tmp_path: Path) -> None:
    write_study(tmp_path, 1.02, seeds=1)
    document = english(tmp_path)
    (row,) = rows(document, "verdicts")
    assert row["verdict"] == "one seed"
    assert row["gap [interval]"] == f"{100 * (1.02 * 1.001 - 1):+.1f}%" and row["sensitivity [95%]"] == ""
    assert not any(isinstance(block, Chart) for block in section(document, "answer").blocks)


def test_seeds_that_all_agree_are_one_seed_told_several_times(tmp_path: Path) -> None:
    write_arm(tmp_path, "GPT-01", [30.0] * 5)
    write_arm(tmp_path, "GPT-02", [30.3] * 5)
    report = built(tmp_path)
    assert verdicts(report) == {"GPT-02": "INCONCLUSIVE"}
    assert report.judged[0].judgement.reasons[0].code == "no_spread"


def test_no_seed_in_common_gives_no_gap(tmp_path: Path) -> None:
    write_arm(tmp_path, "GPT-01", BASE[:2], seeds=[0, 1])
    write_arm(tmp_path, "GPT-02", BASE[:2], seeds=[2, 3])
    (row,) = rows(english(tmp_path), "verdicts")
    assert (row["verdict"], row["gap [interval]"], row["sensitivity [95%]"]) == ("unfinished", "", "")


def test_smoke_never_gets_a_verdict(tmp_path: Path) -> None:
    write_study(tmp_path, 1.5, budget="smoke")
    report = built(tmp_path)
    document = report.document("en")
    assert cells(document, "verdicts", "verdict")[0].text == "smoke: never a result"
    assert not report.judged[0].judgement.is_look
    assert "0 pass" not in everything(document) and "None can be given a verdict" in texts(document, "verdicts")[0]
    # Nor is it what was measured of what the earlier study reported.
    assert not {"answer", "reported"} & {*names(document)}


def test_paper_arms_of_different_rates_get_no_verdict(tmp_path: Path) -> None:
    write_arm(tmp_path, "GPT-01", BASE[:5], budget="paper", settings={"optim.lr": 3e-4})
    write_arm(tmp_path, "GPT-02", arm_figures(1.01)[:5], budget="paper", settings={"optim.lr": 1e-3})
    document = english(tmp_path)
    assert rows(document, "verdicts")[0]["verdict"] == "CONFOUNDED"
    assert any("optim.lr (0.001 / 0.0003)" in text for text in texts(document, "verdicts", "note"))


def test_each_of_several_comparisons_is_judged_at_a_corrected_level(tmp_path: Path) -> None:
    write_study(tmp_path, 1.02)
    write_study(tmp_path, 1.10, arm="GPT-03")
    write_study(tmp_path, 1.02, arm="GPT-02-matched")
    assert [row.judgement.level for row in built(tmp_path).judged] == pytest.approx([1 - 0.05 / 3] * 3)


def test_arms_of_another_baseline_do_not_widen_the_others(tmp_path: Path) -> None:
    write_study(tmp_path, 1.02)
    write_study(tmp_path, 1.10, arm="GPT-03")
    write_arm(tmp_path, "GPT-04", BASE[:5])
    write_arm(tmp_path, "GPT-05", arm_figures(1.02)[:5])
    found = {row.pair.arm.experiment: row.judgement.level for row in built(tmp_path).judged}
    assert found == pytest.approx({"GPT-02": 0.975, "GPT-03": 0.975, "GPT-05": 0.95})


def test_naming_experiments_changes_no_verdict(tmp_path: Path) -> None:
    for arm, ratio in (("GPT-02", 1.02), ("GPT-03", 1.10), ("GPT-02-matched", 1.05)):
        write_study(tmp_path, ratio, arm=arm)
    for arm, judgement in [(row.pair.arm.experiment, row.judgement) for row in built(tmp_path).judged]:
        report = build_report([tmp_path], package_catalog(), only=[arm])
        assert [(row.pair.arm.experiment, row.judgement) for row in report.judged] == [(arm, judgement)]
        assert {found.experiment for found in report.findings.arms} == {arm, "GPT-01"}


def test_what_cannot_be_judged_does_not_widen_the_others(tmp_path: Path) -> None:
    write_study(tmp_path, 1.02)
    write_study(tmp_path, 1.10, arm="GPT-03", seeds=3)
    write_study(tmp_path, 1.10, arm="GPT-02-matched", budget="smoke")
    write_arm(tmp_path, "GPT-01", BASE[:5])
    write_arm(tmp_path, "GPT-02-global", arm_figures(1.1)[:5], settings={"optim.lr": 5e-4})
    by_arm = {row.pair.arm.experiment: row.judgement for row in built(tmp_path).judged}
    assert {name: judgement.verdict for name, judgement in by_arm.items()} == {
        "GPT-02": "PASS",
        "GPT-03": "EXPLORATORY",
        "GPT-02-matched": "NO_CRITERION",
        "GPT-02-global": "CONFOUNDED",
    }
    assert by_arm["GPT-02"].level == 0.95 and by_arm["GPT-02"].comparisons == 1


def test_the_headline_counts_the_verdicts(tmp_path: Path) -> None:
    for ratio, arm in ((1.02, "GPT-02"), (1.10, "GPT-03"), (1.05, "GPT-02-matched")):
        write_study(tmp_path, ratio, arm=arm)
    assert "3. By what learns in Q and K: pure: 1 pass, 1 fail, 1 inconclusive." in texts(english(tmp_path), "verdicts")[0]


def test_a_second_report_on_the_same_seeds_repeats_the_verdict(tmp_path: Path) -> None:
    write_study(tmp_path, 1.02)
    first, second = look(tmp_path), look(tmp_path)
    assert [row.judgement for row in first.judged] == [row.judgement for row in second.judged]
    assert {key: len(looks) for key, looks in Looks.read(tmp_path).entries.items()} == {"GPT-02|laptop|default": 1}


def test_a_report_that_is_only_built_is_no_look(tmp_path: Path) -> None:
    write_study(tmp_path, 1.02)
    built(tmp_path).document("en")
    assert not (tmp_path / "looks.json").exists()


def test_added_seeds_are_labelled_and_judged_at_a_corrected_level(tmp_path: Path) -> None:
    write_study(tmp_path, 1.05)
    look(tmp_path)
    write_study(tmp_path, 1.05, seeds=7)
    (row,) = built(tmp_path).judged
    assert (row.judgement.look, row.judgement.num_seeds) == (2, 7) and row.judgement.level == pytest.approx(0.975)
    (note,) = texts(english(tmp_path), "verdicts", "note")
    assert "Look number 2" in note and "97.5%" in note


@pytest.mark.parametrize(
    ("settings", "number"),
    [
        ({"optim.lr": 2e-3}, 2),
        ({"schedule.warmup_steps": 5}, 2),
        ({"model.dropout": 0.1}, 2),
        ({"steps": 40}, 1),
        ({"model.ff_dim": 128}, 1),
        ({"method.std": 0.5}, 1),
    ],
    ids=str,
)
def test_a_second_try_at_another_rate_is_the_next_look_at_the_same_question(
    tmp_path: Path, settings: dict[str, Any], number: int
) -> None:
    write_study(tmp_path, 1.05)
    look(tmp_path)
    # On fresh seeds, so that none of the first try's are missing.
    write_arm(tmp_path, "GPT-01", BASE[:5], seeds=range(10, 15), variant="again-0a1b2c3d", settings=settings)
    write_arm(tmp_path, "GPT-02", arm_figures(1.05)[:5], seeds=range(10, 15), variant="again-0a1b2c3d", settings=settings)
    looks = {row.pair.arm.variant: row.judgement.look for row in look(tmp_path).judged}
    assert looks == {"default": 1, "again-0a1b2c3d": number}
    # Repeating the report costs nothing, and taking the first try away does not make the second one the first.
    for variant in ("default", "again-0a1b2c3d"):
        assert {row.pair.arm.variant: row.judgement.look for row in built(tmp_path).judged}[variant] == looks[variant]
    for experiment in ("GPT-01", "GPT-02"):
        shutil.rmtree(tmp_path / experiment / "laptop" / "default")
    assert [row.judgement.look for row in built(tmp_path).judged] == [number]


@pytest.mark.parametrize("lang", ["en", "zh"])
def test_the_interval_that_is_shown_is_the_one_that_decides(tmp_path: Path, lang: str) -> None:
    # At 95% the first would pass. Held together with a second comparison, and at a second look, it does not.
    spread = (1.006, 0.994, 1.008, 0.992, 1.0)
    write_arm(tmp_path, "GPT-01", BASE[:5])
    for arm in ("GPT-02", "GPT-03"):
        write_arm(tmp_path, arm, [1.0405 * base * luck for base, luck in zip(BASE, spread, strict=False)])
    report = built(tmp_path)
    assert verdicts(report) == {"GPT-02": "INCONCLUSIVE", "GPT-03": "INCONCLUSIVE"}
    usual = paired_log_ratio(report.judged[0].pair.arm.best, report.judged[0].pair.baseline.best)
    assert usual is not None and usual.high < 1.05
    document = report.document(lang)
    for row, judged in zip(table(document, "verdicts").rows, report.judged, strict=True):
        decided = judged.judgement.interval
        assert decided is not None and decided.level == 0.975 and decided.low <= 1.05 < decided.high
        assert row[4].text == interval_text(decided, "ppl") and row[10].text == "97.5%"
    for point in values(document, "classes"):
        assert point["high"] > 1.05 and "97.5%" in point["text"]
    assert all("97.5%" in row[4].text for row in table(document, "classes").rows)


def test_two_tries_that_are_seen_for_the_first_time_are_two_looks(tmp_path: Path) -> None:
    for number in range(2):
        write_study(tmp_path, 1.02, variant=f"lr-0.00{number + 1}-abcd123{number}", settings={"optim.lr": 1e-3 * (number + 1)})
    first = look(tmp_path)
    assert [(row.judgement.look, row.judgement.level) for row in first.judged] == [(1, 0.95), (2, pytest.approx(0.975))]
    assert [row.judgement for row in look(tmp_path).judged] == [row.judgement for row in first.judged]


def test_a_look_of_before_questions_were_kept_counts_unless_its_runs_ask_something_else(tmp_path: Path) -> None:
    write_study(tmp_path, 1.05)
    old = [{"seeds": [7, 8, 9], "date": "2025-03-01"}]
    write_plain(tmp_path / "looks.json", {"looks": {"GPT-02|laptop|lr-0.5": old, "GPT-03|laptop|lr-0.5": old}})
    assert [row.judgement.look for row in built(tmp_path).judged] == [2]
    write_arm(tmp_path, "GPT-02", [30.0, 31.0], seeds=[7, 8], variant="lr-0.5", settings={"steps": 40})
    assert [row.judgement.look for row in built(tmp_path).judged] == [1]


def test_seeds_left_out_after_a_look_give_no_verdict(tmp_path: Path) -> None:
    write_study(tmp_path, 1.05, seeds=6)
    look(tmp_path)
    shutil.rmtree(tmp_path / "GPT-02" / "laptop" / "default" / "seed-3")
    assert verdicts(built(tmp_path)) == {"GPT-02": "EXPLORATORY"}


def test_only_what_could_have_passed_or_failed_is_a_look(tmp_path: Path) -> None:
    write_study(tmp_path, 1.02, seeds=3)
    write_study(tmp_path, 1.02, budget="smoke")
    look(tmp_path)
    assert not (tmp_path / "looks.json").exists()


def test_a_look_at_runs_in_a_second_folder_is_counted(tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    write_arm(here, "GPT-01", BASE, seeds=range(7))
    write_arm(there, "GPT-02", arm_figures(1.05)[:5])
    record_looks(built(here, there).judged, [here, there])
    assert not (here / "looks.json").exists() and (there / "looks.json").is_file()
    write_arm(there, "GPT-02", arm_figures(1.05), seeds=range(7))
    assert [row.judgement.look for row in built(here, there).judged] == [2]


def test_a_look_counts_wherever_it_was_written(tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    write_arm(here, "GPT-01", BASE, seeds=range(7))
    write_arm(here, "GPT-02", arm_figures(1.05)[2:], seeds=range(2, 7))
    look(here)
    # The added seeds come first, and lie in the folder that nobody looked at.
    write_arm(there, "GPT-02", arm_figures(1.05)[:2], seeds=range(2))
    assert [row.judgement.look for row in built(there, here).judged] == [2]


# What must not be seen, as a perplexity and as a loss.
NEVER = 98765.43
SHOWN = ("98765", "98,765", f"{math.log(NEVER):.4f}"[:-1])


def shows_it(document: Document) -> bool:
    held = everything(document)
    return any(form in held for form in SHOWN)


def unfinished(state: Any, **changes: Any) -> Callable[[Path], object]:
    def write(root: Path) -> None:
        run = write_run(root, "GPT-02", 0, Fate(ppl=NEVER, method="oelm_freeze"))
        write_plain(run / "status.json", status_of(state, **changes).model_dump(mode="json"))

    return write


def damaged(root: Path) -> None:
    run = write_run(root, "GPT-02", 0, Fate(ppl=NEVER, method="oelm_freeze"))
    (run / "status.json").write_text("{", encoding="utf-8")


def done_without_audit(root: Path) -> None:
    run = write_run(root, "GPT-02", 0, Fate(ppl=NEVER, method="oelm_freeze"))
    (run / "audit.json").unlink()


def mixed_configs(root: Path) -> None:
    write_arm(root, "GPT-02", [NEVER], seeds=[0])
    write_arm(root, "GPT-02", [NEVER], seeds=[1], settings={"optim.lr": 5e-4})


def mixed_data(root: Path) -> None:
    write_arm(root, "GPT-02", [NEVER], seeds=[0])
    write_arm(root, "GPT-02", [NEVER], seeds=[1], fingerprint="f" * 64)


LONG_AGO = "2024-01-02T03:04:05+00:00"
FATES: dict[str, tuple[Callable[[Path], object], str]] = {
    "queued": (unfinished("queued"), "waiting to be run, seeds 0"),
    "running": (unfinished("running", host="elsewhere"), "still running, seeds 0"),
    "stale": (unfinished("running", host="elsewhere", heartbeat=LONG_AGO), "running, but silent for a while, seeds 0"),
    "dead": (unfinished("running", pid=2**22 + 1), "killed, can be continued, seeds 0"),
    "failed": (unfinished("failed", message="no room left"), 'failed, seeds 0. On record: "no room left"'),
    "stopped": (unfinished("stopped"), "stopped, can be continued, seeds 0"),
    "damaged": (damaged, "damaged, seeds 0"),
    "unusable": (done_without_audit, "done, but its files cannot be used, seeds 0"),
    "mixed-configs": (mixed_configs, "differ in optim.lr (0.001 / 0.0005)"),
    "mixed-data": (mixed_data, "were trained on different data"),
}


def test_a_report_says_plainly_what_cannot_be_used_and_shows_nothing_of_it(tmp_path: Path) -> None:
    write_study(tmp_path, 1.02, arm="GPT-03")
    for fate, (write, told) in FATES.items():
        write(tmp_path)
        report = built(tmp_path)
        document = report.document("en")
        (warning,) = texts(document, "verdicts", "warning")
        assert told in warning and warning.startswith("GPT-02/laptop/default: "), fate
        assert not shows_it(document) and not shows_it(report.document("zh")), fate
        assert verdicts(report) == {"GPT-03": "PASS"}, fate
        shutil.rmtree(tmp_path / "GPT-02")


def test_a_report_on_nothing_but_runs_that_cannot_be_used_says_so(tmp_path: Path) -> None:
    for fate, (write, told) in FATES.items():
        write(tmp_path / fate)
        document = english(tmp_path / fate)
        assert names(document) == ["verdicts"], fate
        warnings = texts(document, "verdicts", "warning")
        assert told in warnings[0], fate
        assert warnings[1].startswith("No arm has a finished run together with its baseline"), fate
        assert not shows_it(document), fate


def test_a_report_on_no_runs_says_so(tmp_path: Path) -> None:
    document = english(tmp_path)
    assert names(document) == ["verdicts"]
    assert texts(document, "verdicts") == [
        "No arm has a finished run together with its baseline, so there is nothing to judge yet."
    ]


def test_a_report_on_one_run_shows_its_figure_and_what_is_missing(tmp_path: Path) -> None:
    write_arm(tmp_path, "GPT-02", [31.25], seeds=[4])
    document = english(tmp_path)
    assert rows(document, "figures")[0]["by seed"] == "4: 31.25"
    assert "GPT-02/laptop/default: compared with nothing, because GPT-01/laptop/default has no runs that can be used." in texts(
        document, "verdicts", "warning"
    )


def test_what_must_not_be_seen_would_be(tmp_path: Path) -> None:
    write_arm(tmp_path, "GPT-02", [NEVER], seeds=[0])
    assert shows_it(english(tmp_path))


def test_a_seed_twice_is_told_with_both_places(tmp_path: Path) -> None:
    for name in ("here", "there"):
        write_arm(tmp_path / name, "GPT-02", [NEVER], seeds=[0])
    document = english(tmp_path / "here", tmp_path / "there")
    warning = texts(document, "verdicts", "warning")[0]
    assert "seed 0 occurs twice" in warning and "here/GPT-02" in warning and "there/GPT-02" in warning
    assert not shows_it(document)


def test_a_report_names_no_host_and_no_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = tmp_path / "home" / "alice"
    monkeypatch.setenv("HOME", str(home))
    write_study(home / "runs", 1.02)
    mixed_configs(home / "runs")
    done_without_audit(home / "runs" / "more")
    run = write_run(home / "runs", "GPT-03", 0, Fate(ppl=30.0))
    (run / "audit.json").unlink()
    write_arm(home / "runs", "GPT-02-matched", arm_figures(1.0)[:5], settings={"data.source": f"{home}/text.txt"})
    shown = everything(english(home / "runs"))
    assert "alice" not in shown and "secret-host-name" not in shown
    assert "~/text.txt" in shown and "~/runs/GPT-03/laptop/default/seed-0/audit.json" in shown


def test_an_arm_of_oelm_train_without_its_baseline_is_named_with_what_to_train(tmp_path: Path) -> None:
    write_arm(tmp_path, "train", [30.0], seeds=[0], variant="baseline-00000001", settings={"steps": 40})
    write_arm(tmp_path, "train", [30.6], seeds=[0], variant="oelm-freeze-00000002", method="oelm_freeze")
    told = "because no baseline with the same text and settings was trained; run the same command with --method baseline."
    assert f"train/laptop/oelm-freeze-00000002: compared with nothing, {told}" in texts(english(tmp_path), "verdicts")


def test_only_what_is_asked_for_and_its_baseline_is_reported(tmp_path: Path) -> None:
    write_study(tmp_path, 1.02)
    write_study(tmp_path, 1.02, arm="GPT-03")
    write_study(tmp_path, 1.02, budget="smoke")
    document = english(tmp_path, only=["GPT-02"], budgets=["laptop"])
    assert [row["arm"] for row in rows(document, "figures")] == ["GPT-01", "GPT-02"]


def test_a_diverged_run_does_not_break_a_report(tmp_path: Path) -> None:
    write_study(tmp_path, 1.02)
    write_arm(tmp_path, "GPT-03", [1e250, 31.0, 31.0, 1e300, 31.0])
    report = built(tmp_path)
    assert verdicts(report)["GPT-03"] == "INCONCLUSIVE"
    assert render_html(report.document("en"))


def test_text_of_users_is_nothing_but_text_in_a_page(tmp_path: Path) -> None:
    attack = "<script>alert(1)</script>"
    write_study(tmp_path, 1.02)
    run = write_run(tmp_path, "GPT-03", 0, Fate(ppl=30.0))
    status = json.loads((run / "status.json").read_text(encoding="utf-8"))
    write_plain(run / "status.json", status | {"status": "failed", "message": attack})
    write_arm(tmp_path, "GPT-04", BASE[:2], seeds=[0, 1], data=attack)
    write_arm(tmp_path, "GPT-05", BASE[:2], seeds=[0, 1], data=attack, settings={"optim.lr": 3e-4})
    document = english(tmp_path)
    assert attack in everything(document) and attack not in render_html(document)


def test_a_report_takes_a_study_of_every_kind_at_once(tmp_path: Path) -> None:
    write_study(tmp_path, 1.02)
    write_study(tmp_path, 1.10, arm="GPT-03")
    write_study(tmp_path, 1.02, arm="GPT-02-matched")
    accuracies: Sequence[float] = (0.9, 0.91, 0.89, 0.9, 0.92)
    for experiment in ("SST-2-01", "SST-2-02", "MNLI-01", "MNLI-02"):
        write_arm(tmp_path, experiment, accuracies, data="sst2" if experiment.startswith("SST") else "mnli")
    expected = [
        "answer",
        "verdicts",
        "classes",
        "baselines",
        "learning",
        "costs",
        "why",
        "reported",
    ]
    assert names(english(tmp_path)) == expected
    assert names(built(tmp_path).document("zh")) == expected


def test_every_table_of_a_report_is_known_by_its_name() -> None:
    folder = Path(build.__file__).parent
    sources = [*(folder / "sections").glob("*.py"), folder / "foreign.py"]
    named = {name for path in sources for name in re.findall(r'\bTable\("([a-z]+)"', path.read_text(encoding="utf-8"))}
    assert sorted(named) == list(build.TABLES)
