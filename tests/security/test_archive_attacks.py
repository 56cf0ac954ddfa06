"""Hostile archives, really built: each is refused with its member and the reason, and not a byte of it reaches the disk."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import tarfile
import time
import tracemalloc
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from oelm.errors import ArchiveError
from oelm.experiments.archive import check_archive, import_archive
from oelm.experiments.inventory import FORMAT
from oelm.files import MAX_JSON_BYTES

RUN = "GPT-01/smoke/default/seed-0"
FILES = {"config.json": b"{}\n", "metrics.jsonl": b'{"loss": 1.5}\n'}
MIB = 2**20
Change = Callable[[dict[str, Any]], None]


@dataclass
class Forger:
    """An archive in the making: members are header and bytes as they will stand there, honest until changed."""

    members: list[tuple[tarfile.TarInfo, bytes]] = field(default_factory=list)
    inventory: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def honest(cls) -> Forger:
        listed = [entry(name, content) for name, content in FILES.items()]
        run = {"path": RUN, "seed": 0, "status": "done", "figures": {"best_ppl": 4.27}, "files": listed}
        forger = cls(inventory={"format": FORMAT, "oelm": "0.1.0", "runs": [run], "remarks": []})
        for name, content in FILES.items():
            forger.add(f"{RUN}/{name}", content)
        return forger

    def add(self, name: str, content: bytes = b"", **header: Any) -> Forger:
        info = tarfile.TarInfo(name)
        info.size = len(content)
        for key, value in header.items():
            setattr(info, key, value)
        self.members.append((info, content))
        return self

    def write(self, path: Path, *, inventory: bytes | None = None, first: bool = True, tail: bytes = b"") -> Path:
        text = json.dumps(self.inventory).encode() if inventory is None else inventory
        own = tarfile.TarInfo("inventory.json")
        own.size = len(text)
        members = [(own, text), *self.members] if first else [*self.members, (own, text)]
        raw = b"".join(packed(info, content) for info, content in members)
        path.write_bytes(gzip.compress(raw + bytes(1024) + tail, compresslevel=1))
        return path


def packed(info: tarfile.TarInfo, content: bytes) -> bytes:
    # The GNU format, for it alone writes sizes below zero and beyond eight gigabytes into a plain header.
    return info.tobuf(tarfile.GNU_FORMAT, "utf-8", "surrogateescape") + content + bytes(-len(content) % 512)


def entry(name: str, content: bytes) -> dict[str, Any]:
    return {"path": name, "size_bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}


@pytest.fixture
def forger() -> Forger:
    return Forger.honest()


def assert_refused(path: Path, reason: str) -> None:
    """Both ways in refuse it for the same reason, quickly, in little memory; the folder to import into never comes to be."""
    began = time.monotonic()
    tracemalloc.start()
    for way_in in (check_archive, lambda path: import_archive(path, path.parent / "there" / "outputs")):
        with pytest.raises(ArchiveError, match=reason) as caught:
            way_in(path)
        assert str(path) in str(caught.value) and len(str(caught.value)) < 2000
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert sorted(found.name for found in path.parent.iterdir()) == [path.name]
    assert peak < 16 * MIB and time.monotonic() - began < 10


def test_an_honest_archive_of_the_forger_passes(forger: Forger, tmp_path: Path) -> None:
    path = forger.write(tmp_path / "a.tar.gz")
    assert check_archive(path).runs[0].path == RUN
    assert import_archive(path, tmp_path / "there").added == (RUN,)
    assert (tmp_path / "there" / RUN / "metrics.jsonl").read_bytes() == FILES["metrics.jsonl"]


NAMES = {
    "/etc/cron.d/x": "is absolute",
    "\\\\server\\x": "is absolute",
    "C:/x": "is absolute",
    "../x": "leads out of its folder",
    f"{RUN}/../../../../../x": "leads out of its folder",
    f"{RUN}/./config.json": "is not made of letters",
    f"{RUN}//config.json": "is not made of letters",
    f"{RUN}/c\u043enfig.json": "is not made of letters",
    f"{RUN}/config.json\n": "is not made of letters",
    f"{RUN}/\x1b[31mconfig.json": "is not made of letters",
    "-rf/x": "is not made of letters",
    ".ssh/authorized_keys": "is not made of letters",
    "x" * 65: "is not made of letters",
    "dot./x": "is not made of letters",
    "con/x": "Windows keeps for a device",
    "a/Lpt1.txt": "Windows keeps for a device",
    f"{RUN}/run.sh": "is not listed",
    f"{RUN}/checkpoints/step-00000001/evil.pt": "is not listed",
    f"{RUN}/CONFIG.JSON": "is not listed",
}


@pytest.mark.parametrize("name", NAMES, ids=ascii)
def test_a_member_of_a_bad_or_unlisted_name_is_refused(forger: Forger, tmp_path: Path, name: str) -> None:
    assert_refused(forger.add(name, b"evil").write(tmp_path / "a.tar.gz"), NAMES[name])


@pytest.mark.parametrize("name", [name for name in NAMES if not name.startswith(RUN)], ids=ascii)
def test_a_listed_run_of_a_bad_name_is_refused(forger: Forger, tmp_path: Path, name: str) -> None:
    forger.inventory["runs"][0]["path"] = f"{name}/a/b/seed-0"
    assert_refused(forger.write(tmp_path / "a.tar.gz"), rf"inventory\.json: runs\.0: .*({NAMES[name]})")


@pytest.mark.parametrize("name", [name.removeprefix(f"{RUN}/") for name in NAMES if name.startswith(RUN)], ids=ascii)
def test_a_listed_file_of_a_bad_or_foreign_name_is_refused(forger: Forger, tmp_path: Path, name: str) -> None:
    forger.inventory["runs"][0]["files"].append(entry(name, b"evil"))
    forger.add(f"{RUN}/{name}", b"evil")
    assert_refused(
        forger.write(tmp_path / "a.tar.gz"), r"runs\.0\.files\.2\.path: .*(absolute|leads out|is not made|is no file)"
    )


KINDS = {
    tarfile.SYMTYPE: "a symbolic link",
    tarfile.LNKTYPE: "a hard link",
    tarfile.DIRTYPE: "a folder",
    tarfile.FIFOTYPE: "a pipe",
    tarfile.CHRTYPE: "a device",
    tarfile.BLKTYPE: "a device",
    tarfile.GNUTYPE_SPARSE: "a sparse file",
    tarfile.CONTTYPE: "a contiguous file",
    tarfile.GNUTYPE_LONGNAME: "an extended header",
    tarfile.GNUTYPE_LONGLINK: "an extended header",
    tarfile.XHDTYPE: "an extended header",
    tarfile.XGLTYPE: "an extended header",
    tarfile.AREGTYPE: r"of the unknown type b'\\x00'",
    b"Z": "of the unknown type b'Z'",
}


@pytest.mark.parametrize("kind", KINDS, ids=repr)
def test_anything_but_a_regular_file_is_refused_under_a_listed_name(tmp_path: Path, kind: bytes) -> None:
    forger = Forger.honest()
    forger.members[1][0].type = kind
    forger.members[1][0].linkname = "/etc/passwd"
    assert_refused(forger.write(tmp_path / "a.tar.gz"), rf"'{RUN}/metrics.jsonl' is {KINDS[kind]}; only regular files")


def test_a_link_followed_by_a_file_through_it_is_refused(forger: Forger, tmp_path: Path) -> None:
    forger.members.insert(0, (tarfile.TarInfo("GPT-01"), b""))
    forger.members[0][0].type, forger.members[0][0].linkname = tarfile.SYMTYPE, str(tmp_path.parent)
    assert_refused(forger.write(tmp_path / "a.tar.gz"), "'GPT-01' is a symbolic link")


@pytest.mark.parametrize("kind", [tarfile.XHDTYPE, tarfile.GNUTYPE_LONGNAME, tarfile.REGTYPE], ids=repr)
@pytest.mark.parametrize("size", [2**40, 200 * MIB, -512])
def test_a_header_that_promises_the_moon_is_refused_unread(forger: Forger, tmp_path: Path, kind: bytes, size: int) -> None:
    forger.members[1][0].type, forger.members[1][0].size = kind, size
    assert_refused(forger.write(tmp_path / "a.tar.gz"), "an extended header|listed are 14|below zero")


def test_a_bomb_under_a_listed_name_is_refused_unread(forger: Forger, tmp_path: Path) -> None:
    forger.members[1] = (forger.members[1][0], bytes(200 * MIB))
    forger.members[1][0].size = 200 * MIB
    assert_refused(forger.write(tmp_path / "a.tar.gz"), r"metrics.jsonl' has 209,715,200 bytes, listed are 14")


def test_a_bomb_behind_the_end_is_refused_unread(forger: Forger, tmp_path: Path) -> None:
    assert_refused(forger.write(tmp_path / "a.tar.gz", tail=bytes(200 * MIB)), "something behind its end")


def test_a_bomb_in_a_second_stream_is_refused_unread(forger: Forger, tmp_path: Path) -> None:
    path = forger.write(tmp_path / "a.tar.gz")
    path.write_bytes(path.read_bytes() + gzip.compress(bytes(200 * MIB), compresslevel=1))
    assert_refused(path, "something behind its end")


def test_a_second_archive_behind_the_end_is_refused(forger: Forger, tmp_path: Path) -> None:
    path = forger.write(tmp_path / "a.tar.gz")
    path.write_bytes(path.read_bytes() * 2)
    assert_refused(path, "something behind its end")


def test_rubbish_behind_the_stream_is_refused(forger: Forger, tmp_path: Path) -> None:
    path = forger.write(tmp_path / "a.tar.gz")
    path.write_bytes(path.read_bytes() + b"rubbish")
    assert_refused(path, "damaged")


def test_more_than_the_limit_is_refused_by_what_is_listed(forger: Forger, tmp_path: Path) -> None:
    forger.inventory["runs"][0]["files"][1]["size_bytes"] = 2**40
    assert_refused(forger.write(tmp_path / "a.tar.gz"), "lists 1,099,511,627,779 bytes, over the limit of 68,719,476,736")


def test_the_limit_can_be_chosen(forger: Forger, tmp_path: Path) -> None:
    path, size = forger.write(tmp_path / "a.tar.gz"), sum(map(len, FILES.values()))
    assert check_archive(path, max_bytes=size).size_bytes == size
    with pytest.raises(ArchiveError, match="over the limit"):
        import_archive(path, tmp_path / "there", max_bytes=size - 1)
    assert not (tmp_path / "there").exists()


def test_content_other_than_listed_is_refused(forger: Forger, tmp_path: Path) -> None:
    forger.members[1] = (forger.members[1][0], b'{"loss": 1.4}\n')
    assert_refused(forger.write(tmp_path / "a.tar.gz"), rf"'{RUN}/metrics.jsonl' is not as listed \(sha256")


@pytest.mark.parametrize("listed", [0, 13, 15, 2**62])
def test_a_size_other_than_listed_is_refused(forger: Forger, tmp_path: Path, listed: int) -> None:
    forger.inventory["runs"][0]["files"][1]["size_bytes"] = listed
    assert_refused(forger.write(tmp_path / "a.tar.gz"), "metrics.jsonl' has 14 bytes, listed are|over the limit")


def test_a_listed_file_that_is_missing_is_refused(forger: Forger, tmp_path: Path) -> None:
    forger.members.pop()
    assert_refused(forger.write(tmp_path / "a.tar.gz"), rf"'{RUN}/metrics.jsonl' is listed and missing")


def test_a_member_twice_is_refused(forger: Forger, tmp_path: Path) -> None:
    assert_refused(forger.add(f"{RUN}/config.json", b"{}\n").write(tmp_path / "a.tar.gz"), "config.json' is there twice")


def test_members_out_of_order_are_refused(forger: Forger, tmp_path: Path) -> None:
    forger.members.reverse()
    assert_refused(forger.write(tmp_path / "a.tar.gz"), "metrics.jsonl' is there twice or out of order, where")


def test_a_second_inventory_is_refused(forger: Forger, tmp_path: Path) -> None:
    assert_refused(forger.add("inventory.json", b"{}").write(tmp_path / "a.tar.gz"), "'inventory.json' is not listed")


def test_an_inventory_that_is_not_first_is_refused(forger: Forger, tmp_path: Path) -> None:
    assert_refused(forger.write(tmp_path / "a.tar.gz", first=False), f"begins with '{RUN}/config.json'")


def test_an_archive_without_members_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.tar.gz"
    path.write_bytes(gzip.compress(bytes(10240)))
    assert_refused(path, "is empty and not with inventory.json")


def _twice(inventory: dict[str, Any]) -> None:
    inventory["runs"] *= 2


def _in_two_cases(inventory: dict[str, Any]) -> None:
    inventory["runs"].append({**inventory["runs"][0], "path": "gpt-01/smoke/other/seed-0"})


def _file_twice(inventory: dict[str, Any]) -> None:
    inventory["runs"][0]["files"].append(inventory["runs"][0]["files"][1])


def _no_config(inventory: dict[str, Any]) -> None:
    del inventory["runs"][0]["files"][0]


def _set(*path: str | int, to: Any) -> Change:
    def change(inventory: dict[str, Any]) -> None:
        place: Any = inventory
        for key in path[:-1]:
            place = place[key]
        place[path[-1]] = to

    return change


CHANGES: dict[str, tuple[Change, str]] = {
    "a run twice": (_twice, "a run is listed twice"),
    "a run in two cases": (_in_two_cases, "'gpt-01' and 'GPT-01' differ only in case"),
    "a file twice": (_file_twice, "lists its files twice"),
    "no config": (_no_config, "lists no config.json"),
    "no runs": (_set("runs", to=[]), "runs: "),
    "too shallow": (_set("runs", 0, "path", to="GPT-01/seed-0"), "is not <experiment>/<budget>"),
    "another seed": (_set("runs", 0, "seed", to=1), "is listed with seed 1"),
    "seed as text": (_set("runs", 0, "seed", to="0"), r"runs\.0\.seed: "),
    "a running run": (_set("runs", 0, "status", to="running"), r"runs\.0\.status: "),
    "another format": (_set("format", to="oelm-archive-2"), "format: .*or of a newer oelm"),
    "a name to drown in": (_set("runs", 0, "path", to="x" * MIB), "is not made of letters"),
    "a key to drown in": (_set("x" * MIB, to=1), "xxx: "),
    "unknown key": (_set("hook", to="os.system"), "hook: "),
    "size below zero": (_set("runs", 0, "files", 1, "size_bytes", to=-1), "size_bytes: "),
    "size as a fraction": (_set("runs", 0, "files", 1, "size_bytes", to=14.0), "size_bytes: "),
    "size beyond all": (_set("runs", 0, "files", 1, "size_bytes", to=10**400), "size_bytes: "),
    "digest of another kind": (_set("runs", 0, "files", 1, "sha256", to="x"), "sha256: "),
    "a figure without end": (_set("runs", 0, "figures", to={"best_ppl": float("inf")}), "figures.best_ppl"),
    "a figure with a formula for a name": (_set("runs", 0, "figures", to={"=cmd()": 1}), "figures"),
    "a remark that drives a terminal": (_set("remarks", to=["\x1b]0;evil\x07"]), r"remarks\.0: "),
    "a version that is none": (_set("oelm", to="<script>"), "oelm: "),
}


@pytest.mark.parametrize("name", CHANGES)
def test_an_inventory_that_does_not_hold_together_is_refused(forger: Forger, tmp_path: Path, name: str) -> None:
    change, reason = CHANGES[name]
    change(forger.inventory)
    assert_refused(forger.write(tmp_path / "a.tar.gz"), rf"inventory\.json: .*{reason}")


@pytest.mark.parametrize(
    "text",
    [b"", b"null", b"[]", b'{"format": "oelm-a', b"\xff\xfe", b"[" * MIB, b'{"runs": ' + b"9" * MIB + b"}"],
    ids=["empty", "null", "list", "cut", "no text", "nest", "long number"],
)
def test_an_inventory_that_is_not_one_is_refused(forger: Forger, tmp_path: Path, text: bytes) -> None:
    assert_refused(forger.write(tmp_path / "a.tar.gz", inventory=text), r"inventory\.json: ")


def test_an_inventory_too_large_to_be_one_is_refused_unread(tmp_path: Path) -> None:
    text = io.BytesIO()
    with gzip.GzipFile(fileobj=text, mode="wb", compresslevel=1) as file:
        info = tarfile.TarInfo("inventory.json")
        info.size = MAX_JSON_BYTES + 1
        file.write(packed(info, bytes(MAX_JSON_BYTES + 1)))
    (tmp_path / "a.tar.gz").write_bytes(text.getvalue())
    assert_refused(tmp_path / "a.tar.gz", "inventory.json says it has 67,108,865 bytes; the most is 67,108,864")


def test_a_header_whose_checksum_is_wrong_is_refused(forger: Forger, tmp_path: Path) -> None:
    raw = bytearray(gzip.decompress(forger.write(tmp_path / "a.tar.gz").read_bytes()))
    place = raw.index(f"{RUN}/metrics.jsonl".encode(), 1024)
    raw[place] ^= 1
    (tmp_path / "a.tar.gz").write_bytes(gzip.compress(bytes(raw)))
    assert_refused(tmp_path / "a.tar.gz", f"damaged after '{RUN}/config.json'")


def linked_experiment(root: Path, outside: Path) -> None:
    (root / "GPT-01").symlink_to(outside)


def linked_run(root: Path, outside: Path) -> None:
    (root / RUN).parent.mkdir(parents=True)
    (root / RUN).symlink_to(outside)


def dangling_link(root: Path, outside: Path) -> None:
    (root / RUN).parent.mkdir(parents=True)
    (root / RUN).symlink_to(outside / "not" / "there")


def file_in_the_way(root: Path, outside: Path) -> None:
    (root / "GPT-01").write_text("mine")


def other_case(root: Path, outside: Path) -> None:
    (root / "gpt-01").mkdir()


def empty_folder(root: Path, outside: Path) -> None:
    (root / RUN).mkdir(parents=True)


@pytest.mark.parametrize(
    "in_the_way", [linked_experiment, linked_run, dangling_link, file_in_the_way, other_case, empty_folder]
)
def test_nothing_is_written_through_links_or_over_anything(
    forger: Forger, tmp_path: Path, in_the_way: Callable[[Path, Path], None]
) -> None:
    root, outside = tmp_path / "outputs", tmp_path / "outside"
    root.mkdir()
    outside.mkdir()
    in_the_way(root, outside)
    before = sorted(tmp_path.rglob("*"))
    path = forger.write(tmp_path / "a.tar.gz")
    with pytest.raises(ArchiveError, match="is a link or a file|only in case|another run is there") as caught:
        import_archive(path, root)
    assert "move it aside, or import into another --out" in str(caught.value)
    assert sorted(tmp_path.rglob("*")) == sorted([*before, path])


def test_modes_and_owners_of_an_archive_are_not_taken_over(forger: Forger, tmp_path: Path) -> None:
    for info, _ in forger.members:
        info.mode, info.uid, info.uname = 0o6777, 12345, "root"
    import_archive(forger.write(tmp_path / "a.tar.gz"), tmp_path / "there")
    for path in (tmp_path / "there" / RUN).iterdir():
        assert path.stat().st_mode & 0o7111 == 0 and path.stat().st_uid == tmp_path.stat().st_uid
