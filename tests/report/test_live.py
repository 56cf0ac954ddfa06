"""The live page: what runs do now is shown as it is, verdicts are preliminary and leave no trace, and it stays small."""

from __future__ import annotations

import html
import json
import re
import shlex
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from oelm.experiments.catalog import load_catalog
from oelm.experiments.importer import ImportedRun, write_imported
from oelm.experiments.plan import parse_seeds
from oelm.report.build import build_report
from oelm.report.document import Chart, Document, Table, Text
from oelm.report.foreign import parse_question
from oelm.report.html import Live, render_html, render_live
from oelm.report.live import LiveRuns, Moment, continue_command, live_document, machine_load, news, queue_eta_s
from oelm.report.words import Words
from tests.experiments.recorded import record
from tests.report.synthetic import Fate, write_arm, write_lines, write_run
from tests.report.test_words import english_words

BASE = (30.0, 30.2, 29.9, 30.1, 30.05)
ARM = (30.63, 30.77, 30.56, 30.64, 30.65)
ATTACK = "</section><script>window.pwned = 1</script><img src=x onerror=window.pwned=1>\x1b[2J\u202e"
LIVE = Live("file", 5.0, 1000.0)


def runs_of(root: Path, **chosen: object) -> LiveRuns:
    return LiveRuns(root, load_catalog(), **chosen)  # type: ignore[arg-type]


def page_of(root: Path, lang: str = "en") -> Document:
    return live_document(runs_of(root).look(), Words(lang))


def table(document: Document, name: str) -> Table:
    blocks = [block for section in document.sections for block in section.blocks]
    return next(block for block in blocks if isinstance(block, Table) and block.name == name)


def charts(document: Document) -> list[Chart]:
    return [block for section in document.sections for block in section.blocks if isinstance(block, Chart)]


def texts(document: Document) -> Iterator[str]:
    for section in document.sections:
        yield section.title
        for block in section.blocks:
            if isinstance(block, Text):
                yield block.text
            elif isinstance(block, Table):
                yield from (
                    block.caption,
                    *block.columns,
                    *(cell.text for row in block.rows for cell in row if not cell.is_code),
                )
            else:
                yield from (block.caption, block.alt)


def under_way(root: Path, experiment: str, seed: int, losses: tuple[float, ...], **facts: Any) -> Path:
    """Write a run under way, of another host: nobody here can say that it is dead."""
    told: dict[str, Any] = {"host": "elsewhere", "step": 10 * len(losses), "steps": 100, "metric": "ppl", "best": 31.0} | facts
    run = record(root, "running", experiment=experiment, budget="laptop", seed=seed, **told)
    rows = [{"step": 10 * n, "val_loss": loss, "val_ppl": 2.0 * loss} for n, loss in enumerate(losses, start=1)]
    write_lines(run / "metrics.jsonl", rows)
    return run


def test_nothing_recorded_yet_is_a_page_too(tmp_path: Path) -> None:
    document = page_of(tmp_path / "outputs")
    assert "No runs yet." in texts(document) and charts(document) == []
    assert [section.name for section in document.sections] == ["queue", "verdicts", "machine"]
    assert not (tmp_path / "outputs").exists()


def test_the_queue_shows_state_progress_eta_and_the_gap_at_the_last_common_step(tmp_path: Path) -> None:
    under_way(tmp_path, "GPT-01", 0, (5.0, 4.0, 3.0), eta_s=700.0)
    under_way(tmp_path, "GPT-02", 0, (5.5, 4.4), eta_s=65.0)
    record(tmp_path, "queued", budget="laptop", seed=1)
    document = page_of(tmp_path)
    rows = [[cell.text for cell in row] for row in table(document, "queue").rows]
    assert rows[1][:6] == ["GPT-02", "0", "running", "20/100 (20%)", "+10.0% (step 20)", "1:05"]
    assert rows[0][4] == "" and rows[2][2] == "waiting"
    assert any(text.startswith("3 runs: 2 running, 1 waiting.") for text in texts(document))


def test_a_run_that_ended_badly_is_listed_with_its_message_and_what_continues_it(tmp_path: Path) -> None:
    record(tmp_path, "failed", budget="laptop", seed=3, message="out of memory")
    record(tmp_path, "running", budget="laptop", seed=4, pid=2**22 + 1)
    rows = [[cell.text for cell in row] for row in table(page_of(tmp_path), "trouble").rows]
    assert rows[0][:4] == ["GPT-02, laptop, 3", "failed", "450/600", "out of memory"]
    assert rows[1][1] == "killed" and "--retry" not in rows[1][4]
    assert shlex.split(rows[0][4])[-1] == "--retry"


def test_the_command_names_exactly_one_seed_as_oelm_run_reads_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    record(Path("outputs"), "stopped", budget="laptop", seed=7)
    moment = runs_of(Path("outputs")).look()
    words = shlex.split(continue_command(moment.views[0], moment))
    assert words[:5] == ["oelm", "run", "GPT-02", "--budget", "laptop"] and "--out" not in words
    assert parse_seeds(words[words.index("--seeds") + 1]) == [7]


def test_a_variant_is_continued_from_its_own_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run = record(Path("my runs"), "stopped", variant="lr-1-abcdef01", seed=2)
    moment = runs_of(Path("my runs")).look()
    assert shlex.split(continue_command(moment.views[0], moment)) == [
        "oelm", "train", "--config", f"{run}/config.json", "--out", str(run),
    ]  # fmt: skip
    (run / "config.json").write_text(json.dumps({"examples": {}}))
    assert shlex.split(continue_command(moment.views[0], moment))[1] == "finetune"


def test_the_interval_narrows_as_seeds_finish_and_is_the_reports_own(tmp_path: Path) -> None:
    write_arm(tmp_path, "GPT-01", BASE)
    widths, verdicts = [], []
    runs = runs_of(tmp_path)
    for seeds in (2, 5):
        write_arm(tmp_path, "GPT-02", ARM[:seeds], seeds=range(seeds))
        moment = runs.look()
        (row,) = moment.report.judged
        assert row.judgement.interval is not None
        widths.append(row.judgement.interval.high - row.judgement.interval.low)
        verdicts.append(row.judgement.verdict)
    assert widths[1] < widths[0] and verdicts == ["EXPLORATORY", "PASS"]
    assert moment.report.judged == build_report([tmp_path], load_catalog()).judged
    assert list(moment.decided()) == ["GPT-02/laptop/default"]


def test_verdicts_are_labelled_preliminary_and_no_look_is_recorded(tmp_path: Path) -> None:
    write_arm(tmp_path, "GPT-01", BASE)
    write_arm(tmp_path, "GPT-02", ARM)
    before = sorted(path for path in tmp_path.rglob("*"))
    document = page_of(tmp_path)
    section = next(section for section in document.sections if section.name == "verdicts")
    warning = section.blocks[0]
    assert isinstance(warning, Text) and warning.kind == "warning" and warning.text.startswith("Preliminary:")
    assert "preliminary verdict" in table(document, "verdicts").columns
    assert sorted(path for path in tmp_path.rglob("*")) == before, "nothing is written, looks.json neither"


def test_arms_of_one_baseline_are_judged_together_whichever_are_watched(tmp_path: Path) -> None:
    write_arm(tmp_path, "GPT-01", BASE)
    write_arm(tmp_path, "GPT-02", ARM)
    write_arm(tmp_path, "GPT-02-global", [1.01 * value for value in ARM[::-1]])
    moment = runs_of(tmp_path, only={"GPT-02", "GPT-01"}).look()
    assert {view.experiment for view in moment.views} == {"GPT-01", "GPT-02"}
    (row,) = moment.report.judged
    assert row.judgement.comparisons == 2


def test_a_finished_run_is_read_once_and_again_when_it_was_extended(tmp_path: Path) -> None:
    (run,) = write_arm(tmp_path, "GPT-01", BASE[:1], seeds=range(1))
    runs = runs_of(tmp_path)
    first = runs.look().report
    assert runs.look().report is first
    write_run(tmp_path, "GPT-01", 0, Fate(ppl=20.0, heartbeat="2026-02-02T03:04:05+00:00"))
    assert [arm.best for arm in runs.look().report.findings.arms] == [{0: pytest.approx(20.0)}]
    assert run.is_dir()


def test_curves_are_means_over_the_seeds_that_reached_a_step_with_their_band(tmp_path: Path) -> None:
    under_way(tmp_path, "GPT-01", 0, (5.0, 4.0, 3.0))
    under_way(tmp_path, "GPT-01", 1, (6.0,))
    (chart,) = charts(page_of(tmp_path))
    points = {row["step"]: (row["low"], row["mean"], row["high"], row["seeds"]) for row in chart.spec["data"]["values"]}
    assert points == {10: (5.0, 5.5, 6.0, 2), 20: (4.0, 4.0, 4.0, 1), 30: (3.0, 3.0, 3.0, 1)}
    assert chart.caption.startswith("GPT-01 and the arms compared with it, budget laptop.")


def test_arms_of_oelm_train_are_drawn_with_the_baseline_of_the_same_config(tmp_path: Path) -> None:
    write_arm(tmp_path, "train", BASE[:2], seeds=range(2), variant="baseline-00000001")
    write_arm(tmp_path, "train", ARM[:2], seeds=range(2), variant="oelm-freeze-00000002", method="oelm_freeze")
    (chart,) = [chart for chart in charts(page_of(tmp_path)) if chart.name.startswith("learning")]
    assert chart.caption.startswith("train (baseline-00000001) and the arms compared with it")
    arms = list(dict.fromkeys(row["arm"] for row in chart.spec["data"]["values"]))
    assert arms == ["train (baseline-00000001)", "train (oelm-freeze-00000002)"]


def test_a_long_curve_is_thinned_to_its_end(tmp_path: Path) -> None:
    under_way(tmp_path, "GPT-01", 0, tuple(5.0 - 0.001 * n for n in range(1000)))
    (chart,) = charts(page_of(tmp_path))
    steps = [row["step"] for row in chart.spec["data"]["values"]]
    assert len(steps) <= 20 and steps[-1] == 10_000 and steps == sorted(steps)


def test_the_eta_counts_waiting_runs_by_what_others_of_their_arm_took(tmp_path: Path) -> None:
    started, ended = "2026-01-01T00:00:00+00:00", "2026-01-01T00:10:00+00:00"
    record(tmp_path, "done", seed=0, started=started, heartbeat=ended)
    under_way(tmp_path, "GPT-01", 0, (5.0,), eta_s=30.0)
    record(tmp_path, "queued", seed=1)
    record(tmp_path, "queued", seed=2)
    assert queue_eta_s(runs_of(tmp_path).look().views) == pytest.approx(30.0 + 2 * 600.0)


def test_without_anything_to_go_by_there_is_no_eta(tmp_path: Path) -> None:
    record(tmp_path, "queued")
    assert queue_eta_s(runs_of(tmp_path).look().views) is None
    assert not any("left" in text for text in texts(page_of(tmp_path)) if "runs:" in text)


def test_a_page_of_hostile_texts_holds_no_markup_of_theirs(tmp_path: Path) -> None:
    record(tmp_path, "failed", message=ATTACK, device=ATTACK)
    under_way(tmp_path, "GPT-01", 0, (5.0, 4.0))
    page = render_live(page_of(tmp_path), LIVE)
    assert "<img" not in page.html and page.html.count("<script") == 1 and "\x1b" not in page.html
    assert list(page.parts) == ["part-queue", "part-trouble", "part-verdicts", "part-learning", "part-machine"]
    assert all(part.endswith("</section>") and part in page.html for part in page.parts.values())


def test_no_path_of_this_machine_is_on_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    record(tmp_path / "outputs", "failed", variant="lr-1-abcdef01", message=f"no room to write {tmp_path}/outputs/x")
    page = render_live(page_of(tmp_path / "outputs"), LIVE).html
    assert str(tmp_path) not in page and "no room to write ./outputs/x" in page


def test_the_chinese_page_holds_no_english_sentence(tmp_path: Path) -> None:
    write_arm(tmp_path, "GPT-01", BASE)
    write_arm(tmp_path, "GPT-02", ARM[:3], seeds=range(3))
    record(tmp_path, "failed", budget="laptop", seed=3)
    under_way(tmp_path, "GPT-02", 4, (5.0, 4.0))
    known = {"oelm", "watch", "report", "status", "all", "CPU", "GiB", "PPL", "UTC", "laptop", "cpu", "nat", "lr"}
    for text in texts(page_of(tmp_path, "zh")):
        assert english_words(text) <= known, text


def test_an_update_changes_only_the_parts_that_are_new(tmp_path: Path) -> None:
    under_way(tmp_path, "GPT-01", 0, (5.0, 4.0))
    runs = runs_of(tmp_path)
    first = render_live(live_document(fixed_load(runs.look()), Words("en")), LIVE)
    under_way(tmp_path, "GPT-01", 0, (5.0, 4.0), loss=3.1)
    second = render_live(live_document(fixed_load(runs.look()), Words("en")), LIVE)
    changed = {name for name in second.digests if first.digests[name] != second.digests[name]}
    assert changed == {"part-queue"}
    told = re.search(r'data-parts="([^"]+)"', second.html)
    assert told is not None and dict(part.split("=") for part in told[1].split()) == second.digests


def fixed_load(moment: Moment) -> Moment:
    return Moment(moment.views, moment.report, moment.baselines, {"load": "1"}, moment.written, moment.root)


@pytest.mark.slow
def test_a_thousand_runs_make_a_page_under_200_kb(tmp_path: Path) -> None:
    experiments = [entry for entry in load_catalog() if entry.id.startswith("GPT-0")][:67]
    for entry in experiments:
        for seed in range(5):
            losses = tuple(3.4 - 0.001 * n - 0.0001 * seed for n in range(20))
            for budget in ("laptop", "workstation"):
                fate = Fate(ppl=30.0 + 0.01 * seed, method=str(entry.method), losses=losses, steps=20)
                write_run(tmp_path, entry.id, seed, fate, budget=budget)
            run = record(tmp_path, "running", experiment=entry.id, budget="paper", seed=seed, pid=2**22 + 1)
            write_lines(run / "metrics.jsonl", [{"step": n, "val_loss": loss} for n, loss in enumerate(losses)])
    moment = runs_of(tmp_path).look()
    assert len(moment.views) == 1005 and len(moment.report.judged) > 70
    for lang in ("en", "zh"):
        page = render_live(live_document(moment, Words(lang)), LIVE)
        assert len(page.html.encode()) < 200_000 and page.html.count("<tr>") > 200 and page.html.count("<svg") == 4


def test_the_load_of_the_machine_is_told_as_far_as_it_is_known(tmp_path: Path) -> None:
    load = machine_load(tmp_path / "not-there")
    assert "cores" in load and "disk" in load
    assert sys.platform != "linux" or {"load", "memory"} <= load.keys()


def test_what_happens_between_two_looks_is_told_once(tmp_path: Path) -> None:
    write_arm(tmp_path, "GPT-01", BASE)
    write_arm(tmp_path, "GPT-02", ARM[:4], seeds=range(4))
    under_way(tmp_path, "GPT-02", 4, (5.0,))
    record(tmp_path, "failed", experiment="GPT-03", message="an old failure")
    record(tmp_path, "queued", experiment="GPT-03", seed=1)
    runs = runs_of(tmp_path)
    first = runs.look()
    assert news(first, runs.look()) == []
    write_arm(tmp_path, "GPT-02", ARM[4:], seeds=[4])
    record(tmp_path, "failed", experiment="GPT-03", seed=1, message="out of memory")
    found = news(first, runs.look())
    assert [(event, name) for event, name, _ in found] == [
        ("failed", "GPT-03/smoke/default/seed-1"),
        ("verdict", "GPT-02/laptop/default"),
        ("ended", "queue"),
    ]
    assert found[0][2] == "GPT-03/smoke/default/seed-1 failed: out of memory"
    assert "preliminary verdict PASS, gap +2." in found[1][2] and "`oelm report GPT-02` gives and records" in found[1][2]
    assert found[2][2] == "no run is left: 2 failed, 10 done"
    assert not (tmp_path / "looks.json").exists()


def import_arms(root: Path, arms: Mapping[str, tuple[float, ...]], *, steps: int = 2, study: str = "theirs") -> None:
    """Import runs of another tool, whose losses fall to these values over so many evaluations."""
    runs = []
    for arm, finals in arms.items():
        for seed, final in enumerate(finals):
            points = tuple((100 * n, final + 0.1 * (steps - n)) for n in range(1, steps + 1))
            facts: dict[str, Any] = {"study": study, "arm": arm, "seed": seed, "name": f"{arm}-{seed}", "format": "table"}
            runs.append(ImportedRun(**facts, curves={"eval_loss": points}, source={}))
    write_imported(runs, root, replace=True)


THEIRS = {"base": (3.0, 3.02, 2.99, 3.01, 3.005), "good": (3.011, 3.028, 3.002, 3.02, 3.014)}
QUESTION = parse_question("eval_loss", baseline="base", at_most="1.05x")


def test_imported_runs_have_their_state_curves_and_preliminary_verdicts(tmp_path: Path) -> None:
    import_arms(tmp_path, THEIRS)
    document = live_document(runs_of(tmp_path, question=QUESTION).look(), Words("en"))
    assert [section.name for section in document.sections] == ["imported", "machine"], "none of ours, so nothing of ours"
    assert any(text.startswith("10 runs, all imported: they are shown as they were") for text in texts(document))
    assert [[cell.text for cell in row][:4] for row in table(document, "imported").rows] == [
        ["theirs", "base", "0, 1, 2, 3, 4", "200"],
        ["theirs", "good", "0, 1, 2, 3, 4", "200"],
    ]
    forest, learning = charts(document)
    assert (forest.name, learning.name) == ("forest-theirs", "curves-theirs")
    assert {(row["arm"], row["step"]) for row in learning.spec["data"]["values"]} == {
        (arm, step) for arm in THEIRS for step in (100, 200)
    }
    assert "preliminary verdict" in table(document, "imported-theirs").columns
    assert not (tmp_path / "looks.json").exists(), "a look at this page is none that counts"


@pytest.mark.parametrize("lang", ["en", "zh"])
def test_imported_runs_are_judged_on_the_page_as_in_the_report_with_its_words(tmp_path: Path, lang: str) -> None:
    import_arms(tmp_path, THEIRS)
    write_arm(tmp_path, "GPT-01", BASE)
    live = live_document(runs_of(tmp_path, question=QUESTION).look(), Words(lang))
    report = build_report([tmp_path], load_catalog(), question=QUESTION).document(lang)
    sections = [next(section for section in found.sections if section.name == "imported") for found in (live, report)]
    assert sections[0].title == sections[1].title
    assert table(live, "imported-theirs").rows == table(report, "imported-theirs").rows
    assert table(live, "imported") == table(report, "imported")
    kinds = [[block for block in section.blocks if isinstance(block, Chart)] for section in sections]
    assert kinds[0] == kinds[1] and len(kinds[0]) == 2
    warning = next(block for block in sections[0].blocks if isinstance(block, Text) and block.kind == "warning")
    assert warning.text == Words(lang)("live.preliminary") and warning not in sections[1].blocks
    assert [section.name for section in live.sections][:3] == ["queue", "verdicts", "imported"]


def test_imported_runs_are_read_again_when_they_are_imported_again_and_a_verdict_is_news(tmp_path: Path) -> None:
    import_arms(tmp_path, {arm: finals[:4] for arm, finals in THEIRS.items()})
    runs = runs_of(tmp_path, question=QUESTION)
    first = runs.look()
    assert runs.look().report is first.report and first.decided() == {}
    import_arms(tmp_path, THEIRS)
    ((event, name, text),) = news(first, runs.look())
    assert (event, name) == ("verdict", "imported/theirs/good") and "preliminary verdict PASS, gap +1.0% [" in text


def test_who_names_experiments_sees_no_imported_runs(tmp_path: Path) -> None:
    import_arms(tmp_path, THEIRS)
    document = live_document(runs_of(tmp_path, only={"GPT-01"}).look(), Words("en"))
    assert "imported" not in [section.name for section in document.sections]


def test_two_hundred_imported_arms_make_a_page_under_200_kb(tmp_path: Path) -> None:
    arms = {f"arm-{n}": tuple(3.0 + 0.001 * n + 0.002 * ((seed * 7 + n) % 5) for seed in range(2)) for n in range(200)}
    import_arms(tmp_path, arms, steps=30)
    question = parse_question("eval_loss", baseline="arm-0", at_most="1.05x")
    document = live_document(runs_of(tmp_path, question=question).look(), Words("en"))
    assert len(table(document, "imported").rows) == len(table(document, "imported-theirs").rows) == 70
    assert sum("more rows are left out" in text for text in texts(document)) == 2
    assert len(render_live(document, LIVE).html.encode()) < 200_000


def test_hostile_names_of_imported_arms_are_escaped(tmp_path: Path) -> None:
    import_arms(tmp_path, {"base": THEIRS["base"], ATTACK: THEIRS["good"]})
    page = render_live(live_document(runs_of(tmp_path, question=QUESTION).look(), Words("en")), LIVE).html
    assert "<img" not in page and page.count("<script") == 1 and "\x1b" not in page


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> Document:
    """A page with learning curves and a picture of intervals."""
    root = tmp_path_factory.mktemp("drawn")
    write_arm(root, "GPT-01", BASE)
    write_arm(root, "GPT-02", ARM[:3], seeds=range(3))
    return page_of(root)


def test_only_a_served_page_may_ask_and_only_its_own_server(drawn: Document) -> None:
    policies = {}
    for source in ("file", "server", "over"):
        page = render_live(drawn, Live(source, 5.0, 1000.0)).html
        found = re.search(r'http-equiv="Content-Security-Policy" content="([^"]+)"', page)
        assert found is not None
        policies[source] = html.unescape(found[1])
    assert policies["server"].endswith("; connect-src 'self'") and "connect-src" not in policies["file"] + policies["over"]
    assert all(policy.startswith("default-src 'none'; script-src 'sha256-") for policy in policies.values())


def test_a_page_that_is_over_asks_for_nothing_more(drawn: Document) -> None:
    live, over = (render_live(drawn, Live(source, 7.4, 1000.0)).html for source in ("file", "over"))
    assert '<noscript><meta http-equiv="refresh" content="7"></noscript>' in live and 'id="pause"' in live
    assert "refresh" not in over.split("<style>")[0] and 'id="pause"' not in over


def test_every_picture_is_there_for_a_wide_window_and_for_a_phone(drawn: Document) -> None:
    page = render_live(drawn, LIVE).html
    widths = [int(width) for width in re.findall(r'<svg width="(\d+)"', page)]
    assert len(charts(drawn)) == 2 and len(widths) == 4
    assert all(wide > 700 for wide in widths[::2]) and all(narrow <= 330 for narrow in widths[1::2])
    ids = re.findall(r' id="([^"]+)"', page)
    assert len(ids) == len(set(ids)), "pictures do not share ids"
    assert page.count("<script") == 1 and "http://" not in page.replace("http://www.w3.org/2000/svg", "")


def test_a_report_is_no_live_page(drawn: Document) -> None:
    assert "data-live" not in render_html(drawn) and "location.reload" not in render_html(drawn)
