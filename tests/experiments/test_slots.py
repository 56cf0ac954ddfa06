"""Where runs are put, with cards that tell what is written down: on those that the user shows, each with one run of ours."""

from __future__ import annotations

from pathlib import Path

import pytest

from oelm.errors import ConfigError
from oelm.experiments.queue import Slots
from oelm.experiments.slots import MIN_READINGS, READ_EVERY_S, CpuSlots, GpuPool, choose_slots
from tests.cases import case
from tests.experiments.test_gpus import Server, card, told


def slots_of(server: Server, folder: Path, *listed: int) -> GpuPool:
    return server.pool(folder, listed or "auto")


def names(server: Server, slots: GpuPool, *, adopted: int, times: int = MIN_READINGS) -> list[str]:
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


VISIBLE = "CUDA_VISIBLE_DEVICES"
MIG = ["MIG-4c0a-1", "MIG-4c0a-2"]


def chosen(monkeypatch: pytest.MonkeyPatch, shown: str | None, asked: str | None = None, jobs: int | None = None) -> Slots:
    """Return what is chosen where CUDA_VISIBLE_DEVICES is so, on a machine of three cards: GPU-0, GPU-1 and GPU-2."""
    told(monkeypatch, {}, {}, {})
    monkeypatch.delenv(VISIBLE, raising=False)
    if shown is not None:
        monkeypatch.setenv(VISIBLE, shown)
    return choose_slots(asked, jobs, budget="laptop")


def test_who_hides_the_gpus_gets_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    for shown in ("", " ", "-1", "NoDevFiles", "-1,0", ",1"):
        with case(shown):
            assert isinstance(chosen(monkeypatch, shown), CpuSlots)
            assert isinstance(chosen(monkeypatch, shown, jobs=2), CpuSlots)
            with pytest.raises(
                ConfigError, match="^--gpus auto: CUDA_VISIBLE_DEVICES hides every GPU; unset it, or leave --gpus out$"
            ):
                chosen(monkeypatch, shown, "auto")


def test_cards_that_are_shown_are_the_only_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    cases: list[tuple[str, str]] = [
        ("0", "0"),
        ("2,0", "2, 0"),
        (" 1 , 2", "1, 2"),
        ("1,-1,2", "1"),
        ("GPU-1", "1"),
        ("GPU-2,GPU-0", "2, 0"),
        ("GPU-2,0", "2, 0"),
    ]
    for shown, those in cases:
        for asked in (None, "auto"):
            with case(shown, those, asked):
                made = chosen(monkeypatch, shown, asked)
                assert str(made) == f"one run a GPU on {those}" and made.count == len(those.split(", "))


def test_what_shows_no_card_of_this_machine_is_refused_with_those_that_are(monkeypatch: pytest.MonkeyPatch) -> None:
    for shown in ("3", "GPU-9", "GPU-", "GPU-00", "gpu-0", "all", "0;1", "\u0663", "0,nonsense"):
        with case(shown):
            with pytest.raises(ConfigError, match=r"^CUDA_VISIBLE_DEVICES: .* is none of the GPUs here: 0 \(GPU-0\), 1 "):
                chosen(monkeypatch, shown)
            assert isinstance(chosen(monkeypatch, shown, "none"), CpuSlots)
            assert str(chosen(monkeypatch, shown, "1")) == "one run a GPU on 1"


@pytest.mark.parametrize("shown", ["0,0", "1,GPU-1", f"{MIG[0]},{MIG[0]}", f"0,{MIG[0]}"])
def test_a_card_that_is_shown_twice_or_beside_slices_is_refused(shown: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=f"^CUDA_VISIBLE_DEVICES={shown}: name each GPU once, and do not mix slices"):
        chosen(monkeypatch, shown)


def test_slices_are_given_by_their_own_name_and_never_beside_a_run_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    made = chosen(monkeypatch, ",".join(MIG))
    assert str(made) == "one run a slice of a GPU on 2 of them" and made.take(adopted=1) is None
    given = [made.take(adopted=0) for _ in range(made.count + 1)]
    assert [slot.environment()[VISIBLE] if slot else None for slot in given] == [*MIG, None]


def test_without_the_variable_or_without_gpus_it_is_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    made = chosen(monkeypatch, None)
    assert str(made) == "one run a GPU on those of 3 that are free" and made.count == 3
    told(monkeypatch)
    for shown in ("nonsense", "0", ""):
        monkeypatch.setenv(VISIBLE, shown)
        assert isinstance(choose_slots(None, None, budget="laptop"), CpuSlots)


def test_the_cpu_takes_as_many_runs_as_asked_those_left_behind_included() -> None:
    slots = CpuSlots(2, threads=1)
    first, second = slots.take(adopted=0), slots.take(adopted=0)
    assert first is not None and second is not None and slots.take(adopted=0) is None
    first.release()
    assert slots.take(adopted=1) is None
    assert slots.take(adopted=0) is not None
