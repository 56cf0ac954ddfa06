"""`oelm report` and `compare` as a user types them: what they print, what they write, and with which code they end."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner, Result

from oelm.cli.report import compare, report
from tests.conftest import oelm_command
from tests.experiments.recorded import record
from tests.report.synthetic import Fate, write_arm, write_plain, write_run, write_sweep

app = typer.Typer()
for command in (report, compare):
    app.command()(command)
BASE = (30.0, 30.2, 29.9, 30.1, 30.05, 29.95, 30.15)
ARM = (30.63, 30.77, 30.56, 30.64, 30.65, 30.6, 30.71)
HOSTILE = "\x1b[2Jcleared\x07\x9b2J [bold]not bold[/bold] :warning: \u202eturned"


def oelm(*arguments: object, code: int = 0) -> Result:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == code, result.output
    assert "Traceback" not in result.output
    return result


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder of its own, with a study at the default place for runs."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    write_study(tmp_path / "outputs")
    return tmp_path / "outputs"


def write_study(root: Path, seeds: int = 5) -> None:
    write_arm(root, "GPT-01", BASE[:seeds], seeds=range(seeds))
    write_arm(root, "GPT-02", ARM[:seeds], seeds=range(seeds))


def test_the_terminal_shows_the_verdicts_and_how_to_write_a_report(root: Path) -> None:
    shown = oelm("report").output
    assert "Comparisons: 1. By what learns in Q and K: pure: 1 pass, 0 fail" in shown
    answer = "Compared with baselines whose Q and K learn: within the bound on every data set judged: both frozen at random ("
    assert shown.startswith(f"{answer}oelm_freeze, ")
    (row,) = [line for line in shown.splitlines() if line.startswith("oelm_freeze") and "GPT-02 / GPT-01" in line]
    assert "tinystories" in row and "5/5" in row and row.split().count("PASS") == 1
    assert "write it: --html report.html" in shown


def test_a_narrow_terminal_gets_whole_words(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_arm(
        root,
        "GPT-02-matched",
        [1.05 * base * luck for base, luck in zip(BASE[:5], (1.001, 0.999, 1.002, 0.998, 1.0), strict=True)],
    )
    write_arm(root, "GPT-03", ARM[:3], seeds=range(3))
    monkeypatch.setenv("COLUMNS", "80")
    shown = oelm("report").output
    table = shown.split("GPT-02, laptop:")[0]
    for word in ("gaussian_matched", "INCONCLUSIVE", "exploratory", "tinystories", "verdict"):
        assert word in table
    grids = [line for line in table.splitlines() if line.startswith(("oelm_", "gaussian_", "method"))]
    assert max(map(len, grids)) <= 80


def test_a_report_on_nothing_says_so_and_ends_well(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    shown = oelm("report", "--out", tmp_path / "empty").output
    assert "there is nothing to judge yet" in shown and "start with `oelm demo`" in shown and "write it" not in shown


def test_a_folder_without_runs_is_told_how_to_begin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert "no runs here yet: this folder has no outputs/. Start with `oelm demo`" in oelm("report", code=2).output


def test_runs_of_oelm_train_are_reported_by_the_commands_name(root: Path) -> None:
    for variant, method, figures in (("baseline-1a2b3c4d", "baseline", BASE), ("polar-1a2b3c4e", "polar", ARM)):
        write_arm(root, "train", figures[:5], variant=variant, method=method, five_gram=60.0)
    shown = oelm("report", "train").output
    assert "polar" in shown and "GPT-02" not in shown and "1 pass" in shown
    assert "GPT-02" in oelm("report", "train", "gpt-02").output


def test_where_no_verdict_can_be_given_no_notes_are_promised(root: Path) -> None:
    write_study(root.parent / "few", seeds=2)
    assert "notes below" not in oelm("report", "--out", root.parent / "few").output


def test_ids_whatever_their_case_and_groups_choose_what_is_reported(root: Path) -> None:
    write_arm(root, "GPT-03", ARM[:5])
    assert "GPT-03" not in oelm("report", "gpt-02").output
    assert "GPT-03" in oelm("report", "study").output


def test_an_unknown_id_is_refused_with_the_nearest(root: Path) -> None:
    assert "no experiment or group called 'GPT-2' (did you mean 'GPT-02'?)" in oelm("report", "GPT-2", code=2).output


def test_an_unknown_language_is_refused_with_those_there_are(root: Path) -> None:
    assert "--lang 'xx': choose one of en, zh" in oelm("report", "--lang", "xx", code=2).output


def test_an_unknown_budget_is_refused_with_the_nearest(root: Path) -> None:
    shown = oelm("report", "--budget", "labtop", code=2).output
    assert "no budget called 'labtop' (did you mean 'laptop'?); choose one of paper, workstation, laptop, smoke" in shown


def test_what_has_no_runs_is_refused_with_where_there_are_some_and_writes_nothing(root: Path, tmp_path: Path) -> None:
    shown = oelm("report", "--budget", "paper", "--markdown", tmp_path / "report.md", code=2).output
    assert "error: no runs at budget paper under outputs; the runs are at laptop\n" in shown
    assert not (tmp_path / "report.md").exists()
    shown = oelm("report", "GPT-02", "--budget", "smoke", code=2).output
    assert "no runs of GPT-02 at budget smoke under outputs; the runs of GPT-02 are at laptop\n" in shown
    assert "no runs of GPT-05 under outputs; `oelm status` shows all" in oelm("report", "GPT-05", code=2).output


def test_a_run_given_as_the_folder_of_runs_is_refused_with_what_to_use(root: Path, tmp_path: Path) -> None:
    (tmp_path / "alone").mkdir()
    run = (root / "GPT-02" / "laptop" / "default" / "seed-0").rename(tmp_path / "alone" / "run")
    assert f"{run} is itself a run: use `oelm compare RUN RUN` or `oelm eval" in oelm("report", "--out", run, code=2).output
    assert f"{run.parent} holds runs directly, such as {run}: use" in oelm("report", "--out", run.parent, code=2).output


def test_a_missing_folder_is_refused(tmp_path: Path) -> None:
    assert "nowhere: no such folder" in oelm("report", "--out", tmp_path / "nowhere", code=2).output


def test_chinese_is_one_option_away(root: Path) -> None:
    assert "\u79cd\u5b50" in oelm("report", "--lang", "zh").output


def test_several_folders_are_one_study(root: Path, tmp_path: Path) -> None:
    write_arm(tmp_path / "more", "GPT-01", BASE[5:], seeds=[5, 6])
    write_arm(tmp_path / "more", "GPT-02", ARM[5:], seeds=[5, 6])
    assert "7/5" in oelm("report", "--out", root, "--out", tmp_path / "more").output


def test_a_folder_that_is_named_twice_counts_once(root: Path, tmp_path: Path) -> None:
    assert "5/5" in oelm("report", "--out", root, "--out", tmp_path / "outputs" / ".." / "outputs").output


def test_every_format_is_written_and_named(root: Path, tmp_path: Path) -> None:
    files = {"html": "r.html", "markdown": "r.md", "csv": "tables", "latex": "r.tex"}
    options = [part for name, file in files.items() for part in (f"--{name}", tmp_path / "deep" / file)]
    shown = oelm("report", *options).output
    assert all(str(tmp_path / "deep" / file) in shown for file in files.values()) and "write it:" not in shown
    page = (tmp_path / "deep" / "r.html").read_text(encoding="utf-8")
    assert page.lower().startswith("<!doctype html") and "GPT-02" in page
    markdown = (tmp_path / "deep" / "r.md").read_text(encoding="utf-8")
    pictures = sorted((tmp_path / "deep" / "r-pictures").iterdir())
    assert pictures and all(f"r-pictures/{picture.name}" in markdown for picture in pictures)
    tables = {path.stem for path in (tmp_path / "deep" / "tables").glob("*.csv")}
    assert {"verdicts", "figures", "costs", "reported"} <= tables
    assert "\\toprule" in (tmp_path / "deep" / "r.tex").read_text(encoding="utf-8")


def test_a_file_that_cannot_be_written_is_refused_and_the_look_still_counts(root: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    assert "cannot be written" in oelm("report", "--csv", tmp_path / "file" / "tables", code=3).output
    assert (root / "looks.json").is_file()


@pytest.mark.parametrize("option", ["--html", "--markdown", "--latex"])
def test_a_folder_in_a_files_place_is_refused_before_anything_is_shown(root: Path, tmp_path: Path, option: str) -> None:
    assert f"{option} {tmp_path}: this is a folder; name a file in it" in oelm("report", option, tmp_path, code=2).output
    (tmp_path / "file").write_text("", encoding="utf-8")
    assert "this is a file; name a folder" in oelm("report", "--csv", tmp_path / "file", code=2).output
    assert not (root / "looks.json").exists()


@pytest.mark.parametrize("one", [("--table", "verdicts"), ("--picture", "classes")])
def test_one_table_or_picture_goes_into_no_file(root: Path, tmp_path: Path, one: tuple[str, str]) -> None:
    found = oelm("report", *one, "--html", tmp_path / "a.html", code=2).output
    assert "--html: --table and --picture print one thing and write no file" in found and not (tmp_path / "a.html").exists()


@pytest.mark.parametrize(
    ("one", "near"),
    [(("--table", "verdict"), "verdicts"), (("--picture", "clases"), "classes")],
    ids=["table", "picture"],
)
def test_a_misspelt_table_or_picture_is_refused_with_the_nearest(root: Path, one: tuple[str, str], near: str) -> None:
    found = " ".join(oelm("report", *one, code=2).output.split())
    assert f"{one[0]} '{one[1]}' (did you mean '{near}'?): this report has no such {one[0][2:]}; it has " in found


def test_a_table_of_runs_that_are_not_there_is_refused_with_the_reason(tmp_path: Path) -> None:
    found = oelm("report", "--out", tmp_path, "--table", "classes", code=2).output
    told = "--table 'classes': this report has no such table; it has none; no arm in it has finished runs together with"
    assert told in " ".join(found.split())


def test_a_table_that_other_reports_have_is_not_called_misspelt(root: Path) -> None:
    found = " ".join(oelm("report", "--table", "imported", code=2).output.split())
    assert "--table 'imported': this report has no such table; it has classes" in found


def test_looks_are_counted(root: Path) -> None:
    oelm("report")
    again = oelm("report").output
    assert "Look number" not in again and "PASS" in again
    write_study(root, seeds=7)
    assert "Look number 2" in oelm("report").output
    looks = json.loads((root / "looks.json").read_text(encoding="utf-8"))["looks"]
    assert [look["seeds"] for look in looks["GPT-02|laptop|default"]] == [list(range(5)), list(range(7))]


def test_a_damaged_count_of_looks_is_refused_before_any_verdict(root: Path) -> None:
    (root / "looks.json").write_text("{", encoding="utf-8")
    shown = oelm("report", code=3).output
    assert "looks.json" in shown and "restore it from a copy" in shown and "PASS" not in shown


def test_text_of_users_cannot_drive_the_terminal(root: Path) -> None:
    record(root, "failed", experiment="GPT-03", budget="laptop", message=HOSTILE)
    shown = oelm("report").output
    assert "[bold]not bold[/bold] :warning:" in shown
    assert not {"\x1b", "\x07", "\x9b", "\u202e"} & set(shown)


def test_a_catalog_of_ones_own_is_judged_by_its_own_criterion(root: Path, tmp_path: Path) -> None:
    own = "MINE: {extends: GPT-02, criterion: {ppl_ratio_at_most: 1.01}}\n"
    (tmp_path / "own.yaml").write_text(own, encoding="utf-8")
    write_arm(root, "MINE", ARM[:5], method="oelm_freeze")
    shown = oelm("report", "MINE", "--catalog", tmp_path / "own.yaml").output
    assert "Comparisons: 1. By what learns in Q and K: pure: 0 pass, 1 fail" in shown and "misses the bound 1.010x" in shown


def test_compare_sets_runs_side_by_side(root: Path) -> None:
    shown = oelm("compare", root / "GPT-01" / "laptop" / "default", root / "GPT-02" / "laptop" / "default").output
    assert "best PPL" in shown and "30.65" in shown and "method.init (native / orthogonal)" in shown


def test_compare_refuses_what_cannot_be_compared(root: Path) -> None:
    run = root / "GPT-01" / "laptop" / "default" / "seed-0"
    oelm("compare", run, code=2)
    oelm("compare", run, root / "nothing", code=2)
    oelm("compare", run, record(root, "failed", experiment="GPT-03"), code=2)
    oelm("compare", run, write_arm(root, "SST-2-01", [0.9], seeds=[0])[0], code=2)


def test_compare_says_of_one_path_why_it_has_nothing_to_compare(root: Path, tmp_path: Path) -> None:
    def said(path: Path) -> str:
        return oelm("compare", path, code=2).output.removeprefix(f"error: {path}: ")

    (file := tmp_path / "file").touch()
    assert said(tmp_path / "nope").startswith("no such folder; give a run's folder")
    assert said(file).startswith("is a file; give a run's folder")
    assert said(root).startswith("is no run, and holds no seed-0, seed-1, ...; give one below it, such as ")
    assert said(root / "GPT-02").endswith(f"such as {root / 'GPT-02' / 'laptop' / 'default'}\n")
    (run, _) = write_arm(root, "train", ARM[:2], seeds=range(2), variant="lonely", method="oelm_freeze")
    told = "no baseline with the same text and settings was trained; run the same command with --method baseline"
    assert said(run).startswith(told) and said(run.parent).startswith(told)
    assert said(write_arm(root, "train", BASE[:1], seeds=[0], variant="base")[0]).startswith("is itself a baseline;")
    assert said(root / "GPT-01" / "laptop" / "default").startswith("is itself a baseline;")
    assert said(run.rename(tmp_path / "solo")).startswith("its folder is not that of an experiment with a baseline;")
    write_run(root, "train", 0, Fate(ppl=31.0, method="oelm_freeze", settings={"steps": 40}), variant="lonely")
    assert said(run.parent).startswith("seed-0 and seed-1 differ in steps (40 / ")


def test_compare_prints_hostile_names_as_text(root: Path, tmp_path: Path) -> None:
    run = root / "GPT-01" / "laptop" / "default" / "seed-0"
    moved = (root / "GPT-02" / "laptop" / "default" / "seed-0").rename(tmp_path / "[red]a\x1b[31mb\u202e")
    shown = oelm("compare", run, moved).output
    assert "[red]a" in shown and not {"\x1b", "\u202e"} & set(shown)


def test_a_report_does_not_wait_for_torch(root: Path) -> None:
    write_sweep(root, "GPT-02", best=1)
    # Its method has settings below `thaw`, which is null for the baseline.
    write_arm(root, "GPT-02-thaw-all", ARM[:5])
    program = (
        "import sys; from pathlib import Path; from oelm.experiments.catalog import load_catalog; "
        "from oelm.report.build import build_report; "
        "build_report([Path('outputs')], load_catalog()).document('en'); sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)


def test_the_commands_are_there_in_a_process_of_their_own(root: Path) -> None:
    write_run(root, "GPT-01", 9, Fate(ppl=30.0))
    write_plain(root / "GPT-01" / "laptop" / "default" / "seed-9" / "audit.json", {})
    done = subprocess.run(oelm_command("report", "--out", "outputs"), capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "") and "done, but its files cannot be used, seeds 9" in done.stdout
    refused = oelm("report", "--out", "nowhere", code=2)
    assert refused.stdout == "" and refused.stderr.startswith("error: nowhere: no such folder")


def test_one_table_alone_names_the_records_that_it_could_not_use(root: Path) -> None:
    assert oelm("report", "--table", "classes").stderr == ""
    metrics = root / "GPT-02" / "laptop" / "default" / "seed-3" / "metrics.jsonl"
    metrics.write_text("", encoding="utf-8")
    (root / "GPT-01" / "laptop" / "sweep.json").write_text("xx", encoding="utf-8")
    for asked in (("--table", "classes"), ("--picture", "classes")):
        found = oelm("report", *asked)
        damaged = [line for line in found.stderr.splitlines() if line.startswith("warning: not used: ")]
        assert len(damaged) == 2 and "seed-3" in damaged[0] and "sweep.json: damaged" in damaged[1]
        assert "not used" not in found.stdout


def test_a_damaged_sweep_is_named_in_the_whole_report(root: Path) -> None:
    (root / "GPT-02" / "laptop" / "sweep.json").write_text("xx", encoding="utf-8")
    shown = oelm("report").output
    assert "Cannot be used" in shown and "sweep.json: damaged" in shown


@pytest.mark.parametrize("files", [(), ("--latex", "page.tex"), ("--table", "verdicts")], ids=["terminal", "file", "table"])
def test_a_reader_that_leaves_gets_no_error_and_the_files_are_written(root: Path, files: tuple[str, ...]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    command = oelm_command("report", "--out", str(root), *files)
    ended = subprocess.run(command, cwd=root.parent, stdout=writer, stderr=subprocess.PIPE, text=True)
    os.close(writer)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert (root / "looks.json").is_file() and (root.parent / "page.tex").exists() == ("--latex" in files)


def test_a_look_that_cannot_be_recorded_is_refused_before_any_verdict(root: Path) -> None:
    (root / ".looks.lock").mkdir()
    result = CliRunner().invoke(app, ["report", "--out", str(root)])
    assert result.exit_code != 0 and "PASS" not in result.output and not (root / "looks.json").exists()


def test_a_table_that_is_not_shown_is_no_look(root: Path) -> None:
    oelm("report", "--out", root, "--table", "nonsense", code=2)
    assert not (root / "looks.json").exists()
