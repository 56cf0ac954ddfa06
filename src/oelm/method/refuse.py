"""What cannot be frozen is refused before anything is changed: wrapped, tied, sharded and read-only weights, odd arguments."""

from __future__ import annotations

import operator
from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from oelm.errors import MethodError
from oelm.method.architectures import class_path, own_parameter
from oelm.method.method import Method
from oelm.method.record import is_frozen_from_outside, require_model
from oelm.method.sharded import is_fully_sharded
from oelm.method.sites import Projection, Site


def check_arguments(model: nn.Module, method: Method | str, seed: int) -> int:
    """Raise MethodError where an argument of `freeze` is of a wrong kind; return the seed as a plain int."""
    require_model(model)
    if not isinstance(method, Method | str):
        raise MethodError(f"method is {method!r} ({type(method).__name__}); give the name of a preset or an oelm.Method")
    # Everything would be hashed, and '0', 0.0 and 0 give three different draws.
    if isinstance(seed, bool) or not hasattr(seed, "__index__"):
        raise MethodError(f"seed is {seed!r} ({type(seed).__name__}); give a whole number, the same for the same frames")
    return operator.index(seed)


def refuse_inference(verb: str) -> None:
    """Raise MethodError under torch.inference_mode(): what is made there can never be written to or learn."""
    if torch.is_inference_mode_enabled():
        raise MethodError(
            f"{verb} was called under torch.inference_mode(), where new weights could never learn; call it outside"
        )


def refuse_parallel(model: nn.Module, verb: str) -> None:
    """Raise MethodError where a model was distributed over processes by a wrapper that has sorted its parameters."""
    require_model(model)
    # It has sorted its parameters by whether they learn: the gradients of others would never be summed, in silence.
    # It may be inside another wrapper, as torch.compile's.
    if any(isinstance(module, nn.parallel.DistributedDataParallel) for module in model.modules()):
        raise MethodError(
            f"{verb} the model before DistributedDataParallel wraps it: oelm.{verb}(model.module), then wrap it anew"
        )
    refuse_sharded(model, verb)


def refuse_part(model: nn.Module, verb: str) -> None:
    """Raise MethodError where a part of a frozen model was given: the record of the whole model would not follow."""
    if is_frozen_from_outside(model):
        raise MethodError(
            f"this {type(model).__name__} is a part of a model that oelm.freeze froze, or a copy of such a part: call "
            f"oelm.{'thaw' if verb == 'freeze' else verb} on the model that was frozen. If that is gone, load the weights into "
            "a fresh model"
        )


def refuse_sharded(model: nn.Module, verb: str) -> None:
    """Raise MethodError where every process holds a part of the weights alone."""
    require_model(model)
    # Known by module too: after a forward pass, weights look whole until the next backward.
    split = [path for path, module in model.named_modules() if is_fully_sharded(module)]
    split += [name for name, parameter in model.named_parameters() if hasattr(parameter, "full_tensor")]
    if split:
        raise MethodError(
            f"{type(model).__name__} is sharded over processes ({split[0] or 'all of it'}); oelm.{verb} needs whole weights. "
            f"Call oelm.{verb} before fully_shard or parallelize_module; oelm.assert_unmoved and oelm.audit work after them"
        )


def check_writable(projection: Projection) -> None:
    """Raise MethodError where a weight cannot be written to, or is computed from something else."""
    module, weight = projection.module, projection.weight
    if not weight.is_floating_point():
        raise MethodError(
            f"{projection.name} holds {weight.dtype} numbers (quantized?); load the model in float32, bfloat16 or "
            "float16, then freeze"
        )
    if _is_wrapper(weight):
        raise MethodError(
            f"{projection.name} is a {class_path(type(weight))} (quantized?), whose bytes are not its numbers; load the model "
            "in float32, bfloat16 or float16, then freeze"
        )
    if parametrize.is_parametrized(module):
        names = ", ".join(dict(module.get_submodule("parametrizations").named_children()))
        raise MethodError(
            f"{projection.path} is parametrized ({names}): what every forward pass computes again cannot be frozen; call "
            "torch.nn.utils.parametrize.remove_parametrizations first"
        )
    if projection.bias is None and getattr(module, projection.bias_slot.parameter, None) is not None:
        # Pruned, say: its error tells of what is computed again by every forward pass.
        own_parameter(module, projection.bias_slot.parameter, path=projection.path)
    for name, parameter in projection.parameters():
        if parameter.is_inference():
            raise MethodError(
                f"{name} was made under torch.inference_mode() and can never be written to again; build or load the model "
                "outside of it"
            )


def refuse_tied(model: nn.Module, sites: Iterable[Site], method: Method) -> None:
    """Raise MethodError where a weight that the method changes or freezes is at the same time another one.

    Queries may be tied to the keys of their own attention when both are frozen and nothing of their own learns on top.
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
    """Raise MethodError where a layer is also one of another attention, or both queries and keys.

    A whole attention that is used twice is no obstacle: it is one attention.
    """
    holders: dict[int, dict[tuple[int, str], str]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        for name, child in module._modules.items():
            holders.setdefault(id(child), {}).setdefault((id(module), name), f"{path}.{name}" if path else name)
    for site in sites:
        for _, projection in site.projections():
            if isinstance(projection.module, nn.MultiheadAttention):
                continue
            found = list(holders.get(id(projection.module), {}).values())
            if len(found) > 1:
                raise MethodError(
                    f"{found[0]} and {found[1]} are one layer (shared): what is done to one is done to the other too. Give "
                    "one a copy, copy.deepcopy(layer), then freeze"
                )


def refuse_hooks(sites: Iterable[Site], method: Method) -> None:
    """Raise MethodError where another module will take the place of a layer that has forward hooks: they would be lost."""
    for site in sites:
        for part, projection in site.projections():
            module = projection.module
            if part not in method.freeze or isinstance(module, nn.MultiheadAttention):
                continue
            is_replaced = method.init == "axes" or projection.is_fused
            if is_replaced and (module._forward_hooks or module._forward_pre_hooks):
                raise MethodError(
                    f"{projection.path} has forward hooks, and another module takes its place when it is frozen: they would "
                    "never be called again. Remove them, freeze, and add them to the new module"
                )


def refuse_mixing(sites: Iterable[Site], method: Method) -> None:
    """Raise MethodError where a change of basis inside the heads, as the method makes it, would change the logits."""
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
        if method.balances and reason is not None:
            raise MethodError(
                f"init '{method.init}' changes the basis inside each head of {site.name or 'the attention'}, and {reason}: the "
                "logits would change. Use init 'polar', or 'native' to keep the weights as they are"
            )


def _slots(projection: Projection) -> set[tuple[int, str]]:
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
