"""Measurements: `python -m bench.speed`, `python -m bench.quality` and `python -m bench.serving`."""
