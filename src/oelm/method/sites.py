"""Where Q and K live: one `Site` per attention, found by the class of the attention module.

A model of your own is described in a few lines:

    @register_sites("my_package.model.MyAttention")
    def _(module): return SitePaths(q="to_q", k="to_k", num_heads=module.heads, num_kv_heads=module.heads)
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from oelm.errors import SiteError


@dataclass(frozen=True)
class SitePaths:
    """Where an attention module keeps its query and key projections, and how many heads each has."""

    q: str
    k: str
    num_heads: int
    num_kv_heads: int


@dataclass(frozen=True)
class Projection:
    """One linear map into heads. Its weight is (heads * head_dim, model_dim), as in nn.Linear."""

    name: str
    module: nn.Module
    num_heads: int

    @property
    def weight(self) -> nn.Parameter:
        weight = self.module.weight
        assert isinstance(weight, nn.Parameter)
        return weight

    @property
    def bias(self) -> nn.Parameter | None:
        bias = getattr(self.module, "bias", None)
        assert bias is None or isinstance(bias, nn.Parameter)
        return bias

    def weight_HKD(self) -> Tensor:
        """Return the weight by heads, as a view: (H, K, D)."""
        return self.weight.detach().unflatten(0, (self.num_heads, -1))

    def write(self, weight_HKD: Tensor) -> None:
        """Copy new rows into the weight, in place, cast to its dtype."""
        with torch.no_grad():
            self.weight.copy_(weight_HKD.flatten(0, 1).to(self.weight.dtype))

    def parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield weight and bias under their full names in the model; a learnt gain is not among them."""
        yield f"{self.name}.weight", self.weight
        if self.bias is not None:
            yield f"{self.name}.bias", self.bias


@dataclass(frozen=True)
class Site:
    """One attention's Q and K: `layer` counts from 0, `name` is the attention module's path in the model.

    `key` names the site's draw of frames: the layer, and which of its attentions where there are several.
    """

    name: str
    layer: int
    key: str
    q: Projection
    k: Projection

    def projections(self) -> Iterator[tuple[str, Projection]]:
        yield "q", self.q
        yield "k", self.k


Adapter = Callable[[nn.Module], SitePaths]
_ADAPTERS: dict[str, Adapter] = {}


def register_sites(attention: str | type[nn.Module]) -> Callable[[Adapter], Adapter]:
    """Register, for attention modules of a class (itself, or 'package.module.Class'), what finds Q and K in one.

    Classes derived from it are found too.
    """
    class_path = attention if isinstance(attention, str) else _class_path(attention)

    def register(adapter: Adapter) -> Adapter:
        _ADAPTERS[class_path] = adapter
        return adapter

    return register


@register_sites("oelm.models.gpt.Attention")
def _gpt(module: nn.Module) -> SitePaths:
    num_heads = module.num_heads
    assert isinstance(num_heads, int)
    return SitePaths(q="q", k="k", num_heads=num_heads, num_kv_heads=num_heads)


def _class_path(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def attention_sites(model: nn.Module) -> list[Site]:
    """Return the sites of every attention in the model, by layer; raise SiteError when there is none we know."""
    found: list[tuple[str, Projection, Projection]] = []
    for name, module in model.named_modules():
        known = [_ADAPTERS[path] for path in map(_class_path, type(module).__mro__) if path in _ADAPTERS]
        if known:
            adapter = known[0]
            paths = adapter(module)
            prefix = f"{name}." if name else ""
            q = Projection(f"{prefix}{paths.q}", module.get_submodule(paths.q), paths.num_heads)
            k = Projection(f"{prefix}{paths.k}", module.get_submodule(paths.k), paths.num_kv_heads)
            found.append((name, q, k))
    if not found:
        raise SiteError(
            f"no attention found in {type(model).__name__}: none of its modules is of a known class "
            f"({', '.join(sorted(_ADAPTERS))}). Describe yours with oelm.register_sites('package.module.Attention'); "
            "docs/method.md shows how in four lines"
        )
    sites: list[Site] = []
    for (name, q, k), layer in zip(found, _layer_numbers([name for name, _, _ in found]), strict=True):
        earlier = sum(site.layer == layer for site in sites)
        sites.append(Site(name, layer, key=f"{layer}.{earlier}" if earlier else str(layer), q=q, k=k))
    return sites


def _layer_numbers(names: list[str]) -> list[int]:
    numbers = [re.findall(r"(?:^|\.)(\d+)(?=\.|$)", name) for name in names]
    # Wrappers number what they wrap: the layer is the first number in which sites differ, of a single site the last.
    columns = list(zip(*numbers, strict=False))
    depth = next((n for n, column in enumerate(columns) if len(set(column)) > 1), len(columns) - 1)
    return [int(own[depth]) if depth >= 0 else position for position, own in enumerate(numbers)]
