"""What a run reports to its watch, and the flag that asks it to stop."""

from __future__ import annotations

import signal
import threading
from dataclasses import dataclass
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from oelm.train.evaluate import Evaluation


@dataclass(frozen=True)
class StepReport:
    """One step as seen from outside."""

    step: int
    steps: int
    loss: float
    lr: float
    tokens_per_s: float
    eta_s: float | None


class Watch(Protocol):
    """Hears of a run's remarks, preparation, steps and evaluations."""

    def on_remark(self, text: str) -> None: ...

    def on_preparing(self, what: str, done: int, total: int, tokens: int) -> None: ...

    def on_step(self, report: StepReport) -> None: ...

    def on_validating(self, done: int, total: int) -> None: ...

    def on_evaluation(self, step: int, evaluation: Evaluation, *, is_best: bool) -> None: ...


class Silence:
    """A watch that shows nothing."""

    def on_remark(self, text: str) -> None: ...

    def on_preparing(self, what: str, done: int, total: int, tokens: int) -> None: ...

    def on_step(self, report: StepReport) -> None: ...

    def on_validating(self, done: int, total: int) -> None: ...

    def on_evaluation(self, step: int, evaluation: Evaluation, *, is_best: bool) -> None: ...


# Closing a terminal sends SIGHUP; Windows has none.
_ASKING = (signal.SIGINT, signal.SIGTERM, *((signal.SIGHUP,) if hasattr(signal, "SIGHUP") else ()))


class StopFlag:
    """As a context manager: SIGINT, SIGTERM and SIGHUP ask for a stop after the present step; a second SIGINT stops at once."""

    def __init__(self) -> None:
        self.reason: str | None = None
        self._previous: dict[signal.Signals, Any] = {}

    def requested(self) -> bool:
        return self.reason is not None

    def request(self, reason: str) -> None:
        self.reason = self.reason or reason

    def __enter__(self) -> StopFlag:
        # Only the main thread may set handlers; in others the caller uses request().
        if threading.current_thread() is threading.main_thread():
            for number in _ASKING:
                # nohup ignores SIGHUP, so that a run outlives its terminal.
                if number in (signal.SIGINT, signal.SIGTERM) or signal.getsignal(number) != signal.SIG_IGN:
                    self._previous[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous.clear()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and self.requested():
            raise KeyboardInterrupt
        self.request(signal.Signals(number).name)
