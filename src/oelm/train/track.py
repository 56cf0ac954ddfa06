"""Trackers: mirror a run's numbers to TensorBoard, W&B or trackio as they are written, and read what these hold."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import logging
import os
import sqlite3
import struct
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Protocol, get_args

from oelm.errors import DataError, MissingExtraError, needing, one_of
from oelm.files import read_json, room_checked
from oelm.runs.layout import CONFIG, MANIFEST, METRICS
from oelm.runs.metrics import read_metrics

if TYPE_CHECKING:
    from oelm.train.evaluate import Evaluation
    from oelm.train.watch import StepReport, Watch

log = logging.getLogger(__name__)

FormatName = Literal["table", "tensorboard", "wandb", "trackio", "trainer", "study"]
TrackerName = Literal["tensorboard", "wandb", "trackio"]
TRACKERS: tuple[TrackerName, ...] = get_args(TrackerName)
PROJECT, EVENTS = "oelm", "events.out.tfevents.*"
_TRAINED = ("loss", "lr", "tokens_per_s")
# W&B's log: its header, then LevelDB's blocks of records, each with its checksum, length and place in a whole one.
_WANDB_MAGIC, _BLOCK_BYTES = b":W&B\xe1\xbe", 1 << 15
_HEAD = struct.Struct("<IHB")
_WHOLE, _FIRST, _LAST = 1, 2, 4
_WANDB_WAIT_S = 20.0
Curves = dict[str, list[tuple[int, float]]]


@dataclass
class SourceRun:
    """One run as another tool's files hold it: curves by metric, NaN and all; `arm` and `seed` where the files name them."""

    name: str
    where: Path
    format: FormatName
    files: list[Path]
    arm: str = ""
    seed: int | None = None
    curves: Curves = field(default_factory=dict)

    def add(self, step: int, numbers: Mapping[str, Any]) -> None:
        """Add what is a number of a row; trackers write NaN and infinity as text."""
        for metric, value in numbers.items():
            number = float(value) if value in ("NaN", "Infinity", "-Infinity") else value
            if isinstance(number, int | float) and not isinstance(number, bool):
                self.curves.setdefault(metric, []).append((step, number))

    def configured(self, config: Mapping[str, Any]) -> None:
        """Take the seed from the config that a tracker keeps."""
        seed = config.get("seed")
        self.seed = seed if isinstance(seed, int) and not isinstance(seed, bool) else self.seed


class Tracker(Protocol):
    """An open tracker: `held` is what it held of this run before."""

    held: Curves

    def write(self, step: int, numbers: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


def tracked(watch: Watch, run: Path, to: TrackerName | None) -> contextlib.AbstractContextManager[Watch]:
    """Return `watch`, wrapped so that the run's numbers go to a tracker too where one is named."""
    return contextlib.nullcontext(watch) if to is None else TrackWatch(watch, run, to)


def tracker_named(name: str | None) -> TrackerName | None:
    """Return the tracker that a command line names, if any.

    Raises ConfigError where there is none of that name, and MissingExtraError where its library is not installed: before
    anything is trained, rather than at the first step.
    """
    if name is None:
        return None
    tracker = one_of("--track", name, TRACKERS)
    if importlib.util.find_spec(tracker) is None:
        raise MissingExtraError(tracker, "track" if tracker == "tensorboard" else tracker)
    return tracker


class TrackWatch:
    """A `Watch` that passes everything on to another one and mirrors the run's numbers to a tracker.

    Nothing is written before the first number: the folder is not a run's until then. With it, every row of metrics.jsonl that
    the tracker lacks is written, and none twice: a killed run repeats the steps after its checkpoint.
    """

    def __init__(self, watch: Watch, run: Path, to: TrackerName) -> None:
        self._watch, self._run, self._to = watch, run, to
        self._tracker: Tracker | None = None
        self._held: dict[str, set[int]] = {}

    def __enter__(self) -> TrackWatch:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._tracker is not None:
            # What ended the run counts, not what goes wrong in closing a file on the same full disk.
            with contextlib.suppress(OSError) if error is not None else room_checked(self._run / self._to):
                self._tracker.close()

    def on_remark(self, text: str) -> None:
        self._watch.on_remark(text)

    def on_preparing(self, what: str, done: int, total: int, tokens: int) -> None:
        self._watch.on_preparing(what, done, total, tokens)

    def on_step(self, report: StepReport) -> None:
        self._write(report.step, {name: getattr(report, name) for name in _TRAINED})
        self._watch.on_step(report)

    def on_validating(self, done: int, total: int) -> None:
        self._watch.on_validating(done, total)

    def on_evaluation(self, step: int, evaluation: Evaluation, *, is_best: bool) -> None:
        self._write(step, evaluation.as_row())
        self._watch.on_evaluation(step, evaluation, is_best=is_best)

    def _write(self, step: int, row: Mapping[str, Any]) -> None:
        with room_checked(self._run / self._to):
            if self._tracker is None:
                self._tracker = _OPENED[self._to](self._run)
                self._held = {tag: {step for step, _ in points} for tag, points in self._tracker.held.items()}
                for earlier in read_metrics(self._run / METRICS):
                    self._mirror(self._tracker, earlier["step"], earlier)
            self._mirror(self._tracker, step, row)

    def _mirror(self, tracker: Tracker, step: int, row: Mapping[str, Any]) -> None:
        new = {tag: number for tag, number in _numbers(row).items() if step not in self._held.setdefault(tag, set())}
        if new:
            tracker.write(step, new)
        for tag in new:
            self._held[tag].add(step)


def _numbers(row: Mapping[str, Any]) -> dict[str, float]:
    """Return what trackers show of a row of metrics.jsonl, under their tags."""
    if "val_loss" not in row:
        return {f"train/{name}": row[name] for name in _TRAINED}
    numbers = {name: value for name, value in row.items() if name != "step" and type(value) in (int, float)}
    return {f"val/{name.removeprefix('val_')}": value for name, value in numbers.items()}


class _TensorBoard:
    """Event files in `<run>/tensorboard`."""

    def __init__(self, run: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._folder = run / "tensorboard"
        self.held = next((found.curves for found in read_events(self._folder.glob(EVENTS))), {})
        self._writer = SummaryWriter(str(self._folder))

    def write(self, step: int, numbers: Mapping[str, float]) -> None:
        for tag, number in numbers.items():
            self._writer.add_scalar(tag, number, step)
        # As metrics.jsonl does: a kill loses nothing that a checkpoint may stand behind.
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


def _identity(run: Path) -> tuple[str, str, str, dict[str, Any]]:
    """Return a run's id, its name and group (where it lies, with and without the seed) and its config."""
    own = run.absolute().parts[-4:]
    return read_json(run / MANIFEST)["run"], "/".join(own), "/".join(own[:-1]), read_json(run / CONFIG)


class _Wandb:
    """W&B's files in `<run>/wandb`: offline unless WANDB_MODE says otherwise; `wandb sync` uploads them."""

    def __init__(self, run: Path) -> None:
        import wandb

        number, name, group, config = _identity(run)
        self.held = next((found.curves for found in read_wandb(sorted((run / "wandb").rglob("*.wandb")))), {})
        settings = wandb.Settings(silent=True, console="off", disable_git=True, disable_code=True, symlink=False)
        mode = os.environ.get("WANDB_MODE") or "offline"
        project = os.environ.get("WANDB_PROJECT") or PROJECT
        where: dict[str, Any] = {"dir": str(run), "project": project, "id": number, "name": name, "group": group}
        self._run = wandb.init(**where, config=config, mode=mode, resume="allow", settings=settings)

    def write(self, step: int, numbers: Mapping[str, float]) -> None:
        self._run.log(dict(numbers), step=step)

    def close(self) -> None:
        folder = Path(self._run.dir).parent
        self._run.finish()
        # W&B's own process writes the file, and may go on doing so, or be ended before it has.
        deadline = time.monotonic() + _WANDB_WAIT_S
        while not _is_ended(folder):
            if time.monotonic() > deadline:
                log.warning("%s: W&B has not written all points within %.0f s", folder, _WANDB_WAIT_S)
                return
            time.sleep(0.05)


class _Trackio:
    """A run of the project 'oelm' in trackio's own database on this machine (TRACKIO_DIR), or where its settings say."""

    def __init__(self, run: Path) -> None:
        import trackio
        from trackio.utils import TRACKIO_DIR

        number, name, group, config = _identity(run)
        # Trackio knows runs by their names: another run in a folder of the same name is another run.
        name = f"{name} {number[:8]}"
        stored = Path(TRACKIO_DIR) / f"{PROJECT}.db"
        found = read_trackio(stored, only=name) if stored.is_file() else []
        self.held = next((run.curves for run in found), {})
        # It prints to standard output, which is for our results.
        with contextlib.redirect_stdout(io.StringIO()):
            self._run = trackio.init(project=PROJECT, name=name, group=group, config=config, resume="allow", embed=False)

    def write(self, step: int, numbers: Mapping[str, float]) -> None:
        self._run.log(dict(numbers), step=step)

    def close(self) -> None:
        import trackio

        with contextlib.redirect_stdout(io.StringIO()):
            trackio.finish()


_OPENED: Mapping[TrackerName, Callable[[Path], Tracker]] = {"tensorboard": _TensorBoard, "wandb": _Wandb, "trackio": _Trackio}


def read_events(paths: Iterable[Path]) -> list[SourceRun]:
    """Return the run of each folder that holds some of these event files of TensorBoard, named by its path."""
    runs = []
    for place in dict.fromkeys(path.parent for path in paths):
        with needing("tensorboard", "track"):
            from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
            from tensorboard.util.tensor_util import make_ndarray
        # No sampling: every point counts.
        events = EventAccumulator(str(place), size_guidance={"scalars": 0, "tensors": 0}).Reload()
        run = SourceRun(place.as_posix(), place, "tensorboard", sorted(place.glob(EVENTS)))
        for tag in events.Tags()["scalars"]:
            run.curves[tag] = [(point.step, point.value) for point in events.Scalars(tag)]
        # Newer writers keep scalars as tensors, marked as the scalars plugin's.
        plugins = {events.SummaryMetadata(tag).plugin_data.plugin_name for tag in events.Tags()["tensors"]}
        for tag in events.PluginTagToContent("scalars") if "scalars" in plugins else ():
            run.curves[tag] = [(point.step, float(make_ndarray(point.tensor_proto))) for point in events.Tensors(tag)]
        runs.append(run)
    return runs


def read_trackio(path: Path, *, only: str | None = None) -> list[SourceRun]:
    """Return the runs in a trackio project's database, or the one of a name; nothing is written to it."""
    runs: dict[str, SourceRun] = {}
    try:
        with contextlib.closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)) as database:
            columns = {row[1] for row in database.execute("PRAGMA table_info(metrics)")}
            # Databases of before runs had ids know them by their names.
            key = "run_id" if "run_id" in columns else "run_name"
            rows = database.execute(f"SELECT {key}, run_name, step, metrics FROM metrics ORDER BY id")
            for number, name, step, numbers in rows:
                if only in (None, name):
                    runs.setdefault(number, SourceRun(name, path, "trackio", [path])).add(step, json.loads(numbers))
            if database.execute("SELECT 1 FROM sqlite_master WHERE name = 'configs'").fetchone():
                for number, text in database.execute(f"SELECT {key}, config FROM configs"):
                    if number in runs:
                        config = json.loads(text)
                        runs[number].configured(config)
                        runs[number].arm = config.get("_Group") or ""
    except (sqlite3.Error, ValueError, AttributeError) as problem:
        raise DataError(f"{path}: cannot be read as trackio's database ({problem}); give the project's .db file") from None
    return list(runs.values())


def read_wandb(paths: Iterable[Path]) -> list[SourceRun]:
    """Return the runs in .wandb files; the files of one run that was resumed are one run."""
    runs: dict[str, SourceRun] = {}
    for path in paths:
        _add_wandb(path, runs)
    return list(runs.values())


def _is_ended(folder: Path) -> bool:
    """Whether W&B has written the last record of the run in this folder."""
    from wandb.proto import wandb_internal_pb2 as proto

    record, contents = proto.Record(), [content for path in folder.glob("*.wandb") for content in _wandb_records(path)]
    record.ParseFromString(contents[-1] if contents else b"")
    return record.WhichOneof("record_type") == "exit"


def _add_wandb(path: Path, runs: dict[str, SourceRun]) -> None:
    with needing("wandb", "wandb"):
        from wandb.proto import wandb_internal_pb2 as proto
    from google.protobuf.message import DecodeError

    # Its first record says whose they are.
    run = SourceRun(path.parent.name, path, "wandb", [path])
    for content in _wandb_records(path):
        record = proto.Record()
        try:
            record.ParseFromString(content)
        except DecodeError as problem:
            raise DataError(f"{path}: cannot be read as W&B's file ({problem})") from None
        if record.WhichOneof("record_type") == "run":
            known = runs.setdefault(record.run.run_id, run)
            known.files += [] if known is run else [path]
            run, run.name, run.arm = known, record.run.display_name or record.run.run_id, record.run.run_group
            run.configured({item.key: json.loads(item.value_json) for item in record.run.config.update if item.key})
        elif record.WhichOneof("record_type") == "history":
            values = {"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in record.history.item}
            run.add(record.history.step.num, {metric: value for metric, value in values.items() if metric[:1] != "_"})


def _wandb_records(path: Path) -> Iterator[bytes]:
    """Yield the whole records of a .wandb file; what a kill tore at its end is left out, DataError where it is damaged."""
    content = path.read_bytes()
    if content and not content.startswith(_WANDB_MAGIC):
        raise DataError(f"{path}: does not begin as W&B's files do; give a run's folder or its .wandb file")
    place, parts = len(_WANDB_MAGIC) + 1, b""
    while place + _HEAD.size <= len(content):
        left = _BLOCK_BYTES - place % _BLOCK_BYTES
        if left < _HEAD.size:
            place += left
            continue
        checksum, size, kind = _HEAD.unpack_from(content, place)
        body = content[place + _HEAD.size : place + _HEAD.size + size]
        if kind == 0 or len(body) < size:
            return
        if zlib.crc32(bytes([kind]) + body) != checksum:
            raise DataError(f"{path}: is damaged at byte {place:,}; restore it from a copy")
        place += _HEAD.size + size
        parts = body if kind in (_WHOLE, _FIRST) else parts + body
        if kind in (_WHOLE, _LAST):
            yield parts
