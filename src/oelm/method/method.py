"""`Method`: plain data that says how Q and K start, which are frozen, where and until when; and the named presets."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Literal, Self

import torch
from pydantic import BaseModel, ConfigDict, Field, field_serializer, field_validator, model_validator
from torch import Tensor

from oelm.errors import MethodError, suggest
from oelm.method.frames import orthonormalize, polar, rotated, sample_frames, sample_gaussian, sample_global_frame
from oelm.method.kind import COUNTED_LAYERS, Kind, layers_problem, method_kind, selects_layer

Part = Literal["q", "k"]
Gain = Literal["none", "head", "matrix"]
Layers = str | tuple[int, ...]
Scale = Literal["unit", "layer"] | Annotated[float, Field(gt=0, allow_inf_nan=False)]
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
# Given a projection's current weight (H, K, D) and its own generator, return the weight it shall start from.
InitFunction = Callable[[Tensor, torch.Generator], Tensor]


class Thaw(BaseModel):
    """When frozen layers begin to learn: one after another between two fractions of training, or all at once."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")

    start: float = Field(gt=0, lt=1)
    end: float = Field(gt=0, lt=1)
    order: Literal["first_first", "last_first"]

    @model_validator(mode="after")
    def _ends_after_start(self) -> Self:
        if self.end < self.start:
            raise ValueError(f"end {self.end} lies before start {self.start}; give both the same value to thaw all at once")
        return self


class Method(BaseModel):
    """How queries and keys start and whether they learn. Fields are described in docs/method.md."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")

    init: InitName | InitFunction = "native"
    std: float = Field(default=0.02, ge=0.0, allow_inf_nan=False)
    freeze: tuple[Part, ...] = ()
    layers: Layers = "all"
    gain: Gain = "none"
    # The share of a projection's own parameters that a learnt correction of low rank may have.
    correction: float = Field(default=0.0, ge=0, lt=1)
    learn_layers: Layers = "all"
    scale: Scale = "unit"
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
    def _sorted_parts(cls, parts: tuple[Part, ...]) -> tuple[Part, ...]:
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

    def __reduce_ex__(self, protocol: Any) -> Any:
        name = getattr(self.init, "__qualname__", "")
        if callable(self.init) and "<" in name:
            raise MethodError(
                f"a method whose init is {name} cannot be pickled, and neither can a model that it froze (torch.save(model), "
                "a process that is spawned): define the function at the top level of a module, or save model.state_dict()"
            )
        return super().__reduce_ex__(protocol)

    @model_validator(mode="after")
    def _learnt_on_frozen(self) -> Self:
        if self.gain != "none" and "q" not in self.freeze:
            raise ValueError(f"gain '{self.gain}' is learnt on top of frozen queries; add q to freeze, or use gain none")
        if self.correction and not self.freeze:
            raise ValueError(f"correction {self.correction} stands on what is frozen; add q or k to freeze, or leave it out")
        if self.learn_layers != "all" and not self.learns_on_top:
            raise ValueError(
                "learn_layers says where a gain or a correction learns, and there is neither; give one, or leave it out"
            )
        return self

    @model_validator(mode="after")
    def _times_agree(self) -> Self:
        if (self.thaw or self.freeze_at) and not self.freeze:
            raise ValueError("thaw and freeze_at say when something is frozen; add q or k to freeze")
        if self.thaw and self.freeze_at:
            raise ValueError("give either thaw (frozen first, then free) or freeze_at (free first, then frozen)")
        if (self.thaw or self.freeze_at) and self.learns_on_top:
            raise ValueError("gain and correction are for Q and K frozen from first to last; leave thaw and freeze_at out")
        return self

    @model_validator(mode="after")
    def _axes_keep_nothing(self) -> Self:
        if self.init == "axes" and self.scale == "layer":
            raise ValueError(
                "scale 'layer' takes over the size of the weights, and init 'axes' keeps nothing of them: "
                "queries and keys become slices. Use scale 'unit' or a number"
            )
        if self.init == "axes" and self.freeze_at:
            raise ValueError(
                "freeze_at lets Q and K learn first, and init 'axes' would then replace what they learnt by slices; "
                "use another init, or leave freeze_at out"
            )
        return self

    @model_validator(mode="after")
    def _forms_have_a_size(self) -> Self:
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
        """Whether Q and K start from the weights that are there, so that their biases are kept too."""
        return self.init in ("native", "orthonormalized", "polar", "rotated") or self.balances

    @property
    def balances(self) -> bool:
        """Whether the start is made from Q and K of a site together, by a change of basis inside each head."""
        return self.init in ("spectral", "spectral_flat")

    @property
    def changes_weights(self) -> bool:
        """Whether Q and K start from anything but the very weights that are there."""
        return self.init != "native" or isinstance(self.scale, float)

    @property
    def factor(self) -> float:
        """The number that the start is multiplied by, where it is one."""
        return self.scale if isinstance(self.scale, float) else 1.0

    @property
    def kind(self) -> Kind:
        """The class of a verdict: what learns on the Q/K side, where and when; classes are never mixed."""
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

    def start(self, weight_HKD: Tensor, generator: torch.Generator) -> Tensor:
        """Return the weight that a projection starts from, given its present one."""
        start_HKD = self._unscaled_start(weight_HKD, generator)
        if isinstance(self.scale, float):
            return start_HKD * self.scale
        if self.scale == "unit" or self.init == "native":
            return start_HKD
        return _at_scale_of(weight_HKD, start_HKD)

    def _unscaled_start(self, weight_HKD: Tensor, generator: torch.Generator) -> Tensor:
        if callable(self.init):
            # A copy: torch's own functions of that kind, nn.init, write in place.
            start_HKD = self.init(weight_HKD.clone(), generator)
            if not isinstance(start_HKD, Tensor):
                raise MethodError(f"the init function gave {start_HKD!r}; it must return a tensor, the weight to start from")
            return start_HKD
        num_heads, head_dim, model_dim = weight_HKD.shape
        match self.init:
            case "native":
                return weight_HKD
            case "orthonormalized":
                return orthonormalize(weight_HKD)
            case "orthogonal":
                return sample_frames(num_heads, head_dim, model_dim, generator=generator)
            case "orthogonal_global":
                return sample_global_frame(num_heads, head_dim, model_dim, generator=generator)
            case "gaussian":
                return sample_gaussian(num_heads, head_dim, model_dim, std=self.std, generator=generator)
            case "polar":
                return polar(weight_HKD)
            case "rotated":
                return rotated(weight_HKD, generator=generator)
            case "axes" | "spectral" | "spectral_flat":
                raise MethodError(
                    f"init '{self.init}' is for a whole site, Q and K together; oelm.freeze(model, method) applies it"
                )
            case "gaussian_matched":
                # The scale of orthonormal rows: unit norm, so entries of variance 1 / model_dim.
                return sample_gaussian(num_heads, head_dim, model_dim, std=model_dim**-0.5, generator=generator)


def _at_scale_of(weight_HKD: Tensor, start_HKD: Tensor) -> Tensor:
    """Return the start times the number that gives it the weight's Frobenius norm; nothing but zeros stays so."""
    wanted, present = weight_HKD.double().norm(), start_HKD.double().norm()
    if not bool(wanted.isfinite()) or not bool(wanted > 0):
        raise MethodError(
            f"scale 'layer' takes over the size of the weights that are there, and theirs is {float(wanted)}; "
            "use scale 'unit', or load the weights first"
        )
    return (start_HKD.double() * (wanted / present)).float() if bool(present > 0) else start_HKD


_FROZEN: tuple[Part, ...] = ("q", "k")

PRESETS: dict[str, Method] = {
    "baseline": Method(),
    "oelm_freeze": Method(init="orthogonal", freeze=_FROZEN),
    "oelm_freeze_pretrained": Method(init="orthonormalized", freeze=_FROZEN),
    "oelm_random": Method(init="gaussian", std=0.02, freeze=_FROZEN),
    "oelm_global": Method(init="orthogonal_global", freeze=_FROZEN),
    "gaussian_matched": Method(init="gaussian_matched", freeze=_FROZEN),
    "pretrained_freeze": Method(init="native", freeze=_FROZEN),
    # Frames made from pretrained weights, by what they keep of them (docs/method.md), at the size of these weights.
    "rotated": Method(init="rotated", freeze=_FROZEN, scale="layer"),
    "qr_layer": Method(init="orthonormalized", freeze=_FROZEN, scale="layer"),
    "polar": Method(init="polar", freeze=_FROZEN, scale="layer"),
    "spectral_flat": Method(init="spectral_flat", freeze=_FROZEN),
    "pretrained_lowrank": Method(init="native", freeze=_FROZEN, correction=0.125),
    # All logits zero, so every visible token gets the same weight: attention without Q and K, the floor.
    "uniform": Method(init="gaussian", std=0.0, freeze=_FROZEN),
    # Still nothing of Q and K learns, but logits are twice as large.
    "oelm_scaled": Method(init="orthogonal", freeze=_FROZEN, scale=2**0.5),
    # Frozen frames, and a little that learns on top of them.
    "oelm_head_gain": Method(init="orthogonal", freeze=_FROZEN, gain="head"),
    "oelm_matrix": Method(init="orthogonal", freeze=_FROZEN, gain="matrix"),
    "oelm_lowrank": Method(init="orthogonal", freeze=_FROZEN, correction=0.125),
    "oelm_lowrank_first": Method(init="orthogonal", freeze=_FROZEN, correction=0.125, learn_layers="first 1"),
    # Queries and keys are slices of what the layer reads: no product, and nothing stored.
    "oelm_axes": Method(init="axes", freeze=_FROZEN),
    "oelm_axes_lowrank": Method(init="axes", freeze=_FROZEN, correction=0.125),
    "oelm_axes_q": Method(init="axes", freeze=("q",)),
    "oelm_axes_k": Method(init="axes", freeze=("k",)),
    "oelm_axes_q_lowrank": Method(init="axes", freeze=("q",), correction=0.125),
    # Only some of it is frozen, or only for a while.
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
    """Return a Method as it is, or the preset of that name; raise MethodError with the nearest names otherwise."""
    if isinstance(method, Method):
        return method
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
