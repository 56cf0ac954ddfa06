"""Our GPT computes what transformers' GPT-2 computes, sees no future, and its weights follow from seed and name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from torch import Tensor

from oelm.errors import ConfigError
from oelm.method.audit import digest
from oelm.models.gpt import GPT, INIT_STD, attend_by_blocks, build_gpt
from oelm.models.shape import GPTConfig, divisors_near
from tests.cases import case
from tests.conftest import tiny_gpt_config


def digests(model: GPT) -> dict[str, str]:
    return {name: digest(parameter) for name, parameter in model.named_parameters()}


def lively_gpt(config: GPTConfig) -> GPT:
    """A GPT in float64 whose weights are large and random, norms and biases too, so that nothing is near a no-op."""
    model = build_gpt(config, seed=0).double()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.4)
    return model


def random_tokens(config: GPTConfig, *, batch: int = 2) -> Tensor:
    return torch.randint(config.vocab_size, (batch, config.seq_len), generator=torch.Generator().manual_seed(2))


def as_gpt2(model: GPT) -> Any:
    """Return transformers' GPT-2 with the same weights; its matrices 'c_*' are transposed, c_attn holds q, k and v."""
    transformers = pytest.importorskip("transformers")
    ours, config = dict(model.named_parameters()), model.config
    shape = transformers.GPT2Config(
        vocab_size=config.vocab_size,
        n_positions=config.seq_len,
        n_embd=config.model_dim,
        n_layer=config.num_layers,
        n_head=config.num_heads,
        n_inner=config.ff_dim,
        activation_function="gelu",
        bos_token_id=0,
        eos_token_id=0,
    )
    theirs = transformers.GPT2LMHeadModel(shape).double().eval()
    weights: dict[str, Tensor] = {"wte.weight": ours["token_embedding.weight"], "wpe.weight": ours["position_embedding.weight"]}
    for kind in ("weight", "bias"):
        weights[f"ln_f.{kind}"] = ours[f"final_norm.{kind}"]
        for n in range(config.num_layers):
            weights[f"h.{n}.ln_1.{kind}"] = ours[f"blocks.{n}.attention_norm.{kind}"]
            weights[f"h.{n}.ln_2.{kind}"] = ours[f"blocks.{n}.ff_norm.{kind}"]
            weights[f"h.{n}.mlp.c_fc.{kind}"] = ours[f"blocks.{n}.ff_in.{kind}"]
            weights[f"h.{n}.mlp.c_proj.{kind}"] = ours[f"blocks.{n}.ff_out.{kind}"]
    for n in range(config.num_layers):
        weights[f"h.{n}.attn.c_attn.weight"] = torch.cat([ours[f"blocks.{n}.attention.{part}.weight"] for part in "qkv"])
        weights[f"h.{n}.attn.c_attn.bias"] = torch.zeros(3 * config.model_dim)
        weights[f"h.{n}.attn.c_proj.weight"] = ours[f"blocks.{n}.attention.out.weight"]
        weights[f"h.{n}.attn.c_proj.bias"] = torch.zeros(config.model_dim)
    turned = {
        name: value.detach().T if ".c_" in name and value.dim() == 2 else value.detach() for name, value in weights.items()
    }
    theirs.transformer.load_state_dict(turned, strict=True)
    return theirs


def test_logits_are_those_of_transformers_gpt2() -> None:
    model = lively_gpt(tiny_gpt_config()).eval()
    tokens = random_tokens(model.config)
    with torch.no_grad():
        ours, theirs = model.logits(tokens), as_gpt2(model)(tokens).logits
    # In float64 (u = 1.1e-16) a logit, here below 10, comes after some 10^3 roundings: 1e-12. A wrong term moves it by 0.1.
    assert float((ours - theirs).abs().max()) <= 1e-12


def test_a_token_changes_no_logits_before_it_and_all_from_it_on() -> None:
    cases: list[int] = [1, 7, 15]
    for position in cases:
        with case(position):
            model = lively_gpt(tiny_gpt_config()).float().eval()
            tokens = random_tokens(model.config)
            changed = tokens.clone()
            changed[:, position] = (changed[:, position] + 1) % model.config.vocab_size
            with torch.no_grad():
                before, after = model.logits(tokens), model.logits(changed)
            # To the bit: what is masked enters as an exact zero, and the order of sums does not depend on values.
            assert torch.equal(before[:, :position], after[:, :position])
            assert bool((before[:, position:] != after[:, position:]).any(-1).all())


def test_logits_are_the_hidden_states_read_by_the_token_embedding() -> None:
    model = lively_gpt(tiny_gpt_config()).eval()
    tokens = random_tokens(model.config)
    assert model.head_VD is model.token_embedding.weight
    assert torch.equal(model.logits(tokens), model(tokens) @ model.token_embedding.weight.T)


def test_dropout_acts_in_training_only() -> None:
    model = build_gpt(tiny_gpt_config(dropout=0.5), seed=0)
    tokens = random_tokens(model.config)
    assert not torch.equal(model.train()(tokens), model(tokens))
    assert torch.equal(model.eval()(tokens), model(tokens))


@pytest.mark.parametrize("length", [1, 128, 300])
def test_attention_by_blocks_is_causal_attention(length: int) -> None:
    generator = torch.Generator().manual_seed(0)
    blocks, whole = (
        [torch.randn(2, 3, length, 8, generator=generator.manual_seed(i)).requires_grad_() for i in range(3)] for _ in range(2)
    )
    mixed = attend_by_blocks(*blocks, dropout=0.0)
    expected = torch.nn.functional.scaled_dot_product_attention(whole[0], whole[1], whole[2], is_causal=True)
    # Sums of at most 300 products of numbers of size one, in another order.
    torch.testing.assert_close(mixed, expected, atol=1e-5, rtol=1e-5)
    mixed.square().sum().backward()
    expected.square().sum().backward()
    for ours, theirs in zip(blocks, whole, strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, atol=1e-4, rtol=1e-4)


def test_attention_by_blocks_drops_weights_and_scales_the_rest() -> None:
    torch.manual_seed(0)
    q = k = torch.zeros(1, 1, 256, 4)
    mixed = attend_by_blocks(q, k, torch.eye(256)[None, None], dropout=0.25)[0, 0]
    # Equal logits: row t holds 1 / (t + 1) up to t before dropout.
    scaled = mixed * torch.arange(1, 257)[:, None]
    seen = scaled[torch.ones(256, 256, dtype=torch.bool).tril()]
    assert ((seen.abs() < 1e-5) | ((seen - 4 / 3).abs() < 1e-4)).all() and (mixed.triu(1) == 0).all()
    # 32,896 draws: ten standard deviations are 0.024.
    assert float((seen == 0).float().mean()) == pytest.approx(0.25, abs=0.024)


def test_long_texts_train_with_dropout_by_blocks_and_see_no_future() -> None:
    model = build_gpt(tiny_gpt_config(seq_len=512, dropout=0.1), seed=0).train()
    tokens = torch.randint(61, (1, 512), generator=torch.Generator().manual_seed(0))
    changed = tokens.clone()
    changed[0, 300] = (tokens[0, 300] + 1) % 61
    outputs = []
    for batch in (tokens, changed):
        torch.manual_seed(1)
        outputs.append(model(batch).detach())
    same = (outputs[0] == outputs[1]).all(-1)[0]
    assert same[:300].all() and not same[300:].any()


def test_weights_do_not_depend_on_the_global_generator() -> None:
    torch.manual_seed(1)
    first = digests(build_gpt(tiny_gpt_config(), seed=0))
    torch.manual_seed(2)
    assert digests(build_gpt(tiny_gpt_config(), seed=0)) == first


def test_building_leaves_the_global_generator_alone() -> None:
    before = torch.get_rng_state()
    build_gpt(tiny_gpt_config(), seed=0)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_deeper_model_shares_the_weights_of_the_layers_it_shares() -> None:
    shallow, deep = (digests(build_gpt(tiny_gpt_config(num_layers=n), seed=0)) for n in (2, 4))
    assert {name: deep[name] for name in shallow} == shallow


def test_matrices_of_one_shape_and_different_name_differ() -> None:
    weights = [p for p in build_gpt(tiny_gpt_config(), seed=0).parameters() if p.shape == (24, 24)]
    assert len({digest(weight) for weight in weights}) == len(weights) == 3 * 4


def test_another_seed_gives_other_matrices() -> None:
    one, other = (build_gpt(tiny_gpt_config(), seed=seed) for seed in (0, 1))
    assert all(not torch.equal(p, other.get_parameter(n)) for n, p in one.named_parameters() if p.dim() == 2)


def test_fresh_matrices_are_gaussian_norms_one_and_biases_zero() -> None:
    for name, parameter in build_gpt(tiny_gpt_config(model_dim=48), seed=0).named_parameters():
        if parameter.dim() == 2:
            # The sample's standard deviation has a relative error of 1 / sqrt(2n); six of them.
            assert abs(float(parameter.detach().std()) / INIT_STD - 1) <= 6 / (2 * parameter.numel()) ** 0.5, name
        else:
            assert torch.equal(parameter, torch.full_like(parameter, 0.0 if name.endswith("bias") else 1.0)), name


@pytest.mark.parametrize(
    ("overrides", "count"),
    [
        # Embeddings (61 + 16) x 24; a layer: 4 x 24^2, 2 x 24 x 40 + 40 + 24, two norms of 48; a last norm of 48.
        ({}, 77 * 24 + 3 * (4 * 576 + 1920 + 64 + 96) + 48),
        ({"num_layers": 1}, 77 * 24 + (4 * 576 + 1920 + 64 + 96) + 48),
        ({"vocab_size": 100}, 116 * 24 + 3 * (4 * 576 + 1920 + 64 + 96) + 48),
        ({"num_heads": 1, "dropout": 0.5}, 77 * 24 + 3 * (4 * 576 + 1920 + 64 + 96) + 48),
    ],
    ids=str,
)
def test_parameter_count_is_that_of_the_shape(overrides: dict[str, Any], count: int) -> None:
    with torch.device("meta"):
        model = GPT(tiny_gpt_config(**overrides))
    assert sum(parameter.numel() for parameter in model.parameters()) == count


def test_medium_512_has_44_896_768_parameters() -> None:
    with torch.device("meta"):
        model = GPT(tiny_gpt_config(vocab_size=50257, seq_len=512, model_dim=512, num_layers=6, num_heads=8, ff_dim=2048))
    assert sum(parameter.numel() for parameter in model.parameters()) == 44_896_768


def test_a_head_count_that_does_not_divide_is_refused_with_the_nearest() -> None:
    cases: list[tuple[int, str]] = [(5, "4, 6"), (7, "6, 8"), (13, "12, 24"), (25, "24")]
    for num_heads, nearest in cases:
        with case(num_heads, nearest):
            with pytest.raises(ValidationError, match=f"model_dim 24 does not split into {num_heads} heads; .*: {nearest} "):
                tiny_gpt_config(num_heads=num_heads)


@settings(deadline=None, derandomize=True)
@given(st.integers(1, 300), st.integers(1, 400))
def test_suggested_head_counts_divide_and_none_is_nearer(number: int, wanted: int) -> None:
    suggested = [int(word) for word in divisors_near(number, wanted).split(", ") if word]
    between = range(suggested[0] + 1, suggested[-1]) if len(suggested) == 2 else range(0)
    assert all(number % n == 0 for n in suggested)
    assert not [n for n in between if number % n == 0 and n != wanted]


def test_a_gpt_without_a_vocabulary_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"model\.vocab_size is 0"):
        build_gpt(tiny_gpt_config(vocab_size=0), seed=0)


def test_a_seed_that_is_no_whole_number_is_refused() -> None:
    cases: list[Any] = ["0", 0.0, None, True]
    for seed in cases:
        with case(seed):
            with pytest.raises(ConfigError, match=rf"seed is {seed!r} \({type(seed).__name__}\)"):
                build_gpt(tiny_gpt_config(), seed=seed)


def test_whole_numbers_of_torch_are_seeds() -> None:
    models = [build_gpt(tiny_gpt_config(), seed=seed) for seed in (3, torch.tensor(3))]  # type: ignore[arg-type]
    assert len({digest(model.token_embedding.weight) for model in models}) == 1


def test_what_is_no_config_is_refused() -> None:
    cases: list[Any] = [{}, None, GPTConfig]
    for config in cases:
        with case(config):
            with pytest.raises(ConfigError, match=r"build_gpt takes an oelm\.GPTConfig"):
                build_gpt(config, seed=0)


def test_a_model_is_built_on_the_cpu_whatever_device_is_set_around_it() -> None:
    with torch.device("meta"):
        model = build_gpt(tiny_gpt_config(), seed=0)
    assert digest(model.token_embedding.weight) == digest(build_gpt(tiny_gpt_config(), seed=0).token_embedding.weight)
