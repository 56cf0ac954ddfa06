"""The command line: one module per command; each parses, calls one function, prints."""

from __future__ import annotations

import os


def main() -> None:
    """Run the `oelm` command."""
    # Before torch is loaded: threads that spin long while they wait ruin each other on a machine that is shared. Measured
    # on two cores: as fast when alone, 1.8 times as fast next to one busy process. The user's own choice is kept.
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")
    # Looking for plugins of pydantic, of which none has anything to do here, takes as long as all of our own modules.
    os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")
    from oelm.cli.app import app

    app()
