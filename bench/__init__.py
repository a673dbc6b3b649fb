"""Measurements: `python -m bench.speed`, `python -m bench.quality` and `python -m bench.serving`."""

import polarlm  # noqa: F401 - `bench` alone is an alias
