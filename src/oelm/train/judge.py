"""Evaluate a loaded classifier on any examples with its labels."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from oelm.config import ExamplesConfig
from oelm.data.encoded import ExampleSet
from oelm.errors import ConfigError, DataError
from oelm.train.classify import ClassifierEvaluation, evaluate_split
from oelm.train.device import choose_compute
from oelm.train.load import LoadedClassifier
from oelm.train.stop import StopFlag
from oelm.train.task_examples import check_marks, open_or_prepare
from oelm.train.watch import Watch


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
