"""The settings of the user's cluster: partition, account, GPUs, time and modules, from slurm.yaml and the command."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, Field, ValidationError

from oelm.errors import ConfigError, suggest
from oelm.experiments.yamlfile import YamlFile, read_yaml
from oelm.strict import Strict

FILE = "slurm.yaml"
# Values go into a script: each must be one harmless word to the shell and to sbatch.
_WORD = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:,=/+@%-]{0,199}")
_TIME = re.compile(r"(?:(\d{1,3})-)?(\d{1,6})(?::(\d{1,6}))?(?::(\d{1,2}))?")


def _word(text: str) -> str:
    if not _WORD.fullmatch(text):
        raise ValueError(f"{text!r}: use letters, digits and ._:,=/+@%-, beginning with a letter or digit")
    return text


def _time(text: str) -> str:
    parse_time(text)
    return text


Word = Annotated[str, AfterValidator(_word)]


class ClusterConfig(Strict):
    """`slurm.yaml`: options of sbatch for every job. Fields are described in docs/cluster.md."""

    partition: Word | None = None
    # For jobs without a GPU (preparing data, the report), if `partition` requires one.
    cpu_partition: Word | None = None
    account: Word | None = None
    qos: Word | None = None
    constraint: Word | None = None
    gres: Word | None = None
    time: Annotated[str, AfterValidator(_time)] | None = None
    cpus_per_task: int = Field(default=1, gt=0, le=1024)
    mem: Word | None = None
    array_limit: int | None = Field(default=None, gt=0)
    modules: tuple[Word, ...] = ()
    # A run is asked to save this long before the time limit; SLURM may be a minute early.
    grace_s: int = Field(default=180, ge=10)

    @property
    def wants_gpu(self) -> bool:
        return self.gres is not None and self.gres.startswith("gpu")

    @property
    def time_s(self) -> int | None:
        return None if self.time is None else parse_time(self.time)


def parse_time(text: str) -> int:
    """Return the seconds of a time of sbatch: minutes, minutes:seconds, h:mm:ss, d-h, d-h:mm or d-h:mm:ss."""
    found = _TIME.fullmatch(text)
    if found is None:
        raise ValueError(f"{text!r}: write a time as 8:00:00 (h:mm:ss), 90 (minutes) or 1-12 (days-hours)")
    days, *rest = found.groups()
    numbers = [int(part) for part in rest if part is not None]
    if days is not None:
        hours, minutes, seconds = [*numbers, 0, 0][:3]
        return ((int(days) * 24 + hours) * 60 + minutes) * 60 + seconds
    if len(numbers) == 3:
        return (numbers[0] * 60 + numbers[1]) * 60 + numbers[2]
    return numbers[0] * 60 + (numbers[1] if len(numbers) == 2 else 0)


def config_path() -> Path | None:
    """Return slurm.yaml of this folder, else of the user's configuration folder, else None."""
    home = Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "oelm"
    return next((path for path in (Path(FILE), home / FILE) if path.is_file()), None)


def cluster_config(changes: dict[str, Any]) -> ClusterConfig:
    """Return slurm.yaml with the changes of the command; ConfigError names file, line and the nearest known key."""
    path = config_path()
    file = read_yaml(path) if path is not None else YamlFile("", {}, {})
    known = list(ClusterConfig.model_fields)
    for key in file.data:
        if key not in known:
            hint = suggest(key, known) or f"; known keys: {', '.join(known)}"
            raise ConfigError(f"{file.where(key)}: unknown key '{key}'{hint}")
    given = {key: value for key, value in changes.items() if value is not None}
    data: dict[str, Any] = {**file.data, **given}
    if isinstance(data.get("modules"), list):
        data["modules"] = tuple(data["modules"])
    try:
        return ClusterConfig.model_validate(data)
    except ValidationError as problem:
        error = problem.errors()[0]
        key = str(error["loc"][0])
        where = f"--{key.replace('_', '-')}" if key in given or path is None else file.where(key)
        raise ConfigError(f"{where}: {key}: {str(error['msg']).removeprefix('Value error, ')}") from None
