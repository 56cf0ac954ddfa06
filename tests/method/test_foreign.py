"""The method on models that are not ours: stacks of layers, sizes of heads, the scale of weights, models without bytes."""

from __future__ import annotations

import contextlib
import copy
import io
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import nn

from oelm.errors import FrozenMovedError, MethodError, SiteError
from oelm.method import sites as site_module
from oelm.method.apply import adopt_record, cast, freeze, thaw
from oelm.method.audit import assert_unmoved, audit, digest, record_of
from oelm.method.frames import orthonormality_error
from oelm.method.layers import learning_modules
from oelm.method.method import InitName, Method, QKPart, method_name
from oelm.method.sites import attention_sites
from tests.cases import case
from tests.method.tiny_models import BY_NAME, PackedTorch, Tiny, tiny_model

PAGE = Path(__file__).parents[2] / "docs" / "architectures.md"
QK: tuple[QKPart, ...] = ("q", "k")
DRAWN: tuple[InitName, ...] = (
    "orthogonal",
    "orthogonal_global",
    "gaussian",
    "gaussian_matched",
    "orthonormalized",
    "polar",
    "rotated",
)


def digests(model: nn.Module) -> dict[str, str]:
    return {name: digest(parameter) for name, parameter in model.named_parameters()}


def keys_frozen(name: str, layers: str | tuple[int, ...]) -> list[str]:
    model = tiny_model(BY_NAME[name])
    names = freeze(model, Method(freeze=("q",), layers=layers))
    return [site.key for site in attention_sites(model) if next(site.q.parameters())[0] in names]


def test_layers_count_within_encoder_and_decoder() -> None:
    cases: list[tuple[str, str | tuple[int, ...], list[str]]] = [
        # T5 here: two encoder layers, one decoder layer with two attentions.
        ("t5", "all", ["encoder.0", "encoder.1", "decoder.0", "decoder.0.1"]),
        ("t5", "first 1", ["encoder.0", "decoder.0", "decoder.0.1"]),
        ("t5", "last 1", ["encoder.1", "decoder.0", "decoder.0.1"]),
        ("t5", (-1,), ["encoder.1", "decoder.0", "decoder.0.1"]),
        ("t5", (1,), ["encoder.1"]),
        ("t5", "even", ["encoder.0", "decoder.0", "decoder.0.1"]),
        # BART here: one encoder layer, two decoder layers.
        ("bart", "first 1", ["encoder.0", "decoder.0", "decoder.0.1"]),
        ("bart", (1,), ["decoder.1", "decoder.1.1"]),
        ("bart", "all but first 1", ["decoder.1", "decoder.1.1"]),
        ("torch", "first 1", ["encoder.0", "decoder.0", "decoder.0.1"]),
        ("gpt2_cross", (1,), ["1", "1.1"]),
    ]
    for name, layers, keys in cases:
        with case(name, layers, keys):
            assert keys_frozen(name, layers) == keys


def test_layers_that_no_stack_has_are_refused_and_nothing_changed() -> None:
    missing: list[str | tuple[int, ...]] = ["first 3", "last 3", (2,), (0, 2), (-3,)]
    for name in ("t5", "bart", "bert", "gpt2", "qwen3", "torch"):
        model = tiny_model(BY_NAME[name])
        before = digests(model)
        for layers in missing:
            with case(name, layers), pytest.raises(MethodError, match="but the model has"):
                freeze(model, Method(init="orthogonal", freeze=QK, layers=layers))
        assert digests(model) == before


class Sparse(nn.Module):
    """Attention in layers 0 and 2 only, as in hybrids."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.MultiheadAttention(8, 2), nn.Linear(8, 8), nn.MultiheadAttention(8, 2)])


def test_layers_without_attention_are_refused() -> None:
    cases: list[str | tuple[int, ...]] = [(1,), (0, 1), (-2,), "odd"]
    for layers in cases:
        with case(layers):
            with pytest.raises(MethodError, match="match no attention of Sparse, which has some in layers 0, 2"):
                freeze(Sparse(), Method(init="orthogonal", freeze=QK, layers=layers))


def test_all_but_layers_without_attention_is_not_taken_for_all() -> None:
    model = Sparse()
    model.layers.insert(0, nn.Linear(8, 8))
    with pytest.raises(MethodError, match="'all but first 1' leave out no attention of Sparse, which has some in layers 1, 3;"):
        freeze(model, "oelm_first_free")
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_what_learns_on_top_counts_layers_within_encoder_and_decoder() -> None:
    cases: list[tuple[str | tuple[int, ...], list[str]]] = [
        ("first 1", ["encoder.0", "decoder.0", "decoder.0.1"]),
        ((1,), ["decoder.1", "decoder.1.1"]),
    ]
    for learn_layers, keys in cases:
        with case(learn_layers, keys):
            model = tiny_model(BY_NAME["bart"])
            freeze(model, Method(init="orthogonal", freeze=QK, correction=0.25, learn_layers=learn_layers))
            sites = attention_sites(model)
            learning = learning_modules(model).keys()
            assert [site.key for site in sites if site.q.path in learning and site.k.path in learning] == keys
            assert [site.key for site in sites if site.q.path in learning or site.k.path in learning] == keys


def test_a_model_without_attention_is_refused() -> None:
    with pytest.raises(SiteError, match="no attention found in Linear"):
        freeze(nn.Linear(2, 2), "oelm_freeze")


def test_an_unknown_transformers_model_is_named_by_its_type() -> None:
    from transformers import MambaConfig, MambaModel

    config = MambaConfig(hidden_size=8, num_hidden_layers=1, vocab_size=11, state_size=4)
    with torch.device("meta"):
        model = MambaModel(config)
    with pytest.raises(SiteError, match=r"MambaModel \(model type 'mamba'\).*Known: our GPT, BERT"):
        freeze(model, "oelm_freeze")


def test_cross_attention_of_a_bert_like_decoder_is_found() -> None:
    cases: list[str] = ["BertLMHeadModel", "RobertaForCausalLM", "XLMRobertaForCausalLM", "ElectraForCausalLM"]
    for name in cases:
        with case(name):
            import transformers

            kind: Any = getattr(transformers, name)
            shape = {
                "vocab_size": 11,
                "hidden_size": 16,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "intermediate_size": 8,
            }
            model = kind(kind.config_class(**shape, pad_token_id=0, is_decoder=True, add_cross_attention=True))
            assert [site.key for site in attention_sites(model)] == ["0", "0.1", "1", "1.1"]
            # Two layers, two attentions, Q and K.
            assert len(freeze(model, "oelm_freeze")) == 2 * 2 * 2 * 2
            assert audit(model).frozen == 2 * 2 * 2 * 16 * 17


def test_encoder_and_decoder_draw_frames_of_their_own() -> None:
    model = PackedTorch()
    freeze(model, "oelm_freeze")
    drawn = [projection.weight_HKD() for site in attention_sites(model) for _, projection in site.projections()]
    assert not any(torch.equal(first, second) for n, first in enumerate(drawn) for second in drawn[:n])


def test_a_wrapper_changes_no_draw() -> None:
    cases: list[str] = ["t5", "bart", "gpt2", "bert"]
    for name in cases:
        with case(name):
            model, wrapped = tiny_model(BY_NAME[name]), nn.Sequential(tiny_model(BY_NAME[name]))
            freeze(model, "oelm_freeze")
            freeze(wrapped, "oelm_freeze")
            assert digests(model) == digests(wrapped[0])


def test_one_layer_of_each_stack_is_still_layer_zero() -> None:
    from transformers import T5Config, T5ForConditionalGeneration

    model = T5ForConditionalGeneration(T5Config(vocab_size=11, d_model=8, d_kv=4, num_heads=2, d_ff=8, num_layers=1))
    assert [(site.stack, site.layer) for site in attention_sites(model)] == [("encoder", 0), ("decoder", 0), ("decoder", 0)]
    assert [site.block for site in attention_sites(model)] == ["encoder.block.0", "decoder.block.0", "decoder.block.0"]


def test_heads_larger_than_the_model_are_refused_by_name() -> None:
    cases: list[InitName] = ["orthogonal", "orthonormalized"]
    for init in cases:
        with case(init):
            from transformers import LlamaConfig, LlamaForCausalLM

            model = LlamaForCausalLM(
                LlamaConfig(
                    vocab_size=11, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, head_dim=24, intermediate_size=8
                )
            )
            before = digests(model)
            with pytest.raises(MethodError, match=r"model\.layers\.0\.self_attn\.q_proj: 24 rows cannot be orthonormal in 16"):
                freeze(model, Method(init=init, freeze=QK))
            assert digests(model) == before
            freeze(model, "gaussian_matched")


def test_all_heads_together_may_be_wider_than_the_model_but_for_one_frame_across_them() -> None:
    model = tiny_model(BY_NAME["qwen3"])
    with pytest.raises(MethodError, match=r"q_proj: 64 rows cannot be orthonormal in 32 .*init 'orthogonal'"):
        freeze(model, "oelm_global")
    freeze(model, "oelm_freeze")
    site = attention_sites(model)[0]
    assert (site.q.weight_HKD().shape, site.k.weight_HKD().shape) == ((4, 16, 32), (2, 16, 32))
    assert orthonormality_error(site.k.weight_HKD()) <= 2.0**-22


def rms(name: str, method: Method) -> tuple[list[float], list[float]]:
    model = tiny_model(BY_NAME[name])
    for number, (_, projection) in enumerate(p for site in attention_sites(model) for p in site.projections()):
        projection.weight_HKD().mul_(1 + number)
    before = [p.weight_HKD().norm().item() for site in attention_sites(model) for _, p in site.projections()]
    freeze(model, method)
    return before, [p.weight_HKD().norm().item() for site in attention_sites(model) for _, p in site.projections()]


@pytest.mark.parametrize("name", ["bert", "gpt2", "t5", "llama", "torch"])
def test_scale_layer_keeps_each_projections_own_size(name: str) -> None:
    for init in DRAWN:
        # Not T5 across all heads: 64 rows in 32 dimensions.
        if (name, init) != ("t5", "orthogonal_global"):
            with case(init):
                before, after = rms(name, Method(init=init, freeze=QK, scale="layer"))
                # Scaled in float64 and rounded once to float32; the norm is summed in float32.
                assert after == pytest.approx(before, rel=1e-5)


def test_scale_unit_has_rows_of_norm_one_whatever_was_there() -> None:
    _, after = rms("t5", Method(init="orthogonal", freeze=QK))
    assert after == pytest.approx([math.sqrt(64)] * 8, rel=1e-5)


def test_scaled_frames_are_the_same_frames() -> None:
    models = [tiny_model(BY_NAME["bert"]) for _ in range(2)]
    freeze(models[0], Method(init="orthogonal", freeze=QK))
    freeze(models[1], Method(init="orthogonal", freeze=QK, scale="layer"))
    for unit, scaled in zip(attention_sites(models[0]), attention_sites(models[1]), strict=True):
        size = scaled.q.weight.norm() / unit.q.weight.norm()
        assert torch.allclose(scaled.q.weight, unit.q.weight * size, rtol=1e-5, atol=0)


def test_a_start_of_zeros_stays_zero_at_any_scale() -> None:
    model = tiny_model(BY_NAME["bert"])
    freeze(model, Method(init="gaussian", std=0.0, freeze=QK, scale="layer"))
    assert not any(bool(projection.weight.any()) for site in attention_sites(model) for _, projection in site.projections())


def test_the_scale_of_weights_that_are_zero_is_refused() -> None:
    model = tiny_model(BY_NAME["bert"])
    attention_sites(model)[1].k.weight_HKD().zero_()
    with pytest.raises(MethodError, match=r"layer\.1\.attention\.self\.key: scale 'layer' .* theirs is 0\.0"):
        freeze(model, Method(init="orthogonal", freeze=QK, scale="layer"))


def test_scale_has_a_name_and_no_other_values() -> None:
    assert method_name(Method(init="orthogonal", freeze=QK, scale="layer")) == "orthogonal, q+k frozen, layers all, scale layer"
    with pytest.raises(ValidationError, match="'unit' or 'layer'"):
        Method.model_validate({"scale": "model"})


@pytest.fixture(scope="module")
def bert_base() -> nn.Module:
    from transformers import BertConfig, BertForSequenceClassification

    settings: dict[str, Any] = {"num_labels": 3}
    with torch.device("meta"):
        model: nn.Module = BertForSequenceClassification(BertConfig(**settings))
    freeze(model, "oelm_freeze_pretrained")
    return model


def test_bert_base_with_three_labels_has_the_studys_counts(bert_base: nn.Module) -> None:
    counts = audit(bert_base)
    assert (counts.total, counts.frozen, counts.trainable) == (109_484_547, 14_174_208, 95_310_339)


def test_the_summary_reads_like_pefts_and_says_what_is_frozen_where(bert_base: nn.Module) -> None:
    assert audit(bert_base).summary() == (
        "trainable params: 95,310,339 || all params: 109,484,547 || trainable%: 87.05\n"
        "frozen q: bert.encoder.layer.*.attention.self.query, layers 0-11: 7,087,104\n"
        "frozen k: bert.encoder.layer.*.attention.self.key, layers 0-11: 7,087,104"
    )


def test_the_summary_counts_what_was_frozen_by_others() -> None:
    model = tiny_model(BY_NAME["gpt2"])
    model.get_parameter("transformer.wpe.weight").requires_grad_(False)
    freeze(model, Method(freeze=("k",), layers=(1,)))
    assert audit(model).summary().splitlines()[1:] == [
        "frozen k: transformer.h.*.attn.c_attn.k, layers 1: 1,056",
        "frozen besides, not by their Q or K: 512",
    ]


def test_berts_attention_output_is_no_feed_forward(bert_base: nn.Module) -> None:
    roles = audit(bert_base).by_role
    square = 768 * 768 + 768
    assert roles["value_output"]["trainable"] == 12 * 2 * square
    assert roles["feed_forward"]["trainable"] == 12 * (2 * 768 * 3072 + 768 + 3072)


def test_nothing_can_be_proven_of_what_was_frozen_without_bytes(bert_base: nn.Module) -> None:
    model = copy.deepcopy(bert_base)
    for prove in (lambda: assert_unmoved(model), lambda: cast(model, torch.bfloat16)):
        with pytest.raises(FrozenMovedError, match="frozen on the meta device, where it had no bytes"):
            prove()
    assert all(p.digest is None and math.isnan(p.orthonormality_error) for p in audit(model).projections)
    assert len(thaw(model)) == 48
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_any_architecture_can_be_counted_without_bytes() -> None:
    cases: list[str] = ["gpt2", "gpt_neox", "torch", "t5"]
    for name in cases:
        with case(name):
            tiny: Tiny = BY_NAME[name]
            with torch.device("meta"):
                model = tiny.build()
            freeze(model, "oelm_freeze")
            assert audit(model).frozen == tiny.frozen
            with pytest.raises(MethodError, match="meta device, where there is nothing to keep"):
                fresh = copy.deepcopy(model)
                thaw(fresh)
                freeze(fresh, "oelm_freeze", keep_original=True)


def test_a_model_that_is_partly_without_bytes_is_refused() -> None:
    model = tiny_model(BY_NAME["bert"])
    model.get_submodule("bert.encoder.layer.1").to("meta")
    with pytest.raises(MethodError, match=r"BertForSequenceClassification is partly on the meta device \(offloaded\?\)"):
        freeze(model, "oelm_freeze")


def test_a_model_frozen_without_bytes_takes_over_stored_weights_and_digests() -> None:
    stored = tiny_model(BY_NAME["gpt2"])
    freeze(stored, "oelm_freeze")
    record = record_of(stored)
    assert record
    with torch.device("meta"):
        model = BY_NAME["gpt2"].build()
    freeze(model, "oelm_freeze")
    model.load_state_dict(stored.state_dict(), assign=True)
    adopt_record(model, record)
    assert_unmoved(model)


def test_the_guide_runs_and_prints_what_it_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    printed, names = io.StringIO(), {"__name__": "guide"}
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), flags=re.MULTILINE | re.DOTALL)
    with contextlib.redirect_stdout(printed):
        for block in blocks:
            exec(compile(block, PAGE.name, "exec"), names)
    site_module.ADAPTERS.pop("guide.MyAttention")
    said = [line.removeprefix("# ") for line in "".join(blocks).splitlines() if line.startswith("# ")]
    assert printed.getvalue().splitlines() == said
