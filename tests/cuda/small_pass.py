"""`python -m tests.cuda.small_pass`: prompts, second turns and steps of small models on the GPU, for compute-sanitizer.

Every array has memory of its own, so that an access beyond one is an access beyond an allocation. Nothing is recorded,
since a graph would use memory that has been freed. It checks no results: other tests do.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from polarlm.bench.random_weights import RandomWeights
from polarlm.engine.backends.cuda.ops import CudaOps
from tests.cuda import gpu_sizes
from tests.cuda.emulated import open_device
from tests.cuda.test_gpu import Unrecorded
from tests.cuda.test_model_emulated import model_from, model_of, talk
from tests.cuda.test_packed_model import mixed_model

_PASSES = (("Q4_K_M", ("ring4", "ring3.5")), ("bf16", ("polarquant", "turbo4")), ("f16", ("polarpair-m4n4", "f16")))
_WINDOWED = "qwen2_mixed_windows", ("ring5", "ring4")


class _NoPool:
    """Replaces CuPy's pool of memory: every allocation is one of CUDA's."""

    @staticmethod
    def malloc(size: int) -> Any:
        import cupy

        return cupy.cuda.MemoryPointer(cupy.cuda.Memory(max(1, size)), 0)

    def free_bytes(self) -> int:
        return 0

    def free_all_blocks(self) -> None:
        """There are none."""


def run(ops: CudaOps) -> Iterator[tuple[str, bool]]:
    """The name of each model and its cache types, and whether all its logits are finite."""
    config, mixed = mixed_model()
    for kind, types in _PASSES[:1] if gpu_sizes.SIZES is gpu_sizes.SMALL else _PASSES:
        source = mixed if kind == "Q4_K_M" else RandomWeights(config, lambda _, kind=kind: kind)
        yield f"{kind}, {'/'.join(types)}", _finite(talk(model_from(ops, config, source, types)))
    if gpu_sizes.SIZES is not gpu_sizes.SMALL:
        yield ", ".join((_WINDOWED[0], "/".join(_WINDOWED[1]))), _finite(talk(model_of(ops, *_WINDOWED)))


def _finite(logits: list[np.ndarray]) -> bool:
    return all(np.isfinite(part).all() for part in logits)


def main() -> None:
    import cupy

    pool = _NoPool()
    cupy.get_default_memory_pool = lambda: pool
    cupy.cuda.set_allocator(pool.malloc)
    for name, finite in run(Unrecorded(open_device())):
        print(f"{name}: {'finite' if finite else 'NOT FINITE'}", flush=True)


if __name__ == "__main__":
    main()
