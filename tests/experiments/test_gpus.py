"""A GPU is taken only when nobody uses it, and by one launch only. There is no GPU here: what cards tell is written down."""

from __future__ import annotations

import multiprocessing as mp
import signal
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pynvml  # type: ignore[import-untyped]
import pytest
from hypothesis import given
from hypothesis import strategies as st

from oelm.errors import ConfigError, MissingExtraError
from oelm.experiments.slots import MIN_READINGS, READ_EVERY_S, GpuPool, GpuReading, check_gpus, free_gpus, parse_gpus, read_gpus
from oelm.files import cache_root
from tests.cases import case

MIB = 2**20
TOTAL = 40960 * MIB
NO = pynvml.NVML_ERROR_NOT_SUPPORTED
Series = list[tuple[int, int, int] | None]
Contender = tuple[SpawnProcess, Connection]


def card(index: int, *, used: int = 3, utilization: int = 0, processes: int = 0, uuid: str = "") -> GpuReading:
    """Return a reading of an A100; `used` in MiB, as nvidia-smi prints it."""
    uuid = uuid or f"GPU-5c1e9a20-0000-4000-8000-{index:012d}"
    return GpuReading(index, uuid, "NVIDIA A100-SXM4-40GB", used * MIB, TOTAL, utilization, processes)


# What one card shows reading by reading, as (MiB used, percent busy, compute processes), or None where it is not there.
# Modelled on a shared server of four A100s under driver 550, five seconds between two readings.
IDLE: Series = [(3, 0, 0)] * 7
BUSY: Series = [(31744, 97, 1), (31744, 99, 1), (31744, 98, 1), (31744, 97, 1), (31744, 99, 1), (31744, 99, 1), (31744, 98, 1)]
SERIES: dict[str, tuple[Series, bool]] = {
    "idle": (IDLE, True),
    "display card": ([(300, 0, 0), (304, 3, 0), (304, 1, 0), (300, 0, 0), (311, 4, 0), (300, 0, 0), (300, 0, 0)], True),
    "training": (BUSY, False),
    "training, between two epochs now": ([*BUSY[:6], (31744, 0, 1)], False),
    "between two runs of a script": ([*BUSY[:3], *IDLE[:4]], False),
    "a run that has just begun": ([*IDLE[:6], (512, 0, 1)], False),
    "sleeping process that holds memory": ([(18432, 0, 1)] * 7, False),
    "sleeping process of a container, not listed": ([(18432, 0, 0)] * 7, False),
    "small job of a container, not listed": ([(400, 35, 0)] * 7, False),
    "vanishes": ([*IDLE[:6], None], False),
    "was away for a moment": ([*IDLE[:3], None, *IDLE[:3]], False),
}


def window_of(series: Series, *, index: int = 0) -> list[list[GpuReading]]:
    shown = [None if row is None else card(index, used=row[0], utilization=row[1], processes=row[2]) for row in series]
    return [[] if reading is None else [reading] for reading in shown]


def test_a_card_is_free_only_when_nobody_used_it_all_the_time() -> None:
    for name, (series, is_free) in SERIES.items():
        with case(name):
            assert len(series) == MIN_READINGS and free_gpus(window_of(series, index=2)) == ([2] if is_free else [])


def test_of_a_whole_server_the_idle_cards_are_found() -> None:
    kinds = ("training", "idle", "sleeping process that holds memory", "display card")
    columns = [window_of(SERIES[kind][0], index=index) for index, kind in enumerate(kinds)]
    window = [[reading for readings in moment for reading in readings] for moment in zip(*columns, strict=True)]
    assert free_gpus(window) == [1, 3]


@pytest.mark.parametrize("before", [[card(0, uuid="GPU-a")], [card(0, uuid="GPU-a"), card(1, uuid="GPU-b")]])
def test_another_card_in_the_same_place_was_not_watched(before: list[GpuReading]) -> None:
    assert free_gpus([before] * 6 + [[card(0, uuid="GPU-b")]]) == []


def test_too_few_readings_prove_nothing() -> None:
    assert [free_gpus([[card(0)]] * readings) for readings in range(MIN_READINGS)] == [[]] * MIN_READINGS
    assert free_gpus([], min_readings=0) == []


readings = st.builds(
    card,
    st.integers(0, 3),
    used=st.sampled_from([3, 300, 511, 512, 18432]),
    utilization=st.sampled_from([0, 4, 9, 10, 100]),
    processes=st.sampled_from([0, 0, 1, 2]),
    uuid=st.sampled_from(["", "", "GPU-x"]),
)
idle = st.builds(card, st.integers(0, 3), used=st.sampled_from([3, 300]), utilization=st.sampled_from([0, 4]))
moments = st.lists(idle, max_size=4, unique_by=lambda reading: reading.index)


def disturbed(moment: list[GpuReading], length: int, strays: list[tuple[int, GpuReading]]) -> list[list[GpuReading]]:
    """Return the same moment again and again, but for some cards that show something else, or are gone, once."""
    window = [list(moment) for _ in range(length)]
    for at, stray in strays:
        others = [reading for reading in window[at % length] if reading.index != stray.index]
        window[at % length] = others if at % 5 == 0 else [*others, stray]
    return window


windows = st.builds(disturbed, moments, st.integers(1, 4), st.lists(st.tuples(st.integers(0, 99), readings), max_size=4))


@given(windows, st.integers(0, 4))
def test_what_is_free_was_idle_in_every_reading(window: list[list[GpuReading]], min_readings: int) -> None:
    for index in free_gpus(window, min_readings=min_readings):
        assert len(window) >= min_readings
        seen = [reading for moment in window for reading in moment if reading.index == index]
        assert len(seen) == len(window) and len({reading.uuid for reading in seen}) == 1
        assert all(reading.processes == 0 and reading.utilization < 10 and reading.used_bytes < 512 * MIB for reading in seen)


@given(windows)
def test_the_emptiest_card_comes_first_and_each_once(window: list[list[GpuReading]]) -> None:
    free = free_gpus(window, min_readings=1)
    latest = {reading.index: reading.free_bytes for reading in window[-1]}
    assert len(set(free)) == len(free) and free == sorted(free, key=lambda index: (-latest[index], index))


@given(windows, readings)
def test_a_job_that_appears_takes_away_its_card_and_no_other(window: list[list[GpuReading]], job: GpuReading) -> None:
    busy = replace(job, processes=1)
    now = [*(reading for reading in window[-1] if reading.index != busy.index), busy]
    assert set(free_gpus([*window, now], min_readings=1)) == set(free_gpus(window, min_readings=1)) - {busy.index}


@pytest.mark.parametrize(("text", "choice"), [("auto", "auto"), (" none ", "none"), ("0", (0,)), (" 3, 10", (3, 10))])
def test_choice_of_gpus_reads_as_written(text: str, choice: object) -> None:
    assert parse_gpus(text) == choice


def test_nonsense_is_refused_with_what_would_do() -> None:
    cases: list[str] = [
        "",
        " ",
        ",",
        "2,",
        "2,,3",
        "all",
        "AUTO",
        "-1",
        "2,-3",
        "1.5",
        "0x1",
        "+1",
        "auto,1",
        "\u0663",
        "9" * 5000,
    ]
    for text in cases:
        with case(text):
            with pytest.raises(ConfigError, match=r"^--gpus .* is not a GPU number; give auto, none, or numbers such as 2,3$"):
                parse_gpus(text)


@pytest.mark.parametrize("text", ["2,2", "0,1,2,1", "1,01"])
def test_a_gpu_named_twice_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"names GPU [12] twice"):
        parse_gpus(text)


@dataclass
class Server:
    """A server of cards that can be changed, its readings counted, and a clock that moves when told to."""

    cards: list[GpuReading]
    now: float = 100.0
    readings: int = 0

    def read(self) -> list[GpuReading]:
        self.readings += 1
        return list(self.cards)

    def pool(self, folder: Path, choice: Any = "auto") -> GpuPool:
        return GpuPool(choice, read=self.read, folder=folder, clock=lambda: self.now)

    def watched_by(self, pool: GpuPool, *, times: int = MIN_READINGS - 1) -> GpuPool:
        """Let a pool look so many times, as far apart as readings are, and get nothing."""
        for _ in range(times):
            assert pool.take() is None
            self.now += READ_EVERY_S
        return pool


def test_auto_takes_a_card_after_a_whole_window_and_not_before(tmp_path: Path) -> None:
    server = Server([card(0, used=200), card(1), card(2, processes=1)])
    pool = server.watched_by(server.pool(tmp_path))
    taken = [pool.take() for _ in range(3)]
    assert [(gpu.index, gpu.uuid) if gpu else None for gpu in taken] == [(1, card(1).uuid), (0, card(0).uuid), None]


def test_asking_often_is_no_more_proof_than_asking_once(tmp_path: Path) -> None:
    server = Server([card(0)])
    pool = server.pool(tmp_path)
    for _ in range(50):
        assert pool.take() is None
        server.now += READ_EVERY_S / 100
    assert server.readings == 1


def test_a_job_seen_once_keeps_its_card_for_a_whole_window(tmp_path: Path) -> None:
    server = Server([card(0)])
    pool = server.watched_by(server.pool(tmp_path))
    server.cards = [card(0, used=31744, utilization=98, processes=1)]
    server.watched_by(pool, times=1)
    server.cards = [card(0)]
    server.watched_by(pool)
    assert pool.take() is not None


def test_readings_of_long_ago_prove_nothing_about_now(tmp_path: Path) -> None:
    server = Server([card(0)])
    pool = server.watched_by(server.pool(tmp_path))
    server.now += 3600
    server.watched_by(pool)
    assert pool.take() is not None


def test_listed_gpus_are_taken_in_order_at_once_even_when_busy(tmp_path: Path) -> None:
    server = Server([card(index, used=31744, utilization=99, processes=2) for index in range(4)])
    pool = server.pool(tmp_path, (2, 0))
    taken = [pool.take() for _ in range(3)]
    assert [gpu.index for gpu in taken if gpu] == [2, 0] and taken[2] is None


@pytest.mark.parametrize(("count", "those"), [(4, "this machine has 0, 1, 2, 3"), (0, "NVML sees none")])
def test_a_gpu_that_is_not_there_is_named_with_those_that_are(count: int, those: str, tmp_path: Path) -> None:
    server = Server([card(index) for index in range(count)])
    with pytest.raises(ConfigError, match=f"no GPU 7; {those}; see nvidia-smi"):
        check_gpus((7,), server.cards)
    with pytest.raises(ConfigError, match="no GPU 7;"):
        server.pool(tmp_path, (7,))


def test_released_gpu_can_be_taken_again_and_twice_released_does_no_harm(tmp_path: Path) -> None:
    server = Server([card(0)])
    mine, other = server.pool(tmp_path, (0,)), server.pool(tmp_path, (0,))
    gpu = mine.take()
    assert gpu is not None and mine.take() is None and other.take() is None
    gpu.release()
    theirs = other.take()
    gpu.release()
    assert theirs is not None and mine.take() is None


def test_a_gpu_can_be_released_by_another_thread(tmp_path: Path) -> None:
    pool = Server([card(0)]).pool(tmp_path, (0,))
    gpu = pool.take()
    assert gpu is not None
    with ThreadPoolExecutor() as threads:
        threads.submit(gpu.release).result()
    assert pool.take() is not None


def test_leaving_the_pool_gives_everything_back(tmp_path: Path) -> None:
    server = Server([card(0), card(1)])
    with pytest.raises(RuntimeError), server.pool(tmp_path, (0, 1)) as pool:
        assert pool.take() and pool.take()
        raise RuntimeError
    again = server.pool(tmp_path, (0, 1))
    assert again.take() and again.take()


def test_locks_lie_in_the_cache_under_names_that_cannot_leave_it() -> None:
    with GpuPool((0,), read=lambda: [card(0, uuid="../../etc/GPU 1\n")]) as pool:
        assert pool.take() is not None and (cache_root() / "gpus" / "------etc-GPU-1-.lock").is_file()


def contend(folder: str, order: Connection) -> None:
    """In a process of its own: take the card that is named at the moment that is named, tell, and let go when told to."""
    while True:
        uuid, moment = order.recv()
        with Server([card(0, uuid=uuid)]).pool(Path(folder), (0,)) as pool:
            while time.monotonic() < moment:
                pass
            order.send(pool.take() is not None)
            order.recv()


@contextmanager
def contending(folder: Path, *, count: int) -> Iterator[list[Contender]]:
    spawn = mp.get_context("spawn")
    pipes = [spawn.Pipe() for _ in range(count)]
    all_of_them = [(spawn.Process(target=contend, args=(str(folder), theirs), daemon=True), ours) for ours, theirs in pipes]
    for process, _ in all_of_them:
        process.start()
    try:
        yield all_of_them
    finally:
        for process, _ in all_of_them:
            process.kill()
            process.join()


def has_won(contender: Contender) -> bool:
    assert contender[1].poll(60), "the other process does not answer"
    return bool(contender[1].recv())


def test_of_two_launches_at_once_exactly_one_takes_the_gpu(tmp_path: Path) -> None:
    wins = []
    with contending(tmp_path, count=2) as contenders:
        for race in range(20):
            # The monotonic clock is the machine's, the same in both. A lock file that is new is raced for as one that is not.
            start = time.monotonic() + 0.02
            for _, order in contenders:
                order.send((f"GPU-race-{race}" if race % 2 else "GPU-race", start))
            wins.append(sum(map(has_won, contenders)))
            for _, order in contenders:
                order.send("let go")
    assert wins == [1] * 20


def test_killed_holder_frees_its_gpu(tmp_path: Path) -> None:
    with contending(tmp_path, count=1) as [contender]:
        process, order = contender
        order.send((card(0).uuid, 0.0))
        assert has_won(contender)
        pool = Server([card(0)]).pool(tmp_path, (0,))
        assert pool.take() is None
        process.kill()
        process.join()
        assert process.exitcode == -signal.SIGKILL and pool.take() is not None


def test_a_machine_without_a_driver_has_no_gpus() -> None:
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        assert read_gpus() == []
    else:
        pytest.skip("there is a driver here")


def test_without_nvml_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)  # what Python does for a package that is not installed
    with pytest.raises(MissingExtraError, match=r"'nvidia-ml-py'.*oelm\[gpu\]"):
        read_gpus()


def told(monkeypatch: pytest.MonkeyPatch, *refusals: dict[str, int]) -> list[GpuReading]:
    """Read cards of which each refuses the driver's questions that are named, by these error codes."""

    def answers(question: str, handle: int, value: Any) -> Any:
        if (code := refusals[handle].get(question)) is not None:
            raise pynvml.NVMLError(code)
        return value

    def memory(handle: int, version: int | None = None) -> Any:
        # As on an idle A100: the first version counts what the driver reserves.
        used, question = (912 * MIB, "memory") if version is None else (8 * MIB, "memory_v2")
        return answers(question, handle, SimpleNamespace(used=used, total=TOTAL))

    busy, opened = SimpleNamespace(gpu=3, memory=9), list[int]()
    functions: dict[str, Callable[..., Any]] = {
        "nvmlInit": lambda: opened.append(1),
        "nvmlShutdown": lambda: opened.append(-1),
        "nvmlDeviceGetCount": lambda: len(refusals),
        "nvmlDeviceGetHandleByIndex": lambda index: answers("handle", index, index),
        "nvmlDeviceGetUUID": lambda handle: answers("uuid", handle, f"GPU-{handle}"),
        "nvmlDeviceGetName": lambda handle: answers("name", handle, "NVIDIA A100-SXM4-40GB"),
        "nvmlDeviceGetMemoryInfo": memory,
        "nvmlDeviceGetUtilizationRates": lambda handle: answers("utilization", handle, busy),
        "nvmlDeviceGetComputeRunningProcesses": lambda handle: answers("processes", handle, []),
    }
    for name, function in functions.items():
        monkeypatch.setattr(pynvml, name, function)
    readings = read_gpus()
    assert opened == [1, -1], "what was opened is closed"
    return readings


def test_a_card_is_read_whole_without_what_its_driver_reserves(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = GpuReading(0, "GPU-0", "NVIDIA A100-SXM4-40GB", 8 * MIB, TOTAL, utilization=3, processes=0)
    assert told(monkeypatch, {}) == [expected]
    assert free_gpus([[expected]] * MIN_READINGS) == [0]


@pytest.mark.parametrize("question", ["utilization", "processes"])
@pytest.mark.parametrize("code", [NO, pynvml.NVML_ERROR_FUNCTION_NOT_FOUND, pynvml.NVML_ERROR_NO_PERMISSION])
def test_a_card_that_will_not_tell_is_there_but_never_free(question: str, code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    readings = told(monkeypatch, {question: code}, {})
    assert [reading.index for reading in readings] == [0, 1] and free_gpus([readings] * MIN_READINGS) == [1]


def test_an_old_driver_is_asked_for_memory_the_old_way(monkeypatch: pytest.MonkeyPatch) -> None:
    (reading,) = told(monkeypatch, {"memory_v2": pynvml.NVML_ERROR_FUNCTION_NOT_FOUND})
    assert (reading.used_bytes, reading.total_bytes) == (912 * MIB, TOTAL)


def test_a_card_without_memory_of_its_own_can_be_named_but_is_never_free(monkeypatch: pytest.MonkeyPatch) -> None:
    readings = told(monkeypatch, {"memory_v2": NO, "memory": NO})
    check_gpus((0,), readings)
    assert free_gpus([readings] * MIN_READINGS) == []


@pytest.mark.parametrize("question", ["handle", "uuid", "name", "memory_v2", "utilization", "processes"])
def test_a_lost_card_is_left_out_and_the_others_are_read(question: str, monkeypatch: pytest.MonkeyPatch) -> None:
    readings = told(monkeypatch, {}, {question: pynvml.NVML_ERROR_GPU_IS_LOST}, {})
    assert [reading.index for reading in readings] == [0, 2]
