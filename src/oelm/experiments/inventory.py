"""What a portable archive may hold, as data: the names it may use, and an inventory of every run and file in it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from oelm.files import MAX_JSON_BYTES
from oelm.names import is_device, is_safe
from oelm.runs.layout import CHECKPOINT_FILES, CONFIG, POINTERS, RECORDS, SWEEP
from oelm.strict import Strict

FORMAT: Literal["oelm-archive-1"] = "oelm-archive-1"
INVENTORY = "inventory.json"
_CHECKPOINT_FILE = re.compile(r"checkpoints/step-[0-9]{8,18}/([a-z.]+)")
_SEED = re.compile(r"seed-(0|[1-9][0-9]{0,9})")
_FIGURE = re.compile(r"[a-z][a-z0-9_]{0,63}")

Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Size = Annotated[int, Field(ge=0, lt=2**63)]
Figure = Annotated[int, Field(gt=-(2**63), lt=2**63)] | float
# A running one is not archived: its files would be of different moments.
ArchivedStatus = Literal["queued", "stopped", "failed", "done", "unknown"]


class FileEntry(Strict):
    """One file of a run, as it is in the archive; `path` is below the run."""

    path: str
    size_bytes: Size
    sha256: Digest

    @field_validator("path")
    @classmethod
    def _known(cls, path: str) -> str:
        if not is_run_file(path):
            raise ValueError(name_problem(path) or f"{_shown(path)} is no file that a run leaves")
        return path


class RunEntry(Strict):
    """One run: its place, how it ended, and, when done, its final figures from timing_stats.json."""

    path: str
    seed: int = Field(ge=0, lt=10**10)
    status: ArchivedStatus
    figures: dict[Annotated[str, Field(pattern=rf"^{_FIGURE.pattern}$")], Figure]
    files: tuple[FileEntry, ...]

    @model_validator(mode="after")
    def _whole(self) -> Self:
        if problem := run_path_problem(self.path):
            raise ValueError(problem)
        if self.seed != int(self.path.rsplit("-", 1)[1]):
            raise ValueError(f"{self.path!r} is listed with seed {self.seed}")
        names = [file.path for file in self.files]
        if names != sorted(set(names)):
            raise ValueError(f"{self.path!r} lists its files twice or out of order")
        if CONFIG not in names:
            raise ValueError(f"{self.path!r} lists no {CONFIG}, so it is no run")
        return self

    @property
    def size_bytes(self) -> int:
        return sum(file.size_bytes for file in self.files)


class SweepEntry(Strict):
    """What a sweep found for an experiment at a budget, without which tuned runs cannot be told to be tuned alike."""

    path: str
    size_bytes: Annotated[int, Field(ge=0, le=MAX_JSON_BYTES)]
    sha256: Digest

    @field_validator("path")
    @classmethod
    def _in_its_place(cls, path: str) -> str:
        parts = path.split("/")
        if name_problem(path) or len(parts) != 3 or parts[2] != SWEEP:
            raise ValueError(name_problem(path) or f"{_shown(path)} is not <experiment>/<budget>/{SWEEP}")
        return path


class Inventory(Strict):
    """`inventory.json`: the first member of an archive, and everything that may follow it, in order."""

    format: Literal["oelm-archive-1"]
    oelm: str = Field(pattern=r"^[0-9A-Za-z.+!-]{1,64}$")
    runs: tuple[RunEntry, ...] = Field(min_length=1)
    sweeps: tuple[SweepEntry, ...] = ()
    # Of what was left out and why. Printable ASCII: they reach terminals and reports.
    remarks: tuple[Annotated[str, Field(pattern=r"^[ -~]{1,1000}$")], ...] = ()

    @model_validator(mode="after")
    def _apart(self) -> Self:
        paths = [run.path for run in self.runs]
        if problem := case_problem(paths):
            raise ValueError(problem)
        if paths != sorted(set(paths)):
            raise ValueError("a run is listed twice or out of order")
        sweeps = [sweep.path for sweep in self.sweeps]
        if sweeps != sorted(set(sweeps)) or not {path.rsplit("/", 1)[0] for path in sweeps} <= budgets_of(paths):
            raise ValueError("a sweep is listed twice, out of order or without a run beside it")
        return self

    @property
    def size_bytes(self) -> int:
        return sum(run.size_bytes for run in self.runs) + sum(sweep.size_bytes for sweep in self.sweeps)

    @property
    def num_files(self) -> int:
        return sum(len(run.files) for run in self.runs) + len(self.sweeps)

    def members(self) -> Iterator[tuple[str, FileEntry | SweepEntry]]:
        """Yield the name of every member after the inventory, in the order in which they must come."""
        for run in self.runs:
            for file in run.files:
                yield f"{run.path}/{file.path}", file
        for sweep in self.sweeps:
            yield sweep.path, sweep


def budgets_of(runs: Iterable[str]) -> set[str]:
    """Return the folders of experiments at budgets that runs lie in, by the runs' places."""
    return {"/".join(run.split("/")[:2]) for run in runs}


def is_run_file(path: str) -> bool:
    """Whether a path below a run is one that an archive carries."""
    if path in RECORDS or path in POINTERS:
        return True
    found = _CHECKPOINT_FILE.fullmatch(path)
    return found is not None and found[1] in CHECKPOINT_FILES


def run_path_problem(path: str) -> str | None:
    """Return why `path` cannot be a run's place below a root, or None."""
    if problem := name_problem(path):
        return problem
    parts = path.split("/")
    if len(parts) != 4 or not _SEED.fullmatch(parts[-1]):
        return f"{_shown(path)} is not <experiment>/<budget>/<variant>/seed-<n>"
    return None


def name_problem(name: str) -> str | None:
    """Return why a name with '/' between its components must not be written on some system, or None."""
    if name.startswith(("/", "\\")) or re.match(r"[A-Za-z]:", name):
        return f"{_shown(name)} is absolute"
    for part in name.split("/"):
        if part == "..":
            return f"{_shown(name)} leads out of its folder"
        if not is_safe(part):
            return (
                f"{_shown(name)} is not made of letters, digits, '.', '_' and '-' (each part up to 64, a letter or digit first)"
            )
        if is_device(part):
            return f"{_shown(name)} holds {part!r}, which Windows keeps for a device"
    return None


def _shown(name: str) -> str:
    # Whoever made it may have made it long, to drown the message.
    return repr(name) if len(name) <= 300 else f"{name[:300]!r}..."


def case_problem(paths: Iterable[str]) -> str | None:
    """Return which two folders or files would be one on a disk that ignores case, or None."""
    spellings: dict[str, str] = {}
    for path in paths:
        parts = path.split("/")
        for count in range(1, len(parts) + 1):
            prefix = "/".join(parts[:count])
            known = spellings.setdefault(prefix.lower(), prefix)
            if known != prefix:
                return f"{prefix!r} and {known!r} differ only in case"
    return None


def final_figures(stats: Any) -> dict[str, int | float]:
    """Return the numbers of a timing_stats.json: those at its top, and of the clocks the whole wall time and mean step."""
    if not isinstance(stats, dict):
        return {}
    flat = {**stats, "wall_s": _inner(stats, "wall_s", "total"), "step_s": _inner(stats, "step_s", "mean")}
    return {key: value for key, value in flat.items() if _FIGURE.fullmatch(key) and _is_figure(value)}


def _is_figure(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 2**63


def _inner(stats: dict[str, Any], key: str, inner: str) -> Any:
    value = stats.get(key)
    return value.get(inner) if isinstance(value, dict) else None
