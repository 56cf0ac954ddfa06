"""Benchmarks: ratios measured side by side, with the arithmetic bound beside them."""
