"""Labelled examples: rows of tables, local or on the hub, or snippets of the standard library."""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from tokenizers.normalizers import BertNormalizer

from oelm.data.public_sets import USUAL_COLUMNS, TaskEntry
from oelm.data.python_source import package_of, stdlib_corpus
from oelm.data.readers import Row, column_names, fraction, parquet_label_names, rows
from oelm.data.sources import (
    Corpus,
    find_splits,
    hub_label_names,
    hub_rows,
    neighbour_splits,
    plain_name,
    set_folder,
    short_path,
)
from oelm.data.tokenizer import BERT_MARKS, add_bert_marks, train_bpe
from oelm.data.tokens import OnProgress, no_progress
from oelm.errors import ConfigError, DataError
from oelm.files import cache_root, write_text

# Labels that mean none: in GLUE's tests, and for pairs on which the annotators disagreed.
_UNLABELLED = (None, "-", "", -1, "-1")
_DEV_SHARE = 0.05
_INTEGER = re.compile(r"-?[0-9]{1,9}")


@dataclass(frozen=True)
class Example:
    """One text, or a pair, and its label as a position in the task's labels; -1 where it has none."""

    text: str
    pair: str | None
    label: int


@dataclass(frozen=True)
class LabelMap:
    """The meaning of labels. Integers are positions in `integers`, which a release may order differently from `names`."""

    names: tuple[str, ...]
    integers: tuple[str, ...]
    aliases: dict[str, str] = field(default_factory=dict)

    def position(self, raw: Any, *, where: str) -> int:
        """Return a label's position in `names`, -1 for no label; DataError when it is unknown."""
        if raw in _UNLABELLED and raw is not False and raw not in self.names:
            return -1
        if isinstance(raw, str) and raw in self.aliases:
            raw = self.aliases[raw]
        if isinstance(raw, str) and raw in self.names:
            return self.names.index(raw)
        number = int(raw) if isinstance(raw, str) and _INTEGER.fullmatch(raw) else raw
        if isinstance(number, int) and not isinstance(number, bool) and 0 <= number < len(self.integers):
            return self.names.index(self.integers[number])
        known = ", ".join(f"{number} or {name!r}" for number, name in enumerate(self.integers))
        raise DataError(f"{where}: unknown label {raw!r}; known: {known}. Give their meaning with --labels A,B,...")


@dataclass(frozen=True)
class ExampleSource:
    """Named splits of examples. `integers` records, by file, the meaning of integer labels."""

    name: str
    source: str
    names: tuple[str, ...]
    splits: dict[str, Callable[[], Iterator[Example]]]
    revision: str | None = None
    integers: dict[str, str] = field(default_factory=dict)


def folder_examples(entry: TaskEntry, folder: Path, *, language: str, labels: tuple[str, ...] | None) -> ExampleSource:
    """Return a named task from local copies of its files, in this folder or in one of its name inside.

    `labels` overrides the order of integer labels.
    """
    # Of the public tests, only XNLI's has labels.
    known = ("train", *entry.dev_splits, *(("test",) if entry.languages else ()))
    own = set_folder(entry.name, folder)
    found = find_splits(own, wanted=known, only=language if entry.languages else "")
    if "train" not in found and entry.trains_on and language == "en":
        found |= neighbour_splits(folder, entry.trains_on, wanted=("train",))
    wanted = [split for split in known if split in found]
    if not wanted:
        raise DataError(
            f"--from {folder}: no file of {entry.name} (a .tsv, .jsonl or .parquet with 'train', 'dev' or 'valid' in its name)"
        )
    splits: dict[str, Callable[[], Iterator[Example]]] = {}
    integers: dict[str, str] = {}
    for split in wanted:
        for path in found[split]:
            columns = _columns_of(path, entry.columns)
            _check_language(path, entry, language)
            meaning = _integers(entry, path, columns["label"], labels)
            integers[path.name] = ", ".join(f"{number}={name}" for number, name in enumerate(meaning))
        splits[split] = partial(_all_files, found[split], entry, labels, language)
    names = ", ".join(short_path(path, own) for split in wanted for path in found[split])
    return ExampleSource(_name(entry, language), f"{entry.name}: local copies ({names})", entry.labels, splits, None, integers)


def _name(entry: TaskEntry, language: str) -> str:
    return f"{entry.name}-{language}" if entry.languages else entry.name


def _check_language(path: Path, entry: TaskEntry, language: str) -> None:
    words = {path.parent.name, *re.split(r"[^a-z]+", path.stem.lower())}
    if (others := words & set(entry.languages)) and language not in words and "language" not in column_names(path):
        raise DataError(f"{path}: its name says {min(others)!r}, not {language!r}; give --language {min(others)}")


def _all_files(paths: list[Path], entry: TaskEntry, labels: tuple[str, ...] | None, language: str) -> Iterator[Example]:
    for path in paths:
        columns = _columns_of(path, entry.columns)
        meaning = LabelMap(entry.labels, _integers(entry, path, columns["label"], labels), entry.aliases)
        keep = language if entry.languages and "language" in column_names(path) else None
        yield from read_examples(path, columns, meaning, language=keep)


def _integers(entry: TaskEntry, path: Path, column: str, given: tuple[str, ...] | None) -> tuple[str, ...]:
    chosen = given or _written_names(path, column) or entry.labels
    return _checked(tuple(entry.aliases.get(name, name) for name in chosen), entry.labels, where=str(path))


def _written_names(path: Path, column: str) -> tuple[str, ...] | None:
    return parquet_label_names(path, column) if path.suffix.lower() == ".parquet" else None


def _checked(integers: tuple[str, ...], names: tuple[str, ...], *, where: str) -> tuple[str, ...]:
    if sorted(integers) != sorted(names):
        raise DataError(
            f"{where}: its labels are {', '.join(integers)}; the task has {', '.join(names)}. Give the meaning of the "
            "integers 0, 1, ... with --labels, in these names"
        )
    return integers


def _columns_of(path: Path, spellings: tuple[dict[str, str], ...]) -> dict[str, str]:
    present = column_names(path)
    for columns in spellings:
        if all(name in present for name in columns.values()):
            return columns
    expected = " or ".join("(" + ", ".join(columns.values()) + ")" for columns in spellings)
    raise DataError(
        f"{path}: columns {', '.join(map(repr, present))}; expected {expected}. Give yours with --columns text=...,label=..."
    )


def read_examples(path: Path, columns: dict[str, str], labels: LabelMap, *, language: str | None = None) -> Iterator[Example]:
    """Read the examples of a table; `language` keeps the rows of that language."""
    wanted = (*columns.values(), "language") if language else tuple(columns.values())
    for number, row in rows(path, columns=wanted):
        if language is None or row["language"] == language:
            yield _example(row, columns, labels, where=f"{path}: row {number}")


def _example(row: Row, columns: dict[str, str], labels: LabelMap, *, where: str) -> Example:
    for part in ("text", "pair"):
        if part in columns and not isinstance(row[columns[part]], str):
            raise DataError(f"{where}: {columns[part]!r} is {type(row[columns[part]]).__name__}, expected text; fix the row")
    pair = row[columns["pair"]] if "pair" in columns else None
    return Example(row[columns["text"]], pair, labels.position(row[columns["label"]], where=where))


def hub_examples(entry: TaskEntry, *, language: str) -> ExampleSource:
    """Return a named task as the hub has it, streamed at the pinned commit."""
    hub = replace(entry.hub, config=entry.hub.config.format(language=language))
    hub_entry = replace(entry, hub=hub)
    splits = {split: partial(_hub_split, hub_entry, split) for split in hub.splits}
    source = f"{hub.repo} ({hub.config}) on the Hugging Face hub"
    return ExampleSource(_name(entry, language), source, entry.labels, dict(splits), revision=f"{hub.revision}/{hub.config}")


def _hub_split(entry: TaskEntry, split: str) -> Iterator[Example]:
    columns = entry.columns[0]
    own = hub_label_names(entry.hub, split, columns["label"], name=entry.name) or entry.labels
    labels = LabelMap(entry.labels, _checked(own, entry.labels, where=entry.hub.repo), entry.aliases)
    for number, row in hub_rows(entry.hub, split, columns=tuple(columns.values()), name=entry.name):
        yield _example(row, columns, labels, where=f"{entry.hub.repo} {split}: row {number}")


def file_examples(
    train: Path, dev: Path | None, *, columns: dict[str, str] | None, labels: tuple[str, ...] | None
) -> ExampleSource:
    """Return a user's table as a task; without a dev file, one example in twenty is held out by the hash of its text.

    Without `labels`, they are read from a Parquet file's metadata, or collected from training and sorted: all text or all
    integers.
    """
    spelling = _columns_of(train, (columns,) if columns else USUAL_COLUMNS)
    names = _own_labels(train, spelling["label"], labels)
    read: dict[str, Callable[[], Iterator[Example]]] = {
        "train": partial(read_examples, train, spelling, LabelMap(names, names))
    }
    if dev is not None:
        written = _checked(labels or _written_names(dev, spelling["label"]) or names, names, where=str(dev))
        read["val"] = partial(read_examples, dev, _columns_of(dev, (spelling,)), LabelMap(names, written))
    else:
        whole = read["train"]
        read = {"train": partial(_held_out, whole, False), "val": partial(_held_out, whole, True)}
    source = f"local table '{train.name}'" + (f" and '{dev.name}'" if dev else ", one in twenty held out")
    return ExampleSource(f"table-{plain_name(train.stem)[:40]}", source, names, read)


def _held_out(whole: Callable[[], Iterator[Example]], dev: bool) -> Iterator[Example]:
    return (example for example in whole() if (fraction(f"{example.text}\0{example.pair}") < _DEV_SHARE) == dev)


def _own_labels(path: Path, column: str, given: tuple[str, ...] | None) -> tuple[str, ...]:
    if given and (len(given) < 2 or len(set(given)) < len(given) or "" in given):
        raise ConfigError(f"--labels {','.join(given)}: give each of two or more labels once, as A,B,...")
    names = given or _written_names(path, column) or _found_labels(path, column)
    for position, name in enumerate(names):
        # The text '1' and the integer 1 must mean the same.
        if _INTEGER.fullmatch(name) and name != str(position):
            raise DataError(
                f"{path}: the label {name!r} would be class {position} of {', '.join(names)}; labels are words, or integers "
                "from 0, not both"
            )
    return names


def _found_labels(path: Path, column: str) -> tuple[str, ...]:
    counts: Counter[str] = Counter()
    for number, row in rows(path, columns=(column,)):
        value = row[column]
        if value in _UNLABELLED:
            continue
        if not isinstance(value, str | int) or isinstance(value, bool):
            raise DataError(
                f"{path}: row {number}: {column!r} holds {value!r}, neither text nor an integer; choose another column"
            )
        counts[str(value)] += 1
    as_numbers = all(_INTEGER.fullmatch(value) for value in counts)
    if as_numbers and sorted(map(int, counts)) != list(range(len(counts))):
        raise DataError(
            f"{path}: {column!r} holds the integers {sorted(map(int, counts))[:10]}; classes count from 0 without a gap"
        )
    if len(counts) < 2:
        only = f"only the label {min(counts)!r}" if counts else "no label"
        raise DataError(f"{path}: the column {column!r} holds {only}; a classifier needs at least two")
    if len(counts) > 1000:
        raise DataError(f"{path}: the column {column!r} holds {len(counts):,} different labels; choose one with at most 1,000")
    return tuple(map(str, sorted(map(int, counts)))) if as_numbers else tuple(sorted(counts))


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


def own_tokenizer(source: ExampleSource, vocab_size: int, progress: OnProgress = no_progress) -> Path:
    """Return the path of a tokenizer.json trained on a task's own training texts; train it where it is missing."""

    def texts() -> Iterator[str]:
        return (text for example in source.splits["train"]() for text in (example.text, example.pair) if text)

    content = hashlib.sha256()
    # The name of the standard library's task has the version of its text.
    is_named = source.name.startswith("stdlib-packages")
    for text in () if is_named else texts():
        content.update(f"{len(text)}.{text}".encode())
    path = cache_root() / "bert-bpe" / f"{source.name}-{vocab_size}{'' if is_named else f'-{content.hexdigest()[:12]}'}.json"
    if not path.is_file():
        progress("training the tokenizer", 0, 1, 0)
        write_text(path, train_bert_bpe(texts(), vocab_size=vocab_size).to_str())
    return path


def train_bert_bpe(texts: Iterable[str], *, vocab_size: int) -> Tokenizer:
    """Train a lower-case byte-level BPE with BERT's marks; not WordPiece, whose trainer numbers words at random."""
    tokenizer = train_bpe(texts, vocab_size=vocab_size, marks=BERT_MARKS, normalizer=BertNormalizer(lowercase=True))
    add_bert_marks(tokenizer)
    return tokenizer
