"""Files appear whole or not at all, and errors name them."""

from __future__ import annotations

import errno
import hashlib
import math
import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from oelm.errors import CheckpointError, DataError, DiskFullError, OelmError, RunDirLostError
from oelm.files import (
    MAX_JSON_BYTES,
    STAGING_PREFIX,
    cache_root,
    dump_json,
    publish_dir,
    read_json,
    room_checked,
    sha256_file,
    sweep_staging,
    write_json,
    write_text,
)


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_published_directory_is_invisible_until_the_block_ends(tmp_path: Path) -> None:
    target = tmp_path / "made"
    with publish_dir(target) as staging:
        (staging / "a.txt").write_text("a")
        assert not target.exists()
    assert (target / "a.txt").read_text() == "a"


def test_a_directory_killed_between_the_renames_of_its_replacement_comes_back(tmp_path: Path) -> None:
    (tmp_path / f"{STAGING_PREFIX}made-old").mkdir()
    (tmp_path / f"{STAGING_PREFIX}made-old" / "a.txt").write_text("the only copy")
    sweep_staging(tmp_path)
    assert (tmp_path / "made" / "a.txt").read_text() == "the only copy"


def test_an_old_directory_that_was_replaced_is_swept(tmp_path: Path) -> None:
    (tmp_path / f"{STAGING_PREFIX}made-old").mkdir()
    (tmp_path / "made").mkdir()
    sweep_staging(tmp_path)
    assert names_in(tmp_path) == ["made"]


def test_files_and_folders_are_as_readable_as_the_user_wants_them(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        write_text(tmp_path / "a.txt", "a")
        with publish_dir(tmp_path / "made"):
            pass
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "a.txt").stat().st_mode) == 0o640
    assert stat.S_IMODE((tmp_path / "made").stat().st_mode) == 0o750


def test_publishing_leaves_only_the_target(tmp_path: Path) -> None:
    with publish_dir(tmp_path / "made") as staging:
        (staging / "a.txt").write_text("a")
    assert names_in(tmp_path) == ["made"]


@pytest.mark.parametrize("problem", [RuntimeError("boom"), KeyboardInterrupt(), SystemExit(1)], ids=repr)
def test_an_exception_while_publishing_leaves_nothing(tmp_path: Path, problem: BaseException) -> None:
    with pytest.raises(type(problem)), publish_dir(tmp_path / "made") as staging:
        (staging / "a.txt").write_text("a")
        raise problem
    assert names_in(tmp_path) == []


def test_an_exception_while_replacing_leaves_the_old_directory(tmp_path: Path) -> None:
    target = tmp_path / "made"
    with publish_dir(target) as staging:
        (staging / "a.txt").write_text("old")
    with pytest.raises(RuntimeError), publish_dir(target) as staging:
        (staging / "a.txt").write_text("new")
        raise RuntimeError
    assert names_in(tmp_path) == ["made"] and (target / "a.txt").read_text() == "old"


def test_publishing_over_a_directory_replaces_it_whole(tmp_path: Path) -> None:
    target = tmp_path / "made"
    with publish_dir(target) as staging:
        (staging / "old.txt").write_text("old")
    with publish_dir(target) as staging:
        (staging / "new.txt").write_text("new")
    assert names_in(tmp_path) == ["made"] and names_in(target) == ["new.txt"]


def test_nested_files_and_missing_parents_are_published(tmp_path: Path) -> None:
    target = tmp_path / "not" / "yet" / "made"
    with publish_dir(target) as staging:
        (staging / "a" / "b").mkdir(parents=True)
        (staging / "a" / "b" / "c.txt").write_text("deep")
    assert (target / "a" / "b" / "c.txt").read_text() == "deep"


def test_publishing_onto_a_symlink_never_writes_through_it(tmp_path: Path) -> None:
    elsewhere, link = tmp_path / "elsewhere", tmp_path / "link"
    elsewhere.mkdir()
    link.symlink_to(elsewhere)
    with pytest.raises((OelmError, OSError)), publish_dir(link) as staging:
        (staging / "a.txt").write_text("a")
    assert names_in(elsewhere) == [] and names_in(tmp_path) == ["elsewhere", "link"]


def test_what_is_published_is_not_writable_by_others(tmp_path: Path) -> None:
    with publish_dir(tmp_path / "made") as staging:
        write_text(staging / "a.txt", "a")
    for path in (tmp_path / "made", tmp_path / "made" / "a.txt"):
        assert stat.S_IMODE(path.stat().st_mode) & 0o022 == 0


def test_text_is_written_byte_for_byte(tmp_path: Path) -> None:
    write_text(tmp_path / "new" / "a.txt", "Zeile\n\u00fc\u4e2d\U0001f426\n")
    assert (tmp_path / "new" / "a.txt").read_bytes() == "Zeile\n\u00fc\u4e2d\U0001f426\n".encode()


@pytest.mark.parametrize("durable", [True, False])
def test_a_write_that_fails_keeps_the_old_text_and_leaves_no_staging(tmp_path: Path, durable: bool) -> None:
    path = tmp_path / "a.txt"
    write_text(path, "old", durable=durable)
    with pytest.raises(UnicodeEncodeError):
        write_text(path, "a" * 100_000 + "\ud800", durable=durable)  # a lone surrogate cannot be encoded
    assert path.read_text() == "old" and names_in(tmp_path) == ["a.txt"]


def test_an_open_reader_keeps_seeing_the_old_text(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    write_text(path, "old text")
    with path.open() as reader:
        write_text(path, "new")
        assert reader.read() == "old text"
    assert path.read_text() == "new"


@pytest.mark.parametrize("is_dangling", [False, True])
def test_writing_onto_a_symlink_is_refused_and_spares_link_and_target(tmp_path: Path, is_dangling: bool) -> None:
    (tmp_path / "precious.txt").write_text("precious")
    (tmp_path / "link.txt").symlink_to(tmp_path / ("nothing" if is_dangling else "precious.txt"))
    with pytest.raises(OelmError, match=r"link\.txt: is a symbolic link.* give the name of a file"):
        write_text(tmp_path / "link.txt", "new")
    assert (tmp_path / "precious.txt").read_text() == "precious" and (tmp_path / "link.txt").is_symlink()
    assert names_in(tmp_path) == ["link.txt", "precious.txt"]


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no named pipes on this system")
def test_writing_onto_a_pipe_or_a_folder_is_refused_and_leaves_it(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    for name, what in (("pipe", "a named pipe"), ("folder", "a folder")):
        with pytest.raises(OelmError, match=f"{name}: is {what}, so nothing was written"):
            write_text(tmp_path / name, "new")
    assert stat.S_ISFIFO((tmp_path / "pipe").stat().st_mode) and names_in(tmp_path) == ["folder", "pipe"]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_number_that_is_none_never_becomes_json(value: float) -> None:
    with pytest.raises(ValueError, match="JSON"):
        dump_json({"loss": [value]})


def test_a_refused_json_value_keeps_the_old_file(tmp_path: Path) -> None:
    write_json(tmp_path / "a.json", {"loss": 1.5})
    with pytest.raises(ValueError):
        write_json(tmp_path / "a.json", {"loss": math.nan})
    assert read_json(tmp_path / "a.json") == {"loss": 1.5} and names_in(tmp_path) == ["a.json"]


def test_json_floats_come_back_to_the_last_bit(tmp_path: Path) -> None:
    values = [0.1, 1 / 3, 5e-324, 1.7976931348623157e308, -0.0]
    write_json(tmp_path / "a.json", values)
    assert [value.hex() for value in read_json(tmp_path / "a.json")] == [value.hex() for value in values]


UNREADABLE = {
    "not-json": b"{'a': 1}",
    "empty": b"",
    "torn": b'{"a": [1, 2',
    "nan": b'{"a": NaN}',
    "infinity": b'{"a": -Infinity}',
    "not-utf8": b'{"a": "\xff"}',
    "nested-deep": b"[" * 100_000,
    "integer-of-5000-digits": b"1" * 5000,
    "pickle": b"\x80\x04\x95\x0b",
}


@pytest.mark.parametrize("content", UNREADABLE.values(), ids=UNREADABLE.keys())
def test_json_that_cannot_be_read_is_refused_by_file_name(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "state.json").write_bytes(content)
    with pytest.raises(DataError) as refusal:
        read_json(tmp_path / "state.json")
    assert str(tmp_path / "state.json") in str(refusal.value)


def test_a_missing_json_file_is_refused_by_file_name(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"gone\.json"):
        read_json(tmp_path / "gone.json")


def test_a_folder_in_place_of_json_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "state.json").mkdir()
    with pytest.raises(DataError, match=r"state\.json"):
        read_json(tmp_path / "state.json")


def test_json_of_unreasonable_size_is_refused_unread(tmp_path: Path) -> None:
    path = tmp_path / "huge.json"
    with path.open("wb") as file:
        file.truncate(MAX_JSON_BYTES + 1)  # sparse: takes no room
    with pytest.raises(DataError, match=r"huge\.json: 67,108,865 bytes is too large"):
        read_json(path)


def test_the_caller_chooses_the_error_of_unreadable_json(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError):
        read_json(tmp_path / "gone.json", error=CheckpointError)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EFBIG, errno.EDQUOT], ids=errno.errorcode.get)
def test_no_room_becomes_an_error_with_path_and_free_bytes(tmp_path: Path, number: int) -> None:
    with pytest.raises(DiskFullError, match=r"no room to write .*model\.bin .*[0-9,]+ bytes free"):
        with room_checked(tmp_path / "not" / "made" / "model.bin"):
            raise OSError(number, os.strerror(number))


def test_a_full_disk_leaves_the_run_resumable() -> None:
    assert DiskFullError.exit_code == 75


@pytest.mark.parametrize("number", [errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EIO], ids=errno.errorcode.get)
def test_any_other_refusal_of_the_system_is_told_by_path(tmp_path: Path, number: int) -> None:
    with pytest.raises(OelmError, match=r"model\.bin: cannot be written .*choose a folder") as refusal:
        with room_checked(tmp_path / "model.bin"):
            raise OSError(number, os.strerror(number))
    assert not isinstance(refusal.value, DiskFullError)


@pytest.mark.parametrize("name", ["file/inside", "x" * 300], ids=["inside-a-file", "name-too-long"])
def test_a_path_that_cannot_be_is_refused_by_path(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(OelmError) as refusal:
        write_text(tmp_path / name, "text")
    assert str(tmp_path / name) in str(refusal.value)


def test_what_is_no_refusal_of_the_system_passes_unchanged(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), room_checked(tmp_path / "a"):
        _ = 1 / 0


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
def test_a_device_that_is_truly_full_is_told_as_such() -> None:
    with pytest.raises(DiskFullError, match="/dev/full"), room_checked(Path("/dev/full")):
        with Path("/dev/full").open("wb", buffering=0) as full:
            full.write(b"x")


def test_a_true_file_size_limit_keeps_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    write_text(path, "old")
    # In a child: the limit would hold for pytest's own files too.
    program = (
        "import resource, sys; from pathlib import Path; from oelm.files import write_text; "
        "from oelm.errors import DiskFullError\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))\n"
        "try: write_text(Path(sys.argv[1]), 'x' * 5000)\n"
        "except DiskFullError as problem: print(problem)\n"
    )
    child = subprocess.run([sys.executable, "-c", program, str(path)], capture_output=True, text=True, check=True)
    assert str(path) in child.stdout
    assert path.read_text() == "old" and names_in(tmp_path) == ["a.txt"]


def test_sweeping_removes_staging_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / f"{STAGING_PREFIX}file").write_text("torso")
    (tmp_path / f"{STAGING_PREFIX}dir" / "deep").mkdir(parents=True)
    (tmp_path / f"{STAGING_PREFIX}dir" / "deep" / "a").write_text("a")
    (tmp_path / "kept" / f"{STAGING_PREFIX}inside").mkdir(parents=True)
    (tmp_path / "staging-file").write_text("kept")
    (tmp_path / ".lock").write_text("")
    sweep_staging(tmp_path)
    assert names_in(tmp_path) == [".lock", "kept", "staging-file"]
    assert names_in(tmp_path / "kept") == [f"{STAGING_PREFIX}inside"]


@pytest.mark.parametrize("inside", [True, False], ids=["link-inside-staging", "link-as-staging"])
def test_sweeping_never_goes_through_a_symlink(tmp_path: Path, inside: bool) -> None:
    precious, folder = tmp_path / "precious", tmp_path / "folder"
    precious.mkdir()
    (precious / "a.txt").write_text("precious")
    staging = folder / f"{STAGING_PREFIX}x"
    (staging if inside else folder).mkdir(parents=True)
    (staging / "link" if inside else staging).symlink_to(precious)
    sweep_staging(folder)
    assert names_in(folder) == [] and (precious / "a.txt").read_text() == "precious"


def test_sweeping_a_folder_that_is_not_there_does_nothing(tmp_path: Path) -> None:
    sweep_staging(tmp_path / "none")
    assert names_in(tmp_path) == []


def test_a_file_digest_is_its_sha256(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"abc" * 1000)
    assert sha256_file(tmp_path / "a") == hashlib.sha256(b"abc" * 1000).hexdigest()


def test_the_cache_is_where_the_environment_says(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("OELM_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    found = [cache_root()]
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    found.append(cache_root())
    monkeypatch.setenv("OELM_CACHE", str(tmp_path / "own"))
    found.append(cache_root())
    assert found == [tmp_path / "home" / ".cache" / "oelm", tmp_path / "xdg" / "oelm", tmp_path / "own"]


def test_a_guard_that_refuses_keeps_every_name_out_of_the_folder(tmp_path: Path) -> None:
    def refuse() -> None:
        raise RunDirLostError("not ours")

    with pytest.raises(RunDirLostError):
        write_json(tmp_path / "status.json", {}, guard=refuse)
    with pytest.raises(RunDirLostError), publish_dir(tmp_path / "run" / "made", guard=refuse):
        pass
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(os.rename not in os.supports_dir_fd, reason="the system has no handles of folders")
def test_a_folder_replaced_after_its_guard_approved_it_is_not_written_to(tmp_path: Path) -> None:
    run, moved = tmp_path / "run", tmp_path / "moved"
    run.mkdir()
    approvals = 0

    def replaced_behind_its_back() -> None:
        nonlocal approvals
        approvals += 1
        # At the last moment: between this answer and the rename that it allows.
        if approvals == 2:
            run.rename(moved)
            run.mkdir()

    write_json(run / "status.json", {}, durable=False, guard=replaced_behind_its_back)
    assert [path.name for path in moved.iterdir()] == ["status.json"] and list(run.iterdir()) == []


def test_a_failure_in_a_folder_that_was_lost_is_told_as_that(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()

    def held() -> None:
        if not run.is_dir():
            raise RunDirLostError("gone")

    with pytest.raises(RunDirLostError, match="gone"), publish_dir(run / "made", guard=held) as staging:
        shutil.rmtree(run)
        (staging / "file").write_text("")
    assert not run.exists()
