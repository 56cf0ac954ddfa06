"""However long a document and wherever its text was cut on the way, its pieces give its text and its tokens."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from oelm.data import readers
from oelm.data.readers import PIECE_CHARS, Piece, articles, fraction, pieces, read_wikitext, separated
from oelm.data.tokenizer import END_OF_TEXT, Encode, encoder, folder_tokenizer, train_bpe
from tests.conftest import made_text

SHARED = Path(__file__).resolve().parents[3] / "shared" / "data"
SMALL = 8

# What a pre-tokenizer treats each in its own way, alone and next to each other.
ODD = st.text(st.sampled_from("aZ9.'s \n\t\r\u00a0\u3000\x85\x1c\u200b\u00fc\u4e2d\U0001f426\u0301-<|>"), max_size=30)
# Between any two stretches one plain gap between words: further apart than 16 pieces, a cut falls anywhere on purpose.
TEXTS = st.lists(ODD, min_size=1, max_size=12).map(lambda stretches: "".join(f"{stretch}a b" for stretch in stretches))
CUTS = st.lists(st.integers(0, 400), max_size=8)


@contextmanager
def small_pieces() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(readers, "PIECE_CHARS", SMALL)
        yield


def in_blocks(text: str, cuts: list[int]) -> list[str]:
    """Cut a text at these places."""
    places = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    return [text[start:end] for start, end in zip(places[:-1], places[1:], strict=True)]


def joined(stream: Iterable[Piece]) -> list[str]:
    """Return the whole documents of a stream; all must be complete."""
    found, held = [], ""
    for piece in stream:
        held += piece.text
        if piece.ends:
            found.append(held)
            held = ""
    assert held == ""
    return found


def small_pieces_of(text: str, cuts: list[int]) -> list[Piece]:
    with small_pieces():
        return list(pieces([*in_blocks(text, cuts), None], tidy=False))


@given(TEXTS, CUTS)
def test_the_pieces_of_a_document_are_its_text(text: str, cuts: list[int]) -> None:
    assert joined(small_pieces_of(text, cuts)) == [text]


def check_tokens(encode: Encode, text: str, cuts: list[int]) -> None:
    cut = [piece.text for piece in small_pieces_of(text, cuts)]
    by_piece = [token for ids in encode(cut) for token in ids.tolist()]
    assert by_piece == encode([text])[0].tolist()


BPE = encoder(train_bpe([made_text(300), "it's 99 \n\n a\u00fcs <|x|> "], vocab_size=300))


@given(TEXTS, CUTS)
@settings(deadline=None, max_examples=100)
def test_the_pieces_of_a_document_give_the_tokens_of_the_whole(text: str, cuts: list[int]) -> None:
    check_tokens(BPE, text, cuts)


@pytest.fixture(scope="module")
def gpt2() -> Tokenizer:
    if not (SHARED / "gpt2_bpe").is_dir():
        pytest.skip(f"no GPT-2 vocabulary under {SHARED}")
    return folder_tokenizer(SHARED / "gpt2_bpe")


def test_the_pieces_of_a_document_give_gpt2s_tokens_of_the_whole(gpt2: Tokenizer) -> None:
    encode = encoder(gpt2)

    @given(TEXTS, CUTS)
    @settings(deadline=None, max_examples=100)
    def check(text: str, cuts: list[int]) -> None:
        check_tokens(encode, text, cuts)

    check()


def test_a_document_longer_than_a_piece_comes_in_several() -> None:
    text = made_text(PIECE_CHARS)
    found = list(pieces([text, None], tidy=False))
    assert len(found) >= 3 and "".join(piece.text for piece in found) == text


def test_only_the_last_piece_ends_its_document() -> None:
    found = small_pieces_of(made_text(100), [])
    assert [piece.ends for piece in found] == [False] * (len(found) - 1) + [True]


@given(st.integers(0, 2000), CUTS)
def test_a_text_without_any_gap_is_still_cut_and_whole(length: int, cuts: list[int]) -> None:
    found = small_pieces_of("x" * length + "y", cuts)
    assert joined(found) == ["x" * length + "y"]
    # Held back are at most 16 pieces' worth, and the last block to arrive, which is at most the whole.
    assert all(len(piece.text) <= 17 * SMALL for piece in found[:-1])


DOCUMENTS = st.lists(st.text(st.sampled_from("ab \n<|endoftext|>"), max_size=40), max_size=8)


def tidied(documents: list[str]) -> list[str]:
    return [document.strip("\n") + "\n" for document in documents if document.strip()]


@given(DOCUMENTS, CUTS)
def test_marks_separate_documents_wherever_the_blocks_are_cut(documents: list[str], cuts: list[int]) -> None:
    text = END_OF_TEXT.join(documents)
    found = joined(pieces(separated(in_blocks(text, cuts)), tidy=True))
    # Texts around a mark may spell another with it: what counts is where the whole text has marks.
    assert found == tidied(text.split(END_OF_TEXT))


def test_a_mark_cut_at_every_place_is_still_a_mark() -> None:
    text = f"one{END_OF_TEXT}two"
    for cut in range(len(text) + 1):
        assert joined(pieces(separated([text[:cut], text[cut:]]), tidy=True)) == ["one\n", "two\n"]


def test_a_tidied_document_begins_without_empty_lines_and_ends_with_one_line_end() -> None:
    cases: list[tuple[str, str]] = [
        ("\n\nbody", "body\n"),
        ("body\n\n\n", "body\n"),
        ("body", "body\n"),
        ("  body\n", "  body\n"),
        ("body  \n", "body  \n"),
        ("a\n\nb\n", "a\n\nb\n"),
        ("\n \nbody\n", " \nbody\n"),
    ]
    for text, tidy in cases:
        assert joined(pieces([text, None], tidy=True)) == [tidy], (text, tidy)


@given(TEXTS, CUTS)
def test_tidying_a_long_document_is_tidying_its_text(text: str, cuts: list[int]) -> None:
    text = f"\n\n{text}\n\n\n"
    with small_pieces():
        assert joined(pieces([*in_blocks(text, cuts), None], tidy=True)) == tidied([text])


def test_documents_of_white_space_only_are_left_out() -> None:
    for blank in ("", " ", "\n\n", "\t\u00a0\n"):
        for tidy in (True, False):
            found = joined(pieces([blank, None, "kept\n", None, blank, blank, None], tidy=tidy))
            assert found == ["kept\n"], (tidy, blank)


WIKITEXT = (
    " \n = First = \n \n Some text . \n \n = = Section = = \n \n More = text . \n = = = Deeper = = = \n \n"
    " = Second = \n \n Its text ; x = 3 . \n = no title = \n"
)


def lines(text: str) -> list[str]:
    return text.splitlines(keepends=True)


def test_an_article_begins_with_the_empty_line_before_its_title() -> None:
    first, second = joined(pieces(articles(lines(WIKITEXT)), tidy=False))
    assert first.startswith(" \n = First = \n") and second.startswith(" \n = Second = \n")


LINES = [" \n", "\n", " = Title = \n", " = = Section = = \n", " a = b = \n", " text . \n", " = = \n", " = \n"]


@given(st.lists(st.sampled_from(LINES), max_size=30))
def test_the_articles_of_a_file_are_the_file(found: list[str]) -> None:
    found = [" \n", " = Title = \n", *found]
    assert "".join(joined(pieces(articles(found), tidy=False))) == "".join(found)


@pytest.mark.parametrize("name", ["valid.tokens.txt", "test.tokens.txt"])
def test_wikitext_has_its_sixty_articles_and_every_character(name: str) -> None:
    path = SHARED / "wikitext103" / name
    if not path.is_file():
        pytest.skip(f"no WikiText extract at {path}")
    found = joined(read_wikitext(path))
    assert "".join(found) == path.read_bytes().decode()
    assert len(found) == 60  # as the data set's authors count them


@given(st.text(max_size=20))
def test_the_fraction_of_a_text_is_at_least_zero_and_below_one(text: str) -> None:
    assert 0 <= fraction(text) < 1


def test_the_fraction_of_a_text_is_the_same_everywhere_and_for_ever() -> None:
    # The split of every corpus without one hangs on it: the first 56 bits of SHA-256.
    digest = hashlib.sha256(b"the cat\n").hexdigest()
    assert fraction("the cat\n") == int(digest[:14], 16) / 2**56
