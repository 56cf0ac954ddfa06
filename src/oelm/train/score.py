"""Evaluate a loaded language model on any data with its tokenizer."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer

from oelm.data.prepare import prepare
from oelm.data.sources import documents, file_corpus
from oelm.data.tokenizer import encoder, end_of_text_id
from oelm.data.tokens import Tokens, TokenSet
from oelm.errors import DataError
from oelm.process import StopFlag
from oelm.runs.layout import TOKENIZER
from oelm.train.device import choose_compute
from oelm.train.evaluate import TokenEvaluation, evaluate_tokens
from oelm.train.load import LoadedRun
from oelm.train.watch import Watch


def score_run(
    run: LoadedRun, *, data: str | None, text: Path | None, split: str, batch_size: int, stop: StopFlag, watch: Watch
) -> tuple[str, TokenEvaluation | None]:
    """Return the name of the data and the evaluation (None if stopped); raise DataError if they do not fit the run."""
    tokenizer = run.tokenizer()
    if text is not None:
        name, tokens, text_bytes = f"all of '{text.name}'", *_encode_all(text, tokenizer)
    else:
        source = run.config.data.source if data is None else data
        opened = _prepared(run, source, watch)
        check_tokenizer_fits(opened, run)
        if split not in opened.meta.splits:
            raise DataError(f"{opened.meta.name} has no split '{split}'; it has: {', '.join(opened.meta.splits)}")
        tokens, text_bytes = opened.splits[split], opened.meta.splits[split].text_bytes
        name = f"{opened.meta.name}, split {split}"
    if len(tokens) < 2:
        raise DataError(f"{name}: {len(tokens)} token; a loss needs at least two")
    compute = choose_compute(run.config.device, run.config.precision)
    run.model.to(compute.device)
    evaluation = evaluate_tokens(
        run.model,
        tokens,
        end_of_text=end_of_text_id(tokenizer),
        text_bytes=text_bytes,
        batch_size=batch_size,
        compute=compute,
        stop=stop,
        progress=watch.on_validating,
    )
    return name, evaluation


def _prepared(run: LoadedRun, source: str, watch: Watch) -> TokenSet:
    known, data = run.checkpoint.saved.data_fingerprint, run.config.data
    # The limit applies to the run's own data.
    most = data.max_tokens if source == data.source else None
    # For a token set made with a tokenizer file, the config has only the digest; the run has the file.
    tokenizer = str(run.path / TOKENIZER) if data.tokenizer.startswith("file-") else data.tokenizer
    return prepare(source, tokenizer=tokenizer, max_tokens=most, known=known, progress=watch.on_preparing)


def check_tokenizer_fits(tokens: TokenSet, run: LoadedRun) -> None:
    """Raise DataError unless a token set was made with the run's tokenizer."""
    theirs = run.checkpoint.saved.tokenizer_sha256
    if theirs != tokens.meta.tokenizer_sha256:
        raise DataError(
            f"{tokens.meta.name} was tokenized with another tokenizer ({tokens.meta.tokenizer}, sha256 "
            f"{tokens.meta.tokenizer_sha256[:12]}...) than the run ({theirs[:12]}...): its ids mean other text to this model. "
            "Give the text itself with --text"
        )


def _encode_all(path: Path, tokenizer: Tokenizer) -> tuple[Tokens, int]:
    end = end_of_text_id(tokenizer)
    texts = list(documents(file_corpus(path)))
    ids = [part for encoded in encoder(tokenizer)(texts) for part in (encoded, [end])]
    return np.concatenate(ids).astype(np.uint32), sum(len(text.encode()) for text in texts)


def probe_windows(run: LoadedRun, *, watch: Watch, most: int = 8) -> torch.Tensor:
    """Return the first windows of the run's validation split, to inspect its heads: (B, T)."""
    tokens = _prepared(run, run.config.data.source, watch)
    check_tokenizer_fits(tokens, run)
    return first_windows(tokens, run.config.model.seq_len, most=most)


def first_windows(tokens: TokenSet, seq_len: int, *, most: int) -> torch.Tensor:
    """Return up to `most` whole windows from the start of the validation split, or a shorter one: (B, T)."""
    count = max(1, min(most, len(tokens.val) // seq_len))
    values = np.asarray(tokens.val[: count * seq_len]).astype(np.int64)
    return torch.from_numpy(values).view(count, -1)
