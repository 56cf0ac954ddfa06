"""What GPT-2 cannot hold is exported for `transformers` all the same: `import oelm.hf` registers its class."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from typer.testing import CliRunner

import oelm
from oelm.cli.app import app
from oelm.errors import OelmError
from oelm.models.generate import Sampling, generate
from oelm.train.load import LoadedRun, load_run
from tests.conftest import run_here, tiny_config

transformers = pytest.importorskip("transformers", reason="needs the extra 'hf'")
Exported = tuple[LoadedRun, Path]


@pytest.fixture(scope="module", params=["baseline", "oelm_axes_q", "oelm_lowrank"])
def exported(request: pytest.FixtureRequest, text_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Exported:
    """A run behind a short convolution, and where `oelm export` wrote it."""
    root = tmp_path_factory.mktemp("exported")
    settings = {"model__short_conv": 3, "model__seq_len": 64, "steps": 6, "optim__lr": 0.01, "batch_size": 2}
    run_here(tiny_config(text_file, method=request.param, micro_batch_size=2, **settings), root / "run")
    result = CliRunner().invoke(app, ["export", str(root / "run"), str(root / "hf")])
    assert result.exit_code == 0 and "import oelm.hf; from transformers" in result.output, result.output
    return load_run(root / "run"), root / "hf"


def opened(folder: Path) -> Any:
    import oelm.hf  # noqa: F401

    return transformers.AutoModelForCausalLM.from_pretrained(folder).eval()


def some_tokens(loaded: LoadedRun, *shape: int) -> torch.Tensor:
    return torch.randint(loaded.config.model.vocab_size, shape, generator=torch.Generator().manual_seed(0))


def test_logits_are_those_of_the_run(exported: Exported) -> None:
    loaded, folder = exported
    tokens = some_tokens(loaded, 3, 40)
    with torch.no_grad():
        difference = (opened(folder)(tokens).logits - loaded.model.logits(tokens)).abs().max()
    assert float(difference) < 1e-5


def test_greedy_text_is_that_of_the_run(exported: Exported) -> None:
    loaded, folder = exported
    prompt = loaded.tokenizer().encode("the cat sat").ids
    ours = list(islice(generate(loaded.model, prompt, sampling=Sampling(temperature=0.0)), 40))
    settings = {"max_new_tokens": 40, "min_new_tokens": 40, "eos_token_id": None, "pad_token_id": 0, "do_sample": False}
    model = opened(folder)
    for options in ({}, {"use_cache": True}):
        output = model.generate(torch.tensor([prompt]), **settings, **options)
        assert output[0, len(prompt) :].tolist() == ours
    beams = model.generate(torch.tensor([prompt, prompt]), **settings, num_beams=2)
    assert beams.shape == (2, len(prompt) + 40) and torch.equal(beams[0], beams[1])


@pytest.fixture(scope="module")
def one(text_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Exported:
    root = tmp_path_factory.mktemp("one")
    run_here(tiny_config(text_file, steps=2, model__short_conv=2, model__seq_len=96), root / "run")
    assert CliRunner().invoke(app, ["export", str(root / "run"), str(root / "hf")]).exit_code == 0
    return load_run(root / "run"), root / "hf"


@pytest.mark.slow
def test_the_cards_code_runs_in_a_process_of_its_own(one: Exported) -> None:
    card = (one[1] / "README.md").read_text()
    assert "short convolution of 2" in card and "No code of this folder is run." in card and "gpt2" not in card
    (code,) = re.findall(r"^```python\n(.*?)^```", card, flags=re.MULTILINE | re.DOTALL)
    code = code.replace("PATH_OF_THIS_FOLDER", str(one[1]))
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert child.returncode == 0 and child.stdout.startswith("Once"), child.stderr


@pytest.mark.slow
def test_without_our_class_the_folder_is_refused_and_nothing_in_it_is_code(one: Exported) -> None:
    code = f"import oelm, transformers; transformers.AutoModelForCausalLM.from_pretrained({str(one[1])!r})"
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert child.returncode and "oelm_gpt" in child.stderr
    assert not [path.name for path in one[1].iterdir() if path.suffix not in (".json", ".safetensors", ".md")]
    assert "auto_map" not in json.loads((one[1] / "config.json").read_text())


def test_it_saves_and_opens_again_with_the_same_weights(one: Exported, tmp_path: Path) -> None:
    model = opened(one[1])
    model.save_pretrained(tmp_path / "again")
    again = opened(tmp_path / "again").state_dict()
    assert again.keys() == model.state_dict().keys()
    assert all(torch.equal(tensor, again[name]) for name, tensor in model.state_dict().items())


def test_a_fresh_model_of_its_config_has_drawn_weights(one: Exported) -> None:
    import oelm.hf  # noqa: F401

    config = transformers.AutoConfig.from_pretrained(one[1])
    fresh = transformers.AutoModelForCausalLM.from_config(config)
    for name, weight in fresh.named_parameters():
        # Of a normal distribution with this spread, the mean of absolute values is 0.8 of it.
        assert weight.dim() == 1 or 0.01 < float(weight.detach().abs().mean()) < 0.03, name
    assert config.hidden_size == fresh.gpt.config.model_dim


def test_it_is_frozen_and_trained_like_any_other_model(one: Exported) -> None:
    model, tokens = opened(one[1]), some_tokens(one[0], 2, 20)
    oelm.freeze(model, "oelm_freeze", seed=0)
    loss = model(tokens, labels=tokens).loss
    logits = model(tokens, return_dict=False)[0]
    assert loss.item() == pytest.approx(F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()).item(), rel=1e-6)
    loss.backward()
    assert {name for name, each in model.named_parameters() if each.grad is None} == {
        f"gpt.blocks.{layer}.attention.{part}.weight" for layer in range(2) for part in "qk"
    }


def test_padding_on_the_right_changes_nothing_and_on_the_left_is_refused(one: Exported) -> None:
    model, tokens = opened(one[1]), some_tokens(one[0], 2, 20)
    mask = torch.ones_like(tokens)
    mask[0, 15:] = 0
    with torch.no_grad():
        assert torch.equal(model(tokens, attention_mask=mask).logits, model(tokens).logits)
    with pytest.raises(OelmError, match="padding on the left"):
        model(tokens, attention_mask=mask.flip(1))
