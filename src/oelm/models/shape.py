"""The shape of a GPT, and arithmetic with it: the work of a training step, and what a method can remove of it at most."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import Field, model_validator

from oelm.files import Strict

# Of a fresh classifier.
Architecture = Literal["bert", "t5", "bart"]
# AdamW reads and writes weight and two moments and reads the gradient: about this many operations an element.
OPTIMIZER_OPERATIONS = 16


class GPTConfig(Strict):
    """The shape of a GPT. `vocab_size` 0 means: that of the data's tokenizer, filled in when the run starts."""

    vocab_size: int = Field(ge=0, le=2**31)
    seq_len: int = Field(gt=0, le=2**20)
    model_dim: int = Field(gt=0, le=2**20)
    num_layers: int = Field(gt=0, le=2**12)
    num_heads: int = Field(gt=0, le=2**20)
    ff_dim: int = Field(gt=0, le=2**24)
    dropout: float = Field(ge=0.0, lt=1.0)
    # Rows of each head's Q and K where they are fewer than those of V: thin attention, the control of few parameters.
    qk_dim: int | None = Field(default=None, gt=0)
    # How many earlier tokens a short convolution adds to each one's embedding, before the first layer.
    short_conv: int = Field(default=0, ge=0, le=64)

    @model_validator(mode="after")
    def _heads_divide(self) -> GPTConfig:
        if self.model_dim % self.num_heads:
            raise ValueError(
                f"model_dim {self.model_dim} does not split into {self.num_heads} heads; "
                f"nearest head counts that do: {divisors_near(self.model_dim, self.num_heads)}"
            )
        if self.qk_dim is not None and self.qk_dim > self.head_dim:
            raise ValueError(f"qk_dim {self.qk_dim} is wider than a head ({self.head_dim}); it is there to make Q and K thin")
        return self

    @property
    def head_dim(self) -> int:
        return self.model_dim // self.num_heads

    @property
    def qk_rows(self) -> int:
        """How many rows Q and K have in all heads together."""
        return self.num_heads * (self.head_dim if self.qk_dim is None else self.qk_dim)


# Measured on a 2-core CPU: products with a 50k vocabulary need 300 rows or more to be fast, and the losses of a 4k
# vocabulary take half the time if a chunk's logits fit in the cache.
_MOST_ELEMENTS, _MOST_ROWS = 2**24, 2**10


def chunk_rows(vocab_size: int) -> int:
    """Return how many tokens' logits are computed at a time."""
    return max(16, min(_MOST_ROWS, _MOST_ELEMENTS // vocab_size))


def divisors_near(number: int, wanted: int) -> str:
    """Return the divisors of `number` just below and just above `wanted`, as words."""
    divisors = [n for n in range(1, number + 1) if number % n == 0]
    below, above = [n for n in divisors if n < wanted][-1:], [n for n in divisors if n > wanted][:1]
    return ", ".join(map(str, below + above))


@dataclass(frozen=True)
class StepWork:
    """Floating-point operations of one training step."""

    matmuls: int
    optimizer: int

    @property
    def total(self) -> int:
        return self.matmuls + self.optimizer


def step_work(model: GPTConfig, *, batch_size: int, is_classifier: bool = False) -> StepWork:
    """Count the matrix products of forward and backward, and the optimizer's update.

    A classifier is a BERT: it reads all tokens of an example, and multiplies by a pooler instead of the vocabulary.
    """
    tokens, width = batch_size * model.seq_len, model.model_dim
    block = 2 * width * (model.qk_rows + width + model.ff_dim)
    head = model.vocab_size * width
    # A product costs 2 operations a weight and token forward, and twice that backward (input and weight gradients).
    matmuls = 6 * tokens * model.num_layers * block + 6 * (batch_size * width**2 if is_classifier else tokens * head)
    # Scores and mixed values: half of T x T where they are causal; the backward pass costs twice the forward.
    pairs = tokens * model.seq_len * (2 if is_classifier else 1)
    matmuls += 3 * model.num_layers * pairs * (model.qk_rows + width)
    weights = model.num_layers * block + head + model.seq_len * width + (width**2 if is_classifier else 0)
    return StepWork(matmuls, OPTIMIZER_OPERATIONS * weights)


def method_work(
    model: GPTConfig,
    method: Mapping[str, Any] | Iterable[tuple[str, Any]],
    *,
    batch_size: int,
    micro_batches: int = 1,
    layers: Collection[int] | None = None,
    learn_layers: Collection[int] | None = None,
    is_classifier: bool = False,
) -> StepWork:
    """Count the operations of the first step, in which a method freezes or skips Q and K.

    `method` is a Method or its plain data. `layers` are the numbers of the layers that it concerns, `learn_layers` those in
    which something learns on top; None means all. A dense frozen projection leaves out its weight gradient and its update.
    One whose `init` is axes leaves out its three products as well, because a selection replaces it.
    """
    fields = dict(method)
    whole = step_work(model, batch_size=batch_size, is_classifier=is_classifier)
    everywhere = range(model.num_layers)
    concerned = everywhere if layers is None else layers
    learning = everywhere if learn_layers is None else learn_layers
    # What `freeze_at` freezes later is free in the first step.
    parts = () if fields.get("freeze_at") else tuple(fields.get("freeze") or ())
    tokens = batch_size * model.seq_len
    products = updated = 0
    for layer in concerned:
        for part in parts:
            on_top = _learnt_on_top(model, fields, part) if layer in learning else _NOTHING
            products += _saved_products(model, on_top, fields.get("init") == "axes", tokens=tokens, times=micro_batches)
            updated += model.model_dim * model.qk_rows - on_top.parameters
    return StepWork(whole.matmuls - products, whole.optimizer - OPTIMIZER_OPERATIONS * updated)


@dataclass(frozen=True)
class WeightCounts:
    """Parameters of a GPT under a method, at its start; `selected` are those that slices replace, stored nowhere."""

    total: int
    frozen: int
    selected: int

    @property
    def trainable(self) -> int:
        return self.total - self.frozen


def weight_counts(
    model: GPTConfig,
    method: Mapping[str, Any] | Iterable[tuple[str, Any]],
    *,
    layers: Collection[int] | None = None,
    learn_layers: Collection[int] | None = None,
) -> WeightCounts:
    """Count parameters as an audit of the model does, without making one; arguments as of `method_work`."""
    fields, width = dict(method), model.model_dim
    size = width * model.qk_rows
    # Q and K, V and the output, the feed-forward with its biases, two norms.
    block = 2 * size + 2 * width**2 + 2 * width * model.ff_dim + model.ff_dim + 5 * width
    whole = (model.vocab_size + model.seq_len + model.short_conv + 2) * width + model.num_layers * block
    parts = () if fields.get("freeze_at") else tuple(fields.get("freeze") or ())
    concerned, learning = (range(model.num_layers) if chosen is None else chosen for chosen in (layers, learn_layers))
    held = len(concerned) * len(parts) * size
    learnt = (_learnt_on_top(model, fields, part) for layer in concerned if layer in learning for part in parts)
    selected = held if fields.get("init") == "axes" else 0
    return WeightCounts(whole - selected + sum(each.parameters for each in learnt), held - selected, selected)


@dataclass(frozen=True)
class _OnTop:
    """What learns on top of one frozen projection: the rank of its correction, the rows of its gain, all parameters."""

    rank: int
    gain_rows: int
    parameters: int


_NOTHING = _OnTop(0, 0, 0)


def _learnt_on_top(model: GPTConfig, method: Mapping[str, Any], part: str) -> _OnTop:
    rows, width = model.qk_rows, model.model_dim
    # The rank that `method.kind.rank_within` gives; a test compares them.
    rank = int(method.get("correction", 0.0) * rows * width / (rows + width))
    # A gain learns on queries only.
    gain = method.get("gain", "none") if part == "q" else "none"
    gain_rows = {"none": 0, "head": 1, "matrix": rows // model.num_heads}[gain]
    return _OnTop(rank, gain_rows, rank * (rows + width) + model.num_heads * gain_rows**2)


def _saved_products(model: GPTConfig, on_top: _OnTop, is_selection: bool, *, tokens: int, times: int) -> int:
    """Return the operations in products that one frozen projection saves a step of so many micro-batches; below 0, costs."""
    size = model.model_dim * model.qk_rows
    matrix_rows = on_top.gain_rows if on_top.gain_rows > 1 else 0
    if is_selection:
        # What learns on top works on the selected output here: each of its products forward and twice backward.
        own = on_top.rank * (model.qk_rows + model.model_dim) + model.qk_rows * matrix_rows
        return 6 * tokens * (size - own)
    if on_top == _NOTHING:
        return 2 * tokens * size
    # On a dense weight the gradient of the whole is needed, so nothing is saved. The weight is adjusted once a micro-batch:
    # one product forward, and one backward for each factor that has a gradient.
    passes = 3 * on_top.rank + (3 if on_top.rank else 2) * matrix_rows
    return -2 * times * passes * size
