"""What was frozen, with its digest, kept on the model itself so that it follows copies and wrappers."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch
from torch import Tensor, nn

_ATTRIBUTE = "_oelm_frozen"


@dataclass(frozen=True)
class FrozenRecord:
    """The sha256 of every frozen parameter, by full name."""

    digests: dict[str, str]


def digest(tensor: Tensor) -> str:
    """Return the sha256 of a tensor's dtype, shape and bytes, wherever it lives."""
    plain = tensor.detach().cpu().contiguous()
    state = hashlib.sha256(f"{plain.dtype}{tuple(plain.shape)}".encode())
    state.update(plain.flatten().view(torch.uint8).numpy().tobytes())
    return state.hexdigest()


def record_of(model: nn.Module) -> FrozenRecord | None:
    """Return what is frozen in the model or in a module inside it, under the names it has in this model."""
    digests: dict[str, str] = {}
    for path, module in model.named_modules():
        # From the module's own dictionary: torch.compile's wrapper passes attributes through, but not the names.
        record = vars(module).get(_ATTRIBUTE)
        if isinstance(record, FrozenRecord):
            digests |= {f"{path}.{name}" if path else name: value for name, value in record.digests.items()}
    return FrozenRecord(digests) if digests else None


def set_record(model: nn.Module, record: FrozenRecord | None) -> None:
    for module in model.modules():
        vars(module).pop(_ATTRIBUTE, None)
    # Past nn.Module.__setattr__: this is a plain attribute, no parameter, buffer or submodule.
    object.__setattr__(model, _ATTRIBUTE, record)
