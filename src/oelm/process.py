"""This process: its rank under torchrun, and the flag by which signals ask it to stop. Loads no torch."""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType, TracebackType
from typing import Any


def is_one_of_many() -> bool:
    """Whether torchrun started this process together with others."""
    return os.environ.get("WORLD_SIZE", "1") != "1" and "RANK" in os.environ


def own_rank() -> int:
    """Return the rank of this process under torchrun; 0 without torchrun."""
    return int(os.environ["RANK"]) if is_one_of_many() else 0


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
