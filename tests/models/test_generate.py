"""Cached text equals uncached text, sampling keeps its promises, and the context slides."""

from __future__ import annotations

import copy
from itertools import islice

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from oelm.errors import ConfigError
from oelm.method.apply import freeze
from oelm.method.method import Method
from oelm.models.generate import Sampling, generate, lay_out_by_columns, next_token, window_start
from oelm.models.gpt import GPT
from tests.cases import case
from tests.conftest import lively_gpt


@pytest.fixture(scope="module")
def model() -> GPT:
    """A model whose weights are large enough for its texts to differ."""
    gpt = lively_gpt()
    freeze(gpt, Method(init="orthogonal", freeze=("q", "k"), gain="matrix"))
    return gpt


SAMPLINGS = [
    Sampling(temperature=0.0),
    Sampling(temperature=1.0, seed=1),
    Sampling(temperature=0.7, top_k=5, seed=2),
    Sampling(temperature=1.3, top_p=0.8, seed=3),
]


# Every way to choose from one prompt, and a prompt that fills the context: what slides does not depend on the choice.
@pytest.mark.parametrize(
    ("prompt", "sampling"),
    [*(([1, 2, 3, 4, 5], each) for each in SAMPLINGS), ([7], SAMPLINGS[0]), (list(range(16)), SAMPLINGS[1])],
)
def test_cached_text_equals_uncached_text_token_for_token(model: GPT, prompt: list[int], sampling: Sampling) -> None:
    cached = list(islice(generate(model, prompt, sampling=sampling), 40))
    uncached = list(islice(generate(model, prompt, sampling=sampling, cached=False), 40))
    assert cached == uncached
    assert len(set(cached)) > 1, "a text of one repeated token would prove nothing"


def test_text_within_the_context_is_what_whole_forwards_give(model: GPT) -> None:
    tokens = [5, 9]
    for token in islice(generate(model, tokens, sampling=Sampling(temperature=0.0)), 14):
        assert token == int(model.logits(torch.tensor([tokens]))[0, -1].argmax())
        tokens = [*tokens, token]


def test_layout_by_columns_changes_no_value_and_no_text(model: GPT) -> None:
    laid_out = copy.deepcopy(model)
    lay_out_by_columns(laid_out)
    assert all(torch.equal(one, other) for one, other in zip(model.parameters(), laid_out.parameters(), strict=True))
    assert laid_out.head_VD.T.is_contiguous() and not model.head_VD.T.is_contiguous()
    texts = [list(islice(generate(gpt, [1], sampling=Sampling(temperature=0.0)), 40)) for gpt in (model, laid_out)]
    assert texts[0] == texts[1]


def test_same_seed_same_text_and_other_seed_other_text(model: GPT) -> None:
    def text(seed: int) -> list[int]:
        return list(islice(generate(model, [1], sampling=Sampling(temperature=1.0, seed=seed)), 40))

    assert text(4) == text(4) != text(5)


def test_sampling_does_not_touch_the_global_generator(model: GPT) -> None:
    torch.manual_seed(0)
    before = torch.get_rng_state()
    list(islice(generate(model, [1], sampling=Sampling(temperature=1.0)), 5))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(("prompt", "words"), [([], "empty"), (list(range(17)), "17 tokens, the model's context 16")])
def test_prompt_that_does_not_fit_is_refused(model: GPT, prompt: list[int], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        next(generate(model, prompt, sampling=Sampling()))


@given(length=st.integers(1, 5000), seq_len=st.integers(1, 64))
def test_context_never_exceeds_the_model_and_never_runs_dry(length: int, seq_len: int) -> None:
    start = window_start(length, seq_len)
    assert 1 <= length - start <= seq_len
    assert window_start(length + 1, seq_len) >= start


@settings(deadline=None, max_examples=50)
@given(seed=st.integers(0, 10**6), top_k=st.integers(1, 8))
def test_top_k_chooses_among_the_k_likeliest(seed: int, top_k: int) -> None:
    logits = torch.randn(20, generator=torch.Generator().manual_seed(seed))
    token = next_token(logits, Sampling(temperature=2.0, top_k=top_k), torch.Generator().manual_seed(seed))
    assert token in logits.topk(top_k).indices.tolist()


@settings(deadline=None, max_examples=50)
@given(seed=st.integers(0, 10**6), top_p=st.floats(0.01, 1.0))
def test_top_p_chooses_within_the_share(seed: int, top_p: float) -> None:
    logits = torch.randn(20, generator=torch.Generator().manual_seed(seed))
    token = next_token(logits, Sampling(temperature=1.0, top_p=top_p), torch.Generator().manual_seed(seed))
    likelier = logits.double().softmax(-1)[logits > logits[token]].sum()
    # The tokens likelier than the chosen one hold less than the share; equality only by float64 rounding.
    assert float(likelier) < top_p + 1e-12


def test_frequencies_follow_the_softmax() -> None:
    logits, generator = torch.tensor([0.0, 1.0, 2.0]), torch.Generator().manual_seed(0)
    draws = torch.tensor([next_token(logits, Sampling(temperature=2.0), generator) for _ in range(4000)])
    expected = (logits / 2.0).softmax(-1)
    # Five standard deviations of a binomial share of 4000 draws are below 0.04.
    assert torch.allclose(torch.bincount(draws) / 4000, expected, atol=0.04)


def test_a_tiny_temperature_takes_the_likeliest() -> None:
    cases: list[float] = [1e-320, 1e-308, 1e-5]
    for temperature in cases:
        with case(temperature):
            logits = torch.tensor([-3e4, 2.0, 3e4, 1.0])
            assert next_token(logits, Sampling(temperature=temperature), torch.Generator().manual_seed(0)) == 2
