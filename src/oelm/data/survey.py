"""The first pass through a corpus: its size, digest and split, before anything is written."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from oelm.data.readers import Piece, fraction, fraction_of
from oelm.data.sources import VALIDATION_BYTES, VALIDATION_SHARE, Corpus, Part
from oelm.data.tokens import Split, computed_once
from oelm.errors import DataError

_TELL_BYTES = 64 * 2**20


@dataclass(frozen=True)
class Survey:
    """What a corpus holds. A document without a given split is validation when its fraction is at most `threshold`."""

    fingerprint: str
    documents: int
    text_bytes: int
    threshold: float

    def for_extract(self, text_bytes: float) -> Survey:
        """Return the survey with the validation share that so much of the text needs."""
        return replace(self, threshold=max(self.threshold, _share(min(text_bytes, self.text_bytes))))


def survey(corpus: Corpus, *, tell: Callable[[int], None]) -> tuple[Corpus, Survey]:
    """Read through the corpus, unless its files were read before and did not change; `tell` gets the bytes read so far.

    A corpus of a single document, besides a test split, comes back as two, cut for validation. A corpus at a pinned commit
    on the hub is not read.
    """
    if corpus.revision is not None:
        assert corpus.text_bytes is not None
        key = f"{corpus.source}@{corpus.revision}"
        return corpus, Survey(key, 0, corpus.text_bytes, _share(corpus.text_bytes))
    files = [part.file for part in corpus.parts if part.file is not None]
    if len(files) == len(corpus.parts):
        how = f"survey 1 of {corpus.name}, {corpus.column}, {[part.split for part in corpus.parts]}"
        found = computed_once(how, files, lambda: _read_through(corpus, tell))
    else:
        found = _read_through(corpus, tell)
    look = Survey(found["fingerprint"], found["documents"], found["text_bytes"], found["threshold"])
    if found["loose"] == 1 and all(part.split in (None, "test") for part in corpus.parts):
        corpus = _cut_in_two(corpus, found["characters"])
    return corpus, look


def _read_through(corpus: Corpus, tell: Callable[[int], None]) -> dict[str, Any]:
    """Return a survey's fields; and how many documents have no given split, and their characters."""
    state = hashlib.sha256(corpus.name.encode())
    documents = text_bytes = loose = characters = 0
    lowest, begun = 1.0, False
    for part in corpus.parts:
        state.update(f"\0{part.split}\0".encode())
        for piece in part.read():
            encoded = piece.text.encode()
            # One digest per piece serves both the fingerprint and the choice of split.
            digest = hashlib.sha256(encoded).digest()
            state.update(digest + (b"." if piece.ends else b"+"))
            if part.split is None and not begun:
                lowest = min(lowest, fraction_of(digest))
            begun = not piece.ends
            documents += piece.ends
            if (text_bytes + len(encoded)) // _TELL_BYTES > text_bytes // _TELL_BYTES:
                tell(text_bytes)
            text_bytes += len(encoded)
            if part.split is None:
                loose, characters = loose + piece.ends, characters + len(piece.text)
    if not documents:
        raise DataError(f"{corpus.source}: no text in it ({len(corpus.parts)} files looked at); give text that is not empty")
    return {
        "fingerprint": state.hexdigest(),
        "documents": documents,
        "text_bytes": text_bytes,
        "threshold": max(lowest, _share(text_bytes)),
        "loose": loose,
        "characters": characters,
    }


def _share(text_bytes: float) -> float:
    return min(VALIDATION_SHARE, VALIDATION_BYTES / text_bytes)


def _cut_in_two(corpus: Corpus, characters: int) -> Corpus:
    at = int(characters * (1 - VALIDATION_SHARE))
    (part,) = (part for part in corpus.parts if part.split is None and any(True for _ in part.read()))
    if not all(any(piece.text.strip() for piece in half) for half in (_head(part, at), _tail(part, at))):
        raise DataError(f"{corpus.source}: {characters} characters are too few to keep some for validation; give more text")
    halves = (
        replace(part, split="train", read=lambda: _head(part, at)),
        replace(part, split="val", read=lambda: _tail(part, at)),
    )
    return replace(corpus, parts=(*halves, *(other for other in corpus.parts if other.split is not None)))


def _head(part: Part, at: int) -> Iterator[Piece]:
    seen = 0
    for piece in part.read():
        if seen + len(piece.text) < at:
            yield piece
            seen += len(piece.text)
        else:
            yield Piece(piece.text[: _line_start(piece.text, at - seen)], ends=True)
            return


def _tail(part: Part, at: int) -> Iterator[Piece]:
    seen = 0
    stream = part.read()
    for piece in stream:
        if seen + len(piece.text) >= at:
            yield Piece(piece.text[_line_start(piece.text, at - seen) :], ends=piece.ends)
            break
        seen += len(piece.text)
    yield from stream


def _line_start(text: str, at: int) -> int:
    """Return where to cut: after the last line end before `at`, unless that is far away."""
    return text.rfind("\n", max(0, at - max(200, at // 10)), at) + 1 or at


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
