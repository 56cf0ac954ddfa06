"""Examples are encoded as the model's own tokenizer does it in transformers, once for each content."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, processors

from oelm.data.example_sets import ExampleSet, pad_id, prepare_examples
from oelm.data.examples import Example, ExampleSource
from oelm.data.tokenizer import train_bpe, wordpiece
from oelm.errors import ConfigError, DataError
from tests.conftest import WORDS

MARKS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
LETTERS = "abcdefghijklmnopqrstuvwxyz"
EXAMPLES = [
    Example("The cat sat on a mat.", None, 0),
    Example("two birds near old trees while rain fell over green hills and two more birds saw the rain", None, 1),
    Example("", None, 1),
    Example("Zo\u00eb \u4e2d\u6587 sat!", None, 0),
]
PAIRS = [
    Example("the cat sat on a mat", "a cat", 0),
    Example("a mat", "two birds near old trees while rain fell over green hills", 1),
    Example("two birds near old trees while rain fell", "the cat sat on a mat and saw two birds near old trees", 1),
    Example("", "", 0),
]


def write_vocabulary(folder: Path) -> Path:
    """Write the files of a small WordPiece tokenizer: the words of made-up text, and letters for all others."""
    folder.mkdir(parents=True, exist_ok=True)
    vocab = [*MARKS, *sorted(set(WORDS) - {"a"}), *LETTERS, *(f"##{letter}" for letter in LETTERS), ".", "!", "##s"]
    words = list(dict.fromkeys(vocab))
    (folder / "vocab.txt").write_text("\n".join(words) + "\n", encoding="utf-8")
    return folder


def source_of(examples: Sequence[Example], *, names: tuple[str, ...] = ("no", "yes"), **splits: list[Example]) -> ExampleSource:
    parts = {"train": list(examples), **splits}
    return ExampleSource("made", "by hand", names, {split: partial(iter, part) for split, part in parts.items()})


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer.json, as a model's folder has it."""
    folder = write_vocabulary(tmp_path_factory.mktemp("vocabulary"))
    wordpiece(folder).save(str(folder / "tokenizer.json"))
    return folder / "tokenizer.json"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache that no other test sees."""
    monkeypatch.setenv("OELM_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def theirs(vocabulary: Path, example: Example, max_length: int | None) -> tuple[list[int], list[int]]:
    """Return ids and types of an example as transformers gives them."""
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(
        tokenizer_file=str(vocabulary), pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]"
    )
    options: dict[str, Any] = {"truncation": "longest_first", "max_length": max_length} if max_length else {}
    # As lists: alone, an empty second text would be taken for none.
    pair = None if example.pair is None else [example.pair]
    encoded = tokenizer([example.text], pair, return_token_type_ids=True, **options)
    return encoded["input_ids"][0], encoded["token_type_ids"][0]


def ours(prepared: ExampleSet, number: int) -> tuple[list[int], list[int]]:
    """Return ids and types of one training example, without padding."""
    alone = prepared.splits["train"].padded(np.array([number]), prepared.meta.pad)
    return alone.ids[0].tolist(), alone.types[0].tolist()


def test_ids_and_types_are_those_of_transformers(vocabulary: Path) -> None:
    cases: list[list[Example]] = [EXAMPLES, PAIRS]
    for examples in cases:
        for max_length in (5, 8, 128):
            prepared = prepare_examples(source_of(examples), tokenizer=str(vocabulary), max_length=max_length)
            assert [ours(prepared, number) for number in range(len(examples))] == [
                theirs(vocabulary, example, max_length) for example in examples
            ], max_length


text = st.lists(
    st.sampled_from([*WORDS, "Xyz", "[SEP]", "\u00e9t\u00e9", "\u4e2d\u6587", "'s", "\U0001f426"]), max_size=12
).map(" ".join)


@given(pairs=st.lists(st.tuples(text, text), min_size=1, max_size=8), max_length=st.integers(4, 20))
@settings(deadline=None, max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_pair_is_cut_where_transformers_cuts_it(
    pairs: list[tuple[str, str]], max_length: int, vocabulary: Path, cache: Path
) -> None:
    examples = [Example(first, second, 0) for first, second in pairs]
    prepared = prepare_examples(source_of(examples), tokenizer=str(vocabulary), max_length=max_length)
    assert [ours(prepared, number)[0] for number in range(len(examples))] == [
        theirs(vocabulary, example, max_length)[0] for example in examples
    ]


# 9 and 11 are the lengths of the first example and the first pair, which just fit.
def test_cut_counts_the_examples_that_were_too_long(vocabulary: Path) -> None:
    cases: list[list[Example]] = [EXAMPLES, PAIRS]
    for examples in cases:
        for max_length in (5, 8, 9, 11, 128):
            prepared = prepare_examples(source_of(examples), tokenizer=str(vocabulary), max_length=max_length)
            too_long = [example for example in examples if len(theirs(vocabulary, example, None)[0]) > max_length]
            assert prepared.meta.splits["train"].cut == len(too_long), max_length


def test_padding_and_truncation_inside_a_tokenizer_file_do_not_leak_in(vocabulary: Path, tmp_path: Path) -> None:
    changed = Tokenizer.from_file(str(vocabulary))
    changed.enable_padding(length=40, pad_id=1, direction="left")
    changed.enable_truncation(4, stride=2, direction="left")
    changed.save(str(tmp_path / "changed.json"))
    plain, other = (
        prepare_examples(source_of(PAIRS), tokenizer=str(path), max_length=10)
        for path in (vocabulary, tmp_path / "changed.json")
    )
    assert [ours(other, number) for number in range(len(PAIRS))] == [ours(plain, number) for number in range(len(PAIRS))]


def test_the_pad_of_a_tokenizer_file_is_the_pad_of_the_set(vocabulary: Path, tmp_path: Path) -> None:
    changed = Tokenizer.from_file(str(vocabulary))
    changed.enable_padding(pad_id=4, pad_token="[MASK]")
    changed.save(str(tmp_path / "changed.json"))
    assert prepare_examples(source_of(PAIRS), tokenizer=str(tmp_path / "changed.json"), max_length=10).meta.pad == 4


def test_without_a_setting_the_pad_is_the_vocabulary_s_own(vocabulary: Path) -> None:
    tokenizer = Tokenizer.from_file(str(vocabulary))
    assert pad_id(tokenizer) == tokenizer.token_to_id("[PAD]")


def test_a_tokenizer_without_any_pad_is_refused() -> None:
    tokenizer = Tokenizer.from_str(train_bpe(["some text"], vocab_size=257).to_str().replace("<|endoftext|>", "<other>"))
    with pytest.raises(DataError, match=r"no token to pad with \(looked for \[PAD\], <pad>"):
        pad_id(tokenizer)


def test_a_pad_outside_of_the_vocabulary_is_refused(vocabulary: Path, tmp_path: Path) -> None:
    settings = json.loads(vocabulary.read_text())
    settings["padding"] = {
        "strategy": "BatchLongest",
        "direction": "Right",
        "pad_to_multiple_of": None,
        "pad_id": 9999,
        "pad_type_id": 0,
        "pad_token": "[PAD]",
    }
    (tmp_path / "odd.json").write_text(json.dumps(settings))
    with pytest.raises(DataError, match="pads with id 9999, but the vocabulary has"):
        prepare_examples(source_of(PAIRS), tokenizer=str(tmp_path / "odd.json"), max_length=10)


@pytest.mark.parametrize(("number", "dtype"), [(500, "uint16"), (70_000, "uint32")])
def test_a_vocabulary_with_a_hole_counts_up_to_its_last_id(number: int, dtype: str, vocabulary: Path, tmp_path: Path) -> None:
    settings = json.loads(vocabulary.read_text())
    settings["model"]["vocab"]["xyzzy"] = number
    (tmp_path / "hole.json").write_text(json.dumps(settings))
    prepared = prepare_examples(source_of([Example("xyzzy", None, 0)]), tokenizer=str(tmp_path / "hole.json"), max_length=5)
    assert (prepared.meta.vocab_size, prepared.meta.dtype, ours(prepared, 0)[0][1]) == (number + 1, dtype, number)


def test_unlabelled_examples_are_left_out_and_counted(vocabulary: Path) -> None:
    examples = [Example("the cat", None, 1), Example("a mat", None, -1), Example("two birds", None, 0), Example("x", None, -1)]
    prepared = prepare_examples(source_of(examples), tokenizer=str(vocabulary), max_length=10)
    known = prepared.meta.splits["train"]
    assert (known.examples, known.unlabelled, prepared.splits["train"].labels.tolist()) == (2, 2, [1, 0])


def test_the_record_counts_what_the_split_holds(vocabulary: Path) -> None:
    prepared = prepare_examples(source_of(PAIRS, val=EXAMPLES), tokenizer=str(vocabulary), max_length=12)
    for split, examples in (("train", PAIRS), ("val", EXAMPLES)):
        known, held = prepared.meta.splits[split], prepared.splits[split]
        assert (known.examples, known.tokens, known.longest) == (len(examples), held.lengths.sum(), held.lengths.max())
        assert known.text_bytes == sum(len((example.text + (example.pair or "")).encode()) for example in examples)
        assert known.label_counts == (2, 2)


def test_more_examples_than_are_encoded_at_once_keep_their_order(vocabulary: Path, cache: Path) -> None:
    examples = [Example("the " * (number % 7), None, number % 2) for number in range(2345)]
    prepared = prepare_examples(source_of(examples), tokenizer=str(vocabulary), max_length=20)
    assert (prepared.splits["train"].lengths - 2).tolist() == [number % 7 for number in range(2345)]
    assert prepared.splits["train"].labels.tolist() == [number % 2 for number in range(2345)]


def traces(folder: Path) -> dict[str, tuple[int, int]]:
    """Return what changes when a file is written again."""
    return {str(path): (path.stat().st_ino, path.stat().st_mtime_ns) for path in folder.rglob("*") if path.is_file()}


def test_the_same_examples_are_not_encoded_again(vocabulary: Path, cache: Path) -> None:
    first = prepare_examples(source_of(PAIRS), tokenizer=str(vocabulary), max_length=10)
    before = traces(first.path)
    again = prepare_examples(source_of(PAIRS), tokenizer=str(vocabulary), max_length=10)
    assert (again.path, traces(again.path)) == (first.path, before)


OTHER_SETS: dict[str, dict[str, Any]] = {
    "max_length": {"max_length": 11},
    "a text": {"source": source_of([*PAIRS[:-1], Example("", "x", 0)])},
    "a label": {"source": source_of([*PAIRS[:-1], Example("", "", 1)])},
    "the order": {"source": source_of(PAIRS[::-1])},
    "the names of labels": {"source": source_of(PAIRS, names=("yes", "no"))},
    "one more split": {"source": source_of(PAIRS, val=EXAMPLES)},
}


@pytest.mark.parametrize("changed", OTHER_SETS)
def test_another_content_is_another_set(changed: str, vocabulary: Path, cache: Path) -> None:
    asked: dict[str, Any] = {"source": source_of(PAIRS), "max_length": 10}
    first, other = (
        prepare_examples(what["source"], tokenizer=str(vocabulary), max_length=what["max_length"])
        for what in (asked, asked | OTHER_SETS[changed])
    )
    assert other.path != first.path


def test_texts_that_are_the_same_in_a_row_but_end_elsewhere_are_another_set(vocabulary: Path, cache: Path) -> None:
    first, other = (
        prepare_examples(source_of([Example(*pair, 0)]), tokenizer=str(vocabulary), max_length=10)
        for pair in (("a", "bc"), ("ab", "c"))
    )
    assert other.path != first.path


def test_another_tokenizer_is_another_set(vocabulary: Path, tmp_path: Path, cache: Path) -> None:
    changed = Tokenizer.from_file(str(vocabulary))
    changed.add_tokens(["birds near"])
    changed.save(str(tmp_path / "changed.json"))
    paths = {
        prepare_examples(source_of(PAIRS), tokenizer=str(path), max_length=10).path
        for path in (vocabulary, tmp_path / "changed.json")
    }
    assert len(paths) == 2


def test_the_digest_of_the_whole_set_tells_labels_apart(vocabulary: Path) -> None:
    sets = [
        prepare_examples(source_of(PAIRS, names=names), tokenizer=str(vocabulary), max_length=10)
        for names in (("no", "yes"), ("yes", "no"))
    ]
    assert sets[0].meta.fingerprint != sets[1].meta.fingerprint


def test_a_preparation_that_fails_leaves_no_set_behind(vocabulary: Path, cache: Path) -> None:
    def breaking() -> Any:
        yield PAIRS[0]
        raise DataError("the connection broke")

    source = ExampleSource("made", "by hand", ("no", "yes"), {"train": breaking}, revision="pinned")
    with pytest.raises(DataError, match="the connection broke"):
        prepare_examples(source, tokenizer=str(vocabulary), max_length=10)
    assert [path.name for path in (cache / "tasks").iterdir() if path.is_dir()] == []


def test_a_split_without_labelled_examples_is_refused_by_name(vocabulary: Path) -> None:
    source = source_of(PAIRS, val=[Example("a", None, -1)])
    with pytest.raises(DataError, match=r"no labelled example for the val split; leave its file out.*--dev"):
        prepare_examples(source, tokenizer=str(vocabulary), max_length=10)


def test_a_tokenizer_still_to_be_trained_is_refused() -> None:
    with pytest.raises(ConfigError, match="'bpe:300': a classifier's is given by its model's files"):
        prepare_examples(source_of(PAIRS), tokenizer="bpe:300", max_length=10)


@pytest.mark.parametrize("max_length", [-1, 0, 2])
def test_a_max_length_without_room_for_a_word_is_refused(max_length: int, vocabulary: Path) -> None:
    with pytest.raises(ConfigError, match=f"max_length {max_length}: "):
        prepare_examples(source_of(PAIRS), tokenizer=str(vocabulary), max_length=max_length)


def test_a_max_length_below_the_marks_of_a_pair_is_refused(vocabulary: Path, tmp_path: Path) -> None:
    # As RoBERTa's: four marks a pair. With less room than that the library cuts nothing at all.
    tokenizer = Tokenizer.from_file(str(vocabulary))
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] [SEP] $B [SEP]",
        special_tokens=[(mark, tokenizer.token_to_id(mark)) for mark in ("[CLS]", "[SEP]")],
    )
    tokenizer.save(str(tmp_path / "four.json"))
    with pytest.raises(ConfigError, match="max_length 3: this tokenizer's marks alone need 4; give more"):
        prepare_examples(source_of(PAIRS), tokenizer=str(tmp_path / "four.json"), max_length=3)


def test_a_model_s_folder_gives_the_ids_of_its_vocabulary(vocabulary: Path, tmp_path: Path) -> None:
    prepared = prepare_examples(source_of(PAIRS), tokenizer=str(write_vocabulary(tmp_path / "model")), max_length=10)
    assert [ours(prepared, number) for number in range(len(PAIRS))] == [theirs(vocabulary, pair, 10) for pair in PAIRS]
