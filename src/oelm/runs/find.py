"""Find recorded runs, and how far each is from its baseline: files are read; nothing is locked, asked or changed."""

from __future__ import annotations

import json
import math
import os
import re
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from oelm.errors import ConfigError, DataError, RunDirError, suggest
from oelm.files import read_json
from oelm.method.method import PRESETS
from oelm.runs.layout import CONFIG, CONSOLE, LOG, STATUS
from oelm.runs.metrics import evaluations
from oelm.runs.status import Locks, State, Status, StatusMetric, decide, is_held, is_here, read_locks, read_status, silent_s
from oelm.text import NAME

_SEED = re.compile(r"seed-(0|[1-9][0-9]{0,18})")
# Experiment, budget, variant.
ArmKey = tuple[str, str, str]


@dataclass(frozen=True, slots=True)
class RunView:
    """One recorded run as it looked at one moment. `status` is None where status.json is missing or unreadable."""

    experiment: str
    budget: str
    variant: str
    seed: int
    # Text: with ten thousand runs, paths as objects cost more than everything else.
    folder: str
    status: Status | None
    state: State

    @property
    def path(self) -> Path:
        return Path(self.folder)

    @property
    def arm(self) -> ArmKey:
        return self.experiment, self.budget, self.variant

    @property
    def root(self) -> Path:
        return Path(self.folder.rsplit(os.sep, 4)[0] or os.sep)

    @property
    def name(self) -> str:
        return f"{self.experiment}/{self.budget}/{self.variant}/seed-{self.seed}"

    @property
    def log(self) -> Path | None:
        """The file that says most about the run: its own log, or its process's output if it failed before it began."""
        never_began = self.state in ("failed", "dead") and (self.status is None or self.status.step == 0)
        names = (CONSOLE, LOG) if never_began else (LOG, CONSOLE)
        return next((self.path / name for name in names if _size(self.path / name) > 0), None)


def scan(root: Path, *, only: Collection[str] = ()) -> list[RunView]:
    """Return the recorded runs below `root`, of the experiments `only` where given, in the order of their names.

    Links are not followed. A root that is not there has no runs; RunDirError where it is no folder.
    """
    if root.exists() and not root.is_dir():
        raise RunDirError(f"{root}: is a file; --out must name the folder that runs are kept in")
    found = [(place, read_status(place.folder)) for place in _places(os.fspath(root), only)]
    # Read after the statuses: a run that said it was running held its lock by then.
    locks, now = read_locks(), time.time()
    views = [_seen(place, status, locks, now=now) for place, status in found]
    return [view for view in _dead_checked(views) if view.status is not None or _is_recorded(view.folder)]


def look(view: RunView) -> RunView:
    """Return a run as it is now."""
    (seen,) = _dead_checked([_seen(view, read_status(view.folder), read_locks(), now=time.time())])
    return seen


def look_at(run: Path) -> RunView:
    """Return the view of one run directory wherever it is; its names are those of the folders it is in."""
    experiment, budget, variant, seed = ("", "", "", *run.absolute().parts)[-4:]
    match = _SEED.fullmatch(seed)
    return look(RunView(experiment, budget, variant, int(match[1]) if match else 0, str(run), None, "damaged"))


def scan_flat(folder: Path) -> list[RunView]:
    """Return a folder and those directly in it that are runs, as `oelm train --out` leaves them."""
    return [look_at(path) for path in (folder, *sorted(folder.iterdir())) if os.path.lexists(path / STATUS)]


def misplaced(root: Path) -> str:
    """Return what to do about a folder that is a run, or holds runs directly, as `oelm train --out` leaves them; else ''."""
    found = scan_flat(root) if root.is_dir() else []
    if not found:
        return ""
    what = "is itself a run" if found[0].path == root else f"holds runs directly, such as {found[0].path}"
    use = "use `oelm compare RUN RUN` or `oelm eval RUN`"
    return f"{root} {what}: {use}, or give a folder that holds EXPERIMENT/BUDGET/VARIANT/seed-N"


def _seen(place: RunView, status: Status | None, locks: Locks | None, *, now: float) -> RunView:
    here = is_here(status)
    # Only what a run says while it runs needs a second witness.
    is_claim = status is None or status.status == "running"
    held = is_held(place.folder, status, locks, same_host=here) if is_claim else None
    state = decide(status, held=held, age_s=silent_s(status, now=now) if is_claim else 0.0, same_host=here)
    return replace(place, status=status, state=state)


def _dead_checked(views: list[RunView]) -> list[RunView]:
    """Look once more at runs that seem dead: one may have ended well between the two looks, or been started again."""
    again = {view.folder: read_status(view.folder) for view in views if view.state == "dead"}
    # The table of locks is not handed out in one piece, so that one absence alone proves nothing.
    locks, now = read_locks() if again else None, time.time()
    return [_judged_again(view, again[view.folder], locks, now=now) if view.state == "dead" else view for view in views]


def _judged_again(view: RunView, status: Status | None, locks: Locks | None, *, now: float) -> RunView:
    here = is_here(status)
    # Whoever wrote since was alive then, whatever the locks say by now.
    held = is_held(view.folder, status, locks, same_host=here) if status == view.status else None
    state = decide(status, held=held, age_s=silent_s(status, now=now), same_host=here)
    return replace(view, status=status, state=state)


def _is_recorded(run: str) -> bool:
    """Whether a folder without a readable status is a run all the same, and not somebody else's."""
    return any(os.path.isfile(os.path.join(run, name)) for name in (CONFIG, STATUS))


def _places(root: str, only: Collection[str]) -> Iterator[RunView]:
    for experiment in _folders(root):
        if only and experiment not in only:
            continue
        for budget in _folders(os.path.join(root, experiment)):
            for variant in _folders(os.path.join(root, experiment, budget)):
                parent = os.path.join(root, experiment, budget, variant)
                seeds = (match for name in _folders(parent) if (match := _SEED.fullmatch(name)))
                for match in sorted(seeds, key=lambda match: int(match[1])):
                    folder = os.path.join(parent, match[0])
                    yield RunView(experiment, budget, variant, int(match[1]), folder, None, "damaged")


def _folders(parent: str | Path) -> list[str]:
    try:
        with os.scandir(parent) as entries:
            names = [entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]
    except OSError:
        # Not there, not ours to read, or gone since its name was read.
        return []
    return sorted(name for name in names if NAME.fullmatch(name))


def choose(root: Path, names: Collection[str], *, groups: Mapping[str, Collection[str]] | None = None) -> list[str]:
    """Return the experiments with folders under `root` that ids and groups stand for, whatever their case.

    ConfigError names what is not there, and what comes nearest.
    """
    there = {name.lower(): name for name in _folders(root)}
    by_group = {group.lower(): {name.lower() for name in ids} for group, ids in (groups or {}).items()}
    chosen: set[str] = set()
    for name in names:
        found = ({name.lower()} if name.lower() in there else by_group.get(name.lower(), set())) & there.keys()
        if not found:
            # Not every folder holds runs: timings and imported runs have theirs, too.
            known = sorted({place.experiment for place in _places(os.fspath(root), ())})
            hint = suggest(name, known) or f"; runs here: {', '.join(known) or 'none'}"
            raise ConfigError(f"no runs of {name!r} under {root}{hint}")
        chosen |= {there[key] for key in found}
    return sorted(chosen)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


# Commands whose runs have no entry in the catalog. Such a run's baseline is the run of the same config but the method.
OWN = ("train", "finetune")


def own_baselines(configs: Mapping[ArmKey, Mapping[str, Any]]) -> dict[ArmKey, ArmKey]:
    """Return the baseline of each arm of `oelm train` or `oelm finetune` that has one, by what the arms' configs say."""
    groups: dict[str, list[ArmKey]] = {}
    for key, config in configs.items():
        rest = {name: value for name, value in config.items() if name not in ("seed", "method")}
        groups.setdefault(json.dumps([*key[:2], rest], sort_keys=True), []).append(key)
    found: dict[ArmKey, ArmKey] = {}
    for keys in groups.values():
        baseline = next((key for key in keys if _is_baseline(configs[key].get("method"))), None)
        found |= {key: baseline for key in keys if baseline is not None and key != baseline}
    return found


def _is_baseline(method: Any) -> bool:
    """Whether a method, as a config has it, is the preset `baseline`; an older record may lack some of its fields."""
    plain = PRESETS["baseline"].model_dump(mode="json", exclude={"seed"})
    return isinstance(method, Mapping) and all(method.get(name, value) == value for name, value in plain.items())


def baselines_near(views: Sequence[RunView]) -> dict[ArmKey, ArmKey]:
    """Return the baselines of the runs of `oelm train` and `oelm finetune` among views; they need not be among them."""
    places = {(view.root, view.experiment, view.budget) for view in views if view.experiment in OWN}
    found: dict[ArmKey, ArmKey] = {}
    for root, experiment, budget in places:
        folder = root / experiment / budget
        configs = {(experiment, budget, variant): _first_config(folder / variant) for variant in _folders(folder)}
        found |= own_baselines({key: config for key, config in configs.items() if config is not None})
    return found


def baselines_of(views: Sequence[RunView], baselines: Mapping[str, str]) -> dict[ArmKey, ArmKey]:
    """Return the baseline of each arm among views that has one: as the catalog's `baselines` name it, or by the configs."""
    named = {view.arm: (baselines[view.experiment], *view.arm[1:]) for view in views if view.experiment in baselines}
    return baselines_near(views) | named


def _first_config(variant: Path) -> dict[str, Any] | None:
    """Return the config of the first run of a variant: those of its other seeds have the same one."""
    for name in _folders(variant):
        try:
            config = read_json(variant / name / CONFIG)
        except DataError:
            continue
        return config if isinstance(config, dict) else None
    return None


def baseline_folder(path: Path, baselines: Mapping[str, str]) -> Path:
    """Return where the baseline of a run, or of a folder of seeds, is; `baselines` are the catalog's. ConfigError if none."""
    is_run = (path / CONFIG).is_file()
    place = path.absolute()
    view = look_at(place if is_run else place / "seed-0")
    variant = path.parent if is_run else path
    if view.experiment in OWN:
        key = baselines_near([view]).get(view.arm)
        found = None if key is None else variant.with_name(key[2])
    else:
        name = baselines.get(view.experiment)
        found = None if name is None else Path(os.path.normpath(variant / "../../.." / name / view.budget / view.variant))
    if found is None:
        config = read_json(path / CONFIG) if is_run else _first_config(path)
        raise ConfigError(f"{path}: {_why_alone(view, config or {})} give two runs: oelm compare RUN RUN")
    found = found / path.name if is_run else found
    if not found.is_dir():
        raise ConfigError(f"{path}: its baseline is not at {found}; train it, or give two runs: oelm compare RUN RUN")
    return found


def _why_alone(view: RunView, config: Mapping[str, Any]) -> str:
    """Return why a run has no baseline, as the first words of a message."""
    if _is_baseline(config.get("method")):
        return "is itself a baseline;"
    if view.experiment in OWN:
        return "no baseline with the same text and settings was trained; run the same command with --method baseline, or"
    return "its folder is not that of an experiment with a baseline;"


_COLUMN: dict[StatusMetric, str] = {"ppl": "val_ppl", "accuracy": "val_accuracy"}


@dataclass(frozen=True, slots=True)
class Gap:
    """How far a run is from its baseline, and at which step; '%' of perplexity, or points of accuracy."""

    value: float
    unit: Literal["%", "pt"]
    step: int


def gaps(views: Sequence[RunView], baselines: Mapping[str, str]) -> list[Gap | None]:
    """Return each run's distance from its baseline's run of the same seed, where it can be told.

    `baselines` are the catalog's. A run of `oelm train` or `oelm finetune` is compared with the one of the same config.
    """
    known = {(*view.arm, view.seed): view.status for view in views}
    others = baselines_of(views, baselines)
    return [_gap_of(view, others.get(view.arm), known) for view in views]


def _gap_of(view: RunView, baseline: ArmKey | None, known: Mapping[tuple[str, str, str, int], Status | None]) -> Gap | None:
    ours = view.status
    if baseline is None or ours is None or ours.metric not in _COLUMN or ours.best is None:
        return None
    key = (*baseline, view.seed)
    other = os.path.join(view.folder.rsplit(os.sep, 4)[0] or os.sep, *baseline, f"seed-{view.seed}")
    theirs = known[key] if key in known else read_status(other)
    if theirs is None or theirs.metric != ours.metric or theirs.best is None:
        return None
    if ours.status == theirs.status == "done" and ours.steps == theirs.steps:
        return _difference(ours.best, theirs.best, ours.metric, step=ours.steps)
    # The best so far of the one that is further on would flatter it: only the same step compares.
    here, there = evaluations(view.folder), evaluations(other)
    step = max(here.keys() & there.keys(), default=None)
    column = _COLUMN[ours.metric]
    return None if step is None else _difference(here[step].get(column), there[step].get(column), ours.metric, step=step)


def _difference(ours: Any, theirs: Any, metric: StatusMetric, *, step: int) -> Gap | None:
    if not (is_number(ours) and is_number(theirs)):
        return None
    if metric == "accuracy":
        return Gap(100 * (ours - theirs), "pt", step)
    percent = 100 * (ours / theirs - 1) if theirs > 0 else math.nan
    return Gap(percent, "%", step) if math.isfinite(percent) else None


def is_number(value: Any) -> bool:
    """Whether a value from a file is a number that sums and differences can be made of."""
    return isinstance(value, int | float) and abs(value) < 1e300
