"""Where Q and K are: one `Site` per attention, found by the class of its module; and the architectures that are known.

Classes are known by their paths, so that no library is imported for them. `register_sites` adds another attention.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal, get_args

from torch import Tensor, nn
from torch.nn.utils import parametrize

from oelm.errors import MethodError, SiteError
from oelm.method.frames import whole
from oelm.method.fused import Layout, SplitProjection, WeightOrder
from oelm.method.layers import Selection, class_path
from oelm.method.mha import BIAS, WEIGHT, SplitInProjection, in_projection_layout, part_bias, part_weight

OUR_ATTENTION = "oelm.models.gpt.Attention"
FusedParts = Literal["qkv", "kv", "qk"]
# What an attention does to queries and keys before it multiplies them.
Logits = Literal["unknown", "product", "rotary", "normed"]


@dataclass(frozen=True)
class SitePaths:
    """Where an attention module keeps its query and key projections, and how many heads each has.

    `q`, `k` and `fused` are paths, inside the module, of layers with a `weight` and maybe a `bias`. Where one layer holds
    several projections, `fused` is its path, `parts` says which in which order, and `layout` how they lie: 'rows' as in
    nn.Linear, 'columns' where weights are (model_dim, heads * head_dim), 'per_head_rows' where the parts of one head are
    adjacent. `num_kv_heads` 0 means as many as `num_heads`. `inner_lists` counts the numbered lists between a layer of
    the model and its attention: their numbers are not the layer's. `logits` is 'product' where a logit is the product of a
    query and a key, times a number and plus terms that depend on neither; 'rotary' where positions rotate them first,
    'normed' where they are normalised.
    """

    q: str = ""
    k: str = ""
    num_heads: int = 0
    num_kv_heads: int = 0
    fused: str = ""
    parts: FusedParts = "qkv"
    layout: WeightOrder = "rows"
    inner_lists: int = 0
    logits: Logits = "unknown"

    def __post_init__(self) -> None:
        are_numbers = all(type(number) is int for number in (self.num_heads, self.num_kv_heads, self.inner_lists))
        if not are_numbers or self.num_heads < 1 or self.num_kv_heads < 0:
            raise SiteError(
                f"SitePaths: num_heads is {self.num_heads!r}, num_kv_heads {self.num_kv_heads!r}, inner_lists "
                f"{self.inner_lists!r}; give the number of heads as a whole number"
            )
        if self.num_heads % self.kv_heads:
            raise SiteError(
                f"SitePaths: {self.num_heads} query heads cannot share {self.num_kv_heads} key heads evenly; give a divisor"
            )
        for field, known in (("layout", get_args(WeightOrder)), ("parts", get_args(FusedParts)), ("logits", get_args(Logits))):
            if getattr(self, field) not in known:
                raise SiteError(f"SitePaths: {field} is {getattr(self, field)!r}; give one of: {', '.join(known)}")
        for part, path in (("q", self.q), ("k", self.k)):
            if bool(path) == bool(self.fused and part in self.parts):
                raise SiteError(f"SitePaths: say once where {part} is: {part}='path', or fused='path' with {part} in its parts")
        if self.q and self.q == self.k:
            raise SiteError(f"SitePaths: q and k are both {self.q!r}; where one layer holds both, say fused={self.q!r}")
        if self.layout == "per_head_rows" and self.kv_heads != self.num_heads:
            raise SiteError("SitePaths: in layout 'per_head_rows' every head has q, k and v; num_kv_heads must not differ")

    @property
    def kv_heads(self) -> int:
        return self.num_kv_heads or self.num_heads


Adapter = Callable[[nn.Module], SitePaths]


@dataclass(frozen=True)
class Known:
    """The function that finds Q and K in attentions of one class, and the usual name of the architecture."""

    adapter: Adapter
    label: str


ADAPTERS: dict[str, Known] = {}


def register_sites(attention: str | type[nn.Module]) -> Callable[[Adapter], Adapter]:
    """Register a function that finds Q and K in attention modules of a class (itself, or 'package.module.Class').

    It applies to derived classes too.
    """
    if not isinstance(attention, str | type):
        raise SiteError(f"register_sites takes a class or 'package.module.Class', not {attention!r}")
    path = attention if isinstance(attention, str) else class_path(attention)

    def register(adapter: Adapter) -> Adapter:
        if not callable(adapter):
            raise SiteError(f"register_sites: {adapter!r} cannot be called; give a function of the module")
        ADAPTERS[path] = Known(adapter, label=path.rpartition(".")[2])
        return adapter

    return register


def find_adapter(module: nn.Module) -> Adapter | None:
    """Return the function that finds Q and K in this module, by its class or the nearest one it derives from."""
    return next((ADAPTERS[path].adapter for path in map(class_path, type(module).__mro__) if path in ADAPTERS), None)


def no_attention_found(model: nn.Module) -> SiteError:
    """Return the error that names the model's type, the known architectures, and the lines that describe another."""
    model_type = getattr(getattr(model, "config", None), "model_type", None)
    kind = f"{type(model).__name__} (model type '{model_type}')" if model_type else type(model).__name__
    known = ", ".join([*dict.fromkeys(known.label for known in ADAPTERS.values()), "torch.nn.MultiheadAttention"])
    return SiteError(
        f"no attention found in {kind}: none of its modules is of a known class. Known: {known}. "
        "Describe yours, then call again (docs/architectures.md):\n"
        "    @oelm.register_sites(MyAttention)  # the class, or 'package.module.MyAttention'\n"
        "    def _(module):\n"
        "        return oelm.SitePaths(q='to_q', k='to_k', num_heads=module.heads, num_kv_heads=module.kv_heads)\n"
        "    # one layer for all three: oelm.SitePaths(fused='qkv', num_heads=module.heads)"
    )


def own_parameter(module: nn.Module, name: str, *, path: str) -> nn.Parameter:
    """Return a parameter that a layer holds itself; raise SiteError where it is computed, quantized or removed."""
    parameter, kind = module._parameters.get(name), class_path(type(module))
    if isinstance(parameter, nn.parameter.UninitializedParameter):
        raise SiteError(f"{path} ({kind}) has no weights yet; run the model once, then call oelm.freeze")
    if parameter is not None:
        return parameter
    if parametrize.is_parametrized(module) or any(key.endswith(("_g", "_orig")) for key in module._parameters):
        reason = (
            "it is parametrized, so every forward pass computes it again; remove the parametrization or pruning, or call "
            "oelm.freeze before it"
        )
    elif "quantized" in kind:
        reason = "it is quantized; call oelm.freeze before quantizing"
    else:
        reason = "another library wrapped it; call oelm.freeze before that"
    raise SiteError(f"{path} ({kind}) does not hold the parameter '{name}' itself: {reason}")


@dataclass(frozen=True)
class ParameterSlot:
    """The name of a parameter in its module, and how the parts lie in it."""

    parameter: str
    layout: Layout


@dataclass(frozen=True)
class HeadProjection:
    """One linear map into heads, alone in its module or one part of a fused one. `path` is the module's in the model."""

    name: str
    path: str
    module: nn.Module
    part: str
    weight_slot: ParameterSlot
    bias_slot: ParameterSlot

    @property
    def num_heads(self) -> int:
        return dict(self.weight_slot.layout.heads)[self.part]

    @property
    def is_fused(self) -> bool:
        """Whether this projection shares a parameter with others, so that it cannot be frozen before they are split."""
        has_fused_bias = self.bias is not None and self.bias_slot.layout.is_fused
        return self.weight_slot.layout.is_fused or has_fused_bias

    @property
    def is_in_torch(self) -> bool:
        """Whether it is computed inside torch.nn.MultiheadAttention, where no layer can be replaced."""
        return isinstance(self.module, nn.MultiheadAttention)

    @property
    def selection(self) -> Selection | None:
        """The module that picks coordinates instead of multiplying by a weight, if any."""
        return self.module if isinstance(self.module, Selection) else None

    @property
    def is_frozen(self) -> bool:
        return self.selection is not None or not self.weight.requires_grad

    @property
    def weight(self) -> nn.Parameter:
        """The parameter that holds the weight, and where it is fused, other weights too; a selection has none."""
        return own_parameter(self.module, self.weight_slot.parameter, path=self.path)

    @property
    def bias(self) -> nn.Parameter | None:
        return self.module._parameters.get(self.bias_slot.parameter)

    def weight_HKD(self) -> Tensor:
        """Return the weight by heads: (H, K, D); a view, but of a selection the dense weight it replaces."""
        if self.selection is not None:
            return self.selection.rows_ED().unflatten(0, (self.num_heads, -1))
        return self.weight_slot.layout.take(whole(self.weight.detach()), self.part)

    @property
    def shape_HKD(self) -> tuple[int, int, int]:
        """The numbers of heads, rows per head and columns of the weight."""
        if self.selection is not None:
            return self.num_heads, self.selection.out_features // self.num_heads, self.selection.in_features
        num_heads, head_dim, columns = self.weight_HKD().shape
        return num_heads, head_dim, columns

    def bias_HK(self) -> Tensor | None:
        """Return the bias by heads, as a view: (H, K)."""
        return None if self.bias is None else self.bias_slot.layout.take(whole(self.bias.detach()), self.part)

    def write(self, weight_HKD: Tensor, bias_HK: Tensor | None = None) -> None:
        """Copy new rows, and a new bias where one is given, into the parameters in place, cast to their dtype."""
        self.weight_HKD().copy_(weight_HKD)
        own_bias_HK = self.bias_HK()
        if own_bias_HK is not None and bias_HK is not None:
            own_bias_HK.copy_(bias_HK)

    def names(self) -> tuple[str, ...]:
        """Return the full names of weight and bias in the model; for a selection, of those it replaces."""
        if self.selection is not None:
            return self.selection.names(self.path)
        return tuple(name for name, _ in self.parameters())

    def parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield weight and bias under their full names in the model, without a learnt gain; of a selection nothing."""
        if self.selection is not None:
            return
        yield _join(self.path, self.weight_slot.parameter), self.weight
        if self.bias is not None:
            yield _join(self.path, self.bias_slot.parameter), self.bias


@dataclass(frozen=True)
class Site:
    """One attention's Q and K: `name` is the attention module's path in the model, `block` that of its layer.

    `layer` counts from 0 within its `stack`: a decoder's layers are counted apart from the encoder's; where a model has
    one stack its name is empty. `key` names the site's draw of frames: stack, layer, and which of its attentions.
    """

    name: str
    block: str
    stack: str
    layer: int
    key: str
    q: HeadProjection
    k: HeadProjection
    logits: Logits

    def projections(self) -> Iterator[tuple[str, HeadProjection]]:
        yield "q", self.q
        yield "k", self.k


def require_model(model: object) -> None:
    """Raise MethodError where the argument is not a model but, say, its name or its class."""
    if not isinstance(model, nn.Module):
        hint = f", e.g. transformers.AutoModel.from_pretrained({model!r})" if isinstance(model, str) else ""
        raise MethodError(f"{model!r} is a {type(model).__name__}, not a model (torch.nn.Module); build or load it first{hint}")


def attention_sites(model: nn.Module) -> list[Site]:
    """Return the sites of every attention in the model, in the model's order; raise SiteError where none is known."""
    require_model(model)
    found: list[tuple[str, int, Logits, HeadProjection, HeadProjection]] = []
    for name, module in model.named_modules():
        adapter = find_adapter(module)
        if adapter is not None:
            paths = _paths(name, adapter, module)
            q, k = (_in_submodule(name, module, paths, part) for part in ("q", "k"))
            found.append((name, paths.inner_lists, paths.logits, q, k))
        elif isinstance(module, nn.MultiheadAttention):
            q, k = (_in_attention(name, module, part) for part in ("q", "k"))
            # torch's attention multiplies; bias_k, a key that it learns besides the projected ones, is in the queries' basis.
            found.append((name, 0, "product" if module.bias_k is None else "unknown", q, k))
    if not found:
        raise no_attention_found(model)
    blocks = _blocks([(name, inner_lists) for name, inner_lists, *_ in found])
    stacks = _stack_names([parent for parent, _, _ in blocks])
    sites: list[Site] = []
    for (name, _, logits, q, k), (_, block, layer), stack in zip(found, blocks, stacks, strict=True):
        _check_shapes(name, q, k)
        earlier = sum((site.stack, site.layer) == (stack, layer) for site in sites)
        key = _join(stack, f"{layer}.{earlier}" if earlier else str(layer))
        sites.append(Site(name, block, stack, layer, key, q, k, logits))
    return sites


def _paths(name: str, adapter: Adapter, module: nn.Module) -> SitePaths:
    try:
        paths = adapter(module)
    except SiteError as problem:
        raise SiteError(f"{name}: {problem}" if name else str(problem)) from None
    # Somebody else's code, which may raise anything; nothing has been changed yet.
    except Exception as problem:
        raise _not_paths(name, module, f"raised {type(problem).__name__}: {problem}") from problem
    if not isinstance(paths, SitePaths):
        raise _not_paths(name, module, f"gave {paths!r}")
    return paths


def _not_paths(name: str, module: nn.Module, what: str) -> SiteError:
    return SiteError(
        f"{name or 'the model'}: what is registered for {class_path(type(module))} {what}; it must return an oelm.SitePaths "
        "(docs/architectures.md)"
    )


def num_layers_by_stack(sites: list[Site]) -> dict[str, int]:
    """Return how many layers each stack has, by the highest number among its sites."""
    return {stack: 1 + max(site.layer for site in sites if site.stack == stack) for stack in {site.stack for site in sites}}


def _join(*parts: str) -> str:
    return ".".join(part for part in parts if part)


def _in_submodule(name: str, attention: nn.Module, paths: SitePaths, part: str) -> HeadProjection:
    """Return the projection that a submodule of the attention holds: alone, fused, or split by us."""
    is_fused = bool(paths.fused) and part in paths.parts
    inside = paths.fused if is_fused else {"q": paths.q, "k": paths.k}[part]
    heads = {"q": paths.num_heads, "k": paths.kv_heads, "v": paths.kv_heads}
    try:
        module = attention.get_submodule(inside)
    except AttributeError:
        children = ", ".join(child for child, _ in attention.named_children())
        raise SiteError(
            f"{class_path(type(attention))} has no layer '{inside}', where its SitePaths puts {part}; it has: {children}"
        ) from None
    projection = path = _join(name, inside)
    layout = Layout(((part, heads[part]),), "columns" if paths.layout == "columns" else "rows")
    if isinstance(module, SplitProjection):
        projection = path = _join(path, part)
        module, layout = module.get_submodule(part), Layout(layout.heads)
    elif is_fused:
        projection = _join(path, part)
        layout = Layout(tuple((each, heads[each]) for each in paths.parts), paths.layout)
    return HeadProjection(projection, path, module, part, ParameterSlot("weight", layout), ParameterSlot("bias", layout))


def _in_attention(name: str, module: nn.MultiheadAttention, part: str) -> HeadProjection:
    """Return the projection that nn.MultiheadAttention holds in its own parameters: packed, separate, or split by us."""
    packed, alone = in_projection_layout(module), Layout(((part, module.num_heads),))
    is_packed = module._parameters.get(WEIGHT) is not None
    weight = ParameterSlot(WEIGHT, packed) if is_packed else ParameterSlot(part_weight(part), alone)
    is_split = isinstance(module, SplitInProjection)
    bias = ParameterSlot(part_bias(part), alone) if is_split else ParameterSlot(BIAS, packed)
    return HeadProjection(_join(name, part), name, module, part, weight, bias)


def _check_shapes(name: str, q: HeadProjection, k: HeadProjection) -> None:
    for projection in (q, k):
        layout = projection.weight_slot.layout
        shape = (layout.total_heads, 1) if projection.selection is not None else layout.rows(projection.weight).shape
        if len(shape) != 2 or shape[0] % layout.total_heads:
            raise SiteError(
                f"{projection.name}: a weight of shape {tuple(projection.weight.shape)} does not hold {layout.total_heads} "
                f"heads of {' and '.join(layout.parts)} in layout '{layout.order}'; correct its SitePaths"
            )
    (num_heads, rows, _), (num_key_heads, key_rows, _) = q.shape_HKD, k.shape_HKD
    if rows != key_rows:
        raise SiteError(
            f"{name or 'the attention'}: a query head has {rows} rows ({num_heads} heads) and a key head {key_rows} "
            f"({num_key_heads} heads), so that they have no product; give num_kv_heads in its SitePaths if K has fewer heads"
        )


def _blocks(names: list[tuple[str, int]]) -> list[tuple[str, str, int]]:
    """Return, for each attention's name, the path of the list its layer is in, of the layer, and the layer's number."""
    numbers = []
    for name, inner_lists in names:
        found = list(re.finditer(r"(?:^|\.)(\d+)(?=\.|$)", name))
        numbers.append(found[: len(found) - inner_lists])
    # Wrappers number what they wrap: the layer is the first number in which sites differ, of a single site the last.
    columns = list(zip(*([match[1] for match in own] for own in numbers), strict=False))
    depth = next((n for n, column in enumerate(columns) if len(set(column)) > 1), len(columns) - 1)
    if depth < 0:
        # An attention outside any list: each is a layer, and all are one stack.
        return [("", name, position) for position, (name, _) in enumerate(names)]
    chosen = [own[depth] for own in numbers]
    return [(name[: at.start()], name[: at.end()], int(at[1])) for (name, _), at in zip(names, chosen, strict=True)]


def _stack_names(parents: list[str]) -> list[str]:
    """Return, for each layer, the name of the list of layers it is in, without what all those names share."""
    names = [parent.split(".") for parent in parents]
    if len(set(parents)) == 1:
        return ["" for _ in parents]
    while all(len(name) > 1 for name in names) and len({name[0] for name in names}) == 1:
        names = [name[1:] for name in names]
    while all(len(name) > 1 for name in names) and len({name[-1] for name in names}) == 1:
        names = [name[:-1] for name in names]
    return [".".join(name) for name in names]


def _number(module: nn.Module, name: str) -> int:
    value = getattr(module, name, None)
    if not isinstance(value, int):
        raise SiteError(
            f"{class_path(type(module))} has no number '{name}': this version of the library is not supported; describe it "
            "with oelm.register_sites (docs/architectures.md)"
        )
    return value


def _apart(q: str, k: str, *, head_dim: str, inner_lists: int = 0, logits: Logits = "product") -> Adapter:
    def adapter(module: nn.Module) -> SitePaths:
        size = _number(module, head_dim)
        heads = {path: _rows(module.get_submodule(path), path) // size for path in (q, k)}
        return SitePaths(q=q, k=k, num_heads=heads[q], num_kv_heads=heads[k], inner_lists=inner_lists, logits=logits)

    return adapter


def _rows(module: nn.Module, path: str) -> int:
    return module.out_features if isinstance(module, Selection) else own_parameter(module, "weight", path=path).shape[0]


def _our_gpt(module: nn.Module) -> SitePaths:
    return SitePaths(q="q", k="k", num_heads=_number(module, "num_heads"), logits="product")


def _gpt2(module: nn.Module) -> SitePaths:
    num_heads = _number(module, "num_heads")
    if module.is_cross_attention:
        return SitePaths(q="q_attn", fused="c_attn", parts="kv", layout="columns", num_heads=num_heads, logits="product")
    return SitePaths(fused="c_attn", layout="columns", num_heads=num_heads, logits="product")


def _gpt_neox(module: nn.Module) -> SitePaths:
    num_heads = _number(module.get_submodule("dense"), "in_features") // _number(module, "head_size")
    return SitePaths(fused="query_key_value", layout="per_head_rows", num_heads=num_heads, logits="rotary")


_bert = _apart("query", "key", head_dim="attention_head_size")
_bart = _apart("q_proj", "k_proj", head_dim="head_dim")
_llama = _apart("q_proj", "k_proj", head_dim="head_dim", logits="rotary")

_distilbert = _apart("q_lin", "k_lin", head_dim="attention_head_size")
_qwen3 = _apart("q_proj", "k_proj", head_dim="head_dim", logits="normed")
_t5 = _apart("q", "k", head_dim="key_value_proj_dim", inner_lists=1)

# Name, adapter, folder under transformers.models, and classes; attentions with the same parts share an adapter.
_TRANSFORMERS: tuple[tuple[str, Adapter, str, tuple[str, ...]], ...] = (
    ("BERT", _bert, "bert", ("BertSelfAttention", "BertCrossAttention")),
    ("RoBERTa", _bert, "roberta", ("RobertaSelfAttention", "RobertaCrossAttention")),
    ("XLM-RoBERTa", _bert, "xlm_roberta", ("XLMRobertaSelfAttention", "XLMRobertaCrossAttention")),
    ("ELECTRA", _bert, "electra", ("ElectraSelfAttention", "ElectraCrossAttention")),
    ("DistilBERT", _distilbert, "distilbert", ("DistilBertSelfAttention",)),
    ("GPT-2", _gpt2, "gpt2", ("GPT2Attention",)),
    ("GPT-NeoX/Pythia", _gpt_neox, "gpt_neox", ("GPTNeoXAttention",)),
    ("OPT", _bart, "opt", ("OPTAttention",)),
    ("Llama", _llama, "llama", ("LlamaAttention",)),
    ("Mistral", _llama, "mistral", ("MistralAttention",)),
    ("Qwen2", _llama, "qwen2", ("Qwen2Attention",)),
    ("Qwen3", _qwen3, "qwen3", ("Qwen3Attention",)),
    ("T5", _t5, "t5", ("T5Attention",)),
    ("BART", _bart, "bart", ("BartAttention",)),
    ("ViT", _bart, "vit", ("ViTAttention",)),
)

ADAPTERS[OUR_ATTENTION] = Known(_our_gpt, "our GPT")
for _label, _adapter, _folder, _classes in _TRANSFORMERS:
    _module = f"transformers.models.{_folder}.modeling_{_folder}"
    ADAPTERS |= {f"{_module}.{name}": Known(_adapter, _label) for name in _classes}
