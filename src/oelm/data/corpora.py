"""Corpora: the standard library that every Python carries, and the user's own text, as documents in two splits."""

from __future__ import annotations

import hashlib
import logging
import platform
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from oelm.data.tokenizer import END_OF_TEXT
from oelm.data.tokens import SPLITS, Split
from oelm.errors import DataError

log = logging.getLogger(__name__)
VALIDATION_SHARE = 0.05
# Tests repeat themselves, encodings are near-duplicate tables; _sysconfigdata and config-* differ by machine.
_LEFT_OUT = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__", "encodings", "lib-dynload"}


@dataclass(frozen=True)
class Document:
    """One text and the split it belongs to."""

    split: Split
    text: str


@dataclass(frozen=True)
class Corpus:
    """Named documents, in a fixed order. `source` says in a line where they come from."""

    name: str
    source: str
    documents: tuple[Document, ...]

    def texts(self, split: Split) -> Iterator[str]:
        return (document.text for document in self.documents if document.split == split)

    def fingerprint(self) -> str:
        """A digest of every document, its split and their order."""
        state = hashlib.sha256(self.name.encode())
        for document in self.documents:
            state.update(f"\0{document.split}\0{len(document.text)}\0".encode())
            state.update(document.text.encode())
        return state.hexdigest()


def stdlib_corpus() -> Corpus:
    """Return the source text of the running Python's standard library, split by top-level package."""
    root = Path(sysconfig.get_path("stdlib"))
    by_path: dict[str, str] = {}
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).parts
        if _LEFT_OUT.intersection(parts) or path.name.startswith("_sysconfigdata") or parts[0].startswith("config-"):
            continue
        text = _read_utf8(path)
        if text and text.strip():
            by_path["/".join(parts)] = text
    if not by_path:
        raise DataError(f"no standard-library source under {root}: this Python ships none; give your own with --text PATH")
    name = f"stdlib-{platform.python_version()}"
    return _split_by_group(
        name, f"source text of CPython {platform.python_version()}'s standard library", by_path, group=_package
    )


def read_documents(path: Path) -> dict[str, str]:
    """Return the documents of a text file, or of every text file of a folder, by name; a file may hold several."""
    if not path.exists():
        raise DataError(f"--text {path}: no such file or folder; give a UTF-8 text file, or a folder of them")
    files = [path] if path.is_file() else sorted(p for p in path.rglob("*") if p.is_file() and not _is_hidden(p, path))
    by_name: dict[str, str] = {}
    left_out: list[str] = []
    for file in files:
        text = _read_utf8(file)
        if text is None:
            if path.is_file():
                raise DataError(f"--text {path}: not UTF-8 text; unpack or convert it first (for example with iconv)")
            left_out.append(file.name)
            continue
        for number, part in enumerate(text.split(END_OF_TEXT)):
            if part.strip():
                by_name[f"{file.relative_to(path.parent)}#{number}"] = part.strip("\n") + "\n"
    if not by_name:
        raise DataError(f"--text {path}: no text in it ({len(files)} files looked at); give UTF-8 text that is not empty")
    if left_out:
        names = ", ".join(left_out[:5]) + (", ..." if len(left_out) > 5 else "")
        log.warning("%s: left out %d of %d files, which are not UTF-8 text (%s)", path, len(left_out), len(files), names)
    return by_name


def text_corpus(path: Path) -> Corpus:
    """Return the documents of a text file or folder as a corpus; a single one is cut in two."""
    by_name = read_documents(path)
    if len(by_name) == 1:
        by_name = _cut_single(next(iter(by_name.values())), path)
        documents = tuple(Document(split, by_name[split]) for split in SPLITS)
        return Corpus(_plain_name(path), f"local text '{path.name}'", documents)
    return _split_by_group(_plain_name(path), f"local text '{path.name}'", by_name, group=lambda name: name)


def _cut_single(text: str, path: Path) -> dict[str, str]:
    cut = text.rfind("\n", 0, int(len(text) * (1 - VALIDATION_SHARE))) + 1
    cut = cut or int(len(text) * (1 - VALIDATION_SHARE))
    parts = {"train": text[:cut], "val": text[cut:]}
    if not all(part.strip() for part in parts.values()):
        raise DataError(f"--text {path}: {len(text)} characters are too few to keep some for validation; give more text")
    return parts


def _package(name: str) -> str:
    return name.split("/")[0].removesuffix(".py")


def _split_by_group(name: str, source: str, texts: dict[str, str], *, group: Callable[[str], str]) -> Corpus:
    sizes: dict[str, int] = {}
    for path, text in texts.items():
        sizes[group(path)] = sizes.get(group(path), 0) + len(text.encode())
    held_out = validation_groups(sizes)
    documents = tuple(Document("val" if group(path) in held_out else "train", text) for path, text in texts.items())
    return Corpus(name, source, documents)


def validation_groups(sizes: dict[str, int]) -> set[str]:
    """Choose whole groups, by the hash of their names, that together hold about VALIDATION_SHARE of the bytes.

    A group that would overshoot twice that share stays in training; where all would, the smallest is chosen.
    """
    wanted = VALIDATION_SHARE * sum(sizes.values())
    chosen: set[str] = set()
    held = 0
    for name in sorted(sizes, key=lambda name: hashlib.sha256(name.encode()).digest()):
        if held < wanted and held + sizes[name] <= 2 * wanted:
            chosen.add(name)
            held += sizes[name]
    return chosen or {min(sizes, key=lambda name: (sizes[name], name))}


def _read_utf8(path: Path) -> str | None:
    try:
        text = path.read_bytes().decode("utf-8")
    except UnicodeDecodeError:
        return None
    except OSError as problem:
        raise DataError(f"{path}: cannot be read ({problem.strerror}); mend its permissions or leave it out") from None
    return None if "\0" in text else text.replace("\r\n", "\n")


def _is_hidden(path: Path, root: Path) -> bool:
    return any(part.startswith(".") for part in path.relative_to(root).parts)


def _plain_name(path: Path) -> str:
    name = "".join(c if c.isascii() and (c.isalnum() or c in "._-") else "-" for c in path.resolve().name)
    return f"text-{name}"[:48]
