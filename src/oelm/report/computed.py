"""What runs were computed with: the kind of device and the precision, as the manifest tells them and not as was asked for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from oelm.runs.records import Manifest

# What a config mostly leaves to the machine ("auto"), so that it does not tell runs apart.
COMPUTED_WITH = ("device", "precision")
# What may change a run's figures in their last digits, so that seeds of one arm should share it.
MIXED = ("source_revision", "torch", "threads")


def computed_with(config: Mapping[str, Any], manifest: Manifest) -> dict[str, str]:
    """Return device and precision of all sittings together ("cpu+cuda"), each where it is known."""
    sittings = [manifest.environment, *(sitting.get("environment") for sitting in manifest.earlier)]
    found = {}
    for name in COMPUTED_WITH:
        # A manifest that is silent leaves what was asked for, where that was not left to the machine.
        told = _texts(name, sittings) or _texts(name, [config])
        if told:
            found[name] = "+".join(sorted({_device_kind(text) for text in told} if name == "device" else told))
    return found


def sittings_with(manifest: Manifest) -> dict[str, tuple[str, ...]]:
    """Return the revisions, torch versions and thread counts of all sittings, each where it is known."""
    first = {"source_revision": manifest.source_revision, "torch": manifest.torch, "environment": manifest.environment}
    sittings = [first, *manifest.earlier]
    places = {"threads": [sitting.get("environment") for sitting in sittings]}
    return {name: tuple(sorted(_texts(name, places.get(name, sittings)))) for name in MIXED}


def _texts(name: str, places: Sequence[Any]) -> set[str]:
    texts = {place[name] for place in places if isinstance(place, Mapping) and isinstance(place.get(name), str)}
    return texts - {"", "auto"}


def _device_kind(name: str) -> str:
    """Return cpu, mps or cuda; a GPU stands in the manifest under its product's name, or as cuda:0 and the like."""
    return name if name in ("cpu", "mps") else "cuda"


def known_differences(first: Mapping[str, str], second: Mapping[str, str]) -> dict[str, tuple[str, str]]:
    """Return in what runs were computed differently; what is not known of one of them is no difference."""
    return {name: (first[name], second[name]) for name in first if name in second and first[name] != second[name]}
