"""Matrix products of cuBLASLt, NVIDIA's library, called by ctypes: CuPy's calls of cuBLAS refuse to be recorded.

A product allocates no device memory. The library chooses an algorithm once for each shape, with the rows rounded up to
a multiple of 16, since nearly every batch of prompts has another number of rows. It creates and frees its own
structures.
Source: NVIDIA, cuBLAS documentation, "Using the cuBLASLt API"; `cublasLt.h` has the numbers.
"""

from __future__ import annotations

import ctypes
import os
from contextlib import suppress
from ctypes import byref, c_float, c_int, c_int64, c_size_t, c_uint32, c_uint64, c_void_p
from functools import lru_cache
from pathlib import Path
from typing import Any

from polarlm.engine.backends.cuda.device import row_stride

WORKSPACE_BYTES = 32 << 20

_FLOAT, _TYPES = 0, {"f": 2, "u": 14}  # cudaDataType: float, half by kind of dtype, bfloat16 as the bits
_COMPUTE_FLOAT, _ADDS_BIAS, _OUT_OF_MEMORY = 68, 4, 3  # CUBLAS_COMPUTE_32F, _EPILOGUE_BIAS, _STATUS_ALLOC_FAILED
_TRANSPOSED, _EPILOGUE, _BIAS = 3, 7, 8  # CUBLASLT_MATMUL_DESC_TRANSA, _EPILOGUE, _BIAS_POINTER
_WORKSPACE, _ALIGNMENTS = 1, (5, 6, 7, 8)  # CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, _MIN_ALIGNMENT_A_BYTES … _D_BYTES
_WORKSPACE_PLACE, _STATUS_PLACE = 64, 72  # of a cublasLtMatmulHeuristicResult_t, which begins with the algorithm
_MOST_PLANS = 512  # least recently used first out; each number of rows has its own
_ROWS = 16  # rows are rounded up to a multiple of this before an algorithm is chosen

# Types of the functions' arguments; results are statuses.
_ARGUMENTS: dict[str, tuple[type, ...]] = {
    "Create": (c_void_p,),
    "MatmulDescCreate": (c_void_p, c_int, c_int),
    "MatrixLayoutCreate": (c_void_p, c_int, c_uint64, c_uint64, c_int64),
    "MatmulPreferenceCreate": (c_void_p,),
    **{f"{kind}SetAttribute": (c_void_p, c_int, c_void_p, c_size_t) for kind in ("MatmulDesc", "MatmulPreference")},
    **{f"{kind}Destroy": (c_void_p,) for kind in ("MatmulDesc", "MatrixLayout", "MatmulPreference")},
    "MatmulAlgoGetHeuristic": (*(c_void_p,) * 7, c_int, c_void_p, c_void_p),
    "MatmulAlgoCheck": (c_void_p,) * 8,
    "Matmul": (*(c_void_p,) * 14, c_size_t, c_void_p),
}


class Products:
    """Matrix products on the GPU that is current when this object is created."""

    def __init__(self, library: Any, workspace: int):
        """library: from `load_library`. workspace: address of WORKSPACE_BYTES, which no other work uses meanwhile."""
        for name, types in _ARGUMENTS.items():
            getattr(library, f"cublasLt{name}").argtypes = types
        self._library, self._workspace, self._handle = library, workspace, c_void_p()
        self._factors = byref(c_float(0)), byref(c_float(1))  # the library reads them on the host
        _call(library, "Create", byref(self._handle))
        self._plan = lru_cache(_MOST_PLANS)(self._new_plan)
        self._algorithm = lru_cache(_MOST_PLANS)(self._new_algorithm)

    def __call__(self, y: Any, x: Any, weight: Any, bias: Any | None, stream: int, *, add: bool) -> None:
        """See `Device.gemm`; arrays of CuPy, handle of a stream."""
        y_address, weight_address, x_address, bias_address = (
            0 if array is None else array.data.ptr for array in (y, weight, x, bias)
        )
        bits = y_address | weight_address | x_address | bias_address | 256
        sizes = len(weight), *x.shape[::-1], int(row_stride(y))
        description, a, b, c, choice = self._plan(_TYPES[x.dtype.kind], *sizes, bias is not None, bits & -bits)
        if bias is not None:
            description.set(_BIAS, c_void_p(bias_address))
        args = self._factors[1], weight_address, a, x_address, b, self._factors[add], y_address, c, y_address, c, choice
        _call(self._library, "Matmul", self._handle, description, *args, self._workspace, WORKSPACE_BYTES, stream)

    def _new_plan(
        self, kind: int, out: int, width: int, rows: int, pitch: int, is_biased: bool, alignment: int
    ) -> tuple[Any, ...]:
        """The arguments that calls of one shape share: a description, layouts of weights, x and y, and the algorithm.
        The library counts by columns: it sees transposes of our matrices, yᵀ = weight · xᵀ.

        pitch: numbers from a row of y to the next. alignment: bytes, 256 at most, of which all addresses are
        multiples.
        """
        padded_rows, rest = -(-rows // _ROWS) * _ROWS, (pitch, is_biased, alignment)
        layouts = self._layouts(kind, out, width, rows, pitch)
        description, choice = self._algorithm(kind, out, width, padded_rows, *rest)
        if padded_rows != rows and not self._serves(description, layouts, choice):
            description, choice = self._algorithm(kind, out, width, rows, *rest)
        return description, *layouts, choice

    def _layouts(self, kind: int, out: int, width: int, rows: int, pitch: int) -> tuple[_Structure, ...]:
        shapes = (kind, width, out, width), (kind, width, rows, width), (_FLOAT, out, rows, pitch)
        return tuple(_Structure(self._library, "MatrixLayout", *shape) for shape in shapes)

    def _new_algorithm(
        self, kind: int, out: int, width: int, rows: int, pitch: int, is_biased: bool, alignment: int
    ) -> tuple[_Structure, Any]:
        """A description, and the result whose first field is the algorithm that the library ranks first; arguments as
        above."""
        library, (a, b, c) = self._library, self._layouts(kind, out, width, rows, pitch)
        description = _Structure(library, "MatmulDesc", _COMPUTE_FLOAT, _FLOAT)
        description.set(_TRANSPOSED, c_int(1))
        if is_biased:
            description.set(_EPILOGUE, c_uint32(_ADDS_BIAS))
            description.set(_BIAS, c_void_p(alignment))  # no address stands for one that is a multiple of anything
        preference = _Structure(library, "MatmulPreference")
        preference.set(_WORKSPACE, c_uint64(WORKSPACE_BYTES))
        for attribute in _ALIGNMENTS:
            preference.set(attribute, c_uint32(alignment))
        choice, count = (c_uint64 * 12)(), c_int()
        args = description, a, b, c, c, preference, 1, byref(choice), byref(count)
        _call(library, "MatmulAlgoGetHeuristic", self._handle, *args)
        if not count.value or c_int.from_buffer(choice, _STATUS_PLACE).value:
            raise RuntimeError(f"cuBLASLt has no algorithm for {(kind, out, width, rows, pitch)}")
        return description, byref(choice)

    def _serves(self, description: _Structure, layouts: tuple[_Structure, ...], choice: Any) -> bool:
        """Whether an algorithm for more rows serves these."""
        (a, b, c), result = layouts, (c_uint64 * 12)()
        status = self._library.cublasLtMatmulAlgoCheck(self._handle, description, a, b, c, c, choice, byref(result))
        return not status and c_size_t.from_buffer(result, _WORKSPACE_PLACE).value <= WORKSPACE_BYTES


class _Structure:
    """A structure of the library, as an argument of its functions."""

    def __init__(self, library: Any, kind: str, *args: int):
        self._library, self._kind, self._as_parameter_ = library, kind, c_void_p()
        _call(library, f"{kind}Create", byref(self._as_parameter_), *args)

    def set(self, attribute: int, value: Any) -> None:
        _call(self._library, f"{self._kind}SetAttribute", self, attribute, byref(value), ctypes.sizeof(value))

    def __del__(self) -> None:
        getattr(self._library, f"cublasLt{self._kind}Destroy")(self)


def _call(library: Any, name: str, *args: Any) -> None:
    if status := getattr(library, f"cublasLt{name}")(*args):
        raise (MemoryError if status == _OUT_OF_MEMORY else RuntimeError)(f"cublasLt{name}: status {status}")


def load_library(cuda: int) -> ctypes.CDLL:
    """The library of the same CUDA as CuPy's cuBLAS, which CuPy finds in the same way. cuda: CuPy's version of it, as
    12040. Raises ImportError, OSError, RuntimeError."""
    from cuda.pathfinder import load_nvidia_dynamic_lib

    name = f"cublasLt64_{cuda // 1000}.dll" if os.name == "nt" else f"libcublasLt.so.{cuda // 1000}"
    path = load_nvidia_dynamic_lib("cublasLt").abs_path or name  # the newest one, if there are several
    if not Path(path).name.startswith(name):
        for other in (name, *Path(path).parents[2].glob(f"*/*/{name}")):  # one that is loaded, or another wheel's
            with suppress(OSError):
                return ctypes.CDLL(str(other))
    return ctypes.CDLL(path)
