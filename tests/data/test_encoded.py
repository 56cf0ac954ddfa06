"""Example files come back as written, in rectangles with little padding, and every kind of damage is refused."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from oelm.data.example_sets import ExampleSplit, open_examples, prepare_examples
from oelm.data.examples import Example
from oelm.errors import DataError
from tests.data.test_tasks import source_of, write_vocabulary

FILES = ("train.ids.bin", "train.rows.bin", "val.ids.bin", "val.rows.bin", "tokenizer.json")
EXAMPLES = [Example("the cat sat on a mat", "two birds", 0), Example("rain fell", "a cat", 1), Example("old trees", "hills", 1)]


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    vocabulary = write_vocabulary(tmp_path_factory.mktemp("vocabulary"))
    return prepare_examples(source_of(EXAMPLES, val=EXAMPLES[:2]), tokenizer=str(vocabulary), max_length=16).path


@pytest.fixture
def folder(prepared: Path, tmp_path: Path) -> Path:
    """A copy to be damaged, outside of the cache."""
    shutil.copytree(prepared, tmp_path / "examples")
    return tmp_path / "examples"


def refusal_of(folder: Path) -> str:
    with pytest.raises(DataError) as refusal:
        open_examples(folder)
    return str(refusal.value)


def change_meta(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    meta = json.loads((folder / "meta.json").read_text())
    change(meta)
    (folder / "meta.json").write_text(json.dumps(meta))


def write_with_digest(folder: Path, name: str, content: bytes) -> None:
    """Replace a file of the training split and its digest: what a hand or another tool might do, no accident of a disk."""
    (folder / name).write_bytes(content)
    key = "ids_sha256" if ".ids." in name else "rows_sha256"
    change_meta(folder, lambda meta: meta["splits"]["train"].update({key: hashlib.sha256(content).hexdigest()}))


def rows_of(folder: Path) -> np.ndarray[Any, np.dtype[np.int64]]:
    return np.fromfile(folder / "train.rows.bin", dtype="<i8").reshape(-1, 3)


def test_a_whole_set_opens_with_its_labels(folder: Path) -> None:
    opened = open_examples(folder)
    assert {split: held.labels.tolist() for split, held in opened.splits.items()} == {"train": [0, 1, 1], "val": [0, 1]}


def each_file(folder: Path) -> Iterator[tuple[Path, bytes]]:
    """Give each file with its content, and put it back before the next; in the end the set opens again."""
    for name in FILES:
        content = (folder / name).read_bytes()
        yield folder / name, content
        (folder / name).write_bytes(content)
    open_examples(folder)


def test_a_flipped_bit_is_refused_naming_the_file(folder: Path) -> None:
    for path, content in each_file(folder):
        flipped = bytearray(content)
        flipped[len(flipped) // 2] ^= 1
        path.write_bytes(flipped)
        message = refusal_of(folder)
        assert f"{path}: sha256 " in message and "damaged" in message


def test_a_truncated_file_is_refused_naming_it(folder: Path) -> None:
    for path, content in each_file(folder):
        for left in (0, 1, -1):
            path.write_bytes(content[:left])
            assert f"{path}: " in refusal_of(folder), left


def test_a_missing_file_is_refused_naming_it(folder: Path) -> None:
    for path, _ in each_file(folder):
        path.unlink()
        assert f"{path}: missing, though meta.json records" in refusal_of(folder)


def test_a_record_that_is_not_json_is_refused(folder: Path) -> None:
    for content in ("", "{", "[1, NaN]", "\0"):
        (folder / "meta.json").write_text(content)
        refusal = refusal_of(folder)
        assert refusal.startswith(f"{folder / 'meta.json'}: content: ") and "restore the files" in refusal, content


def test_a_missing_record_is_refused(folder: Path) -> None:
    (folder / "meta.json").unlink()
    assert str(folder / "meta.json") in refusal_of(folder)


BAD_RECORDS: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "text-for-a-number": (lambda meta: meta.update(vocab_size="77"), "vocab_size"),
    "fraction-for-a-number": (lambda meta: meta["splits"]["train"].update(examples=1.5), "splits.train.examples"),
    "boolean-for-a-number": (lambda meta: meta.update(pad=True), "pad"),
    "negative": (lambda meta: meta["splits"]["train"].update(cut=-1), "splits.train.cut"),
    "no-examples": (lambda meta: meta["splits"]["train"].update(examples=0), "splits.train.examples"),
    "one-label": (lambda meta: meta.update(labels=["only"]), "labels"),
    "no-splits": (lambda meta: meta.update(splits={}), "splits"),
    "other-format": (lambda meta: meta.update(format="oelm-examples-9"), "format"),
    "other-dtype": (lambda meta: meta.update(dtype="float32"), "dtype"),
    "unknown-key": (lambda meta: meta.update(note="hello"), "note"),
    "missing-key": (lambda meta: meta.pop("labels"), "labels"),
    "pad-outside": (lambda meta: meta.update(pad=meta["vocab_size"]), "is outside the vocabulary"),
}


def test_a_record_of_the_wrong_kind_is_refused_naming_the_place(folder: Path) -> None:
    whole = (folder / "meta.json").read_bytes()
    for case, (change, place) in BAD_RECORDS.items():
        (folder / "meta.json").write_bytes(whole)
        change_meta(folder, change)
        message = refusal_of(folder)
        assert message.startswith(f"{folder / 'meta.json'}: ") and place in message, case


@pytest.mark.parametrize("label", [-1, 2, 2**40])
def test_a_label_outside_is_refused_even_with_the_right_digest(label: int, folder: Path) -> None:
    rows = rows_of(folder)
    rows[1, 2] = label
    write_with_digest(folder, "train.rows.bin", rows.tobytes())
    assert f"{folder / 'train.rows.bin'}: holds a label outside of the 2 known ones" in refusal_of(folder)


def test_an_id_outside_the_vocabulary_is_refused_even_with_the_right_digest(folder: Path) -> None:
    vocab_size = json.loads((folder / "meta.json").read_text())["vocab_size"]
    ids = np.fromfile(folder / "train.ids.bin", dtype="<u2")
    ids[3] = vocab_size
    write_with_digest(folder, "train.ids.bin", ids.tobytes())
    expected = f"{folder / 'train.ids.bin'}: holds token id {vocab_size}, but the vocabulary has {vocab_size}"
    assert expected in refusal_of(folder)


@pytest.mark.parametrize("name", ["train.ids.bin", "train.rows.bin"])
@pytest.mark.parametrize("left", [0, -1, -24])
def test_a_file_of_the_wrong_size_is_refused_even_with_the_right_digest(name: str, left: int, folder: Path) -> None:
    content = (folder / name).read_bytes()
    write_with_digest(folder, name, content[:left])
    message = refusal_of(folder)
    assert f"{folder / name}: {len(content[:left]):,} bytes, expected {len(content):,}" in message


# Which number of which row to change, and to what.
BAD_ROWS = {
    "an-end-before-the-last-one": (1, 0, 1),
    "an-end-before-the-beginning": (0, 0, -1),
    "an-end-beyond-the-ids": (2, 0, 10_000),
    "a-second-text-before-its-example": (1, 1, -1),
    "a-second-text-beyond-its-example": (1, 1, 17),
}


@pytest.mark.parametrize("case", BAD_ROWS)
def test_rows_that_do_not_cut_the_ids_are_refused_even_with_the_right_digest(case: str, folder: Path) -> None:
    row, column, value = BAD_ROWS[case]
    rows = rows_of(folder)
    rows[row, column] = value
    write_with_digest(folder, "train.rows.bin", rows.tobytes())
    assert f"{folder / 'train.rows.bin'}: its rows do not cut the" in refusal_of(folder)


def test_a_damaged_set_of_the_user_s_is_not_told_to_be_deleted(folder: Path) -> None:
    (folder / "train.ids.bin").unlink()
    assert refusal_of(folder).endswith("restore the files, or prepare the set again")


def test_a_damaged_set_of_the_cache_is_told_to_be_deleted_and_made_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OELM_CACHE", str(folder.parent))
    (folder / "train.ids.bin").unlink()
    assert refusal_of(folder).endswith(f"delete the folder {folder} and repeat the command to prepare it again")


def split_of(texts: list[tuple[list[int], int, int]]) -> ExampleSplit:
    """Build a split by hand from (ids, where the second text begins, label)."""
    ends = np.cumsum([len(ids) for ids, _, _ in texts], dtype=np.int64)
    ids = np.array([number for ids, _, _ in texts for number in ids], dtype=np.uint16)
    seconds, labels = (np.array([text[place] for text in texts], dtype=np.int64) for place in (1, 2))
    return ExampleSplit(ids, ends, seconds, labels)


def test_a_rectangle_holds_ids_types_mask_and_labels() -> None:
    split = split_of([([5, 6, 7], 2, 1), ([8], 1, 0), ([9, 10], 0, 2)])
    padded = split.padded(np.array([2, 0]), 99)
    assert padded.ids.tolist() == [[9, 10, 99], [5, 6, 7]]
    assert padded.types.tolist() == [[1, 1, 0], [0, 0, 1]]
    assert padded.mask.tolist() == [[1, 1, 0], [1, 1, 1]]
    assert padded.labels.tolist() == [2, 1]


texts = st.lists(
    st.tuples(st.lists(st.integers(0, 500), min_size=1, max_size=9), st.integers(0, 9), st.integers(0, 3)),
    min_size=1,
    max_size=9,
)


@given(texts=texts, data=st.data())
def test_a_rectangle_is_as_wide_as_its_longest_example(texts: list[tuple[list[int], int, int]], data: st.DataObject) -> None:
    numbers = data.draw(st.lists(st.integers(0, len(texts) - 1), min_size=1, max_size=12))
    padded = split_of(texts).padded(np.array(numbers), 999)
    assert padded.ids.shape == (len(numbers), max(len(texts[number][0]) for number in numbers))


@given(texts=texts, data=st.data())
def test_the_mask_uncovers_the_ids_of_each_example_and_nothing_else(
    texts: list[tuple[list[int], int, int]], data: st.DataObject
) -> None:
    numbers = data.draw(st.lists(st.integers(0, len(texts) - 1), min_size=1, max_size=12))
    padded = split_of(texts).padded(np.array(numbers), 999)
    assert [row[mask == 1].tolist() for row, mask in zip(padded.ids, padded.mask, strict=True)] == [
        texts[number][0] for number in numbers
    ]
    assert (padded.ids[padded.mask == 0] == 999).all()
