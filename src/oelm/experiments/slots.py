"""Where a queue runs its runs: on a share of the CPU's threads each, or on a GPU each."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

from oelm.data.encode import num_cores
from oelm.errors import ConfigError, MissingExtraError
from oelm.experiments.gpus import GpuPool, GpuReading, Reservation, check_gpus, parse_gpus, read_gpus
from oelm.experiments.runner import Slots

_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
_VISIBLE, _HIDDEN = "CUDA_VISIBLE_DEVICES", ("", "-1", "NoDevFiles")
# Prefix of the uuid of a part of a GPU (MIG); NVML lists whole ones.
_SLICE = "MIG-"
# With more, memory is short before cores are.
_MOST_JOBS = 8


class CpuSlots:
    """Several runs at once, with the cores divided among them."""

    def __init__(self, count: int, *, threads: int) -> None:
        self.count, self.threads = count, threads
        self._free = list(range(count))

    def take(self, *, adopted: int) -> CpuSlot | None:
        return CpuSlot(self, self._free.pop(0)) if len(self._free) > adopted else None

    def give_back(self, number: int) -> None:
        self._free.append(number)

    def __str__(self) -> str:
        return f"{self.count} at once on the CPU, {self.threads} thread{'s' if self.threads > 1 else ''} each"


@dataclass(frozen=True)
class CpuSlot:
    """An equal share of the CPU."""

    owner: CpuSlots
    number: int

    @property
    def name(self) -> str:
        return "cpu"

    def environment(self) -> dict[str, str]:
        return {"CUDA_VISIBLE_DEVICES": "", **dict.fromkeys(_THREADS, str(self.owner.threads))}

    def release(self) -> None:
        self.owner.give_back(self.number)


class GpuSlots:
    """A GPU for each run, reserved so that no other launch takes it."""

    def __init__(self, pool: GpuPool, described: str, *, count: int) -> None:
        self._pool, self._described, self.count = pool, described, count

    def take(self, *, adopted: int) -> GpuSlot | None:
        # An adopted run uses a card whose lock ended with its launcher: only readings show which.
        reservation = self._pool.take(only_idle=adopted > 0)
        return GpuSlot(reservation) if reservation is not None else None

    def __str__(self) -> str:
        return self._described


@dataclass(frozen=True)
class GpuSlot:
    """One reserved GPU."""

    reservation: Reservation

    @property
    def name(self) -> str:
        return f"cuda:{self.reservation.index}"

    def environment(self) -> dict[str, str]:
        # By nvidia-smi's number, not CUDA's order; a slice has no number.
        is_slice = self.reservation.uuid.startswith(_SLICE)
        shown = self.reservation.uuid if is_slice else str(self.reservation.index)
        return {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": shown}

    def release(self) -> None:
        self.reservation.release()


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
    return GpuSlots(GpuPool("auto"), f"one run a GPU on those of {len(there)} that are free", count=len(there))


def _listed_slots(cards: Sequence[GpuReading]) -> GpuSlots:
    indexes = tuple(card.index for card in cards)
    if cards[0].uuid.startswith(_SLICE):
        described = f"one run a slice of a GPU on {len(cards)} of them"
        return GpuSlots(GpuPool(indexes, read=lambda: cards), described, count=len(cards))
    return GpuSlots(GpuPool(indexes), f"one run a GPU on {', '.join(map(str, indexes))}", count=len(cards))


def _shown(there: Sequence[GpuReading]) -> list[GpuReading] | None:
    """Return the GPUs in CUDA_VISIBLE_DEVICES, read as CUDA does; None if it is not set. Raises ConfigError."""
    if (text := os.environ.get(_VISIBLE)) is None:
        return None
    words = [word.strip() for word in text.split(",")]
    # CUDA ignores what follows one of these.
    words = words[: next((number for number, word in enumerate(words) if word in _HIDDEN), len(words))]
    cards = [_card(word, number, there) for number, word in enumerate(words)]
    are_slices = {card.uuid.startswith(_SLICE) for card in cards}
    if len({card.uuid for card in cards}) < len(cards) or len(are_slices) > 1:
        raise ConfigError(f"{_VISIBLE}={text}: name each GPU once, and do not mix slices and whole GPUs; or give --gpus none")
    return cards


def _card(word: str, number: int, there: Sequence[GpuReading]) -> GpuReading:
    if word.startswith(_SLICE):
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
