"""`oelm train` and `oelm finetune`: train a GPT or a classifier, or resume it."""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from oelm.cli.options import Training, grouped
from oelm.cli.remote import How, refuse_worker, world_of
from oelm.cli.run import leave_by, print_summary, run_all
from oelm.cli.shell import (
    TerminalWatch,
    path_option,
    print_next,
    print_result,
    quiet_unless_first,
    reported,
    same_command,
    shown_warnings,
    stoppable,
)
from oelm.errors import ConfigError
from oelm.process import is_one_of_many, own_rank
from oelm.runs.layout import TOKENIZER
from oelm.text import fixed

if TYPE_CHECKING:
    from oelm.config import FinetuneConfig, RunConfig
    from oelm.experiments.plan import PlannedRun
    from oelm.process import StopFlag
    from oelm.train.dist import World
    from oelm.train.watch import Watch


RunOut = Annotated[
    Path | None,
    typer.Option("--out", "--out_dir", help="Run directory; of several runs the folder that holds them. Default: outputs."),
]


@dataclass(frozen=True)
class Order:
    """What `oelm train` or `oelm finetune` was asked to do: `make` gives the config of a method and a seed."""

    context: typer.Context
    command: str
    make: Callable[[str | None, int | None], RunConfig | FinetuneConfig]
    method: str | None
    budget: str
    out: Path | None
    shared: Training
    exact_step: int | None = None

    @property
    def size(self) -> str:
        return self.budget if self.shared.config is None else "custom"

    def carry_out(self, headline: Callable[[dict[str, Any]], str], stop: StopFlag) -> None:
        """Train one run in this process, or several as a queue with a comparison at its end."""
        from oelm.files import check_can_hold

        check_can_hold("--out", self.out or Path("outputs"))
        methods: list[str | None] = [None] if self.method is None else [name.strip() for name in self.method.split(",")]
        if len(methods) > 1 and "" in methods:
            raise ConfigError(f"--method {self.method!r}: a name is missing next to a comma; add it, or remove the comma")
        if self.shared.seeds is not None or len(methods) > 1:
            self._train_all(methods, stop)
            return
        config = self.make(methods[0], self.shared.seed)
        path = self.out or run_path(Path("outputs"), self.command, self.size, config)
        use = ["oelm", "generate" if self.command == "train" else "eval", str(path)]
        steps = [*self._comparison(config), shlex.join(use)]
        train_one(config, path, headline, self.shared, stop=stop, exact_step=self.exact_step, next_steps=steps)

    def _comparison(self, config: RunConfig | FinetuneConfig) -> list[str]:
        """Return the command that compares this method with the baseline over three seeds; none for a method without a name."""
        from oelm.method.method import PRESETS, method_name

        if (name := method_name(config.method)) not in PRESETS:
            return []
        if name == "baseline":
            name = "pretrained_freeze" if getattr(config.model, "source", None) else "oelm_lowrank"
        without = ("method", "model_type", "seed", "seeds", "out_dir", "exact_step", "strict", "notify")
        words = ["oelm", *same_command(self.context, without=without)[:-1], "--method", f"baseline,{name}", "--seeds", "3"]
        return [f"{shlex.join(words)}  # compared, with intervals"]

    def _train_all(self, methods: Sequence[str | None], stop: StopFlag) -> None:
        from oelm.experiments.plan import parse_seeds
        from oelm.experiments.slots import choose_slots
        from oelm.experiments.study import Study
        from oelm.train.track import tracker_named

        refuse_worker(f"{self.command} with several methods or seeds")
        alone = {"--exact-step": self.exact_step, "--strict": self.shared.strict or None}
        if given := next((option for option, value in alone.items() if value is not None), None):
            raise ConfigError(f"{given} is for one run; leave it out, or give one method and one --seed")
        if self.shared.seed is not None and self.shared.seeds is not None:
            raise ConfigError("--seed and --seeds both give seeds; a single one among several is written --seeds 7-7")
        if (twice := next((name for name in methods if methods.count(name) > 1), None)) is not None:
            raise ConfigError(f"--method: {twice!r} is given twice; remove one")
        seeds = [self.shared.seed or 0] if self.shared.seeds is None else parse_seeds(self.shared.seeds)
        root = self.out or Path("outputs")
        runs = [self._planned(method, seed, root, methods) for seed in seeds for method in methods]
        study = Study(names=(self.command,), budget=self.size, root=root)
        # Repeating the command also repeats what failed, as with one run.
        how = How(stop, retry=True, preflight=not self.shared.no_preflight, track=tracker_named(self.shared.track))
        slots = choose_slots(None, None, budget=self.size)
        ended = run_all(study, runs, slots, how, notify=self.shared.notify, catalog=None)
        print_summary(runs, self.size, what="method")
        leave_by(ended, again="repeat the command")
        print_next(root / self.command / self.size, self._next(runs, root))

    def _planned(self, method: str | None, seed: int, root: Path, methods: Sequence[str | None]) -> PlannedRun:
        from oelm.config import RunConfig
        from oelm.experiments.catalog import Experiment
        from oelm.experiments.plan import PlannedRun
        from oelm.method.method import method_name

        config = self.make(method, seed)
        name = method or method_name(config.method).split(",")[0]
        baseline = "baseline" if name != "baseline" and "baseline" in methods else None
        is_gpt = isinstance(config, RunConfig)
        experiment = Experiment(
            id=name,
            kind="language_model" if is_gpt else "classifier",
            data=config.data.source if isinstance(config, RunConfig) else config.examples.task,
            method=name,
            baseline=baseline,
            where=f"oelm {self.command}",
        )
        # The folder's name says the method once more; in lines about the run it would be noise.
        return PlannedRun(experiment, self.size, "default", seed, config, run_path(root, self.command, self.size, config))

    def _next(self, runs: Sequence[PlannedRun], root: Path) -> list[str]:
        place = [] if root == Path("outputs") else ["--out", str(root)]
        report = ["oelm", "report", self.command, "--budget", self.size, "--html", "report.html", *place]
        arms = dict.fromkeys(str(run.path.parent) for run in runs)
        return [shlex.join(report), *([shlex.join(["oelm", "compare", *arms])] if len(arms) > 1 else [])]


def run_path(root: Path, command: str, size: str, config: RunConfig | FinetuneConfig) -> Path:
    """Return the folder of a run that was given none: by what its config is made of."""
    return Path(root, command, size, config.variant, f"seed-{config.seed}")


def train_one(
    config: RunConfig | FinetuneConfig,
    path: Path,
    headline: Callable[[dict[str, Any]], str],
    shared: Training,
    *,
    stop: StopFlag,
    exact_step: int | None = None,
    next_steps: Sequence[str] = (),
) -> None:
    """Train one run, on all processes that torchrun started, and print how it ended and commands for what comes next."""
    from oelm.train.run import Options, train

    if shared.track is not None:
        from oelm.train.track import tracker_named

        # Refused now, before anything is trained.
        tracker_named(shared.track)
    options = Options(strict=shared.strict, exact_step=exact_step, preflight=not shared.no_preflight)
    with _notified(path, shared.notify), _world(config) as world:
        with TerminalWatch() as terminal, _tracked(terminal, path, shared.track if world.is_writer else None) as watch:
            result = train(config, path, stop=stop, watch=watch, options=options, world=world)
        print_result(result, headline)
        print_next(path, next_steps)


def _world(config: RunConfig | FinetuneConfig) -> contextlib.AbstractContextManager[World]:
    if not is_one_of_many():
        from oelm.train.dist import joined

        return joined("cpu")
    return world_of(config)


def _notified(run: Path, file: Path | None) -> contextlib.AbstractContextManager[None]:
    if file is None or own_rank() > 0:
        return contextlib.nullcontext()
    from oelm.experiments.notify import notifying_of

    return notifying_of(run, file)


def _tracked(watch: TerminalWatch, run: Path, tracker: str | None) -> contextlib.AbstractContextManager[Watch]:
    if tracker is None:
        return contextlib.nullcontext(watch)
    from oelm.train.track import tracked, tracker_named

    return tracked(watch, run, tracker_named(tracker))


# What the earlier study's script called its methods.
_OLD_NAMES = {"baseline": "baseline", "oelm_v2": "oelm_freeze", "oelm_random": "oelm_random"}


@reported
@grouped
def train(
    context: typer.Context,
    method: Annotated[
        str | None, typer.Option(help="A preset: baseline (default), oelm_freeze, ...; several as A,B: they are compared.")
    ] = None,
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
    out_dir: RunOut = None,
    init_from: Annotated[Path | None, typer.Option(help="Start from the best weights of this run, or this checkpoint.")] = None,
    exact_step: Annotated[int | None, typer.Option(help="Resume from this step's checkpoint or not at all.")] = None,
    model_type: Annotated[
        str | None, typer.Option("--model_type", help="The old script's flag: baseline, oelm_v2, oelm_random; budget paper.")
    ] = None,
    *,
    shared: Training,
) -> None:
    """Train a GPT, or several methods over several seeds. Rerun to resume, or to extend a finished run."""
    quiet_unless_first()
    # Before anything heavy is loaded: a signal during start-up shall end as well as one during training.
    with stoppable() as stop, shown_warnings():
        if shared.config is not None and shared.budget is not None:
            raise ConfigError("--config and --budget both set the size of it all; give one of them")
        budget = shared.budget or ("paper" if model_type else "laptop")

        def make(name: str | None, seed: int | None) -> RunConfig:
            chosen: dict[str, Any] = {
                "method": name,
                "data.source": _source(data, text),
                "data.tokenizer": tokenizer,
                "optim.lr": lr,
                "steps": steps,
                "seed": seed,
            }
            return _config(shared.config, budget, chosen, shared.overrides or [], init_from)

        order = Order(context, "train", make, _method_name(method, model_type), budget, out_dir, shared, exact_step)
        order.carry_out(_perplexities, stop)


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
    from oelm.budget import EXTRACT_TOKENS, budget_settings
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
    # As `oelm run` does; of text that the user names, all is read.
    if file is None and budget == "smoke" and "data.source" not in changes:
        settings["data"]["max_tokens"] = EXTRACT_TOKENS[budget]
    parsed = parse_config(with_overrides(settings, changes), where=f"{where} with your options" if changes else where)
    if "data.tokenizer" in changes:
        check_tokenizer_asked(parsed.data.source, parsed.data.tokenizer)
    return parsed


@reported
@grouped
def finetune(
    context: typer.Context,
    model: Annotated[
        str | None,
        typer.Option(help="A pretrained model: its folder, or org/name[@commit] of the hub; default: a small new BERT."),
    ] = None,
    task: Annotated[
        str | None, typer.Option(help="sst2, mnli, xnli, a table of your own (.tsv, .csv, .jsonl, .parquet), or stdlib.")
    ] = None,
    folder: Annotated[Path | None, typer.Option("--from", help="Take local copies of a named task from this folder.")] = None,
    method: Annotated[
        str | None, typer.Option(help="A preset: baseline (default), oelm_freeze_pretrained, ...; several as A,B.")
    ] = None,
    epochs: Annotated[float | None, typer.Option(help="How often to see every training example.")] = None,
    steps: Annotated[int | None, typer.Option(help="Steps, instead of epochs.")] = None,
    lr: Annotated[float | None, typer.Option(help="Peak learning rate.")] = None,
    max_train: Annotated[int | None, typer.Option(help="Training examples to take; 0 takes all.")] = None,
    max_length: Annotated[int | None, typer.Option(help="Longest example in tokens; longer ones are cut, and counted.")] = None,
    dev: Annotated[Path | None, typer.Option(help="The dev table to go with a table of your own.")] = None,
    columns: Annotated[str | None, typer.Option(help="Its columns, as text=A,label=B or text=A,pair=B,label=C.")] = None,
    labels: Annotated[str | None, typer.Option(help="What integer labels 0, 1, ... mean, as A,B,...")] = None,
    language: Annotated[str | None, typer.Option(help="Which language of xnli.")] = None,
    out_dir: RunOut = None,
    *,
    shared: Training,
) -> None:
    """Train a classifier, or several methods over several seeds. Rerun to resume."""
    quiet_unless_first()
    with stoppable() as stop, shown_warnings():
        if shared.config is not None and (shared.budget is not None or model is not None):
            raise ConfigError("--config already says model and size; leave out --budget and --model")
        if epochs is not None and steps is not None:
            raise ConfigError("--epochs and --steps both say how long to train; give one of them")
        lengths = {"epochs": epochs, "steps": steps or 0} if epochs is not None or steps is not None else {}
        budget = shared.budget or "laptop"

        def make(name: str | None, seed: int | None) -> FinetuneConfig:
            chosen: dict[str, Any] = {
                "method": _method(name),
                "examples.task": _task(task),
                "examples.folder": str(folder.absolute()) if folder else None,
                "examples.dev": str(dev.absolute()) if dev else None,
                **{"examples.columns": columns, "examples.labels": labels},
                "examples.language": language,
                "examples.max_length": max_length,
                "examples.max_train": max_train,
                "optim.lr": lr,
                "seed": seed,
            }
            return _classifier_config(shared.config, budget, _whole_path(model), chosen, lengths, shared.overrides or [])

        Order(context, "finetune", make, method, budget, out_dir, shared).carry_out(_accuracies, stop)


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
    final, best, largest = (100 * figures[f"{name}_accuracy"] for name in ("final", "best", "majority"))
    reference = f"always naming the largest class: {largest:.2f}%"
    return f"accuracy {final:.2f}% at the end, best {best:.2f}% at step {figures['best_step']} ({reference})"
