"""AdamW or Muon for the trainable parameters: groups by decay and rate, and the state as named tensors."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor, nn

from oelm.config import OptimConfig
from oelm.errors import CheckpointError
from oelm.method.audit import parameter_roles
from oelm.method.gain import learnt_on_top
from oelm.method.plan import ALWAYS, Plan
from oelm.method.sites import attention_sites, num_layers_by_stack
from oelm.train.muon import Muon

_ADAMW_KEYS, _MUON_KEYS = ("exp_avg", "exp_avg_sq", "step"), ("momentum",)
_IN_LAYERS = ("query", "key", "query_key_value", "correction", "value_output", "feed_forward")


def build_optimizer(
    model: nn.Module,
    config: OptimConfig,
    *,
    device: str,
    layer_lr_decay: float = 1.0,
    plan: Plan = ALWAYS,
    before: torch.optim.Optimizer | None = None,
) -> torch.optim.Optimizer:
    """Build the optimizer for the trainable parameters only: frozen ones have no state and do not decay.

    Parameters that still train keep their state from the optimizer `before`; those thawed since start without, and warm up.
    """
    decay, factors = config.weight_decay, layer_factors(model, layer_lr_decay)
    matrices = muon_parameters(model, config)
    groups: dict[tuple[bool, float, float, int], list[nn.Parameter]] = {(False, decay, 1.0, 0): [], (False, 0.0, 1.0, 0): []}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            # A gain starts at the identity; decay would pull it towards zero attention.
            decays = parameter.dim() >= 2 and learnt_on_top(name) != "gain"
            factor = factors.get(name, 1.0) * (config.matrix_rate if name in matrices else 1.0)
            key = (name in matrices, decay if decays else 0.0, factor, plan.joined_at(name))
            groups.setdefault(key, []).append(parameter)
    listed = [
        {"params": members, "matrices": by_muon, "weight_decay": decay, "factor": factor, "joined": joined}
        for (by_muon, decay, factor, joined), members in groups.items()
        if members or (factor, joined) == (1.0, 0)
    ]
    # lr as given is never used: the loop sets it before every step.
    kind = Muon if config.name == "muon" else torch.optim.AdamW
    optimizer = kind(listed, lr=config.lr, betas=config.betas, fused=device in ("cpu", "cuda"))
    if before is not None:
        learning = {parameter for group in listed for parameter in group["params"]}  # type: ignore[attr-defined]
        optimizer.state.update({parameter: kept for parameter, kept in before.state.items() if parameter in learning})
    return optimizer


def muon_parameters(model: nn.Module, config: OptimConfig) -> set[str]:
    """Return the names of what Muon trains: matrices of the layers, thin ones of Q and K only if the config says so."""
    if config.name != "muon":
        return set()
    roles = parameter_roles(model, attention_sites(model))
    matrices = {name: p for name, p in model.named_parameters() if p.dim() == 2 and roles[name] in _IN_LAYERS}
    thin = {name for name, p in matrices.items() if _is_thin(p, roles[name])}
    return matrices.keys() - (thin if config.thin == "adamw" else set())


def _is_thin(parameter: Tensor, role: str) -> bool:
    return role == "correction" or (role in ("query", "key") and 2 * min(parameter.shape) <= max(parameter.shape))


def layer_factors(model: nn.Module, decay: float) -> dict[str, float]:
    """Return the factor on each parameter's rate, if it is not 1.

    It is 1 in the last layer of every stack and after it, times `decay` for each layer further down, and once more below
    the layers: in embeddings, and in what a model lists before its first layer.
    """
    if decay == 1.0:
        return {}
    sites = attention_sites(model)
    depths = num_layers_by_stack(sites)
    above = {f"{site.block}.": depths[site.stack] - 1 - site.layer for site in sites}
    names = [name for name, _ in model.named_parameters()]
    below = set(itertools.takewhile(lambda name: not name.startswith(tuple(above)), names))
    below |= {f"{path}.weight" for path, module in model.named_modules() if isinstance(module, nn.Embedding)}
    factors = {name: decay ** max(depths.values()) for name in names if name in below}
    for name in names:
        for prefix, distance in above.items():
            if name.startswith(prefix):
                factors[name] = decay**distance
    return {name: factor for name, factor in factors.items() if factor != 1}


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float, *, step: int = 0, warmup_steps: int = 0) -> None:
    """Set the rate of every group for the update from `step`; a group that joined later warms up from then."""
    for group in optimizer.param_groups:
        since = step - group["joined"] + 1
        warmth = min(1.0, since / warmup_steps) if group["joined"] and warmup_steps else 1.0
        group["lr"] = lr * group["factor"] * warmth


def _keys_of(optimizer: torch.optim.Optimizer) -> dict[Tensor, tuple[str, ...]]:
    """Return the names of each parameter's state after an update."""
    is_muon = isinstance(optimizer, Muon)
    keys = {True: _MUON_KEYS, False: _ADAMW_KEYS}
    return {p: keys[is_muon and group["matrices"]] for group in optimizer.param_groups for p in group["params"]}


def optimizer_tensors(optimizer: torch.optim.Optimizer, model: nn.Module) -> dict[str, Tensor]:
    """Return the optimizer's state by names 'key/parameter'; empty before the first step."""
    names: dict[Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
    keys = _keys_of(optimizer)
    return {
        f"{key}/{names[parameter]}": state[key]
        for parameter, state in optimizer.state.items()
        for key in keys[parameter]
        if key in state
    }


def load_optimizer_tensors(optimizer: torch.optim.Optimizer, model: nn.Module, tensors: dict[str, Tensor]) -> None:
    """Restore what `optimizer_tensors` returned; raise CheckpointError if it does not fit the trainable parameters."""
    keys = _keys_of(optimizer)
    parameters = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    # A parameter thawed in the last update has no state if a float16 overflow skipped that update.
    late = {parameter for group in optimizer.param_groups if group["joined"] for parameter in group["params"]}
    skipped = {name for name, p in parameters.items() if p in late and not any(f"{k}/{name}" in tensors for k in keys[p])}
    parameters = {name: parameter for name, parameter in parameters.items() if name not in skipped}
    expected = {f"{key}/{name}" for name, parameter in parameters.items() for key in keys[parameter]} if tensors else set()
    if expected != set(tensors):
        odd = sorted(expected ^ set(tensors))[0]
        raise CheckpointError(f"the optimizer's saved state does not fit what trains in this model (first: {odd})")
    for name, parameter in parameters.items() if tensors else ():
        state = {key: tensors[f"{key}/{name}"] for key in keys[parameter]}
        if any(value.shape != (() if key == "step" else parameter.shape) for key, value in state.items()):
            raise CheckpointError(f"the optimizer's saved state of {name} has another shape than the parameter")
        # Copies: tensors of safetensors are mapped from the file, which would stay open during the run.
        optimizer.state[parameter] = {key: value.to(parameter.device, copy=True) for key, value in state.items()}
