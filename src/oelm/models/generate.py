"""Generate text token by token with cached keys and values, reproducible from a seed.

V vocab
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from pydantic import Field
from torch import Tensor

from oelm.errors import ConfigError
from oelm.files import Strict
from oelm.models.gpt import GPT, Cache
from oelm.seeds import stream_seed

_COLDEST = 1e-3


class Sampling(Strict):
    """How the next token is chosen. Temperature 0 takes the likeliest; top_k 0 and top_p 1 exclude none."""

    temperature: float = Field(default=0.8, ge=0)
    top_k: int = Field(default=0, ge=0)
    top_p: float = Field(default=1.0, gt=0, le=1)
    seed: int = Field(default=0, ge=0)


def lay_out_by_columns(model: GPT) -> None:
    """Store the matrices that widen, the head and the feed-forward's first, by columns: same values, names and shapes.

    One row times a matrix is memory-bound; measured on a 2-core CPU, such a product then takes half the time.
    """
    widening = [model.token_embedding, *(module for name, module in model.named_modules() if name.endswith("ff_in"))]
    for module in widening:
        weight = module.get_parameter("weight")
        weight.data = weight.data.T.contiguous().T


def window_start(length: int, seq_len: int) -> int:
    """Return where the context of the next token begins after `length` tokens.

    A full context is cut to its newer half, so that it is read again only every seq_len / 2 tokens.
    """
    step = max(1, seq_len // 2)
    return 0 if length <= seq_len else -(-(length - seq_len) // step) * step


@torch.inference_mode()
def generate(model: GPT, prompt: list[int], *, sampling: Sampling, cached: bool = True) -> Iterator[int]:
    """Yield tokens after the prompt, endlessly. Raises ConfigError when the prompt is empty or exceeds the context.

    `cached=False` reads the whole context for every token: slow, a reference for the cache.
    """
    check_prompt(prompt, model.config.seq_len)
    model.eval()
    generator = torch.Generator().manual_seed(stream_seed(sampling.seed, "sampling"))
    tokens = list(prompt)
    start, cache = 0, empty_cache(model)
    unread = tokens
    while True:
        if not cached or window_start(len(tokens), model.config.seq_len) != start:
            start, cache = window_start(len(tokens), model.config.seq_len), empty_cache(model)
            unread = tokens[start:]
        token = next_token(_next_logits(model, unread, cache), sampling, generator)
        yield token
        tokens.append(token)
        unread = [token]


def check_prompt(prompt: list[int], seq_len: int) -> None:
    """Raise ConfigError when a prompt is empty or longer than the model's context."""
    if not prompt:
        raise ConfigError("the prompt is empty; give at least one token")
    if len(prompt) > seq_len:
        raise ConfigError(f"the prompt has {len(prompt)} tokens, the model's context {seq_len}; shorten the prompt")


def empty_cache(model: GPT) -> Cache:
    return Cache(model.config, batch_size=1, like=model.head_VD)


def _next_logits(model: GPT, unread: list[int], cache: Cache) -> Tensor:
    hidden_BTD = model(torch.tensor([unread], device=model.head_VD.device), cache)
    return (hidden_BTD[0, -1] @ model.head_VD.T).float().cpu()


def next_token(logits_V: Tensor, sampling: Sampling, generator: torch.Generator) -> int:
    """Return the next token: the likeliest, or one drawn from what temperature, top_k and top_p leave."""
    # Colder, logits over the temperature may overflow; the likeliest token has nearly all of the probability anyway.
    if sampling.temperature < _COLDEST:
        return int(logits_V.argmax())
    # In float64: a float32 sum over 50k probabilities moves the cut of top_p.
    logits_V = logits_V.double() / sampling.temperature
    if 0 < sampling.top_k < len(logits_V):
        lowest = logits_V.topk(sampling.top_k).values[-1]
        logits_V = logits_V.masked_fill(logits_V < lowest, float("-inf"))
    probabilities_V = logits_V.softmax(-1)
    if sampling.top_p < 1:
        ordered_V, order_V = probabilities_V.sort(descending=True, stable=True)
        # The first token that reaches top_p stays, so that one always does.
        beyond_V = ordered_V.cumsum(-1) - ordered_V >= sampling.top_p
        probabilities_V = probabilities_V.index_fill(0, order_V[beyond_V], 0.0)
    return int(torch.multinomial(probabilities_V, 1, generator=generator))
