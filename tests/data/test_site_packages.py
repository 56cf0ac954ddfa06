"""The installed packages that oelm depends on become a code corpus: which files, which split, and what is left out."""

from __future__ import annotations

import hashlib
import re
import sys
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import pytest

from oelm.data.prepare import prepare_corpus
from oelm.data.python_source import (
    Tally,
    capped,
    dependencies,
    package_sizes,
    says_generated,
    site_packages_corpus,
    source_file,
)
from oelm.data.request import Request
from oelm.data.sources import Corpus, Part
from oelm.errors import ConfigError, DataError

PACKAGES = [f"pack{number:02}" for number in range(80)]


def install(site: Path, name: str, files: dict[str, str | bytes], *, requires: tuple[str, ...] = ()) -> None:
    """Install a distribution as pip does: its files, and a .dist-info with METADATA and RECORD."""
    info = f"{name.replace('-', '_')}-1.0.dist-info"
    described = "".join(f"Requires-Dist: {line}\n" for line in requires)
    written = {f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n{described}".encode()}
    written |= {path: text.encode() if isinstance(text, str) else text for path, text in files.items()}
    for path, content in written.items():
        (site / path).parent.mkdir(parents=True, exist_ok=True)
        (site / path).write_bytes(content)
    rows = [f"{path},sha256={hashlib.sha256(content).hexdigest()},{len(content)}" for path, content in written.items()]
    (site / info / "RECORD").write_text("\n".join([*rows, f"{info}/RECORD,,"]) + "\n")


def code(name: str, *, words: int = 100) -> str:
    """Return text of words that no other file has."""
    plain = re.sub(r"\W", "_", name)
    return "".join(f"{plain}_{number} = {number}_{plain}\n" for number in range(words // 2))


@dataclass(frozen=True)
class Site:
    """What a test installs, found first, and the packages that all tests share."""

    own: Path
    shared: Path

    @property
    def search(self) -> list[str]:
        return [str(self.own), str(self.shared)]


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eighty small packages that oelm depends on, with two files each; to be read only."""
    site = tmp_path_factory.mktemp("shared")
    for name in PACKAGES:
        install(site, name, {f"{name}/{part}.py": code(f"{name}/{part}") for part in ("__init__", "core")})
    add_root(site)
    return site


@pytest.fixture
def site(shared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Site:
    """The same packages, and room for a test's own before them."""
    monkeypatch.setenv("OELM_CACHE", str(tmp_path / "cache"))
    return Site(tmp_path / "site", shared)


@pytest.fixture(scope="module")
def whole(shared: Path) -> Corpus:
    """The corpus of the shared packages alone."""
    return site_packages_corpus(search=[str(shared)], min_bytes=1)


def add_root(site: Path, *more: str) -> None:
    install(site, "oelm", {"oelm/method.py": code("oelm")}, requires=(*PACKAGES, *more))


def made(site: Site) -> Corpus:
    return site_packages_corpus(search=site.search, min_bytes=1)


def text_of(part: Part) -> str:
    return "".join(piece.text for piece in part.read())


def labels(corpus: Corpus) -> set[str]:
    return {part.label for part in corpus.parts}


def by_package(corpus: Corpus) -> dict[str, set[str | None]]:
    splits: dict[str, set[str | None]] = defaultdict(set)
    for part in corpus.parts:
        splits[part.label.split("/")[0]].add(part.split)
    return splits


def held_out_package(corpus: Corpus, split: str) -> str:
    return next(name for name, splits in sorted(by_package(corpus).items()) if splits == {split})


def test_every_file_of_every_dependency_is_a_document(whole: Corpus) -> None:
    assert {part.label: text_of(part) for part in whole.parts} == {
        f"{name}/{part}.py": code(f"{name}/{part}") for name in PACKAGES for part in ("__init__", "core")
    }
    assert whole.left_out == {}


def test_a_package_is_in_one_split_and_validation_and_test_have_several(whole: Corpus) -> None:
    splits = by_package(whole)
    assert all(len(found) == 1 for found in splits.values())
    # Packages of equal size: 3% of eighty is 2.4, so three of each; the rest is training.
    count = {split: sum(found == {split} for found in splits.values()) for split in ("train", "val", "test")}
    assert count == {"train": 74, "val": 3, "test": 3}


def test_a_large_package_is_not_held_out(site: Site, whole: Corpus) -> None:
    large = held_out_package(whole, "val")
    install(site.own, large, {f"{large}/{part}.py": code(f"{large}/{part}") for part in "abcdef"})
    assert by_package(made(site))[large] == {"train"}


def test_the_dependencies_of_dependencies_and_of_extras_count_and_others_do_not(tmp_path: Path) -> None:
    install(
        tmp_path,
        "oelm",
        {},
        requires=("Direct_One>=1", "oelm[data]; extra == 'all'", "read; extra == 'data'", "x; extra == 'dev'"),
    )
    install(tmp_path, "direct-one", {}, requires=("deep[fast]", "old; python_version < '3'", "slow; extra == 'never'"))
    install(tmp_path, "deep", {}, requires=("quick; extra == 'fast'", "direct-one", "gone"))
    for name in ("read", "quick", "x", "old", "slow", "unrelated"):
        install(tmp_path, name, {})
    found, missing = dependencies([str(tmp_path)])
    assert (sorted(found), missing) == (["deep", "direct-one", "quick", "read"], ["gone"])


def test_the_real_environment_s_dependencies_are_oelm_s_and_not_those_of_development() -> None:
    found, missing = dependencies(sys.path)
    assert {"torch", "numpy", "pydantic"} <= set(found) | set(missing)
    assert not {"oelm", "pytest", "ruff", "mypy"} & set(found)


def test_an_unrelated_package_changes_nothing(site: Site, whole: Corpus) -> None:
    install(site.own, "unrelated", {"unrelated/core.py": code("unrelated"), "stray.py": code("stray")})
    # Installed again as it is, to have a folder here.
    install(site.own, "pack00", {f"pack00/{part}.py": code(f"pack00/{part}") for part in ("__init__", "core")})
    (site.own / "pack00" / "left_behind.py").write_text(code("of no package's record"))
    after = made(site)
    assert (after.name, after.source, labels(after)) == (whole.name, whole.source, labels(whole))


def test_the_source_names_the_held_out_packages_and_what_is_not_installed(site: Site, whole: Corpus) -> None:
    add_root(site.own, "absent-package")
    val = {name for name, splits in by_package(whole).items() if splits == {"val"}}
    source = made(site).source
    assert source.startswith("Python source of 80 packages") and f"; val: {', '.join(sorted(val))}; " in source
    assert source.endswith("; not installed: absent-package")


PATHS = {
    "more/tests/a.py": "tests",
    "more/testing/long_name.py": "tests",
    "more/test_a.py": "tests",
    "more/a_test.py": "tests",
    "more/conftest.py": "tests",
    "more/_vendor/a.py": "vendored",
    "more/Vendored/b.py": "vendored",
    "more/third_party/a.py": "vendored",
    "more/generated/a.py": "generated",
    "more/_generated_ops.py": "generated",
    "more/messages_pb2.py": "generated",
    "more/contest.py": "",
    "more/latest/attestation.py": "",
    "more/regenerate.py": "",
    "../outside.py": None,
    "more/data.txt": None,
    "more/module.pyi": None,
}


def test_a_file_is_left_out_by_its_path(site: Site) -> None:
    install(site.own, "more", {path: code(path) for path in PATHS})
    add_root(site.own, "more")
    corpus = made(site)
    for path, reason in PATHS.items():
        assert (path in labels(corpus)) == (reason == ""), path
    # Texts of different lengths: each reason has exactly its own files.
    expected: dict[str, list[int]] = defaultdict(list)
    for path, reason in PATHS.items():
        if reason:
            expected[reason].append(len(code(path)))
    assert {why: (gone.files, gone.text_bytes) for why, gone in corpus.left_out.items()} == {
        reason: (len(sizes), sum(sizes)) for reason, sizes in expected.items()
    }


def test_a_file_whose_head_says_so_is_generated() -> None:
    for head in (
        "# This file was automatically generated from models/modular.py.",
        "# coding: utf-8\n#\n# DO NOT EDIT",
        '"""Tables.\n\nThis file is generated by a script.\n"""',
        "# Autogenerated by tool",
        "# Generated from Grammar.g4 by ANTLR 4",
        "# @generated",
    ):
        assert says_generated(head + "\nx = 1\n"), head


def test_a_file_that_speaks_of_generating_is_not_generated() -> None:
    for text in (
        '"""Score the text generated by a model."""\n',
        "x = 1\n" * 10 + "# generated by a script\n",
        "def generated_by(x): ...\n",
        "# Regenerate from time to time\n",
    ):
        assert not says_generated(text), text


def test_what_is_generated_blank_no_text_or_missing_is_left_out_and_counted(site: Site) -> None:
    files: dict[str, str | bytes] = {
        "more/made.py": "# auto-generated\n" + code("made"),
        "more/blank.py": " \n",
        "more/latin.py": b"x = '\xfc'\n",
        "more/deleted.py": code("deleted"),
    }
    install(site.own, "more", files)
    (site.own / "more" / "deleted.py").unlink()
    add_root(site.own, "more")
    corpus = made(site)
    assert len(corpus.parts) == 160
    assert {why: gone.files for why, gone in corpus.left_out.items()} == {
        "listed but not installed": 1,
        "generated": 1,
        "empty or not UTF-8": 2,
    }


def test_equal_texts_are_one_document_whatever_their_line_ends(site: Site) -> None:
    text = code("same")
    install(site.own, "more", {"more/a.py": text, "more/b.py": text, "more/c.py": text.replace("\n", "\r\n")})
    add_root(site.own, "more")
    corpus = made(site)
    assert labels(corpus) & {"more/a.py", "more/b.py", "more/c.py"} == {"more/a.py"}
    assert corpus.left_out["duplicate"].model_dump() == {"files": 2, "text_bytes": 2 * len(text)}


@pytest.mark.parametrize("large", [1, 3])
def test_no_package_has_more_than_a_tenth_of_the_text(site: Site, large: int) -> None:
    for number in range(large):
        install(
            site.own, f"large{number}", {f"large{number}/{part:03}.py": code(f"large{number}/{part}") for part in range(60)}
        )
    add_root(site.own, *(f"large{number}" for number in range(large)))
    corpus = made(site)
    sizes: dict[str, int] = defaultdict(int)
    for part in corpus.parts:
        sizes[part.label.split("/")[0]] += len(text_of(part))
    total = sum(sizes.values())
    assert max(sizes.values()) * 10 <= total
    for number in range(large):
        # Filled to the cap but for one file, and what is missing was counted.
        assert sizes[f"large{number}"] > total / 10 - 2 * len(code(f"large{number}/59"))
        kept = sum(label.startswith(f"large{number}/") for label in labels(corpus))
        assert corpus.left_out[f"large{number}: more than 1/10 of the text"].files == 60 - kept


def test_which_files_of_a_large_package_are_kept_does_not_depend_on_their_order() -> None:
    sizes = {"large": 300, **{f"p{number}": 20 for number in range(20)}}
    files = [source_file(f"{name}/{n}", name, Path("x"), f"{name} {n}\n") for name, size in sizes.items() for n in range(size)]
    up, down = capped(files, Tally()), capped(files[::-1], Tally())
    assert {file.label for file in up} == {file.label for file in down}
    kept = package_sizes(up)
    assert kept["large"] * 10 <= sum(kept.values()) and kept["p3"] == package_sizes(files)["p3"]


@pytest.mark.parametrize("split", ["val", "test"])
def test_a_held_out_file_that_shares_thirteen_words_with_training_is_left_out_and_counted(
    site: Site, whole: Corpus, split: str
) -> None:
    name, trained = held_out_package(whole, split), held_out_package(whole, "train")
    shared = " ".join(f"shared{number}" for number in range(13))
    own = code(f"{name}/core") + f"# {shared}\n"
    install(site.own, name, {f"{name}/__init__.py": code(f"{name}/__init__"), f"{name}/core.py": own})
    text = code(f"{trained}/core") + f"{shared.replace(' ', ', ')}\n"
    install(site.own, trained, {f"{trained}/__init__.py": code(f"{trained}/__init__"), f"{trained}/core.py": text})
    corpus = made(site)
    assert by_package(corpus)[name] == {split} and f"{name}/core.py" not in labels(corpus)
    assert {f"{name}/__init__.py", f"{trained}/core.py"} <= labels(corpus)
    assert corpus.left_out[f"{split}: 13 words shared with training"].model_dump() == {"files": 1, "text_bytes": len(own)}


def test_twelve_shared_words_are_not_too_many(site: Site, whole: Corpus) -> None:
    shared = f"# {' '.join(f'shared{number}' for number in range(12))}\n"
    for name in (held_out_package(whole, "val"), held_out_package(whole, "train")):
        install(site.own, name, {f"{name}/core.py": code(f"{name}/core") + shared})
    assert made(site).left_out == {}


def test_what_was_compared_before_is_found_again_and_made_again_where_damaged(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("oelm.data.tokens._SETTLED_S", -60.0)
    told: list[str] = []

    def corpus() -> Corpus:
        told.clear()
        return site_packages_corpus(search=site.search, min_bytes=1, tell=lambda what, done, total: told.append(what))

    comparing = "comparing held-out packages with training"
    first = corpus()
    assert comparing in told
    assert (corpus().name, corpus().left_out) == (first.name, first.left_out) and comparing not in told
    (kept,) = (tmp_path / "cache" / "computed").iterdir()
    kept.write_text('{"value": [1], "sha256": ""}')
    assert corpus().name == first.name and comparing in told


def test_the_name_is_a_digest_of_the_content(site: Site, whole: Corpus) -> None:
    before = whole.name
    assert re.fullmatch(r"site-packages-[0-9a-f]{12}", before)
    install(
        site.own, "pack07", {"pack07/core.py": code("pack07/core") + "x = 1\n", "pack07/__init__.py": code("pack07/__init__")}
    )
    assert made(site).name != before


def test_too_little_text_is_refused_with_how_much_and_what_is_missing(site: Site) -> None:
    add_root(site.own, "absent-package")
    with pytest.raises(
        DataError, match=r"site-packages: 0\.\d\d MB of Python source in 80 packages .*not installed: absent-pack"
    ) as told:
        site_packages_corpus(search=site.search)
    assert "expected at least 10 MB" in str(told.value) and "-m pip install 'accelerate>=1.1'" in str(told.value)


def test_the_name_means_the_packages_on_python_s_path(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    for path in reversed(site.search):
        monkeypatch.syspath_prepend(path)
    told: list[str] = []
    with pytest.raises(DataError, match="site-packages: .* in 80 packages"):
        Request(name="site-packages", tokenizer="bpe:300").prepare(lambda what, *_: told.append(what))
    assert "reading packages" in told
    with pytest.raises(ConfigError, match="site-packages is on this machine already; --from has no meaning for it"):
        Request(name="site-packages", folder=site.own).corpus()


def test_fewer_packages_than_the_share_allows_are_refused(tmp_path: Path) -> None:
    for name in PACKAGES[:5]:
        install(tmp_path, name, {f"{name}/core.py": code(name)})
    add_root(tmp_path)
    with pytest.raises(DataError, match=r"site-packages: 0\.00 MB of Python source in 0 packages"):
        site_packages_corpus(search=[str(tmp_path)], min_bytes=1)


def test_without_oelm_s_own_record_it_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"oelm is not installed as a package here.*pip install -e '\.\[all\]'"):
        site_packages_corpus(search=[str(tmp_path)], min_bytes=1)


def test_the_record_of_the_token_set_says_what_was_left_out_and_pins_the_text(site: Site) -> None:
    install(site.own, "more", {"more/tests/a.py": code("a"), "more/core.py": code("more")})
    add_root(site.own, "more")
    corpus = made(site)
    meta = prepare_corpus(corpus, tokenizer="bpe:300").meta
    assert meta.name == corpus.name and meta.left_out == corpus.left_out and "tests" in meta.left_out
    assert re.fullmatch("sha256:[0-9a-f]{64}", meta.revision) and set(meta.splits) == {"train", "val", "test"}
    assert sum(split.documents for split in meta.splits.values()) == len(corpus.parts)
