"""The files other tools leave, read as runs: tables, TensorBoard, W&B, trackio, `transformers.Trainer`, the earlier study."""

from __future__ import annotations

import csv
import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from oelm.errors import ConfigError, DataError, suggest
from oelm.experiments.earlier import TIMING, read_earlier
from oelm.experiments.imported import FormatName, SourceRun
from oelm.train.track import Tracked, read_events, read_trackio, read_wandb

FORMATS: tuple[FormatName, ...] = get_args(FormatName)
_MAX_BYTES = 2**30
_TABLES = (".csv", ".tsv", ".json", ".jsonl")
_STATE = "trainer_state.json"
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
        chosen = format or _recognised(source)
        found = _tables(source, columns or Columns({})) if chosen == "table" else _READERS[chosen](source)
        if not found:
            raise DataError(f"{source}: holds no run of the format {chosen}; --format is one of {', '.join(FORMATS)}")
        runs += found
    return runs


def _recognised(source: Path) -> FormatName:
    tells: dict[FormatName, Callable[[Path], bool]] = {
        "tensorboard": lambda path: path.name.startswith("events.out.tfevents."),
        "wandb": lambda path: path.suffix == ".wandb",
        "trackio": lambda path: path.suffix == ".db",
        "trainer": lambda path: path.name == _STATE,
        "study": lambda path: path.name == TIMING,
    }
    files = [source] if source.is_file() else [path for path in source.rglob("*") if path.is_file()]
    found = [name for name, is_one in tells.items() if any(map(is_one, files))]
    if not found and any(path.suffix.lower() in _TABLES for path in files):
        return "table"
    if len(found) != 1:
        what = f"holds files of several formats ({', '.join(found)})" if found else "holds no file of a known format"
        raise ConfigError(f"{source}: {what}; choose one with --format: {', '.join(FORMATS)}")
    return found[0]


def _of_tracker(format: FormatName, source: Path, found: Iterable[Tracked]) -> list[SourceRun]:
    runs = []
    for run in found:
        seed = run.config.get("seed")
        own = seed if isinstance(seed, int) and not isinstance(seed, bool) else None
        runs.append(SourceRun(run.name, source, format, run.curves, run.files, arm=run.group, seed=own))
    return runs


def _events(source: Path) -> list[SourceRun]:
    runs = read_events(source.parent if source.is_file() else source)
    for run in runs:
        run.name = _joined(source.parent if source.is_file() else source, run.name)
    return _of_tracker("tensorboard", source, runs)


def _joined(folder: Path, inner: str) -> str:
    """Return the name of a run by its place: the folder as it was given, and what lies below."""
    return (folder / inner).as_posix() if folder != Path() else inner


def _trackio(source: Path) -> list[SourceRun]:
    files = [source] if source.is_file() else sorted(source.rglob("*.db"))
    return [run for path in files for run in _of_tracker("trackio", path, read_trackio(path))]


def _trainer(source: Path) -> list[SourceRun]:
    """Return the runs of `transformers.Trainer`: of a run's checkpoints the last, whose history holds the others'."""
    newest: dict[Path, tuple[int, SourceRun]] = {}
    for path in [source] if source.is_file() else sorted(source.rglob(_STATE)):
        folder = path.parent.parent if path.parent.name.startswith("checkpoint-") else path.parent
        state = _json(path)
        if not isinstance(state, dict) or not isinstance(state.get("log_history"), list):
            raise DataError(f"{path}: has no log_history; give a trainer_state.json of transformers.Trainer")
        run = Tracked(folder.as_posix())
        for row in state["log_history"]:
            if not isinstance(row, dict) or not isinstance(row.get("step"), int):
                raise DataError(f"{path}: log_history has a row without a step; it is damaged")
            run.add(row["step"], {name: value for name, value in row.items() if name != "step"})
        last = state.get("global_step", 0)
        if folder not in newest or last > newest[folder][0]:
            newest[folder] = last, SourceRun(run.name, path, "trainer", run.curves, [path])
    return [run for _, run in newest.values()]


def _json(path: Path) -> Any:
    """Parse JSON of another tool, NaN and all; DataError with the file and the reason."""
    try:
        return json.loads(_text(path))
    except (ValueError, RecursionError) as problem:
        raise DataError(f"{path}: cannot be read as JSON ({problem})") from None


def _text(path: Path) -> str:
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise DataError(f"{path}: {path.stat().st_size:,} bytes, over the limit of {_MAX_BYTES:,}; export fewer metrics")
        return path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as problem:
        raise DataError(f"{path}: cannot be read as text ({problem})") from None


def _tables(source: Path, columns: Columns) -> list[SourceRun]:
    files = [source] if source.is_file() else sorted(path for path in source.rglob("*") if path.suffix.lower() in _TABLES)
    return [run for path in files for run in _table(path, columns)]


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
        run = runs.setdefault((name, arm, seed), SourceRun(name, path, "table", {}, [path], arm=arm, seed=seed))
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
    """Return the runs of a chart exported from W&B's page; none where the table is no such thing."""
    parts = {name: found for name in header if (found := _CHART.fullmatch(name))}
    if "Step" not in header or not any(found["end"] for found in parts.values()):
        return []
    runs: dict[str, SourceRun] = {}
    for line, row in rows:
        step = _whole(row, {"step": "Step"}, "step", f"{path}: line {line}") or 0
        for name, found in parts.items():
            value = _number(row.get(name))
            if found["end"] is None and value is not None:
                run = runs.setdefault(found["run"], SourceRun(found["run"], path, "wandb", {}, [path]))
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
        return float(value)
    text = value.strip() if isinstance(value, str) else ""
    return float(text) if _NUMBER.fullmatch(text) else _NOT_FINITE.get(text.lower())


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value.strip()) and _number(value) is None


_READERS: dict[FormatName, Callable[[Path], list[SourceRun]]] = {
    "tensorboard": _events,
    "wandb": lambda source: _of_tracker("wandb", source, read_wandb(source)),
    "trackio": _trackio,
    "trainer": _trainer,
    "study": read_earlier,
}
