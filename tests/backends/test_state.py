"""No op keeps state: an ops object is the same after a generation as before a model was loaded."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from types import FunctionType, MethodType
from typing import Any

import numpy as np
import pytest

pytest.importorskip("llvmlite")

from polarlm.engine import SamplingParams
from polarlm.engine.backends.cuda.launch import Launcher
from polarlm.engine.backends.cuda.ops import CudaOps
from polarlm.engine.backends.kv import HeadRule, HeadTransform
from polarlm.engine.backends.native import launch as native_launch
from polarlm.engine.backends.native.graphs import Graphs
from polarlm.engine.backends.native.ops import NativeOps
from polarlm.engine.backends.numpy.ops import NumpyOps
from polarlm.engine.codecs.parts.rotation import signed_hadamard
from tests.cuda.emulated import EmulatedDevice, open_device
from tests.pairs import mostly_slow
from tests.tiny import VOCABULARY, load_tiny

PROMPT = np.random.default_rng(0).integers(5, VOCABULARY, 40).tolist()
SOME = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True)

# What belongs to the machine, and is no state of an op: memory, compiled kernels, recordings, cores.
MACHINE = Launcher, native_launch.Launcher, Graphs, EmulatedDevice


def contents(value: Any, seen: tuple[int, ...] = ()) -> Any:
    """All that can be reached from an object, but for what belongs to the machine."""
    if id(value) in seen:
        return "itself"
    seen = (*seen, id(value))
    if isinstance(value, np.ndarray):
        return value.shape, value.tobytes()
    if isinstance(value, Mapping):
        return {key: contents(item, seen) for key, item in value.items()}
    if isinstance(value, (list, tuple, set)):
        return [contents(item, seen) for item in value]
    if isinstance(value, MethodType):
        return contents(value.__self__, seen)
    if isinstance(value, (FunctionType, type, *MACHINE)) or not hasattr(value, "__dict__"):
        return value
    return contents(vars(value), seen)


BACKENDS: dict[str, Callable[[], Any]] = {
    "numpy": NumpyOps,
    "compiled": lambda: NativeOps(1),
    "emulated GPU": lambda: CudaOps(open_device(checked=False)),
}


@mostly_slow("backend", BACKENDS, ["numpy", "compiled"])
def test_no_op_keeps_state(tiny_path: Path, backend: str) -> None:
    """After prompts, steps, a second turn and a score. The CPU backends have a layer of each kind."""
    ops = BACKENDS[backend]()
    types = {"cache_type_k": "ring4" if backend == "emulated GPU" else "polarpair-m4n4+minmax@1,ring4"}
    before = contents(ops)
    with load_tiny(tiny_path, ops=ops, block_size=32, ctx_size=256, cache_type_v="ring3.5", **types) as engine:
        answer = engine.generate(PROMPT, SOME)
        engine.generate([*PROMPT, *answer.token_ids, *PROMPT[:5]], SOME)
        engine.score(PROMPT, every_token_coded=True)
    assert contents(ops) == before


def test_prepared_transforms_do_not_depend_on_the_host_array() -> None:
    ops, rng = CudaOps(open_device(checked=False)), np.random.default_rng(0)
    qkv, rope = rng.standard_normal((2, 4, 16), np.float32), tuple(rng.standard_normal((2, 2, 8), np.float32))

    def keys(rotation: np.ndarray) -> np.ndarray:
        rule = HeadRule(*ops.prepare([HeadTransform(1, None, rotation, None)]))
        rotation[:] = np.nan
        return ops.to_host(ops.transform_heads(ops.to_device(qkv), tuple(map(ops.to_device, rope)), rule)[1])

    wanted = NumpyOps().transform_heads(qkv.copy(), rope, HeadRule(HeadTransform(1, None, signed_hadamard(16))))[1]
    np.testing.assert_allclose(keys(signed_hadamard(16).copy()), wanted, atol=1e-5)
