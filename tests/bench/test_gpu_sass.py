"""Instructions of the main kernels, counted without a GPU, and their budgets."""

from __future__ import annotations

import re
import subprocess
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from polarlm.bench.gpu import nvrtc, sass
from polarlm.bench.gpu.cost import of_block, packed_steps
from polarlm.bench.gpu.sass import Counts, disassemble, disassembler, parse
from polarlm.engine.backends.cuda import launch_configs, packed
from polarlm.engine.backends.cuda.launch import LaunchConfig
from polarlm.engine.backends.cuda.recurrent.sizes import DeltaSizes, Mamba2Sizes
from polarlm.engine.errors import EngineError
from polarlm.engine.weight_formats import get
from tests.cuda.variants import Cache, Define, Variant

ARCH = 90
RECORDED_WITH = "13.5"  # NVRTC; another compiler schedules otherwise

TEXT = """
.text.small_kernel:
        /*0000*/                   LDC R1, c[0x0][0x28] ;
.L_x_1:
        /*0010*/                   LDG.E.128 R4, desc[UR8][R2.64] ;
        /*0020*/              @!P0 BRA `(.L_x_2) ;
        /*0030*/                   FMUL R4, R4, R5 ;
        /*0040*/                   SHFL.IDX PT, R6, R4, R5, 0x1f ;
.L_x_2:
        /*0050*/              @!P1 BRA `(.L_x_3) ;
        /*0060*/                   LDS.64 R4, [R140+0x400] ;
        /*0070*/                   HMMA.16816.F32 R8, R4, R6, R8 ;
.L_x_3:
        /*0080*/              @!P0 BRA P1, `(.L_x_1) ;
        /*0090*/                   EXIT ;
.L_x_4:
        /*00a0*/                   BRA `(.L_x_4);
.text.other_kernel:
        /*0000*/                   EXIT ;
"""


def test_a_loop_is_counted_by_pipe_and_by_branch() -> None:
    kernels = parse(TEXT)
    assert set(kernels) == {"small_kernel", "other_kernel"}
    loop = kernels["small_kernel"].hot_loop()
    assert (loop.total, loop.seldom, loop.common) == (8, 2, 6)
    assert (loop.hmma, loop.lds, loop.shuffles, loop.wide_loads) == (1, 1, 1, 1)
    assert loop.port == 4 + 1 + 2  # 512 bytes, a shuffle, 256 bytes


# As with nvdisasm's option -hex: the lookup clears scoreboard 1, for which the addition waits.
WITH_CONTROL = """
.text.small_kernel:
.L_x_1:
        /*0000*/                   LDS R4, [R140+0x400] ;                        /* 0x000400008c047984 */
                                                                                 /* 0x000e620000000800 */
        /*0010*/                   FADD R5, R4, R4 ;                             /* 0x0000000404057221 */
                                                                                 /* 0x002fe80000000000 */
        /*0020*/                   HMMA.16816.F32 R8, R4, R6, R8 ;               /* 0x000000060408723c */
                                                                                 /* 0x000fe200000018ff */
        /*0030*/                   BRA `(.L_x_1) ;                               /* 0xfffffffc00c87947 */
                                                                                 /* 0x000fea000383ffff */
"""


def test_a_warp_alone_waits_for_stalls_and_for_results() -> None:
    kernel = parse(WITH_CONTROL)["small_kernel"]
    lookup, addition, product, branch = kernel.instructions
    assert (lookup.stall, lookup.sets, lookup.waits) == (1, 1, 0)
    assert (addition.stall, addition.sets, addition.waits) == (4, None, 0b10)
    assert (product.stall, branch.stall, branch.target) == (1, 5, 0)
    assert kernel.hot_loop().latency == 29 + 4 + 1 + 5
    assert parse(TEXT)["small_kernel"].hot_loop().latency == 6  # without control words, a clock each


NESTED = """
.text.small_kernel:
.L_x_1:
        /*0000*/                   FADD R5, R4, R4 ;
.L_x_2:
        /*0010*/                   HMMA.16816.F32 R8, R4, R6, R8 ;
        /*0020*/                   IADD3 R1, R1, 0x1, RZ ;
        /*0030*/              @!P0 BRA `(.L_x_2) ;
.L_x_3:
        /*0040*/                   STS [R140], R4 ;
        /*0050*/              @!P0 BRA `(.L_x_3) ;
        /*0060*/                   HMMA.16816.F32 R8, R4, R6, R8 ;
        /*0070*/              @!P1 BRA `(.L_x_1) ;
"""


def test_nested_loops_are_counted_apart() -> None:
    """One without products is neither of the two."""
    rest, inner = parse(NESTED)["small_kernel"].nested_loops()
    assert (rest.total, rest.hmma, rest.port) == (3, 1, 0)
    assert [(loop.total, loop.hmma) for loop in inner] == [(3, 1)]


def test_a_kernel_without_a_loop_is_named() -> None:
    small = parse(TEXT)["small_kernel"]
    for loop in (parse(TEXT)["other_kernel"].hot_loop, small.multiplying_loop, small.nested_loops):
        with pytest.raises(EngineError, match=r"has no loop (over|around)"):
            loop()


def test_without_nvdisasm_the_package_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sass.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    with pytest.raises(EngineError, match="nvidia-cuda-nvdisasm"):
        disassembler.__wrapped__()


# -- budgets -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Budget:
    """units: values or weights that one iteration of the hot loop reads, for a warp. instructions: of all lanes, for
    one of them."""

    kernel: str
    variant: Variant
    registers: int
    instructions: float

    def units(self, loop: Counts) -> float:
        if self.kernel == "gemv":
            rows, normed = int(self.variant.defines["ROWS"]), int(self.variant.defines["NORMED"])
            return 32 * 8 * 4 * loop.wide_loads / (4 + 2 * rows + 2 * normed)  # 4 outputs share the loads of x
        if self.kernel == "gemv_packed":
            steps = int(self.variant.defines["TILES"]) * packed_steps(self.variant.text())
            return 16 * 16 * loop.hmma * steps / (steps + 1)
        columns = max(1, int(self.variant.defines.get("ROWS", 8)) // 8)  # tiles of 8 rows of x share weights
        return 16 * 16 * loop.hmma / columns  # of the operand that is read: keys, values, weights


def attention(kernel: str, keys: str, values: str, mean_bits: int = 8) -> Variant:
    cache = Cache(keys, values, 128, mean_bits=mean_bits)
    if kernel == "decode_attention":
        config = launch_configs.decode_attention(*cache.layouts(), 4, order=128)
    else:
        config, _ = getattr(launch_configs, kernel)(*cache.layouts(), 4)
    return Variant(kernel, config.defines, cache, config.shared)


def product(kernel: str, rows: int, out: int, weight: str = "bf16", gated: bool = False) -> Variant:
    """A product on an H200 with weights (out, 4096), without its activation."""
    format, sizes = get(weight), (132, 228 << 10)
    if kernel == "gemv":
        config, _ = launch_configs.gemv(rows, out, 4096, sizes[0])
    elif kernel == "gemm_small":
        config, *_ = launch_configs.gemm_small(rows, out, 4096, *sizes)
    else:
        configured = getattr(packed, kernel)
        config, _ = configured(rows, out, *sizes, format.values, packed.block_bytes(format), gated)
    x: dict[str, Define] = {"ACT": "float", "NORMED": 1}
    if rows > launch_configs.GEMV_ROWS:  # as `narrow` gives it
        x = {"ACT": "__nv_bfloat16" if weight == "bf16" else "__half", "NORMED": 0}
    return Variant(kernel, {**x, "WEIGHT": weight, "ADD": 0, **config.defines}, None, config.shared)


def grouped(pairs: int, weight: str) -> Variant:
    """A product of `pairs` pairs of a row and one of 128 experts, without its activation."""
    config, _, _ = launch_configs.gemm_groups(pairs, 128)
    x: dict[str, Define] = {"ACT": "__nv_bfloat16" if weight == "bf16" else "__half", "NORMED": 0}
    defines = {**x, "WEIGHT": weight, "ADD": 0, **config.defines, "EXPERTS": 1}
    return Variant("gemm_small", defines, None, config.shared)


def with_defines(variant: Variant, **defines: Define) -> Variant:
    return replace(variant, defines={**variant.defines, **defines})


POLARQUANT = attention("decode_attention", "polarquant", "polarquant")
CODES = attention("decode_attention", "ring4", "ring3.5")
PREFILL = attention("prefill_attention", "f16", "f16", 0)

BUDGETS = [
    Budget("decode_attention", CODES, 168, 2.236),
    Budget("decode_attention", POLARQUANT, 168, 3.717),
    Budget("decode_attention", attention("decode_attention", "trellis4", "trellis3.5"), 168, 3.887),
    Budget("decode_attention", attention("decode_attention", "trellis3", "trellis3"), 168, 2.875),
    Budget("decode_attention", attention("decode_attention", "f16", "f16", 0), 134, 3.141),
    Budget("gemv", product("gemv", 1, 28672), 128, 4.562),
    Budget("gemv", product("gemv", 2, 28672), 110, 5.938),
    Budget("gemv", product("gemv", 1, 28672, "f16"), 128, 4.438),
    Budget("gemm_small", product("gemm_small", 8, 28672), 48, 5.500),
    Budget("gemm_small", product("gemm_small", 32, 28672, "q4_k"), 84, 8.156),
    Budget("gemv_packed", product("gemv_packed", 1, 4096, "q4_k"), 66, 2.383),
    Budget("gemv_packed", product("gemv_packed", 1, 28672, "q4_k"), 70, 2.004),
    Budget("gemm_packed", product("gemm_packed", 8, 4096, "q4_k", gated=True), 78, 2.793),
    Budget("gemm_packed", product("gemm_packed", 8, 28672, "q4_k", gated=True), 89, 2.965),
    Budget("gemm_packed", product("gemm_packed", 16, 6144, "q4_k"), 107, 2.969),
    Budget("gemm_packed", product("gemm_packed", 8, 4096, "q4_k"), 62, 3.016),
    Budget("gemm_packed", product("gemm_packed", 16, 28672, "q4_k"), 128, 2.902),
    Budget("gemv_packed", product("gemv_packed", 1, 28672, "q6_k"), 103, 3.000),
    Budget("gemv_packed", product("gemv_packed", 1, 4096, "q8_0"), 70, 3.953),
    Budget("prefill_attention", PREFILL, 253, 0.747),
    Budget("decode_attention", with_defines(CODES, SOFTCAP=50.0, SINK_SCORES=1), 168, 2.398),
    Budget("gemv", with_defines(product("gemv", 1, 2048), EXPERTS=1), 122, 4.417),
    Budget("gemv_packed", with_defines(product("gemv_packed", 1, 2048, "q4_k"), EXPERTS=1), 68, 2.438),
    Budget("gemm_small", grouped(1024, "q4_k"), 71, 7.906),
    Budget("gemm_small", grouped(16384, "q4_k"), 142, 9.094),
    Budget("gemm_small", grouped(16384, "bf16"), 128, 9.594),
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


def compiled(kernel: str, variant: Variant) -> tuple[int, Counts]:
    """Registers and hot loop."""
    skip_without_the_recorded_compiler()
    used, binary = nvrtc.compile_binary(variant.text(), ARCH)
    name = f"{kernel}_kernel"
    (registers,) = [usage.registers for usage in used if usage.kernel == name]
    return registers, disassemble(binary)[name].hot_loop()


@pytest.mark.slow
@pytest.mark.parametrize("budget", BUDGETS, ids=lambda budget: str(budget.variant).replace(" ", "-"))
def test_instructions_and_registers_stay_within_3_percent_of_their_budgets(budget: Budget) -> None:
    """A change that saves instructions or registers is welcome, and is recorded here."""
    registers, loop = compiled(budget.kernel, budget.variant)
    instructions = 32 * loop.total / budget.units(loop)
    print(f"{budget.variant}: {registers} registers, {instructions:.3f} instructions, {loop}")
    assert registers == pytest.approx(budget.registers, rel=0.03)
    assert instructions == pytest.approx(budget.instructions, rel=0.03)


# Kernels of gated delta rules of 128 × 128 numbers and of Mamba 2 of 128 × 64, and of the 256 × 64 of Nemotron-H 56B:
# registers, and for prompts instructions of a float32 product, of all lanes. delta_scan has tensor cores multiply.
DELTA, MAMBA2 = DeltaSizes(128, 128, 64, 4), Mamba2Sizes(128, 64, 64, 4)
MAMBA2_56B = Mamba2Sizes(256, 64, 64, 4)
DELTA_BUDGETS = [
    ("gated_delta", DELTA.step(1), 63, None),
    ("gated_delta", DELTA.step(16), 62, None),
    ("advance_delta", DELTA.advance(), 115, None),
    ("delta_blocks", DELTA.blocks(), 131, 1.133),
    ("delta_scan", DELTA.scan(16, 132, 228 << 10), 150, 0.430),
    ("delta_scan", DELTA.scan(48, 132, 228 << 10), 173, 0.308),
    ("mamba2", MAMBA2.step(1), 64, None),
    ("mamba2", MAMBA2.step(16), 64, None),
    ("mamba2_blocks", MAMBA2.blocks(), 108, 1.203),
    ("delta_scan", MAMBA2.scan(48, 132, 228 << 10), 170, 0.545),
    ("delta_scan", MAMBA2.scan(128, 132, 228 << 10), 193, 0.392),
    ("mamba2", MAMBA2_56B.step(1), 64, None),
    ("mamba2", MAMBA2_56B.step(16), 64, None),
    ("mamba2_blocks", MAMBA2_56B.blocks(), 104, 1.2),
    ("delta_scan", MAMBA2_56B.scan(256, 132, 228 << 10), 152, 0.502),
]


@pytest.mark.slow
@pytest.mark.parametrize(("kernel", "config", "registers", "instructions"), DELTA_BUDGETS)
def test_recurrent_layers_stay_within_3_percent_of_their_budgets(
    kernel: str, config: LaunchConfig, registers: int, instructions: float | None
) -> None:
    """With at most 64 registers, 1,024 threads of a step fit a multiprocessor."""
    skip_without_the_recorded_compiler()
    used, binary = nvrtc.compile_binary(Variant(kernel, config.defines).text(), ARCH)
    (usage,) = used
    print(kernel, usage.registers)
    assert usage.registers == pytest.approx(registers, rel=0.03)
    if instructions is None:
        return
    disassembled = disassemble(binary)[f"{kernel}_kernel"]
    if kernel == "delta_scan":
        loop = of_block(disassembled, Variant(kernel, config.defines).text())
        found = 32 * loop.common / (loop.hmma * 16 * 8 * 16 / 3)
    else:
        loop = disassembled.multiplying_loop()
        found = loop.total / loop.ffma
    print(kernel, found, loop)
    assert found == pytest.approx(instructions, rel=0.03)


@pytest.mark.slow
def test_a_block_of_polarquant_takes_one_lookup_for_each_pair_of_values() -> None:
    _, loop = compiled("decode_attention", POLARQUANT)
    pairs = loop.hmma * 4  # a product on tensor cores takes four registers of a lane
    assert loop.lds <= 300
    assert loop.lds - pairs <= 2
    # Lookups, shuffles and loads share a port, which may take little more time than a block's bytes from memory.
    assert loop.port < 600


@pytest.mark.slow
def test_attention_of_a_prompt_copies_no_registers_of_keys_and_values() -> None:
    """The words of a tile are stored in the order of its two operands."""
    _, loop = compiled("prefill_attention", PREFILL)
    assert loop.total <= 1600
    assert loop.moves < loop.hmma / 8


def test_log_probabilities_have_no_doubles() -> None:
    """Most GPUs compute doubles at a 64th of the rate of floats, and a row has all tokens of the vocabulary."""
    skip_without_the_recorded_compiler()
    _, binary = nvrtc.compile_binary(Variant("logprobs", {}).text(), 89)
    names = [instruction.name for instruction in disassemble(binary)["logprobs_kernel"].instructions]
    assert "FADD" in names
    assert not [name for name in names if re.match(r"D(ADD|MUL|FMA|SETP|MNMX)$|F2F$", name)]


def test_a_failed_disassembly_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sass, "disassembler", lambda: Path("/bin/nvdisasm"))
    failed = subprocess.CompletedProcess([], 1, "", "no such format\n")
    monkeypatch.setattr(sass.subprocess, "run", lambda *args, **kwargs: failed)
    with pytest.raises(EngineError, match="no such format"):
        disassemble(b"nothing")
