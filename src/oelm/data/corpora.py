"""Corpora: named parts that are read as streams of documents, from this machine or from the hub."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from oelm.data.hub import hub_rows
from oelm.data.local import (
    find_splits,
    neighbour_splits,
    own_splits,
    plain_name,
    set_folder,
    short_path,
    visible_files,
)
from oelm.data.pieces import Piece, articles, pieces
from oelm.data.readers import check_file, read_column, read_text, read_wikitext, read_wikitext_rows
from oelm.data.sets import CorpusEntry, set_called, split_of
from oelm.data.tokens import LeftOut, Split
from oelm.errors import DataError

log = logging.getLogger(__name__)
VALIDATION_SHARE = 0.05
# More would only make every evaluation slower.
VALIDATION_BYTES = 8_000_000
# Tables in a folder of text: one document a row.
_TABLES = (".jsonl", ".parquet")


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
    if path.suffix.lower() in (".jsonl", ".json", ".parquet", ".tsv", ".csv"):
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
        file: _reader(file, column=column) if path.is_file() or file.suffix in _TABLES else partial(read_text, file)
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
    kept = [file for file in files if file.suffix in _TABLES or _starts_as_text(file)]
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
