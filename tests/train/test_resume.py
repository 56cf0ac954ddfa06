"""Continuing in odd moments: nothing skipped, nothing twice, nothing overwritten by a refusal."""

from __future__ import annotations

import contextlib
import json
import shutil
from pathlib import Path

import pytest
import torch

from oelm.data.prepare import prepare
from oelm.errors import CheckpointError, DataError, NonFiniteError, RunDirError
from oelm.files import sha256_file
from oelm.process import StopFlag
from oelm.runs.metrics import read_metrics
from oelm.runs.rundir import RunDir
from oelm.train.device import Compute
from oelm.train.loop import evaluate, run_loop
from oelm.train.run import Options, resolve_start, train
from oelm.train.session import Session, build_session, resume
from oelm.train.task import LanguageModelTask, resolve
from oelm.train.watch import Silence, StepReport
from tests.conftest import made_text, run_here, tiny_config


def steps_of(run: Path, key: str) -> list[int]:
    return [row["step"] for row in read_metrics(run / "metrics.jsonl") if key in row]


class StopsAt(Silence):
    """Asks for a stop after a step, or once an evaluation at a step has begun."""

    def __init__(self, stop: StopFlag, *, step: int, in_evaluation: bool = False) -> None:
        self.stop, self.step, self.in_evaluation, self.now = stop, step, in_evaluation, 0

    def on_step(self, report: StepReport) -> None:
        self.now = report.step
        if self.now == self.step and not self.in_evaluation:
            self.stop.request("test")

    def on_validating(self, done: int, total: int) -> None:
        if self.now == self.step and self.in_evaluation:
            self.stop.request("test")


class AskedBetweenLooks(StopFlag):
    """A signal that comes right after the flag was looked at so many times, from a step on."""

    def __init__(self, looks: int) -> None:
        super().__init__()
        self.looks, self.is_counting = looks, False

    def requested(self) -> bool:
        answer = super().requested()
        if self.is_counting:
            self.looks -= 1
            if self.looks == 0:
                self.request("test")
        return answer


@pytest.mark.parametrize("looks", range(1, 6))
def test_stop_between_any_two_looks_at_it_leaves_nothing_unsaved(looks: int, text_file: Path, tmp_path: Path) -> None:
    run, stop = tmp_path / "run", AskedBetweenLooks(looks)

    class CountsFrom(Silence):
        def on_step(self, report: StepReport) -> None:
            stop.is_counting = report.step >= 6

    result = train(tiny_config(text_file, save_every=99, eval_every=99), run, stop=stop, watch=CountsFrom())
    assert result.status == "stopped" and 6 <= result.step < 12
    assert json.loads((run / "latest.json").read_text())["step"] == result.step
    assert steps_of(run, "loss") == list(range(1, result.step + 1))


@pytest.fixture(scope="module")
def finished(text_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that nothing disturbed; nobody writes to it."""
    out = tmp_path_factory.mktemp("finished") / "run"
    run_here(tiny_config(text_file), out)
    return out


def test_stop_during_an_evaluation_makes_it_up_on_resume(finished: Path, text_file: Path, tmp_path: Path) -> None:
    config = tiny_config(text_file)
    for step in (5, 12):
        stop = StopFlag()
        stopped = train(config, tmp_path / "run", stop=stop, watch=StopsAt(stop, step=step, in_evaluation=True))
        assert stopped.status == "stopped" and step not in steps_of(tmp_path / "run", "val_loss")
    assert run_here(config, tmp_path / "run").status == "done"
    rows = [[row for row in read_metrics(run / "metrics.jsonl") if "val_loss" in row] for run in (tmp_path / "run", finished)]
    assert rows[0] == rows[1]
    assert (tmp_path / "run" / "best.json").read_text() == (finished / "best.json").read_text()


def test_stop_during_the_only_evaluation_makes_it_up_on_resume(text_file: Path, tmp_path: Path) -> None:
    config, stop = tiny_config(text_file, steps=3, eval_every=99), StopFlag()
    first = train(config, tmp_path / "run", stop=stop, watch=StopsAt(stop, step=3, in_evaluation=True))
    assert first.status == "stopped" and steps_of(tmp_path / "run", "val_loss") == []
    assert run_here(config, tmp_path / "run").status == "done"
    run_here(config, tmp_path / "oracle")
    rows = [[row for row in read_metrics(tmp_path / name / "metrics.jsonl") if "val_loss" in row] for name in ("run", "oracle")]
    assert rows[0] == rows[1] != []
    assert (tmp_path / "run" / "best.json").read_text() == (tmp_path / "oracle" / "best.json").read_text()


def test_refused_resume_leaves_the_runs_tokenizer_alone(tmp_path: Path) -> None:
    text, run = tmp_path / "text.txt", tmp_path / "run"
    text.write_text(made_text(3000))
    stop = StopFlag()
    train(tiny_config(text), run, stop=stop, watch=StopsAt(stop, step=6))
    before = {name: sha256_file(run / name) for name in ("tokenizer.json", "manifest.json", "audit.json")}
    text.write_text(made_text(3000, seed=1).replace("cat", "catalogue"))
    with pytest.raises(DataError, match="not what this run began with"):
        run_here(tiny_config(text), run)
    assert before == {name: sha256_file(run / name) for name in before}


def test_finished_run_of_other_text_is_not_passed_off_as_done(tmp_path: Path) -> None:
    text, run = tmp_path / "text.txt", tmp_path / "run"
    text.write_text(made_text(3000))
    run_here(tiny_config(text, steps=1), run)
    text.write_text(made_text(3000, seed=1))
    with pytest.raises(DataError, match="was trained on other data"):
        run_here(tiny_config(text, steps=1), run)


def test_command_that_began_an_extended_run_finds_it_done(text_file: Path, tmp_path: Path) -> None:
    for steps in (2, 3):
        run_here(tiny_config(text_file, steps=steps), tmp_path / "run")
    result = run_here(tiny_config(text_file, steps=2), tmp_path / "run")
    assert (result.status, result.step) == ("found done", 3)


def half_precision(text: Path, out: Path, *, stop_at: int | None = None) -> Session:
    """Run a session in float16 with its loss scaler, which the command line allows on a GPU only."""
    config = tiny_config(text, model__dropout=0.0)
    tokens = prepare(config.data.source, tokenizer=config.data.tokenizer)
    stop = StopFlag()
    watch = StopsAt(stop, step=stop_at) if stop_at else Silence()
    with RunDir(out) as folder:
        config = folder.claim(resolve(config, tokens))
        compute = Compute("cpu", "fp16", "test")
        session = build_session(config, folder, LanguageModelTask(tokens, config, compute), compute, stop=stop, watch=watch)
        with contextlib.closing(session.folder.metrics):
            resume(session, strict=False, exact_step=None)
            run_loop(session)
    return session


def test_loss_scaler_continues_where_it_was(text_file: Path, tmp_path: Path) -> None:
    half_precision(text_file, tmp_path / "run", stop_at=6)
    resumed = half_precision(text_file, tmp_path / "run")
    whole = half_precision(text_file, tmp_path / "whole")
    assert resumed.scaler.is_enabled() and resumed.scaler.state_dict() == whole.scaler.state_dict()
    losses = [[row.get("loss") for row in read_metrics(tmp_path / name / "metrics.jsonl")] for name in ("run", "whole")]
    assert losses[0] == losses[1]


def test_run_begun_from_another_resumes_after_that_one_is_gone(finished: Path, text_file: Path, tmp_path: Path) -> None:
    shutil.copytree(finished, tmp_path / "source")
    config = tiny_config(text_file, method="pretrained_freeze", init_from=resolve_start(tmp_path / "source").model_dump())
    stop = StopFlag()
    train(config, tmp_path / "run", stop=stop, watch=StopsAt(stop, step=6))
    run_here(config, tmp_path / "whole")
    shutil.rmtree(tmp_path / "source")
    run_here(config, tmp_path / "run")
    assert [row.get("loss") for row in read_metrics(tmp_path / "run" / "metrics.jsonl")] == [
        row.get("loss") for row in read_metrics(tmp_path / "whole" / "metrics.jsonl")
    ]


def test_weights_of_another_tokenizer_are_refused_as_a_start(finished: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.txt"
    other.write_text(made_text(6000, seed=4).replace("birds", "sparrows"))
    start = resolve_start(finished).model_dump()
    with pytest.raises(DataError, match=r"--tokenizer RUN/tokenizer.json"):
        run_here(tiny_config(other, init_from=start, steps=1), tmp_path / "run")
    # As it says: with that run's tokenizer the other text means the same tokens, and the run goes.
    tokenizer = str(finished / "tokenizer.json")
    assert run_here(tiny_config(other, init_from=start, steps=1, data__tokenizer=tokenizer), tmp_path / "run").status == "done"


def test_going_back_to_a_step_gives_up_the_later_ones(text_file: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    config = tiny_config(text_file, keep_checkpoints=9)
    stop = StopFlag()
    train(config, run, stop=stop, watch=StopsAt(stop, step=10))
    stop = StopFlag()
    train(config, run, stop=stop, watch=StopsAt(stop, step=6), options=Options(exact_step=4))
    assert sorted(path.name for path in run.glob("checkpoints/*")) == ["step-00000004", "step-00000005", "step-00000006"]
    run_here(config, run)
    assert steps_of(run, "loss") == list(range(1, 13)) and steps_of(run, "val_loss") == [5, 10, 12]


def contents(run: Path) -> dict[str, str]:
    return {path.name: sha256_file(path) for path in run.iterdir() if path.is_file() and path.name != "training.log"}


@pytest.mark.parametrize("pointers", [True, False])
def test_stopped_run_whose_checkpoints_are_gone_is_refused_untouched(pointers: bool, text_file: Path, tmp_path: Path) -> None:
    run, stop = tmp_path / "run", StopFlag()
    train(tiny_config(text_file), run, stop=stop, watch=StopsAt(stop, step=6))
    shutil.rmtree(run / "checkpoints")
    if not pointers:
        (run / "latest.json").unlink()
        (run / "best.json").unlink()
    before = contents(run)
    with pytest.raises(CheckpointError, match="its checkpoints are gone, and it had come to step 6"):
        run_here(tiny_config(text_file), run)
    assert contents(run) == before


def test_finished_run_without_weights_is_found_done_and_not_extended(text_file: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    run_here(tiny_config(text_file, steps=2), run)
    for name in ("latest.json", "best.json"):
        (run / name).unlink()
    shutil.rmtree(run / "checkpoints")
    before = contents(run)
    assert run_here(tiny_config(text_file, steps=2), run).status == "found done"
    with pytest.raises(CheckpointError, match=r"weights were not kept, so it cannot be extended to 3: choose another --out"):
        run_here(tiny_config(text_file, steps=3), run)
    assert contents(run) == before


def test_finished_run_has_no_step_to_go_back_to(finished: Path, text_file: Path, tmp_path: Path) -> None:
    run = shutil.copytree(finished, tmp_path / "run")
    with pytest.raises(RunDirError, match="nothing to resume from step 5"):
        run_here(tiny_config(text_file), run, options=Options(exact_step=5))


def test_ruined_weights_are_told_by_the_evaluation_and_never_become_the_best(text_file: Path, tmp_path: Path) -> None:
    config = tiny_config(text_file)
    tokens = prepare(config.data.source, tokenizer=config.data.tokenizer)
    config = resolve(config, tokens)
    with RunDir(tmp_path / "run") as folder:
        compute = Compute("cpu", "float32", "test")
        session = build_session(
            config, folder, LanguageModelTask(tokens, config, compute), compute, stop=StopFlag(), watch=Silence()
        )
        with torch.no_grad():
            session.model.get_parameter("final_norm.weight").fill_(float("nan"))
        with pytest.raises(NonFiniteError, match="validation loss nan"):
            evaluate(session)
        assert session.state.best_value is None and read_metrics(tmp_path / "run" / "metrics.jsonl") == []


@pytest.mark.parametrize(
    ("save_every", "eval_every", "words"),
    [(8, 8, "Nothing was saved; "), (1, 8, "The checkpoint of step 1 is good; ")],
    ids=["nothing-saved", "saved"],
)
def test_a_run_that_diverges_tells_what_was_saved_and_which_rate_it_had(
    text_file: Path, tmp_path: Path, save_every: int, eval_every: int, words: str
) -> None:
    config = tiny_config(text_file, optim__lr=1e30, save_every=save_every, eval_every=eval_every)
    with pytest.raises(NonFiniteError, match=rf"{words}in a new run, lower optim.lr \(now 1e\+30\)"):
        run_here(config, tmp_path / "run")


def test_pointer_that_leads_out_of_the_run_is_refused(finished: Path, tmp_path: Path) -> None:
    from oelm.train.load import load_run

    shutil.copytree(finished, tmp_path / "run")
    for target in ("../../etc", "/etc", 7, None):
        (tmp_path / "run" / "best.json").write_text(json.dumps({"checkpoint": target}))
        with pytest.raises(CheckpointError, match="does not name a checkpoint of this run"):
            load_run(tmp_path / "run")
