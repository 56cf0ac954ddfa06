"""Weights of which every process holds a part: torch's `fully_shard`, FullyShardedDataParallel and tensor parallelism."""

from __future__ import annotations

import sys
from typing import Any

from torch import Tensor, nn


def whole(tensor: Tensor) -> Tensor:
    """Return a tensor as it is, or gathered from all processes where each holds a part; then all of them must call this."""
    gather: Any = getattr(tensor, "full_tensor", None)
    return tensor if gather is None else gather()


def is_fully_sharded(module: nn.Module) -> bool:
    """Whether `fully_shard` or FullyShardedDataParallel manages the module's weights."""
    # Never imported for this: it takes a moment, and whoever shards has it.
    library: Any = sys.modules.get("torch.distributed.fsdp")
    return library is not None and isinstance(module, library.FSDPModule | library.FullyShardedDataParallel)


def use_shards(model: nn.Module) -> None:
    """Drop the whole copies that a forward pass leaves: the optimizer writes to the shards, and they are what counts."""
    for module in model.modules():
        if is_fully_sharded(module) and (reshard := getattr(module, "reshard", None)) is not None:
            reshard()
