"""A user's request to prepare data, and the corpus or the examples that it means."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from oelm.data.example_sets import ExampleSet, prepare_examples
from oelm.data.examples import ExampleSource, file_examples, folder_examples, hub_examples
from oelm.data.prepare import Limits, corpus_of, prepare_corpus
from oelm.data.public_sets import BUILT_IN, CORPORA, TASKS, unknown_set
from oelm.data.sources import TABLES, Corpus, file_corpus, folder_corpus
from oelm.data.tokens import OnProgress, TokenSet, no_progress
from oelm.errors import ConfigError


@dataclass(frozen=True)
class Request:
    """One named set, or one file of the user's, and how to read it."""

    name: str | None = None
    folder: Path | None = None
    text: Path | None = None
    column: str = "text"
    examples: Path | None = None
    dev: Path | None = None
    columns: str | None = None
    labels: str | None = None
    language: str = "en"
    tokenizer: str | None = None
    max_length: int | None = None
    max_documents: int | None = None
    max_tokens: int | None = None
    out: Path | None = None

    def __post_init__(self) -> None:
        own = {"--text": self.text, "--examples": self.examples}
        given = [option for option, value in own.items() if value is not None] + ([self.name] if self.name else [])
        if len(given) != 1:
            found = f" (given: {', '.join(given)})" if given else ""
            raise ConfigError(f"give one thing to prepare{found}: a name of `oelm data list`, or one of {', '.join(own)}")
        unfit: dict[str, object]
        if self.is_task:
            unfit = {"--max-documents": self.max_documents, "--max-tokens": self.max_tokens, "--out": self.out}
            unfit |= {"--dev": self.dev} if self.name else {}
            # The hub is read at one commit, so its columns and labels are known.
            unfit |= {"--columns": self.columns, "--labels": self.labels} if self.name and not self.folder else {}
        else:
            unfit = {"--dev": self.dev, "--columns": self.columns, "--labels": self.labels, "--max-length": self.max_length}
        unfit |= {} if self.name else {"--from": self.folder}
        unfit |= {} if self._has_columns or self.column == "text" else {"--column": self.column}
        unfit |= {} if self._has_languages or self.language == "en" else {"--language": self.language}
        for option, value in unfit.items():
            if value is not None:
                raise ConfigError(f"{option} has no meaning for {given[0]}; leave it out")

    @property
    def is_task(self) -> bool:
        return self.examples is not None or self.name in TASKS

    @property
    def _has_columns(self) -> bool:
        return self.text is not None and (self.text.is_dir() or self.text.suffix.lower() in TABLES)

    @property
    def _has_languages(self) -> bool:
        return self.name in TASKS and bool(TASKS[self.name].languages)

    def prepare(self, progress: OnProgress = no_progress) -> TokenSet | ExampleSet:
        """Prepare the data, or find it prepared."""
        if self.is_task:
            if self.tokenizer is None:
                raise ConfigError("a classifier needs its model's tokenizer: give the model's folder, --tokenizer FOLDER")
            return prepare_examples(
                self.example_source(),
                tokenizer=self.tokenizer,
                max_length=128 if self.max_length is None else self.max_length,
                progress=progress,
            )
        return prepare_corpus(
            self.corpus(progress),
            tokenizer=self.tokenizer or ("gpt2" if self.name in CORPORA else "bpe:4096"),
            limits=Limits(self.max_documents, self.max_tokens),
            out=self.out,
            progress=progress,
        )

    def corpus(self, progress: OnProgress = no_progress) -> Corpus:
        """Return the requested corpus."""
        if self.text is not None:
            return file_corpus(self.text, column=self.column)
        assert self.name is not None
        if self.folder is None:
            return corpus_of(self.name, progress)
        if self.name in BUILT_IN:
            raise ConfigError(f"{self.name} is on this machine already; --from has no meaning for it")
        if self.name not in CORPORA:
            raise unknown_set(self.name)
        return folder_corpus(CORPORA[self.name], self.folder)

    def example_source(self) -> ExampleSource:
        """Return the requested labelled examples."""
        labels = None if self.labels is None else tuple(part.strip() for part in self.labels.split(","))
        columns = _columns(self.columns)
        if self.examples is not None:
            return file_examples(self.examples, self.dev, columns=columns, labels=labels)
        assert self.name is not None
        entry = TASKS[self.name]
        if entry.languages and self.language not in entry.languages:
            raise ConfigError(f"--language {self.language!r}: {self.name} has {', '.join(entry.languages)}")
        if self.folder is not None:
            entry = replace(entry, columns=(columns,)) if columns else entry
            return folder_examples(entry, self.folder, language=self.language, labels=labels)
        return hub_examples(entry, language=self.language)


def _columns(text: str | None) -> dict[str, str] | None:
    if text is None:
        return None
    pairs = dict(part.strip().split("=", 1) for part in text.split(",") if "=" in part)
    if not {"text", "label"} <= set(pairs) <= {"text", "pair", "label"}:
        raise ConfigError(f"--columns {text!r}: write it as text=A,label=B, or text=A,pair=B,label=C for pairs")
    return pairs
