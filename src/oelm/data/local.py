"""Local copies of public data sets: which folder is whose, and which file of a folder is which split."""

from __future__ import annotations

import logging
import re
from pathlib import Path

from oelm.data.sets import SPELLINGS, set_called
from oelm.errors import DataError

log = logging.getLogger(__name__)
SUFFIXES = (".txt", ".tokens", ".raw", ".jsonl", ".json", ".parquet", ".tsv", ".csv")
# Longer marks before those they contain. A name says its split in a word of its own: 'wiki.valid.tokens', 'dev-matched'.
_MARKS = {
    "val_mismatched": r"(?:dev|valid|val|validation)[._-]?mismatched",
    "val": r"(?:dev|valid|val|validation)(?:[._-]?matched)?",
    "test": r"test(?:[._-]?(?:mis)?matched)?",
    "train": r"train(?:ing)?",
}
# What may lie beside the splits of a folder and is none of them.
_ABOUT = re.compile(r"(?:readme|licen[cs]e|citation|sha256sums)\b", re.IGNORECASE)
_PART = re.compile(r"(\d+)-of-(\d+)")
# 'train-more.jsonl' continues 'train.jsonl'.
_MORE = re.compile(r"-more(?=\.)")


def split_in_name(name: str) -> str | None:
    """Return which split a file's name speaks of, if it does."""
    for split, mark in _MARKS.items():
        if re.search(rf"(?:^|[^a-z]){mark}(?:[^a-z]|$)", name.lower()):
            return split
    return None


def set_folder(name: str, folder: Path) -> Path:
    """Return where a named set's files are: the folder given, or one inside it that is called as the set usually is.

    Raises DataError when it holds folders of other sets and none, or more than one, of this one.
    """
    _check_is_folder(folder)
    # By the name it was given under, or, of '.' and the like, its own.
    called = {set_called(folder.name), set_called(folder.resolve().name)}
    if name in called or any(_is_split(path) for path in folder.iterdir()):
        return folder
    inside = folders_of_sets(folder)
    if len(own := inside.get(name, [])) == 1:
        return own[0]
    if own:
        names = ", ".join(path.name for path in own)
        raise DataError(f"--from {folder}: more than one folder is called as {name} is ({names}); give the one that is meant")
    if inside:
        looked_for = " or ".join(map(repr, SPELLINGS[name]))
        raise DataError(
            f"--from {folder}: it holds folders of {', '.join(sorted(inside))} and none of {name} (looked for {looked_for}, "
            "whatever its capitals, dots and hyphens): bring the files there, or give their own folder"
        )
    return folder


def folders_of_sets(folder: Path) -> dict[str, list[Path]]:
    """Return the folders inside this one that are called as named sets usually are, by the set's name."""
    found: dict[str, list[Path]] = {}
    for path in sorted(folder.iterdir()):
        if path.is_dir() and (name := set_called(path.name)):
            found.setdefault(name, []).append(path)
    return found


def _is_split(path: Path) -> bool:
    return path.is_file() and path.suffix.lower() in SUFFIXES and split_in_name(path.name) is not None


def _check_is_folder(folder: Path) -> None:
    if not folder.is_dir():
        raise DataError(f"--from {folder}: no such folder; give the folder that holds the files of the data set")


def find_splits(folder: Path, *, wanted: tuple[str, ...], only: str = "", whole: str = "") -> dict[str, list[Path]]:
    """Return the files of each wanted split under a folder; several only where they are parts of one.

    Parts are numbered, or the second is called '-more' and comes last. `only` keeps to files whose name holds this word
    (a language, say) where any does. A file that names no split and holds the word `whole` counts as training text.
    Raises DataError when two files claim to be the same split.
    """
    _check_is_folder(folder)
    files = sorted(
        path for path in folder.rglob("*") if path.is_file() and path.suffix.lower() in SUFFIXES and not _hidden(path, folder)
    )
    found: dict[str, list[Path]] = {}
    for path in files:
        # A file in a folder per configuration ('en/train-00000-of-00001.parquet') counts by its own name only.
        split = split_in_name(path.name) or ("train" if whole and _has_word(path.stem, whole) else None)
        if split in wanted and split is not None:
            found.setdefault(split, []).append(path)
    for split, paths in found.items():
        found[split] = sorted(_narrowed(paths, only), key=lambda path: (_MORE.search(path.name) is not None, path))
        _check_one_copy(folder, split, found[split])
    return found


def own_splits(folder: Path, files: list[Path]) -> dict[Path, str]:
    """Return which split each file of a user's own folder is, or nothing where not every one of them says so.

    One file of another name, or in a folder below, and it is a folder of text like any other; a README may lie beside.
    There must be training text, and something to validate or test on.
    """
    here = [path for path in files if not (_ABOUT.match(path.name) and path.parent == folder)]
    found = {
        path: split
        for path in here
        if path.parent == folder and path.suffix.lower() in SUFFIXES
        for split in [split_in_name(path.name)]
        if split in ("train", "val", "test")
    }
    if "train" not in found.values() or len(set(found.values())) < 2:
        return {}
    if others := [path for path in here if path not in found]:
        # Whoever has a test file there should hear that it is trained on.
        names = ", ".join(path.name for path in found)
        log.warning("%s: %s are not taken as splits, for %s lies beside them: all is one text", folder, names, others[0].name)
        return {}
    return found


def _narrowed(paths: list[Path], only: str) -> list[Path]:
    speaking = [path for path in paths if only and (_has_word(path.stem, only) or path.parent.name == only)]
    return speaking or paths


def _has_word(stem: str, word: str) -> bool:
    return re.search(rf"(?:^|[^a-z]){re.escape(word)}(?:[^a-z]|$)", stem.lower()) is not None


def _check_one_copy(folder: Path, split: str, paths: list[Path]) -> None:
    copies = {(path.parent, _MORE.sub("", _PART.sub("", path.name))) for path in paths}
    if len(copies) > 1:
        names = ", ".join(str(path.relative_to(folder)) for path in paths[:4])
        raise DataError(f"--from {folder}: more than one file says it is the {split} split ({names}); leave one of them there")
    parts = [found for path in paths if (found := _PART.search(path.name))]
    if parts and (missing := set(range(int(parts[0][2]))) - {int(part[1]) for part in parts}):
        raise DataError(f"--from {folder}: part {min(missing)} of the {split} split's {int(parts[0][2])} is missing; fetch it")


def _hidden(path: Path, root: Path) -> bool:
    return any(part.startswith(".") for part in path.relative_to(root).parts)
