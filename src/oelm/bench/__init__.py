"""Benchmarks: interleaved ratios with their arithmetic bound."""
