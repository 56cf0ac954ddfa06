"""What the arms of a fair comparison may differ in; known without loading torch."""

from __future__ import annotations

# The shape is that of the lean and thin controls. Other weights to start from, another dropout or another context are not.
_SHAPE = {"model.model_dim", "model.num_layers", "model.num_heads", "model.ff_dim", "model.qk_dim"}
# Fields of a method that say how fast an arm learns: a gain by these is none of freezing.
_PACE = {"method.layer_lr_decay", "method.warmup_steps"}


def may_differ(key: str) -> bool:
    """Whether arms may differ in a setting, by its dotted path: the method is the question, its pace is not."""
    return key in _SHAPE or (key.startswith("method.") and key not in _PACE)
