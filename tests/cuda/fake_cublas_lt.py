"""cuBLASLt on the stand-in for CuPy: its functions, with the types of their arguments, as the engine may call them."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable
from ctypes import c_float, c_int, c_int64, c_size_t, c_uint64, c_void_p
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from tests.cuda.fake_cupy import Machine
from tests.cuda.formats import read

# Parameters as `cublasLt.h` declares them.
HEADER = {
    "Create": "cublasLtHandle_t *",
    "MatmulDescCreate": "cublasLtMatmulDesc_t *, cublasComputeType_t, cudaDataType_t",
    "MatmulDescSetAttribute": "cublasLtMatmulDesc_t, cublasLtMatmulDescAttributes_t, void *, size_t",
    "MatmulDescDestroy": "cublasLtMatmulDesc_t",
    "MatrixLayoutCreate": "cublasLtMatrixLayout_t *, cudaDataType_t, uint64_t, uint64_t, int64_t",
    "MatrixLayoutDestroy": "cublasLtMatrixLayout_t",
    "MatmulPreferenceCreate": "cublasLtMatmulPreference_t *",
    "MatmulPreferenceSetAttribute": "cublasLtMatmulPreference_t, cublasLtMatmulPreferenceAttributes_t, void *, size_t",
    "MatmulPreferenceDestroy": "cublasLtMatmulPreference_t",
    "MatmulAlgoGetHeuristic": "cublasLtHandle_t, cublasLtMatmulDesc_t, cublasLtMatrixLayout_t, cublasLtMatrixLayout_t, "
    "cublasLtMatrixLayout_t, cublasLtMatrixLayout_t, cublasLtMatmulPreference_t, int, "
    "cublasLtMatmulHeuristicResult_t *, int *",
    "MatmulAlgoCheck": "cublasLtHandle_t, cublasLtMatmulDesc_t, cublasLtMatrixLayout_t, cublasLtMatrixLayout_t, "
    "cublasLtMatrixLayout_t, cublasLtMatrixLayout_t, cublasLtMatmulAlgo_t *, cublasLtMatmulHeuristicResult_t *",
    "Matmul": "cublasLtHandle_t, cublasLtMatmulDesc_t, void *, void *, cublasLtMatrixLayout_t, void *, "
    "cublasLtMatrixLayout_t, void *, void *, cublasLtMatrixLayout_t, void *, cublasLtMatrixLayout_t, "
    "cublasLtMatmulAlgo_t *, void *, size_t, cudaStream_t",
}
_SIZES = {"size_t": c_size_t, "uint64_t": c_uint64, "int64_t": c_int64}
_ENUMS = ("int", "cublasComputeType_t", "cudaDataType_t")

# Bytes of the attributes of a description and of a preference.
_ATTRIBUTES = {("MatmulDesc", 3): 4, ("MatmulDesc", 7): 4, ("MatmulDesc", 8): 8, ("MatmulPreference", 1): 8}
_ATTRIBUTES |= {("MatmulPreference", number): 4 for number in range(5, 9)}  # least alignments of A, B, C and D
_NOT_SUPPORTED = 15
_KINDS = {2: ("__half", np.float16), 14: ("__nv_bfloat16", np.uint16)}


class _Result(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t."""

    _fields_ = (
        ("algorithm", c_uint64 * 8),
        ("workspace", c_size_t),
        ("state", c_int),
        ("waves", c_float),
        ("reserved", c_int * 4),
    )


class _Structure(NamedTuple):
    kind: str
    args: tuple[int, ...]
    attributes: dict[int, int]


def _for_rows(problem: tuple[Any, ...], rows: int) -> tuple[Any, ...]:
    """A problem with another number of rows of x and y."""
    is_transposed, epilogue, a, *others = problem
    return is_transposed, epilogue, a, *((kind, height, rows, pitch) for kind, height, _, pitch in others)


class _Function:
    def __init__(self, parameters: str, work: Callable[..., int | None]):
        types = (_type_of(parameter) for parameter in parameters.split(", "))
        self.argtypes: tuple[type, ...] = ()
        self._types, self._work, self._values = tuple(types), work, list[tuple[Any, ...]]()
        self._converted = ctypes.CFUNCTYPE(None, *self._types)(lambda *values: self._values.append(values))

    def __call__(self, *args: Any) -> int:
        assert self.argtypes == self._types
        assert len(args) == len(self._types)
        self._converted(*args)
        return self._work(*self._values.pop()) or 0


def _type_of(parameter: str) -> type:
    is_number = parameter in _ENUMS or parameter.endswith("Attributes_t")
    return _SIZES.get(parameter, c_int if is_number else c_void_p)


class Library:
    """structures: by handle. asked: the rows that an algorithm was asked for. status: what asking for one returns.
    serves: whether an algorithm serves fewer rows than it was asked for, which a caller has to check."""

    def __init__(self, machine: Machine):
        self.structures: dict[int, _Structure] = {}
        self.asked, self.status, self.serves = list[int](), 0, True
        self._checked = set[tuple[int, int]]()  # algorithms and rows
        self._machine, self._numbers, self._problems = machine, itertools.count(1000), list[tuple[Any, ...]]()
        verbs = {"Create": self._create, "Destroy": self._destroy, "SetAttribute": self._set}
        works = {"MatmulAlgoGetHeuristic": self._choose, "MatmulAlgoCheck": self._check, "Matmul": self._multiply}
        for name, parameters in HEADER.items():
            verb = next((verb for verb in verbs if name.endswith(verb)), "")
            work = partial(verbs[verb], name.removesuffix(verb)) if verb else works[name]
            setattr(self, f"cublasLt{name}", _Function(parameters, work))

    def _create(self, kind: str, handle: int, *args: int) -> None:
        number = c_void_p.from_address(handle).value = next(self._numbers)
        self.structures[number] = _Structure(kind, args or (self._machine.current,), {})

    def _destroy(self, kind: str, handle: int) -> None:
        assert self.structures.pop(handle).kind == kind

    def _set(self, kind: str, handle: int, attribute: int, buffer: int, size: int) -> None:
        assert self.structures[handle].kind == kind
        assert _ATTRIBUTES[kind, attribute] == size
        self.structures[handle].attributes[attribute] = int.from_bytes(ctypes.string_at(buffer, size), "little")

    def _problem(self, handle: int, description: int, *layouts: int) -> tuple[Any, ...]:
        """What is asked of an algorithm, but for the preference."""
        assert self.structures[handle].args == (self._machine.current,), "a handle of another GPU"
        wanted, made = self.structures[description], [self.structures[layout] for layout in layouts]
        assert (wanted.kind, wanted.args) == ("MatmulDesc", (68, 0))
        assert all(layout.kind == "MatrixLayout" and layout.args[1] <= layout.args[3] for layout in made)
        return wanted.attributes.get(3), wanted.attributes.get(7, 1), *(layout.args for layout in made)

    def _choose(self, handle: int, description: int, *rest: int) -> int:
        *layouts, preference, most, results, count = rest
        wanted = self.structures[preference].attributes
        assert most == 1
        self.asked.append(self.structures[layouts[1]].args[2])
        if self.status:
            return self.status
        bias = self.structures[description].attributes.get(8, 1 << 8)  # that of an unset address may be anything
        self._problems.append((self._problem(handle, description, *layouts), wanted, bias & -bias))
        result = _Result.from_address(results)
        result.algorithm[0], result.workspace, result.state = len(self._problems), wanted[1], 0
        c_int.from_address(count).value = 1
        return 0

    def _check(self, handle: int, description: int, *rest: int) -> int:
        *layouts, algorithm, result = rest
        number, problem = c_uint64.from_address(algorithm).value, self._problem(handle, description, *layouts)
        assert _for_rows(self._problems[number - 1][0], problem[3][2]) == problem
        if not self.serves:
            return _NOT_SUPPORTED
        self._checked.add((number, problem[3][2]))
        _Result.from_address(result).workspace = 0
        return 0

    def _multiply(self, handle: int, description: int, alpha: int, a: int, *rest: int) -> None:
        """D = alpha · Aᵀ · B + beta · C (+ bias), column-major; C and D are the same."""
        a_layout, b, b_layout, beta, c, c_layout, d, d_layout, algorithm, workspace, size, stream = rest
        number = c_uint64.from_address(algorithm).value
        asked, wanted, of_bias = self._problems[number - 1]
        problem = self._problem(handle, description, a_layout, b_layout, c_layout, d_layout)
        assert problem == asked or (number, problem[3][2]) in self._checked, "an algorithm for another product"
        is_transposed, epilogue, (kind, k, m, lda), (other, _, n, ldb), c_args, d_args = problem
        assert (is_transposed, kind, c_args, c) == (1, other, d_args, d)
        assert d_args[:3] == (0, m, n)
        bias = self.structures[description].attributes[8] if epilogue == 4 else None
        assert all(address % wanted[number] == 0 for number, address in zip(range(5, 9), (a, b, c, d), strict=True))
        assert bias is None or bias % of_bias == 0, "a bias that is aligned less than it was said to be"
        assert size >= wanted[1]
        assert stream == self._machine.stream.ptr
        read_at, factors = partial(self._at, *_KINDS[kind]), [c_float.from_address(at).value for at in (alpha, beta)]

        def work() -> None:
            assert self._machine.number_of(workspace) == self._machine.current
            product = factors[0] * (read_at(b, n, ldb)[:, :k] @ read_at(a, m, lda)[:, :k].T)
            if bias is not None:
                product += self._at("float", np.float32, bias, 1, m)
            result = self._raw(np.float32, d, n, d_args[3])[:, :m]
            result[...] = product + (factors[1] * result if factors[1] else 0)

        self._machine.do(work)

    def _at(self, kind: str, dtype: Any, address: int, rows: int, pitch: int) -> np.ndarray:
        return read(self._raw(dtype, address, rows, pitch), kind).astype(np.float64)

    def _raw(self, dtype: Any, address: int, rows: int, pitch: int) -> np.ndarray:
        assert self._machine.number_of(address) == self._machine.current, "an array of another GPU"
        raw = (ctypes.c_ubyte * (rows * pitch * np.dtype(dtype).itemsize)).from_address(address)
        return np.frombuffer(raw, dtype).reshape(rows, pitch)
