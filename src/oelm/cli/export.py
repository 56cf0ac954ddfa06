"""`oelm export`: take a run to Hugging Face."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from oelm.cli.options import Checkpoint, RunFolder
from oelm.cli.shell import reported, say
from oelm.errors import DataError


@reported
def export(
    run: RunFolder,
    folder: Annotated[Path, typer.Argument(help="A new folder to write to.")],
    checkpoint: Checkpoint = "best",
) -> None:
    """Write a run as a plain folder that `transformers` loads with no code of ours: GPT-2, or a classifier's own kind."""
    from oelm.data.tokenizer import end_of_text_id
    from oelm.method.audit import audit
    from oelm.models.export import export_gpt2
    from oelm.report.card import model_card
    from oelm.train.binding import read_manifest
    from oelm.train.load import LoadedRun, load_any

    loaded = load_any(run, which=checkpoint)
    if not isinstance(loaded, LoadedRun):
        from oelm.models.hub import export_classifier

        export_classifier(loaded.folded(), loaded.tokenizer_path(), folder)
        say(
            f"exported step {loaded.step} to {folder}\n"
            f'  from transformers import pipeline; pipeline("text-classification", model="{folder}")'
        )
        return
    tokenizer = loaded.tokenizer()
    data = read_manifest(loaded.path).get("data")
    if data is None:
        raise DataError(
            f"{loaded.path / 'manifest.json'}: is gone, or names no data, and the model card says what the run was trained on; "
            "restore the file from a copy"
        )
    state = loaded.checkpoint.saved.state
    card = model_card(
        loaded.config,
        audit(loaded.model),
        data=data,
        step=loaded.step,
        loss=state.best_value if state.is_best_here else None,
    )
    export_gpt2(loaded.folded(), tokenizer, folder, end_of_text=end_of_text_id(tokenizer), card=card)
    say(
        f"exported step {loaded.step} to {folder}\n"
        f'  from transformers import pipeline; pipeline("text-generation", model="{folder}")'
    )
