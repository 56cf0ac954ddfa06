"""What was frozen, with its digest, kept on the model itself so that it follows copies and wrappers."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor, nn

from oelm.errors import MethodError
from oelm.method.axes import Selection
from oelm.method.frames import whole
from oelm.method.method import Method

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


def require_model(model: object) -> None:
    """Raise MethodError where the argument is not a model but, say, its name or its class."""
    if not isinstance(model, nn.Module):
        hint = f", e.g. transformers.AutoModel.from_pretrained({model!r})" if isinstance(model, str) else ""
        raise MethodError(f"{model!r} is a {type(model).__name__}, not a model (torch.nn.Module); build or load it first{hint}")


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
