"""One writer, one config for life, honest statuses; and what a run is estimated to need."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from oelm.config import RunConfig
from oelm.errors import CheckpointError, DiskFullError, OelmError, OutOfMemoryError, RunDirError, RunDirLostError
from oelm.files import STAGING_PREFIX
from oelm.method.apply import freeze
from oelm.method.audit import audit
from oelm.method.method import PRESETS
from oelm.models.gpt import build_gpt
from oelm.runs.records import DataRecord, Manifest
from oelm.runs.rundir import RunDir
from oelm.runs.status import HEARTBEAT_S, Progress, read_status
from oelm.train.device import Estimate, check_fits, estimate, is_out_of_memory, parameter_counts, what_to_lower
from tests.cases import case
from tests.conftest import tiny_config


def manifest_of(torch_version: str) -> Manifest:
    data = DataRecord(name="text", source="text", fingerprint="0", tokenizer="bpe:300")
    return Manifest(python="3", oelm="1", source_revision=None, torch=torch_version, numpy="2", environment={}, data=data)


def test_second_holder_is_refused_and_the_lock_ends_with_the_first(tmp_path: Path, text_file: Path) -> None:
    with RunDir(tmp_path / "run") as first:
        first.claim(tiny_config(text_file))
        first.set_status("running", Progress(step=1, steps=9))
        with pytest.raises(RunDirError, match=r"in use by process \d+ on .* since 20\d\d-"), RunDir(tmp_path / "run"):
            pass
    with RunDir(tmp_path / "run"):
        pass


@pytest.mark.parametrize("fate", ["removed", "renamed", "replaced"])
def test_who_lost_its_folder_writes_nothing_there_any_more(fate: str, tmp_path: Path, text_file: Path) -> None:
    run = tmp_path / "run"
    with RunDir(run) as folder:
        folder.claim(tiny_config(text_file))
        folder.set_status("running", Progress(step=1, steps=9))
        run.rename(tmp_path / "moved")
        if fate == "removed":
            shutil.rmtree(tmp_path / "moved")
        if fate == "replaced":
            shutil.copytree(tmp_path / "moved", run)
        there = sorted(run.rglob("*"))
        for write in (
            lambda: folder.set_status("stopped", Progress(step=2, steps=9)),
            lambda: folder.write_manifest(manifest_of("1")),
        ):
            with pytest.raises(RunDirLostError, match=r"run was removed, renamed or replaced .* repeat the command"):
                write()
    assert RunDirLostError.exit_code == 75
    # Not its holder's name either, which another process may have written there.
    assert sorted(run.rglob("*")) == there and run.exists() == (fate == "replaced")


def test_a_folder_renamed_and_back_is_still_its_holders(tmp_path: Path) -> None:
    with RunDir(tmp_path / "run") as folder:
        for source, target in (("run", "moved"), ("moved", "run")):
            (tmp_path / source).rename(tmp_path / target)
        folder.set_status("running", Progress(step=1, steps=9))
    assert read_status(tmp_path / "run") is not None


def test_a_file_in_the_way_is_refused(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("mine")
    with pytest.raises(RunDirError, match="is a file"), RunDir(tmp_path / "run"):
        pass
    assert (tmp_path / "run").read_text() == "mine"


def test_folder_with_other_things_is_refused_untouched(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("mine")
    with pytest.raises(RunDirError, match=r"holds 'thesis.tex' but no config.json"), RunDir(tmp_path):
        pass
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_staging_of_a_killed_writer_is_swept(tmp_path: Path) -> None:
    torso = tmp_path / "run" / "checkpoints" / f"{STAGING_PREFIX}abc"
    torso.mkdir(parents=True)
    (torso / "model.safetensors").write_text("half")
    (tmp_path / "run" / "config.json").write_text("{}")
    with RunDir(tmp_path / "run"):
        pass
    assert not torso.exists()


def test_run_killed_before_its_config_can_start_again(tmp_path: Path, text_file: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    for name in (".lock", "training.log", f"{STAGING_PREFIX}abc"):
        (run / name).write_text("")
    with RunDir(run) as folder:
        folder.claim(tiny_config(text_file))
    assert sorted(path.name for path in run.iterdir()) == [".lock", "config.json", "training.log"]


def test_damaged_config_is_refused_with_its_file(tmp_path: Path, text_file: Path) -> None:
    config = tiny_config(text_file)
    with RunDir(tmp_path / "run") as folder:
        folder.claim(config)
        (tmp_path / "run" / "metrics.jsonl").write_text('{"step": 1}\n')
        (tmp_path / "run" / "config.json").write_text('{"steps": 3')
        with pytest.raises(RunDirError, match=r"config.json: cannot be read as JSON .* aside"):
            folder.claim(config)


def test_config_is_written_once_and_reads_back_equal(tmp_path: Path, text_file: Path) -> None:
    config = tiny_config(text_file, method="gaussian_matched", seed=5)
    with RunDir(tmp_path / "run") as folder:
        assert folder.claim(config) == config
        assert folder.claim(config) == config


def test_folder_in_which_nothing_was_trained_takes_another_config(tmp_path: Path, text_file: Path) -> None:
    with RunDir(tmp_path / "run") as folder:
        folder.claim(tiny_config(text_file))
        smaller = tiny_config(text_file, micro_batch_size=1)
        assert folder.claim(smaller) == smaller


def begun(run: Path, config: RunConfig, *, rows: int) -> None:
    """Leave what a run that took so many steps leaves beside its checkpoints."""
    with RunDir(run) as folder:
        folder.claim(config)
    (run / "metrics.jsonl").write_text("".join(f'{{"step": {step}, "loss": 1.0}}\n' for step in range(1, rows + 1)))


@pytest.mark.parametrize(("save_every", "eval_every"), [(4, 9), (9, 4)])
def test_run_killed_before_its_first_checkpoint_starts_again_by_itself(
    save_every: int, eval_every: int, tmp_path: Path, text_file: Path
) -> None:
    config = tiny_config(text_file, save_every=save_every, eval_every=eval_every)
    begun(tmp_path / "run", config, rows=4)
    with RunDir(tmp_path / "run") as folder:
        assert folder.claim(config) == config


@pytest.mark.parametrize(("save_every", "eval_every"), [(4, 9), (9, 4)])
def test_run_that_had_saved_and_lost_it_is_refused(save_every: int, eval_every: int, tmp_path: Path, text_file: Path) -> None:
    config = tiny_config(text_file, save_every=save_every, eval_every=eval_every)
    begun(tmp_path / "run", config, rows=5)
    with (
        RunDir(tmp_path / "run") as folder,
        pytest.raises(CheckpointError, match=r"its checkpoints are gone, and it had come to step 5; .*move the run aside"),
    ):
        folder.claim(config)


def test_run_whose_pointer_is_left_alone_is_refused_and_keeps_its_config(tmp_path: Path, text_file: Path) -> None:
    begun(tmp_path / "run", tiny_config(text_file), rows=0)
    (tmp_path / "run" / "latest.json").write_text("{}")
    before = (tmp_path / "run" / "config.json").read_bytes()
    with RunDir(tmp_path / "run") as folder:
        with pytest.raises(CheckpointError, match="its checkpoints are gone"):
            folder.claim(tiny_config(text_file))
        with pytest.raises(RunDirError, match="holds a run of another config"):
            folder.claim(tiny_config(text_file, seed=7))
    assert (tmp_path / "run" / "config.json").read_bytes() == before


def test_linked_checkpoints_are_refused(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "checkpoints").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(RunDirError, match="is a link"), RunDir(tmp_path / "run"):
        pass


def test_status_of_nothing_or_damage_is_none(tmp_path: Path) -> None:
    assert read_status(tmp_path) is None
    (tmp_path / "status.json").write_text('{"status": "don')
    assert read_status(tmp_path) is None


def test_heartbeat_is_rare(tmp_path: Path) -> None:
    with RunDir(tmp_path / "run") as folder:
        folder.set_status("running", Progress(step=0, steps=9))
        folder.heartbeat(lambda: Progress(step=1, steps=9, eta_s=2.0))
    status = read_status(tmp_path / "run")
    assert HEARTBEAT_S > 1 and status is not None and status.step == 0


def test_manifest_keeps_the_settings_of_earlier_sittings(tmp_path: Path) -> None:
    with RunDir(tmp_path / "run") as folder:
        for torch_version in ("1", "1", "2"):
            folder.write_manifest(manifest_of(torch_version))
    manifest = json.loads((tmp_path / "run" / "manifest.json").read_text())
    assert manifest["torch"] == "2" and [row["torch"] for row in manifest["earlier"]] == ["1"]


@pytest.mark.parametrize(("method", "layers"), [("baseline", "all"), ("oelm_freeze", "all"), ("oelm_freeze", "last 1")])
def test_parameters_are_counted_as_the_audit_counts_them(method: str, layers: str, text_file: Path) -> None:
    chosen = PRESETS[method].model_copy(update={"layers": layers})
    config = tiny_config(text_file, model__vocab_size=300, method=chosen.model_dump(mode="json"))
    model = build_gpt(config.model, seed=0)
    freeze(model, config.method)
    report = audit(model)
    assert parameter_counts(config) == (report.total, report.trainable)


def test_frozen_weights_are_estimated_to_need_less(text_file: Path) -> None:
    configs = [tiny_config(text_file, model__vocab_size=300, method=method) for method in ("baseline", "oelm_freeze")]
    baseline, frozen = (estimate(config, device="cpu") for config in configs)
    weights = 2 * 2 * 32 * 32  # Q and K of two layers
    # No gradient and no two moments in memory; no two moments in a checkpoint.
    assert baseline.memory - frozen.memory == 12 * weights
    assert baseline.checkpoint - frozen.checkpoint == 8 * weights


def test_too_little_disk_is_refused_before_the_start(tmp_path: Path, text_file: Path) -> None:
    with pytest.raises(DiskFullError, match="--no-preflight"):
        check_fits(Estimate(memory=1, disk=2**60, checkpoint=2**58), tiny_config(text_file), run=tmp_path, device="cpu")


def test_too_little_memory_is_refused_before_the_start(tmp_path: Path, text_file: Path) -> None:
    with pytest.raises(OutOfMemoryError, match="lower micro_batch_size from 2 to 1"):
        check_fits(Estimate(memory=2**60, disk=1, checkpoint=1), tiny_config(text_file), run=tmp_path, device="cpu")


def test_advice_keeps_the_batch_whole(text_file: Path) -> None:
    assert "from 6 to 3" in what_to_lower(tiny_config(text_file, batch_size=6, micro_batch_size=6))
    assert "from 5 to 1" in what_to_lower(tiny_config(text_file, batch_size=5, micro_batch_size=5))
    assert "model.seq_len" in what_to_lower(tiny_config(text_file, batch_size=5, micro_batch_size=1))


def test_failed_allocations_are_recognised() -> None:
    cases: list[tuple[Exception, bool]] = [
        (MemoryError(), True),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried"), True),
        (RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate"), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (OelmError("out of memory"), False),
    ]
    for error, expected in cases:
        with case(error, expected):
            assert is_out_of_memory(error) is expected


def test_a_real_failed_allocation_is_recognised() -> None:
    import torch

    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**50)
    assert is_out_of_memory(caught.value)
