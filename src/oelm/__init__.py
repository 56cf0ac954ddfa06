"""A laboratory for transformers whose attention does not learn. The public names, on one page."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from oelm.errors import OelmError
    from oelm.method.apply import cast, fold, freeze, hold, plan_of, restore, thaw
    from oelm.method.audit import Audit, assert_unmoved, audit
    from oelm.method.method import PRESETS, Method
    from oelm.method.sites import Site, SitePaths, attention_sites, register_sites
    from oelm.models.gpt import GPT, build_gpt
    from oelm.models.shape import GPTConfig
    from oelm.report.arms import load_runs
    from oelm.report.foreign import ArmVerdict, verdict
    from oelm.train.callback import OelmCallback
    from oelm.train.load import load_run

_HOME = {
    "OelmError": "oelm.errors",
    "cast": "oelm.method.apply",
    "fold": "oelm.method.apply",
    "freeze": "oelm.method.apply",
    "hold": "oelm.method.apply",
    "restore": "oelm.method.apply",
    "thaw": "oelm.method.apply",
    "Audit": "oelm.method.audit",
    "assert_unmoved": "oelm.method.audit",
    "audit": "oelm.method.audit",
    "PRESETS": "oelm.method.method",
    "Method": "oelm.method.method",
    "plan_of": "oelm.method.apply",
    "Site": "oelm.method.sites",
    "SitePaths": "oelm.method.sites",
    "attention_sites": "oelm.method.sites",
    "register_sites": "oelm.method.sites",
    "GPT": "oelm.models.gpt",
    "GPTConfig": "oelm.models.shape",
    "build_gpt": "oelm.models.gpt",
    "load_runs": "oelm.report.arms",
    "ArmVerdict": "oelm.report.foreign",
    "verdict": "oelm.report.foreign",
    "OelmCallback": "oelm.train.callback",
    "load_run": "oelm.train.load",
}
__all__ = [
    "GPT",
    "PRESETS",
    "ArmVerdict",
    "Audit",
    "GPTConfig",
    "Method",
    "OelmCallback",
    "OelmError",
    "Site",
    "SitePaths",
    "assert_unmoved",
    "attention_sites",
    "audit",
    "build_gpt",
    "cast",
    "fold",
    "freeze",
    "hold",
    "load_run",
    "load_runs",
    "plan_of",
    "register_sites",
    "restore",
    "thaw",
    "verdict",
]


def __getattr__(name: str) -> Any:
    # Looked up on first use: `oelm --help` must not wait for torch.
    if name not in _HOME:
        raise AttributeError(f"module 'oelm' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return __all__
