"""The named data sets: where each is on the hub, pinned by commit, and the format of its local copies."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from oelm.data.tokens import Split
from oelm.errors import DataError, suggest

# Python source on this machine: needs neither a network nor files.
BUILT_IN = {
    "stdlib": "this Python's own source text; always available (PSF)",
    "site-packages": "source of the packages that oelm[all] depends on",
}
NLI_LABELS = ("entailment", "neutral", "contradiction")


@dataclass(frozen=True)
class HubSource:
    """A repository of the Hugging Face hub at one commit, its configuration, and its names for our splits."""

    repo: str
    revision: str
    config: str
    splits: dict[str, str]


@dataclass(frozen=True)
class CorpusEntry:
    """Text for language models. `text_bytes` is its approximate size, to plan disk and time."""

    name: str
    about: str
    licence: str
    hub: HubSource
    text_bytes: int
    layout: Literal["documents", "wikitext"] = "documents"
    # Other names of its folder.
    spellings: tuple[str, ...] = ()
    # A word in the name of a local file that holds everything and names no split.
    whole: str = ""
    # The set with the same validation and test files, so that its own release may lack them.
    judged_on: str = ""


@dataclass(frozen=True)
class TaskEntry:
    """Labelled examples. Integer labels are positions in `labels`; `aliases` are other spellings in releases."""

    name: str
    about: str
    licence: str
    hub: HubSource
    labels: tuple[str, ...]
    # Names of the columns, by release; the first that a file has completely is read.
    columns: tuple[dict[str, str], ...]
    dev_splits: tuple[str, ...] = ("val",)
    aliases: dict[str, str] = field(default_factory=dict)
    languages: tuple[str, ...] = ()
    spellings: tuple[str, ...] = ()
    # The set with the same English training examples, so that its own release may lack them.
    trains_on: str = ""


_WIKITEXT = "b08601e04326c79dfdd32d625aee71d232d685c3"
_GLUE = "bcdcba79d07bc864c1c254ccfcedcce55bcc9a8c"
_LM_SPLITS = {"train": "train", "val": "validation"}
_ALL_SPLITS = {**_LM_SPLITS, "test": "test"}
_NLI_COLUMNS = (
    {"text": "premise", "pair": "hypothesis", "label": "label"},
    {"text": "sentence1", "pair": "sentence2", "label": "gold_label"},
    {"text": "premise", "pair": "hypo", "label": "label"},
)
# For a user's table, tried in this order.
USUAL_COLUMNS = ({"text": "text", "label": "label"}, {"text": "sentence", "label": "label"}, *_NLI_COLUMNS)
XNLI_LANGUAGES = ("ar", "bg", "de", "el", "en", "es", "fr", "hi", "ru", "sw", "th", "tr", "ur", "vi", "zh")

_CORPORA = (
    CorpusEntry(
        "tinystories",
        "short stories in the words of small children",
        "CDLA-Sharing-1.0",
        HubSource("roneneldan/TinyStories", "f54c09fd23315a6f9c86f9dc80f725de7d8f9c64", "default", _LM_SPLITS),
        1_920_000_000,
    ),
    CorpusEntry(
        "openwebtext",
        "web pages that Reddit users linked to",
        "packaging CC0, texts of third parties",
        HubSource("Skylion007/openwebtext", "79d93d786212f7344586290adb811d4ae6a1762c", "plain_text", {"train": "train"}),
        39_800_000_000,
        spellings=("owt",),
    ),
    CorpusEntry(
        "wikitext103",
        "good Wikipedia articles, words split and rare ones <unk>",
        "CC BY-SA 3.0",
        HubSource("Salesforce/wikitext", _WIKITEXT, "wikitext-103-v1", _ALL_SPLITS),
        540_000_000,
        layout="wikitext",
        spellings=("wikitext103v1",),
    ),
    CorpusEntry(
        "wikitext2",
        "the first fiftieth of wikitext103, with the same validation and test",
        "CC BY-SA 3.0",
        HubSource("Salesforce/wikitext", _WIKITEXT, "wikitext-2-v1", _ALL_SPLITS),
        11_000_000,
        layout="wikitext",
        spellings=("wikitext2v1",),
        judged_on="wikitext103",
    ),
    CorpusEntry(
        "wikipedia",
        "English Wikipedia articles as plain text",
        "CC BY-SA 3.0 and GFDL",
        HubSource("wikimedia/wikipedia", "b04c8d1ceb2f5cd4588862100d08de323dccfbaa", "20231101.en", {"train": "train"}),
        20_200_000_000,
        spellings=("enwiki",),
        whole="articles",
    ),
)
_MNLI_SPLITS = {"train": "train", "val": "validation_matched", "val_mismatched": "validation_mismatched"}
_TASKS = (
    TaskEntry(
        "sst2",
        "is a phrase of a film review positive?",
        "none stated",
        HubSource("nyu-mll/glue", _GLUE, "sst2", _LM_SPLITS),
        labels=("negative", "positive"),
        columns=({"text": "sentence", "label": "label"},),
    ),
    TaskEntry(
        "mnli",
        "does one sentence follow from another? ten genres",
        "mostly OANC",
        HubSource("nyu-mll/glue", _GLUE, "mnli", _MNLI_SPLITS),
        labels=NLI_LABELS,
        columns=_NLI_COLUMNS,
        dev_splits=("val", "val_mismatched"),
        spellings=("multinli", "multinli10"),
    ),
    TaskEntry(
        "xnli",
        "mnli's question in fifteen languages; trains on mnli's pairs, translated",
        "CC BY-NC 4.0",
        HubSource("facebook/xnli", "b8dd5d7af51114dbda02c0e3f6133f332186418e", "{language}", _ALL_SPLITS),
        labels=NLI_LABELS,
        columns=_NLI_COLUMNS,
        aliases={"contradictory": "contradiction"},
        languages=XNLI_LANGUAGES,
        trains_on="mnli",
    ),
)
CORPORA = {entry.name: entry for entry in _CORPORA}
TASKS = {entry.name: entry for entry in _TASKS}
# Usual names of a set's folder, in lower-case letters and digits.
SPELLINGS = {entry.name: (entry.name, *entry.spellings) for entry in (*_CORPORA, *_TASKS)}


def set_called(folder_name: str) -> str:
    """Return the set that a folder's name means, "" for none: 'SST-2' and 'sst2' are the same."""
    plain = "".join(c for c in folder_name.lower() if c.isalnum())
    return next((name for name, spellings in SPELLINGS.items() if plain in spellings), "")


def unknown_set(name: str) -> DataError:
    if name in TASKS:
        return DataError(f"{name} is a task for classifiers, not text for language models: oelm finetune --task {name}")
    known = [*BUILT_IN, *CORPORA, *TASKS]
    return DataError(
        f"no data set called {name!r}{suggest(name, known)}: `oelm data list` describes {', '.join(known)}; "
        "or give the path of a text file, a .jsonl, a .parquet, a folder of text, or a prepared token set"
    )


def split_of(name: str) -> Split:
    """Return a split's name as the type that token sets use."""
    splits: dict[str, Split] = {"train": "train", "val": "val", "test": "test"}
    return splits[name]
