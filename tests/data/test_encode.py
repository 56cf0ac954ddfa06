"""Texts, made ones and the real extracts', become the ids that the tokenizers' own libraries give, in order."""

from __future__ import annotations

import json
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import tiktoken
import tiktoken.load
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from oelm.data.prepare import prepare_corpus
from oelm.data.public_sets import CORPORA
from oelm.data.sources import folder_corpus
from oelm.data.tokenizer import END_OF_TEXT, encoder, end_of_text_id, folder_tokenizer, in_order, num_cores, train_bpe
from oelm.data.tokens import TokenSet
from tests.conftest import made_text

SHARED = Path(__file__).resolve().parents[3] / "shared" / "data"
GPT2 = SHARED / "gpt2_bpe"
# As the GPT-2 paper's code has it.
PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
TOKENIZER = train_bpe([made_text(300)], vocab_size=300)
TEXTS = st.text(st.one_of(st.sampled_from("aZ9.'sdt \n\t\r\u00a0\u3000\x85\x1c<|>"), st.characters(codec="utf-8")), max_size=60)


@pytest.fixture(scope="module")
def gpt2() -> Tokenizer:
    if not GPT2.is_dir():
        pytest.skip(f"no GPT-2 vocabulary at {GPT2}")
    return folder_tokenizer(GPT2)


@pytest.fixture(scope="module")
def tiktoken_gpt2(gpt2: Tokenizer) -> tiktoken.Encoding:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TIKTOKEN_CACHE_DIR", "")  # reads the files where they are, and keeps no copy
        ranks = tiktoken.load.data_gym_to_mergeable_bpe_ranks(str(GPT2 / "vocab.bpe"), str(GPT2 / "encoder.json"))
    return tiktoken.Encoding("reference", pat_str=PATTERN, mergeable_ranks=ranks, special_tokens={END_OF_TEXT: 50256})


@pytest.fixture(scope="module")
def tokenizers_gpt2(gpt2: Tokenizer) -> Tokenizer:
    merges = [line.split() for line in (GPT2 / "vocab.bpe").read_text(encoding="utf-8").split("\n")[1:] if line]
    vocab = json.loads((GPT2 / "encoder.json").read_text(encoding="utf-8"))
    reference = Tokenizer(models.BPE(vocab=vocab, merges=[(left, right) for left, right in merges]))
    reference.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    reference.decoder = decoders.ByteLevel()
    return reference


@given(st.lists(TEXTS, max_size=5))
@settings(deadline=None)
def test_ids_are_those_of_the_tokenizer(texts: list[str]) -> None:
    assert [ids.tolist() for ids in encoder(TOKENIZER)(texts)] == [
        TOKENIZER.encode(text, add_special_tokens=False).ids for text in texts
    ]


def test_gpt2s_ids_are_those_of_tiktoken_and_of_tokenizers(
    gpt2: Tokenizer, tiktoken_gpt2: tiktoken.Encoding, tokenizers_gpt2: Tokenizer
) -> None:
    encode = encoder(gpt2)

    @given(TEXTS)
    @settings(deadline=None, max_examples=500)
    def check(text: str) -> None:
        ours = encode([text])[0].tolist()
        assert ours == tiktoken_gpt2.encode_ordinary(text) == tokenizers_gpt2.encode(text).ids

    check()


def test_gpt2s_ids_are_the_same_without_tiktoken(gpt2: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    text = made_text(100) + " it's\u00a0\u4e2d  \n\n 99 \U0001f426"
    with_tiktoken = encoder(gpt2)([text])[0].tolist()
    monkeypatch.setitem(sys.modules, "tiktoken", None)  # what Python does for a package that is not installed
    assert encoder(gpt2)([text])[0].tolist() == with_tiktoken


def test_a_mark_written_in_a_text_is_text() -> None:
    text = f"one{END_OF_TEXT}two {END_OF_TEXT}"
    (ids,) = encoder(TOKENIZER)([text])
    assert end_of_text_id(TOKENIZER) not in ids and TOKENIZER.decode(ids.tolist()) == text


def test_a_mark_written_in_a_text_is_text_to_gpt2_too(gpt2: Tokenizer) -> None:
    text = f"one{END_OF_TEXT}two {END_OF_TEXT}"
    (ids,) = encoder(gpt2)([text])
    assert 50256 not in ids and gpt2.decode(ids.tolist()) == text


def test_what_a_tokenizer_file_says_of_cutting_and_padding_is_left_aside() -> None:
    limited = Tokenizer.from_str(TOKENIZER.to_str())
    limited.enable_truncation(3)
    limited.enable_padding(length=50)
    text = made_text(30)
    assert encoder(limited)([text])[0].tolist() == TOKENIZER.encode(text).ids


@pytest.mark.parametrize("workers", [1, 2, 5])
def test_what_is_made_comes_in_the_order_of_the_items(workers: int) -> None:
    def work(number: int) -> int:
        time.sleep(0.001 * (number % 5))  # the first of every five ends last
        return -number

    assert list(in_order(work, range(40), workers=workers)) == [(number, -number) for number in range(40)]


@pytest.mark.parametrize("workers", [1, 3])
def test_only_a_few_items_are_read_ahead(workers: int) -> None:
    read = 0

    def items() -> Iterator[int]:
        nonlocal read
        for number in range(100):
            read += 1
            yield number

    for number, (_, _) in enumerate(in_order(str, items(), workers=workers)):
        assert read - number <= 2 * workers + 1


def test_an_error_of_the_work_reaches_the_caller() -> None:
    def work(number: int) -> int:
        return 1 // (3 - number)

    with pytest.raises(ZeroDivisionError):
        list(in_order(work, range(10), workers=2))


def test_breaking_off_leaves_no_thread_behind() -> None:
    before = threading.active_count()
    stream = in_order(lambda number: time.sleep(0.01), range(100), workers=2)
    next(stream)
    stream.close()  # type: ignore[attr-defined]
    assert threading.active_count() == before


def test_there_is_a_core() -> None:
    assert num_cores() >= 1


def stories(path: Path) -> list[str]:
    found = path.read_text(encoding="utf-8").split(END_OF_TEXT)
    return [story.strip("\n") + "\n" for story in found if story.strip()]


def articles(path: Path) -> list[str]:
    # Each begins with the empty line before its title; a section's title has more marks.
    return re.split(r"(?m)(?=^ \n = [^=].* = \n)", path.read_text(encoding="utf-8"))[1:]


def web_pages(path: Path) -> list[str]:
    return [json.loads(line)["text"] for line in path.read_text(encoding="utf-8").split("\n") if line]


# How a few lines of Python read each extract, and its files.
EXTRACTS: dict[str, tuple[Callable[[Path], list[str]], dict[str, str]]] = {
    "tinystories": (stories, {"train": "train.txt", "val": "valid.txt"}),
    "wikitext103": (
        articles,
        {"train": "train-first-0.5pct.tokens.txt", "val": "valid.tokens.txt", "test": "test.tokens.txt"},
    ),
    "openwebtext": (web_pages, {"train": "train.jsonl train-more.jsonl", "val": "valid.jsonl"}),
}


@pytest.fixture(scope="module", params=EXTRACTS)
def extract(request: pytest.FixtureRequest, gpt2: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> TokenSet:
    """A real extract, prepared with GPT-2's tokens."""
    if not (SHARED / request.param).is_dir():
        pytest.skip(f"no extract of {request.param} under {SHARED}")
    corpus = folder_corpus(CORPORA[request.param], SHARED / request.param)
    return prepare_corpus(corpus, tokenizer=str(GPT2), out=tmp_path_factory.mktemp("extract") / request.param)


def ids_by_document(extract: TokenSet, split: str) -> list[list[int]]:
    """Read a token file as nanoGPT does, and part it at the marks."""
    data = np.memmap(extract.path / f"{split}.bin", dtype=np.uint16, mode="r")
    return [ids[:-1].tolist() for ids in np.split(data, np.flatnonzero(data == 50256) + 1)[:-1]]


@pytest.mark.slow
def test_every_document_of_a_real_extract_has_tiktokens_ids(extract: TokenSet, tiktoken_gpt2: tiktoken.Encoding) -> None:
    read, splits = EXTRACTS[extract.meta.name]
    for split, names in splits.items():
        texts = [text for name in names.split() for text in read(SHARED / extract.meta.name / name)]
        assert ids_by_document(extract, split) == [tiktoken_gpt2.encode_ordinary(text) for text in texts]


def test_three_hundred_documents_of_a_real_extract_have_tokenizers_ids(extract: TokenSet, tokenizers_gpt2: Tokenizer) -> None:
    read, splits = EXTRACTS[extract.meta.name]
    texts = read(SHARED / extract.meta.name / splits["val"])[:300]
    assert ids_by_document(extract, "val")[:300] == [encoding.ids for encoding in tokenizers_gpt2.encode_batch(texts)]


@pytest.mark.slow
def test_a_million_blanks_are_encoded_too(gpt2: Tokenizer) -> None:
    text = "a" + " " * 1_500_000 + "b"
    assert encoder(gpt2)([text])[0].tolist() == gpt2.encode(text).ids
