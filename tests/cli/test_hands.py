"""The commands for a trained model, as a user types them."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from oelm.bench.speed import read_timings
from oelm.cli.app import app
from oelm.train.load import load_run
from tests.conftest import oelm_command, run_here, tiny_config


@pytest.fixture(scope="module")
def run(text_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "run"
    run_here(tiny_config(text_file, keep_checkpoints=9), out)
    return out


def oelm(*arguments: object, code: int = 0) -> str:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == code, result.output
    assert "Traceback" not in result.output
    return result.output


def test_generate_continues_the_prompt_and_tells_its_speed(run: Path) -> None:
    output = oelm("generate", run, "--prompt", "the cat", "--max-tokens", 8, "--temperature", 0)
    assert output.startswith("the cat") and "8 tokens," in output and "tokens/s, step 12" in output


def test_generate_repeats_itself_for_a_seed(run: Path) -> None:
    arguments = ["generate", str(run), "--max-tokens", "30", "--seed"]
    texts = [CliRunner().invoke(app, [*arguments, seed]).stdout for seed in ("1", "1", "2")]
    assert texts[0] == texts[1] != texts[2]


def test_generate_ends_well_when_its_reader_leaves(run: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    command = oelm_command("generate", str(run), "--max-tokens", "100000")
    ended = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, timeout=120)
    os.close(writer)
    assert (ended.returncode, ended.stderr) == (0, "")


def test_eval_prints_the_recorded_loss_and_writes_documents(run: Path, tmp_path: Path) -> None:
    best = json.loads((run / "best.json").read_text())["value"]
    output = oelm("eval", run, "--documents", tmp_path / "losses.jsonl")
    rows = [json.loads(line) for line in (tmp_path / "losses.jsonl").read_text().splitlines()]
    assert f"loss {best:.4f} nats per token" in output
    # Sums of the same float32 losses in another order.
    assert sum(row["nats"] for row in rows) / sum(row["tokens"] for row in rows) == pytest.approx(best, abs=1e-6)


def test_eval_takes_any_text(run: Path, text_file: Path) -> None:
    assert "all of 'made.txt'" in oelm("eval", run, "--text", text_file)


@pytest.mark.parametrize("picture", ["heads", "heads.SVG"])
def test_inspect_shows_roles_digests_and_heads(picture: str, run: Path, tmp_path: Path) -> None:
    output = oelm("inspect", run, "--heads", "--picture", tmp_path / picture)
    audit = json.loads((run / "audit.json").read_text())
    assert f"frozen: {audit['frozen']:,}" in output and output.count("frozen, unmoved") == 4
    assert audit["projections"][0]["digest"][:12] in output
    assert sorted(path.name for path in tmp_path.iterdir()) == ["heads.png", "heads.svg"]
    assert (tmp_path / "heads.png").read_bytes().startswith(b"\x89PNG") and "induction" in output


def test_export_writes_a_card_with_the_audit_and_the_figures(run: Path, tmp_path: Path) -> None:
    output = oelm("export", run, tmp_path / "hf")
    card = (tmp_path / "hf" / "README.md").read_text()
    audit, best = json.loads((run / "audit.json").read_text()), json.loads((run / "best.json").read_text())
    assert "exported step 12" in output
    assert f"{audit['frozen']:,} of {audit['total']:,}" in card and f"{best['value']:.4f}" in card


@pytest.mark.parametrize("method", ["oelm_freeze", "oelm_lowrank_first", "oelm_matrix", "oelm_head_gain"])
def test_what_was_exported_gives_transformers_the_same_logits(method: str, text_file: Path, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="needs the extra 'hf'")
    run_here(tiny_config(text_file, steps=8, optim__lr=0.01, method=method), tmp_path / "run")
    oelm("export", tmp_path / "run", tmp_path / "hf")
    card, roles = (
        (tmp_path / "hf" / "README.md").read_text(),
        json.loads((tmp_path / "run" / "audit.json").read_text())["by_role"],
    )
    on_top = [f"{role} {roles[role]['trainable']:,}" for role in ("gain", "correction") if role in roles]
    assert bool(on_top) == (method != "oelm_freeze")
    assert ("learnt on top of them | " + ", ".join(on_top) in card) if on_top else "learnt on top" not in card
    theirs = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "hf").eval()
    ours = load_run(tmp_path / "run").model.eval()
    tokens = torch.arange(16).unsqueeze(0)
    with torch.no_grad():
        difference = (theirs(tokens).logits - ours.logits(tokens)).abs().max()
    # One float32 rounding of each folded weight, on logits of order one, as in test_gain.
    assert float(difference) < 2e-5


def test_export_of_a_step_without_evaluation_mentions_no_loss(run: Path, tmp_path: Path) -> None:
    oelm("export", run, tmp_path / "hf", "--checkpoint", 8)
    assert "validation loss" not in (tmp_path / "hf" / "README.md").read_text()


@pytest.mark.slow
def test_bench_prints_interval_bound_and_a_sentence() -> None:
    output = oelm("bench", "baseline", "oelm_freeze", "--budget", "smoke", "--rounds", 3, "--set", "model.short_conv=2")
    words = " ".join(output.split())
    assert "2 layers, 32 wide, dropout 0.0, short convolution of 2, batch 8 x 32" in words
    assert "95% interval over 3 rounds" in words and "arithmetic allows at most" in words and "all-reduced" in words


def test_bench_takes_several_arms_at_a_named_shape(tmp_path: Path) -> None:
    arms = ("baseline", "oelm_freeze", "thin")
    words = " ".join(oelm("bench", *arms, "--shape", "tiny", "--rounds", 3, "--no-memory", "--out", tmp_path).split())
    assert "2 layers, 32 wide, dropout 0.0, batch 4 x 16, vocabulary 300" in words
    assert all(label in words for label in ("parameters stored", "parameters trainable", "arithmetic bound"))
    assert "speed of B oelm_freeze against A baseline" in words and "speed of C thin against A baseline" in words
    assert {(timing.first, timing.second) for timing in read_timings(tmp_path)} == {("baseline", arm) for arm in arms[1:]}
    assert "peak memory" not in words and all(timing.first_peak_bytes is None for timing in read_timings(tmp_path))


def test_bench_times_classifiers_and_records_them_as_such(tmp_path: Path) -> None:
    small = [
        f"model.{name}={size}" for name, size in (("num_layers", 1), ("model_dim", 24), ("ff_dim", 32), ("vocab_size", 300))
    ]
    options = [text for pair in small for text in ("--set", pair)]
    words = " ".join(oelm("bench", "--shape", "bert", "--rounds", 3, "--no-memory", *options, "--out", tmp_path).split())
    assert "classifier, 1 layers, 24 wide, dropout 0.0, batch 16 x 128" in words and "arithmetic bound" in words
    (found,) = read_timings(tmp_path)
    assert found.shape.is_classifier and (found.first, found.second) == ("baseline", "oelm_freeze") and found.bound > 1


def test_bench_times_generation_next_to_transformers() -> None:
    words = " ".join(oelm("bench", "--generate", "--shape", "tiny", "--rounds", 3, "--tokens", 5).split())
    assert "greedy text, batch 1" in words and "oelm_freeze" in words and "against transformers" in words


def test_doctor_answers_without_the_matrix_test() -> None:
    assert "precision" in oelm("doctor", "--seconds", 0)


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("generate", "RUN", "--prompt", "cat " * 40), 2, "the model's context 16; shorten the prompt"),
        (("generate", "RUN", "--top-p", "1.5"), 2, "--top-p"),
        (("generate", "nowhere"), 3, "no such run"),
        (("eval", "RUN", "--data", "stdlib", "--text", "x"), 2, "give one of them"),
        (("eval", "RUN", "--text", "missing.txt"), 3, "no such file or folder"),
        (("eval", "RUN", "--split", "test"), 3, "no split 'test'"),
        (("inspect", "RUN", "--checkpoint", "99"), 3, "no checkpoint of step 99"),
        (("export", "RUN", "RUN"), 3, "not an empty folder"),
        (("bench", "baseline", "oelm_frezee"), 2, "did you mean 'oelm_freeze'"),
        (("bench", "--rounds", "1"), 2, "--rounds"),
        (("bench", "--shape", "mediun"), 2, "did you mean 'medium'"),
        (("bench", "thin", "--shape", "bert"), 2, "'thin' needs our GPT"),
        (("bench", "--generate", "--shape", "bert"), 2, "is a classifier and writes no text"),
        (("bench", "--shape", "bert", "--set", "model.seq_len=64"), 2, "unknown key 'seq_len'"),
    ],
)
def test_bad_input_gets_one_clear_paragraph(arguments: tuple[str, ...], code: int, words: str, run: Path) -> None:
    output = oelm(*(str(run) if word == "RUN" else word for word in arguments), code=code)
    assert words in output


def test_a_prompt_that_is_no_unicode_is_refused_with_its_place() -> None:
    result = CliRunner().invoke(app, ["generate", "nowhere", "--prompt", "ab\udcff"])
    assert result.exit_code == 2 and "--prompt: is not valid Unicode (character 3 is" in result.stderr
