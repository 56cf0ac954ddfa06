"""Python source as a corpus: the standard library, and the packages that oelm[all] depends on."""

from __future__ import annotations

import hashlib
import platform
import re
import sys
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import Distribution, PackagePath, distributions
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from oelm.data.readers import Piece, pieces
from oelm.data.sources import Corpus, Part
from oelm.data.survey import VALIDATION_SHARE
from oelm.data.tokens import LeftOut, Split, computed_once
from oelm.errors import DataError, install_command, needing

# Tests repeat themselves, encodings are near-duplicate tables; _sysconfigdata and config-* differ by machine.
_LEFT_OUT = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__", "encodings", "lib-dynload"}


@dataclass(frozen=True)
class SourceFile:
    """A file of Python source: its name in the corpus, its package, and size and digest of its text."""

    label: str
    package: str
    path: Path
    size_bytes: int
    digest: bytes


def source_file(label: str, package: str, path: Path, text: str) -> SourceFile:
    """Describe a file whose text was read."""
    encoded = text.encode()
    return SourceFile(label, package, path, len(encoded), hashlib.sha256(encoded).digest())


def python_text(path: Path) -> str | None:
    """Return a file's text with bare newlines; None when it is not UTF-8, holds a zero byte or is blank."""
    try:
        text = path.read_bytes().decode().replace("\r\n", "\n")
    except UnicodeDecodeError:
        return None
    except OSError as problem:
        raise DataError(f"{path}: cannot be read ({problem.strerror}); fix its permissions or leave it out") from None
    return text if text.strip() and "\0" not in text else None


def package_sizes(files: Iterable[SourceFile]) -> dict[str, int]:
    """Return how many bytes of text each package has."""
    sizes: dict[str, int] = {}
    for file in files:
        sizes[file.package] = sizes.get(file.package, 0) + file.size_bytes
    return sizes


def held_out_packages(sizes: Mapping[str, int], *, wanted_bytes: float) -> set[str]:
    """Choose whole packages, by the hash of their names, that together hold about `wanted_bytes`.

    A package that would raise the sum above twice that is not chosen; if that excludes all, the smallest is.
    """
    chosen: set[str] = set()
    held = 0
    for name in sorted(sizes, key=lambda name: hashlib.sha256(name.encode()).digest()):
        if held < wanted_bytes and held + sizes[name] <= 2 * wanted_bytes:
            chosen.add(name)
            held += sizes[name]
    return chosen or {min(sizes, key=lambda name: (sizes[name], name))}


def python_corpus(
    name: str,
    source: str,
    files: Iterable[SourceFile],
    splits: Mapping[str, Split],
    left_out: Mapping[str, LeftOut] | None = None,
) -> Corpus:
    """Return the corpus of these files in order; `splits` has the packages that are not training text."""
    parts = (Part(file.label, splits.get(file.package, "train"), partial(_verbatim, file.path), file.path) for file in files)
    return Corpus(name, source, tuple(parts), left_out=dict(left_out or {}))


def _verbatim(path: Path) -> Iterator[Piece]:
    text = python_text(path)
    if text is None:
        raise DataError(f"{path}: the file changed while the corpus was read; repeat the command")
    return pieces([text, None], tidy=False)


def stdlib_corpus() -> Corpus:
    """Return the source text of the running Python's standard library, split by top-level package."""
    root = Path(sysconfig.get_path("stdlib"))
    files: list[SourceFile] = []
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).parts
        if _LEFT_OUT.intersection(parts) or path.name.startswith("_sysconfigdata") or parts[0].startswith("config-"):
            continue
        if (text := python_text(path)) is not None:
            label = "/".join(parts)
            files.append(source_file(label, package_of(label), path, text))
    if not files:
        raise DataError(f"no standard-library source under {root}: this Python ships none; give your own text with --text PATH")
    sizes = package_sizes(files)
    held_out = held_out_packages(sizes, wanted_bytes=VALIDATION_SHARE * sum(sizes.values()))
    version = platform.python_version()
    source = f"source text of CPython {version}'s standard library"
    return python_corpus(f"stdlib-{version}", source, files, dict.fromkeys(held_out, "val"))


def package_of(name: str) -> str:
    """Return the top-level package or module of a standard-library file."""
    return name.split("/")[0].removesuffix(".py")


Key = TypeVar("Key")
_WORD = re.compile(r"\w+")
# Odd, so that no power of it loses bits modulo 2**64.
_FACTOR = np.uint64(0x9E3779B97F4A7C15)
_Hashes = NDArray[np.uint64]


def sharing(held_out: Iterable[tuple[Key, str]], training: Iterable[str], *, words: int) -> set[Key]:
    """Return the keys of the held-out texts that share `words` successive words with any training text.

    A word is a run of letters, digits and underscores. Runs are compared by a 64-bit hash: a wrong match has a probability
    of about 1 in 10**6 for a million held-out and 10**7 training words.
    """
    ids: dict[str, int] = {}
    runs = {key: _runs([ids.setdefault(word, len(ids) + 1) for word in _WORD.findall(text)], words) for key, text in held_out}
    known = np.unique(np.concatenate([*runs.values(), np.zeros(0, dtype=np.uint64)]))
    if not len(known):
        return set()
    is_shared = np.zeros(len(known), dtype=np.bool_)
    for text in training:
        # Other words are 0, so that the table of words does not grow.
        found = _runs([ids.get(word, 0) for word in _WORD.findall(text)], words)
        at = np.minimum(np.searchsorted(known, found), len(known) - 1)
        is_shared[at[known[at] == found]] = True
    shared = known[is_shared]
    return {key for key, hashes in runs.items() if np.isin(hashes, shared).any()}


def _runs(ids: list[int], words: int) -> _Hashes:
    """Return the hash of every run of `words` ids: a polynomial in them, modulo 2**64."""
    numbers: NDArray[Any] = np.asarray(ids, dtype=np.uint64)
    count = max(0, len(numbers) - words + 1)
    hashes = np.zeros(count, dtype=np.uint64)
    for offset in range(words):
        hashes = hashes * _FACTOR + numbers[offset : offset + count]
    return hashes


ROOT, EXTRA = "oelm", "all"
# No package has more than one part in so many of the text.
LARGEST_SHARE = 10
HELD_OUT_SHARE = 0.03
SHARED_WORDS = 13
# Below this, a model of the smallest budget sees the text many times over.
MIN_BYTES = 10_000_000
# Part of the cache key: another rule must not find the old answer.
_RULES = f"{SHARED_WORDS} words, 1"
_TESTS = {"test", "tests", "_test", "_tests", "testing"}
_VENDORED = {"third_party", "thirdparty", "extern", "externals", "_extern"}
_HEAD_LINES = 10
_SAYS_GENERATED = re.compile(
    r"auto-?generated|automatically (?:generated|written|created)|@generated|\bdo not (?:edit|modify)"
    r"|(?:file|code|module) (?:is|was|has been) generated",
    re.IGNORECASE,
)
# Only in comments: in a docstring it may describe what the code generates.
_COMMENT_SAYS_GENERATED = re.compile(r"^\s*#.*\bgenerated (?:by|from|with|using)\b", re.IGNORECASE)
# Called with the current work, and how many of how many bytes are done (0: unknown).
Tell = Callable[[str, int, int], None]


@dataclass
class Tally:
    """Counts left-out files by reason."""

    reasons: dict[str, LeftOut] = field(default_factory=dict)

    def add(self, reason: str, size_bytes: int) -> None:
        before = self.reasons.get(reason, LeftOut(files=0, text_bytes=0))
        self.reasons[reason] = LeftOut(files=before.files + 1, text_bytes=before.text_bytes + size_bytes)


def site_packages_corpus(
    *, search: list[str] | None = None, min_bytes: int = MIN_BYTES, tell: Tell = lambda what, done, total: None
) -> Corpus:
    """Return the source text of the installed packages that oelm[all] depends on, directly or not, split by package.

    `search` is where packages are looked for, by default the running Python's path. Raises DataError when oelm is not
    installed there, or when less than `min_bytes` of text is left.
    """
    found, missing = dependencies(sys.path if search is None else search)
    tally = Tally()
    files = capped(_collected(found, tally, tell), tally)
    splits = _splits(files)
    files = _without_shared(files, splits, tally, tell)
    # Again, because the text is smaller now.
    files = capped(files, tally)
    _check_enough(files, splits, missing, min_bytes)
    # By digest, so that the beginning of the corpus is a sample of all packages.
    files = sorted(files, key=lambda file: file.digest)
    digest = hashlib.sha256(b"".join(_split_of(file, splits).encode() + file.digest for file in files)).hexdigest()
    name = f"site-packages-{digest[:12]}"
    return python_corpus(name, _source(files, splits, missing), files, splits, tally.reasons)


def dependencies(search: list[str]) -> tuple[dict[str, Distribution], list[str]]:
    """Return the installed distributions that oelm[all] depends on, without oelm; and the missing names."""
    with needing("packaging", EXTRA):
        from packaging.requirements import InvalidRequirement, Requirement
        from packaging.utils import canonicalize_name
    found: dict[str, Distribution] = {}
    missing: set[str] = set()
    seen: set[tuple[str, frozenset[str]]] = set()
    waiting = [(ROOT, frozenset({EXTRA}))]
    while waiting:
        if (asked := waiting.pop()) in seen:
            continue
        seen.add(asked)
        name, extras = asked
        distribution = next(iter(distributions(name=name, path=search)), None)
        if distribution is None:
            missing.add(name)
            continue
        found[name] = distribution
        for line in distribution.requires or ():
            try:
                wanted = Requirement(line)
            except InvalidRequirement as problem:
                raise DataError(f"the installed package {name} requires {line!r}: {problem}; reinstall it") from None
            if wanted.marker is None or any(wanted.marker.evaluate({"extra": extra}) for extra in {"", *extras}):
                waiting.append((canonicalize_name(wanted.name), frozenset(wanted.extras)))
    if found.pop(ROOT, None) is None:
        raise DataError(
            f"{ROOT} is not installed as a package here, so its dependencies are unknown: "
            f"in its folder, pip install -e '.[{EXTRA}]'"
        )
    return found, sorted(missing)


def _collected(found: dict[str, Distribution], tally: Tally, tell: Tell) -> list[SourceFile]:
    """Return the source files of all distributions, each text once."""
    kept: dict[bytes, SourceFile] = {}
    done = 0
    for package, distribution in sorted(found.items()):
        tell("reading packages", done, 0)
        for listed in sorted(distribution.files or (), key=str):
            # Files outside, for example in bin/, are generated by the installer.
            if listed.suffix != ".py" or listed.is_absolute() or ".." in listed.parts:
                continue
            path = Path(str(distribution.locate_file(listed)))
            if not path.is_file():
                tally.add("listed but not installed", 0)
            elif reason := _reason_in_path(listed):
                tally.add(reason, path.stat().st_size)
            elif (text := python_text(path)) is None:
                tally.add("empty or not UTF-8", path.stat().st_size)
            else:
                file = source_file(str(listed), package, path, text)
                done += file.size_bytes
                if says_generated(text):
                    tally.add("generated", file.size_bytes)
                elif kept.setdefault(file.digest, file) is not file:
                    tally.add("duplicate", file.size_bytes)
    return list(kept.values())


def _reason_in_path(path: PackagePath) -> str:
    """Return why a file of this name is left out, "" to keep it."""
    folders = {part.lower() for part in path.parts[:-1]}
    stem = path.stem.lower()
    if folders & _TESTS or stem.startswith("test_") or stem.endswith("_test") or stem == "conftest":
        return "tests"
    if folders & _VENDORED or any("vendor" in folder for folder in folders):
        return "vendored"
    if any("generated" in part for part in (*folders, stem)) or stem.endswith(("_pb2", "_pb2_grpc")):
        return "generated"
    return ""


def says_generated(text: str) -> bool:
    """Whether one of the first lines says that a program wrote the file."""
    lines = text.split("\n", _HEAD_LINES)[:_HEAD_LINES]
    return any(_SAYS_GENERATED.search(line) or _COMMENT_SAYS_GENERATED.search(line) for line in lines)


def capped(files: list[SourceFile], tally: Tally) -> list[SourceFile]:
    """Return files of which no package has more than 1/LARGEST_SHARE of the text.

    Of a larger package, files are taken in the order of their digests while they fit.
    """
    while (sizes := package_sizes(files)) and max(sizes.values()) * LARGEST_SHARE > sum(sizes.values()):
        cap = _cap(sizes)
        used = dict.fromkeys(sizes, 0)
        kept: list[SourceFile] = []
        for file in sorted(files, key=lambda file: file.digest):
            if used[file.package] + file.size_bytes <= cap:
                used[file.package] += file.size_bytes
                kept.append(file)
            else:
                tally.add(f"{file.package}: more than 1/{LARGEST_SHARE} of the text", file.size_bytes)
        files = kept
    return files


def _cap(sizes: dict[str, int]) -> int:
    """Return the size that is 1/LARGEST_SHARE of the text once every larger package is cut down to it."""
    rest = sum(sizes.values())
    for larger, size in enumerate(sorted(sizes.values(), reverse=True)):
        cap = rest // (LARGEST_SHARE - larger)
        if size <= cap:
            return cap
        rest -= size
    return 0


def _splits(files: list[SourceFile]) -> dict[str, Split]:
    """Return the packages held out for validation and test: at least two each, where they are small enough."""
    sizes = package_sizes(files)
    wanted = HELD_OUT_SHARE * sum(sizes.values())
    splits: dict[str, Split] = {}
    names: tuple[Split, Split] = ("val", "test")
    for split in names:
        left = {package: size for package, size in sizes.items() if package not in splits}
        small = {package: size for package, size in left.items() if size <= wanted / 2}
        if small or left:
            splits |= dict.fromkeys(held_out_packages(small or left, wanted_bytes=wanted), split)
    return splits


def _split_of(file: SourceFile, splits: dict[str, Split]) -> Split:
    return splits.get(file.package, "train")


def _without_shared(files: list[SourceFile], splits: dict[str, Split], tally: Tally, tell: Tell) -> list[SourceFile]:
    """Leave out the held-out files that share SHARED_WORDS successive words with a training file."""
    state = hashlib.sha256(_RULES.encode())
    for file in sorted(files, key=lambda file: file.digest):
        state.update(_split_of(file, splits).encode() + file.digest)
    # The comparison takes most of the time, and every run needs its result.
    how, paths = f"shared words {state.hexdigest()}", [file.path for file in files]
    shared = computed_once(how, paths, lambda: sorted(digest.hex() for digest in _shared(files, splits, tell)))
    kept: list[SourceFile] = []
    for file in files:
        if file.package in splits and file.digest.hex() in shared:
            tally.add(f"{splits[file.package]}: {SHARED_WORDS} words shared with training", file.size_bytes)
        else:
            kept.append(file)
    return kept


def _shared(files: list[SourceFile], splits: dict[str, Split], tell: Tell) -> set[bytes]:
    held_out = [file for file in files if file.package in splits]
    training = [file for file in files if file.package not in splits]
    total = sum(file.size_bytes for file in training)

    def training_texts() -> Iterator[str]:
        done = 0
        for file in training:
            tell("comparing held-out packages with training", done, total)
            yield python_text(file.path) or ""
            done += file.size_bytes

    texts = ((file.digest, python_text(file.path) or "") for file in held_out)
    return sharing(texts, training_texts(), words=SHARED_WORDS)


def _check_enough(files: list[SourceFile], splits: dict[str, Split], missing: list[str], min_bytes: int) -> None:
    size, packages = sum(file.size_bytes for file in files), len(package_sizes(files))
    ways_out = f"install all of it ({install_command(EXTRA)}), or choose another corpus of `oelm data list`"
    without = f" (not installed: {', '.join(missing)})" if missing else ""
    if size < min_bytes:
        raise DataError(
            f"site-packages: {size / 1e6:.2f} MB of Python source in {packages} packages that {ROOT}[{EXTRA}] depends on"
            f"{without}, expected at least {min_bytes / 1e6:g} MB: {ways_out}"
        )
    if absent := {"train", "val"} - {_split_of(file, splits) for file in files}:
        raise DataError(
            f"site-packages: nothing is left for the {min(absent)} split of {packages} packages that {ROOT}[{EXTRA}] depends "
            f"on{without}: {ways_out}"
        )


def _source(files: list[SourceFile], splits: dict[str, Split], missing: list[str]) -> str:
    packages = package_sizes(files)
    parts = [f"Python source of {len(packages)} packages that {ROOT}[{EXTRA}] depends on"]
    for split in ("val", "test"):
        parts.append(f"{split}: {', '.join(sorted(name for name in packages if splits.get(name) == split)) or 'none'}")
    return "; ".join([*parts, *([f"not installed: {', '.join(missing)}"] if missing else [])])
