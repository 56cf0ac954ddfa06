"""Python source text as a corpus: a document is a file, and whole packages are held out."""

from __future__ import annotations

import hashlib
import platform
import sysconfig
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from oelm.data.corpora import VALIDATION_SHARE, Corpus, Part
from oelm.data.pieces import Piece, pieces
from oelm.data.tokens import LeftOut, Split
from oelm.errors import DataError

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


def source_text(path: Path) -> str | None:
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
    text = source_text(path)
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
        if (text := source_text(path)) is not None:
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
