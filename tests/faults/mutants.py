"""Forty-three one-line faults in the code, one at a time, in a copy of it: the tests must notice.

python -m tests.faults.mutants [NUMBER...]; prints killed or survived for each; the exit code is 0 when at least 40 are killed.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
NEEDED = 40
TIMEOUT_S = 900


@dataclass(frozen=True)
class Mutant:
    """A line of a file under src/oelm as it is and as it becomes, and the tests that should fail then."""

    file: str
    old: str
    new: str
    tests: str
    why: str


MUTANTS = (
    # method
    Mutant(
        "method/frames.py", "(q_HDK * diagonal_HK.sign().unsqueeze(-2))", "q_HDK", "method/test_frames.py", "LAPACK's signs"
    ),
    Mutant(
        "method/frames.py", "if head_dim > model_dim:", "if head_dim > model_dim + 1:", "method/test_frames.py", "off by one"
    ),
    Mutant("method/frames.py", "(gram_HKK - identity_KK)", "(gram_HKK + identity_KK)", "method/test_frames.py", "a sign"),
    Mutant(
        "method/apply.py",
        "bias_HK is not None and not keeps_bias",
        "bias_HK is not None and keeps_bias",
        "method/test_architectures.py::test_frames_are_orthonormal_by_the_heads_of_the_architecture",
        "a negation: biases of a fresh start stay",
    ),
    Mutant(
        "method/audit.py",
        "if digest(frozen) != recorded:",
        "if digest(frozen) == NO_DIGEST:",
        "method/test_apply_audit.py::test_a_frozen_parameter_that_moved_is_caught_by_name",
        "a skipped guard: frozen bytes may move",
    ),
    Mutant(
        "method/apply.py",
        "if first <= step < end)",
        "if first < step < end)",
        "faults/test_thaw_killed.py::test_frozen_bytes_stay_to_the_very_step_of_their_thaw",
        "off by one: the first update moves what is frozen",
    ),
    # train
    Mutant("train/optim.py", "parameter.dim() >= 2 and", "parameter.dim() >= 1 and", "train/test_optim.py", "norms decay"),
    Mutant(
        "train/optim.py",
        "        if parameter.requires_grad:",
        "        if parameter.dim():",
        "train/test_optim.py",
        "a skipped guard",
    ),
    Mutant("train/optim.py", "return (step + 1) / warmup", "return step / warmup", "train/test_schedule.py", "off by one"),
    Mutant("train/optim.py", "math.pi * progress", "2 * math.pi * progress", "train/test_schedule.py", "a whole cosine"),
    Mutant(
        "train/step.py",
        "compute_loss(micro_batch) / num_micro_batches",
        "compute_loss(micro_batch)",
        "train/test_step.py",
        "no mean",
    ),
    Mutant("train/step.py", '"noise", step, micro_batch)', '"noise", step)', "train/test_step.py", "the same noise twice"),
    Mutant(
        "train/step.py",
        "if not math.isfinite(total) or (not math.isfinite(grad_norm) and not is_overflow):",
        "if not math.isfinite(total):",
        "train/test_step.py",
        "a skipped guard: NaN gradients reach the weights",
    ),
    Mutant(
        "train/loop.py",
        "run.state.evaluated_step < run.state.step",
        "run.state.evaluated_step <= run.state.step",
        "train/test_run.py::test_extended_run_equals_its_config_run_from_scratch",
        "an evaluation twice after a resume",
    ),
    Mutant(
        "train/checkpoint.py",
        "value < self.best_value",
        "value > self.best_value",
        "train/test_run.py::test_best_checkpoint_is_the_one_of_the_best_evaluation_and_is_kept",
        "the worst is kept",
    ),
    Mutant(
        "train/checkpoint.py", "older[self.keep :]", "older[self.keep + 1 :]", "faults/test_durable.py", "one too many is kept"
    ),
    Mutant(
        "train/checkpoint.py",
        "if (path / SAVED_MANIFEST).read_bytes() == actual.encode():",
        "if (path / SAVED_MANIFEST).read_bytes():",
        "faults/test_damaged.py::test_every_damage_to_a_file_is_found_and_none_is_loaded",
        "a skipped guard: damaged files load",
    ),
    Mutant(
        "train/checkpoint.py",
        "        check_frozen(model)\n        target",
        "        target",
        "train/test_run.py::test_weights_that_moved_never_reach_a_checkpoint",
        "a skipped guard: moved frames are saved",
    ),
    Mutant(
        "train/session.py", "                    self.folder.metrics.sync()\n", "", "faults/test_durable.py", "a dropped fsync"
    ),
    Mutant(
        "train/session.py",
        "        load_optimizer(checkpoint, session.model, session.optimizer)\n",
        "",
        "train/test_resume.py::test_loss_scaler_continues_where_it_was",
        "a resume forgets the moments",
    ),
    Mutant("runs/metrics.py", 'row["step"] <= (', 'row["step"] < (', "runs/test_metrics.py", "off by one"),
    Mutant(
        "process.py",
        "if number == signal.SIGINT and self.requested():",
        "if number < 0:",
        "faults/test_signals.py::test_second_interrupt_leaves_at_once_and_loses_at_most_one_interval",
        "deaf",
    ),
    # data
    Mutant(
        "data/order.py",
        "self.num_tokens // self.seq_len - 1)",
        "self.num_tokens // self.seq_len)",
        "data/test_order.py",
        "off by one",
    ),
    Mutant("data/order.py", "+ batch * self.batch_size", "+ batch", "data/test_order.py", "windows repeat"),
    Mutant("data/tokens.py", ">= meta.vocab_size:", "> meta.vocab_size:", "data/test_tokens.py", "off by one"),
    Mutant(
        "data/tokens.py",
        "compare_digests(file, digest, known.sha256)",
        "compare_digests(file, digest, digest)",
        "data/test_tokens.py",
        "a skipped guard",
    ),
    Mutant(
        "data/prepare.py",
        "                os.fsync(file.fileno())\n",
        "",
        "data/test_shards.py::test_a_shard_is_durable_before_the_journal_speaks_of_it",
        "a dropped fsync",
    ),
    # stats.py
    Mutant("stats.py", "_mean(values), len(values) - 1", "_mean(values), len(values)", "report/test_stats.py", "off by one"),
    Mutant("stats.py", "(freedom, (1 - level) / 2)", "(freedom, (1 - level))", "report/test_stats.py", "one-sided"),
    Mutant("stats.py", "2 ** (look - 1)", "2**look", "report/test_stats.py", "off by one"),
    # One writer in a run's folder, and its own checkpoints only.
    Mutant(
        "runs/rundir.py",
        "is_ours = (there.st_dev, there.st_ino) == (ours.st_dev, ours.st_ino)",
        "is_ours = there.st_dev == ours.st_dev",
        "runs/test_rundir.py::test_who_lost_its_folder_writes_nothing_there_any_more",
        "a skipped guard: a run writes into the folder of another",
    ),
    Mutant(
        "files.py",
        "move(old, new, src_dir_fd=handle, dst_dir_fd=handle)",
        "move(folder / old, folder / new)",
        "test_files.py::test_a_folder_replaced_after_its_guard_approved_it_is_not_written_to",
        "a rename by path: the folder may be another since it was proven",
    ),
    Mutant(
        "train/checkpoint.py",
        "if saved.run and own and saved.run != own:",
        "if saved.run and not own and saved.run != own:",
        "faults/test_foreign_checkpoints.py::test_of_two_runs_of_one_config_each_opens_its_own_only",
        "a skipped guard: another run's checkpoint opens",
    ),
    Mutant(
        "train/checkpoint.py",
        "if then and now and then != now:",
        "if then and now and len(then) != len(now):",
        "faults/test_foreign_checkpoints.py::test_frozen_bytes_that_the_run_did_not_begin_with_are_refused",
        "a skipped guard: frames that the run did not begin with",
    ),
    # Records that were edited, copies, and second tries.
    Mutant(
        "runs/finished.py",
        "isclose(stored, value, rel_tol=1e-9)",
        "isclose(stored, value, rel_tol=0.9)",
        "report/test_edited.py::test_one_edited_figure_of_a_language_model_is_refused_by_name_with_both_values",
        "a loose comparison: edited figures are judged",
    ),
    Mutant(
        "report/arms.py",
        "known.setdefault(tuple(run.curve.items()), run)",
        "known.setdefault(((run.seed, 0.0),), run)",
        "report/test_edited.py::test_seeds_that_are_copies_of_each_other_make_no_arm",
        "a skipped guard: a copy counts as one more seed",
    ),
    Mutant(
        "report/judge.py",
        "(questions.get(other) or look.question or asked) == asked)",
        "(questions.get(other) or look.question or asked) != asked)",
        "report/test_build.py::test_a_second_try_at_another_rate_is_the_next_look_at_the_same_question",
        "a negation: second tries are first looks",
    ),
    # Damaged metrics, full disks, broken outputs.
    Mutant(
        "runs/metrics.py",
        "if fault := missing_rows(kept, step=step, evaluated=evaluated):",
        'if fault := "":',
        "faults/test_metrics_damaged.py",
        "a skipped guard: rows that the checkpoint has seen are cut",
    ),
    Mutant(
        "train/run.py",
        "        with contextlib.suppress(OelmError):\n            log.error(",
        "        if True:\n            log.error(",
        "faults/test_full_disk.py::test_a_log_that_finds_no_room_stops_the_run_resumable",
        "a full log leaves the status running",
    ),
    Mutant("cli/shell.py", "            stop.request(why)\n", "", "cli/test_streams.py", "nobody hears that the output broke"),
    Mutant(
        "method/save.py",
        "target.copy_(folded.reshape(target.shape))",
        "target.copy_(target)",
        "method/test_save.py::test_what_learnt_on_top_is_in_the_plain_weights_that_are_saved",
        "what learnt on top is not in the weights that are saved",
    ),
    Mutant(
        "method/refuse.py",
        "and _overlap(tensor, other):",
        "and _overlap(tensor, other) and method.changes_weights:",
        "method/test_refuse.py::test_a_weight_that_is_another_one_too_is_refused",
        "a skipped guard: a weight tied to Q freezes with it",
    ),
    Mutant(
        "experiments/slurm.py",
        'in ("Cc", "Zl", "Zp", "Cs")]',
        'in ("Zl", "Zp", "Cs")]',
        "security/test_scripts.py::test_a_working_folder_with_a_line_end_in_its_name_is_refused",
        "a skipped guard: a folder's name runs as a command",
    ),
)


def outcome_of(tests: str, source: Path) -> tuple[int, str]:
    """Run tests on a copy of the code; return pytest's exit code and the first test that failed."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-m", "not slow", "--tb=no"]
    command += [f"tests/{name}" for name in tests.split()]
    environment = {**os.environ, "PYTHONPATH": str(source), "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
    try:
        child = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return 1, "the tests hang"
    # Anything but passed (0) and failed (1), as when nothing was collected, proves nothing.
    assert child.returncode in (0, 1), child.stdout + child.stderr
    failed = [
        line.split(" - ")[0].split("::")[-1] for line in child.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))
    ]
    return child.returncode, failed[0] if failed else ""


def killed(mutant: Mutant) -> tuple[bool, str, float]:
    """Apply a mutant to a copy of the code and run its tests; whether they failed, which one first, and how long it took."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="oelm-mutant-") as folder:
        copy = Path(shutil.copytree(ROOT / "src", Path(folder) / "src", ignore=shutil.ignore_patterns("__pycache__")))
        path = copy / "oelm" / mutant.file
        text = path.read_text(encoding="utf-8")
        assert text.count(mutant.old) == 1, f"{mutant.file}: {mutant.old!r} stands there {text.count(mutant.old)} times"
        changed = text.replace(mutant.old, mutant.new)
        # One that is no Python would fail every test.
        compile(changed, mutant.file, "exec")
        path.write_text(changed, encoding="utf-8")
        code, by = outcome_of(mutant.tests, copy)
    return code == 1, by, time.monotonic() - began


def main() -> int:
    numbers = [int(text) for text in sys.argv[1:]] or list(range(1, len(MUTANTS) + 1))
    # A test that fails without them proves nothing of mutants.
    needed = " ".join(dict.fromkeys(name for number in numbers for name in MUTANTS[number - 1].tests.split()))
    code, by = outcome_of(needed, ROOT / "src")
    if code:
        print(f"the tests do not pass as it is: {by}")
        return 1
    with ThreadPoolExecutor(max_workers=2) as pool:
        outcomes = pool.map(lambda number: killed(MUTANTS[number - 1]), numbers)
        survivors = 0
        for number, (is_killed, by, seconds) in zip(numbers, outcomes, strict=True):
            mutant = MUTANTS[number - 1]
            survivors += not is_killed
            outcome, hint = "killed" if is_killed else "SURVIVED", f": {by}" if by else ""
            print(f"{number:2} {outcome} {mutant.file}: {mutant.why} ({seconds:.0f} s){hint}", flush=True)
    print(f"{len(numbers) - survivors} of {len(numbers)} mutants killed")
    return 0 if survivors <= len(MUTANTS) - NEEDED else 1


if __name__ == "__main__":
    sys.exit(main())
