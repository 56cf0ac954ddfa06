"""Data that runs need is prepared before they start, from local copies where they are given."""

from __future__ import annotations

from pathlib import Path

import pytest

from oelm.data.prepared import prepared_sets
from oelm.errors import ConfigError, DataError
from oelm.experiments.catalog import load_catalog
from oelm.experiments.plan import PlannedRun
from oelm.experiments.study import Readiness, Study, make_ready, prepare_study
from oelm.files import write_json
from oelm.process import StopFlag
from oelm.runs.status import Progress, now_text, status_now
from oelm.train.watch import Silence
from tests.conftest import made_text
from tests.faults.queues import write_catalog
from tests.models.test_hub import write_model
from tests.train.finetuning import write_tables


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder and a cache of its own, out of reach of any network."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OELM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return tmp_path


def plan(*names: str, **facts: object) -> list[PlannedRun]:
    return Study(names=names, root=Path("outputs"), seeds=[0], **{"budget": "laptop", **facts}).plan(load_catalog())  # type: ignore[arg-type]


def ready(runs: list[PlannedRun], folder: Path | None) -> Readiness:
    return make_ready(runs, folder=folder, stop=StopFlag(), watch=Silence())


def test_named_corpus_is_prepared_from_local_copies_and_then_found_by_name(place: Path) -> None:
    copies = place / "copies" / "TinyStories"
    copies.mkdir(parents=True)
    (copies / "train.txt").write_text(made_text(9000))
    (copies / "valid.txt").write_text(made_text(900, seed=1))
    runs = plan("GPT-02")
    assert set(ready(runs, place / "copies").needs) == {run.path for run in runs}
    assert [meta.name for _, meta in prepared_sets()] == ["tinystories"]
    # The runs themselves are told of no folder.
    assert set(ready(runs, None).needs) == {run.path for run in runs}


def test_named_task_is_prepared_from_local_copies_with_the_models_tokenizer(place: Path) -> None:
    model, copies = write_model(place / "model"), place / "copies"
    write_tables(copies)
    (copies / "SST-2").mkdir()
    for name in ("train.tsv", "dev.tsv"):
        text = (copies / name).read_text().replace("\tsecond", "").replace("\tneg", "\t0").replace("\tpos", "\t1")
        lines = [line.split("\t") for line in text.splitlines()]
        (copies / "SST-2" / name).write_text("".join(f"{words[0]}\t{words[-1]}\n" for words in lines))
        (copies / name).unlink()
    changes = {"model.source": str(model), "examples.max_length": 16}
    runs = plan("SST-2-01", changes=changes)
    assert set(ready(runs, copies).needs) == {run.path for run in runs}
    assert [meta.name for _, meta in prepared_sets()] == ["sst2"]
    assert set(ready(runs, None).needs) == {run.path for run in runs}


def test_folder_of_copies_means_nothing_for_text_of_the_users_own(place: Path, text_file: Path) -> None:
    write_catalog(place, text_file)
    (place / "copies").mkdir()
    runs = plan("mine", budget="smoke")
    assert set(ready(runs, place / "copies").needs) == {run.path for run in runs}


def test_set_that_cannot_be_had_stops_only_its_runs(place: Path, text_file: Path) -> None:
    write_catalog(place, text_file)
    runs = [*plan("GPT-01"), *plan("mine-01", budget="smoke")]
    found = ready(runs, None)
    assert list(found.problems) == [runs[0].path] and list(found.needs) == [runs[1].path]
    assert "tinystories" in str(found.problems[runs[0].path])


def test_study_of_which_no_set_can_be_had_is_refused_with_the_reason(place: Path) -> None:
    with pytest.raises(DataError, match="tinystories"):
        prepare_study(plan("GPT-02"), folder=None, stop=StopFlag(), watch=Silence(), preflight=True, retry=False)
    assert not (place / "outputs").exists()


def test_mistake_in_the_command_concerns_all_runs(place: Path, text_file: Path) -> None:
    write_catalog(place, text_file)
    runs = plan("mine", budget="smoke", changes={"data.tokenizer": "bpe:-3"})
    with pytest.raises(ConfigError, match="tokenizer"):
        ready(runs, None)


def test_failed_run_that_is_not_taken_up_needs_no_data(place: Path) -> None:
    (run,) = runs = plan("GPT-01")
    status = status_now("failed", Progress(step=0, steps=9), started=now_text(), message="diverged")
    write_json(run.path / "status.json", status.model_dump(mode="json"))
    settings = {"folder": None, "stop": StopFlag(), "watch": Silence(), "preflight": True}
    assert prepare_study(runs, **settings, retry=False) == {}  # type: ignore[arg-type]
    with pytest.raises(DataError, match="tinystories"):
        prepare_study(runs, **settings, retry=True)  # type: ignore[arg-type]
