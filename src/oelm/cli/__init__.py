"""The command line: one module per command; each parses, calls one function, prints."""

from __future__ import annotations


def main() -> None:
    """Run the `oelm` command."""
    from oelm.cli.app import app

    app()
