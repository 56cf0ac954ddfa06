"""Local copies of public data sets: which file of a folder is which split."""

from __future__ import annotations

import re
from pathlib import Path

from oelm.errors import DataError

SUFFIXES = (".txt", ".tokens", ".raw", ".jsonl", ".json", ".parquet", ".tsv", ".csv")
# Longer marks before those they contain. A name says its split in a word of its own: 'wiki.valid.tokens', 'dev-matched'.
_MARKS = {
    "val_mismatched": r"(?:dev|valid|val|validation)[._-]?mismatched",
    "val": r"(?:dev|valid|val|validation)(?:[._-]?matched)?",
    "test": r"test(?:[._-]?(?:mis)?matched)?",
    "train": r"train(?:ing)?",
}
_PART = re.compile(r"(\d+)-of-(\d+)")


def split_in_name(name: str) -> str | None:
    """Return which split a file's name speaks of, if it does."""
    for split, mark in _MARKS.items():
        if re.search(rf"(?:^|[^a-z]){mark}(?:[^a-z]|$)", name.lower()):
            return split
    return None


def find_splits(folder: Path, *, wanted: tuple[str, ...], only: str = "") -> dict[str, list[Path]]:
    """Return the files of each wanted split under a folder; several only where they are numbered parts of one.

    `only` keeps to files whose name holds this word (a language, say) where any does. Raises DataError when there is no
    training file, or when two files claim to be the same split.
    """
    if not folder.is_dir():
        raise DataError(f"--from {folder}: no such folder; give the folder that holds the files of the data set")
    files = sorted(
        path for path in folder.rglob("*") if path.is_file() and path.suffix.lower() in SUFFIXES and not _hidden(path, folder)
    )
    found: dict[str, list[Path]] = {}
    for path in files:
        # A file in a folder per configuration ('en/train-00000-of-00001.parquet') counts by its own name only.
        if (split := split_in_name(path.name)) in wanted and split is not None:
            found.setdefault(split, []).append(path)
    for split, paths in found.items():
        found[split] = _narrowed(paths, only)
        _check_one_copy(folder, split, found[split])
    return found


def _narrowed(paths: list[Path], only: str) -> list[Path]:
    word = re.compile(rf"(?:^|[^a-z]){re.escape(only)}(?:[^a-z]|$)")
    speaking = [path for path in paths if only and (word.search(path.stem.lower()) or path.parent.name == only)]
    return speaking or paths


def _check_one_copy(folder: Path, split: str, paths: list[Path]) -> None:
    copies = {(path.parent, _PART.sub("", path.name)) for path in paths}
    if len(copies) > 1:
        names = ", ".join(str(path.relative_to(folder)) for path in paths[:4])
        raise DataError(f"--from {folder}: more than one file says it is the {split} split ({names}); leave one of them there")
    parts = [found for path in paths if (found := _PART.search(path.name))]
    if parts and (missing := set(range(int(parts[0][2]))) - {int(part[1]) for part in parts}):
        raise DataError(f"--from {folder}: part {min(missing)} of the {split} split's {int(parts[0][2])} is missing; fetch it")


def _hidden(path: Path, root: Path) -> bool:
    return any(part.startswith(".") for part in path.relative_to(root).parts)
