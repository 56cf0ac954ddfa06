"""Which class a method's verdict belongs to, and which layers it concerns; from plain data, without torch."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Protocol, TypeVar

MethodKind = Literal["free", "pure", "little", "partial"]
ALL_BUT = "all but "
# "first 2", "last half", and their complements: "all but first 2".
COUNTED_LAYERS = re.compile(rf"(?P<but>{ALL_BUT})?(?P<end>first|last) (?P<count>[1-9][0-9]*|half)")


def selects_layer(layers: str | tuple[int, ...], layer: int, num_layers: int) -> bool:
    """Whether a choice of layers includes layer `layer` (counted from 0) of `num_layers`."""
    if not isinstance(layers, str):
        return layer in {n + num_layers if n < 0 else n for n in layers}
    if counted := COUNTED_LAYERS.fullmatch(layers):
        count = num_layers // 2 if counted["count"] == "half" else int(counted["count"])
        is_counted = layer < count if counted["end"] == "first" else layer >= num_layers - count
        return is_counted != bool(counted["but"])
    return layers == "all" or layer % 2 == (0 if layers == "even" else 1)


def layers_problem(layers: str | tuple[int, ...], num_layers: int) -> str | None:
    """Return what a choice of layers asks for that a model of `num_layers` does not have; None where it has all."""
    counted = COUNTED_LAYERS.fullmatch(layers) if isinstance(layers, str) else None
    if counted and counted["but"]:
        is_none_left = counted["count"] != "half" and int(counted["count"]) >= num_layers
        return f"leaves none of the model's {num_layers} layers" if is_none_left else None
    missing: list[int] = []
    if not isinstance(layers, str):
        missing = [n for n in layers if not -num_layers <= n < num_layers]
    elif counted and counted["count"] != "half" and int(counted["count"]) > num_layers:
        missing = [int(counted["count"]) - 1]
    elif num_layers == 1 and (counted and counted["count"] == "half" or layers == "odd"):
        missing = [1]
    return f"names layer {missing[0]}, but the model has {num_layers} (0 to {num_layers - 1})" if missing else None


def method_kind(method: Mapping[str, Any]) -> MethodKind:
    """Return what a method lets learn on the Q/K side: everything, nothing, something on top, or a part of it.

    `little` says where it learns, not how much, which depends on the shape. A report gives it as a share of the baseline's.
    """
    parts = method.get("freeze") or ()
    if not parts:
        return "free"
    if len(parts) < 2 or method.get("layers", "all") != "all" or method.get("thaw") or method.get("freeze_at"):
        return "partial"
    return "little" if method.get("gain", "none") != "none" or method.get("correction") else "pure"


class CountedProjection(Protocol):
    """A Q or K of an audit, computed or read from a record."""

    @property
    def pattern(self) -> str: ...

    @property
    def layer(self) -> int: ...

    @property
    def part(self) -> str: ...

    @property
    def num_parameters(self) -> int: ...

    @property
    def is_frozen(self) -> bool: ...


AnyProjection = TypeVar("AnyProjection", bound=CountedProjection)


def learning_later(method: Mapping[str, Any], projections: Sequence[CountedProjection]) -> int:
    """Return how many more parameters of Q and K learn in the last step than in the first, whose audit is given."""
    if method.get("thaw"):
        return sum(each.num_parameters for each in projections if each.is_frozen)
    return -sum(each.num_parameters for each in _chosen(method, projections)) if method.get("freeze_at") else 0


def starts_otherwise(method: Mapping[str, Any], projections: Sequence[AnyProjection]) -> AnyProjection | None:
    """Return the first projection of an audit of the first step that is frozen against the method, or free against it."""
    chosen = [] if method.get("freeze_at") else _chosen(method, projections)
    return next((each for each in projections if each.is_frozen != any(each is one for one in chosen)), None)


def tops_otherwise(method: Mapping[str, Any], by_role: Mapping[str, Mapping[str, int]]) -> str | None:
    """Return the role, gain or correction, that learns in an audit against the method, or should learn and does not."""
    is_freezing = bool(method.get("freeze"))
    wanted = {"gain": method.get("gain", "none") != "none", "correction": bool(method.get("correction"))}
    learning = {role: by_role.get(role, {}).get("trainable", 0) > 0 for role in wanted}
    return next((role for role, is_wanted in wanted.items() if (is_freezing and is_wanted) != learning[role]), None)


def _chosen(method: Mapping[str, Any], projections: Sequence[AnyProjection]) -> list[AnyProjection]:
    """Return what the method freezes at some time."""
    # Projections of one pattern belong to one stack.
    depths = {each.pattern: 1 + max(p.layer for p in projections if p.pattern == each.pattern) for each in projections}
    layers, parts = method.get("layers", "all"), method.get("freeze") or ()
    choice = layers if isinstance(layers, str) else tuple(layers)
    return [each for each in projections if each.part in parts and selects_layer(choice, each.layer, depths[each.pattern])]
