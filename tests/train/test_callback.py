"""Our guards in other people's loops: `transformers.Trainer` with the callback, and PEFT's adapters beside frozen Q and K."""

from __future__ import annotations

import copy
import logging
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import oelm
from oelm.errors import FrozenMovedError, MethodError
from oelm.method.audit import digest, record_of
from oelm.method.method import Thaw
from oelm.train.callback import OelmCallback
from tests.models.test_hub import BERT, VOCAB

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

pytestmark = [
    # torch's own, of the Trainer's loader on a machine without a GPU.
    pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true:UserWarning"),
]
STEPS = 8


@pytest.fixture(scope="module", autouse=True)
def _quiet_library() -> Iterator[None]:
    transformers.utils.logging.disable_progress_bar()
    yield


def tiny_bert(**settings: Any) -> nn.Module:
    torch.manual_seed(0)
    model: nn.Module = transformers.BertForSequenceClassification(transformers.BertConfig(**(BERT | settings)))
    return model


def examples() -> list[dict[str, Any]]:
    chance = torch.Generator().manual_seed(1)
    rows = torch.randint(5, len(VOCAB), (16, 8), generator=chance)
    return [{"input_ids": row.tolist(), "attention_mask": [1] * 8, "labels": number % 2} for number, row in enumerate(rows)]


def trainer(model: nn.Module, out: Path, *callbacks: Any, **settings: Any) -> Any:
    arguments = transformers.TrainingArguments(
        output_dir=str(out),
        max_steps=STEPS,
        per_device_train_batch_size=4,
        learning_rate=1e-2,
        weight_decay=0.1,
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        **({"save_steps": 4, "logging_strategy": "no"} | settings),
    )
    rows = examples()
    return transformers.Trainer(model=model, args=arguments, train_dataset=rows, eval_dataset=rows, callbacks=list(callbacks))


class Snapshots(transformers.TrainerCallback):  # type: ignore[misc,name-defined]
    """Keeps a copy of every parameter before the first step and after every step."""

    def __init__(self) -> None:
        self.after: list[dict[str, Tensor]] = []

    def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        self._keep(given["model"])

    def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        self._keep(given["model"])

    def _keep(self, model: nn.Module) -> None:
        self.after.append({name: parameter.detach().clone() for name, parameter in model.named_parameters()})

    def moved_in(self, step: int, *words: str) -> set[bool]:
        """Return whether the parameters with such names moved in a step, counted from 1."""
        before, after = self.after[step - 1], self.after[step]
        return {not torch.equal(before[name], after[name]) for name in before if any(word in name for word in words)}


class FirstIsBest(transformers.TrainerCallback):  # type: ignore[misc,name-defined]
    """Makes every evaluation worse than the one before, whatever the model."""

    def on_evaluate(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        given["metrics"]["eval_loss"] = float(state.global_step)


class Moves(transformers.TrainerCallback):  # type: ignore[misc,name-defined]
    """Somebody else's code that writes to a frozen weight after a step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        if state.global_step == self.step:
            with torch.no_grad():
                given["model"].get_parameter("bert.encoder.layer.1.attention.self.key.weight")[0, 0] += 1e-6


def test_a_trainer_where_nothing_is_frozen_is_refused_at_the_start(tmp_path: Path) -> None:
    snapshots = Snapshots()
    with pytest.raises(MethodError, match=r"nothing is frozen in this model: call oelm.freeze\(model, method\) before"):
        trainer(tiny_bert(), tmp_path, OelmCallback(), snapshots).train()
    assert len(snapshots.after) <= 1


def test_frozen_weights_stay_all_others_learn_and_what_was_saved_loads_without_us(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model, snapshots = tiny_bert(), Snapshots()
    oelm.freeze(model, "oelm_freeze")
    with caplog.at_level(logging.INFO, logger="oelm"):
        trainer(model, tmp_path, OelmCallback(), snapshots).train()
    assert len(snapshots.after) == STEPS + 1
    first, last = snapshots.after[0], snapshots.after[-1]
    unmoved = {name for name in first if torch.equal(first[name], last[name])}
    assert unmoved == {name for name in first if ".query." in name or ".key." in name}
    # What is frozen is told at the start.
    assert str(oelm.audit(model)) in caplog.text and "frozen: 4,224" in caplog.text
    plain = transformers.BertForSequenceClassification.from_pretrained(str(tmp_path / f"checkpoint-{STEPS}"))
    assert torch.equal(logits_of(plain), logits_of(model))


@pytest.mark.parametrize(("moved_at", "told_at"), [(4, 4), (5, 8)])
def test_a_moved_frozen_weight_is_told_at_the_next_save(moved_at: int, told_at: int, tmp_path: Path) -> None:
    model, snapshots = tiny_bert(), Snapshots()
    oelm.freeze(model, "oelm_freeze")
    with pytest.raises(FrozenMovedError, match=r"encoder\.layer\.1\.attention\.self\.key\.weight has moved"):
        trainer(model, tmp_path, OelmCallback(), Moves(moved_at), snapshots).train()
    assert len(snapshots.after) == told_at + 1


def test_a_moved_frozen_weight_is_told_at_the_end_when_nothing_is_saved(tmp_path: Path) -> None:
    model = tiny_bert()
    oelm.freeze(model, "oelm_freeze")
    with pytest.raises(FrozenMovedError, match="has moved"):
        trainer(model, tmp_path, OelmCallback(), Moves(6), save_strategy="no").train()


def test_a_weight_moved_before_training_is_told_at_the_start(tmp_path: Path) -> None:
    model, snapshots = tiny_bert(), Snapshots()
    oelm.freeze(model, "oelm_freeze")
    with torch.no_grad():
        model.get_parameter("bert.encoder.layer.0.attention.self.query.bias").add_(1.0)
    with pytest.raises(FrozenMovedError, match="query.bias has moved"):
        trainer(model, tmp_path, OelmCallback(), snapshots).train()
    assert len(snapshots.after) <= 1


@pytest.mark.parametrize(("thaw_at", "first"), [(0.3, 3), (0.999, 8)])
def test_thawed_weights_learn_from_their_step_on_and_not_before(thaw_at: float, first: int, tmp_path: Path) -> None:
    # Of 8 steps, those that begin with about three tenths of them done, and at least the last.
    model, snapshots = tiny_bert(), Snapshots()
    oelm.freeze(
        model, oelm.Method(init="orthogonal", freeze=("q", "k"), thaw=Thaw(start=thaw_at, end=thaw_at, order="first_first"))
    )
    trainer(model, tmp_path, OelmCallback(), snapshots, lr_scheduler_type="constant").train()
    moved = [snapshots.moved_in(step, ".query.weight", ".key.weight") for step in range(1, STEPS + 1)]
    assert moved == [{False}] * (first - 1) + [{True}] * (STEPS + 1 - first)


def test_a_thawed_fused_weight_learns_and_its_values_keep_their_optimizer_state(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=len(VOCAB), n_embd=32, n_layer=2, n_head=4, n_positions=16, num_labels=2, pad_token_id=0
    )
    model = transformers.GPT2ForSequenceClassification(config)
    oelm.freeze(model, "thaw_together")
    made = trainer(model, tmp_path, OelmCallback(), lr_scheduler_type="constant")
    before = model.state_dict()["transformer.h.0.attn.c_attn.weight"].clone()
    made.train()
    after = model.state_dict()["transformer.h.0.attn.c_attn.weight"]
    known = {id(parameter) for group in made.optimizer.param_groups for parameter in group["params"]}
    assert {id(parameter) for parameter in model.parameters()} <= known
    assert not torch.equal(before[:, :64], after[:, :64]) and not torch.equal(before[:, 64:], after[:, 64:])
    attention = [int(made.optimizer.state[p]["step"]) for name, p in model.named_parameters() if ".c_attn." in name]
    assert sorted(set(attention)) == [4, STEPS]


THAWED = {
    "layer by layer": oelm.Method(init="orthogonal", freeze=("q", "k"), thaw=Thaw(start=0.25, end=0.75, order="last_first")),
    "at once": oelm.PRESETS["thaw_together"],
    "slices": oelm.Method(init="axes", freeze=("q", "k"), thaw=Thaw(start=0.25, end=0.75, order="first_first")),
    "frozen later": oelm.PRESETS["train_then_freeze"],
    "slices for a part": oelm.Method(
        init="axes", freeze=("q",), layers="first 1", thaw=Thaw(start=0.5, end=0.5, order="first_first")
    ),
}


@dataclass(frozen=True)
class Trained:
    """A model that a Trainer brought to its end with our callback, saved every two steps."""

    model: nn.Module
    trainer: Any
    snapshots: Snapshots
    out: Path

    def checkpoint(self, step: int) -> Path:
        return self.out / f"checkpoint-{step}"


def frozen_bert(what: str) -> nn.Module:
    model = tiny_bert()
    oelm.freeze(model, THAWED[what])
    return model


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Trained]:
    """Return what each of these methods comes to when nothing interrupts it; nobody writes to it."""

    @cache
    def trained_once(what: str) -> Trained:
        model, snapshots, out = frozen_bert(what), Snapshots(), tmp_path_factory.mktemp("whole")
        made = trainer(model, out, OelmCallback(), snapshots, save_steps=2)
        made.train()
        return Trained(model, made, snapshots, out)

    return trained_once


def stills(snapshots: Snapshots, step: int, names: set[str]) -> set[str]:
    """Return which of these a step left as they were; a selection is no parameter, and stays."""
    before, after = snapshots.after[step - 1], snapshots.after[step]
    return {name for name in names if name not in after or (name in before and torch.equal(before[name], after[name]))}


@pytest.mark.parametrize("what", THAWED)
def test_a_method_that_thaws_or_freezes_in_training_is_followed_to_the_step(what: str, whole: Callable[[str], Trained]) -> None:
    trained = whole(what)
    model = trained.model
    plan = oelm.plan_of(frozen_bert(what), THAWED[what], steps=STEPS)
    assert plan.moments
    # Its gradient may be nothing but rounding: softmax does not see a key's bias.
    names = {name for name in plan.spans if not name.endswith("key.bias")}
    for step in range(1, STEPS + 1):
        assert stills(trained.snapshots, step, names) == plan.frozen_at(step - 1) & names, step
    known = [id(parameter) for group in trained.trainer.optimizer.param_groups for parameter in group["params"]]
    assert len(known) == len(set(known)) and {id(p) for p in model.parameters() if p.requires_grad} <= set(known)


def test_thawing_keeps_what_the_optimizer_knows_of_the_rest(whole: Callable[[str], Trained]) -> None:
    trained = whole("at once")
    state = trained.trainer.optimizer.state
    steps = {name: int(state[parameter]["step"]) for name, parameter in trained.model.named_parameters()}
    thawed = {name for name in steps if ".query." in name or ".key." in name}
    assert thawed and {steps[name] for name in thawed} == {4} and steps["classifier.weight"] == STEPS


def test_a_part_of_a_model_that_was_frozen_follows_its_method(tmp_path: Path) -> None:
    model, snapshots = tiny_bert(), Snapshots()
    oelm.freeze(model.get_submodule("bert"), "thaw_together")
    trainer(model, tmp_path, OelmCallback(), snapshots, lr_scheduler_type="constant").train()
    moved = [snapshots.moved_in(step, ".query.weight", ".key.weight") for step in range(1, STEPS + 1)]
    assert moved == [{False}] * 4 + [{True}] * 4


def end_of(trained: Trained) -> tuple[dict[str, str], dict[str, tuple[int, str]]]:
    """Return the digests of the weights, and of what the optimizer knows of them, by name."""
    named = {parameter: name for name, parameter in trained.model.named_parameters()}
    state = {named[p]: (int(s["step"]), digest(s["exp_avg"])) for p, s in trained.trainer.optimizer.state.items()}
    return digests(trained.model), state


# Of two layers the last thaws before step 3, the first before step 7: at the first, between them, and at the second.
@pytest.mark.parametrize(
    "what", ["layer by layer", *(pytest.param(what, marks=pytest.mark.slow) for what in ("at once", "frozen later"))]
)
def test_a_trainer_resumes_bit_for_bit_before_and_after_a_thaw(
    what: str, whole: Callable[[str], Trained], tmp_path: Path
) -> None:
    for step in (6, 4, 2):
        model, snapshots = frozen_bert(what), Snapshots()
        made = trainer(model, tmp_path, OelmCallback(), save_steps=2)
        made.train(resume_from_checkpoint=str(whole(what).checkpoint(step)))
        assert end_of(Trained(model, made, snapshots, tmp_path)) == end_of(whole(what)), step


def test_one_trainer_resumes_its_own_checkpoints_of_either_side_of_a_thaw(tmp_path: Path) -> None:
    model = frozen_bert("at once")
    made = trainer(model, tmp_path, OelmCallback(), save_steps=2)
    made.train()
    end = digests(model)
    for step in (6, 2):
        made.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{step}"))
        assert digests(model) == end


def test_a_resumed_trainer_still_proves_what_has_not_thawed_yet(whole: Callable[[str], Trained], tmp_path: Path) -> None:
    # Of two layers the last thaws before step 3, the first before step 7.
    spoilt = shutil.copytree(whole("layer by layer").checkpoint(4), tmp_path / "checkpoint-4")
    weights = load_file(spoilt / "model.safetensors")
    weights["bert.encoder.layer.0.attention.self.key.weight"][0, 0] += 1
    save_file(weights, spoilt / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(FrozenMovedError, match="layer.0.attention.self.key.weight has moved"):
        trainer(frozen_bert("layer by layer"), tmp_path, OelmCallback()).train(resume_from_checkpoint=str(spoilt))


def test_weights_that_thaw_in_a_model_that_was_thawed_by_hand_do_not_take_anothers_state(
    whole: Callable[[str], Trained], tmp_path: Path
) -> None:
    model = frozen_bert("at once")
    oelm.thaw(model)
    with pytest.raises(ValueError, match="doesn't match the size of optimizer's group"):
        trainer(model, tmp_path).train(resume_from_checkpoint=str(whole("at once").checkpoint(STEPS)))


@pytest.mark.parametrize("is_moved", [False, True], ids=["unmoved", "moved"])
def test_the_best_checkpoint_may_be_of_before_the_freeze(is_moved: bool, tmp_path: Path) -> None:
    model, snapshots = tiny_bert(), Snapshots()
    method = oelm.Method(init="native", freeze=("q", "k"), freeze_at=0.5)
    oelm.freeze(model, method)
    settings = {"eval_strategy": "steps", "eval_steps": 2, "save_steps": 2, "metric_for_best_model": "loss"}
    moves = [Moves(STEPS)] if is_moved else []
    made = trainer(model, tmp_path, *moves, OelmCallback(), snapshots, load_best_model_at_end=True, **settings)
    made.add_callback(FirstIsBest())
    if is_moved:
        with pytest.raises(FrozenMovedError, match="key.weight has moved"):
            made.train()
        return
    made.train()
    assert made.state.best_global_step == 2 < min(oelm.plan_of(model, method, steps=STEPS).moments)
    assert all(torch.equal(parameter, snapshots.after[2][name]) for name, parameter in model.named_parameters())
    assert not record_of(model) and all(parameter.requires_grad for parameter in model.parameters())


def test_a_thawed_model_no_longer_follows_a_method(tmp_path: Path) -> None:
    model = tiny_bert()
    oelm.freeze(model, "thaw_together")
    oelm.thaw(model)
    with pytest.raises(MethodError, match="nothing is frozen in this model"):
        trainer(model, tmp_path, OelmCallback()).train()


LORA = {"r": 2, "target_modules": ["value", "output.dense"], "lora_dropout": 0.0}


def with_lora(*, freeze: str) -> Any:
    """Return a BERT with adapters on values and outputs, whose Q and K were frozen before or after them."""
    model = tiny_bert(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    config = peft.LoraConfig(task_type="SEQ_CLS", **LORA)
    if freeze == "first":
        oelm.freeze(model, "oelm_freeze")
        return peft.get_peft_model(model, config)
    wrapped = peft.get_peft_model(model, config)
    oelm.freeze(wrapped if freeze == "wrapper after" else wrapped.get_base_model(), "oelm_freeze")
    return wrapped


def trained(model: Any, *, steps: int = 10) -> dict[str, Tensor]:
    """Train what trains with decay, and return all parameters as they were before."""
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, weight_decay=0.1)
    inputs = torch.tensor([row["input_ids"] for row in examples()])
    labels = torch.tensor([row["labels"] for row in examples()])
    for _ in range(steps):
        optimizer.zero_grad()
        model(input_ids=inputs, labels=labels).loss.backward()
        optimizer.step()
    return before


ORDERS = ["first", "wrapper after", "base after"]


@torch.no_grad()
def logits_of(model: Any) -> Tensor:
    inputs = torch.tensor([row["input_ids"] for row in examples()])
    logits: Tensor = model.eval()(input_ids=inputs).logits
    return logits


@pytest.mark.parametrize("order", ORDERS)
def test_adapters_learn_while_queries_and_keys_stay_and_merge_into_plain_weights(order: str) -> None:
    model = with_lora(freeze=order)
    oelm.assert_unmoved(model)
    before = trained(model)
    moved = {name for name, parameter in model.named_parameters() if not torch.equal(parameter, before[name])}
    assert {name for name in before if "lora_" in name} <= moved
    assert not [name for name in moved if ".query." in name or ".key." in name]
    expected = logits_of(model)
    merged = copy.deepcopy(model).merge_and_unload()
    # W x + B A x against (W + B A) x: at most 48 float32 products in another order, 2 layers, logits below 10.
    assert torch.allclose(logits_of(merged), expected, rtol=0, atol=48 * 2**-24 * 2 * 10)
    assert not [name for name, _ in merged.named_parameters() if "lora" in name]
    with torch.no_grad():
        next(p for name, p in model.named_parameters() if name.endswith("self.query.weight")).mul_(1.5)
    with pytest.raises(FrozenMovedError, match="query.weight has moved"):
        oelm.assert_unmoved(model)


# Frozen through the wrapper, the record is on the wrapper, which merging throws away.
@pytest.mark.parametrize("order", ["first", "base after"])
def test_merging_adapters_keeps_the_record_of_what_is_frozen(order: str) -> None:
    model = with_lora(freeze=order)
    trained(model, steps=2)
    merged = model.merge_and_unload()
    assert record_of(merged)
    oelm.assert_unmoved(merged)


def corrected_bert(*, seed: int = 0) -> nn.Module:
    model = tiny_bert()
    oelm.freeze(model, oelm.Method(init="orthogonal", freeze=("q", "k"), correction=0.25, gain="matrix"), seed=seed)
    return model


def digests(model: nn.Module) -> dict[str, str]:
    return {name: digest(parameter) for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("callbacks", [[OelmCallback()], []], ids=["with the callback", "without"])
def test_what_learns_on_top_resumes_bit_for_bit_and_its_checkpoint_loads_without_us(
    callbacks: list[Any], tmp_path: Path
) -> None:
    model = corrected_bert()
    trainer(model, tmp_path, *callbacks).train()
    # Another process: a fresh model, frozen by the same command.
    resumed = corrected_bert()
    trainer(resumed, tmp_path / "resumed", *callbacks).train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    assert digests(resumed) == digests(model)
    plain = transformers.BertForSequenceClassification.from_pretrained(str(tmp_path / f"checkpoint-{STEPS}"))
    before = logits_of(model)
    oelm.fold(model)
    assert torch.equal(logits_of(plain), logits_of(model))
    # Folding rounds once: a few float32 roundings on logits of order one.
    assert torch.allclose(logits_of(model), before, rtol=0, atol=2e-5)


def test_the_best_checkpoint_brings_back_what_had_learnt_on_top_by_then(tmp_path: Path) -> None:
    model, snapshots = corrected_bert(), Snapshots()
    made = trainer(
        model,
        tmp_path,
        OelmCallback(),
        snapshots,
        eval_strategy="steps",
        eval_steps=4,
        load_best_model_at_end=True,
        metric_for_best_model="loss",
        greater_is_better=True,  # the worst, for a loss: what is to be brought back is not what is there
    )
    made.train()
    best = int(made.state.best_model_checkpoint.rpartition("-")[2])
    assert best < STEPS, "the last checkpoint would prove nothing"
    assert all(torch.equal(parameter, snapshots.after[best][name]) for name, parameter in model.named_parameters())
