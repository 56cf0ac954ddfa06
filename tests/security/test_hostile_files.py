"""Hostile pickles and hostile JSON in every place where a file is read: never run, never loaded, told by name."""

from __future__ import annotations

import json
import pickle
import shutil
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from oelm.data.prepare import prepare
from oelm.errors import CheckpointError, OelmError
from oelm.models.hub import pretrained_classifier, weights_sha256
from oelm.runs.layout import SAVED_MANIFEST, SAVED_MODEL, SAVED_OPTIMIZER, SAVED_STATE
from oelm.train.checkpoint import Checkpoints, _manifest_text, load_tensors, open_checkpoint
from oelm.train.load import load_run
from tests.conftest import run_here, tiny_config
from tests.faults.tally import Tally
from tests.models.test_hub import Hostile

MIB = 2**20


@pytest.fixture(scope="module")
def finished(text_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("finished") / "run"
    run_here(tiny_config(text_file), out)
    return out


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / "run"))


def newest(run: Path) -> Path:
    return sorted(run.glob("checkpoints/step-*"))[-1]


def made_whole(folder: Path) -> None:
    """Let the manifest agree with the files: whoever can write a checkpoint can do that too."""
    (folder / SAVED_MANIFEST).write_text(_manifest_text(folder))


def _open_model(run: Path) -> None:
    load_run(run, which="latest")


def _open_optimizer(run: Path) -> None:
    load_tensors(newest(run) / SAVED_OPTIMIZER)


def _open_tokenizer(run: Path) -> None:
    load_run(run, which="latest").tokenizer()


# Every file of a run that somebody may have replaced, and what reads it.
PLACES: dict[str, tuple[Callable[[Path], Path], Callable[[Path], None]]] = {
    "the model": (lambda run: newest(run) / SAVED_MODEL, _open_model),
    "the optimizer": (lambda run: newest(run) / SAVED_OPTIMIZER, _open_optimizer),
    "the state": (lambda run: newest(run) / SAVED_STATE, _open_model),
    "the manifest": (lambda run: newest(run) / SAVED_MANIFEST, _open_model),
    "the config": (lambda run: run / "config.json", _open_model),
    "the pointer": (lambda run: run / "latest.json", _open_model),
    "the tokenizer": (lambda run: run / "tokenizer.json", _open_tokenizer),
}


@pytest.mark.parametrize("place", PLACES)
def test_a_hostile_pickle_in_a_run_is_never_unpickled(place: str, run: Path, tmp_path: Path, tally: Tally) -> None:
    find, read = PLACES[place]
    path, mark = find(run), tmp_path / "mark"
    path.write_bytes(pickle.dumps(Hostile(mark)))
    if place in ("the model", "the optimizer", "the state"):
        made_whole(newest(run))
    with pytest.raises(OelmError) as told:
        read(run)
    assert path.name in str(told.value) and not mark.exists()
    tally("S1", "hostile pickles in place of a run's files", held=1, of=1)


@pytest.mark.parametrize("name", ["text.pkl", "text.pt", "text.bin", "text.npy", "text.txt", ".metadata"])
def test_a_hostile_pickle_as_data_is_never_unpickled(name: str, tmp_path: Path, tally: Tally) -> None:
    mark = tmp_path / "mark"
    (tmp_path / "data").mkdir()
    content = pickle.dumps(Hostile(mark))
    # An array of objects in NumPy's own format is a pickle behind a header.
    header = b"\x93NUMPY\x01\x00F\x00{'descr': '|O', 'fortran_order': False, 'shape': (1,), }".ljust(79) + b"\n"
    (tmp_path / "data" / name).write_bytes(header + content if name.endswith(".npy") else content)
    for source in (tmp_path / "data" / name, tmp_path / "data"):
        with pytest.raises(OelmError) as told:
            prepare(str(source), tokenizer="bpe:300")
        assert str(tmp_path / "data") in str(told.value)
    assert not mark.exists()
    tally("S1", "hostile pickles as data", held=1, of=1)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "pytorch_model.bin.index.json", ".metadata", "__0_0.distcp"])
def test_a_model_that_is_only_a_pickle_is_refused_with_the_safe_route(name: str, tmp_path: Path, tally: Tally) -> None:
    mark, folder = tmp_path / "mark", tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "bert", "hidden_size": 8}))
    (folder / name).write_bytes(pickle.dumps(Hostile(mark)))
    for read in (weights_sha256, lambda path: pretrained_classifier(path, num_labels=2, seed=0)):
        with pytest.raises(CheckpointError) as told:
            read(folder)
        assert str(folder) in str(told.value) and "safetensors" in str(told.value)
    assert not mark.exists()
    tally("S1", "models that are only a pickle", held=1, of=1)


DEEP = b'{"state": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"
STATES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "a huge number": lambda state: json.dumps(state).replace('"step": 12', '"step": 1' + "0" * 5000).encode(),
    "a number below zero": lambda state: state | {"state": state["state"] | {"step": -1}},
    "a step in words": lambda state: state | {"state": state["state"] | {"step": "12"}},
    "a step with a fraction": lambda state: state | {"state": state["state"] | {"step": 12.5}},
    "NaN": lambda state: json.dumps(state | {"clock": {"step": float("nan")}}).encode(),
    "a missing key": lambda state: {key: value for key, value in state.items() if key != "frozen"},
    "an extra key": lambda state: state | {"__reduce__": "os.system"},
    "a list": lambda state: [state],
    "null": lambda state: None,
    "deep nesting": lambda state: DEEP,
    "bytes that are no text": lambda state: b"\xff\xfe\x00",
    "nothing": lambda state: b"",
}


@pytest.mark.parametrize("kind", STATES)
def test_a_state_of_another_kind_is_refused_by_file(kind: str, run: Path, tally: Tally) -> None:
    folder = newest(run)
    changed = STATES[kind](json.loads((folder / SAVED_STATE).read_text()))
    (folder / SAVED_STATE).write_bytes(changed if isinstance(changed, bytes) else json.dumps(changed).encode())
    made_whole(folder)
    with pytest.raises(CheckpointError, match=SAVED_STATE):
        open_checkpoint(folder)
    fallback = Checkpoints(run, keep=2).newest(exact_step=None)
    assert fallback is not None and fallback.path != folder
    tally("S6", "states of another kind", held=1, of=1)


def _header(**tensors: Any) -> bytes:
    text = json.dumps(tensors).encode()
    return len(text).to_bytes(8, "little") + text


HEADERS = {
    "2^40 elements": _header(x={"dtype": "F32", "shape": [2**40], "data_offsets": [0, 2**42]}),
    "a product that overflows": _header(x={"dtype": "F32", "shape": [2**32, 2**32, 4], "data_offsets": [0, 0]}),
    "offsets beyond the end": _header(x={"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}),
    "offsets backwards": _header(x={"dtype": "F32", "shape": [4], "data_offsets": [16, 0]}) + bytes(16),
    "a header longer than the file": (2**62).to_bytes(8, "little") + b"{}",
    "an unknown type": _header(x={"dtype": "O", "shape": [1], "data_offsets": [0, 8]}) + bytes(8),
    "deep nesting": (200_000).to_bytes(8, "little") + b"[" * 100_000 + b"]" * 100_000,
    "no header": b"",
}


@pytest.mark.parametrize("kind", HEADERS)
def test_a_tensor_file_that_promises_the_moon_is_refused_in_little_memory(kind: str, run: Path, tally: Tally) -> None:
    folder = newest(run)
    (folder / SAVED_MODEL).write_bytes(HEADERS[kind])
    made_whole(folder)
    tracemalloc.start()
    with pytest.raises(CheckpointError, match=SAVED_MODEL):
        load_run(run, which="latest")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 64 * MIB
    tally("S6", "tensor files with a hostile header", held=1, of=1)
