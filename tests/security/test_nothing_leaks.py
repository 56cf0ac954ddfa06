"""What is committed and what a run hands out names no person, no machine, no folder of anybody's, and no secret."""

from __future__ import annotations

import getpass
import json
import os
import re
import shutil
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cases import case
from tests.conftest import oelm_command, run_here, tiny_config

ROOT = Path(__file__).parents[2]
# A folder of somebody's, on any system; ~ and $HOME say nothing.
HOME = re.compile(r"(?<![\w.])/(?:home|Users|root)/[\w.-]+|[A-Z]:\\+Users\\+[\w.-]+")
ADDRESS = re.compile(r"(?<![\w.])(?:\d{1,3}\.){3}\d{1,3}(?![\w.])")
ALLOWED_ADDRESSES = {"127.0.0.1", "0.0.0.0"}
SECRET = re.compile(
    r"\b(?:hf_[A-Za-z0-9]{20,}|sk-[A-Za-z0-9]{20,}|ghp_[A-Za-z0-9]{30,}|AKIA[A-Z0-9]{16}|xox[bp]-[\w-]{20,}|wandb_[a-z0-9]{30,})"
    r"|-----BEGIN [A-Z ]*PRIVATE KEY-----"
)
TEXT = {
    ".md",
    ".json",
    ".jsonl",
    ".yaml",
    ".yml",
    ".txt",
    ".toml",
    ".py",
    ".cff",
    ".html",
    ".csv",
    ".j2",
    ".css",
    ".js",
    ".svg",
    "",
}


def leaks(text: str, *, host: str) -> Iterator[str]:
    """Yield what in a text tells of a machine or its user."""
    yield from HOME.findall(text)
    yield from (address for address in ADDRESS.findall(text) if address not in ALLOWED_ADDRESSES)
    yield from SECRET.findall(text)
    # A host called 'cpu' or 'main' is a word; longer and odder names are nobody's words.
    if len(host) > 5 and re.search(rf"(?<![\w-]){re.escape(host)}(?![\w-])", text):
        yield host


def test_a_leak_is_seen() -> None:
    cases: list[str] = [
        "saved to /home/ada/outputs",
        '"source": "/Users/ada/x.txt"',
        "C:\\\\Users\\\\ada\\\\x",
        "/root/work/x",
        "on 10.2.33.4 it took",
        "token hf_" + "a" * 34,
        "-----BEGIN RSA PRIVATE KEY-----",
        "trained on gpu-server-07.",
    ]
    for text in cases:
        with case(text):
            assert list(leaks(text, host="gpu-server-07"))


def test_what_tells_nothing_is_no_leak() -> None:
    cases: list[str] = ["~/outputs", "outputs/home/x", "version 2.13.0", "127.0.0.1:0", "/homes", "the gpu-server-071"]
    for text in cases:
        with case(text):
            assert list(leaks(text, host="gpu-server-07")) == []


def committed() -> list[Path]:
    listed = subprocess.run(["git", "-C", str(ROOT), "ls-files", "-z"], capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a checkout")
    # Tests of stripping hold made-up homes and hosts; they are nobody's.
    names = [name for name in listed.stdout.split("\0") if name and not name.startswith("tests/")]
    return [ROOT / name for name in names if (ROOT / name).suffix in TEXT and (ROOT / name).is_file()]


def test_nothing_committed_tells_of_a_machine_or_its_user() -> None:
    files = committed()
    assert any("results" in path.parts for path in files) and any("docs" in path.parts for path in files)
    found = {
        str(path.relative_to(ROOT)): told
        for path in files
        if (told := list(leaks(path.read_text(encoding="utf-8", errors="replace"), host=socket.gethostname())))
    }
    assert found == {}


SECRETS = {"HF_TOKEN": "hf_" + "q" * 34, "WANDB_API_KEY": "w" * 40, "AWS_SECRET_ACCESS_KEY": "z" * 40}


def test_secrets_homes_and_hosts_reach_no_report_and_no_portable_folder(text_file: Path, tmp_path: Path) -> None:
    home = tmp_path / "home" / "ada"
    (home / "texts").mkdir(parents=True)
    (home / "texts" / "mine.txt").write_text(text_file.read_text())
    run = home / "outputs" / "GPT-01" / "smoke" / "default" / "seed-0"
    run_here(tiny_config(home / "texts" / "mine.txt"), run)
    environment = {**os.environ, **SECRETS, "HOME": str(home), "OMP_NUM_THREADS": "1"}
    for arguments in (
        ("report", "--html", "r.html", "--markdown", "r.md", "--csv", "csv", "--latex", "r.tex"),
        ("archive", "portable", "--weights"),
    ):
        child = subprocess.run(oelm_command(*arguments), cwd=home, env=environment, capture_output=True, text=True, timeout=120)
        assert child.returncode == 0, f"{arguments}: {child.stdout}{child.stderr}"
    reports = [home / "r.html", home / "r.md", home / "r.tex", *home.glob("csv/*")]
    archived = [path for path in home.glob("portable/**/*") if path.is_file()]
    assert len(reports) > 3 and len(archived) > 8
    handed_out = {path: path.read_bytes() for path in (*reports, *archived)}
    # A name of two letters stands by chance among any bytes; of such hosts, tests/experiments/test_portable.py speaks.
    hosts = [socket.gethostname()] if len(socket.gethostname()) > 5 else []
    for path, content in handed_out.items():
        for word in (*SECRETS.values(), str(home), *hosts, f'"pid": {os.getpid()}'):
            assert word.encode() not in content, f"{path}: {word}"


def test_a_run_records_no_variable_of_the_environment(text_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)
    run_here(tiny_config(text_file), tmp_path / "run")
    for path in (path for path in (tmp_path / "run").rglob("*") if path.is_file()):
        content = path.read_bytes()
        assert not any(value.encode() in content for value in SECRETS.values()), path
    status = json.loads((tmp_path / "run" / "status.json").read_text())
    assert status["host"] == socket.gethostname() and getpass.getuser() not in json.dumps({**status, "host": ""}).split('"')


@pytest.mark.slow
def test_a_run_and_its_report_need_no_network(text_file: Path, tmp_path: Path) -> None:
    apart = ["unshare", "--map-root-user", "--net"]
    if shutil.which("unshare") is None or subprocess.run([*apart, "true"], capture_output=True).returncode:
        pytest.skip("this user may not leave the network")
    config = tiny_config(text_file)
    (tmp_path / "config.json").write_text(json.dumps(config.as_dict()))
    out = tmp_path / "outputs" / "GPT-01" / "smoke" / "default" / "seed-0"
    for arguments in (("train", "--config", "config.json", "--out", str(out)), ("report", "--html", "r.html")):
        command = [*apart, *oelm_command(*arguments)]
        child = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
        assert child.returncode == 0, f"{arguments}: {child.stdout}{child.stderr}"
    assert (out / "predictions.jsonl").is_file() and (tmp_path / "r.html").is_file()
