"""Measurements: `python -m bench.speed` and `python -m bench.quality`."""
