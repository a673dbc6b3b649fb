"""The matrices of a level that multiplies them: units, and instructions. `tests/ops/` has products and experts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from polarlm.engine.backends.native.kernels.linear.activations import Inputs
from polarlm.engine.backends.native.kernels.linear.matrix_sums import units_at_once
from polarlm.engine.backends.native.kernels.linear.product import ProductSpec, product
from polarlm.engine.backends.native.kernels.linear.tiling import largest_tiling
from polarlm.engine.backends.native.product_ops.multiplication import inputs_of
from polarlm.engine.jit.isa.levels import LEVELS
from polarlm.engine.jit.isa.x86 import Avx512Amx
from polarlm.engine.jit.lang import Level
from polarlm.engine.weight_formats import Linear, get
from tests.backends.native.hot_loops import Loop
from tests.jit.levels import assembly
from tests.pairs import in_turn


def test_threads_take_many_units_and_none_has_nothing_to_do() -> None:
    assert units_at_once(96, 2) == 16
    assert units_at_once(16, 4) == 2
    assert units_at_once(3, 4) == 1


@in_turn("level name", [(level, name) for level in LEVELS if level.matrices for name in ("q4_0", "q6_k", "bf16")])
def test_instructions(name: str, level: Level) -> None:
    """The loop that multiplies has a product for each matrix that it loads, makes a matrix of another strip for four
    parts of its own, and reads and writes no vectors on the stack."""
    kernel = product(ProductSpec(get(name), largest_tiling(level, Inputs.MATRICES), inputs=Inputs.MATRICES))
    text = assembly(kernel, level)
    assert text.count("tdpbf16ps") == 4 * 4 + 4 + 2 * 4 + 2  # beside what is made and after it, of 32 rows and of 16
    assert Loop(kernel, level, share_of="vpermw").spilled == 0


def test_a_routers_inputs_have_16_bits() -> None:
    launch: Any = SimpleNamespace(level=Avx512Amx(), in_graph=False, input_bits="bf16")
    matrix: Any = SimpleNamespace(format=get("bf16"), shape=(16, 64))
    assert inputs_of(launch, Linear((matrix,)), rows=32) == [Inputs.MATRICES]
    assert inputs_of(launch, Linear((matrix,), is_exact=True), rows=32) == [Inputs.WORDS]


@pytest.mark.parametrize("bits", ["8", "16"])
def test_matrices_are_for_bfloat16_alone(bits: str) -> None:
    """Where others are asked for, kernels of the level below serve."""
    level, inputs = Avx512Amx(), Inputs.BYTES if bits == "8" else Inputs.CODES
    kernel = product(ProductSpec(get("q4_0"), largest_tiling(level), inputs=inputs))
    assert "tdp" not in assembly(kernel, level)
