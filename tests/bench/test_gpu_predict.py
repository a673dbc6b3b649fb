"""Predictions of a step on a GPU that is not there. Kernels are not compiled here: see test_gpu_sass.py."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from polarlm.bench.command import CacheType
from polarlm.bench.gpu import cost, predict
from polarlm.bench.gpu.cards import MACHINES, Machine
from polarlm.bench.gpu.launches import Launch, Part
from polarlm.bench.gpu.parts import prompt_parts, step_parts
from polarlm.bench.gpu.sass import Counts
from polarlm.bench.gpu.shapes import (
    GPT_OSS_20B,
    GRANITE_4_H_TINY,
    LLAMA_8B,
    NEMOTRON_3_NANO,
    QWEN3_5_0_8B,
    QWEN3_5_4B,
    QWEN3_30B_A3B,
)
from polarlm.engine.errors import EngineError
from polarlm.model_loaders.config import Experts, ModelConfig

H200 = MACHINES["h200"]
ATTENTION = "decode_attention"
# Of a loop that computes next to nothing, whatever the kernel.
IDLE = Counts(
    total=64,
    seldom=0,
    alu=8,
    port=8,
    hmma=64,
    ffma=64,
    lds=0,
    shuffles=0,
    special=0,
    moves=0,
    wide_loads=32,
    latency=64,
)


def parts_of(context: int, batch: int, cache: str = "balanced", weights: str = "bf16") -> dict[str, Part]:
    sizes = H200.processors, H200.shared_memory
    return {part.name: part for part in step_parts(LLAMA_8B, weights, CacheType.read(cache), context, batch, *sizes)}


@pytest.mark.parametrize(("batch", "product"), [(1, ["gemv"]), (2, ["gemv"]), (3, ["narrow", "gemm_small"])])
def test_a_part_has_the_kernels_that_the_engine_launches(batch: int, product: list[str]) -> None:
    parts = parts_of(2048, batch)
    assert [launch.kernel for launch in parts["gate_up"].launches] == product
    assert [launch.kernel for launch in parts["attention"].launches] == ["decode_attention"]
    # 30 of 32 blocks are quantized; of sink and current block 16 tokens are a unit.
    assert (parts["attention"].units, parts["attention"].unit_tokens) == (batch * 8 * (30 + 2 * 4), 64)
    assert all(part.launches for part in parts.values())
    # From 3 rows on attention writes what the product takes, as the activation does.
    assert ("#define TO __nv_bfloat16" in parts["attention"].launches[0].text) == (batch == 3)
    assert all("narrow" not in [launch.kernel for launch in parts[name].launches] for name in ("out", "down"))


def test_the_floor_is_the_bytes_of_weights_and_cache() -> None:
    parts = parts_of(131072, 1)
    weights = sum(part.repeats * part.bytes for part in parts.values() if part.products)
    assert weights == 2 * (len(LLAMA_8B.layers) * 218_103_808 + 128256 * 4096)
    assert parts["attention"].bytes == pytest.approx(8 * 2046 * 8064, rel=0.01)  # records of balanced, 8 KV heads
    exact = parts_of(131072, 1, "f16")["attention"].bytes
    assert exact == 8 * 2048 * 2 * 64 * 128 * 2


def test_the_mixture_has_the_size_of_its_file() -> None:
    parts = parts_of(2048, 1, weights="q4_k_m")
    assert [name for name in parts if name.startswith(("qkv", "down"))] == [
        "qkv (q4_k)", "qkv (q4_k, q6_k)", "down (q4_k)", "down (q6_k)"
    ]  # fmt: skip
    qkv = parts["qkv (q4_k, q6_k)"]
    assert [[one.kernel for one in launches] for launches in (qkv.launches, qkv.alone)] == [
        ["gemv_packed"], ["gemv_packed"] * 2
    ]  # fmt: skip
    head = embedding = 128256 * 4096
    larger = head + 16 * (4096 * 14336 + 1024 * 4096)  # `down` and values of half of the layers
    smaller = 32 * 218_103_808 + head - larger
    read = sum(part.repeats * part.bytes for part in parts.values() if part.products)
    assert read == (148 * smaller + 210 * larger) // 256  # a block of q4_k has 4 bytes more than in the file
    assert (144 * (smaller + embedding) + 210 * larger) / 256 == pytest.approx(4.92e9, rel=0.01)  # as published


def test_packed_weights_have_their_own_kernel_and_the_bytes_of_their_tiles() -> None:
    down = parts_of(2048, 1, weights="q4_k")["down"]
    assert down.launches[0].kernel == "gemv_packed"
    assert down.bytes == 4096 * 14336 * (128 + 4 + 2 * 8) // 256  # codes, scale and offset, numbers of 8 groups


@pytest.mark.parametrize(("batch", "weights_each"), [(1, 256 * 8 / 9), (8, 256), (16, 128), (64, 32)])
def test_rows_of_x_by_8_share_their_weights(monkeypatch: pytest.MonkeyPatch, batch: int, weights_each: float) -> None:
    """Each has its own products on tensor cores with them; of one row, every ninth product adds up x."""
    monkeypatch.setattr(cost, "_compiled", lambda *given: (168, IDLE))
    (down,) = cost.predict([parts_of(2048, batch, weights="q4_k")["down"]], H200, LLAMA_8B)
    assert down.instructions == pytest.approx(32 * IDLE.total / (weights_each * IDLE.hmma))


def test_the_busiest_unit_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    attention = parts_of(131072, 16)["attention"]

    def predicted(loop: Counts) -> cost.Prediction:
        monkeypatch.setattr(cost, "_compiled", lambda *given: (168, loop))
        return cost.predict([attention], H200, LLAMA_8B)[0]

    idle = predicted(IDLE)
    assert idle.limit == "memory"
    # Reading is 4.5 % faster than the copy that the floor is made of.
    assert idle.floor / cost._READ < idle.seconds < 1.1 * idle.floor
    assert predicted(replace(IDLE, port=700)).limit == "shared memory and L1"
    slow, slower = (predicted(replace(IDLE, total=total)) for total in (4000, 8000))
    assert slow.limit == slower.limit == "issue"
    assert slow.instructions == pytest.approx(32 * 4000 / (2 * 64 * 128))
    assert slower.seconds - 32 * ATTENTION_FIXED == pytest.approx(2 * (slow.seconds - 32 * ATTENTION_FIXED), rel=0.01)


def test_every_column_of_blocks_reads_x_from_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cost, "_compiled", lambda *given: (64, IDLE))
    gate_up = parts_of(2048, 16)["gate_up"]
    assert gate_up.launches[-1].inputs == 16 * 4096 * 2  # rounded
    through = gate_up.bytes + gate_up.launches[-1].grid[0] * 16 * 4096 * 2

    def predicted(machine: Machine) -> cost.Prediction:
        return cost.predict([gate_up], machine, LLAMA_8B)[0]

    assert predicted(H200).limit == "memory"
    slow, slower = (predicted(replace(H200, cache=cache)) for cache in (2e12, 1e12))
    assert slow.limit == slower.limit == "L2"
    assert slower.seconds - slow.seconds == pytest.approx(32 * through * (1e-12 - 0.5e-12))


def test_a_block_of_gemm_small_waits_for_x_in_every_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    """So where blocks are few, the speed of the memory does not matter. 96 blocks have 64 rows of weights each, and of
    4,096 inputs 128 in a stage."""
    monkeypatch.setattr(cost, "_compiled", lambda *given: (64, IDLE))
    qkv, down = (parts_of(2048, 16)[name] for name in ("qkv", "down"))
    assert qkv.launches[-1].grid == (96, 1)
    for machine in (H200, replace(H200, bandwidth=2 * H200.bandwidth)):
        (slow,) = cost.predict([qkv], machine, LLAMA_8B)
        assert slow.limit == "latency"
        own = qkv.launches[0].activations / machine.bandwidth + cost.NARROW
        assert slow.seconds / slow.repeats - own == pytest.approx(32 * 0.8e-6 + 1.3e-6 + 5.0e-6)
    # 64 rows: 24 blocks in 5 parts have 256 rows of weights each, and 32 inputs in a stage, 64 bytes of bfloat16.
    part = parts_of(2048, 64)["qkv"]
    beside = sum(cost._small(launch, H200) for launch in part.launches if launch.kernel != "gemm_small")
    (many,) = cost.predict([part], H200, LLAMA_8B)
    assert many.seconds / many.repeats - beside == pytest.approx(128 / 5 * 1.3e-6 + 1.3e-6 + 5.0e-6)
    packed = parts_of(2048, 64, weights="q8_0")["qkv"].launches[-2]
    assert (packed.kernel, cost._stage_seconds(packed)) == ("gemm_small", 0.8e-6)
    # As many blocks as a GPU has at once, with parts of the inputs, wait for the memory.
    assert cost.predict([down], H200, LLAMA_8B)[0].limit == "memory"


def test_all_instructions_of_a_product_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its branches skip the unpacking of weights, not a mask."""
    kernels = {
        f"{name}_kernel": SimpleNamespace(hot_loop=lambda: replace(IDLE, seldom=60)) for name in ("a", ATTENTION)
    }
    monkeypatch.setattr(cost, "disassemble", lambda binary: kernels)
    used = [SimpleNamespace(kernel=name, registers=64) for name in kernels]
    monkeypatch.setattr(cost, "compile_binary", lambda text, arch: (used, b""))
    assert cost._compiled("a", "any text", 90) == (64, IDLE)
    assert cost._compiled(ATTENTION, "any text", 90)[1].common == 4


FIXED = 1.3e-6 + 4.0e-6  # seconds of an attention without units
ATTENTION_FIXED = 12.3e-6


@pytest.mark.parametrize(("context", "most"), [(2048, 3), (32768, 32), (131072, 125)])
def test_the_busiest_multiprocessor_reads_its_equal_share(
    monkeypatch: pytest.MonkeyPatch, context: int, most: int
) -> None:
    """Of 8 KV heads' units, on 132 multiprocessors. Its 12 warps may have unequal shares; memory has equal ones."""
    monkeypatch.setattr(cost, "_compiled", lambda *given: (168, IDLE))
    attention = parts_of(context, 1)["attention"]
    (prediction,) = cost.predict([attention], H200, LLAMA_8B)
    assert most == -(-attention.units // 132)
    assert prediction.limit == "memory"
    mean = prediction.floor / attention.units / cost._READ
    iterations = 32 * most * 2 * 128 * 64 / (16 * 16 * IDLE.hmma)  # with what is not hidden behind the memory
    added = 0.4 * iterations * IDLE.common / 4 / H200.clock
    assert prediction.seconds - 32 * ATTENTION_FIXED == pytest.approx(132 * most * mean + added, rel=1e-6)


def test_a_warp_computes_its_units_one_after_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 32 units on 12 warps, 8 warps have 3. With exact keys and values a unit is 16 tokens."""
    slow = replace(IDLE, latency=40_000)
    monkeypatch.setattr(cost, "_compiled", lambda *given: (168, slow))
    (prediction,) = cost.predict([parts_of(32768, 1)["attention"]], H200, LLAMA_8B)
    assert prediction.limit == "latency"
    assert prediction.seconds == pytest.approx(32 * (3 * 40_000 / H200.clock + ATTENTION_FIXED))
    exact = parts_of(32768, 1, "f16")["attention"]
    assert (exact.units, exact.unit_tokens) == (8 * 512 * 4, 16)
    (prediction,) = cost.predict([exact], H200, LLAMA_8B)  # IDLE's loop has the products of 64 tokens
    assert prediction.seconds == pytest.approx(32 * (11 * 10_000 / H200.clock + ATTENTION_FIXED))


def prompt_of(tokens: int, weights: str = "bf16", cache: str = "balanced") -> dict[str, Part]:
    sizes = H200.processors, H200.shared_memory
    return {part.name: part for part in prompt_parts(LLAMA_8B, weights, CacheType.read(cache), tokens, *sizes)}


def test_a_prompt_has_the_kernels_that_the_engine_launches() -> None:
    """A layer takes 8,192 rows at a time."""
    parts = prompt_of(16384)
    kernels = {name: [launch.kernel for launch in part.launches] for name, part in parts.items()}
    assert kernels["qkv"] == kernels["out"] == ["narrow", "gemm"]
    assert kernels["gate_up"] == ["narrow", "gemm", "activate_mul"]
    assert kernels["down"] == ["gemm"]
    assert kernels["heads"] == ["transform_heads", "append_kv"]
    assert kernels["attention"] == ["prefill_attention", "rotate"] * 2
    assert [parts[name].repeats for name in ("qkv", "heads", "attention", "down", "head")] == [64, 64, 32, 64, 1]
    flops = sum(part.repeats * launch.flops for part in parts.values() for launch in part.launches)
    assert flops == 2 * 16384 * len(LLAMA_8B.layers) * 218_103_808
    packed = [launch.kernel for launch in prompt_of(2048, "q4_k")["out"].launches]
    assert packed == ["narrow", "dequantize", "gemm"]


def test_attention_of_a_prompt_waits_for_its_busiest_unit(monkeypatch: pytest.MonkeyPatch) -> None:
    """An iteration of IDLE's loop has the products of 32 rows with 16 tokens; a row sees half of the prompt."""
    attention = prompt_of(8192)["attention"]
    iterations = 32 * 8192 / 32 * (8192 / 2 / 16 + 0.5) / H200.processors
    beside = 2 * 2.7e-6 + 2 * 8192 * 4096 * 4 / H200.bandwidth  # launches, and q and the result of `rotate`

    def predicted(loop: Counts) -> cost.Prediction:
        monkeypatch.setattr(cost, "_compiled", lambda *given: (253, loop))
        return cost.predict([attention], H200, LLAMA_8B)[0]

    busy = predicted(IDLE)
    assert busy.limit == "tensor cores"
    assert busy.seconds / 32 == pytest.approx(iterations * 64 * 2.75 / H200.clock + beside, rel=0.01)
    assert busy.floor / 32 == pytest.approx(2 * 32 * 128 * 8192 * 8193 / H200.gemm)
    assert predicted(replace(IDLE, total=1000)).limit == "issue"
    alone = predicted(replace(IDLE, latency=10_000))
    assert alone.limit == "latency"  # two blocks of four warps are resident
    assert alone.seconds / 32 == pytest.approx(iterations * 10_000 / 8 / H200.clock + beside, rel=0.01)


def test_a_library_s_product_takes_its_flops_or_its_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    part = prompt_of(2048)["down"]
    (long,) = cost.predict([part], H200, LLAMA_8B)
    assert long.seconds == pytest.approx(32 * (2 * 2048 * 4096 * 14336 / H200.gemm + 2.7e-6))
    assert (long.limit, long.floor) == ("tensor cores", pytest.approx(32 * 2 * 2048 * 4096 * 14336 / H200.gemm))
    (short,) = cost.predict([part], replace(H200, gemm=1e18), LLAMA_8B)
    assert short.limit == "memory"
    moved = 2 * 4096 * 14336 + 2 * 2048 * 14336 + 4 * 2048 * 4096
    assert short.seconds == pytest.approx(32 * (moved / H200.bandwidth + 2.7e-6))


# -- experts -------------------------------------------------------------------------------------------------------


def step_of(config: ModelConfig, weights: str, batch: int, context: int = 2048) -> dict[str, Part]:
    sizes = H200.processors, H200.shared_memory
    return {part.name: part for part in step_parts(config, weights, CacheType.read("balanced"), context, batch, *sizes)}


def test_one_row_reads_the_matrices_of_its_experts() -> None:
    experts = step_of(QWEN3_30B_A3B, "bf16", 1)["experts"]
    assert [launch.kernel for launch in experts.launches] == ["gemv", "gemv", "add_experts"]
    assert experts.repeats == 48
    assert experts.bytes == 8 * 3 * 2048 * 768 * 2
    assert [launch.grid[2] for launch in experts.launches[:2]] == [8, 8]
    assert experts.launches[0].inputs == 8 * 2048 * 4  # each pair reads its row


def test_rows_read_each_expert_that_some_of_them_chose_once_from_memory() -> None:
    """Of pairs one by one, those with a common expert read it from the cache again; a group reads it once."""
    one = 3 * 2048 * 768 * 2
    pairs, groups = (step_of(QWEN3_30B_A3B, "bf16", rows)["experts"] for rows in (16, 64))
    distinct = 128 * (1 - (120 / 128) ** 16)
    assert pairs.bytes == pytest.approx(distinct * one, rel=1e-6)
    assert sum(product.bytes for product in pairs.products) == 16 * 8 * one
    assert [launch.kernel for launch in groups.launches[:3]] == ["group_pairs", "narrow", "gemm_small"]
    distinct = 128 * (1 - (120 / 128) ** 64)
    assert groups.bytes == sum(product.bytes for product in groups.products) == pytest.approx(distinct * one, rel=1e-6)


def test_a_prompt_computes_experts_of_some_rows_at_a_time() -> None:
    sizes = H200.processors, H200.shared_memory
    parts = prompt_parts(QWEN3_30B_A3B, "q4_k_m", CacheType.read("balanced"), 8192, *sizes)
    experts = [part for part in parts if part.name.startswith("experts")]
    assert [(part.name, part.repeats) for part in experts] == [("experts", 24), ("experts (q4_k, q6_k)", 24)]
    products = [launch for launch in experts[0].launches if launch.kernel == "gemm_small"]
    assert len(products) == len(experts[0].products) == 4 * 2
    assert sum(launch.flops for launch in products) == 2 * 8192 * 8 * 3 * 2048 * 768


# -- gated delta rules -----------------------------------------------------------------------------------------------


def test_a_step_reads_the_states_of_its_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    """The newest of 2,048 tokens is the last one of its block."""
    parts = step_of(QWEN3_5_0_8B, "bf16", 8)
    rule = parts["delta rule"]
    assert [launch.kernel for launch in rule.launches] == ["gated_delta"]
    assert {name: parts[name].repeats for name in ("delta inputs", "delta rule", "delta out", "qkv", "gate_up")} == {
        "delta inputs": 18, "delta rule": 18, "delta out": 18, "qkv": 6, "gate_up": 24
    }  # fmt: skip
    assert rule.bytes == 8 * 4 * 16 * (128 * 128 + 63 * (128 + 128 + 1))
    monkeypatch.setattr(cost, "_compiled", lambda *given: (63, IDLE))
    (many,) = cost.predict([rule], H200, QWEN3_5_0_8B)
    assert many.limit == "memory"
    assert many.seconds == pytest.approx(many.floor + 18 * FIXED)
    (one,) = cost.predict([step_of(QWEN3_5_0_8B, "bf16", 1)["delta rule"]], H200, QWEN3_5_0_8B)
    assert one.limit == "shared memory and L1"  # of the multiprocessors that have a head
    assert one.seconds == pytest.approx(18 * (rule.bytes / 8 / 16 / 64 / H200.clock + FIXED))


def test_a_prompt_multiplies_the_tokens_of_a_block(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = H200.processors, H200.shared_memory
    parts = {part.name: part for part in prompt_parts(QWEN3_5_0_8B, "bf16", CacheType.read("balanced"), 2048, *sizes)}
    rule = parts["delta rule"]
    kernels = ["delta_blocks", "delta_scan", "delta_results", "delta_inputs"]
    assert [launch.kernel for launch in rule.launches] == 2 * kernels  # 1,024 rows at a time
    solved, scanned = (sum(one.flops for one in rule.launches if one.kernel == kernel) for kernel in kernels[:2])
    assert solved == 32 * 16 * (2 * 2 * 64 * 64 * 128 + 64 * 64 * 256)
    assert scanned == 2 * 32 * 16 * (3 * 64 * 128 * 128 + 64 * 64 * 128)

    def predicted(loop: Counts) -> cost.Prediction:
        monkeypatch.setattr(cost, "_compiled", lambda *given: (128, loop))
        return cost.predict([rule], H200, QWEN3_5_0_8B)[0]

    slow, slower = (predicted(replace(IDLE, total=total, hmma=3)) for total in (4000, 8000))
    assert slow.limit == "issue"
    assert slower.seconds > 1.9 * slow.seconds
    assert predicted(replace(IDLE, latency=10**6)).limit == "latency"


# -- Mamba 2 ---------------------------------------------------------------------------------------------------------


def test_heads_of_a_group_read_its_keys_each_for_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are in the L2 cache when the second one reads them."""
    parts = step_of(GRANITE_4_H_TINY, "bf16", 8)
    mamba = parts["mamba 2"]
    assert [launch.kernel for launch in mamba.launches] == ["mamba2", "mamba2_results"]
    assert mamba.launches[1].activations == 3 * 8 * 48 * 64 * 4  # results and their gates, and results again
    of_heads = 48 * (128 * 64 + 63 * (64 + 1))
    assert mamba.bytes == 8 * 4 * (of_heads + 63 * 128)
    assert mamba.state_bytes == 8 * 4 * (of_heads + 48 * 63 * 128)
    assert parts["mamba inputs"].bytes == 2 * 1536 * (2 * 48 * 64 + 2 * 128 + 48)
    monkeypatch.setattr(cost, "_compiled", lambda *given: (64, IDLE))
    (found,) = cost.predict([mamba], H200, GRANITE_4_H_TINY)
    assert found.limit == "L2"
    results = mamba.launches[1].activations / H200.bandwidth + 2.7e-6
    assert found.seconds == pytest.approx(36 * (mamba.state_bytes / H200.cache + FIXED + results))


def test_a_network_is_counted_in_the_layers_that_have_it() -> None:
    """Six mixers of Nemotron 3 Nano have none; its experts have no gate."""
    parts = step_of(NEMOTRON_3_NANO, "bf16", 1)
    names = ("mamba inputs", "mamba 2", "mamba out", "qkv", "attention", "router", "experts", "shared down")
    assert [parts[name].repeats for name in names] == [23, 23, 23, 6, 6, 23, 23, 23]
    experts = [launch.kernel for launch in parts["experts"].launches]
    assert experts == ["gemv", "activate", "gemv", "add_experts"]
    assert parts["experts"].bytes == 6 * 2 * 2688 * 1856 * 2
    assert parts["shared gate_up"].bytes == 2688 * 3712 * 2


def test_a_prompt_multiplies_queries_and_keys_once_for_some_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = H200.processors, H200.shared_memory
    given = "bf16", CacheType.read("balanced"), 1024, *sizes
    mamba = next(part for part in prompt_parts(GRANITE_4_H_TINY, *given) if part.name == "mamba 2")
    blocks, scan, *_ = mamba.launches
    assert [launch.kernel for launch in mamba.launches] == [
        "mamba2_blocks", "delta_scan", "delta_inputs", "mamba2_results"
    ]  # fmt: skip
    assert blocks.flops == 16 * 6 * 2 * 64 * 64 * 128  # 6 times 8 heads
    assert scan.flops == 2 * 16 * 48 * (2 * 64 * 128 * 64 + 64 * 64 * 64)
    assert scan.inputs == 16 * 48 * (2 * 64 * 128 + 64 * 64) * 4  # of queries, faded keys and weights
    free = replace(IDLE, total=1, latency=1, port=0, alu=0)
    monkeypatch.setattr(cost, "_compiled", lambda *given: (128, free))
    moved, _, _, _ = cost._delta_time(blocks, replace(H200, product_clocks=1))
    assert moved == pytest.approx(blocks.activations / H200.bandwidth / cost._READ + 2.7e-6)
    cached, limit, _, _ = cost._delta_time(scan, H200)
    assert limit == "L2"
    assert cached == pytest.approx((scan.activations + scan.grid[0] * scan.inputs) / H200.cache + 2.7e-6)


def test_delta_scan_takes_the_instructions_of_all_its_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 128 terms in 4 chunks and 64 in 2: the last chunk of each product stands behind its loop. A float32 product is
    three of tensor cores."""
    rest, read = replace(IDLE, total=100, seldom=10, hmma=30), replace(IDLE, total=40, hmma=10)
    kernel = SimpleNamespace(nested_loops=lambda: (rest, [read]))
    monkeypatch.setattr(cost, "disassemble", lambda binary: {"delta_scan_kernel": kernel})
    used = [SimpleNamespace(kernel="delta_scan_kernel", registers=64)]
    monkeypatch.setattr(cost, "compile_binary", lambda text, arch: (used, b""))
    text = "#define KEY_DIM 128\n#define BLOCK 64\n#define CHUNK 32\n"
    _, whole = cost._compiled("delta_scan", text, 90)
    assert (whole.total, whole.common, whole.hmma) == (100 + 3 * 40, 90 + 3 * 40, 30 + 3 * 10)
    launch = Launch("delta_scan", text, (2, 66), 256, 0, flops=2 * 132 * 16 * 64 * 1024)
    seconds, limit, _, instructions = cost._delta_time(launch, H200)  # of 16 blocks, of 64 · 1,024 products each
    iterations = 16 * 64 * 1024 / 8 / (60 * 16 * 8 * 16 / 3)
    assert limit == "tensor cores"
    assert seconds == pytest.approx(8 * iterations * 60 * 2.75 / H200.clock + 2.7e-6)
    assert instructions == pytest.approx(32 * 210 * 3 / (60 * 16 * 8 * 16))


def test_layers_with_a_window_read_its_blocks() -> None:
    parts = step_of(GPT_OSS_20B, "mxfp4_moe", 1, 32768)
    window, whole = parts["attention, window of 128"], parts["attention"]
    assert window.repeats == whole.repeats == 12
    assert window.units < whole.units / 50
    assert "#define SINK_SCORES 1" in window.launches[0].text
    assert parts["experts"].bytes == 4 * 3 * 2880 * 2880 * 18 // 32  # the scale of 32 codes is a half
    assert [launch.kernel for launch in parts["qkv"].launches] == ["gemv_packed"]


def everything(config: ModelConfig) -> float:
    """Weights of all matrices of a mixture of experts but the embedding."""
    parts, ffn = step_of(config, "bf16", 1), config.ffn
    assert isinstance(ffn, Experts)
    used = sum(part.repeats * part.bytes for part in parts.values() if part.products) / 2
    return used + parts["experts"].repeats * parts["experts"].bytes / 2 * (ffn.count / ffn.top_k - 1)


def test_the_shapes_have_as_many_weights_as_the_models() -> None:
    for config, billions in ((QWEN3_30B_A3B, 30.5), (GPT_OSS_20B, 20.9), (NEMOTRON_3_NANO, 31.6)):
        assert everything(config) + config.hidden_size * config.vocab_size == pytest.approx(billions * 1e9, rel=0.01)
    # The embedding is the head, too.
    assert everything(GRANITE_4_H_TINY) == pytest.approx(6.94e9, rel=0.01)
    for config, billions in ((QWEN3_5_0_8B, 0.752), (QWEN3_5_4B, 4.21)):  # the embedding is the head, too
        products = [part for part in step_of(config, "bf16", 1).values() if part.products]
        assert sum(part.repeats * part.bytes for part in products) / 2 == pytest.approx(billions * 1e9, rel=0.01)


def test_launches_that_overlap_begin_no_later_than_the_one_before_them_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cost, "_compiled", lambda *given: (168, IDLE))
    parts = cost.predict(list(parts_of(2048, 1).values()), H200, LLAMA_8B)
    whole, launches = sum(part.seconds for part in parts), 3 + 32 * 6
    assert cost.overlapped(parts, H200) == pytest.approx(whole - 0.63 * (launches - 1) * 1.3e-6)
    assert cost.overlapped(parts, MACHINES["a100"]) is None


def test_the_report_says_that_it_is_a_prediction(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cost, "_compiled", lambda *given: (168, IDLE))
    output = tmp_path / "predicted.json"
    assert predict.main(["--weights", "q4_k_m", "--batch", "1,16", "--output", str(output)]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("PREDICTION, not measured: NVIDIA H200")
    assert "Estimated: the speed of the L2 cache" in printed
    assert "\n| 2,048 × 16" in printed.split("Steps, predicted")[1]
    assert "A prompt of 8,192 tokens, predicted: " in printed
    rows = json.loads(output.read_text(encoding="utf-8"))
    assert rows["kind"] == "prediction: no GPU was measured"
    assert rows["prompts"][0]["tokens"] == 8192
    step = rows["steps"][0]
    assert (step["context"], step["batch"]) == (2048, 1)
    limits = {part["part"]: part["limit"] for part in step["parts"]}
    assert {"qkv (q4_k)", "down (q6_k)", "head", "attention"} <= set(limits)
    assert limits["attention"] == "memory"
    assert step["seconds"] == pytest.approx(sum(part["seconds"] for part in step["parts"]))
    assert step["seconds"] > step["overlapped"] > step["floor"] > 1e-3


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["--weights", "q9"], "--weights q9: there is no such type"),
        (["--weights", "f32"], "--weights f32: there is no such type"),
        (["--batch", "65"], "--batch takes numbers from 1 to 64"),
        (["--context", "64"], "--context takes numbers from 192"),
        (["--prompt", "64"], "--prompt takes numbers from 128"),
        (["--cache", "ring99"], "ring99"),
        (
            ["--model", "nemotron-3-nano", "--weights", "q4_k"],
            "rows of 2,688 numbers, which are no whole blocks of q4_k",
        ),
    ],
)
def test_bad_flags_are_refused_with_a_sentence(
    given: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert predict.main(given) == 2
    assert words in capsys.readouterr().err


def test_without_nvdisasm_a_sentence_says_how_to_get_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def missing(*given: object) -> None:
        raise EngineError("Counting instructions needs nvdisasm: install the package nvidia-cuda-nvdisasm with pip")

    monkeypatch.setattr(cost, "_compiled", missing)
    assert predict.main(["--output", str(tmp_path / "predicted.json")]) == 2
    assert "install the package nvidia-cuda-nvdisasm" in capsys.readouterr().err


def test_a_measured_run_is_shown_beside_its_prediction(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cost, "_compiled", lambda *given: (168, IDLE))
    file = Path(__file__).parents[2] / "bench" / "results" / "gpu-nvidia-h200-2026-11-22.json"
    shown = predict.beside("NVIDIA H200", LLAMA_8B, file)
    assert shown.startswith("Measured on NVIDIA H200, next to the predictions")
    assert "| step, bf16, 131,072 × 16, without the host " in shown
    assert all(f"| gate_up, {kind}, batch {rows} " in shown for kind in ("bf16", "q4_k_m") for rows in (1, 8, 16, 64))
    assert predict.beside("Some GPU", LLAMA_8B, file).startswith("Not predicted: Some GPU is none of 3060, ")
