"""What a forward pass launches, and what of it decides how long it takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from polarlm.engine.backends.cuda.device import tracing
from polarlm.engine.backends.cuda.device.tracing import TracingArray

BLOCK_SIZE = 64
LIBRARY = tracing.GEMM  # a product by a library
STATES = ("gated_delta", "mamba2")  # kernels of steps that read states
SCAN = "delta_scan"
BLOCKS = ("delta_blocks", "mamba2_blocks")
DELTA = (*BLOCKS, SCAN)  # kernels of prompts that multiply matrices of float32


@dataclass(frozen=True)
class Launch:
    """kernel: its name without `_kernel`, or LIBRARY. activations: bytes of the float32 and 16-bit arrays
    among its arguments. inputs: bytes that the blocks of one column of the grid read: of x, in a product, all of it, or
    of each pair of a row and an expert that row; in SCAN, what matrices and updates are multiplied by. turns: how often
    they read it, on average: blocks of gemm_packed that stay, for each of their sets of tiles. shared: bytes of a
    block's dynamic shared memory. flops: of a library's product, of products with experts, and of DELTA."""

    kernel: str
    text: str
    grid: tuple[int, ...]
    threads: int
    activations: int
    inputs: int = 0
    shared: int = 0
    flops: int = 0
    turns: float = 1.0

    def constant(self, name: str) -> str:
        """One of the constants of its text."""
        return constant(self.text, name)

    def number(self, name: str) -> int:
        return int(self.constant(name))


class Multiplied(NamedTuple):
    """A product with weights. weights: how many are multiplied by rows that share them. bytes: of these weights, as
    often as they are read. distinct: bytes that are read from memory, where rows choose some experts alike."""

    weights: int
    bytes: int
    distinct: int


@dataclass(frozen=True)
class Part:
    """A part of a step or of a prompt. repeats: how often it is there. bytes: what one of them must read from memory:
    weights, states, or codes and full-precision blocks. products: of its kernels in `cuda/linear`, in their order.
    alone: where these share a launch, what each would be by itself, whose loops are its own.
    units: of attention in a step, which all multiprocessors share (see cuda/attention/shares.cuh); unit_tokens: of one.
    state_bytes: what all heads of a step read of states; heads of a group each read its keys. prompt: tokens of the
    prompt whose attention this is; visible: how many of them all of its tokens see together. is_coded: of the encoding
    of blocks: whether they get codes.
    """

    name: str
    repeats: int
    launches: Sequence[Launch]
    bytes: int
    products: Sequence[Multiplied] = ()
    alone: Sequence[Launch] = ()
    units: int = 0
    unit_tokens: int = BLOCK_SIZE
    state_bytes: int = 0
    prompt: int = 0
    visible: int = 0
    is_coded: bool = False


def constant(text: str, name: str) -> str:
    """The constant `name` of a kernel's text."""
    line = next(line for line in text.splitlines() if line.startswith(f"#define {name} "))
    return line.split()[2]


def launch_of(traced: tracing.Launch) -> Launch:
    """A launch that a device has noted."""
    arrays = [arg for arg in traced.args if isinstance(arg, TracingArray)]
    moved = sum(x.nbytes for x in arrays if x.dtype in (np.float32, np.float16, np.uint16))
    if traced.kernel == LIBRARY:
        y, x, _ = arrays
        return Launch(LIBRARY, "", (1,), 0, moved, flops=2 * x.size * y.shape[1])
    name, grid = traced.kernel.removesuffix("_kernel"), tuple(traced.grid)
    inputs = next((arg.nbytes for arg in traced.args[1:] if isinstance(arg, TracingArray)), 0)
    flops = 0
    if "#define EXPERTS 1" in traced.text:  # y has a row for each pair
        y, x, *_ = arrays
        inputs = len(y) * x.nbytes // len(x)
        flops = 2 * y.size * x.shape[1] * (2 if "#define ACTIVATION " in traced.text else 1)
    if name in ("delta_results", "mamba2_results"):  # they read as many gates as results, and little else
        moved = 3 * arrays[0].nbytes
    if name == "delta_inputs":
        moved = 2 * arrays[0].nbytes
    if name in DELTA:
        flops, inputs = _of_prompt(name, traced.text, grid, arrays)
    turns = 1.0
    if name == "gemm_packed" and "#define STAYS 1" in traced.text:
        turns = -(-len(arrays[2]) // int(constant(traced.text, "TILES"))) / grid[0]
    return Launch(name, traced.text, grid, traced.block[0], moved, inputs, traced.shared, flops, turns)


def _of_prompt(kernel: str, text: str, grid: tuple[int, ...], arrays: Sequence[TracingArray]) -> tuple[int, int]:
    """`flops` and `inputs` of a kernel in DELTA."""
    a, d, n = (int(constant(text, name)) for name in ("KEY_DIM", "VALUE_DIM", "BLOCK"))
    *_, (blocks, heads, _, _) = (array.shape for array in arrays if array.ndim == 4)  # of weights
    if kernel == "mamba2_blocks":
        return blocks * grid[1] * grid[2] * 2 * n * n * a, 0
    if kernel == "delta_blocks":
        return blocks * (grid[1] * 4 * n * n * a + heads * n * n * (a + d)), 0
    terms = n * a * (2 + int(constant(text, "READS")))  # of queries and faded keys, and of reads
    return 2 * blocks * heads * d * (terms + n * n), 4 * blocks * heads * (terms + n * n)
