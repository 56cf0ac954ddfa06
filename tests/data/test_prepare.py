"""Preparing is a pure function of text and tokenizer, done once, whole or absent, whoever else does it meanwhile."""

from __future__ import annotations

import hashlib
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from oelm.data.corpora import Corpus, text_corpus
from oelm.data.prepare import prepare, prepare_corpus
from oelm.data.tokenizer import load_tokenizer
from oelm.data.tokens import SPLITS, open_tokens
from oelm.errors import ConfigError, DataError
from oelm.files import STAGING_PREFIX
from tests.conftest import made_text

SPEC = "bpe:300"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache that no other test sees."""
    monkeypatch.setenv("OELM_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Seventy documents (more than are encoded at once), some not ASCII."""
    folder = tmp_path_factory.mktemp("documents")
    for number in range(70):
        (folder / f"{number:02}.txt").write_text(
            made_text(40, seed=number) + "\u00fc\u4e2d\U0001f426\n" * (number % 3), encoding="utf-8"
        )
    return folder


def set_folders(cache: Path) -> list[Path]:
    """Return what lies in the cache under a final name."""
    found = (cache / "tokens").iterdir() if (cache / "tokens").is_dir() else iter(())
    return sorted(path for path in found if path.is_dir() and not path.name.startswith(STAGING_PREFIX))


def digests(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}


def decoded(path: Path, split: str) -> list[str]:
    """Return the documents of a split, read back without our own reader."""
    tokenizer, data = load_tokenizer(path), np.memmap(path / f"{split}.bin", dtype=np.uint16, mode="r")
    ends = np.flatnonzero(data == tokenizer.token_to_id("<|endoftext|>"))
    starts = [0, *(ends[:-1] + 1).tolist()]
    assert ends[-1] == len(data) - 1
    return [
        tokenizer.decode(data[start:end].tolist(), skip_special_tokens=False) for start, end in zip(starts, ends, strict=True)
    ]


@pytest.mark.parametrize("split", SPLITS)
def test_every_document_is_decoded_back_exactly(cache: Path, folder: Path, split: str) -> None:
    tokens = prepare(str(folder), tokenizer=SPEC)
    assert decoded(tokens.path, split) == [
        document.text for document in text_corpus(folder).documents if document.split == split
    ]


def test_the_record_counts_documents_tokens_and_bytes(cache: Path, folder: Path) -> None:
    tokens, corpus = prepare(str(folder), tokenizer=SPEC), text_corpus(folder)
    for split, ids in zip(SPLITS, (tokens.train, tokens.val), strict=True):
        texts, known = list(corpus.texts(split)), tokens.meta.splits[split]
        assert (known.documents, known.tokens) == (len(texts), len(ids))
        assert known.text_bytes == sum(len(text.encode()) for text in texts)


def test_the_tokenizer_never_sees_the_validation_split(cache: Path, folder: Path) -> None:
    corpus = text_corpus(folder)
    without = Corpus(
        corpus.name, corpus.source, tuple(d if d.split == "train" else type(d)("val", "other\n") for d in corpus.documents)
    )
    one, other = (prepare_corpus(c, tokenizer=SPEC).path / "tokenizer.json" for c in (corpus, without))
    assert one != other and one.read_bytes() == other.read_bytes()


def test_fresh_caches_hold_the_same_bytes(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for name in ("one", "other"):
        monkeypatch.setenv("OELM_CACHE", str(tmp_path / name))
        path = prepare(str(folder), tokenizer=SPEC).path
        found.append((path.name, digests(path)))
    assert found[0] == found[1]


def test_a_second_call_finds_the_set_and_writes_nothing(cache: Path, folder: Path) -> None:
    path = prepare(str(folder), tokenizer=SPEC).path
    before = {file: file.stat().st_mtime_ns for file in [path, *path.iterdir()]}
    heard: list[str] = []
    assert prepare(str(folder), tokenizer=SPEC, progress=lambda what, done, total: heard.append(what)).path == path
    assert {file: file.stat().st_mtime_ns for file in [path, *path.iterdir()]} == before and heard == []


def test_changed_text_is_prepared_anew_beside_the_old(cache: Path, tmp_path: Path) -> None:
    text = tmp_path / "a.txt"
    text.write_text(made_text(300))
    first = prepare(str(text), tokenizer=SPEC)
    text.write_text(made_text(300, seed=1))
    second = prepare(str(text), tokenizer=SPEC)
    assert first.path != second.path and first.meta.fingerprint != second.meta.fingerprint
    assert set_folders(cache) == sorted([first.path, second.path])


def test_another_tokenizer_is_prepared_beside_the_old(cache: Path, folder: Path) -> None:
    one, other = prepare(str(folder), tokenizer="bpe:300"), prepare(str(folder), tokenizer="bpe:320")
    assert (one.meta.vocab_size, other.meta.vocab_size) == (300, 320) and len(set_folders(cache)) == 2


def test_a_prepared_folder_is_opened_where_it_is(cache: Path, folder: Path, tmp_path: Path) -> None:
    made = prepare(str(folder), tokenizer=SPEC).path
    moved = made.rename(tmp_path / "moved")
    assert prepare(str(moved), tokenizer=SPEC).path == moved and set_folders(cache) == []


def test_progress_ends_with_everything_done(cache: Path, folder: Path) -> None:
    heard: list[tuple[int, int]] = []
    prepare(str(folder), tokenizer=SPEC, progress=lambda what, done, total: heard.append((done, total)))
    assert heard[-1][0] == heard[-1][1] and heard == sorted(heard, key=lambda pair: pair[0] / pair[1])


class Killed(BaseException):
    """Stands for a kill: nothing of ours may catch it for good."""


@pytest.mark.parametrize("where", ["training the tokenizer", "tokenizing train", "tokenizing val"])
def test_preparing_broken_off_leaves_nothing_that_opens(cache: Path, folder: Path, where: str) -> None:
    def break_off(what: str, done: int, total: int) -> None:
        if what == where:
            raise Killed

    with pytest.raises(Killed):
        prepare(str(folder), tokenizer=SPEC, progress=break_off)
    assert set_folders(cache) == [] and not list(cache.rglob("*.bin"))


def test_preparing_broken_off_can_be_repeated(cache: Path, folder: Path) -> None:
    def break_off(what: str, done: int, total: int) -> None:
        raise Killed

    with pytest.raises(Killed):
        prepare(str(folder), tokenizer=SPEC, progress=break_off)
    assert decoded(prepare(str(folder), tokenizer=SPEC).path, "val")


PROGRAM = (
    "import os, signal, sys; from oelm.data.prepare import prepare\n"
    "def progress(what, done, total):\n"
    "    if what == sys.argv[2]: os.kill(os.getpid(), signal.SIGKILL)\n"
    "print(prepare(sys.argv[1], tokenizer='bpe:300', progress=progress).path)\n"
)


def killed_while_tokenizing(folder: Path) -> None:
    child = subprocess.run([sys.executable, "-c", PROGRAM, str(folder), "tokenizing val"], capture_output=True, text=True)
    assert child.returncode == -signal.SIGKILL, child.stderr


def test_preparing_truly_killed_leaves_nothing_that_opens(cache: Path, folder: Path) -> None:
    killed_while_tokenizing(folder)
    assert set_folders(cache) == []


def test_what_a_killed_preparation_left_is_gone_once_it_is_repeated(cache: Path, folder: Path) -> None:
    killed_while_tokenizing(folder)
    path = prepare(str(folder), tokenizer=SPEC).path
    assert [entry for entry in (cache / "tokens").iterdir() if entry.is_dir()] == [path]


def test_two_processes_preparing_at_once_end_with_one_good_set(cache: Path, folder: Path) -> None:
    command = [sys.executable, "-c", PROGRAM, str(folder), "never"]
    children = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ) for _ in range(2)]
    printed = [child.communicate(timeout=60)[0].strip() for child in children]
    assert [child.returncode for child in children] == [0, 0]
    assert {Path(line) for line in printed} == set(set_folders(cache)) and len(set_folders(cache)) == 1
    assert open_tokens(set_folders(cache)[0]).meta.splits["train"].documents > 0


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


CACHE_DAMAGE = {
    "bit-flipped": lambda path: flip(path / "train.bin"),
    "truncated": lambda path: os.truncate(path / "val.bin", 10),
    "file-missing": lambda path: (path / "val.bin").unlink(),
    "meta-missing": lambda path: (path / "meta.json").unlink(),
    "meta-torn": lambda path: os.truncate(path / "meta.json", 10),
    "meta-changed": lambda path: (path / "meta.json").write_text("{}"),
}


@pytest.mark.parametrize("damage", CACHE_DAMAGE)
def test_a_damaged_cached_set_is_refused_with_what_to_do(cache: Path, folder: Path, damage: str) -> None:
    path = prepare(str(folder), tokenizer=SPEC).path
    CACHE_DAMAGE[damage](path)
    with pytest.raises(DataError) as refusal:
        prepare(str(folder), tokenizer=SPEC)
    assert str(path) in str(refusal.value) and "delete" in str(refusal.value)


def test_deleting_a_damaged_cached_set_mends_it(cache: Path, folder: Path) -> None:
    path = prepare(str(folder), tokenizer=SPEC).path
    before = digests(path)
    for file in path.iterdir():
        file.unlink()
    path.rmdir()
    assert digests(prepare(str(folder), tokenizer=SPEC).path) == before


def test_a_folder_of_text_may_hold_a_meta_json_of_something_else(cache: Path, tmp_path: Path) -> None:
    # A folder of text that happens to hold a meta.json of something else.
    (tmp_path / "novel").mkdir()
    (tmp_path / "novel" / "chapter.txt").write_text(made_text(300))
    (tmp_path / "novel" / "meta.json").write_text('{"title": "precious"}')
    # Its files are text like any other, so it is prepared; and nothing in it is touched.
    tokens = prepare(str(tmp_path / "novel"), tokenizer=SPEC)
    assert sum(split.documents for split in tokens.meta.splits.values()) == 2
    assert (tmp_path / "novel" / "meta.json").read_text() == '{"title": "precious"}'


def test_a_damaged_set_of_the_users_own_is_not_to_be_deleted(cache: Path, folder: Path, tmp_path: Path) -> None:
    moved = tmp_path / "mine"
    shutil.copytree(prepare(str(folder), tokenizer=SPEC).path, moved)
    (moved / "train.bin").write_bytes(b"")
    with pytest.raises(DataError, match="bring back the files as they were") as refusal:
        prepare(str(moved), tokenizer=SPEC)
    assert "delete" not in str(refusal.value)


def test_an_unknown_data_name_is_refused_with_what_there_is(cache: Path) -> None:
    with pytest.raises(DataError, match=r"no data set called 'wikitext' here: use 'stdlib'"):
        prepare("wikitext", tokenizer=SPEC)


def test_a_wrong_tokenizer_spec_is_refused_before_anything_is_written(cache: Path, folder: Path) -> None:
    with pytest.raises(ConfigError, match="tokenizer 'gpt2'"):
        prepare(str(folder), tokenizer="gpt2")
    assert not cache.exists()
