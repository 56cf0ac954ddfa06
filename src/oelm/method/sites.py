"""Where Q and K are: one `Site` per attention, found by the class of the attention module.

`register_sites` describes an attention of your own in a few lines.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor, nn

from oelm.errors import SiteError
from oelm.method.architectures import (
    Adapter,
    Logits,
    SitePaths,
    class_path,
    find_adapter,
    no_attention_found,
    own_parameter,
    register_sites,
)
from oelm.method.axes import Selection
from oelm.method.frames import whole
from oelm.method.frozen import require_model
from oelm.method.fused import Layout, SplitProjection
from oelm.method.mha import BIAS, WEIGHT, SplitInProjection, in_projection_layout, part_bias, part_weight

__all__ = ["HeadProjection", "ParameterSlot", "Site", "SitePaths", "attention_sites", "num_layers_by_stack", "register_sites"]


@dataclass(frozen=True)
class ParameterSlot:
    """The name of a parameter in its module, and how the parts lie in it."""

    parameter: str
    layout: Layout


@dataclass(frozen=True)
class HeadProjection:
    """One linear map into heads, alone in its module or one part of a fused one. `path` is the module's in the model."""

    name: str
    path: str
    module: nn.Module
    part: str
    weight_slot: ParameterSlot
    bias_slot: ParameterSlot

    @property
    def num_heads(self) -> int:
        return dict(self.weight_slot.layout.heads)[self.part]

    @property
    def is_fused(self) -> bool:
        """Whether this projection shares a parameter with others, so that it cannot be frozen before they are split."""
        has_fused_bias = self.bias is not None and self.bias_slot.layout.is_fused
        return self.weight_slot.layout.is_fused or has_fused_bias

    @property
    def is_in_torch(self) -> bool:
        """Whether it is computed inside torch.nn.MultiheadAttention, where no layer can be replaced."""
        return isinstance(self.module, nn.MultiheadAttention)

    @property
    def selection(self) -> Selection | None:
        """The module that picks coordinates instead of multiplying by a weight, if any."""
        return self.module if isinstance(self.module, Selection) else None

    @property
    def is_frozen(self) -> bool:
        return self.selection is not None or not self.weight.requires_grad

    @property
    def weight(self) -> nn.Parameter:
        """The parameter that holds the weight, and where it is fused, other weights too; a selection has none."""
        return own_parameter(self.module, self.weight_slot.parameter, path=self.path)

    @property
    def bias(self) -> nn.Parameter | None:
        return self.module._parameters.get(self.bias_slot.parameter)

    def weight_HKD(self) -> Tensor:
        """Return the weight by heads: (H, K, D); a view, but of a selection the dense weight it replaces."""
        if self.selection is not None:
            return self.selection.rows_ED().unflatten(0, (self.num_heads, -1))
        return self.weight_slot.layout.take(whole(self.weight.detach()), self.part)

    @property
    def shape_HKD(self) -> tuple[int, int, int]:
        """The numbers of heads, rows per head and columns of the weight."""
        if self.selection is not None:
            return self.num_heads, self.selection.out_features // self.num_heads, self.selection.in_features
        num_heads, head_dim, columns = self.weight_HKD().shape
        return num_heads, head_dim, columns

    def bias_HK(self) -> Tensor | None:
        """Return the bias by heads, as a view: (H, K)."""
        return None if self.bias is None else self.bias_slot.layout.take(whole(self.bias.detach()), self.part)

    def write(self, weight_HKD: Tensor, bias_HK: Tensor | None = None) -> None:
        """Copy new rows, and a new bias where one is given, into the parameters in place, cast to their dtype."""
        self.weight_HKD().copy_(weight_HKD)
        own_bias_HK = self.bias_HK()
        if own_bias_HK is not None and bias_HK is not None:
            own_bias_HK.copy_(bias_HK)

    def names(self) -> tuple[str, ...]:
        """Return the full names of weight and bias in the model; for a selection, of those it replaces."""
        if self.selection is not None:
            return self.selection.names(self.path)
        return tuple(name for name, _ in self.parameters())

    def parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield weight and bias under their full names in the model, without a learnt gain; of a selection nothing."""
        if self.selection is not None:
            return
        yield _join(self.path, self.weight_slot.parameter), self.weight
        if self.bias is not None:
            yield _join(self.path, self.bias_slot.parameter), self.bias


@dataclass(frozen=True)
class Site:
    """One attention's Q and K: `name` is the attention module's path in the model, `block` that of its layer.

    `layer` counts from 0 within its `stack`: a decoder's layers are counted apart from the encoder's; where a model has
    one stack its name is empty. `key` names the site's draw of frames: stack, layer, and which of its attentions.
    """

    name: str
    block: str
    stack: str
    layer: int
    key: str
    q: HeadProjection
    k: HeadProjection
    logits: Logits

    def projections(self) -> Iterator[tuple[str, HeadProjection]]:
        yield "q", self.q
        yield "k", self.k


def attention_sites(model: nn.Module) -> list[Site]:
    """Return the sites of every attention in the model, in the model's order; raise SiteError where none is known."""
    require_model(model)
    found: list[tuple[str, int, Logits, HeadProjection, HeadProjection]] = []
    for name, module in model.named_modules():
        adapter = find_adapter(module)
        if adapter is not None:
            paths = _paths(name, adapter, module)
            q, k = (_in_submodule(name, module, paths, part) for part in ("q", "k"))
            found.append((name, paths.inner_lists, paths.logits, q, k))
        elif isinstance(module, nn.MultiheadAttention):
            q, k = (_in_attention(name, module, part) for part in ("q", "k"))
            # torch's attention multiplies; bias_k, a key that it learns besides the projected ones, is in the queries' basis.
            found.append((name, 0, "product" if module.bias_k is None else "unknown", q, k))
    if not found:
        raise no_attention_found(model)
    blocks = _blocks([(name, inner_lists) for name, inner_lists, *_ in found])
    stacks = _stack_names([parent for parent, _, _ in blocks])
    sites: list[Site] = []
    for (name, _, logits, q, k), (_, block, layer), stack in zip(found, blocks, stacks, strict=True):
        _check_shapes(name, q, k)
        earlier = sum((site.stack, site.layer) == (stack, layer) for site in sites)
        key = _join(stack, f"{layer}.{earlier}" if earlier else str(layer))
        sites.append(Site(name, block, stack, layer, key, q, k, logits))
    return sites


def _paths(name: str, adapter: Adapter, module: nn.Module) -> SitePaths:
    try:
        paths = adapter(module)
    except SiteError as problem:
        raise SiteError(f"{name}: {problem}" if name else str(problem)) from None
    # Somebody else's code, which may raise anything; nothing has been changed yet.
    except Exception as problem:
        raise _not_paths(name, module, f"raised {type(problem).__name__}: {problem}") from problem
    if not isinstance(paths, SitePaths):
        raise _not_paths(name, module, f"gave {paths!r}")
    return paths


def _not_paths(name: str, module: nn.Module, what: str) -> SiteError:
    return SiteError(
        f"{name or 'the model'}: what is registered for {class_path(type(module))} {what}; it must return an oelm.SitePaths "
        "(docs/architectures.md)"
    )


def num_layers_by_stack(sites: list[Site]) -> dict[str, int]:
    """Return how many layers each stack has, by the highest number among its sites."""
    return {stack: 1 + max(site.layer for site in sites if site.stack == stack) for stack in {site.stack for site in sites}}


def _join(*parts: str) -> str:
    return ".".join(part for part in parts if part)


def _in_submodule(name: str, attention: nn.Module, paths: SitePaths, part: str) -> HeadProjection:
    """Return the projection that a submodule of the attention holds: alone, fused, or split by us."""
    is_fused = bool(paths.fused) and part in paths.parts
    inside = paths.fused if is_fused else {"q": paths.q, "k": paths.k}[part]
    heads = {"q": paths.num_heads, "k": paths.kv_heads, "v": paths.kv_heads}
    try:
        module = attention.get_submodule(inside)
    except AttributeError:
        children = ", ".join(child for child, _ in attention.named_children())
        raise SiteError(
            f"{class_path(type(attention))} has no layer '{inside}', where its SitePaths puts {part}; it has: {children}"
        ) from None
    projection = path = _join(name, inside)
    layout = Layout(((part, heads[part]),), "columns" if paths.layout == "columns" else "rows")
    if isinstance(module, SplitProjection):
        projection = path = _join(path, part)
        module, layout = module.get_submodule(part), Layout(layout.heads)
    elif is_fused:
        projection = _join(path, part)
        layout = Layout(tuple((each, heads[each]) for each in paths.parts), paths.layout)
    return HeadProjection(projection, path, module, part, ParameterSlot("weight", layout), ParameterSlot("bias", layout))


def _in_attention(name: str, module: nn.MultiheadAttention, part: str) -> HeadProjection:
    """Return the projection that nn.MultiheadAttention holds in its own parameters: packed, separate, or split by us."""
    packed, alone = in_projection_layout(module), Layout(((part, module.num_heads),))
    is_packed = module._parameters.get(WEIGHT) is not None
    weight = ParameterSlot(WEIGHT, packed) if is_packed else ParameterSlot(part_weight(part), alone)
    is_split = isinstance(module, SplitInProjection)
    bias = ParameterSlot(part_bias(part), alone) if is_split else ParameterSlot(BIAS, packed)
    return HeadProjection(_join(name, part), name, module, part, weight, bias)


def _check_shapes(name: str, q: HeadProjection, k: HeadProjection) -> None:
    for projection in (q, k):
        layout = projection.weight_slot.layout
        shape = (layout.total_heads, 1) if projection.selection is not None else layout.rows(projection.weight).shape
        if len(shape) != 2 or shape[0] % layout.total_heads:
            raise SiteError(
                f"{projection.name}: a weight of shape {tuple(projection.weight.shape)} does not hold {layout.total_heads} "
                f"heads of {' and '.join(layout.parts)} in layout '{layout.order}'; correct its SitePaths"
            )
    (num_heads, rows, _), (num_key_heads, key_rows, _) = q.shape_HKD, k.shape_HKD
    if rows != key_rows:
        raise SiteError(
            f"{name or 'the attention'}: a query head has {rows} rows ({num_heads} heads) and a key head {key_rows} "
            f"({num_key_heads} heads), so that they have no product; give num_kv_heads in its SitePaths if K has fewer heads"
        )


def _blocks(names: list[tuple[str, int]]) -> list[tuple[str, str, int]]:
    """Return, for each attention's name, the path of the list its layer is in, of the layer, and the layer's number."""
    numbers = []
    for name, inner_lists in names:
        found = list(re.finditer(r"(?:^|\.)(\d+)(?=\.|$)", name))
        numbers.append(found[: len(found) - inner_lists])
    # Wrappers number what they wrap: the layer is the first number in which sites differ, of a single site the last.
    columns = list(zip(*([match[1] for match in own] for own in numbers), strict=False))
    depth = next((n for n, column in enumerate(columns) if len(set(column)) > 1), len(columns) - 1)
    if depth < 0:
        # An attention outside any list: each is a layer, and all are one stack.
        return [("", name, position) for position, (name, _) in enumerate(names)]
    chosen = [own[depth] for own in numbers]
    return [(name[: at.start()], name[: at.end()], int(at[1])) for (name, _), at in zip(names, chosen, strict=True)]


def _stack_names(parents: list[str]) -> list[str]:
    """Return, for each layer, the name of the list of layers it is in, without what all those names share."""
    names = [parent.split(".") for parent in parents]
    if len(set(parents)) == 1:
        return ["" for _ in parents]
    while all(len(name) > 1 for name in names) and len({name[0] for name in names}) == 1:
        names = [name[1:] for name in names]
    while all(len(name) > 1 for name in names) and len({name[-1] for name in names}) == 1:
        names = [name[:-1] for name in names]
    return [".".join(name) for name in names]
