"""A GPT whose Q and K have fewer rows than V: the same attention, only thinner, and still a plain GPT-2 once exported."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import pytest
import torch
from pydantic import ValidationError
from tokenizers import Tokenizer
from tokenizers.models import BPE
from torch import Tensor

from oelm.method.apply import freeze
from oelm.method.audit import audit, check_frozen, digest
from oelm.method.method import PRESETS
from oelm.method.sites import attention_sites
from oelm.models.export import export_gpt
from oelm.models.generate import Sampling, generate
from oelm.models.gpt import GPT, build_gpt
from oelm.models.heads import summarize_heads
from oelm.train.load import load_run
from tests.cases import case
from tests.conftest import lively_gpt, run_here, tiny_config, tiny_gpt_config

TOKENS = torch.randint(61, (2, 16), generator=torch.Generator().manual_seed(1))
# Heads of 8; with 2 rows the export's factor, the root of 8 / 2, is a whole number.
HEAD_DIM, NUM_HEADS, WIDTH, LAYERS = 8, 3, 24, 3


def naive_attention(model: GPT, layer: int, x_BTD: Tensor) -> Tensor:
    """Return what a block's attention must give, head by head, from the textbook's formula."""
    attention = model.get_submodule(f"blocks.{layer}.attention")
    q, k, v = (x_BTD @ attention.get_parameter(f"{part}.weight").T for part in "qkv")
    rows = q.shape[-1] // NUM_HEADS
    future = torch.ones(x_BTD.shape[1], x_BTD.shape[1]).triu(1).bool()
    mixed = []
    for head in range(NUM_HEADS):
        thin, wide = slice(head * rows, (head + 1) * rows), slice(head * HEAD_DIM, (head + 1) * HEAD_DIM)
        scores = (q[..., thin] @ k[..., thin].mT / rows**0.5).masked_fill(future, float("-inf"))
        mixed.append(scores.softmax(-1) @ v[..., wide])
    return torch.cat(mixed, -1) @ attention.get_parameter("out.weight").T


def test_attention_is_the_textbooks_with_fewer_rows() -> None:
    cases: list[int] = [1, 2, 5, 8]
    for qk_dim in cases:
        with case(qk_dim):
            model = lively_gpt(qk_dim=qk_dim).double()
            x_BTD = torch.randn(2, 16, WIDTH, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
            # Sums of at most 24 products in another order, in float64, of numbers below 1000.
            expected = naive_attention(model, 1, x_BTD)
            assert torch.allclose(model.get_submodule("blocks.1.attention")(x_BTD), expected, rtol=0, atol=24 * 2.0**-52 * 1e3)


def test_as_wide_as_a_head_is_the_model_without_the_setting() -> None:
    wide, plain = lively_gpt(qk_dim=HEAD_DIM), lively_gpt(qk_dim=None)
    assert {n: digest(p) for n, p in wide.named_parameters()} == {n: digest(p) for n, p in plain.named_parameters()}
    assert torch.equal(wide.logits(TOKENS), plain.logits(TOKENS))


def test_everything_but_q_and_k_is_that_of_the_model_it_controls() -> None:
    thin, plain = build_gpt(tiny_gpt_config(qk_dim=2), seed=0), build_gpt(tiny_gpt_config(), seed=0)
    for name, parameter in thin.named_parameters():
        if name.endswith((".q.weight", ".k.weight")):
            assert parameter.shape == (NUM_HEADS * 2, WIDTH)
        else:
            assert torch.equal(parameter, plain.get_parameter(name))


def test_parameters_are_those_of_the_rows_left_out() -> None:
    thin, plain = (audit(build_gpt(tiny_gpt_config(qk_dim=qk_dim), seed=0)).total for qk_dim in (2, None))
    assert plain - thin == LAYERS * 2 * NUM_HEADS * (HEAD_DIM - 2) * WIDTH


def test_wider_than_a_head_is_refused_with_both_widths() -> None:
    cases: list[int] = [9, 24, 100]
    for qk_dim in cases:
        with case(qk_dim):
            with pytest.raises(
                ValidationError, match=rf"qk_dim {qk_dim} is wider than a head \(8\); it is there to make Q and K thin"
            ):
                tiny_gpt_config(qk_dim=qk_dim)


@pytest.mark.parametrize("sampling", [Sampling(temperature=0.0), Sampling(temperature=1.0, seed=1)], ids=["greedy", "sampled"])
@pytest.mark.parametrize("qk_dim", [1, 3])
def test_cached_text_equals_uncached_text_token_for_token(qk_dim: int, sampling: Sampling) -> None:
    model = lively_gpt(qk_dim=qk_dim)
    cached, uncached = (list(islice(generate(model, [5, 9], sampling=sampling, cached=c), 60)) for c in (True, False))
    assert cached == uncached and len(set(cached)) > 1


def test_every_method_applies_to_thin_queries_and_keys() -> None:
    for preset in PRESETS:
        with case(preset):
            model = build_gpt(tiny_gpt_config(qk_dim=4), seed=0)
            names = freeze(model, preset)
            check_frozen(model)
            model.logits(TOKENS).sum().backward()
            assert all((parameter.grad is None) == (name in names) for name, parameter in model.named_parameters())


def test_thin_frames_are_orthonormal() -> None:
    model = build_gpt(tiny_gpt_config(qk_dim=2), seed=0)
    freeze(model, "oelm_freeze")
    assert {site.q.weight_HKD().shape for site in attention_sites(model)} == {(NUM_HEADS, 2, WIDTH)}
    # As in test_frames: rounding to float32 gives 2^-23, the rest is slack.
    assert max(projection.orthonormality_error for projection in audit(model).projections) <= 2.0**-22


def test_heads_are_summarised_with_the_rank_they_can_have() -> None:
    assert all(summary.effective_rank <= 2 + 1e-5 for summary in summarize_heads(lively_gpt(qk_dim=2), TOKENS))


def as_gpt2(model: GPT, folder: Path) -> torch.nn.Module:
    transformers = pytest.importorskip("transformers", reason="needs the extra 'hf'")
    export_gpt(model, Tokenizer(BPE({"<|endoftext|>": 0}, [])), folder, end_of_text=0, card="card")
    loaded: torch.nn.Module = transformers.GPT2LMHeadModel.from_pretrained(folder).eval()
    return loaded


@pytest.mark.parametrize("qk_dim", [2, 3, 8])
def test_exported_it_gives_transformers_the_same_logits(qk_dim: int, tmp_path: Path) -> None:
    model = lively_gpt(qk_dim=qk_dim)
    theirs = as_gpt2(model, tmp_path / "hf").double()
    with torch.no_grad():
        ours, read = model.double().logits(TOKENS), theirs(TOKENS).logits
    # In float64 but for the exported weights. A factor of 2 or 1 is exact, and what is left are some hundred sums of 40
    # products; another one rounds each weight of Q by 2^-24 of itself, and so a logit of attention by that of its parts.
    scale = float(ours.abs().max())
    exact, rounded = 1e4 * 2.0**-53 * scale, 2.0**-24 * 100 * scale
    assert float((read - ours).abs().max()) <= (rounded if qk_dim == 3 else exact)


def test_a_thin_run_trains_opens_and_exports(text_file: Path, tmp_path: Path) -> None:
    config = tiny_config(text_file, method="baseline", model__qk_dim=2, steps=6, optim__lr=0.01)
    run_here(config, tmp_path / "run")
    loaded = load_run(tmp_path / "run", which="latest")
    assert loaded.config.model.qk_dim == 2 and loaded.step == 6
    tokens = torch.arange(16).unsqueeze(0)
    with torch.no_grad():
        difference = (as_gpt2(loaded.folded(), tmp_path / "hf")(tokens).logits - loaded.model.logits(tokens)).abs().max()
    # Two layers of float32 sums of at most 128 products, on logits below one: as in test_export.
    assert float(difference) < 1e-5
