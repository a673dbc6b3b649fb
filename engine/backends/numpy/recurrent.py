"""The ops of layers whose state is not K/V, in NumPy."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from polarlm.engine.backends.delta import LARGEST_CODE, LEAST_SCALE, DeltaEnds, FetchStates
from polarlm.engine.backends.numpy.gated_delta import gated_delta
from polarlm.engine.backends.numpy.mamba2 import mamba2
from polarlm.engine.backends.numpy.recurrence import advance_delta
from polarlm.engine.backends.numpy.rows import short_conv
from polarlm.model_loaders.config import Recurrent


class RecurrentOps:
    """See `engine.backends.recurrent_ops`."""

    short_conv = staticmethod(short_conv)
    gated_delta = staticmethod(gated_delta)
    mamba2 = staticmethod(mamba2)
    advance_delta = staticmethod(advance_delta)

    def check_recurrent(self, mixer: Recurrent, block_size: int) -> None:
        """Every shape is computed."""

    def keep_states(self, ends: DeltaEnds, *, exact: bool) -> FetchStates:
        kept = {"inputs": ends.inputs.copy()}
        if exact:
            kept["matrices"] = ends.matrices.copy()
        else:
            kept["codes"], kept["scales"] = encode(ends.matrices)
        return lambda: kept

    def restore_states(self, kept: Mapping[str, np.ndarray]) -> np.ndarray:
        return kept["matrices"] if "matrices" in kept else decode(kept["codes"], kept["scales"])


@np.errstate(invalid="ignore", over="ignore")  # of damaged weights, which the check of logits finds
def encode(matrices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return codes int8 (..., A, D) of matrices (..., A, D), and scales (..., D): one for each value channel.

    A channel of values that is larger than the others then costs these no precision.
    """
    scales = np.abs(matrices).max(axis=-2) / np.float32(LARGEST_CODE)
    factors = np.divide(1, scales, out=np.zeros_like(scales), where=scales > LEAST_SCALE)
    return np.rint(matrices * factors[..., None, :]).astype(np.int8), scales


def decode(codes: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Return the matrices (..., A, D) that were encoded."""
    return codes * scales[..., None, :]
