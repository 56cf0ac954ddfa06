"""Runs in processes of their own, so that they can really be killed, stopped, starved and raced."""

from __future__ import annotations

import json
import multiprocessing as mp
import os
import resource
import shutil
import signal
import tempfile
from collections.abc import Callable
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

from oelm.files import STAGING_PREFIX, sha256_file
from oelm.train.metrics import read_metrics

_SERVER = mp.get_context("forkserver")
# Loading torch takes longer than a tiny run; the server does it once and every child is forked from it.
_SERVER.set_forkserver_preload(["oelm.train.run", "oelm.experiments.budget"])
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

    from oelm.errors import OelmError
    from oelm.train.config import parse_config
    from oelm.train.run import Options, train
    from oelm.train.stop import StopFlag
    from oelm.train.watch import Silence

    torch.set_num_threads(settings.get("threads", 1))
    if "file_bytes" in settings:
        resource.setrlimit(resource.RLIMIT_FSIZE, (settings["file_bytes"],) * 2)
    if fault is not None:
        FAULTS[fault]()
    options = Options(strict=settings.get("strict", False), exact_step=settings.get("exact_step"))
    try:
        with StopFlag() as stop:
            result = train(parse_config(config, where="test"), Path(out), stop=stop, watch=Silence(), options=options)
    except OelmError as problem:
        if "told" in settings:
            Path(settings["told"]).write_text(str(problem))
        os._exit(problem.exit_code)
    os._exit(75 if result.status == "stopped" else 0)


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
        if Path(path).name.startswith("step-"):
            next(Path(path).iterdir()).unlink()
            _die()
        original(path, **kwargs)

    _on_second_save(shutil, "rmtree", remove_one_file)


def _nan_in_one_gradient() -> None:
    """Turn one gradient to NaN at the seventh backward pass, as a flipped exponent bit would."""
    import torch

    backward = torch.Tensor.backward
    calls = 0

    def poisoned(self: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 7:
            self = self * float("nan")
        backward(self, *args, **kwargs)

    torch.Tensor.backward = poisoned  # type: ignore[method-assign]


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
    "nan in one gradient": _nan_in_one_gradient,
    "no memory": _no_memory,
    "in the test split": _in_the_test_split,
}
SAVE_POINTS = tuple(FAULTS)[:6]
