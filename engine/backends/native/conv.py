"""The op of short convolutions."""

from __future__ import annotations

import numpy as np

from polarlm.engine.backends.native.kernels.conv import ConvArguments, short_conv
from polarlm.engine.backends.native.launch import Launcher


class ConvOps:
    """The op `short_conv`."""

    def __init__(self, launch: Launcher) -> None:
        self._launch = launch

    def short_conv(
        self, inputs: np.ndarray, conv: np.ndarray, bias: np.ndarray | None, slots: np.ndarray, rows: np.ndarray
    ) -> np.ndarray:
        y = self._launch.empty((len(inputs), inputs.shape[1] // 3))
        arguments = ConvArguments(
            inputs=inputs,
            conv=conv,
            bias=bias,
            slots=slots,
            rows=rows,
            y=y,
            channels=y.shape[1],
            slot_rows=slots.shape[1],
        )
        self._launch(short_conv(len(conv), has_bias=bias is not None), len(inputs), arguments)
        return y
