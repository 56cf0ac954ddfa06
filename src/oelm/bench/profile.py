"""Where a step's time goes, against the machine's own speed at products; and greedy text, several arms in turn."""

from __future__ import annotations

import importlib.util
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from oelm.bench.interleave import against, interleave
from oelm.bench.speed import Product
from oelm.config import RunConfig
from oelm.data.tokenizer import train_bpe
from oelm.errors import OelmError
from oelm.method.apply import fold, freeze
from oelm.models.export import export_gpt, fits_gpt2
from oelm.models.generate import Sampling, generate, lay_out_by_columns
from oelm.models.gpt import GPT, build_gpt
from oelm.models.shape import GPTConfig
from oelm.stats import Ratio
from oelm.train.loss import chunk_rows

PARTS = ("products", "attention", "gelu", "norms", "head", "optimizer", "rest")
_STEP = "oelm step"
# By the beginning of an operation's name after 'aten::'.
_OPERATIONS = {
    "products": ("mm", "addmm", "linear", "matmul"),
    "attention": ("_scaled_dot_product", "scaled_dot_product", "bmm", "baddbmm", "_softmax", "softmax"),
    "gelu": ("gelu",),
    "norms": ("native_layer_norm", "layer_norm"),
    # Clipping belongs to the update: it reads the same memory.
    "optimizer": ("_fused_adam", "_foreach_", "linalg_vector_norm", "clamp"),
}


def gemm_speed(config: RunConfig, *, seconds: float) -> list[Product]:
    """Time each distinct product of a baseline's step alone, in turn for so many seconds.

    Forward, input gradient and weight gradient have the layouts of a linear layer. Q, K and V are one product, and the head
    is computed in the chunks of our loss.
    """
    micro_batches = config.batch_size // config.micro_batch_size
    operands: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
    described = []
    for name, rows, columns, inner, count in _layers(config.model, config.micro_batch_size * config.model.seq_len):
        x, weight, grad = torch.randn(rows, inner), torch.randn(columns, inner), torch.randn(rows, columns)
        for pass_name, left, right in (
            ("forward", x, weight.T),
            ("input gradient", grad, weight),
            ("weight gradient", grad.T, x),
        ):
            operands.append((left, right, torch.empty(left.shape[0], right.shape[1])))
            described.append((f"{name}, {pass_name}", left.shape[0], right.shape[1], left.shape[1], count * micro_batches))
    best = _best_seconds(operands, seconds)
    return [
        Product(name=name, rows=rows, columns=columns, inner=inner, count=count, best_s=best_s)
        for (name, rows, columns, inner, count), best_s in zip(described, best, strict=True)
    ]


def _layers(model: GPTConfig, tokens: int) -> list[tuple[str, int, int, int, int]]:
    """Return name, rows, columns, inner size and count of the products of one micro-batch's forward pass."""
    width, depth, inner = model.model_dim, model.num_layers, model.ff_dim
    chunk = min(tokens, chunk_rows(model.vocab_size))
    return [
        ("Q, K and V", tokens, 2 * model.qk_rows + width, width, depth),
        ("attention's output", tokens, width, width, depth),
        ("feed-forward in", tokens, inner, width, depth),
        ("feed-forward out", tokens, width, inner, depth),
        # The last chunk may be shorter; so may its time.
        ("head", chunk, model.vocab_size, width, -(-tokens // chunk)),
    ]


def _best_seconds(operands: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]], seconds: float) -> list[float]:
    """Return the best time of each product. They take turns, so that a disturbance affects no product every time."""
    best = [float("inf")] * len(operands)
    started, rounds = time.perf_counter(), 0
    while rounds < 2 or time.perf_counter() - started < seconds:
        for number, (left, right, out) in enumerate(operands):
            # Several times in a row: at first the cache holds another product's operands.
            for _ in range(3):
                began = time.perf_counter()
                torch.mm(left, right, out=out)
                best[number] = min(best[number], time.perf_counter() - began)
        rounds += 1
    return best


def split_time(step: Callable[[], object], *, steps: int) -> dict[str, float]:
    """Return each of PARTS' share of a step's time, over several steps in torch's profiler; the shares add up to 1."""
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        for _ in range(steps):
            with record_function(_STEP):
                step()
    spent = dict.fromkeys(PARTS, 0.0)
    # Time of a scope outside operations is Python's: it counts as rest.
    for event in profiler.events() or ():
        if _is_inside_step(event):
            spent[_part(event)] += float(event.self_cpu_time_total)
    total = sum(spent.values())
    return {part: value / total for part, value in spent.items()}


def _is_inside_step(event: Any) -> bool:
    return event.name == _STEP or any(above.name == _STEP for above in _above(event))


def _above(event: Any) -> list[Any]:
    found = []
    while event.cpu_parent is not None:
        event = event.cpu_parent
        found.append(event)
    return found


def _part(event: Any) -> str:
    names = [event.name, *(above.name for above in _above(event))]
    # The loss computes the head's products.
    if any("CrossEntropy" in name for name in names):
        return "head"
    if any(name.startswith("Optimizer.") for name in names):
        return "optimizer"
    own = str(event.name).removeprefix("aten::")
    if own == event.name:
        return "rest"
    return next((part for part, starts in _OPERATIONS.items() if own.startswith(starts)), "rest")


TRANSFORMERS = "transformers"
_PROMPT = [5, 6, 7, 8]


@dataclass(frozen=True)
class Writer:
    """One contender: its tokens a second, and its speed relative to the first arm and to `transformers`."""

    name: str
    tokens_per_s: float
    ratio: Ratio
    against_transformers: Ratio | None


def compare_generation(
    arms: Sequence[tuple[str, RunConfig]], *, rounds: int, num_tokens: int, has_transformers: bool
) -> list[Writer]:
    """Time every arm's greedy text against the first arm's, and against `transformers` on that arm's export.

    A text ends at the model's context and is then repeated, up to `num_tokens` in all. Raises OelmError where the export
    writes another text than the arm.
    """
    room = min(config.model.seq_len for _, config in arms) - len(_PROMPT)
    if room < 1:
        raise OelmError(f"a context of {room + len(_PROMPT)} tokens leaves no room after a prompt of {len(_PROMPT)}")
    length = min(num_tokens, room)
    times = max(1, num_tokens // length)
    models = [_model(config) for _, config in arms]
    writers: dict[str, Callable[[], list[int]]] = {
        f"{number} {name}": _ours(model, length) for number, ((name, _), model) in enumerate(zip(arms, models, strict=True))
    }
    first = next(iter(writers))
    if has_transformers:
        theirs = _theirs(models[0], length)
        if writers[first]() != theirs():
            raise OelmError(f"transformers writes another text on the export of {arms[0][0]}: their speeds cannot be compared")
        writers[TRANSFORMERS] = theirs
    for model in models:
        lay_out_by_columns(model)

    def repeated(write: Callable[[], list[int]]) -> Callable[[], None]:
        def run() -> None:
            for _ in range(times):
                write()

        return run

    seconds = interleave({name: repeated(write) for name, write in writers.items()}, rounds=rounds)
    timed = against(first, seconds)
    reference = against(TRANSFORMERS, seconds) if has_transformers else {}
    return [
        Writer(
            name=name if name == TRANSFORMERS else name.partition(" ")[2],
            tokens_per_s=times * length / timed[name].median_s,
            ratio=timed[name].ratio,
            against_transformers=reference[name].ratio if reference else None,
        )
        for name in writers
    ]


def can_export(config: RunConfig) -> bool:
    """Whether `transformers` is installed and GPT-2's format can hold the model."""
    is_plain = fits_gpt2(config.model) and config.model.qk_dim is None
    return is_plain and importlib.util.find_spec(TRANSFORMERS) is not None


def _model(config: RunConfig) -> GPT:
    model = build_gpt(config.model, seed=0)
    freeze(model, config.method, seed=0)
    # As `oelm generate` does. A selection of axes is cheaper than the weight it would fold into.
    if config.method.learns_on_top and str(config.method.init) != "axes":
        fold(model)
    return model.eval()


def _ours(model: GPT, length: int) -> Callable[[], list[int]]:
    def write() -> list[int]:
        return list(islice(generate(model, _PROMPT, sampling=Sampling(temperature=0.0)), length))

    return write


def _theirs(model: GPT, length: int) -> Callable[[], list[int]]:
    from transformers import GPT2LMHeadModel
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = train_bpe(["any text will do"], vocab_size=300)
        export_gpt(model, tokenizer, Path(folder) / "hf", end_of_text=0, card="")
        theirs = GPT2LMHeadModel.from_pretrained(Path(folder) / "hf", local_files_only=True).eval()
    # Without an end mark, so that both write exactly as many tokens.
    theirs.generation_config.eos_token_id = None
    theirs.generation_config.pad_token_id = 0
    prompt = torch.tensor([_PROMPT])
    mask = torch.ones_like(prompt)

    def write() -> list[int]:
        with torch.no_grad():
            output = theirs.generate(prompt, attention_mask=mask, max_new_tokens=length, do_sample=False, use_cache=True)
        return [int(token) for token in output[0, len(_PROMPT) :]]

    return write
