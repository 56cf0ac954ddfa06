"""One pass over a corpus before it is prepared: what identifies it, and how much of it is for validation."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from oelm.data.readers import Piece, fraction_of
from oelm.data.sources import Corpus, Part
from oelm.data.tokens import computed_once
from oelm.errors import DataError

VALIDATION_SHARE = 0.05
# More would only make every evaluation slower.
VALIDATION_BYTES = 8_000_000
_TELL_BYTES = 64 * 2**20


@dataclass(frozen=True)
class Survey:
    """What a corpus holds. A document without a given split is validation when its fraction is at most `threshold`."""

    fingerprint: str
    documents: int
    text_bytes: int
    threshold: float
    highest: float = 1.0

    def for_extract(self, text_bytes: float) -> Survey:
        """Return the survey with the validation share that so much of the text needs."""
        return replace(self, threshold=max(self.threshold, _share(min(text_bytes, self.text_bytes), below=self.highest)))


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
        how = f"survey 2 of {corpus.name}, {corpus.column}, {[part.split for part in corpus.parts]}"
        found = computed_once(how, files, lambda: _read_through(corpus, tell))
    else:
        found = _read_through(corpus, tell)
    look = Survey(found["fingerprint"], found["documents"], found["text_bytes"], found["threshold"], found["highest"])
    if found["loose"] == 1 and all(part.split in (None, "test") for part in corpus.parts):
        corpus = _cut_in_two(corpus, found["characters"])
    return corpus, look


def _read_through(corpus: Corpus, tell: Callable[[int], None]) -> dict[str, Any]:
    """Return a survey's fields; and how many documents have no given split, and their characters."""
    state = hashlib.sha256(corpus.name.encode())
    documents = text_bytes = loose = characters = 0
    lowest, highest, begun = 1.0, 0.0, False
    for part in corpus.parts:
        state.update(f"\0{part.split}\0".encode())
        for piece in part.read():
            encoded = piece.text.encode()
            # One digest per piece serves both the fingerprint and the choice of split.
            digest = hashlib.sha256(encoded).digest()
            state.update(digest + (b"." if piece.ends else b"+"))
            if part.split is None and not begun:
                own = fraction_of(digest)
                lowest, highest = min(lowest, own), max(highest, own)
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
        "threshold": max(lowest, _share(text_bytes, below=highest)),
        "highest": highest,
        "loose": loose,
        "characters": characters,
    }


def _share(text_bytes: float, *, below: float = 1.0) -> float:
    """Return the validation share of so much text, and less than `below`: a document with that fraction is left to train."""
    return min(VALIDATION_SHARE, VALIDATION_BYTES / text_bytes, math.nextafter(below, 0.0))


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
