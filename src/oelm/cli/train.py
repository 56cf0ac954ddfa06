"""`oelm train` and `oelm finetune`: train a GPT or a classifier, or resume it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from oelm.cli.options import Training, grouped
from oelm.cli.remote import default_place, quiet_unless_first, train_one
from oelm.cli.shell import path_option, reported, shown_warnings, stoppable
from oelm.errors import ConfigError
from oelm.runs.layout import TOKENIZER
from oelm.text import fixed

if TYPE_CHECKING:
    from oelm.config import FinetuneConfig, RunConfig


# What the earlier study's script called its methods.
_OLD_NAMES = {"baseline": "baseline", "oelm_v2": "oelm_freeze", "oelm_random": "oelm_random"}


@reported
@grouped
def train(
    method: Annotated[str | None, typer.Option(help="A preset: baseline (default), oelm_freeze, gaussian_matched, ...")] = None,
    data: Annotated[
        str | None,
        typer.Option("--data", "--dataset", help="A name of `oelm data list` (default stdlib), text, or a token set."),
    ] = None,
    text: Annotated[Path | None, path_option("Train on this text file, or on every text file of this folder.")] = None,
    tokenizer: Annotated[str | None, typer.Option(help="'gpt2', 'bpe:N', a tokenizer.json or its folder.")] = None,
    lr: Annotated[float | None, typer.Option("--lr", "--max_lr", help="Peak learning rate.")] = None,
    steps: Annotated[
        int | None, typer.Option("--steps", "--max_steps", help="Steps; with --out, more than before extend a finished run.")
    ] = None,
    out_dir: Annotated[
        Path | None, typer.Option("--out", "--out_dir", help="Run directory; by default one named by the config.")
    ] = None,
    init_from: Annotated[Path | None, typer.Option(help="Start from the best weights of this run, or this checkpoint.")] = None,
    exact_step: Annotated[int | None, typer.Option(help="Resume from this step's checkpoint or not at all.")] = None,
    model_type: Annotated[
        str | None, typer.Option("--model_type", help="The old script's flag: baseline, oelm_v2, oelm_random; budget paper.")
    ] = None,
    *,
    shared: Training,
) -> None:
    """Train a GPT. Rerun to resume, or to extend a finished run."""
    quiet_unless_first()
    # Before anything heavy is loaded: a signal during start-up shall end as well as one during training.
    with stoppable() as stop, shown_warnings():
        chosen: dict[str, Any] = {
            "method": _method_name(method, model_type),
            "data.source": _source(data, text),
            "data.tokenizer": tokenizer,
            "optim.lr": lr,
            "steps": steps,
            "seed": shared.seed,
        }
        if shared.config is not None and shared.budget is not None:
            raise ConfigError("--config and --budget both set the size of it all; give one of them")
        budget = shared.budget or ("paper" if model_type else "laptop")
        config = _config(shared.config, budget, chosen, shared.overrides or [], init_from)
        path = out_dir or default_place("train", budget, config, shared)
        train_one(config, path, _perplexities, shared, stop=stop, exact_step=exact_step)


def _perplexities(figures: dict[str, Any]) -> str:
    return f"best PPL {fixed(figures['best_ppl'], 2)} at step {figures['best_step']}"


def _method_name(method: str | None, model_type: str | None) -> str | None:
    if model_type is None:
        return method
    if method is not None:
        raise ConfigError("--method and --model_type both name the method; give one of them")
    if model_type not in _OLD_NAMES:
        raise ConfigError(f"--model_type {model_type!r}: the old script knew {', '.join(_OLD_NAMES)}; or use --method")
    return _OLD_NAMES[model_type]


def _source(data: str | None, text: Path | None) -> str | None:
    if data is not None and text is not None:
        raise ConfigError("--data and --text both name what to train on; give one of them")
    if text is not None:
        return str(text.absolute())
    if data == "":
        raise ConfigError("--data is empty; give the name of a corpus or a path, '.' for the current folder")
    from oelm.data.public_sets import BUILT_IN, CORPORA

    # A path is kept whole, so that the config says where the data was whatever folder it is read in. A name stays one,
    # even next to a folder of that name.
    is_path = data is not None and data not in (*BUILT_IN, *CORPORA) and Path(data).exists()
    return str(Path(str(data)).absolute()) if is_path else data


def _config(file: Path | None, budget: str, chosen: dict[str, Any], overrides: list[str], init_from: Path | None) -> RunConfig:
    from oelm.budget import budget_settings
    from oelm.config import parse_config, parse_overrides, with_overrides
    from oelm.data.prepare import check_tokenizer_asked
    from oelm.runs.records import read_config
    from oelm.train.run import resolve_start

    settings = read_config(file).as_dict() if file is not None else budget_settings(budget)
    where = str(file) if file is not None else f"budget {budget}"
    if chosen["method"] is not None:
        from oelm.method.method import resolve_method

        chosen["method"] = resolve_method(chosen["method"]).model_dump(mode="json")
    if init_from is not None:
        start = resolve_start(init_from)
        chosen["init_from"] = start.model_dump()
        # Those weights know their own tokens only.
        settings["data"]["tokenizer"] = str(Path(start.checkpoint).parents[1] / TOKENIZER)
    changes = parse_overrides(overrides, flags=chosen)
    parsed = parse_config(with_overrides(settings, changes), where=f"{where} with your options" if changes else where)
    if "data.tokenizer" in changes:
        check_tokenizer_asked(parsed.data.source, parsed.data.tokenizer)
    return parsed


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
    dev: Annotated[Path | None, typer.Option(help="The dev table to go with a table of your own.")] = None,
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
        config = _classifier_config(shared.config, budget, _whole_path(model), chosen, lengths, shared.overrides or [])
        path = out_dir or default_place("finetune", budget, config, shared)
        train_one(config, path, _accuracies, shared, stop=stop)


def _method(name: str | None) -> dict[str, Any] | None:
    from oelm.method.method import resolve_method

    # As data, so that --set method.KEY=VALUE can change a part of it.
    return None if name is None else resolve_method(name).model_dump(mode="json")


def _task(task: str | None) -> str | None:
    from oelm.data.public_sets import TASKS

    # A name stays one, even next to a folder of that name.
    return task if task in ("stdlib", *TASKS) else _whole_path(task)


def _whole_path(source: str | None) -> str | None:
    # A path is kept whole, so that the config says where it was whatever folder it is read in.
    return str(Path(source).absolute()) if source is not None and Path(source).exists() else source


def _classifier_config(
    file: Path | None, budget: str, model: str | None, chosen: dict[str, Any], lengths: dict[str, Any], overrides: list[str]
) -> FinetuneConfig:
    from oelm.budget import classifier_settings
    from oelm.config import FinetuneConfig, parse_as, parse_overrides, with_overrides
    from oelm.runs.records import read_any_config

    settings = classifier_settings(budget, model=model) if file is None else read_any_config(file).as_dict()
    where = str(file) if file is not None else f"budget {budget}"
    changes = parse_overrides(overrides, flags=chosen | lengths)
    return parse_as(
        FinetuneConfig, with_overrides(settings | lengths, changes), where=f"{where} with your options" if changes else where
    )


def _accuracies(figures: dict[str, Any]) -> str:
    final, best = 100 * figures["final_accuracy"], 100 * figures["best_accuracy"]
    return f"accuracy {final:.2f}% at the end, best {best:.2f}% at step {figures['best_step']}"
