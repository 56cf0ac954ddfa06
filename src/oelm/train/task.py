"""What a run learns, as the loop sees it; the language model's task."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from oelm.config import InitFrom, RunConfig
from oelm.data.example_sets import ExampleSet
from oelm.data.ngram import ORDERS, ngram_figures
from oelm.data.order import WindowOrder
from oelm.data.prepare import is_made_with, prepare
from oelm.data.tokens import OnProgress, TokenSet
from oelm.errors import CheckpointError, DataError, StoppedError
from oelm.files import sha256_file
from oelm.models.gpt import GPT, build_gpt
from oelm.models.heads import summarize_heads
from oelm.process import StopFlag
from oelm.runs.layout import SAVED_MODEL, TOKENIZER
from oelm.runs.status import StatusMetric
from oelm.train.checkpoint import load_weights
from oelm.train.device import Compute, Estimate, estimate
from oelm.train.dist import ALONE, World
from oelm.train.evaluate import Evaluation, TokenEvaluation, evaluate_tokens
from oelm.train.load import load_run
from oelm.train.loss import mean_cross_entropy
from oelm.train.score import first_windows
from oelm.train.watch import Watch

_PROBED_WINDOWS = 8
# Splits to evaluate on: the best model is chosen on the first, and evaluated on the second once, at the end.
Judging = Literal["val", "test"]


@dataclass(frozen=True)
class DataFacts:
    """What a run records of its data, and a one-line summary."""

    name: str
    source: str
    fingerprint: str
    tokenizer: str
    tokenizer_sha256: str
    tokenizer_path: Path
    summary: str

    @classmethod
    def of(cls, data: TokenSet | ExampleSet, summary: str) -> DataFacts:
        """Return the facts of a prepared set."""
        meta = data.meta
        return cls(
            name=meta.name,
            source=meta.source,
            fingerprint=meta.fingerprint,
            tokenizer=meta.tokenizer,
            tokenizer_sha256=meta.tokenizer_sha256,
            tokenizer_path=data.path / TOKENIZER,
            summary=summary,
        )


@dataclass(frozen=True)
class Batch:
    """What one step learns from: `ids` are examples, or windows by their offsets; `num_tokens` does not count padding."""

    ids: list[int]
    # One for each micro-batch: windows of one token more than the model reads, or padded examples by input.
    parts: Sequence[Any]
    num_tokens: int

    @property
    def num_micro_batches(self) -> int:
        return len(self.parts)


class Task(Protocol):
    """What a run learns: batches, their loss, and evaluation on a whole split."""

    @property
    def data(self) -> DataFacts: ...

    @property
    def has_test(self) -> bool: ...

    def build_model(self, run: Path, *, is_new: bool) -> nn.Module:
        """Return the model before freezing, with its starting weights; for a resumed run, only the shape matters."""

    def join(self, world: World) -> None:
        """Split batches among the processes of a world; only its writer may touch the run's folder."""

    def batch(self, step: int) -> Batch:
        """Return batch `step`: a pure function of the seed and the step."""

    def loss(self, forward: nn.Module, model: nn.Module, batch: Batch, micro_batch: int) -> Tensor:
        """Return a micro-batch's share of the mean loss, times their number; `forward` is the model or its compiled form."""

    def evaluate(
        self,
        model: nn.Module,
        stop: StopFlag,
        *,
        progress: Callable[[int, int], None],
        split: Judging = "val",
        world: World = ALONE,
    ) -> Evaluation | None:
        """Evaluate the model on a whole split; None if a stop came first."""

    def references(self, stop: StopFlag) -> dict[str, Any] | None:
        """Return the figures of plain models on the same splits, as references; None if a stop came first."""

    def estimate(self, device: str) -> Estimate:
        """Estimate the memory and disk that training needs."""

    def look_at_heads(self, model: nn.Module) -> dict[str, Any] | None:
        """Return the content of attention.json; None if the heads of this model cannot be inspected."""

    def reading(self, criterion: float) -> tuple[StatusMetric, float]:
        """Return the metric that people read in place of the criterion, and its value."""

    def figures(self, evaluations: list[dict[str, Any]]) -> dict[str, Any]:
        """Return the final and best figures from the evaluations in metrics.jsonl."""


class LanguageModelTask:
    """Predict the next token of a token set."""

    def __init__(self, tokens: TokenSet, config: RunConfig, compute: Compute) -> None:
        if config.model.vocab_size != tokens.meta.vocab_size:
            raise DataError(
                f"model.vocab_size is {config.model.vocab_size}, but {tokens.meta.name} was tokenized with a vocabulary "
                f"of {tokens.meta.vocab_size}; leave it at 0 to follow the data"
            )
        self.tokens, self.config, self.compute = tokens, config, compute
        self.micro_batch_size = config.micro_batch_size
        self.order = WindowOrder(len(tokens.train), config.model.seq_len, config.batch_size, config.seed)
        if len(tokens.val) < 2:
            raise DataError(f"{tokens.path}: the validation split holds {len(tokens.val)} token; it needs at least two")

    @property
    def data(self) -> DataFacts:
        meta = self.tokens.meta
        counts = ", ".join(f"{split.tokens:,} tokens {name}" for name, split in meta.splits.items())
        extract = " (an extract)" if meta.is_extract else ""
        return DataFacts.of(self.tokens, f"{meta.name}{extract}: {counts}, vocabulary {meta.vocab_size:,}")

    def build_model(self, run: Path, *, is_new: bool) -> GPT:
        model = build_gpt(self.config.model, seed=self.config.seed)
        # A resumed run has its weights in its checkpoint, and the path may no longer exist.
        if self.config.init_from is not None and is_new:
            load_start(model, self.config.init_from, self.tokens)
        return model

    def join(self, world: World) -> None:
        self.micro_batch_size = world.micro_batch_size(self.config.batch_size, self.config.micro_batch_size)

    def batch(self, step: int) -> Batch:
        starts = self.order.starts(step)
        rows = np.stack([self.tokens.train[s : s + self.config.model.seq_len + 1] for s in starts]).astype(np.int64)
        windows = torch.from_numpy(rows).to(self.compute.device, non_blocking=True)
        return Batch(starts.tolist(), windows.split(self.micro_batch_size), len(windows) * self.config.model.seq_len)

    def loss(self, forward: nn.Module, model: nn.Module, batch: Batch, micro_batch: int) -> Tensor:
        assert isinstance(model, GPT)
        windows: Tensor = batch.parts[micro_batch]
        with self.compute.autocast():
            hidden_ND = forward(windows[:, :-1]).flatten(0, 1)
            return mean_cross_entropy(hidden_ND, model.head_VD, windows[:, 1:].flatten())

    @property
    def has_test(self) -> bool:
        # The first token is not predicted.
        return len(self.tokens.splits.get("test", ())) > 1

    def evaluate(
        self,
        model: nn.Module,
        stop: StopFlag,
        *,
        progress: Callable[[int, int], None],
        split: Judging = "val",
        world: World = ALONE,
    ) -> TokenEvaluation | None:
        assert isinstance(model, GPT)
        return evaluate_tokens(
            model,
            self.tokens.splits[split],
            end_of_text=self.tokens.meta.end_of_text,
            text_bytes=self.tokens.meta.splits[split].text_bytes,
            batch_size=self.config.micro_batch_size,
            compute=self.compute,
            stop=stop,
            progress=progress,
            world=world,
        )

    def references(self, stop: StopFlag) -> dict[str, Any] | None:
        counted = ngram_figures(self.tokens, stopped=stop.requested)
        return None if counted is None else {"ngram": counted.up_to(ORDERS), "ngram_tokens": counted.tokens}

    def estimate(self, device: str) -> Estimate:
        return estimate(self.config, device=device)

    def look_at_heads(self, model: nn.Module) -> dict[str, Any]:
        assert isinstance(model, GPT)
        windows = first_windows(self.tokens, self.config.model.seq_len, most=_PROBED_WINDOWS).to(self.compute.device)
        return {"tokens": windows.numel(), "heads": [summary.as_dict() for summary in summarize_heads(model, windows)]}

    def reading(self, criterion: float) -> tuple[StatusMetric, float]:
        return "ppl", math.exp(min(criterion, 700.0))

    def figures(self, evaluations: list[dict[str, Any]]) -> dict[str, Any]:
        best, last = min(row["val_loss"] for row in evaluations), evaluations[-1]
        return {
            "final_val_loss": last["val_loss"],
            "final_ppl": last["val_ppl"],
            "final_bits_per_byte": last["bits_per_byte"],
            "best_val_loss": best,
            "best_ppl": math.exp(min(best, 700.0)),
        }


def seen_progress(stop: StopFlag, watch: Watch) -> OnProgress:
    """Return a progress callback that reports to the watch, and raises StoppedError after a stop."""

    def progress(what: str, done: int, total: int, tokens: int) -> None:
        watch.on_preparing(what, done, total, tokens)
        if stop.requested():
            raise StoppedError("stopped while preparing the data; repeat the same command to continue after the last shard")

    return progress


def open_language_task(
    config: RunConfig, compute: Compute, *, known: str, progress: OnProgress
) -> tuple[RunConfig, LanguageModelTask]:
    """Prepare the text of a language model; return the completed config, and the task.

    `known` is the fingerprint of the tokens that the run started with, if it did.
    """
    data = config.data
    tokens = prepare(data.source, tokenizer=data.tokenizer, max_tokens=data.max_tokens, known=known, progress=progress)
    config = resolve(config, tokens)
    return config, LanguageModelTask(tokens, config, compute)


def resolve(config: RunConfig, tokens: TokenSet) -> RunConfig:
    """Fill in the vocabulary size, and the tokenizer of a token set given by its path."""
    data, model = config.data, config.model
    if Path(data.source) == tokens.path and not is_made_with(tokens.meta.tokenizer, data.tokenizer):
        data = data.model_copy(update={"tokenizer": tokens.meta.tokenizer})
    if not model.vocab_size:
        model = model.model_copy(update={"vocab_size": tokens.meta.vocab_size})
    return config.model_copy(update={"data": data, "model": model})


def load_start(model: GPT, start: InitFrom, tokens: TokenSet) -> None:
    """Copy the weights of another run's checkpoint into a fresh model; raise DataError if its tokenizer differs."""
    if start.tokenizer_sha256 != tokens.meta.tokenizer_sha256:
        raise DataError(
            f"--init-from: those weights were trained with another tokenizer than {tokens.meta.name} was made with "
            f"({tokens.meta.tokenizer}): its ids mean other text to them. Use that run's: --tokenizer RUN/{TOKENIZER}"
        )
    path = Path(start.checkpoint) / SAVED_MODEL
    if not path.is_file():
        raise CheckpointError(f"--init-from: {path} no longer exists; its sha256 was {start.sha256[:12]}...")
    if (found := sha256_file(path)) != start.sha256:
        raise CheckpointError(f"--init-from: {path} has sha256 {found[:12]}..., this run started from {start.sha256[:12]}...")
    # Folded: what learnt on top there may be frozen here.
    load_weights(model, load_run(path.parent).folded().state_dict(), where=str(path))
