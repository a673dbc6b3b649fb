"""What the CUDA ops need of a device: memory, launches, one matrix product, recorded work. No arithmetic of its own."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, Protocol, TypeVar

import numpy as np

# An array on the device: has shape, dtype, strides, size, nbytes, reshape, and slices are views.
Array = Any
Result = TypeVar("Result")

MOST_RECORDINGS = 24
"""Those used last that a device keeps: each has its graph, of some hundred launches, and room for its inputs."""


class Device(Protocol):
    """One GPU, or what stands in for it. All work happens in the order of the calls."""

    name: str
    """For people, such as "NVIDIA H200"."""

    processors: int
    """Multiprocessors: so many blocks of a large kernel run at the same time."""

    shared_memory: int
    """Bytes of shared memory of a multiprocessor, which the blocks that run on it divide among themselves."""

    def memory(self) -> tuple[int, int]:
        """Bytes that an allocation could still have, and bytes that there are."""

    def empty(self, shape: tuple[int, ...], dtype: Any) -> Array:
        """An array with anything in it, aligned to 256 bytes. Raises MemoryError."""

    def zeros(self, shape: tuple[int, ...], dtype: Any) -> Array:
        """An array of zeros, aligned to 256 bytes. Raises MemoryError."""

    def from_host(self, x: np.ndarray) -> Array:
        """A copy on the device, same dtype; `x` may change afterwards. Raises MemoryError."""

    def to_host(self, x: Array) -> np.ndarray:
        """A copy on the host, same dtype, once everything before is done."""

    def wait(self) -> None:
        """Return when everything before is done."""

    def launch(
        self, kernel: str, text: str, grid: Sequence[int], block: Sequence[int], args: Sequence[Any], shared: int = 0
    ) -> None:
        """Run `kernel` of a CUDA text over grid and block (1 to 3 sizes each).

        args: device arrays or None for pointers, NumPy scalars of the kernel's own types for numbers (bfloat16 travels
        as uint16). shared: bytes of dynamic shared memory. TypeError for any other argument.
        """

    def gemm(self, y: Array, x: Array, weight: Array, *, add: bool) -> None:
        """y (T, out) float32 = x (T, in) @ weight (out, in)ᵀ, or += with `add`.

        x and weight are both float16 or both bfloat16, and contiguous; y may be columns of wider rows. Sums are
        float32. Not for work that
        is recorded.
        """

    def run_graph(self, key: Hashable, work: Callable[..., Result], inputs: Sequence[np.ndarray]) -> Result:
        """work(*inputs on the device); with a key, shapes and dtypes seen before, what it launched then once more.

        The result, a contiguous array or a tuple of them, is good until the next call. Work may keep what it brings
        from the host, and nothing else that it makes. Raises MemoryError.
        """

    def set_aside(self, size: int) -> None:
        """Take `size` bytes for all work that is ever recorded, in one piece: the largest may need so much.

        Without, or where it needs more, memory is found as work is recorded. Raises MemoryError.
        """
