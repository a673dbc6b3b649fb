"""The launches of whole models are within the limits of each card, and blocks that stay are there at once.

A card is one of `bench.gpu.cards.MACHINES`. A trace notes what the engine would launch on it for large models; a small
model runs on the emulator.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import pytest

from polarlm.bench.command import CacheType
from polarlm.bench.gpu.cards import MACHINES, Machine
from polarlm.bench.gpu.launches import LIBRARY, Launch
from polarlm.bench.gpu.nvrtc import SHARED_LIMIT, Usage, compile_text, compiler
from polarlm.bench.gpu.occupancy import REGISTERS, resident_blocks
from polarlm.bench.gpu.parts import prompt_parts, step_parts
from polarlm.bench.gpu.shapes import GPT_OSS_20B, LLAMA_8B, QWEN3_5_0_8B, QWEN3_30B_A3B
from polarlm.engine.backends.cuda.launch_configs import SYSTEM_BYTES
from polarlm.engine.backends.cuda.ops import CudaOps
from polarlm.engine.errors import EngineError
from polarlm.model_loaders.config import ModelConfig
from tests.cuda.emulated import EmulatedDevice, _program
from tests.cuda.test_model_emulated import close, model_from, talk
from tests.cuda.test_packed_model import Exact, Halves, mixed_model
from tests.pairs import pairs

MOST_THREADS = 1024  # of a block
MOST_BLOCKS = (2**31 - 1, 65535, 65535)  # of a grid
L2 = {"3060": 3, "4060": 24, "4090": 72, "5090": 96, "a100": 40, "h100": 50, "h200": 50, "b200": 126}  # MiB

MODELS: dict[str, tuple[ModelConfig, tuple[str, ...]]] = {
    "8b": (LLAMA_8B, ("bf16", "q4_k_m", "q5_0", "q6_k")),
    "qwen3-30b-a3b": (QWEN3_30B_A3B, ("q4_k_m",)),
    "gpt-oss-20b": (GPT_OSS_20B, ("mxfp4_moe",)),
    "qwen3.5-0.8b": (QWEN3_5_0_8B, ("bf16", "q8_0")),
}
STEPS = ((2048, 1), (2048, 2), (2048, 5), (2048, 16), (131072, 1), (2048, 64))  # context, sequences
PROMPTS = (192, 8192)  # tokens


@cache
def launches(card: str, model: str, weights: str, cache_type: str, steps: tuple[tuple[int, int], ...]) -> list[Launch]:
    """Of steps and of prompts."""
    machine, config = MACHINES[card], MODELS[model][0]
    sizes = machine.processors, machine.shared_memory
    kind = CacheType.read(cache_type)
    within = [(min(context, config.max_context), batch) for context, batch in steps]
    parts = [part for at in within for part in step_parts(config, weights, kind, *at, *sizes)]
    parts += [part for tokens in PROMPTS for part in prompt_parts(config, weights, kind, tokens, *sizes)]
    return [launch for part in parts for launch in part.launches if launch.kernel != LIBRARY]


@pytest.mark.parametrize(
    ("card", "cache_type", "of_model"),
    pairs(
        MACHINES,
        ["balanced", "f16", "polarquant"],
        [(name, kind) for name, (_, kinds) in MODELS.items() for kind in kinds],
    ),
)
def test_blocks_and_grids_are_within_the_limits_of_a_card(
    card: str, cache_type: str, of_model: tuple[str, str]
) -> None:
    """Threads, grids, and dynamic shared memory, which static shared memory and registers may restrict further."""
    machine = MACHINES[card]
    for launch in launches(card, *of_model, cache_type, STEPS):
        assert 1 <= launch.threads <= MOST_THREADS, launch.kernel
        assert all(1 <= size <= most for size, most in zip(launch.grid, MOST_BLOCKS, strict=False)), launch.kernel
        assert launch.shared <= SHARED_LIMIT[machine.arch], launch.kernel
        assert launch.shared + SYSTEM_BYTES <= machine.shared_memory, launch.kernel


@pytest.mark.parametrize("card", MACHINES)
def test_what_all_blocks_of_a_product_read_stays_in_the_cache(card: str) -> None:
    """x of a step's products, which each block reads from L2."""
    for launch in launches(card, "8b", "q4_k_m", "balanced", STEPS):
        if launch.kernel in ("gemv", "gemv_packed", "gemm_packed", "gemm_small"):
            assert launch.inputs <= L2[card] << 20, launch


# Kernels whose blocks are at most as many as a GPU has at once: they take one piece of work after another.
STAYING = ("decode_attention", "gemv_packed", "gemm_packed")


@pytest.mark.slow
@pytest.mark.parametrize("card", MACHINES)
def test_compiled_kernels_fit_and_blocks_that_stay_are_there_at_once(card: str) -> None:
    """With the registers and the static shared memory that the compiler takes. What waits for another block of its
    launch would need the second."""
    try:
        compiler()
    except EngineError as error:
        pytest.skip(str(error))
    machine, staying = MACHINES[card], set()
    for launch, usage in _compiled(card, machine.arch):
        what = f"{launch.kernel} {launch.grid} × {launch.threads}, {launch.shared} bytes, {usage}"
        shared = launch.shared + usage.static_shared
        assert shared <= SHARED_LIMIT[machine.arch], what
        assert usage.registers * launch.threads <= REGISTERS, what
        at_once = resident_blocks(machine.arch, machine.shared_memory, usage.registers, launch.threads, shared)
        assert at_once >= 1, what
        if launch.kernel in STAYING and (launch.kernel != "gemm_packed" or launch.number("STAYS")):
            staying.add(launch.kernel)
            assert math.prod(launch.grid) <= at_once * machine.processors, what
        if launch.kernel == "gemv_packed":
            assert at_once >= launch.number("RESIDENT"), what
    assert staying == {*STAYING}


class EmulatedCard(EmulatedDevice):
    """The emulated device with the multiprocessors and the shared memory of a card, whose limits launches must keep."""

    def __init__(self, machine: Machine):
        super().__init__(checked=False)
        self.processors, self.shared_memory = machine.processors, machine.shared_memory
        self._machine = machine

    def launch(
        self, kernel: str, text: str, grid: Sequence[int], block: Sequence[int], args: Sequence[Any], shared: int = 0
    ) -> None:
        assert math.prod(block) <= MOST_THREADS, kernel
        assert shared + _program(text, False).static_shared <= SHARED_LIMIT[self._machine.arch], kernel
        super().launch(kernel, text, grid, block, args, shared)


@pytest.mark.slow
@pytest.mark.parametrize("card", MACHINES)
def test_a_model_gives_numpy_s_logits_on_each_card(card: str) -> None:
    """The number of multiprocessors decides how sums are cut, and shared memory how many blocks there are."""
    backends = CudaOps(EmulatedCard(MACHINES[card])), Exact(), Halves(CudaOps(EmulatedCard(MACHINES[card])))
    close(*(talk(model_from(ops, *mixed_model(), ("f16", "f16"))) for ops in backends))


def _compiled(card: str, arch: int) -> Iterator[tuple[Launch, Usage]]:
    """Each launch of steps and prompts of the 8B model that differs from the others in its text or its sizes."""
    found = launches(card, "8b", "q4_k_m", "balanced", ((2048, 1), (2048, 2), (2048, 16)))
    usages: dict[str, dict[str, Usage]] = {}
    different = {(launch.kernel, launch.text, launch.grid, launch.threads, launch.shared): launch for launch in found}
    for launch in different.values():
        if launch.text not in usages:
            usages[launch.text] = {usage.kernel: usage for usage in compile_text(launch.text, arch)}
        yield launch, usages[launch.text][f"{launch.kernel}_kernel"]


@pytest.mark.parametrize(
    ("arch", "shared_memory", "registers", "threads", "shared", "blocks"),
    [
        (90, 228 << 10, 32, 32, 0, 32),
        (86, 100 << 10, 32, 32, 0, 16),
        (90, 228 << 10, 32, 512, 0, 4),
        (89, 100 << 10, 32, 512, 0, 3),
        (90, 228 << 10, 168, 384, 0, 1),  # 64,512 of 65,536 registers
        (90, 228 << 10, 169, 384, 0, 0),
        (90, 228 << 10, 64, 256, 113 << 10, 2),
        (90, 228 << 10, 64, 256, (113 << 10) + 1, 1),
        (89, 100 << 10, 64, 256, 99 << 10, 1),
        (89, 100 << 10, 64, 256, 100 << 10, 0),
    ],
)
def test_a_multiprocessor_has_as_many_blocks_as_its_scarcest_resource(
    arch: int, shared_memory: int, registers: int, threads: int, shared: int, blocks: int
) -> None:
    assert resident_blocks(arch, shared_memory, registers, threads, shared) == blocks


def test_the_cards_are_those_of_the_predictions() -> None:
    assert set(L2) == set(MACHINES)
