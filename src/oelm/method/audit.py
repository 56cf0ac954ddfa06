"""What is frozen, with digests kept on the model itself; counts of parameters by role, and the proof that nothing moved."""

from __future__ import annotations

import hashlib
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from oelm.errors import FrozenMovedError, MethodError
from oelm.method.frames import on_cpu, orthonormality_error, use_shards, whole
from oelm.method.layers import Selection, consecutive_runs, learnt_on_top
from oelm.method.method import Method
from oelm.method.sites import HeadProjection, Site, attention_sites, require_model

_DIGESTS = "_oelm_frozen"
_ORIGINALS = "_oelm_originals"
_METHOD = "_oelm_method"
# On the module that owns a frozen parameter, so that a part of a frozen model knows that it is one.
_OWNS = "_oelm_owns_frozen"
# On the meta device parameters have shapes but no bytes: they can be frozen and counted, but not proven unmoved.
NO_DIGEST = ""
# The sha256 of every frozen parameter, and of every selection that replaces one, by the parameter's full name.
FrozenRecord = dict[str, str]
# A projection's weight by heads, and its bias, as they were before `freeze`; by the projection's name in its model.
Originals = dict[str, tuple[Tensor, Tensor | None]]


def digest(held: Tensor | Selection) -> str:
    """Return the sha256 of a tensor's dtype, shape and bytes, wherever it is; NO_DIGEST on the meta device.

    For a selection, that of its coordinates and scale.
    """
    tensor, more = (held.index, f"{held.scale}") if isinstance(held, Selection) else (held, "")
    if tensor.is_meta:
        return NO_DIGEST
    if isinstance(held, Selection) and not held.is_consistent:
        # What is picked is not what is stored: another digest than that of an intact selection.
        more += f"{held.runs}"
    plain = whole(tensor.detach()).cpu().contiguous()
    state = hashlib.sha256(f"{plain.dtype}{tuple(plain.shape)}{more}".encode())
    state.update(plain.flatten().view(torch.uint8).numpy().tobytes())
    return state.hexdigest()


def freezable(model: nn.Module) -> dict[str, nn.Parameter | Selection]:
    """Return every parameter by its names, also where it is tied, and every selection by the names of what it replaces."""
    found: dict[str, nn.Parameter | Selection] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        prefix = f"{path}." if path else ""
        found |= {prefix + name: p for name, p in module._parameters.items() if p is not None}
        if isinstance(module, Selection):
            found |= dict.fromkeys(module.names(path), module)
    return found


def record_of(model: nn.Module) -> FrozenRecord:
    """Return what is frozen in the model or in a module inside it, under the names it has in this model."""
    require_model(model)
    digests: FrozenRecord = {}
    for path, module in model.named_modules():
        # From the module's own dictionary: torch.compile's wrapper passes attributes through, but not the names.
        own: FrozenRecord = vars(module).get(_DIGESTS, {})
        digests |= {f"{path}.{name}" if path else name: value for name, value in own.items()}
    return digests


def set_record(model: nn.Module, record: FrozenRecord) -> None:
    """Replace everything that is recorded in the model by this record, which may be empty."""
    _put(model, _DIGESTS, record)
    modules = dict(model.named_modules(remove_duplicate=False))
    for module in modules.values():
        module.__dict__.pop(_OWNS, None)
    for owner in {name.rpartition(".")[0] for name in record} & modules.keys():
        object.__setattr__(modules[owner], _OWNS, True)


def _put(model: nn.Module, attribute: str, value: object) -> None:
    """Set a plain attribute on the model, or none where the value is empty, and remove it from the modules inside."""
    for module in model.modules():
        vars(module).pop(attribute, None)
    if value:
        # Past nn.Module.__setattr__: no parameter, buffer or submodule.
        object.__setattr__(model, attribute, value)


def is_frozen_from_outside(model: nn.Module) -> bool:
    """Whether this is a part of a model that was frozen as a whole: the record is on that model, out of reach."""
    return not record_of(model) and any(_OWNS in vars(module) for module in model.modules())


def set_method(model: nn.Module, method: Method | None) -> None:
    """Note on the model by which method it was frozen, or that none applies any more."""
    _put(model, _METHOD, method)


def methods_of(model: nn.Module) -> list[tuple[nn.Module, Method]]:
    """Return the model or the modules inside it that were given to `freeze`, each with its method."""
    return [(module, vars(module)[_METHOD]) for module in model.modules() if _METHOD in vars(module)]


def originals_of(module: nn.Module) -> Originals:
    """Return what `freeze` kept on this very module, not on those inside it."""
    kept: Originals = vars(module).get(_ORIGINALS, {})
    return kept


def set_originals(model: nn.Module, originals: Originals) -> None:
    """Keep these on the model, or with none forget what was kept on it and on the modules inside."""
    _put(model, _ORIGINALS, originals)


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
