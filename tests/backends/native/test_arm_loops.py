"""Hot loops of the levels of AArch64, compiled on any machine: they hold the instructions that a level exists for, and
their vectors stay in registers."""

from __future__ import annotations

import pytest

pytest.importorskip("llvmlite")

from polarlm.engine import codecs
from polarlm.engine.backends.native import codecs as tiles
from polarlm.engine.backends.native.kernels.linear.product import Product, product
from polarlm.engine.backends.native.kernels.linear.tiling import SINGLE, Tiling, largest_tiling
from polarlm.engine.jit.compile.compiler import Kernel
from polarlm.engine.jit.isa.levels import Level
from polarlm.engine.weight_formats import get
from tests.backends.native.codecs import attend
from tests.backends.native.hot_loops import ARM, Loop

every_arm_level = pytest.mark.parametrize("level", ARM, ids=lambda level: level.name)

WORDS = r"smlal2?|smull2?|mla|mul"  # of int16, or of int32 that LLVM made of them


def weights(name: str, sizes: Tiling) -> Kernel:
    return product(Product(get(name), sizes))


def scores(name: str) -> Kernel:
    own = tiles.keys(codecs.get(name), 64, 64)
    assert own is not None
    return attend.scores_kernel(own, 64, 3)


def mix(name: str) -> Kernel:
    own = tiles.values(codecs.get(name), 64, 64)
    assert own is not None
    return attend.mix_kernel(own, 64, 64, 3)


@every_arm_level
def test_products_of_codes(level: Level) -> None:
    """512 products of a row: with `sdot` 16 in two instructions, those of the high and those of the low bytes, with
    `smmla` in one."""
    loop = Loop(weights("q4_1", SINGLE), level)
    assert (
        loop.count({"neon": WORDS, "neon-dot": "sdot", "neon-i8mm": "smmla"}[level.name])
        >= {
            "neon": 128,
            "neon-dot": 64,
            "neon-i8mm": 32,
        }[level.name]
    )
    assert loop.on_stack <= len(loop) / 10
    assert len(loop) <= {"neon": 540, "neon-dot": 190, "neon-i8mm": 210}[level.name]


@every_arm_level
def test_products_of_several_rows_unpack_codes_once(level: Level) -> None:
    sizes = largest_tiling(level)
    one, all_ = (Loop(weights("q8_0", own), level) for own in (SINGLE, sizes))
    name = {"neon": WORDS, "neon-dot": "sdot", "neon-i8mm": "smmla"}[level.name]
    assert all_.count(name) == sizes.rows * one.count(name)
    assert len(all_) < sizes.rows * len(one) * (0.75 if level.name == "neon" else 1.1)
