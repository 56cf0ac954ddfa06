"""Our GPT as a model of `transformers`, for what GPT-2 cannot hold: `import oelm.hf`, then AutoModelForCausalLM loads it.

Importing this module registers the classes; no code comes from the folder. `import oelm` alone does not: it loads neither
torch nor transformers.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from oelm.errors import OelmError, needing
from oelm.models.export import MODEL_TYPE, WEIGHTS_PREFIX
from oelm.models.gpt import GPT, INIT_STD, ShortConvolution
from oelm.models.shape import GPTConfig

with needing("transformers", "hf"):
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationMixin, PreTrainedConfig, PreTrainedModel
    from transformers import initialization as init
    from transformers.modeling_outputs import CausalLMOutput

# `transformers` builds a config without arguments to find out what differs from it.
_SHAPE = GPTConfig(vocab_size=50257, seq_len=512, model_dim=512, num_layers=6, num_heads=8, ff_dim=2048, dropout=0.1)


class OelmGPTConfig(PreTrainedConfig):
    """The fields of `oelm.GPTConfig`, under the same names, and those of every config of `transformers`."""

    model_type = MODEL_TYPE
    attribute_map = {
        "hidden_size": "model_dim",
        "num_hidden_layers": "num_layers",
        "num_attention_heads": "num_heads",
        "intermediate_size": "ff_dim",
        "max_position_embeddings": "seq_len",
    }

    def __init__(self, **settings: Any) -> None:
        for name, value in _SHAPE.model_dump().items():
            setattr(self, name, settings.pop(name, value))
        super().__init__(**settings)

    def shape(self) -> GPTConfig:
        """Return the shape of the GPT."""
        return GPTConfig(**{name: getattr(self, name) for name in GPTConfig.model_fields})


class OelmGPTForCausalLM(PreTrainedModel, GenerationMixin):
    """Our GPT behind the interface of `transformers`; its weights and logits are those of `oelm.GPT`.

    Generation reads the whole text again for every token; `oelm generate` keeps keys and values. Texts of one batch must
    begin at the same position: padding on the left raises OelmError.
    """

    config_class = OelmGPTConfig
    base_model_prefix = WEIGHTS_PREFIX
    main_input_name = "input_ids"
    _supports_sdpa = True

    def __init__(self, config: OelmGPTConfig) -> None:
        super().__init__(config)
        self.gpt = GPT(config.shape())
        self.post_init()

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        return_dict: bool | None = None,
    ) -> CausalLMOutput | tuple[Tensor, ...]:
        """Return logits for every position, and the loss where labels are given; nothing is cached."""
        if attention_mask is not None and not bool(attention_mask[:, 0].all()):
            raise OelmError("padding on the left moves a text from its positions: pad on the right, or give one text at a time")
        logits_BTV = F.linear(self.gpt(input_ids), self.gpt.head_VD)
        loss = None if labels is None else self.loss_function(logits_BTV, labels, vocab_size=self.config.vocab_size)
        output = CausalLMOutput(loss=loss, logits=logits_BTV)  # type: ignore[arg-type]
        return output.to_tuple() if return_dict is False else output

    def prepare_inputs_for_generation(  # type: ignore[override]
        self, input_ids: Tensor, attention_mask: Tensor | None = None, **_: Any
    ) -> dict[str, Tensor | None]:
        """Return the whole text: a cache that `generate` may offer is left empty."""
        return {"input_ids": input_ids, "attention_mask": attention_mask}

    def get_input_embeddings(self) -> nn.Embedding:
        return self.gpt.token_embedding

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.gpt.token_embedding = value  # type: ignore[assignment]

    def get_output_embeddings(self) -> None:
        """Return nothing: the head is the token embedding itself."""

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, ShortConvolution):
            init.normal_(module.weight, std=INIT_STD)


AutoConfig.register(MODEL_TYPE, OelmGPTConfig, exist_ok=True)
AutoModelForCausalLM.register(OelmGPTConfig, OelmGPTForCausalLM, exist_ok=True)
