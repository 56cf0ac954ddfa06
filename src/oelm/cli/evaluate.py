"""`oelm eval`: score a run on other text."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from oelm.cli.options import Checkpoint, RunFolder
from oelm.cli.shell import TerminalWatch, path_option, reported, say
from oelm.decimals import fixed
from oelm.errors import ConfigError, StoppedError

if TYPE_CHECKING:
    from oelm.train.classify import ClassifierEvaluation
    from oelm.train.evaluate import Evaluation


@reported
def evaluate(
    run: RunFolder,
    data: Annotated[str | None, typer.Option(help="A token set; by default the run's own.")] = None,
    text: Annotated[Path | None, path_option("A text file or folder, tokenized as the run's own text was.")] = None,
    split: Annotated[str, typer.Option(help="train, val or test, where the token set has it.")] = "val",
    checkpoint: Checkpoint = "best",
    documents: Annotated[
        Path | None, typer.Option(help="Write each document's loss, or example's prediction, to this file, as JSON lines.")
    ] = None,
    task: Annotated[str | None, typer.Option(help="A classifier: another task with the same labels, or a table.")] = None,
    folder: Annotated[Path | None, typer.Option("--from", help="Local copies of that task.")] = None,
    language: Annotated[str | None, typer.Option(help="Which language of xnli.")] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Windows at a time; changes speed only.")] = 16,
) -> None:
    """Print a language model's loss, perplexity and bits per byte, or a classifier's accuracy, over a whole split."""
    from oelm.files import dump_json, write_text
    from oelm.train.load import LoadedRun, load_any
    from oelm.train.score import score_run
    from oelm.train.stop import StopFlag

    if data is not None and text is not None:
        raise ConfigError("--data and --text both name what to score on; give one of them")
    loaded = load_any(run, which=checkpoint)
    is_model = isinstance(loaded, LoadedRun)
    unfit = {"--task": task, "--from": folder, "--language": language} if is_model else {"--data": data, "--text": text}
    for option, value in unfit.items():
        if value is not None:
            kind = "a language model's" if is_model else "a classifier's"
            raise ConfigError(f"{option} has no meaning for {kind} run; leave it out")
    if task is None and (folder is not None or language is not None):
        raise ConfigError("--from and --language say more about --task; give that too")
    evaluation: Evaluation | ClassifierEvaluation | None
    with StopFlag() as stop, TerminalWatch() as watch:
        if isinstance(loaded, LoadedRun):
            name, evaluation = score_run(
                loaded, data=data, text=text, split=split, batch_size=batch_size, stop=stop, watch=watch
            )
        else:
            from oelm.train.config import ExamplesConfig
            from oelm.train.judge import judge_run

            examples = None
            if task is not None:
                # A table is judged whole: it is its own dev split, and reads as the run's own did.
                dev = str(Path(task).absolute()) if Path(task).is_file() else None
                examples = ExamplesConfig(
                    task=dev or task,
                    folder=str(folder.absolute()) if folder else None,
                    dev=dev,
                    columns=loaded.config.examples.columns if dev else None,
                    labels=",".join(loaded.labels()) if dev else None,
                    language=language or "en",
                )
            name, _, evaluation = judge_run(loaded, examples, split=split, stop=stop, watch=watch)
    if evaluation is None:
        raise StoppedError("stopped before the end, so there is no figure; repeat the same command")
    if documents is not None:
        write_text(documents, "".join(dump_json(row, indent=None) + "\n" for row in evaluation.predictions))
    _print(name, loaded.step, evaluation, documents)


def _print(name: str, step: int, evaluation: Evaluation | ClassifierEvaluation, documents: Path | None) -> None:
    from oelm.train.evaluate import Evaluation

    if not isinstance(evaluation, Evaluation):
        say(f"{name}, model of step {step:,}: {evaluation.headline()}")
        if documents is not None:
            say(f"predictions by example: {documents}")
        return
    tokens = sum(int(row["tokens"]) for row in evaluation.documents)
    lines = [
        f"{name}: {tokens:,} tokens in {len(evaluation.documents):,} documents, model of step {step:,}",
        f"loss {evaluation.loss:.4f} nats per token, PPL {fixed(evaluation.perplexity, 3)}, "
        f"{evaluation.bits_per_byte:.4f} bits per byte",
    ]
    if documents is not None:
        lines.append(f"losses by document: {documents}")
    say("\n".join(lines))
