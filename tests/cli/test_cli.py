"""The command line: what users get wrong is told in one paragraph with the right exit code; what they get right trains."""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
import typer.main
from typer.testing import CliRunner, Result

from oelm.cli.app import app
from oelm.data.prepare import prepare
from oelm.method.method import PRESETS, Method
from oelm.runs.metrics import read_metrics
from tests.cases import case
from tests.conftest import made_text, oelm_command

TOKENIZER = "bpe:300"
TINY = ["--budget", "smoke", "--tokenizer", TOKENIZER, "--steps", "4"]
for setting in ("model.seq_len=16", "batch_size=4", "micro_batch_size=2", "eval_every=2", "save_every=2"):
    TINY += ["--set", setting]


def oelm(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, list(map(str, arguments)))


def train(*arguments: str | Path) -> Result:
    return oelm("train", *TINY, *arguments)


def succeeded(result: Result) -> Result:
    assert result.exit_code == 0, result.output
    return result


def digests(folder: Path) -> dict[str, tuple[str, int]]:
    """Return the digest and the time of last change of everything below a folder."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(p.relative_to(folder)): (hashlib.sha256(p.read_bytes()).hexdigest(), p.stat().st_mtime_ns) for p in files}


def read(path: Path) -> Any:
    return json.loads(path.read_text())


@dataclass(frozen=True)
class Place:
    """A folder with one of everything: good text, bad text, a token set, a damaged one, a finished run."""

    root: Path

    def __truediv__(self, name: str) -> Path:
        return self.root / name


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    root = tmp_path_factory.mktemp("place")
    (root / "good.txt").write_text(made_text(3000))
    (root / "short.txt").write_text("one two\nthree four\nfive six\nseven eight\n")
    (root / "empty.txt").write_text("")
    (root / "latin1.txt").write_bytes("M\u00fcller\n".encode("latin-1") * 100)
    shutil.copytree(prepare(str(root / "good.txt"), tokenizer=TOKENIZER).path, root / "tokens")
    shutil.copytree(root / "tokens", root / "flipped")
    content = bytearray((root / "flipped" / "train.bin").read_bytes())
    content[len(content) // 2] ^= 1
    (root / "flipped" / "train.bin").write_bytes(content)
    (root / "foreign").mkdir()
    (root / "foreign" / "thesis.tex").write_text("precious")
    (root / "no-run").mkdir()
    succeeded(train("--text", root / "good.txt", "--out", root / "run"))
    shutil.copytree(root / "run", root / "odd-run")
    (root / "odd-run" / "best.json").write_text("[]")
    return Place(root)


def test_version_prints_name_and_version() -> None:
    assert succeeded(oelm("--version")).stdout == f"oelm {version('oelm')}\n"


@pytest.mark.parametrize("arguments", [["--help"], ["-h"]])
def test_help_lists_the_commands(arguments: list[str]) -> None:
    shown = succeeded(oelm(*arguments)).stdout
    assert "demo" in shown and "train" in shown


def test_help_of_train_lists_its_options() -> None:
    shown = succeeded(oelm("train", "--help")).stdout
    assert all(option in shown for option in ("--method", "--text", "--set", "--steps", "--out"))


@pytest.mark.parametrize(
    ("line", "word"),
    [("--bogus", "--bogus"), ("train --bogus", "--bogus"), ("trian", "train"), ("train --steps many", "--steps")],
)
def test_wrong_usage_is_exit_2_on_stderr(line: str, word: str) -> None:
    result = oelm(*line.split())
    assert result.exit_code == 2 and word in result.stderr and "Traceback" not in result.stderr


# What is wrong: arguments after `train` (with {} for the folder of `place`), exit code, words the message must hold.
BAD_INPUT: dict[str, tuple[str, int, list[str]]] = {
    "unknown-key": ("--text {}/good.txt --set optim.weigth_decay=0", 2, ["'weigth_decay'", "did you mean 'weight_decay'?"]),
    "set-without-equals": ("--text {}/good.txt --set steps", 2, ["--set 'steps'", "key=value"]),
    "set-of-wrong-type": ("--text {}/good.txt --set optim.lr=fast", 2, ["optim.lr", "'fast'"]),
    "heads-do-not-divide": ("--text {}/good.txt --set model.num_heads=5", 2, ["model_dim 32", "5 heads", "4, 8"]),
    "betas-out-of-range": ("--text {}/good.txt --set optim.betas=[0.9,2]", 2, ["optim.betas"]),
    "nan": ("--text {}/good.txt --lr nan", 2, ["optim.lr", "nan"]),
    "negative-seed": ("--text {}/good.txt --seed -1", 2, ["seed", "-1"]),
    "unknown-layer": ("--text {}/good.txt --method oelm_freeze --set method.layers=[7]", 2, ["layer 7", "has 2"]),
    "given-by-flag-and-set": ("--text {}/good.txt --steps 9 --set steps=8", 2, ["--set steps", "given twice"]),
    "missing-text": ("--text {}/gone.txt", 3, ["gone.txt", "no such file or folder"]),
    "empty-text": ("--text {}/empty.txt", 3, ["empty.txt", "the file is empty"]),
    "not-utf8": ("--text {}/latin1.txt", 3, ["latin1.txt", "not UTF-8"]),
    "text-too-short": ("--text {}/short.txt", 3, ["training tokens", "seq_len 16", "give more text"]),
    "unknown-tokenizer": ("--text {}/good.txt --tokenizer gpt3", 2, ["'gpt3'", "bpe:4096"]),
    "unknown-method": ("--text {}/good.txt --method oelm_freez", 2, ["'oelm_freez'", "did you mean 'oelm_freeze'?"]),
    "method-missing": ("--text {}/good.txt --method baseline,", 2, ["--method 'baseline,'", "a name is missing"]),
    "unknown-old-method": ("--text {}/good.txt --model_type oelm_v3", 2, ["'oelm_v3'", "oelm_v2"]),
    "unknown-budget": ("--text {}/good.txt --budget lapto", 2, ["'lapto'", "did you mean 'laptop'?"]),
    "data-and-text": ("--text {}/good.txt --data stdlib", 2, ["--data", "--text", "give one"]),
    "unknown-data": ("--data wikitext", 3, ["'wikitext'", "stdlib"]),
    "no-token-set": ("--data {}/no-run", 3, ["no-run", "no text in it"]),
    "flipped-bit": ("--data {}/flipped", 3, ["flipped/train.bin", "sha256", "expected"]),
    "other-vocabulary": ("--data {}/tokens --set model.vocab_size=7", 3, ["vocab_size is 7", "300"]),
    "out-is-a-file": ("--data {}/gone --out {}/good.txt", 2, ["--out", "good.txt is a file"]),
    "out-inside-a-file": ("--data {}/gone --out {}/good.txt/run", 2, ["--out", "good.txt is a file"]),
    "out-of-seeds-is-a-file": ("--data {}/gone --seeds 2 --out {}/good.txt", 2, ["--out", "good.txt is a file"]),
    "out-name-too-long": ("--text {}/good.txt --out {}/" + "x" * 300, 3, ["xxx"]),
    "out-is-foreign": ("--text {}/good.txt --out {}/foreign", 3, ["foreign", "'thesis.tex'", "no config.json"]),
    "out-of-another-config": (
        "--text {}/good.txt --out {}/run --lr 0.5 --method oelm_freeze",
        3,
        ["optim.lr: 0.002 there, 0.5 asked for", "method.init: 'native' there, 'orthogonal' asked for"],
    ),
    "out-of-fewer-steps": ("--text {}/good.txt --out {}/run --steps 3", 3, ["steps: 4 there, 3 asked for"]),
    "init-from-no-run": ("--text {}/good.txt --init-from {}/no-run", 3, ["no-run", "neither a run"]),
    "init-from-nothing": ("--text {}/good.txt --init-from {}/gone", 3, ["gone"]),
    "init-from-odd-run": ("--text {}/good.txt --init-from {}/odd-run", 3, ["odd-run", "best.json"]),
    "config-and-budget": ("--config {}/gone.json", 2, ["--config and --budget", "give one of them"]),
    "no-such-step": ("--text {}/good.txt --exact-step 3", 3, ["step-00000003", "no such checkpoint"]),
}


def test_bad_input_is_told_in_one_paragraph_with_its_exit_code(place: Place, tmp_path: Path) -> None:
    for name, (line, exit_code, words) in BAD_INPUT.items():
        with case(name):
            # A later --out overrules the first.
            result = train("--out", tmp_path / name, *line.replace("{}", str(place.root)).split())
            assert (result.exit_code, type(result.exception)) == (exit_code, SystemExit)
            assert result.stderr.startswith("error: ") and result.stderr.count("\n") == 1
            assert [word for word in words if word not in result.stderr] == []


@pytest.mark.parametrize(("name", "words"), [("gone.json", "gone.json"), ("good.txt", "cannot be read as JSON")])
def test_a_config_that_is_none_is_refused(name: str, words: str, place: Place, tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["train", "--config", str(place / name), "--out", str(tmp_path / "out")])
    assert result.exit_code == 2 and words in result.stderr and not (tmp_path / "out").exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_a_device_that_is_not_there_is_refused_with_those_that_are(place: Place, tmp_path: Path) -> None:
    result = train("--text", place / "good.txt", "--out", tmp_path / "out", "--set", "device=cuda")
    assert result.exit_code == 2
    assert result.stderr.startswith("error: device 'cuda' is not available here; available: ") and "cpu" in result.stderr


def test_an_error_in_a_true_process_shows_no_traceback() -> None:
    child = subprocess.run(oelm_command("data", "info", "nothing"), capture_output=True, text=True)
    assert (child.returncode, child.stderr.count("\n")) == (3, 1) and child.stderr.startswith("error: ")


def test_brackets_in_a_path_are_shown_as_they_are(tmp_path: Path) -> None:
    result = train("--text", tmp_path / "[red]gone[/red].txt", "--out", tmp_path / "out")
    assert "[red]gone[/red].txt" in result.stderr


def test_a_folder_refused_as_foreign_loses_nothing(place: Place, tmp_path: Path) -> None:
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "thesis.tex").write_text("precious")
    (foreign / ".staging-notes").write_text("not ours, whatever its name")
    before = digests(foreign)
    train("--text", place / "good.txt", "--out", foreign)
    assert {name: digest for name, digest in digests(foreign).items() if name in before} == before


def test_a_folder_refused_as_foreign_gains_nothing(place: Place, tmp_path: Path) -> None:
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "thesis.tex").write_text("precious")
    train("--text", place / "good.txt", "--out", foreign)
    assert [path.name for path in foreign.iterdir()] == ["thesis.tex"]


def test_a_run_refused_for_another_config_is_left_as_it_was(place: Place) -> None:
    before = digests(place / "run")
    train("--text", place / "good.txt", "--out", place / "run", "--lr", "0.5")
    assert digests(place / "run") == before


def test_a_command_leaves_no_log_handler_behind(place: Place) -> None:
    before = list(logging.getLogger("oelm").handlers)
    train("--text", place / "good.txt", "--out", place / "run")
    assert logging.getLogger("oelm").handlers == before


def test_training_says_where_the_run_is_and_how_good(place: Place, tmp_path: Path) -> None:
    shown = succeeded(train("--text", place / "good.txt", "--out", tmp_path / "run")).stdout
    best = read(tmp_path / "run" / "timing_stats.json")["best_ppl"]
    assert f"done: best PPL {best:.2f} at step 4" in shown and f"run directory: {tmp_path / 'run'}" in shown


def test_training_writes_nothing_to_stderr(place: Place, tmp_path: Path) -> None:
    assert succeeded(train("--text", place / "good.txt", "--out", tmp_path / "run")).stderr == ""


def test_the_same_command_again_says_done_and_changes_no_byte(place: Place) -> None:
    before = digests(place / "run")
    again = succeeded(train("--text", place / "good.txt", "--out", place / "run"))
    assert "already done: best PPL" in again.stdout
    assert digests(place / "run") == before


def test_without_out_the_run_goes_where_its_config_says(place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    succeeded(train("--text", place / "good.txt", "--seed", "3", "--method", "oelm_freeze"))
    (path,) = tmp_path.rglob("timing_stats.json")
    *above, variant, seed, _ = path.relative_to(tmp_path).parts
    assert (above, variant[:12], seed) == (["outputs", "train", "smoke"], "oelm-freeze-", "seed-3")


def test_a_finished_run_is_extended_without_gap_or_repeat(place: Place, tmp_path: Path) -> None:
    out = tmp_path / "run"
    shutil.copytree(place / "run", out)
    earlier = read_metrics(out / "metrics.jsonl")
    succeeded(train("--text", place / "good.txt", "--out", out, "--steps", "7"))
    rows = read_metrics(out / "metrics.jsonl")
    assert [row["step"] for row in rows if "loss" in row] == [1, 2, 3, 4, 5, 6, 7]
    assert [row["step"] for row in rows if "val_loss" in row] == [2, 4, 6, 7]
    assert rows[: len(earlier)] == earlier


def test_an_extended_run_records_where_it_was_extended(place: Place, tmp_path: Path) -> None:
    out = tmp_path / "run"
    shutil.copytree(place / "run", out)
    succeeded(train("--text", place / "good.txt", "--out", out, "--steps", "5"))
    config = read(out / "config.json")
    assert (config["steps"], config["extended_at"]) == (5, [4])


def test_the_config_of_a_run_repeats_it(place: Place, tmp_path: Path) -> None:
    succeeded(oelm("train", "--config", place / "run" / "config.json", "--out", tmp_path / "again"))
    losses = [[row.get("loss") for row in read_metrics(path / "metrics.jsonl")] for path in (place / "run", tmp_path / "again")]
    assert losses[0] == losses[1]


def test_a_prepared_folder_gives_the_same_losses_as_its_text(place: Place, tmp_path: Path) -> None:
    succeeded(train("--data", place / "tokens", "--out", tmp_path / "run"))
    losses = [[row.get("loss") for row in read_metrics(path / "metrics.jsonl")] for path in (place / "run", tmp_path / "run")]
    assert losses[0] == losses[1]


def test_a_run_can_start_from_the_best_weights_of_another(place: Place, tmp_path: Path) -> None:
    succeeded(train("--text", place / "good.txt", "--out", tmp_path / "run", "--init-from", place / "run"))
    best = read(place / "run" / "best.json")["checkpoint"]
    assert read(tmp_path / "run" / "config.json")["init_from"]["checkpoint"] == str((place / "run" / best).resolve())


@pytest.fixture(scope="module")
def old_script_config(place: Place, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The config of a run that was started with the flags of the earlier study's script."""
    out = tmp_path_factory.mktemp("old") / "run"
    flags = f"--model_type oelm_v2 --dataset {place / 'tokens'} --max_lr 1e-3 --max_steps 4 --out_dir {out}"
    smaller = ["model.seq_len=16", "model.model_dim=16", "model.num_layers=1", "model.num_heads=2", "model.ff_dim=16"]
    succeeded(oelm("train", *flags.split(), *(part for setting in smaller for part in ("--set", setting))))
    config: dict[str, Any] = read(out / "config.json")
    return config


def test_the_old_flags_train_the_method_that_oelm_v2_was(old_script_config: dict[str, Any]) -> None:
    assert Method.model_validate_json(json.dumps(old_script_config["method"])) == PRESETS["oelm_freeze"]


def test_the_old_flags_mean_what_they_meant(old_script_config: dict[str, Any], place: Place) -> None:
    assert (old_script_config["optim"]["lr"], old_script_config["steps"]) == (1e-3, 4)
    assert old_script_config["data"]["source"] == str(place / "tokens")


def test_the_old_flags_take_the_rest_from_the_study_s_recipe(old_script_config: dict[str, Any]) -> None:
    assert (old_script_config["model"]["dropout"], old_script_config["batch_size"]) == (0.1, 8)


@pytest.mark.slow
def test_the_demo_compares_four_arms_says_what_happened_and_what_to_paste_next(tmp_path: Path) -> None:
    shown = succeeded(oelm("demo", "--out", tmp_path, "--budget", "smoke")).stdout
    assert all(arm in shown for arm in ("baseline", "oelm_freeze", "oelm_lowrank", "oelm_axes_q"))
    assert "one seed: no verdict" in shown and "Freezing queries and keys at random (oelm_freeze)" in shown
    assert f"report demo --html demo.html --out {tmp_path}" in shown


def commands(group: Any, *path: str) -> Iterator[tuple[str, ...]]:
    """Yield the words of every command below a group."""
    for name, command in group.commands.items():
        yield (*path, name)
        if hasattr(command, "commands"):
            yield from commands(command, *path, name)


def test_no_flag_is_shown_with_a_type_and_help_fits_80_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    for words in ((), *commands(typer.main.get_command(app))):
        with case(*words):
            shown = CliRunner().invoke(app, [*words, "--help"]).stdout
            assert "<bool>" not in shown and max(map(len, shown.splitlines())) <= 80


@pytest.mark.parametrize("name", ["run", "sweep", "train", "finetune"])
def test_help_of_commands_with_many_options_fits_two_screens(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert len(CliRunner().invoke(app, [name, "--help"]).stdout.splitlines()) <= 100


def test_help_has_the_commands_in_four_groups() -> None:
    shown = CliRunner().invoke(app, ["--help"]).stdout
    places = [shown.index(f"─ {panel} ─") for panel in ("Start", "Study", "Look", "Machine")]
    assert places == sorted(places)


EMPTY = [("train", "--text"), ("train", "--data"), ("data", "prepare", "--text"), ("eval", "run", "--text")]


@pytest.mark.parametrize("words", EMPTY, ids=" ".join)
def test_an_empty_path_is_refused_and_is_not_the_current_folder(
    words: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "notes.txt").write_text(made_text(2000))
    monkeypatch.chdir(tmp_path)
    result = oelm(*words, "")
    assert result.exit_code == 2 and "empty" in result.output
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_a_missing_manifest_and_a_torn_audit_are_told_with_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text(made_text(3000))
    succeeded(train("--text", tmp_path / "text.txt", "--out", tmp_path / "run"))
    manifest, audit = tmp_path / "run" / "manifest.json", tmp_path / "run" / "audit.json"
    kept = manifest.read_text()
    manifest.unlink()
    repeated = train("--text", tmp_path / "text.txt", "--out", tmp_path / "run")
    exported = oelm("export", tmp_path / "run", tmp_path / "hf")
    for result in (repeated, exported):
        assert result.exit_code == 3 and "manifest.json: is missing" in result.output and "restore the file" in result.output
        assert "other data" not in result.output
    manifest.write_text(kept)
    audit.write_text(audit.read_text()[:80])
    result = oelm("eval", tmp_path / "run")
    assert result.exit_code == 3 and "audit.json: cannot be read as JSON" in result.output
    assert "restore the file from a copy, or move it aside" in " ".join(result.output.split())
