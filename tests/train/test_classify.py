"""Classifiers through our loop: they learn, their figures can be computed again without us, and they resume to the bit."""

from __future__ import annotations

import json
import math
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from oelm.models.hub import export_classifier
from oelm.process import StopFlag
from oelm.report.arms import read_run
from oelm.runs.find import look_at
from oelm.runs.metrics import read_metrics
from oelm.train.classify import ClassifierTask
from oelm.train.load import LoadedClassifier, load_any
from tests.train.finetuning import (
    BATCH,
    NATS_TOLERANCE,
    NUM_DEV,
    NUM_TRAIN,
    Rows,
    evaluations,
    finetune_here,
    read,
    table_rows,
    task_of,
    tiny_finetune,
)
from tests.train.test_resume import StopsAt


@pytest.fixture(scope="module")
def finished(calm_bert: Path, tables: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four epochs of everything there is, evaluated after each."""
    out = tmp_path_factory.mktemp("runs") / "run"
    config = tiny_finetune(calm_bert, tables, steps=0, epochs=4, eval_every=0, save_every=0, model__num_labels=0)
    finetune_here(config, out)
    return out


@pytest.fixture(scope="module")
def exported(finished: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("exports") / "latest"
    loaded = load_any(finished, which="latest")
    assert isinstance(loaded, LoadedClassifier)
    export_classifier(loaded.folded(), finished / "tokenizer.json", target)
    return target


@torch.no_grad()
def reference(exported: Path, tables: Path) -> tuple[list[float], list[int]]:
    """Return each dev sentence's loss and prediction, one at a time without padding, by transformers alone."""
    import transformers

    model = transformers.AutoModelForSequenceClassification.from_pretrained(str(exported))
    tokenizer = transformers.AutoTokenizer.from_pretrained(str(exported))
    nats, predicted = [], []
    for text, _, label in table_rows(tables / "dev.tsv"):
        logits = model(**tokenizer(text, return_tensors="pt")).logits[0].double()
        nats.append(float(-F.log_softmax(logits, -1)[model.config.label2id[label]]))
        predicted.append(int(logits.argmax()))
    return nats, predicted


def test_a_separable_task_is_learnt(finished: Path) -> None:
    assert read(finished / "timing_stats.json")["final_accuracy"] > 0.9


def test_epochs_give_as_many_steps_as_they_have_batches(finished: Path) -> None:
    assert read(finished / "config.json")["steps"] == 4 * math.ceil(NUM_TRAIN / BATCH)


def test_parts_of_an_epoch_round_up_to_whole_steps(calm_bert: Path, tables: Path, tmp_path: Path) -> None:
    # 95 examples in batches of 6 are 16 batches.
    for epochs, steps in ((0.1, 2), (0.5, 8), (1.0, 16), (1.01, 17)):
        config = tiny_finetune(calm_bert, tables, steps=0, epochs=epochs, eval_every=0, save_every=0)
        # The first goes to its end; of the others the first step is enough.
        stop, run = StopFlag(), tmp_path / str(steps)
        watch = StopsAt(stop, step=1 if steps > 2 else 0)
        done = finetune_here(config, run, stop=stop, watch=watch).step
        assert (read(run / "config.json")["steps"], done) == (steps, 1 if steps > 2 else 2), epochs


def test_every_epoch_is_evaluated(finished: Path) -> None:
    assert [row["step"] for row in evaluations(finished)] == [16, 32, 48, 64]


def test_dev_figures_and_predictions_are_what_transformers_alone_computes_in_the_order_of_the_file(
    finished: Path, exported: Path, tables: Path
) -> None:
    nats, predicted = reference(exported, tables)
    labels = [("neg", "pos").index(row[2]) for row in table_rows(tables / "dev.tsv")]
    last = evaluations(finished)[-1]
    assert last["val_loss"] == pytest.approx(float(np.mean(nats)), abs=NATS_TOLERANCE)
    assert last["val_accuracy"] == np.mean([p == y for p, y in zip(predicted, labels, strict=True)])
    rows = [json.loads(line) for line in (finished / "predictions.jsonl").read_text().splitlines()]
    assert [(row["example"], row["label"], row["predicted"]) for row in rows] == list(
        zip(range(NUM_DEV), labels, predicted, strict=True)
    )
    assert [row["nats"] for row in rows] == pytest.approx(nats, abs=NATS_TOLERANCE)


def test_predictions_agree_with_the_figures(finished: Path) -> None:
    rows = [json.loads(line) for line in (finished / "predictions.jsonl").read_text().splitlines()]
    figures = read(finished / "timing_stats.json")
    assert np.mean([row["nats"] for row in rows]) == figures["final_val_loss"]
    assert np.mean([row["label"] == row["predicted"] for row in rows]) == figures["final_accuracy"]
    counts = Counter(row["label"] for row in rows)
    assert figures["majority_accuracy"] == max(counts.values()) / len(rows) and "test_majority_accuracy" not in figures
    assert read_run(look_at(finished)).problem == ""


def test_figures_are_those_of_the_metrics(finished: Path) -> None:
    rows, figures = evaluations(finished), read(finished / "timing_stats.json")
    assert figures["best_accuracy"] == max(row["val_accuracy"] for row in rows)
    assert figures["final_accuracy"] == rows[-1]["val_accuracy"]
    assert figures["best_val_loss"] == min(row["val_loss"] for row in rows)


def test_best_checkpoint_is_the_first_of_the_highest_accuracy(finished: Path) -> None:
    rows = evaluations(finished)
    highest = max(row["val_accuracy"] for row in rows)
    assert load_any(finished, which="best").step == next(row["step"] for row in rows if row["val_accuracy"] == highest)


def test_first_of_equals_stays_the_best(calm_bert: Path, tables: Path, tmp_path: Path) -> None:
    # At this rate no prediction changes.
    finetune_here(tiny_finetune(calm_bert, tables, optim__lr=1e-12, steps=6, eval_every=3), tmp_path / "run")
    assert len({row["val_accuracy"] for row in evaluations(tmp_path / "run")}) == 1
    assert [row["step"] for row in evaluations(tmp_path / "run")] == [3, 6] and load_any(tmp_path / "run").step == 3


def test_trained_tokens_leave_padding_out(finished: Path, calm_bert: Path, tables: Path) -> None:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(calm_bert / "tokenizer.json"))
    per_epoch = sum(len(tokenizer.encode(row[0]).ids) for row in table_rows(tables / "train.tsv"))
    assert read(finished / "timing_stats.json")["tokens"] == 4 * per_epoch


def test_the_record_says_what_is_frozen_and_what_it_was_made_from(finished: Path, calm_bert: Path) -> None:
    # Two layers, Q and K, of 32 x 32 weights and 32 biases.
    assert read(finished / "audit.json")["frozen"] == 2 * 2 * (32 * 32 + 32)
    assert read(finished / "manifest.json")["data"]["name"] == "table-train"
    assert read(finished / "model" / "config.json")["id2label"] == {"0": "neg", "1": "pos"}
    assert read(finished / "config.json")["model"]["num_labels"] == 2


def test_an_export_names_its_labels_and_answers_through_a_pipeline(exported: Path) -> None:
    import transformers

    answers = transformers.pipeline("text-classification", model=str(exported))(["we saw a lovely film", "it was a dull play"])
    assert [answer["label"] for answer in answers] == ["pos", "neg"]


def test_longer_examples_are_cut_and_counted(calm_bert: Path, tables: Path) -> None:
    task = task_of(tiny_finetune(calm_bert, tables, examples__max_length=6))
    words = [len(row[0].split()) for name in ("train", "dev") for row in table_rows(tables / f"{name}.tsv")]
    assert f"{sum(n + 2 > 6 for n in words)} cut to 6 tokens" in task.data.summary


def gradients(task: ClassifierTask, model: nn.Module, step: int) -> dict[str, Tensor]:
    """Return the gradients that a step of ours adds up."""
    model.zero_grad()
    batch = task.batch(step)
    for part in range(batch.num_micro_batches):
        (task.loss(model, model, batch, part) / batch.num_micro_batches).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def naive_gradients(folder: Path, model: nn.Module, rows: Rows, *, pairs: bool) -> dict[str, Tensor]:
    """Return the gradients of transformers' own loss over plainly padded text."""
    import transformers

    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"),
        pad_token="[PAD]",
        model_input_names=["input_ids", "token_type_ids", "attention_mask"],
    )
    texts, seconds, labels = zip(*rows, strict=True)
    inputs = tokenizer(list(texts), list(seconds) if pairs else None, padding="max_length", max_length=16, return_tensors="pt")
    model.zero_grad()
    model(**inputs, labels=torch.tensor([("neg", "pos").index(label) for label in labels])).loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_same_gradients(found: dict[str, Tensor], expected: dict[str, Tensor], case: str) -> None:
    assert found.keys() == expected.keys(), case
    largest = max(float(grad.abs().max()) for grad in expected.values())
    assert largest > 0.1, f"{case}: too small to tell right from wrong"
    for name, grad in expected.items():
        # float32 sums over at most 6 * 16 tokens in another order, back through two layers: 96 * 2**-24 * 2, of the largest.
        assert torch.allclose(found[name], grad, rtol=0, atol=96 * 2**-23 * largest), (case, name)


def roughened(model: nn.Module) -> nn.Module:
    """Give every weight a size at which examples of a batch no longer cancel."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() >= 2:
                parameter.normal_(std=32**-0.5, generator=generator)
    return model


@pytest.mark.parametrize("pairs", [False, True], ids=["texts", "pairs"])
def test_micro_batches_give_the_gradient_of_a_naive_step(pairs: bool, calm_bert: Path, tables: Path, tmp_path: Path) -> None:
    columns = "text=sentence,pair=second,label=label" if pairs else "text=sentence,label=label"
    rows = table_rows(tables / "train.tsv")
    for micro in (1, 2, 3, 6):
        task = task_of(tiny_finetune(calm_bert, tables, micro_batch_size=micro, examples__columns=columns))
        model = roughened(task.build_model(tmp_path, is_new=True))
        for size in (6, 5):
            # 95 examples in batches of 6: one batch of an epoch has 5.
            step = next(step for step in range(16) if len(task.batch(step).ids) == size)
            chosen = [rows[number] for number in task.batch(step).ids]
            assert_same_gradients(
                gradients(task, model, step), naive_gradients(calm_bert, model, chosen, pairs=pairs), f"{size} by {micro}"
            )


def test_reported_loss_is_the_mean_over_the_batch(calm_bert: Path, tables: Path, tmp_path: Path) -> None:
    task = task_of(tiny_finetune(calm_bert, tables, micro_batch_size=2))
    model = task.build_model(tmp_path, is_new=True)
    step = next(step for step in range(16) if len(task.batch(step).ids) == 5)
    batch = task.batch(step)
    whole = task_of(tiny_finetune(calm_bert, tables, micro_batch_size=6))
    with torch.no_grad():
        parts = [task.loss(model, model, batch, part) for part in range(batch.num_micro_batches)]
        expected = whole.loss(model, model, whole.batch(step), 0)
    # A mean of five float32 losses below 2, in another order.
    assert float(sum(parts)) / len(parts) == pytest.approx(float(expected), abs=5 * 2**-22)


def test_dropout_is_on_while_a_pretrained_model_trains(bert: Path, calm_bert: Path, tables: Path, tmp_path: Path) -> None:
    # Both have the same weights; the first loss is before any update.
    for name, model in (("with", bert), ("without", calm_bert)):
        finetune_here(tiny_finetune(model, tables, steps=1), tmp_path / name)
    with_it, without = (read_metrics(tmp_path / name / "metrics.jsonl")[0]["loss"] for name in ("with", "without"))
    assert with_it != without
