"""Freezing does what the method says and no more, and nothing frozen can move unseen."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from oelm.config import OptimConfig
from oelm.errors import FrozenMovedError, MethodError
from oelm.method.apply import cast, freeze, restore, thaw
from oelm.method.audit import assert_unmoved, audit, check_frozen, digest, record_of
from oelm.method.layers import learnt_on_top, selections
from oelm.method.method import PRESETS, Method
from oelm.method.sites import attention_sites
from oelm.models.gpt import GPT, Attention, build_gpt
from oelm.models.heads import attention_logits
from oelm.models.shape import GPTConfig
from oelm.train.optim import build_optimizer
from tests.cases import case
from tests.conftest import lively_gpt, tiny_gpt_config

FREEZING = [name for name, preset in PRESETS.items() if preset.freeze and not preset.freeze_at]
# Which queries and keys of the three layers a preset freezes, where it is not all of them.
SOME_OF_THEM = {
    "oelm_first_half": {"0.q", "0.k"},
    "oelm_last_half": {"2.q", "2.k"},
    "oelm_first_free": {"1.q", "1.k", "2.q", "2.k"},
    "oelm_even": {"0.q", "0.k", "2.q", "2.k"},
    "oelm_odd": {"1.q", "1.k"},
    "oelm_q_only": {"0.q", "1.q", "2.q"},
    "oelm_axes_q": {"0.q", "1.q", "2.q"},
    "oelm_axes_q_lowrank": {"0.q", "1.q", "2.q"},
    "oelm_axes_k": {"0.k", "1.k", "2.k"},
    "oelm_k_only": {"0.k", "1.k", "2.k"},
}
SOME_FROZEN = "blocks.1.attention.k.weight"


def fresh_gpt(*, seed: int = 0) -> GPT:
    return build_gpt(tiny_gpt_config(), seed=seed)


@pytest.fixture
def frozen_gpt() -> GPT:
    model = fresh_gpt()
    freeze(model, "oelm_freeze")
    return model


def digests(model: nn.Module) -> dict[str, str]:
    return {name: digest(parameter) for name, parameter in model.named_parameters()}


def is_qk(name: str) -> bool:
    return name.endswith((".attention.q.weight", ".attention.k.weight"))


def train(model: GPT, *, steps: int) -> torch.optim.Optimizer:
    optimizer = build_optimizer(model, OptimConfig(lr=1e-3, weight_decay=0.1), device="cpu")
    generator = torch.Generator().manual_seed(0)
    for _ in range(steps):
        tokens = torch.randint(model.config.vocab_size, (2, model.config.seq_len + 1), generator=generator)
        optimizer.zero_grad()
        F.cross_entropy(model.logits(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()).backward()
        optimizer.step()
    return optimizer


def test_medium_512_has_the_studys_parameter_counts_and_orthonormal_frames() -> None:
    """The study's model at full size; only its Q and K are drawn, the other weights do not matter to a count."""
    config = GPTConfig(vocab_size=50257, seq_len=512, model_dim=512, num_layers=6, num_heads=8, ff_dim=2048, dropout=0.1)
    with torch.device("meta"):
        model = GPT(config)
    model.to_empty(device="cpu")
    freeze(model, "oelm_freeze")
    counts, square = audit(model), 6 * 512 * 512
    assert (counts.total, counts.frozen, counts.trainable) == (44_896_768, 3_145_728, 41_751_040)
    assert counts.by_role == {
        "embedding": {"trainable": (50257 + 512) * 512, "frozen": 0},
        "norm": {"trainable": 13 * 2 * 512, "frozen": 0},
        "query": {"trainable": 0, "frozen": square},
        "key": {"trainable": 0, "frozen": square},
        "value_output": {"trainable": 2 * square, "frozen": 0},
        "feed_forward": {"trainable": 6 * (2 * 512 * 2048 + 2048 + 512), "frozen": 0},
    }
    # Rounding to float32 gives 2^-23 (see test_frames); the rest is slack.
    assert max(projection.orthonormality_error for projection in counts.projections) <= 2.0**-22


@pytest.fixture(scope="module")
def by_preset() -> dict[str, tuple[GPT, tuple[str, ...]]]:
    """A model frozen by each preset, and the names that freezing gave; to be read only."""
    models = {preset: fresh_gpt() for preset in PRESETS}
    return {preset: (model, freeze(model, preset)) for preset, model in models.items()}


def test_roles_sum_to_the_total(by_preset: dict[str, tuple[GPT, tuple[str, ...]]]) -> None:
    for preset, (model, _) in by_preset.items():
        with case(preset):
            counts = audit(model)
            assert sum(role["trainable"] + role["frozen"] for role in counts.by_role.values()) == counts.total
            assert counts.total == sum(parameter.numel() for parameter in model.parameters())


def test_audit_says_of_each_projection_whether_it_is_frozen() -> None:
    model = fresh_gpt()
    freeze(model, Method(init="orthogonal", freeze=("k",), layers="last 1"))
    assert [(p.layer, p.part, p.is_frozen) for p in audit(model).projections if p.is_frozen] == [(2, "k", True)]


def test_audit_shows_the_recorded_digests(frozen_gpt: GPT) -> None:
    shown = {f"{p.name}.weight": p.digest for p in audit(frozen_gpt).projections}
    assert shown == {name: value for name, value in digests(frozen_gpt).items() if is_qk(name)}


def test_audit_reads_like_a_line(frozen_gpt: GPT) -> None:
    # vocab 61, 16 positions, model_dim 24, 3 layers, ff_dim 40, by hand; frozen: 3 layers x 2 x 24 x 24.
    assert str(audit(frozen_gpt)) == "parameters: 15,048 || trainable: 11,592 || frozen: 3,456 (22.97%)"


def test_audit_changes_nothing(frozen_gpt: GPT) -> None:
    before = digests(frozen_gpt)
    audit(frozen_gpt)
    assert digests(frozen_gpt) == before


@pytest.fixture(
    scope="module", params=[("oelm_freeze", 200), ("pretrained_freeze", 20)], ids=["oelm_freeze", "pretrained_freeze"]
)
def trained(request: pytest.FixtureRequest) -> tuple[GPT, torch.optim.Optimizer, dict[str, str]]:
    """A model after 200 steps of AdamW with weight decay (20 where the weights are kept), its optimizer, its digests before."""
    preset, steps = request.param
    model = fresh_gpt()
    freeze(model, preset)
    before = digests(model)
    return model, train(model, steps=steps), before


Trained = tuple[GPT, torch.optim.Optimizer, dict[str, str]]


def test_200_steps_with_weight_decay_move_everything_but_what_is_frozen(trained: Trained) -> None:
    model, _, before = trained
    after = digests(model)
    assert {name for name in after if after[name] == before[name]} == {name for name in after if is_qk(name)}


def test_training_passes_the_proof_that_nothing_frozen_moved(trained: Trained) -> None:
    assert_unmoved(trained[0])


def test_no_optimizer_state_exists_for_what_is_frozen(trained: Trained) -> None:
    model, optimizer, _ = trained
    stateful = {id(parameter) for parameter in optimizer.state}
    assert stateful == {id(parameter) for name, parameter in model.named_parameters() if not is_qk(name)}


def _write_in_place(parameter: nn.Parameter) -> None:
    parameter.data[0, 0] += 1e-3


def _flip_the_lowest_bit(parameter: nn.Parameter) -> None:
    parameter.data.view(torch.int32)[3, 5] ^= 1


def _change_the_sign_of_zero(parameter: nn.Parameter) -> None:
    parameter.data.mul_(-1.0)


def _change_the_dtype(parameter: nn.Parameter) -> None:
    parameter.data = parameter.data.double()


def _change_the_shape(parameter: nn.Parameter) -> None:
    parameter.data = parameter.data.reshape(12, 48)


MOVES: list[Callable[[nn.Parameter], None]] = [_write_in_place, _flip_the_lowest_bit, _change_the_dtype, _change_the_shape]


@pytest.mark.parametrize("move", MOVES)
def test_a_frozen_parameter_that_moved_is_caught_by_name(move: Callable[[nn.Parameter], None], frozen_gpt: GPT) -> None:
    assert_unmoved(frozen_gpt)
    move(frozen_gpt.get_parameter(SOME_FROZEN))
    with pytest.raises(FrozenMovedError, match=f"{SOME_FROZEN} has moved"):
        assert_unmoved(frozen_gpt)


def test_even_the_sign_of_a_zero_is_caught() -> None:
    model = fresh_gpt()
    freeze(model, "uniform")
    _change_the_sign_of_zero(model.get_parameter(SOME_FROZEN))
    with pytest.raises(FrozenMovedError, match=SOME_FROZEN):
        assert_unmoved(model)


def test_a_frozen_parameter_that_asks_for_a_gradient_again_is_caught(frozen_gpt: GPT) -> None:
    frozen_gpt.get_parameter(SOME_FROZEN).requires_grad_(True)
    with pytest.raises(FrozenMovedError, match=f"{SOME_FROZEN} requires a gradient again"):
        assert_unmoved(frozen_gpt)


def test_a_frozen_parameter_that_is_gone_is_caught(frozen_gpt: GPT) -> None:
    attention = frozen_gpt.get_submodule("blocks.1.attention")
    attention.k = nn.Identity()
    with pytest.raises(FrozenMovedError, match=f"{SOME_FROZEN} is gone"):
        assert_unmoved(frozen_gpt)


def test_a_wrapper_does_not_hide_that_a_frozen_parameter_moved(frozen_gpt: GPT) -> None:
    wrapped = nn.Sequential(frozen_gpt)
    _write_in_place(frozen_gpt.get_parameter(SOME_FROZEN))
    with pytest.raises(FrozenMovedError, match=SOME_FROZEN):
        assert_unmoved(wrapped)


def test_a_frozen_model_in_a_wrapper_cannot_be_frozen_again(frozen_gpt: GPT) -> None:
    with pytest.raises(MethodError, match="already frozen"):
        freeze(nn.Sequential(frozen_gpt), "oelm_random")


def test_what_trains_may_move(frozen_gpt: GPT) -> None:
    _write_in_place(frozen_gpt.get_parameter("blocks.1.attention.v.weight"))
    assert_unmoved(frozen_gpt)


def test_cast_records_the_frozen_parameters_anew(frozen_gpt: GPT) -> None:
    cast(frozen_gpt, torch.bfloat16)
    assert frozen_gpt.get_parameter(SOME_FROZEN).dtype == torch.bfloat16
    assert_unmoved(frozen_gpt)


def test_cast_refuses_to_record_what_had_moved_before(frozen_gpt: GPT) -> None:
    _write_in_place(frozen_gpt.get_parameter(SOME_FROZEN))
    with pytest.raises(FrozenMovedError, match=SOME_FROZEN):
        cast(frozen_gpt, torch.bfloat16)


def test_a_move_after_a_cast_is_caught(frozen_gpt: GPT) -> None:
    cast(frozen_gpt, torch.bfloat16)
    frozen_gpt.get_parameter(SOME_FROZEN).data[0, 0] += 1
    with pytest.raises(FrozenMovedError, match=SOME_FROZEN):
        assert_unmoved(frozen_gpt)


def test_a_thawed_model_learns_its_queries_and_keys(frozen_gpt: GPT) -> None:
    assert set(thaw(frozen_gpt)) == {name for name, _ in frozen_gpt.named_parameters() if is_qk(name)}
    before = digests(frozen_gpt)
    train(frozen_gpt, steps=2)
    check_frozen(frozen_gpt)
    assert all(value != before[name] for name, value in digests(frozen_gpt).items())


def test_thawing_moves_nothing(frozen_gpt: GPT) -> None:
    before = digests(frozen_gpt)
    thaw(frozen_gpt)
    assert digests(frozen_gpt) == before


def test_thawing_a_model_that_is_not_frozen_does_nothing() -> None:
    assert thaw(fresh_gpt()) == ()


def test_a_thawed_model_can_be_frozen_again(frozen_gpt: GPT) -> None:
    thaw(frozen_gpt)
    assert freeze(frozen_gpt, "oelm_random")


def test_freezing_twice_is_refused(frozen_gpt: GPT) -> None:
    before = digests(frozen_gpt)
    with pytest.raises(MethodError, match=r"already frozen; call oelm\.thaw"):
        freeze(frozen_gpt, "oelm_random")
    assert digests(frozen_gpt) == before


def test_layers_that_do_not_exist_leave_the_model_untouched() -> None:
    cases: list[str | tuple[int, ...]] = [(3,), (0, -4), "first 4", "last 4"]
    for layers in cases:
        with case(layers):
            model = fresh_gpt()
            before = digests(model)
            with pytest.raises(MethodError, match="but the model has 3"):
                freeze(model, Method(init="orthogonal", freeze=("q", "k"), layers=layers))
            assert digests(model) == before
            assert all(parameter.requires_grad for parameter in model.parameters())


def test_a_start_refused_in_a_late_layer_leaves_the_model_untouched() -> None:
    model = fresh_gpt()
    model.get_parameter("blocks.2.attention.k.weight").data.zero_()
    before = digests(model)
    with pytest.raises(MethodError):
        freeze(model, "oelm_freeze_pretrained")
    assert digests(model) == before


def test_a_native_start_changes_no_weight() -> None:
    cases: list[str] = ["baseline", "pretrained_freeze", "train_then_freeze"]
    for preset in cases:
        with case(preset):
            model = fresh_gpt()
            freeze(model, preset)
            assert digests(model) == digests(fresh_gpt())


def test_the_baseline_freezes_nothing() -> None:
    model = fresh_gpt()
    assert freeze(model, "baseline") == ()
    assert not record_of(model)
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_freezing_names_and_freezes_every_query_and_key_of_the_preset(
    by_preset: dict[str, tuple[GPT, tuple[str, ...]]],
) -> None:
    every_one = {name for name, _ in fresh_gpt().named_parameters() if is_qk(name)}
    for preset in FREEZING:
        with case(preset):
            model, names = by_preset[preset]
            record, slices = record_of(model), {f"{path}.weight" for path in selections(model)}
            assert record and set(names) == set(record)
            assert set(names) - slices == {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
            assert slices == (set(names) if PRESETS[preset].init == "axes" else set())
            some = {f"blocks.{at.replace('.', '.attention.')}.weight" for at in SOME_OF_THEM.get(preset, ())}
            assert set(names) == (some or every_one)


def test_what_is_frozen_later_only_starts() -> None:
    model = fresh_gpt()
    assert freeze(model, Method(init="orthogonal", freeze=("q", "k"), freeze_at=0.5)) == ()
    assert not record_of(model) and all(parameter.requires_grad for parameter in model.parameters())
    frames = fresh_gpt()
    freeze(frames, "oelm_freeze")
    assert digests(model) == digests(frames)


def test_freezing_drops_a_gradient_that_was_there() -> None:
    model = fresh_gpt()
    model.logits(torch.zeros(1, 4, dtype=torch.long)).sum().backward()
    freeze(model, "oelm_freeze")
    assert model.get_parameter(SOME_FROZEN).grad is None


def test_only_the_layers_named_are_started_and_frozen() -> None:
    model, before = fresh_gpt(), digests(fresh_gpt())
    names = freeze(model, Method(init="orthogonal", freeze=("q", "k"), layers=(-1,)))
    assert {name for name, value in digests(model).items() if value != before[name]} == set(names)
    assert all(name.startswith("blocks.2.attention.") for name in names)


def test_a_layers_frames_do_not_depend_on_which_others_are_frozen() -> None:
    model, other = fresh_gpt(), fresh_gpt()
    freeze(model, "oelm_freeze")
    freeze(other, Method(init="orthogonal", freeze=("q", "k"), layers=(2,)))
    assert torch.equal(attention_sites(model)[2].k.weight, attention_sites(other)[2].k.weight)


def test_the_methods_own_seed_goes_before_the_runs() -> None:
    method = Method(init="orthogonal", freeze=("q", "k"), seed=5)
    models = [fresh_gpt(), fresh_gpt(), fresh_gpt()]
    for model, (how, seed) in zip(models, [(method, 0), (method, 1), (PRESETS["oelm_freeze"], 5)], strict=True):
        freeze(model, how, seed=seed)
    assert digests(models[0]) == digests(models[1]) == digests(models[2])


def test_another_seed_gives_other_frames() -> None:
    model, other = fresh_gpt(), fresh_gpt()
    freeze(model, "oelm_freeze", seed=0)
    freeze(other, "oelm_freeze", seed=1)
    assert all(not torch.equal(model.get_parameter(n), p) for n, p in other.named_parameters() if is_qk(n))


def test_arms_of_one_seed_share_every_other_weight(by_preset: dict[str, tuple[GPT, tuple[str, ...]]]) -> None:
    before = digests(fresh_gpt())
    for preset, (model, _) in by_preset.items():
        with case(preset):
            after = digests(model)
            assert all(after[name] == value for name, value in before.items() if not is_qk(name))
            assert all(learnt_on_top(name) for name in after.keys() - before.keys())
            assert bool(after.keys() - before.keys()) == PRESETS[preset].learns_on_top


def test_uniform_gives_every_visible_token_the_same_weight() -> None:
    model = fresh_gpt()
    freeze(model, "uniform")
    attention = model.get_submodule("blocks.0.attention")
    assert isinstance(attention, Attention)
    weights = attention_logits(attention, torch.randn(2, 16, 24, generator=torch.Generator().manual_seed(0))).softmax(-1)
    expected = torch.ones(16, 16).tril() / torch.arange(1.0, 17.0).unsqueeze(1)
    assert torch.equal(weights, expected.expand_as(weights))


def test_queries_tied_to_keys_can_be_frozen_and_proven() -> None:
    model = fresh_gpt()
    for site in attention_sites(model):
        site.k.module.weight = site.q.weight
    freeze(model, "oelm_freeze")
    assert_unmoved(model)


def test_an_init_function_that_writes_in_place_changes_nothing_else() -> None:
    cases: list[Any] = ["unit", "layer"]
    for scale in cases:
        with case(scale):
            written, fresh = (lively_gpt() for _ in range(2))
            inits: tuple[Any, ...] = (
                lambda w, generator: nn.init.normal_(w, generator=generator),
                lambda w, generator: torch.randn(w.shape, generator=generator),
            )
            before = digests(written)
            for model, init in zip((written, fresh), inits, strict=True):
                freeze(model, Method(init=init, freeze=("q", "k"), scale=scale), keep_original=True)
            assert digests(written) == digests(fresh)
            restore(written)
            assert digests(written) == before


def test_an_init_function_that_writes_and_then_fails_leaves_the_model_as_it_was() -> None:
    model, calls = lively_gpt(), []
    before = digests(model)

    def init(weight_HKD: Tensor, generator: torch.Generator) -> Tensor:
        weight_HKD.zero_()
        calls.append(1)
        if len(calls) == 3:
            raise MethodError("enough")
        return weight_HKD

    with pytest.raises(MethodError, match="enough"):
        freeze(model, Method(init=init, freeze=("q",)), keep_original=True)
    assert digests(model) == before


def test_an_init_function_must_return_a_tensor() -> None:
    nothing: Any = lambda weight_HKD, generator: None  # noqa: E731
    with pytest.raises(MethodError, match=r"attention\.q: the init function gave None; it must return a tensor"):
        freeze(lively_gpt(), Method(init=nothing, freeze=("q",), scale=2.0))


def test_a_start_that_does_not_fit_the_dtype_is_refused() -> None:
    cases_0: list[tuple[float, str]] = [(1e6, "infinite"), (1e-9, "all zero")]
    init_cases: list[Any] = ["orthogonal", "axes"]
    parts_cases: list[Any] = [("q", "k"), ("q",)]
    for scale, told in cases_0:
        for init in init_cases:
            for parts in parts_cases:
                with case(scale, told, init, parts):
                    model = lively_gpt().half()
                    before = digests(model)
                    with pytest.raises(MethodError, match=rf"become {told} in torch\.float16"):
                        freeze(model, Method(init=init, freeze=parts, scale=scale))
                    assert digests(model) == before


def test_a_cast_that_frozen_numbers_do_not_survive_is_refused() -> None:
    cases: list[Any] = ["orthogonal", "axes"]
    for init in cases:
        with case(init):
            model = lively_gpt()
            freeze(model, Method(init=init, freeze=("q", "k"), scale=1e6))
            before = digests(model)
            with pytest.raises(MethodError, match=r"attention\.q\.weight has numbers .* become infinite in torch\.float16"):
                cast(model, torch.float16)
            assert digests(model) == before
            assert_unmoved(model)


def test_a_cast_to_what_is_no_floating_point_dtype_is_refused() -> None:
    cases: list[Any] = [torch.int8, torch.complex64, "bfloat16", None]
    for dtype in cases:
        with case(dtype):
            model = lively_gpt()
            freeze(model, "oelm_freeze")
            with pytest.raises(MethodError, match="cast takes a floating-point dtype"):
                cast(model, dtype)
            assert_unmoved(model)


def test_a_device_set_around_the_call_changes_nothing() -> None:
    cases: list[str] = ["oelm_freeze", "oelm_axes_lowrank"]
    for name in cases:
        with case(name):
            here, there = lively_gpt(), lively_gpt()
            freeze(here, name)
            with torch.device("meta"):
                freeze(there, name)
                told = audit(there)
            assert digests(there) == digests(here)
            assert told == audit(here)
