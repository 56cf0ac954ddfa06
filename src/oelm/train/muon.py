"""Muon: orthogonalized momentum for matrices, AdamW for everything else, in one optimizer.

Keller Jordan's method (https://kellerjordan.github.io/posts/muon), as in `torch.optim.Muon`, but in the precision of the
weights: torch casts to bfloat16, which most CPUs only emulate. R rows  C columns  N matrices of one shape
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

MOMENTUM = 0.95
# The quintic whose slope at zero is steepest; five rounds bring singular values to between 0.7 and 1.2.
_COEFFICIENTS, _ROUNDS = (3.4445, -4.7750, 2.0315), 5
_TINY = 1e-7


class Muon(torch.optim.Optimizer):
    """Muon for the groups with `matrices`, AdamW for the others; each group has its `lr`."""

    def __init__(self, groups: list[dict[str, Any]], *, lr: float, betas: tuple[float, float], fused: bool) -> None:
        rest, matrices = ([group for group in groups if group["matrices"] == wanted] for wanted in (False, True))
        self._adamw = torch.optim.AdamW(rest or [{"params": []}], lr=lr, betas=betas, fused=fused)
        super().__init__(matrices or [{"params": [], "matrices": True}], {"lr": lr})
        # One list of groups and one state, so that rates, checkpoints and zero_grad see a single optimizer.
        self.param_groups = self.param_groups + self._adamw.param_groups
        self._link()

    def _link(self) -> None:
        """Share this optimizer's groups and state with the AdamW half."""
        self._own = [group for group in self.param_groups if group.get("matrices")]
        self._adamw.param_groups = [group for group in self.param_groups if not group.get("matrices")]
        self._adamw.state = self.state

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"_adamw": self._adamw}

    def __setstate__(self, state: dict[str, Any]) -> None:
        # Also called by load_state_dict, with new groups and a new state.
        super().__setstate__(state)
        self._link()

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        assert closure is None
        self._adamw.step()
        by_shape: dict[tuple[Any, ...], list[tuple[nn.Parameter, dict[str, Any]]]] = defaultdict(list)
        for group in self._own:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    by_shape[(*parameter.shape, parameter.dtype, parameter.device)].append((parameter, group))
        for members in by_shape.values():
            self._update([parameter for parameter, _ in members], [group for _, group in members])
        return None

    def _update(self, parameters: list[nn.Parameter], groups: list[dict[str, Any]]) -> None:
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
