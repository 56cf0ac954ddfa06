"""How long a queue says that it will take: by what runs said, took before, or are expected to."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from oelm.cli.queue import QueueView
from oelm.experiments.plan import PlannedRun
from oelm.experiments.queue import Job, JobState
from oelm.experiments.study import Study
from oelm.files import write_json
from tests.experiments.planned import PAIR, catalog_of, finish
from tests.experiments.recorded import status_of

MINUTE = 60.0


def planned(root: Path, count: int) -> list[PlannedRun]:
    return Study(("base",), "smoke", root, seeds=list(range(count))).plan(catalog_of(PAIR))


def under_way(run: PlannedRun, eta_s: float | None, state: JobState = "running") -> Job:
    write_json(run.path / "status.json", status_of("running", eta_s=eta_s).model_dump(mode="json"), durable=False)
    return Job(run, state=state)


def done(run: PlannedRun, *, here_s: float, whole_s: Any) -> Job:
    """Return a job that ended just now; `whole_s` is what its own record says of all its sittings."""
    finish(run, 3.0)
    write_json(run.path / "timing_stats.json", whole_s, durable=False)
    return Job(run, state="done", seconds=here_s)


def wall(seconds: float) -> dict[str, Any]:
    return {"wall_s": {"total": seconds}}


def test_a_run_resumed_for_its_last_minute_does_not_make_the_others_short(tmp_path: Path) -> None:
    first, *rest = planned(tmp_path, 40)
    view = QueueView(40, 1, {})
    view.on_end(done(first, here_s=MINUTE, whole_s=wall(50 * MINUTE)))
    assert view.eta_s([Job(run) for run in rest]) == 39 * 50 * MINUTE


@pytest.mark.parametrize("record", [{}, {"wall_s": {}}, {"wall_s": None}, {"wall_s": {"total": "long"}}, wall(1.0)])
def test_a_run_whose_record_says_less_counts_by_the_clock(record: dict[str, Any], tmp_path: Path) -> None:
    first, *rest = planned(tmp_path, 3)
    view = QueueView(3, 1, {})
    view.on_end(done(first, here_s=5 * MINUTE, whole_s=record))
    assert view.eta_s([Job(run) for run in rest]) == 10 * MINUTE


def test_what_is_expected_is_shown_before_the_first_run_ends_and_what_was_measured_after(tmp_path: Path) -> None:
    first, *rest = planned(tmp_path, 3)
    view = QueueView(3, 1, {str(run.path): 20 * MINUTE for run in (first, *rest)})
    assert view.eta_s([Job(first, state="running"), *map(Job, rest)]) == 60 * MINUTE
    ended = done(first, here_s=30 * MINUTE, whole_s=wall(30 * MINUTE))
    view.on_end(ended)
    assert view.eta_s([ended, *map(Job, rest)]) == 60 * MINUTE
    assert view.eta_s([ended, under_way(rest[0], 10 * MINUTE), Job(rest[1])]) == 40 * MINUTE


def test_nothing_is_guessed_of_a_run_of_which_nothing_is_known(tmp_path: Path) -> None:
    first, second = planned(tmp_path, 2)
    for jobs in ([Job(first), Job(second)], [under_way(first, 9.0), Job(second)], [under_way(first, None)]):
        assert QueueView(2, 1, {str(tmp_path): 1.0}).eta_s(jobs) is None


def test_runs_are_shared_out_among_the_places_there_are(tmp_path: Path) -> None:
    runs = planned(tmp_path, 16)
    expected = {str(run.path): 10 * MINUTE for run in runs}
    # Before any has a place: on as many as there may be. Then on as many as run, for others may use the rest.
    assert QueueView(16, 8, expected).eta_s([Job(run) for run in runs]) == 20 * MINUTE
    jobs = [under_way(runs[0], 10 * MINUTE), under_way(runs[1], 10 * MINUTE, "elsewhere")]
    assert QueueView(16, 8, expected).eta_s([*map(Job, runs[2:]), *jobs]) == 80 * MINUTE


def test_the_longest_of_the_last_runs_counts(tmp_path: Path) -> None:
    jobs = [under_way(run, minutes * MINUTE) for run, minutes in zip(planned(tmp_path, 3), (1, 50, 1), strict=True)]
    assert QueueView(3, 3, {}).eta_s(jobs) == 50 * MINUTE


def test_a_stopped_run_is_not_counted_as_done(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    states: tuple[JobState, ...] = ("done", "stopped", "failed", "found done", "waiting")
    jobs = [Job(run, state=state) for run, state in zip(planned(tmp_path, 5), states, strict=True)]
    view = QueueView(5, 1, {})
    view._shown -= 3600
    view.on_tick(jobs)
    assert "2 of 5 runs done, 1 failed, 1 stopped, 0 running" in capsys.readouterr().out
