"""Token files are read as nanoGPT reads them, and every kind of damage is refused with file, expected and found."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import numpy as np
import pytest

import oelm.data.tokens
from oelm.data.tokens import SPLITS, computed_once, dtype_for, open_tokens
from oelm.errors import DataError

TRAIN = [5, 9, 299, 0, 7, 7, 12, 0]
VAL = [3, 299, 0]


def write_set(
    folder: Path, *, train: list[int] = TRAIN, val: list[int] = VAL, vocab_size: int = 300, dtype: str = "uint16"
) -> Path:
    """Write a token set by hand, as another tool might."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = b'{"made": "by hand"}'
    (folder / "tokenizer.json").write_bytes(tokenizer)
    splits: dict[str, Any] = {}
    for split, ids in zip(SPLITS, (train, val), strict=True):
        content = np.array(ids, dtype=f"<{'u2' if dtype == 'uint16' else 'u4'}").tobytes()
        (folder / f"{split}.bin").write_bytes(content)
        digest = hashlib.sha256(content).hexdigest()
        splits[split] = {"tokens": len(ids), "documents": 1, "text_bytes": 9, "sha256": digest}
    meta = {
        "format": "oelm-tokens-1",
        "name": "made",
        "source": "by hand",
        "dtype": dtype,
        "vocab_size": vocab_size,
        "end_of_text": 0,
        "tokenizer": "bpe:300",
        "tokenizer_sha256": hashlib.sha256(tokenizer).hexdigest(),
        "splits": splits,
    }
    (folder / "meta.json").write_text(json.dumps(meta))
    return folder


def change_meta(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    path = folder / "meta.json"
    meta = json.loads(path.read_text())
    change(meta)
    path.write_text(json.dumps(meta))


def refusal_of(folder: Path) -> str:
    with pytest.raises(DataError) as refusal:
        open_tokens(folder)
    return str(refusal.value)


def test_ids_come_back_as_written(tmp_path: Path) -> None:
    tokens = open_tokens(write_set(tmp_path))
    assert (tokens.train.tolist(), tokens.val.tolist()) == (TRAIN, VAL)


def test_a_set_is_read_as_nanogpt_reads_it(tmp_path: Path) -> None:
    tokens = open_tokens(write_set(tmp_path))
    data = np.memmap(tmp_path / "train.bin", dtype=np.uint16, mode="r")
    assert np.array_equal(data, tokens.train) and data.tolist() == TRAIN


def test_the_dtype_is_the_smallest_that_holds_every_id() -> None:
    cases: list[tuple[int, str]] = [
        (1, "uint16"),
        (50257, "uint16"),
        (65535, "uint16"),
        (65536, "uint16"),
        (65537, "uint32"),
        (2**31, "uint32"),
    ]
    for vocab_size, dtype in cases:
        assert dtype_for(vocab_size) == dtype and vocab_size - 1 <= np.iinfo(dtype).max, (vocab_size, dtype)


def test_ids_beyond_sixteen_bits_come_back_as_written(tmp_path: Path) -> None:
    ids = [70_000, 65_536, 65_535, 0]
    tokens = open_tokens(write_set(tmp_path, train=ids, vocab_size=70_001, dtype="uint32"))
    assert tokens.train.tolist() == ids and tokens.train.dtype == np.uint32


def test_an_opened_set_cannot_be_written_to(tmp_path: Path) -> None:
    tokens = open_tokens(write_set(tmp_path))
    with pytest.raises(ValueError, match="read-only"):
        tokens.train[0] = 1


def test_a_truncated_file_is_refused_with_both_sizes(tmp_path: Path) -> None:
    cases: list[int | str] = [2, 1, 4, "all"]
    for cut in cases:
        for split in SPLITS:
            place = Path(mkdtemp(dir=tmp_path))
            path = write_set(place) / f"{split}.bin"
            content = path.read_bytes()
            path.write_bytes(content[: 0 if cut == "all" else len(content) - int(cut)])
            message = refusal_of(place)
            assert message.startswith(f"{path}: {path.stat().st_size} bytes, expected {len(content)} "), (split, cut)


def test_a_longer_file_is_refused_with_both_sizes(tmp_path: Path) -> None:
    for extra in (b"\0", b"\0\0"):
        for split in SPLITS:
            place = Path(mkdtemp(dir=tmp_path))
            path = write_set(place) / f"{split}.bin"
            content = path.read_bytes()
            path.write_bytes(content + extra)
            assert refusal_of(place).startswith(f"{path}: {len(content) + len(extra)} bytes, expected {len(content)} "), (
                split,
                extra,
            )


def test_one_flipped_bit_is_refused_with_both_digests(tmp_path: Path) -> None:
    cases: list[int] = [0, 1, 3, -2, -1]
    for bit in (0, 7):
        for offset in cases:
            for split in SPLITS:
                place = Path(mkdtemp(dir=tmp_path))
                path = write_set(place) / f"{split}.bin"
                content = bytearray(path.read_bytes())
                recorded = hashlib.sha256(content).hexdigest()
                content[offset] ^= 1 << bit
                path.write_bytes(content)
                found = hashlib.sha256(content).hexdigest()
                assert refusal_of(place).startswith(f"{path}: sha256 {found[:12]}..., expected {recorded[:12]}..."), (
                    split,
                    offset,
                )


def test_a_file_replaced_by_another_of_equal_size_is_refused(tmp_path: Path) -> None:
    path = write_set(tmp_path) / "train.bin"
    path.write_bytes(np.array(TRAIN[::-1], dtype="<u2").tobytes())
    assert f"{path}: sha256" in refusal_of(tmp_path)


def test_splits_swapped_at_equal_size_are_refused(tmp_path: Path) -> None:
    write_set(tmp_path, train=[1, 2, 3], val=[4, 5, 6])
    train, val = tmp_path / "train.bin", tmp_path / "val.bin"
    content = train.read_bytes()
    train.write_bytes(val.read_bytes())
    val.write_bytes(content)
    assert f"{train}: sha256" in refusal_of(tmp_path)


@pytest.mark.parametrize("split", SPLITS)
def test_a_missing_file_is_refused_with_what_it_should_hold(tmp_path: Path, split: str) -> None:
    path = write_set(tmp_path) / f"{split}.bin"
    path.unlink()
    assert refusal_of(tmp_path).startswith(
        f"{path}: missing, though meta.json records {len(TRAIN if split == 'train' else VAL)} tokens"
    )


def test_a_folder_in_place_of_a_file_is_refused(tmp_path: Path) -> None:
    path = write_set(tmp_path) / "train.bin"
    path.unlink()
    path.mkdir()
    assert str(path) in refusal_of(tmp_path)


def test_a_folder_without_meta_is_no_token_set(tmp_path: Path) -> None:
    (write_set(tmp_path) / "meta.json").unlink()
    assert refusal_of(tmp_path).startswith(f"{tmp_path}: no meta.json")


def test_meta_that_is_not_json_is_refused_by_file(tmp_path: Path) -> None:
    for content in (b"", b"no JSON", b'{"format": ', b"\xff\xfe", b'{"vocab_size": NaN}'):
        place = Path(mkdtemp(dir=tmp_path))
        (write_set(place) / "meta.json").write_bytes(content)
        assert str(place / "meta.json") in refusal_of(place), content


def drop_val(meta: dict[str, Any]) -> None:
    del meta["splits"]["val"]


META_DAMAGE: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "unknown-key": (lambda meta: meta.update(dtyp="uint16"), "dtyp"),
    "unknown-key-in-split": (lambda meta: meta["splits"]["val"].update(token=3), "splits.val.token"),
    "missing-key": (lambda meta: meta.pop("vocab_size"), "vocab_size"),
    "missing-split": (drop_val, "val"),
    "unknown-split": (lambda meta: meta["splits"].update(extra=meta["splits"]["val"]), "extra"),
    "text-for-number": (lambda meta: meta.update(vocab_size="300"), "vocab_size"),
    "true-for-number": (lambda meta: meta["splits"]["train"].update(tokens=True), "splits.train.tokens"),
    "fraction-of-a-token": (lambda meta: meta["splits"]["train"].update(tokens=8.5), "splits.train.tokens"),
    "negative-count": (lambda meta: meta["splits"]["train"].update(tokens=-8), "splits.train.tokens"),
    "other-dtype": (lambda meta: meta.update(dtype="int16"), "dtype"),
    "other-format": (lambda meta: meta.update(format="oelm-tokens-2"), "format"),
    "null": (lambda meta: meta.update(splits=None), "splits"),
}


def test_meta_of_another_shape_is_refused_by_file_and_key(tmp_path: Path) -> None:
    for change, key in META_DAMAGE.values():
        place = Path(mkdtemp(dir=tmp_path))
        change_meta(write_set(place), change)
        message = refusal_of(place)
        assert str(place / "meta.json") in message and key in message, key


def test_meta_that_is_no_object_is_refused_by_file(tmp_path: Path) -> None:
    for content in ("[]", "null", "3", '"text"'):
        place = Path(mkdtemp(dir=tmp_path))
        (write_set(place) / "meta.json").write_text(content)
        assert str(place / "meta.json") in refusal_of(place), content


def test_a_recorded_id_outside_the_vocabulary_is_refused_with_both_numbers(tmp_path: Path) -> None:
    change_meta(write_set(tmp_path), lambda meta: meta.update(vocab_size=200))
    message = refusal_of(tmp_path)
    assert str(tmp_path / "train.bin") in message and "299" in message and "200" in message


def test_an_id_outside_the_vocabulary_is_refused_whatever_meta_records(tmp_path: Path) -> None:
    # A set made by another tool: every digest agrees.
    write_set(tmp_path, train=[1, 2, 4000])
    message = refusal_of(tmp_path)
    assert str(tmp_path / "train.bin") in message and "4000" in message and "300" in message


def test_an_id_outside_the_vocabulary_is_found_wherever_it_stands(tmp_path: Path) -> None:
    # Files are looked through in blocks of 8 MiB: one id further on than the first.
    write_set(tmp_path, train=[1] * (2**22 + 5) + [300, 1])
    assert "holds token id 300, but the vocabulary has 300" in refusal_of(tmp_path)


def test_an_end_of_text_outside_the_vocabulary_is_refused(tmp_path: Path) -> None:
    change_meta(write_set(tmp_path), lambda meta: meta.update(end_of_text=300))
    assert "end_of_text" in refusal_of(tmp_path)


def record_test_split(folder: Path, ids: list[int]) -> None:
    content = np.array(ids, dtype="<u2").tobytes()
    (folder / "test.bin").write_bytes(content)
    known = {"tokens": len(ids), "documents": 1, "text_bytes": 9}
    change_meta(folder, lambda meta: meta["splits"].update(test={**known, "sha256": hashlib.sha256(content).hexdigest()}))


def test_a_test_split_is_opened_where_there_is_one(tmp_path: Path) -> None:
    record_test_split(write_set(tmp_path), [8, 0])
    assert open_tokens(tmp_path).splits["test"].tolist() == [8, 0]


def test_a_recorded_test_split_must_be_there(tmp_path: Path) -> None:
    record_test_split(write_set(tmp_path), [8, 0])
    (tmp_path / "test.bin").unlink()
    assert refusal_of(tmp_path).startswith(f"{tmp_path / 'test.bin'}: missing")


def test_another_tokenizer_than_recorded_is_refused(tmp_path: Path) -> None:
    (write_set(tmp_path) / "tokenizer.json").write_bytes(b'{"made": "otherwise"}')
    assert str(tmp_path / "tokenizer.json") in refusal_of(tmp_path)


def test_the_wrong_dtype_in_meta_is_refused(tmp_path: Path) -> None:
    change_meta(write_set(tmp_path), lambda meta: meta.update(dtype="uint32"))
    assert f"{tmp_path / 'train.bin'}: 16 bytes, expected 32 (uint32)" in refusal_of(tmp_path)


def test_equal_sets_in_two_places_have_one_fingerprint(tmp_path: Path) -> None:
    one, other = (open_tokens(write_set(tmp_path / name)).meta for name in ("one", "other"))
    assert one.fingerprint == other.fingerprint


FINGERPRINT_CHANGES: dict[str, Callable[[dict[str, Any]], object]] = {
    "vocabulary": lambda meta: meta.update(vocab_size=301),
    "end-of-text": lambda meta: meta.update(end_of_text=7),
}


@pytest.mark.parametrize("change", FINGERPRINT_CHANGES.values(), ids=FINGERPRINT_CHANGES.keys())
def test_another_meaning_of_the_tokens_is_another_fingerprint(
    tmp_path: Path, change: Callable[[dict[str, Any]], object]
) -> None:
    before = open_tokens(write_set(tmp_path)).meta.fingerprint
    change_meta(tmp_path, change)
    assert open_tokens(tmp_path).meta.fingerprint != before


@pytest.mark.parametrize("split", SPLITS)
def test_other_tokens_are_another_fingerprint(tmp_path: Path, split: str) -> None:
    before = open_tokens(write_set(tmp_path / "one")).meta.fingerprint
    other = (
        write_set(tmp_path / "other", train=[1, *TRAIN]) if split == "train" else write_set(tmp_path / "other", val=[1, *VAL])
    )
    assert open_tokens(other).meta.fingerprint != before


def test_a_new_name_or_source_is_the_same_fingerprint(tmp_path: Path) -> None:
    before = open_tokens(write_set(tmp_path)).meta.fingerprint
    change_meta(tmp_path, lambda meta: meta.update(name="renamed", source="elsewhere"))
    assert open_tokens(tmp_path).meta.fingerprint == before


@pytest.fixture
def settled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of this test's own, for which files are old enough as soon as they are written."""
    monkeypatch.setenv("OELM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(oelm.data.tokens, "_SETTLED_S", -60.0)
    return tmp_path / "cache"


def replace_file(path: Path) -> None:
    (path.parent / "other").write_bytes(path.read_bytes()[::-1])
    os.replace(path.parent / "other", path)


def write_over(path: Path) -> None:
    """Change the content, and give the file its time back."""
    times = path.stat()
    path.write_bytes(path.read_bytes()[::-1])
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


def beyond_vocabulary(path: Path) -> None:
    ids = np.array([*TRAIN[:-1], 300], dtype="<u2").tobytes()
    path.write_bytes(ids)
    change_meta(path.parent, lambda meta: meta["splits"]["train"].update(sha256=hashlib.sha256(ids).hexdigest()))


LATER_DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "truncated": (lambda path: os.truncate(path, 8), "8 bytes, expected 16"),
    "odd length": (lambda path: path.write_bytes(path.read_bytes() + b"\0"), "17 bytes, expected 16"),
    "wrong dtype": (lambda path: change_meta(path.parent, lambda meta: meta.update(dtype="uint32")), "expected 32 (uint32)"),
    "id beyond the vocabulary": (beyond_vocabulary, "holds token id 300, but the vocabulary has 300"),
    "replaced by one of equal size": (replace_file, "sha256"),
    "written over at equal size and time": (write_over, "sha256"),
    "gone": (Path.unlink, "missing"),
    "another tokenizer": (lambda path: write_over(path.parent / "tokenizer.json"), "tokenizer.json: sha256"),
}


@pytest.mark.parametrize(("spoil", "said"), LATER_DAMAGE.values(), ids=LATER_DAMAGE.keys())
def test_damage_after_a_set_was_verified_is_refused(
    tmp_path: Path, settled: Path, spoil: Callable[[Path], object], said: str
) -> None:
    write_set(tmp_path / "set")
    for _ in range(2):
        assert open_tokens(tmp_path / "set").train.tolist() == TRAIN
    assert list((settled / "computed").iterdir())
    spoil(tmp_path / "set" / "train.bin")
    assert said in refusal_of(tmp_path / "set")


def counting() -> tuple[list[int], Callable[[], int]]:
    calls: list[int] = []

    def compute() -> int:
        calls.append(1)
        return len(calls)

    return calls, compute


@pytest.mark.parametrize("change", [replace_file, write_over], ids=["replaced", "written over"])
def test_a_value_is_computed_once_until_a_file_changes(tmp_path: Path, settled: Path, change: Callable[[Path], object]) -> None:
    path, (calls, compute) = tmp_path / "file", counting()
    path.write_text("some text")
    assert [computed_once("it", [path], compute) for _ in range(3)] == [1, 1, 1]
    assert computed_once("something else", [path], compute) == 2
    change(path)
    assert [computed_once("it", [path], compute) for _ in range(2)] == [3, 3] and len(calls) == 3


def test_a_file_that_changed_just_now_is_looked_at_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OELM_CACHE", str(tmp_path / "cache"))
    path, (_, compute) = tmp_path / "file", counting()
    path.write_text("some text")
    assert [computed_once("it", [path], compute) for _ in range(2)] == [1, 2]


@pytest.mark.parametrize("content", ["", "[]", "null", '{"value": 1}', '{"value": 7, "sha256": ""}'])
def test_a_damaged_value_is_computed_again(tmp_path: Path, settled: Path, content: str) -> None:
    path, (_, compute) = tmp_path / "file", counting()
    path.write_text("some text")
    computed_once("it", [path], compute)
    (kept,) = (settled / "computed").iterdir()
    kept.write_text(content)
    assert [computed_once("it", [path], compute) for _ in range(2)] == [2, 2]


def test_a_cache_that_cannot_be_written_costs_time_only(tmp_path: Path, settled: Path) -> None:
    settled.write_text("a file in its place")
    assert open_tokens(write_set(tmp_path / "set")).train.tolist() == TRAIN
