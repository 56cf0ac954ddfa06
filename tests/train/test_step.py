"""One update is what ten naive lines do, to the bit; a bad loss or gradient stops it before anything moves."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from oelm.config import OptimConfig
from oelm.errors import NonFiniteError
from oelm.method.apply import freeze
from oelm.method.audit import digest
from oelm.models.gpt import GPT, build_gpt
from oelm.seeds import stream_seed
from oelm.train.optim import build_optimizer
from oelm.train.step import Outcome, train_step
from tests.conftest import tiny_gpt_config

NOISE_SEED, BATCH_IDS = 11, [170, 4242]
WINDOWS = torch.randint(61, (4, 17), generator=torch.Generator().manual_seed(0))


def gpt(*, dropout: float = 0.0) -> GPT:
    model = build_gpt(tiny_gpt_config(dropout=dropout), seed=0)
    freeze(model, "oelm_freeze")
    return model


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return build_optimizer(model, OptimConfig(lr=1e-2), device="cpu")


def no_scaler() -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", enabled=False)


def loss_of(model: GPT, windows: Tensor) -> Tensor:
    return F.cross_entropy(model.logits(windows[:, :-1]).flatten(0, 1), windows[:, 1:].flatten())


def digests(model: nn.Module) -> dict[str, str]:
    return {name: digest(parameter) for name, parameter in model.named_parameters()}


def step_once(
    compute_loss: Callable[[int], Tensor],
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    scaler: torch.amp.GradScaler | None = None,
    num_micro_batches: int = 1,
    clip_norm: float = 1.0,
    step: int = 0,
    forward: nn.Module | None = None,
) -> Outcome:
    return train_step(
        compute_loss,
        model,
        optimizer,
        scaler or no_scaler(),
        num_micro_batches=num_micro_batches,
        clip_norm=clip_norm,
        noise_seed=NOISE_SEED,
        batch_ids=BATCH_IDS,
        step=step,
        forward=forward,
    )


def naive_step(model: GPT, optimizer: torch.optim.Optimizer, windows: Tensor, *, parts: int, clip: float, step: int) -> None:
    optimizer.zero_grad()
    for part, rows in enumerate(windows.chunk(parts)):
        torch.manual_seed(stream_seed(NOISE_SEED, "noise", step, part))
        (loss_of(model, rows) / parts).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
    optimizer.step()


@pytest.mark.parametrize("parts", [1, 2, 4])
@pytest.mark.parametrize("clip", [0.05, 1e9], ids=["clipped", "free"])
def test_steps_are_the_naive_ones_bit_for_bit(parts: int, clip: float) -> None:
    ours, theirs = gpt(dropout=0.1), gpt(dropout=0.1)
    our_optimizer, their_optimizer = adamw(ours), adamw(theirs)
    rows = WINDOWS.chunk(parts)
    for step in range(3):
        step_once(
            lambda part: loss_of(ours, rows[part]), ours, our_optimizer, num_micro_batches=parts, clip_norm=clip, step=step
        )
        naive_step(theirs, their_optimizer, WINDOWS, parts=parts, clip=clip, step=step)
    assert digests(ours) == digests(theirs)


@pytest.mark.parametrize("parts", [2, 4])
def test_accumulated_gradients_are_those_of_the_whole_batch(parts: int) -> None:
    models = [gpt().double(), gpt().double()]
    for model, count in zip(models, (1, parts), strict=True):
        rows = WINDOWS.chunk(count)
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1.0)
        step_once(
            lambda part, model=model, rows=rows: loss_of(model, rows[part]),  # type: ignore[misc]
            model,
            optimizer,
            num_micro_batches=count,
            clip_norm=1e9,
        )
    # Plain gradient descent in float64, so that parameters differ as gradients do: those are means over 64 tokens of
    # terms below 10, after some 10^3 roundings of 1.1e-16 each. 1e-12.
    for name, parameter in models[0].named_parameters():
        assert float((parameter - models[1].get_parameter(name)).detach().abs().max()) <= 1e-12, name


def test_a_compiled_model_takes_the_same_step() -> None:
    """A compiled module has no truth value: PyTorch asks the model for its length."""
    plain, other = gpt(), gpt()
    compiled: nn.Module = torch.compile(other, backend="eager")  # type: ignore[assignment]
    step_once(lambda _: loss_of(plain, WINDOWS), plain, adamw(plain), forward=plain)
    step_once(lambda _: loss_of(other, WINDOWS), other, adamw(other), forward=compiled)
    assert digests(plain) == digests(other)


def test_the_outcome_is_the_loss_before_and_the_norm_before_clipping() -> None:
    model, twin = gpt(), gpt()
    outcome = step_once(lambda _: loss_of(model, WINDOWS), model, adamw(model), clip_norm=0.01)
    loss = loss_of(twin, WINDOWS)
    loss.backward()
    gradients = [parameter.grad for parameter in twin.parameters() if parameter.grad is not None]
    assert outcome.loss == float(loss.detach())
    assert outcome.grad_norm == float(torch.nn.utils.get_total_norm(gradients))


def test_a_gradient_beyond_the_clip_norm_is_scaled_down_to_it() -> None:
    model = gpt()
    step_once(lambda _: loss_of(model, WINDOWS), model, adamw(model), clip_norm=0.01)
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    # torch divides by the norm plus 1e-6: relative to a norm above 0.5, 2e-6; float32 adds less than that again.
    assert float(torch.nn.utils.get_total_norm(gradients)) == pytest.approx(0.01, rel=4e-6)


def test_the_reported_loss_is_the_mean_over_micro_batches() -> None:
    model = gpt()
    losses = [float(loss_of(model, row.unsqueeze(0)).detach()) for row in WINDOWS]
    outcome = step_once(lambda n: loss_of(model, WINDOWS[n : n + 1]), model, adamw(model), num_micro_batches=4)
    assert outcome.loss == sum(loss / 4 for loss in losses)  # division by four is exact


def test_dropout_does_not_depend_on_the_global_generator() -> None:
    results = []
    for global_seed in (1, 2):
        torch.manual_seed(global_seed)
        model = gpt(dropout=0.5)
        step_once(lambda _, model=model: loss_of(model, WINDOWS), model, adamw(model))  # type: ignore[misc]
        results.append(digests(model))
    assert results[0] == results[1]


def test_micro_batches_and_steps_have_noise_of_their_own() -> None:
    model, drawn = gpt(), []

    def draw(part: int) -> Tensor:
        drawn.append(float(torch.rand(())))
        return loss_of(model, WINDOWS)

    optimizer = adamw(model)
    for step in range(2):
        step_once(draw, model, optimizer, num_micro_batches=2, step=step)
    assert len(set(drawn)) == 4


def test_gradients_of_an_earlier_step_do_not_leak_in() -> None:
    model, twin = gpt(), gpt()
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.ones_like(parameter)
    for each in (model, twin):
        step_once(lambda _, each=each: loss_of(each, WINDOWS), each, adamw(each))  # type: ignore[misc]
    assert digests(model) == digests(twin)


def _nan_loss(model: GPT) -> Tensor:
    return loss_of(model, WINDOWS) * float("nan")


def _infinite_loss(model: GPT) -> Tensor:
    return loss_of(model, WINDOWS) + float("inf")


def _infinite_gradient(model: GPT) -> Tensor:
    # The root of zero is zero, its slope infinite: a finite loss whose gradient is not.
    weight = model.final_norm.weight
    return loss_of(model, WINDOWS) + (weight - weight.detach()).sqrt().sum()


BAD = [_nan_loss, _infinite_loss, _infinite_gradient]


@pytest.mark.parametrize("bad", BAD)
def test_what_is_not_finite_stops_the_run_before_anything_is_updated(bad: Callable[[GPT], Tensor]) -> None:
    model = gpt()
    optimizer, before = adamw(model), digests(model)
    with pytest.raises(NonFiniteError):
        step_once(lambda _: bad(model), model, optimizer)
    assert digests(model) == before
    assert not optimizer.state


@pytest.mark.parametrize("bad", BAD)
def test_what_is_not_finite_is_reported_with_step_and_batch(bad: Callable[[GPT], Tensor]) -> None:
    model = gpt()
    with pytest.raises(NonFiniteError, match=r"^step 8: .*The batch holds \[170, 4242\]"):
        step_once(lambda _: bad(model), model, adamw(model), step=7)


def test_one_bad_micro_batch_among_good_ones_stops_the_run() -> None:
    model = gpt()
    before = digests(model)
    with pytest.raises(NonFiniteError):
        step_once(lambda n: _nan_loss(model) if n == 1 else loss_of(model, WINDOWS), model, adamw(model), num_micro_batches=3)
    assert digests(model) == before


def test_no_gradient_is_left_after_a_refused_step() -> None:
    model = gpt()
    with pytest.raises(NonFiniteError):
        step_once(lambda _: _infinite_gradient(model), model, adamw(model))
    assert all(parameter.grad is None for parameter in model.parameters())


def test_with_a_loss_scale_steps_are_those_without() -> None:
    model, twin = gpt(), gpt()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
    step_once(lambda _: loss_of(model, WINDOWS), model, adamw(model), scaler=scaler)
    step_once(lambda _: loss_of(twin, WINDOWS), twin, adamw(twin))
    assert digests(model) == digests(twin)  # scaling by a power of two is exact


def test_an_overflow_under_a_loss_scale_skips_the_update_and_lowers_the_scale() -> None:
    model = gpt()
    before = digests(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
    step_once(lambda _: _infinite_gradient(model), model, adamw(model), scaler=scaler)
    assert digests(model) == before
    assert scaler.get_scale() == 2.0**7


def test_overflows_that_no_scale_cures_stop_the_run() -> None:
    model = gpt()
    optimizer, before = adamw(model), digests(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**-9)
    step_once(lambda _: _infinite_gradient(model), model, optimizer, scaler=scaler)
    with pytest.raises(NonFiniteError, match="step 2: "):
        step_once(lambda _: _infinite_gradient(model), model, optimizer, scaler=scaler, step=1)
    assert digests(model) == before


def test_a_nan_loss_under_a_loss_scale_stops_the_run_at_once() -> None:
    model = gpt()
    before = digests(model)
    with pytest.raises(NonFiniteError):
        step_once(lambda _: _nan_loss(model), model, adamw(model), scaler=torch.amp.GradScaler("cpu", init_scale=2.0**8))
    assert digests(model) == before
