"""The standard library becomes documents, and whole packages of it are held out."""

from __future__ import annotations

import sys
import sysconfig
from collections import defaultdict
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oelm.data.python_source import held_out_packages, python_text, stdlib_corpus
from oelm.data.sources import Corpus, documents
from oelm.data.survey import VALIDATION_SHARE
from oelm.errors import DataError

STDLIB = Path(sysconfig.get_path("stdlib"))


@pytest.fixture(scope="module")
def stdlib() -> Corpus:
    return stdlib_corpus()


@pytest.fixture(scope="module")
def by_split(stdlib: Corpus) -> dict[str, list[str]]:
    """The documents of each split that the corpus names."""
    found: dict[str, list[str]] = defaultdict(list)
    for part in stdlib.parts:
        found[str(part.split)] += ["".join(piece.text for piece in part.read())]
    return found


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


def test_the_standard_library_is_over_five_megabytes(stdlib: Corpus) -> None:
    assert sum(len(text.encode()) for text in documents(stdlib)) > 5_000_000


def test_the_standard_library_is_without_tests_tables_and_what_differs_by_machine(by_split: dict[str, list[str]]) -> None:
    held = {text for found in by_split.values() for text in found}
    for pattern in (
        "test/**/*.py",
        "*/test*/**/*.py",
        "encodings/*.py",
        "_sysconfigdata*.py",
        "config-*/*.py",
        "site-packages/pip/_internal/**/*.py",
    ):
        assert not left_out_texts(pattern) & held, pattern


def test_no_package_is_in_both_splits(by_split: dict[str, list[str]]) -> None:
    packages = packages_by_text()
    held: dict[str, set[str]] = {"train": set(), "val": set()}
    for split, found in by_split.items():
        for text in found:
            owners = packages[text]
            assert owners
            if len(owners) == 1:  # a text that two packages share says nothing about either
                held[split] |= owners
    assert held["val"] and not held["train"] & held["val"]


def test_validation_is_a_small_part_of_the_standard_library(by_split: dict[str, list[str]]) -> None:
    sizes = {split: sum(len(text.encode()) for text in parts) for split, parts in by_split.items()}
    assert 0.02 < sizes["val"] / sum(sizes.values()) < 0.12


def test_the_standard_library_is_the_same_corpus_twice(stdlib: Corpus) -> None:
    again = stdlib_corpus()
    assert [(part.label, part.split) for part in again.parts] == [(part.label, part.split) for part in stdlib.parts]
    assert (again.name, again.source) == (stdlib.name, stdlib.source)


def test_the_standard_library_is_named_by_its_version(stdlib: Corpus) -> None:
    assert stdlib.name == f"stdlib-{'.'.join(map(str, sys.version_info[:3]))}"


def chosen(sizes: dict[str, int]) -> set[str]:
    return held_out_packages(sizes, wanted_bytes=VALIDATION_SHARE * sum(sizes.values()))


@given(st.dictionaries(st.text(min_size=1, max_size=8), st.integers(1, 10**6), min_size=2, max_size=40))
def test_both_splits_get_something_of_two_groups_or_more(sizes: dict[str, int]) -> None:
    held_out = chosen(sizes)
    assert held_out and held_out < sizes.keys()


# Numbered names: dozens of drawn ones take far longer than what is tested. Their hashes differ with what they begin with.
@given(st.text(max_size=8), st.lists(st.integers(1, 1000), min_size=60, max_size=100))
@settings(max_examples=30)
def test_validation_overshoots_twice_its_share_only_by_a_single_smallest_group(begin: str, drawn: list[int]) -> None:
    sizes = {f"{begin}{number}": size for number, size in enumerate(drawn)}
    held_out = chosen(sizes)
    held = sum(sizes[name] for name in held_out)
    assert held <= 2 * VALIDATION_SHARE * sum(sizes.values()) or (len(held_out) == 1 and held == min(sizes.values()))


@given(st.dictionaries(st.text(min_size=1, max_size=8), st.integers(1, 10**6), min_size=2, max_size=40))
def test_the_choice_of_groups_does_not_depend_on_their_order(sizes: dict[str, int]) -> None:
    assert chosen(dict(reversed(sizes.items()))) == chosen(sizes)


def test_the_text_of_a_file_has_bare_newlines(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_bytes("x = '\u00fc'\r\ny = 1\n".encode())
    assert python_text(tmp_path / "a.py") == "x = '\u00fc'\ny = 1\n"


@pytest.mark.parametrize("content", [b"", b" \r\n\n", b"x = 1\0", b"x = '\xfc'"], ids=repr)
def test_a_file_that_is_blank_or_no_text_has_none(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a.py").write_bytes(content)
    assert python_text(tmp_path / "a.py") is None


def test_a_file_that_cannot_be_read_is_refused_by_path(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"a\.py: cannot be read"):
        python_text(tmp_path / "a.py")
