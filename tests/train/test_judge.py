"""A trained classifier is judged again, on its own examples or on others with the same labels, and on no others."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from oelm.config import ExamplesConfig
from oelm.errors import CheckpointError, ConfigError, DataError
from oelm.process import StopFlag
from oelm.train.classify import ClassifierEvaluation, judge_run
from oelm.train.load import LoadedClassifier, load_any
from oelm.train.watch import Silence
from tests.models.test_hub import VOCAB, write_model, write_tokenizer
from tests.train.finetuning import (
    evaluations,
    finetune_here,
    made_rows,
    tiny_finetune,
    write_table,
    write_tables,
)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with tables and a run on them, every evaluation of which was saved."""
    root = tmp_path_factory.mktemp("judged")
    model, tables = write_model(root / "model"), write_tables(root / "tables")
    finetune_here(tiny_finetune(model, tables, steps=30, eval_every=10, save_every=10, keep_checkpoints=9), root / "run")
    return root


def opened(run: Path, which: str = "best") -> LoadedClassifier:
    loaded = load_any(run, which=which)
    assert isinstance(loaded, LoadedClassifier)
    return loaded


def judged(run: Path, examples: ExamplesConfig | None = None, *, which: str = "best", split: str = "val") -> Any:
    return judge_run(opened(run, which), examples, split=split, stop=StopFlag(), watch=Silence())


def table(path: Path, **settings: Any) -> ExamplesConfig:
    return ExamplesConfig(task=str(path), columns="text=sentence,label=label", **settings)


@pytest.mark.parametrize("step", [10, 20, 30])
def test_judging_a_checkpoint_repeats_the_figures_of_its_evaluation(step: int, place: Path) -> None:
    _, _, found = judged(place / "run", which=str(step))
    recorded = next(row for row in evaluations(place / "run") if row["step"] == step)
    assert (found.loss, found.accuracy) == (recorded["val_loss"], recorded["val_accuracy"])


def test_judging_works_after_the_pretrained_model_is_gone(place: Path, tmp_path: Path) -> None:
    shutil.copytree(place / "model", tmp_path / "model")
    finetune_here(tiny_finetune(tmp_path / "model", place / "tables", steps=2), tmp_path / "run")
    shutil.rmtree(tmp_path / "model")
    _, _, found = judged(tmp_path / "run")
    assert isinstance(found, ClassifierEvaluation)


def test_the_training_split_can_be_judged_too(place: Path) -> None:
    _, examples, found = judged(place / "run", split="train")
    assert len(found.predictions) == examples.meta.splits["train"].examples == 95


def test_a_split_that_is_not_there_is_refused_with_those_that_are(place: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no split 'test'; it has: train, val"):
        judged(place / "run", split="test")


def test_another_table_with_the_same_labels_is_judged_whole(place: Path, tmp_path: Path) -> None:
    other = write_table(tmp_path / "other.tsv", made_rows(40, seed=9))
    name, _, found = judged(place / "run", table(place / "tables" / "train.tsv", dev=str(other)))
    assert len(found.predictions) == 40 and "split val" in name


def test_labels_in_another_order_are_matched_by_name(place: Path) -> None:
    tables = place / "tables"
    swapped = table(tables / "train.tsv", dev=str(tables / "dev.tsv"), labels="pos,neg")
    _, _, found = judged(place / "run", swapped)
    _, _, expected = judged(place / "run")
    assert (found.loss, found.accuracy) == (expected.loss, expected.accuracy)


@pytest.mark.parametrize("labels", [("bad", "good"), ("neg", "neutral", "pos")], ids=["other names", "one more"])
def test_other_labels_are_refused_with_both_lists(labels: tuple[str, ...], place: Path, tmp_path: Path) -> None:
    rows = [(text, second, labels[n % len(labels)]) for n, (text, second, _) in enumerate(made_rows(60, seed=9))]
    with pytest.raises(DataError, match=rf"has the labels {', '.join(labels)}, the run was trained on neg, pos"):
        judged(place / "run", table(write_table(tmp_path / "other.tsv", rows)))


def test_judging_leaves_the_model_as_it_was(place: Path) -> None:
    from tests.models.test_hub import weights

    loaded = opened(place / "run")
    before = weights(loaded.model)
    judge_run(loaded, None, split="val", stop=StopFlag(), watch=Silence())
    assert weights(loaded.model) == before and not loaded.model.training


def test_a_stop_gives_no_figure(place: Path) -> None:
    stop = StopFlag()
    stop.request("test")
    _, _, found = judge_run(opened(place / "run"), None, split="val", stop=stop, watch=Silence())
    assert found is None


def test_a_tokenizer_other_than_the_weights_were_trained_with_is_refused(place: Path, tmp_path: Path) -> None:
    shutil.copytree(place / "run", tmp_path / "run")
    (tmp_path / "run" / "tokenizer.json").unlink()
    write_tokenizer(tmp_path / "run", words=(*VOCAB[:5], *reversed(VOCAB[5:])))
    with pytest.raises(CheckpointError, match="not the tokenizer these weights were trained with"):
        judged(tmp_path / "run")
