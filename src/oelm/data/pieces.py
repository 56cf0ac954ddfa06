"""Documents as a stream of pieces, so that a text of any length needs bounded memory."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from oelm.data.vocabularies import END_OF_TEXT

PIECE_CHARS = 2**20
# GPT-2's pre-tokenizer never looks across a single space between two other characters: cut there, the pieces of a
# document give the same tokens as the whole.
_CUT = re.compile(r"\S(?= \S)")


@dataclass(frozen=True, slots=True)
class Piece:
    """Some text of a document; `ends` marks its last piece."""

    text: str
    ends: bool


def pieces(fragments: Iterable[str | None], *, tidy: bool) -> Iterator[Piece]:
    """Yield the pieces of documents given as fragments of text, each document closed by None.

    Blank documents are left out. With `tidy`, each begins without empty lines and ends with one line end.
    """
    held: list[str] = []
    size, begun = 0, False
    for fragment in fragments:
        if fragment is not None:
            held.append(fragment)
            size += len(fragment)
            while size > 2 * PIECE_CHARS and (cut := _cut(text := "".join(held))):
                if begun or text[:cut].strip():
                    yield Piece(text[:cut].lstrip("\n") if tidy and not begun else text[:cut], ends=False)
                    begun = True
                held, size = [text[cut:]], len(text) - cut
            continue
        text = "".join(held)
        if begun or text.strip():
            if tidy:
                text = (text if begun else text.lstrip("\n")).rstrip("\n") + "\n"
            yield Piece(text, ends=True)
        held, size, begun = [], 0, False


def _cut(text: str) -> int:
    found = _CUT.search(text, PIECE_CHARS)
    if found is not None:
        return found.end()
    # Without such a space for this long, other tokens at one place are better than unbounded memory.
    return PIECE_CHARS if len(text) > 16 * PIECE_CHARS else 0


def separated(blocks: Iterable[str]) -> Iterator[str | None]:
    """Yield the fragments of a text in which documents are separated by the end-of-text mark."""
    held = ""
    for block in blocks:
        *whole, held = (held + block).split(END_OF_TEXT)
        for text in whole:
            yield text
            yield None
        # The end may hold the beginning of a mark.
        sure = len(held) - len(END_OF_TEXT) + 1
        if sure > 0:
            yield held[:sure]
            held = held[sure:]
    yield held
    yield None


def articles(lines: Iterable[str]) -> Iterator[str | None]:
    """Yield the fragments of a WikiText file: an article begins with its title (' = Title = '), sections with more marks."""
    before = ""
    for line in lines:
        is_title = (
            len(line) > len(" =  = ")
            and line.startswith(" = ")
            and not line.startswith(" = = ")
            and line.rstrip("\n").endswith(" = ")
        )
        if is_title and not before.strip():
            yield None
        # Held back by one line: the empty line before a title belongs to the article it opens.
        yield before
        before = line
    yield before
    yield None


def fraction(text: str) -> float:
    """Return a number in [0, 1) that depends on the text alone, so that equal texts get the same split."""
    return fraction_of(hashlib.sha256(text.encode()).digest())


def fraction_of(digest: bytes) -> float:
    """Return the number in [0, 1) of a text's sha256."""
    return int.from_bytes(digest[:7]) / 2**56
