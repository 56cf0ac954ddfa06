"""Runs in processes of their own, so that they can really be killed, stopped, starved and raced."""

from __future__ import annotations

import json
import multiprocessing as mp
import os
import resource
import shutil
import signal
import tempfile
import time
from collections.abc import Callable
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

from oelm.files import STAGING_PREFIX, sha256_file
from oelm.process import StopFlag
from oelm.runs.metrics import read_metrics
from oelm.train.watch import Silence, StepReport

_SERVER = mp.get_context("forkserver")
# Loading torch takes longer than a tiny run; the server does it once and every child is forked from it.
_SERVER.set_forkserver_preload(["oelm.train.run", "oelm.budget"])
Fault = Callable[[], None]


def start(config: dict[str, Any], out: Path, *, fault: str | None = None, **settings: Any) -> ForkServerProcess:
    """Start a run in a child process, with a named fault built in."""
    child = _SERVER.Process(target=_child, args=(config, str(out), fault, settings))
    child.start()
    return child


def finish(config: dict[str, Any], out: Path, **settings: Any) -> None:
    """Bring a run to its end in a child process."""
    child = start(config, out, **settings)
    child.join(timeout=120)
    assert child.exitcode == 0, f"exit code {child.exitcode}"


def _child(config: dict[str, Any], out: str, fault: str | None, settings: dict[str, Any]) -> None:
    import torch

    from oelm.config import parse_config
    from oelm.errors import OelmError
    from oelm.train.run import Options, train

    torch.set_num_threads(settings.get("threads", 1))
    if "file_bytes" in settings:
        resource.setrlimit(resource.RLIMIT_FSIZE, (settings["file_bytes"],) * 2)
    if "user" in settings:
        os.setuid(settings["user"])
    if fault is not None:
        FAULTS[fault]()
    if "ids" in settings:
        _note_batches(Path(settings["ids"]))
    options = Options(
        strict=settings.get("strict", False),
        exact_step=settings.get("exact_step"),
        preflight=settings.get("preflight", True),
    )
    # The server's own answer to an interrupt is to ignore it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with StopFlag() as stop:
            watch = Follower(stop, settings, steps=config["steps"])
            result = train(parse_config(config, where="test"), Path(out), stop=stop, watch=watch, options=options)
    except KeyboardInterrupt:
        os._exit(130)
    except OelmError as problem:
        if "told" in settings:
            Path(settings["told"]).write_text(str(problem))
        os._exit(problem.exit_code)
    os._exit(75 if result.status == "stopped" else 0)


class Follower(Silence):
    """Dies after a step, or rests in a phase until a signal comes: the file `phase` says that it does."""

    def __init__(self, stop: StopFlag, settings: dict[str, Any], *, steps: int) -> None:
        self.stop, self.steps, self.now = stop, steps, 0
        self.die_at, self.rest_in, self.rest_at = settings.get("die_at"), settings.get("rest_in"), settings.get("rest_at", 0)
        self.sign, self.is_deaf_once = Path(settings.get("phase", "")), settings.get("deaf_once", False)
        # Instead of a signal, the end of this file may end the rest.
        self.held_by = Path(settings["rest_while"]) if "rest_while" in settings else None
        if self.held_by is not None:
            self.held_by.touch()
        if self.rest_in == "start-up":
            self.rest()
        if self.rest_in == "save":
            import oelm.train.checkpoint as checkpoint

            _on_second_save(checkpoint, "_manifest_text", self._rest_before)

    def rest(self) -> None:
        if self.sign.exists():
            return
        self.sign.touch()
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and (self.held_by is None or self.held_by.exists()):
            if self.stop.requested() and not self.is_deaf_once:
                return
            time.sleep(0.001)

    def _rest_before(self, original: Callable[[Path], str], folder: Path) -> str:
        self.rest()
        return original(folder)

    def on_step(self, report: StepReport) -> None:
        self.now = report.step
        if self.now == self.die_at:
            _die()
        if self.rest_in in ("warm-up", "step") and self.now == self.rest_at:
            self.rest()

    def on_validating(self, done: int, total: int) -> None:
        if self.rest_in == "evaluation" and self.rest_at <= self.now < self.steps:
            self.rest()
        if self.rest_in == "final evaluation" and self.now == self.steps:
            self.rest()


def _note_batches(path: Path) -> None:
    """Write down which windows every batch holds, in the order in which they are asked for."""
    from oelm.train.task import LanguageModelTask

    original = LanguageModelTask.batch

    def noted(self: Any, step: int) -> Any:
        batch = original(self, step)
        with path.open("a") as file:
            file.write(json.dumps({"step": step, "ids": [int(number) for number in batch.ids]}) + "\n")
        return batch

    LanguageModelTask.batch = noted  # type: ignore[method-assign]


def wait_for(is_so: Callable[[], bool], child: ForkServerProcess, *, timeout_s: float = 120) -> None:
    """Wait until something holds, or the child is over."""
    deadline = time.monotonic() + timeout_s
    while child.is_alive() and not is_so():
        assert time.monotonic() < deadline, "it never came to that"
        time.sleep(0.001)


def rows(run: Path) -> int:
    """Return how many whole rows of metrics a run has written."""
    metrics = run / "metrics.jsonl"
    return metrics.read_bytes().count(b"\n") if metrics.exists() else 0


def evidence(run: Path) -> dict[str, Any]:
    """Return what must be equal between a disturbed run and its oracle: everything but clocks and speeds."""
    rows = read_metrics(run / "metrics.jsonl")
    latest = run / json.loads((run / "latest.json").read_text())["checkpoint"]
    state = json.loads((latest / "state.json").read_text())
    return {
        "losses": [(row["step"], row["loss"].hex(), row["lr"].hex(), row["grad_norm"].hex()) for row in rows if "loss" in row],
        "evaluations": [(row["step"], row["val_loss"].hex()) for row in rows if "val_loss" in row],
        "model": sha256_file(latest / "model.safetensors"),
        "optimizer": sha256_file(latest / "optimizer.safetensors"),
        "state": state["state"],
        "frozen": state["frozen"],
        "predictions": sha256_file(run / "predictions.jsonl"),
        "attention": sha256_file(run / "attention.json"),
        "best": json.loads((run / "best.json").read_text()),
    }


def leftovers(run: Path) -> list[Path]:
    """Return staging files and folders that a writer left behind."""
    return list(run.rglob(f"{STAGING_PREFIX}*"))


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _on_second_save(module: Any, name: str, act: Callable[..., Any]) -> None:
    """Replace a function that a save calls by `act`, from the second save on: the first one must survive."""
    import oelm.train.checkpoint as checkpoint

    original, publish = getattr(module, name), checkpoint.Checkpoints.publish
    saves = 0

    def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal saves
        saves += 1
        return publish(self, *args, **kwargs)

    def replaced(*args: Any, **kwargs: Any) -> Any:
        return act(original, *args, **kwargs) if saves >= 2 else original(*args, **kwargs)

    checkpoint.Checkpoints.publish = counted  # type: ignore[method-assign]
    setattr(module, name, replaced)


def _before_staging() -> None:
    _on_second_save(tempfile, "mkdtemp", lambda original, *a, **k: _die())


def _mid_file() -> None:
    import oelm.train.checkpoint as checkpoint

    def half(original: Any, tensors: Any, path: Path) -> None:
        original(tensors, path)
        os.truncate(path, path.stat().st_size // 2)
        _die()

    _on_second_save(checkpoint, "save_file", half)


def _before_manifest() -> None:
    import oelm.train.checkpoint as checkpoint

    _on_second_save(checkpoint, "_manifest_text", lambda original, folder: _die())


def _before_rename() -> None:
    _on_second_save(os, "rename", lambda original, *a: _die())


def _after_rename() -> None:
    def rename_then_die(original: Any, *args: Any) -> None:
        original(*args)
        _die()

    _on_second_save(os, "rename", rename_then_die)


def _during_prune() -> None:
    def remove_one_file(original: Any, path: Any, **kwargs: Any) -> None:
        if Path(path).name.startswith(f"{STAGING_PREFIX}step-") and Path(path).is_dir():
            next(Path(path).iterdir()).unlink()
            _die()
        original(path, **kwargs)

    _on_second_save(shutil, "rmtree", remove_one_file)


def _poison_one_gradient(value: float) -> Fault:
    """Turn one element of one gradient to `value` at the seventh backward pass, as a flipped exponent bit would."""

    def install() -> None:
        import torch

        backward = torch.Tensor.backward
        calls = 0

        def poisoned(self: torch.Tensor, *args: Any, **kwargs: Any) -> None:
            nonlocal calls
            calls += 1
            backward(self, *args, **kwargs)
            if calls == 7:
                _some_parameter().grad.view(-1)[0] = value

        torch.Tensor.backward = poisoned  # type: ignore[method-assign]

    return install


def _some_parameter() -> Any:
    """Return a parameter of the model that trains in this process."""
    import gc

    from oelm.models.gpt import GPT

    model = next(item for item in gc.get_objects() if isinstance(item, GPT))
    return next(parameter for parameter in model.parameters() if parameter.grad is not None)


def _poison_loss(value: float) -> Fault:
    """Turn the loss of the seventh micro-batch to `value`."""

    def install() -> None:
        from oelm.train.task import LanguageModelTask

        loss = LanguageModelTask.loss
        calls = 0

        def poisoned(self: Any, *args: Any) -> Any:
            nonlocal calls
            calls += 1
            return loss(self, *args) * (value if calls == 7 else 1.0)

        LanguageModelTask.loss = poisoned  # type: ignore[method-assign,assignment]

    return install


def _no_memory() -> None:
    import torch

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    torch.Tensor.backward = refuse  # type: ignore[method-assign]


def _in_the_test_split() -> None:
    """Die in the middle of evaluating the test split, its predictions not yet written."""
    import oelm.train.finish as finish

    evaluated = finish._evaluated

    def killed(session: Any, model: Any, split: Any) -> Any:
        found = evaluated(session, model, split)
        if split == "test":
            _die()
        return found

    finish._evaluated = killed


FAULTS: dict[str, Fault] = {
    "before staging": _before_staging,
    "mid-file": _mid_file,
    "before manifest": _before_manifest,
    "before rename": _before_rename,
    "after rename": _after_rename,
    "during prune": _during_prune,
    "nan in one gradient": _poison_one_gradient(float("nan")),
    "inf in one gradient": _poison_one_gradient(float("inf")),
    "nan loss": _poison_loss(float("nan")),
    "inf loss": _poison_loss(float("inf")),
    "no memory": _no_memory,
    "in the test split": _in_the_test_split,
}
SAVE_POINTS = tuple(FAULTS)[:6]
NOT_FINITE = ("nan in one gradient", "inf in one gradient", "nan loss", "inf loss")
