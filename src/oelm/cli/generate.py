"""`oelm generate`: read what a run writes."""

from __future__ import annotations

import time
from itertools import islice
from typing import Annotated

import typer

from oelm.cli.options import Checkpoint, RunFolder
from oelm.cli.shell import err, out, printable, reported
from oelm.errors import ConfigError


@reported
def generate(
    run: RunFolder,
    prompt: Annotated[str, typer.Option(help="What to continue; nothing starts a new document.")] = "",
    max_tokens: Annotated[int, typer.Option(min=1, help="How many tokens to write at most.")] = 200,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 takes the likeliest token every time.")] = 0.8,
    top_k: Annotated[int, typer.Option(min=0, help="Choose among the k likeliest; 0 among all.")] = 0,
    top_p: Annotated[float, typer.Option(help="Choose among the likeliest that hold this share; 1 among all.")] = 1.0,
    seed: Annotated[int, typer.Option(min=0, help="Another seed, another text.")] = 0,
    checkpoint: Checkpoint = "best",
) -> None:
    """Write text with a trained model, to the terminal as it comes; ends at the end of a document."""
    from pydantic import ValidationError

    from oelm.data.tokenizer import end_of_text_id
    from oelm.models.generate import Sampling, lay_out_by_columns
    from oelm.models.generate import generate as tokens_of
    from oelm.train.load import load_run

    try:
        sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p, seed=seed)
    except ValidationError as problem:
        first = problem.errors()[0]
        raise ConfigError(f"--{str(first['loc'][0]).replace('_', '-')}: {first['msg']} (given: {first['input']})") from None

    try:
        prompt.encode()
    except UnicodeEncodeError as problem:
        raise ConfigError(
            f"--prompt: is not valid Unicode (character {problem.start + 1} is {prompt[problem.start]!r}); give it in UTF-8"
        ) from None

    def show(text: str) -> None:
        # What a model writes is data: it must not drive a terminal.
        out.file.write(printable(text) if out.file.isatty() else text)

    loaded = load_run(run, which=checkpoint)
    # Nothing to adjust at every token, and no product where a slice will do.
    model = loaded.folded(keep_slices=True)
    lay_out_by_columns(model)
    tokenizer = loaded.tokenizer()
    end = end_of_text_id(tokenizer)
    ids = tokenizer.encode(prompt, add_special_tokens=False).ids or [end]
    show(prompt)
    written: list[int] = []
    shown = ""
    started = time.perf_counter()
    for token in islice(tokens_of(model, ids, sampling=sampling), max_tokens):
        if token == end:
            break
        written.append(token)
        text = tokenizer.decode(written)
        # A character may be cut between two tokens: hold it back until it is whole.
        if not text.endswith("\ufffd"):
            show(text[len(shown) :])
            out.file.flush()
            shown = text
    show(tokenizer.decode(written)[len(shown) :] + "\n")
    speed = len(written) / (time.perf_counter() - started)
    err.print(f"{len(written)} tokens, {speed:,.0f} tokens/s, step {loaded.step}", style="dim")
