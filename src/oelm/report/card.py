"""The model card of an exported run: what it is, what was frozen, what was measured."""

from __future__ import annotations

import html
import re
from typing import Any

from oelm.config import RunConfig
from oelm.method.audit import Audit
from oelm.method.method import method_name
from oelm.stats import exp_or_inf
from oelm.text import fixed


def model_card(config: RunConfig, audit: Audit, *, data: dict[str, Any], step: int, loss: float | None) -> str:
    """Return a Hugging Face model card in Markdown; a loss that was not measured is not mentioned."""
    model = config.model
    frozen = f"{audit.frozen:,} of {audit.total:,} ({100 * audit.frozen / audit.total:.2f}%)"
    measured = ""
    if loss is not None:
        measured = f"| validation loss and perplexity at that step | {loss:.4f}, {fixed(exp_or_inf(loss), 3)} |\n"
    new_tokens = min(40, model.seq_len // 2)

    return f"""---
library_name: transformers
pipeline_tag: text-generation
tags: [gpt2, frozen-attention, oelm]
---
# GPT trained with `oelm`, method `{method_name(config.method)}`

A small GPT-2-shaped language model, trained from scratch by `oelm`, a laboratory for
transformers whose attention does not learn. A research artefact: one seed, small data, no safety tuning.

| | |
|---|---|
| shape | {model.num_layers} layers, {model.num_heads} heads, {model.model_dim} wide, context {model.seq_len} |
| parameters while training | {audit.total:,} |
| of them frozen (Q and K) | {frozen} |
{_on_top(audit)}| data | {_plain(data.get("source", "not recorded"))} (fingerprint {str(data.get("fingerprint", ""))[:12]}) |
| steps, of planned | {step:,} of {config.steps:,} |
| batch, learning rate, seed | {config.batch_size} x {model.seq_len}, {config.optim.lr:g}, {config.seed} |
{measured}
{"What learnt on top is folded into Q and K: these" if _on_top(audit) else "These"} are plain GPT-2 weights.

```python
from transformers import pipeline

write = pipeline("text-generation", model="PATH_OF_THIS_FOLDER")
print(write("Once", max_new_tokens={new_tokens})[0]["generated_text"])
```
"""


def _on_top(audit: Audit) -> str:
    """Return a row for what learnt on top of the frozen weights; nothing where nothing did."""
    counts = {role: audit.by_role[role]["trainable"] for role in ("gain", "correction") if role in audit.by_role}
    shown = ", ".join(f"{role} {count:,}" for role, count in counts.items())
    return f"| learnt on top of them | {shown} |\n" if shown else ""


def _plain(value: object) -> str:
    """Return text that cannot end a table cell or become markup: a folder's name may hold anything."""
    escaped = html.escape(str(value), quote=False)
    return re.sub(r"([\\`*_{}\[\]()#+!|])", r"\\\1", " ".join(escaped.split()))
