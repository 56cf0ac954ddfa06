"""Shared fixtures: a cache of its own for the whole session, small text, and the smallest run that does everything."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import torch
import typer.main

from oelm.budget import budget_settings
from oelm.config import RunConfig, parse_config, with_overrides
from oelm.method.method import PRESETS
from oelm.models.gpt import GPT, build_gpt
from oelm.models.shape import GPTConfig
from oelm.process import StopFlag
from oelm.train.run import Options, Result, train
from oelm.train.watch import Silence

# A console keeps for good the width it finds when it is made; tests that want one of theirs set it later.
os.environ.pop("COLUMNS", None)
pytest_plugins = ("tests.faults.tally",)
# A busy machine is no reason to fail: promises about time are kept by benchmarks.
hypothesis.settings.register_profile("oelm", deadline=None)
hypothesis.settings.load_profile("oelm")
# Words from a small closed list: text made here, so that no test depends on a machine's files.
WORDS = "the cat sat on a mat and saw two birds near old trees while rain fell over green hills".split()
# One preset of each kind: by what is held and where it lies, what learns on top, which layers and parts, and until when.
KINDS = {"baseline", "oelm_freeze", "spectral_flat", "oelm_lowrank_first", "oelm_axes_q_lowrank", "thaw_last_first"}
KINDS |= {"train_then_freeze"}
assert KINDS <= PRESETS.keys()


def one_of_each_kind(presets: Iterable[str]) -> list[Any]:
    """Return presets as cases of a test that trains whole runs: all but one of each kind are slow."""
    return [pytest.param(name, marks=() if name in KINDS else pytest.mark.slow) for name in presets]


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep the user's own cache out of the tests, here and in every child process."""
    os.environ["OELM_CACHE"] = str(tmp_path_factory.mktemp("cache"))
    # One thread: these models are too small for two, and child processes must give the same bits.
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    yield


def made_text(num_words: int, *, seed: int = 0) -> str:
    """Return sentences that are the same on every machine."""
    state, words = seed + 12345, []
    for _ in range(num_words):
        state = (1103515245 * state + 12345) % 2**31
        words.append(WORDS[(state >> 16) % len(WORDS)])
    return "\n".join(" ".join(words[start : start + 12]) + "." for start in range(0, num_words, 12)) + "\n"


@pytest.fixture(scope="session")
def text_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "made.txt"
    path.write_text(made_text(6000), encoding="utf-8")
    return path


def tiny_settings(text: Path, **overrides: Any) -> dict[str, Any]:
    """Return settings of a run of seconds, with dropout so that noise matters; dots in keys are written '__'."""
    base = {
        "data.source": str(text),
        "data.tokenizer": "bpe:300",
        "model.dropout": 0.1,
        "model.seq_len": 16,
        "method": "oelm_freeze",
        "steps": 12,
        "eval_every": 5,
        "save_every": 4,
        "batch_size": 4,
        "micro_batch_size": 2,
    }
    dotted = {key.replace("__", "."): value for key, value in overrides.items()}
    return with_overrides(budget_settings("smoke"), base | dotted)


def tiny_config(text: Path, **overrides: Any) -> RunConfig:
    return parse_config(tiny_settings(text, **overrides), where="test")


def run_here(config: RunConfig, out: Path, *, stop: StopFlag | None = None, options: Options | None = None) -> Result:
    """Train in this process, in silence."""
    return train(config, out, stop=stop or StopFlag(), watch=Silence(), options=options)


def tiny_gpt_config(**overrides: Any) -> GPTConfig:
    shape = {"vocab_size": 61, "seq_len": 16, "model_dim": 24, "num_layers": 3, "num_heads": 3, "ff_dim": 40, "dropout": 0.0}
    return GPTConfig(**(shape | overrides))


def lively_gpt(**overrides: Any) -> GPT:
    """Return a model whose attention is far from uniform and whose texts differ."""
    model = build_gpt(tiny_gpt_config(**overrides), seed=3)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() >= 2:
                parameter.mul_(12.0)
    return model.eval()


def oelm_command(*arguments: str) -> list[str]:
    """Return the argv of the command line in a child process."""
    return [sys.executable, "-m", "oelm", *arguments]


@pytest.fixture(scope="session", autouse=True)
def _collected_objects_are_not_looked_through_again() -> None:
    """Take what was imported and collected out of the garbage collector: every full look through it takes 0.3 s."""
    import gc

    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def _commands_made_once() -> Iterator[None]:
    """Let typer's runner keep the commands of an app: made anew for each call, they are half the time of a refusal."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("typer.testing._get_command", functools.cache(typer.main.get_command))
        yield
