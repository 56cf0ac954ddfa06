"""Where a queue runs its runs: on a share of the CPU's threads each, or on a GPU each."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from oelm.data.encode import num_cores
from oelm.errors import ConfigError, MissingExtraError
from oelm.experiments.gpus import SLICE, GpuPool, GpuReading, check_gpus, parse_gpus, read_gpus
from oelm.experiments.runner import Slots

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
