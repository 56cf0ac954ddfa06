"""A short convolution before the first layer: what it computes, that it sees no future, and that all else stays."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import pytest
import torch
from pydantic import ValidationError
from torch.nn import functional as F

from oelm.errors import ConfigError
from oelm.method.apply import freeze
from oelm.method.audit import assert_unmoved, audit
from oelm.models.generate import Sampling, empty_cache, generate
from oelm.models.gpt import GPT, ShortConvolution, build_gpt
from oelm.models.heads import summarize_heads
from oelm.train.load import load_run
from tests.cases import case
from tests.conftest import lively_gpt, run_here, tiny_config, tiny_gpt_config

TOKENS = torch.randint(61, (2, 16), generator=torch.Generator().manual_seed(1))
WIDTH = 24


def test_it_adds_what_a_causal_depthwise_convolution_gives() -> None:
    cases: list[int] = [1, 3, 20]
    for reach in cases:
        with case(reach):
            generator = torch.Generator().manual_seed(0)
            conv = ShortConvolution(reach, WIDTH).double()
            with torch.no_grad():
                conv.weight.copy_(torch.randn(reach, WIDTH, generator=generator, dtype=torch.float64))
            x_BTD = torch.randn(2, 16, WIDTH, generator=generator, dtype=torch.float64)
            # torch's kernel runs from the farthest token to the nearest, and ours ends one token before each.
            kernel = conv.weight.T.flip(1).unsqueeze(1)
            reference = F.conv1d(F.pad(x_BTD.mT, (reach, 0))[..., :-1], kernel, groups=WIDTH).mT
            # Sums of at most 21 products in another order, in float64.
            torch.testing.assert_close(conv(x_BTD), x_BTD + reference, rtol=0, atol=1e-12)


def test_no_token_sees_a_later_one_and_the_next_few_do_see_it() -> None:
    cases: list[int] = [0, 5, 15]
    for changed in cases:
        with case(changed):
            model, other = lively_gpt(short_conv=3), TOKENS.clone()
            other[:, changed] = (other[:, changed] + 1) % 61
            moved_BT = (model.embed(TOKENS) != model.embed(other)).any(-1)
            assert moved_BT.tolist() == [[changed <= place <= changed + 3 for place in range(16)]] * 2
            assert torch.equal(model(TOKENS)[:, :changed], model(other)[:, :changed])


def test_with_weights_of_zero_it_is_the_plain_model_and_all_else_is_drawn_alike() -> None:
    plain, conv = lively_gpt(short_conv=0), lively_gpt(short_conv=3)
    ours = dict(conv.named_parameters())
    assert ours.keys() - dict(plain.named_parameters()).keys() == {"short_conv.weight"}
    assert all(torch.equal(weight, ours[name]) for name, weight in plain.named_parameters())
    assert not torch.equal(plain(TOKENS), conv(TOKENS))
    with torch.no_grad():
        ours["short_conv.weight"].zero_()
    assert torch.equal(plain(TOKENS), conv(TOKENS))


@pytest.mark.parametrize("reach", [1, 3, 20])
def test_cached_text_equals_uncached_text_token_for_token(reach: int) -> None:
    model, greedy = lively_gpt(short_conv=reach), Sampling(temperature=0.0)
    # Prompts shorter than the reach, longer, and as long as the context.
    prompts = [([7], greedy), ([1, 2], greedy), (list(range(16)), greedy), ([1, 2, 3, 4, 5], Sampling(temperature=1.0, seed=1))]
    for prompt, sampling in prompts:
        with case(prompt, sampling):
            cached = list(islice(generate(model, prompt, sampling=sampling), 40))
            assert cached == list(islice(generate(model, prompt, sampling=sampling, cached=False), 40))
            assert len(set(cached)) > 1, "a text of one repeated token would prove nothing"


def test_a_cache_holds_no_more_than_what_is_looked_back_at() -> None:
    model, cache = lively_gpt(short_conv=3), empty_cache(lively_gpt(short_conv=3))
    model(TOKENS[:1, :6], cache)
    for token in range(6, 10):
        model(torch.tensor([[token]]), cache)
        assert cache.embedded_BTD.shape == (1, 3, WIDTH) and cache.length == token + 1
        assert cache.embedded_BTD.untyped_storage().nbytes() == 3 * WIDTH * 4
    with pytest.raises(ConfigError, match="17 tokens exceed the model's context of 16"):
        model(torch.zeros(1, 7, dtype=torch.long), cache)


def test_freezing_leaves_it_free_and_nothing_on_the_side_of_q_and_k_learns() -> None:
    model = build_gpt(tiny_gpt_config(short_conv=3), seed=0)
    plain = build_gpt(tiny_gpt_config(), seed=0)
    for each in (model, plain):
        freeze(each, "oelm_scaled", seed=0)
    ours, theirs = audit(model), audit(plain)
    assert ours.trainable - theirs.trainable == 3 * WIDTH and ours.frozen == theirs.frozen
    assert ours.by_role["query"]["trainable"] == ours.by_role["key"]["trainable"] == 0
    assert all(
        torch.equal(weight, model.get_parameter(name))
        for name, weight in plain.named_parameters()
        if name.endswith(("attention.q.weight", "attention.k.weight"))
    )


def test_a_run_trains_it_and_is_read_back_whole(text_file: Path, tmp_path: Path) -> None:
    config = tiny_config(text_file, model__short_conv=2, steps=4)
    run_here(config, tmp_path / "run")
    loaded = load_run(tmp_path / "run")
    assert isinstance(loaded.model, GPT) and loaded.model.short_conv is not None
    assert_unmoved(loaded.model)
    start = build_gpt(loaded.model.config, seed=config.seed)
    assert not torch.equal(loaded.model.short_conv.weight, start.get_parameter("short_conv.weight"))


def test_the_heads_are_measured_behind_it() -> None:
    conv, plain = lively_gpt(short_conv=3), lively_gpt(short_conv=0)
    assert summarize_heads(conv, TOKENS) != summarize_heads(plain, TOKENS)
    with torch.no_grad():
        conv.get_parameter("short_conv.weight").zero_()
    assert summarize_heads(conv, TOKENS) == summarize_heads(plain, TOKENS)


def test_a_reach_that_makes_no_sense_is_refused() -> None:
    cases: list[object] = [-1, 65, 1.5, "3"]
    for reach in cases:
        with case(reach):
            with pytest.raises(ValidationError, match="short_conv"):
                tiny_gpt_config(short_conv=reach)
