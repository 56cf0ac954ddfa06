"""The log tells of every run on its day, and nothing that a record says becomes markup."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from oelm.report.diary import write_diary
from tests.experiments.recorded import record, status_of
from tests.report.sample_document import ATTACKS
from tests.report.synthetic import Fate, audit_of, write_plain, write_run


def days(diary: str) -> dict[str, list[str]]:
    """Return the lines of each day, in the order of the log."""
    parts = re.split(r"^## ", diary, flags=re.MULTILINE)[1:]
    return {part.split("\n")[0]: [line for line in part.split("\n") if line.startswith("- ")] for part in parts}


def test_no_runs_make_an_empty_log(tmp_path: Path) -> None:
    assert write_diary([tmp_path]) == "# Experiment log\n\nNo runs yet.\n"


def test_runs_stand_under_their_day_the_newest_day_first(tmp_path: Path) -> None:
    moments = {0: "2026-03-01T23:59:59+00:00", 1: "2026-03-02T00:00:01+00:00", 2: "2026-03-01T08:00:00+00:00"}
    for seed, moment in moments.items():
        write_run(tmp_path, "GPT-01", seed, Fate(ppl=30.0, heartbeat=moment))
    found = {day: [re.findall(r"seed-(\d)", line) for line in lines] for day, lines in days(write_diary([tmp_path])).items()}
    assert list(found) == ["2026-03-02", "2026-03-01"]
    assert found == {"2026-03-02": [["1"]], "2026-03-01": [["2"], ["0"]]}


def test_a_finished_run_is_told_with_what_came_out(tmp_path: Path) -> None:
    fate = Fate(ppl=31.25, method="oelm_freeze", steps=400, step_s=0.75, overhead_s=60.0, revision="a" * 40 + "+changes")
    write_run(tmp_path, "GPT-02", 3, fate)
    ((line,),) = days(write_diary([tmp_path])).values()
    counted = audit_of("oelm_freeze")
    assert line.startswith("- `GPT-02/laptop/default/seed-3`: best PPL 31.25 at step 400, 1.6M tokens in 6.0 min on `cpu`; ")
    assert f"{counted['trainable']:,} trainable, {counted['frozen']:,} frozen" in line
    assert "data `tinystories`" in line and line.endswith("revision `aaaaaaaaaaaa+changes`")


def test_a_classifier_is_told_by_its_accuracy(tmp_path: Path) -> None:
    write_run(tmp_path, "SST-2-01", 0, Fate(accuracy=0.9125, entropies=None, revision=None))
    diary = write_diary([tmp_path])
    assert "best accuracy 91.25%" in diary and "revision `unknown`" in diary


def test_a_run_that_failed_is_told_with_why(tmp_path: Path) -> None:
    record(tmp_path, "failed", experiment="GPT-01", heartbeat="2026-03-02T00:00:01+00:00", message="no room left")
    assert days(write_diary([tmp_path])) == {"2026-03-02": ["- `GPT-01/smoke/default/seed-0`: failed (`no room left`)"]}


def test_a_run_without_a_readable_status_stands_last_without_a_date(tmp_path: Path) -> None:
    write_run(tmp_path, "GPT-01", 0, Fate(ppl=30.0))
    run = write_run(tmp_path, "GPT-01", 1, Fate(ppl=30.0))
    (run / "status.json").write_text("{", encoding="utf-8")
    found = days(write_diary([tmp_path]))
    assert list(found) == ["2026-01-02", "no date"] and "damaged" in found["no date"][0]


def test_runs_of_several_folders_are_in_one_log(tmp_path: Path) -> None:
    for seed, name in enumerate(("here", "there")):
        write_run(tmp_path / name, "GPT-01", seed, Fate(ppl=30.0))
    assert len(days(write_diary([tmp_path / "here", tmp_path / "there"]))["2026-01-02"]) == 2


@pytest.mark.parametrize("attack", [text for text in ATTACKS.values() if text.isascii() or "\u202e" in text])
def test_nothing_that_a_record_says_leaves_its_line_or_its_quotes(tmp_path: Path, attack: str) -> None:
    run = write_run(tmp_path, "GPT-01", 0, Fate(ppl=30.0, data=f"x{attack}", fingerprint=f"`{attack}", heartbeat=attack))
    failed = write_run(tmp_path, "GPT-01", 1, Fate(ppl=30.0))
    status = status_of("failed", message=f"y{attack}", heartbeat=f"## {attack}").model_dump(mode="json")
    write_plain(failed / "status.json", status)
    diary = write_diary([tmp_path])
    lines = diary.split("\n")
    assert [line for line in lines if line.startswith("#")] == ["# Experiment log", "## no date"]
    assert len(lines) == 7 and run.name in diary
    for line in lines[4:6]:
        # Code spans in turn with our own words: outside of them is nothing of the record's.
        outside = "".join(line.split("`")[::2])
        assert line.count("`") % 2 == 0 and re.fullmatch(r"[-A-Za-z0-9 :;,.()]*", outside)
        assert not re.search(r"[\x00-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]", line)


def test_a_home_folder_is_not_in_the_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "alice"))
    run = write_run(tmp_path / "alice" / "runs", "GPT-01", 0, Fate(ppl=30.0))
    (run / "audit.json").unlink()
    diary = write_diary([tmp_path / "alice" / "runs"])
    assert "alice" not in diary and "~/runs/GPT-01/laptop/default/seed-0/audit.json" in diary
