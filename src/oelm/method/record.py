"""What was frozen, with its digest, kept on the model itself so that it follows copies and wrappers."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from oelm.errors import MethodError
from oelm.method.axes import Selection
from oelm.method.method import Method
from oelm.method.sharded import whole

_ATTRIBUTE = "_oelm_frozen"
_ORIGINALS = "_oelm_originals"
_METHOD = "_oelm_method"
# On the module that owns a frozen parameter, so that a part of the frozen model knows that it is one.
_OWNS = "_oelm_owns_frozen"
# On the meta device parameters have shapes but no bytes: they can be frozen and counted, but nothing proven of them.
NO_DIGEST = ""


@dataclass(frozen=True)
class FrozenRecord:
    """The sha256 of every frozen parameter, and of every selection that stands for one, by the parameter's full name."""

    digests: dict[str, str]


def digest(held: Tensor | Selection) -> str:
    """Return the sha256 of a tensor's dtype, shape and bytes, wherever it lives; NO_DIGEST on the meta device.

    Of a selection, that of its coordinates and scale.
    """
    tensor, more = (held.index, f"{held.scale}") if isinstance(held, Selection) else (held, "")
    if tensor.is_meta:
        return NO_DIGEST
    if isinstance(held, Selection) and not held.is_consistent:
        # What is picked is not what is stored: no digest of a whole selection.
        more += f"{held.runs}"
    plain = whole(tensor.detach()).cpu().contiguous()
    state = hashlib.sha256(f"{plain.dtype}{tuple(plain.shape)}{more}".encode())
    state.update(plain.flatten().view(torch.uint8).numpy().tobytes())
    return state.hexdigest()


def selection_names(path: str, selection: Selection) -> tuple[str, ...]:
    """Return the names that the weight, and the bias, have which a selection stands for."""
    return tuple(f"{path}.{kind}" if path else kind for kind in (("weight", "bias") if selection.has_bias else ("weight",)))


def freezable(model: nn.Module) -> dict[str, nn.Parameter | Selection]:
    """Return every parameter by its names, also where it is tied, and every selection by those it stands for."""
    found: dict[str, nn.Parameter | Selection] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        prefix = f"{path}." if path else ""
        found |= {prefix + name: p for name, p in module._parameters.items() if p is not None}
        if isinstance(module, Selection):
            found |= dict.fromkeys(selection_names(path, module), module)
    return found


def require_model(model: object) -> None:
    """Raise MethodError where something else was given than a model: its name, say, or its class."""
    if not isinstance(model, nn.Module):
        hint = f", e.g. transformers.AutoModel.from_pretrained({model!r})" if isinstance(model, str) else ""
        raise MethodError(f"{model!r} is a {type(model).__name__}, not a model (torch.nn.Module); build or load it first{hint}")


def record_of(model: nn.Module) -> FrozenRecord | None:
    """Return what is frozen in the model or in a module inside it, under the names it has in this model."""
    require_model(model)
    digests: dict[str, str] = {}
    for path, module in model.named_modules():
        # From the module's own dictionary: torch.compile's wrapper passes attributes through, but not the names.
        record = vars(module).get(_ATTRIBUTE)
        if isinstance(record, FrozenRecord):
            digests |= {f"{path}.{name}" if path else name: value for name, value in record.digests.items()}
    return FrozenRecord(digests) if digests else None


def set_record(model: nn.Module, record: FrozenRecord | None) -> None:
    modules = dict(model.named_modules(remove_duplicate=False))
    for module in modules.values():
        module.__dict__.pop(_ATTRIBUTE, None)
        module.__dict__.pop(_OWNS, None)
    # Past nn.Module.__setattr__: this is a plain attribute, no parameter, buffer or submodule.
    object.__setattr__(model, _ATTRIBUTE, record)
    for owner in {name.rpartition(".")[0] for name in record.digests} & modules.keys() if record is not None else ():
        object.__setattr__(modules[owner], _OWNS, True)


def is_frozen_from_outside(model: nn.Module) -> bool:
    """Whether this is a part of a model that was frozen as a whole: that one has the record, and this one cannot see it."""
    require_model(model)
    return record_of(model) is None and any(_OWNS in vars(module) for module in model.modules())


def set_method(model: nn.Module, method: Method | None) -> None:
    """Note on the model by which method it was frozen, or that none applies any more."""
    for module in model.modules():
        vars(module).pop(_METHOD, None)
    if method is not None:
        object.__setattr__(model, _METHOD, method)


def methods_of(model: nn.Module) -> list[tuple[nn.Module, Method]]:
    """Return the model or the modules inside it that were given to `freeze`, each with its method."""
    return [(module, vars(module)[_METHOD]) for module in model.modules() if _METHOD in vars(module)]


# A projection's weight by heads, and its bias, as they were before `freeze`; by the projection's name in its model.
Originals = dict[str, tuple[Tensor, Tensor | None]]


def originals_of(module: nn.Module) -> Originals:
    """Return what `freeze` kept on this very module, not on those inside it."""
    kept: Originals = vars(module).get(_ORIGINALS, {})
    return kept


def set_originals(model: nn.Module, originals: Originals) -> None:
    """Keep these on the model, or with none forget what was kept there and in modules inside."""
    for module in model.modules():
        vars(module).pop(_ORIGINALS, None)
    if originals:
        object.__setattr__(model, _ORIGINALS, originals)
