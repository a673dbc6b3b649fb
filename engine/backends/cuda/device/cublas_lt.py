"""Matrix products of cuBLASLt, NVIDIA's library, called by ctypes: CuPy's calls of cuBLAS refuse to be recorded.

A product allocates no memory of the device: its workspace comes with `Products`. The algorithm of a shape is asked for
once. Structures of the library are made and freed by it, and only their handles are known here.
Source: NVIDIA, cuBLAS documentation, "Using the cuBLASLt API"; `cublasLt.h` has the numbers.
"""

from __future__ import annotations

import ctypes
from ctypes import byref, c_float, c_int, c_int64, c_size_t, c_uint32, c_uint64, c_void_p
from functools import lru_cache
from typing import Any, NamedTuple

from polarlm.engine.backends.cuda.device import row_stride

WORKSPACE_BYTES = 32 << 20
_TYPES = {"float32": 0, "float16": 2, "uint16": 14}  # cudaDataType; uint16 are the bits of bfloat16

_COMPUTE_FLOAT = 68  # CUBLAS_COMPUTE_32F
_TRANSPOSED, _EPILOGUE, _BIAS = 3, 7, 8  # CUBLASLT_MATMUL_DESC_TRANSA, _EPILOGUE, _BIAS_POINTER
_ADDS_BIAS = 4  # CUBLASLT_EPILOGUE_BIAS
_MOST_WORKSPACE, _ALIGNMENTS = 1, (5, 6, 7, 8)  # CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, _MIN_ALIGNMENT_A_BYTES … _D
_OUT_OF_MEMORY = 3  # CUBLAS_STATUS_ALLOC_FAILED
_MOST_PLANS = 512  # a prompt of another number of rows has new ones

# The functions and the types of their arguments; each returns a status.
_ATTRIBUTE = c_void_p, c_int, c_void_p, c_size_t
_FUNCTIONS: dict[str, tuple[type, ...]] = {
    "Create": (c_void_p,),
    "MatmulDescCreate": (c_void_p, c_int, c_int),
    "MatmulDescSetAttribute": _ATTRIBUTE,
    "MatmulDescDestroy": (c_void_p,),
    "MatrixLayoutCreate": (c_void_p, c_int, c_uint64, c_uint64, c_int64),
    "MatrixLayoutDestroy": (c_void_p,),
    "MatmulPreferenceCreate": (c_void_p,),
    "MatmulPreferenceSetAttribute": _ATTRIBUTE,
    "MatmulPreferenceDestroy": (c_void_p,),
    "MatmulAlgoGetHeuristic": (*(c_void_p,) * 7, c_int, c_void_p, c_void_p),
    "Matmul": (*(c_void_p,) * 14, c_size_t, c_void_p),
}


class _Shape(NamedTuple):
    """What the algorithm of y (rows, out) = x (rows, width) @ weight (out, width)ᵀ depends on.

    pitch: numbers from a row of y to the next. aligned, y_aligned: bytes of which the addresses of x and the weights,
    and of y and the bias, are multiples.
    """

    rows: int
    width: int
    out: int
    kind: int  # of x and the weights
    pitch: int
    is_biased: bool
    aligned: int
    y_aligned: int


class _Choice(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t, which begins with an algorithm."""

    _fields_ = (
        ("algorithm", c_uint64 * 8),
        ("workspace", c_size_t),
        ("status", c_int),
        ("waves", c_float),
        ("reserved", c_int * 4),
    )


class _Plan(NamedTuple):
    """What stays from call to call of a product of a shape."""

    description: _Made
    weight: _Made
    x: _Made
    y: _Made
    choice: _Choice


class Products:
    """Matrix products on the GPU that is the current one when this is made."""

    def __init__(self, library: Any, workspace: int):
        """library: from `load_library`. workspace: address of WORKSPACE_BYTES, which no other work uses meanwhile."""
        for name, types in _FUNCTIONS.items():
            getattr(library, f"cublasLt{name}").argtypes = types
        self._library, self._workspace, self._handle = library, workspace, c_void_p()
        self._factors = c_float(0), c_float(1)  # the library reads them on the host
        _call(library, "Create", byref(self._handle))
        self._plan = lru_cache(_MOST_PLANS)(self._new_plan)

    def __call__(self, y: Any, x: Any, weight: Any, bias: Any | None, stream: int, *, add: bool) -> None:
        """See `Device.gemm`; arrays of CuPy, handle of a stream. Raises MemoryError."""
        (rows, width), out, kind = x.shape, len(weight), _TYPES[x.dtype.name]
        to, left, right, beside = (0 if array is None else array.data.ptr for array in (y, weight, x, bias))
        aligned = _alignment(left | right), _alignment(to | beside)
        plan = self._plan(_Shape(rows, width, out, kind, int(row_stride(y)), bias is not None, *aligned))
        if bias is not None:
            plan.description.set(_BIAS, c_void_p(beside))
        before, one = byref(self._factors[add]), byref(self._factors[1])
        inputs, result = (one, left, plan.weight, right, plan.x), (to, plan.y)
        rest = byref(plan.choice), self._workspace, WORKSPACE_BYTES, stream
        _call(self._library, "Matmul", self._handle, plan.description, *inputs, before, *result, *result, *rest)

    def _new_plan(self, shape: _Shape) -> _Plan:
        """The library counts by columns, so that it sees transposes of our matrices: yᵀ = weight · xᵀ."""
        library, (rows, width, out, kind, pitch, is_biased, aligned, y_aligned) = self._library, shape
        description = _Made(library, "MatmulDesc", _COMPUTE_FLOAT, _TYPES["float32"])
        description.set(_TRANSPOSED, c_int(1))
        if is_biased:
            description.set(_EPILOGUE, c_uint32(_ADDS_BIAS))
        weight = _Made(library, "MatrixLayout", kind, width, out, width)
        x = _Made(library, "MatrixLayout", kind, width, rows, width)
        y = _Made(library, "MatrixLayout", _TYPES["float32"], out, rows, pitch)
        preference = _Made(library, "MatmulPreference")
        preference.set(_MOST_WORKSPACE, c_uint64(WORKSPACE_BYTES))
        for attribute, size in zip(_ALIGNMENTS, (aligned, aligned, y_aligned, y_aligned), strict=True):
            preference.set(attribute, c_uint32(size))
        choice, count = _Choice(), c_int()
        made = description, weight, x, y, y, preference
        _call(library, "MatmulAlgoGetHeuristic", self._handle, *made, 1, byref(choice), byref(count))
        if not count.value or choice.status:
            raise RuntimeError(f"cuBLASLt has no algorithm for {shape}")
        return _Plan(description, weight, x, y, choice)


class _Made:
    """A structure of the library, as an argument of its functions."""

    def __init__(self, library: Any, kind: str, *args: int):
        self._library, self._kind, self._as_parameter_ = library, kind, c_void_p()
        _call(library, f"{kind}Create", byref(self._as_parameter_), *args)

    def set(self, attribute: int, value: Any) -> None:
        _call(self._library, f"{self._kind}SetAttribute", self, attribute, byref(value), ctypes.sizeof(value))

    def __del__(self) -> None:
        getattr(self._library, f"cublasLt{self._kind}Destroy")(self)


def _call(library: Any, name: str, *args: Any) -> None:
    status = getattr(library, f"cublasLt{name}")(*args)
    if status:
        raise (MemoryError if status == _OUT_OF_MEMORY else RuntimeError)(f"cublasLt{name}: status {status}")


def _alignment(addresses: int) -> int:
    """Bytes, 256 at most, of which all addresses are multiples whose bits are in `addresses`."""
    return (addresses | 256) & -(addresses | 256)


def load_library() -> ctypes.CDLL:
    """The library beside CuPy's cuBLAS, which CuPy finds in the same way. Raises OSError, ImportError, RuntimeError."""
    from cuda.pathfinder import load_nvidia_dynamic_lib

    return ctypes.CDLL(load_nvidia_dynamic_lib("cublasLt").abs_path)
