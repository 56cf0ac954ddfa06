"""nn.MultiheadAttention keeps Q, K and V in its own parameters: the same split, by a class that replaces the module's."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from oelm.method.fused import Layout, fuse_saved, part_parameter, split_loaded

QKV = ("q", "k", "v")
WEIGHT, BIAS = "in_proj_weight", "in_proj_bias"


def part_weight(part: str) -> str:
    """Return the name of a part's weight; it is torch's own name where kdim or vdim differ."""
    return f"{part}_proj_weight"


def part_bias(part: str) -> str:
    return f"{part}_proj_bias"


def in_projection_layout(module: nn.MultiheadAttention) -> Layout:
    return Layout(tuple((part, module.num_heads) for part in QKV))


class SplitInProjection(nn.MultiheadAttention):
    """Multi-head attention whose input projections are separate parameters; torch's code reads them as before.

    While something learns it takes torch's path for separate weights, so that a frozen one costs no gradient; otherwise
    the packed path, on which torch's fast paths for inference depend.
    """

    @property
    def in_proj_weight(self) -> Tensor | None:  # type: ignore[override]
        return torch.cat(self._weights()) if self._is_packed() else None

    @property
    def in_proj_bias(self) -> Tensor | None:  # type: ignore[override]
        return torch.cat([self.get_parameter(part_bias(part)) for part in QKV]) if self._has_bias() else None

    @property
    def _qkv_same_embed_dim(self) -> bool:
        learns = torch.is_grad_enabled() and any(weight.requires_grad for weight in self._weights())
        return self._is_packed() and not learns

    def _is_packed(self) -> bool:
        # The constructor's own criterion; the property above hides the attribute that it sets.
        return self.kdim == self.vdim == self.embed_dim

    def _has_bias(self) -> bool:
        return self._parameters.get(part_bias("q")) is not None

    @property
    def is_mixed(self) -> bool:
        """Whether some of the parts that torch keeps in one parameter learn and others do not."""
        return any(len({self.get_parameter(name).requires_grad for name in parts}) > 1 for parts, _ in self._fused_names(""))

    def _weights(self) -> list[Tensor]:
        return [self.q_proj_weight, self.k_proj_weight, self.v_proj_weight]

    def _fused_names(self, prefix: str) -> list[tuple[list[str], str]]:
        weights = [([f"{prefix}{part_weight(part)}" for part in QKV], prefix + WEIGHT)] if self._is_packed() else []
        biases = [([f"{prefix}{part_bias(part)}" for part in QKV], prefix + BIAS)] if self._has_bias() else []
        return weights + biases

    def __reduce__(self) -> tuple[Any, ...]:
        # Its class is made on demand and cannot be found by its name.
        return _unpickled, (type(self).__bases__[1],), self.__getstate__()

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for parts, fused in self._fused_names(prefix):
            fuse_saved(in_projection_layout(self), destination, parts, fused)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *others: Any) -> None:
        for parts, fused in self._fused_names(prefix):
            split_loaded(in_projection_layout(self), state_dict, parts, fused)
        super()._load_from_state_dict(state_dict, prefix, *others)


@cache
def _split_class(kind: type[nn.Module]) -> type[nn.Module]:
    # Made for each class, so that one derived from torch's keeps its own methods.
    return type(f"Split{kind.__name__}", (SplitInProjection, kind), {})


def _unpickled(kind: Any) -> nn.Module:
    split = _split_class(kind)
    return split.__new__(split)


def split_attention(module: nn.MultiheadAttention) -> None:
    """Keep the module's Q, K and V separate from now on, under its own class's forward."""
    layout, weight, bias = in_projection_layout(module), module.in_proj_weight, module.in_proj_bias
    kind: Any = type(module)
    split_kind: Any = _split_class(kind)
    module.__class__ = split_kind
    # Their names stay, without values: the order of the parameters is then the same after a merge.
    module._parameters[WEIGHT] = module._parameters[BIAS] = None
    for part in QKV:
        if weight is not None:
            module.register_parameter(part_weight(part), part_parameter(layout, part, weight))
        if bias is not None:
            module.register_parameter(part_bias(part), part_parameter(layout, part, bias))


def merge_attentions(model: nn.Module) -> dict[str, str]:
    """Undo `split_attention` wherever all parts learn or none does; return the new names of the parameters that held them."""
    renamed: dict[str, str] = {}
    for path, module in model.named_modules():
        if isinstance(module, SplitInProjection) and not module.is_mixed:
            for parts, fused in module._fused_names(f"{path}." if path else ""):
                renamed |= dict.fromkeys(parts, fused)
            _merge(module)
    return renamed


def _merge(module: SplitInProjection) -> None:
    fused = module._fused_names("")
    module.__class__ = type(module).__bases__[1]
    for parts, name in fused:
        held = [module.get_parameter(part) for part in parts]
        whole = torch.cat([parameter.detach() for parameter in held])
        module.register_parameter(name, nn.Parameter(whole, requires_grad=held[0].requires_grad))
        for part in parts:
            if name == WEIGHT:
                module._parameters[part] = None
            else:
                del module._parameters[part]
