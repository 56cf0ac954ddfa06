"""Runs that freeze or thaw on the way: what is frozen never moves, and any interruption leaves the same bits."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from oelm.config import RunConfig
from oelm.data.prepare import prepare
from oelm.errors import FrozenMovedError
from oelm.files import sha256_file
from oelm.method.apply import Plan, adopt_record, freeze, plan_of
from oelm.method.audit import digest, record_of
from oelm.models.gpt import build_gpt
from oelm.process import StopFlag
from oelm.runs.metrics import read_metrics
from oelm.runs.records import read_config
from oelm.runs.rundir import RunDir
from oelm.train.checkpoint import _manifest_text, load_tensors, open_checkpoint
from oelm.train.device import Compute
from oelm.train.load import LoadedClassifier, load_any, load_run
from oelm.train.loop import run_loop
from oelm.train.optim import learning_rate, optimizer_tensors
from oelm.train.run import train
from oelm.train.session import Session, build_session, follow_plan, resume
from oelm.train.task import LanguageModelTask, resolve
from oelm.train.watch import Silence, StepReport
from tests.conftest import run_here, tiny_config
from tests.train.finetuning import evidence as classifier_evidence
from tests.train.finetuning import finetune_here, tiny_finetune

STEPS = 12
# Two layers and twelve steps: with these, by hand, the first step that moves each layer's Q and K, and where it ends.
MOMENTS = {"thaw_first_first": {3, 9}, "thaw_last_first": {3, 9}, "thaw_together": {6}, "train_then_freeze": {3}}
FREE_FROM = {
    "thaw_first_first": {0: 3, 1: 9},
    "thaw_last_first": {0: 9, 1: 3},
    "thaw_together": {0: 6, 1: 6},
}


def config_of(text: Path, method: str, **more: Any) -> RunConfig:
    return tiny_config(text, method=method, **({"steps": STEPS, "eval_every": 6, "schedule__warmup_steps": 2} | more))


Whole = tuple[str, Path]


@pytest.fixture(scope="module")
def wholes(text_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Whole]:
    """Return an undisturbed run of a method that kept a checkpoint of every step; nobody writes to it."""

    @cache
    def trained_once(method: str) -> Whole:
        out = tmp_path_factory.mktemp("whole") / method
        run_here(config_of(text_file, method, save_every=1, keep_checkpoints=STEPS + 1), out)
        return method, out

    return trained_once


@pytest.fixture(params=MOMENTS)
def whole(request: pytest.FixtureRequest, wholes: Callable[[str], Whole]) -> Whole:
    return wholes(request.param)


def at_step(run: Path, step: int) -> Path:
    return run / "checkpoints" / f"step-{step:08d}"


def weights_at(run: Path, step: int) -> dict[str, str]:
    return {name: digest(tensor) for name, tensor in load_tensors(at_step(run, step) / "model.safetensors").items()}


def start_of(config: RunConfig) -> tuple[dict[str, str], Plan]:
    model = build_gpt(config.model, seed=config.seed)
    freeze(model, config.method, seed=config.seed)
    return {name: digest(p) for name, p in model.named_parameters()}, plan_of(model, config.method, steps=config.steps)


def test_moments_are_those_counted_by_hand(whole: Whole) -> None:
    assert start_of(read_config(whole[1]))[1].moments == MOMENTS[whole[0]]


def test_each_weight_moves_in_every_update_but_those_that_leave_it_frozen(whole: Whole) -> None:
    method, run = whole
    before, _ = start_of(read_config(run))
    for step in range(1, STEPS + 1):
        after = weights_at(run, step)
        still = {name for name in after if after[name] == before[name]}
        if method == "train_then_freeze":
            expected = {(layer, part) for layer in (0, 1) for part in "qk"} if step > 3 else set()
        else:
            expected = {(layer, part) for layer, moment in FREE_FROM[method].items() for part in "qk" if step <= moment}
        assert still == {f"blocks.{layer}.attention.{part}.weight" for layer, part in expected}, step
        before = after


def test_a_checkpoint_tells_what_its_last_update_left_alone(whole: Whole) -> None:
    _, plan = start_of(read_config(whole[1]))
    for step in range(1, STEPS + 1):
        frozen = open_checkpoint(at_step(whole[1], step)).saved.frozen
        assert frozen.keys() == plan.frozen_at(step - 1)
        assert frozen.items() <= weights_at(whole[1], step).items()


def test_a_checkpoint_of_each_stage_opens_frozen_as_it_was(whole: Whole) -> None:
    for step in range(1, STEPS + 1):
        loaded = load_run(whole[1], which=str(step))
        record, saved = record_of(loaded.model), loaded.checkpoint.saved
        assert record == saved.frozen
        assert {name for name, p in loaded.model.named_parameters() if not p.requires_grad} == saved.frozen.keys()
        assert {name: digest(p) for name, p in loaded.model.named_parameters()} == weights_at(whole[1], step)


def test_the_record_of_another_stage_is_refused(whole: Whole) -> None:
    for moment in MOMENTS[whole[0]]:
        before, after = (load_run(whole[1], which=str(step)) for step in (moment, moment + 1))
        for model, other in ((before.model, after), (after.model, before)):
            record = record_of(model)
            with pytest.raises(FrozenMovedError, match="is not what this method freezes"):
                adopt_record(model, other.checkpoint.saved.frozen)
            assert record_of(model) == record


def test_a_checkpoint_whose_frozen_set_is_of_another_stage_is_refused(wholes: Callable[[str], Whole], tmp_path: Path) -> None:
    run = shutil.copytree(wholes("thaw_together")[1], tmp_path / "run")
    folder = at_step(run, 7)
    state = json.loads((folder / "state.json").read_text())
    state["frozen"] = json.loads((at_step(run, 6) / "state.json").read_text())["frozen"]
    (folder / "state.json").write_text(json.dumps(state))
    (folder / "manifest.json").write_text(_manifest_text(folder))
    with pytest.raises(FrozenMovedError, match="is not what this method freezes"):
        load_run(run, which="7")


class StopsAt(Silence):
    """Asks for a stop after a step."""

    def __init__(self, stop: StopFlag, step: int) -> None:
        self.stop, self.step = stop, step

    def on_step(self, report: StepReport) -> None:
        if report.step == self.step:
            self.stop.request("test")


class Death(BaseException):
    """Not an exception of any kind that something may handle."""


class DiesAt(Silence):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_step(self, report: StepReport) -> None:
        if report.step == self.step:
            raise Death


def disturb(config: RunConfig, out: Path, *, stop_at: tuple[int, ...] = (), die_at: tuple[int, ...] = ()) -> Path:
    """Run with these interruptions, one after the other, to the end."""
    for step in stop_at:
        stop = StopFlag()
        assert train(config, out, stop=stop, watch=StopsAt(stop, step)).status == "stopped"
        assert load_run(out, which="latest").step == step
    for step in die_at:
        with pytest.raises(Death):
            train(config, out, stop=StopFlag(), watch=DiesAt(step))
    assert run_here(config, out).status == "done"
    return out


def evidence(run: Path) -> dict[str, Any]:
    """Return what must be equal between a disturbed run and an undisturbed one."""
    rows, last = read_metrics(run / "metrics.jsonl"), at_step(run, read_config(run).steps)
    return {
        "audit": sha256_file(run / "audit.json"),
        "losses": [(row["step"], row["loss"].hex(), row["lr"].hex(), row["grad_norm"].hex()) for row in rows if "loss" in row],
        "evaluations": [(row["step"], row["val_loss"].hex()) for row in rows if "val_loss" in row],
        "model": sha256_file(last / "model.safetensors"),
        "optimizer": sha256_file(last / "optimizer.safetensors"),
        "frozen": open_checkpoint(last).saved.frozen,
    }


Near = tuple[int, ...]


def cases(quick: dict[str, tuple[Any, ...]], every: tuple[Any, ...]) -> list[Any]:
    """Pair every method with every value; all but these are slow."""
    return [pytest.param(m, v, marks=[pytest.mark.slow] * (v not in quick.get(m, ()))) for m in MOMENTS for v in every]


# At the moments, and a step before and after them.
@pytest.mark.parametrize(
    ("whole", "near"),
    cases({"thaw_first_first": ((0,), (-1, 1)), "train_then_freeze": ((0,),)}, ((0,), (-1, 1))),
    indirect=["whole"],
)
def test_a_run_stopped_around_every_moment_ends_in_the_same_bits(
    near: Near, whole: Whole, text_file: Path, tmp_path: Path
) -> None:
    method, undisturbed = whole
    stops = tuple(sorted(moment + beside for moment in MOMENTS[method] for beside in near))
    assert evidence(disturb(config_of(text_file, method), tmp_path / "run", stop_at=stops)) == evidence(undisturbed)


# With a checkpoint at the moments, and with checkpoints only between them.
@pytest.mark.parametrize(
    ("whole", "save_every"), cases({"thaw_first_first": (3, 4), "train_then_freeze": (3,)}, (3, 4)), indirect=["whole"]
)
def test_a_run_killed_around_every_moment_ends_in_the_same_bits(
    save_every: int, whole: Whole, text_file: Path, tmp_path: Path
) -> None:
    method, undisturbed = whole
    config = config_of(text_file, method, save_every=save_every)
    deaths = tuple(sorted(moment + near for moment in MOMENTS[method] for near in (0, 1, 2)))
    assert evidence(disturb(config, tmp_path / "run", die_at=deaths)) == evidence(undisturbed)


@pytest.mark.parametrize(
    "method",
    [
        "thaw_first_first",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("train_then_freeze", "oelm_freeze", "oelm_lowrank")),
        "oelm_lowrank_first",
    ],
)
def test_an_extended_run_keeps_the_plan_of_its_first_length_and_resumes(method: str, text_file: Path, tmp_path: Path) -> None:
    first, longer = (config_of(text_file, method, steps=steps, save_every=1, keep_checkpoints=99) for steps in (8, STEPS))
    runs = tmp_path / "whole", tmp_path / "run"
    run_here(first, runs[0])
    shutil.copytree(runs[0], runs[1])
    _, plan = start_of(read_config(runs[0]))
    run_here(longer, runs[0])
    assert read_config(runs[0]).extended_at == (8,)
    for step in range(1, STEPS + 1):
        assert load_run(runs[0], which=str(step)).checkpoint.saved.frozen.keys() == plan.frozen_at(min(step, 8) - 1)
    assert evidence(disturb(longer, runs[1], stop_at=(9, 10))) == evidence(runs[0])


@contextlib.contextmanager
def session(config: RunConfig, out: Path, *, stop_at: int | None = None) -> Iterator[Session]:
    """Yield a session that was built, resumed and run, up to a stop if one is asked for."""
    tokens = prepare(config.data.source, tokenizer=config.data.tokenizer)
    stop, compute = StopFlag(), Compute("cpu", "float32", "test")
    with RunDir(out) as folder:
        config = folder.claim(resolve(config, tokens))
        watch = StopsAt(stop, stop_at) if stop_at else Silence()
        made = build_session(config, folder, LanguageModelTask(tokens, config, compute), compute, stop=stop, watch=watch)
        with contextlib.closing(made.folder.metrics):
            resume(made, strict=False, exact_step=None)
            run_loop(made)
            yield made


def optimizer_digests(run: Session) -> dict[str, str]:
    return {name: digest(tensor) for name, tensor in optimizer_tensors(run.optimizer, run.model).items()}


def test_what_goes_on_learning_keeps_its_optimizer_state_bit_for_bit(text_file: Path, tmp_path: Path) -> None:
    with session(config_of(text_file, "thaw_first_first"), tmp_path / "run", stop_at=3) as run:
        before, held = optimizer_digests(run), record_of(run.model)
        follow_plan(run)
        assert before and optimizer_digests(run) == before
        thawed = {f"blocks.0.attention.{part}.weight" for part in "qk"}
        record = record_of(run.model)
        assert held is not None and record and held.keys() - record.keys() == thawed
        in_groups = {id(p) for group in run.optimizer.param_groups if group["joined"] == 3 for p in group["params"]}
        assert in_groups == {id(run.model.get_parameter(name)) for name in thawed}


def test_what_freezes_leaves_the_optimizer_and_the_rest_keeps_its_state(text_file: Path, tmp_path: Path) -> None:
    with session(config_of(text_file, "train_then_freeze"), tmp_path / "run", stop_at=3) as run:
        before = optimizer_digests(run)
        follow_plan(run)
        record = record_of(run.model)
        assert record and len(record) == 4
        frozen = {f"{key}/{name}" for name in record for key in ("exp_avg", "exp_avg_sq", "step")}
        assert frozen < before.keys()
        assert optimizer_digests(run) == {name: value for name, value in before.items() if name not in frozen}


class RatesSeen(Silence):
    def __init__(self) -> None:
        self.session: Session | None = None
        self.seen: list[dict[int, set[float]]] = []

    def on_step(self, report: StepReport) -> None:
        assert self.session is not None
        rates: dict[int, set[float]] = {}
        for group in self.session.optimizer.param_groups:
            rates.setdefault(group["joined"], set()).add(group["lr"])
        self.seen.append(rates)


@pytest.mark.parametrize("warmup", [0, 5, 100])
def test_what_was_thawed_warms_up_from_there_and_the_rest_follows_the_schedule(
    warmup: int, text_file: Path, tmp_path: Path
) -> None:
    tokens = prepare(str(text_file), tokenizer="bpe:300")
    config = resolve(config_of(text_file, "thaw_first_first", schedule__warmup_steps=warmup), tokens)
    watch, compute = RatesSeen(), Compute("cpu", "float32", "test")
    with RunDir(tmp_path / "run") as folder:
        task = LanguageModelTask(tokens, config, compute)
        run = watch.session = build_session(config, folder, task, compute, stop=StopFlag(), watch=watch)
        with contextlib.closing(run.folder.metrics):
            run_loop(run)
    # A warm-up is half of the run at most, at its start and here.
    length = min(warmup, STEPS // 2)
    for step, rates in enumerate(watch.seen):
        lr = learning_rate(config, step)
        expected = {0: {lr}}
        for moment in (moment for moment in (3, 9) if step >= moment):
            expected[moment] = {lr * min(1.0, (step - moment + 1) / length) if length else lr}
        assert rates == expected, step


def test_a_weight_that_moves_after_its_freezing_cannot_be_saved(text_file: Path, tmp_path: Path) -> None:
    with session(config_of(text_file, "train_then_freeze"), tmp_path / "run", stop_at=5) as run:
        run.model.get_parameter("blocks.1.attention.k.weight").data[0, 0] += 1e-3
        with pytest.raises(FrozenMovedError, match=r"blocks\.1\.attention\.k\.weight has moved"):
            run.save()
    assert load_run(tmp_path / "run", which="latest").step == 5


@pytest.mark.parametrize("stop_at", [pytest.param(3, marks=pytest.mark.slow), 4, pytest.param(9, marks=pytest.mark.slow)])
def test_a_classifier_that_thaws_ends_in_the_same_bits(stop_at: int, bert: Path, tables: Path, tmp_path: Path) -> None:
    thaw = {"start": 0.25, "end": 0.75, "order": "last_first"}
    method = {"init": "orthonormalized", "freeze": ["q", "k"], "thaw": thaw, "layer_lr_decay": 0.8}
    config = tiny_finetune(bert, tables, method=method)
    finetune_here(config, tmp_path / "whole")
    stop = StopFlag()
    finetune_here(config, tmp_path / "run", stop=stop, watch=StopsAt(stop, stop_at))
    loaded = load_any(tmp_path / "run", which="latest")
    assert isinstance(loaded, LoadedClassifier) and loaded.step == stop_at
    assert len(loaded.checkpoint.saved.frozen) == {3: 8, 4: 4, 9: 4}[stop_at]
    finetune_here(config, tmp_path / "run")
    assert classifier_evidence(tmp_path / "run") == classifier_evidence(tmp_path / "whole")
    assert load_any(tmp_path / "run", which="latest").checkpoint.saved.frozen == {}
