"""Measurements, `polarlm speed` and `polarlm quality`; in a checkout also those of `bench.lab`."""

import polarlm  # noqa: F401 - `bench` alone is an alias
