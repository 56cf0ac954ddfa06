"""Pictures show the numbers of the run directories, are whole files, and let no name break out of them."""

from __future__ import annotations

import json
import math
import struct
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest

from oelm.report.charts import learning_curves, save_chart
from oelm.report.svg import FONTS, MEASURED, PAGE, PAPER

# Short enough for the legend to show it whole.
HOSTILE_ARM = '<script>&amp; "q"'
HOSTILE = "<script>alert(1)</script> & \"q\" 'p'"


def write_run(path: Path, *, offset: float = 0.0, steps: int = 6) -> Path:
    """Write by hand the metrics of a run that evaluated after every third step."""
    path.mkdir(parents=True)
    rows: list[dict[str, Any]] = []
    for step in range(1, steps + 1):
        rows.append({"step": step, "loss": 5.0 - step / 4 + offset})
        if step % 3 == 0:
            rows.append({"step": step, "val_loss": 4.0 - step / 8 + offset})
    (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("runs")
    return {"baseline": write_run(folder / "base"), "frozen": write_run(folder / "frozen", offset=0.5)}


@pytest.fixture(scope="module")
def files(runs: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    named = {"baseline": runs["baseline"], HOSTILE_ARM: runs["frozen"]}
    chart = learning_curves(named, baseline="baseline", title=f"title {HOSTILE}", subtitle="one seed")
    return save_chart(chart, tmp_path_factory.mktemp("charts") / "new" / "curves")


def shown(chart: Any) -> list[dict[str, Any]]:
    """Return every row of data that a chart carries, wherever in its definition it stands."""
    found: list[dict[str, Any]] = []

    def collect(part: Any) -> None:
        if isinstance(part, dict):
            found.extend(part.get("values", []) if isinstance(part.get("values"), list) else [])
            part = list(part.values())
        if isinstance(part, list):
            for inner in part:
                collect(inner)

    collect(chart.to_dict())
    return found


def curves(runs: dict[str, Path]) -> list[dict[str, Any]]:
    return shown(learning_curves(runs, baseline="baseline", title="t", subtitle="s"))


def texts(svg: Path) -> list[str]:
    return ["".join(element.itertext()) for element in ET.parse(svg).getroot().iter("{http://www.w3.org/2000/svg}text")]


def test_every_evaluation_is_a_point(runs: dict[str, Path]) -> None:
    points = {(row["arm"], row["step"], row["loss"]) for row in curves(runs) if row.get("kind") == "validation"}
    assert points == {("baseline", 3, 3.625), ("baseline", 6, 3.25), ("frozen", 3, 4.125), ("frozen", 6, 3.75)}


def test_a_short_run_shows_every_step(runs: dict[str, Path]) -> None:
    line = [(row["step"], row["loss"]) for row in curves(runs) if row.get("kind") == "training" and row["arm"] == "baseline"]
    assert line == [(step, 5.0 - step / 4) for step in range(1, 7)]


def test_a_long_run_shows_means_over_at_most_fifty_stretches(tmp_path: Path) -> None:
    run = write_run(tmp_path / "long", steps=101)
    line = [(row["step"], row["loss"]) for row in curves({"baseline": run}) if row.get("kind") == "training"]
    # 101 steps in stretches of three: 33 whole ones whose mean is their middle, and one of two.
    whole = [(step, 5.0 - (step - 1) / 4) for step in range(3, 100, 3)]
    assert line == [*whole, (101, 5.0 - 100.5 / 4)]


def test_the_gap_is_the_ratio_of_perplexities_in_percent(runs: dict[str, Path]) -> None:
    gaps = [(row["arm"], row["step"], row["gap"]) for row in curves(runs) if "arm" in row and "gap" in row]
    # Losses apart by one half: exp(4.125) / exp(3.625) - 1 = expm1(0.5), with no rounding in the difference.
    assert gaps == [("frozen", 3, 100 * math.expm1(0.5)), ("frozen", 6, 100 * math.expm1(0.5))]


def test_a_gap_is_shown_only_where_the_baseline_was_evaluated(runs: dict[str, Path], tmp_path: Path) -> None:
    longer = {"baseline": runs["baseline"], "frozen": write_run(tmp_path / "longer", steps=12)}
    assert [row["step"] for row in curves(longer) if "arm" in row and "gap" in row] == [3, 6]


def test_a_run_torn_in_its_last_line_is_drawn_without_it(tmp_path: Path) -> None:
    run = write_run(tmp_path / "torn")
    path = run / "metrics.jsonl"
    path.write_bytes(path.read_bytes()[:-3])
    assert [row["step"] for row in curves({"baseline": run}) if row.get("kind") == "validation"] == [3]


def test_a_chart_becomes_an_svg_and_a_png(files: list[Path]) -> None:
    assert [path.name for path in files] == ["curves.svg", "curves.png"] and all(path.is_file() for path in files)


def test_the_svg_is_xml(files: list[Path]) -> None:
    assert ET.parse(files[0]).getroot().tag == "{http://www.w3.org/2000/svg}svg"


def test_the_svg_names_every_arm(files: list[Path]) -> None:
    assert {"baseline", HOSTILE_ARM} <= set(texts(files[0]))


def test_the_svg_carries_the_title(files: list[Path]) -> None:
    assert f"title {HOSTILE}" in texts(files[0])


def test_no_name_becomes_an_element_of_the_svg(files: list[Path]) -> None:
    assert not [element.tag for element in ET.parse(files[0]).iter() if element.tag.endswith("script")]


def test_the_png_is_a_png_of_some_size(files: list[Path]) -> None:
    content = files[1].read_bytes()
    width, height = struct.unpack(">II", content[16:24])
    assert content[:8] == b"\x89PNG\r\n\x1a\n" and width > 500 and height > 300


def test_a_dot_in_the_name_of_a_picture_is_kept(runs: dict[str, Path], tmp_path: Path) -> None:
    chart = learning_curves(runs, baseline="baseline", title="t", subtitle="s")
    assert [path.name for path in save_chart(chart, tmp_path / "gpt-02.laptop")] == ["gpt-02.laptop.svg", "gpt-02.laptop.png"]


def test_the_same_runs_give_the_same_svg(runs: dict[str, Path], tmp_path: Path) -> None:
    made = [
        save_chart(learning_curves(runs, baseline="baseline", title="t", subtitle="s"), tmp_path / name)[0].read_bytes()
        for name in ("one", "other")
    ]
    assert made[0] == made[1]


def test_many_arms_still_have_a_colour_each(tmp_path: Path) -> None:
    runs = {f"arm-{n}": write_run(tmp_path / str(n)) for n in range(7)}
    chart = learning_curves(runs, baseline="arm-0", title="t", subtitle="s").to_dict()
    scale = chart["hconcat"][0]["layer"][0]["encoding"]["color"]["scale"]
    assert scale["domain"] == list(runs) and len(set(scale["range"])) == 7


def test_texts_are_measured_by_a_font_that_every_machine_has(files: list[Path]) -> None:
    texts = [element for element in ET.parse(files[0]).iter("{http://www.w3.org/2000/svg}text")]
    assert texts and {element.get("font-family") for element in texts} == {FONTS}
    # What vl-convert brings along; its widths are Arial's, which readers have.
    assert PAPER["font"] == PAGE["font"] == MEASURED and FONTS.startswith("Arial, 'Liberation Sans'")
