"""Where the runs of a queue go: shares of the CPU's threads, or GPUs that nobody else uses."""

from __future__ import annotations

import logging
import os
import re
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

from filelock import FileLock

from oelm.data.tokenizer import num_cores
from oelm.errors import ConfigError, MissingExtraError, needing
from oelm.experiments.queue import Slots
from oelm.files import cache_root, lock_at, room_checked, take

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
    with needing("nvidia-ml-py", "gpu"):
        import pynvml  # type: ignore[import-untyped]
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


_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
_VISIBLE, _HIDDEN = "CUDA_VISIBLE_DEVICES", ("", "-1", "NoDevFiles")
# With more, memory is short before cores are.
_MOST_JOBS = 8


class CpuSlots:
    """Several runs at once, with the cores divided among them."""

    def __init__(self, count: int, *, threads: int) -> None:
        self.count, self.threads = count, threads
        self._taken = 0

    def take(self, *, adopted: int) -> CpuSlot | None:
        if self._taken + adopted >= self.count:
            return None
        self._taken += 1
        return CpuSlot(self)

    def give_back(self) -> None:
        self._taken -= 1

    def __str__(self) -> str:
        return f"{self.count} at once on the CPU, {self.threads} thread{'s' if self.threads > 1 else ''} each"


@dataclass(frozen=True)
class CpuSlot:
    """An equal share of the CPU."""

    owner: CpuSlots
    name: str = "cpu"

    def environment(self) -> dict[str, str]:
        return {"CUDA_VISIBLE_DEVICES": "", **dict.fromkeys(_THREADS, str(self.owner.threads))}

    def release(self) -> None:
        self.owner.give_back()


def choose_slots(gpus: str | None, jobs: int | None, *, budget: str) -> Slots:
    """Choose slots for a queue: `gpus` is '2,3', 'auto' or 'none'; None takes GPUs if there are any."""
    choice = parse_gpus(gpus) if gpus is not None else None
    there = [] if choice == "none" else _readable(needed=choice is not None)
    # A scheduler makes only the cards of this job visible.
    shown = _shown(there) if there and choice in (None, "auto") else None
    if shown == [] and choice == "auto":
        raise ConfigError(f"--gpus auto: {_VISIBLE} hides every GPU; unset it, or leave --gpus out")
    if choice == "none" or (choice is None and not (there if shown is None else shown)):
        return _cpu_slots(jobs, budget=budget)
    if jobs is not None:
        raise ConfigError(
            "--jobs divides the CPU, but each run takes a whole GPU; choose them with --gpus, or give --gpus none"
        )
    if not there:
        raise ConfigError(f"--gpus {gpus}: this machine has no NVIDIA GPU; leave it out, or give --gpus none")
    if shown is not None:
        return _listed_slots(shown)
    if isinstance(choice, tuple):
        check_gpus(choice, there)
        return _listed_slots([next(card for card in there if card.index == index) for index in choice])
    return GpuPool("auto", described=f"one run a GPU on those of {len(there)} that are free", count=len(there))


def _listed_slots(cards: Sequence[GpuReading]) -> GpuPool:
    indexes = tuple(card.index for card in cards)
    if cards[0].uuid.startswith(SLICE):
        described = f"one run a slice of a GPU on {len(cards)} of them"
        return GpuPool(indexes, described=described, count=len(cards), read=lambda: cards)
    return GpuPool(indexes, described=f"one run a GPU on {', '.join(map(str, indexes))}", count=len(cards))


def _shown(there: Sequence[GpuReading]) -> list[GpuReading] | None:
    """Return the GPUs in CUDA_VISIBLE_DEVICES, read as CUDA does; None if it is not set. Raises ConfigError."""
    if (text := os.environ.get(_VISIBLE)) is None:
        return None
    words = [word.strip() for word in text.split(",")]
    # CUDA ignores what follows one of these.
    words = words[: next((number for number, word in enumerate(words) if word in _HIDDEN), len(words))]
    cards = [_card(word, number, there) for number, word in enumerate(words)]
    are_slices = {card.uuid.startswith(SLICE) for card in cards}
    if len({card.uuid for card in cards}) < len(cards) or len(are_slices) > 1:
        raise ConfigError(f"{_VISIBLE}={text}: name each GPU once, and do not mix slices and whole GPUs; or give --gpus none")
    return cards


def _card(word: str, number: int, there: Sequence[GpuReading]) -> GpuReading:
    if word.startswith(SLICE):
        # Readings are of the whole card, so a slice never counts as idle.
        return GpuReading(number, word, "slice of a GPU", 0, 0, utilization=100, processes=1)
    by_uuid = [card for card in there if word.startswith("GPU-") and card.uuid.startswith(word)]
    found = by_uuid or [card for card in there if word.isdecimal() and card.index == int(word)]
    if len(found) != 1:
        here = ", ".join(f"{card.index} ({card.uuid})" for card in there)
        raise ConfigError(f"{_VISIBLE}: {word!r} is none of the GPUs here: {here}; fix or unset it, or give --gpus none")
    return found[0]


def _readable(*, needed: bool) -> list[GpuReading]:
    """Read the GPUs; none if the library is missing and no GPU is needed."""
    try:
        return read_gpus()
    except MissingExtraError:
        if needed:
            raise
        return []


def _cpu_slots(jobs: int | None, *, budget: str) -> CpuSlots:
    cores = num_cores()
    # Small models gain little from a second thread; the full recipe uses all threads, and the memory.
    count = jobs if jobs is not None else 1 if budget == "paper" else min(cores, _MOST_JOBS)
    if count < 1:
        raise ConfigError(f"--jobs {count}: at least one run at a time")
    asked = os.environ.get(_THREADS[0], "")
    threads = int(asked) if asked.isdecimal() and int(asked) > 0 else max(1, cores // count)
    return CpuSlots(count, threads=threads)


def queue_seconds(seconds: Iterable[float], slots: int) -> float:
    """Return how long runs take on equal slots, each started as soon as one is free."""
    ends = [0.0] * max(1, slots)
    for length in seconds:
        first = min(range(len(ends)), key=ends.__getitem__)
        ends[first] += length
    return max(ends)
