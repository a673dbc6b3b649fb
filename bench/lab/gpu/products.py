"""Products with weights on a GPU: every matrix of a layer, by the number of rows, beside PyTorch's (cuBLAS)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from polarlm.bench.lab.gpu.peer import Calls, call_seconds
from polarlm.bench.lab.gpu.setup import Gpu, Sizes
from polarlm.bench.random_weights import RandomMatrix
from polarlm.bench.result import Result
from polarlm.engine.backends.cuda.device import Array
from polarlm.engine.backends.cuda.ops import CudaOps
from polarlm.engine.config import format_bytes
from polarlm.engine.errors import EngineError
from polarlm.engine.weight_formats import Linear, get
from polarlm.model_loaders.config import ModelConfig

PRODUCT = "product of"  # a subject, with the matrix and its format
FORMATS = ("q4_k", "q6_k", "bf16")
PEER = "bf16 of PyTorch"  # instead of a format
MATRICES = ("qkv", "out", "gate_up", "down")
_STEP_ROWS = 64  # products of more rows are a prompt's, and not recorded


def shape_of(config: ModelConfig, name: str) -> tuple[int, int]:
    """(out, in) of a matrix of MATRICES."""
    attention, e, f = config.attention, config.hidden_size, config.ffn.size
    heads, of_queries = attention.heads + 2 * attention.kv_heads, attention.heads * attention.head_dim
    shapes = {"qkv": (heads * attention.head_dim, e), "out": (e, of_queries), "gate_up": (2 * f, e), "down": (e, f)}
    return shapes[name]


def measure_products(result: Result, gpu: Gpu, sizes: Sizes, weights: str, name: str) -> None:
    """Add the seconds of x (rows, in) times a matrix that no cache holds, with every number of rows; up to a step's
    rows by a graph, as a step has them. Raises EngineError if there is too little memory."""
    shape, (ops, _) = shape_of(sizes.config, name), gpu.open()
    size = shape[0] * get(weights).size(shape[1])
    matrices = _matrices(ops, sizes, weights, shape, size)

    def seconds(rows: int) -> float:
        x = ops.to_device(np.random.default_rng(4).standard_normal((rows, shape[1]), np.float32))

        def multiply(*_: Array) -> Array:
            for matrix in matrices:
                y = ops.linear(x, matrix)
            return y

        if rows > _STEP_ROWS:
            return gpu.clock.held(multiply, sizes.runs)
        graph = partial(ops.run_graph, ("product", rows), multiply, [np.zeros(1, np.int32)])
        return gpu.clock.seconds(graph, sizes.runs)

    for rows in sizes.rows:
        _add(result, name, weights, rows, seconds(rows) / len(matrices), size)


def _add(result: Result, name: str, weights: str, rows: int, seconds: float | None, size: int, why: str = "") -> None:
    result.add(f"{PRODUCT} {name}, {weights}", str(rows), "seconds", value=seconds, failure=why, bytes=size)


def _matrices(ops: CudaOps, sizes: Sizes, weights: str, shape: tuple[int, int], size: int) -> Sequence[Linear]:
    """So many random matrices that the first is in no cache after the last."""
    count, room = -(-sizes.rotated // size), ops.memory_left(0)
    if count * size > room:
        raise EngineError(f"their {format_bytes(count * size)} do not fit into the {format_bytes(room)} that are free")
    return [Linear(ops.load([RandomMatrix(weights, *shape, seed=str(number))])) for number in range(count)]


def torch_products(result: Result, sizes: Sizes, name: str) -> None:
    """Add the seconds of PyTorch's products with a bfloat16 matrix of this shape."""
    out, width = shape_of(sizes.config, name)
    count = -(-sizes.rotated // (2 * out * width))

    def make(rows: int, torch: Any) -> Calls:
        random = partial(torch.randn, device="cuda", dtype=torch.bfloat16)
        x = random(rows, width)
        return [partial(torch.nn.functional.linear, x, random(out, width)) for _ in range(count)]

    times = call_seconds({str(rows): partial(make, rows) for rows in sizes.rows}, sizes.runs).values()
    for rows, (seconds, why) in zip(sizes.rows, times, strict=True):
        _add(result, name, PEER, rows, seconds, 2 * out * width, why)
