"""The launches of whole models are within the limits of each card, and blocks that stay are there at once.

A trace notes what the engine would launch on a card for large models; a small model runs on the emulator.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

import pytest

from polarlm.bench.gpu.nvrtc import SHARED_LIMIT, Usage, compile_text, compiler
from polarlm.bench.gpu.shapes import GPT_OSS_20B, LLAMA_8B, QWEN3_5_0_8B, QWEN3_30B_A3B
from polarlm.bench.random_weights import RandomWeights
from polarlm.engine import codecs
from polarlm.engine.backends.cuda.device.tracing import GEMM, Launch, TracingDevice
from polarlm.engine.backends.cuda.launch_configs import SYSTEM_BYTES
from polarlm.engine.backends.cuda.ops import CudaOps
from polarlm.engine.backends.cuda.warm_up import FirstRow
from polarlm.engine.errors import EngineError
from polarlm.engine.model.forward import Transformer
from polarlm.engine.model.warm_up import warm_up, warm_up_codes, warm_up_rows
from polarlm.engine.model.weights import load_weights
from polarlm.engine.quantization.conditioning import Conditioning
from polarlm.engine.state.layer_shapes import LayerShape
from polarlm.engine.state.plan import plan_for_tokens
from polarlm.engine.state.shapes import CacheShape
from polarlm.engine.state.store import KVStore
from polarlm.model_loaders.config import ModelConfig
from tests.bare import shape_of
from tests.cuda.emulated import EmulatedDevice, _program
from tests.cuda.test_model_emulated import close, model_from, talk
from tests.cuda.test_packed_model import Exact, Halves, mixed_model


class Card(NamedTuple):
    """arch: compute capability, times ten. processors: multiprocessors. l2: MiB of its cache. shared_memory in KiB,
    threads, blocks: most of a multiprocessor ("Technical Specifications per Compute Capability" in the CUDA programming
    guide)."""

    arch: int
    processors: int
    shared_memory: int
    l2: int
    threads: int
    blocks: int


CARDS = {
    "3060": Card(86, 28, 100, 3, 1536, 16),
    "4090": Card(89, 128, 100, 72, 1536, 24),
    "5090": Card(120, 170, 100, 96, 1536, 24),
    "a100": Card(80, 108, 164, 40, 2048, 32),
    "h200": Card(90, 132, 228, 50, 2048, 32),
    "b200": Card(100, 148, 228, 126, 2048, 32),
}
MODELS: dict[str, tuple[ModelConfig, str]] = {
    "8b": (LLAMA_8B, "q4_k"),
    "8b in bfloat16": (LLAMA_8B, "bf16"),
    "qwen3-30b-a3b": (QWEN3_30B_A3B, "q4_k"),
    "gpt-oss-20b": (GPT_OSS_20B, "mxfp4"),
    "qwen3.5-0.8b": (QWEN3_5_0_8B, "q8_0"),
}
REGISTERS = 65536  # of a multiprocessor, and of a block at most
MOST_THREADS = 1024  # of a block
MOST_BLOCKS = (2**31 - 1, 65535, 65535)  # of a grid
BLOCK, BATCHES, PROMPT = 64, (1, 2, 5, 16), 1100
PRODUCTS = ("gemv", "gemv_packed", "gemm_packed", "gemm_small")
# Kernels whose blocks are at most as many as a GPU has at once: they take one piece of work after another.
STAYING = ("decode_attention", "gemv_packed", "gemm_packed")


@cache
def launches(card: str, model: str) -> list[Launch]:
    """What prompts and steps of a model's first layers launch: layers up to one of every kind."""
    found: list[Launch] = []
    made, (config, kind) = CARDS[card], MODELS[model]
    kinds = {layer: number for number, layer in reversed([*enumerate(config.layers)])}
    config = replace(config, layers=config.layers[: 1 + max(kinds.values())])
    ops = CudaOps(TracingDevice(found.append, made.processors, made.shared_memory << 10))
    loads, load_experts = ops.load, ops.load_experts
    ops.load = lambda stored, kept=None: loads([FirstRow(one) for one in stored], kept)  # type: ignore[method-assign]
    ops.load_experts = lambda stored, kept=None: load_experts(  # type: ignore[method-assign]
        [[FirstRow(one) for one in expert] for expert in stored], kept
    )
    weights = load_weights(ops, config, RandomWeights.of_kind(config, kind))
    k, v = codecs.get("ring4"), codecs.get("ring3.5")
    layers = tuple(shape_of(layer.mixer, k, v, 8, BLOCK) for layer in config.layers)
    conditioning = [
        Conditioning(k.rotation(shape.head_dim), v.rotation(shape.head_dim))
        if isinstance(shape, LayerShape)
        else Conditioning()
        for shape in layers
    ]
    plan = plan_for_tokens(CacheShape(BLOCK, layers), 2 * PROMPT, 2 * max(BATCHES))
    transformer = Transformer(ops, config, weights, KVStore(ops, plan, conditioning))
    found.clear()
    warm_up_codes(transformer, warm_up(transformer, [PROMPT]))
    for rows in BATCHES:
        warm_up_rows(transformer, rows, in_steps=True)
    return [launch for launch in found if launch.kernel != GEMM]


def check_limits(card: str, model: str) -> None:
    """Threads, grids, and dynamic shared memory, which static shared memory and registers may restrict further."""
    limits, seen = CARDS[card], set()
    for launch in launches(card, model):
        threads, kernel = math.prod(launch.block), launch.kernel
        assert 1 <= threads <= MOST_THREADS, kernel
        assert all(1 <= size <= most for size, most in zip(launch.grid, MOST_BLOCKS, strict=False)), kernel
        assert launch.shared <= SHARED_LIMIT[limits.arch], kernel
        assert launch.shared + SYSTEM_BYTES <= limits.shared_memory << 10, kernel
        if kernel.removesuffix("_kernel") in PRODUCTS and "#define EXPERTS 1" not in launch.text:
            inputs = launch.args[1]  # each block reads all of them, from L2
            assert inputs.nbytes <= limits.l2 << 20, kernel
        seen.add(kernel)
    assert {"decode_attention_kernel", "sample_kernel"} <= seen


@pytest.mark.parametrize(("card", "model"), [("3060", "8b"), ("h200", "qwen3.5-0.8b"), ("5090", "gpt-oss-20b")])
def test_blocks_and_grids_are_within_the_limits_of_a_card(card: str, model: str) -> None:
    check_limits(card, model)


@pytest.mark.slow  # every model on every card: a launch beyond a limit fails on that card alone
@pytest.mark.parametrize("card", CARDS)
def test_blocks_and_grids_of_all_models_are_within_the_limits_of_a_card(card: str) -> None:
    for model in MODELS:
        check_limits(card, model)


@pytest.mark.slow  # NVIDIA's compiler takes minutes for all cards, and only it knows registers
@pytest.mark.parametrize("card", CARDS)
def test_compiled_kernels_fit_and_blocks_that_stay_are_there_at_once(card: str) -> None:
    """With the registers and the static shared memory that the compiler takes. What waits for another block of its
    launch would need the second."""
    try:
        compiler()
    except EngineError as error:
        pytest.skip(str(error))
    limits, staying = CARDS[card], set()
    for launch, usage in _compiled(card, limits.arch):
        threads, shared = math.prod(launch.block), launch.shared + usage.static_shared
        what = f"{launch.kernel} {launch.grid} × {threads}, {launch.shared} bytes, {usage}"
        assert shared <= SHARED_LIMIT[limits.arch], what
        at_once = resident_blocks(limits, usage.registers, threads, shared)
        assert at_once >= 1, what
        name = launch.kernel.removesuffix("_kernel")
        if name in STAYING and (name != "gemm_packed" or "#define STAYS 1" in launch.text):
            staying.add(name)
            assert math.prod(launch.grid) <= at_once * limits.processors, what
        if name == "gemv_packed":
            (line,) = [line for line in launch.text.splitlines() if line.startswith("#define RESIDENT ")]
            assert at_once >= int(line.split()[2]), what
    assert staying == {*STAYING}


def _compiled(card: str, arch: int) -> Iterator[tuple[Launch, Usage]]:
    """Each launch of the 8B model that differs from the others in its text or its sizes."""
    usages: dict[str, dict[str, Usage]] = {}
    different = {
        (launch.kernel, launch.text, *launch.grid, math.prod(launch.block), launch.shared): launch
        for launch in launches(card, "8b")
    }
    for launch in different.values():
        if launch.text not in usages:
            usages[launch.text] = {usage.kernel: usage for usage in compile_text(launch.text, arch)}
        yield launch, usages[launch.text][launch.kernel]


def resident_blocks(card: Card, registers: int, threads: int, shared: int) -> int:
    """The number of blocks of a kernel that a multiprocessor has at once; 0 where not even one fits.

    registers: of a thread, of which the hardware gives multiples of 8 to a warp. shared: bytes of a block, static ones
    included, of which it gives multiples of 128.
    """
    of_registers = -(-registers // 8) * 8 * -(-threads // 32) * 32
    of_shared = -(-(shared + SYSTEM_BYTES) // 128) * 128
    room = (card.shared_memory << 10) // of_shared
    return min(card.blocks, card.threads // threads, REGISTERS // of_registers, room)


class EmulatedCard(EmulatedDevice):
    """The emulated device with the multiprocessors and the shared memory of a card, whose limits launches must keep."""

    def __init__(self, card: Card):
        super().__init__(checked=False)
        self.processors, self.shared_memory = card.processors, card.shared_memory << 10
        self._card = card

    def launch(
        self, kernel: str, text: str, grid: Sequence[int], block: Sequence[int], args: Sequence[Any], shared: int = 0
    ) -> None:
        assert math.prod(block) <= MOST_THREADS, kernel
        assert shared + _program(text, False).static_shared <= SHARED_LIMIT[self._card.arch], kernel
        super().launch(kernel, text, grid, block, args, shared)


@pytest.mark.slow  # a model is emulated three times for each card
@pytest.mark.parametrize("card", ["3060", "5090", "h200"])
def test_a_model_gives_numpy_s_logits_on_each_card(card: str) -> None:
    """The number of multiprocessors decides how sums are cut, and shared memory how many blocks there are."""
    backends = CudaOps(EmulatedCard(CARDS[card])), Exact(), Halves(CudaOps(EmulatedCard(CARDS[card])))
    close(*(talk(model_from(ops, *mixed_model(), ("f16", "f16"))) for ops in backends))
