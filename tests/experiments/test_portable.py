"""Paths and names of this machine are taken out of a text whole, and nothing else is."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oelm.experiments.portable import Machine
from oelm.files import dump_json
from tests.cases import case

MACHINE = Machine(paths=(("/root", "~"), ("/root/lab", ".")), hosts=("vm.example.org", "vm"))


def test_whole_paths_and_whole_names_are_replaced_and_no_others() -> None:
    cases: list[tuple[str, str]] = [
        ("/root/x", "~/x"),
        ("/root", "~"),
        ("read /root.", "read ~."),
        ("'/root': 1", "'~': 1"),
        ("a=/root/x:/root/y", "a=~/x:~/y"),
        ("file:///root/x", "file:~/x"),
        ("//root//x", "~//x"),
        ("/root/lab/x", "./x"),
        ("/root/lab", "."),
        ("/root/lab2/x", "~/lab2/x"),
        ("/root/root/x", "~/root/x"),
        ("/rootfs/x", "/rootfs/x"),
        ("/root-2/x", "/root-2/x"),
        ("/root.old/x", "/root.old/x"),
        ("/data/root/x", "/data/root/x"),
        ("./root/x ../root/x", "./root/x ../root/x"),
        ("a\\n/root/x\\tvm", "a\\n~/x\\thost"),
        ("\\/root/x", "\\~/x"),
        ("in use on vm since", "in use on host since"),
        ("ada@vm.example.org:/x", "ada@host:/x"),
        ("/net/VM/x", "/net/host/x"),
        ("vmlinux my-vm vm_1 vm.txt x.vm", "vmlinux my-vm vm_1 vm.txt x.vm"),
    ]
    for text, expected in cases:
        with case(text, expected):
            assert MACHINE.stripped(text) == expected


@pytest.mark.parametrize("home", ["/", "//", "", "C:\\"])
def test_a_home_that_is_the_root_of_a_disk_ruins_nothing(home: str) -> None:
    text = "/etc/x and C:\\x and a/b"
    assert Machine(paths=((home, "~"),), hosts=()).stripped(text) == text


def test_a_home_on_windows_is_replaced_whichever_way_its_slashes_lean() -> None:
    machine = Machine(paths=(("C:\\Users\\ada", "~"),), hosts=())
    assert machine.stripped("C:\\Users\\ada\\x C:/Users/ada/x C:\\Users\\adam") == "~\\x ~/x C:\\Users\\adam"


def test_a_host_named_like_a_setting_leaves_the_settings_alone() -> None:
    machine = Machine(paths=(), hosts=("cpu",))
    config = {"device": "cpu", "cpu": "on cpu"}
    assert machine.stripped_json(config, keep_words=True) == {"device": "cpu", "cpu": "on host"}
    assert machine.stripped_json(config, keep_words=False) == {"device": "host", "cpu": "on host"}


FRAGMENTS = st.lists(st.sampled_from(["/root", "/", "lab", "fs", "vm", ".", " ", '"', "\\", "~", "-", "\u00e9", "x"])).map(
    "".join
)


@settings(deadline=None)
@given(FRAGMENTS)
def test_stripping_twice_is_stripping_once(text: str) -> None:
    assert MACHINE.stripped(MACHINE.stripped(text)) == MACHINE.stripped(text)


@settings(deadline=None)
@given(st.recursive(st.none() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | FRAGMENTS, st.lists))
def test_stripped_json_is_json_of_the_same_shape_and_numbers(value: Any) -> None:
    def shape(item: Any) -> Any:
        return [shape(inner) for inner in item] if isinstance(item, list) else type(item) if isinstance(item, str) else item

    assert shape(json.loads(dump_json(MACHINE.stripped_json(value, keep_words=False)))) == shape(value)
