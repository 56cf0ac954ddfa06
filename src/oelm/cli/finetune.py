"""`oelm finetune`: train a classifier, or continue it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from oelm.cli.many import default_place, quiet_unless_first, train_one
from oelm.cli.options import Training, grouped
from oelm.cli.shell import reported, shown_warnings, stoppable
from oelm.errors import ConfigError

if TYPE_CHECKING:
    from oelm.train.config import FinetuneConfig


@reported
@grouped
def finetune(
    model: Annotated[str | None, typer.Option(help="A pretrained model: its folder, or org/name[@commit] of the hub.")] = None,
    task: Annotated[
        str | None, typer.Option(help="sst2, mnli, xnli, a table of your own (.tsv, .csv, .jsonl, .parquet), or stdlib.")
    ] = None,
    folder: Annotated[Path | None, typer.Option("--from", help="Take local copies of a named task from this folder.")] = None,
    method: Annotated[str | None, typer.Option(help="A preset: baseline (default), oelm_freeze_pretrained, ...")] = None,
    epochs: Annotated[float | None, typer.Option(help="How often to see every training example.")] = None,
    steps: Annotated[int | None, typer.Option(help="Steps, instead of epochs.")] = None,
    lr: Annotated[float | None, typer.Option(help="Peak learning rate.")] = None,
    max_train: Annotated[int | None, typer.Option(help="Training examples to take; 0 takes all.")] = None,
    max_length: Annotated[int | None, typer.Option(help="Longest example in tokens; longer ones are cut, and counted.")] = None,
    dev: Annotated[Path | None, typer.Option(help="The dev table beside a table of your own.")] = None,
    columns: Annotated[str | None, typer.Option(help="Its columns, as text=A,label=B or text=A,pair=B,label=C.")] = None,
    labels: Annotated[str | None, typer.Option(help="What integer labels 0, 1, ... mean, as A,B,...")] = None,
    language: Annotated[str | None, typer.Option(help="Which language of xnli.")] = None,
    out_dir: Annotated[Path | None, typer.Option("--out", help="Run directory; by default one named by the config.")] = None,
    *,
    shared: Training,
) -> None:
    """Train a classifier. Rerun to resume."""
    quiet_unless_first()
    with stoppable() as stop, shown_warnings():
        if shared.config is not None and (shared.budget is not None or model is not None):
            raise ConfigError("--config already says model and size; leave out --budget and --model")
        if epochs is not None and steps is not None:
            raise ConfigError("--epochs and --steps both say how long to train; give one of them")
        chosen: dict[str, Any] = {
            "method": _method(method),
            "examples.task": _task(task),
            "examples.folder": str(folder.absolute()) if folder else None,
            "examples.dev": str(dev.absolute()) if dev else None,
            **{"examples.columns": columns, "examples.labels": labels},
            "examples.language": language,
            "examples.max_length": max_length,
            "examples.max_train": max_train,
            "optim.lr": lr,
            "seed": shared.seed,
        }
        lengths = {"epochs": epochs, "steps": steps or 0} if epochs is not None or steps is not None else {}
        budget = shared.budget or "laptop"
        config = _config(shared.config, budget, _whole_path(model), chosen, lengths, shared.overrides or [])
        path = out_dir or default_place("finetune", budget, config, shared)
        train_one(config, path, _accuracies, shared, stop=stop)


def _method(name: str | None) -> dict[str, Any] | None:
    from oelm.method.method import resolve_method

    # As data, so that --set method.KEY=VALUE can change a part of it.
    return None if name is None else resolve_method(name).model_dump(mode="json")


def _task(task: str | None) -> str | None:
    from oelm.data.sets import TASKS

    # A name stays one, even beside a folder of that name.
    return task if task in ("stdlib", *TASKS) else _whole_path(task)


def _whole_path(source: str | None) -> str | None:
    # A path is kept whole, so that the config says where it was whatever folder it is read in.
    return str(Path(source).absolute()) if source is not None and Path(source).exists() else source


def _config(
    file: Path | None, budget: str, model: str | None, chosen: dict[str, Any], lengths: dict[str, Any], overrides: list[str]
) -> FinetuneConfig:
    from oelm.experiments.budget import classifier_settings
    from oelm.train.config import FinetuneConfig, parse_as, parse_overrides, read_any_config, with_overrides

    settings = classifier_settings(budget, model=model) if file is None else read_any_config(file).as_dict()
    where = str(file) if file is not None else f"budget {budget}"
    changes = parse_overrides(overrides, flags=chosen | lengths)
    return parse_as(
        FinetuneConfig, with_overrides(settings | lengths, changes), where=f"{where} with your options" if changes else where
    )


def _accuracies(figures: dict[str, Any]) -> str:
    final, best = 100 * figures["final_accuracy"], 100 * figures["best_accuracy"]
    return f"accuracy {final:.2f}% at the end, best {best:.2f}% at step {figures['best_step']}"
