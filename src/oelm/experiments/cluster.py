"""What a user's cluster wants to be told: partition, account, GPUs, time and modules, from a small file and the command."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, Field, ValidationError

from oelm.errors import ConfigError, suggest
from oelm.experiments.yamlfile import read_yaml
from oelm.strict import Strict

FILE = "slurm.yaml"
# All of it goes into a script: one word each, nothing that a shell or sbatch could take for more.
_WORD = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:,=/+@%-]{0,199}")
_TIME = re.compile(r"(?:(\d{1,3})-)?(\d{1,6})(?::(\d{1,6}))?(?::(\d{1,2}))?")


def _word(text: str) -> str:
    if not _WORD.fullmatch(text):
        raise ValueError(f"{text!r}: letters, digits and ._:,=/+@%- only, beginning with a letter or digit")
    return text


def _time(text: str) -> str:
    parse_time(text)
    return text


Word = Annotated[str, AfterValidator(_word)]


class ClusterConfig(Strict):
    """`slurm.yaml`: what every job of a user's says to sbatch. Fields are described in docs/cluster.md."""

    partition: Word | None = None
    # For jobs that need no GPU (preparing data, the report), where the other takes none without.
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
    # How long before the time limit a run is asked to save; SLURM may ask a minute earlier than that.
    grace_s: int = Field(default=180, ge=10)

    @property
    def wants_gpu(self) -> bool:
        return self.gres is not None and self.gres.startswith("gpu")

    @property
    def time_s(self) -> int | None:
        return None if self.time is None else parse_time(self.time)


def parse_time(text: str) -> int:
    """Return the seconds of a time as sbatch takes it: minutes, minutes:seconds, h:mm:ss, d-h, d-h:mm or d-h:mm:ss."""
    found = _TIME.fullmatch(text)
    if found is None:
        raise ValueError(f"{text!r}: a time is written as 8:00:00 (h:mm:ss), 90 (minutes) or 1-12 (days-hours)")
    days, *rest = found.groups()
    numbers = [int(part) for part in rest if part is not None]
    if days is not None:
        hours, minutes, seconds = [*numbers, 0, 0][:3]
        return ((int(days) * 24 + hours) * 60 + minutes) * 60 + seconds
    if len(numbers) == 3:
        return (numbers[0] * 60 + numbers[1]) * 60 + numbers[2]
    return numbers[0] * 60 + (numbers[1] if len(numbers) == 2 else 0)


def config_path() -> Path | None:
    """Return the user's file: slurm.yaml here, else the one in the user's configuration folder, else none."""
    home = Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "oelm"
    return next((path for path in (Path(FILE), home / FILE) if path.is_file()), None)


def cluster_config(changes: dict[str, Any]) -> ClusterConfig:
    """Return the user's file with what the command says instead; ConfigError names file, line and the nearest known key."""
    path = config_path()
    file = read_yaml(path) if path is not None else None
    known = list(ClusterConfig.model_fields)
    for key in file.data if file is not None else ():
        if key not in known:
            hint = suggest(str(key), known) or f"; known keys: {', '.join(known)}"
            assert file is not None
            raise ConfigError(f"{file.where(str(key))}: unknown key '{key}'{hint}")
    said = {key: value for key, value in changes.items() if value is not None}
    data: dict[str, Any] = {**(file.data if file is not None else {}), **said}
    if isinstance(data.get("modules"), list):
        data["modules"] = tuple(data["modules"])
    try:
        return ClusterConfig.model_validate(data)
    except ValidationError as problem:
        error = problem.errors()[0]
        key = str(error["loc"][0])
        where = f"--{key.replace('_', '-')}" if key in said or file is None else file.where(key)
        raise ConfigError(f"{where}: {key}: {str(error['msg']).removeprefix('Value error, ')}") from None
