"""A limit in the config says which extract a run reads: prepared to it, found by it, and never another in its place."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from oelm.data.prepare import prepare
from oelm.data.request import Request
from oelm.errors import ConfigError, DataError
from oelm.process import StopFlag
from oelm.train.load import LoadedRun, load_any
from oelm.train.score import score_run
from oelm.train.watch import Silence
from tests.conftest import made_text, run_here, tiny_config
from tests.data.test_shelf import write_stories

SPEC, LIMIT = "bpe:300", 400


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache that no other test sees."""
    monkeypatch.setenv("OELM_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    """A folder of forty documents."""
    folder = tmp_path / "texts"
    folder.mkdir()
    for number in range(40):
        (folder / f"{number:02}.txt").write_text(made_text(60, seed=number))
    return folder


def story_set(tmp_path: Path, *, max_tokens: int | None) -> Path:
    files = write_stories(tmp_path / "stories", count=40)
    return Request(name="tinystories", folder=files, tokenizer=SPEC, max_tokens=max_tokens).prepare().path


def test_a_text_is_prepared_to_the_limit(cache: Path, texts: Path) -> None:
    whole, extract = (prepare(str(texts), tokenizer=SPEC, max_tokens=limit) for limit in (None, LIMIT))
    longest = max(len(whole.val), 200)
    assert extract.meta.max_tokens == LIMIT and LIMIT <= len(extract.train) < LIMIT + longest < len(whole.train)


@pytest.mark.slow
def test_the_standard_library_is_prepared_to_the_limit(cache: Path) -> None:
    extract = prepare("stdlib", tokenizer=SPEC, max_tokens=LIMIT)
    # No file of the standard library that comes early has as many tokens.
    assert extract.meta.max_tokens == LIMIT and LIMIT <= len(extract.train) < 200_000


def test_what_is_prepared_to_a_limit_is_what_the_command_prepares(cache: Path, texts: Path) -> None:
    asked = Request(text=texts, tokenizer=SPEC, max_tokens=LIMIT).prepare()
    assert prepare(str(texts), tokenizer=SPEC, max_tokens=LIMIT).path == asked.path


def test_a_named_extract_is_found_by_its_limit_beside_the_whole(cache: Path, tmp_path: Path) -> None:
    whole, extract = story_set(tmp_path, max_tokens=None), story_set(tmp_path, max_tokens=LIMIT)
    assert prepare("tinystories", tokenizer=SPEC, max_tokens=LIMIT).path == extract != whole


def test_a_named_corpus_with_no_such_extract_is_refused_and_not_fetched(cache: Path, tmp_path: Path) -> None:
    story_set(tmp_path, max_tokens=LIMIT)
    with pytest.raises(DataError, match=f"oelm data prepare tinystories --tokenizer {SPEC} --max-tokens 500$"):
        prepare("tinystories", tokenizer=SPEC, max_tokens=500)


def test_a_token_set_given_by_path_must_have_been_prepared_to_the_limit(cache: Path, tmp_path: Path) -> None:
    path = shutil.move(story_set(tmp_path, max_tokens=LIMIT), tmp_path / "moved")
    assert prepare(str(path), tokenizer=SPEC, max_tokens=LIMIT).path == prepare(str(path), tokenizer=SPEC).path
    with pytest.raises(DataError, match=f"with a limit of {LIMIT} tokens, the config has data.max_tokens 500"):
        prepare(str(path), tokenizer=SPEC, max_tokens=500)


def test_a_run_reads_the_extract_that_its_config_names_and_is_scored_on_it(cache: Path, tmp_path: Path) -> None:
    story_set(tmp_path, max_tokens=None)
    extract = prepare(str(story_set(tmp_path, max_tokens=LIMIT)), tokenizer=SPEC)
    config = tiny_config(Path("tinystories"), data__max_tokens=LIMIT, steps=2, eval_every=2, save_every=2)
    run_here(config, tmp_path / "run")
    loaded = load_any(tmp_path / "run")
    assert isinstance(loaded, LoadedRun) and loaded.checkpoint.saved.data_fingerprint == extract.meta.fingerprint
    _, scored = score_run(loaded, data=None, text=None, split="val", batch_size=4, stop=StopFlag(), watch=Silence())
    assert scored is not None and len(scored.documents) == extract.meta.splits["val"].documents


@pytest.mark.parametrize("limit", [0, -1, 1.5])
def test_a_limit_that_is_no_number_of_tokens_is_refused(limit: float, text_file: Path) -> None:
    with pytest.raises(ConfigError, match="data.max_tokens"):
        tiny_config(text_file, data__max_tokens=limit)


def test_a_config_without_a_limit_takes_all(text_file: Path) -> None:
    assert tiny_config(text_file).data.max_tokens is None
