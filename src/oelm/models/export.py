"""Export our GPT as a folder that `transformers` reads: GPT-2 where that can hold it, else the class of `oelm.hf`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional as F

from oelm.errors import OelmError
from oelm.files import publish_dir, write_json, write_text
from oelm.models.gpt import GPT, Attention, TransformerBlock, skeleton
from oelm.models.shape import GPTConfig

# Of a model that GPT-2 cannot hold: its type in config.json, and what its weights' names begin with.
MODEL_TYPE, WEIGHTS_PREFIX = "oelm_gpt", "gpt"


def fits_gpt2(shape: GPTConfig) -> bool:
    """Whether GPT-2 can hold a model of this shape; a short convolution has no place in it."""
    return not shape.short_conv


def export_gpt(model: GPT, tokenizer: Tokenizer, folder: Path, *, end_of_text: int, card: str) -> None:
    """Write config, weights, tokenizer and model card to a new or empty folder, completely or not at all.

    Raises OelmError when the folder is not empty, or when axes, learnt gains or corrections were not folded in.
    """
    own = dict(skeleton(model.config).named_parameters())
    if own.keys() != {name for name, _ in model.named_parameters()}:
        raise OelmError("Q and K of this model are not plain weights: call oelm.fold(model) first")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise OelmError(f"{folder}: exists and is not an empty folder; nothing is overwritten, choose a new one")
    is_gpt2 = fits_gpt2(model.config)
    tensors = _gpt2_tensors(model) if is_gpt2 else {f"{WEIGHTS_PREFIX}.{name}": each for name, each in model.named_parameters()}
    ends = {"bos_token_id": end_of_text, "eos_token_id": end_of_text}
    config = _gpt2_config(model) if is_gpt2 else _own_config(model)
    with publish_dir(folder) as staging:
        plain = {name: tensor.detach().cpu().float().clone().contiguous() for name, tensor in tensors.items()}
        save_file(plain, staging / "model.safetensors", metadata={"format": "pt"})
        write_json(staging / "config.json", {**config, **ends, "dtype": "float32"})
        generation = {"_from_model_config": True, **ends, **({} if is_gpt2 else {"use_cache": False})}
        write_json(staging / "generation_config.json", generation)
        write_text(staging / "tokenizer.json", tokenizer.to_str(pretty=True))
        write_json(staging / "tokenizer_config.json", _tokenizer_config(model, tokenizer.id_to_token(end_of_text)))
        write_text(staging / "README.md", card)


def _own_config(model: GPT) -> dict[str, Any]:
    return {
        "architectures": ["OelmGPTForCausalLM"],
        "model_type": MODEL_TYPE,
        "use_cache": False,
        **model.config.model_dump(),
    }


def _gpt2_config(model: GPT) -> dict[str, Any]:
    shape = model.config
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "vocab_size": shape.vocab_size,
        "n_positions": shape.seq_len,
        "n_embd": shape.model_dim,
        "n_layer": shape.num_layers,
        "n_head": shape.num_heads,
        "n_inner": shape.ff_dim,
        "activation_function": "gelu",
        "layer_norm_epsilon": model.final_norm.eps,
        "attn_pdrop": shape.dropout,
        "embd_pdrop": shape.dropout,
        "resid_pdrop": shape.dropout,
        "tie_word_embeddings": True,
    }


def _gpt2_tensors(model: GPT) -> dict[str, Tensor]:
    """Return the weights under GPT-2's names: Q, K and V fused and transposed, attention's missing biases as zeros."""
    tensors = {
        "transformer.wte.weight": model.token_embedding.weight,
        "transformer.wpe.weight": model.position_embedding.weight,
        "transformer.ln_f.weight": model.final_norm.weight,
        "transformer.ln_f.bias": model.final_norm.bias,
    }
    for layer, block in enumerate(model.blocks):
        assert isinstance(block, TransformerBlock)
        tensors |= {f"transformer.h.{layer}.{name}": tensor for name, tensor in _block_tensors(block).items()}
    return tensors


def _block_tensors(block: TransformerBlock) -> dict[str, Tensor]:
    attention = block.attention
    fused_ED = torch.cat([*_as_wide_as_values(attention), attention.v.weight])
    return {
        "ln_1.weight": block.attention_norm.weight,
        "ln_1.bias": block.attention_norm.bias,
        "attn.c_attn.weight": fused_ED.T,
        "attn.c_attn.bias": fused_ED.new_zeros(len(fused_ED)),
        "attn.c_proj.weight": attention.out.weight.T,
        "attn.c_proj.bias": fused_ED.new_zeros(len(attention.out.weight)),
        "ln_2.weight": block.ff_norm.weight,
        "ln_2.bias": block.ff_norm.bias,
        "mlp.c_fc.weight": block.ff_in.weight.T,
        "mlp.c_fc.bias": block.ff_in.bias,
        "mlp.c_proj.weight": block.ff_out.weight.T,
        "mlp.c_proj.bias": block.ff_out.bias,
    }


def _as_wide_as_values(attention: Attention) -> tuple[Tensor, Tensor]:
    """Return the weights of Q and K with as many rows per head as V: thin ones get rows of zeros.

    GPT-2 divides logits by the root of a head's width, so the queries are scaled up for the wider one.
    """
    q_HKD, k_HKD = (each.weight.unflatten(0, (attention.num_heads, -1)) for each in (attention.q, attention.k))
    wide, thin = attention.v.weight.shape[0] // attention.num_heads, q_HKD.shape[1]
    q_HKD = q_HKD * (wide / thin) ** 0.5 if thin < wide else q_HKD
    padded_q, padded_k = (F.pad(each, (0, 0, 0, wide - thin)).flatten(0, 1) for each in (q_HKD, k_HKD))
    return padded_q, padded_k


def _tokenizer_config(model: GPT, end_of_text: str | None) -> dict[str, Any]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": end_of_text,
        "eos_token": end_of_text,
        "unk_token": end_of_text,
        "model_max_length": model.config.seq_len,
        "clean_up_tokenization_spaces": False,
    }
