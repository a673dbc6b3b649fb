"""Functions of the kernel language that are more than one instruction."""

from __future__ import annotations

import numpy as np

from tests.backends.native.levels import every_level, run

from engine.backends.native.compiler import Kernel  # isort: skip
from engine.backends.native.emit import Emitter
from engine.backends.native.target import Level
from engine.backends.native.values import F32, Value, vector


@every_level
def test_exp(level: Level) -> None:
    def emit(e: Emitter, x: Value, y: Value, begin: Value, end: Value, scratch: Value) -> None:
        with e.loop(begin, end) as unit:
            e.store(e.exp(e.load(x + unit * 64, vector(F32, 16))), y + unit * 64)
            e.store(e.exp(e.load(x + unit * 64, F32)), y + unit * 64)

    x = np.concatenate([np.linspace(-87.29, 88, 2**14), [0, -87.31, -100, -1e30, -np.inf], np.full(11, 1)])
    x = x.astype(np.float32)
    y = np.empty_like(x)
    run(Kernel("exp", emit, ("x", "y")), level, len(x) // 16, (x, y))
    np.testing.assert_allclose(y[: 2**14], np.exp(x[: 2**14].astype(np.float64)), rtol=2e-7)
    assert y[2**14 :].tolist() == [1, 0, 0, 0, 0, *[y[-1]] * 11]
