"""GPUs of a shared server: find the free ones, and reserve one so that no other launch takes it."""

from __future__ import annotations

import logging
import re
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

from filelock import FileLock

from oelm.errors import ConfigError, MissingExtraError
from oelm.files import cache_root, room_checked
from oelm.locks import lock_at, take

log = logging.getLogger(__name__)

GpuChoice = Literal["auto", "none"] | tuple[int, ...]

# Prefix of the uuid of a part of a GPU (MIG); NVML lists whole ones.
SLICE = "MIG-"
READ_EVERY_S = 5.0
# Seven readings span half a minute, about the pause of a script between two runs, when a card in use looks free.
MIN_READINGS = 7
# Readings further apart than this prove nothing about the time between them.
_LONGEST_GAP_S = 60.0
# A desktop alone uses a few percent and some hundred MB of a card; a training job uses more of both.
_BUSY_FROM_PERCENT = 10
_HELD_FROM_BYTES = 512 * 2**20


@dataclass(frozen=True)
class GpuReading:
    """One GPU at one moment. `index` is that of nvidia-smi (PCI bus order); 0 total bytes means unknown."""

    index: int
    uuid: str
    name: str
    used_bytes: int
    total_bytes: int
    utilization: int
    processes: int

    @property
    def free_bytes(self) -> int:
        return self.total_bytes - self.used_bytes


def read_gpus() -> list[GpuReading]:
    """Read every GPU that answers; none without a driver. Raises MissingExtraError."""
    try:
        import pynvml  # type: ignore[import-untyped]
    except ImportError:
        raise MissingExtraError("nvidia-ml-py", "gpu") from None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as problem:
        log.info("NVML sees no GPU: %s", problem)
        return []
    try:
        readings = [_read_gpu(pynvml, index) for index in range(pynvml.nvmlDeviceGetCount())]
    finally:
        pynvml.nvmlShutdown()
    return [reading for reading in readings if reading is not None]


def _read_gpu(nvml: Any, index: int) -> GpuReading | None:
    try:
        card = nvml.nvmlDeviceGetHandleByIndex(index)
        uuid, name = nvml.nvmlDeviceGetUUID(card), nvml.nvmlDeviceGetName(card)
        used, total = _memory(nvml, card)
        # What a card does not report counts as busy (MIG parents and vGPUs have no utilization, some drivers list no
        # processes): `auto` then skips the card, but the user can still name it.
        utilization = _reported(nvml, lambda: int(nvml.nvmlDeviceGetUtilizationRates(card).gpu), otherwise=100)
        processes = _reported(nvml, lambda: len(nvml.nvmlDeviceGetComputeRunningProcesses(card)), otherwise=1)
    except nvml.NVMLError as problem:
        # Lost, being reset, or not permitted: leave the card out.
        log.info("GPU %d does not answer: %s", index, problem)
        return None
    return GpuReading(index, uuid, name, used, total, utilization, processes)


def _memory(nvml: Any, card: Any) -> tuple[int, int]:
    # The second version first: the older one counts the driver's reserve as used, 0.9 GB on an idle A100.
    memory = _reported(nvml, lambda: nvml.nvmlDeviceGetMemoryInfo(card, nvml.nvmlMemory_v2), otherwise=None)
    if memory is None:
        memory = _reported(nvml, lambda: nvml.nvmlDeviceGetMemoryInfo(card), otherwise=None)
    return (int(memory.used), int(memory.total)) if memory is not None else (0, 0)


def _reported(nvml: Any, ask: Callable[[], Any], *, otherwise: Any) -> Any:
    try:
        return ask()
    except (nvml.NVMLError_NotSupported, nvml.NVMLError_FunctionNotFound, nvml.NVMLError_NoPermission):
        return otherwise


def free_gpus(window: Sequence[Sequence[GpuReading]], *, min_readings: int = MIN_READINGS) -> list[int]:
    """Return the GPUs that were idle in every reading, most free memory first.

    Empty with fewer than `min_readings`: one idle moment proves nothing.
    """
    if len(window) < max(min_readings, 1):
        return []
    # By index and uuid: a card may have been replaced by another.
    always = set.intersection(*({(card.index, card.uuid) for card in now if _is_idle(card)} for now in window))
    free = [card for card in window[-1] if (card.index, card.uuid) in always]
    return [card.index for card in sorted(free, key=lambda card: (-card.free_bytes, card.index))]


def _is_idle(card: GpuReading) -> bool:
    # All of them: a sleeping job shows no utilization, and a job in another container no process.
    return (
        card.processes == 0
        and card.utilization < _BUSY_FROM_PERCENT
        and card.used_bytes < _HELD_FROM_BYTES
        and card.total_bytes > 0
    )


def parse_gpus(text: str) -> GpuChoice:
    """Parse `--gpus`: 'auto', 'none', or numbers such as '2,3'. Raises ConfigError."""
    word = text.strip()
    if word == "auto":
        return "auto"
    if word == "none":
        return "none"
    parts = [part.strip() for part in word.split(",")]
    for part in parts:
        if not re.fullmatch("[0-9]{1,4}", part):
            raise ConfigError(f"--gpus {text!r}: {part!r} is not a GPU number; give auto, none, or numbers such as 2,3")
    numbers = tuple(map(int, parts))
    twice = [number for number in numbers if numbers.count(number) > 1]
    if twice:
        raise ConfigError(f"--gpus {text!r} names GPU {twice[0]} twice; remove one")
    return numbers


def check_gpus(wanted: tuple[int, ...], there: Sequence[GpuReading]) -> None:
    """Raise ConfigError if a wanted GPU does not exist."""
    known = [card.index for card in there]
    for index in wanted:
        if index not in known:
            here = f"this machine has {', '.join(map(str, sorted(known)))}" if known else "NVML sees none"
            raise ConfigError(f"--gpus: no GPU {index}; {here}; see nvidia-smi, or give auto or none")


class GpuSlot:
    """One GPU, reserved until released or until this process ends."""

    def __init__(self, card: GpuReading, lock: FileLock) -> None:
        self.index, self.uuid = card.index, card.uuid
        self._lock = lock

    @property
    def name(self) -> str:
        return f"cuda:{self.index}"

    def environment(self) -> dict[str, str]:
        # By nvidia-smi's number, not CUDA's order; a slice has no number.
        shown = self.uuid if self.uuid.startswith(SLICE) else str(self.index)
        return {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": shown}

    def release(self) -> None:
        """Release the GPU; may be called twice."""
        self._lock.release()


class GpuPool:
    """Reserves GPUs, each for one holder among all launches of this user; as a context manager, releases all at the end.

    'auto' reserves only GPUs that nobody uses, other users included; a list reserves exactly those, busy or not. Raises
    ConfigError if a listed one does not exist.
    """

    def __init__(
        self,
        choice: Literal["auto"] | tuple[int, ...],
        *,
        described: str = "",
        count: int = 0,
        read: Callable[[], Sequence[GpuReading]] = read_gpus,
        folder: Path | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.count, self._described, self._read, self._clock = count, described, read, clock
        self._folder = folder if folder is not None else cache_root() / "gpus"
        self._window: deque[Sequence[GpuReading]] = deque(maxlen=MIN_READINGS)
        self._last_read: float | None = None
        self._held: list[GpuSlot] = []
        self._listed: list[GpuReading] | None = None
        if choice != "auto":
            there = read()
            check_gpus(choice, there)
            self._listed = [next(card for card in there if card.index == index) for index in choice]

    def __enter__(self) -> GpuPool:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for slot in self._held:
            slot.release()

    def __str__(self) -> str:
        return self._described

    def take(self, *, adopted: int = 0) -> GpuSlot | None:
        """Reserve a free GPU, or return None at once. For 'auto', call it at least once a minute: it takes readings.

        With `adopted` runs, whose launcher was killed, listed GPUs must be idle too: the lock of the GPU that such a run
        uses ended with its launcher, and only readings show which it is.
        """
        cards = self._listed if self._listed is not None and not adopted else self._idle()
        listed = {card.index for card in self._listed or cards}
        for card in (card for card in cards if card.index in listed):
            if (slot := self._reserve(card)) is not None:
                self._held.append(slot)
                return slot
        return None

    def _idle(self) -> list[GpuReading]:
        now = self._clock()
        since = None if self._last_read is None else now - self._last_read
        if since is None or since >= READ_EVERY_S:
            if since is not None and since > _LONGEST_GAP_S:
                self._window.clear()
            self._window.append(self._read())
            self._last_read = now
        latest = {card.index: card for card in self._window[-1]}
        return [latest[index] for index in free_gpus(self._window)]

    def _reserve(self, card: GpuReading) -> GpuSlot | None:
        path = self._folder / (re.sub("[^A-Za-z0-9-]", "-", card.uuid) + ".lock")
        # A kernel lock ends with its process. Any thread may release it.
        lock = lock_at(path, thread_local=False)
        with room_checked(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            return GpuSlot(card, lock) if take(lock) else None
