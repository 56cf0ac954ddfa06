"""Print the modules that `oelm train --text` enters before its first training step, and how often it changes package.

    python studies/walk.py [--most-modules N] [--most-switches N]

A module is entered when one of its functions is called; loading it does not count. Modules are listed by first entry.
A switch is a pair of neighbours in that list from two packages (cli, experiments, train, data, ...). Modules directly
under `oelm` belong to none and are listed without counting as a switch. Exits with 1 above a given bound.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path
from types import FrameType
from typing import Any

_TEXT = "A line of text about nothing in particular, number {}.\n"


class Walk:
    """Records the first entry of each module of oelm until `train_step` is called; used with sys.setprofile."""

    def __init__(self) -> None:
        self.modules: list[str] = []
        self._loading = 0
        self._known = set[str]()

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        if event not in ("call", "return"):
            return
        name = str(frame.f_globals.get("__name__", ""))
        if not name.startswith("oelm."):
            return
        if frame.f_code.co_name == "<module>":
            self._loading += 1 if event == "call" else -1
        elif event == "call" and not self._loading and name not in self._known:
            self._known.add(name)
            self.modules.append(name)
        if event == "call" and frame.f_code.co_name == "train_step":
            sys.setprofile(None)

    @property
    def packages(self) -> list[str]:
        """The package of each module in a package, in order."""
        return [name.split(".")[1] for name in self.modules if name.count(".") > 1]

    @property
    def num_switches(self) -> int:
        return sum(one != other for one, other in zip(self.packages, self.packages[1:], strict=False))


def record(folder: Path) -> Walk:
    """Train one tiny model on a text file in `folder`, and return the walk to its first step."""
    text = folder / "text.txt"
    text.write_text("".join(_TEXT.format(number) for number in range(2000)))
    os.environ["OELM_CACHE"] = str(folder / "cache")
    # Not at the top: what is loaded here must be loaded while the walk is recorded, as in a fresh process.
    from oelm.cli.app import app

    out = str(folder / "run")
    sys.argv = ["oelm", "train", "--text", str(text), "--budget", "smoke", "--steps", "2", "--out", out]
    walk = Walk()
    sys.setprofile(walk)
    try:
        app()
    except SystemExit as ended:
        if ended.code:
            raise
    finally:
        sys.setprofile(None)
    return walk


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--most-modules", type=int, default=sys.maxsize)
    parser.add_argument("--most-switches", type=int, default=sys.maxsize)
    bounds = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        walk = record(Path(folder))
    print("\n".join(walk.modules))
    print(f"{len(walk.modules)} modules, {walk.num_switches} switches between packages")
    if len(walk.modules) > bounds.most_modules or walk.num_switches > bounds.most_switches:
        sys.exit(1)


if __name__ == "__main__":
    main()
