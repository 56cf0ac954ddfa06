"""Whatever is put in: it is read, or refused with an error of ours, and never anything else happens.

Bounded in number and free of chance: the same examples everywhere. The shapes of results (frames orthonormal, epochs
complete, plans that survive JSON) have properties of their own beside the code they are about.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from oelm.budget import budget_settings
from oelm.config import differences, parse_any, parse_config, parse_override, with_overrides
from oelm.data.order import BucketOrder, WindowOrder
from oelm.data.prepare import prepare
from oelm.data.tokens import open_tokens
from oelm.errors import ConfigError, DataError, MethodError, OelmError
from oelm.experiments.catalog import build_catalog, check_name, parse_yaml
from oelm.experiments.portable import INVENTORY, archive_runs, check_folder
from oelm.method.frames import sample_frames
from oelm.method.method import Method, resolve_method
from oelm.runs.find import scan
from oelm.text import is_device, is_safe
from tests.report.synthetic import Fate, write_run

pytestmark = pytest.mark.faults
bounded = settings(
    max_examples=100,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
KEYS = st.sampled_from(
    "model data optim schedule method steps seed batch_size micro_batch_size eval_every save_every keep_checkpoints examples "
    "epochs extended_at init_from device precision init freeze layers gain thaw std start end order lr seq_len".split()
) | st.text(max_size=6)
LEAVES = (
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats()
    | st.text(max_size=12)
    | st.sampled_from(["orthogonal", "native", "all", "first 3", "last 0", "q", "k", "auto", "__import__('os')"])
)
JSONS = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(KEYS, inner, max_size=5), max_leaves=12
)


@given(JSONS)
@example({"steps": float("nan")})
@example({"method": {"init": "os.system"}})
@example({"examples": {}, "model": 3})
@example({"model": {"seq_len": 10**400}})
@bounded
def test_any_data_is_a_config_or_refused_with_its_place(data: Any) -> None:
    with_place = pytest.raises(ConfigError, match="^here: ")
    try:
        config = parse_any(data, where="here")
    except ConfigError:
        with with_place:
            parse_any(data, where="here")
    else:
        assert parse_any(json.loads(json.dumps(config.as_dict())), where="here") == config


@given(st.dictionaries(KEYS, JSONS, max_size=3))
@bounded
def test_a_config_with_anything_changed_is_one_or_refused(changes: dict[str, Any]) -> None:
    base = with_overrides(budget_settings("smoke"), {"data.source": "x.txt", "method": "oelm_freeze"})
    try:
        config = parse_config({**base, **changes}, where="here")
    except OelmError as problem:
        assert isinstance(problem, ConfigError)
    else:
        assert differences(config, config) == []


@given(st.text(max_size=20))
@example("a..b=1")
@example("a=" + "[" * 5000)
@bounded
def test_any_override_is_read_or_refused(text: str) -> None:
    try:
        key, _ = parse_override(text)
    except ConfigError as problem:
        assert "key=value" in str(problem)
    else:
        assert key and all(key.split("."))


ENTRY_KEYS = st.sampled_from(
    "kind data method baseline groups criterion settings at extends title note seeds reported".split()
) | st.text(max_size=6)
ENTRIES = st.dictionaries(
    st.sampled_from(["mine", "mine-2", "GPT-01", "all", "con", "../x"]) | st.text(max_size=5),
    st.dictionaries(ENTRY_KEYS, JSONS, max_size=4).map(lambda entry: {"kind": "language_model", "data": "stdlib"} | entry)
    | JSONS,
    max_size=3,
)


@given(ENTRIES)
@bounded
def test_any_catalog_is_read_or_refused_with_its_file(entries: dict[str, Any]) -> None:
    try:
        text = json.dumps(entries, allow_nan=False)
    except ValueError:
        text = str(entries)
    try:
        catalog = build_catalog([parse_yaml(text, where="own.yaml")])
    except ConfigError as problem:
        assert str(problem).startswith("own.yaml")
    else:
        assert set(catalog.experiments) == set(entries)


@given(st.text(max_size=70) | st.text(st.sampled_from("aZ0._-/\\ \0\n"), max_size=70))
@example("com1.x")
@bounded
def test_a_name_is_allowed_exactly_when_it_is_safe_everywhere(name: str) -> None:
    try:
        check_name(name, where="own.yaml:1")
    except ConfigError:
        return
    assert is_safe(name) and not is_device(name) and (Path("/root") / name).parent == Path("/root") and name.isascii()


@given(st.integers(-2, 5), st.integers(-2, 9), st.integers(-2, 9))
@bounded
def test_frames_of_any_shape_are_orthonormal_or_refused(num_heads: int, head_dim: int, model_dim: int) -> None:
    try:
        frames_HKD = sample_frames(num_heads, head_dim, model_dim, generator=torch.Generator().manual_seed(0))
    except MethodError:
        assert head_dim > model_dim or min(num_heads, head_dim, model_dim) < 1
    else:
        gram_HKK = (frames_HKD.double() @ frames_HKD.double().mT) - torch.eye(head_dim, dtype=torch.float64)
        assert frames_HKD.shape == (num_heads, head_dim, model_dim) and gram_HKK.abs().max() < 1e-6


@given(st.dictionaries(KEYS, LEAVES | st.lists(LEAVES, max_size=3) | st.dictionaries(KEYS, LEAVES, max_size=3), max_size=4))
@bounded
def test_any_data_is_a_method_or_refused(data: dict[str, Any]) -> None:
    base = with_overrides(budget_settings("smoke"), {"data.source": "x.txt"})
    try:
        method = parse_config({**base, "method": data}, where="here").method
    except ConfigError:
        return
    assert Method.model_validate_json(method.model_dump_json()) == method


@given(st.text(max_size=20))
@bounded
def test_any_word_is_a_preset_or_refused_with_those_there_are(word: str) -> None:
    try:
        resolve_method(word)
    except MethodError as problem:
        assert "oelm_freeze" in str(problem)


@given(st.integers(0, 200), st.integers(1, 20), st.integers(1, 9), st.integers(0, 2**63 - 1), st.integers(0, 400))
@bounded
def test_any_batch_is_inside_its_tokens_and_the_same_twice(
    num_tokens: int, seq_len: int, batch_size: int, seed: int, batch: int
) -> None:
    try:
        order = WindowOrder(num_tokens, seq_len, batch_size, seed)
    except DataError:
        assert num_tokens < seq_len + 1
        return
    starts = order.starts(batch)
    assert starts.min() >= 0 and starts.max() + seq_len + 1 <= num_tokens
    assert (starts == WindowOrder(num_tokens, seq_len, batch_size, seed).starts(batch)).all()


@given(st.lists(st.integers(1, 30), max_size=40), st.integers(1, 9), st.integers(0, 2**63 - 1))
@bounded
def test_any_epoch_of_examples_has_each_once(lengths: list[int], batch_size: int, seed: int) -> None:
    try:
        order = BucketOrder(np.array(lengths, dtype=np.int64), batch_size, seed)
    except DataError:
        assert not lengths
        return
    for epoch in (0, 3):
        first = epoch * order.batches_per_epoch
        seen = np.concatenate([order.examples(first + n) for n in range(order.batches_per_epoch)])
        assert sorted(seen.tolist()) == list(range(len(lengths)))


@pytest.fixture(scope="module")
def tokens(text_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(shutil.copytree(prepare(str(text_file), tokenizer="bpe:300").path, tmp_path_factory.mktemp("tokens") / "set"))


SPOILS = st.tuples(
    st.sampled_from(["meta.json", "train.bin", "val.bin", "tokenizer.json"]),
    st.sampled_from(["cut", "flip", "insert", "replace"]),
    st.floats(0, 1),
    st.binary(min_size=1, max_size=8),
)


def spoiled(content: bytes, how: str, where: float, extra: bytes) -> bytes:
    place = min(int(where * len(content)), len(content) - 1)
    match how:
        case "cut":
            return content[:place]
        case "flip":
            return content[:place] + bytes([content[place] ^ (extra[0] or 1)]) + content[place + 1 :]
        case "insert":
            return content[:place] + extra + content[place:]
    return extra * (len(content) // len(extra) + 1)


@given(SPOILS)
@bounded
def test_any_damage_to_a_token_set_is_refused_by_file_or_changes_no_meaning(
    tokens: Path, spoil: tuple[str, str, float, bytes]
) -> None:
    name, how, where, extra = spoil
    whole, meaning = (tokens / name).read_bytes(), open_tokens(tokens).meta.fingerprint
    (tokens / name).write_bytes(spoiled(whole, how, where, extra))
    try:
        # A letter of the set's own title may change; its tokens and what they mean may not.
        assert open_tokens(tokens).meta.fingerprint == meaning and name == "meta.json"
    except DataError as problem:
        assert str(tokens) in str(problem)
    finally:
        (tokens / name).write_bytes(whole)


@pytest.fixture(scope="module")
def portable(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("portable")
    for seed in (0, 1):
        write_run(folder / "outputs", "GPT-02", seed, Fate(ppl=20.0 + seed, test=21.0))
    archive_runs(folder / "folder", scan(folder / "outputs"), weights=False)
    return folder / "folder"


@given(SPOILS, st.integers(0, 99))
@bounded
def test_any_damage_to_a_portable_folder_is_found_or_changes_no_meaning(
    portable: Path, spoil: tuple[str, str, float, bytes], number: int
) -> None:
    whole_inventory, problems = check_folder(portable)
    assert problems == []
    # The inventory as often as all files together: it is what the others are checked by.
    names = sorted(whole_inventory.files)
    path = portable / (INVENTORY if number % 2 else names[number // 2 % len(names)])
    whole = path.read_bytes()
    path.write_bytes(spoiled(whole, *spoil[1:]))
    try:
        inventory, problems = check_folder(portable)
        assert problems or (inventory == whole_inventory and path.name == INVENTORY) or path.read_bytes() == whole
    except DataError as problem:
        assert str(path) in str(problem) and path.name == INVENTORY
    finally:
        path.write_bytes(whole)
