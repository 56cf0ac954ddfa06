"""Other tools' runs: read from their files, kept as labelled records under `<outputs>/imported/`."""

from __future__ import annotations

import csv
import hashlib
import json
import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError

from oelm.errors import ConfigError, DataError, suggest
from oelm.files import MAX_JSON_BYTES, Strict, dump_json, sha256_file, write_text
from oelm.runs.layout import TIMING
from oelm.text import is_safe
from oelm.train.track import FormatName, SourceRun, read_events, read_trackio, read_wandb

IMPORTED = "imported"
# So many values that agree to the last digit are no chance: one run is a copy of the other.
_COPIED = 10
_MAX_SEED = 2**63 - 1
_WITH_SEED = re.compile(r"(?P<arm>.*?)[-_. ]*seed[-_=. ]?(?P<seed>[0-9]{1,18})", re.IGNORECASE)
ShortText = Annotated[str, Field(min_length=1, max_length=200)]
Point = tuple[Annotated[int, Field(ge=0)], float]


class ImportedRun(Strict):
    """One run that another tool made. `name` is what its source calls it, `source` has the sha256 of every file read."""

    label: Literal["imported"] = "imported"
    study: ShortText
    arm: ShortText
    seed: int = Field(ge=0, le=_MAX_SEED)
    name: ShortText
    format: FormatName
    curves: dict[ShortText, Annotated[tuple[Point, ...], Field(min_length=1)]] = Field(min_length=1)
    source: dict[ShortText, Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]]


@dataclass(frozen=True)
class Placing:
    """How arm and seed follow from a run's name: by a pattern such as '{arm}-s{seed}', or given for a single run."""

    pattern: str | None = None
    arm: str | None = None
    seed: int | None = None

    def place(self, run: SourceRun) -> tuple[str, int]:
        """Return a run's arm and seed; DataError if neither name nor options give them."""
        arm, seed = self._named(run)
        arm, seed = self.arm or arm, seed if self.seed is None else self.seed
        if seed is None or not arm:
            raise DataError(
                f"{run.where}: no {'seed' if seed is None else 'arm'} is known for the run {run.name!r}; give --runs with a "
                "pattern of its name, such as '{arm}-s{seed}', or --arm and --seed where this is one run"
            )
        return arm, seed

    def _named(self, run: SourceRun) -> tuple[str, int | None]:
        if self.pattern is not None:
            found = _as_regex(self.pattern).fullmatch(run.name)
            if found is None:
                raise DataError(f"{run.where}: run {run.name!r} does not match --runs {self.pattern!r}; '*' matches anything")
            return found.groupdict().get("arm", run.arm), int(found["seed"])
        parts = ["", *run.name.split("/")]
        for above, part in reversed(list(pairwise(parts))):
            if found := _WITH_SEED.fullmatch(part):
                return run.arm or found["arm"] or above, int(found["seed"]) if run.seed is None else run.seed
        return run.arm or parts[-1], run.seed


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
        if not source.curves:
            raise DataError(f"{what}: holds no number at all")
        if (arm, seed) in runs:
            raise DataError(f"{what}: the run {runs[arm, seed].name!r} has this arm and seed, too; tell them apart with --runs")
        try:
            runs[arm, seed] = ImportedRun(
                study=study,
                arm=arm,
                seed=seed,
                name=source.name,
                format=source.format,
                curves={metric: _checked(what, metric, source) for metric in metrics or sorted(source.curves)},
                source={path.name: sha256_file(path) for path in source.files},
            )
        except ValidationError as problem:
            error = problem.errors()[0]
            raise DataError(f"{what}: {'.'.join(map(str, error['loc']))}: {error['msg']}") from None
    _refuse_copies(list(runs.values()))
    return list(runs.values())


def _checked(what: str, metric: str, run: SourceRun) -> tuple[tuple[int, float], ...]:
    """Return a curve in the order of its steps; DataError where a value is not finite or a step has two."""
    if metric not in run.curves:
        raise DataError(
            f"{what}: has no metric {metric!r}{suggest(metric, run.curves)}; it has {', '.join(sorted(run.curves))}"
        )
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
        first = known.setdefault(f"{run.arm} {sorted(run.curves.items())}", run)
        if first is not run and sum(map(len, run.curves.values())) >= _COPIED:
            raise DataError(
                f"{run.arm}: the seeds {first.seed} and {run.seed} have the same values at every step, so one is a copy of the "
                "other; leave it out"
            )


def record_path(root: Path, run: ImportedRun) -> Path:
    """Return where a run is stored; an arm whose name cannot name a folder is stored under a digest."""
    folder = run.arm
    if not is_safe(folder) or len(folder) > 60:
        digest = hashlib.sha256(run.arm.encode()).hexdigest()[:8]
        folder = f"{re.sub(r'[^A-Za-z0-9._-]+', '-', folder).strip('.-_')[:40]}-{digest}".lstrip("-")
    return root / IMPORTED / run.study / folder / f"seed-{run.seed}.json"


def write_imported(runs: Sequence[ImportedRun], root: Path, *, replace: bool = False) -> tuple[list[Path], list[Path]]:
    """Write runs under an outputs folder; return the paths written, and those that held the same run already.

    Raises DataError, and writes nothing, where another run is in the place of one, unless it is to be replaced.
    """
    for folder in (root / IMPORTED, *{record_path(root, run).parent.parent for run in runs}):
        if folder.is_symlink():
            raise DataError(f"{folder}: is a link; nothing is written through links, so replace it by a folder")
    texts = {
        record_path(root, run): dump_json(run.model_dump(mode="json", exclude_defaults=True), indent=None) + "\n"
        for run in runs
    }
    same = [path for path, text in texts.items() if path.is_file() and path.read_bytes() == text.encode()]
    new = [path for path in texts if path not in same]
    for path in new:
        if path.exists() and not replace:
            raise DataError(f"{path}: holds another run of this arm and seed; give another --name, or --replace")
        if len(texts[path]) > MAX_JSON_BYTES:
            raise DataError(f"{path}: would have {len(texts[path]):,} bytes; import fewer metrics with --metric")
    for path in new:
        write_text(path, texts[path], durable=False)
    return new, same


def read_imported(path: Path) -> ImportedRun:
    """Read one imported run; DataError where the file is damaged or in another's place."""
    try:
        if path.stat().st_size > MAX_JSON_BYTES:
            raise DataError(f"{path}: {path.stat().st_size:,} bytes, too large to be a file of ours; remove it")
        run = ImportedRun.model_validate_json(path.read_bytes())
    except (OSError, ValidationError) as problem:
        reason: Any = problem.errors()[0]["msg"] if isinstance(problem, ValidationError) else problem
        raise DataError(f"{path}: cannot be read ({reason}); import it again, or remove the file") from None
    if path.parts[-3:] != record_path(Path(), run).parts[-3:]:
        raise DataError(f"{path}: holds seed {run.seed} of {run.arm} in {run.study}; import it again, or remove the file")
    return run


def load_imported(root: Path) -> list[ImportedRun]:
    """Return every run that was imported under an outputs folder, by study, arm and seed; none where none was."""
    runs = [read_imported(path) for path in (root / IMPORTED).glob("*/*/seed-*.json")]
    return sorted(runs, key=lambda run: (run.study, run.arm, run.seed))


_MAX_BYTES = 2**30
_KEYS = ("arm", "run", "seed", "step", "metric", "value")
# What tools call a column of ours, in the order they are looked for.
_USUAL: dict[str, tuple[str, ...]] = {
    "arm": ("arm",),
    "run": ("run", "run_name", "name", "Name"),
    "seed": ("seed",),
    "step": ("step", "_step", "global_step", "Step"),
}
_NOT_FINITE = {"nan": math.nan, "inf": math.inf, "infinity": math.inf, "-inf": -math.inf, "-infinity": -math.inf}
_NUMBER = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?")
# A chart that is exported from W&B's page has a column for each run and metric, with its least and most.
_CHART = re.compile(r"(?P<run>.+) - (?P<metric>.+?)(?P<end>__MIN|__MAX)?")
# The earlier study's folders are named by its experiments; what it called the figures of timing_stats.json, and what we do.
_EXPERIMENT = re.compile(r"([A-Z0-9][A-Z0-9-]{0,59}-[0-9]{2})(_.*)?")
_FIGURES = {
    "total_wall_time": "wall_s",
    # They computed it from the best validation loss, whatever the word says.
    "final_perplexity": "best_ppl",
    "best_val_loss": "best_val_loss",
    "num_steps_measured": "measured_steps",
    "warmup_steps": "warmup_steps",
    "mean_step_time": "step_s",
    "median_step_time": "step_s_median",
    "total_validation_time": "validation_s",
    "num_validations": "validations",
}
# Progress bars are before and behind it on the same line.
_EVALUATION = re.compile(rb"\[Step ([0-9]{1,15})\] Validation - Loss: ([0-9.e+-]{1,320}), PPL: ([0-9.e+-]{1,320}[0-9])")
Row = Mapping[str, Any]


@dataclass(frozen=True)
class Columns:
    """Which column of a table is what: of `arm`, `run`, `seed`, `step`, `metric` and `value`, those that were given."""

    given: Mapping[str, str]

    @classmethod
    def parse(cls, text: str | None) -> Columns:
        """Parse 'arm=model,seed=rng'; ConfigError where it is not of that form."""
        pairs = [part.partition("=") for part in text.split(",")] if text else []
        for key, _, column in pairs:
            if key.strip() not in _KEYS or not column.strip():
                raise ConfigError(
                    f"--columns {text!r}: write pairs such as arm=model,seed=rng; the left side is one of {_KEYS}"
                )
        return cls({key.strip(): column.strip() for key, _, column in pairs})

    def resolve(self, header: Sequence[str], where: Path) -> dict[str, str]:
        """Return the columns of a table by what they are; DataError where one that was given is not in it."""
        for column in self.given.values():
            if column not in header:
                raise DataError(f"{where}: no column {column!r}{suggest(column, header)}; it has: {', '.join(header)}")
        found = {key: name for key, names in _USUAL.items() for name in reversed(names) if name in header}
        if {"metric", "value"} <= {*header}:
            found |= {"metric": "metric", "value": "value"}
        found |= self.given
        # 'run' and 'seed' side by side: the run is the arm.
        if "seed" in found and "arm" not in found and "run" in found:
            found["arm"] = found.pop("run")
        if "arm" in found and "run" not in self.given:
            found.pop("run", None)
        return found


def read_sources(
    sources: Sequence[Path], *, format: FormatName | None = None, columns: Columns | None = None
) -> list[SourceRun]:
    """Return the runs in files and folders, of the format named or the one that is recognised; ConfigError where none is."""
    runs: list[SourceRun] = []
    for source in sources:
        if not source.exists():
            raise DataError(f"{source}: no such file or folder")
        files = [source] if source.is_file() else sorted(path for path in source.rglob("*") if path.is_file())
        chosen = format or _recognised(source, files)
        pattern, read = _READERS[chosen]
        own = [path for path in files if path == source or re.fullmatch(pattern, path.name)]
        found = [run for path in own for run in _table(path, columns or Columns({}))] if read is None else read(own)
        if not found:
            raise DataError(f"{source}: holds no run of the format {chosen}; --format is one of {', '.join(FORMATS)}")
        runs += found
    return runs


def _recognised(source: Path, files: Sequence[Path]) -> FormatName:
    found = [name for name in FORMATS if any(re.fullmatch(_READERS[name][0], path.name) for path in files)]
    # Next to other tools' files, tables are something else.
    found = [name for name in found if name != "table"] or found
    if len(found) != 1:
        what = f"holds files of several formats ({', '.join(found)})" if found else "holds no file of a known format"
        raise ConfigError(f"{source}: {what}; choose one with --format: {', '.join(FORMATS)}")
    return found[0]


def _trainer(paths: Sequence[Path]) -> list[SourceRun]:
    """Return the runs of `transformers.Trainer`: of a run's checkpoints the last, whose history holds the others'."""
    newest: dict[Path, tuple[int, SourceRun]] = {}
    for path in paths:
        folder = path.parent.parent if path.parent.name.startswith("checkpoint-") else path.parent
        state = _json(path)
        if not isinstance(state, dict) or not isinstance(state.get("log_history"), list):
            raise DataError(f"{path}: has no log_history; give a trainer_state.json of transformers.Trainer")
        run = SourceRun(folder.as_posix(), path, "trainer", [path])
        for row in state["log_history"]:
            if not isinstance(row, dict) or not isinstance(row.get("step"), int):
                raise DataError(f"{path}: log_history has a row without a step; it is damaged")
            run.add(row["step"], {name: value for name, value in row.items() if name != "step"})
        last = state.get("global_step", 0)
        if folder not in newest or last > newest[folder][0]:
            newest[folder] = last, run
    return [run for _, run in newest.values()]


def _study(paths: Sequence[Path]) -> list[SourceRun]:
    """Return the earlier study's experiments, one seed each: the figures of timing_stats.json, and evaluations in the logs."""
    runs = []
    for path in paths:
        folder = path.parent
        logs = sorted(log for log in folder.iterdir() if log.suffix in (".log", ".txt") and log.is_file())
        found = _EXPERIMENT.fullmatch(folder.resolve().name)
        # It does not name its seed.
        run = SourceRun(folder.resolve().name, folder, "study", [path, *logs], arm=found[1] if found else "", seed=0)
        for log in logs:
            for step, *numbers in _EVALUATION.findall(_bytes(log)):
                loss, ppl = map(_number, (number.decode() for number in numbers))
                if loss is not None and ppl is not None and math.isfinite(loss) and math.isfinite(ppl):
                    run.add(int(step), {"val_loss": loss, "val_ppl": ppl})
        figures = _timing(path)
        steps = int(figures.get("measured_steps", 0) + figures.get("warmup_steps", 0))
        run.add(max([steps, *(step for points in run.curves.values() for step, _ in points)]), figures)
        runs.append(run)
    return runs


def _timing(path: Path) -> dict[str, float]:
    """Return the figures of the earlier study's timing_stats.json under our names; null is a missing figure."""
    timing = _json(path)
    if not isinstance(timing, dict) or "total_wall_time" not in timing:
        raise DataError(f"{path}: has no total_wall_time; give a folder of the earlier study")
    figures = {}
    for theirs, ours in _FIGURES.items():
        value = timing.get(theirs)
        if value is None:
            continue
        number = None if isinstance(value, str) else _number(value)
        if number is None or not math.isfinite(number) or number < 0:
            raise DataError(f"{path}: {theirs} is {value!r:.40}, not a number from 0 on; correct it, or write null")
        figures[ours] = number
    return figures


def _json(path: Path) -> Any:
    """Parse JSON of another tool, NaN and all; DataError with the file and the reason."""
    try:
        return json.loads(_text(path))
    except (ValueError, RecursionError) as problem:
        raise DataError(f"{path}: cannot be read as JSON ({problem})") from None


def _bytes(path: Path) -> bytes:
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise DataError(f"{path}: {path.stat().st_size:,} bytes, over the limit of {_MAX_BYTES:,}; export fewer metrics")
        return path.read_bytes()
    except OSError as problem:
        raise DataError(f"{path}: cannot be read ({problem})") from None


def _text(path: Path) -> str:
    try:
        return _bytes(path).decode("utf-8-sig")
    except UnicodeDecodeError as problem:
        raise DataError(f"{path}: cannot be read as text ({problem})") from None


def _table(path: Path, columns: Columns) -> list[SourceRun]:
    rows = list(_csv(path) if path.suffix.lower() in (".csv", ".tsv") else _json_rows(path))
    if not rows:
        raise DataError(f"{path}: has no row")
    header = list(dict.fromkeys(name for _, row in rows for name in row))
    if not columns.given and (charts := _charts(path, header, rows)):
        return charts
    keys = columns.resolve(header, path)
    runs: dict[tuple[str, str, int | None], SourceRun] = {}
    for line, row in rows:
        where = f"{path}: line {line}"
        arm = _cell(row, keys, "arm", where)
        name = _cell(row, keys, "run", where) or arm or path.with_suffix("").as_posix()
        seed = _whole(row, keys, "seed", where)
        step = _whole(row, keys, "step", where) or 0
        run = runs.setdefault((name, arm, seed), SourceRun(name, path, "table", [path], arm, seed))
        for metric, value in _measured(row, keys, where).items():
            run.curves.setdefault(metric, []).append((step, value))
    texts = {name for _, row in rows for name, value in row.items() if _is_text(value)} if "metric" not in keys else set()
    for run in runs.values():
        run.curves = {metric: points for metric, points in run.curves.items() if metric not in texts}
    return list(runs.values())


def _csv(path: Path) -> Iterator[tuple[int, Row]]:
    reader = csv.DictReader(_text(path).splitlines(), delimiter="\t" if path.suffix.lower() == ".tsv" else ",", strict=True)
    try:
        for row in reader:
            if None in row or None in row.values():
                raise DataError(f"{path}: line {reader.line_num} has not as many cells as the header")
            yield reader.line_num, row
    except csv.Error as problem:
        raise DataError(f"{path}: line {reader.line_num}: {problem}") from None


def _json_rows(path: Path) -> Iterator[tuple[int, Row]]:
    if path.suffix.lower() == ".json":
        rows = _json(path)
    else:
        try:
            rows = [json.loads(line) for line in _text(path).splitlines() if line.strip()]
        except (ValueError, RecursionError) as problem:
            raise DataError(f"{path}: a line cannot be read as JSON ({problem})") from None
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise DataError(f"{path}: must hold a list of objects, one for each row")
    yield from enumerate(rows, start=1)


def _charts(path: Path, header: Sequence[str], rows: Sequence[tuple[int, Row]]) -> list[SourceRun]:
    """Return the runs of a chart exported from W&B's page; none if the table is not one."""
    parts = {name: found for name in header if (found := _CHART.fullmatch(name))}
    if "Step" not in header or not any(found["end"] for found in parts.values()):
        return []
    runs: dict[str, SourceRun] = {}
    for line, row in rows:
        step = _whole(row, {"step": "Step"}, "step", f"{path}: line {line}") or 0
        for name, found in parts.items():
            value = _number(row.get(name))
            if found["end"] is None and value is not None:
                run = runs.setdefault(found["run"], SourceRun(found["run"], path, "wandb", [path]))
                run.curves.setdefault(found["metric"], []).append((step, value))
    return list(runs.values())


def _cell(row: Row, keys: Mapping[str, str], key: str, where: str) -> str:
    if key not in keys:
        return ""
    value = row.get(keys[key])
    text = "" if value is None else str(value).strip()
    if not text:
        raise DataError(f"{where}: the column {keys[key]!r} is empty; every row needs its {key}")
    return text


def _whole(row: Row, keys: Mapping[str, str], key: str, where: str) -> int | None:
    text = _cell(row, keys, key, where)
    number = _number(text)
    if text and (number is None or not math.isfinite(number) or number != int(number) or number < 0):
        raise DataError(f"{where}: the column {keys[key]!r} is {text!r}; a {key} is a whole number from 0 on")
    return None if number is None else int(number)


def _measured(row: Row, keys: Mapping[str, str], where: str) -> dict[str, float]:
    """Return the numbers of a row that are no keys, by metric."""
    if "metric" in keys:
        metric, value = _cell(row, keys, "metric", where), _number(row.get(keys["value"]))
        if value is None:
            raise DataError(f"{where}: the column {keys['value']!r} is {row.get(keys['value'])!r}, not a number")
        return {metric: value}
    numbers = {name: _number(value) for name, value in row.items() if name not in keys.values()}
    return {name: value for name, value in numbers.items() if value is not None}


def _number(value: Any) -> float | None:
    """Return a cell's number, not finite ones too; None where it is empty, text, or true or false."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        try:
            return float(value)
        except OverflowError:
            return math.inf
    text = value.strip() if isinstance(value, str) else ""
    return float(text) if _NUMBER.fullmatch(text) else _NOT_FINITE.get(text.lower())


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value.strip()) and _number(value) is None


# How the files of each format are called, and what reads them; tables need their columns besides.
_READERS: dict[FormatName, tuple[str, Callable[[Sequence[Path]], list[SourceRun]] | None]] = {
    "table": (r".+\.(?i:csv|tsv|json|jsonl)", None),
    "tensorboard": (r"events\.out\.tfevents\..+", read_events),
    "wandb": (r".+\.wandb", read_wandb),
    "trackio": (r".+\.db", lambda paths: [run for path in paths for run in read_trackio(path)]),
    "trainer": (r"trainer_state\.json", _trainer),
    "study": (re.escape(TIMING), _study),
}
FORMATS = tuple(_READERS)
