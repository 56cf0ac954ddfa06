"""Runs of classifiers resume to the bit, differ by their arm alone, and refuse what does not fit; other architectures too."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional as F

from oelm.config import FinetuneConfig, parse_as
from oelm.errors import CheckpointError, ConfigError, DataError, OelmError, RunDirError
from oelm.method.audit import assert_unmoved, record_of
from oelm.method.method import PRESETS
from oelm.models.hub import export_classifier
from oelm.process import StopFlag
from oelm.runs.metrics import read_metrics
from oelm.train.load import LoadedClassifier, load_any
from oelm.train.session import Session
from tests.conftest import one_of_each_kind
from tests.models.test_hub import BERT, VOCAB, write_model, write_t5_tokenizer, write_tokenizer
from tests.train.finetuning import (
    NATS_TOLERANCE,
    NUM_TRAIN,
    evaluations,
    evidence,
    finetune_here,
    read,
    session_of,
    table_rows,
    task_of,
    tiny_finetune,
)
from tests.train.test_resume import StopsAt


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


# Twice with one step between; 4 is a save, 5 an evaluation, 16 the end of an epoch.
@pytest.mark.parametrize(
    "steps",
    [(2, 3, 4, 16), *(pytest.param((step,), marks=pytest.mark.slow) for step in (1, 4, 5, 7, 16))],
    ids=str,
)
def test_stopped_run_continues_bit_for_bit(
    steps: tuple[int, ...], undisturbed: Path, bert: Path, tables: Path, tmp_path: Path
) -> None:
    config = tiny_finetune(bert, tables, steps=18)
    stopped_at(config, tmp_path / "run", *steps)
    finetune_here(config, tmp_path / "run")
    assert evidence(tmp_path / "run") == evidence(undisturbed)


def test_stops_during_an_evaluation_and_the_last_one_make_it_up_bit_for_bit(
    undisturbed: Path, bert: Path, tables: Path, tmp_path: Path
) -> None:
    config = tiny_finetune(bert, tables, steps=18)
    stopped_at(config, tmp_path / "run", 5, 18, in_evaluation=True)
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
    stopped_at(config, tmp_path / "run", 1)
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
    finetune_here(tiny_finetune(bert, tables, steps=2), tmp_path / "run")
    assert finetune_here(tiny_finetune(bert, tables, steps=4), tmp_path / "run").step == 4
    assert [row["step"] for row in read_metrics(tmp_path / "run" / "metrics.jsonl") if "loss" in row] == list(range(1, 5))


def checkpoint_tensors(run: Path, step: int) -> dict[str, Tensor]:
    return load_file(run / "checkpoints" / f"step-{step:08d}" / "model.safetensors")


@pytest.mark.parametrize(
    "method", one_of_each_kind(name for name, preset in PRESETS.items() if not (preset.thaw or preset.freeze_at))
)
def test_every_preset_trains_everything_but_what_it_freezes(method: str, bert: Path, tables: Path, tmp_path: Path) -> None:
    config = tiny_finetune(bert, tables, method=method, steps=3, eval_every=3, save_every=1, keep_checkpoints=9)
    finetune_here(config, tmp_path / "run")
    first, last = checkpoint_tensors(tmp_path / "run", 1), checkpoint_tensors(tmp_path / "run", 3)
    unmoved = {name for name in first if torch.equal(first[name], last[name])}
    maps = {"q": "query", "k": "key"}
    kinds = ("index",) if PRESETS[method].init == "axes" else ("weight", "bias")
    frozen = {
        f"bert.encoder.layer.{layer}.attention.self.{maps[part]}.{kind}"
        for layer in range(2)
        for part in PRESETS[method].freeze
        for kind in kinds
        if PRESETS[method].selects(layer, 2)
    }
    # Positions behind the longest text and words that never came up have no gradient, and decay is too slow for a bit.
    assert unmoved == frozen


def test_frozen_parameters_have_no_optimizer_state(undisturbed: Path) -> None:
    held = load_file(undisturbed / read(undisturbed / "latest.json")["checkpoint"] / "optimizer.safetensors")
    assert held and not [name for name in held if ".query." in name or ".key." in name]


@pytest.fixture(scope="module")
def baseline(bert: Path, tables: Path, tmp_path_factory: pytest.TempPathFactory) -> Session:
    return session_of(tiny_finetune(bert, tables, method="baseline", seed=5), tmp_path_factory.mktemp("arms") / "baseline")


@pytest.mark.parametrize("method", one_of_each_kind(name for name in PRESETS if name != "baseline"))
def test_every_arm_starts_with_the_baselines_other_weights_and_batches(
    method: str, baseline: Session, bert: Path, tables: Path, tmp_path: Path
) -> None:
    arm = session_of(tiny_finetune(bert, tables, method=method, seed=5), tmp_path / "arm")
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
# As the pretrained ones have them; 19 words and 3 marks fit.
T5 = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 1, "num_decoder_layers": 2, "num_heads": 4, "n_positions": 12}
T5 |= {"eos_token_id": 1, "decoder_start_token_id": 0}
OTHERS: dict[str, dict[str, Any]] = {
    "Roberta": {**BERT, "max_position_embeddings": 17, "type_vocab_size": 1},
    "DistilBert": DISTIL,
    "Electra": {**BERT, "embedding_size": 24},
    "GPT2": GPT2,
    "Bart": BART,
    "T5": T5,
}


@torch.no_grad()
def assert_plain_transformers_agree(loaded: LoadedClassifier, tables: Path, exported: Path) -> float:
    """Check the logits of the exported model on padded texts; return its mean loss on all, one at a time."""
    import transformers

    plain = transformers.AutoModelForSequenceClassification.from_pretrained(str(exported))
    tokenizer = transformers.AutoTokenizer.from_pretrained(str(exported))
    rows = table_rows(tables / "dev.tsv")
    inputs = dict(tokenizer([row[0] for row in rows[:9]], padding=True, return_tensors="pt"))
    inputs.pop("token_type_ids", None)
    found, expected = plain(**inputs).logits, loaded.model(**inputs).logits
    # GPT-2's Q, K and V are one product there and three here: 32 products in another order, 2 layers, logits below 10.
    assert torch.allclose(found, expected, rtol=0, atol=32 * 2**-24 * 2 * 10)
    nats = []
    for text, _, label in rows:
        logits = plain(input_ids=tokenizer(text, return_tensors="pt")["input_ids"]).logits[0].double()
        nats.append(float(-F.log_softmax(logits, -1)[("neg", "pos").index(label)]))
    return float(np.mean(nats))


@pytest.mark.parametrize("architecture", OTHERS)
def test_other_architectures_resume_bit_for_bit_stay_frozen_and_are_plain_transformers_when_exported(
    architecture: str, tables: Path, tmp_path: Path
) -> None:
    settings = {"vocab_size": VOCAB_SIZE, "pad_token_id": 0} | OTHERS[architecture]
    write_model(tmp_path / "model", architecture, **settings)
    if architecture == "T5":
        write_t5_tokenizer(tmp_path / "model")
    config = tiny_finetune(tmp_path / "model", tables, steps=3, eval_every=3, save_every=3, examples__max_train=18)
    finetune_here(config, tmp_path / "whole")
    stopped_at(config, tmp_path / "stopped", 1)
    finetune_here(config, tmp_path / "stopped")
    assert evidence(tmp_path / "stopped") == evidence(tmp_path / "whole")
    best = load_any(tmp_path / "whole")
    assert record_of(best.model)
    assert_unmoved(best.model)
    loaded = load_any(tmp_path / "whole", which="latest")
    assert isinstance(loaded, LoadedClassifier)
    export_classifier(loaded.folded(), loaded.path / "tokenizer.json", tmp_path / "export")
    nats = assert_plain_transformers_agree(loaded, tables, tmp_path / "export")
    assert evaluations(tmp_path / "whole")[-1]["val_loss"] == pytest.approx(nats, abs=NATS_TOLERANCE)


def test_a_model_that_pads_otherwise_than_its_tokenizer_resumes_bit_for_bit(tables: Path, tmp_path: Path) -> None:
    shape = OTHERS["Roberta"] | {"max_position_embeddings": 18, "pad_token_id": 1}
    config = tiny_finetune(write_model(tmp_path / "model", "Roberta", **shape), tables, steps=3, eval_every=3, save_every=3)
    finetune_here(config, tmp_path / "whole")
    stopped_at(config, tmp_path / "stopped", 1)
    finetune_here(config, tmp_path / "stopped")
    assert evidence(tmp_path / "stopped") == evidence(tmp_path / "whole")


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
