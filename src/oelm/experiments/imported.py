"""Records of runs that other tools made: each run a file under `<outputs>/imported/<study>/<arm>/`."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError

from oelm.errors import ConfigError, DataError
from oelm.files import MAX_JSON_BYTES, dump_json, sha256_file, write_text
from oelm.names import is_safe
from oelm.strict import Strict
from oelm.train.track import FormatName, SourceRun

IMPORTED = "imported"
# So many values that agree to the last digit are no chance: one run is a copy of the other.
_COPIED = 10
_MAX_SEED = 2**63 - 1
_WITH_SEED = re.compile(r"(?P<arm>.*?)[-_. ]*seed[-_=. ]?(?P<seed>[0-9]{1,18})", re.IGNORECASE)
Text = Annotated[str, Field(min_length=1, max_length=200)]
Point = tuple[Annotated[int, Field(ge=0)], float]


class ImportedRun(Strict):
    """One run that another tool made. `name` is what its source calls it, `source` has the sha256 of every file read."""

    label: Literal["imported"] = "imported"
    study: Text
    arm: Text
    seed: int = Field(ge=0, le=_MAX_SEED)
    name: Text
    format: FormatName
    curves: dict[Text, Annotated[tuple[Point, ...], Field(min_length=1)]] = Field(min_length=1)
    source: dict[Text, Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]]

    def last(self, metric: str) -> float:
        """Return the value of a metric at the last step that has one."""
        return self.curves[metric][-1][1]


@dataclass(frozen=True)
class Placing:
    """How a run's name tells its arm and its seed: by a pattern such as '{arm}-s{seed}', or given for a single run."""

    pattern: str | None = None
    arm: str | None = None
    seed: int | None = None

    def place(self, run: SourceRun) -> tuple[str, int]:
        """Return a run's arm and seed; DataError where nothing tells them."""
        arm, seed = self._named(run)
        arm, seed = self.arm or arm, seed if self.seed is None else self.seed
        if seed is None or not arm:
            missing = "seed" if seed is None else "arm"
            raise DataError(
                f"{run.where}: no {missing} is known for the run {run.name!r}; give --runs with a pattern of its name, such as "
                f"'{{arm}}-s{{seed}}', or --arm and --seed where this is one run"
            )
        return arm, seed

    def _named(self, run: SourceRun) -> tuple[str, int | None]:
        if self.pattern is not None:
            found = _as_regex(self.pattern).fullmatch(run.name)
            if found is None:
                raise DataError(
                    f"{run.where}: the run {run.name!r} does not match --runs {self.pattern!r}; '*' matches anything"
                )
            parts = found.groupdict()
            return parts.get("arm", run.arm), int(parts["seed"]) if "seed" in parts else run.seed
        if run.arm and run.seed is not None:
            return run.arm, run.seed
        parts_of_name = ["", *run.name.split("/")]
        for above, part in reversed(list(zip(parts_of_name, parts_of_name[1:], strict=False))):
            if found := _WITH_SEED.fullmatch(part):
                return run.arm or found["arm"] or above, int(found["seed"]) if run.seed is None else run.seed
        return run.arm or run.name.rpartition("/")[2], run.seed


def _as_regex(pattern: str) -> re.Pattern[str]:
    """Return a pattern such as '*/{arm}-s{seed}' as a regular expression."""
    if pattern.count("{arm}") > 1 or pattern.count("{seed}") != 1:
        raise ConfigError(f"--runs {pattern!r}: write {{seed}} once and {{arm}} at most once, as in '{{arm}}-s{{seed}}'")
    text = re.escape(pattern).replace(r"\*", ".*")
    text = text.replace(re.escape("{arm}"), "(?P<arm>.+?)").replace(re.escape("{seed}"), "(?P<seed>[0-9]{1,18})")
    return re.compile(text)


def imported_runs(
    found: Sequence[SourceRun], *, study: str, placing: Placing, metrics: Collection[str] = ()
) -> list[ImportedRun]:
    """Return runs as records, with the metrics named or all of them; DataError says which run cannot be used and why."""
    if not is_safe(study):
        raise ConfigError(f"--name {study!r}: use letters, digits, '.', '_' and '-', a letter or digit first")
    runs: dict[tuple[str, int], ImportedRun] = {}
    for source in found:
        arm, seed = placing.place(source)
        what = f"{source.where}: {arm}, seed {seed}"
        if (arm, seed) in runs:
            raise DataError(f"{what}: the run {runs[arm, seed].name!r} has this arm and seed, too; tell them apart with --runs")
        try:
            runs[arm, seed] = ImportedRun(
                study=study,
                arm=arm,
                seed=seed,
                name=source.name,
                format=source.format,
                curves={metric: _checked(what, metric, source) for metric in _chosen(what, source, metrics)},
                source={path.name: sha256_file(path) for path in source.files},
            )
        except ValidationError as problem:
            error = problem.errors()[0]
            raise DataError(f"{what}: {'.'.join(map(str, error['loc']))}: {error['msg']}") from None
    _refuse_copies(list(runs.values()))
    return list(runs.values())


def _chosen(what: str, run: SourceRun, metrics: Collection[str]) -> Collection[str]:
    if not run.curves:
        raise DataError(f"{what}: holds no number at all")
    for metric in metrics:
        if metric not in run.curves:
            raise DataError(f"{what}: has no metric {metric!r}; it has {', '.join(sorted(run.curves))}")
    return metrics or sorted(run.curves)


def _checked(what: str, metric: str, run: SourceRun) -> tuple[tuple[int, float], ...]:
    """Return a curve in the order of its steps; DataError where a value is not finite or a step has two."""
    known: dict[int, float] = {}
    for step, value in run.curves[metric]:
        if not math.isfinite(value):
            raise DataError(
                f"{what}: {metric} is {value} at step {step}. A run that diverged has no figure to compare: correct the file, "
                "or import only other metrics with --metric"
            )
        # Trackers write a step again when a run resumes or is evaluated twice; in a table a second row is a second run.
        if step in known and (run.format == "table" or known[step] != value):
            raise DataError(
                f"{what}: {metric} has two values at step {step}, {known[step]} and {value}; keep one row for each "
                "arm, seed and step"
            )
        known[step] = value
    return tuple(sorted(known.items()))


def _refuse_copies(runs: Sequence[ImportedRun]) -> None:
    known: dict[str, ImportedRun] = {}
    for run in runs:
        if sum(map(len, run.curves.values())) < _COPIED:
            continue
        first = known.setdefault(f"{run.arm} {sorted(run.curves.items())}", run)
        if first is not run:
            raise DataError(
                f"{run.arm}: the seeds {first.seed} and {run.seed} have the same values at every step, so one is a copy of the "
                "other; leave it out"
            )


def run_path(root: Path, run: ImportedRun) -> Path:
    """Return where a run is kept; an arm whose name is no folder's has its digest there."""
    folder = run.arm
    if not is_safe(folder) or len(folder) > 60:
        folder = (
            f"{re.sub(r'[^A-Za-z0-9._-]+', '-', folder).strip('.-_')[:40]}-{hashlib.sha256(run.arm.encode()).hexdigest()[:8]}"
        )
    return root / IMPORTED / run.study / folder.lstrip("-") / f"seed-{run.seed}.json"


def write_imported(runs: Sequence[ImportedRun], root: Path, *, replace: bool = False) -> tuple[list[Path], list[Path]]:
    """Write runs under an outputs folder; return the paths written, and those that held the same run already.

    Raises DataError, and writes nothing, where another run is in the place of one, unless it is to be replaced.
    """
    for folder in (root / IMPORTED, *{run_path(root, run).parent.parent for run in runs}):
        if folder.is_symlink():
            raise DataError(f"{folder}: is a link; nothing is written through links, so replace it by a folder")
    texts = {
        run_path(root, run): dump_json(run.model_dump(mode="json", exclude_defaults=True), indent=None) + "\n" for run in runs
    }
    same = [path for path, text in texts.items() if path.is_file() and path.read_bytes() == text.encode()]
    if other := next((path for path in texts if path.exists() and path not in same), None):
        if not replace:
            raise DataError(f"{other}: holds another run of this arm and seed; give another --name, or --replace")
    for path, text in texts.items():
        if len(text) > MAX_JSON_BYTES:
            raise DataError(f"{path}: would have {len(text):,} bytes; import fewer metrics with --metric")
    for path in texts.keys() - set(same):
        write_text(path, texts[path], durable=False)
    return [path for path in texts if path not in same], same


def read_imported(path: Path) -> ImportedRun:
    """Read one imported run; DataError where the file is damaged or in another's place."""
    try:
        if path.stat().st_size > MAX_JSON_BYTES:
            raise DataError(f"{path}: {path.stat().st_size:,} bytes, too large to be a file of ours; remove it")
        run = ImportedRun.model_validate_json(path.read_bytes())
    except (OSError, ValidationError) as problem:
        reason: Any = problem.errors()[0]["msg"] if isinstance(problem, ValidationError) else problem
        raise DataError(f"{path}: cannot be read ({reason}); import it again, or remove the file") from None
    if path.parts[-3:] != run_path(Path(), run).parts[-3:]:
        raise DataError(f"{path}: holds seed {run.seed} of {run.arm} in {run.study}; import it again, or remove the file")
    return run


def load_imported(root: Path) -> list[ImportedRun]:
    """Return every run that was imported under an outputs folder, by study, arm and seed; none where none was."""
    runs = [read_imported(path) for path in (root / IMPORTED).glob("*/*/seed-*.json")]
    return sorted(runs, key=lambda run: (run.study, run.arm, run.seed))


def studies(runs: Sequence[ImportedRun]) -> Mapping[str, Mapping[str, Mapping[int, ImportedRun]]]:
    """Return runs by study, arm and seed, in their order."""
    found: dict[str, dict[str, dict[int, ImportedRun]]] = {}
    for run in runs:
        found.setdefault(run.study, {}).setdefault(run.arm, {})[run.seed] = run
    return found
