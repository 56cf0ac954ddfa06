"""The Python source of the packages that oelm[all] depends on: a code corpus wherever oelm is installed."""

from __future__ import annotations

import hashlib
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib.metadata import Distribution, PackagePath, distributions
from pathlib import Path

from oelm.data.corpora import Corpus
from oelm.data.overlap import sharing
from oelm.data.python_source import SourceFile, held_out_packages, package_sizes, python_corpus, source_file, source_text
from oelm.data.tokens import LeftOut, Split
from oelm.errors import DataError, MissingExtraError
from oelm.files import cache_root, read_json, write_json

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
    try:
        from packaging.requirements import InvalidRequirement, Requirement
        from packaging.utils import canonicalize_name
    except ImportError:
        raise MissingExtraError("packaging", EXTRA) from None
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
            f"{ROOT} is not installed as a package here, so its dependencies are unknown: pip install '{ROOT}[{EXTRA}]'"
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
            elif (text := source_text(path)) is None:
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
    known = cache_root() / "site-packages" / f"{state.hexdigest()}.json"
    shared = _read_shared(known)
    if shared is None:
        shared = sorted(digest.hex() for digest in _shared(files, splits, tell))
        write_json(known, {"shared": shared})
    kept: list[SourceFile] = []
    for file in files:
        if file.package in splits and file.digest.hex() in shared:
            tally.add(f"{splits[file.package]}: {SHARED_WORDS} words shared with training", file.size_bytes)
        else:
            kept.append(file)
    return kept


def _read_shared(path: Path) -> list[str] | None:
    """Return the cached digests; None where the file is missing or damaged."""
    try:
        shared = read_json(path)["shared"]
    except (DataError, KeyError, TypeError):
        return None
    return shared if isinstance(shared, list) and all(isinstance(digest, str) for digest in shared) else None


def _shared(files: list[SourceFile], splits: dict[str, Split], tell: Tell) -> set[bytes]:
    held_out = [file for file in files if file.package in splits]
    training = [file for file in files if file.package not in splits]
    total = sum(file.size_bytes for file in training)

    def training_texts() -> Iterator[str]:
        done = 0
        for file in training:
            tell("comparing held-out packages with training", done, total)
            yield source_text(file.path) or ""
            done += file.size_bytes

    texts = ((file.digest, source_text(file.path) or "") for file in held_out)
    return sharing(texts, training_texts(), words=SHARED_WORDS)


def _check_enough(files: list[SourceFile], splits: dict[str, Split], missing: list[str], min_bytes: int) -> None:
    size, packages = sum(file.size_bytes for file in files), len(package_sizes(files))
    ways_out = f"install all of it (pip install '{ROOT}[{EXTRA}]'), or choose another corpus of `oelm data list`"
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
