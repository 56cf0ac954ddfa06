"""A first look through a corpus: what it holds and its digest, before anything is written."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from oelm.data.corpora import VALIDATION_BYTES, VALIDATION_SHARE, Corpus, Part
from oelm.data.pieces import Piece, fraction, fraction_of
from oelm.data.tokens import Split
from oelm.errors import DataError

_TELL_BYTES = 64 * 2**20


@dataclass(frozen=True)
class Survey:
    """What a corpus holds. A document without a split of its own is validation when its fraction is at most `threshold`."""

    fingerprint: str
    documents: int
    text_bytes: int
    threshold: float

    def for_extract(self, text_bytes: float) -> Survey:
        """Return the survey with the share for validation that so much of the text needs."""
        return replace(self, threshold=max(self.threshold, _share(min(text_bytes, self.text_bytes))))


def survey(corpus: Corpus, *, tell: Callable[[int], None]) -> tuple[Corpus, Survey]:
    """Look through the corpus; `tell` hears of the bytes seen. A single document comes back as two, cut for validation.

    A test split of its own does not count for that. What lies at a pinned commit elsewhere is taken at its word.
    """
    if corpus.revision is not None:
        assert corpus.text_bytes is not None
        key = f"{corpus.source}@{corpus.revision}"
        return corpus, Survey(key, 0, corpus.text_bytes, _share(corpus.text_bytes))
    state = hashlib.sha256(corpus.name.encode())
    documents = text_bytes = loose = characters = 0
    lowest, begun = 1.0, False
    for part in corpus.parts:
        state.update(f"\0{part.split}\0".encode())
        for piece in part.read():
            encoded = piece.text.encode()
            # One digest a piece serves both the whole's and the choice of split.
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
    threshold = max(lowest, _share(text_bytes))
    # With a validation split of its own, nothing is cut off for one.
    if loose == 1 and all(part.split in (None, "test") for part in corpus.parts):
        corpus = _cut_in_two(corpus, characters)
    return corpus, Survey(state.hexdigest(), documents, text_bytes, threshold)


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
    """Return where to cut: behind the last line end before `at`, unless that is far off."""
    return text.rfind("\n", max(0, at - max(200, at // 10)), at) + 1 or at


@dataclass(frozen=True, slots=True)
class Item:
    """A piece, the split of its document and whether that went by hash, and where it stands: which part, which piece of it."""

    split: Split
    piece: Piece
    at: tuple[int, int]
    by_hash: bool = False


def items(
    corpus: Corpus, threshold: float, *, after: tuple[int, int] = (-1, 0), full: frozenset[Split] | set[Split | None]
) -> Iterator[Item]:
    """Yield the pieces that stand behind `after`; what is left of a part is passed over once its split is in `full`.

    None in `full` means the parts without a split of their own.
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
    """Group a stream into lists of about so many characters."""
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
    """Yield the training text in order, up to a number of bytes or documents: enough to train a tokenizer on."""
    seen = documents = 0
    for item in items(corpus, threshold, full=frozenset(("val", "test"))):
        if item.split != "train":
            continue
        if seen >= most_bytes or documents == most_documents:
            return
        yield item.piece.text
        seen += len(item.piece.text.encode())
        documents += item.piece.ends
