"""Products with random matrices on any backend, and how near to float64 each backend's result is.

case = product(ops, [("q4_k", 37)], 512, rows=3, options="norm bias added")
case.check(case.result())
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from polarlm.engine.backends.cuda.launch_configs import GEMV_ROWS
from polarlm.engine.backends.numpy.rows import apply_activation
from polarlm.engine.backends.ops import Fusion
from polarlm.engine.weight_formats import Linear, get
from tests.cuda.formats import EPS32, STEP, read, store
from tests.ops import reference
from tests.weights import StoredBytes, random_matrix

HALF, EPS = STEP["__half"], 1e-5


def input_kind(name: str) -> str:
    """The CUDA type in which products with this format take x."""
    return "__nv_bfloat16" if name == "bf16" else "__half"


@dataclass(frozen=True)
class Case:
    """x (T, in) times the matrices of `files` stacked, whose rows are the outputs, with the options of `linear`."""

    ops: Any
    files: Sequence[StoredBytes]
    w: Linear
    x: np.ndarray
    bias: np.ndarray | None
    gain: np.ndarray | None
    before: np.ndarray | None
    activation: str | None

    @property
    def norm(self) -> Any:
        return None if self.gain is None else (self.ops.to_device(self.gain), EPS)

    def result(self, *, is_recorded: bool = False) -> np.ndarray:
        ops, fusion = self.ops, Fusion(self.norm, self.activation)

        def work(x: Any, before: Any = None) -> Any:
            y = ops.linear(x, self.w, fusion, before)
            assert before is None or y is before
            return y

        inputs = [self.x.copy(), *([] if self.before is None else [self.before.copy()])]
        return np.array(
            ops.to_host(ops.run_graph("test", work, inputs) if is_recorded else work(*map(ops.to_device, inputs)))
        )

    def check(self, actual: np.ndarray) -> None:
        """Assert that a result is the product, within what the backend's arithmetic may be off by.

        A GPU: each of n additions rounds a sum of about the root of the summed squares r, and the errors go either way:
        √n · r units. Four times that, because tensor cores cut off instead. x is rounded to the type of the matrix;
        with a norm, x that is nearly between two numbers of that type may become either. Packed weights become halves.

        Compiled kernels: a ten-thousandth, since inputs become words; with numbers of bfloat16, what their roundings to
        2⁻⁹ of each make. NumPy: n roundings of the largest sum.
        """
        exact, allowed = (np.concatenate(parts, axis=1) for parts in zip(*map(self._part, self.files), strict=True))
        exact += 0 if self.bias is None else self.bias
        exact += 0 if self.before is None else self.before
        if self.ops.backend == "native":
            wanted = exact if self.activation is None else apply_activation(exact, self.activation)
            allowed = 2**-8 * (1 + (self.activation is not None)) if self.ops._launch.input_bits == "bf16" else 1e-4
            assert np.linalg.norm(actual - wanted) < allowed * np.linalg.norm(wanted)
            return
        allowed += 4 * EPS32 * np.abs(exact)
        if self.activation is not None:
            exact, allowed = reference.gated(exact, allowed)
        assert actual.shape == exact.shape
        worst = np.abs(actual - exact) - allowed
        assert (worst <= 0).all(), f"{(~(worst <= 0)).sum()} of {worst.size} are off, by up to {np.nanmax(worst)}"

    def _part(self, file: StoredBytes) -> tuple[np.ndarray, np.ndarray]:
        """The product with one matrix in float64, and what it may be off by."""
        values, kind, name = self.x.astype(np.float64), input_kind(file.format.name), file.format.name
        weights, error = file.values.astype(np.float64), np.zeros(())
        on_gpu = self.ops.backend == "cuda"
        if on_gpu and name == "f32":
            weights = weights.astype(np.float16).astype(np.float64)
        elif on_gpu and file.format.unpack is not None:
            error = weight_errors(file)
        if self.gain is not None:
            values = values / np.sqrt((values**2).mean(axis=1, keepdims=True) + EPS) * self.gain
        is_rounded = on_gpu and (len(self.x) > GEMV_ROWS or name != "bf16")  # gemv does not round x to bfloat16
        if is_rounded:
            values = read(store(values.astype(np.float32), kind), kind).astype(np.float64)
        root, columns = np.sqrt(values**2 @ weights.T**2), weights.shape[1]
        allowed = (4 * EPS32 * np.sqrt(columns) + (self.gain is not None) * is_rounded * STEP[kind]) * root
        if not on_gpu:
            allowed = 4 * columns * EPS32 * (np.abs(values) @ np.abs(weights).T + 1)
        return values @ weights.T, allowed + (np.abs(values) @ error.T if error.ndim else 0)


def weight_errors(file: StoredBytes) -> np.ndarray:
    """How far weights in half precision may be from the file's (rows, in): scale, offset and result are rounded, each
    by at most half a unit, or by half the smallest number of half precision."""
    format = file.format
    assert format.unpack
    grouped = format.unpack(file.raw)
    values = grouped.dequantize().astype(np.float64)
    offsets = np.zeros_like(values)
    if grouped.offset is not None:
        offsets += np.repeat(grouped.offset.astype(np.float64), format.values, axis=1)
    if grouped.sub_offset is not None:
        offsets *= np.repeat(grouped.sub_offset, format.group, axis=1)
    codes = np.abs(grouped.codes.astype(np.float64) - format.zero) if grouped.table is None else 127.0
    return HALF / 2 * (np.abs(values - offsets) + np.abs(offsets) + np.abs(values)) + 2.0**-25 * (codes + 2)


def width_of(name: str, groups: int) -> int:
    """Inputs of a row of at least 32 · `groups`, in whole blocks of a format."""
    values = get(name).values
    return -(-32 * groups // values) * values


def product(
    ops: Any, matrices: Sequence[tuple[str, int]], columns: int, rows: int, options: str = "", seed: int = 0
) -> Case:
    """matrices: formats and outputs. options: some of norm, bias, added, silu."""
    rng = np.random.default_rng(seed)
    files = [random_matrix(rng, name, count, columns) for name, count in matrices]
    out, chosen = sum(len(file.raw) for file in files), options.split()
    x = rng.standard_normal((rows, columns)) * rng.uniform(0.1, 4, (rows, 1)) * rng.lognormal(0, 0.5, columns)
    bias, gain, before = (rng.standard_normal(size).astype(np.float32) for size in (out, columns, (rows, out)))
    w = Linear(ops.load(files), ops.to_device(bias) if "bias" in chosen else None)
    arrays = {"bias": bias, "norm": gain, "added": before}
    vectors = [array if name in chosen else None for name, array in arrays.items()]
    return Case(ops, files, w, x.astype(np.float32), *vectors, "silu" if "silu" in chosen else None)
