"""The number formats of kernels as NumPy arrays, and how far a kernel's result may be from the exact one."""

from __future__ import annotations

import numpy as np

EPS32 = float(np.finfo(np.float32).eps)

# CUDA type → distance of neighbouring numbers relative to them.
STEP = {"float": EPS32, "__half": float(np.finfo(np.float16).eps), "__nv_bfloat16": 2.0**-7}

# Two packed formats of q, k and v in one layer: the mixtures of llama.cpp, from two bits on; the formats that
# replace them where rows are no whole blocks of 256; and the mixtures of eight experts, where k and v have q8_0.
# The engine has q8_0 instead of formats that a GPU does not read.
_OF_256 = [("q2_k", "q3_k"), ("q2_k", "q4_k"), ("q2_k", "q5_k"), ("q3_k", "q4_k"), ("q3_k", "q5_k"), ("q4_k", "q5_k")]
_OF_256 += [("q4_k", "q6_k"), ("q5_k", "q6_k"), ("iq4_xs", "q5_k"), ("iq4_nl", "q5_k"), ("q8_0", "q4_k")]
_OF_32 = [("q4_0", "q5_0"), ("q4_0", "q5_1"), ("q5_0", "q5_1"), ("q5_0", "q8_0"), ("q5_1", "q8_0"), ("iq4_nl", "q5_1")]
_OF_EIGHT = [(name, "q8_0") for name in ("q2_k", "q3_k", "q4_k", "q5_k", "q6_k", "q4_0", "q4_1", "iq4_xs", "iq4_nl")]
FORMAT_PAIRS = [*_OF_256, *_OF_32, *_OF_EIGHT]


def store(x: np.ndarray, kind: str) -> np.ndarray:
    """x as an array of CUDA type `kind`, rounded to nearest even; bfloat16 as its bits, uint16. `x` has no NaN."""
    x = np.asarray(x, np.float32)
    if kind == "__nv_bfloat16":
        bits = x.view(np.uint32)
        return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)
    return x.astype(np.float16 if kind == "__half" else np.float32)


def read(x: np.ndarray, kind: str) -> np.ndarray:
    """The float32 values of an array from `store`."""
    if kind == "__nv_bfloat16":
        return (x.astype(np.uint32) << 16).view(np.float32)
    return x.astype(np.float32)


def poisoned(shape: tuple[int, ...], kind: str) -> np.ndarray:
    if kind == "__nv_bfloat16":
        return np.full(shape, 0xFFFF, np.uint16)
    return np.full(shape, np.nan, np.float16 if kind == "__half" else np.float32)
