"""`python -m oelm` is `oelm`."""

from oelm.cli import main

main()
