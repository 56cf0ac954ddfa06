"""What little may learn on top of frozen queries and keys, and folding it back into plain weights.

H heads  K head_dim  D model_dim  E all heads' rows  R rank
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from oelm.method.architectures import class_path
from oelm.method.axes import CORRECTION_IN, CORRECTION_OUT, GAIN, LEARNT, Selection, unfold_loaded
from oelm.method.frames import sample_gaussian
from oelm.method.method import Gain, rank_within
from oelm.method.sharded import whole
from oelm.method.sites import Projection

# Whose output is its input times its weight, plus its bias: for these a changed weight is all there is to change.
_LINEAR = ("torch.nn.modules.linear.Linear", "transformers.pytorch_utils.Conv1D")


class Adjusted(nn.Module):
    """A linear map into heads with what learns on top of its frozen weight; `plain` is its class without.

    The weight is adjusted first, by products that are small beside the map itself, and then used once: in training it
    costs what a plain one costs, and folding it is the same arithmetic.
    """

    plain: type[nn.Module]

    def forward(self, x_BTD: Tensor) -> Tensor:
        own = {name: parameter for name, parameter in self._parameters.items() if parameter is not None}
        return F.linear(x_BTD, *_adjusted(own, is_transposed=self.plain is not nn.Linear))

    def folded(self) -> dict[str, Tensor]:
        """Return weight and bias with what learnt on top, laid out as they are, in float64 on the CPU."""
        # On the CPU: not every device has float64.
        own = {name: whole(p.detach()).cpu().double() for name, p in self._parameters.items() if p is not None}
        is_transposed = self.plain is not nn.Linear
        weight_ED, bias_E = _adjusted(own, is_transposed=is_transposed)
        return {"weight": weight_ED.mT if is_transposed else weight_ED} | ({} if bias_E is None else {"bias": bias_E})

    def __reduce__(self) -> tuple[Any, ...]:
        # Its class is made when it is needed, and cannot be found by its name.
        return _unpickled, (self.plain,), self.__getstate__()

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *others: Any) -> None:
        unfold_loaded(self, state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *others)


_CLASSES: dict[type[nn.Module], type[Adjusted]] = {}


def _adjusted_class(plain: type[nn.Module]) -> type[Adjusted]:
    if plain not in _CLASSES:
        _CLASSES[plain] = type(f"Adjusted{plain.__name__}", (Adjusted, plain), {"plain": plain})
    return _CLASSES[plain]


def _unpickled(plain: type[nn.Module]) -> Adjusted:
    kind = _adjusted_class(plain)
    return kind.__new__(kind)


def _adjusted(own: Mapping[str, Tensor], *, is_transposed: bool) -> tuple[Tensor, Tensor | None]:
    """Return weight and bias with what learnt on top: first the correction, then the gain."""
    weight_ED, bias_E, gain_HKK = own["weight"], own.get("bias"), own.get(GAIN)
    if is_transposed:
        weight_ED = weight_ED.mT
    if CORRECTION_IN in own:
        weight_ED = torch.addmm(weight_ED, own[CORRECTION_OUT], own[CORRECTION_IN])
    if gain_HKK is None:
        return weight_ED, bias_E
    weight_ED = _by_head(gain_HKK, weight_ED)
    return weight_ED, bias_E if bias_E is None else _by_head(gain_HKK, bias_E.unsqueeze(-1)).squeeze(-1)


def _by_head(gain_HKK: Tensor, rows_ED: Tensor) -> Tensor:
    """Return every head's rows times its gain, a number or a matrix."""
    rows_HKD = rows_ED.unflatten(0, (len(gain_HKK), -1))
    return (rows_HKD * gain_HKK if gain_HKK.shape[-1] == 1 else gain_HKK.mT @ rows_HKD).flatten(0, 1)


def learnt_on_top(name: str) -> str | None:
    """Return 'gain' or 'correction' when a parameter of this name was put on top of a frozen projection by us."""
    last = name.rpartition(".")[2]
    return {GAIN: "gain", CORRECTION_IN: "correction", CORRECTION_OUT: "correction"}.get(last)


def add_gain(projection: Projection, kind: Gain) -> None:
    """Give a query projection a learnt gain that starts at the identity: one number a head, or a K x K matrix a head."""
    if kind == "none":
        return
    num_heads, head_dim, _ = projection.shape_HKD
    if kind == "head":
        start = torch.ones(num_heads, 1, 1)
    else:
        start = torch.eye(head_dim).expand(num_heads, head_dim, head_dim).clone()
    _register(projection, {GAIN: start})


def add_correction(projection: Projection, share: float, generator: torch.Generator) -> None:
    """Give a projection a learnt correction of low rank, which starts at nothing (arXiv 2106.09685)."""
    if share == 0:
        return
    num_heads, head_dim, model_dim = projection.shape_HKD
    rows, rank = num_heads * head_dim, correction_rank(projection, share)
    # Rows of norm one, like those of the frames.
    into_RD = sample_gaussian(1, rank, model_dim, std=model_dim**-0.5, generator=generator)[0]
    _register(projection, {CORRECTION_IN: into_RD, CORRECTION_OUT: torch.zeros(rows, rank)})


def correction_rank(projection: Projection, share: float) -> int:
    """Return the highest rank whose two factors need no more than this share of the weight's numbers; it may be 0."""
    num_heads, head_dim, model_dim = projection.shape_HKD
    return rank_within(share, num_heads * head_dim, model_dim)


def _register(projection: Projection, starts: dict[str, Tensor]) -> None:
    module, selection = projection.module, projection.selection
    like = projection.weight if selection is None else selection.like
    for name, start in starts.items():
        module.register_parameter(name, nn.Parameter(start.to(like.device, like.dtype)))
    if selection is not None:
        return
    # Its class, not a wrapper around it: the names of its weights stay as they are, and so do copies of the model.
    object.__setattr__(module, "__class__", _adjusted_class(_plain_class(module)))


def can_learn_on(projection: Projection) -> bool:
    """Whether something may learn on top of the projection: it is a linear layer, or will be when its weight is split."""
    if projection.selection is not None:
        return True
    return projection.is_fused or class_path(_plain_class(projection.module)) in _LINEAR


def _plain_class(module: nn.Module) -> type[nn.Module]:
    return module.plain if isinstance(module, Adjusted) else type(module)


def has_learnt(projection: Projection) -> bool:
    """Whether anything of ours learns on top of the projection."""
    own = projection.module._parameters
    return isinstance(projection.module, Adjusted | Selection) and any(learnt_on_top(name) for name in own)


def fold_learnt(projection: Projection) -> None:
    """Put what learnt on top into weight and bias, in float64, and take it off."""
    module = projection.module
    assert isinstance(module, Adjusted)
    if not projection.weight.is_meta:
        for name, tensor in module.folded().items():
            module.get_parameter(name).detach().copy_(tensor)
    for name in LEARNT:
        module._parameters.pop(name, None)
    object.__setattr__(module, "__class__", module.plain)
