"""A model's folder is data: code in it is never run, and nobody is asked whether to."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

SCRIPT = """
import sys
from pathlib import Path
from oelm.errors import CheckpointError
from oelm.models import hub

folder = Path(sys.argv[1])
calls = {
    "pretrained": lambda: hub.pretrained_classifier(folder, num_labels=2, seed=0),
    "shaped": lambda: hub.shaped_classifier(folder),
    "skeleton": lambda: hub.classifier_skeleton(str(folder), num_labels=2),
}
for name, call in calls.items():
    try:
        call()
    except CheckpointError as problem:
        print(f"refused by {name}:", problem)
"""


def test_code_that_a_model_folder_names_is_never_run(tmp_path: Path) -> None:
    folder, marker = tmp_path / "model", tmp_path / "ran"
    folder.mkdir()
    hostile = f"open({str(marker)!r}, 'w').close()\nimport transformers as t\nclass C(t.PretrainedConfig): pass\n"
    (folder / "code.py").write_text(hostile)
    config = {"model_type": "hostile", "auto_map": {"AutoConfig": "code.C", "AutoModelForSequenceClassification": "code.C"}}
    (folder / "config.json").write_text(json.dumps(config))
    # An empty safetensors file: the length of its header, and the header.
    (folder / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    environment = {**os.environ, "HF_HOME": str(tmp_path / "hf"), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-c", SCRIPT, str(folder)]
    # Somebody, or a script, who says yes to whatever is asked.
    child = subprocess.run(command, input="y\n" * 60, env=environment, capture_output=True, text=True, timeout=120)
    assert not marker.exists() and child.returncode == 0, child.stdout + child.stderr
    assert re.findall(r"^refused by (\w+):", child.stdout, re.MULTILINE) == ["pretrained", "shaped", "skeleton"], child.stdout
