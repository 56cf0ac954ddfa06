"""A named task that was prepared before is found by its name: no hub, no folder, and no path in the config."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from oelm.config import ExamplesConfig, FinetuneConfig
from oelm.data.request import Request
from oelm.errors import DataError
from oelm.files import dump_json
from oelm.process import StopFlag
from oelm.train.classify import judge_run
from oelm.train.load import LoadedClassifier, load_any
from oelm.train.watch import Silence
from tests.data.test_examples import write_jsonl, write_lines
from tests.models.test_hub import VOCAB, write_model, write_tokenizer
from tests.train.finetuning import evidence, finetune_here, made_rows, read, tiny_finetune
from tests.train.test_classify_runs import stopped_at

LENGTH = 16


@pytest.fixture(autouse=True)
def _offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache that no other test sees, and no way to the hub."""
    import huggingface_hub.constants

    monkeypatch.setenv("OELM_CACHE", str(tmp_path / "cache"))
    for name in [name for name in os.environ if name.lower().endswith("_proxy")]:
        monkeypatch.delenv(name)
    # A name that no server answers to, whatever network there is: RFC 6761 reserves it.
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://hub.invalid")


def sst2(folder: Path, *, seed: int = 1) -> Path:
    """Write the two files of SST-2, made up."""
    for split, number in (("train", seed), ("dev", seed + 1)):
        rows = [f"{text}\t{('neg', 'pos').index(label)}" for text, _, label in made_rows(40, seed=number)]
        write_lines(folder / f"{split}.tsv", "sentence\tlabel", *rows)
    return folder


def nli(path: Path, *, seed: int) -> Path:
    labels = {"neg": "contradiction", "pos": "entailment"}
    rows = [{"premise": a, "hypothesis": b, "label": labels[label]} for a, b, label in made_rows(30, seed=seed)]
    return write_jsonl(path, *rows, {"premise": "so", "hypothesis": "it", "label": "neutral"})


def named(model: Path, task: str = "sst2", **overrides: Any) -> FinetuneConfig:
    plain = {"examples__task": task, "examples__dev": None, "examples__columns": None, "model__num_labels": 0}
    return tiny_finetune(model, Path(), **(plain | {"steps": 4, "eval_every": 2, "save_every": 2} | overrides))


def test_a_prepared_task_trains_offline_and_leaves_no_path_of_the_data(bert: Path, tmp_path: Path) -> None:
    Request(name="sst2", folder=sst2(tmp_path / "files"), tokenizer=str(bert), max_length=LENGTH).prepare()
    shutil.rmtree(tmp_path / "files")
    finetune_here(named(bert), tmp_path / "run")
    assert str(tmp_path) not in dump_json(read(tmp_path / "run" / "config.json")["examples"])
    assert read(tmp_path / "run" / "manifest.json")["data"]["name"] == "sst2"


def test_a_task_that_was_not_prepared_is_asked_of_the_hub(bert: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="the Hugging Face hub cannot be reached"):
        finetune_here(named(bert), tmp_path / "run")


def test_a_task_prepared_for_another_tokenizer_is_not_taken_and_the_command_is_told(bert: Path, tmp_path: Path) -> None:
    other = write_tokenizer(tmp_path / "other", words=(*VOCAB, "more"))
    Request(name="sst2", folder=sst2(tmp_path / "files"), tokenizer=str(other), max_length=LENGTH).prepare()
    with pytest.raises(DataError, match="train, val with another tokenizer, cut at 16 tokens") as problem:
        finetune_here(named(bert), tmp_path / "run")
    assert str(problem.value).endswith(f"oelm data prepare sst2 --tokenizer {bert} --max-length 16 --from FOLDER")


def test_a_task_cut_at_another_length_is_not_taken(bert: Path, tmp_path: Path) -> None:
    Request(name="sst2", folder=sst2(tmp_path / "files"), tokenizer=str(bert), max_length=LENGTH - 1).prepare()
    with pytest.raises(DataError, match="with this tokenizer, cut at 15 tokens"):
        finetune_here(named(bert), tmp_path / "run")


def test_two_different_sets_of_a_name_are_refused_for_a_new_run(bert: Path, tmp_path: Path) -> None:
    for seed in (1, 5):
        Request(name="sst2", folder=sst2(tmp_path / str(seed), seed=seed), tokenizer=str(bert), max_length=LENGTH).prepare()
    with pytest.raises(DataError, match="sst2 was prepared 2 times for this model"):
        finetune_here(named(bert), tmp_path / "run")


def test_a_folder_that_is_given_is_read_whatever_is_on_the_shelf(bert: Path, tmp_path: Path) -> None:
    made = [
        Request(name="sst2", folder=sst2(tmp_path / str(s), seed=s), tokenizer=str(bert), max_length=LENGTH).prepare()
        for s in (1, 5)
    ]
    finetune_here(named(bert, examples__folder=str(tmp_path / "5")), tmp_path / "run")
    assert read(tmp_path / "run" / "manifest.json")["data"]["fingerprint"] == made[1].meta.fingerprint


def test_a_run_goes_on_with_the_set_it_began_with_bit_for_bit_whether_or_not_its_model_is_there(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model")
    Request(name="sst2", folder=sst2(tmp_path / "first"), tokenizer=str(model), max_length=LENGTH).prepare()
    finetune_here(named(model), tmp_path / "whole")
    stopped_at(named(model), tmp_path / "run", 3)
    shutil.copytree(tmp_path / "run", tmp_path / "again")
    Request(name="sst2", folder=sst2(tmp_path / "second", seed=5), tokenizer=str(model), max_length=LENGTH).prepare()
    for run in (tmp_path / "run", tmp_path / "again"):
        finetune_here(named(model), run)
        assert evidence(run) == evidence(tmp_path / "whole")
        shutil.rmtree(model, ignore_errors=True)


def test_a_run_whose_set_was_replaced_is_refused(bert: Path, tmp_path: Path) -> None:
    first = Request(name="sst2", folder=sst2(tmp_path / "first"), tokenizer=str(bert), max_length=LENGTH).prepare()
    stopped_at(named(bert), tmp_path / "run", 3)
    shutil.rmtree(first.path)
    Request(name="sst2", folder=sst2(tmp_path / "second", seed=5), tokenizer=str(bert), max_length=LENGTH).prepare()
    with pytest.raises(DataError, match="the data is not what this run began with"):
        finetune_here(named(bert), tmp_path / "run")


def test_xnli_trains_on_mnli_s_pairs_and_is_judged_on_its_own(bert: Path, tmp_path: Path) -> None:
    nli(tmp_path / "data" / "MNLI" / "train.jsonl", seed=1)
    nli(tmp_path / "data" / "MNLI" / "dev_matched.jsonl", seed=2)
    nli(tmp_path / "data" / "xnli" / "dev-en.jsonl", seed=3)
    sets = {
        n: Request(name=n, folder=tmp_path / "data", tokenizer=str(bert), max_length=LENGTH).prepare() for n in ("mnli", "xnli")
    }
    assert sets["xnli"].meta.name == "xnli-en" and "MNLI/train.jsonl, dev-en.jsonl" in sets["xnli"].meta.source
    finetune_here(named(bert, "xnli"), tmp_path / "run")
    assert read(tmp_path / "run" / "manifest.json")["data"]["fingerprint"] == sets["xnli"].meta.fingerprint
    run = load_any(tmp_path / "run")
    assert isinstance(run, LoadedClassifier)
    name, _, judged = judge_run(run, ExamplesConfig(task="mnli"), split="val", stop=StopFlag(), watch=Silence())
    assert name == "mnli, split val" and judged is not None and len(judged.predictions) == 31


def test_xnli_s_dev_pairs_alone_are_judged_on_and_not_trained_on(bert: Path, tmp_path: Path) -> None:
    nli(tmp_path / "mnli" / "train.jsonl", seed=1)
    nli(tmp_path / "mnli" / "dev_matched.jsonl", seed=2)
    nli(tmp_path / "xnli" / "dev-en.jsonl", seed=3)
    for task in ("mnli", "xnli"):
        Request(name=task, folder=tmp_path / task, tokenizer=str(bert), max_length=LENGTH).prepare()
    with pytest.raises(DataError, match="Prepared as xnli-en is here: val with this tokenizer, cut at 16 tokens"):
        finetune_here(named(bert, "xnli"), tmp_path / "none")
    finetune_here(named(bert, "mnli"), tmp_path / "run")
    run = load_any(tmp_path / "run")
    assert isinstance(run, LoadedClassifier)
    name, _, judged = judge_run(run, ExamplesConfig(task="xnli"), split="val", stop=StopFlag(), watch=Silence())
    assert name == "xnli-en, split val" and judged is not None and len(judged.predictions) == 31
