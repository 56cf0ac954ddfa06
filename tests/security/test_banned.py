"""Nothing in the product can run foreign code: looked for in the syntax tree, through aliases, and proven to be found."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from tests.cases import case

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "src" / "oelm").rglob("*.py"))
# Whatever their alias: modules of which nothing may be imported, and functions that may not even be named.
MODULES = {"pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib", "code", "codeop", "runpy", "imp", "ctypes"}
# A server is one more way in; the one of the live page is KNOWN, and tests/security/test_live_server.py attacks it.
MODULES |= {"http.server", "socketserver", "xmlrpc", "wsgiref", "flask", "fastapi", "uvicorn", "torch.distributed.checkpoint"}
FUNCTIONS = {
    *("torch.load", "torch.save", "torch.jit.load", "torch.hub.load", "torch.package.PackageImporter"),
    *(
        "yaml.load",
        "yaml.load_all",
        "yaml.unsafe_load",
        "yaml.full_load",
        "yaml.Loader",
        "yaml.UnsafeLoader",
        "yaml.FullLoader",
    ),
    *("numpy.load", "numpy.loads", "os.system", "os.popen", "subprocess.getoutput", "subprocess.getstatusoutput"),
    *("tarfile.open", "tarfile.TarFile", "zipfile.ZipFile", "shutil.unpack_archive", "importlib.import_module"),
    *("builtins.eval", "builtins.exec", "builtins.compile", "builtins.__import__"),
}
BUILTINS = {"eval", "exec", "compile", "__import__"}
FALSE_ONLY = {"shell", "trust_remote_code", "allow_pickle"}
TRUE_ONLY = {"weights_only", "use_safetensors"}
# The public names are loaded when they are first asked for; what is imported is a table in that file.
KNOWN = {
    "oelm/__init__.py": {"importlib.import_module"},
    "oelm/report/serve.py": {"http.server", "http.server.BaseHTTPRequestHandler", "socketserver"},
}


def offences(source: str) -> Iterator[str]:
    """Yield what is banned in a module's source, with its line."""
    tree = ast.parse(source)
    names = dict(_imported(tree))
    for node in ast.walk(tree):
        line = getattr(node, "lineno", 0)
        if isinstance(node, ast.Import | ast.ImportFrom):
            for module in _modules(node):
                if any(module == banned or module.startswith(f"{banned}.") for banned in MODULES):
                    yield f"{line}: imports {module}"
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and node.id in BUILTINS and node.id not in names:
            yield f"{line}: names {node.id}"
        if isinstance(node, ast.Attribute | ast.Name) and (full := _full_name(node, names)) in FUNCTIONS:
            yield f"{line}: names {full}"
        if isinstance(node, ast.Call):
            yield from _bad_arguments(node, names)


def _modules(node: ast.Import | ast.ImportFrom) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    return [node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)]


def _imported(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Yield the names that imports bind, with what they stand for."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield (alias.asname, alias.name) if alias.asname else (alias.name.split(".")[0], alias.name.split(".")[0])
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                yield alias.asname or alias.name, f"{node.module}.{alias.name}"


def _full_name(node: ast.expr, names: dict[str, str]) -> str:
    if isinstance(node, ast.Name):
        return names.get(node.id, "")
    if isinstance(node, ast.Attribute) and (above := _full_name(node.value, names)):
        return f"{above}.{node.attr}"
    return ""


def _bad_arguments(call: ast.Call, names: dict[str, str]) -> Iterator[str]:
    for keyword in call.keywords:
        value = keyword.value.value if isinstance(keyword.value, ast.Constant) else None
        if (keyword.arg in FALSE_ONLY and value is not False) or (keyword.arg in TRUE_ONLY and value is not True):
            yield f"{call.lineno}: {keyword.arg}={ast.unparse(keyword.value)}"
    # getattr(torch, "load") is torch.load.
    if isinstance(call.func, ast.Name) and call.func.id == "getattr" and len(call.args) > 1:
        owner, name = call.args[0], call.args[1]
        if isinstance(name, ast.Constant) and f"{_full_name(owner, names)}.{name.value!s}" in FUNCTIONS:
            yield f"{call.lineno}: {ast.unparse(call)}"


def test_nothing_that_can_run_foreign_code_is_named() -> None:
    found = [
        (str(path.relative_to(ROOT / "src")), what) for path in FILES for what in offences(path.read_text(encoding="utf-8"))
    ]
    assert [(name, what) for name, what in found if what.split()[-1] not in KNOWN.get(name, set())] == []


BAD = [
    "import pickle",
    "from pickle import loads as read",
    "import torch\ntorch.load('x')",
    "import torch as t\nread = t.load",
    "from torch import load\nload('x')",
    "import torch\ngetattr(torch, 'load')('x')",
    "import torch.distributed.checkpoint as dcp",
    "from torch.distributed import checkpoint",
    "import yaml\nyaml.load(text, yaml.Loader)",
    "from yaml import load as safe\nsafe(text)",
    "import numpy as np\nnp.load(path)",
    "import numpy as np\nnp.fromfile(path, allow_pickle=True)",
    "eval('1')",
    "run = exec",
    "import builtins\nbuiltins.eval('1')",
    "__import__('os')",
    "import subprocess\nsubprocess.run('ls', shell=True)",
    "import subprocess\nsubprocess.run('ls', shell=flag)",
    "import os\nos.system('ls')",
    "from transformers import AutoModel\nAutoModel.from_pretrained(x, trust_remote_code=True)",
    "from transformers import AutoModel\nAutoModel.from_pretrained(x, trust_remote_code=asked)",
    "from transformers import AutoModel\nAutoModel.from_pretrained(x, use_safetensors=False)",
    "from http.server import HTTPServer",
    "import tarfile\ntarfile.open(x).extractall()",
    "import importlib\nimportlib.import_module(name)",
]
GOOD = [
    "import re\nre.compile('x')",
    "import torch\ntorch.compile(model)",
    "import json\njson.load(file)",
    "from safetensors.torch import load_file\nload_file(path)",
    "import yaml\nyaml.compose(text, Loader=yaml.SafeLoader)",
    "import subprocess\nsubprocess.run(['ls'], shell=False)",
    "model.eval()",
]


def test_what_is_banned_is_found_under_any_name() -> None:
    for source in BAD:
        with case(source):
            assert list(offences(source)), source


def test_what_is_harmless_is_not_taken_for_it() -> None:
    for source in GOOD:
        with case(source):
            assert list(offences(source)) == [], source


def test_no_line_of_the_product_has_the_words_of_an_unsafe_load() -> None:
    # Beside the tree, the plain words: what only a comment or a text that becomes code would hide.
    words = re.compile(r"trust_remote_code\s*=\s*True|shell\s*=\s*True|allow_pickle\s*=\s*True|weights_only\s*=\s*False")
    for path in FILES:
        assert not words.search(path.read_text(encoding="utf-8")), path


def test_every_download_from_the_hub_names_a_commit() -> None:
    """Calls that may fetch from the hub pass `revision`, or read a folder that is there (`local_files_only`)."""
    fetching = {"from_pretrained", "hf_hub_download", "snapshot_download", "load_dataset"}
    found = 0
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call):
                name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
                if name in fetching:
                    found += 1
                    given = {keyword.arg for keyword in node.keywords}
                    assert given & {"revision", "local_files_only"}, f"{path.name}:{node.lineno}: {name}"
    assert found


def test_requirements_are_pinned_to_one_version_each() -> None:
    lines = [line.split("#")[0].split(";")[0].strip() for line in (ROOT / "constraints.txt").read_text().splitlines()]
    wanted = [line for line in lines if line]
    assert len(wanted) > 20 and [line for line in wanted if not re.fullmatch(r"[A-Za-z0-9._-]+==[A-Za-z0-9.+!]+", line)] == []
