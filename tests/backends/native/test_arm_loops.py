"""Hot loops of the levels of AArch64, compiled on any machine: they hold the instructions that a level exists for, and
their vectors stay in registers: nothing is written to the stack. Where that is not so, the test says how much is."""

from __future__ import annotations

import re
from typing import Any

from polarlm.engine import codecs
from polarlm.engine.backends.native import codecs as tiles
from polarlm.engine.backends.native.kernels.attention.prompts import attend as attend_kernel
from polarlm.engine.backends.native.kernels.attention.unit import PromptSpec
from polarlm.engine.backends.native.kernels.linear.activations import Inputs
from polarlm.engine.backends.native.kernels.linear.block_sums import output_groups
from polarlm.engine.backends.native.kernels.linear.product import ProductSpec, product
from polarlm.engine.backends.native.kernels.linear.tiling import SINGLE, Tiling, largest_tiling
from polarlm.engine.jit.lang import F32, Emitter, Kernel, Level, Value, vector
from polarlm.engine.weight_formats import get
from tests.backends.native.codecs import attend
from tests.backends.native.hot_loops import ARM, Loop
from tests.jit.levels import assembly, declared
from tests.pairs import each, in_turn

every_arm_level = in_turn("level", ARM)


# Products of bytes with int16: of 4 high and of 4 low bytes in two instructions, or of 8 of both in one; of int16,
# or of int32 that LLVM makes of them.
OF_WEIGHTS = {"neon": "smlal2?|smull2?|mla|mul", "neon-dot": "sdot", "neon-i8mm": "smmla"}
PRODUCTS = {"neon": 128, "neon-dot": 64, "neon-i8mm": 32}  # how many for 16 outputs and 32 inputs


def keys(name: str) -> Kernel:
    own = tiles.keys(codecs.get(name), 64, 64)
    assert own is not None
    return attend.scores_kernel(own, 64, 3)


def values(name: str) -> Kernel:
    own = tiles.values(codecs.get(name), 64, 64)
    assert own is not None
    return attend.mix_kernel(own, 64, 64, 3)


@every_arm_level
def test_products(level: Level) -> None:
    """Codes of 4 bits are masked and multiplied as bytes. Sums of several rows with both bytes are of 8 outputs."""
    instruction, count = OF_WEIGHTS[level.name], PRODUCTS[level.name]
    one, many = (Loop(product(ProductSpec(get("q4_1"), own)), level) for own in (SINGLE, largest_tiling(level)))
    rows = largest_tiling(level).rows
    assert count <= one.count(instruction) <= count + 4
    turns = len(output_groups(level, rows))
    assert rows * count <= turns * many.count(instruction) <= rows * (count + 4)
    assert one.count("and") == (32 if level.splits_words else 64)
    assert turns * len(many) < rows * len(one) * (0.85 if level.splits_words else 0.7)
    assert one.on_stack == 0
    assert len(one) <= (190 if level.splits_words else 510)


@in_turn("level name", each([level for level in ARM if level.most_code], ["q4_1", "q6_k", "q8_0", "iq4_xs"]))
def test_products_of_inputs_of_8_bits(level: Level, name: str) -> None:
    """Half of the products of a row with both bytes of 16 bits, and at most three quarters of the instructions."""
    kinds = Inputs.CODES, Inputs.BYTES
    kernels = [ProductSpec(get(name), largest_tiling(level, kind), inputs=kind) for kind in kinds]
    words, of_bytes = (Loop(product(kernel), level) for kernel in kernels)
    rows = [kernel.row_tile for kernel in kernels]
    instruction = OF_WEIGHTS[level.name]
    assert of_bytes.count(instruction) / rows[1] == words.count(instruction) / rows[0] / 2
    assert len(of_bytes) / rows[1] < 0.75 * len(words) / rows[0]
    assert of_bytes.spilled == 0


@every_arm_level
@in_turn("name", ["q4_1", "q6_k", "q8_0", "iq4_xs"])
def test_sums_of_products_stay_in_registers(level: Level, name: str) -> None:
    """What few instructions read from the stack are constants. At `neon` an instruction in 40 spills a sum of several
    rows: without, for 8 outputs at a time, loops would have a fifth more instructions."""
    for rows in range(1, largest_tiling(level).rows + 1):
        loop = Loop(product(ProductSpec(get(name), Tiling(rows, 1))), level)
        spills = rows > 1 and not level.splits_words
        assert loop.spilled <= spills * len(loop) / 40, f"{rows} rows"
        assert loop.on_stack <= 4 + spills * len(loop) / 20, f"{rows} rows"


@every_arm_level
def test_tables_and_bytes(level: Level) -> None:
    """The two tables of 256 bytes of `ring4` are looked up in four instructions each, 64 entries at a time, and what is
    found is multiplied by each query as signed bytes. The tables would take all registers: they are read again, 64
    entries for four registers of codes."""
    loop = Loop(keys("ring4"), level)
    lookups, products = 2 * 4, 3 * 2 * 4  # for four registers of codes
    assert loop.count("tbl") == lookups
    assert loop.count("tbx") == 3 * lookups
    assert loop.count("smull2?|sdot") == products * (2 if level.name == "neon" else 1)
    assert loop.spilled <= (3 if level.name == "neon" else 0)


@every_arm_level
def test_unsigned_bytes_times_signed_ones(level: Level) -> None:
    """Attention weights and directions of `polarquant`: `usdot`, or `sdot` and what it lacks, or two products of words
    that are added in pairs. Rounded products of words are one instruction."""
    loop = Loop(values("polarquant"), level)
    wanted = {"neon": ("sadalp", 24), "neon-dot": ("sdot", 40), "neon-i8mm": ("usdot", 24)}
    instruction, count = wanted[level.name]
    assert loop.count(instruction) == count
    assert loop.count("sqrdmulh") == 24
    assert loop.count("tbl") == 12
    assert loop.on_stack <= len(loop) / 16


@every_arm_level
def test_floats(level: Level) -> None:
    """Halves are widened four at a time, each register for three multiply-adds, and nothing goes to the stack."""
    loop = Loop(keys("f16"), level)
    assert loop.count("fcvtl2?") == 16
    assert loop.count("fmla") == 3 * 16
    assert loop.on_stack == 0
    prompt = Loop(attend_kernel(PromptSpec(64)), level, product=True)
    assert prompt.count("fmla") >= len(prompt) * 0.7
    assert prompt.on_stack == 0


@every_arm_level
def test_order_is_kept_without_an_instruction(level: Level) -> None:
    """Each number is added before the next one is read."""

    def emit(e: Emitter, args: Any, begin: Value, end: Value, scratch: Value) -> None:
        total = e.load(args.x, vector(F32, 4))
        for place in range(1, 20):
            e.keep_order()
            total = total + e.load(args.x, vector(F32, 4), 48 * place)
        e.store(total, args.out)

    text = assembly(Kernel("test_order", emit, declared("x out")), level)
    names = [line.split()[0] for line in text.splitlines() if re.match(r"\t\w", line)]
    assert names == ["ldp", "ldr", *["ldr", "fadd"] * 19, "str", "ret"]


@every_arm_level
def test_a_level_has_no_instruction_of_a_later_one(level: Level) -> None:
    """LLVM would end the process for an instruction that it does not know; this finds one that it chose itself."""
    later = {
        "neon": "[su]dot|usdot|smmla|usmmla",
        "neon-dot": "usdot|[su]mmla|usmmla",
        "neon-i8mm": "f?mlal.*bf16|bf.*",
    }
    for kernel in (product(ProductSpec(get("q4_1"), SINGLE)), values("polarquant")):
        names = {line.split()[0] for line in assembly(kernel, level).splitlines() if line.startswith("\t")}
        assert not [name for name in names if re.fullmatch(later[level.name], name)]
