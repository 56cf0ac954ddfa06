"""The speed of greedy text: several arms in turn, and `transformers` on the first one's export."""

from __future__ import annotations

import importlib.util
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import torch

from oelm.bench.interleave import OnRound, against, interleave, silent
from oelm.config import RunConfig
from oelm.data.tokenizer import train_bpe
from oelm.errors import OelmError
from oelm.method.apply import fold, freeze
from oelm.models.export import export_gpt, fits_gpt2
from oelm.models.generate import Sampling, generate, lay_out_by_columns
from oelm.models.gpt import GPT, build_gpt
from oelm.stats import Ratio

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
    arms: Sequence[tuple[str, RunConfig]],
    *,
    rounds: int,
    num_tokens: int,
    has_transformers: bool,
    progress: OnRound = silent,
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

    progress(f"timing greedy text of {', '.join(writers)} in turn: {rounds} rounds after 1 to warm up")
    seconds = interleave({name: repeated(write) for name, write in writers.items()}, rounds=rounds, progress=progress)
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
