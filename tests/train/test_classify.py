"""Classifiers through our loop: they learn, their figures can be computed again without us, and they resume to the bit."""

from __future__ import annotations

import json
import math
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F

from oelm.data.prepare import no_progress
from oelm.errors import CheckpointError, ConfigError, DataError, OelmError, RunDirError
from oelm.files import sha256_file
from oelm.method.audit import assert_unmoved
from oelm.method.method import PRESETS
from oelm.method.record import record_of
from oelm.models.hub import export_classifier
from oelm.train.classify import ClassifierTask, prepare_task_examples
from oelm.train.config import FinetuneConfig, parse_as, with_overrides
from oelm.train.device import Compute
from oelm.train.load import LoadedClassifier, load_any
from oelm.train.metrics import read_metrics
from oelm.train.run import Result, train
from oelm.train.rundir import RunDir
from oelm.train.session import Session, build_session
from oelm.train.stop import StopFlag
from oelm.train.watch import Silence, Watch
from tests.models.test_hub import BAD, BERT, GOOD, NEUTRAL, VOCAB, write_model, write_tokenizer
from tests.train.test_resume import StopsAt

NUM_TRAIN, NUM_DEV, BATCH, MICRO = 95, 70, 6, 2
CPU = Compute("cpu", "float32", "test")
Rows = list[tuple[str, str, str]]


def made_rows(count: int, *, seed: int) -> Rows:
    """Return sentences of 3 to 10 words that say good or bad with one word, a second text, and the label."""
    chance, made = random.Random(seed), []
    for number in range(count):
        label = ("neg", "pos")[number % 2]
        words = chance.choices(NEUTRAL, k=chance.randint(2, 9))
        words.insert(chance.randint(0, len(words)), chance.choice(GOOD if label == "pos" else BAD))
        made.append((" ".join(words), " ".join(chance.choices(NEUTRAL, k=chance.randint(1, 3))), label))
    return made


def write_table(path: Path, rows: Rows) -> Path:
    path.write_text("\n".join(["sentence\tsecond\tlabel", *("\t".join(row) for row in rows)]) + "\n")
    return path


def write_tables(folder: Path) -> Path:
    """Write train.tsv and dev.tsv, which share no sentence; return the folder."""
    folder.mkdir(exist_ok=True)
    train_rows = made_rows(NUM_TRAIN, seed=1)
    seen = {row[0] for row in train_rows}
    dev_rows = [row for row in made_rows(3 * NUM_DEV, seed=2) if row[0] not in seen]
    write_table(folder / "train.tsv", train_rows)
    write_table(folder / "dev.tsv", dev_rows[:NUM_DEV])
    return folder


def tiny_finetune(model: Path, tables: Path, **overrides: Any) -> FinetuneConfig:
    """Return the config of a run of seconds; dots in keys are written '__'."""
    base: dict[str, Any] = {
        "model": {"source": str(model), "num_labels": 2},
        "examples": {
            "task": str(tables / "train.tsv"),
            "dev": str(tables / "dev.tsv"),
            "columns": "text=sentence,label=label",
            "max_length": 16,
        },
        "method": "oelm_freeze",
        "optim": {"lr": 3e-3},
        "schedule": {"warmup_steps": 2},
        "steps": 12,
        "eval_every": 5,
        "save_every": 4,
        "batch_size": BATCH,
        "micro_batch_size": MICRO,
    }
    dotted = {key.replace("__", "."): value for key, value in overrides.items()}
    return parse_as(FinetuneConfig, with_overrides(base, dotted), where="test")


def finetune_here(config: FinetuneConfig, out: Path, *, stop: StopFlag | None = None, watch: Watch | None = None) -> Result:
    return train(config, out, stop=stop or StopFlag(), watch=watch or Silence())


def task_of(config: FinetuneConfig) -> ClassifierTask:
    source = config.model.source
    folder = Path(source) if source is not None else None
    examples = prepare_task_examples(config.examples, folder, vocab_size=config.model.vocab_size, progress=no_progress)
    return ClassifierTask(examples, config, CPU)


def session_of(config: FinetuneConfig, out: Path) -> Session:
    """Return a session at step 0."""
    with RunDir(out) as folder:
        return build_session(config, folder, task_of(config), CPU, stop=StopFlag(), watch=Silence())


def read(path: Path) -> Any:
    return json.loads(path.read_text())


def evaluations(run: Path) -> list[dict[str, Any]]:
    return [row for row in read_metrics(run / "metrics.jsonl") if "val_loss" in row]


def table_rows(path: Path) -> Rows:
    return [(a, b, c) for a, b, c in (line.split("\t") for line in path.read_text().splitlines()[1:])]


def evidence(run: Path) -> dict[str, Any]:
    """Return what must be equal between a disturbed run and an undisturbed one: everything but clocks and speeds."""
    rows = read_metrics(run / "metrics.jsonl")
    latest = run / read(run / "latest.json")["checkpoint"]
    return {
        "losses": [(row["step"], row["loss"].hex(), row["lr"].hex(), row["grad_norm"].hex()) for row in rows if "loss" in row],
        "evaluations": [(row["step"], row["val_loss"].hex(), row["val_accuracy"].hex()) for row in rows if "val_loss" in row],
        "model": sha256_file(latest / "model.safetensors"),
        "optimizer": sha256_file(latest / "optimizer.safetensors"),
        "state": read(latest / "state.json")["state"],
        "predictions": sha256_file(run / "predictions.jsonl"),
        "best": read(run / "best.json"),
    }


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("models") / "bert")


@pytest.fixture(scope="module")
def calm_bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same without dropout."""
    folder = tmp_path_factory.mktemp("models") / "calm"
    return write_model(folder, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)


@pytest.fixture(scope="module")
def tables(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tables(tmp_path_factory.mktemp("tables"))


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


@pytest.mark.parametrize(("epochs", "steps"), [(0.1, 2), (0.5, 8), (1.0, 16), (1.01, 17)])
def test_parts_of_an_epoch_round_up_to_whole_steps(
    epochs: float, steps: int, calm_bert: Path, tables: Path, tmp_path: Path
) -> None:
    # 95 examples in batches of 6 are 16 batches.
    config = tiny_finetune(calm_bert, tables, steps=0, epochs=epochs, eval_every=0, save_every=0)
    assert finetune_here(config, tmp_path / "run").step == steps


def test_every_epoch_is_evaluated(finished: Path) -> None:
    assert [row["step"] for row in evaluations(finished)] == [16, 32, 48, 64]


# Sums of at most 48 float32 products in another order, through 2 layers, on logits below 10: 48 * 2**-24 * 2 * 10 = 6e-5.
NATS_TOLERANCE = 6e-5


def test_dev_loss_is_what_transformers_alone_computes(finished: Path, exported: Path, tables: Path) -> None:
    nats, _ = reference(exported, tables)
    assert evaluations(finished)[-1]["val_loss"] == pytest.approx(float(np.mean(nats)), abs=NATS_TOLERANCE)


def test_dev_accuracy_is_what_transformers_alone_computes(finished: Path, exported: Path, tables: Path) -> None:
    _, predicted = reference(exported, tables)
    labels = [("neg", "pos").index(row[2]) for row in table_rows(tables / "dev.tsv")]
    assert evaluations(finished)[-1]["val_accuracy"] == np.mean([p == y for p, y in zip(predicted, labels, strict=True)])


def test_every_dev_example_has_its_own_prediction_in_the_order_of_the_file(
    finished: Path, exported: Path, tables: Path
) -> None:
    nats, predicted = reference(exported, tables)
    rows = [json.loads(line) for line in (finished / "predictions.jsonl").read_text().splitlines()]
    labels = [("neg", "pos").index(row[2]) for row in table_rows(tables / "dev.tsv")]
    assert [(row["example"], row["label"], row["predicted"]) for row in rows] == list(
        zip(range(NUM_DEV), labels, predicted, strict=True)
    )
    assert [row["nats"] for row in rows] == pytest.approx(nats, abs=NATS_TOLERANCE)


def test_predictions_agree_with_the_figures(finished: Path) -> None:
    rows = [json.loads(line) for line in (finished / "predictions.jsonl").read_text().splitlines()]
    figures = read(finished / "timing_stats.json")
    assert np.mean([row["nats"] for row in rows]) == figures["final_val_loss"]
    assert np.mean([row["label"] == row["predicted"] for row in rows]) == figures["final_accuracy"]


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
    finetune_here(tiny_finetune(calm_bert, tables, optim__lr=1e-12, eval_every=3), tmp_path / "run")
    assert len({row["val_accuracy"] for row in evaluations(tmp_path / "run")}) == 1
    assert load_any(tmp_path / "run").step == 3


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


def assert_same_gradients(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    largest = max(float(grad.abs().max()) for grad in expected.values())
    assert largest > 0.1, "too small to tell right from wrong"
    for name, grad in expected.items():
        # float32 sums over at most 6 * 16 tokens in another order, back through two layers: 96 * 2**-24 * 2, of the largest.
        assert torch.allclose(found[name], grad, rtol=0, atol=96 * 2**-23 * largest), name


def roughened(model: nn.Module) -> nn.Module:
    """Give every weight a size at which examples of a batch no longer cancel."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() >= 2:
                parameter.normal_(std=32**-0.5, generator=generator)
    return model


@pytest.mark.parametrize("pairs", [False, True], ids=["texts", "pairs"])
@pytest.mark.parametrize("micro", [1, 2, 3, 6])
@pytest.mark.parametrize("size", [6, 5])
def test_micro_batches_give_the_gradient_of_a_naive_step(
    size: int, micro: int, pairs: bool, calm_bert: Path, tables: Path, tmp_path: Path
) -> None:
    columns = "text=sentence,pair=second,label=label" if pairs else "text=sentence,label=label"
    task = task_of(tiny_finetune(calm_bert, tables, micro_batch_size=micro, examples__columns=columns))
    model = roughened(task.build_model(tmp_path, is_new=True))
    # 95 examples in batches of 6: one batch of an epoch has 5.
    step = next(step for step in range(16) if len(task.batch(step).ids) == size)
    rows = table_rows(tables / "train.tsv")
    chosen = [rows[number] for number in task.batch(step).ids]
    assert_same_gradients(gradients(task, model, step), naive_gradients(calm_bert, model, chosen, pairs=pairs))


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


@pytest.fixture(scope="module")
def undisturbed(bert: Path, tables: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "undisturbed"
    finetune_here(tiny_finetune(bert, tables, steps=18), out)
    return out


def stopped_at(config: FinetuneConfig, out: Path, *steps: int, in_evaluation: bool = False) -> None:
    """Run to each of these steps and stop there."""
    for step in steps:
        stop = StopFlag()
        watch = StopsAt(stop, step=step, in_evaluation=in_evaluation)
        assert finetune_here(config, out, stop=stop, watch=watch).status == "stopped"


# 4 is a save, 5 an evaluation, 16 the end of an epoch.
@pytest.mark.parametrize("steps", [(1,), (4,), (5,), (7,), (16,), (2, 3, 11, 17)], ids=str)
def test_stopped_run_continues_bit_for_bit(
    steps: tuple[int, ...], undisturbed: Path, bert: Path, tables: Path, tmp_path: Path
) -> None:
    config = tiny_finetune(bert, tables, steps=18)
    stopped_at(config, tmp_path / "run", *steps)
    finetune_here(config, tmp_path / "run")
    assert evidence(tmp_path / "run") == evidence(undisturbed)


@pytest.mark.parametrize("step", [5, 18])
def test_stop_during_an_evaluation_makes_it_up_bit_for_bit(
    step: int, undisturbed: Path, bert: Path, tables: Path, tmp_path: Path
) -> None:
    config = tiny_finetune(bert, tables, steps=18)
    stopped_at(config, tmp_path / "run", step, in_evaluation=True)
    finetune_here(config, tmp_path / "run")
    assert evidence(tmp_path / "run") == evidence(undisturbed)


def test_run_resumes_bit_for_bit_after_its_pretrained_model_is_gone(
    undisturbed: Path, bert: Path, tables: Path, tmp_path: Path
) -> None:
    shutil.copytree(bert, tmp_path / "model")
    config = tiny_finetune(tmp_path / "model", tables, steps=18)
    stopped_at(config, tmp_path / "run", 7)
    shutil.rmtree(tmp_path / "model")
    finetune_here(config, tmp_path / "run")
    assert evidence(tmp_path / "run") == evidence(undisturbed)


def test_a_new_run_of_a_model_that_is_gone_is_refused(tables: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no such folder"):
        finetune_here(tiny_finetune(tmp_path / "gone", tables), tmp_path / "run")


def test_changed_weights_under_the_same_path_are_refused_on_resume(bert: Path, tables: Path, tmp_path: Path) -> None:
    shutil.copytree(bert, tmp_path / "model")
    config = tiny_finetune(tmp_path / "model", tables)
    stopped_at(config, tmp_path / "run", 3)
    other = tmp_path / "model" / "model.safetensors"
    other.write_bytes(other.read_bytes()[:-1] + b"\1")
    with pytest.raises(RunDirError, match=r"model\.sha256: '[0-9a-f]{64}' there, '[0-9a-f]{64}' asked for"):
        finetune_here(config, tmp_path / "run")


def test_weights_other_than_a_config_names_are_refused(bert: Path, tables: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"these weights \(sha256 [0-9a-f]{12}\.\.\.\) are not those of the config \(00000000"):
        finetune_here(tiny_finetune(bert, tables, model__sha256="0" * 64), tmp_path / "run")


def test_the_config_a_run_leaves_repeats_it_bit_for_bit(undisturbed: Path, tmp_path: Path) -> None:
    finetune_here(parse_as(FinetuneConfig, read(undisturbed / "config.json"), where="test"), tmp_path / "run")
    assert evidence(tmp_path / "run") == evidence(undisturbed)


def test_a_finished_run_is_extended_by_more_steps(bert: Path, tables: Path, tmp_path: Path) -> None:
    finetune_here(tiny_finetune(bert, tables, steps=4), tmp_path / "run")
    assert finetune_here(tiny_finetune(bert, tables, steps=9), tmp_path / "run").step == 9
    assert [row["step"] for row in read_metrics(tmp_path / "run" / "metrics.jsonl") if "loss" in row] == list(range(1, 10))


def checkpoint_tensors(run: Path, step: int) -> dict[str, Tensor]:
    return load_file(run / "checkpoints" / f"step-{step:08d}" / "model.safetensors")


@pytest.mark.parametrize("method", PRESETS)
def test_every_preset_trains_everything_but_what_it_freezes(method: str, bert: Path, tables: Path, tmp_path: Path) -> None:
    config = tiny_finetune(bert, tables, method=method, steps=3, save_every=1, keep_checkpoints=9)
    finetune_here(config, tmp_path / "run")
    first, last = checkpoint_tensors(tmp_path / "run", 1), checkpoint_tensors(tmp_path / "run", 3)
    unmoved = {name for name in first if torch.equal(first[name], last[name])}
    frozen = {name for name in first if ".query." in name or ".key." in name}
    # Positions behind the longest text and words that never came up have no gradient, and decay is too slow for a bit.
    assert unmoved == (set() if method == "baseline" else frozen)


def test_frozen_parameters_have_no_optimizer_state(bert: Path, tables: Path, tmp_path: Path) -> None:
    finetune_here(tiny_finetune(bert, tables, steps=2), tmp_path / "run")
    latest = tmp_path / "run" / read(tmp_path / "run" / "latest.json")["checkpoint"]
    assert not [name for name in load_file(latest / "optimizer.safetensors") if ".query." in name or ".key." in name]


@pytest.mark.parametrize("method", [name for name in PRESETS if name != "baseline"])
def test_every_arm_starts_with_the_baselines_other_weights_and_batches(
    method: str, bert: Path, tables: Path, tmp_path: Path
) -> None:
    arm, baseline = (
        session_of(tiny_finetune(bert, tables, method=name, seed=5), tmp_path / name) for name in (method, "baseline")
    )
    expected = baseline.model.state_dict()
    others = {name: tensor for name, tensor in arm.model.state_dict().items() if ".query." not in name and ".key." not in name}
    assert all(torch.equal(tensor, expected[name]) for name, tensor in others.items()) and "classifier.weight" in others
    assert [arm.task.batch(n).ids for n in range(20)] == [baseline.task.batch(n).ids for n in range(20)]


def test_max_train_takes_the_same_examples_for_every_seed_in_another_order(bert: Path, tables: Path) -> None:
    tasks = [task_of(tiny_finetune(bert, tables, seed=seed, examples__max_train=30)) for seed in (0, 1)]
    epochs = [[number for step in range(5) for number in task.batch(step).ids] for task in tasks]
    assert sorted(epochs[0]) == sorted(epochs[1]) and epochs[0] != epochs[1] and len(set(epochs[0])) == 30


def test_an_epoch_shows_every_example_once(bert: Path, tables: Path) -> None:
    task = task_of(tiny_finetune(bert, tables))
    assert sorted(number for step in range(16) for number in task.batch(step).ids) == list(range(NUM_TRAIN))


VOCAB_SIZE, END = len(VOCAB), VOCAB.index("[SEP]")
DISTIL = {"dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 48, "max_position_embeddings": 16}
GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 16, "bos_token_id": END, "eos_token_id": END}
BART = {
    "d_model": 32,
    "encoder_layers": 1,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "max_position_embeddings": 16,
    "eos_token_id": END,
    "forced_eos_token_id": END,
    "decoder_start_token_id": END,
}
OTHERS: dict[str, dict[str, Any]] = {
    "Roberta": {**BERT, "max_position_embeddings": 17, "type_vocab_size": 1},
    "DistilBert": DISTIL,
    "Electra": {**BERT, "embedding_size": 24},
    "GPT2": GPT2,
    "Bart": BART,
}


@pytest.fixture(scope="module", params=OTHERS)
def other(request: pytest.FixtureRequest, tables: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny model of another architecture, a run of three steps and one that was stopped on the way."""
    root = tmp_path_factory.mktemp("others")
    settings = {"vocab_size": VOCAB_SIZE, "pad_token_id": 0} | OTHERS[request.param]
    write_model(root / "model", request.param, **settings)
    config = tiny_finetune(root / "model", tables, steps=3, eval_every=3, save_every=3, examples__max_train=18)
    finetune_here(config, root / "whole")
    stopped_at(config, root / "stopped", 1, 2)
    finetune_here(config, root / "stopped")
    return root


def test_other_architectures_resume_bit_for_bit(other: Path) -> None:
    assert evidence(other / "stopped") == evidence(other / "whole")


def test_other_architectures_keep_what_is_frozen(other: Path) -> None:
    loaded = load_any(other / "whole")
    assert record_of(loaded.model) is not None
    assert_unmoved(loaded.model)


@torch.no_grad()
def test_other_architectures_export_to_plain_transformers(other: Path, tables: Path, tmp_path: Path) -> None:
    import transformers

    loaded = load_any(other / "whole", which="latest")
    assert isinstance(loaded, LoadedClassifier)
    export_classifier(loaded.folded(), loaded.path / "tokenizer.json", tmp_path / "export")
    plain = transformers.AutoModelForSequenceClassification.from_pretrained(str(tmp_path / "export"))
    tokenizer = transformers.AutoTokenizer.from_pretrained(str(tmp_path / "export"))
    inputs = dict(tokenizer([row[0] for row in table_rows(tables / "dev.tsv")[:9]], padding=True, return_tensors="pt"))
    inputs.pop("token_type_ids", None)
    found, expected = plain(**inputs).logits, loaded.model(**inputs).logits
    # GPT-2's Q, K and V are one product there and three here: 32 products in another order, 2 layers, logits below 10.
    assert torch.allclose(found, expected, rtol=0, atol=32 * 2**-24 * 2 * 10)


def test_other_architectures_are_judged_as_transformers_would(other: Path, tables: Path, tmp_path: Path) -> None:
    loaded = load_any(other / "whole", which="latest")
    assert isinstance(loaded, LoadedClassifier)
    export_classifier(loaded.folded(), loaded.path / "tokenizer.json", tmp_path / "export")
    nats = _reference_without_types(tmp_path / "export", tables)
    assert evaluations(other / "whole")[-1]["val_loss"] == pytest.approx(float(np.mean(nats)), abs=NATS_TOLERANCE)


@torch.no_grad()
def _reference_without_types(exported: Path, tables: Path) -> list[float]:
    import transformers

    model = transformers.AutoModelForSequenceClassification.from_pretrained(str(exported))
    tokenizer = transformers.AutoTokenizer.from_pretrained(str(exported))
    nats = []
    for text, _, label in table_rows(tables / "dev.tsv"):
        logits = model(input_ids=tokenizer(text, return_tensors="pt")["input_ids"]).logits[0].double()
        nats.append(float(-F.log_softmax(logits, -1)[("neg", "pos").index(label)]))
    return nats


def spoilt(bert: Path, folder: Path, act: Callable[[Path], object]) -> Path:
    shutil.copytree(bert, folder)
    act(folder)
    return folder


def _other_tokenizer(folder: Path) -> None:
    write_tokenizer(folder, words=(*VOCAB[:5], *(f"more{n}" for n in range(30)), *VOCAB[5:]))


REFUSALS: dict[str, tuple[Callable[[Path], object], dict[str, Any], type[OelmError], str]] = {
    "tokenizer of another model": (_other_tokenizer, {}, DataError, r"gives ids up to \d+, the model's vocabulary has 26"),
    "no config": (lambda folder: (folder / "config.json").unlink(), {}, CheckpointError, "no config.json"),
    "torn config": (lambda folder: (folder / "config.json").write_text("{"), {}, CheckpointError, "config.json"),
    "no weights": (lambda folder: (folder / "model.safetensors").unlink(), {}, CheckpointError, "no weights in it"),
    "longer than its positions": (
        lambda folder: None,
        {"examples__max_length": 17},
        ConfigError,
        "examples.max_length 17: .* reads 16 tokens at most; lower it",
    ),
    "another number of labels": (lambda folder: None, {"model__num_labels": 3}, ConfigError, "is 3, the task .* has 2 labels"),
    "layers that are not there": (
        lambda folder: None,
        {"method": {"freeze": ["q"], "layers": [2]}},
        OelmError,
        "names layer 2, but the model has 2",
    ),
    "table that is not there": (lambda folder: None, {"examples__task": "/no/such.tsv"}, OelmError, "/no/such.tsv"),
    "unknown task": (lambda folder: None, {"examples__task": "sst3"}, ConfigError, r"no task called 'sst3': .*sst2"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_what_does_not_fit_is_refused_by_name(case: str, bert: Path, tables: Path, tmp_path: Path) -> None:
    act, changes, kind, message = REFUSALS[case]
    model = spoilt(bert, tmp_path / "model", act)
    with pytest.raises(kind, match=message):
        finetune_here(tiny_finetune(model, tables, **changes), tmp_path / "run")


@pytest.mark.parametrize(("name", "settings", "most"), [("GPT2", GPT2, 16), ("Roberta", OTHERS["Roberta"], 16)])
def test_architectures_that_count_positions_their_own_way_refuse_what_is_too_long(
    name: str, settings: dict[str, Any], most: int, tables: Path, tmp_path: Path
) -> None:
    model = write_model(tmp_path / "model", name, **({"vocab_size": VOCAB_SIZE, "pad_token_id": 0} | settings))
    with pytest.raises(ConfigError, match=f"reads {most} tokens at most"):
        finetune_here(tiny_finetune(model, tables, examples__max_length=most + 1), tmp_path / "run")


def test_a_run_of_a_language_model_is_not_written_over(text_file: Path, bert: Path, tables: Path, tmp_path: Path) -> None:
    from tests.conftest import run_here, tiny_config

    run_here(tiny_config(text_file, steps=2), tmp_path / "run")
    with pytest.raises(RunDirError, match="holds a run of another kind"):
        finetune_here(tiny_finetune(bert, tables), tmp_path / "run")


def test_damaged_checkpoint_of_a_classifier_is_told(bert: Path, tables: Path, tmp_path: Path) -> None:
    finetune_here(tiny_finetune(bert, tables, steps=1), tmp_path / "run")
    path = tmp_path / "run" / "checkpoints" / "step-00000001" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"\1")
    with pytest.raises(CheckpointError, match="model.safetensors"):
        load_any(tmp_path / "run")
