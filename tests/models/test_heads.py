"""What is said of a head is what its attention does: logits, entropy, rank, distance, induction."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from oelm.method.apply import cast, freeze
from oelm.method.frames import frame_generator, sample_frames
from oelm.method.method import PRESETS
from oelm.models.gpt import GPT, Attention, TransformerBlock, build_gpt
from oelm.models.heads import attention_logits, summarize_heads
from tests.cases import case
from tests.conftest import tiny_gpt_config

SEQ_LEN, HEAD_DIM = 16, 8


def gpt(preset: str) -> GPT:
    model = build_gpt(tiny_gpt_config(), seed=0)
    freeze(model, preset)
    return model


def attention_of(model: GPT, layer: int = 0) -> Attention:
    block = model.blocks[layer]
    assert isinstance(block, TransformerBlock)
    return block.attention


def windows(model: GPT, *, count: int = 3) -> Tensor:
    shape = (count, model.config.seq_len)
    return torch.randint(model.config.vocab_size, shape, generator=torch.Generator().manual_seed(0))


def test_softmax_of_the_logits_reproduces_the_attention() -> None:
    cases: list[str] = ["oelm_freeze", "gaussian_matched", "baseline"]
    for preset in cases:
        with case(preset):
            attention = attention_of(gpt(preset)).double()
            x_BTD = torch.randn(2, SEQ_LEN, 24, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 3
            with torch.no_grad():
                weights_BHTT = attention_logits(attention, x_BTD).double().softmax(-1)
                mixed = attention.out((weights_BHTT @ attention.heads(attention.v(x_BTD))).transpose(1, 2).flatten(-2))
                # The logits come back in float32: those here are below 64, so off by 2^-19 at most, and a weight by a factor of
                # exp(2 * 2^-19). The values are below 1 and averaged, and the output map's rows sum to less than 1.
                assert float((mixed - attention(x_BTD)).abs().max()) <= 2.0**-18


def test_the_future_has_no_weight() -> None:
    x_BTD = torch.randn(2, SEQ_LEN, 24, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        logits_BHTT = attention_logits(attention_of(gpt("oelm_freeze")), x_BTD)
    future_TT = torch.ones(SEQ_LEN, SEQ_LEN, dtype=torch.bool).triu(1)
    assert bool((logits_BHTT[..., future_TT] == -math.inf).all())
    assert bool(logits_BHTT[..., ~future_TT].isfinite().all())


def test_heads_are_listed_by_layer_and_head() -> None:
    model = gpt("oelm_freeze")
    listed = [(summary.layer, summary.head) for summary in summarize_heads(model, windows(model))]
    assert listed == [(layer, head) for layer in range(3) for head in range(3)]


def test_every_figure_is_finite() -> None:
    for preset in PRESETS:
        with case(preset):
            model = gpt(preset)
            for summary in summarize_heads(model, windows(model)):
                assert all(math.isfinite(value) for value in summary.as_dict().values()), summary


def test_every_figure_is_finite_however_short_the_window() -> None:
    cases: list[int] = [1, 2, 3, 4]
    for seq_len in cases:
        with case(seq_len):
            model = build_gpt(tiny_gpt_config(seq_len=seq_len), seed=0)
            for summary in summarize_heads(model, windows(model)):
                assert all(math.isfinite(value) for value in summary.as_dict().values()), summary


def test_every_figure_of_a_model_cast_to_bfloat16_is_finite() -> None:
    model = gpt("oelm_freeze")
    cast(model, torch.bfloat16)
    for summary in summarize_heads(model, windows(model)):
        assert all(math.isfinite(value) for value in summary.as_dict().values()), summary


def test_uniform_heads_have_the_uniform_entropy() -> None:
    model = gpt("uniform")
    for summary in summarize_heads(model, windows(model)):
        # A row's entropy sums up to 16 terms whose total is log n <= 2.8, each with a few roundings of 2^-24.
        assert abs(summary.entropy - summary.uniform_entropy) <= 20 * 2.8 * 2.0**-24


def test_uniform_entropy_is_the_mean_of_the_logarithms_of_what_is_visible() -> None:
    model = gpt("oelm_freeze")
    expected = sum(math.log(n) for n in range(1, SEQ_LEN + 1)) / SEQ_LEN
    # Sixteen float32 terms below 2.8.
    assert abs(summarize_heads(model, windows(model))[0].uniform_entropy - expected) <= 20 * 2.8 * 2.0**-24


def test_no_head_has_more_than_the_uniform_entropy() -> None:
    model = gpt("oelm_freeze")
    assert all(s.entropy <= s.uniform_entropy + 1e-6 for s in summarize_heads(model, windows(model)))


def test_uniform_heads_look_back_half_of_what_is_visible() -> None:
    model = gpt("uniform")
    for summary in summarize_heads(model, windows(model)):
        # The mean over t of t / 2 for t = 0..15; float32 sums of 16 terms below 16.
        assert abs(summary.mean_distance - (SEQ_LEN - 1) / 4) <= 20 * 16 * 2.0**-24


def test_uniform_heads_have_logits_without_spread_and_no_rank() -> None:
    model = gpt("uniform")
    assert {(s.logit_std, s.effective_rank) for s in summarize_heads(model, windows(model))} == {(0.0, 0.0)}


def test_logit_spread_is_that_of_the_visible_logits() -> None:
    model = gpt("oelm_freeze")
    tokens = windows(model)
    first = model.blocks[0]
    assert isinstance(first, TransformerBlock)
    with torch.no_grad():
        embedded = model.token_embedding(tokens) + model.position_embedding(torch.arange(SEQ_LEN))
        logits_BHTT = attention_logits(first.attention, first.attention_norm(embedded))
    visible_TT = torch.ones(SEQ_LEN, SEQ_LEN, dtype=torch.bool).tril()
    summary = summarize_heads(model, tokens)[1]
    # Of each window by itself, then averaged; 136 float32 squares summed in another order: roundings of 2^-24, relative.
    by_window = logits_BHTT[:, 1][:, visible_TT].double().std(1, correction=0)
    assert summary.logit_std == pytest.approx(float(by_window.mean()), rel=136 * 2.0**-24)


def with_qk(q_HKD: Tensor, k_HKD: Tensor) -> GPT:
    model = build_gpt(tiny_gpt_config(), seed=0)
    with torch.no_grad():
        attention_of(model).q.weight.copy_(q_HKD.flatten(0, 1))
        attention_of(model).k.weight.copy_(k_HKD.flatten(0, 1))
    return model


def rank_of_first_head(model: GPT) -> float:
    return summarize_heads(model, windows(model))[0].effective_rank


# Singular values are good to about K * D * 2^-24 = 1.1e-5; the entropy is flat where they are equal (so that enters
# squared) and its own 8 terms and exponential add 8 * 2.1 * 2^-24, times a rank of 8: 8e-6.
EQUAL_VALUES = 2e-5


def test_orthonormal_queries_equal_to_keys_have_the_full_rank() -> None:
    frames_HKD = sample_frames(3, HEAD_DIM, 24, generator=frame_generator(0, "0", "q"))
    assert abs(rank_of_first_head(with_qk(frames_HKD, frames_HKD)) - HEAD_DIM) <= EQUAL_VALUES


def test_rank_does_not_depend_on_scale() -> None:
    frames_HKD = sample_frames(3, HEAD_DIM, 24, generator=frame_generator(0, "0", "q"))
    assert abs(rank_of_first_head(with_qk(frames_HKD * 2**-10, frames_HKD * 2**4)) - HEAD_DIM) <= EQUAL_VALUES


def test_rank_is_that_of_the_whole_form_of_queries_and_keys() -> None:
    model = gpt("baseline")
    q_KD, k_KD = (
        attention_of(model).q.weight[:HEAD_DIM].detach().double(),
        attention_of(model).k.weight[:HEAD_DIM].detach().double(),
    )
    share_K = torch.linalg.svdvals(q_KD.T @ k_KD)[:HEAD_DIM]
    share_K /= share_K.sum()
    # Eight shares off by 1.1e-5 (as above), each times |log| + 1 < 6, times a rank of 8: 4e-3. A wrong form is 0.1 off.
    assert abs(rank_of_first_head(model) - math.exp(-float((share_K * share_K.log()).sum()))) <= 4e-3


def test_rank_counts_the_keys_rows_that_are_there() -> None:
    cases: list[int] = [1, 2, 5]
    for kept in cases:
        with case(kept):
            frames_HKD = sample_frames(3, HEAD_DIM, 24, generator=frame_generator(0, "0", "q"))
            keys_HKD = frames_HKD.clone()
            keys_HKD[:, kept:] = 0
            # A value that should be zero is 1e-7 instead, and adds s * log(1/s) = 1.6e-6 to the entropy, times at most 7 x 5.
            assert abs(rank_of_first_head(with_qk(frames_HKD, keys_HKD)) - kept) <= EQUAL_VALUES + 6e-5


def test_a_head_made_to_look_after_the_first_copy_scores_one_for_induction() -> None:
    """Positions are one-hot; keys are shifted so that the query at t finds the key at t - half + 1."""
    half = SEQ_LEN // 2
    model = build_gpt(tiny_gpt_config(model_dim=SEQ_LEN, num_heads=1, num_layers=1), seed=0)
    attention = attention_of(model)
    with torch.no_grad():
        model.token_embedding.weight.zero_()
        model.position_embedding.weight.copy_(torch.eye(SEQ_LEN))
        attention.q.weight.copy_(100 * torch.eye(SEQ_LEN))
        attention.k.weight.copy_(torch.eye(SEQ_LEN).roll(half - 1, dims=0))
    # The norm makes a one-hot about 3.9 high and flat elsewhere: the match leads every other logit by over 300.
    assert summarize_heads(model, windows(model))[0].induction == 1.0


@pytest.mark.parametrize("training", [True, False])
def test_summarizing_leaves_the_model_in_its_mode(training: bool) -> None:
    model = gpt("oelm_freeze").train(training)
    summarize_heads(model, windows(model))
    assert model.training is training


def test_summaries_are_made_without_dropout() -> None:
    model = build_gpt(tiny_gpt_config(dropout=0.5), seed=0).train()
    assert summarize_heads(model, windows(model)) == summarize_heads(model, windows(model))
