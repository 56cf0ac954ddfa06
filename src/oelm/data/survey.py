"""One pass over a corpus before it is prepared: what identifies it, and how much of it is for validation."""

from __future__ import annotations

import hashlib
import heapq
import math
from collections.abc import Callable, Iterator
from dataclasses import astuple, dataclass, field, replace
from functools import partial
from typing import Any

from oelm.data.readers import Piece, fraction, fraction_of
from oelm.data.sources import Corpus, Part
from oelm.data.tokens import SPLITS, Split, computed_once
from oelm.errors import DataError

VALIDATION_SHARE = 0.05
# More would only make every evaluation slower.
VALIDATION_BYTES = 8_000_000
# Where whole documents would give more than this to validation, one of them is cut instead.
MOST_HELD_OUT = 0.2
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

    Where whole documents would give far too much of it to validation, the corpus comes back with its largest document cut
    in two. A corpus at a pinned commit on the hub is not read.
    """
    if corpus.revision is not None:
        assert corpus.text_bytes is not None
        key = f"{corpus.source}@{corpus.revision}"
        return corpus, Survey(key, 0, corpus.text_bytes, _share(corpus.text_bytes))
    files = [part.file for part in corpus.parts if part.file is not None]
    if len(files) == len(corpus.parts):
        how = f"survey 3 of {corpus.name}, {corpus.column}, {[part.split for part in corpus.parts]}"
        found = computed_once(how, files, lambda: _read_through(corpus, tell))
    else:
        found = _read_through(corpus, tell)
    look = Survey(found["fingerprint"], found["documents"], found["text_bytes"], found["threshold"], found["highest"])
    if found["cut"] is None:
        return corpus, look
    return _split_within(corpus, look, found["loose"], Cut(*found["cut"]))


def _split_within(corpus: Corpus, look: Survey, loose: int, cut: Cut) -> tuple[Corpus, Survey]:
    """Return the corpus with a document cut, if that leaves text on both sides; else several documents stay whole."""
    halves = _cut_in_two(corpus, cut)
    if all(_has_text(halves, split) for split in SPLITS):
        # Sets of several documents that were prepared before these were cut must not be taken for this one.
        return halves, look if loose == 1 else replace(look, fingerprint=f"{look.fingerprint}-cut")
    if loose > 1:
        return corpus, look
    raise DataError(f"{corpus.source}: {cut.length} characters are too few to keep some for validation; give more text")


def _has_text(corpus: Corpus, split: Split) -> bool:
    return any(piece.text.strip() for part in corpus.parts if part.split == split for piece in part.read())


@dataclass(frozen=True)
class Cut:
    """Documents with this fraction, `length` characters long, are training text up to `at` and validation from there on."""

    fraction: float
    length: int
    at: int


@dataclass
class _Loose:
    """Documents without a given split, as a survey meets them; the heap `near` has those that may go to validation."""

    documents: int = 0
    text_bytes: int = 0
    characters: int = 0
    lowest: float = 1.0
    highest: float = 0.0
    largest: tuple[int, float] = (0, 0.0)
    near: list[tuple[float, int]] = field(default_factory=list)

    def add(self, own: float, *, text_bytes: int, characters: int) -> None:
        """Count a document that has this fraction."""
        self.documents += 1
        self.text_bytes += text_bytes
        self.characters += characters
        self.lowest, self.highest = min(self.lowest, own), max(self.highest, own)
        self.largest = max(self.largest, (characters, own))
        heapq.heappush(self.near, (-own, text_bytes))
        # More text only lowers the threshold, so what is above it now can go, and memory does not grow with the corpus.
        while -self.near[0][0] > max(self.lowest, _share(self.text_bytes)):
            heapq.heappop(self.near)

    def cut(self, threshold: float) -> Cut | None:
        """Return how to cut the largest document where whole ones would give validation too much; else None."""
        held_out = sum(size for negative, size in self.near if -negative <= threshold)
        # Of copies of one text, any cut would put the same text on both sides.
        is_copies = self.documents > 1 and self.lowest == self.highest
        if is_copies or held_out <= MOST_HELD_OUT * self.text_bytes:
            return None
        length, own = self.largest
        share = VALIDATION_SHARE * (self.characters / length)
        return Cut(own, length, int(length * (1 - min(share, 0.5))))


def _read_through(corpus: Corpus, tell: Callable[[int], None]) -> dict[str, Any]:
    """Return a survey's fields; and how many documents have no given split, and where to cut one of them, if anywhere."""
    state = hashlib.sha256(corpus.name.encode())
    loose, documents, text_bytes = _Loose(), 0, 0
    begun, own, start, length = False, 0.0, 0, 0
    for part in corpus.parts:
        state.update(f"\0{part.split}\0".encode())
        for piece in part.read():
            encoded = piece.text.encode()
            # One digest per piece serves both the fingerprint and the choice of split.
            digest = hashlib.sha256(encoded).digest()
            state.update(digest + (b"." if piece.ends else b"+"))
            if not begun:
                own, start, length = fraction_of(digest), text_bytes, 0
            if (text_bytes + len(encoded)) // _TELL_BYTES > text_bytes // _TELL_BYTES:
                tell(text_bytes)
            begun, length = not piece.ends, length + len(piece.text)
            documents, text_bytes = documents + piece.ends, text_bytes + len(encoded)
            if part.split is None and piece.ends:
                loose.add(own, text_bytes=text_bytes - start, characters=length)
    if not documents:
        raise DataError(f"{corpus.source}: no text in it ({len(corpus.parts)} files looked at); give text that is not empty")
    threshold = max(loose.lowest, _share(text_bytes, below=loose.highest))
    is_validated = any(part.split in SPLITS for part in corpus.parts)
    cut = None if is_validated else loose.cut(threshold)
    return {
        "fingerprint": state.hexdigest(),
        "documents": documents,
        "text_bytes": text_bytes,
        "threshold": threshold,
        "highest": loose.highest,
        "loose": loose.documents,
        "cut": None if cut is None else astuple(cut),
    }


def _share(text_bytes: float, *, below: float = 1.0) -> float:
    """Return the validation share of so much text, and less than `below`: a document with that fraction is left to train."""
    return min(VALIDATION_SHARE, VALIDATION_BYTES / text_bytes, math.nextafter(below, 0.0))


def _cut_in_two(corpus: Corpus, cut: Cut) -> Corpus:
    """Return the corpus with every part that has no given split as two: training text, and what is behind the cut."""
    loose = [part for part in corpus.parts if part.split is None]
    halves = (replace(part, split=split, read=partial(_side, part, cut, split)) for split in SPLITS for part in loose)
    return replace(corpus, parts=(*halves, *(part for part in corpus.parts if part.split is not None)))


def _side(part: Part, cut: Cut, side: Split) -> Iterator[Piece]:
    return (piece for split, piece in _sides(part, cut) if split == side)


def _sides(part: Part, cut: Cut) -> Iterator[tuple[Split, Piece]]:
    """Yield the pieces of a part, each with its split."""
    seen, begun, is_cut = 0, False, False
    for piece in part.read():
        if not begun:
            seen, is_cut = 0, fraction(piece.text) == cut.fraction
        before, seen, begun = seen, seen + len(piece.text), not piece.ends
        if not is_cut or seen < cut.at:
            yield "train", piece
        elif before >= cut.at:
            yield "val", piece
        else:
            at = _line_start(piece.text, cut.at - before)
            yield "train", Piece(piece.text[:at], ends=True)
            yield "val", Piece(piece.text[at:], ends=piece.ends)


def _line_start(text: str, at: int) -> int:
    """Return where to cut: after the last line end before `at`, unless that is far away."""
    return text.rfind("\n", max(0, at - max(200, at // 10)), at) + 1 or at
