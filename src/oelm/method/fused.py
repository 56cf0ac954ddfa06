"""One weight that holds several projections, and the module that keeps its parts separate while some are frozen.

H heads  K head_dim  D model_dim  R rows: heads times head_dim, of all parts together
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from oelm.method.frames import whole
from oelm.method.layers import keep_shell

WeightOrder = Literal["rows", "columns", "per_head_rows"]


@dataclass(frozen=True)
class Layout:
    """How a weight, and its bias, hold the rows of their parts.

    `rows`: (R, D) as in nn.Linear, one part after the other. `columns`: the transpose of that, as in GPT-2's Conv1D.
    `per_head_rows`: (R, D), the parts of the first head, then those of the second, as in GPT-NeoX. A weight that holds
    one projection alone has one part.
    """

    heads: tuple[tuple[str, int], ...]
    order: WeightOrder = "rows"

    @property
    def parts(self) -> tuple[str, ...]:
        return tuple(part for part, _ in self.heads)

    @property
    def is_fused(self) -> bool:
        return len(self.heads) > 1

    @property
    def total_heads(self) -> int:
        return sum(count for _, count in self.heads)

    def rows(self, tensor: Tensor) -> Tensor:
        """Return a weight, or a bias, with its R rows first, as a view."""
        return tensor.mT if self.order == "columns" and tensor.dim() == 2 else tensor

    def take(self, tensor: Tensor, part: str) -> Tensor:
        """Return one part by heads, as a view: (H, K, D) of a weight, (H, K) of a bias."""
        rows, position = self.rows(tensor), self.parts.index(part)
        if self.order == "per_head_rows":
            return rows.unflatten(0, (self.heads[position][1], len(self.heads), -1))[:, position]
        head_dim = len(rows) // self.total_heads
        first = sum(count for _, count in self.heads[:position])
        count = self.heads[position][1]
        return rows[first * head_dim : (first + count) * head_dim].unflatten(0, (count, -1))

    def join(self, parts: Sequence[Tensor], *, dim: int) -> Tensor:
        """Join parts, in their order, along a dimension of rows: of weights, biases or outputs."""
        if self.order == "per_head_rows":
            by_head = [part.unflatten(dim, (self.heads[0][1], -1)) for part in parts]
            return torch.stack(by_head, dim + 1).flatten(dim, dim + 2)
        return torch.cat(list(parts), dim)

    def fuse(self, parts: Sequence[Tensor]) -> Tensor:
        """Join weights (rows, D) or biases (rows) as the fused module has them."""
        return self.rows(self.join(parts, dim=0)).contiguous()


class SplitProjection(nn.Module):
    """Replaces a fused module: each part is a linear layer, so that a frozen one costs no gradient and no state.

    It saves and loads the fused module's own names and layout; `merged` gives that module back.
    """

    def __init__(self, fused: nn.Module, layout: Layout) -> None:
        super().__init__()
        self.layout = layout
        weight, bias = fused.get_parameter("weight"), fused._parameters.get("bias")
        for part in layout.parts:
            self.add_module(part, _linear(layout, part, weight, bias))
        keep_shell(self, fused)
        self.register_state_dict_post_hook(_fuse_saved)
        self.register_load_state_dict_pre_hook(_split_loaded)

    def forward(self, x_BTD: Tensor) -> Tensor:
        outputs = [self.get_submodule(part)(x_BTD) for part in self.layout.parts]
        return self.layout.join(outputs, dim=x_BTD.dim() - 1)

    def tensors(self, kind: str) -> list[Tensor]:
        """Return the parts' weights or biases in order; nothing where the fused module has none."""
        found = [self.get_submodule(part)._parameters[kind] for part in self.layout.parts]
        return [tensor for tensor in found if tensor is not None]

    @property
    def is_mixed(self) -> bool:
        """Whether some parts learn and others do not, which one weight cannot."""
        return any(len({tensor.requires_grad for tensor in self.tensors(kind)}) > 1 for kind in ("weight", "bias"))

    def merged(self) -> nn.Module:
        """Return the module this one replaces, with the parts' present weights; a part's gain must be folded."""
        shell: nn.Module = vars(self)["_shell"]
        for kind in ("weight", "bias"):
            if tensors := self.tensors(kind):
                fused = self.layout.fuse([tensor.detach() for tensor in tensors])
                shell.register_parameter(kind, nn.Parameter(fused, requires_grad=tensors[0].requires_grad))
        return shell.train(self.training)


def _linear(layout: Layout, part: str, weight: Tensor, bias: Tensor | None) -> nn.Linear:
    own = part_parameter(layout, part, weight)
    linear = nn.Linear(own.shape[1], own.shape[0], bias=bias is not None, device="meta")
    linear.weight = own
    if bias is not None:
        linear.bias = part_parameter(layout, part, bias)
    return linear


def part_parameter(layout: Layout, part: str, fused: Tensor) -> nn.Parameter:
    """Return one part of a fused weight or bias as a parameter with its own memory."""
    own = layout.take(fused.detach(), part).flatten(0, 1).clone(memory_format=torch.contiguous_format)
    return nn.Parameter(own, requires_grad=fused.requires_grad)


def _fuse_saved(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    assert isinstance(module, SplitProjection)
    for kind in ("weight", "bias"):
        fuse_saved(module.layout, state, [f"{prefix}{part}.{kind}" for part in module.layout.parts], f"{prefix}{kind}")


def _split_loaded(module: nn.Module, state: dict[str, Any], prefix: str, *others: Any) -> None:
    assert isinstance(module, SplitProjection)
    for kind in ("weight", "bias"):
        split_loaded(module.layout, state, [f"{prefix}{part}.{kind}" for part in module.layout.parts], f"{prefix}{kind}")


def fuse_saved(layout: Layout, state: dict[str, Any], parts: list[str], fused: str) -> None:
    """Replace, in a state dict, the parts' tensors by the fused one."""
    if all(name in state for name in parts):
        tensors = [state.pop(name) for name in parts]
        # A selection among sharded parts is whole.
        is_mixed = len({hasattr(tensor, "full_tensor") for tensor in tensors}) > 1
        state[fused] = layout.fuse([whole(tensor) for tensor in tensors] if is_mixed else tensors)


def split_loaded(layout: Layout, state: dict[str, Any], parts: list[str], fused: str) -> None:
    """Replace, in a state dict to be loaded, the fused tensor by its parts, if it is there."""
    tensor = state.get(fused)
    # A number of rows that does not divide is of another model: left under its name, for torch to report.
    if isinstance(tensor, Tensor) and tensor.dim() and layout.rows(tensor).shape[0] % layout.total_heads == 0:
        del state[fused]
        for part, name in zip(layout.parts, parts, strict=True):
            # A copy: with load_state_dict(assign=True) the parts would otherwise share one memory.
            state[name] = layout.take(tensor, part).flatten(0, 1).clone(memory_format=torch.contiguous_format)


def split_module(model: nn.Module, path: str, layout: Layout) -> None:
    """Replace the fused module at `path` by one that keeps its parts separate."""
    model.set_submodule(path, SplitProjection(model.get_submodule(path), layout))


def merge_modules(model: nn.Module) -> dict[str, str]:
    """Put every fused module back; return, for each parameter that held a part, the name of the one that now does.

    A module stays split while some of its parts learn and others do not.
    """
    renamed: dict[str, str] = {}
    for path, module in list(model.named_modules()):
        if isinstance(module, SplitProjection) and not module.is_mixed:
            model.set_submodule(path, module.merged())
            renamed |= {
                f"{path}.{part}.{kind}": f"{path}.{kind}" for part in module.layout.parts for kind in ("weight", "bias")
            }
    return renamed
