"""Measurements, such as `python -m polarlm.bench.speed`, `….quality`, `….serving` and `….gpu`."""

import polarlm  # noqa: F401 - `bench` alone is an alias
