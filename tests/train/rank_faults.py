"""What goes wrong, or is looked at, inside one process of a run on several."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any

import oelm.train.checkpoint
import oelm.train.loop
import oelm.train.session
from oelm.errors import DataError
from oelm.train.dist import World
from oelm.train.watch import Silence

_LOOP: Any = oelm.train.loop


class Recorder(Silence):
    """Notes the batch ids of every step, as the loop hands them to it, and the bytes of gradients that it summed."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.ids: list[list[int]] = []
        self.step_bytes: list[int] = []
        self._step = _LOOP.train_step

    def __enter__(self) -> Recorder:
        def noted(*args: Any, **given: Any) -> Any:
            self.ids.append(list(given["batch_ids"]))
            outcome = self._step(*args, **given)
            self.step_bytes.append(self.world.step_bytes)
            return outcome

        _LOOP.train_step = noted
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        _LOOP.train_step = self._step


def _at_backward(number: int, act: Callable[[Any], Any]) -> None:
    """Replace the loss by what `act` makes of it at the n-th backward pass of this process."""
    import torch

    backward = torch.Tensor.backward
    calls = 0

    def counted(self: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        nonlocal calls
        calls += 1
        backward(act(self) if calls == number else self, *args, **kwargs)

    torch.Tensor.backward = counted  # type: ignore[method-assign]


def _nan_on_rank_1(rank: int) -> None:
    if rank == 1:
        _at_backward(7, lambda loss: loss * float("nan"))


def _killed_rank_1(rank: int) -> None:
    if rank == 1:
        _at_backward(11, lambda loss: os.kill(os.getpid(), signal.SIGKILL))


def _stopped_rank_1(rank: int) -> None:
    if rank == 1:

        def suspended(loss: Any) -> Any:
            os.kill(os.getpid(), signal.SIGSTOP)
            return loss

        _at_backward(11, suspended)


def _killed_writer(rank: int) -> None:
    if rank == 0:
        _at_backward(11, lambda loss: os.kill(os.getpid(), signal.SIGKILL))


def _killed_while_saving(rank: int) -> None:
    """The writer dies half-way through its second checkpoint."""
    if rank == 0:
        from tests.faults.harness import FAULTS as OF_ONE

        OF_ONE["mid-file"]()


def _waiter_killed_while_saving(rank: int) -> None:
    """Another process dies while the writer saves."""
    if rank == 1:
        session: Any = oelm.train.session.Session
        save = session.save
        saves = 0

        def dying(self: Any) -> None:
            nonlocal saves
            saves += 1
            if saves == 2:
                os.kill(os.getpid(), signal.SIGKILL)
            save(self)

        session.save = dying


def _no_room(rank: int) -> None:
    """The writer finds the disk full at its second checkpoint."""
    if rank == 0:
        import errno

        from tests.faults.harness import _on_second_save

        def full(original: Any, *args: Any, **kwargs: Any) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        import tempfile

        _on_second_save(tempfile, "mkdtemp", full)


def _slow(rank: int) -> None:
    """Every save of the writer takes longer than the others' patience."""
    if rank == 0:
        checkpoints: Any = oelm.train.checkpoint.Checkpoints
        publish = checkpoints.publish

        def slowly(self: Any, *args: Any) -> Any:
            time.sleep(4.0)
            return publish(self, *args)

        checkpoints.publish = slowly


def _while_opening(act: Callable[[], None]) -> Callable[[int], None]:
    """Something happens to the second process, and no other, as it opens the data."""

    def install(rank: int) -> None:
        if rank == 1:
            import oelm.data.prepare

            module: Any = oelm.data.prepare
            opened = module.open_tokens

            def disturbed(path: Any) -> Any:
                act()
                return opened(path)

            module.open_tokens = disturbed

    return install


def _refuse() -> None:
    raise DataError("train.bin: not what was recorded")


def _stop_after(step: int) -> Callable[[int], None]:
    """The second process, and no other, is asked to stop once a step is done."""

    def install(rank: int) -> None:
        if rank == 1:
            own = _LOOP.train_step
            calls = 0

            def counted(*args: Any, **given: Any) -> Any:
                nonlocal calls
                calls += 1
                if calls == step:
                    os.kill(os.getpid(), signal.SIGTERM)
                return own(*args, **given)

            _LOOP.train_step = counted

    return install


FAULTS: dict[str, Callable[[int], None]] = {
    "nan on rank 1": _nan_on_rank_1,
    "rank 1 killed": _killed_rank_1,
    "rank 1 suspended": _stopped_rank_1,
    "writer killed": _killed_writer,
    "writer killed while saving": _killed_while_saving,
    "rank 1 killed while saving": _waiter_killed_while_saving,
    "disk full": _no_room,
    "slow saves": _slow,
    "rank 1 slow to open": _while_opening(lambda: time.sleep(7.0)),
    "rank 1 killed while opening": _while_opening(lambda: os.kill(os.getpid(), signal.SIGKILL)),
    "rank 1 finds other data": _while_opening(_refuse),
    "stop at 4": _stop_after(4),
}
