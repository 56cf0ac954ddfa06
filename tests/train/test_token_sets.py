"""A token set given by its path brings its tokenizer: the config says which, and another that was asked for is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from oelm.cli.app import app
from oelm.config import RunConfig
from oelm.data.prepare import check_tokenizer_asked, prepare
from oelm.errors import DataError
from oelm.experiments.plan import make_config, recipe_changes
from oelm.runs.records import read_config
from oelm.train.load import load_run
from oelm.train.score import probe_windows
from oelm.train.task import resolve
from oelm.train.watch import Silence
from tests.conftest import run_here, tiny_config
from tests.experiments.planned import PAIR, catalog_of

MADE_WITH, OTHER = "bpe:300", "bpe:350"


@pytest.fixture(scope="module")
def made(text_file: Path) -> Path:
    return prepare(str(text_file), tokenizer=MADE_WITH).path


def tokenizer_of(run: Path) -> tuple[str, str]:
    """Return what a run's config and its manifest call its tokenizer."""
    config, manifest = (json.loads((run / name).read_text()) for name in ("config.json", "manifest.json"))
    return config["data"]["tokenizer"], manifest["data"]["tokenizer"]


@pytest.mark.parametrize("asked", [MADE_WITH, OTHER, "gpt2", "gone/tokenizer.json"])
def test_the_config_of_a_run_on_a_token_set_names_its_tokenizer(asked: str, made: Path, tmp_path: Path) -> None:
    config = tiny_config(made, steps=2, data__tokenizer=asked)
    assert run_here(config, tmp_path / "run").status == "done"
    assert tokenizer_of(tmp_path / "run") == (MADE_WITH, MADE_WITH)
    assert run_here(config, tmp_path / "run").status == "found done"


def test_the_config_of_such_a_run_repeats_it_elsewhere(made: Path, tmp_path: Path) -> None:
    run_here(tiny_config(made, steps=2, data__tokenizer=OTHER), tmp_path / "run")
    assert run_here(read_config(tmp_path / "run" / "config.json"), tmp_path / "again").status == "done"
    assert read_config(tmp_path / "again" / "config.json") == read_config(tmp_path / "run" / "config.json")


def test_a_set_made_with_a_tokenizer_of_a_file_is_trained_on_and_looked_at(made: Path, text_file: Path, tmp_path: Path) -> None:
    by_file = prepare(str(text_file), tokenizer=str(made / "tokenizer.json"))
    run_here(tiny_config(by_file.path, steps=2), tmp_path / "run")
    assert tokenizer_of(tmp_path / "run") == (by_file.meta.tokenizer,) * 2
    assert by_file.meta.tokenizer.startswith("file-")
    loaded = load_run(tmp_path / "run")
    assert probe_windows(loaded, watch=Silence()).shape[1] == 16
    # Its tokenizer is known by the run's copy, so that text of another place is made with it.
    run_config = loaded.config.model_copy(update={"data": loaded.config.data.model_copy(update={"source": str(text_file)})})
    assert probe_windows(type(loaded)(loaded.path, run_config, loaded.checkpoint, loaded.model), watch=Silence()).numel()


def test_text_keeps_the_tokenizer_that_is_asked_for(text_file: Path, tmp_path: Path) -> None:
    run_here(tiny_config(text_file, steps=2, data__tokenizer=OTHER), tmp_path / "run")
    assert tokenizer_of(tmp_path / "run") == (OTHER, OTHER)


def test_another_tokenizer_than_a_sets_own_is_refused(made: Path, text_file: Path) -> None:
    with pytest.raises(DataError, match=r"was made with the tokenizer bpe:300, not with bpe:350: leave the tokenizer out"):
        check_tokenizer_asked(str(made), OTHER)
    for data, tokenizer in ((made, MADE_WITH), (text_file, OTHER), (Path("stdlib"), OTHER)):
        check_tokenizer_asked(str(data), tokenizer)


@pytest.mark.parametrize("option", [["--tokenizer", OTHER], ["--set", f"data.tokenizer={OTHER}"]], ids=["option", "set"])
def test_a_command_that_names_another_tokenizer_is_refused_before_anything_is_written(
    option: list[str], made: Path, tmp_path: Path
) -> None:
    command = ["train", "--budget", "smoke", "--data", str(made), "--out", str(tmp_path / "run"), *option]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 3 and "was made with the tokenizer bpe:300" in " ".join(result.output.split())
    assert not (tmp_path / "run").exists()


def test_an_experiment_takes_a_token_set_in_place_of_its_text_with_the_sets_tokenizer(made: Path, tmp_path: Path) -> None:
    changes = {"data.source": str(made)}
    experiment = catalog_of(PAIR).experiments["base"]
    planned = make_config(experiment, "smoke", seed=0, changes=changes)
    assert isinstance(planned, RunConfig) and planned.data.tokenizer != MADE_WITH
    begun = resolve(planned, prepare(str(made), tokenizer=planned.data.tokenizer))
    assert begun.data.tokenizer == MADE_WITH and recipe_changes(planned, begun) == []
    on_text = make_config(experiment, "smoke", seed=0)
    assert recipe_changes(on_text, on_text.model_copy(update={"data": begun.data}))
    with pytest.raises(DataError, match="was made with the tokenizer"):
        make_config(experiment, "smoke", seed=0, changes=changes | {"data.tokenizer": OTHER})
