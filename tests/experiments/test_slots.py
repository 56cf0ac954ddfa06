"""Where runs are put, with cards that tell what is written down: none on a card that a run of ours still has."""

from __future__ import annotations

from pathlib import Path

from oelm.experiments.gpus import MIN_READINGS, READ_EVERY_S
from oelm.experiments.slots import GpuSlots
from tests.experiments.test_gpus import Server, card


def slots_of(server: Server, folder: Path, *listed: int) -> GpuSlots:
    return GpuSlots(server.pool(folder, listed or "auto"), "cards")


def names(server: Server, slots: GpuSlots, *, adopted: int, times: int = MIN_READINGS) -> list[str]:
    """Return what is given in so many readings."""
    found = []
    for _ in range(times):
        while (slot := slots.take(adopted=adopted)) is not None:
            found.append(slot.name)
        server.now += READ_EVERY_S
    return found


def test_a_listed_card_is_not_given_while_a_run_that_its_launcher_left_behind_has_it(tmp_path: Path) -> None:
    server = Server([card(0, used=20_000, utilization=95, processes=1)])
    slots = slots_of(server, tmp_path, 0)
    assert names(server, slots, adopted=1, times=3 * MIN_READINGS) == []
    server.cards = [card(0)]
    assert names(server, slots, adopted=0, times=1) == ["cuda:0"]


def test_of_two_listed_cards_the_other_one_is_given(tmp_path: Path) -> None:
    for orphan, other in ((2, 3), (3, 2)):
        server = Server([card(index, used=20_000, processes=1) if index == orphan else card(index) for index in range(4)])
        slots = slots_of(server, tmp_path / str(orphan), 2, 3)
        assert names(server, slots, adopted=1, times=MIN_READINGS - 1) == []
        assert names(server, slots, adopted=1) == [f"cuda:{other}"]


def test_a_run_that_has_not_come_to_its_card_yet_is_waited_for(tmp_path: Path) -> None:
    server = Server([card(0), card(1)])
    slots = slots_of(server, tmp_path, 0, 1)
    assert names(server, slots, adopted=1, times=2) == []
    server.cards = [card(0), card(1, used=600, processes=1)]
    assert names(server, slots, adopted=1) == ["cuda:0"]


def test_listed_cards_are_given_at_once_where_no_run_was_left_behind(tmp_path: Path) -> None:
    server = Server([card(index, used=20_000, utilization=95, processes=1) for index in range(3)])
    assert names(server, slots_of(server, tmp_path, 2, 0), adopted=0, times=1) == ["cuda:2", "cuda:0"]


def test_cards_that_are_not_listed_are_not_given_however_idle(tmp_path: Path) -> None:
    server = Server([card(index) for index in range(4)])
    assert sorted(names(server, slots_of(server, tmp_path, 1, 3), adopted=1)) == ["cuda:1", "cuda:3"]


def test_auto_gives_what_was_idle_with_runs_left_behind_or_without(tmp_path: Path) -> None:
    for adopted in (0, 1):
        server = Server([card(0, processes=1), card(1)])
        slots = slots_of(server, tmp_path / str(adopted))
        assert names(server, slots, adopted=adopted, times=MIN_READINGS - 1) == []
        assert names(server, slots, adopted=adopted, times=1) == ["cuda:1"]
