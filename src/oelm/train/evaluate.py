"""Loss on a whole split: every token once, whatever the batch size.

B batch  T tokens  N all tokens of a batch
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from oelm.data.tokens import Tokens
from oelm.models.gpt import GPT
from oelm.process import StopFlag
from oelm.runs.records import DocumentRow, ExampleRow
from oelm.text import fixed
from oelm.train.device import Compute
from oelm.train.dist import ALONE, World
from oelm.train.loss import token_losses

Losses = NDArray[np.float64]
T = TypeVar("T")


class Evaluation(Protocol):
    """The result of an evaluation of either kind; the best checkpoint has the smallest `criterion`."""

    @property
    def loss(self) -> float: ...

    @property
    def criterion(self) -> float: ...

    @property
    def predictions(self) -> Sequence[DocumentRow | ExampleRow]: ...

    def as_row(self) -> dict[str, Any]: ...

    def headline(self) -> str: ...


@dataclass(frozen=True)
class TokenEvaluation:
    """Loss per token on a whole split, as PPL and bits per byte too, and each document's share of it."""

    loss: float
    perplexity: float
    bits_per_byte: float
    documents: list[DocumentRow]

    @property
    def criterion(self) -> float:
        return self.loss

    @property
    def predictions(self) -> list[DocumentRow]:
        return self.documents

    def headline(self) -> str:
        return f"validation loss {self.loss:.4f}, PPL {fixed(self.perplexity, 2)}, {self.bits_per_byte:.3f} bits per byte"

    def as_row(self) -> dict[str, Any]:
        return {"val_loss": self.loss, "val_ppl": self.perplexity, "bits_per_byte": self.bits_per_byte}


def evaluate_tokens(
    model: GPT,
    tokens: Tokens,
    *,
    end_of_text: int,
    text_bytes: int,
    batch_size: int,
    compute: Compute,
    stop: StopFlag,
    progress: Callable[[int, int], None],
    world: World = ALONE,
) -> TokenEvaluation | None:
    """Return the loss per token over all tokens, or None if a stop came first.

    Windows start at multiples of seq_len whatever the batch size, and the last is shorter; every token but the first is
    predicted once, and all count the same. `progress` gets the tokens done and in total. The processes of a world take
    turns at the same batches as one alone, so the result does not depend on their number.
    """
    parts: list[Losses] = []
    done = 0
    for losses in _losses(model, tokens, batch_size, compute, world):
        if world.agree(stop):
            return None
        parts.append(losses)
        done = min(done + len(losses) * world.size, len(tokens) - 1)
        progress(done, len(tokens) - 1)
    losses = np.concatenate(world.gather(parts))
    nats = float(losses.sum())
    return TokenEvaluation(
        loss=nats / len(losses),
        # Beyond the range of a float; the loss is exact.
        perplexity=math.exp(min(nats / len(losses), 700.0)),
        bits_per_byte=nats / math.log(2) / text_bytes,
        documents=_by_document(losses, tokens, end_of_text),
    )


def _by_document(losses: Losses, tokens: Tokens, end_of_text: int) -> list[DocumentRow]:
    """Return each document's token count and summed loss, its end mark included."""
    # The document of a predicted token is the number of end marks before it.
    document_of = np.cumsum(np.asarray(tokens[:-1]) == end_of_text)
    nats, counts = np.bincount(document_of, weights=losses), np.bincount(document_of)
    # Not validated: a loss that is not finite is reported by the evaluation as a whole.
    return [
        DocumentRow.model_construct(document=number, tokens=int(count), nats=float(total))
        for number, (count, total) in enumerate(zip(counts, nats, strict=True))
        if count
    ]


@torch.no_grad()
def _losses(model: GPT, tokens: Tokens, batch_size: int, compute: Compute, world: World) -> Iterator[Losses]:
    """Yield the losses of this process's batches; an empty array in a last turn without a batch for it."""
    was_training = model.training
    model.eval()
    try:
        for turn in batched(_windows(tokens, model.config.seq_len, batch_size), world.size):
            if world.rank >= len(turn):
                yield np.zeros(0)
                continue
            windows_BT = turn[world.rank].to(compute.device)
            with compute.autocast():
                hidden_ND = model(windows_BT[:, :-1]).flatten(0, 1)
                losses_N = token_losses(hidden_ND, model.head_VD.to(hidden_ND.dtype), windows_BT[:, 1:].flatten())
            yield losses_N.cpu().double().numpy()
    finally:
        model.train(was_training)


def batched(items: Iterable[T], size: int) -> Iterator[list[T]]:
    """Yield lists of `size` items; the last may be shorter."""
    iterator = iter(items)
    while turn := list(itertools.islice(iterator, size)):
        yield turn


def _windows(tokens: Tokens, seq_len: int, batch_size: int) -> Iterator[Tensor]:
    whole = (len(tokens) - 1) // seq_len
    for first in range(0, whole, batch_size):
        starts = range(first * seq_len, min(first + batch_size, whole) * seq_len, seq_len)
        yield torch.from_numpy(np.stack([tokens[s : s + seq_len + 1] for s in starts]).astype(np.int64))
    if (len(tokens) - 1) % seq_len:
        yield torch.from_numpy(np.asarray(tokens[whole * seq_len :]).astype(np.int64)).unsqueeze(0)
