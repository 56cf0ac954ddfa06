"""An exported run is a plain GPT-2: transformers loads it without our code and computes and writes the same."""

from __future__ import annotations

import json
import subprocess
import sys
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch

from oelm.data.tokenizer import end_of_text_id
from oelm.errors import OelmError
from oelm.method.method import PRESETS
from oelm.models.export import export_gpt
from oelm.models.generate import Sampling, generate
from oelm.train.load import LoadedRun, load_run
from tests.conftest import run_here, tiny_config

transformers = pytest.importorskip("transformers", reason="needs the extra 'hf'")


def exported(loaded: LoadedRun, folder: Path) -> Any:
    tokenizer = loaded.tokenizer()
    export_gpt(loaded.folded(), tokenizer, folder, end_of_text=end_of_text_id(tokenizer), card="card")
    return transformers.AutoModelForCausalLM.from_pretrained(folder).eval()


def trained(text: Path, out: Path, **overrides: Any) -> LoadedRun:
    from oelm.method.method import resolve_method

    overrides["method"] = resolve_method(overrides["method"]).model_dump(mode="json")
    run_here(tiny_config(text, steps=6, optim__lr=0.01, **overrides), out)
    return load_run(out)


@pytest.fixture(scope="module")
def gained(text_file: Path, tmp_path_factory: pytest.TempPathFactory) -> LoadedRun:
    return trained(text_file, tmp_path_factory.mktemp("gained") / "run", method="oelm_head_gain")


def same_logits(loaded: LoadedRun, folder: Path) -> bool:
    tokens = torch.randint(loaded.config.model.vocab_size, (3, 16), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        difference = (exported(loaded, folder)(tokens).logits - loaded.model.logits(tokens)).abs().max()
    return float(difference) < 1e-5


# What is exported is folded, whatever the method: nothing to fold, a correction, and one on top of slices.
FOLDED = {"baseline", "oelm_lowrank_first", "oelm_axes_q_lowrank"}
BELOW = {"oelm_freeze", "oelm_head_gain"}
assert FOLDED | BELOW < PRESETS.keys()


@pytest.mark.parametrize(
    "method",
    [pytest.param(name, marks=() if name in FOLDED else pytest.mark.slow) for name in PRESETS if name not in BELOW],
)
def test_logits_of_every_preset_are_equal(method: str, text_file: Path, tmp_path: Path) -> None:
    assert same_logits(trained(text_file, tmp_path / "run", method=method), tmp_path / "hf")


@pytest.fixture(scope="module")
def writer(text_file: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[LoadedRun, Path]:
    """A run with room for 200 tokens after a prompt, and where it was exported."""
    root = tmp_path_factory.mktemp("writer")
    loaded = trained(text_file, root / "run", method="oelm_freeze", model__seq_len=224, batch_size=2, micro_batch_size=2)
    exported(loaded, root / "hf")
    return loaded, root / "hf"


def test_logits_of_frozen_frames_and_of_folded_gains_are_equal(
    writer: tuple[LoadedRun, Path], gained: LoadedRun, tmp_path: Path
) -> None:
    assert same_logits(writer[0], tmp_path / "frozen")
    assert same_logits(gained, tmp_path / "gained")


@pytest.mark.slow
def test_greedy_texts_of_ten_prompts_are_equal(writer: tuple[LoadedRun, Path], text_file: Path) -> None:
    loaded, folder = writer
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    words = text_file.read_text().split()
    for number in range(10):
        prompt = loaded.tokenizer().encode(" ".join(words[7 * number : 7 * number + 4])).ids
        ours = list(islice(generate(loaded.model, prompt, sampling=Sampling(temperature=0.0)), 200))
        output = theirs.generate(
            torch.tensor([prompt]), max_new_tokens=200, min_new_tokens=200, do_sample=False, eos_token_id=None, pad_token_id=0
        )
        assert output[0, len(prompt) :].tolist() == ours


def test_tokenizer_gives_the_same_ids_and_text(writer: tuple[LoadedRun, Path]) -> None:
    loaded, folder = writer
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    text = "the cat sat\n\n  on two  mats; naïve 日本 \U0001f408<|endoftext|>next"
    assert theirs(text).input_ids == loaded.tokenizer().encode(text).ids
    assert theirs.decode(theirs(text).input_ids) == text
    assert theirs.eos_token_id == end_of_text_id(loaded.tokenizer())


@pytest.mark.slow
def test_a_process_without_oelm_can_write_with_it(writer: tuple[LoadedRun, Path]) -> None:
    program = (
        "import sys; sys.modules['oelm'] = None\n"
        "from transformers import pipeline\n"
        "out = pipeline('text-generation', model=sys.argv[1])('the cat', max_new_tokens=5, do_sample=False)\n"
        "print(len(out[0]['generated_text']) > len('the cat'))\n"
    )
    child = subprocess.run([sys.executable, "-c", program, str(writer[1])], capture_output=True, text=True)
    assert child.stdout.strip().endswith("True"), child.stderr


def test_folder_that_is_not_empty_is_refused_untouched(writer: tuple[LoadedRun, Path], tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("mine")
    with pytest.raises(OelmError, match="not an empty folder"):
        exported(writer[0], tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_gains_that_were_not_folded_are_refused(gained: LoadedRun, tmp_path: Path) -> None:
    with pytest.raises(OelmError, match=r"not plain weights.* call oelm\.fold"):
        export_gpt(gained.model, gained.tokenizer(), tmp_path / "hf", end_of_text=0, card="card")
    assert not (tmp_path / "hf").exists()


def test_nothing_in_the_export_is_pickle_or_code(writer: tuple[LoadedRun, Path]) -> None:
    names = sorted(path.name for path in writer[1].iterdir())
    assert names == sorted(
        ["README.md", "config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"]
    )
    assert "auto_map" not in json.loads((writer[1] / "config.json").read_text())
