"""AdamW over what trains: decay groups, and its state as named tensors."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from oelm.errors import CheckpointError
from oelm.method.gain import GAIN
from oelm.train.config import OptimConfig

_STATE_KEYS = ("exp_avg", "exp_avg_sq", "step")


def build_optimizer(model: nn.Module, config: OptimConfig, *, device: str) -> torch.optim.AdamW:
    """Build AdamW over the trainable parameters only: what is frozen has no state and cannot decay."""
    trainable = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    # A gain starts at the identity: decay would pull it towards no attention at all.
    decayed = {name for name, p in trainable.items() if p.dim() >= 2 and not name.endswith(f".{GAIN}")}
    groups = [
        {"params": [p for name, p in trainable.items() if name in decayed], "weight_decay": config.weight_decay},
        {"params": [p for name, p in trainable.items() if name not in decayed], "weight_decay": 0.0},
    ]
    # lr as given is never used: the loop sets it before every step.
    return torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, fused=device in ("cpu", "cuda"))


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = lr


def optimizer_tensors(optimizer: torch.optim.Optimizer, model: nn.Module) -> dict[str, Tensor]:
    """Return the optimizer's state under names 'key/parameter'; empty before the first step."""
    names: dict[Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
    return {
        f"{key}/{names[parameter]}": state[key]
        for parameter, state in optimizer.state.items()
        for key in _STATE_KEYS
        if key in state
    }


def load_optimizer_tensors(optimizer: torch.optim.Optimizer, model: nn.Module, tensors: dict[str, Tensor]) -> None:
    """Restore what `optimizer_tensors` returned; raise CheckpointError when it does not fit the trainable parameters."""
    parameters = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    expected = {f"{key}/{name}" for name in parameters for key in _STATE_KEYS} if tensors else set()
    if expected != set(tensors):
        odd = sorted(expected ^ set(tensors))[0]
        raise CheckpointError(f"the optimizer's saved state does not fit what trains in this model (first: {odd})")
    for name, parameter in parameters.items() if tensors else ():
        state = {key: tensors[f"{key}/{name}"] for key in _STATE_KEYS}
        if any(value.shape != (() if key == "step" else parameter.shape) for key, value in state.items()):
            raise CheckpointError(f"the optimizer's saved state of {name} has another shape than the parameter")
        optimizer.state[parameter] = {
            key: value.to("cpu" if key == "step" and parameter.device.type == "cpu" else parameter.device)
            for key, value in state.items()
        }
