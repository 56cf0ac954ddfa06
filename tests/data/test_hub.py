"""The hub's data sets are pinned by commit and read as streams; without a network the error names both ways out."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import datasets
import pytest

from oelm.data.public_sets import CORPORA, TASKS, CorpusEntry, HubSource, TaskEntry
from oelm.data.sources import documents, hub_corpus, hub_label_names, hub_rows
from oelm.errors import DataError

ENTRIES: list[CorpusEntry | TaskEntry] = [*CORPORA.values(), *TASKS.values()]
WAYS_OUT = "oelm data prepare made --from FOLDER"
LABELS = datasets.Features({"text": datasets.Value("string"), "label": datasets.ClassLabel(names=["no", "yes"])})
SPLITS = {"train": "train", "val": "validation"}


def write_split(folder: Path, split: str, texts: list[str], *, parts: int = 1) -> None:
    """Write a split as repositories of the hub hold it: numbered Parquet files in a folder of the configuration."""
    folder.mkdir(parents=True, exist_ok=True)
    for part in range(parts):
        mine = texts[len(texts) * part // parts : len(texts) * (part + 1) // parts]
        made = datasets.Dataset.from_dict({"text": mine, "label": [len(text) % 2 for text in mine]}, features=LABELS)
        made.to_parquet(str(folder / f"{split}-{part:05}-of-{parts:05}.parquet"))


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> HubSource:
    """A folder laid out as a repository of the hub, which `datasets` reads the same way."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    repo = tmp_path / "repo"
    write_split(repo / "plain", "train", [f"text {number}" for number in range(10)], parts=3)
    write_split(repo / "plain", "validation", ["held out"])
    (repo / "README.md").write_text(
        "---\nconfigs:\n- config_name: plain\n  data_files:\n  - split: train\n    path: plain/train-*\n"
        "  - split: validation\n    path: plain/validation-*\n---\n"
    )
    return HubSource(str(repo), "0" * 40, "plain", SPLITS)


def test_rows_of_all_parts_come_in_order_with_their_numbers(source: HubSource) -> None:
    found = list(hub_rows(source, "train", columns=("text",), name="made"))
    assert found == [(number + 1, {"text": f"text {number}"}) for number in range(10)]


def test_a_split_goes_by_the_name_the_hub_gives_it(source: HubSource) -> None:
    assert list(hub_rows(source, "val", columns=("text",), name="made")) == [(1, {"text": "held out"})]


def test_a_missing_column_is_refused_with_those_there_are(source: HubSource) -> None:
    with pytest.raises(DataError, match=r"repo at 00000000: no column 'premise'; columns: \['text', 'label'\]"):
        list(hub_rows(source, "train", columns=("text", "premise"), name="made"))


def test_what_the_hub_says_of_its_labels_is_told(source: HubSource) -> None:
    assert hub_label_names(source, "train", "label", name="made") == ("no", "yes")


def test_a_column_without_label_names_has_none(source: HubSource) -> None:
    assert hub_label_names(source, "train", "text", name="made") is None


def test_an_unknown_configuration_is_refused_with_the_ways_out(source: HubSource) -> None:
    wrong = HubSource(source.repo, source.revision, "fancy", source.splits)
    with pytest.raises(DataError, match=f"cannot be fetched .*{WAYS_OUT}"):
        list(hub_rows(wrong, "train", columns=("text",), name="made"))


def test_a_truncated_file_of_the_hub_is_refused_with_the_ways_out(source: HubSource) -> None:
    path = Path(source.repo) / "plain" / "train-00001-of-00003.parquet"
    os.truncate(path, path.stat().st_size // 2)
    with pytest.raises(DataError, match=WAYS_OUT):
        list(hub_rows(source, "train", columns=("text",), name="made"))


def entry(source: HubSource, layout: str = "documents") -> CorpusEntry:
    return CorpusEntry("made", "made here", "none", source, 100, layout="wikitext" if layout == "wikitext" else "documents")


def test_a_corpus_of_the_hub_has_a_document_a_row(source: HubSource) -> None:
    assert list(documents(hub_corpus(entry(source)))) == [*(f"text {number}" for number in range(10)), "held out"]


def test_a_corpus_of_the_hub_is_split_as_the_hub_has_it(source: HubSource) -> None:
    assert [part.split for part in hub_corpus(entry(source)).parts] == ["train", "val"]


def test_a_corpus_of_the_hub_without_validation_is_split_by_hash(source: HubSource) -> None:
    only_train = HubSource(source.repo, source.revision, source.config, {"train": "train"})
    assert [part.split for part in hub_corpus(entry(only_train)).parts] == [None]


def test_wikitext_of_the_hub_has_a_document_an_article(source: HubSource) -> None:
    folder = Path(source.repo) / "plain"
    for path in folder.iterdir():
        path.unlink()
    write_split(folder, "train", ["", " = One = \n", "", " Text . \n", "", " = Two = \n", " Text . \n"], parts=2)
    write_split(folder, "validation", ["", " = Three = \n"])
    found = list(documents(hub_corpus(entry(source, "wikitext"))))
    assert found == [" = One = \n Text . \n", " = Two = \n Text . \n", " = Three = \n"]


def test_every_set_of_the_hub_is_pinned_by_a_commit() -> None:
    for known in ENTRIES:
        assert re.fullmatch(r"[0-9a-f]{40}", known.hub.revision), known.name


def test_without_a_network_the_error_names_both_ways_out(tmp_path: Path) -> None:
    name = "wikitext103"
    # A name that no server answers to, whatever network there is: RFC 6761 reserves it.
    environment = {key: value for key, value in os.environ.items() if not key.lower().endswith("_proxy")}
    environment |= {"HF_ENDPOINT": "http://hub.invalid", "HF_HOME": str(tmp_path), "OELM_CACHE": str(tmp_path)}
    environment |= {"HF_HUB_OFFLINE": "0"}
    command = [sys.executable, "-m", "oelm", "data", "prepare", name, "--tokenizer", "bpe:300"]
    child = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment, cwd=tmp_path)
    told = " ".join((child.stdout + child.stderr).split())
    assert child.returncode == 3 and "no network" in told
    assert "repeat the command" in told and f"oelm data prepare {name} --from FOLDER" in told
