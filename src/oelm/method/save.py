"""Makes `save_pretrained` of transformers write plain weights of a model with something learnt on top of Q and K."""

from __future__ import annotations

import contextlib
import functools
import inspect
import re
import sys
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from oelm.errors import MethodError
from oelm.method.frames import whole
from oelm.method.fused import SplitProjection
from oelm.method.layers import FROZEN, LEARNT, Adjusted, Selection, learning_modules

# The library's own rule for a folder that a Trainer can resume from.
_CHECKPOINT = re.compile(r"checkpoint-\d+")
# Larger than any file: the library loads shards one by one, and a frame must be loaded together with its folded weight.
_ONE_FILE = 2**62


def save_folded() -> None:
    """Make `save_pretrained` fold what learnt on top into what it writes, from now on; the live model does not change.

    In a Trainer's checkpoint the parts are written too, next to the plain weights: `load_state_dict` of a model that learns
    takes them, every other reader the plain weights. The library's class is changed, not the model: what is saved may be a
    model around the one that was frozen, a part or a copy of it. Models with nothing learnt on top are saved as before.
    """
    # Already imported where the model is one of the library's.
    library = sys.modules.get("transformers.modeling_utils")
    if library is not None:
        _guard_adapters()
    if library is None or hasattr(library.PreTrainedModel.save_pretrained, "_oelm_folds"):
        return
    save: Any = library.PreTrainedModel.save_pretrained
    signature = inspect.signature(save)

    @functools.wraps(save)
    def save_pretrained(model: nn.Module, *args: Any, **settings: Any) -> Any:
        learning = learning_modules(model)
        if not learning:
            return save(model, *args, **settings)
        call = signature.bind(model, *args, **settings)
        _fold_written(model, learning, call.arguments)
        return save(*call.args, **call.kwargs)

    save_pretrained._oelm_folds = True  # type: ignore[attr-defined]
    library.PreTrainedModel.save_pretrained = save_pretrained


def _guard_adapters() -> None:
    """Make peft's `save_pretrained` refuse to write adapters without what learnt on top, if peft is installed."""
    # Imported here if it is not yet: the user may import it after freezing, and nothing would call us then.
    with contextlib.suppress(ImportError):
        import peft.peft_model  # noqa: F401
    library = sys.modules.get("peft.peft_model")
    if library is None or hasattr(library.PeftModel.save_pretrained, "_oelm_folds"):
        return
    save: Any = library.PeftModel.save_pretrained

    @functools.wraps(save)
    def save_pretrained(model: nn.Module, *args: Any, **settings: Any) -> Any:
        if learning := learning_modules(model):
            raise _adapters_alone(model, learning)
        return save(model, *args, **settings)

    save_pretrained._oelm_folds = True  # type: ignore[attr-defined]
    library.PeftModel.save_pretrained = save_pretrained


def _adapters_alone(model: nn.Module, learning: dict[str, Adjusted | Selection]) -> MethodError:
    return MethodError(
        f"save_pretrained of this {type(model).__name__} saves adapters alone, and what learnt on top of "
        f"{next(iter(learning))} would be lost: call oelm.fold(model) first and save the model without adapters too"
    )


def _fold_written(model: nn.Module, learning: dict[str, Adjusted | Selection], call: dict[str, Any]) -> None:
    """Change the arguments of a call of `save_pretrained` so that it writes folded weights."""
    if getattr(model, "_hf_peft_config_loaded", False):
        raise _adapters_alone(model, learning)
    given = call.get("state_dict")
    state = dict(model.state_dict() if given is None else given)
    is_checkpoint = bool(_CHECKPOINT.fullmatch(Path(call["save_directory"]).name))
    if is_checkpoint:
        # Under the model's present names: a Trainer that resumes does not translate those of earlier versions.
        call |= {"max_shard_size": _ONE_FILE, "save_original_format": False}
    for path, module in learning.items():
        for name, tensor in module.folded().items():
            _put(state, model, path, name, tensor)
        for name, tensor in _frozen(module).items() if is_checkpoint else ():
            state[f"{path}.{FROZEN[name]}"] = tensor
        for name in () if is_checkpoint else LEARNT:
            state.pop(f"{path}.{name}", None)
    call["state_dict"] = state


def _frozen(module: Adjusted | Selection) -> dict[str, Tensor]:
    if isinstance(module, Selection):
        return module.bare()
    return {name: whole(p.detach()).clone() for name, p in module._parameters.items() if name in FROZEN and p is not None}


def _put(state: dict[str, Any], model: nn.Module, path: str, name: str, folded: Tensor) -> None:
    """Replace a weight or bias in a state dict, alone or within the fused one that split parts are saved as."""
    above, _, part = path.rpartition(".")
    holder = model.get_submodule(above)
    key = f"{above}.{name}" if isinstance(holder, SplitProjection) else f"{path}.{name}"
    if key in state:
        copied = state[key] = whole(state[key].detach()).clone()
        target = holder.layout.take(copied, part) if isinstance(holder, SplitProjection) else copied
        target.copy_(folded.reshape(target.shape))
