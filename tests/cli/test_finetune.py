"""`oelm finetune` and the commands for its runs, as a user types them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from oelm.cli.app import app
from tests.cases import case
from tests.cli.test_cli import digests
from tests.data.test_examples import write_lines
from tests.models.test_hub import write_model
from tests.train.finetuning import made_rows, write_table, write_tables

TINY = ["--budget", "smoke", "--steps", "6", "--max-length", "16", "--columns", "text=sentence,label=label"]


def oelm(*arguments: object, code: int = 0) -> str:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == code, result.output
    assert "Traceback" not in result.output
    return result.output


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model, tables and a finished run."""
    root = tmp_path_factory.mktemp("place")
    write_model(root / "model")
    write_tables(root / "tables")
    oelm(*command(root), "--out", root / "run")
    return root


def command(root: Path) -> list[object]:
    """Return what started the run, its folder left out."""
    tables = root / "tables"
    return ["finetune", *TINY, "--model", root / "model", "--task", tables / "train.tsv", "--dev", tables / "dev.tsv"]


def read(path: Path) -> Any:
    return json.loads(path.read_text())


@pytest.fixture(scope="module")
def default_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The folder in which `oelm finetune --budget smoke` was said with nothing else and no way to the hub, and its output."""
    import huggingface_hub.constants

    root = tmp_path_factory.mktemp("default")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(root)
        patch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
        output = oelm("finetune", "--budget", "smoke")
    return root, output


def test_the_smallest_command_runs_offline_with_nothing_else(default_run: tuple[Path, str]) -> None:
    root, output = default_run
    runs = list(root.glob("outputs/finetune/smoke/baseline-*/seed-0/config.json"))
    assert len(runs) == 1 and read(runs[0])["model"]["source"] is None
    assert "done: accuracy" in output


def test_a_run_tells_its_folder_its_data_and_what_trains(default_run: tuple[Path, str]) -> None:
    _, output = default_run
    assert "run directory: outputs/finetune/smoke/" in output and "stdlib-packages" in output and "frozen: 0 (0.00%)" in output


def test_the_run_of_the_smallest_command_can_be_judged(default_run: tuple[Path, str]) -> None:
    root, _ = default_run
    run = next(root.glob("outputs/finetune/smoke/*/seed-0"))
    best = read(run / "timing_stats.json")["best_accuracy"]
    assert f"accuracy {100 * best:.2f}%" in oelm("eval", run)


def test_the_same_command_again_is_already_done_and_changes_no_byte(place: Path) -> None:
    before = digests(place / "run")
    output = oelm(*command(place), "--out", place / "run")
    changed = {name for name in before if before[name][0] != digests(place / "run")[name][0]}
    assert "already done: accuracy" in output and changed == set() and digests(place / "run").keys() == before.keys()


def test_relative_paths_mean_the_same_run_from_anywhere(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place)
    tables = ["--task", "tables/train.tsv", "--dev", "tables/dev.tsv"]
    assert "already done" in oelm("finetune", *TINY, "--model", "model", *tables, "--out", "run")


def test_a_runs_config_repeats_it(place: Path, tmp_path: Path) -> None:
    oelm("finetune", "--config", place / "run" / "config.json", "--out", tmp_path / "run")
    assert (tmp_path / "run" / "predictions.jsonl").read_bytes() == (place / "run" / "predictions.jsonl").read_bytes()


def test_epochs_stand_in_for_the_budgets_steps(place: Path, tmp_path: Path) -> None:
    arguments = [argument for argument in command(place) if argument not in ("--steps", "6")]
    oelm(*arguments, "--epochs", 0.5, "--out", tmp_path / "run")
    # 95 examples in batches of 8 are 12 batches.
    assert read(tmp_path / "run" / "config.json")["steps"] == 6


def test_a_task_prepared_by_its_name_is_trained_on_without_its_files(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OELM_CACHE", str(tmp_path / "cache"))
    for split, seed in (("train", 1), ("dev", 2)):
        rows = [f"{text}\t{('neg', 'pos').index(label)}" for text, _, label in made_rows(40, seed=seed)]
        write_lines(tmp_path / "sets" / "SST-2" / f"{split}.tsv", "sentence\tlabel", *rows)
    oelm("data", "prepare", "sst2", "--from", tmp_path / "sets", "--tokenizer", place / "model", "--max-length", 16)
    shutil.rmtree(tmp_path / "sets")
    asked = ["--budget", "smoke", "--steps", 2, "--max-length", 16, "--model", place / "model", "--task", "sst2"]
    assert "sst2: examples 40 train, 40 val" in oelm("finetune", *asked, "--out", tmp_path / "run")
    assert read(tmp_path / "run" / "config.json")["examples"]["folder"] is None
    assert "sst2, split val" in oelm("eval", tmp_path / "run")


REFUSALS: dict[str, tuple[list[str], int, str]] = {
    "two lengths": (["--epochs", "1", "--steps", "5"], 2, "--epochs and --steps both say how long to train"),
    "config and model": (["--config", "x.json", "--model", "m"], 2, "leave out --budget and --model"),
    "config and budget": (["--config", "x.json", "--budget", "smoke"], 2, "leave out --budget and --model"),
    "unknown task": (["--task", "sst3"], 2, "no task called 'sst3': choose one of stdlib, "),
    "unknown key": (["--set", "optim.weigth_decay=0"], 2, "unknown key 'weigth_decay' (did you mean 'weight_decay'?)"),
    "key of examples": (["--set", "examples.max_lenght=9"], 2, "(did you mean 'max_length'?)"),
    "architecture of a pretrained model": (
        ["--model", "{model}", "--set", "model.architecture=t5"],
        2,
        "architecture 't5' is for fresh models",
    ),
    "shape of a pretrained model": (
        ["--model", "{model}", "--set", "model.num_layers=7"],
        2,
        "num_layers 7 is for fresh models",
    ),
    "language of the standard library": (
        ["--budget", "smoke", "--task", "stdlib", "--language", "fr"],
        2,
        "--language has no meaning for stdlib; leave it out",
    ),
    "columns of the standard library": (["--budget", "smoke", "--columns", "text=a"], 2, "--columns has no meaning for stdlib"),
    "a setting given twice": (["--lr", "1e-3", "--set", "optim.lr=1e-4"], 2, "--set optim.lr: given twice"),
    "unknown method": (["--method", "oelm_freze"], 2, "did you mean 'oelm_freeze'?"),
    "unknown budget": (["--budget", "smok"], 2, "did you mean 'smoke'?"),
    "no steps": (["--budget", "smoke", "--steps", "0"], 2, "give either steps or epochs"),
    "no such model": (["--model", "/no/such/model", "--task", "stdlib"], 3, "/no/such/model: no such folder"),
    "no such table": (["--model", "{model}", "--task", "/no/such.tsv"], 3, "/no/such.tsv"),
    "no such config": (["--config", "/no/such.json"], 2, "/no/such.json"),
}


def test_what_is_wrong_is_told_in_one_paragraph(place: Path, tmp_path: Path) -> None:
    for number, (name, (arguments, code, message)) in enumerate(REFUSALS.items()):
        with case(name):
            given = [argument.replace("{model}", str(place / "model")) for argument in arguments]
            assert message in oelm("finetune", *given, "--out", tmp_path / str(number), code=code)


def test_a_refused_command_leaves_no_folder(tmp_path: Path) -> None:
    oelm("finetune", "--epochs", 1, "--steps", 5, "--out", tmp_path / "run", code=2)
    assert not (tmp_path / "run").exists()


def test_another_config_in_the_same_folder_is_refused(place: Path) -> None:
    assert "optim.lr" in oelm(*command(place), "--lr", 0.5, "--out", place / "run", code=3)


def test_eval_repeats_the_figure_of_the_run(place: Path) -> None:
    final = read(place / "run" / "timing_stats.json")
    output = oelm("eval", place / "run", "--checkpoint", "latest")
    assert f"dev loss {final['final_val_loss']:.4f}, accuracy {100 * final['final_accuracy']:.2f}% of 70" in output


def test_eval_writes_the_predictions_of_the_run(place: Path, tmp_path: Path) -> None:
    oelm("eval", place / "run", "--checkpoint", "latest", "--documents", tmp_path / "predictions.jsonl")
    assert (tmp_path / "predictions.jsonl").read_bytes() == (place / "run" / "predictions.jsonl").read_bytes()


def other_table(path: Path, *, names: dict[str, str]) -> Path:
    return write_table(path, [(text, second, names[label]) for text, second, label in made_rows(200, seed=9)])


def test_eval_judges_another_table_with_the_same_labels(place: Path, tmp_path: Path) -> None:
    table = other_table(tmp_path / "other.tsv", names={"neg": "neg", "pos": "pos"})
    told = oelm("eval", place / "run", "--task", table)
    # The whole table, not the part of it that training on it would hold out.
    assert "table-other, split val" in told and f"of {len(table.read_text().splitlines()) - 1:,}" in told


def test_eval_refuses_a_table_with_other_labels(place: Path, tmp_path: Path) -> None:
    table = other_table(tmp_path / "other.tsv", names={"neg": "bad", "pos": "good"})
    told = oelm("eval", place / "run", "--task", table, code=3)
    assert "row 1: unknown label" in told and "known: 0 or 'neg', 1 or 'pos'" in told


@pytest.mark.parametrize(
    "options", [("--data", "stdlib"), ("--text", "x.txt"), ("--language", "de"), ("--from", "somewhere")], ids=lambda o: o[0]
)
def test_eval_refuses_what_has_no_meaning_for_a_classifier(place: Path, options: tuple[str, str]) -> None:
    assert options[0] in oelm("eval", place / "run", *options, code=2)


def test_part_of_a_preset_can_be_changed(place: Path, tmp_path: Path) -> None:
    oelm(*command(place), "--method", "oelm_freeze", "--set", "method.scale=layer", "--out", tmp_path / "run")
    assert json.loads((tmp_path / "run" / "config.json").read_text())["method"]["scale"] == "layer"


def test_eval_refuses_a_split_that_is_not_there(place: Path) -> None:
    assert "has no split 'test'; it has: train, val" in oelm("eval", place / "run", "--split", "test", code=2)


def test_inspect_counts_what_is_frozen_and_checks_it(place: Path, tmp_path: Path) -> None:
    oelm(*command(place), "--method", "oelm_freeze", "--out", tmp_path / "run")
    output = oelm("inspect", tmp_path / "run")
    # Two layers, Q and K, of 32 x 32 weights and 32 biases.
    assert "method: oelm_freeze" in output and "frozen: 4,224" in output and output.count("frozen, unmoved") == 4


def test_inspect_has_no_picture_of_a_classifiers_heads(place: Path) -> None:
    assert "--heads is for language" in oelm("inspect", place / "run", "--heads", code=2)


def test_export_answers_through_transformers_alone(place: Path, tmp_path: Path) -> None:
    import transformers

    output = oelm("export", place / "run", tmp_path / "export")
    answer = transformers.pipeline("text-classification", model=str(tmp_path / "export"))("we saw a lovely film")
    assert "exported step" in output and answer[0]["label"] in ("neg", "pos")


def test_export_does_not_write_over_what_is_there(place: Path) -> None:
    assert "exists already" in oelm("export", place / "run", place / "tables", code=3)


def test_generate_refuses_a_classifier(place: Path) -> None:
    output = CliRunner().invoke(app, ["generate", str(place / "run")])
    assert output.exit_code in (2, 3) and "a classifier's run, not a language model's" in output.output
