"""Models of the Hugging Face hub, or of a folder in its format: loaded from safetensors only, never from pickles."""

from __future__ import annotations

import contextlib
import hashlib
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from tokenizers import Tokenizer
from torch import nn

from oelm.errors import CheckpointError, ConfigError, needing
from oelm.files import publish_dir, read_json, sha256_file
from oelm.models.shape import Architecture
from oelm.seeds import stream_seed

# Names of the layers that a classifier adds to a pretrained model.
_NEW_LAYERS = re.compile(r"^(classifier|pre_classifier|score|classification_head)\.|(^|\.)pooler\.")
# Names of the weight of a classifier's last layer.
_HEADS = ("classifier.weight", "classifier.out_proj.weight", "score.weight", "classification_head.out_proj.weight")


def model_folder(source: str) -> Path:
    """Return the folder of a model: the path itself, or the download of a hub id ('org/name' or 'org/name@revision')."""
    path = Path(source)
    if path.is_dir():
        return path
    if path.is_absolute() or source.count("/") > 1 or source.startswith("."):
        raise CheckpointError(f"{source}: no such folder; give a model's folder (config.json, model.safetensors) or a hub id")
    with needing("huggingface_hub", "hf"):
        from huggingface_hub import snapshot_download
    repo, _, revision = source.partition("@")
    try:
        found = snapshot_download(repo, revision=revision or None, allow_patterns=["*.json", "*.safetensors", "*.txt"])
    # What an unreachable hub raises differs by version.
    except Exception as problem:
        raise CheckpointError(
            f"{source} cannot be fetched from the Hugging Face hub ({type(problem).__name__}), and no such folder exists: "
            "repeat with a network, or copy the model's folder here and give its path"
        ) from problem
    return Path(found)


def weights_sha256(folder: Path) -> str:
    """Return a digest of a model's weights; raise CheckpointError when none can be read safely."""
    return hashlib.sha256("".join(map(sha256_file, _weight_files(folder))).encode()).hexdigest()


def _weight_files(folder: Path) -> list[Path]:
    model_facts(folder)
    files = sorted(folder.glob("*.safetensors"))
    if not files and (pickles := sorted([*folder.glob("*.bin"), *folder.glob("*.pt"), *folder.glob("*.ckpt")])):
        raise CheckpointError(
            f"{pickles[0]}: a pickle can run code when read, so these weights are not read. Convert them once, if you "
            "trust them: AutoModel.from_pretrained(FOLDER).save_pretrained(NEW_FOLDER) writes model.safetensors"
        )
    if not files:
        raise CheckpointError(f"{folder}: no weights in it (model.safetensors)")
    return files


def pretrained_classifier(
    folder: Path, *, num_labels: int, seed: int, pad: int | None = None, dropout: float | None = None
) -> nn.Module:
    """Return a classifier with a folder's weights; a new last layer is drawn with `seed`.

    `pad` and `dropout`, where given, replace the model's.
    """
    transformers = load_transformers()
    _check_head(_weight_files(folder), num_labels)
    with _quiet(transformers), _seeded(seed):
        try:
            config = transformers.AutoConfig.from_pretrained(
                str(folder), num_labels=num_labels, local_files_only=True, trust_remote_code=False
            )
            config.pad_token_id = config.pad_token_id if pad is None else pad
            if config.is_encoder_decoder and getattr(config, "decoder_start_token_id", None) is None:
                # T5 starts with its pad token; newer configs may leave this out.
                config.decoder_start_token_id = config.pad_token_id
            _set_dropout(config, dropout)
            model: nn.Module
            model, loaded = transformers.AutoModelForSequenceClassification.from_pretrained(
                str(folder),
                config=config,
                use_safetensors=True,
                dtype=torch.float32,
                local_files_only=True,
                trust_remote_code=False,
                output_loading_info=True,
            )
        except (ValueError, KeyError, OSError, RuntimeError, SafetensorError) as problem:
            reason = str(problem).strip().splitlines()[0][:200]
            raise CheckpointError(f"{folder}: cannot be loaded as a classifier ({reason})") from problem
    _check_loaded(folder, loaded["missing_keys"])
    # The library returns pretrained models in eval mode, new ones (a resumed run's) in train mode.
    return model.train()


def _check_loaded(folder: Path, missing: Iterable[str]) -> None:
    """Raise CheckpointError when more than the new last layers would start at random; the library only warns."""
    odd = sorted(name for name in missing if not _NEW_LAYERS.search(name))
    if odd:
        raise CheckpointError(
            f"{folder}: its weights lack {len(odd)} tensors of the model in its config.json (first: {odd[0]}), "
            "which would start at random: these weights belong to another model"
        )


def shaped_classifier(folder: Path) -> nn.Module:
    """Return the model that a folder's config.json describes, with weights that are to be overwritten."""
    transformers = load_transformers()
    with _quiet(transformers), _seeded(0):
        return described_classifier(folder).float().train()


def described_classifier(folder: Path, **settings: Any) -> nn.Module:
    """Return the classifier that a folder's config.json describes, with these settings changed; run none of its code."""
    transformers = load_transformers()
    model_facts(folder)
    try:
        # trust_remote_code is given, because by default the library asks at the terminal whether to run the folder's code.
        config = transformers.AutoConfig.from_pretrained(
            str(folder), local_files_only=True, trust_remote_code=False, **settings
        )
        model: nn.Module = transformers.AutoModelForSequenceClassification.from_config(config, trust_remote_code=False)
    # What a wrong config raises differs by architecture and by version.
    except Exception as problem:
        reason = " ".join(str(problem).split())[:200]
        raise CheckpointError(f"{folder}: its config.json describes no classifier ({reason})") from problem
    return model


@dataclass(frozen=True)
class ClassifierShape:
    """The sizes of a small classifier; an encoder-decoder has `num_layers` in each half.

    `end` is the mark at the end of every example, where an encoder-decoder classifies; None for a BERT.
    """

    vocab_size: int
    seq_len: int
    model_dim: int
    num_layers: int
    num_heads: int
    ff_dim: int
    num_labels: int
    pad: int
    end: int | None

    @classmethod
    def of(cls, model: Any, **rest: Any) -> ClassifierShape:
        """Return the shape with the sizes of a config's model, and the rest, which the data decides."""
        sizes = ("vocab_size", "model_dim", "num_layers", "num_heads", "ff_dim")
        return cls(**{name: getattr(model, name) for name in sizes} | rest)


def fresh_classifier(
    architecture: Architecture, shape: ClassifierShape, *, seed: int, dropout: float | None = None
) -> nn.Module:
    """Return a classifier of this architecture and shape with fresh weights drawn with `seed`."""
    transformers = load_transformers()
    if shape.model_dim % shape.num_heads:
        raise ConfigError(f"model.model_dim {shape.model_dim} does not split into {shape.num_heads} heads")
    family, settings = _FRESH[architecture]
    config = getattr(transformers, f"{family}Config")(
        vocab_size=shape.vocab_size, num_labels=shape.num_labels, pad_token_id=shape.pad, **settings(shape)
    )
    _set_dropout(config, dropout)
    with _quiet(transformers), _seeded(seed):
        model: nn.Module = getattr(transformers, f"{family}ForSequenceClassification")(config)
    return model


def _bert_settings(shape: ClassifierShape) -> dict[str, Any]:
    return {
        "hidden_size": shape.model_dim,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "intermediate_size": shape.ff_dim,
        "max_position_embeddings": shape.seq_len,
    }


def _t5_settings(shape: ClassifierShape) -> dict[str, Any]:
    assert shape.end is not None
    return {
        "d_model": shape.model_dim,
        "d_kv": shape.model_dim // shape.num_heads,
        "d_ff": shape.ff_dim,
        "num_layers": shape.num_layers,
        "num_decoder_layers": shape.num_layers,
        "num_heads": shape.num_heads,
        "eos_token_id": shape.end,
        # As in the pretrained models.
        "decoder_start_token_id": shape.pad,
    }


def _bart_settings(shape: ClassifierShape) -> dict[str, Any]:
    assert shape.end is not None
    halves = ("encoder", "decoder")
    return {
        "d_model": shape.model_dim,
        **{f"{half}_layers": shape.num_layers for half in halves},
        **{f"{half}_attention_heads": shape.num_heads for half in halves},
        **{f"{half}_ffn_dim": shape.ff_dim for half in halves},
        "max_position_embeddings": shape.seq_len,
        "eos_token_id": shape.end,
        # As in the pretrained models.
        "decoder_start_token_id": shape.end,
        # Only for generating text; the library's defaults are ids of another vocabulary.
        "bos_token_id": None,
        "forced_eos_token_id": None,
    }


_FRESH: dict[Architecture, tuple[str, Callable[[ClassifierShape], dict[str, Any]]]] = {
    "bert": ("Bert", _bert_settings),
    "t5": ("T5", _t5_settings),
    "bart": ("Bart", _bart_settings),
}


def _set_dropout(config: Any, rate: float | None) -> None:
    """Set every dropout rate of a model's config, whatever the architecture calls it."""
    for name, value in list(vars(config).items()):
        if rate is not None and isinstance(value, int | float) and ("dropout" in name or name.endswith("pdrop")):
            setattr(config, name, rate)


def save_model_config(model: nn.Module, folder: Path) -> None:
    """Write the config.json that `shaped_classifier` reads."""
    folder.mkdir(exist_ok=True)
    model.config.save_pretrained(str(folder))  # type: ignore[union-attr,operator]


def export_classifier(model: nn.Module, tokenizer_json: Path, target: Path) -> None:
    """Write a classifier as a new folder that `transformers` loads without our code."""
    if target.exists():
        raise CheckpointError(f"{target} exists already; give a new folder")
    transformers = load_transformers()
    with publish_dir(target) as staging, _quiet(transformers):
        model.save_pretrained(str(staging))  # type: ignore[operator]
        tokenizer = transformers.PreTrainedTokenizerFast(
            tokenizer_object=Tokenizer.from_file(str(tokenizer_json)),
            model_input_names=input_names(model),
            **_special_tokens(tokenizer_json, model),
        )
        tokenizer.save_pretrained(str(staging))


def input_names(model: nn.Module) -> list[str]:
    """Return the names of a classifier's inputs."""
    names = ["input_ids", "attention_mask"]
    # Models without separate token types have one type, or no such input.
    if getattr(model.config, "type_vocab_size", 0) > 1:
        names.append("token_type_ids")
    return names


def is_encoder_decoder(model: nn.Module) -> bool:
    """Whether a classifier classifies at the end mark of every example, instead of at a fixed place."""
    return bool(model.config.is_encoder_decoder)  # type: ignore[union-attr]


def _special_tokens(tokenizer_json: Path, model: nn.Module) -> dict[str, str]:
    """Return the special tokens that the tokenizer has, by the library's names."""
    tokenizer = Tokenizer.from_file(str(tokenizer_json))
    marks = {
        "pad_token": ("[PAD]", "<pad>", "<|endoftext|>"),
        "unk_token": ("[UNK]", "<unk>"),
        "cls_token": ("[CLS]", "<s>"),
        "sep_token": ("[SEP]", "</s>"),
        "mask_token": ("[MASK]", "<mask>"),
    }
    found = {name: [mark for mark in spellings if tokenizer.token_to_id(mark) is not None] for name, spellings in marks.items()}
    named = {name: spellings[0] for name, spellings in found.items() if spellings}
    if is_encoder_decoder(model):
        named["eos_token"] = str(tokenizer.id_to_token(model.config.eos_token_id))  # type: ignore[union-attr,arg-type]
    return named


def _check_head(files: list[Path], num_labels: int) -> None:
    """Raise ConfigError when the model was trained for another number of labels."""
    for path in files:
        try:
            with safe_open(str(path), framework="pt") as file:
                for name in set(file.keys()) & set(_HEADS):
                    if (found := file.get_slice(name).get_shape()[0]) != num_labels:
                        raise ConfigError(
                            f"{path}: its last layer ({name}) has {found} labels, the task {num_labels}: "
                            "give the model before that fine-tuning, or a task with as many labels"
                        )
        except SafetensorError as problem:
            raise CheckpointError(f"{path}: cannot be read as safetensors ({problem}); fetch it again") from None


def model_facts(folder: Path) -> dict[str, Any]:
    """Return a model's config.json as plain data."""
    if not (folder / "config.json").is_file():
        raise CheckpointError(f"{folder}: no config.json, so this is not a model's folder")
    content = read_json(folder / "config.json", error=CheckpointError)
    if not isinstance(content, dict):
        raise CheckpointError(f"{folder / 'config.json'}: must be an object, found {type(content).__name__}")
    return content


def load_transformers() -> Any:
    """Import `transformers`; raise MissingExtraError where it is not installed."""
    with needing("transformers", "hf"):
        import transformers
    return transformers


@contextlib.contextmanager
def _quiet(transformers: Any) -> Iterator[None]:
    """Silence the library's warnings about new last layers, and its progress bars."""
    before = transformers.logging.get_verbosity()
    had_bar = transformers.utils.logging.is_progress_bar_enabled()
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers.logging.set_verbosity(before)
        if had_bar:
            transformers.utils.logging.enable_progress_bar()


@contextlib.contextmanager
def _seeded(seed: int) -> Iterator[None]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(stream_seed(seed, "weights"))
        yield


# By repository: the config class of `transformers`, and the differences from its defaults.
_KNOWN: dict[str, tuple[str, dict[str, Any]]] = {
    "google-bert/bert-base-uncased": ("BertConfig", {}),
    "sentence-transformers/all-MiniLM-L6-v2": (
        "BertConfig",
        {"hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 12, "intermediate_size": 1536},
    ),
    "google-t5/t5-small": ("T5Config", {}),
    "facebook/bart-base": (
        "BartConfig",
        {"d_model": 768}
        | {f"{half}_layers": 6 for half in ("encoder", "decoder")}
        | {f"{half}_attention_heads": 12 for half in ("encoder", "decoder")}
        | {f"{half}_ffn_dim": 3072 for half in ("encoder", "decoder")},
    ),
}


def classifier_skeleton(source: str, *, num_labels: int) -> nn.Module | None:
    """Return the classifier of a folder or a known hub id, without weights; None for an unknown id.

    A folder whose config.json describes no classifier raises CheckpointError; its code never runs.
    """
    transformers = load_transformers()
    repo = source.partition("@")[0]
    with torch.device("meta"):
        if Path(source).is_dir():
            return described_classifier(Path(source), num_labels=num_labels)
        if repo not in _KNOWN:
            return None
        name, settings = _KNOWN[repo]
        config = getattr(transformers, name)(**settings, num_labels=num_labels)
        model: nn.Module = transformers.AutoModelForSequenceClassification.from_config(config)
    return model
