"""Budgets of the main kernels: their registers, and the instructions of their hot loops. No GPU is needed."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

import pytest

from polarlm.engine.backends.cuda import launch_configs, packed, wide
from polarlm.engine.backends.cuda.launch import LaunchConfig
from polarlm.engine.backends.cuda.recurrent import DeltaSizes, Mamba2Sizes
from polarlm.engine.errors import EngineError
from polarlm.engine.weight_formats import get
from tests.cuda import nvrtc
from tests.cuda.sass import Instruction, Kernel, Loop, count, disassemble, disassembler
from tests.cuda.variants import Cache, Define, Variant

ARCH = 90
RECORDED_WITH = "13.5"  # NVRTC; another compiler schedules otherwise


# -- budgets -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Budget:
    """units: values or weights that a warp reads in one iteration of the hot loop. instructions: for one unit, summed
    over all lanes."""

    kernel: str
    variant: Variant
    registers: int
    instructions: float

    def units(self, loop: Loop) -> float:
        if self.kernel == "gemv":
            rows, normed = int(self.variant.defines["ROWS"]), int(self.variant.defines["NORMED"])
            loads = count(loop, Instruction.is_wide_load)
            return 32 * 8 * 4 * loads / (4 + 2 * rows + 2 * normed)  # 4 outputs share the loads of x
        products = count(loop, Instruction.is_product)
        if self.kernel == "gemv_packed":
            steps = int(self.variant.defines["TILES"]) * _packed_steps(self.variant)
            return 16 * 16 * products * steps / (steps + 1)
        columns = max(1, int(self.variant.defines.get("ROWS", 8)) // 8)  # tiles of 8 rows of x share weights
        return 16 * 16 * products / columns  # numbers of the operand that is read: keys, values, weights


def _packed_steps(variant: Variant) -> int:
    """The steps of 32 inputs of a span of `gemv_packed`: of 8 groups, or of a unit."""
    return min(8 * get(str(variant.defines["WEIGHT"])).group, int(variant.defines["UNIT"])) // 32


def attention(kernel: str, keys: str, values: str, mean_bits: int = 8) -> Variant:
    cache = Cache(keys, values, 128, mean_bits=mean_bits)
    if kernel == "decode_attention":
        config = launch_configs.decode_attention(*cache.layouts(), 4, order=128)
    else:
        config, _ = getattr(launch_configs, kernel)(*cache.layouts(), 4)
    return Variant(kernel, config.defines, cache, config.shared)


def product(kernel: str, rows: int, out: int, weight: str = "bf16", gated: bool = False) -> Variant:
    """A product on an H200 with weights (out, 4096), without its activation."""
    sizes = 132, 228 << 10
    if kernel == "gemv":
        config, _ = launch_configs.gemv(rows, out, 4096, sizes[0])
    elif kernel == "gemm_wide":
        warps = wide.warps_for((out,), wide.parts((out,), 4096, sizes[0]), sizes[0])
        config, _ = wide.gemm_wide(wide.row_groups(rows)[0], (get(weight),), warps, sizes[1])
    else:
        config, *_ = packed.gemv_packed(rows, *sizes, (packed.rows_of(get(weight), out),), gated)
    normed = int(rows <= launch_configs.GEMV_ROWS)  # `narrow` normalises more
    defines = {"NORMED": normed, "WEIGHT": weight, "ADD": 0, **config.defines}
    return Variant(kernel, defines, None, config.shared)


def grouped(pairs: int, weight: str) -> Variant:
    """A product of `pairs` pairs of a row and one of 128 experts, without its activation."""
    config, _ = wide.gemm_wide_experts(wide.expert_groups(pairs, 128)[0], get(weight), 228 << 10)
    return Variant("gemm_wide", {"NORMED": 0, "WEIGHT": weight, "ADD": 0, **config.defines}, None, config.shared)


def with_defines(variant: Variant, **defines: Define) -> Variant:
    return replace(variant, defines={**variant.defines, **defines})


POLARQUANT = attention("decode_attention", "polarquant", "polarquant")
CODES = attention("decode_attention", "ring4", "ring3.5")
PREFILL = attention("prefill_attention", "f16", "f16", 0)

BUDGETS = [
    Budget("decode_attention", CODES, 168, 2.236),
    Budget("decode_attention", POLARQUANT, 168, 3.717),
    Budget("decode_attention", attention("decode_attention", "f16", "f16", 0), 134, 3.228),
    Budget("gemv", product("gemv", 1, 28672), 128, 4.562),
    Budget("gemv", product("gemv", 1, 28672, "f16"), 128, 4.438),
    Budget("gemm_wide", product("gemm_wide", 8, 4096, "q4_k"), 76, 3.102),
    Budget("gemm_wide", product("gemm_wide", 16, 28672, "q4_k"), 92, 3.453),
    Budget("gemm_wide", product("gemm_wide", 64, 28672, "q4_k"), 174, 4.617),
    Budget("gemm_wide", product("gemm_wide", 64, 28672, "q6_k"), 172, 5.852),
    Budget("gemm_wide", product("gemm_wide", 64, 4096, "q8_0"), 159, 4.688),
    Budget("gemv_packed", product("gemv_packed", 1, 4096, "q4_k"), 66, 2.383),
    Budget("gemv_packed", product("gemv_packed", 1, 28672, "q4_k"), 70, 2.004),
    Budget("gemv_packed", product("gemv_packed", 1, 28672, "q6_k"), 103, 3.000),
    Budget("gemv_packed", product("gemv_packed", 1, 4096, "q8_0"), 70, 3.953),
    Budget("prefill_attention", PREFILL, 253, 0.747),
    Budget("decode_attention", with_defines(CODES, SOFTCAP=50.0, SINK_SCORES=1), 168, 2.398),
    Budget("gemv", with_defines(product("gemv", 1, 2048), EXPERTS=1), 122, 4.417),
    Budget("gemv_packed", with_defines(product("gemv_packed", 1, 2048, "q4_k"), EXPERTS=1), 72, 2.375),
    Budget("gemm_wide", grouped(512, "q4_k"), 90, 3.289),
    Budget("gemm_wide", grouped(16384, "mxfp4"), 172, 8.516),
    Budget("gemm_wide", grouped(16384, "bf16"), 154, 6.547),
]


def skip_without_the_recorded_compiler() -> None:
    """Skips the test where counts of instructions cannot be compared with what was recorded."""
    try:
        nvrtc.compiler()
        disassembler()
    except EngineError as error:
        pytest.skip(str(error))
    if nvrtc.version() != RECORDED_WITH:
        pytest.skip(f"the figures were recorded with NVRTC {RECORDED_WITH}, and this is {nvrtc.version()}")


def compiled(kernel: str, text: str, arch: int = ARCH) -> tuple[int, Kernel]:
    """Registers, and the instructions of a kernel of a text."""
    skip_without_the_recorded_compiler()
    used, binary = nvrtc.compile_binary(text, arch)
    name = f"{kernel}_kernel"
    (registers,) = [usage.registers for usage in used if usage.kernel == name]
    return registers, disassemble(binary)[name]


# Exhaustive, and slow: NVIDIA's compiler takes seconds for each.
@pytest.mark.slow
@pytest.mark.parametrize("budget", BUDGETS, ids=lambda budget: str(budget.variant).replace(" ", "-"))
def test_instructions_and_registers_stay_within_3_percent_of_their_budgets(budget: Budget) -> None:
    """A change that saves instructions or registers is welcome, and is recorded here."""
    registers, kernel = compiled(budget.kernel, budget.variant.text())
    loop = kernel.hot_loop()
    instructions = 32 * len(loop) / budget.units(loop)
    print(f"{budget.variant}: {registers} registers, {instructions:.3f} instructions")
    assert registers == pytest.approx(budget.registers, rel=0.03)
    assert instructions == pytest.approx(budget.instructions, rel=0.03)
    if budget.variant == POLARQUANT:  # one lookup for each pair of values; a product takes four registers of a lane
        assert count(loop, "LDS") <= min(300, 2 + 4 * count(loop, Instruction.is_product))
    if budget.variant == PREFILL:  # no copies: the words of a tile are stored in the order of its two operands
        assert count(loop, _moves) < count(loop, Instruction.is_product) / 8


def _moves(instruction: Instruction) -> bool:
    return instruction.name == "MOV" or instruction.opcode.startswith("IMAD.MOV")


# Kernels of gated delta rules of 128 × 128 numbers and of Mamba 2 of 128 × 64, and of the 256 × 64 of Nemotron-H 56B:
# registers, and for prompts instructions of the hot loop, for each of its products.
DELTA, MAMBA2 = DeltaSizes(128, 128, 64, 4), Mamba2Sizes(128, 64, 64, 4)
MAMBA2_56B = Mamba2Sizes(256, 64, 64, 4)
RECURRENT_BUDGETS = [
    ("delta_step", DELTA.step(1), 63, None),
    ("delta_step", DELTA.step(16), 62, None),
    ("advance_delta", DELTA.advance(), 115, None),
    ("delta_blocks", DELTA.blocks(), 131, 1.43),
    ("delta_scan", DELTA.scan(16, 132, 228 << 10), 150, 6.0),
    ("delta_scan", DELTA.scan(48, 132, 228 << 10), 173, 4.222),
    ("delta_step", MAMBA2.step(1), 64, None),
    ("mamba2_blocks", MAMBA2.blocks(), 108, 1.203),
    ("delta_scan", MAMBA2.scan(128, 132, 228 << 10), 193, 3.944),
    ("delta_step", MAMBA2_56B.step(16), 64, None),
    ("mamba2_blocks", MAMBA2_56B.blocks(), 104, 1.2),
    ("delta_scan", MAMBA2_56B.scan(256, 132, 228 << 10), 152, 6.0),
]


# Exhaustive, and slow, as above.
@pytest.mark.slow
@pytest.mark.parametrize(("kernel", "config", "registers", "instructions"), RECURRENT_BUDGETS)
def test_recurrent_layers_stay_within_3_percent_of_their_budgets(
    kernel: str, config: LaunchConfig, registers: int, instructions: float | None
) -> None:
    """With at most 64 registers, 1,024 threads of a step fit a multiprocessor."""
    used, instructions_of_kernel = compiled(kernel, Variant(kernel, config.defines).text())
    assert used == pytest.approx(registers, rel=0.03)
    if instructions is None:
        return
    by_tensor_cores = kernel == "delta_scan"
    is_product = Instruction.is_product if by_tensor_cores else Instruction.is_multiplication
    loop = instructions_of_kernel.hot_loop(is_product)
    per_product = len(loop) / count(loop, is_product)
    print(f"{kernel}: {per_product:.3f} instructions")
    assert per_product == pytest.approx(instructions, rel=0.03)


@pytest.mark.slow
@pytest.mark.parametrize(("side", "instructions"), [(0, 1274), (1, 1261)], ids=["keys", "values"])
def test_eight_channels_of_32_rows_stay_within_3_percent_of_their_budget(side: int, instructions: int) -> None:
    """Twelve warps have all registers of a multiprocessor if each thread has at most 168."""
    cache = Cache("ring4", "ring3.5", 128)
    config = launch_configs.encode_rows(cache.layouts()[side], is_tilted=not side)
    assert config is not None
    registers, kernel = compiled("encode_rows", Variant("encode_rows", config.defines, cache, config.shared).text())
    rounding = min(len(loop) for loop in kernel.loops() if count(loop, Instruction.is_product) > 40)
    print(f"encode_rows: {registers} registers, {rounding} instructions")
    assert registers <= 168
    assert rounding == pytest.approx(instructions, rel=0.03)


def test_log_probabilities_have_no_doubles() -> None:
    """Most GPUs compute doubles at a 64th of the rate of floats, and a row has all tokens of the vocabulary."""
    _, kernel = compiled("logprobs", Variant("logprobs", {}).text(), arch=89)
    names = [instruction.name for instruction in kernel.instructions]
    assert "FADD" in names
    assert not [name for name in names if re.match(r"D(ADD|MUL|FMA|SETP|MNMX)$|F2F$", name)]
