"""Predicted times of a step's parts, from the instructions of the compiled kernels and from their bytes.

Sources of its terms. Counted in the compiled kernels: instructions, and what shared memory and tensor cores do. Counted
in the launches: bytes. Measured on an H100 and an H200, whose files are in `bench/results`: how much faster reading is
than copying, what a launch of each kind costs besides its bytes, how long a block of `encode_blocks` takes, how much of
the work on the chip (instructions, and x out of L2) is added to the time of the memory instead of hidden behind it,
and the rate of Hopper's `mma.sync`. These are taken for other GPUs as they are, in clocks where they are work.
From data sheets, or assumed: `cards.MACHINES`.

A multiprocessor takes as long as its busiest unit: memory, the L2 cache, instruction issue, the integer pipe, the port
of shared memory and L1, or tensor cores; a warp of attention takes as long as it would alone, by the compiler's own
stalls and estimated delays of shared memory and shuffles, or longer; a block of gemm_small as long as it waits for x.
Matrices of two formats in one launch take as long as each alone, but begin and end once.
Bank conflicts are not counted, nor what blocks of
a multiprocessor may share in L1.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache

from polarlm.bench.gpu.cards import Machine
from polarlm.bench.gpu.launches import (
    BLOCK_SIZE,
    BLOCKS,
    DELTA,
    LIBRARY,
    SCAN,
    STATES,
    Launch,
    Multiplied,
    Part,
    constant,
)
from polarlm.bench.gpu.nvrtc import compile_binary
from polarlm.bench.gpu.occupancy import resident_blocks
from polarlm.bench.gpu.sass import Counts, Kernel, disassemble, disassembler
from polarlm.engine.backends.cuda.packed import is_packed
from polarlm.engine.weight_formats import get
from polarlm.model_loaders.config import ModelConfig

# Seconds that a kernel adds to its bytes or instructions: until it begins after the one before it, and until all
# multiprocessors are busy, and then idle again. Small kernels and gemm_packed: estimates, which measurements confirm.
# Others: what remains of the measured time of the smallest and of the largest product or context, when the slope
# between them is taken off. Of attention, docs/kernels.md, 7.2, has the clocks of its parts.
_BEGIN, _RAMP = 1.3e-6, 1.4e-6
NARROW = _BEGIN + _RAMP  # of `narrow` with few rows
_ATTENTION_RAMP = 11.7e-6 - 0.7e-6  # less what docs/kernels.md, 7.2, estimates for its changes since
_STATE_RAMP = 4.0e-6  # an estimate: no GPU has run kernels with states
_PRODUCT_RAMP = {"gemv": 3.5e-6, "gemv_packed": 2.6e-6, "gemm_packed": 1.4e-6, "gemm_small": 5.0e-6}
_SAMPLING_RAMP = 8.0e-6  # an estimate, docs/kernels.md, 7.1: no GPU has run it in one launch

# Reading alone is faster than a copy: the slope of products of bfloat16 from 34 MB to 1 GB, on both GPUs.
_READ = 1.045
# How much of the work on the chip is added to the time of the memory. Both GPUs have the same multiprocessors, and the
# measured times of a byte differ by those of the memory alone, so that this part is one number.
# Blocks of gemm_packed that stay, which no GPU has run, are taken to add as much as those of gemv_packed, which stay.
_ADDED_OF_FEW = 0.5  # of gemm_packed with up to 8 rows
_ADDED = {"gemv": 0.0, "gemv_packed": 0.4, "gemm_packed": 0.8, "gemm_small": 0.4, "decode_attention": 0.4}

# Least seconds of a stage of a block of gemm_small. It loads x one stage ahead, after the copies of weights that are
# four stages ahead, and stores it at the end of the stage: so each stage waits for a load. Measured with the matrices
# that give a multiprocessor one block: 8 and 16 rows of the 8B model's qkv and output projection take as long on an
# H100 as on an H200, whose memory is 1.4 times as fast.
_STAGE_SECONDS = 0.8e-6
# The same where a stage has 32 inputs of 16-bit weights, so that a row of them is copied in pieces of 64 bytes.
# Measured with 64 rows, on both GPUs, within 12 %.
_PIECES_SECONDS = 1.3e-6
_STAGE_WEIGHTS = 8 * 32 * 32  # of a block: its warps', of 32 rows and 32 inputs each

# The part of _BEGIN that overlapped launches hide: steps of both GPUs at 2,048 × 1, in both types of weights. Attention
# takes nearly all registers, so that no other kernel begins next to it.
_HIDDEN = 0.63

# Clocks of a block of encode_blocks for 64 tokens of 128 channels, of the default cache type; two fit a multiprocessor.
_ENCODE_CLOCKS, _ENCODED, _ENCODERS = 3.76e5, 64 * 128, 2

_OVERLAPS_FROM = 90  # compute capability, times ten
_SCHEDULERS = 4  # of a multiprocessor; each issues an instruction a clock
_ALU_CLOCKS = 2  # of an instruction of the integer pipe on its scheduler
_MULTIPLIED = 16 * 8 * 16  # pairs of numbers that an instruction of tensor cores multiplies
_OF_FLOAT = 3  # products of halves that delta_scan computes for one of float32
_PORT_BYTES = 64  # that a multiprocessor gets from L2 in a clock, at most
_PROMPT = "prefill_attention"
_ENCODE = "encode_blocks"
_OTHERS = (_PROMPT, *STATES, *DELTA, LIBRARY, _ENCODE)  # kernels with a time of their own


@dataclass(frozen=True)
class Prediction:
    """One part of a step. seconds, floor: of all its repetitions; floor: its bytes at the speed of a copy.

    limit: what its main kernel waits for. registers: of that kernel; instructions: of all lanes, for one coded value or
    weight. Both 0 for parts that only wait.
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
    """Registers and hot loop of a kernel. Raises EngineError without NVIDIA's compiler and nvdisasm."""
    disassembler()
    used, binary = compile_binary(text, arch)
    name = f"{kernel}_kernel"
    (registers,) = [usage.registers for usage in used if usage.kernel == name]
    compiled = disassemble(binary)[name]
    if kernel == SCAN:
        return registers, of_block(compiled, text)
    if kernel in BLOCKS:
        return registers, replace(compiled.multiplying_loop(), seldom=0)
    loop = compiled.hot_loop()
    # Masks and new maxima are seldom; what a product's branches skip is the unpacking of weights.
    return registers, loop if kernel.endswith("_attention") else replace(loop, seldom=0)


def of_block(compiled: Kernel, text: str) -> Counts:
    """Counts of a warp of delta_scan for a block of tokens, with all chunks of both of its loops of products."""
    rest, loops = compiled.nested_loops()
    chunks = [-(-int(constant(text, terms)) // int(constant(text, "CHUNK"))) for terms in ("KEY_DIM", "BLOCK")]
    often = [count - 1 for count in chunks if count > 2]  # the last chunk of each product stands behind its loop
    every = [(rest, 1), *((replace(loop, seldom=0), count) for loop, count in zip(loops, often, strict=True))]
    names = [field.name for field in fields(Counts)]
    return Counts(**{name: sum(count * getattr(loop, name) for loop, count in every) for name in names})


def predict(parts: Sequence[Part], machine: Machine, config: ModelConfig) -> list[Prediction]:
    """The predicted times of parts. Raises EngineError where nothing can be compiled."""
    return [_predict(part, machine, config) for part in parts]


def overlapped(parts: Sequence[Prediction], machine: Machine) -> float | None:
    """The seconds of a step whose launches overlap, so that kernels begin before the one before them has ended; None
    where the GPU has no such launches."""
    if machine.arch < _OVERLAPS_FROM:
        return None
    launches = sum(part.repeats * len(part.kernels) for part in parts)
    return sum(part.seconds for part in parts) - _HIDDEN * (launches - 1) * _BEGIN


def _predict(part: Part, machine: Machine, config: ModelConfig) -> Prediction:
    counted = [launch for launch in part.launches if launch.kernel in _UNITS]
    small = [launch for launch in part.launches if launch.kernel not in (*_UNITS, *_OTHERS)]
    beside = sum(_small(launch, machine) for launch in small)
    times: list[tuple[float, str, int, float]] = []
    flops = sum(launch.flops for launch in part.launches)
    library = [launch for launch in part.launches if launch.kernel == LIBRARY]
    if library:
        times += [_library_time(launch, machine) for launch in library]
        if any(launch.kernel == "dequantize" for launch in small):
            beside += part.bytes / machine.bandwidth
    elif any(launch.kernel == _ENCODE for launch in part.launches):
        times += [_encoding_time(launch, part, machine, config) for launch in part.launches]
    elif part.prompt:
        flops = 4 * config.attention.heads * config.attention.head_dim * part.visible
        times.append(_prompt_time(part, machine, config))
    elif any(launch.kernel in (*STATES, *DELTA) for launch in part.launches):
        times += [_state_time(launch, part, machine) for launch in part.launches if launch.kernel in STATES]
        times += [_delta_time(launch, machine) for launch in part.launches if launch.kernel in DELTA]
    elif part.products:
        alone = part.alone or counted
        times += [_product_time(one, product, machine) for one, product in zip(alone, part.products, strict=True)]
        beside -= (len(alone) - len(counted)) * (_BEGIN + _PRODUCT_RAMP[alone[0].kernel])  # those of one launch
    else:
        times += [_attention_time(launch, part, machine, config) for launch in counted]
    _, limit, registers, instructions = max(times, default=(0.0, "latency", 0, 0.0))
    return Prediction(
        part=part.name,
        repeats=part.repeats,
        kernels=tuple(launch.kernel for launch in part.launches),
        seconds=part.repeats * (beside + sum(seconds for seconds, *_ in times)),
        floor=part.repeats * max(part.bytes / machine.bandwidth, flops / machine.gemm),
        limit=limit,
        registers=registers,
        instructions=instructions,
    )


def _product_time(launch: Launch, product: Multiplied, machine: Machine) -> tuple[float, str, int, float]:
    """Seconds of a product with one matrix, its limit, registers, instructions of a weight."""
    registers, loop = _compiled(launch.kernel, launch.text, machine.arch)
    units = _units(launch, loop)
    x = launch.grid[0] * launch.inputs * launch.turns  # every block reads it from L2
    everything = product.weights / units, product.distinct, _cached(launch, product.bytes), x
    iterations, own, cached, own_x = (all_ / machine.processors for all_ in everything)
    clocks, limit = _busiest(loop, iterations, own, cached, machine)
    from_memory = own / _READ / machine.bytes_per_clock
    if clocks < (added := from_memory + _on_chip(launch, loop, iterations, own_x, machine)):
        clocks, limit = added, "memory"
    if launch.kernel == "gemm_small":
        blocks = math.prod(launch.grid)
        turns = -(-blocks // (_resident(launch, registers, machine) * machine.processors))
        stages = product.weights / blocks / _STAGE_WEIGHTS
        if clocks < (waited := turns * stages * _stage_seconds(launch) * machine.clock):
            clocks, limit = waited, "latency"
    ramp = _PRODUCT_RAMP[launch.kernel]
    return clocks / machine.clock + _BEGIN + ramp, limit, registers, 32 * loop.common / units


def _stage_seconds(launch: Launch) -> float:
    """Least seconds of a stage of gemm_small."""
    in_pieces = launch.number("WARPS_OUT") == 8 and not is_packed(get(launch.constant("WEIGHT")))
    return _PIECES_SECONDS if in_pieces else _STAGE_SECONDS


def _on_chip(launch: Launch, loop: Counts, iterations: float, x: float, machine: Machine) -> float:
    """Clocks of a multiprocessor for its instructions and the bytes of x that are not hidden behind its memory."""
    through_l2 = x / machine.bytes_per_clock * machine.bandwidth / machine.cache
    added = _ADDED[launch.kernel]
    if launch.kernel == "gemm_packed" and launch.number("STAYS"):
        added = _ADDED["gemv_packed"]
    elif launch.kernel == "gemm_packed" and launch.number("ROWS") <= 8:
        added = _ADDED_OF_FEW
    return added * (iterations * loop.common / _SCHEDULERS + through_l2)


def _attention_time(launch: Launch, part: Part, machine: Machine, config: ModelConfig) -> tuple[float, str, int, float]:
    """Seconds of attention of a layer, its limit, registers, instructions of a coded value.

    The busiest multiprocessor counts, and of its warps the one with most units, which computes them one after another.
    """
    registers, loop = _compiled(launch.kernel, launch.text, machine.arch)
    units = _units(launch, loop)
    (ctas,), warps = launch.grid, launch.threads // 32
    most = -(-part.units // ctas)
    iterations = 2 * config.attention.head_dim * part.unit_tokens / units  # of a unit
    nbytes = part.bytes * most / part.units
    clocks, limit = _busiest(loop, most * iterations, nbytes, nbytes, machine)
    added = nbytes / _READ / machine.bytes_per_clock + _on_chip(launch, loop, most * iterations, 0, machine)
    if added > clocks:
        clocks, limit = added, "memory"
    one_by_one = -(-most // warps) * iterations * loop.latency
    if one_by_one > clocks:
        clocks, limit = one_by_one, "latency"
    return clocks / machine.clock + _BEGIN + _ATTENTION_RAMP, limit, registers, 32 * loop.common / units


def _encoding_time(launch: Launch, part: Part, machine: Machine, config: ModelConfig) -> tuple[float, str, int, float]:
    """Seconds of the encoding of a layer's blocks, and its limit. A block of threads rounds one value after the other,
    and those of a multiprocessor take turns. Measured with the default cache type, and taken for others; without codes
    it only copies."""
    values = BLOCK_SIZE * config.attention.head_dim
    turns = math.ceil(math.prod(launch.grid) / (_ENCODERS * machine.processors))
    times = {
        "latency": turns * _ENCODE_CLOCKS * values / _ENCODED / machine.clock * part.is_coded,
        "memory": part.bytes / machine.bandwidth,
    }
    limit = max(times, key=lambda unit: times[unit])
    return times[limit] + _BEGIN + _RAMP, limit, 0, 0.0


def _library_time(launch: Launch, machine: Machine) -> tuple[float, str, int, float]:
    """Seconds of a library's product, and its limit; registers and instructions are not known."""
    times = {"tensor cores": launch.flops / machine.gemm, "memory": launch.activations / machine.bandwidth}
    limit = max(times, key=lambda unit: times[unit])
    return times[limit] + _BEGIN + _RAMP, limit, 0, 0.0


def _prompt_time(part: Part, machine: Machine, config: ModelConfig) -> tuple[float, str, int, float]:
    """Seconds of a prompt's attention of a layer, its limit, registers, and instructions of a product of two numbers.

    A warp takes its rows of scores with all parts of blocks that one of them sees, half a part more than the mean of
    them. Barriers between the warps of a block are not counted.
    """
    launches = [launch for launch in part.launches if launch.kernel == _PROMPT]
    launch = launches[0]
    registers, loop = _compiled(launch.kernel, launch.text, machine.arch)
    rows = launch.number("WARP_ROWS")
    products = loop.hmma * _MULTIPLIED  # of an iteration: of numbers
    tokens = products / (2 * rows * config.attention.head_dim)
    iterations = config.attention.heads / rows * (part.visible / tokens + part.prompt / 2) / machine.processors
    clocks, limit = _busiest(loop, iterations, 0, 0, machine)
    in_turn = iterations * loop.latency / (_resident(launch, registers, machine) * launch.threads // 32)
    if in_turn > clocks:
        clocks, limit = in_turn, "latency"
    fixed = len(launches) * (_BEGIN + _RAMP)
    return clocks / machine.clock + fixed, limit, registers, 32 * loop.common / products


def _state_time(launch: Launch, part: Part, machine: Machine) -> tuple[float, str, int, float]:
    """Seconds of gated_delta or mamba2, and its limit. A multiprocessor gets the blocks of a head one after another, no
    faster than its port of L1; and as in attention, loads depend on each other, and the results of warps are merged."""
    blocks = math.prod(launch.grid)
    registers, _ = _compiled(launch.kernel, launch.text, machine.arch)
    through_port = part.state_bytes / blocks * -(-blocks // machine.processors) / _PORT_BYTES / machine.clock
    times = {
        "memory": part.bytes / machine.bandwidth,
        "L2": part.state_bytes / machine.cache,
        "shared memory and L1": through_port,
    }
    limit = max(times, key=lambda unit: times[unit])
    return times[limit] + _BEGIN + _STATE_RAMP, limit, registers, 0.0


def _delta_time(launch: Launch, machine: Machine) -> tuple[float, str, int, float]:
    """Seconds of a kernel of a prompt in DELTA, its limit, registers, and instructions of a product of two numbers.

    What others than delta_scan stage around their loops of products is not counted, nor are barriers.
    """
    registers, loop = _compiled(launch.kernel, launch.text, machine.arch)
    blocks, warps = math.prod(launch.grid), launch.threads // 32
    products = loop.hmma * _MULTIPLIED / _OF_FLOAT if launch.kernel == SCAN else 32 * loop.ffma  # of a warp's iteration
    iterations = launch.flops / 2 / blocks / warps / products  # of a warp
    own = -(-blocks // machine.processors)
    nbytes = launch.activations / machine.processors
    cached = _cached(launch, launch.activations) / machine.processors
    clocks, limit = _busiest(loop, own * warps * iterations, nbytes, cached, machine)
    in_turn = iterations * loop.latency * -(-own // _resident(launch, registers, machine))
    if in_turn > clocks:
        clocks, limit = in_turn, "latency"
    return clocks / machine.clock + _BEGIN + _RAMP, limit, registers, 32 * loop.common / products


def _resident(launch: Launch, registers: int, machine: Machine) -> int:
    """Blocks that a multiprocessor has at once."""
    return max(1, resident_blocks(machine.arch, machine.shared_memory, registers, launch.threads, launch.shared))


def _cached(launch: Launch, nbytes: int) -> float:
    """Bytes that a product reads through L2: its weights, and x for every column of its grid."""
    return nbytes + launch.grid[0] * launch.inputs * launch.turns


def _busiest(loop: Counts, iterations: float, nbytes: float, cached: float, machine: Machine) -> tuple[float, str]:
    """Clocks of a multiprocessor for so many iterations of its warps, bytes of memory and bytes through L2, and the
    unit that takes them."""
    clocks = {
        "memory": nbytes / _READ / machine.bytes_per_clock,
        "L2": cached / machine.bytes_per_clock * machine.bandwidth / machine.cache,
        "issue": iterations * loop.common / _SCHEDULERS,
        "integers": iterations * loop.alu * _ALU_CLOCKS / _SCHEDULERS,
        "shared memory and L1": iterations * loop.port,
        "tensor cores": iterations * loop.hmma * machine.product_clocks,
    }
    limit = max(clocks, key=lambda unit: clocks[unit])
    return clocks[limit], limit


_UNITS = ("decode_attention", "gemv", "gemv_packed", "gemm_packed", "gemm_small")  # kernels whose hot loop is counted


def _units(launch: Launch, loop: Counts) -> float:
    """Values or weights that a warp reads in one iteration of the hot loop."""
    if launch.kernel == "gemv_packed":
        rows, steps = launch.number("ROWS"), launch.number("TILES") * packed_steps(launch.text)
        return 16 * 16 * loop.hmma / rows * steps / (steps + 1)  # the others add up x
    if launch.kernel != "gemv":
        rows = 8 if launch.kernel == "decode_attention" else max(8, launch.number("ROWS"))
        return 16 * 16 * loop.hmma / (rows // 8)  # rows of x by 8 share the weights
    outputs, rows, normed = (launch.number(name) for name in ("OUTPUTS", "ROWS", "NORMED"))
    return 32 * 8 * outputs * loop.wide_loads / (outputs + 2 * rows + 2 * normed)


def packed_steps(text: str) -> int:
    """The steps of 32 inputs of a span of `gemv_packed`, of whose text this is: of 8 groups, or of a unit."""
    return min(8 * get(constant(text, "WEIGHT")).group, int(constant(text, "UNIT"))) // 32


def _small(launch: Launch, machine: Machine) -> float:
    """Seconds of a kernel that only moves activations, or chooses tokens."""
    ramp = _SAMPLING_RAMP if launch.kernel == "sample" else _RAMP
    return launch.activations / machine.bandwidth + _BEGIN + ramp
