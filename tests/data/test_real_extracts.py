"""The data sets of the study, from the real extracts beside the repository: all prepare, count right, and train."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from oelm.data.example_sets import ExampleSet
from oelm.data.order import BucketOrder
from oelm.data.public_sets import CORPORA as ENTRIES
from oelm.data.readers import fraction
from oelm.data.request import Request
from oelm.data.sources import folder_corpus, items
from oelm.data.survey import survey
from oelm.data.tokenizer import load_tokenizer
from oelm.data.tokens import TokenSet
from tests.conftest import run_here, tiny_config

EXTRACTS = Path(__file__).parents[3] / "shared" / "data"
MISSING = pytest.mark.skipif(
    not (EXTRACTS / "SHA256SUMS").is_file(), reason=f"no extracts of the public data sets in {EXTRACTS}"
)
pytestmark = [MISSING, pytest.mark.slow]
CORPORA = ("tinystories", "openwebtext", "wikitext103")
TASKS = ("sst2", "mnli", "xnli")


@pytest.fixture(scope="module")
def corpora() -> dict[str, TokenSet]:
    """The corpora, whole, in GPT-2's tokens."""
    made: dict[str, TokenSet] = {}
    for name in (*CORPORA, "wikitext2"):
        prepared = Request(name=name, folder=EXTRACTS / name, tokenizer=str(EXTRACTS / "gpt2_bpe")).prepare()
        assert isinstance(prepared, TokenSet)
        made[name] = prepared
    return made


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A WordPiece vocabulary of the words that are frequent in SST-2, and of single letters."""
    text = (EXTRACTS / "sst2" / "train.tsv").read_text(encoding="utf-8").lower()
    words = [word for word, _ in Counter(re.findall(r"[a-z]+|[^a-z\s]", text)).most_common(4000)]
    pieces = [f"##{letter}" for letter in "abcdefghijklmnopqrstuvwxyz"]
    folder = tmp_path_factory.mktemp("model")
    (folder / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", *words, *pieces]), encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def tasks(vocabulary: Path) -> dict[str, ExampleSet]:
    made: dict[str, ExampleSet] = {}
    for name in TASKS:
        prepared = Request(name=name, folder=EXTRACTS / name, tokenizer=str(vocabulary), max_length=64).prepare()
        assert isinstance(prepared, ExampleSet)
        made[name] = prepared
    return made


@pytest.mark.parametrize(
    ("name", "documents"),
    [
        ("tinystories", {"train": 11_346, "val": 600}),
        ("openwebtext", {"train": 1_833, "val": 456}),
        # Lines ' = Title = ' behind an empty line, counted with grep; glossaries within articles have such lines, too.
        ("wikitext103", {"train": 155, "val": 60, "test": 60}),
        ("wikitext2", {"train": 601, "val": 60, "test": 60}),
    ],
)
def test_a_corpus_holds_the_documents_of_the_table(name: str, documents: dict[str, int], corpora: dict[str, TokenSet]) -> None:
    assert {split: known.documents for split, known in corpora[name].meta.splits.items()} == documents


def test_an_extract_of_wikitext_keeps_its_test_split(corpora: dict[str, TokenSet]) -> None:
    extract = Request(name="wikitext103", folder=EXTRACTS, tokenizer=str(EXTRACTS / "gpt2_bpe"), max_tokens=20_000).prepare()
    assert isinstance(extract, TokenSet) and list(extract.splits) == ["train", "val", "test"]
    for split, tokens in extract.splits.items():
        # The start of the whole split, up to the end of the document that reached the limit.
        assert 20_000 <= len(tokens) < len(corpora["wikitext103"].splits[split])
        assert np.array_equal(tokens, corpora["wikitext103"].splits[split][: len(tokens)])


@pytest.mark.parametrize(("name", "train", "val"), [("tinystories", 2.30e6, 0.12e6), ("openwebtext", 2.05e6, 0.5e6)])
def test_a_corpus_has_about_the_gpt2_tokens_of_the_table(
    name: str, train: float, val: float, corpora: dict[str, TokenSet]
) -> None:
    found = corpora[name]
    # The table rounds 0.12M to two digits, which is 4%; end-of-text marks add 0.5% at most.
    assert abs(len(found.train) / train - 1) < 0.05 and abs(len(found.val) / val - 1) < 0.05


@pytest.mark.parametrize("name", ["wikitext103", "wikitext2"])
@pytest.mark.parametrize(("split", "words", "with_line_ends"), [("val", 213_886, 217_646), ("test", 241_211, 245_569)])
def test_every_word_and_line_of_wikitext_comes_back_from_its_tokens(
    name: str, split: str, words: int, with_line_ends: int, corpora: dict[str, TokenSet]
) -> None:
    found = corpora[name]
    ids = np.fromfile(found.path / f"{split}.bin", dtype=np.uint16)
    text = load_tokenizer(found.path).decode(ids[ids != found.meta.end_of_text].tolist(), skip_special_tokens=False)
    assert (len(text.split()), len(text.split()) + text.count("\n")) == (words, with_line_ends)


def test_the_training_split_of_wikitext2_is_the_whole_file(corpora: dict[str, TokenSet]) -> None:
    text = (EXTRACTS / "wikitext2" / "train.tokens.txt").read_bytes()
    assert corpora["wikitext2"].meta.splits["train"].text_bytes == len(text)
    assert len(text.split()) + text.count(b"\n") == 2_088_628


@pytest.mark.parametrize("name", ["wikitext2", "wikipedia"])
def test_the_folder_of_all_sets_means_the_set_s_own(name: str) -> None:
    assert folder_corpus(ENTRIES[name], EXTRACTS).source == folder_corpus(ENTRIES[name], EXTRACTS / name).source


def test_wikipedia_has_as_many_articles_as_the_table_and_none_in_both_splits() -> None:
    corpus, look = survey(folder_corpus(ENTRIES["wikipedia"], EXTRACTS), tell=lambda done: None)
    splits = Counter((item.split, fraction(item.piece.text)) for item in items(corpus, look.threshold, full=frozenset()))
    train, val = ({text for split, text in splits if split == name} for name in ("train", "val"))
    assert look.documents == 1_601 and not train & val and 0.03 < len(val) / 1_601 < 0.07


@pytest.mark.parametrize(
    ("name", "examples"),
    [("sst2", {"train": 67_349, "val": 872}), ("mnli", {"train": 24_511, "val": 9_815}), ("xnli", {"val": 2_490})],
)
def test_a_task_holds_the_examples_of_the_table(name: str, examples: dict[str, int], tasks: dict[str, ExampleSet]) -> None:
    assert {split: known.examples for split, known in tasks[name].meta.splits.items()} == examples


@pytest.mark.parametrize(
    ("name", "split", "by_label"),
    [
        # GLUE's dev sets are complete here, and these are their published class counts; XNLI's is balanced by design.
        ("sst2", "val", (428, 444)),
        ("mnli", "val", (3_479, 3_123, 3_213)),
        ("xnli", "val", (830, 830, 830)),
    ],
)
def test_a_dev_set_has_its_known_number_of_each_label(
    name: str, split: str, by_label: tuple[int, ...], tasks: dict[str, ExampleSet]
) -> None:
    assert tasks[name].meta.splits[split].label_counts == by_label


@pytest.mark.parametrize(("name", "split"), [("sst2", "train"), ("mnli", "train"), ("xnli", "val")])
def test_the_first_batches_of_a_task_are_whole_rectangles(name: str, split: str, tasks: dict[str, ExampleSet]) -> None:
    task = tasks[name]
    held = task.splits[split]
    order = BucketOrder(held.lengths, 16, seed=0)
    for step in range(4):
        padded = held.padded(order.examples(step), task.meta.pad)
        first = load_tokenizer(task.path).token_to_id("[CLS]")
        assert padded.ids.shape == padded.mask.shape == padded.types.shape == (16, padded.mask.sum(axis=1).max())
        assert (padded.ids[:, 0] == first).all() and set(padded.labels.tolist()) <= set(range(len(task.meta.labels)))


@pytest.mark.parametrize("name", CORPORA)
def test_a_short_training_runs_on_each_corpus(name: str, tmp_path: Path) -> None:
    request = Request(name=name, folder=EXTRACTS / name, tokenizer="bpe:300", max_documents=3, out=tmp_path / "tokens")
    request.prepare()
    config = tiny_config(tmp_path / "tokens", steps=4, eval_every=4, save_every=4)
    result = run_here(config, tmp_path / "run")
    # Four steps from the loss of a guess among 300 tokens: lower than that, and no miracle.
    assert result.figures is not None and 50 < result.figures["best_ppl"] < 300


@pytest.mark.parametrize("name", CORPORA)
def test_the_folder_of_all_sets_serves_each_corpus(name: str) -> None:
    found = [
        Request(name=name, folder=at, tokenizer="bpe:300", max_tokens=2000).prepare() for at in (EXTRACTS, EXTRACTS / name)
    ]
    assert found[0].path == found[1].path


@pytest.mark.parametrize(
    ("name", "examples"),
    [
        ("sst2", {"train": 67_349, "val": 872}),
        ("mnli", {"train": 24_511, "val": 9_815}),
        # English XNLI trains on MNLI's pairs.
        ("xnli", {"train": 24_511, "val": 2_490}),
    ],
)
def test_the_folder_of_all_sets_serves_each_task(name: str, examples: dict[str, int], vocabulary: Path) -> None:
    prepared = Request(name=name, folder=EXTRACTS, tokenizer=str(vocabulary), max_length=64).prepare()
    assert isinstance(prepared, ExampleSet)
    assert {split: known.examples for split, known in prepared.meta.splits.items()} == examples
