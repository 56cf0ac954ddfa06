"""What a classifier's run is estimated to need is no less than what it holds, whatever its architecture, and not much more."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from oelm.config import FinetuneConfig
from oelm.data.example_sets import ExampleMeta, prepare_examples
from oelm.data.examples import Example, ExampleSource
from oelm.method.apply import freeze
from oelm.method.method import PRESETS
from oelm.models.gpt import build_gpt
from oelm.models.hub import ClassifierShape, fresh_classifier
from oelm.models.shape import Architecture
from oelm.train.device import classifier_estimate, parameter_counts
from tests.conftest import tiny_config
from tests.models.test_hub import write_tokenizer
from tests.train.finetuning import tiny_finetune

# By name: how config.json of the public model differs from its class's defaults.
PUBLIC: dict[str, tuple[str, dict[str, Any]]] = {
    "bert-base": ("Bert", {}),
    "t5-small": ("T5", {}),
    "t5-11b": ("T5", {"d_model": 1024, "d_kv": 128, "d_ff": 65536, "num_layers": 24, "num_heads": 128}),
    "flan-t5-small": (
        "T5",
        {"d_ff": 1024, "d_kv": 64, "num_layers": 8, "num_heads": 6, "feed_forward_proj": "gated-gelu"},
    ),
    "bart-base": (
        "Bart",
        {
            "d_model": 768,
            "encoder_layers": 6,
            "decoder_layers": 6,
            "encoder_attention_heads": 12,
            "decoder_attention_heads": 12,
            "encoder_ffn_dim": 3072,
            "decoder_ffn_dim": 3072,
        },
    ),
    "bart-large": ("Bart", {}),
}


@pytest.fixture(scope="module")
def examples(tmp_path_factory: pytest.TempPathFactory) -> ExampleMeta:
    """Examples of which the longest has 16 tokens."""
    rows = [Example(" ".join(["film"] * 14), None, 0), Example("good", None, 1)]
    source = ExampleSource("long", "by hand", ("no", "yes"), {split: partial(iter, rows) for split in ("train", "val")})
    folder = write_tokenizer(tmp_path_factory.mktemp("words"))
    meta = prepare_examples(source, tokenizer=str(folder), max_length=16).meta
    assert meta.splits["train"].longest == 16
    return meta


def config_of(**overrides: Any) -> FinetuneConfig:
    return tiny_finetune(Path("model"), Path("tables"), **overrides)


def parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("name", PUBLIC)
def test_the_checkpoint_of_a_public_model_is_no_larger_than_estimated(name: str, examples: ExampleMeta) -> None:
    import transformers

    family, settings = PUBLIC[name]
    config = getattr(transformers, f"{family}Config")(**settings)
    with torch.device("meta"):
        model = getattr(transformers, f"{family}ForSequenceClassification")(config)
    facts = json.loads(config.to_json_string())
    # Weights and AdamW's two moments, in float32.
    held = 3 * 4 * parameters(model)
    assert held <= classifier_estimate(facts, config_of(), examples).checkpoint < 1.1 * held


@pytest.mark.parametrize("left_out", ["num_decoder_layers", "is_encoder_decoder"])
def test_what_a_config_leaves_to_its_class_is_not_counted_as_nothing(left_out: str, examples: ExampleMeta) -> None:
    import transformers

    facts = json.loads(transformers.T5Config().to_json_string())
    whole = classifier_estimate(facts, config_of(), examples)
    assert classifier_estimate({key: facts[key] for key in facts if key != left_out}, config_of(), examples) == whole


def kept_bytes(model: nn.Module, batch: int, longest: int) -> int:
    """Return the bytes that a forward pass keeps for the backward one, weights left out."""
    owned = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in owned:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    ids = torch.full((batch, longest), 5)
    ids[:, -1] = 3
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        # Held until the end, so that no two tensors have the same address.
        output = model(input_ids=ids, attention_mask=torch.ones_like(ids))
    assert output.logits.requires_grad
    return sum(kept.values())


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("architecture", ["bert", "t5", "bart"])
def test_a_fresh_model_in_training_needs_no_more_memory_than_estimated(
    architecture: Architecture, dropout: float, examples: ExampleMeta
) -> None:
    sizes = {"vocab_size": 300, "model_dim": 64, "num_layers": 3, "num_heads": 4, "ff_dim": 192}
    shape = ClassifierShape(**sizes, seq_len=16, num_labels=2, pad=0, end=3)
    model = fresh_classifier(architecture, shape, seed=0, dropout=dropout).train()
    facts = {**sizes, "is_encoder_decoder": architecture != "bert"}
    config = config_of(batch_size=32, micro_batch_size=32)
    estimated = classifier_estimate(facts, config, examples).memory
    # Weights, their gradients and AdamW's two moments, and what the backward pass needs.
    needed = 4 * 4 * parameters(model) + kept_bytes(model, 32, 16)
    assert needed <= estimated < 2 * needed


@pytest.mark.parametrize("heads", [2, 12])
def test_a_t5_with_gates_and_heads_of_another_width_needs_no_more_memory_than_estimated(
    heads: int, examples: ExampleMeta
) -> None:
    import transformers

    sizes: dict[str, Any] = {"vocab_size": 300, "d_model": 64, "d_kv": 16, "d_ff": 192, "num_layers": 3, "num_heads": heads}
    sizes |= {"eos_token_id": 3, "decoder_start_token_id": 0, "feed_forward_proj": "gated-gelu"}
    shape = transformers.T5Config(**sizes)
    model = transformers.T5ForSequenceClassification(shape).train()
    config = config_of(batch_size=32, micro_batch_size=32)
    estimated = classifier_estimate(json.loads(shape.to_json_string()), config, examples).memory
    needed = 4 * 4 * parameters(model) + kept_bytes(model, 32, 16)
    assert needed <= estimated < 2 * needed


@pytest.mark.parametrize("preset", PRESETS)
def test_a_language_model_s_counts_are_those_of_the_model_that_learns_most(preset: str) -> None:
    config = tiny_config(Path("text.txt"), method=preset, model__vocab_size=300)
    model = build_gpt(config.model, seed=0)
    freeze(model, preset)
    total = parameters(model)
    # What is frozen for a while only needs its gradient and its state all the same.
    frozen = 0 if PRESETS[preset].thaw else sum(p.numel() for p in model.parameters() if not p.requires_grad)
    assert parameter_counts(config) == (total, total - frozen)


@pytest.mark.parametrize("is_thawed", [False, True])
def test_slices_are_counted_as_what_they_are_at_their_largest(is_thawed: bool, text_file: Path) -> None:
    thaw = {"thaw": {"start": 0.5, "end": 0.5, "order": "first_first"}} if is_thawed else {}
    config = tiny_config(text_file, method={"init": "axes", "freeze": ["q", "k"], **thaw})
    plain = tiny_config(text_file, method="baseline")
    config, plain = (
        each.model_copy(update={"model": each.model.model_copy(update={"vocab_size": 300})}) for each in (config, plain)
    )
    (dense, _), per_layer = parameter_counts(plain), 2 * plain.model.model_dim**2
    expected = dense if is_thawed else dense - plain.model.num_layers * per_layer
    assert parameter_counts(config) == (expected, expected)
