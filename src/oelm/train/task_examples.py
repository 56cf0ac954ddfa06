"""The encoded examples of a classifier's config, and checks that a model can read them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from oelm.config import ExamplesConfig
from oelm.data.encoded import ExampleSet, open_examples
from oelm.data.examples import ExampleSource
from oelm.data.request import Request
from oelm.data.sets import TASKS
from oelm.data.shelf import examples_there, find_examples
from oelm.data.stdlib_task import stdlib_examples, stdlib_tokenizer
from oelm.data.tasks import prepare_examples
from oelm.data.tokens import OnProgress
from oelm.errors import ConfigError, DataError
from oelm.models.hub import is_encoder_decoder

_COUNTED_FROM_PAD = ("roberta", "camembert", "mpnet", "longformer", "xmod")


def prepare_task_examples(
    config: ExamplesConfig, tokenizer: Path | None, *, vocab_size: int, progress: OnProgress, known: str = ""
) -> ExampleSet:
    """Return the encoded examples of a config, with a tokenizer (a model's folder, or a file) or one trained on them."""
    if tokenizer is not None:
        return open_or_prepare(config, tokenizer, splits=("train", "val"), known=known, progress=progress)
    source = example_source(config)
    if config.task != "stdlib":
        raise ConfigError(f"task {config.task!r} needs a model with a tokenizer: --model FOLDER, or a hub id")
    own = stdlib_tokenizer(vocab_size, progress)
    return prepare_examples(source, tokenizer=str(own), max_length=config.max_length, progress=progress)


def open_or_prepare(
    config: ExamplesConfig, tokenizer: Path, *, splits: tuple[str, ...], known: str, progress: OnProgress
) -> ExampleSet:
    """Return the examples of a config, encoded with a tokenizer.

    A named task that was prepared with these splits is opened; of several, the one with the fingerprint `known`. Otherwise
    it is prepared from local copies or the hub.
    """
    source, length = example_source(config), config.max_length
    is_shelved = config.task in TASKS and config.folder is None
    if is_shelved:
        fits: dict[str, Any] = {"max_length": length, "labels": source.names, "splits": splits}
        if (found := find_examples(source.name, str(tokenizer), **fits, known=known)) is not None:
            return open_examples(found)
    try:
        return prepare_examples(source, tokenizer=str(tokenizer), max_length=length, progress=progress)
    except DataError as problem:
        if is_shelved and (there := examples_there(source.name, str(tokenizer))):
            language = f" --language {config.language}" if TASKS[config.task].languages else ""
            raise DataError(
                f"{problem}. Prepared as {source.name} is here: {there}. This run asks for: oelm data prepare {config.task}"
                f"{language} --tokenizer {tokenizer} --max-length {length} --from FOLDER"
            ) from problem
        raise


def example_source(config: ExamplesConfig) -> ExampleSource:
    """Return where the examples of a config come from."""
    if config.task == "stdlib":
        unfit = {"--dev": config.dev, "--columns": config.columns, "--labels": config.labels}
        unfit |= {"--language": config.language} if config.language != "en" else {}
        if given := next((option for option, value in unfit.items() if value is not None), None):
            raise ConfigError(f"{given} has no meaning for stdlib; leave it out")
        return stdlib_examples()
    named = config.task in TASKS
    if not named and not Path(config.task).exists() and "/" not in config.task:
        if "." in config.task:
            raise ConfigError(f"no file {config.task!r} here; give the path of a table, or a task: stdlib, {', '.join(TASKS)}")
        raise ConfigError(f"no task called {config.task!r}: there are stdlib, {', '.join(TASKS)}; or give the path of a table")
    request = Request(
        name=config.task if named else None,
        examples=None if named else Path(config.task),
        folder=Path(config.folder) if config.folder else None,
        dev=Path(config.dev) if config.dev else None,
        columns=config.columns,
        labels=config.labels,
        language=config.language,
    )
    return request.example_source()


def num_positions(facts: dict[str, Any]) -> int:
    """Return the most tokens that a model can read; 0 if it has no limit."""
    # T5 uses relative positions, whatever its config.json says.
    if "t5" in str(facts.get("model_type")):
        return 0
    positions = int(facts.get("max_position_embeddings") or facts.get("n_positions") or 0)
    # Models derived from RoBERTa count positions from the pad token's.
    is_kin = any(name in str(facts.get("model_type")) for name in _COUNTED_FROM_PAD)
    offset = int(facts.get("pad_token_id") or 0) + 1 if is_kin else 0
    return max(positions - offset, 0)


def check_fits_model(examples: ExampleSet, facts: dict[str, Any], folder: Path) -> None:
    """Raise if a pretrained model's vocabulary or context is too small for the examples."""
    vocab, positions = int(facts.get("vocab_size", 0)), num_positions(facts)
    largest = max(int(split.ids.max()) for split in examples.splits.values())
    if vocab and largest >= vocab:
        raise DataError(
            f"{folder}: its tokenizer gives ids up to {largest}, the model's vocabulary has {vocab}: its tokenizer is another "
            "model's; give the model with its own"
        )
    if positions and examples.meta.max_length > positions:
        raise ConfigError(
            f"examples.max_length {examples.meta.max_length}: {folder} reads {positions} tokens at most; lower it"
        )


def closing_mark(examples: ExampleSet) -> int:
    """Return the id that ends every example; raise DataError if they differ."""
    last = np.unique(np.concatenate([split.ids[split.ends - 1] for split in examples.splits.values()]))
    if len(last) != 1:
        raise DataError(
            f"{examples.meta.name}: its examples end with {len(last):,} different tokens, and an encoder-decoder classifies at "
            "the mark that ends each: take architecture bert, or a tokenizer that closes every text"
        )
    return int(last[0])


def check_marks(examples: ExampleSet, model: nn.Module, *, pad: int) -> None:
    """Raise DataError unless all examples for an encoder-decoder have the same number of end marks.

    The model classifies at the last one, and transformers fails in the middle of training if their number differs.
    """
    if not is_encoder_decoder(model):
        return
    end = model.config.eos_token_id  # type: ignore[union-attr]
    if not isinstance(end, int) or pad == end:
        raise DataError(
            f"{examples.meta.name}: the model's end mark is {end}, short texts are filled up with {pad}: it classifies at the "
            "mark, which must be one token other than the filling; fix eos_token_id and pad_token_id in its config.json"
        )
    counts = {name: split.counts(end) for name, split in examples.splits.items()}
    usual = max(1, int(np.median(np.concatenate(list(counts.values())))))
    for name, found in counts.items():
        for number in np.flatnonzero(found != usual)[:1]:
            raise DataError(
                f"{examples.meta.name}: example {number + 1} of {name} has the end mark (id {end}) {found[number]} times, not "
                f"{usual}: the model classifies at the last one and wants as many in each. Take the mark out of the text; "
                "where no example has it, the tokenizer is another model's"
            )
