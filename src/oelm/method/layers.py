"""Layers that stand in for a linear one whose rows are frozen: a slice of its input, and a small trainable part on top.

H heads  K head_dim  D model_dim  E all heads' rows  R rank
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from oelm.errors import MethodError
from oelm.method.frames import axis_rows, sample_gaussian, whole
from oelm.method.method import Gain, rank_within

if TYPE_CHECKING:
    from oelm.method.sites import HeadProjection

GAIN, CORRECTION_IN, CORRECTION_OUT = "gain", "correction_in", "correction_out"
LEARNT = (GAIN, CORRECTION_IN, CORRECTION_OUT)
# In a file whose weights and biases have what was learnt folded in: the frozen ones, without it.
FROZEN = {"weight": "frozen_weight", "bias": "frozen_bias"}
# More pieces than this are gathered by index: copying them one by one would cost more.
_MOST_RUNS = 64
_IS_COMPACT: ContextVar[bool] = ContextVar("is_compact", default=False)


def class_path(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


class Selection(nn.Module):
    """Replaces a linear layer whose rows are coordinates: it picks them from its input and stores no weight.

    What learns on top is added to its output. `state_dict` has the layer's own names and dense numbers; inside
    `compact_states` it has the coordinates instead. `dense` gives the layer back.
    """

    index: Tensor
    like: Tensor

    def __init__(self, layer: nn.Module, index_HK: Tensor, *, scale: float, is_transposed: bool, lends: bool = False) -> None:
        super().__init__()
        # Whether the reader of the output never writes to it, so that it may be a view of the input.
        self.lends = lends
        weight = layer.get_parameter("weight")
        self.out_features, self.in_features = weight.mT.shape if is_transposed else weight.shape
        self.scale, self.is_transposed = scale, is_transposed
        self.has_bias = layer._parameters.get("bias") is not None
        self.register_buffer("index", index_HK.flatten().to(weight.device), persistent=False)
        # Follows the model's casts and moves, so that what is saved and thawed has its dtype and device.
        self.register_buffer("like", weight.detach().new_empty(0), persistent=False)
        self.runs = consecutive_runs(index_HK.flatten().tolist())
        keep_shell(self, layer)
        self.register_state_dict_post_hook(_save)
        self.register_load_state_dict_pre_hook(_load)

    def forward(self, x_BTD: Tensor) -> Tensor:
        if torch.is_autocast_enabled(x_BTD.device.type):
            # As the linear layers next to it do.
            x_BTD = x_BTD.to(torch.get_autocast_dtype(x_BTD.device.type))
        own = self._parameters
        picked_BTE = self._picked(x_BTD)
        if (into_RD := own.get(CORRECTION_IN)) is not None:
            out_ER = own[CORRECTION_OUT]
            assert out_ER is not None
            # Added by the product itself: one pass over the output less.
            low_NR = F.linear(x_BTD, into_RD).flatten(0, -2)
            picked_BTE = torch.addmm(picked_BTE.flatten(0, -2), low_NR, out_ER.mT).view(picked_BTE.shape)
        if (gain_HKK := own.get(GAIN)) is None:
            return picked_BTE
        picked_BTHK = picked_BTE.unflatten(-1, (len(gain_HKK), -1))
        if gain_HKK.shape[-1] == 1:
            return (picked_BTHK * gain_HKK.squeeze(-1)).flatten(-2)
        return torch.einsum("...hj,hjk->...hk", picked_BTHK, gain_HKK).flatten(-2)

    def _picked(self, x_BTD: Tensor) -> Tensor:
        if len(self.runs) > _MOST_RUNS:
            picked_BTE = x_BTD.index_select(-1, self.index)
        elif len(self.runs) == 2 and self.runs[1] == (0, self.runs[0][0]) and self.out_features == self.in_features:
            # All coordinates, rolled: backward this is one pass, where pieces would each fill a gradient with zeros.
            picked_BTE = x_BTD.roll(-self.runs[0][0], -1)
        else:
            pieces = [x_BTD.narrow(-1, start, length) for start, length in self.runs]
            picked_BTE = pieces[0] if len(pieces) == 1 else torch.cat(pieces, -1)
            if len(pieces) == 1 and not self.lends:
                # A product in place on the queries would change what the layer reads.
                picked_BTE = picked_BTE.clone()
        return picked_BTE if self.scale == 1 else picked_BTE * self.scale

    @property
    def coordinates(self) -> list[int]:
        """The picked coordinates as plain integers, known on the meta device too."""
        return [first + n for first, length in self.runs for n in range(length)]

    @property
    def is_consistent(self) -> bool:
        """Whether the pieces that are picked are those of the stored coordinates."""
        return self.index.is_meta or self.runs == consecutive_runs(self.index.tolist())

    def names(self, path: str) -> tuple[str, ...]:
        """Return the full names of the weight, and the bias, that this replaces; `path` is its own in the model."""
        return tuple(f"{path}.{kind}" if path else kind for kind in (("weight", "bias") if self.has_bias else ("weight",)))

    def _apply(self, fn: Any, recurse: bool = True) -> Selection:
        was_meta = self.index.is_meta
        super()._apply(fn, recurse)
        if was_meta and not self.index.is_meta:
            # to_empty gives memory without numbers.
            self._refill(self.index.device)
        return self

    def _refill(self, device: torch.device) -> None:
        self.index = torch.tensor(self.coordinates, dtype=torch.int64, device=device)

    def rows_ED(self) -> Tensor:
        """Return the dense weight that this replaces, without what learnt on top."""
        if self.index.is_meta or self.like.is_meta:
            return self.like.new_empty(self.out_features, self.in_features)
        return axis_rows(self.index, self.in_features, scale=self.scale).to(self.like.dtype)

    def folded(self) -> dict[str, Tensor]:
        """Return weight and bias including what learnt on top, in the layer's own layout."""
        weight_ED = self.rows_ED()
        if self._parameters and not weight_ED.is_meta:
            folded_ED, _ = adjusted(weight_ED.cpu().double(), None, in_float64(self))
            weight_ED = folded_ED.to(weight_ED)
        return self._laid_out(weight_ED)

    def bare(self) -> dict[str, Tensor]:
        """Return weight and bias without what learnt on top, in the layer's own layout."""
        return self._laid_out(self.rows_ED())

    def _laid_out(self, weight_ED: Tensor) -> dict[str, Tensor]:
        tensors = {"weight": weight_ED.mT.contiguous() if self.is_transposed else weight_ED}
        return tensors | ({"bias": self.like.new_zeros(self.out_features)} if self.has_bias else {})

    def dense(self, *, learns: bool) -> nn.Module:
        """Return the layer this one replaces, with plain weights and a bias of zeros where it has one."""
        shell: nn.Module = vars(self)["_shell"]
        for name, tensor in self.folded().items():
            shell.register_parameter(name, nn.Parameter(tensor, requires_grad=learns))
        return shell.train(self.training)

    def choose(self, index_E: Tensor) -> None:
        """Pick these coordinates from now on; raise MethodError where they do not fit the input."""
        index_E = index_E.cpu()
        is_right = index_E.shape == self.index.shape and not index_E.is_floating_point() and index_E.dtype != torch.bool
        if not is_right or bool(((index_E < 0) | (index_E >= self.in_features)).any()):
            raise MethodError(
                f"a selection of {self.out_features} among {self.in_features} coordinates cannot take "
                f"{index_E.dtype} numbers of shape {tuple(index_E.shape)}: damaged, or of another model"
            )
        self.runs = consecutive_runs(index_E.tolist())
        if not self.index.is_meta:
            self.index.copy_(index_E)


def keep_shell(stand_in: nn.Module, layer: nn.Module) -> None:
    """Keep the replaced layer, without its weights, on the module that replaces it, to be given back later."""
    # Past nn.Module.__setattr__: meanwhile it is no part of the model.
    object.__setattr__(stand_in, "_shell", layer)
    for name in ("weight", "bias"):
        if name in layer._parameters:
            layer._parameters[name] = None
    stand_in.train(layer.training)


def in_float64(module: nn.Module) -> dict[str, Tensor]:
    """Return a module's own parameters in float64, on the CPU: not every device has float64."""
    return {name: whole(p.detach()).cpu().double() for name, p in module._parameters.items() if p is not None}


def adjusted(weight_ED: Tensor, bias_E: Tensor | None, learnt: Mapping[str, Tensor]) -> tuple[Tensor, Tensor | None]:
    """Return weight and bias with what learnt on top: first the correction, then the gain."""
    if CORRECTION_IN in learnt:
        weight_ED = torch.addmm(weight_ED, learnt[CORRECTION_OUT], learnt[CORRECTION_IN])
    if (gain_HKK := learnt.get(GAIN)) is None:
        return weight_ED, bias_E
    weight_ED = _by_head(gain_HKK, weight_ED)
    return weight_ED, bias_E if bias_E is None else _by_head(gain_HKK, bias_E.unsqueeze(-1)).squeeze(-1)


def _by_head(gain_HKK: Tensor, rows_ED: Tensor) -> Tensor:
    """Return every head's rows times its gain, a number or a matrix."""
    rows_HKD = rows_ED.unflatten(0, (len(gain_HKK), -1))
    return (rows_HKD * gain_HKK if gain_HKK.shape[-1] == 1 else gain_HKK.mT @ rows_HKD).flatten(0, 1)


def consecutive_runs(numbers: list[int]) -> tuple[tuple[int, int], ...]:
    """Return the runs of consecutive numbers: the first one and the length of each."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == sum(runs[-1]):
            runs[-1][1] += 1
        else:
            runs.append([number, 1])
    return tuple((start, length) for start, length in runs)


@contextmanager
def compact_states() -> Iterator[None]:
    """Within this block `state_dict` has a selection's coordinates instead of the dense weight it replaces."""
    token = _IS_COMPACT.set(True)
    try:
        yield
    finally:
        _IS_COMPACT.reset(token)


def _save(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    assert isinstance(module, Selection)
    tensors = {"index": module.index} if _IS_COMPACT.get() else module.bare()
    state |= {prefix + name: tensor for name, tensor in tensors.items()}


def _load(
    module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any, strict: bool, missing: list[str], *others: Any
) -> None:
    assert isinstance(module, Selection)
    unfold_loaded(module, state, prefix)
    given = {name: state.pop(f"{prefix}{name}") for name in ("index", "weight", "bias") if f"{prefix}{name}" in state}
    index, weight = given.pop("index", None), given.get("weight")
    if index is None and weight is None:
        missing.append(f"{prefix}weight")
    if index is not None and not index.is_meta:
        module.choose(index)
    is_assigned = metadata.get("assign_to_params_buffers", False)
    for name, tensor in given.items():
        if not tensor.is_meta and not _is_selected(module, name, tensor, is_assigned=is_assigned):
            raise MethodError(
                f"{prefix}{name} cannot be loaded: this model picks coordinates there (init 'axes'), and the given numbers are "
                "not that selection. Call oelm.thaw(model) first to load any weight, or build the model with the same seed"
            )
    source = weight if weight is not None else index
    if is_assigned and source is not None and not source.is_meta:
        dtype = module.like.dtype if weight is None else weight.dtype
        module.like = torch.empty(0, dtype=dtype, device=source.device)
        module._refill(source.device)
    elif not is_assigned and not module.index.is_meta and source is not None:
        module._refill(module.index.device)


def _is_selected(module: Selection, name: str, given: Tensor, *, is_assigned: bool) -> bool:
    """Whether a loaded weight or bias is that of the selection, in the dtype that it will have."""
    given = whole(given)
    dtype = given.dtype if is_assigned or module.like.is_meta else module.like.dtype
    if name == "bias":
        return given.shape == (module.out_features,) and not bool(given.to(dtype).any())
    # From the pieces: the stored coordinates may be on the meta device, or not filled yet.
    coordinates = torch.tensor(module.coordinates, device=given.device)
    wanted_ED = axis_rows(coordinates, module.in_features, scale=module.scale).to(dtype)
    return torch.equal(given.to(dtype), wanted_ED.mT if module.is_transposed else wanted_ED)


def unfold_loaded(module: nn.Module, state: dict[str, Any], prefix: str) -> None:
    """Take the frozen weight of a module with something on top from a state dict that has the folded one too.

    Raises MethodError where the state dict has only plain weights.
    """
    for name, frozen in FROZEN.items():
        if prefix + frozen in state:
            state[prefix + name] = state.pop(prefix + frozen)
    missing = [name for name in LEARNT if module._parameters.get(name) is not None and prefix + name not in state]
    # Without a weight, these are somebody's other layers. With one it is either folded or never had anything on top:
    # together with what this model learnt it would be neither.
    if missing and prefix + "weight" in state:
        raise MethodError(
            f"these weights have none of what learns on top of {prefix.rstrip('.')}: {', '.join(missing)}. They are plain, "
            "or it was folded into them: load them into a fresh model, before oelm.freeze; to resume, load a "
            "state_dict of this model or a Trainer's checkpoint"
        )


def selections(model: nn.Module) -> dict[str, Selection]:
    """Return every selection in the model under its path."""
    found = model.named_modules(remove_duplicate=False)
    return {path: module for path, module in found if isinstance(module, Selection)}


# Their output is the input times the weight, plus the bias: to change the weight is to change everything.
_LINEAR = ("torch.nn.modules.linear.Linear", "transformers.pytorch_utils.Conv1D")


class Adjusted(nn.Module):
    """A linear map into heads with something that learns on top of its frozen weight; `plain` is its class without.

    The weight is adjusted first, by products that are small compared with the map itself, and then used once: training
    costs as much as with a plain layer, and folding is the same arithmetic.
    """

    plain: type[nn.Module]

    def forward(self, x_BTD: Tensor) -> Tensor:
        return F.linear(x_BTD, *self._adjusted({name: p for name, p in self._parameters.items() if p is not None}))

    def folded(self) -> dict[str, Tensor]:
        """Return weight and bias including what learnt on top, in the layer's own layout, in float64 on the CPU."""
        weight_ED, bias_E = self._adjusted(in_float64(self))
        return {"weight": weight_ED if self.plain is nn.Linear else weight_ED.mT} | ({} if bias_E is None else {"bias": bias_E})

    def _adjusted(self, own: dict[str, Any]) -> tuple[Tensor, Tensor | None]:
        weight_ED = own["weight"] if self.plain is nn.Linear else own["weight"].mT
        return adjusted(weight_ED, own.get("bias"), own)

    def __reduce__(self) -> tuple[Any, ...]:
        # Its class is made on demand and cannot be found by its name.
        return _unpickled, (self.plain,), self.__getstate__()

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *others: Any) -> None:
        unfold_loaded(self, state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *others)


@cache
def _adjusted_class(plain: type[nn.Module]) -> type[Adjusted]:
    return type(f"Adjusted{plain.__name__}", (Adjusted, plain), {"plain": plain})


def _unpickled(plain: Any) -> Adjusted:
    kind = _adjusted_class(plain)
    return kind.__new__(kind)


def learnt_on_top(name: str) -> str | None:
    """Return 'gain' or 'correction' where a parameter of this name is one that we put on top of a frozen projection."""
    last = name.rpartition(".")[2]
    return {GAIN: "gain", CORRECTION_IN: "correction", CORRECTION_OUT: "correction"}.get(last)


def add_gain(projection: HeadProjection, kind: Gain) -> None:
    """Give a query projection a learnt gain that starts at the identity: one number per head, or a K x K matrix per head."""
    if kind == "none":
        return
    num_heads, head_dim, _ = projection.shape_HKD
    if kind == "head":
        start = torch.ones(num_heads, 1, 1)
    else:
        start = torch.eye(head_dim).expand(num_heads, head_dim, head_dim).clone()
    _register(projection, {GAIN: start})


def add_correction(projection: HeadProjection, share: float, generator: torch.Generator) -> None:
    """Give a projection a learnt correction of low rank that starts at zero (arXiv 2106.09685)."""
    if share == 0:
        return
    num_heads, head_dim, model_dim = projection.shape_HKD
    rank = correction_rank(projection, share)
    # Rows of norm one, like those of the frames.
    into_RD = sample_gaussian(1, rank, model_dim, std=model_dim**-0.5, generator=generator)[0]
    _register(projection, {CORRECTION_IN: into_RD, CORRECTION_OUT: torch.zeros(num_heads * head_dim, rank)})


def correction_rank(projection: HeadProjection, share: float) -> int:
    """Return the highest rank whose two factors need at most this share of the weight's numbers; it may be 0."""
    num_heads, head_dim, model_dim = projection.shape_HKD
    return rank_within(share, num_heads * head_dim, model_dim)


def _register(projection: HeadProjection, starts: dict[str, Tensor]) -> None:
    module, selection = projection.module, projection.selection
    like = projection.weight if selection is None else selection.like
    for name, start in starts.items():
        module.register_parameter(name, nn.Parameter(start.to(like.device, like.dtype)))
    if selection is None:
        # Its class, not a wrapper around it: the names of its weights stay, and copies of the model work.
        plain: Any = _plain_class(module)
        object.__setattr__(module, "__class__", _adjusted_class(plain))


def can_learn_on(projection: HeadProjection) -> bool:
    """Whether something may learn on top of the projection: it is a linear layer, or will be when its weight is split."""
    if projection.selection is not None:
        return True
    return projection.is_fused or class_path(_plain_class(projection.module)) in _LINEAR


def _plain_class(module: nn.Module) -> type[nn.Module]:
    return module.plain if isinstance(module, Adjusted) else type(module)


def learning_modules(model: nn.Module) -> dict[str, Adjusted | Selection]:
    """Return the modules on top of which something learns, by every path that leads to them."""
    return {
        path: module
        for path, module in model.named_modules(remove_duplicate=False)
        if isinstance(module, Adjusted | Selection) and any(name in LEARNT for name in module._parameters)
    }


def fold_learnt(module: Adjusted) -> None:
    """Put what learnt on top into weight and bias, in float64, and remove it."""
    if not module.get_parameter("weight").is_meta:
        for name, tensor in module.folded().items():
            module.get_parameter(name).detach().copy_(tensor)
    for name in LEARNT:
        module._parameters.pop(name, None)
    object.__setattr__(module, "__class__", module.plain)
