"""Which parameters are frozen at a given step, from a method's fractions of training."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from oelm.errors import MethodError
from oelm.method.method import Method, resolve_method
from oelm.method.sites import Site, attention_sites, num_layers_by_stack


@dataclass(frozen=True)
class Plan:
    """For each parameter that is ever frozen: the first step that leaves it unchanged, and the first that moves it again."""

    spans: dict[str, tuple[int, int]]
    steps: int

    def frozen_at(self, step: int) -> frozenset[str]:
        """Return the names that the update from `step` to `step + 1` must not move; past the end, as at the last step."""
        step = min(step, self.steps - 1)
        return frozenset(name for name, (first, end) in self.spans.items() if first <= step < end)

    @property
    def moments(self) -> frozenset[int]:
        """The steps before which something is frozen or thawed."""
        return frozenset(step for span in self.spans.values() for step in span if 0 < step < self.steps)

    def joined_at(self, name: str) -> int:
        """Return the step at which a thawed parameter joined those that learn; 0 for all others."""
        end = self.spans.get(name, (0, 0))[1]
        return end if end < self.steps else 0


# Whatever is frozen stays frozen from the first step to the last.
ALWAYS = Plan({}, 0)


def plan_of(model: nn.Module, method: Method | str, *, steps: int) -> Plan:
    """Return the plan of a model to which the method, or the preset of that name, was applied, for this many steps."""
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
        raise MethodError(f"steps is {steps!r}; give the number of training steps, a whole number of at least 1")
    method = resolve_method(method)
    spans: dict[str, tuple[int, int]] = {}
    sites = attention_sites(model)
    depths = num_layers_by_stack(sites)
    chosen = [site for site in sites if method.selects(site.layer, depths[site.stack])]
    for site in chosen:
        span = _span(site, chosen, method, steps)
        for part, projection in site.projections():
            if part in method.freeze:
                spans |= dict.fromkeys(projection.names(), span)
    return Plan(spans, steps)


def _span(site: Site, chosen: list[Site], method: Method, steps: int) -> tuple[int, int]:
    if method.thaw is None:
        return (_moment(method.freeze_at, steps) if method.freeze_at else 0), steps
    layers = sorted({other.layer for other in chosen if other.stack == site.stack})
    turn = layers.index(site.layer) if method.thaw.order == "first_first" else len(layers) - 1 - layers.index(site.layer)
    share = turn / (len(layers) - 1) if len(layers) > 1 else 0.0
    return 0, _moment(method.thaw.start + share * (method.thaw.end - method.thaw.start), steps)


def _moment(fraction: float, steps: int) -> int:
    """Return the step at a fraction of training, after the first update and before the last one where there are two."""
    return max(1, min(steps - 1, round(fraction * steps)))
