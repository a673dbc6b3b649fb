"""Ops on each number of a row: launches of small kernels in `cuda/linear/`."""

from __future__ import annotations

from polarlm.engine.backends.cuda.device import Array, row_stride
from polarlm.engine.backends.cuda.launch import LaunchConfig, Launcher, threads_for


class RowOps:
    """The ops `softcap`, `activate`, `scale` and `gate`."""

    def __init__(self, launch: Launcher):
        self._launch = launch

    def softcap(self, x: Array, cap: float) -> None:
        rows, n = x.shape
        config = LaunchConfig({"ACT": "float"}, threads_for(n))
        self._launch("softcap", (-(-n // config.threads), rows), config, x, n, row_stride(x), float(cap))

    def activate(self, x: Array, up: Array, activation: str) -> None:
        rows, n = x.shape
        config = LaunchConfig({"ACT": "float", "ACTIVATION": activation}, threads_for(n))
        grid = -(-n // config.threads), rows
        self._launch("activate", grid, config, x, up, n, row_stride(x), row_stride(up))

    def scale(self, x: Array, factor: Array) -> None:
        rows, n = x.shape
        config = LaunchConfig({"ACT": "float"}, threads_for(n))
        self._launch("scale", (-(-n // config.threads), rows), config, x, factor, n, row_stride(x))

    def gate(self, x: Array, logits: Array) -> None:
        rows, n = x.shape
        config = LaunchConfig({"ACT": "float", "WHOLE": int(logits.shape[1] == 1)}, threads_for(n))
        strides = row_stride(x), row_stride(logits)
        self._launch("gate", (-(-n // config.threads), rows), config, x, logits, n, *strides)
