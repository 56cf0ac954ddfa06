"""The known attentions, by the path of their class, so that no library is imported for them; and how to add another."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

from torch import nn
from torch.nn.utils import parametrize

from oelm.errors import SiteError
from oelm.method.axes import Selection
from oelm.method.fused import Order

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
    layout: Order = "rows"
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
        for field, known in (("layout", get_args(Order)), ("parts", get_args(FusedParts)), ("logits", get_args(Logits))):
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


def class_path(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


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
