"""Open the task of a config of either kind: prepare its data, and fill in the config from them."""

from __future__ import annotations

from pathlib import Path

from oelm.config import FinetuneConfig, RunConfig
from oelm.data.prepare import is_made_with, prepare
from oelm.data.tokens import OnProgress, TokenSet
from oelm.errors import StoppedError
from oelm.runs.records import data_fingerprint
from oelm.train.classify import ClassifierTask, open_classifier_task
from oelm.train.device import Compute
from oelm.train.stop import StopFlag
from oelm.train.task import LanguageModelTask
from oelm.train.watch import Watch


def open_task(
    config: RunConfig | FinetuneConfig, compute: Compute, *, run: Path, stop: StopFlag, watch: Watch
) -> tuple[RunConfig, LanguageModelTask] | tuple[FinetuneConfig, ClassifierTask]:
    """Prepare a run's data; return its config, completed from the data, and its task."""
    progress = seen_progress(stop, watch)
    if isinstance(config, FinetuneConfig):
        return open_classifier_task(config, compute, run=run, known=data_fingerprint(run), progress=progress)
    data, known = config.data, data_fingerprint(run)
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


def seen_progress(stop: StopFlag, watch: Watch) -> OnProgress:
    """Return a progress callback that reports to the watch, and raises StoppedError after a stop."""

    def progress(what: str, done: int, total: int, tokens: int) -> None:
        watch.on_preparing(what, done, total, tokens)
        if stop.requested():
            raise StoppedError("stopped while preparing the data; repeat the same command to continue after the last shard")

    return progress
