"""`freeze` and `thaw`: the only code that changes a model."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from oelm.errors import FrozenMovedError, MethodError
from oelm.method.audit import assert_unmoved
from oelm.method.frames import frame_generator
from oelm.method.gain import add_gain, fold_gain, has_gain
from oelm.method.method import Method, method_name, resolve_method
from oelm.method.record import FrozenRecord, digest, record_of, set_record
from oelm.method.sites import Projection, attention_sites


def freeze(model: nn.Module, method: Method | str, *, seed: int = 0) -> tuple[str, ...]:
    """Give the model's Q and K their start and freeze those the method names; return their names.

    The frames follow `method.seed` where it is set, else `seed`. Frozen parameters keep their names, get no gradient,
    and their digests are recorded on the model for `assert_unmoved`. Raises MethodError when the model is frozen
    already or the method names layers it does not have, SiteError when its attention is of no known kind.
    """
    method = resolve_method(method)
    sites = attention_sites(model)
    if record_of(model) is not None:
        raise MethodError("this model was frozen before; call oelm.thaw(model) first, or start from a fresh model")
    num_layers = 1 + max(site.layer for site in sites)
    method.check_layers(num_layers)
    chosen = [site for site in sites if method.selects(site.layer, num_layers)]
    frame_seed = seed if method.seed is None else method.seed
    # All starts before the first write: a refusal leaves the model as it was.
    starts = [
        (projection, _start(projection, method, frame_generator(frame_seed, site.key, part)))
        for site in chosen
        for part, projection in site.projections()
        if method.init != "native"
    ]
    for projection, start_HKD in starts:
        projection.write(start_HKD)
        if projection.bias is not None and not method.keeps_weights:
            with torch.no_grad():
                projection.bias.zero_()
    frozen = {
        name: parameter
        for site in chosen
        for part, projection in site.projections()
        if part in method.freeze
        for name, parameter in projection.parameters()
    }
    if method.freeze and not frozen:
        raise MethodError(f"method '{method_name(method)}' matches no parameter of {type(model).__name__}")
    for parameter in frozen.values():
        parameter.requires_grad_(False)
        parameter.grad = None
    for site in chosen:
        add_gain(site.q, method.gain)
    set_record(model, FrozenRecord({name: digest(parameter) for name, parameter in frozen.items()}) if frozen else None)
    return tuple(frozen)


def _start(projection: Projection, method: Method, generator: torch.Generator) -> Tensor:
    present_HKD = projection.weight_HKD()
    start_HKD = method.start(present_HKD.float().cpu(), generator)
    if start_HKD.shape != present_HKD.shape or not bool(start_HKD.isfinite().all()):
        raise MethodError(
            f"the init of {projection.name} gave {tuple(start_HKD.shape)}, finite: {bool(start_HKD.isfinite().all())}; "
            f"it must give finite numbers of shape {tuple(present_HKD.shape)} (heads, head_dim, model_dim)"
        )
    return start_HKD.to(present_HKD.device)


def thaw(model: nn.Module) -> tuple[str, ...]:
    """Let every parameter that `freeze` froze learn again, from where it is; return their names. Gains are folded in.

    An optimizer built before this does not know them: add them to it or build it anew.
    """
    record = record_of(model)
    if record is None:
        return ()
    fold_gains(model)
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for name in record.digests:
        parameters[name].requires_grad_(True)
    set_record(model, None)
    return tuple(record.digests)


def fold_gains(model: nn.Module) -> None:
    """Multiply every learnt gain into its query weights and remove it: the same outputs from plain weights.

    The folded weights are new ones: what was recorded of the frozen ones is recorded anew.
    """
    assert_unmoved(model)
    folded = [site.q for site in attention_sites(model) if has_gain(site.q)]
    for projection in folded:
        fold_gain(projection)
    if folded:
        _record_anew(model)


def _record_anew(model: nn.Module) -> None:
    if (record := record_of(model)) is not None:
        parameters = dict(model.named_parameters(remove_duplicate=False))
        set_record(model, FrozenRecord({name: digest(parameters[name]) for name in record.digests}))


def cast(model: nn.Module, dtype: torch.dtype) -> None:
    """Cast the model's floating-point weights, and record the frozen ones anew: the one sanctioned change to them."""
    assert_unmoved(model)
    model.to(dtype)
    _record_anew(model)


def adopt_record(model: nn.Module, digests: dict[str, str]) -> None:
    """Take over the digests that stored weights were frozen with, after those weights were copied into the model.

    Stored frames count, not a new draw of them: another machine's draw may differ in its last bits. Raises
    FrozenMovedError when the weights are not what the digests say, or when other parameters are frozen here.
    """
    record = record_of(model)
    if set(digests) != set(record.digests if record else ()):
        raise FrozenMovedError("what the stored weights froze is not what this method freezes; use the run's own config")
    set_record(model, FrozenRecord(dict(digests)) if digests else None)
    try:
        assert_unmoved(model)
    except FrozenMovedError:
        set_record(model, record)
        raise
