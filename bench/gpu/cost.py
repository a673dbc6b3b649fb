"""Predicted times of a step's parts, from the instructions of the compiled kernels and from their bytes.

A multiprocessor takes as long as its busiest unit: memory, instruction issue, the integer pipe, the port of shared
memory and L1, or tensor cores. Latencies are hidden, except at the start and end of a kernel. Traffic between L2 and
the multiprocessors is not counted, nor are bank conflicts or cache misses of activations. No GPU was asked.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from bench.gpu.paper import BLOCK_SIZE, Launch, Part
from bench.gpu.sass import Counts, disassemble
from engine.errors import EngineError
from engine.weight_formats import get
from model_loaders.config import ModelConfig
from tests.cuda.nvrtc import compile_binary

# Seconds that a kernel adds to its bytes or instructions: until it begins after the one before it, and until all
# multiprocessors are busy, and then idle again. Attention waits for three loads that depend on each other, and merges
# the results of its warps. Estimates for an H200.
_BEGIN, _RAMP, _ATTENTION_RAMP = 1.3e-6, 1.4e-6, 3.0e-6

_SCHEDULERS = 4  # of a multiprocessor; each issues an instruction a clock
_ALU_CLOCKS = 2  # of an instruction of the integer pipe on its scheduler


@dataclass(frozen=True)
class Machine:
    """clock: Hz. bandwidth: bytes a second of a copy, read and written. shared_memory: bytes of a multiprocessor.
    product_clocks: of m16n8k16 with float32 sums, on a multiprocessor."""

    name: str
    arch: int
    processors: int
    clock: float
    bandwidth: float
    shared_memory: int
    product_clocks: float
    source: str

    @property
    def bytes_per_clock(self) -> float:
        """Of one multiprocessor, when all read."""
        return self.bandwidth / self.processors / self.clock


_SHEET = "bandwidth: 0.9 of the data sheet's"
MACHINES = {
    "h200": Machine("NVIDIA H200", 90, 132, 1.98e9, 4.3e12, 228 << 10, 2, "bandwidth: a measured copy"),
    "a100": Machine("NVIDIA A100 80GB", 80, 108, 1.41e9, 0.9 * 2.039e12, 164 << 10, 2, _SHEET),
    "4090": Machine("NVIDIA GeForce RTX 4090", 89, 128, 2.52e9, 0.9 * 1.008e12, 100 << 10, 8, _SHEET),
}


@dataclass(frozen=True)
class Prediction:
    """One part of a step. seconds, floor: of all its repetitions; floor: its bytes at the speed of a copy.

    limit: what its main kernel waits for. registers: of that kernel; instructions: of all lanes, for one coded value or
    weight. Both 0 where they were not counted.
    """

    part: str
    repeats: int
    kernels: tuple[str, ...]
    seconds: float
    floor: float
    limit: str
    registers: int = 0
    instructions: float = 0.0


@lru_cache(maxsize=64)
def _compiled(kernel: str, text: str, arch: int) -> tuple[int, Counts]:
    """Registers and hot loop of a kernel. Raises EngineError without nvdisasm."""
    try:
        used, binary = compile_binary(text, arch)
    except FileNotFoundError as error:
        raise EngineError(f"Predictions need NVRTC: {error}") from None
    name = f"{kernel}_kernel"
    (registers,) = [usage.registers for usage in used if usage.kernel == name]
    loop = disassemble(binary)[name].hot_loop()
    # Masks and new maxima are seldom; what a product's branches skip is the unpacking of weights.
    return registers, loop if kernel == "decode_attention" else replace(loop, seldom=0)


def predict(parts: Sequence[Part], machine: Machine, config: ModelConfig, batch: int) -> list[Prediction]:
    """The predicted times of parts whose kernels exist. Raises EngineError where nothing can be compiled."""
    return [_predict(part, machine, config, batch) for part in parts]


def _predict(part: Part, machine: Machine, config: ModelConfig, batch: int) -> Prediction:
    kernels = tuple(launch.kernel for launch in part.launches)
    main = next((launch for launch in part.launches if launch.kernel in _UNITS), None)
    beside = sum(_small(launch, machine) for launch in part.launches if launch is not main)
    floor = part.bytes / machine.bandwidth
    if main is None:
        return Prediction(part.name, part.repeats, kernels, part.repeats * beside, part.repeats * floor, "latency")
    registers, loop = _compiled(main.kernel, main.text, machine.arch)
    units = _units(main, loop)
    if main.kernel == "decode_attention":
        clocks, limit = _attention_clocks(main, loop, units, part, machine, config, batch)
        seconds = clocks / machine.clock + _BEGIN + _ATTENTION_RAMP
    else:
        iterations = part.weights / units / machine.processors
        clocks, limit = _busiest(loop, iterations, part.bytes / machine.processors, machine)
        seconds = clocks / machine.clock + _BEGIN + _RAMP
    total = part.repeats * (seconds + beside)
    per_value = 32 * loop.common / units
    return Prediction(part.name, part.repeats, kernels, total, part.repeats * floor, limit, registers, per_value)


def _busiest(loop: Counts, iterations: float, nbytes: float, machine: Machine) -> tuple[float, str]:
    """Clocks of a multiprocessor for so many iterations of its warps and bytes, and the unit that takes them."""
    clocks = {
        "memory": nbytes / machine.bytes_per_clock,
        "issue": iterations * loop.common / _SCHEDULERS,
        "integers": iterations * loop.alu * _ALU_CLOCKS / _SCHEDULERS,
        "shared memory and L1": iterations * loop.port,
        "tensor cores": iterations * loop.hmma * machine.product_clocks,
    }
    limit = max(clocks, key=lambda unit: clocks[unit])
    return clocks[limit], limit


def _attention_clocks(
    launch: Launch, loop: Counts, units: float, part: Part, machine: Machine, config: ModelConfig, batch: int
) -> tuple[float, str]:
    """Clocks of the busiest multiprocessor. Its warps take whole blocks, and the last round may be half empty."""
    splits, heads, sequences = launch.grid
    warps = launch.threads // 32
    per_split = -(-part.blocks // splits)
    rounds = -(-per_split // warps)
    waves = -(-splits * heads * sequences // machine.processors)
    blocks = waves * warps * rounds
    values = 2 * config.head_dim * BLOCK_SIZE
    per_block = part.bytes / max(1, batch * config.kv_heads * part.blocks)
    # The other multiprocessors read less while the last round is half empty, which leaves more to this one.
    most = min(blocks * per_block, waves * part.bytes / machine.processors + warps * per_block)
    return _busiest(loop, blocks * values / units, most, machine)


_UNITS = ("decode_attention", "gemv", "gemm_small")  # kernels whose hot loop is counted


def _units(launch: Launch, loop: Counts) -> float:
    """Values or weights that a warp reads in one iteration of the hot loop."""
    if launch.kernel != "gemv":
        columns = max(1, _define(launch, "ROWS") // 8) if launch.kernel == "gemm_small" else 1
        return 16 * 16 * loop.hmma / columns
    outputs, rows, normed = (_define(launch, name) for name in ("OUTPUTS", "ROWS", "NORMED"))
    return 32 * 8 * outputs * loop.wide_loads / (outputs + 2 * rows + 2 * normed)


def _define(launch: Launch, name: str) -> int:
    """A constant of the launch's text."""
    line = next(line for line in launch.text.splitlines() if line.startswith(f"#define {name} "))
    return int(line.split()[2])


def _small(launch: Launch, machine: Machine) -> float:
    """Seconds of a kernel that only moves activations."""
    return launch.activations / machine.bandwidth + _BEGIN + _RAMP


def packed_bytes(part: Part, config: ModelConfig, weights: str) -> float:
    """Bytes of one matrix of a part, as files store it; the mean over the layers for a mixture such as q4_k_m."""
    if weights != MIXED:
        return part.weights * get(weights).nbytes / get(weights).values
    small, large = (get(name).nbytes / get(name).values for name in ("q4_k", "q6_k"))
    shares = {"head": 1.0, "down": _larger_share(config.layers)}
    if part.name == "qkv":  # of which values are stored in more bits
        shares["qkv"] = _larger_share(config.layers) * config.kv_heads / (config.heads + 2 * config.kv_heads)
    share = shares.get(part.name, 0.0)
    return part.weights * (share * large + (1 - share) * small)


MIXED = "q4_k_m"


def _larger_share(layers: int) -> float:
    """The share of layers whose `down` and values llama.cpp's Q4_K_M stores as q6_k: the first and last eighth, and
    every third between them."""
    eighth = layers // 8
    large = [i < eighth or i >= 7 * layers // 8 or (i - eighth) % 3 == 2 for i in range(layers)]
    return sum(large) / layers


def from_bytes(part: Part, machine: Machine, config: ModelConfig, weights: str) -> Prediction:
    """A product with packed weights, of which no kernel is counted: its bytes, and the start and end of a kernel."""
    floor = packed_bytes(part, config, weights) / machine.bandwidth
    seconds = part.repeats * (floor + _BEGIN + _RAMP)
    return Prediction(part.name, part.repeats, (), seconds, part.repeats * floor, "bytes only: no kernel was counted")
