"""A row of a product, whatever the number of rows beside it: kernels round x to the same numbers, and gemm_wide adds
them in the same order.

The exceptions are one and two rows: bf16 weights take x unrounded, and packed ones are not rounded themselves.
"""

from __future__ import annotations

import numpy as np
import pytest

from polarlm.engine.backends.cuda.launch_configs import GEMV_ROWS
from polarlm.engine.backends.cuda.ops import CudaOps
from polarlm.engine.backends.cuda.wide import WIDE_ROWS
from polarlm.engine.weight_formats import Linear
from tests.cuda.emulated import open_device
from tests.cuda.formats import EPS32, STEP
from tests.pairs import pairs
from tests.weights import random_matrix

EPS = 1e-5
ROWS = (1, 2, 3, 9, 17, 64, 70, 128, 130)
WIDTH, OUT = 1024, 40


@pytest.mark.slow
@pytest.mark.parametrize(
    ("weight", "normed", "activation"), pairs(["f16", "bf16", "q8_0", "q4_k"], [False, True], [None, "silu"])
)
def test_other_rows_change_only_the_order_of_sums(
    rng: np.random.Generator, weight: str, normed: bool, activation: str | None
) -> None:
    """Within what float32 sums in two orders differ by, which is less than rounding x changes; and nothing at all with
    packed weights, from three rows on, up to as many as are multiplied as they are."""
    ops = CudaOps(open_device(checked=False))
    w = Linear(ops.load([random_matrix(rng, weight, OUT, WIDTH)]))
    x = (2 * rng.standard_normal((max(ROWS), WIDTH))).astype(np.float32)
    norm = (ops.to_device(rng.uniform(0.5, 2, WIDTH).astype(np.float32)), EPS) if normed else None
    products = {
        rows: ops.to_host(ops.linear(ops.to_device(x[:rows]), w, norm=norm, activation=activation))[0] for rows in ROWS
    }
    weights = ops.rows(w).astype(np.float64)
    values = x[0].astype(np.float64)
    if normed:
        values *= ops.to_host(norm[0]) / np.sqrt((values**2).mean() + EPS)
    root = np.sqrt(weights**2 @ values**2)  # the root of the sum of squares of what is summed
    alike = [products[rows] for rows in ROWS if rows > (GEMV_ROWS if weight != "f16" else 0)]
    order, rounding = 4 * EPS32 * np.sqrt(WIDTH) * root, STEP["__half"] / 4 * root
    assert (order < rounding / 4).all()
    if activation is not None:
        gate, up = np.split(weights @ values, 2)
        (gate_order, up_order), silu = np.split(order, 2), gate / (1 + np.exp(-gate))
        order = 1.1 * gate_order * (np.abs(up) + up_order) + np.abs(silu) * up_order + 16 * EPS32 * np.abs(gate * up)
    for other in alike[1:]:
        assert (np.abs(other - alike[0]) <= order).all()
    if w.parts[0].format.unpack:
        wide = [products[rows] for rows in ROWS if GEMV_ROWS < rows <= WIDE_ROWS]
        np.testing.assert_equal(wide, wide[:1] * len(wide))


def test_inputs_of_any_size_are_normalised_before_they_are_rounded(rng: np.random.Generator) -> None:
    """Residual streams of some models leave the range of half precision."""
    ops = CudaOps(open_device(checked=False))
    file = random_matrix(rng, "q8_0", OUT, WIDTH)
    w, norm = Linear(ops.load([file])), ops.to_device(np.full(WIDTH, 30, np.float32))
    x = rng.standard_normal((9, WIDTH)).astype(np.float32)
    for rows in (1, 2, 3, 9):
        small, large = (ops.linear(ops.to_device(scale * x[:rows]), w, norm=(norm, 0.0)) for scale in (1, 2**17))
        np.testing.assert_array_equal(ops.to_host(large), ops.to_host(small))
