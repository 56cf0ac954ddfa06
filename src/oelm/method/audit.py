"""Count parameters by role, check what is frozen, and measure how orthonormal the heads are."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass
from typing import Any

from torch import nn

from oelm.errors import FrozenMovedError
from oelm.method.frames import orthonormality_error
from oelm.method.gain import GAIN
from oelm.method.record import digest, record_of
from oelm.method.sites import Site, attention_sites


@dataclass(frozen=True)
class ProjectionAudit:
    """One Q or K: is it frozen, what is its digest, and how far is W W^T from I per head."""

    name: str
    layer: int
    part: str
    num_heads: int
    is_frozen: bool
    digest: str | None
    orthonormality_error: float


@dataclass(frozen=True)
class Audit:
    """Parameters of a model by role, trainable and frozen, and every projection's state."""

    total: int
    trainable: int
    frozen: int
    by_role: dict[str, dict[str, int]]
    projections: tuple[ProjectionAudit, ...]

    def __str__(self) -> str:
        share = 100 * self.frozen / self.total
        return f"parameters: {self.total:,} || trainable: {self.trainable:,} || frozen: {self.frozen:,} ({share:.2f}%)"

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def audit(model: nn.Module) -> Audit:
    """Count the model's parameters by role and look at every Q and K; changes nothing."""
    sites = attention_sites(model)
    parameters = dict(model.named_parameters())
    roles = parameter_roles(model, sites)
    by_role: dict[str, dict[str, int]] = {}
    for name, parameter in parameters.items():
        counts = by_role.setdefault(roles[name], {"trainable": 0, "frozen": 0})
        counts["trainable" if parameter.requires_grad else "frozen"] += parameter.numel()
    trainable = sum(counts["trainable"] for counts in by_role.values())
    frozen = sum(counts["frozen"] for counts in by_role.values())
    return Audit(trainable + frozen, trainable, frozen, by_role, tuple(_audit_projections(model, sites)))


def _audit_projections(model: nn.Module, sites: list[Site]) -> list[ProjectionAudit]:
    record = record_of(model)
    digests = record.digests if record else {}
    return [
        ProjectionAudit(
            name=projection.name,
            layer=site.layer,
            part=part,
            num_heads=projection.num_heads,
            is_frozen=not projection.weight.requires_grad,
            digest=digests.get(f"{projection.name}.weight"),
            orthonormality_error=orthonormality_error(projection.weight_HKD()),
        )
        for site in sites
        for part, projection in site.projections()
    ]


def parameter_roles(model: nn.Module, sites: list[Site]) -> dict[str, str]:
    """Return each parameter's role: query, key, gain, value_output, feed_forward, norm, embedding or other."""
    roles: dict[str, str] = {}
    # Everything of the same numbered layer as a site, norms aside, that is not attention is its feed-forward.
    layer_prefixes = tuple({re.sub(r"((?:^|\.)\d+\.).*", r"\1", f"{site.name}.") for site in sites})
    attention_prefixes = tuple(f"{site.name}." for site in sites)
    for name, _ in model.named_parameters():
        owner = type(model.get_submodule(name.rpartition(".")[0]))
        if name.endswith(f".{GAIN}"):
            roles[name] = "gain"
        elif issubclass(owner, nn.Embedding):
            roles[name] = "embedding"
        elif "norm" in owner.__name__.lower():
            roles[name] = "norm"
        elif name.startswith(attention_prefixes):
            roles[name] = "value_output"
        elif name.startswith(layer_prefixes):
            roles[name] = "feed_forward"
        else:
            roles[name] = "other"
    for site in sites:
        for role, projection in (("query", site.q), ("key", site.k)):
            roles.update({name: role for name, _ in projection.parameters()})
    return roles


def assert_unmoved(model: nn.Module) -> None:
    """Raise FrozenMovedError unless every frozen parameter still has the bytes it was frozen with.

    The proof is the digest, never the flag: weight decay, a stale optimizer or a write in place all show.
    """
    record = record_of(model)
    if record is None:
        return
    # Tied parameters go by more than one name.
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for name, recorded in record.digests.items():
        if name not in parameters:
            raise FrozenMovedError(f"frozen parameter {name} is gone from the model; call oelm.thaw before changing it")
        if digest(parameters[name]) != recorded:
            raise FrozenMovedError(
                f"frozen parameter {name} has moved since it was frozen (its sha256 no longer begins {recorded[:8]}): "
                "something wrote to it, or changed its dtype by another way than oelm.cast. Go back to the last checkpoint"
            )
        if parameters[name].requires_grad:
            raise FrozenMovedError(f"frozen parameter {name} asks for a gradient again; use oelm.thaw(model) to let it learn")
