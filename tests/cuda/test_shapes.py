"""The launches of the larger kernels: everything is covered, and fits into every GPU."""

from __future__ import annotations

import itertools

import pytest

from polarlm.engine import codecs, records
from polarlm.engine.backends.cuda import launch_configs, packed
from polarlm.engine.backends.cuda.launch_configs import GEMM_PACKED_ROWS, GEMV_ROWS, SHARED_BYTES, SMALL_ROWS
from polarlm.engine.weight_formats import WeightFormat, available, get

CODECS = ["f16", "ring3", "ring3.5", "ring4", "ring5", "turbo2", "turbo4", "polarquant"]
WIDTHS = [8, 48, 576, 4096, 28672]


@pytest.mark.parametrize("head_dim", [8, 80, 128, 256])
def test_attention_fits_into_shared_memory(head_dim: int) -> None:
    for block_size in (16, 64):
        for k in CODECS:
            for v in CODECS:
                keys = records.layout(codecs.get(k), False, block_size, head_dim, 8)
                values = records.layout(codecs.get(v), True, block_size, head_dim)
                configs = [launch_configs.encode_blocks(keys, values)]
                for group in (1, 3, 8, 12):
                    configs += [launch_configs.prefill_attention(keys, values, group)[0]]
                    configs += [launch_configs.decode_attention(keys, values, group, rows, 256) for rows in (1, 16)]
                assert max(config.shared for config in configs) <= SHARED_BYTES, block_size
                assert block_size % configs[0].defines["TOKENS"] == 0, block_size


@pytest.mark.parametrize("processors", [1, 20, 132])
def test_products_cover_every_output(processors: int) -> None:
    for width in WIDTHS:
        for out in (1, 40, 4096, 151936):
            for rows in range(1, GEMV_ROWS + 1):
                config, blocks = launch_configs.gemv(rows, out, width, processors)
                columns = config.defines["OUTPUTS"] * config.threads // 32 // config.defines["SPLIT"]
                assert config.defines["ROWS"] >= rows
                assert (blocks - 1) * columns < out <= blocks * columns
            for rows in range(1, SMALL_ROWS + 1):
                config, blocks, parts = launch_configs.gemm_small(rows, out, width, processors, 228 << 10)
                tile = 32 * config.defines["WARPS_OUT"]
                assert config.defines["ROWS"] >= rows
                assert config.defines["ROWS"] * 8 // config.defines["WARPS_OUT"] <= 128
                assert (blocks - 1) * tile < out <= blocks * tile
                assert parts == 1 or parts * 32 <= width
                assert config.shared <= SHARED_BYTES


# Multiprocessors, and bytes of shared memory of one ("Technical Specifications per Compute Capability" in the CUDA
# programming guide).
MACHINES = H100, A100, RTX_4090 = (132, 228 << 10), (108, 164 << 10), (128, 100 << 10)
PACKED = [get(name) for name in available() if packed.is_packed(get(name))]


@pytest.mark.parametrize("format", PACKED[::3], ids=lambda format: format.name)
def test_packed_products_have_every_output_and_fit_their_multiprocessors(format: WeightFormat) -> None:
    """Blocks that stay are as many as are resident; each has room for the next weights while it multiplies."""
    block = format.values, packed.block_bytes(format)
    cases = itertools.product(MACHINES, range(1, GEMM_PACKED_ROWS + 1), (32, 4096, 28672, 128256), (False, True))
    for case in cases:
        (processors, memory), rows, out, gated = case
        configured = packed.gemv_packed if rows <= GEMV_ROWS else packed.gemm_packed
        config, blocks = configured(rows, out, processors, memory, *block, gated)
        tiles, slots = (config.defines[name] for name in ("TILES", "SLOTS"))
        sets = -(-out // (16 * tiles))
        assert rows <= config.defines["ROWS"] < 2 * rows, case
        assert tiles >= 2 or not gated, case
        assert slots > tiles, case
        assert config.shared + 256 + 1024 <= min(memory, 100 << 10), case
        if rows <= GEMV_ROWS:
            resident = config.defines["RESIDENT"]
            assert blocks == min(sets, resident * processors), case
            assert resident * (config.shared + 256 + 1024) <= memory, case
        else:
            assert blocks == sets or (config.defines["STAYS"] and sets >= 1.5 * blocks), case
