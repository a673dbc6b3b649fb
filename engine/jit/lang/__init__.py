"""The language: kernels, values, and the operations on them."""

from polarlm.engine.jit.lang.emit import Emitter, gather, gather_pairs, largest, round_to, scaled_to, step_inverse
from polarlm.engine.jit.lang.level import LARGEST_SPLIT, Level
from polarlm.engine.jit.lang.records import Float32, Int64, Kernel, Pointer, read
from polarlm.engine.jit.lang.values import (
    BF16,
    F32,
    F64,
    I8,
    I16,
    I32,
    I64,
    POINTER,
    Type,
    Value,
    Values,
    Variable,
    vector,
)
