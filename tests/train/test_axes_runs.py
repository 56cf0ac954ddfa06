"""Runs whose queries and keys are slices: small checkpoints, exact resume on either side of a thaw, and every command."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from oelm.config import RunConfig
from oelm.errors import FrozenMovedError, OelmError
from oelm.files import sha256_file
from oelm.method.audit import record_of
from oelm.method.layers import selections
from oelm.models.export import export_gpt
from oelm.models.generate import Sampling, generate
from oelm.models.heads import summarize_heads
from oelm.train.checkpoint import _manifest_text, load_tensors, open_checkpoint
from oelm.train.load import load_run
from oelm.train.optim import layer_factors
from tests.conftest import run_here, tiny_config
from tests.train.test_plan_runs import at_step, disturb, evidence

METHODS = ("oelm_axes", "oelm_axes_lowrank")
THAWED = {"init": "axes", "freeze": ["q", "k"], "thaw": {"start": 0.25, "end": 0.75, "order": "first_first"}}
# Two layers, twelve steps: the first thaws before the fourth update, the second before the tenth.
MOMENTS = (3, 9)


def config_of(text: Path, method: Any, **more: Any) -> RunConfig:
    settings = {"steps": 12, "eval_every": 6, "schedule__warmup_steps": 2, "save_every": 4, "keep_checkpoints": 13}
    return tiny_config(text, method=method, **(settings | more))


Whole = tuple[Any, Path]


@pytest.fixture(scope="module")
def wholes(text_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Whole]:
    """Return an undisturbed run of a method that kept a checkpoint of every step; nobody writes to it."""

    @cache
    def trained_once(name: str) -> Whole:
        method = THAWED if name == "thawed" else name
        out = tmp_path_factory.mktemp("axes") / name
        run_here(config_of(text_file, method, save_every=1), out)
        return method, out

    return trained_once


@pytest.fixture(params=["oelm_axes_q", "thawed", *(pytest.param(name, marks=pytest.mark.slow) for name in METHODS)])
def whole(request: pytest.FixtureRequest, wholes: Callable[[str], Whole]) -> Whole:
    return wholes(request.param)


# At the moments, and a step before and after them; where nothing thaws, one place is as good as another.
@pytest.mark.parametrize(("whole", "near"), [("thawed", (0,)), ("thawed", (-1, 1)), ("oelm_axes_q", (0,))], indirect=["whole"])
def test_a_run_stopped_around_a_thaw_ends_in_the_same_bits(
    near: tuple[int, ...], whole: Whole, text_file: Path, tmp_path: Path
) -> None:
    stops = tuple(moment + beside for moment in MOMENTS for beside in near)
    assert evidence(disturb(config_of(text_file, whole[0]), tmp_path / "run", stop_at=stops)) == evidence(whole[1])


def test_a_run_killed_around_a_thaw_ends_in_the_same_bits(whole: Whole, text_file: Path, tmp_path: Path) -> None:
    deaths = tuple(sorted(moment + near for moment in MOMENTS for near in ((0, 1, 2) if whole[0] == THAWED else (1,))))
    assert evidence(disturb(config_of(text_file, whole[0]), tmp_path / "run", die_at=deaths)) == evidence(whole[1])


def test_checkpoints_and_optimizer_hold_nothing_dense_of_what_is_picked(whole: Whole) -> None:
    for step in (1, 4, 12):
        loaded = load_run(whole[1], which=str(step))
        picked = selections(loaded.model)
        tensors = load_tensors(at_step(whole[1], step) / "model.safetensors")
        assert {f"{path}.index" for path in picked} == {name for name in tensors if name.endswith(".index")}
        assert not any(f"{path}.weight" in tensors for path in picked)
        states = load_tensors(at_step(whole[1], step) / "optimizer.safetensors")
        assert not any(name.endswith(tuple(f"{path}.weight" for path in picked)) for name in states) or not picked
        record = record_of(loaded.model)
        assert record == open_checkpoint(at_step(whole[1], step)).saved.frozen
    if whole[0] == THAWED:
        assert [len(selections(load_run(whole[1], which=str(step)).model)) for step in (3, 4, 9, 10)] == [4, 2, 2, 0]


def test_the_audit_tells_what_is_stored(whole: Whole) -> None:
    told = json.loads((whole[1] / "audit.json").read_text())
    assert told["total"] == told["trainable"] and told["frozen"] == 0
    assert told["selected"] == sum(each["num_parameters"] for each in told["projections"] if each["is_selection"]) > 0


def test_coordinates_that_were_edited_are_found_before_anything_is_computed(text_file: Path, tmp_path: Path) -> None:
    from safetensors.torch import save_file

    run_here(config_of(text_file, "oelm_axes", steps=1), tmp_path / "run")
    folder = at_step(tmp_path / "run", 1)
    tensors = load_file(folder / "model.safetensors")
    tensors["blocks.0.attention.k.index"] = tensors["blocks.0.attention.k.index"].flip(0)
    save_file(tensors, folder / "model.safetensors")
    (folder / "manifest.json").write_text(_manifest_text(folder))
    with pytest.raises(FrozenMovedError, match=r"blocks\.0\.attention\.k\.weight has moved"):
        load_run(tmp_path / "run", which="1")


def test_generation_inspection_and_export_read_what_is_picked(whole: Whole, tmp_path: Path) -> None:
    from transformers import GPT2LMHeadModel

    loaded = load_run(whole[1], which="latest")
    cached, plain = (
        [token for token, _ in zip(generate(loaded.model, [1, 2], sampling=Sampling(), cached=way), range(20), strict=False)]
        for way in (True, False)
    )
    assert cached == plain
    windows = torch.arange(16).unsqueeze(0)
    summaries = summarize_heads(loaded.model, windows)
    assert len(summaries) == 2 * loaded.config.model.num_heads
    if picked := [path for path in selections(loaded.model) if loaded.config.method.correction == 0]:
        assert picked and all(each.effective_rank > 1 for each in summaries)
    if selections(loaded.model):
        with pytest.raises(OelmError, match="fold"):
            export_gpt(loaded.model, loaded.tokenizer(), tmp_path / "none", end_of_text=0, card="")
    kept = loaded.folded(keep_slices=True)
    assert selections(kept).keys() == selections(loaded.model).keys()
    export_gpt(loaded.folded(), loaded.tokenizer(), tmp_path / "gpt2", end_of_text=0, card="")
    theirs = GPT2LMHeadModel.from_pretrained(tmp_path / "gpt2").eval()
    with torch.no_grad():
        # Two implementations of the same arithmetic: logits of order one, a few units in the sixth digit.
        assert torch.allclose(theirs(windows).logits, loaded.model.logits(windows), rtol=0, atol=1e-5)
        assert torch.allclose(kept.logits(windows), loaded.model.logits(windows), rtol=0, atol=1e-5)


def test_layer_wise_rates_follow_the_layers_of_slices(text_file: Path, tmp_path: Path) -> None:
    method = {"init": "axes", "freeze": ["q"], "layer_lr_decay": 0.5}
    run_here(config_of(text_file, method, steps=1), tmp_path / "run")
    model = load_run(tmp_path / "run").model
    factors = layer_factors(model, 0.5)
    assert factors["blocks.0.attention.k.weight"] == 0.5 and "blocks.1.attention.k.weight" not in factors


def test_a_run_may_start_from_the_weights_of_one_with_slices(text_file: Path, tmp_path: Path) -> None:
    from oelm.train.run import resolve_start

    short = {"steps": 2, "eval_every": 2, "save_every": 2}
    run_here(config_of(text_file, "oelm_axes_lowrank", **short), tmp_path / "first")
    start = resolve_start(tmp_path / "first").model_dump()
    for method in ("baseline", "oelm_axes"):
        assert run_here(config_of(text_file, method, init_from=start, **short), tmp_path / method).status == "done"


def test_two_runs_of_one_seed_are_equal_and_slices_differ_by_seed(text_file: Path, tmp_path: Path) -> None:
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        short = config_of(text_file, "oelm_axes", seed=seed, steps=2, eval_every=2, save_every=2, model__num_heads=4)
        run_here(short, tmp_path / name)
    last = {name: at_step(tmp_path / name, 2) for name in "abc"}
    assert sha256_file(last["a"] / "model.safetensors") == sha256_file(last["b"] / "model.safetensors")
    drawn = {json.dumps(open_checkpoint(folder).saved.frozen, sort_keys=True) for folder in last.values()}
    assert len(drawn) > 1
