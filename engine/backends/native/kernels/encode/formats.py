"""The specialization of the encoder for the format of a cache."""

from __future__ import annotations

import math

from polarlm.engine.backends.kv import CacheFormat
from polarlm.engine.backends.native.kernels.encode.unit import LANES, Encoding, scratch_bytes
from polarlm.engine.codecs.ring import RingTable
from polarlm.engine.codecs.trellis import TrellisTable
from polarlm.engine.codecs.turbo import TurboTable
from polarlm.engine.jit.run.workers import SCRATCH


def by_rounding(format: CacheFormat, side: int) -> Encoding | None:
    """The encoding of keys (side 0) or values (1) for a codec that rounds to a table of points; None without kernel."""
    codec, metric = ((format.codec_k, format.metric_k), (format.codec_v, format.metric_v))[side]
    rounding = codec.rounding
    if not isinstance(rounding, (RingTable, TurboTable, TrellisTable)) or format.block_size % LANES:
        return None
    feedback = None if metric is None else metric.token_feedback
    rounds = 0 if not isinstance(rounding, TrellisTable) else 1 if feedback is None else feedback.shape[1]
    encoding = Encoding(
        bits=rounding.bits,
        width=rounding.width,
        tokens=format.block_size,
        tilted=metric is not None and metric.tilt_mean is not None,
        along_tokens=feedback is not None and not rounds,
        mean_bits=0 if side else format.mean_bits,
        has_metric=metric is not None,
        # Without a limit, vectors of `turbo` whose norm overflows get the codes next to 0, as in NumPy.
        largest=float(rounding.norms.largest) if metric is None and not isinstance(rounding, TurboTable) else math.inf,
        rounds=rounds,
    )
    return encoding if scratch_bytes(encoding, format.head_dim) <= SCRATCH else None


def without_metric(format: CacheFormat, side: int, bits: int = 8) -> Encoding | None:
    """The encoding of keys (side 0) or values (1) for codecs without an error metric; None if scratch is too small."""
    mean_bits = 0 if side else format.mean_bits
    encoding = Encoding(bits, 1, format.block_size, tilted=False, along_tokens=False, mean_bits=mean_bits)
    return encoding if scratch_bytes(encoding, format.head_dim) <= SCRATCH else None
