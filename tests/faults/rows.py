"""Which tests stand for which fault or attack: a whole file, or one test of it, by its place under tests/."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Row:
    """One thing that must hold, and the tests that try it."""

    title: str
    tests: tuple[str, ...]


ROWS: dict[str, Row] = {
    "R1": Row(
        "SIGKILL at random moments and at six points of a save",
        (
            "faults/test_random_kills.py::test_run_killed_at_a_random_moment_loses_at_most_one_interval_and_no_bit",
            "faults/test_kills.py::test_run_killed_at_ten_random_points_continues_bit_for_bit",
            "faults/test_kills.py::test_run_killed_inside_a_save_continues_bit_for_bit",
            "faults/test_finetune_killed.py",
            "faults/test_preparing_killed.py::test_preparation_killed_at_a_point_and_repeated_gives_the_same_bytes",
            "faults/test_preparing_killed.py::test_preparation_killed_at_random_times_gives_the_same_bytes",
            "faults/test_durable.py",
        ),
    ),
    "R2": Row(
        "killed within an epoch, at its end, before the first save: batches in order",
        ("faults/test_random_kills.py::test_batches_of_a_killed_run_are_the_same_in_order",),
    ),
    "R3": Row(
        "a finished run resumed: says so, changes no byte",
        (
            "faults/test_kills.py::test_finished_run_says_so_and_changes_no_byte",
            "faults/test_runner_kills.py::test_finished_queue_says_so_and_changes_no_byte",
            "cli/test_cli.py::test_the_same_command_again_says_done_and_changes_no_byte",
        ),
    ),
    "R4": Row(
        "full disk",
        (
            "faults/test_starved.py::test_file_size_limit_stops_resumable_and_loses_nothing",
            "faults/test_starved.py::test_full_disk_stops_resumable_and_loses_nothing",
            "faults/test_full_disk.py",
            "faults/test_broken_output.py::test_a_run_of_a_queue_whose_console_log_is_full_is_stopped_and_not_failed",
            "faults/test_preparing_killed.py::test_a_full_disk_stops_resumable_and_with_room_again_gives_the_same_bytes",
            "test_files.py::test_a_device_that_is_truly_full_is_told_as_such",
            "test_files.py::test_a_true_file_size_limit_keeps_the_old_file",
        ),
    ),
    "R5": Row("damaged and foreign checkpoints", ("faults/test_damaged.py", "faults/test_foreign_checkpoints.py")),
    "R6": Row(
        "a save over the checkpoint that was loaded",
        ("faults/test_damaged.py::test_a_checkpoint_saved_over_itself_is_the_same",),
    ),
    "R7": Row(
        "two processes on one run",
        (
            "faults/test_races.py",
            "faults/test_two_writers.py",
            "faults/test_starved.py::test_of_processes_started_together_exactly_one_trains",
            "experiments/test_no_flock.py",
        ),
    ),
    "R8": Row(
        "SIGTERM and SIGINT in every phase, SIGHUP, broken outputs",
        ("faults/test_signals.py", "faults/test_broken_output.py", "cli/test_streams.py"),
    ),
    "R9": Row(
        "a loss or gradient that is not finite",
        (
            "faults/test_starved.py::test_what_is_not_finite_stops_before_the_update_and_names_the_batch",
            "train/test_step.py::test_what_is_not_finite_stops_the_run_before_anything_is_updated",
            "train/test_resume.py::test_ruined_weights_are_told_by_the_evaluation_and_never_become_the_best",
        ),
    ),
    "R10": Row(
        "spoiled token files",
        (
            "faults/test_other_setting.py::test_spoiled_token_file_is_refused_by_name_and_never_kills",
            "faults/test_starved.py::test_resume_on_other_data_is_refused",
            "data/test_tokens.py",
        ),
    ),
    "R11": Row("2 ranks: one killed, one stopped, one killed in a save", ("faults/test_ranks.py",)),
    "R12": Row("1 rank against 2 and 4 ranks; NaN on one of them", ("train/test_dist.py",)),
    "R13": Row(
        "frozen bytes under decay, 200 steps, every architecture",
        (
            "method/test_architectures.py::test_200_steps_with_decay_move_everything_but_what_is_frozen",
            "method/test_architectures.py::test_frames_are_orthonormal_by_the_heads_of_the_architecture",
            "method/test_architectures.py::test_plain_weights_load_into_a_frozen_model",
            "method/test_architectures.py::test_a_thawed_model_is_the_architectures_own_again_and_learns_everywhere",
            "method/test_architectures.py::test_restoring_gives_back_the_bytes_there_were",
            "method/test_architectures.py::test_two_processes_train_every_architecture_alike",
            "faults/test_thaw_killed.py",
            "method/test_apply_audit.py::test_200_steps_with_weight_decay_move_everything_but_what_is_frozen",
            "method/test_apply_audit.py::test_no_optimizer_state_exists_for_what_is_frozen",
            "train/test_run.py::test_every_preset_trains_and_its_frozen_weights_do_not_move",
            "train/test_run.py::test_weights_that_moved_never_reach_a_checkpoint",
        ),
    ),
    "R14": Row(
        "resumed with other threads, versions, config, code",
        (
            "faults/test_other_setting.py::test_other_setting_warns_with_the_difference_and_strict_refuses_it",
            "faults/test_other_setting.py::test_other_config_is_refused_with_the_difference",
            "faults/test_starved.py::test_other_thread_count_warns_and_strict_refuses",
        ),
    ),
    "R15": Row(
        "torn, damaged and deleted metrics, read-only folder, clock set back, 10,000 runs",
        (
            "faults/test_metrics_damaged.py",
            "runs/test_metrics.py::test_a_tail_torn_at_any_byte_costs_only_its_own_row",
            "runs/test_find.py::test_a_status_that_cannot_be_read_is_damaged_and_no_crash",
            "experiments/test_gaps.py::test_evaluations_are_read_by_step_without_a_torn_tail",
            "runs/test_find.py::test_a_heartbeat_from_the_future_is_fresh",
            "faults/test_other_setting.py::test_folder_that_cannot_be_written_is_told",
            "faults/test_other_setting.py::test_text_that_cannot_be_read_is_told",
            "faults/test_other_setting.py::test_a_text_of_an_endless_name_is_refused",
            "faults/test_other_setting.py::test_ten_thousand_runs_are_listed_within_two_seconds",
        ),
    ),
    "R16": Row(
        "run, launcher or everything killed; numbers of processes used again",
        (
            "faults/test_runner_kills.py::test_queue_whose_launcher_and_run_are_killed_finishes_exactly_once",
            "faults/test_runner_kills.py::test_queue_killed_at_random_moments_finishes_exactly_once",
            "experiments/test_runner.py::test_run_whose_launcher_was_killed_is_adopted_and_not_begun_again",
            "experiments/test_runner.py::test_dead_run_with_the_number_of_a_living_process_is_taken_up",
            "runs/test_find.py::test_a_run_is_running_stale_and_dead_with_its_process",
        ),
    ),
    "R17": Row(
        "the same command twice; golden losses",
        ("faults/test_kills.py::test_the_oracle_repeats_itself_bit_for_bit", "train/test_golden.py"),
    ),
    "S1": Row(
        "hostile pickles; nothing that can run foreign code",
        (
            "security/test_hostile_files.py::test_a_hostile_pickle_in_a_run_is_never_unpickled",
            "security/test_hostile_files.py::test_a_hostile_pickle_as_data_is_never_unpickled",
            "security/test_hostile_files.py::test_a_model_that_is_only_a_pickle_is_refused_with_the_safe_route",
            "security/test_banned.py",
            "security/test_model_folders.py",
        ),
    ),
    "S2": Row(
        "weights that are only a pickle",
        (
            "models/test_hub.py::test_weights_as_a_pickle_are_refused_with_the_conversion_and_never_opened",
            "models/test_hub.py::test_a_pickle_beside_safetensors_is_not_opened",
        ),
    ),
    "S3": Row("hostile YAML", ("experiments/test_yamlfile.py",)),
    "S4": Row(
        "hostile names, links that lead out",
        (
            "experiments/test_registry.py::test_a_name_that_is_no_folder_s_everywhere_is_refused_for_ids_and_groups",
            "experiments/test_registry.py::test_ids_equal_but_for_case_are_refused_in_one_file",
            "runs/test_rundir.py::test_linked_checkpoints_are_refused",
            "train/test_resume.py::test_pointer_that_leads_out_of_the_run_is_refused",
            "test_files.py::test_publishing_onto_a_symlink_never_writes_through_it",
            "test_files.py::test_sweeping_never_goes_through_a_symlink",
        ),
    ),
    "S5": Row(
        "cleaning with a hostile or wrong root",
        ("runs/test_manage.py", "cli/test_stop_clean.py::test_clean_takes_no_name_that_is_not_a_runs"),
    ),
    "S6": Row(
        "checkpoints with hostile JSON or headers",
        (
            "security/test_hostile_files.py::test_a_state_of_another_kind_is_refused_by_file",
            "security/test_hostile_files.py::test_a_tensor_file_that_promises_the_moon_is_refused_in_little_memory",
        ),
    ),
    "S7": Row(
        "HTML, Markdown, ANSI, CSV formulas, LaTeX in names and notes",
        (
            "report/test_html.py::test_no_text_changes_the_elements_of_the_page",
            "report/test_markdown.py::test_no_text_changes_the_structure",
            "report/test_markdown.py::test_no_html_comes_from_a_text",
            "report/test_csv.py::test_a_formula_is_text_to_a_spreadsheet",
            "report/test_csv.py::test_no_field_begins_a_formula_or_holds_a_control_character",
            "report/test_latex.py::test_no_text_holds_a_command_or_a_special_character",
            "cli/test_status_commands.py::test_text_of_a_run_cannot_drive_the_terminal",
            "cli/test_report_command.py::test_text_of_users_cannot_drive_the_terminal",
        ),
    ),
    "S8": Row(
        "the live page's server: one reader, one page; reports are files that load nothing",
        (
            "security/test_live_server.py",
            "security/test_banned.py::test_nothing_that_can_run_foreign_code_is_named",
            "report/test_html.py::test_every_address_in_the_page_is_inside_it",
            "report/test_html.py::test_the_policy_allows_nothing_but_the_pages_own_scripts_and_style",
        ),
    ),
    "S9": Row(
        "odd arguments arrive byte for byte, in scripts for SLURM too; control characters are refused there",
        (
            "experiments/test_launch.py::test_folder_and_config_arrive_byte_for_byte",
            "cli/test_run_command.py::test_odd_names_of_folders_and_files_arrive_whole",
            "security/test_scripts.py",
        ),
    ),
    "S10": Row(
        "secrets, homes and hosts stay here",
        (
            "security/test_nothing_leaks.py",
            "experiments/test_portable_folder.py::test_nothing_of_the_machine_travels",
            "experiments/test_portable.py",
            "report/test_build.py::test_a_report_names_no_host_and_no_home_folder",
        ),
    ),
    "S12": Row(
        "pinned requirements and revisions, no network needed",
        (
            "security/test_banned.py::test_requirements_are_pinned_to_one_version_each",
            "security/test_banned.py::test_every_download_from_the_hub_names_a_commit",
            "data/test_hub.py::test_every_set_of_the_hub_is_pinned_by_a_commit",
            "experiments/test_catalog.py::test_every_pretrained_model_is_pinned_by_commit",
            "security/test_nothing_leaks.py::test_a_run_and_its_report_need_no_network",
        ),
    ),
    "S13": Row(
        "modes of files",
        (
            "test_files.py::test_files_and_folders_are_as_readable_as_the_user_wants_them",
            "test_files.py::test_what_is_published_is_not_writable_by_others",
        ),
    ),
}


def rows_of(nodeid: str) -> list[str]:
    """Return the rows that a collected test stands for."""
    name = nodeid.split("[")[0].removeprefix("tests/")
    return [row for row, facts in ROWS.items() if name in facts.tests or name.split("::")[0] in facts.tests]
