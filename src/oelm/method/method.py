"""`Method`: how Q and K start, which are frozen, where and until when; presets and classes. Loads no torch."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal, Protocol, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, field_serializer, field_validator, model_validator

from oelm.errors import MethodError, suggest

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


QKPart = Literal["q", "k"]
Gain = Literal["none", "head", "matrix"]
Layers = str | tuple[int, ...]
StartScale = Literal["unit", "layer"] | Annotated[float, Field(gt=0, allow_inf_nan=False)]
InitName = Literal[
    "native",
    "orthogonal",
    "orthogonal_global",
    "gaussian",
    "gaussian_matched",
    "orthonormalized",
    "polar",
    "rotated",
    "spectral",
    "spectral_flat",
    "axes",
]
# From a projection's current weight (H, K, D) and its own generator to the weight it starts from.
if TYPE_CHECKING:
    import torch

    InitFunction = Callable[[torch.Tensor, torch.Generator], torch.Tensor]
else:
    # A method is data: who only reads one does not wait for torch.
    InitFunction = Callable[..., Any]


class Thaw(BaseModel):
    """When frozen layers start to learn: one after another between two fractions of training, or all at once."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")

    start: float = Field(gt=0, lt=1)
    end: float = Field(gt=0, lt=1)
    order: Literal["first_first", "last_first"]

    @model_validator(mode="after")
    def _ends_after_start(self) -> Self:
        if self.end < self.start:
            raise ValueError(f"end {self.end} is before start {self.start}; give both the same value to thaw all at once")
        return self


class Method(BaseModel):
    """How queries and keys start and whether they learn. docs/method.md describes the fields."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")

    init: InitName | InitFunction = "native"
    std: float = Field(default=0.02, ge=0.0, allow_inf_nan=False)
    freeze: tuple[QKPart, ...] = ()
    layers: Layers = "all"
    gain: Gain = "none"
    # The largest share of a projection's own parameters that a learnt low-rank correction may have.
    correction: float = Field(default=0.0, ge=0, lt=1)
    learn_layers: Layers = "all"
    scale: StartScale = "unit"
    thaw: Thaw | None = None
    freeze_at: float = Field(default=0.0, ge=0, lt=1)
    layer_lr_decay: float = Field(default=1.0, gt=0, le=10)
    warmup_steps: int | None = Field(default=None, ge=0)
    seed: int | None = Field(default=None, ge=0)

    @field_validator("freeze", "layers", "learn_layers", mode="before")
    @classmethod
    def _list_as_tuple(cls, value: object) -> object:
        return tuple(value) if isinstance(value, list) else value

    @field_validator("freeze")
    @classmethod
    def _sorted_parts(cls, parts: tuple[QKPart, ...]) -> tuple[QKPart, ...]:
        return tuple(part for part in ("q", "k") if part in parts)

    @field_validator("layers", "learn_layers")
    @classmethod
    def _known_layers(cls, layers: Layers) -> Layers:
        if isinstance(layers, tuple):
            if not layers:
                raise ValueError(
                    "an empty list of layers matches nothing; to train everything use freeze: [], without gain and correction"
                )
            return tuple(sorted(set(layers)))
        if layers not in ("all", "even", "odd") and not COUNTED_LAYERS.fullmatch(layers):
            raise ValueError(
                "must be 'all', 'even', 'odd', 'first N', 'last N', 'first half', 'last half', one of these four "
                "after 'all but ', or a list of layer numbers"
            )
        return layers

    @model_validator(mode="after")
    def _learnt_on_frozen(self) -> Self:
        if self.gain != "none" and "q" not in self.freeze:
            raise ValueError(f"gain '{self.gain}' is learnt on top of frozen queries; add q to freeze, or use gain none")
        if self.correction and not self.freeze:
            raise ValueError(
                f"correction {self.correction} learns on top of frozen maps; add q or k to freeze, or leave it out"
            )
        if self.learn_layers != "all" and not self.learns_on_top:
            raise ValueError("learn_layers needs a gain or a correction that learns; give one, or leave learn_layers out")
        return self

    @model_validator(mode="after")
    def _times_agree(self) -> Self:
        if (self.thaw or self.freeze_at) and not self.freeze:
            raise ValueError("thaw and freeze_at need something to freeze; add q or k to freeze")
        if self.thaw and self.freeze_at:
            raise ValueError("give either thaw (frozen first, then free) or freeze_at (free first, then frozen)")
        if (self.thaw or self.freeze_at) and self.learns_on_top:
            raise ValueError("gain and correction need Q and K frozen throughout the training; leave thaw and freeze_at out")
        return self

    @model_validator(mode="after")
    def _init_agrees(self) -> Self:
        if self.init == "axes" and self.scale == "layer":
            raise ValueError(
                "scale 'layer' takes the size of the weights, and init 'axes' keeps nothing of them: "
                "queries and keys become slices. Use scale 'unit' or a number"
            )
        if self.init == "axes" and self.freeze_at:
            raise ValueError(
                "freeze_at lets Q and K learn first, and init 'axes' would then replace what they learnt by slices; "
                "use another init, or leave freeze_at out"
            )
        if self.balances and self.scale == "layer":
            raise ValueError(
                f"init '{self.init}' takes the size of Q and K from their product, and scale 'layer' from each of the two; "
                "leave scale out, or give a number"
            )
        return self

    @field_serializer("init")
    def _init_as_data(self, init: InitName | InitFunction) -> str:
        if callable(init):
            raise MethodError(
                "a method whose init is a Python function cannot be written to a file; "
                "apply it with oelm.freeze(model, method), or use a named init in a run's config"
            )
        return init

    @property
    def keeps_weights(self) -> bool:
        """Whether Q and K start from the present weights, so that their biases are kept too."""
        return self.init in ("native", "orthonormalized", "polar", "rotated") or self.balances

    @property
    def balances(self) -> bool:
        """Whether the start is computed from Q and K of a site together, by a change of basis inside each head."""
        return self.init in ("spectral", "spectral_flat")

    @property
    def changes_weights(self) -> bool:
        """Whether Q and K start from anything but the present weights."""
        return self.init != "native" or isinstance(self.scale, float)

    @property
    def factor(self) -> float:
        """The number that multiplies the start: `scale` where that is a number, else 1."""
        return self.scale if isinstance(self.scale, float) else 1.0

    @property
    def kind(self) -> MethodKind:
        """The class of its verdicts: what learns on the Q/K side, where and when; classes are never mixed."""
        return method_kind(dict(self))

    @property
    def learns_on_top(self) -> bool:
        """Whether something learns on top of what is frozen."""
        return self.gain != "none" or self.correction > 0

    def selects(self, layer: int, num_layers: int) -> bool:
        """Whether this method concerns layer `layer` (counted from 0) of `num_layers`."""
        return selects_layer(self.layers, layer, num_layers)

    def learns_in(self, layer: int, num_layers: int) -> bool:
        """Whether something learns on top of what is frozen in layer `layer` (counted from 0) of `num_layers`."""
        return self.learns_on_top and self.selects(layer, num_layers) and selects_layer(self.learn_layers, layer, num_layers)

    def check_layers(self, num_layers: int) -> None:
        """Raise MethodError when the method names a layer that a model of `num_layers` does not have."""
        for field, layers in (("layers", self.layers), ("learn_layers", self.learn_layers)):
            if (problem := layers_problem(layers, num_layers)) is not None:
                raise MethodError(f"method.{field} = {layers!r} {problem}; choose among them or use 'all'")


def rank_within(share: float, rows: int, model_dim: int) -> int:
    """Return the highest rank whose two factors need no more than this share of a weight's numbers; it may be 0."""
    return int(share * rows * model_dim / (rows + model_dim))


_FROZEN: tuple[QKPart, ...] = ("q", "k")

PRESETS: dict[str, Method] = {
    "baseline": Method(),
    "oelm_freeze": Method(init="orthogonal", freeze=_FROZEN),
    "oelm_freeze_pretrained": Method(init="orthonormalized", freeze=_FROZEN),
    "oelm_random": Method(init="gaussian", std=0.02, freeze=_FROZEN),
    "oelm_global": Method(init="orthogonal_global", freeze=_FROZEN),
    "gaussian_matched": Method(init="gaussian_matched", freeze=_FROZEN),
    "pretrained_freeze": Method(init="native", freeze=_FROZEN),
    # Frames made from pretrained weights, at their size, by what they keep of them (docs/method.md).
    "rotated": Method(init="rotated", freeze=_FROZEN, scale="layer"),
    "qr_layer": Method(init="orthonormalized", freeze=_FROZEN, scale="layer"),
    "polar": Method(init="polar", freeze=_FROZEN, scale="layer"),
    "spectral_flat": Method(init="spectral_flat", freeze=_FROZEN),
    "pretrained_lowrank": Method(init="native", freeze=_FROZEN, correction=0.125),
    # All logits are zero, so every visible token gets the same weight: the floor.
    "uniform": Method(init="gaussian", std=0.0, freeze=_FROZEN),
    # Logits are twice as large.
    "oelm_scaled": Method(init="orthogonal", freeze=_FROZEN, scale=2**0.5),
    # Frozen frames with a small trainable part on top.
    "oelm_head_gain": Method(init="orthogonal", freeze=_FROZEN, gain="head"),
    "oelm_matrix": Method(init="orthogonal", freeze=_FROZEN, gain="matrix"),
    "oelm_lowrank": Method(init="orthogonal", freeze=_FROZEN, correction=0.125),
    "oelm_lowrank_first": Method(init="orthogonal", freeze=_FROZEN, correction=0.125, learn_layers="first 1"),
    # Queries and keys are slices of the layer's input: no product, nothing stored.
    "oelm_axes": Method(init="axes", freeze=_FROZEN),
    "oelm_axes_lowrank": Method(init="axes", freeze=_FROZEN, correction=0.125),
    "oelm_axes_q": Method(init="axes", freeze=("q",)),
    "oelm_axes_k": Method(init="axes", freeze=("k",)),
    "oelm_axes_q_lowrank": Method(init="axes", freeze=("q",), correction=0.125),
    # Frozen in part, or for a part of the training.
    "oelm_first_half": Method(init="orthogonal", freeze=_FROZEN, layers="first half"),
    "oelm_last_half": Method(init="orthogonal", freeze=_FROZEN, layers="last half"),
    "oelm_first_free": Method(init="orthogonal", freeze=_FROZEN, layers="all but first 1"),
    "oelm_even": Method(init="orthogonal", freeze=_FROZEN, layers="even"),
    "oelm_odd": Method(init="orthogonal", freeze=_FROZEN, layers="odd"),
    "oelm_q_only": Method(init="orthogonal", freeze=("q",)),
    "oelm_k_only": Method(init="orthogonal", freeze=("k",)),
    "thaw_first_first": Method(init="orthogonal", freeze=_FROZEN, thaw=Thaw(start=0.25, end=0.75, order="first_first")),
    "thaw_last_first": Method(init="orthogonal", freeze=_FROZEN, thaw=Thaw(start=0.25, end=0.75, order="last_first")),
    "thaw_together": Method(init="orthogonal", freeze=_FROZEN, thaw=Thaw(start=0.5, end=0.5, order="first_first")),
    "train_then_freeze": Method(freeze=_FROZEN, freeze_at=0.25),
}


def resolve_method(method: Method | str) -> Method:
    """Return a Method unchanged, or the preset of that name; raise MethodError with the nearest name otherwise."""
    if isinstance(method, Method):
        return method
    if not isinstance(method, str):
        raise MethodError(f"method is {method!r} ({type(method).__name__}); give the name of a preset or an oelm.Method")
    if method in PRESETS:
        return PRESETS[method]
    raise MethodError(f"unknown method {method!r}{suggest(method, PRESETS)}; presets: {', '.join(PRESETS)}")


def method_name(method: Method) -> str:
    """Return the preset's name when the method is one (whatever its seed), else a short description."""
    plain = method.model_copy(update={"seed": None})
    for name, preset in PRESETS.items():
        if plain == preset:
            return name
    init = "callable" if callable(method.init) else method.init
    where, learning = (
        layers if isinstance(layers, str) else ",".join(map(str, layers)) for layers in (method.layers, method.learn_layers)
    )
    gain = "" if method.gain == "none" else f", gain {method.gain}"
    correction = f", correction {method.correction:g}" if method.correction else ""
    learns = "" if learning == "all" else f", learning in layers {learning}"
    size = f"{method.scale:g}" if isinstance(method.scale, float) else method.scale
    scale = "" if size == "unit" else f", scale {size}"
    what = f"{'+'.join(method.freeze) or 'nothing'} frozen{_when(method)}"
    return f"{init}, {what}, layers {where}{gain}{correction}{learns}{scale}{_how(method)}"


def _when(method: Method) -> str:
    if method.freeze_at:
        return f" from {method.freeze_at:g} of training on"
    if method.thaw is None:
        return ""
    first, last = (f"{fraction:g}" for fraction in (method.thaw.start, method.thaw.end))
    return f" until {first}" + ("" if first == last else f" to {last}") + f" of training ({method.thaw.order})"


def _how(method: Method) -> str:
    decay = "" if method.layer_lr_decay == 1 else f", lr x {method.layer_lr_decay:g} a layer"
    return decay + ("" if method.warmup_steps is None else f", warm-up of {method.warmup_steps} steps")
