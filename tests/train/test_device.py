"""Device and precision are decided by table: what is asked for, what the machine has, what comes of it."""

from __future__ import annotations

import itertools
from typing import Any, get_args

import pytest
import torch

from oelm.config import Device, Precision
from oelm.errors import ConfigError
from oelm.train.device import Capabilities, Compute, capabilities, choose_compute

REFUSED = None
MACHINES = [Capabilities(cuda, mps, bf16) for cuda, mps, bf16 in itertools.product((False, True), repeat=3)]
# By (cuda, mps): what each request for a device comes to.
DEVICES: dict[tuple[bool, bool], dict[Device, str | None]] = {
    (False, False): {"auto": "cpu", "cuda": REFUSED, "mps": REFUSED, "cpu": "cpu"},
    (False, True): {"auto": "mps", "cuda": REFUSED, "mps": "mps", "cpu": "cpu"},
    (True, False): {"auto": "cuda", "cuda": "cuda", "mps": REFUSED, "cpu": "cpu"},
    (True, True): {"auto": "cuda", "cuda": "cuda", "mps": "mps", "cpu": "cpu"},
}
# By (device, GPU computes bfloat16): what each request for a precision comes to.
PRECISIONS: dict[tuple[str, bool], dict[Precision, str | None]] = {
    ("cpu", False): {"auto": "float32", "float32": "float32", "bf16": "bf16", "fp16": REFUSED},
    ("cpu", True): {"auto": "float32", "float32": "float32", "bf16": "bf16", "fp16": REFUSED},
    ("mps", False): {"auto": "float32", "float32": "float32", "bf16": "bf16", "fp16": "fp16"},
    ("mps", True): {"auto": "float32", "float32": "float32", "bf16": "bf16", "fp16": "fp16"},
    ("cuda", False): {"auto": "fp16", "float32": "float32", "bf16": REFUSED, "fp16": "fp16"},
    ("cuda", True): {"auto": "bf16", "float32": "float32", "bf16": "bf16", "fp16": "fp16"},
}


def test_every_request_on_every_machine() -> None:
    for has, device, precision in itertools.product(MACHINES, get_args(Device), get_args(Precision)):
        case = (has, device, precision)
        expected_device = DEVICES[has.cuda, has.mps][device]
        expected_precision = PRECISIONS[expected_device, has.cuda_bf16][precision] if expected_device else REFUSED
        try:
            chosen = choose_compute(device, precision, has)
        except ConfigError:
            assert expected_device is REFUSED or expected_precision is REFUSED, case
        else:
            assert (chosen.device, chosen.precision) == (expected_device, expected_precision), case
            assert expected_device is not REFUSED and expected_precision is not REFUSED, case


NOTHING, MAC = Capabilities(cuda=False, mps=False, cuda_bf16=False), Capabilities(cuda=False, mps=True, cuda_bf16=False)
OLD_GPU = Capabilities(cuda=True, mps=False, cuda_bf16=False)


@pytest.mark.parametrize(
    ("device", "precision", "has", "words"),
    [
        ("cuda", "auto", NOTHING, "device 'cuda' is not available here; available: cpu, or 'auto'"),
        ("cuda", "auto", MAC, "device 'cuda' is not available here; available: mps, cpu, or 'auto'"),
        ("mps", "auto", OLD_GPU, "device 'mps' is not available here; available: cuda, cpu, or 'auto'"),
        ("cpu", "fp16", OLD_GPU, "precision 'fp16' needs a GPU"),
        ("auto", "bf16", OLD_GPU, "precision 'bf16' is not supported by this GPU"),
    ],
)
def test_a_refusal_says_what_there_is(device: Device, precision: Precision, has: Capabilities, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        choose_compute(device, precision, has)


@pytest.mark.parametrize("precision", ["float32", "bf16"])
def test_products_run_in_the_chosen_precision(precision: Precision) -> None:
    matrix = torch.ones(2, 2)
    with choose_compute("cpu", precision, NOTHING).autocast():
        product = matrix @ matrix
    assert product.dtype == {"float32": torch.float32, "bf16": torch.bfloat16}[precision]


def test_autocast_ends_with_its_block() -> None:
    with choose_compute("cpu", "bf16", NOTHING).autocast():
        pass
    assert not torch.is_autocast_enabled("cpu")


@pytest.mark.parametrize(("precision", "dtype"), [("float32", None), ("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_each_precision_has_its_autocast_dtype(precision: str, dtype: torch.dtype | None) -> None:
    assert Compute("cuda", precision, "asked for").autocast_dtype == dtype


@pytest.mark.parametrize(("emulates", "computes", "claims"), [(True, True, True), (True, False, False), (False, False, False)])
def test_a_gpu_that_only_emulates_bfloat16_does_not_claim_it(
    emulates: bool, computes: bool, claims: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch says yes for a T4 or a V100, which compute bfloat16 by detours, unless asked to leave emulation out."""

    def is_supported(including_emulation: bool = True) -> bool:
        return emulates if including_emulation else computes

    def is_available(*_: Any) -> bool:
        return True

    monkeypatch.setattr(torch.cuda, "is_available", is_available)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", is_supported)
    assert capabilities().cuda_bf16 is claims


def test_without_a_gpu_none_is_claimed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda *_, **__: True)
    assert (capabilities().cuda, capabilities().cuda_bf16) == (False, False)
