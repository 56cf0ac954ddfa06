"""A user's own catalog: found, seen from its own folder, beside the built-in one and never instead of it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from oelm.budget import BUDGETS
from oelm.cli.app import app
from oelm.config import flatten
from oelm.errors import ConfigError
from oelm.experiments.catalog import load_catalog
from oelm.experiments.plan import make_config

DOCS = Path(__file__).parents[2] / "docs" / "experiments.md"


def entry(**changes: Any) -> str:
    """Return an entry called `mine`, the third line of its file, with keys put in or replaced."""
    return "\n\nmine: " + json.dumps({"kind": "language_model", "data": "stdlib"} | changes)


def test_a_file_in_the_working_folder_is_picked_up_and_one_that_is_named_instead_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert "mine" not in load_catalog().experiments
    (tmp_path / "experiments.yaml").write_text(entry())
    (tmp_path / "other.yaml").write_text("other: {kind: classifier, data: sst2}")
    found, named = load_catalog().experiments, load_catalog(Path("other.yaml")).experiments
    assert list(found)[-1] == "mine" and found["mine"].where == "experiments.yaml:3"
    assert list(named)[-1] == "other" and list(named)[:-1] == list(found)[:-1]


def test_a_user_s_entry_extends_a_built_in_one_and_cannot_replace_it(tmp_path: Path) -> None:
    own = tmp_path / "own.yaml"
    own.write_text("my-frozen: {extends: GPT-02, groups: [mine], method: {init: orthogonal, freeze: [q, k], layers: last 2}}")
    mine = load_catalog(own).get("my-frozen")
    assert (mine.baseline, mine.data, mine.groups, mine.reported) == ("GPT-01", "tinystories", ("mine",), None)
    for name in ("GPT-02", "gpt-02", "study"):
        own.write_text(f"\n{name}: {{extends: GPT-01}}")
        with pytest.raises(ConfigError, match=rf"^{own}:2: '{name}' is (taken|also the name of a group)"):
            load_catalog(own)


def test_a_missing_catalog_is_a_mistake_of_the_command() -> None:
    result = CliRunner().invoke(app, ["list", "--catalog", "nowhere.yaml"])
    assert result.exit_code == 2 and "nowhere.yaml: cannot be read" in result.stderr


@pytest.mark.parametrize("written", ["texts", "texts/", "./texts", "texts/a.txt", "deep/../texts"])
def test_data_of_a_user_s_file_is_seen_from_that_file(written: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, elsewhere = tmp_path / "project", tmp_path / "elsewhere"
    for made in (folder / "texts", folder / "deep", elsewhere / "texts"):
        made.mkdir(parents=True)
    (folder / "texts" / "a.txt").write_text("text")
    (folder / "own.yaml").write_text(entry(data=written) + "\nchild: {extends: mine}")
    monkeypatch.chdir(elsewhere)
    for own in (folder / "own.yaml", Path("../project/own.yaml")):
        catalog = load_catalog(own)
        found = [Path(catalog.get(name).data) for name in ("mine", "child")]
        assert all(path.is_absolute() and path.resolve() == (folder / written).resolve() for path in found)


def test_a_data_set_s_name_stays_one_beside_a_folder_of_that_name(tmp_path: Path) -> None:
    for name in ("tinystories", "stdlib"):
        (tmp_path / name).mkdir()
        (tmp_path / "own.yaml").write_text(entry(data=name))
        assert load_catalog(tmp_path / "own.yaml").get("mine").data == name


def test_tables_and_models_of_a_user_s_file_are_seen_from_that_file(tmp_path: Path) -> None:
    for name in ("dev.csv", "train.csv", "bert"):
        (tmp_path / name).write_text("")
    settings = {"examples.dev": "dev.csv", "examples": {"columns": "text=a,label=b"}, "model.source": "bert"}
    (tmp_path / "own.yaml").write_text(
        entry(kind="classifier", data="train.csv", settings=settings, at={"smoke": {"model.source": "org/x"}})
    )
    mine = load_catalog(tmp_path / "own.yaml").get("mine")
    assert mine.data == str(tmp_path / "train.csv")
    assert flatten(mine.settings) == {
        "examples.dev": str(tmp_path / "dev.csv"),
        "examples.columns": "text=a,label=b",
        "model.source": str(tmp_path / "bert"),
    }
    assert mine.at["smoke"] == {"model.source": "org/x"}


def test_the_list_has_a_line_an_arm_that_fits_a_terminal_of_80_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    shown = CliRunner().invoke(app, ["list"]).stdout.splitlines()
    assert max(map(len, shown)) <= 80
    assert sum(line.startswith("slices-q.") for line in shown) == 1 and any(line.startswith("slices-q.SET ") for line in shown)
    assert any(line.startswith("GPT-01 ") and line.endswith("(reported: PPL 4.27)") for line in shown)
    assert "SET: tinystories, wikitext2, wikipedia, openwebtext, stdlib, site-packages" in shown


def test_an_arm_on_one_data_set_is_listed_by_its_own_name() -> None:
    shown = CliRunner().invoke(app, ["list", "slices-q.stdlib"]).stdout
    assert shown.startswith("slices-q.stdlib  stdlib: queries are slices, keys learn") and "SET" not in shown


def test_titles_can_neither_drive_a_terminal_nor_change_on_their_way(tmp_path: Path) -> None:
    title = "\x1b[31m red :smile: [bold] \x9b31m"
    (tmp_path / "own.yaml").write_text(entry(title=title))
    arguments = ["mine", "--catalog", str(tmp_path / "own.yaml")]
    assert load_catalog(tmp_path / "own.yaml").get("mine").title == title
    shown = CliRunner().invoke(app, ["list", *arguments]).stdout
    assert "\x1b" not in shown and "\x9b" not in shown and "red" in shown


def test_the_example_of_the_docs_is_a_catalog_at_every_budget(tmp_path: Path) -> None:
    example, *_ = re.findall(r"```yaml\n(.*?)```", DOCS.read_text(encoding="utf-8"), flags=re.DOTALL)
    (tmp_path / "texts").mkdir()
    (tmp_path / "own.yaml").write_text(example, encoding="utf-8")
    catalog = load_catalog(tmp_path / "own.yaml")
    assert list(catalog.experiments)[-3:] == ["my-frozen", "my-text", "my-text-baseline"]
    for name in ("my-frozen", "my-text", "my-text-baseline"):
        for budget in BUDGETS:
            assert make_config(catalog.get(name), budget, seed=0).seed == 0
    assert catalog.get("my-text-baseline").data == str(tmp_path / "texts")
    assert make_config(catalog.get("my-text-baseline"), "laptop", seed=0).steps == 4000
