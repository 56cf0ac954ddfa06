"""A catalog's file is plain data: whatever else YAML can say is refused, with its line."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from oelm.errors import ConfigError
from oelm.experiments.catalog import FAST_LOADER, MAX_BYTES, parse_yaml, read_yaml
from tests.cases import case

CATALOG = Path(__file__).parents[2] / "src" / "oelm" / "experiments" / "catalog"
# What is printed, and controls, which JSON writes as escapes; YAML would fold separators of lines.
_TEXTS = st.text(st.characters(categories=("L", "N", "P", "S", "Zs"), include_characters="\n\t\x00\x1b"), max_size=20)
_LEAVES = st.none() | st.booleans() | st.integers(-(10**28), 10**28) | st.floats(allow_nan=False, allow_infinity=False) | _TEXTS
_DATA = st.dictionaries(
    _TEXTS,
    st.recursive(_LEAVES, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(_TEXTS, inner, max_size=4), max_leaves=8),
    max_size=5,
)
# What YAML gives a meaning to, so that random text gets past its first character.
_WORDS = "a b [ ] { } , &x *x ! !! | > \" ' \\ \\x \\U0011 --- ... # << = 1e3 0x ~ yes 1:2 2001-01-01 !< ` @ % %YAML".split()
_PIECES = st.sampled_from(
    [*_WORDS, " ", "  ", ": ", "- ", "? ", "\n", "\t", "\ufeff", "\x85", "\x00", "\x1b", "\u2028", "\ud800", "\U0001f600"]
)


def value_of(text: str) -> Any:
    return parse_yaml(f"key: {text}", where="own.yaml").data["key"]


def test_scalars_mean_what_people_write() -> None:
    cases: list[tuple[str, object]] = [
        ("1e3", 1000.0),
        ("1e-3", 0.001),
        ("3E+4", 30000.0),
        ("2.5e3", 2500.0),
        ("-1.e3", -1000.0),
        (".5e3", 500.0),
        ("1_000", 1000),
        ("+5", 5),
        ("-0.5", -0.5),
        ("true", True),
        ("False", False),
        ("null", None),
        ("~", None),
        ("", None),
        ("y", "y"),
        ("2024-01-31", "2024-01-31"),
        ("last 2", "last 2"),
        ("3e-4x", "3e-4x"),
    ]
    for text, value in cases:
        with case(text, value):
            found = value_of(text)
            assert found == value and type(found) is type(value)


def test_quoted_scalars_stay_text() -> None:
    for text in ("1e3", "yes", "null", "0x10", ".nan", "12"):
        with case(text):
            assert value_of(f'"{text}"') == text == value_of(f"'{text}'")


def test_digits_of_other_scripts_are_text() -> None:
    assert value_of("\u0661e\u0663") == "\u0661e\u0663"


def test_numbers_that_are_not_finite_decimals_are_refused() -> None:
    cases: list[str] = [".nan", ".NaN", ".inf", "-.inf", "1e999", "-1e999", "0x10", "010", "0b1", "1:30", "9" * 40, "9" * 9000]
    for text in cases:
        with case(text):
            with pytest.raises(
                ConfigError, match=r"^own\.yaml:1: .{1,40} is not a finite decimal number; quote it if it is text$"
            ):
                value_of(text)


def test_loose_booleans_are_refused_as_value_and_as_key() -> None:
    for text in ("yes", "no", "Yes", "NO", "on", "OFF"):
        with case(text):
            for place in (f"key: {text}", f"{text}: 1"):
                with pytest.raises(ConfigError, match=rf"^own\.yaml:1: write true or false, or quote the word \({text}\)$"):
                    parse_yaml(place, where="own.yaml")


@pytest.mark.parametrize(
    "tagged",
    [
        "a: !!python/object/apply:os.system [touch HERE]",
        "a: !!python/name:os.system",
        "!!python/object/apply:os.system {args: touch HERE}",
        "!!python/object:oelm.errors.OelmError {a: 1}",
        "!!python/tuple [a, b]",
        "a: !!binary aGVsbG8=",
        "a: !!set {b, c}",
        "a: !!bool maybe",
        "a: !!str 1e3",
        "a: !mine 1",
        "a: ! 1",
        "a: !<tag:yaml.org,2002:int> 1",
        "!!str a: 1",
        "a: !" + "x" * 5000 + " 1",
    ],
)
def test_tags_are_refused_and_run_nothing(tagged: str, tmp_path: Path) -> None:
    here = tmp_path / "touched"
    with pytest.raises(ConfigError, match=r"^own\.yaml:1: the tag \S{1,60} is not plain data"):
        parse_yaml(tagged.replace("HERE", str(here)), where="own.yaml")
    assert not here.exists()


def test_an_alias_is_refused_with_its_line_and_what_to_use_instead() -> None:
    with pytest.raises(ConfigError, match=r"^own\.yaml:2: aliases \(\*x\) are not supported; use extends:$"):
        parse_yaml("a: &x {b: 1}\nc: *x\n", where="own.yaml")


def test_an_alias_bomb_is_refused_at_its_first_alias() -> None:
    bomb = "a0: &a0 [lol]\n" + "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 20))
    with pytest.raises(ConfigError, match=r"^own\.yaml:2: aliases"):
        parse_yaml(bomb, where="own.yaml")


def test_an_alias_of_itself_is_refused() -> None:
    with pytest.raises(ConfigError, match="aliases"):
        parse_yaml("a: &a [*a]", where="own.yaml")


@pytest.mark.parametrize("text", ["a:\n  <<: {b: 1}", "a:\n  b: ="])
def test_yaml_s_own_words_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"^own\.yaml:2: (<<|=) has a special meaning in YAML"):
        parse_yaml(text, where="own.yaml")


def test_a_key_that_stands_twice_is_refused_at_its_second_line() -> None:
    with pytest.raises(ConfigError, match=r"^own\.yaml:4: 'lr' is given twice$"):
        parse_yaml("a:\n  lr: 1\n  steps: 2\n  lr: 3\n", where="own.yaml")
    assert parse_yaml("a: {lr: 1}\nb: {lr: 1}", where="own.yaml").data == {"a": {"lr": 1}, "b": {"lr": 1}}


def test_a_key_that_is_not_text_is_refused() -> None:
    for key in ("1", "1.5", "~", "true", "[a]", "{a: 1}"):
        with case(key):
            with pytest.raises(ConfigError, match=r"^own\.yaml:2: the key .* must be text; write it in quotes$"):
                parse_yaml(f"a: 1\n? {key}\n: 2\n", where="own.yaml")


def test_a_file_that_is_no_mapping_is_refused() -> None:
    for text in ("hello", "- a\n- b", "5", "null", "[]"):
        with case(text):
            with pytest.raises(ConfigError, match=r"^own\.yaml:1: must be a mapping \(NAME: \.\.\.\) at the top$"):
                parse_yaml(text, where="own.yaml")


@pytest.mark.parametrize("text", ["", "\n\n", "# only a remark\n"])
def test_an_empty_file_is_an_empty_catalog(text: str) -> None:
    assert parse_yaml(text, where="own.yaml").data == {}


def test_a_second_document_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^own\.yaml:2: not YAML"):
        parse_yaml("a: 1\n---\nb: 2\n", where="own.yaml")


def test_what_is_broken_is_refused_with_its_line() -> None:
    cases: list[tuple[str, int]] = [
        ("a: 1\nb: [1, }\n", 2),
        ("a: 1\n\tb: 2\n", 2),
        ("a: 1\nb: \x00\n", 2),
        ("a: 1\nb: \x1b[31m\n", 2),
        ('a: 1\nb: "\\U00110000"\n', 2),
        ('a: 1\nb: "\\Uffffffff"\n', 2),
        ('a: 1\nb: "\\ud83d"\n', 2),
        ('a: 1\n"\\ud83d": 2\n', 2),
        ("%YAML 1." + "9" * 5000 + "\n---\na: 1\n", 1),
    ]
    for text, line in cases:
        with case(text, line):
            with pytest.raises(ConfigError, match=rf"^own\.yaml:{line}: "):
                parse_yaml(text, where="own.yaml")


def test_deep_nesting_is_refused_at_once() -> None:
    for opening in ("[", "{", "- ", "? ", "[a: ", "a: ["):
        with case(opening):
            began = time.monotonic()
            with pytest.raises(ConfigError, match=r"^own\.yaml:1: (more than 20 levels deep|not YAML)"):
                parse_yaml(opening * (MAX_BYTES // len(opening) // 4), where="own.yaml")
            # Minutes, were it parsed to its end first; a share of a second is what reading the characters takes.
            assert time.monotonic() - began < 10


def test_twenty_levels_are_read_and_no_more() -> None:
    assert parse_yaml("{a: " * 20 + "1" + "}" * 20, where="own.yaml").data["a"]
    with pytest.raises(ConfigError, match="more than 20 levels deep"):
        parse_yaml("{a: " * 21 + "1" + "}" * 21, where="own.yaml")


@given(st.text(max_size=60) | st.lists(_PIECES, max_size=20).map("".join))
@settings(max_examples=300, deadline=None)
def test_any_text_is_read_or_refused_by_name(text: str) -> None:
    try:
        data = parse_yaml(text, where="own.yaml").data
    except ConfigError as problem:
        assert str(problem).startswith("own.yaml:")
    else:
        assert json.loads(json.dumps(data, allow_nan=False)) == data


@given(_DATA)
@settings(max_examples=80, deadline=None)
def test_plain_data_comes_back_as_it_was(data: dict[str, Any]) -> None:
    # JSON is YAML, with every text in quotes.
    found = parse_yaml(json.dumps(data, ensure_ascii=False), where="own.yaml").data
    assert found == data and repr(found) == repr(data)


@given(st.floats(allow_nan=False, allow_infinity=False))
@settings(deadline=None)
def test_every_finite_number_is_a_number_without_quotes(number: float) -> None:
    assert repr(value_of(repr(number))) == repr(number)


@given(st.lists(st.integers(0, 3), min_size=1, max_size=8))
@settings(deadline=None)
def test_every_key_is_told_with_its_own_line(blanks: list[int]) -> None:
    text, lines = "", []
    for number, count in enumerate(blanks):
        text += "\n" * count
        lines.append(text.count("\n") + 1)
        text += f"k{number}:\n  inner: 1\n"
    found = parse_yaml(text, where="own.yaml")
    assert [found.where(f"k{number}") for number in range(len(blanks))] == [f"own.yaml:{line}" for line in lines]
    assert [found.where(f"k{number}", "inner") for number in range(len(blanks))] == [f"own.yaml:{line + 1}" for line in lines]


def test_the_line_of_a_key_that_is_not_there_is_that_of_the_nearest_above() -> None:
    found = parse_yaml("\na:\n  b:\n    c: 1\n", where="own.yaml")
    assert found.where("a", "b", "x", "y") == "own.yaml:3"
    assert found.where("x") == found.where() == "own.yaml"


def test_a_mark_of_byte_order_is_no_part_of_the_first_key(tmp_path: Path) -> None:
    (tmp_path / "own.yaml").write_bytes(b"\xef\xbb\xbfa: 1\n")
    assert read_yaml(tmp_path / "own.yaml").data == {"a": 1}


@pytest.mark.parametrize(
    "content",
    [
        b"a: \xff\xfe\n",
        "a: b\u00e4r\n".encode("latin-1"),
        "a: 1\n".encode("utf-16"),
        b"\x7fELF\x02\x01\x01\x00\xff",
        b"\x00" * 64,
    ],
    ids=["bytes", "latin-1", "utf-16", "program", "zeros"],
)
def test_a_file_that_is_not_utf8_text_is_refused_by_name(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "own.yaml").write_bytes(content)
    with pytest.raises(ConfigError, match=rf"^{tmp_path}/own\.yaml:"):
        read_yaml(tmp_path / "own.yaml")


@pytest.mark.parametrize("size", [MAX_BYTES + 1, 10_000_000])
def test_a_file_over_a_megabyte_is_refused_unread(size: int, tmp_path: Path) -> None:
    (tmp_path / "own.yaml").write_bytes(b"#" * size)
    with pytest.raises(ConfigError, match=r"own\.yaml: too large; the limit is 1,048,576 bytes$"):
        read_yaml(tmp_path / "own.yaml")


@pytest.mark.skipif(not Path("/dev/zero").exists(), reason="no endless file here")
def test_an_endless_file_is_refused() -> None:
    with pytest.raises(ConfigError, match="too large"):
        read_yaml(Path("/dev/zero"))


@pytest.mark.parametrize("name", ["missing.yaml", ".", "own.yaml/below", "nul\x00", "x" * 300])
def test_a_file_that_cannot_be_read_is_refused_by_name(name: str, tmp_path: Path) -> None:
    (tmp_path / "own.yaml").write_text("a: 1")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_yaml(tmp_path / name)


def test_the_fast_loader_reads_the_packages_files_as_the_other_does() -> None:
    for path in sorted(CATALOG.glob("*.yaml")):
        with case(path):
            text = path.read_text(encoding="utf-8")
            fast, plain = (parse_yaml(text, where="here", loader=loader) for loader in (FAST_LOADER, yaml.SafeLoader))
            assert fast == plain and repr(fast.data) == repr(plain.data)
