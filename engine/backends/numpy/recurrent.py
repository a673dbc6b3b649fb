"""The ops of layers whose state is not K/V, in NumPy."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from polarlm.engine.backends.delta import DeltaEnds, FetchStates
from polarlm.engine.backends.numpy.gated_delta import gated_delta
from polarlm.engine.backends.numpy.mamba2 import mamba2
from polarlm.engine.backends.numpy.recurrence import advance_delta
from polarlm.engine.backends.numpy.rows import short_conv
from polarlm.engine.quantization.snapshot_codes import SnapshotCodes
from polarlm.model_loaders.config import Recurrent


class RecurrentOps:
    """See `engine.backends.recurrent_ops`."""

    short_conv = staticmethod(short_conv)
    gated_delta = staticmethod(gated_delta)
    mamba2 = staticmethod(mamba2)
    advance_delta = staticmethod(advance_delta)

    def check_recurrent(self, mixer: Recurrent, block_size: int) -> None:
        """Every shape is computed."""

    def assign(self, to: np.ndarray, x: np.ndarray | float) -> None:
        to[...] = x

    def keep_states(self, ends: DeltaEnds, codes: SnapshotCodes) -> FetchStates:
        kept = {**codes.encode(ends.matrices), "inputs": np.array(ends.inputs)}
        return lambda: kept

    def restore_states(self, kept: Mapping[str, np.ndarray], codes: SnapshotCodes) -> np.ndarray:
        return codes.decode(kept)
