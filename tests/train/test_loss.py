"""The chunked loss is the plain cross-entropy, loss and gradients, without the full logits ever existing."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from oelm.models import shape as shape_module
from oelm.models.shape import chunk_rows
from oelm.train.loss import mean_cross_entropy, token_losses

quickly = settings(deadline=None, derandomize=True, max_examples=30)
SHIPPED_ROWS = shape_module._MOST_ROWS
ROWS = 16  # the fewest rows a chunk may have; asked for in every test here, so that small batches make many chunks


@pytest.fixture(scope="module", autouse=True)
def _small_chunks() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shape_module, "_MOST_ROWS", ROWS)
        yield


@dataclass
class Problem:
    """Hidden states, a head and targets in float64, from one seed."""

    hidden_ND: Tensor
    head_VD: Tensor
    targets_N: Tensor

    def to(self, dtype: torch.dtype) -> Problem:
        return Problem(self.hidden_ND.to(dtype), self.head_VD.to(dtype), self.targets_N)


def problem(num_tokens: int, vocab_size: int, *, seed: int = 0, model_dim: int = 6, scale: float = 1.0) -> Problem:
    generator = torch.Generator().manual_seed(seed)
    return Problem(
        torch.randn(num_tokens, model_dim, generator=generator, dtype=torch.float64) * scale,
        torch.randn(vocab_size, model_dim, generator=generator, dtype=torch.float64),
        torch.randint(vocab_size, (num_tokens,), generator=generator),
    )


Results = tuple[Tensor, Tensor | None, Tensor | None]


def chunked(given_: Problem, *, scale: float = 1.0, wants: tuple[bool, bool] = (True, True)) -> Results:
    hidden, head = (t.clone().requires_grad_(w) for t, w in zip((given_.hidden_ND, given_.head_VD), wants, strict=True))
    loss = mean_cross_entropy(hidden, head, given_.targets_N)
    (loss * scale).backward()
    return loss.detach(), hidden.grad, head.grad


def plain(given_: Problem) -> tuple[Tensor, Tensor, Tensor]:
    hidden, head = given_.hidden_ND.clone().requires_grad_(), given_.head_VD.clone().requires_grad_()
    loss = F.cross_entropy(hidden @ head.T, given_.targets_N)
    loss.backward()
    assert hidden.grad is not None and head.grad is not None
    return loss.detach(), hidden.grad, head.grad


def distances(results: Results, expected: tuple[Tensor, Tensor, Tensor]) -> list[float]:
    return [float((r.double() - e).abs().max()) for r, e in zip(results, expected, strict=True) if r is not None]


def bounds(given_: Problem, *, logit_error: float, unit: float) -> list[float]:
    """Return how far loss and gradients may be off when each logit is off by `logit_error` and sums round to `unit`.

    A probability is then off by a factor exp(2 * logit_error) and by the V + 4 roundings of its normalisation; so is
    the loss, plus the N roundings of its mean. A gradient to a hidden state is a mean of head rows weighted by p - y,
    whose absolute sum is at most 2 a token; one to the head a mean over tokens of hidden entries times |p - y| <= 1.
    """
    hidden, head = float(given_.hidden_ND.abs().max()), float(given_.head_VD.abs().max())
    num_tokens, vocab_size = len(given_.hidden_ND), len(given_.head_VD)
    relative = torch.tensor(2 * logit_error, dtype=torch.float64).expm1().item() + (vocab_size + num_tokens + 8) * unit
    largest_loss = float(F.cross_entropy(given_.hidden_ND @ given_.head_VD.T, given_.targets_N, reduction="none").max())
    return [
        2 * logit_error + (vocab_size + num_tokens + 8) * unit * (1 + largest_loss),
        2 * relative * head / num_tokens,
        relative * hidden,
    ]


def largest_absolute_product(given_: Problem) -> float:
    return float((given_.hidden_ND.abs() @ given_.head_VD.abs().T).max())


# Both sides of every chunk boundary up to four chunks, and one token alone.
token_counts = st.sampled_from([1, 2, 15, 16, 17, 31, 32, 33, 48, 49, 64])
vocab_sizes = st.integers(1, 60)


@quickly
@given(token_counts, vocab_sizes, st.integers(0, 2**31))
def test_float64_loss_and_gradients_are_the_plain_ones(num_tokens: int, vocab_size: int, seed: int) -> None:
    small = problem(num_tokens, vocab_size, seed=seed)
    # Numbers below 30, at most 10^2 roundings of 1.1e-16 each, on both sides: below 1e-12.
    assert max(distances(chunked(small), plain(small))) <= 1e-12


@quickly
@given(token_counts, vocab_sizes, st.integers(0, 2**31))
def test_float32_loss_and_gradients_are_the_plain_ones(num_tokens: int, vocab_size: int, seed: int) -> None:
    small = problem(num_tokens, vocab_size, seed=seed).to(torch.float32)
    exact, unit = small.to(torch.float64), 2.0**-24
    # A float32 sum of D = 6 products is off by D + 1 roundings of the sum of their absolute values.
    allowed = bounds(exact, logit_error=7 * unit * largest_absolute_product(exact), unit=unit)
    for distance, bound in zip(distances(chunked(small), plain(exact)), allowed, strict=True):
        assert distance <= bound


@quickly
@given(token_counts, st.integers(2, 60), st.integers(0, 2**31))
def test_under_bfloat16_autocast_they_are_the_plain_ones_up_to_its_rounding(
    num_tokens: int, vocab_size: int, seed: int
) -> None:
    small = problem(num_tokens, vocab_size, seed=seed, scale=0.25).to(torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        results = chunked(small)
    exact, unit = small.to(torch.float64), 2.0**-8
    # Both factors and the product are rounded to 8 bits: three units of the products. p - y and the gradients' own
    # product are rounded once more each: four units, in place of the long sums, which stay in float32.
    logit_error = 3.1 * unit * largest_absolute_product(exact)
    allowed = bounds(exact, logit_error=logit_error, unit=2.0**-24)
    rounding = [
        0.0,
        2 * 4 * unit * float(exact.head_VD.abs().max()) / num_tokens,
        4 * unit * float(exact.hidden_ND.abs().max()),
    ]
    for distance, bound, rounded in zip(distances(results, plain(exact)), allowed, rounding, strict=True):
        assert distance <= bound + rounded


def test_under_autocast_the_loss_and_gradients_stay_wide() -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        results = chunked(problem(20, 30).to(torch.float32))
    assert [result.dtype for result in results if result is not None] == [torch.float32] * 3


def test_under_autocast_exponentials_and_their_sums_stay_wide() -> None:
    """With logits that bfloat16 holds exactly (quarters, picked by one-hot states) only float32's rounding is left."""
    head_VD = (problem(1, 60).head_VD * 4).round() / 4
    exact = Problem(torch.eye(6, dtype=torch.float64).repeat(6, 1), head_VD, torch.arange(36))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss, _, _ = chunked(exact.to(torch.float32))
    assert abs(float(loss) - float(plain(exact)[0])) <= bounds(exact, logit_error=0.0, unit=2.0**-24)[0]


@quickly
@given(token_counts, st.integers(-10, 16))
def test_a_power_of_two_as_loss_scale_scales_the_gradients_exactly(num_tokens: int, power: int) -> None:
    small = problem(num_tokens, 30).to(torch.float32)
    _, *once = chunked(small)
    _, *scaled = chunked(small, scale=2.0**power)
    for one, other in zip(once, scaled, strict=True):
        assert one is not None and other is not None
        assert torch.equal(one * 2.0**power, other)


@pytest.mark.parametrize("wants", [(True, False), (False, True)], ids=["hidden only", "head only"])
def test_the_gradient_that_is_wanted_does_not_depend_on_the_other(wants: tuple[bool, bool]) -> None:
    small = problem(40, 30).to(torch.float32)
    both, one = chunked(small), chunked(small, wants=wants)
    for wanted, with_both, alone in zip((True, *wants), both, one, strict=True):
        assert with_both is not None
        assert torch.equal(alone, with_both) if alone is not None else not wanted


def test_the_loss_is_the_same_without_gradients() -> None:
    small = problem(40, 30).to(torch.float32)
    assert torch.equal(mean_cross_entropy(small.hidden_ND, small.head_VD, small.targets_N), chunked(small)[0])


def test_a_head_that_is_also_the_input_embedding_gets_both_gradients() -> None:
    small = problem(40, 30)
    gradients = []
    for compute in (mean_cross_entropy, lambda h, w, t: F.cross_entropy(h @ w.T, t)):
        head = small.head_VD.clone().requires_grad_()
        compute(F.embedding(small.targets_N.flip(0), head).tanh(), head, small.targets_N).backward()
        assert head.grad is not None
        gradients.append(head.grad)
    # As in the float64 test above.
    assert float((gradients[0] - gradients[1]).abs().max()) <= 1e-12


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("scale", [1e3, 1e6])
def test_large_logits_do_not_overflow(dtype: torch.dtype, scale: float) -> None:
    large = problem(20, 30, scale=scale).to(dtype)
    exact, unit = large.to(torch.float64), torch.finfo(dtype).eps / 2
    loss, grad_hidden, grad_head = chunked(large)
    assert grad_hidden is not None and grad_head is not None
    assert bool(grad_hidden.isfinite().all()) and bool(grad_head.isfinite().all())
    # The logits' own rounding, D + 1 units of the products, twice, and the roundings of a mean of 20 of that size.
    assert abs(float(loss) - float(plain(exact)[0])) <= (2 * 7 + 30) * unit * largest_absolute_product(exact)


@pytest.mark.parametrize("num_tokens", [1, 16, 33])
def test_token_losses_are_the_plain_losses_of_each_token(num_tokens: int) -> None:
    small = problem(num_tokens, 30).to(torch.float32)
    exact, unit = small.to(torch.float64), 2.0**-24
    losses = token_losses(small.hidden_ND, small.head_VD, small.targets_N)
    expected = F.cross_entropy(exact.hidden_ND @ exact.head_VD.T, exact.targets_N, reduction="none")
    assert losses.dtype == torch.float32 and losses.shape == (num_tokens,)
    bound = bounds(exact, logit_error=7 * unit * largest_absolute_product(exact), unit=unit)[0]
    assert float((losses.double() - expected).abs().max()) <= bound


@quickly
@given(token_counts, vocab_sizes)
def test_token_losses_average_to_the_mean_loss(num_tokens: int, vocab_size: int) -> None:
    small = problem(num_tokens, vocab_size).to(torch.float32)
    exact, unit = small.to(torch.float64), 2.0**-24
    mean = token_losses(small.hidden_ND, small.head_VD, small.targets_N).double().mean()
    bound = bounds(exact, logit_error=7 * unit * largest_absolute_product(exact), unit=unit)[0]
    assert abs(float(mean) - float(chunked(small)[0])) <= 2 * bound  # each is within one of the truth


def test_token_losses_have_no_gradient() -> None:
    small = problem(20, 30).to(torch.float32)
    assert not token_losses(small.hidden_ND.requires_grad_(), small.head_VD.requires_grad_(), small.targets_N).requires_grad


class LargestOutput(TorchDispatchMode):
    """Records the most elements that any operation returned."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for value in out if isinstance(out, tuple | list) else (out,):
            if isinstance(value, Tensor):
                self.numel = max(self.numel, value.numel())
        return out


NUM_TOKENS, VOCAB_SIZE, MODEL_DIM = 400, 50, 4


@pytest.mark.parametrize(
    "compute", [chunked, lambda p: token_losses(p.hidden_ND, p.head_VD, p.targets_N)], ids=["mean", "tokens"]
)
@pytest.mark.parametrize("autocast", [False, True], ids=["float32", "bfloat16"])
def test_the_full_logits_never_exist(compute: Any, autocast: bool) -> None:
    small = problem(NUM_TOKENS, VOCAB_SIZE, model_dim=MODEL_DIM).to(torch.float32)
    with LargestOutput() as largest, torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        compute(small)
    assert largest.numel <= max(ROWS * VOCAB_SIZE, NUM_TOKENS * MODEL_DIM)


def test_the_probe_for_the_full_logits_sees_them_in_the_plain_loss() -> None:
    with LargestOutput() as largest:
        plain(problem(NUM_TOKENS, VOCAB_SIZE, model_dim=MODEL_DIM))
    assert largest.numel == NUM_TOKENS * VOCAB_SIZE


@settings(deadline=None, derandomize=True)
@given(st.integers(1, 2**31))
def test_a_chunk_is_as_large_as_rows_and_elements_allow(vocab_size: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shape_module, "_MOST_ROWS", SHIPPED_ROWS)
        rows = chunk_rows(vocab_size)
    assert ROWS <= rows <= SHIPPED_ROWS
    assert rows == ROWS or rows * vocab_size <= 2**24
    assert rows == SHIPPED_ROWS or (rows + 1) * vocab_size > 2**24


@pytest.mark.parametrize("target", [-100, 30])
def test_a_target_outside_the_vocabulary_is_an_error(target: int) -> None:
    small = problem(20, 30)
    small.targets_N[7] = target
    with pytest.raises((RuntimeError, IndexError)):
        chunked(small)
