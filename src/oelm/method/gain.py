"""What little may learn on top of frozen queries and keys, and folding it back into plain weights.

H heads  K head_dim  D model_dim  E all heads' rows  R rank
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from oelm.method.frames import sample_gaussian
from oelm.method.method import Gain
from oelm.method.sites import Projection

GAIN, CORRECTION_IN, CORRECTION_OUT = "gain", "correction_in", "correction_out"
_HANDLE = "_oelm_gain_hook"


def learnt_on_top(name: str) -> str | None:
    """Return 'gain' or 'correction' when a parameter of this name was put on top of a frozen projection by us."""
    last = name.rpartition(".")[2]
    return {GAIN: "gain", CORRECTION_IN: "correction", CORRECTION_OUT: "correction"}.get(last)


def add_gain(projection: Projection, kind: Gain) -> None:
    """Give a query projection a learnt gain that starts at the identity: one number a head, or a K x K matrix a head."""
    if kind == "none":
        return
    num_heads, head_dim, _ = projection.weight_HKD().shape
    if kind == "head":
        start = torch.ones(num_heads, 1, 1)
    else:
        start = torch.eye(head_dim).expand(num_heads, head_dim, head_dim).clone()
    _register(projection, {GAIN: start})


def add_correction(projection: Projection, share: float, generator: torch.Generator) -> None:
    """Give a projection a learnt correction of low rank, which starts at nothing (arXiv 2106.09685)."""
    if share == 0:
        return
    num_heads, head_dim, model_dim = projection.weight_HKD().shape
    rows, rank = num_heads * head_dim, correction_rank(projection, share)
    # Rows of norm one, like those of the frames.
    into_RD = sample_gaussian(1, rank, model_dim, std=model_dim**-0.5, generator=generator)[0]
    _register(projection, {CORRECTION_IN: into_RD, CORRECTION_OUT: torch.zeros(rows, rank)})


def correction_rank(projection: Projection, share: float) -> int:
    """Return the highest rank whose two factors need no more than this share of the weight's numbers; it may be 0."""
    num_heads, head_dim, model_dim = projection.weight_HKD().shape
    rows = num_heads * head_dim
    return int(share * rows * model_dim / (rows + model_dim))


def _register(projection: Projection, starts: dict[str, Tensor]) -> None:
    module, weight = projection.module, projection.weight
    for name, start in starts.items():
        module.register_parameter(name, nn.Parameter(start.to(weight.device, weight.dtype)))
    if not hasattr(module, _HANDLE):
        # A hook on the projection itself: the model's own code and the names of its weights stay as they are.
        object.__setattr__(module, _HANDLE, module.register_forward_hook(_adjust))


def has_learnt(projection: Projection) -> bool:
    """Whether anything of ours learns on top of the projection."""
    return hasattr(projection.module, _HANDLE)


def _adjust(module: nn.Module, inputs: tuple[Any, ...], output_BTE: Tensor) -> Tensor:
    own = module._parameters
    into_RD, out_ER, gain_HKK = own.get(CORRECTION_IN), own.get(CORRECTION_OUT), own.get(GAIN)
    if into_RD is not None and out_ER is not None:
        output_BTE = output_BTE + (inputs[0] @ into_RD.T) @ out_ER.T
    if gain_HKK is None:
        return output_BTE
    heads_BTHK = output_BTE.unflatten(-1, (len(gain_HKK), -1))
    if gain_HKK.shape[-1] == 1:
        return (heads_BTHK * gain_HKK.squeeze(-1)).flatten(-2)
    return torch.einsum("...hk,hkj->...hj", heads_BTHK, gain_HKK).flatten(-2)


def fold_learnt(projection: Projection) -> None:
    """Put what learnt on top into weight and bias, in float64, and take it off."""
    module = projection.module
    if not projection.weight.is_meta:
        _fold_numbers(projection)
    getattr(module, _HANDLE).remove()
    delattr(module, _HANDLE)
    for name in (GAIN, CORRECTION_IN, CORRECTION_OUT):
        module._parameters.pop(name, None)


def _fold_numbers(projection: Projection) -> None:
    # On the CPU: not every device has float64.
    own = {name: p.detach().cpu().double() for name, p in projection.module._parameters.items() if p is not None}
    weight_HKD = projection.weight_HKD().cpu().double()
    if CORRECTION_IN in own:
        weight_HKD = weight_HKD + (own[CORRECTION_OUT] @ own[CORRECTION_IN]).reshape(weight_HKD.shape)
    bias_HK = projection.bias_HK()
    if GAIN in own:
        gain_HKK = own[GAIN] * torch.eye(weight_HKD.shape[1], dtype=torch.float64) if own[GAIN].shape[-1] == 1 else own[GAIN]
        weight_HKD = gain_HKK.mT @ weight_HKD
        if bias_HK is not None:
            bias_HK.copy_((gain_HKK.mT @ bias_HK.cpu().double().unsqueeze(-1)).squeeze(-1))
    projection.write(weight_HKD)
