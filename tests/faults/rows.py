from dataclasses import dataclass


@dataclass(frozen=True)
class Row:
    title: str
    tests: tuple[str, ...]


ROWS = {n: Row(n, ()) for n in [*(f"R{i}" for i in range(1, 18)), *(f"S{i}" for i in range(1, 14))]}


def rows_of(nodeid: str) -> list[str]:
    return []
