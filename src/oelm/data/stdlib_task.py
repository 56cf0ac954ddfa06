"""A classification task that works offline: which package of the standard library is a snippet from?"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path

from tokenizers import Tokenizer
from tokenizers.normalizers import BertNormalizer

from oelm.data.corpora import Corpus
from oelm.data.examples import Example, ExampleSource
from oelm.data.pieces import fraction
from oelm.data.python_source import package_of, stdlib_corpus
from oelm.data.tokenizer import train_bpe
from oelm.data.tokens import OnProgress, no_progress
from oelm.data.vocabularies import BERT_MARKS, add_bert_marks
from oelm.files import cache_root, write_text

NUM_LABELS = 8
_SNIPPET_LINES = 8
_DEV_FILES = 0.1


def stdlib_examples() -> ExampleSource:
    """Return snippets of a few lines, labelled with their package, from the packages with the most files.

    Whole files are held out for dev: lines of one file are too similar.
    """
    corpus = stdlib_corpus()
    files = Counter(package_of(part.label) for part in corpus.parts if "/" in part.label)
    labels = tuple(sorted(sorted(files, key=lambda name: (-files[name], name))[:NUM_LABELS]))
    splits: dict[str, Callable[[], Iterator[Example]]] = {
        split: partial(_snippets, corpus, labels, split == "val") for split in ("train", "val")
    }
    name = corpus.name.replace("stdlib", "stdlib-packages")
    return ExampleSource(name, f"which package a snippet is from: {corpus.source}", labels, splits)


def _snippets(corpus: Corpus, labels: tuple[str, ...], dev: bool) -> Iterator[Example]:
    # Files share paragraphs; one that was trained on measures nothing.
    seen = {example.text for example in _snippets_of(corpus, labels, False)} if dev else set()
    return (example for example in _snippets_of(corpus, labels, dev) if example.text not in seen)


def _snippets_of(corpus: Corpus, labels: tuple[str, ...], dev: bool) -> Iterator[Example]:
    for part in corpus.parts:
        package = package_of(part.label)
        if package not in labels or "/" not in part.label or (fraction(part.label) < _DEV_FILES) != dev:
            continue
        lines = [line.strip() for piece in part.read() for line in piece.text.split("\n")]
        # An import or a mention of the package's own name would give the answer away.
        lines = [line for line in lines if line and package.lower() not in line.lower()]
        for start in range(0, len(lines) - _SNIPPET_LINES + 1, _SNIPPET_LINES):
            yield Example(" ".join(lines[start : start + _SNIPPET_LINES]), None, labels.index(package))


def stdlib_tokenizer(vocab_size: int, progress: OnProgress = no_progress) -> Path:
    """Return the path of a tokenizer.json trained on the task's own snippets; train it where it is missing."""
    source = stdlib_examples()
    path = cache_root() / "bert-bpe" / f"{source.name}-{vocab_size}.json"
    if not path.is_file():
        progress("training the tokenizer", 0, 1, 0)
        texts = (example.text for example in source.splits["train"]())
        write_text(path, train_bert_bpe(texts, vocab_size=vocab_size).to_str())
    return path


def train_bert_bpe(texts: Iterable[str], *, vocab_size: int) -> Tokenizer:
    """Train a lower-case byte-level BPE with BERT's marks; not WordPiece, whose trainer numbers words at random."""
    tokenizer = train_bpe(texts, vocab_size=vocab_size, marks=BERT_MARKS, normalizer=BertNormalizer(lowercase=True))
    add_bert_marks(tokenizer)
    return tokenizer
