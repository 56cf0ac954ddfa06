"""What several files of tests fine-tune on."""

from tests.train.conftest import bert, tables

__all__ = ["bert", "tables"]
