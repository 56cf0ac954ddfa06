"""The second kind of run: classify the examples of a task, with a pretrained model or a small fresh one."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

from oelm.config import ExamplesConfig, FinetuneConfig
from oelm.data.example_sets import ExampleSet, ExampleSplit, PaddedExamples, open_examples, prepare_examples
from oelm.data.examples import ExampleSource, own_tokenizer, stdlib_examples
from oelm.data.order import BucketOrder, permuted
from oelm.data.prepared import examples_there, find_examples
from oelm.data.public_sets import TASKS
from oelm.data.request import Request
from oelm.data.tokens import OnProgress
from oelm.errors import CheckpointError, ConfigError, DataError
from oelm.models.hub import (
    ClassifierShape,
    fresh_classifier,
    input_names,
    is_encoder_decoder,
    model_facts,
    model_folder,
    pretrained_classifier,
    save_model_config,
    shaped_classifier,
    weights_sha256,
)
from oelm.process import StopFlag
from oelm.runs.layout import CHECKPOINTS, MODEL_FOLDER, TOKENIZER
from oelm.runs.records import ExampleRow, majority_share, read_any_config
from oelm.runs.status import StatusMetric
from oelm.seeds import stream_seed
from oelm.train.device import Compute, Estimate, choose_compute, classifier_estimate
from oelm.train.dist import ALONE, World
from oelm.train.evaluate import batched
from oelm.train.load import LoadedClassifier
from oelm.train.task import Batch, DataFacts, Judging
from oelm.train.watch import Watch

_COUNTED_FROM_PAD = ("roberta", "camembert", "mpnet", "longformer", "xmod")


def prepare_task_examples(
    config: ExamplesConfig, tokenizer: Path | None, *, vocab_size: int, progress: OnProgress, known: str = ""
) -> ExampleSet:
    """Return the encoded examples of a config, with a tokenizer (a model's folder, or a file) or one trained on them."""
    if tokenizer is not None:
        return open_or_prepare(config, tokenizer, splits=("train", "val"), known=known, progress=progress)
    source = example_source(config)
    own = own_tokenizer(source, vocab_size, progress)
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
        raise ConfigError(
            f"no task called {config.task!r}: choose one of stdlib, {', '.join(TASKS)}; or give the path of a table"
        )
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


_EVALUATED_AT_ONCE = 64


@dataclass(frozen=True)
class ClassifierEvaluation:
    """Accuracy and loss per example on a whole split, and the predictions."""

    loss: float
    accuracy: float
    predictions: list[ExampleRow]

    @property
    def criterion(self) -> float:
        return 1.0 - self.accuracy

    def headline(self) -> str:
        largest = majority_share([row.label for row in self.predictions])
        count = f"{len(self.predictions):,}, largest class {100 * largest:.2f}%"
        return f"dev loss {self.loss:.4f}, accuracy {100 * self.accuracy:.2f}% of {count}"

    def as_row(self) -> dict[str, Any]:
        return {"val_loss": self.loss, "val_accuracy": self.accuracy}


class ClassifierTask:
    """Predict the labels of an example set; `folder` is the pretrained model's, None for a fresh one."""

    def __init__(self, examples: ExampleSet, config: FinetuneConfig, compute: Compute, *, folder: Path | None) -> None:
        self.examples, self.config, self.compute, self.folder = examples, config, compute, folder
        self.micro_batch_size, self.is_writer = config.micro_batch_size, True
        # The model's if it has one: RoBERTa counts positions from it, GPT-2 searches the last token before it.
        own = model_facts(self.folder).get("pad_token_id") if self.folder is not None else None
        self.pad = examples.meta.pad if own is None or int(own) < 0 else int(own)
        for split in ("train", "val"):
            if split not in examples.splits:
                raise DataError(f"{examples.meta.name} has no {split} split ({examples.meta.source}); training needs both")
        self.chosen = _chosen(examples.splits["train"], config.examples.max_train)
        self.order = BucketOrder(examples.splits["train"].lengths[self.chosen], config.batch_size, config.seed)

    @property
    def data(self) -> DataFacts:
        meta = self.examples.meta
        counts = ", ".join(f"{split.examples:,} {name}" for name, split in meta.splits.items())
        cut = sum(split.cut for split in meta.splits.values())
        taken = f", {len(self.chosen):,} of them taken" if len(self.chosen) < meta.splits["train"].examples else ""
        labels = ", ".join(meta.labels)
        summary = f"{meta.name}: examples {counts}{taken}, labels {labels}; {cut:,} cut to {meta.max_length} tokens"
        return DataFacts.of(self.examples, summary)

    def build_model(self, run: Path, *, is_new: bool) -> nn.Module:
        model, meta = self.config.model, self.examples.meta
        if not is_new:
            return shaped_classifier(run / MODEL_FOLDER)
        if self.folder is not None:
            built = pretrained_classifier(
                self.folder, num_labels=model.num_labels, pad=self.pad, dropout=model.dropout, seed=self.config.seed
            )
        else:
            built = fresh_classifier(model.architecture, self._shape(), dropout=model.dropout, seed=self.config.seed)
        check_marks(self.examples, built, pad=self.pad)
        built.config.id2label = dict(enumerate(meta.labels))  # type: ignore[union-attr]
        built.config.label2id = {label: number for number, label in enumerate(meta.labels)}  # type: ignore[union-attr]
        if self.is_writer:
            save_model_config(built, run / MODEL_FOLDER)
        return built

    def _shape(self) -> ClassifierShape:
        model, meta = self.config.model, self.examples.meta
        return ClassifierShape.of(
            model,
            vocab_size=meta.vocab_size,
            seq_len=meta.max_length,
            num_labels=model.num_labels,
            pad=self.pad,
            end=None if model.architecture == "bert" else closing_mark(self.examples),
        )

    def join(self, world: World) -> None:
        self.micro_batch_size = world.micro_batch_size(self.config.batch_size, self.config.micro_batch_size)
        self.is_writer = world.is_writer

    def batch(self, step: int) -> Batch:
        split = self.examples.splits["train"]
        numbers = self.chosen[self.order.examples(step)]
        size = self.micro_batch_size
        parts = [split.padded(numbers[start : start + size], self.pad) for start in range(0, len(numbers), size)]
        tokens = int(sum(part.mask.sum() for part in parts))
        return Batch(numbers.tolist(), [_tensors(part, self.compute.device) for part in parts], tokens)

    def loss(self, forward: nn.Module, model: nn.Module, batch: Batch, micro_batch: int) -> Tensor:
        part: dict[str, Tensor] = batch.parts[micro_batch]
        with self.compute.autocast():
            logits = forward(**_inputs(model, part)).logits
        total = F.cross_entropy(logits.float(), part["labels"], reduction="sum")
        # Every example counts the same, also in the unequal micro-batches of an epoch's last batch.
        return total * batch.num_micro_batches / len(batch.ids)

    @property
    def has_test(self) -> bool:
        # Unlabelled examples were dropped when the set was prepared, so the split has labels.
        return "test" in self.examples.splits

    def evaluate(
        self,
        model: nn.Module,
        stop: StopFlag,
        *,
        progress: Callable[[int, int], None],
        split: Judging = "val",
        world: World = ALONE,
    ) -> ClassifierEvaluation | None:
        examples = self.examples.splits[split]
        return evaluate_split(model, examples, pad=self.pad, compute=self.compute, stop=stop, progress=progress, world=world)

    def references(self, stop: StopFlag) -> dict[str, Any]:
        splits: dict[str, Judging] = {"majority_accuracy": "val"}
        if self.has_test:
            splits["test_majority_accuracy"] = "test"
        return {name: majority_share(self.examples.splits[split].labels.tolist()) for name, split in splits.items()}

    def estimate(self, device: str) -> Estimate:
        model = self.config.model
        fresh = {**model.model_dump(), "is_encoder_decoder": model.architecture != "bert"}
        facts = model_facts(self.folder) if self.folder is not None else fresh
        return classifier_estimate(facts, self.config, self.examples.meta)

    def look_at_heads(self, model: nn.Module) -> dict[str, Any] | None:
        return None

    def reading(self, criterion: float) -> tuple[StatusMetric, float]:
        return "accuracy", 1.0 - criterion

    def figures(self, evaluations: list[dict[str, Any]]) -> dict[str, Any]:
        last = evaluations[-1]
        return {
            "final_val_loss": last["val_loss"],
            "final_accuracy": last["val_accuracy"],
            "best_val_loss": min(row["val_loss"] for row in evaluations),
            "best_accuracy": max(row["val_accuracy"] for row in evaluations),
        }


def _chosen(split: ExampleSplit, most: int) -> NDArray[np.int64]:
    """Return the numbers of the examples to train on: the same for every seed and arm, in file order."""
    count = len(split.labels)
    everything = np.arange(count, dtype=np.int64)
    if most == 0 or most >= count:
        return everything
    return np.sort(permuted(everything, count, stream_seed(0, "subset"))[:most])


def _tensors(part: PaddedExamples, device: str) -> dict[str, Tensor]:
    arrays = {"input_ids": part.ids, "token_type_ids": part.types, "attention_mask": part.mask, "labels": part.labels}
    return {name: torch.from_numpy(array).to(device, non_blocking=True) for name, array in arrays.items()}


def _inputs(model: nn.Module, part: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: part[name] for name in input_names(model)}


def evaluate_split(
    model: nn.Module,
    split: ExampleSplit,
    *,
    pad: int,
    compute: Compute,
    stop: StopFlag,
    progress: Callable[[int, int], None],
    world: World = ALONE,
) -> ClassifierEvaluation | None:
    """Return loss and accuracy on every example of a split, or None if a stop came first.

    The processes of a world take turns at the same batches as one alone, so the result does not depend on their number.
    """
    count = len(split.labels)
    parts: list[NDArray[np.float64]] = []
    done = 0
    for judged in _judged(model, split, pad, compute, world):
        if world.agree(stop):
            return None
        parts.append(judged)
        done = min(done + len(judged) // 3 * world.size, count)
        progress(done, count)
    nats, guesses = np.zeros(count), np.zeros(count, dtype=np.int64)
    for part in world.gather(parts):
        numbers, losses, predicted = part.reshape(3, -1)
        nats[numbers.astype(np.int64)], guesses[numbers.astype(np.int64)] = losses, predicted
    rows = [
        ExampleRow(example=number, label=int(split.labels[number]), predicted=int(guesses[number]), nats=float(nats[number]))
        for number in range(count)
    ]
    return ClassifierEvaluation(float(nats.mean()), float((guesses == split.labels).mean()), rows)


@torch.no_grad()
def _judged(model: nn.Module, split: ExampleSplit, pad: int, compute: Compute, world: World) -> Iterator[NDArray[np.float64]]:
    """Yield for each batch of this process one row: the examples' numbers, their losses, the predictions."""
    # Longest first: what does not fit in memory fails at once. The batches do not depend on the training batch.
    by_length = np.argsort(-split.lengths, kind="stable")
    was_training = model.training
    model.eval()
    try:
        for turn in batched(range(0, len(by_length), _EVALUATED_AT_ONCE), world.size):
            if world.rank >= len(turn):
                yield np.zeros(0)
                continue
            numbers = by_length[turn[world.rank] : turn[world.rank] + _EVALUATED_AT_ONCE]
            part = _tensors(split.padded(numbers, pad), compute.device)
            with compute.autocast():
                logits = model(**_inputs(model, part)).logits.float()
            losses = F.cross_entropy(logits, part["labels"], reduction="none")
            yield np.concatenate([numbers, losses.cpu().double().numpy(), logits.argmax(-1).cpu().numpy()])
    finally:
        model.train(was_training)


def open_classifier_task(
    config: FinetuneConfig, compute: Compute, *, run: Path, known: str, progress: OnProgress
) -> tuple[FinetuneConfig, ClassifierTask]:
    """Encode a classifier's examples with its model's tokenizer, and fill in the config from model and data.

    `known` is the fingerprint of the examples that the run started with, if it did.
    """
    source = config.model.source
    folder, digest, tokenizer = _start(source, run) if source is not None else (None, "", None)
    vocab_size = config.model.vocab_size
    examples = prepare_task_examples(config.examples, tokenizer, vocab_size=vocab_size, known=known, progress=progress)
    labels = len(examples.meta.labels)
    if config.model.num_labels not in (0, labels):
        raise ConfigError(f"model.num_labels is {config.model.num_labels}, the task {examples.meta.name} has {labels} labels")
    if folder is not None:
        check_fits_model(examples, model_facts(folder), folder)
    if config.model.sha256 not in ("", digest):
        raise DataError(
            f"{source}: these weights (sha256 {digest[:12]}...) are not those of the config ({config.model.sha256[:12]}...)"
        )
    config = config.model_copy(update={"model": config.model.model_copy(update={"num_labels": labels, "sha256": digest})})
    task = ClassifierTask(examples, config, compute, folder=folder)
    task.config = _with_length(config, task.order.batches_per_epoch)
    return task.config, task


def _start(source: str, run: Path) -> tuple[Path, str, Path]:
    """Return a pretrained model's folder, digest and tokenizer; from the run if it has started and the model is missing."""
    try:
        folder = model_folder(source)
        return folder, weights_sha256(folder), folder
    except CheckpointError:
        if not any(run.glob(f"{CHECKPOINTS}/step-*")):
            raise
        held = read_any_config(run)
        if not isinstance(held, FinetuneConfig) or held.model.source != source:
            raise
        return run / MODEL_FOLDER, held.model.sha256, run / TOKENIZER


def _with_length(config: FinetuneConfig, per_epoch: int) -> FinetuneConfig:
    """Fill in steps, and how often to evaluate and save, from the number of batches in an epoch."""
    steps = config.steps if config.epochs is None else math.ceil(config.epochs * per_epoch)
    every = min(per_epoch, steps)
    return config.model_copy(
        update={
            "steps": steps,
            "epochs": None,
            "eval_every": config.eval_every or every,
            "save_every": config.save_every or every,
        }
    )


def judge_run(
    run: LoadedClassifier, examples: ExamplesConfig | None, *, split: str, stop: StopFlag, watch: Watch
) -> tuple[str, ExampleSet, ClassifierEvaluation | None]:
    """Return the name of the data, its examples, and the evaluation (None if stopped).

    Without `examples`, the run's task is used. Labels are matched by name, in any order.
    """
    wanted = (examples or run.config.examples).model_copy(update={"max_length": run.config.examples.max_length})
    fingerprint = run.checkpoint.saved.data_fingerprint
    opened = open_or_prepare(wanted, run.tokenizer_path(), splits=(split,), known=fingerprint, progress=watch.on_preparing)
    if split not in opened.splits:
        raise ConfigError(f"{opened.meta.name} has no split '{split}'; it has: {', '.join(opened.splits)}")
    known = run.labels()
    if sorted(known) != sorted(opened.meta.labels):
        raise DataError(
            f"{opened.meta.name} has the labels {', '.join(opened.meta.labels)}, the run was trained on {', '.join(known)}"
        )
    places = np.array([known.index(label) for label in opened.meta.labels], dtype=np.int64)
    judged = replace(opened.splits[split], labels=places[opened.splits[split].labels])
    pad = int(run.model.config.pad_token_id)  # type: ignore[union-attr,arg-type]
    check_marks(opened, run.model, pad=pad)
    compute = choose_compute(run.config.device, run.config.precision)
    run.model.to(compute.device)
    evaluation = evaluate_split(run.model, judged, pad=pad, compute=compute, stop=stop, progress=watch.on_validating)
    return f"{opened.meta.name}, split {split}", opened, evaluation
