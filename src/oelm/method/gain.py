"""What little may learn on top of frozen queries, and folding it back into plain weights.

H heads  K head_dim  D model_dim
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from oelm.method.method import Gain
from oelm.method.sites import Projection

GAIN = "gain"
_HANDLE = "_oelm_gain_hook"


def add_gain(projection: Projection, kind: Gain) -> None:
    """Give a query projection a learnt gain that starts at the identity: one number a head, or a K x K matrix a head."""
    if kind == "none":
        return
    num_heads, head_dim, _ = projection.weight_HKD().shape
    weight = projection.weight
    if kind == "head":
        start = torch.ones(num_heads, 1, 1)
    else:
        start = torch.eye(head_dim).expand(num_heads, head_dim, head_dim).clone()
    projection.module.register_parameter(GAIN, nn.Parameter(start.to(weight.device, weight.dtype)))
    # A hook on the projection itself: the model's own code and the names of its weights stay as they are.
    handle = projection.module.register_forward_hook(_apply_gain)
    object.__setattr__(projection.module, _HANDLE, handle)


def has_gain(projection: Projection) -> bool:
    return isinstance(getattr(projection.module, GAIN, None), nn.Parameter)


def _apply_gain(module: nn.Module, inputs: Any, output_BTE: Tensor) -> Tensor:
    gain_HKK = module.get_parameter(GAIN)
    heads_BTHK = output_BTE.unflatten(-1, (len(gain_HKK), -1))
    if gain_HKK.shape[-1] == 1:
        return (heads_BTHK * gain_HKK.squeeze(-1)).flatten(-2)
    return torch.einsum("...hk,hkj->...hj", heads_BTHK, gain_HKK).flatten(-2)


def fold_gain(projection: Projection) -> None:
    """Multiply the gain into weight and bias, in float64, and take it off."""
    if not projection.weight.is_meta:
        gain_HKK = projection.module.get_parameter(GAIN).detach().cpu().double()  # not every device has float64
        if gain_HKK.shape[-1] == 1:
            gain_HKK = gain_HKK * torch.eye(projection.weight_HKD().shape[1], dtype=torch.float64)
        projection.write(gain_HKK.mT @ projection.weight_HKD().cpu().double())
        bias_HK = projection.bias_HK()
        if bias_HK is not None:
            bias_HK.copy_((gain_HKK.mT @ bias_HK.cpu().double().unsqueeze(-1)).squeeze(-1))
    getattr(projection.module, _HANDLE).remove()
    delattr(projection.module, GAIN)
