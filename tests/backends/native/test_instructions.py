"""Hot loops of kernels at the levels of x86-64, which any machine compiles: they hold the instructions that a level
exists for, in whole registers, and hardly a vector goes to the stack and back."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from polarlm.engine import codecs
from polarlm.engine.backends.kv import CacheFormat
from polarlm.engine.backends.native import codecs as tiles
from polarlm.engine.backends.native.kernels.attention.bfloat_matrices import BFLOAT
from polarlm.engine.backends.native.kernels.attention.latent_steps import LANES, LatentBody
from polarlm.engine.backends.native.kernels.attention.matrix_prompts import attend_by_matrices
from polarlm.engine.backends.native.kernels.attention.prompts import attend as attend_prompt
from polarlm.engine.backends.native.kernels.attention.steps import AttentionSpec
from polarlm.engine.backends.native.kernels.attention.steps import attend as attend_step
from polarlm.engine.backends.native.kernels.attention.unit import PromptSpec
from polarlm.engine.backends.native.kernels.attention.word_matrices import WORDS
from polarlm.engine.backends.native.kernels.linear.activations import Inputs, inputs_for, splits
from polarlm.engine.backends.native.kernels.linear.product import ProductSpec, product
from polarlm.engine.backends.native.kernels.linear.tiling import (
    SINGLE,
    Tiling,
    are_unsigned,
    become_words,
    largest_tiling,
    tiling,
)
from polarlm.engine.jit.lang import Kernel, Level
from polarlm.engine.weight_formats import get
from tests.backends.native.codecs import attend
from tests.backends.native.hot_loops import OF_BYTES, OF_SMALL_BYTES, OF_WORDS, X86, Loop, special_levels
from tests.jit.levels import assembly
from tests.ops.encoding import Shape, metrics_of
from tests.pairs import each, in_turn, mostly_slow

WITH_WORDS = [level for level in X86 if level.unpacks_first]


def has_permutes(level: Level) -> bool:
    return "avx512vbmi" in level.needs


def wide_lookup(level: Level) -> str:
    """The instruction that looks up bytes of a table with more than 16 entries, or several of them."""
    if level.lanes < 16:
        return "vpshufb"
    return "vperm[it]?2?b" if has_permutes(level) else "vperm[it]2w"


def polar_key_counts(level: Level) -> dict[str, int]:
    if has_permutes(level):
        return {"vpermb": 6, "vpdpbusd": 6}
    return {"vpshufb": 6, "vpmaddubsw": 6, "vpmulhrsw": 3}


def polar_value_counts(level: Level) -> dict[str, int]:
    return {"vpshufb": 4, "vpmulhrsw": 12, "vpackuswb": 6, OF_SMALL_BYTES[level.name]: 12}


def table_count(level: Level) -> float:
    """The share of instructions that may use the stack in a loop with a table."""
    return 0.02 if has_permutes(level) else 0.2


# Codec, side → the least number of each instruction, and the share of instructions that may use the stack with the 32
# registers of AVX-512.
Counts = Callable[[Level], dict[str, int]]
OF_CODECS: dict[tuple[str, str], tuple[Counts, Callable[[Level], float]]] = {
    ("ring4", "keys"): (lambda level: {wide_lookup(level): 4, OF_BYTES[level.name]: 12}, table_count),
    ("ring3.5", "values"): (lambda level: {wide_lookup(level): 4, OF_SMALL_BYTES[level.name]: 12}, table_count),
    ("turbo3", "keys"): (lambda level: {"vpshufb": 4, OF_BYTES[level.name]: 12}, table_count),
    ("polarpair-m4n4", "keys"): (lambda level: {wide_lookup(level): 4, OF_BYTES[level.name]: 24}, table_count),
    ("polarquant", "keys"): (polar_key_counts, lambda level: 0),
    ("polarquant", "values"): (polar_value_counts, lambda level: 0),
    ("f16", "keys"): (lambda level: {"vcvtph2ps": 8, "vfmadd231ps": 24}, lambda level: 0),
    ("f16", "values"): (lambda level: {"vcvtph2ps": 8, "vfmadd231ps": 24}, lambda level: 0),
}


@pytest.mark.slow
@special_levels
@in_turn("codec_and_side", OF_CODECS)
def test_loops_over_codes(codec_and_side: tuple[str, str], level: Level) -> None:
    """Codes are looked up and multiplied by three queries or three rows of weights."""
    name, side = codec_and_side
    side_tiles = getattr(tiles, side)(codecs.get(name), 64, 64)
    kernel = attend.scores_kernel(side_tiles, 64, 3) if side == "keys" else attend.mix_kernel(side_tiles, 64, 64, 3)
    loop, (least, share) = Loop(kernel, level), OF_CODECS[codec_and_side]
    for instruction, count in least(level).items():
        assert loop.count(instruction) >= count, instruction
    if level.lanes == 16:
        assert loop.on_stack <= share(level) * len(loop)


def encoder(tilted: bool) -> Kernel:
    shape, ring4 = Shape(("ring4", "ring4"), 64, 64, 8), codecs.get("ring4")
    format = CacheFormat(ring4, ring4, *metrics_of(shape), shape.mean_bits, shape.size, shape.heads, shape.dim)
    return (tiles.values, tiles.keys)[tilted](ring4, 64, 64).encoder(format, int(not tilted))


OF_FLOATS: dict[str, Callable[[], Kernel]] = {
    "a step's blocks in full precision": lambda: attend_step(
        AttentionSpec(*(make(codecs.get("linear8"), 64, 64) for make in (tiles.keys, tiles.values)), 8, 64, 64, 3, 3)
    ),
    "a prompt": lambda: attend_prompt(PromptSpec(64)),
    "a prompt of wide heads": lambda: attend_prompt(PromptSpec(128)),
    "rounding of keys": lambda: encoder(tilted=True),
    "rounding of values": lambda: encoder(tilted=False),
}


# Levels whose registers are as wide have the same instructions on floats.
@mostly_slow("level", X86, {level.lanes: level for level in X86}.values(), ids=lambda level: level.name)
@in_turn("kernel", OF_FLOATS)
def test_loops_over_floats(kernel: str, level: Level) -> None:
    """At least half of the instructions are multiply-adds, and their sums never go to the stack."""
    loop = Loop(OF_FLOATS[kernel](), level, product=True)
    assert loop.count(r"vfmadd\d+ps") >= max(4, len(loop) / 2)
    assert loop.on_stack == 0


@in_turn("level", [level for level in X86 if level.has_room and "vnni" in level.features])
def test_steps_over_latent_vectors_multiply_what_is_in_memory(level: Level) -> None:
    """Each number or four bytes of a block by those of 16 queries, whose sums never go to the stack."""
    for name, instruction in (("ring3", "vpdpbusd"), ("f16", "vfmadd")):
        spec = AttentionSpec(tiles.keys(codecs.get(name), 64, 64), None, 0, 64, 64, LANES, LANES)
        loop = Loop(attend_step(spec, LatentBody), level, share_of=instruction)
        products = loop.count(rf"{instruction}\S*.*1to16.*")
        assert products >= max(2 * LANES, len(loop) * 2 / 3)
        assert loop.on_stack == 0


@in_turn("level", [level for level in X86 if level.matrices is not None])
def test_weights_are_computed_between_products(level: Level) -> None:
    """Of 16 queries and 64 keys in a turn, in registers."""
    text = assembly(attend_by_matrices(BFLOAT, PromptSpec(64)), level)
    _, *weights, _ = text.split("vscalefps")
    assert len(weights) == 63
    assert not any("%rsp" in line for part in weights for line in part.splitlines() if "%zmm" in line)
    # Two for scores and two for sums of each 16 keys or channels, and two for the sum of weights; those of the first
    # turn and of the last one are outside.
    assert text.count("tdpbf16ps") == 2 * (8 + 10)


@in_turn("level", [level for level in X86 if level.multiplies_words])
def test_attention_of_prompts_multiplies_words(level: Level) -> None:
    """Of 8 rows and 32 keys, or of 4 and 16 where there are 16 registers: of each two pairs a product a register of
    sums, a load of each register of pairs and one of each query."""
    loop = Loop(attend_by_matrices(WORDS, PromptSpec(64)), level, share_of=OF_WORDS[level.name])
    registers = 2 if level.has_room else 16 // level.lanes
    rows = 8 if level.has_room else 4
    assert loop.count(OF_WORDS[level.name]) == 2 * rows * registers
    own = 1 if level.most_code == 255 else 2  # with an addition each
    assert len(loop) <= 2 * (own * rows * registers + registers + rows) + 8
    assert loop.on_stack == 0


@special_levels
@in_turn("name rows", [("q4_1", 1), ("q6_k", 4), ("q8_0", 8), ("iq4_xs", 1), ("q4_1", 64)])
def test_products_of_codes(name: str, rows: int, level: Level) -> None:
    """16 dot products of pairs of words for each row and 32 inputs, or of fours of bytes with the high and with the low
    bytes of inputs. AVX2 has 16 registers for twice as many vectors."""
    sizes = tiling(rows, level)
    if become_words(sizes, level):  # other tests compile these
        sizes = Tiling(*level.code_tiles[0])
    loop = Loop(product(ProductSpec(get(name), sizes)), level)
    products = 16 * sizes.rows * sizes.tiles * (16 // level.lanes)
    of_bytes = splits(level, sizes.rows)
    assert loop.count((OF_BYTES if of_bytes else OF_WORDS)[level.name]) == products
    if name == "iq4_xs":
        assert loop.count("vpshufb") >= (8 if of_bytes else 16)
    if level.lanes == 16:
        assert loop.on_stack <= products / 4


@in_turn("level name", each(WITH_WORDS, ["q4_1", "q6_k", "iq3_s", "tq1_0", "f16"]))
def test_products_of_words(name: str, level: Level) -> None:
    """Two pairs of words are multiplied at a time. For each pair there are a load and a dot product for 16 outputs and
    each row, whose inputs are loaded once; or one product of two sums, but for each third row. Nothing else is in the
    loop."""
    sizes = largest_tiling(level)
    rows, vectors = sizes.rows, sizes.tiles * 16 // level.lanes
    kind = inputs_for(get(name), 64, level, waits=False)
    loop = Loop(product(ProductSpec(get(name), sizes, inputs=kind)), level, share_of=OF_WORDS[level.name])
    halved = rows - rows // 3 if level.halves_products else 0
    products = vectors * (2 * rows - halved)
    assert loop.count(OF_WORDS[level.name]) == products
    assert loop.count("vpbroadcastd") == 2 * rows
    sums = 2 * vectors * halved if "vnni" in level.features else products
    assert len(loop) == products + 2 * (rows + vectors) + sums
    assert loop.on_stack == 0


@in_turn("level name", each(X86, ["q4_1", "q5_k", "q6_k", "q8_0"]))
def test_products_of_inputs_of_8_bits(level: Level, name: str) -> None:
    """Half of the products of words. With VNNI the loop of many rows has nothing but them and loads. Without, products
    of two bytes are added as int16, as many as fit, and sums of these in pairs as int32; codes of 8 bits leave no room,
    and keep inputs of 16 bits."""
    kind = inputs_for(get(name), 256, level, waits=False, bits="8")
    if "vnni" not in level.features and name == "q8_0":
        assert kind is Inputs.CODES
        return
    sizes = largest_tiling(level, kind)
    loop = Loop(product(ProductSpec(get(name), sizes, inputs=kind)), level, share_of=OF_SMALL_BYTES[level.name])
    vectors, products = sizes.tiles * 16 // level.lanes, loop.count(OF_SMALL_BYTES[level.name])
    if "vnni" in level.features:
        assert products == 2 * sizes.rows * vectors
        assert len(loop) == products + 2 * (sizes.rows + vectors)
        assert loop.on_stack == 0
    else:
        are_in_memory = are_unsigned(sizes, level, kind)  # inputs up to 255, but codes less their zero point
        together = {"q4_1": 4 if are_in_memory else 8, "q5_k": 2 if are_in_memory else 4, "q6_k": 2}[name]
        assert products == together * loop.count("vpmaddwd")
        assert loop.spilled <= products / 2


@special_levels
@pytest.mark.parametrize("name", ["iq2_s", "iq3_xxs"])
def test_products_of_lattices(name: str, level: Level) -> None:
    """Signs cost a subtraction for each register of values. Few registers of points or constants go to the stack."""
    loop = Loop(product(ProductSpec(get(name), SINGLE)), level)
    assert loop.count("vpsubb") == 8 * (16 // level.lanes)
    assert loop.on_stack <= len(loop) / 7


@special_levels
@pytest.mark.parametrize("name", ["f32", "f16"])
def test_products_of_weights_without_codes(name: str, level: Level) -> None:
    """A multiply-add for each vector of weights and row, two inputs at a time."""
    sizes = tiling(64, level, Inputs.FLOATS)
    loop = Loop(product(ProductSpec(get(name), sizes, inputs=Inputs.FLOATS)), level)
    vectors = 2 * (16 // level.lanes) * sizes.tiles
    assert loop.count("vfmadd231ps") >= sizes.rows * vectors
    assert loop.count("vcvtph2ps") == (vectors if name == "f16" else 0)
    assert loop.on_stack == 0
