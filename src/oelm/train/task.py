"""What a run learns: batches, their loss, and an evaluation over the whole validation split."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from oelm.data.order import WindowOrder
from oelm.data.tokens import TokenSet
from oelm.errors import DataError
from oelm.models.gpt import GPT
from oelm.train.config import RunConfig
from oelm.train.device import Compute
from oelm.train.evaluate import Evaluation, evaluate_tokens
from oelm.train.loss import mean_cross_entropy
from oelm.train.stop import StopFlag


@dataclass(frozen=True)
class Batch:
    """Windows of one token more than the model reads; `ids` are the offsets at which they start."""

    ids: list[int]
    windows: Tensor

    @property
    def num_tokens(self) -> int:
        return self.windows.shape[0] * (self.windows.shape[1] - 1)


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
        """Return the loss per token over all of the validation split, or None when a stop was asked for meanwhile."""
        return evaluate_tokens(
            model,
            self.tokens.val,
            end_of_text=self.tokens.meta.end_of_text,
            text_bytes=self.tokens.meta.splits["val"].text_bytes,
            batch_size=self.config.micro_batch_size,
            compute=self.compute,
            stop=stop,
            progress=progress,
        )
