"""Models in Hugging Face's format: read from safetensors or refused with the way out, and never by running their code."""

from __future__ import annotations

import hashlib
import json
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from torch import nn

from oelm.errors import CheckpointError, ConfigError
from oelm.models.hub import (
    ClassifierShape,
    export_classifier,
    fresh_classifier,
    model_folder,
    pretrained_classifier,
    save_model_config,
    shaped_classifier,
    weights_sha256,
)

MARKS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
GOOD, BAD = ("good", "fine", "lovely", "bright"), ("bad", "awful", "poor", "dull")
NEUTRAL = ("the", "film", "a", "play", "was", "so", "and", "we", "saw", "it", "very", "old")
VOCAB = (*MARKS, *GOOD, *BAD, *NEUTRAL, ".")
BERT: dict[str, Any] = {
    "vocab_size": len(VOCAB),
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 16,
    "pad_token_id": 0,
}


def write_tokenizer(folder: Path, *, words: tuple[str, ...] = VOCAB) -> Path:
    """Write the tokenizer.json of a BERT whose words these are."""
    tokenizer = Tokenizer(models.WordPiece(vocab={word: number for number, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    marks = [(mark, words.index(mark)) for mark in ("[CLS]", "[SEP]")]
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=marks
    )
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def write_t5_tokenizer(folder: Path) -> Path:
    """Write the tokenizer.json of a T5: pieces of a unigram model, filled up with id 0, every text closed with </s>."""
    words = [(f"\u2581{word}", -2.0) for word in (*GOOD, *BAD, *NEUTRAL)]
    marks = [(mark, 0.0) for mark in ("<pad>", "</s>", "<unk>")]
    tokenizer = Tokenizer(models.Unigram([*marks, *words, ("\u2581", -4.0)], unk_id=2))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.add_special_tokens([mark for mark, _ in marks])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="$A </s>", pair="$A </s> $B </s>", special_tokens=[("</s>", 1)]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def write_model(folder: Path, name: str = "Bert", *, kind: str = "Model", **settings: Any) -> Path:
    """Write a tiny model with random weights, and its tokenizer, as a folder of the hub has them."""
    import transformers

    torch.manual_seed(7)
    config = getattr(transformers, f"{name}Config")(**((BERT if name == "Bert" else {}) | settings))
    transformers.utils.logging.disable_progress_bar()
    getattr(transformers, f"{name}{kind}")(config).save_pretrained(str(folder))
    return write_tokenizer(folder)


def weights(model: nn.Module) -> dict[str, str]:
    return {name: hashlib.sha256(tensor.numpy().tobytes()).hexdigest() for name, tensor in model.state_dict().items()}


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("models") / "bert")


@pytest.fixture
def own_bert(bert: Path, tmp_path: Path) -> Path:
    """A copy that a test may spoil."""
    return Path(shutil.copytree(bert, tmp_path / "bert"))


class Hostile:
    """Leaves a mark when unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (self.mark,))


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "model.ckpt"])
@pytest.mark.parametrize("load", [weights_sha256, lambda folder: pretrained_classifier(folder, num_labels=2, seed=0)])
def test_weights_as_a_pickle_are_refused_with_the_conversion_and_never_opened(
    name: str, load: Callable[[Path], Any], own_bert: Path, tmp_path: Path
) -> None:
    (own_bert / "model.safetensors").unlink()
    (own_bert / name).write_bytes(pickle.dumps(Hostile(tmp_path / "mark")))
    with pytest.raises(CheckpointError, match=rf"{name}: .*from_pretrained\(FOLDER\)\.save_pretrained\(NEW_FOLDER\)"):
        load(own_bert)
    assert not (tmp_path / "mark").exists()


def test_a_pickle_beside_safetensors_is_not_opened(own_bert: Path, tmp_path: Path) -> None:
    (own_bert / "pytorch_model.bin").write_bytes(pickle.dumps(Hostile(tmp_path / "mark")))
    pretrained_classifier(own_bert, num_labels=2, seed=0)
    assert not (tmp_path / "mark").exists()


def test_code_beside_a_model_is_not_run(own_bert: Path, tmp_path: Path) -> None:
    facts = json.loads((own_bert / "config.json").read_text())
    facts |= {
        "model_type": "own",
        "auto_map": {name: "own.Own" for name in ("AutoConfig", "AutoModelForSequenceClassification")},
    }
    (own_bert / "config.json").write_text(json.dumps(facts))
    (own_bert / "own.py").write_text(f"import pathlib\npathlib.Path({str(tmp_path / 'mark')!r}).touch()\nclass Own: pass\n")
    with pytest.raises(CheckpointError, match="cannot be loaded as a classifier"):
        pretrained_classifier(own_bert, num_labels=2, seed=0)
    assert not (tmp_path / "mark").exists()


def test_a_model_without_weights_is_refused(own_bert: Path) -> None:
    (own_bert / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="no weights in it"):
        weights_sha256(own_bert)


def test_a_folder_without_config_is_no_model(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no config.json, so this is not a model's folder"):
        weights_sha256(tmp_path)


@pytest.mark.parametrize("content", ["{", "[]", "", '{"vocab_size": 5}'], ids=["torn", "list", "empty", "no type"])
def test_a_config_that_describes_no_model_is_refused(content: str, own_bert: Path) -> None:
    (own_bert / "config.json").write_text(content)
    with pytest.raises(CheckpointError, match=str(own_bert)):
        pretrained_classifier(own_bert, num_labels=2, seed=0)


@pytest.mark.parametrize("kept", [0.0, 0.001, 0.5, 0.999])
def test_truncated_weights_are_refused_with_what_to_do(kept: float, own_bert: Path) -> None:
    path = own_bert / "model.safetensors"
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * kept)])
    with pytest.raises(CheckpointError, match=r"model.safetensors: cannot be read as safetensors .*; fetch it again"):
        pretrained_classifier(own_bert, num_labels=2, seed=0)


def test_weights_of_another_shape_than_the_config_says_are_refused(own_bert: Path) -> None:
    facts = json.loads((own_bert / "config.json").read_text())
    (own_bert / "config.json").write_text(json.dumps(facts | {"intermediate_size": 40}))
    with pytest.raises(CheckpointError, match="cannot be loaded as a classifier"):
        pretrained_classifier(own_bert, num_labels=2, seed=0)


@pytest.mark.filterwarnings("ignore:Using a target size:UserWarning")
@pytest.mark.parametrize(
    ("name", "head", "settings"),
    [
        ("Bert", "classifier.weight", {}),
        ("Roberta", "classifier.out_proj.weight", {**BERT, "max_position_embeddings": 18}),
        (
            "DistilBert",
            "classifier.weight",
            {"vocab_size": len(VOCAB), "dim": 32, "n_layers": 1, "n_heads": 2, "hidden_dim": 48},
        ),
        ("GPT2", "score.weight", {"vocab_size": len(VOCAB), "n_embd": 32, "n_layer": 1, "n_head": 2, "n_positions": 16}),
    ],
)
def test_a_head_for_another_number_of_labels_is_refused_with_both_numbers(
    name: str, head: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    folder = write_model(tmp_path / "model", name, kind="ForSequenceClassification", num_labels=3, **settings)
    with pytest.raises(ConfigError, match=rf"\({head}\) has 3 labels, the task 2"):
        pretrained_classifier(folder, num_labels=2, seed=0)


def test_a_head_for_as_many_labels_is_kept(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    folder = write_model(tmp_path / "model", kind="ForSequenceClassification", num_labels=3)
    model = pretrained_classifier(folder, num_labels=3, seed=0)
    assert torch.equal(model.get_parameter("classifier.weight"), load_file(folder / "model.safetensors")["classifier.weight"])


def test_pretrained_weights_arrive_unchanged(bert: Path) -> None:
    from safetensors.torch import load_file

    model = pretrained_classifier(bert, num_labels=2, seed=0).state_dict()
    assert all(torch.equal(model[f"bert.{name}"], tensor) for name, tensor in load_file(bert / "model.safetensors").items())


def test_half_precision_weights_are_trained_in_float32(tmp_path: Path) -> None:
    import transformers

    transformers.BertModel(transformers.BertConfig(**BERT)).bfloat16().save_pretrained(str(tmp_path))
    model = pretrained_classifier(tmp_path, num_labels=2, seed=0)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


def test_a_new_head_follows_the_seed_alone(bert: Path) -> None:
    heads = []
    for seed in (3, 3, 4):
        torch.rand(5)
        heads.append(pretrained_classifier(bert, num_labels=2, seed=seed).get_parameter("classifier.weight"))
    assert torch.equal(heads[0], heads[1]) and not torch.equal(heads[0], heads[2])


def test_loading_leaves_the_global_generator_and_the_librarys_settings_alone(bert: Path) -> None:
    import transformers

    torch.manual_seed(1)
    before = torch.get_rng_state(), transformers.logging.get_verbosity()
    pretrained_classifier(bert, num_labels=2, seed=0)
    assert torch.equal(torch.get_rng_state(), before[0]) and transformers.logging.get_verbosity() == before[1]


def test_loading_prints_nothing(bert: Path, capfd: pytest.CaptureFixture[str]) -> None:
    pretrained_classifier(bert, num_labels=2, seed=0)
    assert capfd.readouterr() == ("", "")


def test_a_pretrained_and_a_shaped_model_are_both_ready_to_train(bert: Path, tmp_path: Path) -> None:
    # The library hands out pretrained models with dropout off and new ones with it on: a resumed run would differ.
    model = pretrained_classifier(bert, num_labels=2, seed=0)
    save_model_config(model, tmp_path / "model")
    assert (model.training, shaped_classifier(tmp_path / "model").training) == (True, True)


def test_a_saved_config_gives_the_same_shape_again(bert: Path, tmp_path: Path) -> None:
    model = pretrained_classifier(bert, num_labels=3, seed=0)
    save_model_config(model, tmp_path / "model")
    shapes = [{name: t.shape for name, t in m.state_dict().items()} for m in (model, shaped_classifier(tmp_path / "model"))]
    assert shapes[0] == shapes[1]


def test_a_run_that_lost_its_model_config_is_told_so(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=str(tmp_path / "model")):
        shaped_classifier(tmp_path / "model")


SHAPE = ClassifierShape(
    vocab_size=30, seq_len=16, model_dim=32, num_layers=2, num_heads=4, ff_dim=48, num_labels=3, pad=0, end=3
)


def test_a_t5_whose_config_does_not_say_how_its_decoder_starts_begins_with_the_pad(tmp_path: Path) -> None:
    shape: dict[str, Any] = {"vocab_size": len(VOCAB), "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 1, "num_heads": 4}
    folder = write_model(tmp_path / "model", "T5", **shape, pad_token_id=0, eos_token_id=3)
    assert "decoder_start_token_id" not in json.loads((folder / "config.json").read_text())
    assert pretrained_classifier(folder, num_labels=2, seed=0).config.decoder_start_token_id == 0  # type: ignore[union-attr]


def test_a_folder_is_its_own_model_folder(bert: Path) -> None:
    assert model_folder(str(bert)) == bert


@pytest.mark.parametrize("source", ["/no/such/folder", "./here", "../there", "a/b/c"])
def test_a_path_that_is_not_there_is_not_asked_of_the_hub(source: str) -> None:
    with pytest.raises(CheckpointError, match=r"no such folder; give a model's folder \(config.json, model.safetensors\)"):
        model_folder(source)


@pytest.mark.parametrize("source", ["nobody/nothing", "nobody/nothing@abc", "nothing"])
def test_without_a_network_the_error_names_both_ways_out(source: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(CheckpointError, match=rf"{source} cannot be fetched .*: repeat with a network, or copy the .*folder"):
        model_folder(source)


@pytest.mark.parametrize("change", [lambda b: b[:-1] + bytes([b[-1] ^ 1]), lambda b: b + b"\0"], ids=["one bit", "longer"])
def test_the_digest_tells_changed_weights_apart(change: Callable[[bytes], bytes], own_bert: Path) -> None:
    before = weights_sha256(own_bert)
    path = own_bert / "model.safetensors"
    path.write_bytes(change(path.read_bytes()))
    assert weights_sha256(own_bert) != before


def test_an_export_is_not_written_over_what_is_there(bert: Path, tmp_path: Path) -> None:
    (tmp_path / "export").mkdir()
    (tmp_path / "export" / "thesis.tex").write_text("precious")
    with pytest.raises(CheckpointError, match="exists already; give a new folder"):
        export_classifier(fresh_classifier("bert", SHAPE, seed=0), bert / "tokenizer.json", tmp_path / "export")
    assert [path.name for path in (tmp_path / "export").iterdir()] == ["thesis.tex"]


def test_an_export_reads_pairs_as_training_did(bert: Path, tmp_path: Path) -> None:
    import transformers

    export_classifier(fresh_classifier("bert", SHAPE, seed=0), bert / "tokenizer.json", tmp_path / "export")
    exported = transformers.AutoTokenizer.from_pretrained(str(tmp_path / "export"))
    given = exported("the good film", "we saw it")
    expected = Tokenizer.from_file(str(bert / "tokenizer.json")).encode("the good film", "we saw it")
    assert (given["input_ids"], given["token_type_ids"]) == (expected.ids, expected.type_ids)


def test_an_export_of_a_model_without_types_asks_for_none(bert: Path, tmp_path: Path) -> None:
    import transformers

    settings: dict[str, Any] = {
        "vocab_size": len(VOCAB),
        "dim": 32,
        "n_layers": 1,
        "n_heads": 2,
        "hidden_dim": 48,
        "pad_token_id": 0,
    }
    folder = write_model(tmp_path / "model", "DistilBert", **settings)
    export_classifier(pretrained_classifier(folder, num_labels=2, seed=0), folder / "tokenizer.json", tmp_path / "export")
    tokenizer = transformers.AutoTokenizer.from_pretrained(str(tmp_path / "export"))
    assert set(tokenizer("the good film", "we saw it")) == {"input_ids", "attention_mask"}


def test_an_export_knows_its_marks(bert: Path, tmp_path: Path) -> None:
    import transformers

    export_classifier(fresh_classifier("bert", SHAPE, seed=0), bert / "tokenizer.json", tmp_path / "export")
    tokenizer = transformers.AutoTokenizer.from_pretrained(str(tmp_path / "export"))
    marks = (tokenizer.pad_token, tokenizer.unk_token, tokenizer.cls_token, tokenizer.sep_token, tokenizer.mask_token)
    assert marks == MARKS


def test_dropout_is_the_models_own_unless_it_is_given(bert: Path) -> None:
    rates = {
        asked: {
            module.p
            for module in pretrained_classifier(bert, num_labels=2, seed=0, dropout=asked).modules()
            if isinstance(module, nn.Dropout)
        }
        for asked in (None, 0.0, 0.3)
    }
    assert rates[0.0] == {0.0} and rates[0.3] == {0.3} and rates[None] not in ({0.0}, {0.3})


def test_a_pad_that_is_given_replaces_the_models_own(bert: Path) -> None:
    assert pretrained_classifier(bert, num_labels=2, seed=0, pad=3).config.pad_token_id == 3  # type: ignore[union-attr]


def test_weights_of_another_model_are_refused_instead_of_beginning_at_random(bert: Path, tmp_path: Path) -> None:
    folder = tmp_path / "renamed"
    shutil.copytree(bert, folder)
    tensors = load_file(folder / "model.safetensors")
    save_file({f"inner.{name}": tensor for name, tensor in tensors.items()}, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match="would start at random"):
        pretrained_classifier(folder, num_labels=2, seed=0)
