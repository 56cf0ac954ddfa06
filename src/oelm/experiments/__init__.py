"""Experiments: named comparisons, and the one dial that sets their size."""
