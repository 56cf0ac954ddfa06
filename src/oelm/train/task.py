"""What a run learns: batches, their loss, and an evaluation over the whole validation split.

B batch  T tokens  N all tokens of a batch
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from oelm.data.order import WindowOrder
from oelm.data.tokens import TokenSet
from oelm.errors import DataError
from oelm.models.gpt import GPT
from oelm.train.config import RunConfig
from oelm.train.device import Compute
from oelm.train.loss import mean_cross_entropy, token_losses
from oelm.train.stop import StopFlag

Losses = NDArray[np.float64]


@dataclass(frozen=True)
class Batch:
    """Windows of one token more than the model reads; `ids` are the offsets at which they start."""

    ids: list[int]
    windows: Tensor

    @property
    def num_tokens(self) -> int:
        return self.windows.shape[0] * (self.windows.shape[1] - 1)


@dataclass(frozen=True)
class Evaluation:
    """Loss per token over a whole split, its two readings, and each document's share of it."""

    loss: float
    perplexity: float
    bits_per_byte: float
    documents: list[dict[str, Any]]

    def as_row(self) -> dict[str, Any]:
        return {"val_loss": self.loss, "val_ppl": self.perplexity, "bits_per_byte": self.bits_per_byte}


class LanguageModelTask:
    """Predict the next token of a token set."""

    def __init__(self, tokens: TokenSet, config: RunConfig, compute: Compute) -> None:
        if config.model.vocab_size != tokens.meta.vocab_size:
            raise DataError(
                f"model.vocab_size is {config.model.vocab_size}, but {tokens.meta.name} was tokenized with a vocabulary "
                f"of {tokens.meta.vocab_size}; leave it at 0 to follow the data"
            )
        self.tokens, self.config, self.compute = tokens, config, compute
        self.order = WindowOrder(len(tokens.train), config.model.seq_len, config.batch_size, config.seed)
        if len(tokens.val) < 2:
            raise DataError(f"{tokens.path}: the validation split holds {len(tokens.val)} token; it needs two at least")

    def batch(self, step: int) -> Batch:
        """Return batch `step` of the run: a pure function of the seed and the step."""
        starts = self.order.starts(step)
        rows = np.stack([self.tokens.train[s : s + self.config.model.seq_len + 1] for s in starts]).astype(np.int64)
        return Batch(starts.tolist(), torch.from_numpy(rows).to(self.compute.device, non_blocking=True))

    def loss(self, forward: nn.Module, model: GPT, batch: Batch, micro_batch: int) -> Tensor:
        """Return the mean loss of one micro-batch; `forward` is the model or its compiled form."""
        size = self.config.micro_batch_size
        windows = batch.windows[micro_batch * size : (micro_batch + 1) * size]
        with self.compute.autocast():
            hidden_ND = forward(windows[:, :-1]).flatten(0, 1)
            return mean_cross_entropy(hidden_ND, model.head_VD, windows[:, 1:].flatten())

    def evaluate(self, model: GPT, stop: StopFlag, *, progress: Callable[[int, int], None]) -> Evaluation | None:
        """Return the loss per token over all of the validation split, or None when a stop was asked for meanwhile.

        Windows are cut at multiples of seq_len whatever the batch size, the last one shorter; every token but the
        very first is predicted once, and all count the same. `progress` hears of tokens done and in all.
        """
        parts: list[Losses] = []
        done = 0
        for losses in self._validation_losses(model):
            if stop.requested():
                return None
            parts.append(losses)
            done += len(losses)
            progress(done, len(self.tokens.val) - 1)
        losses = np.concatenate(parts)
        nats = float(losses.sum())
        return Evaluation(
            loss=nats / len(losses),
            # Beyond the range of a float the perplexity is unreadable anyway; the loss stands beside it.
            perplexity=math.exp(min(nats / len(losses), 700.0)),
            bits_per_byte=nats / math.log(2) / self.tokens.meta.splits["val"].text_bytes,
            documents=self._by_document(losses),
        )

    def _by_document(self, losses: Losses) -> list[dict[str, Any]]:
        """Return each document's token count and summed loss, its end mark included."""
        # The document of a predicted token: how many end marks stand before it.
        document_of = np.cumsum(np.asarray(self.tokens.val[:-1]) == self.tokens.meta.end_of_text)
        nats, counts = np.bincount(document_of, weights=losses), np.bincount(document_of)
        return [
            {"document": number, "tokens": int(count), "nats": float(total)}
            for number, (count, total) in enumerate(zip(counts, nats, strict=True))
            if count
        ]

    @torch.no_grad()
    def _validation_losses(self, model: GPT) -> Iterator[Losses]:
        was_training = model.training
        model.eval()
        try:
            for windows in self._validation_windows():
                with self.compute.autocast():
                    hidden_ND = model(windows[:, :-1]).flatten(0, 1)
                    losses = token_losses(hidden_ND, model.head_VD.to(hidden_ND.dtype), windows[:, 1:].flatten())
                yield losses.cpu().double().numpy()
        finally:
            model.train(was_training)

    def _validation_windows(self) -> Iterator[Tensor]:
        length, size = self.config.model.seq_len, self.config.micro_batch_size
        values = self.tokens.val
        whole = (len(values) - 1) // length
        for first in range(0, whole, size):
            starts = range(first * length, min(first + size, whole) * length, length)
            rows = np.stack([values[s : s + length + 1] for s in starts]).astype(np.int64)
            yield torch.from_numpy(rows).to(self.compute.device)
        if (len(values) - 1) % length:
            yield (torch.from_numpy(np.asarray(values[whole * length :]).astype(np.int64)).unsqueeze(0).to(self.compute.device))
