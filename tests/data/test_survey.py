"""A corpus is known by its content, and split by it: the same text falls on the same side, whatever is around it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from oelm.data import readers
from oelm.data import survey as survey_module
from oelm.data import tokens as tokens_module
from oelm.data.readers import Piece, fraction, pieces
from oelm.data.sources import Corpus, Item, Part, batches, file_corpus, items, train_texts
from oelm.data.survey import MOST_HELD_OUT, VALIDATION_SHARE, Survey, _Loose, _read_through, survey
from oelm.data.tokens import Split
from oelm.errors import DataError
from tests.conftest import made_text

Documents = list[str]


def made_part(texts: Documents, split: Split | None = None) -> Part:
    def read() -> Iterator[Piece]:
        return pieces((fragment for text in texts for fragment in (text, None)), tidy=False)

    return Part("made", split, read)


def corpus_of(*parts: Part, name: str = "made") -> Corpus:
    return Corpus(name, "made here", parts)


def surveyed(corpus: Corpus) -> tuple[Corpus, Survey]:
    return survey(corpus, tell=lambda done: None)


def by_split(corpus: Corpus) -> dict[str, Documents]:
    """Return the documents of each split."""
    found: dict[str, Documents] = {}
    corpus, look = surveyed(corpus)
    held = ""
    for item in items(corpus, look.threshold, full=frozenset()):
        held += item.piece.text
        if item.piece.ends:
            found.setdefault(item.split, []).append(held)
            held = ""
    return found


UNIQUE = st.lists(st.text("abc \n", min_size=1).filter(lambda text: bool(text.strip())), min_size=2, max_size=40, unique=True)
# Next to so much text, what others give to validation is little, so that none is cut; its fraction sends it to training.
LARGE = max((made_text(4000) + str(number) for number in range(1000)), key=fraction)


@given(UNIQUE)
def test_every_document_is_in_exactly_one_split(texts: Documents) -> None:
    found = by_split(corpus_of(made_part([*texts, LARGE])))
    assert sorted(found.get("train", []) + found.get("val", [])) == sorted([*texts, LARGE])


# Both of these have fractions below the usual share of validation.
@example(["c\ncaca\n \n", "a" * 16])
@given(UNIQUE)
def test_however_few_documents_one_is_for_validation_and_one_is_left_to_train(texts: Documents) -> None:
    found = by_split(corpus_of(made_part(texts)))
    assert found["train"] and found["val"]


@given(UNIQUE)
def test_the_split_does_not_depend_on_the_order_of_documents(texts: Documents) -> None:
    found, other = by_split(corpus_of(made_part(texts))), by_split(corpus_of(made_part(texts[::-1])))
    assert {split: set(mine) for split, mine in found.items()} == {split: set(mine) for split, mine in other.items()}


@given(UNIQUE, st.lists(st.integers(0, 39), max_size=20))
def test_equal_documents_fall_on_the_same_side(texts: Documents, again: list[int]) -> None:
    repeated = texts + [texts[number % len(texts)] for number in again]
    found = by_split(corpus_of(made_part([*repeated, LARGE])))
    assert not set(found["train"]) & set(found["val"])


def test_about_the_usual_share_is_for_validation() -> None:
    texts = [f"document {number}\n" for number in range(4000)]
    share = len(by_split(corpus_of(made_part(texts)))["val"]) / len(texts)
    # A hash is as good as a coin: four standard deviations of 4,000 throws.
    assert abs(share - VALIDATION_SHARE) < 4 * (VALIDATION_SHARE * (1 - VALIDATION_SHARE) / 4000) ** 0.5


def test_a_large_corpus_keeps_no_more_for_validation_than_is_of_use(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = [f"document {number:5}\n" for number in range(4000)]
    monkeypatch.setattr(survey_module, "VALIDATION_BYTES", 40 * len(texts[0]))
    held_out = len(by_split(corpus_of(made_part(texts)))["val"])
    assert abs(held_out - 40) < 4 * 40**0.5  # four standard deviations of a Poisson count


def test_more_documents_move_none_across_except_the_one_that_was_needed() -> None:
    texts = [f"document {number}\n" for number in range(400)]
    small, large = by_split(corpus_of(made_part(texts[:200]))), by_split(corpus_of(made_part(texts)))
    assert set(small["train"]) <= set(large["train"]) and set(small["val"]) <= set(large["val"])


def test_documents_that_are_all_the_same_cannot_be_split(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from oelm.data.prepare import prepare_corpus

    monkeypatch.setenv("OELM_CACHE", str(tmp_path))
    with pytest.raises(DataError, match="nothing in it for the train split; give more text, or more different text"):
        prepare_corpus(corpus_of(made_part(["same\n"] * 20)), tokenizer="bpe:300")


def test_a_split_of_the_sources_own_is_kept() -> None:
    found = by_split(
        corpus_of(made_part(["one", "two"], "train"), made_part(["three", "four"], "val"), made_part(["five"], "test"))
    )
    assert found == {"train": ["one", "two"], "val": ["three", "four"], "test": ["five"]}


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readers, "PIECE_CHARS", 40)


@pytest.mark.parametrize("words", [60, 600, 3000])
def test_a_single_document_is_cut_once_at_the_end_of_a_line(words: int) -> None:
    text = made_text(words)
    found = by_split(corpus_of(made_part([text])))
    (train,), (val,) = found["train"], found["val"]
    assert train + val == text and train.endswith("\n")


@pytest.mark.parametrize("words", [60, 600, 3000])
def test_a_single_document_in_many_pieces_is_cut_once(small: None, words: int) -> None:
    found = by_split(corpus_of(made_part([made_text(words)])))
    (train,), (val,) = found["train"], found["val"]
    assert train + val == made_text(words)


def test_a_single_document_keeps_about_the_usual_share_for_validation() -> None:
    text = made_text(2000)
    (val,) = by_split(corpus_of(made_part([text])))["val"]
    longest_line = max(map(len, text.splitlines(keepends=True)))
    # The cut goes back to the line end before it: at most one line more than the share, and the rounding of one character.
    assert 0 <= len(val) - VALIDATION_SHARE * len(text) <= longest_line + 1


# Sizes in words. The hash would give validation the large document, the small one, or one of three that are alike.
FEW = [(4000, 300), (300, 4000), (900, 900, 900), (4000, 10, 10, 10, 10), (500, 400, 300, 200)]


def test_of_a_few_documents_at_most_a_fifth_is_for_validation(small: None) -> None:
    for sizes in FEW:
        for seed in range(4):
            texts = [made_text(words, seed=10 * seed + number) for number, words in enumerate(sizes)]
            found = by_split(corpus_of(made_part(texts)))
            total, held_out = sum(map(len, texts)), sum(map(len, found["val"]))
            assert sorted("".join(found["train"] + found["val"])) == sorted("".join(texts)), (seed, sizes)
            assert 0 < held_out <= MOST_HELD_OUT * total, (seed, sizes)


# The hash would give the first of them to validation, whole.
UNEVEN = [made_text(4000, seed=5), made_text(300, seed=1), made_text(200, seed=2)]


def test_the_largest_of_a_few_documents_is_cut_whatever_their_order() -> None:
    found, other = by_split(corpus_of(made_part(UNEVEN))), by_split(corpus_of(made_part(UNEVEN[:0:-1]), made_part(UNEVEN[:1])))
    (val,) = found["val"]
    assert UNEVEN[0].endswith(val) and abs(len(val) - VALIDATION_SHARE * sum(map(len, UNEVEN))) < 100
    assert other["val"] == found["val"] and sorted(other["train"]) == sorted(found["train"])


def test_copies_of_a_cut_document_are_cut_at_the_same_place() -> None:
    found = by_split(corpus_of(made_part([*UNEVEN, UNEVEN[0]])))
    assert len(found["val"]) == 2 and len(set(found["val"])) == 1 and not set(found["train"]) & set(found["val"])


def test_documents_too_short_to_cut_stay_whole() -> None:
    assert sorted(map(sorted, by_split(corpus_of(made_part(["a", "b"]))).values())) == [["a"], ["b"]]


@pytest.mark.parametrize(("texts", "is_cut"), [(UNEVEN, True), ([made_text(50, seed=n) for n in range(60)], False)])
def test_only_a_set_whose_split_within_a_document_is_new_has_another_fingerprint(texts: Documents, is_cut: bool) -> None:
    content = _read_through(corpus_of(made_part(texts)), lambda done: None)["fingerprint"]
    assert (fingerprint((None, texts)) != content) == is_cut


def test_a_survey_keeps_the_sizes_of_few_documents_in_mind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(survey_module, "VALIDATION_BYTES", 1000)
    loose = _Loose()
    for number in range(10_000):
        loose.add(fraction(str(number)), text_bytes=50, characters=50)
    assert len(loose.near) < 60 and loose.cut(1000 / 500_000) is None


def test_of_a_few_documents_of_many_pieces_one_is_for_validation(small: None) -> None:
    for seed in range(20):
        found = by_split(corpus_of(made_part([made_text(200, seed=3 * seed + number) for number in range(3)])))
        assert len(found["val"]) >= 1 and len(found["train"]) >= 1


@pytest.mark.parametrize("length", [8, 200, 5000])
def test_a_document_of_one_line_is_cut_within_it(small: None, length: int) -> None:
    text = ("word " * length)[:length] + "end"
    found = by_split(corpus_of(made_part([text])))
    assert found["train"][0] + found["val"][0] == text and found["val"][0]


def test_a_single_document_beside_a_test_split_is_cut_and_the_test_stays_whole(tmp_path: Path) -> None:
    (tmp_path / "train.txt").write_text(made_text(2000))
    (tmp_path / "test.txt").write_text(made_text(300, seed=1))
    corpus, look = survey(file_corpus(tmp_path), tell=lambda done: None)
    assert sorted(str(part.split) for part in corpus.parts) == ["test", "train", "val"]
    text = {part.split: "".join(piece.text for piece in part.read()) for part in corpus.parts}
    assert text["train"] + text["val"] == made_text(2000) and text["test"] == made_text(300, seed=1)
    assert look.documents == 2


def test_a_single_document_among_empty_files_is_cut_too(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(made_text(200))
    (tmp_path / "b.txt").write_text(" \n")
    found = by_split(file_corpus(tmp_path))
    assert "".join(found["train"] + found["val"]) == made_text(200)


@pytest.mark.parametrize("text", ["x", "x\n", "\n\n\n\nx"])
def test_a_text_too_short_to_cut_is_refused_with_its_length(text: str) -> None:
    with pytest.raises(DataError, match=f"made here: {len(text)} characters are too few"):
        surveyed(corpus_of(made_part([text])))


def test_a_corpus_without_text_is_refused_with_how_many_files_were_seen() -> None:
    with pytest.raises(DataError, match=r"made here: no text in it \(2 files looked at\)"):
        surveyed(corpus_of(made_part([" \n"]), made_part([])))


def test_a_survey_counts_documents_and_bytes() -> None:
    look = surveyed(corpus_of(made_part(["one \u00fc\n", "two\n"]), made_part(["three\n"])))[1]
    assert (look.documents, look.text_bytes) == (3, len("one \u00fc\ntwo\nthree\n".encode()))


OTHERS: dict[str, tuple[tuple[Split | None, Documents], ...]] = {
    "text": (("train", ["one\n", "too\n"]), ("val", ["three\n"])),
    "order": (("train", ["two\n", "one\n"]), ("val", ["three\n"])),
    "border": (("train", ["one\ntwo\n"]), ("val", ["three\n"])),
    "moved-border": (("train", ["one\nt", "wo\n"]), ("val", ["three\n"])),
    "split": (("train", ["one\n", "two\n"]), ("test", ["three\n"])),
    "split-border": (("train", ["one\n"]), ("val", ["two\n", "three\n"])),
    "missing": (("train", ["one\n", "two\n"]),),
    "by-hash": ((None, ["one\n", "two\n"]), ("val", ["three\n"])),
}


def fingerprint(*content: tuple[Split | None, Documents], name: str = "made") -> str:
    return surveyed(corpus_of(*(made_part(texts, split) for split, texts in content), name=name))[1].fingerprint


def test_another_content_is_another_fingerprint() -> None:
    for content in OTHERS.values():
        assert fingerprint(*content) != fingerprint(("train", ["one\n", "two\n"]), ("val", ["three\n"])), content


def test_another_name_is_another_fingerprint() -> None:
    content: tuple[Split | None, Documents] = ("train", ["one\n"])
    assert fingerprint(content, name="made") != fingerprint(content, name="named")


def test_windows_line_ends_give_the_same_fingerprint(tmp_path: Path) -> None:
    looks = []
    for folder, end in (("unix", "\n"), ("windows", "\r\n")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "a.txt").write_bytes(made_text(500).replace("\n", end).encode())
        looks.append(surveyed(file_corpus(tmp_path / folder / "a.txt"))[1])
    assert looks[0] == looks[1]


def test_a_corpus_at_a_pinned_commit_is_taken_at_its_word() -> None:
    def unread() -> Iterator[Piece]:
        raise AssertionError("read, though the commit pins it")

    corpus = Corpus("made", "there", (Part("made", "train", unread),), revision="0" * 40, text_bytes=10**9)
    look = surveyed(corpus)[1]
    assert look.text_bytes == 10**9 and "0" * 40 in look.fingerprint


def walk(corpus: Corpus, threshold: float, *, after: tuple[int, int] = (-1, 0)) -> list[Item]:
    return list(items(corpus, threshold, after=after, full=frozenset()))


def test_behind_any_place_the_rest_is_what_it_would_have_been(small: None) -> None:
    corpus = corpus_of(made_part([made_text(40, seed=n) for n in range(6)]), made_part([made_text(60)], "val"))
    whole = walk(corpus, 0.5)
    assert len({item.split for item in whole}) == 2 and any(not item.piece.ends for item in whole)
    for place, item in enumerate(whole):
        assert walk(corpus, 0.5, after=item.at) == whole[place + 1 :]


def test_what_is_left_of_a_full_split_is_not_read() -> None:
    read: list[str] = []

    def reading() -> Iterator[Piece]:
        for number in range(100):
            read.append(f"{number}")
            yield Piece(f"{number}", ends=True)

    full: set[Split | None] = set()
    corpus = corpus_of(Part("long", "train", reading), made_part(["val\n"], "val"))
    found = []
    for item in items(corpus, 0.0, full=full):
        found.append(item.split)
        full.add("train")
    assert found == ["train", "val"] and len(read) == 2


@given(st.lists(st.integers(1, 50), max_size=30), st.integers(1, 100))
def test_batches_are_the_stream_in_order_and_none_much_larger_than_asked(sizes: list[int], size_chars: int) -> None:
    stream = [Item("train", Piece("x" * size, ends=True), (0, number)) for number, size in enumerate(sizes)]
    found = list(batches(iter(stream), size_chars=size_chars))
    assert [item for batch in found for item in batch] == stream
    assert all(sum(len(item.piece.text) for item in batch[:-1]) < size_chars for batch in found)


def test_a_tokenizer_is_shown_training_text_only() -> None:
    texts = [f"document {number}\n" for number in range(300)]
    corpus, look = surveyed(corpus_of(made_part(texts), made_part(["held out\n"], "val"), made_part(["tested\n"], "test")))
    shown = list(train_texts(corpus, look.threshold, most_bytes=10**6, most_documents=None))
    assert shown == by_split(corpus)["train"]


LIMITED: dict[str, tuple[Callable[[Corpus], Iterator[str]], int]] = {
    "documents": (partial(train_texts, threshold=-1.0, most_bytes=10**6, most_documents=7), 7),
    # Ten bytes each: the fourth begins with 30 seen, and ends the matter.
    "bytes": (partial(train_texts, threshold=-1.0, most_bytes=35, most_documents=None), 4),
}


@pytest.mark.parametrize(("shown", "count"), LIMITED.values(), ids=LIMITED.keys())
def test_a_tokenizer_is_shown_as_much_as_asked(shown: Callable[[Corpus], Iterator[str]], count: int) -> None:
    texts = [f"text {number:4}\n" for number in range(50)]
    assert list(shown(corpus_of(made_part(texts)))) == texts[:count]


def test_the_survey_tells_how_far_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(survey_module, "_TELL_BYTES", 100)
    told: list[int] = []
    look = survey(corpus_of(made_part([made_text(10, seed=n) for n in range(30)])), tell=told.append)[1]
    assert len(told) > 5 and told == sorted(told) and told[-1] <= look.text_bytes


def test_a_line_end_far_off_does_not_decide_the_cut_of_a_single_document(tmp_path: Path) -> None:
    path = tmp_path / "title.txt"
    path.write_text("Title\n" + "word " * 4000)
    corpus, _ = survey(file_corpus(path), tell=lambda done: None)
    sizes = {part.split: sum(len(piece.text) for piece in part.read()) for part in corpus.parts}
    assert sizes["train"] > 10 * sizes["val"]


def test_text_that_did_not_change_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OELM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(tokens_module, "_SETTLED_S", -60.0)
    monkeypatch.setattr(survey_module, "_TELL_BYTES", 1)
    path = tmp_path / "text.txt"
    path.write_text("one\n" * 100)
    told: list[int] = []
    (first, look), (again, look_again) = (survey(file_corpus(path), tell=told.append) for _ in range(2))
    assert len(told) == 1 and look == look_again
    assert [part.split for part in first.parts] == [part.split for part in again.parts] == ["train", "val"]
    path.write_text("two\n" * 100)
    assert survey(file_corpus(path), tell=told.append)[1].fingerprint != look.fingerprint and len(told) == 2


def test_another_column_of_the_same_table_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OELM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(tokens_module, "_SETTLED_S", -60.0)
    path = tmp_path / "table.jsonl"
    path.write_text('{"text": "one", "other": "two"}\n' * 2)
    looks = [survey(file_corpus(path, column=name), tell=lambda done: None)[1] for name in ("text", "other")]
    assert looks[0].fingerprint != looks[1].fingerprint
