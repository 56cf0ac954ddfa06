"""AdamW and Muon over what trains, the learning rate of a step, and the optimizer's state as named tensors.

Muon is Keller Jordan's method (https://kellerjordan.github.io/posts/muon), as in `torch.optim.Muon`, but in the precision of
the weights: torch casts to bfloat16, which most CPUs only emulate. R rows  C columns  N matrices of one shape
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from oelm.config import OptimConfig, TrainConfig
from oelm.errors import CheckpointError
from oelm.method.apply import ALWAYS, Plan
from oelm.method.audit import parameter_roles
from oelm.method.layers import learnt_on_top
from oelm.method.sites import attention_sites, num_layers_by_stack

MOMENTUM = 0.95
# The quintic whose slope at zero is steepest; five rounds bring singular values to between 0.7 and 1.2.
_COEFFICIENTS, _ROUNDS = (3.4445, -4.7750, 2.0315), 5
_TINY = 1e-7
# The names of a parameter's state are torch's.
_ADAMW_KEYS, _MUON_KEYS, _EPSILON = ("exp_avg", "exp_avg_sq", "step"), ("momentum",), 1e-8


class Optimizer(torch.optim.Optimizer):
    """AdamW, and Muon for the groups with `matrices`; each group has its `lr`.

    torch's own optimizers load its compiler, which nearly doubles the time that a run takes to start. So this one calls AdamW
    as a function, and overrides the methods that would load the compiler.
    """

    def __init__(self, groups: list[dict[str, Any]], *, fused: bool) -> None:
        super().__init__(groups, {})
        self._fused = fused

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"_fused": self._fused}

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; unlike torch's own method, without a check."""
        self.param_groups.append(param_group)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop every gradient."""
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad = None

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        assert closure is None
        by_shape: dict[tuple[Any, ...], list[tuple[nn.Parameter, dict[str, Any]]]] = defaultdict(list)
        for group in self.param_groups:
            learning = [parameter for parameter in group["params"] if parameter.grad is not None]
            if not group["matrices"]:
                self._update_by_adamw(learning, group)
                continue
            for parameter in learning:
                by_shape[(*parameter.shape, parameter.dtype, parameter.device)].append((parameter, group))
        for members in by_shape.values():
            self._update_by_muon([parameter for parameter, _ in members], [group for _, group in members])
        return None

    def _update_by_adamw(self, parameters: list[nn.Parameter], group: dict[str, Any]) -> None:
        for parameter in parameters:
            if not self.state[parameter]:
                device = parameter.device if self._fused else "cpu"
                zeros = {key: torch.zeros_like(parameter) for key in _ADAMW_KEYS[:2]}
                self.state[parameter] = zeros | {"step": torch.zeros((), dtype=torch.float32, device=device)}
        averages, squares, steps = ([self.state[parameter][key] for parameter in parameters] for key in _ADAMW_KEYS)
        adamw(
            cast(list[Tensor], parameters),
            [cast(Tensor, parameter.grad) for parameter in parameters],
            averages,
            squares,
            [],
            steps,
            fused=self._fused,
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=_EPSILON,
            maximize=False,
        )

    def _update_by_muon(self, parameters: list[nn.Parameter], groups: list[dict[str, Any]]) -> None:
        """Update matrices of one shape, orthogonalized together."""
        directions_NRC = orthogonalized(torch.stack([self._direction(parameter) for parameter in parameters]))
        for parameter, group, direction_RC in zip(parameters, groups, directions_NRC, strict=True):
            parameter.mul_(1 - group["lr"] * group["weight_decay"])
            parameter.add_(direction_RC, alpha=-group["lr"] * shape_factor(*parameter.shape))

    def _direction(self, parameter: nn.Parameter) -> Tensor:
        """Update the parameter's momentum, and return Nesterov's direction."""
        gradient, state = parameter.grad, self.state[parameter]
        assert gradient is not None
        if not state:
            state["momentum"] = torch.zeros_like(gradient)
        momentum: Tensor = state["momentum"]
        momentum.lerp_(gradient, 1 - MOMENTUM)
        return gradient.lerp(momentum, MOMENTUM)


def shape_factor(rows: int, columns: int) -> float:
    """Return the factor on the rate of a matrix: above 1 if it has more rows than columns."""
    return math.sqrt(max(1.0, rows / columns))


def orthogonalized(matrices_NRC: Tensor) -> Tensor:
    """Return for each matrix about the nearest orthogonal one, by Newton-Schulz iteration."""
    a, b, c = _COEFFICIENTS
    is_tall = matrices_NRC.shape[-2] > matrices_NRC.shape[-1]
    x_NRC = matrices_NRC.mT if is_tall else matrices_NRC
    # No singular value may be above 1.
    x_NRC = x_NRC / x_NRC.norm(dim=(-2, -1), keepdim=True).clamp_min(_TINY)
    for _ in range(_ROUNDS):
        gram_NRR = x_NRC @ x_NRC.mT
        x_NRC = torch.baddbmm(x_NRC, torch.baddbmm(gram_NRR, gram_NRR, gram_NRR, beta=b, alpha=c), x_NRC, beta=a)
    return x_NRC.mT if is_tall else x_NRC


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
    common = {"lr": config.lr, "betas": config.betas}
    listed = [
        # The loop sets the rate before every step.
        common | {"params": members, "matrices": by_muon, "weight_decay": decay, "factor": factor, "joined": joined}
        for (by_muon, decay, factor, joined), members in groups.items()
        if members or (factor, joined) == (1.0, 0)
    ]
    optimizer = Optimizer(listed, fused=device in ("cpu", "cuda"))
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
    keys = {True: _MUON_KEYS, False: _ADAMW_KEYS}
    return {p: keys[group["matrices"]] for group in optimizer.param_groups for p in group["params"]}


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


def learning_rate(config: TrainConfig, step: int) -> float:
    """Return the rate of the update that takes the model from `step` to `step + 1`."""
    # An extended run followed the shorter schedule up to its old end; its config alone reproduces that.
    horizon = next(stage for stage in (*config.extended_at, config.steps) if step < stage)
    return config.optim.lr * _fraction(config, step, horizon)


def warmup_steps(config: TrainConfig, horizon: int) -> int:
    """Return the warm-up steps of a training of `horizon` steps: at most half of them; a method may set its own."""
    return min(_asked(config), horizon // 2)


def shortened_warmup(config: TrainConfig) -> str:
    """Return a remark if a run is too short for its warm-up, else ''."""
    horizon = config.planned_steps
    used, asked = warmup_steps(config, horizon), _asked(config)
    # 0: the steps follow from epochs, and are not known yet.
    if horizon == 0 or used == asked:
        return ""
    key = "schedule.warmup_steps" if config.method.warmup_steps is None else "method.warmup_steps"
    return f"{key} {asked} is cut to {used}: a warm-up is at most half of the run's {horizon} steps"


def _asked(config: TrainConfig) -> int:
    own = config.method.warmup_steps
    return config.schedule.warmup_steps if own is None else own


def _fraction(config: TrainConfig, step: int, horizon: int) -> float:
    warmup = warmup_steps(config, horizon)
    if step < warmup:
        return (step + 1) / warmup
    progress = (step - warmup) / max(1, horizon - warmup)
    floor = config.schedule.final_fraction
    return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * progress))
