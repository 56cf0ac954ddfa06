"""A plan says for every step what is frozen, and `hold` makes a model so."""

from __future__ import annotations

import copy
from typing import Any, Literal

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from oelm.errors import FrozenMovedError, MethodError
from oelm.method.apply import ALWAYS, Plan, freeze, hold, plan_of, thaw
from oelm.method.audit import assert_unmoved, digest, record_of
from oelm.method.method import PRESETS, Method, QKPart, Thaw
from oelm.models.gpt import GPT, build_gpt
from tests.cases import case
from tests.conftest import tiny_gpt_config
from tests.method.tiny_models import BY_NAME, tiny_model

Order = Literal["first_first", "last_first"]
STEPS = 100
LATE = Thaw(start=0.999, end=0.999, order="first_first")


def fresh() -> GPT:
    return build_gpt(tiny_gpt_config(num_layers=4), seed=0)


def planned(method: Method, *, num_layers: int = 4, steps: int = STEPS) -> Plan:
    # A plan is of names and places: it needs no numbers, and drawing frames would take most of the time.
    with torch.device("meta"):
        model = GPT(tiny_gpt_config(num_layers=num_layers))
    freeze(model, method)
    return plan_of(model, method, steps=steps)


def thawing(start: float, end: float, order: Order = "first_first", **more: object) -> Method:
    method = Method(init="orthogonal", freeze=("q", "k"), thaw=Thaw(start=start, end=end, order=order))
    return method.model_copy(update=more)


def by_layer(plan: Plan, *, part: str = "q") -> dict[int, tuple[int, int]]:
    """Return the span of each layer's Q or K."""
    named = {int(name.split(".")[1]): span for name, span in plan.spans.items() if f".{part}." in name}
    return dict(sorted(named.items()))


def test_layers_thaw_one_after_the_other_from_start_to_end() -> None:
    cases: list[tuple[Method, list[int]]] = [
        (thawing(0.25, 0.75), [25, 42, 58, 75]),
        (thawing(0.25, 0.75, "last_first"), [75, 58, 42, 25]),
        (thawing(0.5, 0.5), [50, 50, 50, 50]),
        (thawing(0.5, 0.5, "last_first"), [50, 50, 50, 50]),
    ]
    for method, ends in cases:
        with case(method, ends):
            plan = planned(method)
            assert by_layer(plan, part="q") == by_layer(plan, part="k") == {layer: (0, end) for layer, end in enumerate(ends)}
            assert plan.moments == frozenset(ends)


def test_a_single_layer_thaws_at_the_start_of_the_thaw() -> None:
    cases: list[Order] = ["first_first", "last_first"]
    for order in cases:
        with case(order):
            assert by_layer(planned(thawing(0.3, 0.9, order), num_layers=1)) == {0: (0, 30)}


def test_only_the_chosen_layers_take_turns() -> None:
    assert by_layer(planned(thawing(0.2, 0.6, "last_first", layers=(0, 1, 3)))) == {0: (0, 60), 1: (0, 40), 3: (0, 20)}


def test_only_the_chosen_part_has_a_span() -> None:
    plan = planned(thawing(0.2, 0.6, freeze=("k",)))
    assert by_layer(plan, part="q") == {} and len(by_layer(plan, part="k")) == 4


def test_each_stack_of_an_encoder_decoder_thaws_by_its_own_layers() -> None:
    cases: list[tuple[Order, dict[str, int]]] = [("first_first", {"0.": 20, "1.": 60}), ("last_first", {"0.": 60, "1.": 20})]
    for order, ends in cases:
        with case(order, ends):
            model = tiny_model(BY_NAME["t5"])
            freeze(model, thawing(0.2, 0.6, order))
            plan = plan_of(model, thawing(0.2, 0.6, order), steps=STEPS)
            encoder = {
                name.removeprefix("encoder.block.")[:2]: end for name, (_, end) in plan.spans.items() if "encoder.b" in name
            }
            decoder = {name: end for name, (_, end) in plan.spans.items() if name.startswith("decoder")}
            assert encoder == ends
            # One layer, with two attentions of two projections: both thaw when a thaw of one layer does.
            assert len(decoder) == 4 and set(decoder.values()) == {20}


def test_a_fused_weight_is_planned_by_the_names_of_its_parts() -> None:
    model = tiny_model(BY_NAME["gpt2"])
    names = freeze(model, thawing(0.25, 0.75))
    assert plan_of(model, thawing(0.25, 0.75), steps=STEPS).spans.keys() == set(names)
    late = tiny_model(BY_NAME["gpt2"])
    freeze(late, "train_then_freeze")
    assert plan_of(late, PRESETS["train_then_freeze"], steps=STEPS).spans.keys() == set(names)


def test_freeze_at_leaves_the_beginning_free() -> None:
    plan = planned(PRESETS["train_then_freeze"])
    assert by_layer(plan) == dict.fromkeys(range(4), (25, 100)) and plan.moments == {25}
    assert plan.frozen_at(24) == frozenset() and plan.frozen_at(25) == plan.frozen_at(99) == frozenset(plan.spans)


def test_however_short_what_freezes_later_learns_first() -> None:
    cases: list[int] = [1, 2, 3]
    for steps in cases:
        with case(steps):
            plan = planned(Method(freeze=("q", "k"), freeze_at=0.001), steps=steps)
            assert plan.frozen_at(0) == frozenset() and set(by_layer(plan).values()) == {(1, steps)}
            assert plan.moments == ({1} if steps > 1 else frozenset())


def test_what_changes_late_changes_before_the_last_update() -> None:
    cases: list[Method] = [Method(freeze=("q",), freeze_at=0.999), Method(freeze=("q",), thaw=LATE)]
    for method in cases:
        with case(method):
            plan = planned(method, steps=100)
            assert plan.moments == {99} and plan.frozen_at(98) != plan.frozen_at(99)


def test_what_is_frozen_from_first_to_last_has_no_moments() -> None:
    plan = planned(PRESETS["oelm_lowrank"])
    assert plan.moments == frozenset() and plan.frozen_at(0) == plan.frozen_at(99) == frozenset(plan.spans)
    assert not any("correction" in name for name in plan.spans)


def test_a_baseline_is_planned_as_nothing() -> None:
    assert planned(PRESETS["baseline"]).spans == {} == ALWAYS.spans
    assert ALWAYS.frozen_at(7) == frozenset() == ALWAYS.moments and ALWAYS.joined_at("any") == 0


def test_a_parameter_joins_when_it_thaws_and_the_others_at_the_start() -> None:
    plan = planned(thawing(0.25, 0.75))
    joined = {layer: plan.joined_at(f"blocks.{layer}.attention.q.weight") for layer in range(4)}
    assert joined == {0: 25, 1: 42, 2: 58, 3: 75}
    assert plan.joined_at("blocks.0.attention.v.weight") == 0
    for preset in ("oelm_freeze", "train_then_freeze", "baseline"):
        assert planned(PRESETS[preset]).joined_at("blocks.0.attention.q.weight") == 0


def test_past_the_plan_all_stays_as_it_was_at_its_end() -> None:
    cases: list[str] = ["oelm_freeze", "train_then_freeze", "oelm_odd", "thaw_last_first"]
    for preset in cases:
        with case(preset):
            plan = planned(PRESETS[preset])
            assert plan.frozen_at(STEPS) == plan.frozen_at(7 * STEPS) == plan.frozen_at(STEPS - 1)
            assert all(moment < STEPS for moment in plan.moments)


def test_however_short_a_thaw_starts_frozen() -> None:
    cases: list[int] = [1, 2, 3]
    for steps in cases:
        with case(steps):
            plan = planned(thawing(0.01, 0.02), steps=steps)
            assert plan.frozen_at(0) == frozenset(plan.spans)
            assert set(by_layer(plan).values()) == {(0, 1)}
            # A training of one step is over before anything thaws.
            assert plan.moments == ({1} if steps > 1 else frozenset())


methods = st.builds(
    lambda freeze, layers, thaw, freeze_at: Method(freeze=freeze, layers=layers, thaw=thaw, freeze_at=0 if thaw else freeze_at),
    freeze=st.sampled_from([("q",), ("k",), ("q", "k")]),
    layers=st.sampled_from(["all", "even", "first half", "last half", "last 1", (0, -1)]),
    thaw=st.none()
    | st.builds(
        lambda ends, order: Thaw(start=min(ends), end=max(ends), order=order),
        ends=st.tuples(st.floats(0.001, 0.999), st.floats(0.001, 0.999)),
        order=st.sampled_from(["first_first", "last_first"]),
    ),
    freeze_at=st.floats(0, 0.999),
)


@settings(deadline=None, derandomize=True, max_examples=40)
@given(methods, st.integers(1, 40), st.integers(2, 5))
def test_a_name_is_frozen_exactly_between_the_ends_of_its_span(method: Method, steps: int, num_layers: int) -> None:
    plan = planned(method, num_layers=num_layers, steps=steps)
    parts: tuple[QKPart, ...] = method.freeze
    chosen = [layer for layer in range(num_layers) if method.selects(layer, num_layers)]
    assert plan.spans.keys() == {f"blocks.{layer}.attention.{part}.weight" for layer in chosen for part in parts}
    for step in range(steps):
        assert plan.frozen_at(step) == {name for name, (first, end) in plan.spans.items() if first <= step < end}
        if 0 < step:
            assert (step in plan.moments) == (plan.frozen_at(step) != plan.frozen_at(step - 1))
    if method.thaw:
        assert plan.frozen_at(0) == plan.spans.keys()
        assert all(later <= earlier for earlier, later in zip(frozen_counts(plan), frozen_counts(plan)[1:], strict=False))


def frozen_counts(plan: Plan) -> list[int]:
    return [len(plan.frozen_at(step)) for step in range(plan.steps)]


SOME, OTHER = "blocks.1.attention.q.weight", "blocks.2.attention.k.weight"


def frozen_gpt() -> GPT:
    model = fresh()
    freeze(model, "oelm_freeze")
    return model


def held(model: nn.Module) -> dict[str, str]:
    return record_of(model)


def test_holding_freezes_exactly_the_named_and_lets_the_others_learn() -> None:
    model = frozen_gpt()
    before = held(model)
    hold(model, [OTHER])
    assert held(model) == {OTHER: before[OTHER]}
    assert [name for name, parameter in model.named_parameters() if not parameter.requires_grad] == [OTHER]


def test_holding_again_takes_the_weight_as_it_is_now() -> None:
    model = frozen_gpt()
    before = held(model)
    hold(model, ())
    assert not record_of(model)
    model.get_parameter(SOME).data += 1
    model.get_parameter(SOME).grad = torch.ones_like(model.get_parameter(SOME))
    hold(model, {SOME, OTHER})
    assert held(model)[OTHER] == before[OTHER]
    assert held(model)[SOME] == digest(model.get_parameter(SOME)) != before[SOME]
    assert model.get_parameter(SOME).grad is None
    assert_unmoved(model)


def test_holding_refuses_to_forget_that_a_frozen_parameter_moved() -> None:
    model = frozen_gpt()
    model.get_parameter(SOME).data += 1
    with pytest.raises(FrozenMovedError, match=f"{SOME} has moved"):
        hold(model, [OTHER])


def test_holding_what_is_not_there_is_refused_and_nothing_changed() -> None:
    model = frozen_gpt()
    before = held(model)
    with pytest.raises(MethodError, match=r"GPT has no parameter blocks\.9\.x to hold"):
        hold(model, [SOME, "blocks.9.x"])
    assert held(model) == before
    assert {name for name, parameter in model.named_parameters() if not parameter.requires_grad} == before.keys()


def test_what_is_held_is_listed_in_the_models_order() -> None:
    model = frozen_gpt()
    order = list(held(model))
    hold(model, list(reversed(order)))
    assert list(held(model)) == order


def test_holding_leaves_alone_what_somebody_else_froze() -> None:
    model = frozen_gpt()
    model.token_embedding.weight.requires_grad_(False)
    hold(model, [])
    assert not model.token_embedding.weight.requires_grad
    assert all(p.requires_grad for name, p in model.named_parameters() if name != "token_embedding.weight")


def test_a_model_on_the_meta_device_can_be_held() -> None:
    with torch.device("meta"):
        model = GPT(tiny_gpt_config())
    freeze(model, "oelm_freeze")
    hold(model, [SOME])
    assert [name for name, parameter in model.named_parameters() if not parameter.requires_grad] == [SOME]


@pytest.mark.parametrize("name", ["gpt2", "torch", "bart"])
def test_a_plan_is_followed_in_any_architecture(name: str) -> None:
    model, method = tiny_model(BY_NAME[name]), thawing(0.25, 0.75)
    freeze(model, method)
    saved = copy.deepcopy(model.state_dict())
    plan = plan_of(model, method, steps=8)
    for step in range(8):
        hold(model, plan.frozen_at(step))
        frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
        assert frozen == plan.frozen_at(step) == held(model).keys()
    assert held(model) == {} and thaw(model) == ()
    assert all(torch.equal(saved[key], tensor) for key, tensor in model.state_dict().items())


def test_a_plan_may_be_asked_for_by_the_name_of_a_preset() -> None:
    model = build_gpt(tiny_gpt_config(), seed=0)
    freeze(model, "thaw_first_first")
    assert plan_of(model, "thaw_first_first", steps=10) == plan_of(model, PRESETS["thaw_first_first"], steps=10)
    wrong: tuple[Any, ...] = ("thaw_first", None, {})
    for method in wrong:
        with pytest.raises(MethodError, match="did you mean|method is"):
            plan_of(model, method, steps=10)


def test_a_plan_needs_a_number_of_steps() -> None:
    cases: list[Any] = [0, -5, 1e3, "10", None, True]
    for steps in cases:
        with case(steps):
            model = build_gpt(tiny_gpt_config(), seed=0)
            with pytest.raises(MethodError, match=rf"steps is {steps!r}; give the number of training steps"):
                plan_of(model, "thaw_first_first", steps=steps)
