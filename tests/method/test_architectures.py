"""One suite for every architecture: found, counted, frozen, trained, saved, thawed, wrapped. Tiny models, offline."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from oelm.errors import FrozenMovedError, MethodError
from oelm.method.apply import cast, freeze, restore, thaw
from oelm.method.audit import assert_unmoved, audit, digest, record_of
from oelm.method.frames import orthonormality_error
from oelm.method.method import Method, QKPart
from oelm.method.sites import attention_sites
from tests.cases import case
from tests.method.ddp_worker import SLICED, run_pair
from tests.method.kinds import KINDS, of_each_kind
from tests.method.tiny_models import ARCHITECTURES, BY_NAME, Tiny, loss, outputs, tiny_inputs, tiny_model

ROOT = Path(__file__).parents[2]
FUSED = [tiny for tiny in ARCHITECTURES if tiny.is_fused]
FROM_TRANSFORMERS = [tiny for tiny in ARCHITECTURES if tiny.is_from_transformers]
SUBSETS: tuple[tuple[QKPart, ...], ...] = (("q",), ("k",), ("q", "k"))
# Outputs are of order one; where a product is cut into parts, its sums may be added in another order: a few times 2^-23.
ROUNDING = 1e-5
# Why queries and keys of an architecture cannot change their basis inside a head.
OBSTACLES = {"gpt_neox": "positions rotate", "llama": "share 2 key heads", "mistral": "share 2 key heads"} | dict.fromkeys(
    ("qwen2", "qwen3"), "share 2 key heads"
)

every = pytest.mark.parametrize("tiny", ARCHITECTURES, ids=lambda tiny: tiny.name)
each_kind = of_each_kind(ARCHITECTURES)
each_kind_from_transformers = of_each_kind(FROM_TRANSFORMERS)
# Compiling takes a second for each layer: one of a fused map and one of ours, and all of them all under `make test-all`.
compiled = pytest.mark.parametrize(
    ("tiny", "layers"),
    [pytest.param(BY_NAME[name], slice(1), id=f"{name}-1") for name in ("gpt2", "our_gpt")]
    + [pytest.param(tiny, slice(None), id=tiny.name, marks=pytest.mark.slow) for tiny in ARCHITECTURES],
)
# 200 steps under `make test-all`; our own GPT takes as many in test_apply_audit.
trainings = pytest.mark.parametrize(
    ("tiny", "steps"),
    [
        pytest.param(tiny, steps, id=f"{tiny.name}-{steps}", marks=marks)
        for steps, marks in ((8, ()), (200, pytest.mark.slow))
        for tiny in ARCHITECTURES
    ],
)
every_fused = pytest.mark.parametrize("tiny", FUSED, ids=lambda tiny: tiny.name)


@cache
def _frozen(tiny: Tiny, method: str) -> nn.Module:
    model = tiny_model(tiny)
    freeze(model, method)
    return model


def frozen(tiny: Tiny, method: str = "oelm_freeze") -> nn.Module:
    """A frozen model of the test's own: a copy, as drawing its frames takes four times as long."""
    return copy.deepcopy(_frozen(tiny, method))


def digests(model: nn.Module) -> dict[str, str]:
    return {name: digest(parameter) for name, parameter in model.named_parameters()}


def train(model: nn.Module, tiny: Tiny, *, steps: int) -> torch.optim.Optimizer:
    """Train everything that learns with AdamW and decay, on other inputs in every step."""
    learns = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(learns, lr=1e-3, weight_decay=0.1)
    for step in range(steps):
        optimizer.zero_grad()
        loss(model, tiny_inputs(tiny, seed=step)).backward()
        optimizer.step()
    return optimizer


def reads(model: nn.Module, tiny: Tiny) -> Tensor:
    with torch.no_grad():
        return outputs(model, tiny_inputs(tiny))


def test_every_attention_is_found_with_a_draw_of_its_own() -> None:
    for tiny in ARCHITECTURES:
        with case(tiny.name):
            sites = attention_sites(tiny_model(tiny))
            assert len(sites) == tiny.num_sites
            assert len({site.key for site in sites}) == tiny.num_sites
            assert {(site.q.num_heads, site.k.num_heads) for site in sites} == {tiny.heads}


def test_what_is_frozen_is_what_the_shapes_say_and_an_audit_finds_all_else_as_before() -> None:
    for tiny in ARCHITECTURES:
        with case(tiny.name):
            plain = tiny_model(tiny)
            total = sum(parameter.numel() for parameter in plain.parameters())
            before, counts = audit(plain), audit(frozen(tiny))
            assert (counts.total, counts.frozen, counts.trainable) == (total, tiny.frozen, total - tiny.frozen)
            assert counts.by_role["query"]["frozen"] + counts.by_role["key"]["frozen"] == tiny.frozen
            assert sum(projection.num_parameters for projection in counts.projections) == tiny.frozen
            assert before.total == counts.total
            assert [(p.name, p.layer, p.part, p.num_heads, p.num_parameters) for p in before.projections] == [
                (p.name, p.layer, p.part, p.num_heads, p.num_parameters) for p in counts.projections
            ]
            for role in ("norm", "feed_forward", "embedding", "other"):
                assert before.by_role.get(role) == counts.by_role.get(role)


@every
def test_freezing_as_it_is_changes_no_output(tiny: Tiny) -> None:
    before = reads(tiny_model(tiny), tiny)
    for parts in SUBSETS:
        with case(parts):
            model = tiny_model(tiny)
            names = freeze(model, Method(freeze=parts))
            assert {name for name, parameter in model.named_parameters() if not parameter.requires_grad} == set(names)
            after = reads(model, tiny)
            assert torch.allclose(after, before, rtol=0, atol=ROUNDING) if tiny.is_fused else torch.equal(after, before)
            with_gradients = outputs(model, tiny_inputs(tiny)).detach()
            assert torch.allclose(with_gradients, before, rtol=0, atol=ROUNDING)


def test_frames_are_orthonormal_by_the_heads_of_the_architecture() -> None:
    for tiny in ARCHITECTURES:
        # As in test_frames: rounding to float32 gives 2^-23, the rest is slack.
        for site in attention_sites(frozen(tiny)):
            with case(tiny.name, site.name):
                assert max(orthonormality_error(projection.weight_HKD()) for _, projection in site.projections()) <= 2.0**-22
                for _, projection in site.projections():
                    assert projection.bias is None or not bool(projection.bias.any())


@every
def test_spectral_rows_are_orthogonal_and_change_no_output(tiny: Tiny) -> None:
    plain = tiny_model(tiny)
    for parts in SUBSETS:
        with case(parts):
            model = tiny_model(tiny)
            if tiny.name in OBSTACLES:
                with pytest.raises(MethodError, match=OBSTACLES[tiny.name]):
                    freeze(model, Method(init="spectral", freeze=parts))
                assert digests(model) == digests(plain)
                continue
            freeze(model, Method(init="spectral", freeze=parts))
            assert torch.allclose(reads(model, tiny), reads(plain, tiny), rtol=0, atol=ROUNDING)
            for site in attention_sites(model):
                norms = []
                for _, projection in site.projections():
                    gram = projection.weight_HKD().double() @ projection.weight_HKD().double().mT
                    norms.append(gram.diagonal(dim1=-2, dim2=-1))
                    # Rows of norm 1 or so, each entry rounded to float32.
                    assert float((gram - torch.diag_embed(norms[-1])).abs().max()) <= 2.0**-21
                assert torch.allclose(norms[0], norms[1], rtol=1e-5)


def weights_HKD(model: nn.Module) -> list[Tensor]:
    return [projection.weight_HKD().double() for site in attention_sites(model) for _, projection in site.projections()]


@each_kind
def test_a_start_made_of_the_weights_keeps_each_heads_space(tiny: Tiny) -> None:
    before = weights_HKD(tiny_model(tiny))
    for preset in ("polar", "qr_layer", "rotated", "spectral_flat"):
        with case(preset):
            model = tiny_model(tiny)
            if preset == "spectral_flat" and tiny.name in OBSTACLES:
                with pytest.raises(MethodError, match=OBSTACLES[tiny.name]):
                    freeze(model, preset)
                continue
            freeze(model, preset)
            for old, new in zip(before, weights_HKD(model), strict=True):
                norms = new.norm(dim=-1, keepdim=True)
                assert torch.allclose(norms, norms.mean(1, keepdim=True), rtol=1e-5)
                frames = new / norms
                assert float((old - old @ frames.mT @ frames).abs().max()) <= ROUNDING
                assert preset == "spectral_flat" or torch.allclose(new.norm(), old.norm(), rtol=1e-5)


@trainings
def test_200_steps_with_decay_move_everything_but_what_is_frozen(tiny: Tiny, steps: int) -> None:
    model = frozen(tiny).train()
    before = digests(model)
    optimizer = train(model, tiny, steps=steps)
    assert_unmoved(model)
    after, record = digests(model), record_of(model)
    assert record
    assert {name for name in after if after[name] == before[name]} == set(record)
    # What is frozen has no gradient and no state of the optimizer.
    learns = {id(parameter) for parameter in model.parameters() if parameter.requires_grad}
    assert {id(parameter) for parameter in optimizer.state} == learns
    assert all(parameter.grad is None for parameter in model.parameters() if not parameter.requires_grad)


def test_saved_weights_have_the_architectures_own_names_and_layout() -> None:
    for tiny in ARCHITECTURES:
        with case(tiny.name):
            plain, saved = tiny_model(tiny).state_dict(), frozen(tiny, "pretrained_freeze").state_dict()
            assert list(saved) == list(plain)
            assert all(torch.equal(saved[name], tensor) for name, tensor in plain.items())


@each_kind
def test_plain_weights_load_into_a_frozen_model(tiny: Tiny) -> None:
    other = tiny_model(tiny, seed=1)
    for assign in (False, True):
        with case("assigned" if assign else "copied"):
            model = frozen(tiny, "pretrained_freeze")
            model.load_state_dict(copy.deepcopy(other.state_dict()), assign=assign)
            assert torch.allclose(reads(model, tiny), reads(other, tiny), rtol=0, atol=ROUNDING)
            with pytest.raises(FrozenMovedError):
                assert_unmoved(model)
            # Each in a memory of its own: parts that are views of one fused tensor would keep all of it alive.
            for parameter in model.parameters():
                assert parameter.untyped_storage().nbytes() == parameter.numel() * parameter.element_size()


@every_fused
def test_weights_of_another_shape_or_missing_are_refused(tiny: Tiny) -> None:
    model = frozen(tiny)
    weights = model.state_dict()
    name = next(name for name in weights if name.endswith(("c_attn.weight", "query_key_value.weight", "in_proj_bias")))
    with pytest.raises(RuntimeError, match="size mismatch|Unexpected key"):
        model.load_state_dict({**weights, name: weights[name][..., :-2].mT if weights[name].dim() == 2 else weights[name][:-2]})
    weights.pop(name)
    with pytest.raises(RuntimeError, match="Missing key"):
        model.load_state_dict(weights)


_PLAIN_READER = """
import json, sys, warnings
from pathlib import Path
import torch, transformers
from safetensors.torch import load_file
from tests.method.tiny_models import BY_NAME, outputs, tiny_model
torch.set_num_threads(1)
worst = {}
for folder in sorted(Path(sys.argv[1]).iterdir()):
    kept = load_file(folder / "expected.safetensors")
    tiny = BY_NAME[folder.name]
    if tiny.is_from_transformers:
        name = json.loads((folder / "config.json").read_text())["architectures"][0]
        model, told = getattr(transformers, name).from_pretrained(folder, output_loading_info=True)
        assert not any(told.values()), (folder.name, told)
    else:
        model = tiny_model(tiny, seed=5)
        model.load_state_dict(load_file(folder / "weights.safetensors"))
    expected = kept.pop("expected")
    with torch.no_grad():
        worst[folder.name] = float((outputs(model.eval(), kept) - expected).abs().max())
assert not [name for name in sys.modules if name == "oelm" or name.startswith("oelm.")]
print(json.dumps(worst))
"""


@pytest.mark.slow
@pytest.mark.parametrize("names", [KINDS, pytest.param(set(BY_NAME), marks=pytest.mark.slow)], ids=["kinds", "all"])
def test_saved_models_read_the_same_without_us(names: set[str], tmp_path: Path) -> None:
    readable = [tiny for tiny in ARCHITECTURES if tiny.name in names and not tiny.name.startswith("our")]
    for tiny in readable:
        model, folder = frozen(tiny), tmp_path / tiny.name
        train(model.train(), tiny, steps=2)
        saved: Any = model.eval()
        if tiny.is_from_transformers:
            saved.save_pretrained(folder)
        else:
            folder.mkdir()
            save_file(model.state_dict(), folder / "weights.safetensors")
        inputs = tiny_inputs(tiny)
        save_file({**inputs, "expected": reads(model, tiny).contiguous()}, folder / "expected.safetensors")
    command = [sys.executable, "-c", _PLAIN_READER, str(tmp_path)]
    child = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert child.returncode == 0, child.stderr
    worst = json.loads(child.stdout.splitlines()[-1])
    assert set(worst) == {tiny.name for tiny in readable}
    assert all(value <= ROUNDING for value in worst.values()), worst


@each_kind_from_transformers
def test_a_model_loaded_by_transformers_is_saved_as_it_was_loaded(tiny: Tiny, tmp_path: Path) -> None:
    # What from_pretrained renamed or converted on the way in, save_pretrained converts back on the way out.
    plain: Any = tiny_model(tiny)
    plain.save_pretrained(tmp_path / "plain")
    model = type(plain).from_pretrained(tmp_path / "plain")
    freeze(model, "pretrained_freeze")
    model.save_pretrained(tmp_path / "frozen")
    files = [tmp_path / folder / "model.safetensors" for folder in ("plain", "frozen")]
    assert files[0].read_bytes() == files[1].read_bytes()


@every
def test_a_thawed_model_is_the_architectures_own_again_and_learns_everywhere(tiny: Tiny) -> None:
    plain, model = tiny_model(tiny), frozen(tiny)
    before = reads(model, tiny)
    names = thaw(model)
    assert [type(module) for module in model.modules()] == [type(module) for module in plain.modules()]
    assert [name for name, _ in model.named_parameters()] == [name for name, _ in plain.named_parameters()]
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert torch.allclose(reads(model, tiny), before, rtol=0, atol=ROUNDING)
    start = digests(model)
    train(model.train(), tiny, steps=2)
    after = digests(model)
    # A key's bias shifts all of a query's logits alike, so softmax leaves it with rounding for a gradient, or none.
    still = {name for name in after if after[name] == start[name]}
    assert set(names) <= set(after) and still <= {name for name in names if name.endswith("bias")}


@every_fused
def test_a_thaw_may_leave_the_parts_apart_for_an_optimizer_that_runs(tiny: Tiny) -> None:
    model = frozen(tiny)
    names = thaw(model, keep_split=True)
    learns = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert learns == {name for name, _ in model.named_parameters()} and set(names) < learns
    saved = model.state_dict()
    thaw(model)
    assert [name for name, _ in model.named_parameters()] == [name for name, _ in tiny_model(tiny).named_parameters()]
    assert all(torch.equal(saved[name], tensor) for name, tensor in model.state_dict().items())


@each_kind
def test_restoring_gives_back_the_bytes_there_were(tiny: Tiny) -> None:
    plain, model = tiny_model(tiny), tiny_model(tiny)
    freeze(model, "oelm_freeze", keep_original=True)
    names = restore(model)
    assert digests(model) == digests(plain)
    assert set(names) <= set(digests(plain))


@each_kind
def test_bfloat16_weights_are_frozen_trained_and_proven(tiny: Tiny) -> None:
    model = tiny_model(tiny).to(torch.bfloat16)
    freeze(model, "oelm_freeze")
    inputs = {name: value.bfloat16() if value.is_floating_point() else value for name, value in tiny_inputs(tiny).items()}
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, weight_decay=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        loss(model, inputs).backward()
        optimizer.step()
    assert_unmoved(model)
    assert all(parameter.dtype == torch.bfloat16 for parameter in model.parameters())
    cast(model, torch.float32)
    assert_unmoved(model)


@each_kind
def test_a_copy_of_a_frozen_model_stands_alone(tiny: Tiny) -> None:
    model = frozen(tiny)
    before = reads(model, tiny)
    twin = copy.deepcopy(model)
    train(twin.train(), tiny, steps=1)
    assert_unmoved(twin)
    twin.load_state_dict(tiny_model(tiny, seed=1).state_dict())
    twin.load_state_dict(model.state_dict())
    assert torch.equal(reads(twin.eval(), tiny), before)
    thaw(twin)
    train(twin, tiny, steps=1)
    assert torch.equal(reads(model, tiny), before)
    assert_unmoved(model)


def gradients(model: nn.Module, tiny: Tiny) -> dict[str, Tensor]:
    model.zero_grad()
    loss(model, tiny_inputs(tiny)).backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}


@each_kind_from_transformers
def test_gradient_checkpointing_gives_the_same_gradients(tiny: Tiny) -> None:
    model: Any = frozen(tiny)
    if tiny.name == "gpt2_cross":
        model.config.use_cache = False
    # In training mode, as transformers checkpoints only there; without dropout, so that both passes are the same.
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name in ("dropout", "attention_dropout", "activation_dropout"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)
    plain = gradients(model.train(), tiny)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    again = gradients(model, tiny)
    assert plain.keys() == again.keys() == {name for name, p in model.named_parameters() if p.requires_grad}
    assert all(torch.allclose(again[name], value, rtol=1e-4, atol=1e-6) for name, value in plain.items())
    assert_unmoved(model)


@compiled
def test_a_compiled_model_gives_the_same_loss_and_gradients(tiny: Tiny, layers: slice) -> None:
    model = tiny_model(tiny)
    for module in list(model.modules()):
        for name, child in module.named_children():
            if isinstance(child, nn.ModuleList):
                setattr(module, name, child[layers])
    freeze(model, "oelm_freeze")
    plain = gradients(model, tiny)
    torch.compiler.reset()
    # The whole model as one graph: nothing of ours may break it.
    compiled: Any = torch.compile(model, backend="aot_eager", fullgraph=True)
    model.zero_grad()
    loss(compiled, tiny_inputs(tiny)).backward()
    got = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    assert plain.keys() == got.keys()
    assert all(torch.allclose(got[name], expected, rtol=1e-3, atol=1e-5) for name, expected in plain.items())
    assert_unmoved(model)


@pytest.mark.slow
@pytest.mark.parametrize("names", [SLICED, pytest.param(tuple(BY_NAME), marks=pytest.mark.slow)], ids=["kinds", "all"])
def test_two_processes_train_every_architecture_alike(names: tuple[str, ...], tmp_path: Path) -> None:
    assert run_pair(tmp_path, names) == [list(names)] * 2
