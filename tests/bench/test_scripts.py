"""Every benchmark of speed runs on a toy shape, and keeps a record that is read back."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch
from speed_record import SpeedRecord, read_speed, write_speed

from oelm.bench.interleave import shape_config
from oelm.models.gpt import build_gpt
from oelm.stats import Ratio
from oelm.train.loss import mean_cross_entropy

Load = Callable[[str], ModuleType]


@pytest.fixture
def load() -> Load:
    return importlib.import_module


def quick(module: ModuleType, part: str, folder: Path, *options: str) -> SpeedRecord:
    module.main(["--quick", "--out", str(folder), *options])
    found = read_speed(folder, part, "tiny")
    assert found is not None and found.conditions.threads == torch.get_num_threads()
    return found


def test_where_the_time_goes(load: Load, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = quick(load("where_time_goes"), "time", tmp_path)
    assert found.split is not None and sum(found.split.shares.values()) == pytest.approx(1)
    assert found.split.gemm_gflops > 0 and found.split.step_s > 0
    shown = capsys.readouterr().out
    assert "GEMM alone at these sizes" in shown and "head, weight gradient" in shown


def test_a_step_against_others(load: Load, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = quick(load("training_step"), "step", tmp_path)
    assert [arm.name for arm in found.arms] == ["baseline", "transformers", "plain"]
    assert found.arms[0].ratio.value == 1 and found.rounds == found.arms[1].ratio.count == 2
    assert "as fast as plain" in capsys.readouterr().out


def test_methods_against_the_baseline(load: Load, tmp_path: Path) -> None:
    module = load("methods")
    found = quick(module, "methods", tmp_path)
    arms = {arm.name: arm for arm in found.arms}
    assert list(arms) == ["baseline", "oelm_freeze", "oelm_axes", "oelm_axes_lowrank", "oelm_axes_q", "thin"]
    bounds = [arms[name].bound or 0 for name in ("baseline", "oelm_freeze", "oelm_axes_q", "oelm_axes")]
    assert bounds[0] == 1 and bounds == sorted(bounds)
    # Q and K of two layers are stored nowhere.
    assert (arms["baseline"].stored or 0) - (arms["oelm_axes"].stored or 0) == 2 * 2 * 32 * 32


def test_a_classifier_s_step_frozen_and_padded_otherwise(load: Load, tmp_path: Path) -> None:
    found = quick(load("classifier"), "classifier", tmp_path)
    arms = {arm.name: arm for arm in found.arms}
    assert list(arms) == ["baseline", "oelm_freeze_pretrained", "sentences", "pairs"]
    frozen = (arms["baseline"].trainable or 0) - (arms["oelm_freeze_pretrained"].trainable or 0)
    # Two layers' Q and K with their biases.
    assert found.model.is_classifier and frozen == 2 * 2 * (32 * 32 + 32)
    bounds = [arms[name].bound or 0 for name in ("baseline", "oelm_freeze_pretrained", "pairs", "sentences")]
    assert bounds[0] == 1 and bounds == sorted(bounds) and bounds[1] < 1.1 and bounds[3] > 3
    write_speed(tmp_path, found.model_copy(update={"shape": "bert"}))
    for language, title in (("en", "lengths of SST-2"), ("zh", "长度取自 SST-2")):
        shown = load("tables").table("classifier", tmp_path, language)
        assert title in shown and "batch 16 x 128" in shown or "批大小 16 x 128" in shown
    assert load("tables").table("classifier", tmp_path / "none", "en") == "not measured yet; run: make bench"


def test_generation_against_the_baseline_and_transformers(load: Load, tmp_path: Path) -> None:
    found = quick(load("generation"), "generation", tmp_path, "--tokens", "12")
    names = ["baseline", "oelm_axes", "oelm_axes_lowrank", "oelm_axes_q", "transformers"]
    assert [arm.name for arm in found.arms] == names
    assert all(arm.tokens_per_s and arm.against_transformers for arm in found.arms)


def test_the_plain_gpt_computes_what_ours_does(load: Load) -> None:
    config = shape_config("tiny", "baseline").model
    ours = build_gpt(config, seed=0)
    plain = load("plain_gpt").PlainGPT(**config.model_dump(exclude={"qk_dim", "short_conv"}))
    with torch.no_grad():
        plain.tokens.weight.copy_(ours.token_embedding.weight)
        plain.positions.weight.copy_(ours.position_embedding.weight)
        for block, own in zip(plain.blocks, ours.blocks, strict=True):
            weights = own.state_dict()
            block.qkv.weight.copy_(torch.cat([weights[f"attention.{part}.weight"] for part in "qkv"]))
            block.out.weight.copy_(weights["attention.out.weight"])
            for name in ("ff_in", "ff_out"):
                getattr(block, name).weight.copy_(weights[f"{name}.weight"])
                getattr(block, name).bias.zero_()
    tokens = torch.randint(config.vocab_size, (3, config.seq_len + 1), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        loss = mean_cross_entropy(ours(tokens[:, :-1]).flatten(0, 1), ours.head_VD, tokens[:, 1:].flatten())
        theirs = plain(tokens[:, :-1], tokens[:, 1:])
    # A mean of 48 losses of about 5.7 in float32, summed in another order: a few units in the last place.
    assert float(theirs) == pytest.approx(float(loss), abs=5e-6)
    assert sum(p.numel() for p in plain.parameters()) == sum(p.numel() for p in ours.parameters())


@pytest.mark.parametrize("options", [["--rounds", "1"], ["--shape", "huge"]])
def test_bad_options_are_refused(load: Load, options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        load("methods").main(options)
    assert options[0] in capsys.readouterr().err


@pytest.mark.slow
def test_what_a_watcher_costs(load: Load, capsys: pytest.CaptureFixture[str]) -> None:
    load("watching").main(["--rounds", "2", "--seconds", "2", "--runs", "4", "--shape", "tiny"])
    shown = capsys.readouterr().out
    assert "4 runs, page" in shown and "a step takes" in shown and "than 1%" in shown


@pytest.mark.parametrize(
    ("low", "high", "told"), [(1.1, 1.3, "\n  less than 1%"), (1.1, 1.9, "undecided"), (1.85, 1.9, "\n  more than 1%")]
)
def test_the_cost_of_a_watcher_is_scaled_to_its_real_pace(
    load: Load, capsys: pytest.CaptureFixture[str], low: float, high: float, told: str
) -> None:
    # 0.2 s lost to 0.4 CPU seconds, of which the real pace has 0.005 in a second.
    load("watching").show(Ratio(1.2, low, high, 20), 0.4)
    shown = capsys.readouterr().out
    assert "by 0.25% [" in shown and told in shown
