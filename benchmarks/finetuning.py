"""Fine-tuning steps of our loop and of transformers.Trainer on the same examples, batch size and precision, in turn."""

from __future__ import annotations

import argparse
import itertools
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import transformers
from record import keep, parse_options
from transformers import (
    DataCollatorWithPadding,
    PreTrainedTokenizerFast,
    PrinterCallback,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from oelm.config import FinetuneConfig, parse_as
from oelm.data.example_sets import ExampleSet, prepare_examples
from oelm.data.examples import folder_examples, own_tokenizer, stdlib_examples
from oelm.data.public_sets import TASKS
from oelm.models.hub import ClassifierShape, fresh_classifier
from oelm.stats import mean_ratio
from oelm.train.classify import ClassifierTask
from oelm.train.device import Compute
from oelm.train.optim import build_optimizer, set_learning_rate
from oelm.train.step import train_step

BATCH = 16
WARMUP = 3


def config() -> FinetuneConfig:
    settings = {
        "model": {},
        "examples": {"task": "sst2"},
        "optim": {"lr": 5e-5},
        "schedule": {"warmup_steps": 0},
        "steps": 1000,
        "batch_size": BATCH,
        "micro_batch_size": BATCH,
    }
    return parse_as(FinetuneConfig, settings, where="benchmark")


def model(examples: ExampleSet) -> Any:
    meta = examples.meta
    # The shape of a small pretrained encoder: 6 layers, 384 wide.
    shape = ClassifierShape(max(meta.vocab_size, 30522), 512, 384, 6, 12, 1536, len(meta.labels), meta.pad, end=None)
    return fresh_classifier("bert", shape, dropout=None, seed=0)


def our_seconds(examples: ExampleSet, built: Any, *, first: int, steps: int) -> list[float]:
    task = ClassifierTask(examples, config(), Compute("cpu", "float32", "benchmark"), folder=None)
    optimizer = build_optimizer(built, config().optim, device="cpu")
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    seconds = []
    for step in range(first, first + steps + WARMUP):
        began = time.perf_counter()
        batch = task.batch(step)
        set_learning_rate(optimizer, 5e-5)
        train_step(
            lambda n, batch=batch: task.loss(built, built, batch, n),  # type: ignore[misc]
            built,
            optimizer,
            scaler,
            num_micro_batches=batch.num_micro_batches,
            clip_norm=1.0,
            noise_seed=0,
            batch_ids=batch.ids,
            step=step,
        )
        seconds.append(time.perf_counter() - began)
    return seconds[WARMUP:]


class Stopwatch(TrainerCallback):
    """Times from the end of one step to the end of the next, data loading included."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.ends.append(time.perf_counter())


def trainer_seconds(
    rows: list[dict[str, Any]], tokenizer: Any, built: Any, *, seed: int, steps: int, grouped: bool
) -> list[float]:
    watch = Stopwatch()
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            per_device_train_batch_size=BATCH,
            max_steps=steps + WARMUP + 1,
            learning_rate=5e-5,
            weight_decay=0.01,
            report_to=[],
            save_strategy="no",
            logging_strategy="no",
            disable_tqdm=True,
            use_cpu=True,
            seed=seed,
            train_sampling_strategy="group_by_length" if grouped else "random",
        )
        collator = DataCollatorWithPadding(tokenizer)
        trainer = Trainer(model=built, args=arguments, train_dataset=rows, data_collator=collator, callbacks=[watch])
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    return [end - begin for begin, end in itertools.pairwise(watch.ends)][WARMUP:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=6)
    measured = [
        parser.add_argument("--from", dest="folder", type=Path, help="a folder with SST-2; else the standard library's task"),
        parser.add_argument("--tokenizer", type=Path, help="the tokenizer's folder for SST-2"),
        parser.add_argument("--steps", type=int, default=15, help="steps of each contender in a round"),
    ]
    options = parse_options(parser, measured=measured)
    transformers.logging.set_verbosity_error()
    if options.folder is not None:
        source = folder_examples(TASKS["sst2"], options.folder, language="en", labels=None)
        examples = prepare_examples(source, tokenizer=str(options.tokenizer), max_length=128)
    else:
        source = stdlib_examples()
        examples = prepare_examples(source, tokenizer=str(own_tokenizer(source, 4096)), max_length=128)
    split = examples.splits["train"]
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(examples.path / "tokenizer.json"), pad_token="[PAD]")
    starts = split.ends - split.lengths
    rows = [
        {"input_ids": split.ids[start:end].tolist(), "labels": int(label)}
        for start, end, label in zip(starts, split.ends, split.labels, strict=True)
    ]
    compare(examples, rows, tokenizer, options)


def compare(examples: ExampleSet, rows: list[dict[str, Any]], tokenizer: Any, options: Any) -> None:
    print(f"{examples.meta.name}, batch {BATCH}, float32, {torch.get_num_threads()} threads")
    print(f"{options.rounds} rounds of {options.steps} steps in turn")
    built = model(examples)
    seconds: dict[str, list[float]] = {"ours": [], "Trainer": [], "Trainer, grouped by length": []}
    for round_number in range(options.rounds):
        first = round_number * (options.steps + WARMUP)
        seconds["ours"].append(sum(our_seconds(examples, built, first=first, steps=options.steps)))
        for name, grouped in (("Trainer", False), ("Trainer, grouped by length", True)):
            taken = trainer_seconds(rows, tokenizer, built, seed=round_number, steps=options.steps, grouped=grouped)
            seconds[name].append(sum(taken))
    for name, values in seconds.items():
        print(f"  {name:27} {BATCH * options.steps / sorted(values)[len(values) // 2]:7.1f} examples/s (median round)")
    alone, by_length = (mean_ratio(seconds[name], seconds["ours"]) for name in ("Trainer", "Trainer, grouped by length"))
    print(f"  ours is {alone} as fast as Trainer, {by_length} when it groups by length")
    if options.record:
        figures = {"plain": alone, "grouped": by_length}
        keep("finetuning", figures, rounds=options.rounds, threads=torch.get_num_threads())


if __name__ == "__main__":
    main()
