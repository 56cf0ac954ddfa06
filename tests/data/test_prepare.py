"""Preparing is a pure function of text, tokenizer and limits, done once, and whole or absent."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections import namedtuple
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from oelm.data import prepare as prepare_module
from oelm.data import prepare as shards
from oelm.data import readers
from oelm.data.prepare import NO_LIMITS, Limits, prepare, prepare_corpus
from oelm.data.public_sets import CORPORA
from oelm.data.readers import Piece, pieces
from oelm.data.sources import Corpus, Part, file_corpus, folder_corpus
from oelm.data.tokenizer import END_OF_TEXT, encoder, load_tokenizer, train_bpe
from oelm.data.tokens import SPLITS, Split
from oelm.errors import ConfigError, DataError, DiskFullError
from tests.conftest import made_text

SPEC = "bpe:300"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache that no other test sees."""
    monkeypatch.setenv("OELM_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many batches and many shards of little text."""
    monkeypatch.setattr(prepare_module, "_BATCH_CHARS", 500)
    monkeypatch.setattr(shards, "SHARD_BYTES", 2000)


TEXTS = [made_text(40, seed=number) + "\u00fc\u4e2d\U0001f426\n" * (number % 3) for number in range(70)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Seventy documents, some not ASCII."""
    folder = tmp_path_factory.mktemp("documents")
    for number, text in enumerate(TEXTS):
        (folder / f"{number:02}.txt").write_text(text, encoding="utf-8")
    return folder


def made_corpus(**splits: list[str]) -> Corpus:
    """Return a corpus whose splits are given."""

    def part(split: Split, texts: list[str]) -> Part:
        def read() -> Iterator[Piece]:
            return pieces((fragment for text in texts for fragment in (text, None)), tidy=False)

        return Part(f"made {split}", split, read)

    names: tuple[Split, ...] = ("train", "val", "test")
    return Corpus("made", "made here", tuple(part(split, splits[split]) for split in names if split in splits))


def set_folders(cache: Path) -> list[Path]:
    """Return what lies in the cache under a final name."""
    return sorted(path for path in (cache / "tokens").glob("[!.]*") if path.is_dir())


def digests(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}


def decoded(path: Path, split: str, dtype: str = "uint16") -> list[str]:
    """Return the documents of a split, read back without our own reader."""
    tokenizer, data = load_tokenizer(path), np.fromfile(path / f"{split}.bin", dtype=dtype)
    ends = np.flatnonzero(data == tokenizer.token_to_id(END_OF_TEXT))
    starts = [0, *(ends[:-1] + 1).tolist()]
    assert ends[-1] == len(data) - 1
    return [
        tokenizer.decode(data[start:end].tolist(), skip_special_tokens=False) for start, end in zip(starts, ends, strict=True)
    ]


def test_every_document_is_decoded_back_exactly_and_in_order(cache: Path, folder: Path) -> None:
    path = prepare(str(folder), tokenizer=SPEC).path
    train, val = (decoded(path, split) for split in SPLITS)
    assert train == [text for text in TEXTS if text not in val] and val == [text for text in TEXTS if text not in train]


def test_a_test_split_is_prepared_where_the_source_has_one(cache: Path) -> None:
    corpus = made_corpus(train=["one\n", "two\n"], val=["three\n"], test=["four\n", "five\n"])
    path = prepare_corpus(corpus, tokenizer=SPEC).path
    assert [decoded(path, split) for split in ("train", "val", "test")] == [
        ["one\n", "two\n"],
        ["three\n"],
        ["four\n", "five\n"],
    ]


def test_the_record_counts_documents_tokens_and_bytes(cache: Path, folder: Path) -> None:
    tokens = prepare(str(folder), tokenizer=SPEC)
    for split in SPLITS:
        texts, known = decoded(tokens.path, split), tokens.meta.splits[split]
        assert (known.documents, known.tokens) == (len(texts), len(tokens.splits[split]))
        assert known.text_bytes == sum(len(text.encode()) for text in texts)


def test_the_record_says_what_the_text_was(cache: Path, folder: Path) -> None:
    meta = prepare(str(folder), tokenizer=SPEC).meta
    assert folder.name in meta.source and meta.revision.startswith("sha256:") and meta.tokenizer == SPEC


def test_token_files_are_read_as_nanogpt_reads_them(cache: Path, folder: Path) -> None:
    tokens = prepare(str(folder), tokenizer=SPEC)
    for split in SPLITS:
        data = np.memmap(tokens.path / f"{split}.bin", dtype=np.uint16, mode="r")
        assert np.array_equal(data, tokens.splits[split])


def test_a_vocabulary_beyond_sixteen_bits_is_written_in_thirty_two(cache: Path, folder: Path, tmp_path: Path) -> None:
    large = train_bpe(TEXTS, vocab_size=300)
    # "cat sat" is then beyond what 16 bits hold.
    large.add_tokens([f"<{number}>" for number in range(2**16)] + ["cat sat"])
    (tmp_path / "large.json").write_text(large.to_str(), encoding="utf-8")
    tokens = prepare(str(folder), tokenizer=str(tmp_path / "large.json"))
    assert tokens.meta.dtype == "uint32" and tokens.train.max() == 300 + 2**16
    assert sorted(decoded(tokens.path, "train", "uint32") + decoded(tokens.path, "val", "uint32")) == sorted(TEXTS)


def test_the_tokenizer_never_sees_validation_or_test(cache: Path) -> None:
    one = made_corpus(train=TEXTS[:20], val=["held out\n"])
    other = made_corpus(train=TEXTS[:20], val=TEXTS[20:], test=TEXTS[20:])
    first, second = (prepare_corpus(corpus, tokenizer=SPEC).path / "tokenizer.json" for corpus in (one, other))
    assert first != second and first.read_bytes() == second.read_bytes()


def test_a_mark_inside_a_document_of_a_table_is_text(cache: Path, tmp_path: Path) -> None:
    made = [f"{number} before {END_OF_TEXT} behind" for number in range(10)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in made))
    path = prepare(str(tmp_path / "a.jsonl"), tokenizer=SPEC).path
    assert sorted(decoded(path, "train") + decoded(path, "val")) == made


ALL_LIMITS = {"none": NO_LIMITS, "documents": Limits(max_documents=15), "tokens": Limits(max_tokens=1000)}


@pytest.mark.parametrize("limits", ALL_LIMITS.values(), ids=ALL_LIMITS.keys())
def test_the_bytes_do_not_depend_on_the_number_of_workers(
    small_steps: None, folder: Path, tmp_path: Path, limits: Limits
) -> None:
    made = [
        digests(
            prepare_corpus(
                file_corpus(folder), tokenizer=SPEC, limits=limits, workers=workers, out=tmp_path / f"{workers}"
            ).path
        )
        for workers in (1, 2, 5)
    ]
    assert made[0] == made[1] == made[2]


def test_the_bytes_do_not_depend_on_how_text_is_grouped_on_the_way(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = digests(prepare_corpus(file_corpus(folder), tokenizer=SPEC, out=tmp_path / "one").path)
    monkeypatch.setattr(prepare_module, "_BATCH_CHARS", 300)
    monkeypatch.setattr(shards, "SHARD_BYTES", 1000)
    assert digests(prepare_corpus(file_corpus(folder), tokenizer=SPEC, out=tmp_path / "other").path) == one


@pytest.mark.parametrize("most", [1, 7, 20])
def test_max_documents_is_exact_in_every_split(cache: Path, small_steps: None, most: int) -> None:
    corpus = made_corpus(train=TEXTS[:30], val=TEXTS[30:55], test=TEXTS[55:])
    path = prepare_corpus(corpus, tokenizer=SPEC, limits=Limits(max_documents=most)).path
    for split, texts in (("train", TEXTS[:30]), ("val", TEXTS[30:55]), ("test", TEXTS[55:])):
        assert decoded(path, split) == texts[:most]


def test_max_tokens_begins_no_document_beyond_and_cuts_none(cache: Path, small_steps: None) -> None:
    corpus = made_corpus(train=TEXTS[:40], val=TEXTS[40:])
    tokens = prepare_corpus(corpus, tokenizer=SPEC, limits=Limits(max_tokens=1000))
    taken = decoded(tokens.path, "train")
    assert taken == TEXTS[: len(taken)] and len(taken) < 40
    last = len(encoder(load_tokenizer(tokens.path))([taken[-1]])[0]) + 1
    assert len(tokens.train) - last < 1000 <= len(tokens.train)


def test_an_extract_of_text_split_by_hash_still_has_something_to_validate_on(cache: Path, small_steps: None) -> None:
    made = [f"document {number}\n" for number in range(300)]
    found = []
    for most in (1, 2, 5):
        corpus = Corpus("made", "made here", tuple(Part(p.label, None, p.read) for p in made_corpus(train=made).parts))
        meta = prepare_corpus(corpus, tokenizer=SPEC, limits=Limits(max_documents=most)).meta
        found.append((meta.splits["train"].documents, meta.splits["val"].documents >= 1))
    assert found == [(1, True), (2, True), (5, True)]


def test_the_record_of_an_extract_says_so(cache: Path, folder: Path) -> None:
    meta = prepare_corpus(file_corpus(folder), tokenizer=SPEC, limits=Limits(max_documents=9, max_tokens=5000)).meta
    assert (meta.max_documents, meta.max_tokens) == (9, 5000)


def test_every_extract_lies_in_a_folder_of_its_own(cache: Path, folder: Path) -> None:
    asked = [NO_LIMITS, Limits(max_documents=9), Limits(max_tokens=9), Limits(max_documents=10)]
    made = [prepare_corpus(file_corpus(folder), tokenizer=SPEC, limits=limits).path for limits in asked]
    assert len(set(made)) == 4 and set_folders(cache) == sorted(made)


def test_a_second_call_finds_the_set_and_writes_nothing(cache: Path, folder: Path) -> None:
    path = prepare(str(folder), tokenizer=SPEC).path
    before = {file: file.stat().st_mtime_ns for file in [path, *path.iterdir()]}
    heard: list[str] = []
    assert prepare(str(folder), tokenizer=SPEC, progress=lambda what, *_: heard.append(what)).path == path
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


def test_a_named_corpus_prepared_from_local_copies_is_found_by_its_name(cache: Path, tmp_path: Path) -> None:
    (tmp_path / "train.txt").write_text(END_OF_TEXT.join(TEXTS[:20]))
    (tmp_path / "valid.txt").write_text(END_OF_TEXT.join(TEXTS[20:]))
    made = prepare_corpus(folder_corpus(CORPORA["tinystories"], tmp_path), tokenizer=SPEC)
    assert prepare("tinystories", tokenizer=SPEC).path == made.path


def test_a_chosen_folder_holds_the_set_and_is_found_again(cache: Path, folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "chosen" / "here"
    first = prepare_corpus(file_corpus(folder), tokenizer=SPEC, out=out)
    before = digests(out)
    assert prepare_corpus(file_corpus(folder), tokenizer=SPEC, out=out).path == first.path == out
    assert digests(out) == before and set_folders(cache) == []


OTHER_SETS: dict[str, Callable[[Path, Path], object]] = {
    "text": lambda folder, out: prepare_corpus(made_corpus(train=["one\n"], val=["two\n"]), tokenizer=SPEC, out=out),
    "tokenizer": lambda folder, out: prepare_corpus(file_corpus(folder), tokenizer="bpe:310", out=out),
    "limits": lambda folder, out: prepare_corpus(file_corpus(folder), tokenizer=SPEC, limits=Limits(max_documents=5), out=out),
}


@pytest.mark.parametrize("other", OTHER_SETS)
def test_a_chosen_folder_that_holds_another_set_is_refused_and_left_alone(
    cache: Path, folder: Path, tmp_path: Path, other: str
) -> None:
    out = tmp_path / "out"
    OTHER_SETS[other](folder, out)
    before = digests(out)
    with pytest.raises(DataError, match=f"--out {out} holds another token set .*give a new folder"):
        prepare_corpus(file_corpus(folder), tokenizer=SPEC, out=out)
    assert digests(out) == before


def test_a_chosen_folder_with_other_files_is_refused_before_any_text_is_read(cache: Path, tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("precious")
    with pytest.raises(DataError, match=f"--out {tmp_path} holds other files .thesis.tex.; choose a new folder"):
        prepare_corpus(made_corpus(), tokenizer=SPEC, out=tmp_path)
    with pytest.raises(ConfigError, match="--out .*thesis.tex is a file"):
        prepare_corpus(made_corpus(), tokenizer=SPEC, out=tmp_path / "thesis.tex")


def test_progress_ends_with_everything_done(cache: Path, small_steps: None, folder: Path) -> None:
    heard: list[tuple[int, int, int]] = []

    def hear(what: str, done: int, total: int, tokens: int) -> None:
        if what == "tokenizing":
            heard.append((done, total, tokens))

    tokens = prepare(str(folder), tokenizer=SPEC, progress=hear)
    assert len(heard) > 10 and heard == sorted(heard)
    assert heard[-1][0] == heard[-1][1] and heard[-1][2] == len(tokens.train) + len(tokens.val)


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


Usage = namedtuple("Usage", "total used free")


def test_too_small_a_disk_is_refused_before_any_token_is_written(
    cache: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(10**6, 10**6 - 500, 500))
    with pytest.raises(DiskFullError, match="needs about .* bytes under .*, 500 are free") as refusal:
        prepare(str(folder), tokenizer=SPEC)
    assert "OELM_CACHE" in str(refusal.value) and "--max-tokens" in str(refusal.value)
    assert [path.name for path in (cache / "tokens").glob(".partial-*/*")] == ["tokenizer.json"]


def test_the_size_is_foretold_within_a_tenth_and_not_too_low(
    cache: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = prepare(str(folder), tokenizer=SPEC)
    size = tokens.train.nbytes + tokens.val.nbytes
    shutil.rmtree(tokens.path)
    # The documents are of one kind, so that the sample tells the whole; 5% are added for those that are not.
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(10**6, 0, int(1.1 * size)))
    prepare(str(folder), tokenizer=SPEC)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(10**6, 0, size - 1))
    with pytest.raises(DiskFullError):
        prepare(str(folder), tokenizer="bpe:301")


def test_with_room_again_a_refused_preparation_goes_on(
    cache: Path, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    undisturbed = digests(prepare_corpus(file_corpus(folder), tokenizer=SPEC, out=tmp_path / "undisturbed").path)
    with monkeypatch.context() as patch, pytest.raises(DiskFullError):
        patch.setattr(shutil, "disk_usage", lambda path: Usage(10**6, 10**6, 0))
        prepare(str(folder), tokenizer=SPEC)
    assert digests(prepare(str(folder), tokenizer=SPEC).path) == undisturbed


CACHE_DAMAGE: dict[str, Callable[[Path], object]] = {
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


def test_a_folder_of_text_may_hold_a_meta_json_of_something_else(cache: Path, tmp_path: Path) -> None:
    (tmp_path / "novel").mkdir()
    (tmp_path / "novel" / "chapter.txt").write_text(made_text(300))
    (tmp_path / "novel" / "meta.json").write_text('{"title": "precious"}')
    tokens = prepare(str(tmp_path / "novel"), tokenizer=SPEC)
    # Two documents, the larger of which is cut for validation.
    assert (tokens.meta.splits["train"].documents, tokens.meta.splits["val"].documents) == (2, 1)
    assert (tmp_path / "novel" / "meta.json").read_text() == '{"title": "precious"}'


def test_a_damaged_set_of_the_users_own_is_not_to_be_deleted(cache: Path, folder: Path, tmp_path: Path) -> None:
    moved = tmp_path / "mine"
    shutil.copytree(prepare(str(folder), tokenizer=SPEC).path, moved)
    (moved / "train.bin").write_bytes(b"")
    with pytest.raises(DataError, match="restore the files") as refusal:
        prepare(str(moved), tokenizer=SPEC)
    assert "delete" not in str(refusal.value)


def test_an_unknown_data_name_is_refused_with_what_there_is(cache: Path) -> None:
    with pytest.raises(DataError, match=r"no data set called 'tinystory' \(did you mean 'tinystories'\?\)") as refusal:
        prepare("tinystory", tokenizer=SPEC)
    assert "stdlib" in str(refusal.value) and "oelm data list" in str(refusal.value)


@pytest.mark.parametrize("spec", ["bpe:5", "word:300"])
def test_a_wrong_tokenizer_spec_is_refused_before_anything_is_written(cache: Path, folder: Path, spec: str) -> None:
    with pytest.raises(ConfigError, match=f"tokenizer '{spec}'"):
        prepare(str(folder), tokenizer=spec)
    assert not cache.exists()


def test_a_document_that_comes_in_many_pieces_is_prepared_as_one(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readers, "PIECE_CHARS", 200)
    corpus = made_corpus(train=[made_text(2000), made_text(50)], val=[made_text(700, seed=1)])
    assert sum(1 for part in corpus.parts for _ in part.read()) > 10
    path = prepare_corpus(corpus, tokenizer=SPEC).path
    assert (decoded(path, "train"), decoded(path, "val")) == ([made_text(2000), made_text(50)], [made_text(700, seed=1)])
