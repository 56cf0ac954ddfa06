"""The record of what was frozen: its digests, copies of the model, and records that come from storage."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from oelm.errors import FrozenMovedError, MethodError
from oelm.method.apply import adopt_record, cast, fold, freeze, hold, thaw
from oelm.method.audit import assert_unmoved, digest, record_of
from oelm.models.gpt import GPT, build_gpt
from tests.cases import case
from tests.conftest import tiny_gpt_config

SOME_FROZEN = "blocks.1.attention.k.weight"


def fresh_gpt() -> GPT:
    return build_gpt(tiny_gpt_config(), seed=0)


@pytest.fixture
def frozen_gpt() -> GPT:
    model = fresh_gpt()
    freeze(model, "oelm_freeze")
    return model


@pytest.mark.parametrize("other", [lambda t: t.view(torch.int32), lambda t: t.reshape(4, 6)], ids=["dtype", "shape"])
def test_the_same_bytes_as_another_dtype_or_shape_have_another_digest(other: Callable[[Tensor], Tensor]) -> None:
    tensor = torch.arange(24.0).reshape(6, 4)
    assert digest(other(tensor)) != digest(tensor)


def test_a_digest_does_not_depend_on_how_memory_is_laid_out() -> None:
    tensor = torch.arange(24.0).reshape(6, 4)
    assert digest(tensor.T.contiguous().T) == digest(tensor)


def test_the_record_survives_a_deep_copy(frozen_gpt: GPT) -> None:
    twin = copy.deepcopy(frozen_gpt)
    assert_unmoved(twin)
    twin.get_parameter(SOME_FROZEN).data[0, 0] += 1e-3
    with pytest.raises(FrozenMovedError, match=SOME_FROZEN):
        assert_unmoved(twin)


def test_a_deep_copy_is_thawed_alone(frozen_gpt: GPT) -> None:
    thaw(copy.deepcopy(frozen_gpt))
    assert not frozen_gpt.get_parameter(SOME_FROZEN).requires_grad
    assert record_of(frozen_gpt)


def test_the_record_is_no_part_of_the_state_dict(frozen_gpt: GPT) -> None:
    assert frozen_gpt.state_dict().keys() == fresh_gpt().state_dict().keys()


def stored(model: nn.Module) -> tuple[dict[str, Tensor], dict[str, str]]:
    return copy.deepcopy(model.state_dict()), record_of(model)


def test_stored_frames_are_adopted_in_place_of_a_new_draw(frozen_gpt: GPT) -> None:
    other = fresh_gpt()
    freeze(other, "oelm_freeze", seed=9)
    weights, recorded = stored(other)
    frozen_gpt.load_state_dict(weights)
    adopt_record(frozen_gpt, recorded)
    assert_unmoved(frozen_gpt)


def test_adopting_nothing_into_a_model_that_freezes_nothing_is_fine() -> None:
    model = fresh_gpt()
    adopt_record(model, {})
    assert not record_of(model)


def test_adopted_digests_that_are_not_those_of_the_weights_are_refused(frozen_gpt: GPT) -> None:
    _, recorded = stored(frozen_gpt)
    with pytest.raises(FrozenMovedError, match=f"{SOME_FROZEN} has moved"):
        adopt_record(frozen_gpt, {**recorded, SOME_FROZEN: "0" * 64})


def test_adopting_fewer_digests_than_are_frozen_is_refused(frozen_gpt: GPT) -> None:
    _, recorded = stored(frozen_gpt)
    recorded.pop(SOME_FROZEN)
    with pytest.raises(FrozenMovedError, match="not what this method freezes"):
        adopt_record(frozen_gpt, recorded)


def test_adopting_digests_into_a_model_that_freezes_nothing_is_refused(frozen_gpt: GPT) -> None:
    with pytest.raises(FrozenMovedError, match="not what this method freezes"):
        adopt_record(fresh_gpt(), stored(frozen_gpt)[1])


def test_adopting_nothing_into_a_frozen_model_is_refused(frozen_gpt: GPT) -> None:
    with pytest.raises(FrozenMovedError, match="not what this method freezes"):
        adopt_record(frozen_gpt, {})


CALLS: dict[str, Callable[[nn.Module], object]] = {
    "freeze": lambda part: freeze(part, "oelm_freeze", seed=9),
    "thaw": thaw,
    "hold": lambda part: hold(part, []),
    "fold": fold,
    "cast": lambda part: cast(part, torch.float64),
}


@pytest.mark.parametrize("method", ["oelm_freeze", "oelm_axes"])
def test_a_part_of_a_frozen_model_is_refused_and_the_whole_stays_proven(method: str) -> None:
    model = nn.Sequential(fresh_gpt())
    freeze(model, method)
    before = copy.deepcopy(model.state_dict())
    for name, call in CALLS.items():
        with case(name):
            told = rf"this GPT is a part of .* call oelm.{'thaw' if name == 'freeze' else name} on the model that was frozen"
            for part in (model[0], copy.deepcopy(model[0])):
                with pytest.raises(MethodError, match=told):
                    call(part)
            assert all(torch.equal(tensor, before[key]) for key, tensor in model.state_dict().items())
            assert_unmoved(model)


@pytest.mark.parametrize("keep_split", [True, False])
def test_a_part_is_free_once_the_whole_is_thawed(keep_split: bool) -> None:
    model = nn.Sequential(fresh_gpt())
    freeze(model, "oelm_freeze")
    thaw(model, keep_split=keep_split)
    freeze(model[0], "oelm_freeze", seed=9)
    assert_unmoved(model)
    assert thaw(model)
