"""Fresh classifiers of every architecture train, freeze every attention, and resume to the bit."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from safetensors.torch import load_file
from tokenizers import Tokenizer, processors

from oelm.budget import classifier_settings
from oelm.config import ClassifierConfig, FinetuneConfig, parse_as, with_overrides
from oelm.data.example_sets import ExampleSet, prepare_examples
from oelm.data.examples import Example, ExampleSource
from oelm.errors import ConfigError, DataError
from oelm.method.audit import assert_unmoved
from oelm.models.hub import export_classifier
from oelm.train.classify import ClassifierTask, closing_mark
from oelm.train.load import LoadedClassifier, load_any
from tests.models.test_hub import write_model, write_t5_tokenizer, write_tokenizer
from tests.train.finetuning import CPU, evidence, finetune_here, read, task_of, tiny_finetune
from tests.train.test_classify_runs import checkpoint_tensors, stopped_at

# Query and key weights of each half, and of the attention that joins them.
ATTENTIONS = {
    "t5": (
        "encoder.block.{}.layer.0.SelfAttention",
        "decoder.block.{}.layer.0.SelfAttention",
        "decoder.block.{}.layer.1.EncDecAttention",
    ),
    "bart": ("encoder.layers.{}.self_attn", "decoder.layers.{}.self_attn", "decoder.layers.{}.encoder_attn"),
}


def fresh_config(architecture: str, **overrides: Any) -> FinetuneConfig:
    """Return the config of a run of seconds on the standard library's task; dots in keys are written '__'."""
    base = {"model.architecture": architecture, "method": "oelm_freeze", "steps": 5, "eval_every": 5, "save_every": 1}
    dotted = {key.replace("__", "."): value for key, value in overrides.items()}
    small = {"examples.max_train": 40, "keep_checkpoints": 9}
    settings = with_overrides(classifier_settings("smoke", model=None), base | small | dotted)
    return parse_as(FinetuneConfig, settings, where="test")


@pytest.fixture(scope="module", params=["t5", pytest.param("bart", marks=pytest.mark.slow)])
def runs(request: pytest.FixtureRequest, tables: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder named by the architecture, with an undisturbed run and one that was stopped on the way."""
    root = tmp_path_factory.mktemp("fresh") / str(request.param)
    root.mkdir()
    # The standard library's task has a run of its own in cli/test_finetune.
    table = {"task": str(tables / "train.tsv"), "dev": str(tables / "dev.tsv"), "columns": "text=sentence,label=label"}
    config = fresh_config(request.param, **{f"examples__{name}": value for name, value in table.items()})
    finetune_here(config, root / "whole")
    stopped_at(config, root / "stopped", 1, 3)
    finetune_here(config, root / "stopped")
    return root


def test_a_stopped_run_continues_bit_for_bit(runs: Path) -> None:
    assert evidence(runs / "stopped") == evidence(runs / "whole")


def test_q_and_k_of_both_halves_and_between_them_stay_and_all_else_moves(runs: Path) -> None:
    first, last = (checkpoint_tensors(runs / "whole", step) for step in (1, 5))
    unmoved = {name for name in first if torch.equal(first[name], last[name])}
    modules = [path.format(layer) for path in ATTENTIONS[runs.name] for layer in (0, 1)]
    is_projection = {f"{module}.{part}" for module in modules for part in ("q.", "k.", "q_proj.", "k_proj.")}
    assert unmoved == {name for name in first if any(part in name for part in is_projection)}
    assert len(unmoved) == len(modules) * 2 * (2 if runs.name == "bart" else 1)


def test_what_is_frozen_is_proven_by_digest(runs: Path) -> None:
    assert_unmoved(load_any(runs / "whole").model)


def test_a_run_says_what_it_is(runs: Path) -> None:
    facts = read(runs / "whole" / "model" / "config.json")
    assert (facts["model_type"], facts["is_encoder_decoder"]) == (runs.name, True)
    assert read(runs / "whole" / "config.json")["model"]["architecture"] == runs.name


@torch.no_grad()
def test_an_export_gives_the_same_logits_in_plain_transformers(runs: Path, tmp_path: Path) -> None:
    import transformers

    loaded = load_any(runs / "whole", which="latest")
    assert isinstance(loaded, LoadedClassifier)
    export_classifier(loaded.folded(), loaded.tokenizer_path(), tmp_path / "export")
    plain = transformers.AutoModelForSequenceClassification.from_pretrained(str(tmp_path / "export"))
    tokenizer = transformers.AutoTokenizer.from_pretrained(str(tmp_path / "export"))
    inputs = tokenizer(["we saw a good film", "it was bad and very old"], ["x", "y z"], padding=True, return_tensors="pt")
    assert torch.equal(plain(**inputs).logits, loaded.model(**inputs).logits)
    assert tokenizer.eos_token_id == plain.config.eos_token_id


# Texts of unequal length, so that batches are padded.
WORDS = ("good", "bad film", "a very old play", "we saw it", "it was so dull and awful", "lovely")


def made_examples(folder: Path, *, pairs: bool, extra: str = "") -> ExampleSet:
    texts = [*WORDS[:-1], f"{WORDS[-1]}{extra}"]
    rows = [Example(text, "the film" if pairs else None, number % 2) for number, text in enumerate(texts)]
    source = ExampleSource("made", "by hand", ("no", "yes"), {split: partial(iter, rows) for split in ("train", "val")})
    return prepare_examples(source, tokenizer=str(folder), max_length=12)


def made_task(examples: ExampleSet, architecture: str) -> ClassifierTask:
    config = fresh_config(architecture, model__num_labels=2, batch_size=6, micro_batch_size=3, examples__max_train=0)
    return ClassifierTask(examples, config, CPU, folder=None)


@pytest.mark.parametrize("pairs", [False, True], ids=["texts", "pairs"])
@pytest.mark.parametrize("architecture", ["bert", "t5", "bart"])
def test_texts_and_pairs_of_unequal_length_have_a_loss_in_every_micro_batch(
    architecture: str, pairs: bool, tmp_path: Path
) -> None:
    task = made_task(made_examples(write_tokenizer(tmp_path / "words"), pairs=pairs), architecture)
    model, batch = task.build_model(tmp_path, is_new=True), task.batch(0)
    losses = [float(task.loss(model, model, batch, part).detach()) for part in range(batch.num_micro_batches)]
    assert len(losses) == 2 and all(0 < loss < 10 for loss in losses)
    assert any(not part["attention_mask"].all() for part in batch.parts), "nothing is padded"


def that_knows_its_marks(folder: Path) -> Path:
    """Write a tokenizer that reads '[SEP]' in a text as the mark, as those of the hub do."""
    write_tokenizer(folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_special_tokens(["[CLS]", "[SEP]"])
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


@pytest.mark.parametrize("architecture", ["t5", "bart"])
def test_a_text_that_holds_the_end_mark_itself_is_refused_by_its_number(architecture: str, tmp_path: Path) -> None:
    examples = made_examples(that_knows_its_marks(tmp_path / "words"), pairs=False, extra="[SEP]")
    with pytest.raises(DataError, match=r"made: example 6 of train has the end mark \(id 3\) 2 times, not 1"):
        made_task(examples, architecture).build_model(tmp_path, is_new=True)


def test_a_bert_takes_such_a_text(tmp_path: Path) -> None:
    examples = made_examples(that_knows_its_marks(tmp_path / "words"), pairs=False, extra="[SEP]")
    made_task(examples, "bert").build_model(tmp_path, is_new=True)


def without_marks(folder: Path) -> Path:
    write_tokenizer(folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.post_processor = processors.TemplateProcessing(single="$A", pair="$A $B", special_tokens=[])
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def test_the_closing_mark_is_the_one_that_ends_every_example(tmp_path: Path) -> None:
    assert closing_mark(made_examples(write_tokenizer(tmp_path / "words"), pairs=True)) == 3


def test_examples_that_no_mark_closes_are_refused_for_an_encoder_decoder(tmp_path: Path) -> None:
    task = made_task(made_examples(without_marks(tmp_path / "words"), pairs=False), "t5")
    with pytest.raises(DataError, match="its examples end with 6 different tokens"):
        task.build_model(tmp_path, is_new=True)


def pretrained_t5(folder: Path, **settings: Any) -> Path:
    shape: dict[str, Any] = {"vocab_size": 30, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 1, "num_heads": 4}
    return write_model(folder, "T5", **(shape | {"pad_token_id": 0, "eos_token_id": 3} | settings))


def test_a_pretrained_encoder_decoder_with_another_model_s_tokenizer_is_refused(tmp_path: Path) -> None:
    model = pretrained_t5(tmp_path / "model", eos_token_id=1)
    config = fresh_config("bert", model__num_labels=2)
    task = ClassifierTask(made_examples(model, pairs=False), config, CPU, folder=model)
    with pytest.raises(DataError, match=r"example 1 of train has the end mark \(id 1\) 0 times, not 1"):
        task.build_model(tmp_path, is_new=True)


@pytest.mark.parametrize(("pairs", "marks"), [(False, 1), (True, 2)], ids=["texts", "pairs"])
def test_a_pretrained_t5_reads_texts_closed_with_its_own_mark_and_filled_up_with_zeros(
    pairs: bool, marks: int, tables: Path, tmp_path: Path
) -> None:
    model = write_t5_tokenizer(pretrained_t5(tmp_path / "model", eos_token_id=1, n_positions=8))
    columns = "text=sentence,pair=second,label=label" if pairs else "text=sentence,label=label"
    config = tiny_finetune(model, tables, steps=2, eval_every=2, save_every=2, examples__columns=columns)
    assert finetune_here(config, tmp_path / "run").status == "done"
    part = task_of(config).batch(0).parts[0]
    ids, lengths = part["input_ids"], part["attention_mask"].sum(1)
    assert all(row[length - 1] == 1 and not row[length:].any() for row, length in zip(ids, lengths, strict=True))
    assert ((ids == 1).sum(1) == marks).all()


@pytest.mark.parametrize("settings", [{"eos_token_id": 0}, {"eos_token_id": None}], ids=["the filling", "none"])
def test_an_end_mark_that_cannot_be_found_is_refused(settings: dict[str, Any], tmp_path: Path) -> None:
    model = pretrained_t5(tmp_path / "model", **settings)
    task = ClassifierTask(made_examples(model, pairs=False), fresh_config("bert", model__num_labels=2), CPU, folder=model)
    with pytest.raises(DataError, match="fix eos_token_id and pad_token_id"):
        task.build_model(tmp_path, is_new=True)


def test_an_architecture_beside_a_pretrained_model_is_refused() -> None:
    with pytest.raises(ConfigError, match="architecture 't5' is for fresh models; the folder of source org/name says its own"):
        fresh_config("t5", model__source="org/name")


@pytest.mark.parametrize("key", ["vocab_size", "model_dim", "num_layers", "num_heads", "ff_dim"])
def test_a_shape_beside_a_pretrained_model_is_refused(key: str) -> None:
    assert getattr(ClassifierConfig.model_validate({key: 640}), key) == 640
    with pytest.raises(ValidationError, match=f"{key} 640 is for fresh models; the folder of source org/name says its own"):
        ClassifierConfig.model_validate({"source": "org/name", key: 640})


def test_an_unknown_architecture_is_refused_with_those_there_are() -> None:
    with pytest.raises(ConfigError, match="model.architecture: .*'bert', 't5' or 'bart'"):
        fresh_config("t6")


def test_a_bert_is_made_unless_said() -> None:
    assert ClassifierConfig().architecture == "bert"


def test_frozen_parameters_have_no_optimizer_state(runs: Path) -> None:
    latest = runs / "whole" / read(runs / "whole" / "latest.json")["checkpoint"]
    held = load_file(latest / "optimizer.safetensors")
    marks = (".q.", ".k.", ".q_proj.", ".k_proj.")
    assert held and not [name for name in held if any(mark in name for mark in marks)]
