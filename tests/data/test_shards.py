"""Token files grow by whole shards: what was committed survives, what was not is cut off, what is damaged is begun anew."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from oelm.data import prepare as prepare_module
from oelm.data import prepare as shards
from oelm.data.prepare import JOURNAL, NO_LIMITS, Journal, Limits, ShardWriter, prepare, prepare_corpus, read_journal
from oelm.data.readers import Piece
from oelm.data.sources import Item, file_corpus
from oelm.data.tokenizer import END_OF_TEXT, Encode, Ids, encoder
from oelm.data.tokens import Split
from oelm.files import dump_json
from tests.conftest import made_text

END = 9
SPEC = "bpe:300"
U2 = np.dtype("<u2")


def item(number: int, *, split: Split = "train", ends: bool = True, by_hash: bool = False) -> Item:
    return Item(split, Piece("text", ends=ends), (0, number), by_hash=by_hash)


def ids(*values: int) -> np.ndarray[Any, np.dtype[np.uint32]]:
    return np.array(values, dtype=np.uint32)


def writer(folder: Path, *, limits: Limits = NO_LIMITS, journal: Journal | None = None) -> ShardWriter:
    return ShardWriter(folder, U2, END, limits, journal if journal is not None else Journal())


def tokens_in(folder: Path, split: str = "train") -> list[int]:
    return np.fromfile(folder / f"{split}.bin", dtype=U2).tolist()


@pytest.fixture
def begun(tmp_path: Path) -> Path:
    """Two shards of the training split and one of validation, committed."""
    with writer(tmp_path) as grows:
        grows.append(item(0), ids(1, 2))
        grows.append(item(1, split="val"), ids(3))
        grows.commit()
        grows.append(item(2, ends=False), ids(4, 5))
        grows.commit()
    return tmp_path


def test_documents_stand_one_behind_another_each_closed_by_the_mark(begun: Path) -> None:
    with writer(begun, journal=read_journal(begun)) as grows:
        grows.append(item(3), ids(6))
        grows.commit()
    assert (tokens_in(begun), tokens_in(begun, "val")) == ([1, 2, END, 4, 5, 6, END], [3, END])


def test_the_journal_says_what_is_on_disk(begun: Path) -> None:
    journal = read_journal(begun)
    train, val = journal.splits["train"], journal.splits["val"]
    assert journal.at == (0, 2)
    assert (train.tokens, train.documents, train.text_bytes, train.size_bytes) == (5, 1, 8, 10)
    assert (val.tokens, val.documents, val.text_bytes, val.size_bytes) == (2, 1, 4, 4)


def test_what_was_not_committed_is_not_in_the_journal(tmp_path: Path) -> None:
    with writer(tmp_path) as grows:
        grows.append(item(0), ids(1))
        grows.commit()
        grows.append(item(1), ids(2))
    assert read_journal(tmp_path).at == (0, 0) and read_journal(tmp_path).splits["train"].tokens == 2


def test_what_stands_behind_the_last_commit_is_cut_off(begun: Path) -> None:
    with (begun / "train.bin").open("ab") as file:
        file.write(b"torn by a kill!")
    with writer(begun, journal=read_journal(begun)) as grows:
        grows.append(item(3), ids(6))
        grows.commit()
    assert tokens_in(begun) == [1, 2, END, 4, 5, 6, END]


def test_text_of_a_shard_is_committed_by_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards, "SHARD_BYTES", 10)
    with writer(tmp_path) as grows:
        for number in range(5):
            grows.append(item(number), ids(number))
    # Four bytes of text each: the third passes ten.
    assert read_journal(tmp_path).at == (0, 2) and len(read_journal(tmp_path).splits["train"].shards) == 1


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="the kernel does not tell which file a number means here")
def test_a_shard_is_durable_before_the_journal_speaks_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    happened: list[str] = []
    fsync, replace = os.fsync, os.replace

    def watched_fsync(number: int) -> None:
        happened.append(Path(os.readlink(f"/proc/self/fd/{number}")).name)
        fsync(number)

    def watched_replace(source: str, target: Path) -> None:
        happened.append(f"now {target.name}")
        replace(source, target)

    monkeypatch.setattr(os, "fsync", watched_fsync)
    monkeypatch.setattr(os, "replace", watched_replace)
    with writer(tmp_path) as grows:
        grows.append(item(0), ids(1))
        grows.commit()
    assert happened.index("train.bin") < happened.index(f"now {JOURNAL}")


def rewritten(folder: Path, change: Callable[[dict[str, Any]], object], *, signed: bool = True) -> None:
    """Change a journal and sign it again, so that only what was changed is wrong with it."""
    record = json.loads((folder / JOURNAL).read_text())
    change(record["journal"])
    if signed:
        record["sha256"] = hashlib.sha256(dump_json(record["journal"]).encode()).hexdigest()
    (folder / JOURNAL).write_text(json.dumps(record))


def flip(path: Path, offset: int) -> None:
    content = bytearray(path.read_bytes())
    content[offset] ^= 1
    path.write_bytes(content)


DAMAGE: dict[str, Callable[[Path], object]] = {
    "first-shard-flipped": lambda folder: flip(folder / "train.bin", 0),
    "last-shard-flipped": lambda folder: flip(folder / "train.bin", 9),
    "validation-flipped": lambda folder: flip(folder / "val.bin", 1),
    "truncated": lambda folder: os.truncate(folder / "train.bin", 9),
    "emptied": lambda folder: os.truncate(folder / "val.bin", 0),
    "missing": lambda folder: (folder / "train.bin").unlink(),
    "journal-torn": lambda folder: os.truncate(folder / JOURNAL, 20),
    "journal-empty": lambda folder: os.truncate(folder / JOURNAL, 0),
    "journal-not-utf8": lambda folder: (folder / JOURNAL).write_bytes(b"\xff\xfe"),
    "journal-of-another-kind": lambda folder: (folder / JOURNAL).write_text("[]"),
    "journal-with-unknown-key": lambda folder: rewritten(folder, lambda journal: journal.update(more=1)),
    "journal-with-unknown-split": lambda folder: rewritten(folder, lambda j: j["splits"].update(dev=j["splits"]["val"])),
    "journal-with-text-for-number": lambda folder: rewritten(folder, lambda j: j["splits"]["val"].update(tokens="2")),
    "journal-one-piece-back": lambda folder: rewritten(folder, lambda j: j["at"].reverse(), signed=False),
    "journal-without-a-shard": lambda folder: rewritten(folder, lambda j: j["splits"]["train"]["shards"].pop(0)),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_preparation_is_begun_anew_with_a_warning(begun: Path, damage: str, caplog: pytest.LogCaptureFixture) -> None:
    DAMAGE[damage](begun)
    with caplog.at_level(logging.WARNING):
        journal = read_journal(begun)
    assert journal == Journal()
    assert f"what was prepared before in {begun} is damaged" in caplog.text


def test_a_folder_without_a_journal_is_begun_without_a_word(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert read_journal(tmp_path) == Journal() and caplog.text == ""


def test_beginning_anew_replaces_what_stood_there(begun: Path) -> None:
    with writer(begun) as grows:
        grows.append(item(0), ids(7))
        grows.commit()
    assert tokens_in(begun) == [7, END]


def grow(folder: Path, lengths: list[int], *, limits: Limits, kill_after: int = 0) -> list[int]:
    """Write documents of so many tokens, a piece each; committed and begun again by another after `kill_after` pieces."""
    pieces = [(item(0, ends=step == length - 1), ids(step)) for length in lengths for step in range(length)]
    for life in (pieces[:kill_after], pieces[kill_after:]):
        with writer(folder, limits=limits, journal=read_journal(folder)) as grows:
            for piece, tokens in life:
                grows.append(piece, tokens)
            grows.commit()
    return tokens_in(folder)


LENGTHS = st.lists(st.integers(1, 6), min_size=1, max_size=12)


@given(LENGTHS, st.integers(1, 15))
@settings(deadline=None, max_examples=25)  # each commit waits for the disk
def test_at_most_so_many_documents_are_taken(tmp_path_factory: pytest.TempPathFactory, lengths: list[int], most: int) -> None:
    found = grow(tmp_path_factory.mktemp("grow"), lengths, limits=Limits(max_documents=most))
    assert found.count(END) == min(most, len(lengths))


@given(LENGTHS, st.integers(1, 40))
@settings(deadline=None, max_examples=25)  # each commit waits for the disk
def test_no_document_is_begun_after_so_many_tokens_and_none_is_cut(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[int], most: int
) -> None:
    found = grow(tmp_path_factory.mktemp("grow"), lengths, limits=Limits(max_tokens=most))
    wanted: list[int] = []
    for length in lengths:
        if len(wanted) < most:
            wanted += [*range(length), END]
    assert found == wanted


@given(LENGTHS, st.integers(1, 40), st.integers(1, 60))
@settings(deadline=None, max_examples=25)  # each commit waits for the disk
def test_limits_mean_the_same_after_a_kill(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[int], most: int, kill_after: int
) -> None:
    limits = Limits(max_tokens=most)
    undisturbed = grow(tmp_path_factory.mktemp("grow"), lengths, limits=limits)
    assert grow(tmp_path_factory.mktemp("grow"), lengths, limits=limits, kill_after=kill_after) == undisturbed


def test_a_document_that_passes_the_limit_is_completed_after_a_kill_within_it(tmp_path: Path) -> None:
    with writer(tmp_path, limits=Limits(max_tokens=2)) as grows:
        grows.append(item(0, ends=False), ids(1, 2, 3))
        grows.commit()
    with writer(tmp_path, limits=Limits(max_tokens=2), journal=read_journal(tmp_path)) as grows:
        grows.append(item(1), ids(4))
        grows.append(item(2), ids(5))
        grows.commit()
    assert tokens_in(tmp_path) == [1, 2, 3, 4, END]


def test_each_split_has_its_own_limit(tmp_path: Path) -> None:
    order: list[Split] = ["train", "train", "val", "val", "test"]
    with writer(tmp_path, limits=Limits(max_documents=1)) as grows:
        for number, split in enumerate(order):
            grows.append(item(number, split=split), ids(number))
        grows.commit()
    assert [tokens_in(tmp_path, split) for split in ("train", "val", "test")] == [[0, END], [2, END], [4, END]]


@pytest.mark.parametrize("read_ahead", [0, 1, 4])
def test_documents_that_go_by_hash_end_with_the_training_split_however_far_was_read_ahead(
    tmp_path: Path, read_ahead: int
) -> None:
    order: list[Split] = ["train", "val", "train", "val", "val", "val", "val"]
    with writer(tmp_path, limits=Limits(max_documents=2)) as grows:
        for number, split in enumerate(order[: 3 + read_ahead]):
            grows.append(item(number, split=split, by_hash=True), ids(number))
        grows.commit()
    assert tokens_in(tmp_path, "val") == [1, END] and None in grows.full


def test_documents_that_go_by_hash_go_on_until_there_is_one_for_validation(tmp_path: Path) -> None:
    order: list[Split] = ["train", "train", "train", "val", "val"]
    with writer(tmp_path, limits=Limits(max_documents=2)) as grows:
        for number, split in enumerate(order):
            grows.append(item(number, split=split, by_hash=True), ids(number))
        grows.commit()
    assert (tokens_in(tmp_path), tokens_in(tmp_path, "val")) == ([0, END, 1, END], [3, END])


TEXTS = [made_text(40, seed=number) + "\u00fc\u4e2d\U0001f426\n" * (number % 3) for number in range(70)]


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache that no other test sees, filled by many batches and many shards of little text."""
    monkeypatch.setenv("OELM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(prepare_module, "_BATCH_CHARS", 500)
    monkeypatch.setattr(shards, "SHARD_BYTES", 2000)
    return tmp_path / "cache"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Seventy files of a document each."""
    folder = tmp_path_factory.mktemp("documents")
    for number, text in enumerate(TEXTS):
        (folder / f"{number:02}.txt").write_text(text, encoding="utf-8")
    return folder


def digests(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}


class Killed(BaseException):
    """Stands for a kill: nothing of ours may catch it for good."""


def break_off(*, where: str, after: int = 1) -> Callable[[str, int, int, int], None]:
    """Return a progress that breaks the preparation off when it hears of `where` for the n-th time."""
    heard = 0

    def progress(what: str, done: int, total: int, tokens: int) -> None:
        nonlocal heard
        heard += what == where
        if heard == after:
            raise Killed

    return progress


def partial_folder(cache: Path) -> Path:
    (found,) = (cache / "tokens").glob(".partial-*")
    return found


@pytest.fixture
def whole(folder: Path, tmp_path: Path) -> dict[str, str]:
    """What an undisturbed preparation gives."""
    return digests(prepare_corpus(file_corpus(folder), tokenizer=SPEC, out=tmp_path / "undisturbed").path)


@pytest.mark.parametrize(("where", "after"), [("training the tokenizer", 1), ("tokenizing", 1), ("tokenizing", 9)])
def test_preparing_broken_off_leaves_nothing_that_opens_and_can_be_repeated(
    cache: Path, folder: Path, whole: dict[str, str], where: str, after: int
) -> None:
    with pytest.raises(Killed):
        prepare(str(folder), tokenizer=SPEC, progress=break_off(where=where, after=after))
    assert list((cache / "tokens").glob("[!.]*")) == []
    path = prepare(str(folder), tokenizer=SPEC).path
    assert digests(path) == whole
    assert [entry for entry in (cache / "tokens").iterdir() if entry.is_dir()] == [path]


def test_what_is_in_committed_shards_is_not_encoded_again(cache: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    encoded: list[str] = []

    def counting(tokenizer: Tokenizer) -> Encode:
        encode = encoder(tokenizer)

        def counted(texts: list[str]) -> list[Ids]:
            # The sample that foretells the size is encoded too, by the main thread.
            if threading.current_thread() is not threading.main_thread():
                encoded.extend(texts)
            return encode(texts)

        return counted

    monkeypatch.setattr(prepare_module, "encoder", counting)
    with pytest.raises(Killed):
        prepare(str(folder), tokenizer=SPEC, progress=break_off(where="tokenizing", after=15))
    journal = json.loads((partial_folder(cache) / shards.JOURNAL).read_text())
    done = sum(split["documents"] for split in journal["journal"]["splits"].values())
    encoded.clear()
    prepare(str(folder), tokenizer=SPEC)
    # Files of a document each: the part tells which.
    assert done > 20 and sorted(encoded) == sorted(TEXTS[done:])


PARTIAL_DAMAGE: dict[str, Callable[[Path], object]] = {
    "shard-flipped": lambda path: flip(path / "train.bin", 7),
    "shard-truncated": lambda path: os.truncate(path / "train.bin", 100),
    "shard-missing": lambda path: (path / "train.bin").unlink(),
    "journal-torn": lambda path: os.truncate(path / shards.JOURNAL, 30),
    "journal-emptied": lambda path: (path / shards.JOURNAL).write_text("{}"),
}


@pytest.mark.parametrize("damage", PARTIAL_DAMAGE)
def test_a_damaged_partial_set_is_begun_anew_and_gives_the_right_bytes(
    cache: Path, folder: Path, whole: dict[str, str], damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(Killed):
        prepare(str(folder), tokenizer=SPEC, progress=break_off(where="tokenizing", after=15))
    PARTIAL_DAMAGE[damage](partial_folder(cache))
    with caplog.at_level(logging.WARNING):
        path = prepare(str(folder), tokenizer=SPEC).path
    assert digests(path) == whole
    # An empty journal is a valid one: nothing is done yet.
    assert "is damaged" in caplog.text


def test_preparing_other_text_under_the_same_name_does_not_go_on_with_the_first(
    cache: Path, folder: Path, whole: dict[str, str], tmp_path: Path
) -> None:
    other, out = tmp_path / "other.txt", tmp_path / "out"
    other.write_text(END_OF_TEXT.join(made_text(40, seed=1000 + number) for number in range(70)))
    with pytest.raises(Killed):
        prepare_corpus(file_corpus(other), tokenizer=SPEC, out=out, progress=break_off(where="tokenizing", after=20))
    assert digests(prepare_corpus(file_corpus(folder), tokenizer=SPEC, out=out).path) == whole
