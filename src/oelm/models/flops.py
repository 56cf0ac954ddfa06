"""The arithmetic bound: which share of a training step's work freezing Q and K can remove at most."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

# AdamW reads and writes weight and two moments and reads the gradient: about this many operations an element.
OPTIMIZER_OPERATIONS = 16


class Shape(Protocol):
    """What the work depends on; `GPTConfig` has it all."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def seq_len(self) -> int: ...

    @property
    def model_dim(self) -> int: ...

    @property
    def num_layers(self) -> int: ...

    @property
    def ff_dim(self) -> int: ...

    @property
    def qk_rows(self) -> int: ...


@dataclass(frozen=True)
class StepWork:
    """Floating-point operations of one training step."""

    matmuls: int
    optimizer: int
    frozen_saving: int

    @property
    def largest_speedup(self) -> float:
        """How many times as fast a frozen step can be at the very best, if every operation costs the same."""
        total = self.matmuls + self.optimizer
        return total / (total - self.frozen_saving)


def step_work(model: Shape, *, batch_size: int) -> StepWork:
    """Count the matrix products of forward and backward, the optimizer's update, and what frozen Q and K leave out."""
    tokens, width = batch_size * model.seq_len, model.model_dim
    block = 2 * width * (model.qk_rows + width + model.ff_dim)
    head = model.vocab_size * width
    # A product costs 2 operations a weight and token forward, and twice that backward (input and weight gradients).
    matmuls = 6 * tokens * (model.num_layers * block + head)
    # Scores and mixed values, causal: half of T x T; the backward pass costs twice the forward.
    matmuls += 3 * model.num_layers * tokens * model.seq_len * (model.qk_rows + width)
    frozen = model.num_layers * 2 * width * model.qk_rows
    weights = model.num_layers * block + head + model.seq_len * width
    return StepWork(
        matmuls=matmuls,
        optimizer=OPTIMIZER_OPERATIONS * weights,
        frozen_saving=2 * tokens * frozen + OPTIMIZER_OPERATIONS * frozen,
    )
