"""`python -m tests.cuda.small_batches`: prompts, turns and steps of small models on the GPU, for compute-sanitizer.

Every array has memory of its own, so that an access beyond one is an access beyond an allocation. Nothing is recorded,
since a graph would use memory that has been freed: what a recorded batch would replay is launched. It checks no
results: other tests do.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from polarlm.bench.random_weights import RandomWeights
from polarlm.engine import SamplingParams
from polarlm.engine.backends.cuda.ops import CudaOps
from polarlm.engine.model.forward import Transformer
from tests.bare import forward_together
from tests.cuda import gpu_sizes
from tests.cuda.emulated import open_device
from tests.cuda.test_gpu import Unrecorded
from tests.cuda.test_model_emulated import model_from, model_of, talk
from tests.cuda.test_packed_model import mixed_model
from tests.tiny import load_tiny, make_model

_TYPES = (("Q4_K_M", ("ring4", "ring3.5")), ("bf16", ("polarquant", "turbo4")), ("f16", ("polarpair-m4n4", "f16")))
_WINDOWED = "qwen2_mixed_windows", ("ring5", "ring4")
_EXPERTS = "qwen2_moe_shared", ("ring4", "ring3.5")
_DEFAULT = "qwen3_qk_norm_tied", "balanced"


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
    for kind, types in _TYPES[:1] if gpu_sizes.SIZES is gpu_sizes.SMALL else _TYPES:
        source = mixed if kind == "Q4_K_M" else RandomWeights(config, lambda _, kind=kind: kind)
        yield f"{kind}, {'/'.join(types)}", _finite(talk(model_from(ops, config, source, types)))
    yield ", ".join(_DEFAULT), _finite(two_turns(ops))
    yield ", ".join((_EXPERTS[0], "/".join(_EXPERTS[1]))), _finite(batches(model_of(ops, *_EXPERTS, more=256)))
    if gpu_sizes.SIZES is not gpu_sizes.SMALL:
        yield ", ".join((_WINDOWED[0], "/".join(_WINDOWED[1]))), _finite(talk(model_of(ops, *_WINDOWED)))


def two_turns(ops: CudaOps) -> list[np.ndarray]:
    """Log-probabilities of answers over blocks that encoders with a metric have rounded."""
    settings: dict[str, Any] = {"block_size": 16, "ctx_size": 256, "cache_type": _DEFAULT[1], "calibration": True}
    wanted = SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True, logprobs=1)
    ids, seen = [5 + 7 * i % 90 for i in range(130)], list[np.ndarray]()
    with (
        tempfile.TemporaryDirectory() as folder,
        load_tiny(make_model(Path(folder), _DEFAULT[0]), ops=ops, **settings) as engine,
    ):
        for _ in range(2):
            turn = engine.generate(ids, wanted)
            ids += [*turn.token_ids, 9, 8, 7]
            seen.append(np.array([token.logprob for token in turn.logprobs]))
    return seen


def batches(model: Transformer) -> list[np.ndarray]:
    """Logits of batches, of two prompts, of one of them that goes on, and of a step of the other."""
    store, logits = model.store, list[np.ndarray]()
    first, second = store.new_sequence(), store.new_sequence()
    for prompts, steps in (([(first, 40), (second, 33)], []), ([(first, 30)], [second])):
        spans, running = store.open_batch(prompts), [store.open_step(one) for one in steps]
        ids = [[5 + 7 * i % 90 for i in range(count)] for _, count in prompts]
        logits.append(model.logits(forward_together(model, spans, ids, running, [6] * len(steps))))
        store.commit_steps([*spans, *running])
    return logits


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
