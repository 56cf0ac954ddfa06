"""The standard library and the user's own text become documents in two splits that share nothing."""

from __future__ import annotations

import gzip
import sysconfig
from collections import defaultdict
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oelm.data.corpora import VALIDATION_SHARE, Corpus, Document, stdlib_corpus, text_corpus, validation_groups
from oelm.data.tokenizer import END_OF_TEXT
from oelm.errors import DataError
from tests.conftest import made_text

STDLIB = Path(sysconfig.get_path("stdlib"))


@pytest.fixture(scope="module")
def stdlib() -> Corpus:
    return stdlib_corpus()


def left_out_texts(pattern: str) -> set[str]:
    """Return the texts of standard-library files too long to be the same as another by chance."""
    found = (path.read_bytes().decode("utf-8", errors="replace") for path in STDLIB.glob(pattern))
    return {text for text in found if len(text) > 1000}


def packages_by_text() -> dict[str, set[str]]:
    """Return, for every source text of the standard library, the top-level packages that hold it."""
    packages: dict[str, set[str]] = defaultdict(set)
    for path in STDLIB.rglob("*.py"):
        top = path.relative_to(STDLIB).parts[0].removesuffix(".py")
        if top != "site-packages":
            packages[path.read_bytes().decode("utf-8", errors="replace").replace("\r\n", "\n")].add(top)
    return packages


def texts(corpus: Corpus) -> dict[str, list[str]]:
    return {"train": list(corpus.texts("train")), "val": list(corpus.texts("val"))}


def test_the_standard_library_is_over_five_megabytes(stdlib: Corpus) -> None:
    assert sum(len(document.text.encode()) for document in stdlib.documents) > 5_000_000


@pytest.mark.parametrize(
    "pattern",
    [
        "test/**/*.py",
        "*/test*/**/*.py",
        "encodings/*.py",
        "_sysconfigdata*.py",
        "config-*/*.py",
        "site-packages/pip/_internal/**/*.py",
    ],
)
def test_the_standard_library_is_without(stdlib: Corpus, pattern: str) -> None:
    assert not left_out_texts(pattern).intersection(document.text for document in stdlib.documents)


def test_no_package_is_in_both_splits(stdlib: Corpus) -> None:
    packages = packages_by_text()
    held: dict[str, set[str]] = {"train": set(), "val": set()}
    for document in stdlib.documents:
        owners = packages[document.text]
        assert owners
        if len(owners) == 1:  # a text that two packages share says nothing about either
            held[document.split] |= owners
    assert held["val"] and not held["train"] & held["val"]


def test_validation_is_a_small_part_of_the_standard_library(stdlib: Corpus) -> None:
    sizes = {split: sum(len(text.encode()) for text in parts) for split, parts in texts(stdlib).items()}
    assert 0.02 < sizes["val"] / sum(sizes.values()) < 0.12


def test_the_standard_library_is_the_same_corpus_twice(stdlib: Corpus) -> None:
    assert stdlib_corpus() == stdlib


def test_the_standard_library_is_named_by_its_version(stdlib: Corpus) -> None:
    assert stdlib.name == f"stdlib-{'.'.join(map(str, __import__('sys').version_info[:3]))}"


def test_a_single_file_is_cut_once_at_the_end_of_a_line(tmp_path: Path) -> None:
    text = made_text(2000)
    (tmp_path / "a.txt").write_text(text)
    parts = texts(text_corpus(tmp_path / "a.txt"))
    (train,), (val,) = parts["train"], parts["val"]
    assert train + val == text and train.endswith("\n")


def test_a_single_file_keeps_about_the_usual_share_for_validation(tmp_path: Path) -> None:
    text = made_text(2000)
    (tmp_path / "a.txt").write_text(text)
    (val,) = text_corpus(tmp_path / "a.txt").texts("val")
    longest_line = max(map(len, text.splitlines(keepends=True)))
    # The cut goes back to the line end before it: at most one line more than the share, and the rounding of one character.
    assert 0 <= len(val) - VALIDATION_SHARE * len(text) <= longest_line + 1


def test_a_file_of_one_line_is_cut_within_it(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("word " * 200 + "end")
    parts = texts(text_corpus(tmp_path / "a.txt"))
    assert "".join(parts["train"] + parts["val"]) == "word " * 200 + "end\n"


def test_end_of_text_marks_separate_documents(tmp_path: Path) -> None:
    documents = [made_text(20, seed=seed) for seed in range(30)]
    (tmp_path / "a.txt").write_text(END_OF_TEXT.join(documents))
    corpus = text_corpus(tmp_path / "a.txt")
    assert sorted(document.text for document in corpus.documents) == sorted(documents)


def test_no_document_holds_an_end_of_text_mark(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(f"{END_OF_TEXT}one\n{END_OF_TEXT}{END_OF_TEXT}\ntwo\n{END_OF_TEXT}\n  \n{END_OF_TEXT}three")
    corpus = text_corpus(tmp_path / "a.txt")
    assert sorted(document.text for document in corpus.documents) == ["one\n", "three\n", "two\n"]


def test_a_folder_gives_every_text_file_below_it(tmp_path: Path) -> None:
    (tmp_path / "deep" / "er").mkdir(parents=True)
    for number, place in enumerate(["a.txt", "b.md", "no_suffix", "deep/c.txt", "deep/er/d.py"]):
        (tmp_path / place).write_text(f"text number {number}\n")
    corpus = text_corpus(tmp_path)
    assert sorted(document.text for document in corpus.documents) == [f"text number {n}\n" for n in range(5)]


def test_hidden_binary_and_empty_files_of_a_folder_are_passed_over(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("kept one\n")
    (tmp_path / "b.txt").write_text("kept two\n")
    (tmp_path / ".hidden.txt").write_text("hidden\n")
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "config").write_text("hidden\n")
    (tmp_path / "image.png").write_bytes(b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR")
    (tmp_path / "zeros.bin").write_bytes(bytes(100))
    (tmp_path / "packed.gz").write_bytes(gzip.compress(b"packed\n"))
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "blank.txt").write_text(" \n\n")
    assert sorted(document.text for document in text_corpus(tmp_path).documents) == ["kept one\n", "kept two\n"]


def test_a_hidden_folder_above_the_text_hides_nothing(tmp_path: Path) -> None:
    folder = tmp_path / ".cache" / "text"
    folder.mkdir(parents=True)
    (folder / "a.txt").write_text("one\n")
    (folder / "b.txt").write_text("two\n")
    assert len(text_corpus(folder).documents) == 2


def test_windows_line_ends_give_the_same_corpus(tmp_path: Path) -> None:
    text = made_text(500)
    (tmp_path / "unix").mkdir()
    (tmp_path / "windows").mkdir()
    (tmp_path / "unix" / "a.txt").write_bytes(text.encode())
    (tmp_path / "windows" / "a.txt").write_bytes(text.replace("\n", "\r\n").encode())
    unix, windows = (text_corpus(tmp_path / name / "a.txt") for name in ("unix", "windows"))
    assert unix.fingerprint() == windows.fingerprint()


def test_the_order_of_documents_does_not_depend_on_the_order_of_creation(tmp_path: Path) -> None:
    names = [f"{n:02}.txt" for n in range(20)]
    for folder, order in (("up", names), ("down", names[::-1])):
        (tmp_path / folder / "same").mkdir(parents=True)
        for name in order:
            (tmp_path / folder / "same" / name).write_text(f"text of {name}\n")
    assert text_corpus(tmp_path / "up" / "same") == text_corpus(tmp_path / "down" / "same")


def test_the_documents_of_a_folder_stand_in_the_order_of_their_paths(tmp_path: Path) -> None:
    for number in (9, 2, 7, 0, 5, 1, 8, 3, 6, 4):
        (tmp_path / f"{number}.txt").write_text(f"text {number}\n")
    assert [document.text for document in text_corpus(tmp_path).documents] == [f"text {n}\n" for n in range(10)]


def test_a_name_that_would_not_do_as_a_file_name_is_made_plain(tmp_path: Path) -> None:
    path = tmp_path / "m\u00fc \u4e2d;$(id)<b>.txt"
    path.write_text(made_text(100))
    name = text_corpus(path).name
    assert name.startswith("text-") and name.isascii() and not set(name) & set(" ;$()<>/\\")


def test_text_that_is_missing_is_refused_by_path(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"gone\.txt: no such file or folder"):
        text_corpus(tmp_path / "gone.txt")


@pytest.mark.parametrize("content", ["", "\n \n\t\n", END_OF_TEXT * 3], ids=["empty", "blank", "marks-only"])
def test_text_that_holds_nothing_is_refused_by_path(tmp_path: Path, content: str) -> None:
    (tmp_path / "a.txt").write_text(content)
    with pytest.raises(DataError, match=r"a\.txt: no text in it"):
        text_corpus(tmp_path / "a.txt")


def test_a_folder_without_text_is_refused_with_how_many_files_were_seen(tmp_path: Path) -> None:
    (tmp_path / "a.bin").write_bytes(b"\xff\xfe\0")
    (tmp_path / "b.bin").write_bytes(bytes(9))
    with pytest.raises(DataError, match=r"no text in it \(2 files looked at\)"):
        text_corpus(tmp_path)


NOT_TEXT = {
    "latin1": "M\u00fcller\n".encode("latin-1") * 50,
    "utf16": made_text(50).encode("utf-16"),
    "gzip": gzip.compress(made_text(500).encode()),
    "zeros": bytes(1000),
    "cut-in-a-character": "\u4e2d".encode()[:2],
}


@pytest.mark.parametrize("content", NOT_TEXT.values(), ids=NOT_TEXT.keys())
def test_a_file_that_is_not_utf8_is_refused_with_what_to_do(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a.txt").write_bytes(content)
    with pytest.raises(DataError, match=r"a\.txt: not UTF-8 text; unpack or convert it"):
        text_corpus(tmp_path / "a.txt")


def test_a_text_too_short_to_split_is_refused_with_its_length(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("x")
    with pytest.raises(DataError, match=r"a\.txt: 2 characters are too few"):
        text_corpus(tmp_path / "a.txt")


@pytest.mark.skipif(not Path("/proc/self/mem").exists(), reason="no file here that fails on reading")
def test_a_file_that_cannot_be_read_is_refused_by_path() -> None:
    with pytest.raises(DataError, match="/proc/self/mem"):
        text_corpus(Path("/proc/self/mem"))


@given(st.dictionaries(st.text(min_size=1, max_size=8), st.integers(1, 10**6), min_size=2, max_size=40))
def test_both_splits_get_something_of_two_groups_or_more(sizes: dict[str, int]) -> None:
    held_out = validation_groups(sizes)
    assert held_out and held_out < sizes.keys()


@given(st.dictionaries(st.text(min_size=1, max_size=8), st.integers(1, 1000), min_size=60, max_size=100))
def test_validation_overshoots_twice_its_share_only_by_a_single_smallest_group(sizes: dict[str, int]) -> None:
    held_out = validation_groups(sizes)
    held = sum(sizes[name] for name in held_out)
    assert held <= 2 * VALIDATION_SHARE * sum(sizes.values()) or (len(held_out) == 1 and held == min(sizes.values()))


@given(st.dictionaries(st.text(min_size=1, max_size=8), st.integers(1, 10**6), min_size=2, max_size=40))
def test_the_choice_of_groups_does_not_depend_on_their_order(sizes: dict[str, int]) -> None:
    assert validation_groups(dict(reversed(sizes.items()))) == validation_groups(sizes)


ONE = Document("train", "one\n")
TWO = Document("val", "two\n")
OTHER_CORPORA = {
    "text": (ONE, Document("val", "too\n")),
    "split": (ONE, Document("train", "two\n")),
    "order": (TWO, ONE),
    "border": (Document("train", "one\ntw"), Document("val", "o\n")),
    "missing": (ONE,),
}


@pytest.mark.parametrize("documents", OTHER_CORPORA.values(), ids=OTHER_CORPORA.keys())
def test_another_corpus_is_another_fingerprint(documents: tuple[Document, ...]) -> None:
    assert Corpus("made", "here", documents).fingerprint() != Corpus("made", "here", (ONE, TWO)).fingerprint()
