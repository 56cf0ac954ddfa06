"""What a run tells whoever watches it; this one is silent."""

from __future__ import annotations

from dataclasses import dataclass

from oelm.train.task import Evaluation


@dataclass(frozen=True)
class StepReport:
    """One step as seen from outside."""

    step: int
    steps: int
    loss: float
    lr: float
    tokens_per_s: float
    eta_s: float | None


class Watch:
    """Hears of a run's steps, evaluations and remarks; override what you want to show."""

    def on_remark(self, text: str) -> None: ...

    def on_preparing(self, what: str, done: int, total: int) -> None: ...

    def on_step(self, report: StepReport) -> None: ...

    def on_evaluation(self, step: int, evaluation: Evaluation, *, is_best: bool) -> None: ...

    def on_saved(self, step: int) -> None: ...
