"""Archives carry runs whole, the same bytes each time and nothing of the machine; imports are whole, too, or not at all."""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import socket
import tarfile
from pathlib import Path

import pytest
from filelock import FileLock

from oelm.errors import ArchiveError, ConfigError
from oelm.experiments.archive import Imported, check_archive, import_archive, make_archive
from oelm.experiments.collect import find_runs
from oelm.experiments.inventory import Inventory
from oelm.files import STAGING_PREFIX, write_json
from oelm.train.load import load_run
from tests.conftest import run_here, tiny_config
from tests.experiments.archived import CHECKPOINT, FIRST, SECOND, contents, in_child, made, tree, write_run


@pytest.fixture
def root(tmp_path: Path) -> Path:
    write_run(tmp_path / "outputs", FIRST)
    write_run(tmp_path / "outputs", SECOND)
    return tmp_path / "outputs"


def test_an_archive_and_back_gives_every_file_of_the_design(root: Path, tmp_path: Path) -> None:
    target, _ = made(root)
    import_archive(target, tmp_path / "there")
    before, after = tree(root), tree(tmp_path / "there")
    assert len(after) == 2 * 17 and all(
        after[name] == before[name] for name in after if not name.endswith(("status.json", "manifest.json"))
    )


def test_what_is_no_file_of_the_design_stays_behind(root: Path) -> None:
    (root / FIRST / "audit.json").unlink()
    (root / FIRST / "audit.json").symlink_to(root / SECOND / "audit.json")
    target, _ = made(root)
    assert not [name for name, content in contents(target).items() if b"never to be archived" in content]
    assert f"{FIRST}/audit.json" not in contents(target) and f"{SECOND}/audit.json" in contents(target)


def test_without_weights_there_is_no_checkpoint_and_no_pointer(root: Path) -> None:
    names = contents(made(root, weights=False)[0])
    assert not [name for name in names if "checkpoints/" in name or name.endswith(("best.json", "latest.json"))]


def test_half_a_checkpoint_stays_behind(root: Path) -> None:
    (root / FIRST / CHECKPOINT / "state.json").unlink()
    assert not [name for name in contents(made(root)[0]) if name.startswith(f"{FIRST}/checkpoints")]


def test_the_inventory_is_first_and_lists_size_and_digest_of_every_member(root: Path) -> None:
    target, inventory = made(root)
    found = contents(target)
    listed = {name: (entry.size_bytes, entry.sha256) for name, entry in inventory.members()}
    assert next(iter(found)) == "inventory.json" and Inventory.model_validate_json(found.pop("inventory.json")) == inventory
    assert listed == {name: (len(content), hashlib.sha256(content).hexdigest()) for name, content in found.items()}


def test_the_inventory_tells_seed_status_and_final_figures(root: Path) -> None:
    write_run(root, "GPT-03/smoke/default/seed-7", status="stopped")
    runs = made(root)[1].runs
    assert [(run.seed, run.status) for run in runs] == [(0, "done"), (1, "done"), (7, "stopped")]
    assert runs[1].figures == {"best_ppl": 5.27, "wall_s": 9.5, "step_s": 0.1, "tokens": 8} and runs[2].figures == {}


def test_the_same_runs_give_the_same_bytes(root: Path) -> None:
    one, _ = made(root, "one.tar.gz")
    for path in root.rglob("*"):
        os.utime(path, (1, 1))
    other = root.parent / "other.tar.gz"
    make_archive(root, other, runs=[root / SECOND, root / FIRST, root / FIRST], weights=True)
    assert one.read_bytes() == other.read_bytes()


def test_no_time_and_no_owner_is_told(root: Path) -> None:
    target, _ = made(root)
    with tarfile.open(target) as tar:
        assert {(m.mtime, m.uid, m.gid, m.uname, m.gname, m.mode) for m in tar.getmembers()} == {(0, 0, 0, "", "", 0o644)}
    # Of the header of gzip: no flags (so no file name), and a time of zero.
    assert target.read_bytes()[3:8] == bytes(5)


def test_a_running_run_is_left_out_with_a_remark(root: Path) -> None:
    write_run(root, "GPT-03/smoke/default/seed-0", status="running")
    inventory = made(root)[1]
    assert [run.path for run in inventory.runs] == [FIRST, SECOND]
    assert inventory.remarks[0].startswith("GPT-03/smoke/default/seed-0: left out, for its status says running")


def test_an_archive_of_running_runs_alone_is_refused_with_the_remark(tmp_path: Path) -> None:
    write_run(tmp_path / "outputs", status="running")
    with pytest.raises(ArchiveError, match="no run to archive; GPT-01/.*status says running"):
        made(tmp_path / "outputs")
    assert [path.name for path in tmp_path.iterdir()] == ["outputs"]


def test_a_damaged_status_is_left_out_with_a_remark(root: Path) -> None:
    (root / FIRST / "status.json").write_text('{"status": "don')
    inventory = made(root)[1]
    assert inventory.runs[0].status == "unknown"
    assert inventory.remarks == (f"{FIRST}/status.json: left out, for it is damaged or too large",)


def test_a_run_without_a_readable_config_is_left_out_whole(root: Path) -> None:
    (root / FIRST / "config.json").write_text('{"lr": NaN}')
    inventory = made(root)[1]
    assert [run.path for run in inventory.runs] == [SECOND] and f"{FIRST}: left out whole" in inventory.remarks[-1]


def test_an_existing_file_is_never_replaced(root: Path) -> None:
    (root.parent / "a.tar.gz").write_text("mine")
    with pytest.raises(ArchiveError, match="is there already; give --to a new name"):
        made(root)
    assert (root.parent / "a.tar.gz").read_text() == "mine"


@pytest.mark.parametrize(
    ("place", "reason"),
    [
        ("../elsewhere/a/b/seed-0", "is not under"),
        ("GPT 01/smoke/default/seed-0", "is not made of letters"),
        ("GPT-01/smoke/aux/seed-0", "Windows keeps for a device"),
        ("GPT-01/smoke/seed-0", "is not <experiment>/<budget>/<variant>/seed-<n>"),
        ("GPT-01/smoke/default/seed-007", "is not <experiment>/<budget>/<variant>/seed-<n>"),
        ("GPT-01/smoke/default/seed-3", "no run there"),
    ],
)
def test_a_run_that_cannot_travel_is_refused_by_name(root: Path, place: str, reason: str) -> None:
    with pytest.raises(ArchiveError, match=reason):
        make_archive(root, root.parent / "a.tar.gz", runs=[root / FIRST, root / place], weights=False)
    assert not (root.parent / "a.tar.gz").exists()


def test_runs_whose_names_differ_only_in_case_are_refused(root: Path) -> None:
    write_run(root, "gpt-01/smoke/other/seed-0")
    with pytest.raises(ArchiveError, match="'gpt-01' and 'GPT-01' differ only in case"):
        made(root)


def test_a_run_behind_a_link_is_refused_and_not_among_all(root: Path) -> None:
    (root / "GPT-09").symlink_to(root / "GPT-01")
    assert find_runs(root, []) == [root / FIRST, root / SECOND]
    with pytest.raises(ArchiveError, match="a link on the way"):
        make_archive(root, root.parent / "a.tar.gz", runs=[root / "GPT-09/smoke/default/seed-0"], weights=False)


@pytest.mark.parametrize("name", ["GPT-02", "GPT-02/smoke", SECOND, "{root}/" + SECOND, "{root}/GPT-02/"])
def test_ids_and_paths_name_runs(root: Path, name: str) -> None:
    assert find_runs(root, [name.format(root=root)]) == [root / SECOND]


@pytest.mark.parametrize("name", ["GPT-2", "GPT-01/paper", "", "GPT"])
def test_an_unknown_name_is_refused(root: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="is no experiment and no run under"):
        find_runs(root, ["GPT-01", name])


def test_an_unknown_name_is_answered_with_the_nearest(root: Path) -> None:
    with pytest.raises(ConfigError, match=r"'GPT-2' is no experiment .* \(did you mean 'GPT-02'\?\)"):
        find_runs(root, ["GPT-2"])


def test_nothing_of_the_machine_travels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home, folder = tmp_path / "home" / "ada", tmp_path / "home" / "ada" / "lab"
    folder.mkdir(parents=True)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setattr(socket, "gethostname", lambda: "babbage.example.org")
    monkeypatch.chdir(folder)
    message = f"DataError: {folder}/text on babbage, and\\n{home}"
    write_run(folder / "outputs", source=f"{home}/data/text.txt", message=message)
    found = contents(made(folder / "outputs")[0])
    untouched = ("metrics.jsonl", "predictions.jsonl", "tokenizer.json")
    stripped = b"".join(content for name, content in found.items() if not name.endswith(untouched))
    assert not [word for word in (str(home), str(folder), "babbage") if word.encode() in stripped]
    assert json.loads(found[f"{FIRST}/config.json"])["data"]["source"] == "~/data/text.txt"
    assert found[f"{FIRST}/training.log"] == b"read ~/data/text.txt\n"
    status = json.loads(found[f"{FIRST}/status.json"])
    assert (status["host"], status["pid"], status["status"]) == ("", 0, "done")
    assert status["message"] == "DataError: ./text on host, and\\n~"


def test_numbers_and_tokenizers_travel_byte_for_byte_whatever_they_hold(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", "/home/ada")
    run = write_run(tmp_path / "outputs", source="/home/ada/text")
    found = contents(made(tmp_path / "outputs")[0])
    for name in ("metrics.jsonl", "predictions.jsonl", "tokenizer.json", f"{CHECKPOINT}/state.json"):
        assert found[f"{FIRST}/{name}"] == (run / name).read_bytes()


def test_a_check_returns_the_inventory_and_writes_nothing(root: Path) -> None:
    target, inventory = made(root)
    before = tree(root.parent)
    assert check_archive(target) == inventory and tree(root.parent) == before


def test_any_flipped_byte_is_found_unless_it_unpacks_to_the_same(root: Path) -> None:
    target, inventory = made(root)
    whole = target.read_bytes()
    plain, found = gzip.decompress(whole), 0
    for position in range(0, len(whole), 41):
        target.write_bytes(whole[:position] + bytes([whole[position] ^ 0x10]) + whole[position + 1 :])
        try:
            # One repeat is written as a reference to another of the same bytes, or the header's time changes.
            assert check_archive(target) == inventory and gzip.decompress(target.read_bytes()) == plain
        except ArchiveError as problem:
            found += str(target) in str(problem)
    assert found > len(whole) // 41 // 2


def test_an_archive_cut_off_anywhere_is_found(root: Path) -> None:
    target, _ = made(root)
    whole = target.read_bytes()
    for length in range(0, len(whole), 83):
        target.write_bytes(whole[:length])
        with pytest.raises(ArchiveError, match="a.tar.gz"):
            check_archive(target)


def test_a_file_that_is_no_archive_or_not_there_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("hello")
    (tmp_path / "b.gz").write_bytes(gzip.compress(b"hello"))
    for name, reason in (
        ("a.txt", "no archive of ours"),
        ("b.gz", "ends too early"),
        ("c.gz", "no such file"),
        (".", "no such file"),
    ):
        with pytest.raises(ArchiveError, match=reason):
            check_archive(tmp_path / name)


def test_importing_again_changes_nothing_and_counts(root: Path, tmp_path: Path) -> None:
    target, _ = made(root)
    there = tmp_path / "there"
    assert import_archive(target, there) == Imported(added=(FIRST, SECOND), already_there=())
    before = tree(there)
    assert import_archive(target, there) == Imported(added=(), already_there=(FIRST, SECOND)) and tree(there) == before


def test_the_very_runs_an_archive_was_made_of_count_as_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/ada")
    write_run(tmp_path / "outputs", source="/home/ada/text")
    target, _ = made(tmp_path / "outputs")
    assert import_archive(target, tmp_path / "outputs").already_there == (FIRST,)


@pytest.mark.parametrize("name", ["config.json", "timing_stats.json"])
def test_another_run_in_the_place_is_refused_before_anything_is_written(root: Path, tmp_path: Path, name: str) -> None:
    target, _ = made(root)
    other = write_run(tmp_path / "there", SECOND)
    write_json(other / name, {"lr": 0.5})
    before = tree(tmp_path / "there")
    with pytest.raises(ArchiveError, match=rf"{SECOND}: another run is there \(its {name} .*move it aside"):
        import_archive(target, tmp_path / "there")
    assert tree(tmp_path / "there") == before


def test_a_second_import_at_the_same_time_is_refused(root: Path, tmp_path: Path) -> None:
    target, _ = made(root)
    (tmp_path / "there").mkdir()
    with FileLock(tmp_path / "there" / ".import.lock"), pytest.raises(ArchiveError, match="another import is writing there"):
        import_archive(target, tmp_path / "there")
    assert len(import_archive(target, tmp_path / "there").added) == 2


@pytest.mark.parametrize("rename", [1, 2])
def test_an_import_killed_midway_leaves_whole_runs_and_goes_on_when_repeated(root: Path, tmp_path: Path, rename: int) -> None:
    target, _ = made(root)
    killed = (
        "real, count = os.rename, [0]\n"
        "def rename(*args):\n"
        "    count[0] += 1\n"
        f"    os._exit(9) if count[0] == {rename} else real(*args)\n"
        "os.rename = rename; import_archive(a[0], a[1])"
    )
    there, whole = tmp_path / "there", tmp_path / "whole"
    assert in_child(killed, target, there).returncode == 9
    import_archive(target, whole)
    seen = {name: content for name, content in tree(there).items() if STAGING_PREFIX not in name}
    assert seen == {name: content for name, content in tree(whole).items() if rename == 2 and name.startswith(FIRST)}
    assert import_archive(target, there).added == (FIRST, SECOND)[rename - 1 :]
    assert tree(there) == tree(whole)


def test_a_run_begun_during_the_import_is_not_replaced(root: Path, tmp_path: Path) -> None:
    target, _ = made(root)
    begun = (
        "import tempfile; from oelm.errors import ArchiveError; real = tempfile.mkdtemp\n"
        "def mkdtemp(**options):\n"
        "    (a[2]).mkdir(parents=True); (a[2] / 'config.json').write_text('mine'); return real(**options)\n"
        "tempfile.mkdtemp = mkdtemp\n"
        "try: import_archive(a[0], a[1])\n"
        "except ArchiveError as problem: print(problem)"
    )
    child = in_child(begun, target, tmp_path / "there", tmp_path / "there" / FIRST)
    assert "came to be while it was imported; repeat the same command" in child.stdout, child.stderr
    assert tree(tmp_path / "there") == {f"{FIRST}/config.json": b"mine"}


STARVED = (
    "import resource; from oelm.errors import DiskFullError\n"
    "resource.setrlimit(resource.RLIMIT_FSIZE, (20_000,) * 2)\n"
    "try: {call}\n"
    "except DiskFullError as problem: sys.exit(print(problem) or problem.exit_code)"
)


def test_no_room_for_an_import_leaves_nothing_half(root: Path, tmp_path: Path) -> None:
    (root / SECOND / "metrics.jsonl").write_bytes(bytes(100_000))
    target, _ = made(root)
    child = in_child(STARVED.format(call="import_archive(a[0], a[1])"), target, tmp_path / "there")
    assert child.returncode == 75 and "no room to write" in child.stdout, child.stderr
    assert {name.split("/")[0] for name in tree(tmp_path / "there")} == {"GPT-01"}


def test_no_room_for_an_archive_leaves_none(root: Path) -> None:
    (root / SECOND / "metrics.jsonl").write_bytes(os.urandom(100_000))
    target, call = root.parent / "a.tar.gz", "make_archive(a[0], a[1], runs=find_runs(a[0], []), weights=True)"
    child = in_child(STARVED.format(call=call), root, target)
    assert child.returncode == 75 and "no room to write" in child.stdout, child.stderr
    assert [path.name for path in root.parent.iterdir()] == ["outputs"]


def test_a_trained_run_opens_and_is_found_whole_where_it_was_imported(text_file: Path, tmp_path: Path) -> None:
    run_here(tiny_config(text_file, steps=4), tmp_path / "outputs" / FIRST)
    target, inventory = made(tmp_path / "outputs")
    import_archive(target, tmp_path / "there")
    loaded = load_run(tmp_path / "there" / FIRST)
    assert loaded.step == 4 and loaded.tokenizer() is not None
    assert inventory.runs[0].figures["best_step"] == 4 and inventory.remarks == ()
