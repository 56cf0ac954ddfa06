"""What a run reports to its watch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

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
