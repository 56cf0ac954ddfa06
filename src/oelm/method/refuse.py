"""Refuses what cannot be frozen, before anything is changed: wrapped, tied, sharded, quantized and read-only weights."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from oelm.errors import MethodError
from oelm.method.audit import is_frozen_from_outside
from oelm.method.frames import is_fully_sharded
from oelm.method.layers import class_path
from oelm.method.method import Method
from oelm.method.sites import HeadProjection, Site, own_parameter, require_model


def check_changeable(model: nn.Module, verb: str) -> None:
    """Raise MethodError where `oelm.<verb>` must not change this model: under inference mode, distributed, or a part."""
    require_model(model)
    if torch.is_inference_mode_enabled():
        raise MethodError(
            f"{verb} was called under torch.inference_mode(), where new weights could never learn; call it outside"
        )
    # DDP has sorted its parameters by whether they learn: the gradients of others would silently never be summed.
    # It may be inside another wrapper, such as torch.compile's.
    if any(isinstance(module, nn.parallel.DistributedDataParallel) for module in model.modules()):
        raise MethodError(f"call oelm.{verb}(model.module) before DistributedDataParallel wraps it, then wrap it again")
    # Known by module too: after a forward pass, weights look whole until the next backward.
    split = [path for path, module in model.named_modules() if is_fully_sharded(module)]
    split += [name for name, parameter in model.named_parameters() if hasattr(parameter, "full_tensor")]
    if split:
        raise MethodError(
            f"{type(model).__name__} is sharded over processes ({split[0] or 'all of it'}); oelm.{verb} needs whole weights. "
            f"Call oelm.{verb} before fully_shard or parallelize_module; oelm.assert_unmoved and oelm.audit work after them"
        )
    refuse_part(model, verb)


def refuse_part(model: nn.Module, verb: str) -> None:
    """Raise MethodError where a part of a frozen model was given: the record on the whole model would not follow."""
    if is_frozen_from_outside(model):
        raise MethodError(
            f"this {type(model).__name__} is a part of a model that oelm.freeze froze, or a copy of such a part: call "
            f"oelm.{'thaw' if verb == 'freeze' else verb} on the model that was frozen. If that is gone, load the weights into "
            "a fresh model"
        )


def check_writable(projection: HeadProjection) -> None:
    """Raise an error where a weight cannot be written to, or is computed from something else."""
    module, weight = projection.module, projection.weight
    if not weight.is_floating_point() or _is_wrapper(weight):
        raise MethodError(
            f"{projection.name} holds {weight.dtype} numbers in a {class_path(type(weight))} (quantized?); load the model in "
            "float32, bfloat16 or float16, then freeze"
        )
    if projection.bias is None and getattr(module, projection.bias_slot.parameter, None) is not None:
        # Parametrized or pruned: this raises the error that says so.
        own_parameter(module, projection.bias_slot.parameter, path=projection.path)
    for name, parameter in projection.parameters():
        if parameter.is_inference():
            raise MethodError(
                f"{name} was made under torch.inference_mode() and can never be written to again; build or load the model "
                "outside of it"
            )


def refuse_tied(model: nn.Module, sites: Iterable[Site], method: Method) -> None:
    """Raise MethodError where a weight that the method changes or freezes is also another weight.

    Queries may be tied to the keys of the same attention when both are frozen and nothing learns on top.
    """
    holders = [
        (id(module), name, f"{path}.{name}" if path else name, parameter)
        for path, module in model.named_modules()
        for name, parameter in module._parameters.items()
        if parameter is not None
    ]
    for site in sites:
        slots = {part: _slots(projection) for part, projection in site.projections()}
        both = set().union(*slots.values()) if set(method.freeze) == set(slots) and not method.learns_on_top else set()
        for part, projection in site.projections():
            if part not in method.freeze and not method.changes_weights:
                continue
            for own, tensor in projection.parameters():
                for owner, name, full_name, other in holders:
                    if (owner, name) not in slots[part] | both and _overlap(tensor, other):
                        raise MethodError(
                            f"{own} and {full_name} are one tensor (tied): freezing one would change or freeze the other "
                            "too. Untie them: give one a copy, nn.Parameter(weight.detach().clone()), then freeze"
                        )


def refuse_shared(model: nn.Module, sites: Iterable[Site]) -> None:
    """Raise MethodError where a layer also belongs to another attention, or is both queries and keys.

    A whole attention that is used twice is fine: it is one attention.
    """
    holders: dict[int, dict[tuple[int, str], str]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        for name, child in module._modules.items():
            holders.setdefault(id(child), {}).setdefault((id(module), name), f"{path}.{name}" if path else name)
    for projection in (projection for site in sites for _, projection in site.projections() if not projection.is_in_torch):
        found = list(holders.get(id(projection.module), {}).values())
        if len(found) > 1:
            raise MethodError(
                f"{found[0]} and {found[1]} are one layer (shared): a change to one changes the other too. Give one a copy, "
                "copy.deepcopy(layer), then freeze"
            )


def refuse_hooks(sites: Iterable[Site], method: Method) -> None:
    """Raise MethodError where another module will replace a layer that has forward hooks: they would be lost."""
    for site in sites:
        for part, projection in site.projections():
            module, is_replaced = projection.module, method.init == "axes" or projection.is_fused
            if part not in method.freeze or projection.is_in_torch or not is_replaced:
                continue
            if module._forward_hooks or module._forward_pre_hooks:
                raise MethodError(
                    f"{projection.path} has forward hooks, and freezing it puts another module in its place: they would "
                    "never be called again. Remove them, freeze, and add them to the new module"
                )


def refuse_mixing(sites: Iterable[Site], method: Method) -> None:
    """Raise MethodError where a change of basis inside the heads, as the method makes it, would change the logits."""
    if not method.balances:
        return
    reasons = {
        "rotary": "positions rotate queries and keys before their product",
        "normed": "queries and keys are normalised before their product",
        "unknown": "it is not known what happens to queries and keys before their product (if nothing does, say "
        "logits='product' in its SitePaths; torch's attention with bias_k has a key that is not projected)",
    }
    for site in sites:
        reason = reasons.get(site.logits)
        if site.q.num_heads != site.k.num_heads:
            reason = f"{site.q.num_heads} query heads share {site.k.num_heads} key heads, which have one basis for all of them"
        if reason is not None:
            raise MethodError(
                f"init '{method.init}' changes the basis inside each head of {site.name or 'the attention'}, and {reason}: the "
                "logits would change. Use init 'polar', or 'native' to keep the weights as they are"
            )


def _slots(projection: HeadProjection) -> set[tuple[int, str]]:
    return {(id(projection.module), slot.parameter) for slot in (projection.weight_slot, projection.bias_slot)}


def _overlap(one: Tensor, other: Tensor) -> bool:
    """Whether two parameters are the same, or lie in the same memory."""
    if one is other or one.is_meta or other.is_meta or not (one.numel() and other.numel()):
        return one is other
    (first, end), (other_first, other_end) = map(_span, (one, other))
    return one.device == other.device and first < other_end and other_first < end


def _span(tensor: Tensor) -> tuple[int, int]:
    if tensor.layout is not torch.strided or _is_wrapper(tensor):
        return 0, 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()


def _is_wrapper(tensor: Tensor) -> bool:
    return bool(is_traceable_wrapper_subclass(tensor))
