"""`freeze`, `hold`, `thaw` and `restore`: the only code that changes a model; and `Plan`: what is frozen at which step."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from oelm.errors import FrozenMovedError, MethodError
from oelm.method.audit import (
    FrozenRecord,
    Originals,
    assert_unmoved,
    check_frozen,
    digest,
    freezable,
    originals_of,
    record_of,
    set_method,
    set_originals,
    set_record,
)
from oelm.method.frames import axis_rows, balancing, flattened, frame_generator, on_cpu, sample_axes, start_of, whole
from oelm.method.fused import SplitProjection, merge_modules, split_module
from oelm.method.layers import (
    Adjusted,
    Selection,
    add_correction,
    add_gain,
    can_learn_on,
    class_path,
    correction_rank,
    fold_learnt,
    learning_modules,
    selections,
)
from oelm.method.method import ALL_BUT, Method, method_name, resolve_method
from oelm.method.mha import merge_attentions, split_attention
from oelm.method.refuse import (
    check_changeable,
    check_writable,
    refuse_hooks,
    refuse_mixing,
    refuse_part,
    refuse_shared,
    refuse_tied,
)
from oelm.method.save import save_folded
from oelm.method.sites import OUR_ATTENTION, HeadProjection, Site, attention_sites, num_layers_by_stack
from oelm.seeds import whole_seed

# A weight, and a bias where it changes together with the weight.
Start = tuple[Tensor, Tensor | None]


@on_cpu()
def freeze(model: nn.Module, method: Method | str, *, seed: int = 0, keep_original: bool = False) -> tuple[str, ...]:
    """Give the model's Q and K their start and freeze those the method names; return their names.

    The frames follow `method.seed` where it is set, else `seed`. Frozen parameters keep their names, get no gradient,
    and their digests are recorded on the model for `assert_unmoved`. Slices (init 'axes') leave no parameter to freeze: a
    module that picks coordinates replaces the layer. A weight that holds Q, K and V at once is split first; the
    state_dict keeps its name and layout either way. What the method freezes later (`freeze_at`) only gets its start here,
    see `hold`. With `keep_original`, `restore` can undo all of it, at the price of a copy of Q and K in the CPU's memory.
    On the meta device parameters are frozen and counted, but nothing can be proven. Build the optimizer afterwards.

    Raises MethodError when the model is already frozen or the method names layers it does not have, SiteError when its
    attention is of no known class; the model is then unchanged.
    """
    check_changeable(model, "freeze")
    method, seed = resolve_method(method), whole_seed(seed, error=MethodError)
    sites = attention_sites(model)
    if record_of(model):
        raise MethodError("this model is already frozen; call oelm.thaw(model) first, or start from a fresh model")
    chosen = _choose(sites, method, model)
    # All starts and copies before the first write: a refusal leaves the model as it was.
    seed = seed if method.seed is None else method.seed
    slices = _slices(chosen, method, seed) if method.init == "axes" else {}
    # Before an init function sees the model.
    originals = _copies(chosen) if keep_original else {}
    starts = _starts(chosen, method, seed, slices)
    set_originals(model, originals)
    _split(model, [projection for site in chosen for part, projection in site.projections() if part in method.freeze])
    # Found again, as the split moved them.
    keys = {site.key for site in chosen}
    sites = attention_sites(model)
    for site in (site for site in sites if site.key in keys):
        for part, projection in site.projections():
            if projection.name in starts:
                _write(projection, *starts[projection.name], keeps_bias=method.keeps_weights)
            if projection.name in slices and part in method.freeze:
                _select(model, projection, slices[projection.name], scale=method.factor)
    # Found again, as selections replaced layers.
    sites = attention_sites(model) if slices else sites
    frozen = [
        name
        for site in sites
        for part, projection in site.projections()
        if site.key in keys and part in method.freeze and not method.freeze_at
        for name in projection.names()
    ]
    hold(model, frozen)
    _add_learnt(_learning(sites, method), method, seed)
    set_method(model, method)
    return tuple(frozen)


def hold(model: nn.Module, names: Iterable[str]) -> None:
    """Freeze exactly the parameters of these names from here on, as they are; let everything else frozen learn again.

    What was frozen is proven unmoved first. A selection that is let go becomes a dense layer. Fused weights must have been
    split by `freeze`. Build a new optimizer afterwards. Raises MethodError, with nothing changed, when a name is none of
    the model's.
    """
    check_changeable(model, "hold")
    names = _names(names)
    known = record_of(model)
    if any(known.values()):
        assert_unmoved(model)
    if missing := sorted(names - freezable(model).keys()):
        raise MethodError(f"{type(model).__name__} has no parameter {missing[0]} to hold; freeze it first, then ask plan_of")
    _release(model, known.keys() - names)
    digests: FrozenRecord = {}
    # In the model's order, not that of the names: what is saved of it is then the same in every process.
    for name, held in freezable(model).items():
        if name in names:
            if not isinstance(held, Selection):
                held.requires_grad_(False)
                held.grad = None
            digests[name] = known[name] if name in known else digest(held)
    set_record(model, digests)


def _names(names: object) -> frozenset[str]:
    given = list(names) if isinstance(names, Iterable) and not isinstance(names, str) else None
    if given is None or not all(isinstance(name, str) for name in given):
        raise MethodError(f"hold takes a list of parameters' names, not {names if given is None else given!r}")
    return frozenset(given)


def forget(model: nn.Module, names: Collection[str]) -> None:
    """Let these learn and drop their digests without a proof: their weights were replaced by a checkpoint's."""
    record = record_of(model)
    if known := record.keys() & set(names):
        _release(model, known)
        set_record(model, {name: value for name, value in record.items() if name not in known})


def _release(model: nn.Module, names: Collection[str]) -> None:
    """Let these learn from where they are; what picked coordinates is a dense layer from here on."""
    _make_dense(model, names, learns=True)
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for name in names:
        parameters[name].requires_grad_(True)


def _make_dense(model: nn.Module, names: Collection[str], *, learns: bool) -> None:
    """Put the layers back that selections replaced, those of these names."""
    # By identity: a layer that is used twice is one layer again afterwards.
    made: dict[Selection, nn.Module] = {}
    for path, selection in selections(model).items():
        if any(name in names for name in selection.names(path)):
            made[selection] = made[selection] if selection in made else selection.dense(learns=learns)
            model.set_submodule(path, made[selection])


def _learning(sites: list[Site], method: Method) -> list[Site]:
    """Return those of all sites on top of which something learns."""
    depths = num_layers_by_stack(sites)
    return [site for site in sites if method.learns_in(site.layer, depths[site.stack])]


def _add_learnt(sites: list[Site], method: Method, seed: int) -> None:
    if sites:
        save_folded()
    for site in sites:
        add_gain(site.q, method.gain)
        for part, projection in site.projections():
            if part in method.freeze:
                add_correction(projection, method.correction, frame_generator(seed, site.key, f"{part} correction"))


def _choose(sites: list[Site], method: Method, model: nn.Module) -> list[Site]:
    """Return the sites the method concerns; raise MethodError where it names what the model lacks, or cannot be applied."""
    depths = num_layers_by_stack(sites)
    method.check_layers(max(depths.values()))
    chosen = [site for site in sites if method.selects(site.layer, depths[site.stack])]
    is_all_but = isinstance(method.layers, str) and method.layers.startswith(ALL_BUT)
    if not chosen or not _numbers(sites, depths).issuperset(_listed(method.layers)):
        raise _wrong_layers(sites, method, model, "match no attention")
    if is_all_but and len(chosen) == len(sites):
        raise _wrong_layers(sites, method, model, "leave out no attention")
    if len({parameter.is_meta for parameter in model.parameters()}) > 1:
        raise MethodError(f"{type(model).__name__} is partly on the meta device (offloaded?); load all of its weights first")
    for site in chosen:
        for _, projection in site.projections():
            check_writable(projection)
    refuse_shared(model, chosen)
    refuse_tied(model, chosen, method)
    refuse_hooks(chosen, method)
    refuse_mixing(chosen, method)
    _check_learning(sites, method, model)
    return chosen


def _listed(layers: str | tuple[int, ...]) -> tuple[int, ...]:
    return () if isinstance(layers, str) else layers


def _numbers(sites: list[Site], depths: dict[str, int]) -> set[int]:
    """Return the numbers of the sites' layers, counted from the start and from the end."""
    return {layer for site in sites for layer in (site.layer, site.layer - depths[site.stack])}


def _wrong_layers(sites: list[Site], method: Method, model: nn.Module, what: str) -> MethodError:
    there = ", ".join(map(str, sorted({site.layer for site in sites})))
    return MethodError(
        f"method '{method_name(method)}': layers {method.layers!r} {what} of {type(model).__name__}, which has some in layers "
        f"{there}; give a list of these"
    )


def _check_learning(everywhere: list[Site], method: Method, model: nn.Module) -> None:
    """Raise MethodError where something is to learn on top of nothing."""
    sites, depths = _learning(everywhere, method), num_layers_by_stack(everywhere)
    if method.learns_on_top and (not sites or not _numbers(sites, depths).issuperset(_listed(method.learn_layers))):
        frozen = sorted({site.layer for site in everywhere if method.selects(site.layer, depths[site.stack])})
        raise MethodError(
            f"method '{method_name(method)}': learn_layers is {method.learn_layers!r}, but the method freezes attention of "
            f"{type(model).__name__} in layers {', '.join(map(str, frozen))}; choose learn_layers among these"
        )
    for site in sites:
        if site.q.is_in_torch:
            what = f"correction {method.correction:g}" if method.gain == "none" else f"gain '{method.gain}'"
            raise MethodError(
                f"{what}: {site.name} is a torch.nn.MultiheadAttention, whose queries are computed inside torch; "
                "use gain none and correction 0, or an attention with a separate query layer"
            )
        for part, projection in site.projections():
            if not can_learn_on(projection):
                raise MethodError(
                    f"{projection.path} is a {class_path(type(projection.module))}, and only on top of a plain linear layer "
                    "can anything learn; use gain none and correction 0, or make it an nn.Linear"
                )
            if method.correction and part in method.freeze and correction_rank(projection, method.correction) == 0:
                raise MethodError(
                    f"correction {method.correction:g}: {projection.name} has {projection.weight_HKD().numel()} numbers, and "
                    "that share of them is less than a correction of rank 1 needs; raise the share or leave the correction out"
                )


def _starts(sites: list[Site], method: Method, seed: int, slices: dict[str, Tensor]) -> dict[str, Start]:
    """Return the starts of projections, by their names; those that become selections need no weight."""
    if method.balances:
        balanced = [_balanced(site, method) for site in sites if not site.q.weight.is_meta]
        return {name: start for starts in balanced for name, start in starts.items()}
    return {
        projection.name: (
            axis_rows(slices[projection.name], projection.shape_HKD[2], scale=method.factor)
            if slices
            else _start(projection, method, frame_generator(seed, site.key, part)),
            None,
        )
        for site in sites
        for part, projection in site.projections()
        if method.changes_weights and not projection.weight.is_meta and not (slices and part in method.freeze)
    }


def _slices(sites: list[Site], method: Method, seed: int) -> dict[str, Tensor]:
    """Return the coordinates of each projection of these sites, by heads."""
    found: dict[str, Tensor] = {}
    for site in sites:
        if site.q.is_in_torch:
            raise MethodError(
                f"init 'axes': {site.name} is a torch.nn.MultiheadAttention, which multiplies by its weights inside torch; "
                "use init 'orthogonal', or an attention with separate layers for queries and keys"
            )
        for part, projection in site.projections():
            if part in method.freeze and not can_learn_on(projection):
                raise MethodError(
                    f"init 'axes': {projection.path} is a {class_path(type(projection.module))}, whose own forward would be "
                    "lost: only a plain linear layer can become a slice; use init 'orthogonal', or make it an nn.Linear"
                )
            factor = torch.tensor(method.factor, dtype=torch.float64)
            _check_fits(factor, projection.weight.dtype, f"init 'axes' with scale {method.factor:g}: {projection.name}")
        (num_heads, head_dim, query_dim), (num_key_heads, _, key_dim) = site.q.shape_HKD, site.k.shape_HKD
        generator = frame_generator(seed, site.key, "axes")
        try:
            q_HK, k_HK = sample_axes(num_heads, num_key_heads, head_dim, (query_dim, key_dim), generator=generator)
        except MethodError as problem:
            raise MethodError(f"{site.name}: {problem}") from None
        found |= {site.q.name: q_HK, site.k.name: k_HK}
    return found


def _select(model: nn.Module, projection: HeadProjection, index_HK: Tensor, *, scale: float) -> None:
    is_transposed = projection.weight_slot.layout.order == "columns"
    owner = model.get_submodule(projection.path.rpartition(".")[0])
    # Neither writes to its input; of other attentions we do not know.
    lends = isinstance(owner, SplitProjection) or class_path(type(owner)) == OUR_ATTENTION
    selection = Selection(projection.module, index_HK, scale=scale, is_transposed=is_transposed, lends=lends)
    model.set_submodule(projection.path, selection)


def _start(projection: HeadProjection, method: Method, generator: torch.Generator) -> Tensor:
    present_HKD = projection.weight_HKD()
    try:
        start_HKD = start_of(method, present_HKD.float().cpu(), generator)
    except MethodError as problem:
        raise MethodError(f"{projection.name}: {problem}") from None
    if start_HKD.shape != present_HKD.shape or not bool(start_HKD.isfinite().all()):
        raise MethodError(
            f"the init of {projection.name} gave {tuple(start_HKD.shape)}, finite: {bool(start_HKD.isfinite().all())}; "
            f"it must give finite numbers of shape {tuple(present_HKD.shape)} (heads, head_dim, model_dim)"
        )
    _check_fits(start_HKD, present_HKD.dtype, f"the start of {projection.name}")
    return start_HKD.to(present_HKD.device)


def _balanced(site: Site, method: Method) -> dict[str, Start]:
    """Return both starts of a site in the basis in which queries and keys have orthogonal rows."""
    starts: dict[str, Start] = {}
    present = [projection.weight_HKD().double().cpu() for _, projection in site.projections()]
    if not all(bool(weight_HKD.isfinite().all()) for weight_HKD in present):
        raise MethodError(f"{site.name}: Q or K has numbers that are not finite; load the weights first")
    for (_, projection), weight_HKD, mix_HKK in zip(site.projections(), present, balancing(*present), strict=True):
        rows_HKD, bias_HK = mix_HKK @ weight_HKD, projection.bias_HK()
        try:
            rows_HKD = (flattened(rows_HKD) if method.init == "spectral_flat" else rows_HKD) * method.factor
        except MethodError as problem:
            raise MethodError(f"{projection.name}: {problem}") from None
        if bias_HK is not None:
            bias_HK = (mix_HKK @ bias_HK.double().cpu().unsqueeze(-1)).squeeze(-1)
            _check_fits(bias_HK, projection.weight.dtype, f"the bias of {projection.name}")
        _check_fits(rows_HKD, projection.weight.dtype, f"the start of {projection.name}")
        starts[projection.name] = (rows_HKD, bias_HK)
    return starts


def _check_fits(numbers: Tensor, dtype: torch.dtype, what: str) -> None:
    """Raise MethodError where finite numbers become infinite in a dtype, or all of them zero."""
    # By way of float64: torch cannot test every dtype for infinities.
    cast_numbers = numbers.to(dtype).double()
    is_lost = bool((numbers.isfinite() & ~cast_numbers.isfinite()).any())
    if is_lost or (bool(numbers.any()) and not bool(cast_numbers.any())):
        raise MethodError(
            f"{what} has numbers up to {float(numbers.double().abs().max()):.3g}, which become "
            f"{'infinite' if is_lost else 'all zero'} in {dtype}; choose another scale, or load the model in float32"
        )


def _write(projection: HeadProjection, start_HKD: Tensor, start_bias_HK: Tensor | None, *, keeps_bias: bool) -> None:
    projection.write(start_HKD, start_bias_HK)
    bias_HK = projection.bias_HK()
    if bias_HK is not None and not keeps_bias:
        bias_HK.zero_()


def _copies(sites: list[Site]) -> Originals:
    originals: Originals = {}
    for site in sites:
        for _, projection in site.projections():
            if projection.weight.is_meta:
                raise MethodError(f"keep_original: {projection.name} is on the meta device, where there is nothing to keep")
            bias_HK = projection.bias_HK()
            kept_bias = None if bias_HK is None else bias_HK.cpu().clone()
            originals[projection.name] = (projection.weight_HKD().cpu().clone(), kept_bias)
    return originals


def _split(model: nn.Module, projections: list[HeadProjection]) -> None:
    fused = {projection.path: projection for projection in projections if projection.is_fused}
    for path, projection in fused.items():
        if isinstance(projection.module, nn.MultiheadAttention):
            split_attention(projection.module)
        else:
            split_module(model, path, projection.weight_slot.layout)


def thaw(model: nn.Module, *, keep_split: bool = False) -> tuple[str, ...]:
    """Let every parameter that `freeze` froze learn again, from where it is; return their names.

    What learnt on top is folded in. Build a new optimizer afterwards. Fused weights are put together again, as new
    parameters; where you froze V yourself, it stays frozen and the weight stays split. With `keep_split` all weights stay
    split, so that Q and K can be added to a running optimizer, which keeps its state of V. Saving is the same either way.
    """
    check_changeable(model, "thaw")
    record = record_of(model)
    if record:
        # On the meta device nothing has bytes, so nothing can be proven.
        if any(record.values()):
            assert_unmoved(model)
        _fold(model)
        _release(model, record)
        set_record(model, {})
    set_method(model, None)
    renamed = {} if keep_split else merge_modules(model) | merge_attentions(model)
    return tuple(dict.fromkeys(renamed.get(name, name) for name in record))


def restore(model: nn.Module) -> tuple[str, ...]:
    """Thaw, and give Q and K the very bytes they had before `freeze(..., keep_original=True)`; return their names.

    Everything else stays as it was trained. Raises MethodError when nothing was kept.
    """
    check_changeable(model, "restore")
    owners = [module for module in model.modules() if originals_of(module)]
    if not owners:
        raise MethodError("nothing was kept to restore; freeze with oelm.freeze(model, method, keep_original=True)")
    thaw(model)
    restored: dict[int, None] = {}
    for owner in owners:
        kept = originals_of(owner)
        for projection in (p for site in attention_sites(owner) for _, p in site.projections() if p.name in kept):
            projection.write(*kept[projection.name])
            restored |= {id(parameter): None for _, parameter in projection.parameters()}
    set_originals(model, {})
    return tuple(name for name, parameter in model.named_parameters() if id(parameter) in restored)


def fold(model: nn.Module, *, keep_slices: bool = False) -> None:
    """Fold every learnt gain and correction into the weight below it: the same outputs from plain weights.

    Selections become dense layers, frozen as they were; with `keep_slices` they stay, and so does what learnt on top of
    them, which is faster. The digests of the frozen weights are recorded again.
    """
    check_changeable(model, "fold")
    check_frozen(model)
    if _fold(model, keep_slices=keep_slices):
        _record_again(model)


def _fold(model: nn.Module, *, keep_slices: bool = False) -> bool:
    """Fold what learnt on top, and selections unless they are kept; return whether the model has any of these."""
    found = {*learning_modules(model).values(), *selections(model).values()}
    for module in found:
        if isinstance(module, Adjusted):
            fold_learnt(module)
    if not keep_slices:
        _make_dense(model, freezable(model), learns=False)
    return bool(found)


def _record_again(model: nn.Module) -> None:
    held = freezable(model)
    set_record(model, {name: digest(held[name]) for name in record_of(model)})


def cast(model: nn.Module, dtype: torch.dtype) -> None:
    """Cast the model's floating-point weights and record the frozen ones again: the only permitted change to them.

    Raises MethodError, with nothing changed, where a frozen number would become infinite, or all of a weight zero.
    """
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise MethodError(f"cast takes a floating-point dtype, e.g. torch.bfloat16, not {dtype!r}")
    refuse_part(model, "cast")
    check_frozen(model)
    held = freezable(model)
    for name in record_of(model):
        frozen = held[name]
        if isinstance(frozen, Selection):
            numbers = torch.tensor(frozen.scale, dtype=torch.float64, device="cpu")
        else:
            numbers = whole(frozen.detach()).cpu()
        _check_fits(numbers, dtype, f"frozen {name}")
    model.to(dtype)
    _record_again(model)


def adopt_record(model: nn.Module, digests: dict[str, str]) -> None:
    """Take over the digests that stored weights were frozen with, after those weights were copied into the model.

    Stored frames count, not a new draw of them: another machine's draw may differ in its last bits. Raises
    FrozenMovedError when the weights do not match the digests, or when other parameters are frozen here.
    """
    record = record_of(model)
    if set(digests) != set(record):
        raise FrozenMovedError("what the stored weights froze is not what this method freezes; use the run's own config")
    set_record(model, dict(digests))
    try:
        check_frozen(model)
    except FrozenMovedError:
        set_record(model, record)
        raise


@dataclass(frozen=True)
class Plan:
    """For each parameter that is ever frozen: the first step that leaves it unchanged, and the first that moves it again."""

    spans: dict[str, tuple[int, int]]
    steps: int

    def frozen_at(self, step: int) -> frozenset[str]:
        """Return the names that the update from `step` to `step + 1` must not move; past the end, as at the last step."""
        step = min(step, self.steps - 1)
        return frozenset(name for name, (first, end) in self.spans.items() if first <= step < end)

    @property
    def moments(self) -> frozenset[int]:
        """The steps before which something is frozen or thawed."""
        return frozenset(step for span in self.spans.values() for step in span if 0 < step < self.steps)

    def joined_at(self, name: str) -> int:
        """Return the step at which a thawed parameter joined those that learn; 0 for all others."""
        end = self.spans.get(name, (0, 0))[1]
        return end if end < self.steps else 0


# Whatever is frozen stays frozen from the first step to the last.
ALWAYS = Plan({}, 0)


def plan_of(model: nn.Module, method: Method | str, *, steps: int) -> Plan:
    """Return the plan of a model to which the method, or the preset of that name, was applied, for this many steps."""
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
        raise MethodError(f"steps is {steps!r}; give the number of training steps, a whole number of at least 1")
    method = resolve_method(method)
    spans: dict[str, tuple[int, int]] = {}
    sites = attention_sites(model)
    depths = num_layers_by_stack(sites)
    chosen = [site for site in sites if method.selects(site.layer, depths[site.stack])]
    for site in chosen:
        span = _span(site, chosen, method, steps)
        for part, projection in site.projections():
            if part in method.freeze:
                spans |= dict.fromkeys(projection.names(), span)
    return Plan(spans, steps)


def _span(site: Site, chosen: list[Site], method: Method, steps: int) -> tuple[int, int]:
    if method.thaw is None:
        return (_moment(method.freeze_at, steps) if method.freeze_at else 0), steps
    layers = sorted({other.layer for other in chosen if other.stack == site.stack})
    turn = layers.index(site.layer) if method.thaw.order == "first_first" else len(layers) - 1 - layers.index(site.layer)
    share = turn / (len(layers) - 1) if len(layers) > 1 else 0.0
    return 0, _moment(method.thaw.start + share * (method.thaw.end - method.thaw.start), steps)


def _moment(fraction: float, steps: int) -> int:
    """Return the step at a fraction of training, after the first update and before the last one where there are two."""
    return max(1, min(steps - 1, round(fraction * steps)))


def freeze_as_of(model: nn.Module, method: Method, *, seed: int, steps: int, step: int) -> Plan:
    """Freeze what the method freezes after `step` of `steps` updates; return the plan of what is frozen when."""
    freeze(model, method, seed=seed)
    plan = plan_of(model, method, steps=steps)
    hold(model, plan.frozen_at(max(0, step - 1)))
    return plan
