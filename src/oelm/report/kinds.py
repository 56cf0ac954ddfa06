"""Which class a comparison belongs to, by what learns in Q and K; classes are never mixed, not even in a count."""

from __future__ import annotations

from oelm.experiments.registry import Catalog
from oelm.method.kind import learning_later, method_kind
from oelm.report.collect import Arm
from oelm.report.findings import Pair, method_of, method_text, on_architecture
from oelm.report.words import Words

# Beyond `LITTLE` of the baseline's Q and K what learns on top is no little any more. The controls last: what as few trainable
# parameters give without any frame.
CLASSES = ("pure", "little", "partial", "much", "control")
LITTLE = 1 / 8
_QK_ROLES = ("query", "key", "query_key_value", "gain", "correction")


def class_of(pair: Pair) -> str:
    """Return the class of an arm beside its baseline: one that freezes nothing is a control."""
    kind = method_kind(pair.arm.method)
    if kind == "free":
        return "control"
    ours, whole = learning_in_qk(pair.arm), learning_in_qk(pair.baseline)
    is_much = ours is not None and whole is not None and ours > LITTLE * whole
    return "much" if kind == "little" and is_much else kind


def learning_in_qk(arm: Arm) -> int | None:
    """Return how many parameters learn on the Q/K side from the first step on; None where Q, K and V are one weight."""
    roles = arm.first.audit.by_role
    if "query_key_value" in roles:
        return None
    return sum(counts["trainable"] for role, counts in roles.items() if role in _QK_ROLES)


def change_later(arm: Arm) -> int:
    """Return by how many parameters more learn at the end of an arm's training than at its start; or fewer."""
    return learning_later(arm.method, arm.first.audit.projections)


def pair_text(pair: Pair, catalog: Catalog, words: Words) -> str:
    """Return how an arm is called beside others of its baseline: by its method, or as the control that it is."""
    if class_of(pair) != "control":
        return method_text(pair.arm, catalog, words)
    # A control has its baseline's method: what tells it apart is the end of its name.
    suffix = pair.arm.experiment.removeprefix(pair.baseline.experiment).strip("-")
    return on_architecture(pair.arm, suffix or method_of(pair.arm, catalog) or pair.arm.experiment, words)
