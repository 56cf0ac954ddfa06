"""Options that several commands share, and groups of them that a command takes as one value."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from oelm.errors import ConfigError

if TYPE_CHECKING:
    from oelm.experiments.queue import Slots
    from oelm.experiments.study import Study
    from oelm.experiments.torchrun import Ranks

_MACHINE, _DATA, _SLURM = "Machine", "Data", "SLURM (see docs/cluster.md)"

Budget = Annotated[str, typer.Option(help="Size: paper, workstation, laptop or smoke.")]
OnlyBudget = Annotated[str | None, typer.Option("--budget", help="Only runs of this budget.")]
CatalogFile = Annotated[Path | None, typer.Option("--catalog", help="Your own experiments; default: experiments.yaml here.")]
CheckpointOption = Annotated[str, typer.Option(help="'best', 'latest' or the number of a step.")]
ExperimentIds = Annotated[list[str] | None, typer.Argument(metavar="ID...", help="Experiments or groups of `oelm list`.")]
NoPreflight = Annotated[bool, typer.Option("--no-preflight", help="Skip the checks of memory and disk.")]
Notify = Annotated[
    Path | None, typer.Option(metavar="FILE", help="YAML or JSON: command or webhook to call on failures and at the end.")
]
Out = Annotated[Path, typer.Option("--out", help="Where runs are kept.")]
Overrides = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Any setting by dotted path; repeatable.")
]
RunArgument = Annotated[Path, typer.Argument(help="A run directory, or one of its checkpoints.")]
SomeIds = Annotated[list[str] | None, typer.Argument(metavar="[ID...]", help="Experiments or groups; default: all.")]
Track = Annotated[str | None, typer.Option(metavar="TRACKER", help="Also write metrics to tensorboard, wandb or trackio.")]


def grouped(command: Callable[..., Any]) -> Callable[..., Any]:
    """Let typer see the fields of a command's dataclass parameters as separate parameters."""
    hints = get_type_hints(command, include_extras=True)
    groups: dict[str, Any] = {name: hint for name, hint in hints.items() if is_dataclass(hint)}
    parameters = []
    for own in inspect.signature(command).parameters.values():
        if own.name not in groups:
            parameters.append(own.replace(kind=own.KEYWORD_ONLY, annotation=hints[own.name]))
            continue
        kinds = get_type_hints(groups[own.name], include_extras=True)
        for field in fields(groups[own.name]):
            default = own.empty if field.default is MISSING else field.default
            parameters.append(inspect.Parameter(field.name, own.KEYWORD_ONLY, default=default, annotation=kinds[field.name]))

    @functools.wraps(command)
    def call(**given: Any) -> Any:
        values = {name: kind(**{field.name: given.pop(field.name) for field in fields(kind)}) for name, kind in groups.items()}
        return command(**given, **values)

    call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    call.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return call


@dataclass(frozen=True)
class What:
    """Which experiments, at which size, from which files: shared by `oelm run` and `oelm sweep`."""

    ids: ExperimentIds = None
    budget: Budget = "laptop"
    overrides: Overrides = None
    root: Out = Path("outputs")
    catalog: CatalogFile = None
    folder: Annotated[
        Path | None, typer.Option("--from", help="Local copies of the data sets, instead of the hub.", rich_help_panel=_DATA)
    ] = None
    model: Annotated[
        Path | None, typer.Option(help="The pretrained classifier, instead of the hub.", rich_help_panel=_DATA)
    ] = None

    def study(self, *, seeds: list[int] | None = None, tuned: bool = False, baselines: bool = True) -> Study:
        """Return the study that these options ask for."""
        from oelm.config import parse_overrides
        from oelm.experiments.study import Study

        return Study(
            names=tuple(self.ids or ()),
            budget=self.budget,
            root=self.root,
            seeds=seeds,
            changes=parse_overrides(self.overrides or []),
            model=self.model,
            copies=self.folder,
            tuned=tuned,
            baselines=baselines,
        )


@dataclass(frozen=True)
class Queueing:
    """How a queue of runs is worked off: shared by `oelm run` and `oelm sweep`."""

    retry: Annotated[bool, typer.Option("--retry", help="Retry runs that failed before.")] = False
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the plan with times; start nothing.")] = False
    notify: Notify = None
    no_preflight: NoPreflight = False
    gpus: Annotated[
        str | None, typer.Option(help="'2,3', 'auto' (the free ones) or 'none'; default: auto.", rich_help_panel=_MACHINE)
    ] = None
    jobs: Annotated[int | None, typer.Option(help="Runs at once on the CPU.", rich_help_panel=_MACHINE)] = None

    def slots(self, budget: str) -> Slots:
        from oelm.experiments.slots import choose_slots

        return choose_slots(self.gpus, self.jobs, budget=budget)


@dataclass(frozen=True)
class Spread:
    """How each run is spread over processes by torchrun, if it is."""

    nproc: Annotated[
        int | None, typer.Option(min=1, help="Processes for each run (torchrun), one a GPU.", rich_help_panel=_MACHINE)
    ] = None
    nnodes: Annotated[
        int, typer.Option(min=1, help="Hosts for each run; give each the same command.", rich_help_panel=_MACHINE)
    ] = 1
    rdzv_endpoint: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="Where the hosts meet.", rich_help_panel=_MACHINE)
    ] = None
    rdzv_id: Annotated[str | None, typer.Option(help="The name under which they meet.", rich_help_panel=_MACHINE)] = None
    max_restarts: Annotated[int, typer.Option(min=0, help="Restarts after a lost process.", rich_help_panel=_MACHINE)] = 3

    def ranks(self, queueing: Queueing) -> Ranks | None:
        """Return how a run is spread; ConfigError where other options spread it, too."""
        from oelm.experiments.torchrun import Ranks

        if self.nproc is None:
            if self.nnodes > 1 or self.rdzv_endpoint is not None or self.rdzv_id is not None:
                raise ConfigError("--nnodes, --rdzv-endpoint and --rdzv-id need --nproc: how many processes on each host")
            return None
        if queueing.gpus is not None or queueing.jobs is not None:
            raise ConfigError(
                "--gpus and --jobs spread runs, one process each; --nproc gives one run several processes, and they take the "
                "GPUs that CUDA_VISIBLE_DEVICES shows them: give one of the two"
            )
        return Ranks(self.nproc, self.nnodes, self.rdzv_endpoint, self.rdzv_id, self.max_restarts)


@dataclass(frozen=True)
class Cluster:
    """Whether SLURM runs it, and what slurm.yaml does not say already."""

    slurm: Annotated[
        bool, typer.Option("--slurm", help="Submit the runs as a job array; slurm.yaml has the rest.", rich_help_panel=_SLURM)
    ] = False
    partition: Annotated[str | None, typer.Option(help="Partition.", rich_help_panel=_SLURM)] = None
    account: Annotated[str | None, typer.Option(help="Account to charge.", rich_help_panel=_SLURM)] = None
    time: Annotated[
        str | None, typer.Option(help="Limit of each job (8:00:00); it saves and requeues.", rich_help_panel=_SLURM)
    ] = None

    @property
    def wishes(self) -> dict[str, str | None]:
        return {"partition": self.partition, "account": self.account, "time": self.time}

    def check(self) -> None:
        """Raise ConfigError where something is asked of SLURM without --slurm."""
        for name, value in self.wishes.items():
            if value is not None and not self.slurm:
                raise ConfigError(f"--{name} is SLURM's: add --slurm, or leave it out")


@dataclass(frozen=True)
class Training:
    """What `oelm train` and `oelm finetune` share."""

    budget: Annotated[str | None, typer.Option(help="Size: paper, workstation, laptop (default) or smoke.")] = None
    seed: Annotated[int | None, typer.Option(help="Decides weights, frames, data order and dropout.")] = None
    seeds: Annotated[
        str | None, typer.Option(help="Several runs: how many (3: 0 to 2), a range (5-9) or a list; gives intervals.")
    ] = None
    config: Annotated[Path | None, typer.Option(help="Start from a run's config.json instead of a budget.")] = None
    overrides: Overrides = None
    notify: Notify = None
    strict: Annotated[bool, typer.Option("--strict", help="Refuse to resume in a setting that changes the bits.")] = False
    no_preflight: NoPreflight = False
    track: Track = None
