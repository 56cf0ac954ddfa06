"""Local copies of public data sets: which folder holds which set, and which file which split."""

from __future__ import annotations

import logging
import re
from pathlib import Path

from oelm.data.sets import SPELLINGS, set_called
from oelm.errors import DataError

log = logging.getLogger(__name__)
SUFFIXES = (".txt", ".tokens", ".raw", ".jsonl", ".json", ".parquet", ".tsv", ".csv")
# Longer marks before those they contain. A mark is a whole word of the name: 'wiki.valid.tokens', 'dev-matched'.
_MARKS = {
    "val_mismatched": r"(?:dev|valid|val|validation)[._-]?mismatched",
    "val": r"(?:dev|valid|val|validation)(?:[._-]?matched)?",
    "test": r"test(?:[._-]?(?:mis)?matched)?",
    "train": r"train(?:ing)?",
}
# Files next to the splits that are not data.
_ABOUT = re.compile(r"(?:readme|licen[cs]e|citation|sha256sums)\b", re.IGNORECASE)
_PART = re.compile(r"(\d+)-of-(\d+)")
# 'train-more.jsonl' continues 'train.jsonl'.
_MORE = re.compile(r"-more(?=\.)")


def split_in_name(name: str) -> str | None:
    """Return the split that a file's name contains, if any."""
    for split, mark in _MARKS.items():
        if re.search(rf"(?:^|[^a-z]){mark}(?:[^a-z]|$)", name.lower()):
            return split
    return None


def set_folder(name: str, folder: Path) -> Path:
    """Return where a named set's files are: the folder given, or one inside it with a usual name of the set.

    Raises DataError when it holds folders of other sets but none of this one, or more than one.
    """
    _check_is_folder(folder)
    # The given name, and the real one for '.' or a link.
    called = {set_called(folder.name), set_called(folder.resolve().name)}
    if name in called or any(_is_split(path) for path in folder.iterdir()):
        return folder
    inside = folders_of_sets(folder)
    if len(own := inside.get(name, [])) == 1:
        return own[0]
    if own:
        names = ", ".join(path.name for path in own)
        raise DataError(f"--from {folder}: more than one folder is named like {name} ({names}); give one of them")
    if inside:
        looked_for = " or ".join(map(repr, SPELLINGS[name]))
        raise DataError(
            f"--from {folder}: it holds folders of {', '.join(sorted(inside))} but none of {name} (looked for {looked_for}, "
            "in any case, with any dots and hyphens): put the files there, or give their folder"
        )
    return folder


def folders_of_sets(folder: Path) -> dict[str, list[Path]]:
    """Return the folders inside this one that have a usual name of a set, by set."""
    found: dict[str, list[Path]] = {}
    for path in sorted(folder.iterdir()):
        if path.is_dir() and (name := set_called(path.name)):
            found.setdefault(name, []).append(path)
    return found


def neighbour_splits(folder: Path, name: str, *, wanted: tuple[str, ...]) -> dict[str, list[Path]]:
    """Return these splits of another set whose folder is inside this one, if there is exactly one."""
    found = folders_of_sets(folder).get(name, [])
    return find_splits(found[0], wanted=wanted) if len(found) == 1 else {}


def short_path(path: Path, folder: Path) -> str:
    """Return a path relative to the folder; a file of another set with its own folder's name."""
    return str(path.relative_to(folder)) if path.is_relative_to(folder) else f"{path.parent.name}/{path.name}"


def visible_files(folder: Path) -> list[Path]:
    """Return all files under a folder in order, without hidden ones."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return [path for path in files if not any(part.startswith(".") for part in path.relative_to(folder).parts)]


def plain_name(name: str) -> str:
    """Return a name with every unusual character replaced by '-'."""
    return "".join(c if c.isascii() and (c.isalnum() or c in "._-") else "-" for c in name)


def _is_split(path: Path) -> bool:
    return path.is_file() and path.suffix.lower() in SUFFIXES and split_in_name(path.name) is not None


def _check_is_folder(folder: Path) -> None:
    if not folder.is_dir():
        raise DataError(f"--from {folder}: no such folder; give the folder that holds the files of the data set")


def find_splits(folder: Path, *, wanted: tuple[str, ...], only: str = "", whole: str = "") -> dict[str, list[Path]]:
    """Return the files of each wanted split under a folder; several only where they are parts of one.

    Parts are numbered, or the second is named '-more' and comes last. With `only`, files whose name contains this word (a
    language, for example) are preferred. A file without a split in its name that contains `whole` is training text.
    Raises DataError when two files claim to be the same split.
    """
    _check_is_folder(folder)
    found: dict[str, list[Path]] = {}
    for path in visible_files(folder):
        if path.suffix.lower() not in SUFFIXES:
            continue
        # The file's own name counts, not that of a folder per configuration ('en/train-00000-of-00001.parquet').
        split = split_in_name(path.name) or ("train" if whole and _has_word(path.stem, whole) else None)
        if split in wanted and split is not None:
            found.setdefault(split, []).append(path)
    for split, paths in found.items():
        found[split] = sorted(_narrowed(paths, only), key=lambda path: (_MORE.search(path.name) is not None, path))
        _check_one_copy(folder, split, found[split])
    return found


def own_splits(folder: Path, files: list[Path]) -> dict[Path, str]:
    """Return the split of each file of a user's folder; nothing unless every file, except a README, names its split.

    There must be training text, and text to validate or test on.
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
        # Otherwise nobody would notice that a test file is trained on.
        names = ", ".join(path.name for path in found)
        log.warning("%s: %s are not used as splits because of %s: all files are one text", folder, names, others[0].name)
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
        raise DataError(f"--from {folder}: more than one file is named as the {split} split ({names}); keep one of them")
    parts = [found for path in paths if (found := _PART.search(path.name))]
    if parts and (missing := set(range(int(parts[0][2]))) - {int(part[1]) for part in parts}):
        raise DataError(f"--from {folder}: part {min(missing)} of the {split} split's {int(parts[0][2])} is missing; fetch it")
