"""The small trainable part on top of frozen queries and keys, and folding it back into plain weights.

H heads  K head_dim  D model_dim  E all heads' rows  R rank
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from oelm.method.architectures import class_path
from oelm.method.axes import CORRECTION_IN, CORRECTION_OUT, GAIN, LEARNT, Selection, adjusted, in_float64, unfold_loaded
from oelm.method.frames import sample_gaussian
from oelm.method.method import Gain, rank_within
from oelm.method.sites import HeadProjection

# Their output is the input times the weight, plus the bias: to change the weight is to change everything.
_LINEAR = ("torch.nn.modules.linear.Linear", "transformers.pytorch_utils.Conv1D")


class Adjusted(nn.Module):
    """A linear map into heads with something that learns on top of its frozen weight; `plain` is its class without.

    The weight is adjusted first, by products that are small compared with the map itself, and then used once: training
    costs as much as with a plain layer, and folding is the same arithmetic.
    """

    plain: type[nn.Module]

    def forward(self, x_BTD: Tensor) -> Tensor:
        return F.linear(x_BTD, *self._adjusted({name: p for name, p in self._parameters.items() if p is not None}))

    def folded(self) -> dict[str, Tensor]:
        """Return weight and bias including what learnt on top, in the layer's own layout, in float64 on the CPU."""
        weight_ED, bias_E = self._adjusted(in_float64(self))
        return {"weight": weight_ED if self.plain is nn.Linear else weight_ED.mT} | ({} if bias_E is None else {"bias": bias_E})

    def _adjusted(self, own: dict[str, Any]) -> tuple[Tensor, Tensor | None]:
        weight_ED = own["weight"] if self.plain is nn.Linear else own["weight"].mT
        return adjusted(weight_ED, own.get("bias"), own)

    def __reduce__(self) -> tuple[Any, ...]:
        # Its class is made on demand and cannot be found by its name.
        return _unpickled, (self.plain,), self.__getstate__()

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *others: Any) -> None:
        unfold_loaded(self, state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *others)


@cache
def _adjusted_class(plain: type[nn.Module]) -> type[Adjusted]:
    return type(f"Adjusted{plain.__name__}", (Adjusted, plain), {"plain": plain})


def _unpickled(plain: Any) -> Adjusted:
    kind = _adjusted_class(plain)
    return kind.__new__(kind)


def learnt_on_top(name: str) -> str | None:
    """Return 'gain' or 'correction' where a parameter of this name is one that we put on top of a frozen projection."""
    last = name.rpartition(".")[2]
    return {GAIN: "gain", CORRECTION_IN: "correction", CORRECTION_OUT: "correction"}.get(last)


def add_gain(projection: HeadProjection, kind: Gain) -> None:
    """Give a query projection a learnt gain that starts at the identity: one number per head, or a K x K matrix per head."""
    if kind == "none":
        return
    num_heads, head_dim, _ = projection.shape_HKD
    if kind == "head":
        start = torch.ones(num_heads, 1, 1)
    else:
        start = torch.eye(head_dim).expand(num_heads, head_dim, head_dim).clone()
    _register(projection, {GAIN: start})


def add_correction(projection: HeadProjection, share: float, generator: torch.Generator) -> None:
    """Give a projection a learnt correction of low rank that starts at zero (arXiv 2106.09685)."""
    if share == 0:
        return
    num_heads, head_dim, model_dim = projection.shape_HKD
    rank = correction_rank(projection, share)
    # Rows of norm one, like those of the frames.
    into_RD = sample_gaussian(1, rank, model_dim, std=model_dim**-0.5, generator=generator)[0]
    _register(projection, {CORRECTION_IN: into_RD, CORRECTION_OUT: torch.zeros(num_heads * head_dim, rank)})


def correction_rank(projection: HeadProjection, share: float) -> int:
    """Return the highest rank whose two factors need at most this share of the weight's numbers; it may be 0."""
    num_heads, head_dim, model_dim = projection.shape_HKD
    return rank_within(share, num_heads * head_dim, model_dim)


def _register(projection: HeadProjection, starts: dict[str, Tensor]) -> None:
    module, selection = projection.module, projection.selection
    like = projection.weight if selection is None else selection.like
    for name, start in starts.items():
        module.register_parameter(name, nn.Parameter(start.to(like.device, like.dtype)))
    if selection is None:
        # Its class, not a wrapper around it: the names of its weights stay, and copies of the model work.
        plain: Any = _plain_class(module)
        object.__setattr__(module, "__class__", _adjusted_class(plain))


def can_learn_on(projection: HeadProjection) -> bool:
    """Whether something may learn on top of the projection: it is a linear layer, or will be when its weight is split."""
    if projection.selection is not None:
        return True
    return projection.is_fused or class_path(_plain_class(projection.module)) in _LINEAR


def _plain_class(module: nn.Module) -> type[nn.Module]:
    return module.plain if isinstance(module, Adjusted) else type(module)


def learning_modules(model: nn.Module) -> dict[str, Adjusted | Selection]:
    """Return the modules on top of which something learns, by every path that leads to them."""
    return {
        path: module
        for path, module in model.named_modules(remove_duplicate=False)
        if isinstance(module, Adjusted | Selection) and any(name in LEARNT for name in module._parameters)
    }


def fold_learnt(module: Adjusted) -> None:
    """Put what learnt on top into weight and bias, in float64, and remove it."""
    if not module.get_parameter("weight").is_meta:
        for name, tensor in module.folded().items():
            module.get_parameter(name).detach().copy_(tensor)
    for name in LEARNT:
        module._parameters.pop(name, None)
    object.__setattr__(module, "__class__", module.plain)
