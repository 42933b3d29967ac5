"""Streaming answers through updates of the weights: ``python -m benchmarks.streaming``."""
