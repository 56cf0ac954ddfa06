"""Where text comes from: corpora as streams of documents, local copies of public sets, rows of the hub."""

from __future__ import annotations

import logging
import re
import socket
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from oelm.data.public_sets import SPELLINGS, CorpusEntry, HubSource, set_called, split_of
from oelm.data.readers import (
    Piece,
    Row,
    articles,
    check_file,
    fraction,
    pieces,
    read_column,
    read_text,
    read_wikitext,
    read_wikitext_rows,
)
from oelm.data.tokens import LeftOut, Split
from oelm.errors import DataError, needing


def hub_rows(source: HubSource, split: str, *, columns: tuple[str, ...], name: str) -> Iterator[tuple[int, Row]]:
    """Yield number (from 1) and content of every row of a split of the set `name`."""
    opened = _opened(source, split, name)
    if missing := [column for column in columns if opened.column_names is not None and column not in opened.column_names]:
        raise DataError(f"{source.repo} at {source.revision[:8]}: no column {missing[0]!r}; columns: {opened.column_names}")
    number = 0
    try:
        for row in opened:
            number += 1
            yield number, {column: row[column] for column in columns}
    # A broken connection or a damaged file raises whatever the library below does: httpx's, pyarrow's, ...
    except Exception as problem:
        raise _unreachable(f"{source.repo}: stopped after row {number:,} ({_reason(problem)})", name) from problem


def hub_label_names(source: HubSource, split: str, column: str, *, name: str) -> tuple[str, ...] | None:
    """Return the names that the hub gives to integer labels, if any."""
    feature = (_opened(source, split, name).features or {}).get(column)
    names = getattr(feature, "names", None)
    return tuple(names) if names else None


def _opened(source: HubSource, split: str, name: str) -> Any:
    with needing("datasets", "data"):
        import datasets
    if not Path(source.repo).is_dir() and not hub_has_an_address():
        raise _unreachable(f"{source.repo}: no network, the Hugging Face hub cannot be reached", name)
    try:
        return datasets.load_dataset(
            source.repo, source.config, split=source.splits[split], revision=source.revision, streaming=True
        )
    # What an unreachable hub raises differs by library and version.
    except Exception as problem:
        what = f"{source.repo} cannot be fetched from the Hugging Face hub ({_reason(problem)})"
        raise _unreachable(what, name) from problem


def _unreachable(what: str, name: str) -> DataError:
    return DataError(
        f"{what}; with a network, repeat the command; without one, copy the files here and run "
        f"`oelm data prepare {name} --from FOLDER` (docs/data.md names the files)"
    )


def _reason(problem: Exception) -> str:
    return str(problem).strip().splitlines()[0][:200] if str(problem).strip() else type(problem).__name__


def hub_has_an_address() -> bool:
    """Whether the hub's host name resolves; the library itself would retry for half a minute first."""
    from huggingface_hub import constants

    if urllib.request.getproxies():
        return True
    try:
        socket.getaddrinfo(urllib.parse.urlsplit(constants.ENDPOINT).hostname, 443)
    except OSError:
        return False
    return True


log = logging.getLogger(__name__)
TABLES = (".jsonl", ".json", ".parquet", ".tsv", ".csv")
SUFFIXES = (".txt", ".tokens", ".raw", *TABLES)
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


# Tables in a folder of text: one document a row.
_FOLDER_TABLES = (".jsonl", ".parquet")


@dataclass(frozen=True)
class Part:
    """A part of a corpus. `split` None: each document goes to training or validation by the hash of its text.

    `file` is what it reads, where it reads one file.
    """

    label: str
    split: Split | None
    read: Callable[[], Iterator[Piece]]
    file: Path | None = None


@dataclass(frozen=True)
class Corpus:
    """Parts in a fixed order. `source` describes where they come from; `revision` pins a corpus on the hub.

    `text_bytes` is the approximate size of a remote corpus; a local one is surveyed before it is prepared. `column` is
    read from tables. `left_out` counts, by reason, the files of the source that are not in the corpus.
    """

    name: str
    source: str
    parts: tuple[Part, ...]
    revision: str | None = None
    text_bytes: int | None = None
    column: str = "text"
    left_out: dict[str, LeftOut] = field(default_factory=dict)


def documents(corpus: Corpus) -> Iterator[str]:
    """Yield the text of every document of every split."""
    held: list[str] = []
    for part in corpus.parts:
        for piece in part.read():
            held.append(piece.text)
            if piece.ends:
                yield "".join(held)
                held = []


def _reader(path: Path, *, column: str = "text", layout: str = "documents") -> Callable[[], Iterator[Piece]]:
    if path.suffix.lower() in TABLES:
        return partial(read_wikitext_rows, path) if layout == "wikitext" else partial(read_column, path, column)
    return partial(read_wikitext if layout == "wikitext" else read_text, path)


def file_corpus(path: Path, *, column: str = "text") -> Corpus:
    """Return a file of text, JSONL or Parquet, or every text file of a folder, as a corpus.

    A folder in which every file is named after a split (train, valid or dev, test) has these splits.
    """
    if not path.exists():
        raise DataError(f"{path}: no such file or folder; give UTF-8 text, JSONL or Parquet, or a folder of text files")
    splits: dict[Path, str] = {}
    if path.is_dir():
        files = _text_files(path, visible_files(path))
        splits = own_splits(path, files)
        files = list(splits) or files
    else:
        check_file(path, kind="parquet" if path.suffix == ".parquet" else "text")
        files = [path]
    # In a folder, a .json or .csv is text like any other file; given by itself, it is a table.
    readers = {
        file: _reader(file, column=column) if path.is_file() or file.suffix in _FOLDER_TABLES else partial(read_text, file)
        for file in files
    }
    has_val = "val" in splits.values()
    parts = (
        Part(str(file.relative_to(path.parent)), _own_split(splits.get(file), has_val=has_val), reader, file)
        for file, reader in readers.items()
    )
    name = f"text-{plain_name(path.resolve().name)}"[:48]
    return Corpus(name, f"local text '{path.name}'", tuple(parts), column=column)


def _own_split(split: str | None, *, has_val: bool) -> Split | None:
    """Return a file's split; None for training without a validation file, which then gives some of its documents."""
    return None if split is None or (split == "train" and not has_val) else split_of(split)


def _text_files(folder: Path, files: list[Path]) -> list[Path]:
    kept = [file for file in files if file.suffix in _FOLDER_TABLES or _starts_as_text(file)]
    if not kept:
        raise DataError(f"{folder}: no text in it ({len(files)} files looked at); give UTF-8 text that is not empty")
    taken = set(kept)
    left_out = [file.name for file in files if file not in taken and file.stat().st_size]
    if left_out:
        names = ", ".join(left_out[:5]) + (", ..." if len(left_out) > 5 else "")
        log.warning("%s: left out %d of %d files, which are not UTF-8 text (%s)", folder, len(left_out), len(files), names)
    return kept


def _starts_as_text(path: Path) -> bool:
    try:
        for _ in read_text(path):
            return True
    except DataError:
        return False
    return False


def folder_corpus(entry: CorpusEntry, folder: Path) -> Corpus:
    """Return a named corpus from local copies of its files, in this folder or in one of its name inside."""
    folder = set_folder(entry.name, folder)
    found = find_splits(folder, wanted=("train", "val", "test"), whole=entry.whole)
    if not found.get("train"):
        words = "'train'" + (f" or '{entry.whole}'" if entry.whole else "")
        raise DataError(
            f"--from {folder}: no training file of {entry.name} (a .txt, .tokens, .jsonl or .parquet with {words} in its name)"
        )
    if entry.judged_on and set_called(folder.absolute().name) == entry.name:
        found = neighbour_splits(folder.absolute().parent, entry.judged_on, wanted=("val", "test")) | found
    has_val = "val" in found
    parts = [
        Part(short_path(path, folder), _own_split(split, has_val=has_val), _reader(path, layout=entry.layout), path)
        for split in ("train", "val", "test")
        for path in found.get(split, [])
    ]
    return Corpus(entry.name, f"{entry.name}: local copies ({', '.join(part.label for part in parts)})", tuple(parts))


def hub_corpus(entry: CorpusEntry) -> Corpus:
    """Return a named corpus as the hub has it, streamed at the pinned commit."""
    own = "val" in entry.hub.splits
    parts = tuple(
        Part(f"{entry.hub.repo} {split}", split_of(split) if own else None, partial(_hub_pieces, entry, split))
        for split in entry.hub.splits
    )
    source = f"{entry.hub.repo} ({entry.hub.config}) on the Hugging Face hub"
    return Corpus(entry.name, source, parts, revision=entry.hub.revision, text_bytes=entry.text_bytes)


def _hub_pieces(entry: CorpusEntry, split: str) -> Iterator[Piece]:
    texts = (row["text"] for _, row in hub_rows(entry.hub, split, columns=("text",), name=entry.name))
    if entry.layout == "wikitext":
        return pieces(articles(texts), tidy=False)
    return pieces((fragment for text in texts for fragment in (text, None)), tidy=False)


@dataclass(frozen=True, slots=True)
class Item:
    """A piece, the split of its document and whether a hash chose that, and its position: which part, which piece of it."""

    split: Split
    piece: Piece
    at: tuple[int, int]
    by_hash: bool = False


def items(
    corpus: Corpus, threshold: float, *, after: tuple[int, int] = (-1, 0), full: frozenset[Split] | set[Split | None]
) -> Iterator[Item]:
    """Yield the pieces after the position `after`; skip the rest of a part once its split is in `full`.

    None in `full` means the parts without a given split.
    """
    for number, part in enumerate(corpus.parts):
        if number < after[0]:
            continue
        split: Split | None = None
        for position, piece in enumerate(part.read()):
            if part.split in full:
                break
            if split is None:
                split = part.split or ("val" if fraction(piece.text) <= threshold else "train")
            if (number, position) > after:
                yield Item(split, piece, (number, position), by_hash=part.split is None)
            if piece.ends:
                split = None


def batches(stream: Iterator[Item], *, size_chars: int) -> Iterator[list[Item]]:
    """Group a stream into lists of about `size_chars` characters."""
    held: list[Item] = []
    size = 0
    for item in stream:
        held.append(item)
        size += len(item.piece.text)
        if size >= size_chars:
            yield held
            held, size = [], 0
    if held:
        yield held


def train_texts(corpus: Corpus, threshold: float, *, most_bytes: int, most_documents: int | None) -> Iterator[str]:
    """Yield the training text in order, up to a number of bytes or documents."""
    seen = documents = 0
    for item in items(corpus, threshold, full=frozenset(("val", "test"))):
        if item.split != "train":
            continue
        if seen >= most_bytes or documents == most_documents:
            return
        yield item.piece.text
        seen += len(item.piece.text.encode())
        documents += item.piece.ends
