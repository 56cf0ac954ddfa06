"""Imports point down only, and files and functions stay small; what may not be called is in security/test_banned.py."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
SRC = ROOT / "src" / "oelm"
# From the top down; a module may import its own package and the layers below, never another of its own layer.
ORDER = ("cli", "report", "experiments bench", "train", "runs", "config hf", "method models data")
LAYERS = {name: level for level, names in enumerate(reversed(ORDER), start=1) for name in names.split()}
TOP = len(ORDER) + 1
FILES = sorted(SRC.rglob("*.py"))
ALL_FILES = [*FILES, *(path for place in ("tests", "benchmarks", "studies") for path in sorted((ROOT / place).rglob("*.py")))]

FLOOR = {"errors": -2, "text": -1}


def layer_of(module: str) -> int:
    """Return the layer of 'oelm.train.loop' and the like; errors, then text, are the floor."""
    parts = module.split(".")
    if len(parts) == 1:
        return TOP
    if parts[1] in FLOOR:
        return FLOOR[parts[1]]
    return LAYERS.get(parts[1], TOP if parts[1] == "__main__" else 0)


def module_name(path: Path) -> str:
    parts = ("oelm", *path.relative_to(SRC).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def statements_of(path: Path) -> list[ast.stmt]:
    """Return the statements of a file, nested ones too: imports, functions and classes, without the parts of expressions."""

    def within(node: ast.AST) -> Iterator[ast.stmt]:
        for field in ("body", "orelse", "finalbody", "handlers", "cases"):
            for part in inner if isinstance(inner := getattr(node, field, []), list) else []:
                if isinstance(part, ast.stmt):
                    yield part
                yield from within(part)

    return list(within(ast.parse(path.read_text(encoding="utf-8"))))


@cache
def imports_of(path: Path) -> list[str]:
    found: list[str] = []
    for node in statements_of(path):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("oelm"):
            found.append(node.module)
        elif isinstance(node, ast.Import):
            found += [alias.name for alias in node.names if alias.name.startswith("oelm")]
    return found


def test_imports_point_down() -> None:
    wrong = []
    for own, imported in ((module_name(path), imported) for path in FILES for imported in imports_of(path)):
        same_package = imported.split(".")[:2] == own.split(".")[:2]
        if not (layer_of(imported) < layer_of(own) or same_package or own == "oelm"):
            wrong.append(f"{own} imports {imported}")
    assert wrong == []


def test_the_method_library_could_be_lifted_out() -> None:
    allowed = ("oelm.method", "oelm.errors", "oelm.seeds")
    for path in sorted((SRC / "method").glob("*.py")):
        for imported in imports_of(path):
            assert imported.startswith(allowed), f"{path.name} imports {imported}"


def test_no_name_of_a_class_or_function_has_two_meanings() -> None:
    # A command may be called as the function of the library that it calls.
    for files in ([path for path in FILES if path.parent.name == "cli"], [path for path in FILES if path.parent.name != "cli"]):
        places: dict[str, list[str]] = {}
        for path in files:
            for node in statements_of(path):
                # Without indentation: of a module, not of a class.
                if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.col_offset == 0 and node.name[0] != "_":
                    places.setdefault(node.name, []).append(module_name(path))
        assert {name: where for name, where in places.items() if len(where) > 1} == {}


def test_files_and_functions_stay_small() -> None:
    large = []
    for path in ALL_FILES:
        text, name = path.read_text(encoding="utf-8"), path.relative_to(ROOT).as_posix()
        if (lines := text.count("\n")) > 600:
            large.append(f"{name}: {lines} lines")
        for node in statements_of(path):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                assert node.end_lineno is not None
                if node.end_lineno - node.lineno + 1 > 60:
                    large.append(f"{name}:{node.lineno} {node.name}")
    assert large == []


def test_the_training_loop_fits_one_screen() -> None:
    tree = ast.parse((SRC / "train" / "loop.py").read_text())
    loop = next(node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "run_loop")
    assert loop.end_lineno is not None and loop.end_lineno - loop.lineno < 40
