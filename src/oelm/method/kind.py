"""Which class a method's verdict belongs to, from its plain data: records of other versions have classes, too."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Protocol, TypeVar

Kind = Literal["free", "pure", "little", "partial"]
ALL_BUT = "all but "
# "first 2", "last half", and all the others: "all but first 2".
COUNTED_LAYERS = re.compile(rf"(?P<but>{ALL_BUT})?(?P<end>first|last) (?P<count>[1-9][0-9]*|half)")


def selects_layer(layers: str | tuple[int, ...], layer: int, num_layers: int) -> bool:
    """Whether a choice of layers holds layer `layer` (counted from 0) of `num_layers`."""
    if not isinstance(layers, str):
        return layer in {n + num_layers if n < 0 else n for n in layers}
    if counted := COUNTED_LAYERS.fullmatch(layers):
        count = num_layers // 2 if counted["count"] == "half" else int(counted["count"])
        is_counted = layer < count if counted["end"] == "first" else layer >= num_layers - count
        return is_counted != bool(counted["but"])
    return layers == "all" or layer % 2 == (0 if layers == "even" else 1)


def method_kind(method: Mapping[str, Any]) -> Kind:
    """Return what a method lets learn on the Q/K side: everything, nothing, something on top, or some of it sometimes.

    `little` says where it learns, not how much: that depends on the shape too. A report tells it as a share of the baseline's.
    """
    parts = method.get("freeze") or ()
    if not parts:
        return "free"
    if len(parts) < 2 or method.get("layers", "all") != "all" or method.get("thaw") or method.get("freeze_at"):
        return "partial"
    return "little" if method.get("gain", "none") != "none" or method.get("correction") else "pure"


class CountedProjection(Protocol):
    """A Q or K of an audit, made or recorded."""

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


Projection = TypeVar("Projection", bound=CountedProjection)


def learning_later(method: Mapping[str, Any], projections: Sequence[CountedProjection]) -> int:
    """Return by how many parameters more of Q and K learn in the last step than in the first, whose audit it is; or fewer."""
    if method.get("thaw"):
        return sum(each.num_parameters for each in projections if each.is_frozen)
    if not method.get("freeze_at"):
        return 0
    return -sum(each.num_parameters for each in _chosen(method, projections))


def starts_otherwise(method: Mapping[str, Any], projections: Sequence[Projection]) -> Projection | None:
    """Return the first projection of an audit, which is of the first step, that the method lets learn then, or freezes."""
    chosen = [] if method.get("freeze_at") else _chosen(method, projections)
    return next((each for each in projections if each.is_frozen != any(each is one for one in chosen)), None)


def tops_otherwise(method: Mapping[str, Any], by_role: Mapping[str, Mapping[str, int]]) -> str | None:
    """Return the role, gain or correction, that learns in an audit though the method has none, or does not though it has."""
    is_freezing = bool(method.get("freeze"))
    wanted = {"gain": method.get("gain", "none") != "none", "correction": bool(method.get("correction"))}
    return next(
        (role for role, is_wanted in wanted.items() if (is_freezing and is_wanted) != (_learning(by_role, role) > 0)), None
    )


def _learning(by_role: Mapping[str, Mapping[str, int]], role: str) -> int:
    return by_role.get(role, {}).get("trainable", 0)


def _chosen(method: Mapping[str, Any], projections: Sequence[Projection]) -> list[Projection]:
    """Return what the method freezes at some time."""
    # A pattern is one stack's.
    depths = {each.pattern: 1 + max(p.layer for p in projections if p.pattern == each.pattern) for each in projections}
    layers, parts = method.get("layers", "all"), method.get("freeze") or ()
    choice = layers if isinstance(layers, str) else tuple(layers)
    return [each for each in projections if each.part in parts and selects_layer(choice, each.layer, depths[each.pattern])]


def layers_problem(layers: str | tuple[int, ...], num_layers: int) -> str | None:
    """Say what of a choice of layers a model of `num_layers` has not; None where all is there."""
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
