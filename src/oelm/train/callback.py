"""`OelmCallback`: the guards of our loop in `transformers.Trainer`."""

from __future__ import annotations

import logging
from collections.abc import Collection
from typing import Any

import torch
from torch import nn

from oelm.errors import MethodError, needing
from oelm.method.apply import Plan, forget, hold, plan_of
from oelm.method.audit import audit, check_frozen, methods_of, record_of

with needing("transformers", "hf"):
    from transformers import TrainerCallback

log = logging.getLogger(__name__)
# In a saved optimizer: the state of a parameter that joined it during training, by the parameter's name.
_JOINED = "oelm:"


class OelmCallback(TrainerCallback):
    """Logs at the start what is frozen, checks by digest at every save that it has not moved, and follows the method.

    A method that thaws or freezes during training (`Method.thaw`, `Method.freeze_at`) does so at the same steps as in our
    loop. To resume, freeze a fresh model with the same call. Raises MethodError at the start if nothing is frozen, now or
    later.
    """

    def __init__(self) -> None:
        self._plans: list[tuple[nn.Module, Plan]] = []
        self._joined = _Joined()

    def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        model: nn.Module = given["model"]
        plans = [(owner, plan_of(owner, method, steps=state.max_steps)) for owner, method in methods_of(model)]
        self._plans = [(owner, plan) for owner, plan in plans if plan.moments]
        if not record_of(model) and not self._plans:
            raise MethodError("nothing is frozen in this model: call oelm.freeze(model, method) before Trainer(...)")
        if self._plans and args.world_size > 1:
            raise MethodError(
                "a method that thaws or freezes during training: with several processes, gradients of thawed weights would not "
                "be summed; use one process"
            )
        self._resume(model, state, given["optimizer"])
        check_frozen(model)
        log.info("%s", audit(model))

    def _resume(self, model: nn.Module, state: Any, optimizer: Any) -> None:
        """Train what was trained in the last step before the checkpoint; the loaded weights are no longer those of `freeze`."""
        # At step 0 nothing has thawed yet.
        last = max(0, state.global_step - 1)
        for owner, plan in self._plans:
            thawed = plan.frozen_at(0) - plan.frozen_at(last)
            forget(owner, thawed)
            self._joined.add(model, owner, thawed, optimizer)
        self._joined.drop_others(optimizer)

    def on_step_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        model: nn.Module = given["model"]
        for owner, plan in self._plans:
            frozen, before = plan.frozen_at(state.global_step), set(record_of(owner))
            if frozen != before:
                # Fused weights stay split: merged, they would be new tensors, unknown to the optimizer.
                hold(owner, frozen)
                self._joined.add(model, owner, before - frozen, given["optimizer"])
                log.info("step %d: thawed %d tensors, froze %d", state.global_step, len(before - frozen), len(frozen - before))

    def on_save(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        check_frozen(given["model"])

    def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        # After the last step the best checkpoint replaces the weights to check.
        if args.load_best_model_at_end and state.global_step >= state.max_steps:
            check_frozen(given["model"])

    def on_train_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        if args.load_best_model_at_end and state.best_model_checkpoint is not None:
            for owner, plan in self._plans:
                # Loaded from before it was frozen.
                forget(owner, record_of(owner).keys() - plan.frozen_at(state.best_global_step))
        check_frozen(given["model"])


class _Joined:
    """The parameters that joined an optimizer during training, and how its state is saved and loaded with them.

    A Trainer that resumes builds its optimizer from what trains at the start, and torch loads the state by position. So the
    state of those that joined is saved by name, separate from the rest, which always fits.
    """

    def __init__(self) -> None:
        self._names: dict[nn.Parameter, str] = {}
        self._known: set[int] = set()

    def add(self, model: nn.Module, owner: nn.Module, names: Collection[str], optimizer: Any) -> None:
        """Add parameters to an optimizer, with the state that was loaded for them."""
        optimizer = getattr(optimizer, "optimizer", optimizer)
        if names and id(optimizer) not in self._known:
            self._known.add(id(optimizer))
            optimizer.register_state_dict_post_hook(self._save_apart)
            optimizer.register_load_state_dict_pre_hook(self._leave)
        full_names = {parameter: name for name, parameter in model.named_parameters()}
        parameters = dict(owner.named_parameters(remove_duplicate=False))
        # Into existing groups: a new one would not follow the Trainer's schedule. Its first group decays, its last does not.
        groups = optimizer.param_groups
        known = {parameter for group in groups for parameter in group["params"]}
        for name in sorted(names):
            parameter, group = parameters[name], groups[-1 if name.endswith("bias") else 0]
            if parameter not in known:
                group["params"].append(parameter)
                known.add(parameter)
                self._names[parameter] = full_names[parameter]
                if loaded := optimizer.state.pop(_JOINED + full_names[parameter], None):
                    optimizer.state[parameter] = {key: _placed(key, value, parameter, group) for key, value in loaded.items()}

    def drop_others(self, optimizer: Any) -> None:
        """Drop loaded states that were not used."""
        for key in [key for key in optimizer.state if isinstance(key, str) and key.startswith(_JOINED)]:
            del optimizer.state[key]

    def _save_apart(self, optimizer: Any, saved: dict[str, Any]) -> dict[str, Any]:
        held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        rest = [number for number, parameter in enumerate(held) if parameter not in self._names]
        places: dict[Any, Any] = {number: place for place, number in enumerate(rest)}
        groups = [
            {**group, "params": [places[number] for number in group["params"] if number in places]}
            for group in saved["param_groups"]
        ]
        places |= {n: _JOINED + self._names[parameter] for n, parameter in enumerate(held) if parameter in self._names}
        return {
            **saved,
            "param_groups": groups,
            "state": {places.get(key, key): value for key, value in saved["state"].items()},
        }

    def _leave(self, optimizer: Any, loaded: dict[str, Any]) -> None:
        """Remove those that joined before a state is loaded, which may be of an earlier step."""
        for group in optimizer.param_groups:
            group["params"] = [parameter for parameter in group["params"] if parameter not in self._names]
        self._names.clear()


def _placed(key: str, value: Any, parameter: nn.Parameter, group: dict[str, Any]) -> Any:
    """Return a loaded value on the device and in the dtype that torch uses when it loads a state."""
    if not isinstance(value, torch.Tensor):
        return value
    if key == "step":
        return value.to(parameter.device) if group.get("fused") or group.get("capturable") else value
    return value.to(parameter.device, parameter.dtype if value.is_floating_point() else value.dtype)
