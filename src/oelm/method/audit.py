"""Count parameters by role, check what is frozen, and measure how orthonormal the heads are."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from torch import nn

from oelm.errors import FrozenMovedError, MethodError
from oelm.method.adjusted import learnt_on_top
from oelm.method.axes import Selection, consecutive_runs
from oelm.method.frames import on_cpu, orthonormality_error, use_shards
from oelm.method.frozen import NO_DIGEST, digest, freezable, record_of
from oelm.method.sites import HeadProjection, Site, attention_sites


@dataclass(frozen=True)
class ProjectionAudit:
    """One Q or K: whether it is frozen, its digest, and how far W W^T is from I.

    `pattern` is its name with a star for the number of its layer; `layer` counts within its stack.
    """

    name: str
    pattern: str
    layer: int
    part: str
    num_heads: int
    num_parameters: int
    is_frozen: bool
    digest: str | None
    orthonormality_error: float
    # It picks coordinates instead of multiplying: its parameters are counted here and stored nowhere.
    is_selection: bool


@dataclass(frozen=True)
class Audit:
    """Parameters of a model by role, trainable and frozen, and every projection's state.

    `total` counts what is stored. `selected` counts the parameters that selections replace, which are stored nowhere.
    """

    total: int
    trainable: int
    frozen: int
    selected: int
    by_role: dict[str, dict[str, int]]
    projections: tuple[ProjectionAudit, ...]

    def __str__(self) -> str:
        share = 100 * self.frozen / self.total
        counts = f"parameters: {self.total:,} || trainable: {self.trainable:,} || frozen: {self.frozen:,} ({share:.2f}%)"
        return counts + (f" || replaced by slices: {self.selected:,}" if self.selected else "")

    def summary(self) -> str:
        """Return the counts as PEFT prints them, then what is frozen and where."""
        share = 100 * self.trainable / self.total
        lines = [f"trainable params: {self.trainable:,} || all params: {self.total:,} || trainable%: {share:.2f}"]
        frozen = [projection for projection in self.projections if projection.is_frozen]
        for pattern in dict.fromkeys(projection.pattern for projection in frozen):
            same = [projection for projection in frozen if projection.pattern == pattern]
            layers, count = _ranges([projection.layer for projection in same]), sum(p.num_parameters for p in same)
            size = f"slices, none of {count:,} stored" if same[0].is_selection else f"{count:,}"
            lines.append(f"frozen {same[0].part}: {pattern}, layers {layers}: {size}")
        rest = self.frozen + self.selected - sum(projection.num_parameters for projection in frozen)
        if rest > 0:
            lines.append(f"frozen besides, not by their Q or K: {rest:,}")
        return "\n".join(lines)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def _ranges(numbers: list[int]) -> str:
    """Return '0-3, 7' for 0, 1, 2, 3, 7."""
    runs = consecutive_runs(sorted(set(numbers)))
    return ", ".join(str(first) if length == 1 else f"{first}-{first + length - 1}" for first, length in runs)


@on_cpu()
def audit(model: nn.Module) -> Audit:
    """Count the model's parameters by role and examine every Q and K; changes nothing."""
    sites = attention_sites(model)
    roles = parameter_roles(model, sites)
    by_role: dict[str, dict[str, int]] = {}
    for name, parameter in model.named_parameters():
        counts = by_role.setdefault(roles[name], {"trainable": 0, "frozen": 0})
        counts["trainable" if parameter.requires_grad else "frozen"] += parameter.numel()
    trainable = sum(counts["trainable"] for counts in by_role.values())
    frozen = sum(counts["frozen"] for counts in by_role.values())
    projections = tuple(_audit_projections(model, sites))
    selected = sum(projection.num_parameters for projection in projections if projection.is_selection)
    return Audit(trainable + frozen, trainable, frozen, selected, by_role, projections)


def _audit_projections(model: nn.Module, sites: list[Site]) -> list[ProjectionAudit]:
    digests = record_of(model)
    return [
        ProjectionAudit(
            name=projection.name,
            pattern=_pattern(projection.name, site.block),
            layer=site.layer,
            part=part,
            num_heads=projection.num_heads,
            num_parameters=_count(projection),
            is_frozen=projection.is_frozen,
            digest=digests.get(projection.names()[0]) or None,
            orthonormality_error=orthonormality_error(projection.weight_HKD()),
            is_selection=projection.selection is not None,
        )
        for site in sites
        for part, projection in site.projections()
    ]


def _count(projection: HeadProjection) -> int:
    """Return how many parameters weight and bias have; for a selection, those it replaces."""
    num_heads, head_dim, model_dim = projection.shape_HKD
    return num_heads * head_dim * (model_dim + len(projection.names()) - 1)


def _pattern(name: str, block: str) -> str:
    stack, _, number = block.rpartition(".")
    return f"{stack}.*{name[len(block) :]}".lstrip(".") if number.isdecimal() else name


def parameter_roles(model: nn.Module, sites: list[Site]) -> dict[str, str]:
    """Return each parameter's role: query, key, gain, correction, value_output, feed_forward, norm, embedding or other.

    A parameter that holds Q, K and V at once, while no part of it is frozen, is query_key_value.
    """
    roles: dict[str, str] = {}
    # Whatever else is in a site's layer, apart from norms, is its feed-forward.
    layer_prefixes = tuple({f"{site.block}." for site in sites})
    attention_prefixes = tuple({_attention_prefix(site) for site in sites})
    for name, _ in model.named_parameters():
        owner = type(model.get_submodule(name.rpartition(".")[0]))
        if role := learnt_on_top(name):
            roles[name] = role
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
            slots = (projection.weight_slot, projection.bias_slot)
            for (name, _), slot in zip(projection.parameters(), slots, strict=False):
                roles[name] = "query_key_value" if slot.layout.is_fused else role
    return roles


def _attention_prefix(site: Site) -> str:
    # BERT's attention.self has the heads, attention.output next to it the output projection.
    above, _, _ = site.name.rpartition(".")
    name = above if "att" in above.rpartition(".")[2].lower() and len(above) > len(site.block) else site.name
    return f"{name}." if name else ""


def assert_unmoved(model: nn.Module) -> None:
    """Raise FrozenMovedError unless every frozen parameter and every selection still has the bytes it was frozen with.

    It compares digests, never flags: weight decay, a stale optimizer and writes in place are all found. With a sharded
    model all processes must call this. Raises MethodError where nothing is frozen, because nothing is proven then.
    """
    record = record_of(model)
    if not record:
        raise MethodError(
            f"nothing is frozen in this {type(model).__name__}, so nothing can be proven unmoved: call oelm.freeze first, and "
            "give the model that was frozen or one around it"
        )
    use_shards(model)
    held = freezable(model)
    for name, recorded in record.items():
        if name not in held:
            raise FrozenMovedError(f"frozen parameter {name} is gone from the model; call oelm.thaw before changing it")
        if recorded == NO_DIGEST:
            raise FrozenMovedError(
                f"frozen parameter {name} has no digest: it was frozen on the meta device, where it had no bytes. "
                "Nothing can be proven of it; load the weights into a fresh model and freeze that"
            )
        frozen = held[name]
        if digest(frozen) != recorded:
            raise FrozenMovedError(
                f"frozen parameter {name} has moved since it was frozen (its sha256 no longer begins {recorded[:8]}): "
                "something wrote to it, or changed its dtype without oelm.cast. Go back to the last checkpoint"
            )
        if not isinstance(frozen, Selection) and frozen.requires_grad:
            raise FrozenMovedError(f"frozen parameter {name} requires a gradient again; use oelm.thaw(model) to let it learn")


def check_frozen(model: nn.Module) -> None:
    """Raise FrozenMovedError where something frozen has moved; a model in which nothing is frozen passes."""
    if record_of(model):
        assert_unmoved(model)
