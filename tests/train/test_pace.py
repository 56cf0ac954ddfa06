"""How fast an arm learns: its own layer-wise rates and warm-up reach every tensor that learns, in a real run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch import nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from oelm.config import RunConfig
from oelm.method.apply import freeze
from oelm.models.gpt import build_gpt
from oelm.train.optim import learning_rate
from tests.conftest import run_here, tiny_config

STEPS = 8
DECAY = 0.5
# Of two layers: how many lie above what these names begin with; whatever else there is stands behind the last.
ABOVE = {"blocks.1.": 0, "blocks.0.": 1, "token_embedding": 2, "position_embedding": 2}
ON_TOP = {"init": "orthogonal", "freeze": ["q", "k"], "gain": "matrix", "correction": 0.125}
THAWED = {"init": "orthogonal", "freeze": ["q", "k"], "thaw": {"start": 0.5, "end": 0.5, "order": "first_first"}}


def rates_of(config: RunConfig, out: Path) -> list[dict[int, list[float]]]:
    """Train; return for every update the rates that tensors of each number of elements were updated with, in order."""
    updates: list[dict[int, list[float]]] = []

    def note(optimizer: Optimizer, *_: Any) -> None:
        found: dict[int, list[float]] = {}
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                found.setdefault(parameter.numel(), []).append(group["lr"])
        updates.append({count: sorted(rates) for count, rates in found.items()})

    hook = register_optimizer_step_pre_hook(note)
    try:
        run_here(config, out)
    finally:
        hook.remove()
    return updates


def expected(model: nn.Module, lr: float, *, decay: float) -> dict[int, list[float]]:
    found: dict[int, list[float]] = {}
    for name, parameter in model.named_parameters():
        power = next((above for prefix, above in ABOVE.items() if name.startswith(prefix)), 0)
        if parameter.requires_grad:
            found.setdefault(parameter.numel(), []).append(lr * decay**power)
    return {count: sorted(rates) for count, rates in found.items()}


@pytest.mark.parametrize("more", [{}, ON_TOP], ids=["baseline", "on_top"])
def test_a_run_has_its_methods_rate_in_every_layer_and_on_what_is_learnt_on_top(
    text_file: Path, tmp_path: Path, more: dict[str, Any]
) -> None:
    config = tiny_config(text_file, method={**more, "layer_lr_decay": DECAY}, steps=STEPS)
    updates = rates_of(config, tmp_path / "run")
    model = build_gpt(config.model.model_copy(update={"vocab_size": 300}), seed=0)
    freeze(model, config.method, seed=0)
    learnt = [name for name, _ in model.named_parameters() if "gain" in name or "correction" in name]
    assert bool(learnt) == bool(more) and len(updates) == STEPS
    for step, found in enumerate(updates):
        wanted = expected(model, learning_rate(config, step), decay=DECAY)
        # The vocabulary is found by training; all else has its size from the config.
        assert {count: pytest.approx(rates) for count, rates in wanted.items() if count in found} == {
            count: rates for count, rates in found.items() if count in wanted
        }
        assert sum(map(len, found.values())) == sum(map(len, wanted.values()))


def test_what_is_thawed_warms_up_by_its_arms_own_number_of_steps(text_file: Path, tmp_path: Path) -> None:
    config = tiny_config(text_file, method={**THAWED, "warmup_steps": 4}, steps=STEPS, schedule__warmup_steps=1)
    updates = rates_of(config, tmp_path / "run")
    begin = STEPS // 2
    assert [sum(map(len, update.values())) - sum(map(len, updates[0].values())) for update in updates] == [0] * begin + [
        4
    ] * begin
    for step in range(begin, STEPS):
        lr = learning_rate(config, step)
        warm = (step - begin + 1) / 4
        square = config.model.model_dim**2
        # Q and K of two layers were thawed; V and the output of both have learnt all along.
        assert updates[step][square] == pytest.approx(sorted([lr * warm] * 4 + [lr] * 4))


def test_an_arms_own_warm_up_takes_the_place_of_the_schedules(text_file: Path, tmp_path: Path) -> None:
    config = tiny_config(text_file, method={"warmup_steps": 4}, steps=STEPS, schedule__warmup_steps=1)
    first = [max(max(rates) for rates in update.values()) for update in rates_of(config, tmp_path / "run")[:4]]
    assert first == pytest.approx([config.optim.lr * part / 4 for part in (1, 2, 3, 4)])
