"""Corpora: named parts that are read as streams of documents, from this machine or from the hub."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from oelm.data.hub import hub_rows
from oelm.data.local import find_splits, folders_of_sets, own_splits, set_folder
from oelm.data.pieces import Piece, articles, pieces
from oelm.data.readers import check_file, read_column, read_text, read_wikitext, read_wikitext_rows
from oelm.data.sets import CorpusEntry, set_called, split_of
from oelm.data.tokens import LeftOut, Split
from oelm.errors import DataError

log = logging.getLogger(__name__)
VALIDATION_SHARE = 0.05
# Enough to judge a model by; more would only cost time at every evaluation.
VALIDATION_BYTES = 8_000_000
# What a folder of text holds documents in, one a row.
_TABLES = (".jsonl", ".parquet")


@dataclass(frozen=True)
class Part:
    """A stretch of a corpus. `split` None: each document goes to training or validation by the hash of its text."""

    label: str
    split: Split | None
    read: Callable[[], Iterator[Piece]]


@dataclass(frozen=True)
class Corpus:
    """Parts in a fixed order. `source` says in a line where they come from; `revision` pins what is not on this machine.

    `text_bytes` is about how much a remote corpus holds; a local one is surveyed before it is prepared. `left_out` counts,
    by reason, the files that belong to the source and not to the corpus.
    """

    name: str
    source: str
    parts: tuple[Part, ...]
    revision: str | None = None
    text_bytes: int | None = None
    left_out: dict[str, LeftOut] = field(default_factory=dict)


def documents(corpus: Corpus) -> Iterator[str]:
    """Yield the whole text of every document, whatever its split."""
    held: list[str] = []
    for part in corpus.parts:
        for piece in part.read():
            held.append(piece.text)
            if piece.ends:
                yield "".join(held)
                held = []


def reader_of(path: Path, *, column: str = "text", layout: str = "documents") -> Callable[[], Iterator[Piece]]:
    """Return what reads a file of documents, by the end of its name: tables by column, others as text."""
    if path.suffix.lower() in (".jsonl", ".json", ".parquet", ".tsv", ".csv"):
        return partial(read_wikitext_rows, path) if layout == "wikitext" else partial(read_column, path, column)
    return partial(read_wikitext if layout == "wikitext" else read_text, path)


def file_corpus(path: Path, *, column: str = "text") -> Corpus:
    """Return a file of text, JSONL or Parquet, or every text file of a folder, as a corpus.

    A folder whose every file is called after a split (train, valid or dev, test) has these splits, anything else none.
    """
    if not path.exists():
        raise DataError(f"{path}: no such file or folder; give UTF-8 text, JSONL or Parquet, or a folder of text files")
    files = [path] if path.is_file() else sorted(p for p in path.rglob("*") if p.is_file() and not _is_hidden(p, path))
    splits: dict[Path, str] = {}
    if path.is_dir():
        files = _text_files(path, files)
        splits = own_splits(path, files)
        files = list(splits) or files
    else:
        check_file(path, kind="parquet" if path.suffix == ".parquet" else "text")
    # Among the files of a folder a .json or .csv is text like any other; given by itself, it is a table.
    readers = {
        file: reader_of(file, column=column) if path.is_file() or file.suffix in _TABLES else partial(read_text, file)
        for file in files
    }
    has_val = "val" in splits.values()
    parts = (
        Part(str(file.relative_to(path.parent)), _own_split(splits.get(file), has_val=has_val), reader)
        for file, reader in readers.items()
    )
    return Corpus(_plain_name(path), f"local text '{path.name}'", tuple(parts))


def _own_split(split: str | None, *, has_val: bool) -> Split | None:
    """Return the split of a file that says it is this one; without a validation file, training gives some of its own."""
    return None if split is None or (split == "train" and not has_val) else split_of(split)


def _text_files(folder: Path, files: list[Path]) -> list[Path]:
    """Keep the files of a folder that are text: next to text there lie pictures and archives, and empty files."""
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
    found = _judging_files(entry, folder) | found
    has_val = "val" in found
    parts = [
        Part(_label(path, folder), _own_split(split, has_val=has_val), reader)
        for split in ("train", "val", "test")
        for path in found.get(split, [])
        for reader in [reader_of(path, layout=entry.layout)]
    ]
    return Corpus(entry.name, f"{entry.name}: local copies ({', '.join(part.label for part in parts)})", tuple(parts))


def _judging_files(entry: CorpusEntry, folder: Path) -> dict[str, list[Path]]:
    """Return the validation and test files of the set that this one is judged on, where its folder lies beside."""
    if not entry.judged_on or set_called(folder.absolute().name) != entry.name:
        return {}
    beside = folders_of_sets(folder.absolute().parent).get(entry.judged_on, [])
    return find_splits(beside[0], wanted=("val", "test")) if len(beside) == 1 else {}


def _label(path: Path, folder: Path) -> str:
    # A file of another set is named with its folder.
    return str(path.relative_to(folder)) if path.is_relative_to(folder) else f"{path.parent.name}/{path.name}"


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
    ways_out = (
        f"with a network, repeat the command; without one, bring the files here and say "
        f"`oelm data prepare {entry.name} --from FOLDER` (docs/data.md names the files)"
    )
    texts = (row["text"] for _, row in hub_rows(entry.hub, split, columns=("text",), ways_out=ways_out))
    if entry.layout == "wikitext":
        return pieces(articles(texts), tidy=False)
    return pieces((fragment for text in texts for fragment in (text, None)), tidy=False)


def _is_hidden(path: Path, root: Path) -> bool:
    return any(part.startswith(".") for part in path.relative_to(root).parts)


def _plain_name(path: Path) -> str:
    name = "".join(c if c.isascii() and (c.isalnum() or c in "._-") else "-" for c in path.resolve().name)
    return f"text-{name}"[:48]
