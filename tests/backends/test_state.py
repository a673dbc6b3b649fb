"""No op keeps state: an ops object is the same after a generation as before a model was loaded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest

from polarlm.engine import Engine, SamplingParams
from polarlm.engine.backends.cuda.ops import CudaOps
from polarlm.engine.backends.kv import HeadTransform
from polarlm.engine.backends.numpy.ops import NumpyOps
from polarlm.engine.codecs.parts.rotation import signed_hadamard
from polarlm.engine.loading import assembly
from tests.cuda.emulated import open_device

# An attribute about the machine, which is no state of an op: device memory, compiled kernels and recordings.
MACHINE = {"_device", "_launch"}


def state(value: object, seen: tuple[int, ...] = ()) -> object:
    """A snapshot that compares equal as long as nothing in `value` changes; objects of other packages count by
    identity."""
    if id(value) in seen:
        return "itself"
    seen = (*seen, id(value))
    if isinstance(value, (str, int, float, bool, type(None))):
        return value
    if isinstance(value, np.ndarray):
        return id(value), value.tobytes()
    if isinstance(value, Mapping):
        return [(state(key, seen), state(x, seen)) for key, x in value.items()]
    if isinstance(value, (Sequence, set, frozenset)):
        return [state(x, seen) for x in value]
    if type(value).__module__.startswith("polarlm.engine."):
        own = {name: x for name, x in getattr(value, "__dict__", {}).items() if name not in MACHINE}
        return id(value), state(own, seen)
    return id(value)


@pytest.mark.parametrize(
    ("device", "types"), [("cpu", "balanced"), ("emulated GPU", "balanced"), ("emulated GPU", "polarquant")]
)
def test_generating_and_scoring_leave_the_ops_unchanged(
    tiny_path: Path, monkeypatch: pytest.MonkeyPatch, device: str, types: str
) -> None:
    ops = NumpyOps() if device == "cpu" else CudaOps(open_device(checked=False))
    before = state(ops)
    monkeypatch.setattr(assembly, "select", lambda device, threads: (ops, ""))
    with Engine.load(tiny_path, block_size=16, ctx_size=128, cache_type=types) as engine:
        engine.generate("The cat sat on the mat and", SamplingParams(max_tokens=24, temperature=0, ignore_eos=True))
        engine.score(range(5, 40), every_token_coded=True)
        assert state(ops) == before


def test_prepared_transforms_do_not_depend_on_the_host_array() -> None:
    ops, rng = CudaOps(open_device(checked=False)), np.random.default_rng(0)
    qkv, rope = rng.standard_normal((2, 4, 16), np.float32), tuple(rng.standard_normal((2, 2, 8), np.float32))

    def keys(rotation: np.ndarray) -> np.ndarray:
        (transform,) = ops.prepare([HeadTransform(1, None, rotation, None)])
        rotation[:] = np.nan
        return ops.to_host(ops.transform_heads(ops.to_device(qkv), tuple(map(ops.to_device, rope)), transform)[1])

    wanted = NumpyOps().transform_heads(qkv.copy(), rope, HeadTransform(1, None, signed_hadamard(16)))[1]
    np.testing.assert_allclose(keys(signed_hadamard(16).copy()), wanted, atol=1e-5)
