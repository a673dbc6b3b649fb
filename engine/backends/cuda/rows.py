"""Ops on each number of a row: launches of small kernels in `cuda/linear/`."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from polarlm.engine.backends.cuda.device import Array, Device, row_stride
from polarlm.engine.backends.cuda.launch import LaunchConfig, Launcher, threads_for
from polarlm.engine.backends.delta import DeltaEnds, DeltaSlots, DeltaWeights, Mamba2Weights
from polarlm.engine.errors import KernelError


class RowOps:
    """The ops `softcap`, `activate`, `scale`, `gate` and `short_conv`."""

    def __init__(self, device: Device, launch: Launcher):
        self._device, self._launch = device, launch

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

    def gated_delta(
        self, projected: Array, w: DeltaWeights, slots: DeltaSlots, spans: Array, ends: DeltaEnds | None = None
    ) -> Array:
        raise KernelError("There is no kernel of gated delta rules for a GPU")

    def mamba2(
        self, projected: Array, w: Mamba2Weights, slots: DeltaSlots, spans: Array, ends: DeltaEnds | None = None
    ) -> Array:
        raise KernelError("There is no kernel of Mamba 2 for a GPU")

    def advance_delta(self, layers: Sequence[DeltaSlots], slots: Sequence[int], *, tiled: bool) -> None:
        raise KernelError("There is no kernel of gated delta rules for a GPU")

    def short_conv(self, inputs: Array, conv: Array, bias: Array | None, slots: Array, rows: Array) -> Array:
        (width, n), y = conv.shape, self._device.empty((len(inputs), conv.shape[1]), np.float32)
        config = LaunchConfig({"WIDTH": width}, threads_for(n))
        args = y, inputs, conv, bias, slots, rows, n, slots.shape[1]
        self._launch("short_conv", (-(-n // config.threads), len(inputs)), config, *args)
        return y
