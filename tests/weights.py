"""Weights from arrays: as in a file, and as the CPU has them."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable, Iterator

import numpy as np

from polarlm.engine.backends.ops import Ops
from polarlm.engine.weight_formats import Linear, Matrix, StoredMatrix, WeightFormat, get

# Where the blocks of a format have their float16 scales. The scale of mxfp4 is the exponent in its first byte; that of
# iq1_m lies in the upper halves of four bytes.
SCALES = {
    **dict.fromkeys(("q8_0", "q4_0", "q5_0", "iq4_nl", "iq4_xs"), (0,)),
    **dict.fromkeys(("q4_1", "q5_1", "q4_k", "q5_k"), (0, 2)),
    **{"q2_k": (80, 82), "q3_k": (108,), "q6_k": (208,), "mxfp4": (), "tq2_0": (64,), "tq1_0": (52,), "iq1_m": ()},
    **dict.fromkeys(("iq1_s", "iq2_xxs", "iq2_xs", "iq2_s", "iq3_xxs", "iq3_s"), (0,)),
}
BLOCKS = tuple(SCALES)  # names of the formats that have blocks
_GGUF = importlib.util.find_spec("gguf") is not None


def random_blocks(
    rng: np.random.Generator, name: str, rows: int, columns: int, scales: Iterable[float] = (2**-8, 2**-9, -(2**-10))
) -> np.ndarray:
    """Random bytes of a format that has blocks, uint8 (rows, bytes of a row); scales are drawn from `scales`.

    Exponents of mxfp4 are 118 to 122, which are scales of 2^-10 to 2^-6.
    """
    stored = get(name)
    raw = rng.integers(0, 256, (rows, columns // stored.values, stored.nbytes), np.uint8)
    for place in SCALES[name]:
        drawn = rng.choice(np.array(list(scales), "<f2"), raw.shape[:2])
        raw[..., place : place + 2] = drawn[..., None].view(np.uint8)
    if name == "mxfp4":
        raw[..., 0] = rng.integers(118, 123, raw.shape[:2])
    if name == "iq1_m":
        drawn = rng.choice(np.array(list(scales), "<f2"), raw.shape[:2]).view(np.uint16)
        for word in range(4):
            raw[..., 49 + 2 * word] = raw[..., 49 + 2 * word] & 15 | (drawn >> 4 * word & 15).astype(np.uint8) << 4
    return raw.reshape(rows, -1)


def pack(x: np.ndarray, name: str) -> np.ndarray:
    """x (rows, columns) in a format, rounded to nearest even: uint8 (rows, bytes of a row). bf16: no NaN.

    Raises NotImplementedError for formats of blocks that gguf cannot write: see `random_blocks`.
    """
    x = np.ascontiguousarray(x, np.float32)
    if name == "bf16":
        bits = x.view(np.uint32)
        return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype("<u2").view(np.uint8)
    if name in BLOCKS:
        import gguf  # not every machine has it

        return gguf.quantize(x, gguf.GGMLQuantizationType[name.upper()]).view(np.uint8)
    return x.astype({"f32": "<f4", "f16": "<f2"}[name]).view(np.uint8)


class StoredBytes:
    """A matrix of a file that is in memory; see `engine.weight_formats.StoredMatrix`.

    raw: uint8 (rows, bytes of a row), in the format `name`.
    """

    def __init__(self, raw: np.ndarray, name: str):
        self.raw, self._format = raw, get(name)
        self.shape: tuple[int, int] = (len(raw), raw.shape[1] // self._format.nbytes * self._format.values)

    @property
    def format(self) -> WeightFormat:
        return self._format

    @property
    def values(self) -> np.ndarray:
        """The values, float32."""
        out = np.empty(self.shape, np.float32)
        self.dequantize(out)
        return out

    def dequantize(self, out: np.ndarray) -> None:
        if self.format.unpack is None or _GGUF:
            self.format.dequantize(self.raw, out)
        else:  # the same values: tests/weight_formats compare them to the bit
            out[...] = self.format.unpack(self.raw).dequantize()

    def slabs(self, nbytes: int) -> Iterator[tuple[slice, np.ndarray]]:
        step = max(1, nbytes // self.raw.shape[1])
        for first in range(0, len(self.raw), step):
            rows = slice(first, min(first + step, len(self.raw)))
            yield rows, self.raw[rows]


def read_all(stored: StoredMatrix) -> StoredBytes:
    """The matrix in memory, whose values need no package."""
    return StoredBytes(np.concatenate([raw.copy() for _, raw in stored.slabs(1 << 20)]), stored.format.name)


class StoredArray(StoredBytes):
    """x (rows, columns), converted to the format `name`."""

    def __init__(self, x: np.ndarray, name: str):
        super().__init__(pack(x, name), name)


def load(ops: Ops, x: np.ndarray, name: str) -> Matrix:
    """x (rows, columns) in a format, on the device of `ops`."""
    (loaded,) = ops.load([StoredArray(x, name)])
    return loaded


def matrix(x: np.ndarray) -> Matrix:
    """x (out, in) as a matrix of the CPU, in the precision of x."""
    return Matrix(get("f32"), x, x.shape)


def linear(x: np.ndarray, bias: np.ndarray | None = None) -> Linear:
    """x (out, in) and bias (out,) as a `Linear` of the CPU, in the precision of x."""
    return Linear((matrix(x),), bias)
