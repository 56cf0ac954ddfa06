"""The command line: one module per command; each parses, calls one function, prints."""

from __future__ import annotations

import os


def main() -> None:
    """Run the `oelm` command."""
    # Before torch is loaded: threads that wait in a loop ruin each other on a machine that is shared. Measured on two
    # cores with one other process: ten times the tokens per second. A choice of the user's own stands.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    from oelm.cli.app import app

    app()
