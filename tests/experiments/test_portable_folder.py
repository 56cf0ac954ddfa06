"""Portable folders: what is written without weights or a trace of the machine, what is added, refused, and found damaged."""

from __future__ import annotations

import json
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import oelm
from oelm.errors import ConfigError, DataError, RunDirError
from oelm.experiments.portable import INVENTORY, Archived, archive_runs, check_folder
from oelm.files import STAGING_PREFIX, read_json, write_json
from oelm.runs.find import scan
from oelm.runs.layout import METRICS, PREDICTIONS, SWEEP
from oelm.runs.metrics import read_metrics
from oelm.train.load import load_run
from tests.conftest import run_here, tiny_config
from tests.experiments.recorded import record
from tests.report.reading import english, rows
from tests.report.synthetic import SEEDS, Fate, write_arm, write_run

PLACE = "GPT-02/smoke/default/seed-0"
SMALL = {"config.json", "manifest.json", "audit.json", "status.json", "timing_stats.json", "attention.json", METRICS}
SMALL |= {PREDICTIONS["val"]}


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A root with one real finished run of more steps than are kept, and one that is not done."""
    folder = tmp_path_factory.mktemp("portable")
    text = folder / "text.txt"
    text.write_text("the cat sat on the mat and the dog sat on the cat. " * 60)
    root = folder / "outputs"
    run_here(tiny_config(text, steps=230, eval_every=100, save_every=100, batch_size=2), root / PLACE)
    record(root, "stopped", seed=1)
    return root


@pytest.fixture
def two(tmp_path: Path) -> Path:
    """A root with two finished runs, made up."""
    for seed in (0, 1):
        write_run(tmp_path / "outputs", "GPT-02", seed, Fate(ppl=20.0 + seed), budget="smoke")
    return tmp_path / "outputs"


def archive(root: Path, folder: Path, *, weights: bool = False) -> Archived:
    return archive_runs(folder, scan(root), weights=weights)


def kept(outputs: Path, folder: Path, *, weights: bool = False) -> Path:
    archive(outputs, folder, weights=weights)
    return folder / PLACE


def tree(folder: Path) -> dict[str, bytes]:
    """Return every file below a folder, the lock aside."""
    files = [path for path in folder.rglob("*") if path.is_file() and path.name != ".archive.lock"]
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


def test_only_finished_runs_are_archived_and_the_others_named(outputs: Path, tmp_path: Path) -> None:
    result = archive(outputs, tmp_path)
    assert result.added == (PLACE,)
    assert result.remarks == ("GPT-02/smoke/default/seed-1: left out: not finished (stopped)",)


def test_without_a_finished_run_nothing_is_written(tmp_path: Path) -> None:
    record(tmp_path / "outputs", "stopped")
    with pytest.raises(DataError, match=rf"no finished run to archive; {PLACE}: left out: not finished \(stopped\)"):
        archive(tmp_path / "outputs", tmp_path / "folder")
    assert not (tmp_path / "folder").exists()


def test_the_folder_of_the_runs_themselves_is_refused(two: Path) -> None:
    before = tree(two)
    with pytest.raises(ConfigError, match="holds the runs themselves"):
        archive(two, two / "GPT-02" / "..")
    assert tree(two) == before


def test_records_hold_neither_weights_nor_tokenizer_nor_text(outputs: Path, tmp_path: Path) -> None:
    assert set(tree(kept(outputs, tmp_path))) == SMALL


def test_with_weights_a_run_opens_where_the_folder_is_and_has_all_of_its_metrics(outputs: Path, tmp_path: Path) -> None:
    run = kept(outputs, tmp_path, weights=True)
    loaded = load_run(run)
    assert loaded.step == 230 and loaded.tokenizer() is not None
    assert (run / METRICS).read_bytes() == (outputs / PLACE / METRICS).read_bytes()
    names = set(tree(run))
    assert SMALL | {"tokenizer.json", "training.log", "best.json", "latest.json"} < names
    assert names < set(tree(outputs / PLACE)) and check_folder(tmp_path)[1] == []


def test_half_a_checkpoint_a_link_and_files_of_others_stay_behind(outputs: Path, tmp_path: Path) -> None:
    root = tmp_path / "outputs"
    run = Path(shutil.copytree(outputs / PLACE, root / PLACE))
    (run / "checkpoints" / "step-00000200" / "state.json").unlink()
    (run / "audit.json").rename(tmp_path / "audit.json")
    (run / "audit.json").symlink_to(tmp_path / "audit.json")
    for name in ("mine.txt", "console.log", f"{STAGING_PREFIX}abc", f"checkpoints/{STAGING_PREFIX}x"):
        (run / name).write_text("mine")
    names = set(tree(kept(root, tmp_path / "folder", weights=True)))
    assert not [name for name in names if "step-00000200" in name] and [name for name in names if "step-00000230" in name]
    assert not names & {"audit.json", "mine.txt", "console.log", ".lock"} and not [name for name in names if "staging" in name]


def test_every_evaluation_and_at_most_a_hundred_odd_steps_are_kept(outputs: Path, tmp_path: Path) -> None:
    before, after = read_metrics(outputs / PLACE / METRICS), read_metrics(kept(outputs, tmp_path) / METRICS)
    assert [row for row in after if "val_loss" in row] == [row for row in before if "val_loss" in row]
    steps = [row for row in after if "loss" in row]
    assert 100 <= len(steps) < 200
    assert all(row in before for row in steps)


def test_nothing_of_the_machine_travels(outputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = tmp_path / "home" / "ada"
    lab = home / "lab"
    run = Path(shutil.copytree(outputs / PLACE, lab / "outputs" / PLACE))
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setattr(socket, "gethostname", lambda: "babbage.example.org")
    monkeypatch.chdir(lab)
    config, status = read_json(run / "config.json"), read_json(run / "status.json")
    write_json(run / "config.json", config | {"data": config["data"] | {"source": f"{home}/data/text.txt"}})
    message = f"DataError: {lab}/text on babbage, and\\n{home}"
    write_json(run / "status.json", status | {"host": "babbage.example.org", "pid": 4711, "message": message})
    (run / "training.log").write_text(f"read {home}/data/text.txt\n")
    write_json(run.parents[1] / SWEEP, {"changes": {"data.source": f"{lab}/mine.txt"}})
    archive(lab / "outputs", tmp_path / "folder", weights=True)
    found = tree(tmp_path / "folder")
    assert not [(name, word) for name in found for word in (str(home), "babbage") if word.encode() in found[name]]
    assert json.loads(found[f"{PLACE}/config.json"])["data"]["source"] == "~/data/text.txt"
    assert found[f"{PLACE}/training.log"] == b"read ~/data/text.txt\n"
    assert json.loads(found[f"GPT-02/smoke/{SWEEP}"]) == {"changes": {"data.source": "./mine.txt"}}
    told = json.loads(found[f"{PLACE}/status.json"])
    assert (told["host"], told["pid"], told["status"]) == ("", 0, "done")
    assert told["message"] == "DataError: ./text on host, and\\n~"


def test_numbers_travel_byte_for_byte_whatever_they_hold(two: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/ada")
    path = two / PLACE / PREDICTIONS["val"]
    path.write_text(path.read_text() + '{"text": "/home/ada"}\n')
    assert (kept(two, tmp_path / "folder") / PREDICTIONS["val"]).read_bytes() == path.read_bytes()


def test_a_report_reads_the_folder_as_it_reads_the_runs(outputs: Path, tmp_path: Path) -> None:
    kept(outputs, tmp_path)
    ours, theirs = ([row for row in oelm.load_runs(root) if row["state"] == "done"] for root in (tmp_path, outputs))
    assert len(ours) == 1
    assert {key: value for key, value in ours[0].items() if key != "path"} == {
        key: value for key, value in theirs[0].items() if key != "path"
    }


def test_a_run_with_an_edited_figure_is_named(outputs: Path, tmp_path: Path) -> None:
    root = tmp_path / "outputs"
    shutil.copytree(outputs / PLACE, root / PLACE)
    stats = root / PLACE / "timing_stats.json"
    stats.write_text(json.dumps(json.loads(stats.read_text()) | {"best_ppl": 1.5}))
    (remark,) = archive(root, tmp_path / "folder").remarks
    assert remark.startswith(f"{PLACE}: its record does not add up") and "best_ppl is 1.5" in remark


def test_a_run_whose_config_is_gone_is_named(two: Path, tmp_path: Path) -> None:
    (two / PLACE / "config.json").unlink()
    result = archive(two, tmp_path / "folder")
    assert result.remarks == (f"{PLACE}: left out: its config.json is missing; restore it from a copy",)
    assert not (tmp_path / "folder" / PLACE).exists() and len(result.added) == 1


def test_a_host_named_like_a_device_leaves_the_status_readable(
    two: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_json(two / PLACE / "status.json", read_json(two / PLACE / "status.json") | {"device": "cpu", "message": "cpu"})
    monkeypatch.setattr(socket, "gethostname", lambda: "cpu")
    status = read_json(kept(two, tmp_path / "folder") / "status.json")
    assert (status["device"], status["message"], status["host"]) == ("cpu", "host", "")


@pytest.mark.parametrize("name", ["config.json", "audit.json"])
def test_a_run_with_a_damaged_record_is_left_out_whole(two: Path, tmp_path: Path, name: str) -> None:
    (two / PLACE / name).write_text('{"lr": NaN}')
    result = archive(two, tmp_path / "folder")
    assert f"{PLACE}: left out: {two / PLACE / name}: cannot be read as JSON" in result.remarks[-1]
    assert not (tmp_path / "folder" / PLACE).exists() and len(result.added) == 1
    assert check_folder(tmp_path / "folder")[1] == []


def test_a_name_that_windows_cannot_write_is_left_out(two: Path, tmp_path: Path) -> None:
    write_run(two, "GPT-02", 2, Fate(ppl=22.0), budget="smoke", variant="aux")
    result = archive(two, tmp_path / "folder")
    assert result.remarks == ("GPT-02/smoke/aux/seed-2: left out: not every system can write this name; rename it",)


def test_archiving_again_changes_nothing(outputs: Path, tmp_path: Path) -> None:
    kept(outputs, tmp_path)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    again = archive(outputs, tmp_path)
    assert (again.added, again.already_there) == ((), (PLACE,))
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before


def test_seeds_added_later_are_in_the_same_folder_and_inventory(two: Path, tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    archive(two, folder)
    before = tree(folder)
    write_run(two, "GPT-02", 2, Fate(ppl=22.0), budget="smoke")
    result = archive(two, folder)
    assert result.added == ("GPT-02/smoke/default/seed-2",) and len(result.already_there) == 2
    inventory, problems = check_folder(folder)
    assert problems == [] and [round(run["best_ppl"], 9) for run in inventory.runs.values()] == [20, 21, 22]
    del before[INVENTORY]
    assert before.items() <= tree(folder).items()


def test_a_folder_without_an_inventory_is_read_and_gets_one_when_runs_are_added(two: Path, tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    archive(two, folder)
    (folder / INVENTORY).unlink()
    assert [row["state"] for row in oelm.load_runs(folder)] == ["done"] * 2
    with pytest.raises(DataError, match=r"has no inventory\.json to check it by"):
        check_folder(folder)
    shutil.rmtree(two / PLACE)
    write_run(two, "GPT-02", 2, Fate(ppl=22.0), budget="smoke")
    archive(two, folder)
    inventory, problems = check_folder(folder)
    assert problems == [] and len(inventory.runs) == 3


def test_a_run_that_was_trained_in_the_folder_is_not_passed_off_as_portable(two: Path, tmp_path: Path) -> None:
    record(tmp_path / "folder", "done", seed=7)
    archive(two, tmp_path / "folder")
    inventory, problems = check_folder(tmp_path / "folder")
    place = "GPT-02/smoke/default/seed-7"
    assert place not in inventory.runs
    assert problems == [f"not listed: {place}/config.json", f"not listed: {place}/status.json"]


@pytest.mark.parametrize("name", ["config.json", "timing_stats.json", METRICS])
def test_another_run_at_the_same_place_is_refused_before_anything_is_written(two: Path, tmp_path: Path, name: str) -> None:
    folder = tmp_path / "folder"
    run = kept(two, folder)
    write_run(two, "GPT-01", 0, Fate(ppl=22.0), budget="smoke")
    (run / name).write_text("{}\n")
    before = tree(folder)
    with pytest.raises(RunDirError, match=rf"{PLACE}/{name}: is not that of .*; move it aside, or archive into another"):
        archive(two, folder)
    assert tree(folder) == before


def test_weights_are_not_added_to_a_run_that_was_archived_without(outputs: Path, tmp_path: Path) -> None:
    kept(outputs, tmp_path)
    with pytest.raises(RunDirError, match=f"{PLACE}: was archived without weights; move it aside"):
        kept(outputs, tmp_path, weights=True)
    # The other way round there is nothing to add.
    kept(outputs, tmp_path / "whole", weights=True)
    assert archive(outputs, tmp_path / "whole").already_there == (PLACE,)


def linked_experiment(folder: Path, outside: Path) -> None:
    (folder / "GPT-02").symlink_to(outside)


def linked_run(folder: Path, outside: Path) -> None:
    (folder / PLACE).parent.mkdir(parents=True)
    (folder / PLACE).symlink_to(outside)


def dangling_link(folder: Path, outside: Path) -> None:
    (folder / PLACE).parent.mkdir(parents=True)
    (folder / PLACE).symlink_to(outside / "not" / "there")


def linked_sweep(folder: Path, outside: Path) -> None:
    (folder / "GPT-02" / "smoke").mkdir(parents=True)
    (folder / "GPT-02" / "smoke" / SWEEP).symlink_to(outside / SWEEP)


def file_in_the_way(folder: Path, outside: Path) -> None:
    (folder / "GPT-02").write_text("mine")


def empty_folder(folder: Path, outside: Path) -> None:
    (folder / PLACE).mkdir(parents=True)


@pytest.mark.parametrize(
    "in_the_way", [linked_experiment, linked_run, dangling_link, linked_sweep, file_in_the_way, empty_folder]
)
def test_nothing_is_written_through_links_or_over_anything(
    two: Path, tmp_path: Path, in_the_way: Callable[[Path, Path], None]
) -> None:
    folder, outside = tmp_path / "folder", tmp_path / "outside"
    folder.mkdir()
    outside.mkdir()
    write_json(two / "GPT-02" / "smoke" / SWEEP, {"experiment": "GPT-02"})
    in_the_way(folder, outside)
    before = {path for path in tmp_path.rglob("*") if path.name != ".archive.lock"}
    with pytest.raises(oelm.errors.OelmError, match="is a link, and links are not followed|is not that of|cannot be written"):
        archive(two, folder)
    assert {path for path in tmp_path.rglob("*") if path.name != ".archive.lock"} == before


def in_child(program: str, *arguments: Path) -> subprocess.CompletedProcess[str]:
    """Archive in a process of its own, which can be killed or starved: a[0] is the root, a[1] the folder."""
    prelude = (
        "import os, sys; from pathlib import Path; a = [Path(x) for x in sys.argv[1:]]\n"
        "from oelm.runs.find import scan; from oelm.experiments.portable import archive_runs\n"
    )
    command = [sys.executable, "-c", prelude + program, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("kill", [1, 2, 3])
def test_archiving_killed_midway_leaves_whole_runs_and_goes_on_when_repeated(two: Path, tmp_path: Path, kill: int) -> None:
    # The first two renames publish the two runs, the third is the inventory's.
    killed = (
        "count = [0]\n"
        "def dying(real):\n"
        "    def move(*args, **options):\n"
        "        count[0] += 1\n"
        f"        os._exit(9) if count[0] == {kill} else real(*args, **options)\n"
        "    return move\n"
        "os.rename, os.replace = dying(os.rename), dying(os.replace)\n"
        "archive_runs(a[1], scan(a[0]), weights=False)"
    )
    folder, whole = tmp_path / "folder", tmp_path / "whole"
    child = in_child(killed, two, folder)
    assert child.returncode == 9, child.stderr
    archive(two, whole)
    runs = [PLACE, PLACE.replace("seed-0", "seed-1")]
    seen = {name: content for name, content in tree(folder).items() if STAGING_PREFIX not in name}
    assert seen == {name: content for name, content in tree(whole).items() if name.rpartition("/")[0] in runs[: kill - 1]}
    assert archive(two, folder).added == tuple(runs[kill - 1 :])
    assert check_folder(folder)[1] == []
    after = {name: content for name, content in tree(folder).items() if not name.startswith(STAGING_PREFIX)}
    assert after == tree(whole)


def test_a_run_begun_meanwhile_is_not_replaced(two: Path, tmp_path: Path) -> None:
    begun = (
        "import tempfile; from oelm.errors import RunDirError; real = tempfile.mkdtemp\n"
        "def mkdtemp(**options):\n"
        "    a[2].mkdir(parents=True); (a[2] / 'config.json').write_text('mine'); return real(**options)\n"
        "tempfile.mkdtemp = mkdtemp\n"
        "try: archive_runs(a[1], scan(a[0]), weights=False)\n"
        "except RunDirError as problem: print(problem)"
    )
    child = in_child(begun, two, tmp_path / "folder", tmp_path / "folder" / PLACE)
    assert "was created by another process meanwhile; repeat the same command" in child.stdout, child.stderr
    assert tree(tmp_path / "folder") == {f"{PLACE}/config.json": b"mine"}


def test_no_room_leaves_nothing_half(two: Path, tmp_path: Path) -> None:
    (two / PLACE.replace("seed-0", "seed-1") / PREDICTIONS["val"]).write_bytes(bytes(300_000))
    starved = (
        "import resource; from oelm.errors import DiskFullError\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (200_000,) * 2)\n"
        "try: archive_runs(a[1], scan(a[0]), weights=False)\n"
        "except DiskFullError as problem: sys.exit(print(problem) or problem.exit_code)"
    )
    child = in_child(starved, two, tmp_path / "folder")
    assert child.returncode == 75 and "no room to write" in child.stdout, child.stderr
    assert {name.rpartition("/")[0] for name in tree(tmp_path / "folder")} == {PLACE}


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def flip(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[:9] + bytes([content[9] ^ 1]) + content[10:])


def link(path: Path) -> None:
    path.rename(path.with_name(".aside"))
    path.symlink_to(path.with_name(".aside"))


@pytest.mark.parametrize(
    ("harm", "words"),
    [
        (cut, "damaged: {} has [0-9,]+ bytes, [0-9,]+ are listed"),
        (flip, "damaged: {} has the sha256 [0-9a-f]{{12}}..., [0-9a-f]{{12}}... is listed"),
        (Path.unlink, "missing: {}"),
        (link, "missing: {} .a link or a folder is in its place."),
    ],
    ids=["cut", "flipped", "missing", "linked"],
)
@pytest.mark.parametrize("name", [f"{PLACE}/audit.json", f"{PLACE}/timing_stats.json", f"GPT-02/smoke/{SWEEP}"])
def test_a_check_names_what_is_damaged_or_missing(
    two: Path, tmp_path: Path, harm: Callable[[Path], None], words: str, name: str
) -> None:
    write_json(two / "GPT-02" / "smoke" / SWEEP, {"experiment": "GPT-02"})
    archive(two, tmp_path / "folder")
    assert check_folder(tmp_path / "folder")[1] == []
    harm(tmp_path / "folder" / name)
    before = tree(tmp_path)
    (problem,) = check_folder(tmp_path / "folder")[1]
    assert re.fullmatch(words.format(name), problem)
    assert tree(tmp_path) == before


def test_a_check_names_what_is_not_listed_and_passes_over_what_reports_and_people_write(two: Path, tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    archive(two, folder)
    for name in ("looks.json", "README.md", ".looks.lock"):
        (folder / name).write_text("{}")
    write_json(folder / "bench" / "step.json", {})
    assert check_folder(folder)[1] == []
    (folder / PLACE / "checkpoints").mkdir()
    (folder / PLACE / "checkpoints" / "extra.bin").write_text("x")
    write_json(folder / "GPT-02" / "smoke" / SWEEP, {})
    assert check_folder(folder)[1] == [f"not listed: {PLACE}/checkpoints/extra.bin", f"not listed: GPT-02/smoke/{SWEEP}"]


def test_a_listed_run_that_was_lost_is_told_and_added_again(two: Path, tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    whole = tree(kept(two, folder).parents[3])
    shutil.rmtree(folder / PLACE)
    assert len(check_folder(folder)[1]) == len(SMALL)
    assert archive(two, folder).added == (PLACE,) and tree(folder) == whole


def edited(**change: Any) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda inventory: inventory | change


ENTRY = {"size_bytes": 1, "sha256": "0" * 64}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (edited(format="oelm-folder-2"), "format: "),
        (edited(hook="os.system"), "hook: "),
        (edited(files={"../x": ENTRY}), "files"),
        (edited(files={"/etc/passwd": ENTRY}), "files"),
        (edited(files={"a//b": ENTRY}), "files"),
        (edited(files={"a": ENTRY | {"size_bytes": -1}}), "size_bytes: "),
        (edited(files={"a": ENTRY | {"sha256": "x"}}), "sha256: "),
        (edited(runs={PLACE: {"best_ppl": "20"}}), "best_ppl"),
        (edited(runs=[]), "runs: "),
    ],
)
def test_an_inventory_that_is_not_one_is_refused(
    two: Path, tmp_path: Path, change: Callable[[dict[str, Any]], dict[str, Any]], reason: str
) -> None:
    archive(two, tmp_path / "folder")
    path = tmp_path / "folder" / INVENTORY
    write_json(path, change(read_json(path)))
    for way_in in (lambda: check_folder(tmp_path / "folder"), lambda: archive(two, tmp_path / "folder")):
        with pytest.raises(DataError, match=rf"inventory\.json: .*{reason}"):
            way_in()


def test_figures_that_were_edited_in_the_inventory_are_found(two: Path, tmp_path: Path) -> None:
    archive(two, tmp_path / "folder")
    path = tmp_path / "folder" / INVENTORY
    inventory = read_json(path)
    inventory["runs"][PLACE]["best_ppl"] = 1.5
    write_json(path, inventory)
    assert check_folder(tmp_path / "folder")[1] == [
        f"damaged: the figures of {PLACE} in inventory.json are not those of its timing_stats.json"
    ]


def test_a_classifiers_answers_are_kept_on_both_splits(tmp_path: Path) -> None:
    root, target = tmp_path / "outputs", tmp_path / "results"
    for experiment, accuracy in (("SST-2-01", 0.9), ("SST-2-02", 0.85)):
        write_arm(root, experiment, [accuracy] * 5, tests=[accuracy - 0.01 * seed for seed in SEEDS], data="sst2")
    archive(root, target)
    place = "SST-2-01/laptop/default/seed-0"
    for name in (PREDICTIONS["val"], PREDICTIONS["test"]):
        assert (target / place / name).read_bytes() == (root / place / name).read_bytes()
    # Else the comparison on test would lose its interval over examples.
    assert rows(english(target), "verdicts") == rows(english(root), "verdicts")


def test_a_language_models_documents_are_kept_on_both_splits(tmp_path: Path) -> None:
    run = write_run(tmp_path / "outputs", "GPT-02", 0, Fate(ppl=20.0, test=21.0), budget="smoke")
    archive(tmp_path / "outputs", tmp_path / "results")
    kept = tmp_path / "results" / run.relative_to(tmp_path / "outputs")
    for name in PREDICTIONS.values():
        assert (kept / name).read_bytes() == (run / name).read_bytes()
