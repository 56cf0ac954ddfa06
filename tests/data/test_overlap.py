"""A held-out text that shares a run of words with the training text is found, and no other."""

from __future__ import annotations

import re
from collections.abc import Iterator

from hypothesis import given
from hypothesis import strategies as st

from oelm.data.python_source import sharing

TEXTS = st.lists(st.lists(st.sampled_from("abc"), max_size=12).map(" ".join), max_size=5)


def runs(text: str, words: int) -> set[tuple[str, ...]]:
    found = re.findall(r"\w+", text)
    return {tuple(found[at : at + words]) for at in range(len(found) - words + 1)}


@given(TEXTS, TEXTS, st.integers(1, 5))
def test_the_texts_found_are_those_of_a_plain_comparison(held_out: list[str], training: list[str], words: int) -> None:
    trained = {run for text in training for run in runs(text, words)}
    expected = {number for number, text in enumerate(held_out) if runs(text, words) & trained}
    assert sharing(enumerate(held_out), training, words=words) == expected


def test_a_run_is_the_same_words_in_the_same_order_whatever_lies_between() -> None:
    cases: list[tuple[str, bool]] = [
        ("x = one(two,\n    three)  # four", True),
        ("one.two three-four", True),
        ("one two three", False),
        ("one two three five", False),
        ("two three four one", False),
        ("one two THREE four", False),
        ("one_two three four", False),
    ]
    for training, is_shared in cases:
        assert (sharing([("held", "one two three four")], [training], words=4) == {"held"}) == is_shared, (training, is_shared)


def test_a_run_does_not_reach_over_the_end_of_a_text() -> None:
    assert sharing([("held", "one two three four")], ["one two", "three four"], words=3) == set()


def test_training_texts_are_read_one_at_a_time() -> None:
    alive = most = 0

    class Text(str):
        def __del__(self) -> None:
            nonlocal alive
            alive -= 1

    def texts() -> Iterator[str]:
        nonlocal alive, most
        for number in range(20):
            alive += 1
            most = max(most, alive)
            yield Text(f"some words of text number {number}")

    assert sharing([("held", "words of text number 7")], texts(), words=5) == {"held"}
    # The one that is compared, and the one that is made while the name still holds it.
    assert most <= 2
