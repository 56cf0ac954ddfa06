"""One run on several processes of torchrun: who writes, who waits, and what all agree on at every step."""

from __future__ import annotations

import contextlib
import inspect
import json
import logging
import os
import re
import signal
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket, PrefixStore
from torch.distributed.rendezvous import rendezvous
from torch.nn.parallel import DistributedDataParallel

from oelm.errors import STOPPED, ConfigError, OelmError, RankLostError
from oelm.files import dump_json
from oelm.method.audit import digest
from oelm.method.layers import selections
from oelm.process import StopFlag, is_one_of_many

log = logging.getLogger(__name__)
# The library's default of half an hour is long to wait for a hung process.
TIMEOUT_S = 60.0
TIMEOUT_SETTING = "OELM_RANK_TIMEOUT_S"
_BEAT_S = 1.0
_BEAT, _WELL, _FAILED = 0, 1, 2
# How long to wait for a peer's last words once its connection is gone.
_LAST_WORDS_S = 1.0
_REASON = "oelm/failed"
_LOST = re.compile(r"gloo|nccl|connection (closed|reset|refused)|timed out waiting|broken pipe", re.IGNORECASE)
# Torch 2.13 renamed the option: no model of ours has buffers that learn.
_BUFFER_OPTIONS = {"forward_sync_buffers", "broadcast_buffers"} & inspect.signature(DistributedDataParallel).parameters.keys()
_NO_BUFFERS: dict[str, Any] = {max(_BUFFER_OPTIONS): False}

Floats = NDArray[np.float64]


@dataclass(eq=False)
class World:
    """The processes that work on one run. With size 1 there is no process group, and all methods return at once.

    Rank 0 is the writer: the only one that writes to the run's folder.
    """

    rank: int = 0
    size: int = 1
    device: str = "cpu"
    timeout_s: float = TIMEOUT_S
    # Bytes of gradients summed: in total, and in the last step.
    reduced_bytes: int = 0
    step_bytes: int = 0
    _counted_bytes: int = 0
    _store: Any = None
    # A gloo group, whatever backend sums the gradients: it notices at once when a process dies.
    _control: Any = None
    _peers: list[tuple[str, int]] = field(default_factory=list)

    @property
    def is_writer(self) -> bool:
        return self.rank == 0

    def share(self, count: int) -> list[int]:
        """Return which of `count` parts of a batch are this process's: consecutive ones, or none."""
        return list(range(self.rank * count // self.size, (self.rank + 1) * count // self.size))

    def micro_batch_size(self, batch_size: int, micro_batch_size: int) -> int:
        """Return the largest micro-batch, up to the config's, that divides a batch evenly among the processes."""
        if batch_size % self.size:
            fits = [number for number in range(1, batch_size + 1) if batch_size % number == 0]
            raise ConfigError(
                f"batch_size {batch_size} does not divide among {self.size} processes; numbers that do: "
                f"{', '.join(map(str, fits))}. The batch does not change with their number, so choose one of these"
            )
        rows = batch_size // self.size
        return next(size for size in range(min(micro_batch_size, rows), 0, -1) if rows % size == 0)

    def wrap(self, model: nn.Module, *, may_skip: bool = False) -> nn.Module:
        """Return a module whose backward pass sums gradients over all processes, except those of frozen parameters.

        Wrap again after freezing or thawing. `may_skip`: some parameters may get no gradient.
        """
        if self.size == 1:
            return model
        # Nothing needs to be sent: every process has the same weights, which `check_same` proves.
        parallel = DistributedDataParallel(
            model, init_sync=False, gradient_as_bucket_view=True, find_unused_parameters=may_skip, **_NO_BUFFERS
        )
        # A lambda, because torch reads the hook's annotations, which are strings here.
        parallel.register_comm_hook(self, lambda world, bucket: _sum_gradients(world, bucket))
        return parallel

    def settle(self, losses: Sequence[float], stop: StopFlag) -> list[float]:
        """Return the losses of all parts of the batch, each known to one process, and agree on a stop."""
        if self.size == 1:
            return list(losses)
        *known, stops = self._summed([*losses, _asked(stop)])
        self.step_bytes, self._counted_bytes = self.reduced_bytes - self._counted_bytes, self.reduced_bytes
        _take_up(stop, bool(stops))
        return known

    def agree(self, stop: StopFlag) -> bool:
        """Whether any process was asked to stop."""
        if self.size > 1:
            _take_up(stop, bool(self._summed([_asked(stop)])[0]))
        return stop.requested()

    def tell(self, number: int) -> int:
        """Return the writer's number in every process."""
        return number if self.size == 1 else int(self._summed([number if self.is_writer else 0])[0])

    def gather(self, parts: Sequence[Floats]) -> list[Floats]:
        """Return the parts of all processes: the first of each, the second of each, ...; all must give equally many."""
        if self.size == 1:
            return list(parts)
        lengths = torch.tensor([len(part) for part in parts], dtype=torch.int64)
        everybodys = [torch.empty_like(lengths) for _ in range(self.size)]
        dist.all_gather(everybodys, lengths, group=self._control)
        longest = int(max(own.sum() for own in everybodys))
        padded = torch.zeros(longest, dtype=torch.float64)
        own = np.concatenate(parts) if parts else np.zeros(0)
        padded[: len(own)] = torch.from_numpy(own)
        received = [torch.empty_like(padded) for _ in range(self.size)]
        dist.all_gather(received, padded, group=self._control)
        split = [np.split(row.numpy(), np.cumsum(own.numpy()))[:-1] for row, own in zip(received, everybodys, strict=True)]
        return [part for turn in zip(*split, strict=True) for part in turn]

    def check_same(self, model: nn.Module, step: int) -> None:
        """Raise OelmError unless all processes have the same weights, by exact sums, at the same step."""
        if self.size == 1:
            return
        sums = [parameter.detach().double().sum() for parameter in model.parameters()]
        picked = [int(digest(selection)[:15], 16) for selection in selections(model).values()]
        own = torch.cat([torch.stack(sums).cpu().view(torch.int64), torch.tensor([*picked, step])])
        others = [torch.empty_like(own) for _ in range(self.size)]
        dist.all_gather(others, own, group=self._control)
        strays = [rank for rank, other in enumerate(others) if not torch.equal(other, others[0])]
        if strays:
            raise OelmError(
                f"at step {step} process {strays[0]} of {self.size} does not have the weights of process 0: another CPU, GPU, "
                "library or file? Run on equal hosts and repeat the command: it continues from the last checkpoint"
            )

    @contextlib.contextmanager
    def writer_first(self) -> Iterator[None]:
        """Run the block in the writer first, then in the others; if the writer fails, the others raise its error."""
        if self.size == 1:
            yield
        elif self.is_writer:
            with self._beating() as message:
                try:
                    yield
                except BaseException as problem:
                    message[:] = [_FAILED, *_words(problem)]
                    raise
            with self._together():
                pass
        else:
            self._wait_for_writer()
            with self._together():
                yield

    @contextlib.contextmanager
    def _together(self) -> Iterator[None]:
        """Run the block, and leave when all have finished theirs; all exchange a heartbeat every second."""
        over, failed = threading.Event(), threading.Event()
        lost: list[RuntimeError] = []

        def beat() -> None:
            try:
                is_over = over.wait(_BEAT_S)
                while not failed.is_set() and self._summed([float(not is_over)])[0]:
                    is_over = over.wait(_BEAT_S)
            except RuntimeError as problem:
                lost.append(problem)

        thread = threading.Thread(target=beat, daemon=True)
        thread.start()
        try:
            yield
        except BaseException:
            # The others notice when this process ends, and read the reason that it left.
            failed.set()
            raise
        finally:
            over.set()
            thread.join()
        if lost:
            raise lost[0]

    @contextlib.contextmanager
    def _beating(self) -> Iterator[bytearray]:
        """Send heartbeats to the waiting processes until the block ends, then how it ended."""
        message, over = bytearray([_WELL]), threading.Event()
        lost: list[RuntimeError] = []

        def beat() -> None:
            try:
                while not over.wait(_BEAT_S):
                    self._broadcast(bytes([_BEAT]))
                self._broadcast(bytes(message))
            except RuntimeError as problem:
                lost.append(problem)

        thread = threading.Thread(target=beat, daemon=True)
        thread.start()
        try:
            yield message
        finally:
            over.set()
            thread.join()
        if lost:
            raise lost[0]

    def _wait_for_writer(self) -> None:
        while (message := self._broadcast(b""))[0] == _BEAT:
            pass
        if message[0] == _FAILED:
            raise _error(message[1:])

    def _broadcast(self, content: bytes) -> bytes:
        length = torch.tensor([len(content)])
        dist.broadcast(length, src=0, group=self._control)
        buffer = torch.zeros(int(length), dtype=torch.uint8)
        if self.is_writer:
            buffer = torch.tensor(list(content), dtype=torch.uint8)
        dist.broadcast(buffer, src=0, group=self._control)
        return bytes(buffer.tolist())

    def _summed(self, values: Sequence[float]) -> list[float]:
        numbers = torch.tensor(list(values), dtype=torch.float64)
        dist.all_reduce(numbers, group=self._control)
        summed: list[float] = numbers.tolist()
        return summed

    @contextlib.contextmanager
    def guarded(self) -> Iterator[None]:
        """Leave the reason of a failure for the other processes; on a lost process, raise with the reason that it left."""
        if self.size == 1:
            yield
            return
        try:
            yield
        except RankLostError:
            raise
        except RuntimeError as problem:
            if not (isinstance(problem, dist.DistError) or _LOST.search(str(problem))):
                self._leave_word(problem)
                raise
            self._wake_peers()
            raise self._why_lost(problem) from problem
        except BaseException as problem:
            self._leave_word(problem)
            raise

    def _leave_word(self, problem: BaseException) -> None:
        assert self._store is not None
        with contextlib.suppress(RuntimeError):
            self._store.compare_set(_REASON, "", _words(problem, rank=self.rank).decode())

    def _why_lost(self, problem: RuntimeError) -> OelmError:
        assert self._store is not None
        deadline = time.monotonic() + _LAST_WORDS_S
        with contextlib.suppress(RuntimeError):
            while time.monotonic() < deadline:
                if self._store.check([_REASON]):
                    return _error(self._store.get(_REASON))
                time.sleep(_LAST_WORDS_S / 20)
        return RankLostError(
            f"one of the {self.size} processes of this run ended or hangs ({str(problem).splitlines()[0][:200]}); repeat the "
            "command to resume from the last checkpoint"
        )

    def _wake_peers(self) -> None:
        """Wake suspended peers on this host, so that they notice and end."""
        for host, pid in self._peers:
            if host == socket.gethostname() and pid != os.getpid():
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGCONT)


ALONE = World()


@contextlib.contextmanager
def joined(device: str) -> Iterator[World]:
    """Join the other processes of torchrun, and leave them at the end; without torchrun, yield ALONE."""
    if not is_one_of_many():
        yield ALONE
        return
    timeout_s = float(os.environ.get(TIMEOUT_SETTING, TIMEOUT_S))
    timeout = timedelta(seconds=timeout_s)
    if device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    try:
        store, rank, size = next(rendezvous("env://", timeout=timeout))
        # torchrun's store outlives a restart; ignore what dead processes left in it.
        store = PrefixStore(f"oelm/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
        store.set_timeout(timeout)
        backend = "nccl" if device == "cuda" else "gloo"
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)
        control = dist.new_group(backend="gloo", timeout=timeout) if backend != "gloo" else dist.group.WORLD
        store.set(f"pid/{rank}", f"{socket.gethostname()} {os.getpid()}")
        addresses = [store.get(f"pid/{other}").decode().rsplit(" ", 1) for other in range(size)]
    except (RuntimeError, ValueError, KeyError) as problem:
        raise RankLostError(
            f"the processes of this run did not find each other within {timeout_s:g} s ({str(problem).splitlines()[0][:200]}): "
            "do all hosts run the same torchrun command, and does --rdzv-endpoint name one that the others can reach?"
        ) from problem
    peers = [(host, int(pid)) for host, pid in addresses]
    try:
        yield World(rank, size, device, timeout_s, _store=store, _control=control, _peers=peers)
    finally:
        with contextlib.suppress(RuntimeError):
            dist.destroy_process_group()


@contextlib.contextmanager
def unsynced(forward: nn.Module, *, is_last: bool) -> Iterator[None]:
    """Accumulate gradients locally; only the last micro-batch sums them over the processes."""
    if is_last or not isinstance(forward, DistributedDataParallel):
        yield
    else:
        with forward.no_sync():
            yield


def _sum_gradients(world: World, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    """Sum one bucket of gradients; nothing is divided, because the losses are shares of one mean."""
    gradients: Tensor = bucket.buffer()
    world.reduced_bytes += gradients.nbytes
    work = dist.all_reduce(gradients, async_op=True)
    assert work is not None
    summed: torch.futures.Future[Tensor] = work.get_future().then(lambda future: future.value()[0])
    return summed


class AgreedStop(StopFlag):
    """A stop that all processes agreed on; `own` is this process's flag."""

    def __init__(self, own: StopFlag) -> None:
        super().__init__()
        self.own = own


def agreed(stop: StopFlag, world: World) -> StopFlag:
    """Return the flag that the loop polls: the caller's, or one that all processes set at the same step."""
    return stop if world.size == 1 else AgreedStop(stop)


def own_stop(stop: StopFlag) -> StopFlag:
    """Return this process's flag, for work without the others."""
    return stop.own if isinstance(stop, AgreedStop) else stop


def _asked(stop: StopFlag) -> float:
    return float(own_stop(stop).requested())


def _take_up(stop: StopFlag, is_asked: bool) -> None:
    if is_asked:
        own = stop.own.reason if isinstance(stop, AgreedStop) else None
        stop.request(own or "a signal to another process of the run")


def _words(problem: BaseException, *, rank: int = 0) -> bytes:
    """Encode an error so that another process can raise the same."""
    is_ours = isinstance(problem, OelmError)
    text = str(problem) if is_ours else f"{type(problem).__name__}: {problem}"
    where = f"process {rank}: " if rank else ""
    code = STOPPED if isinstance(problem, KeyboardInterrupt) else getattr(problem, "exit_code", 1)
    return dump_json({"code": code, "message": where + text}, indent=None).encode()


def _error(words: bytes) -> OelmError:
    content = json.loads(words)
    problem = OelmError(str(content["message"]))
    problem.exit_code = int(content["code"])
    return problem
