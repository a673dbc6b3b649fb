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
def test_packed_products_of_one_or_two_rows_stay_on_their_multiprocessors(format: WeightFormat) -> None:
    """As many blocks as are resident, or fewer; each has room for the next weights while it multiplies."""
    block = format.values, packed.block_bytes(format)
    for case in itertools.product(MACHINES, (1, 2), (32, 4096, 28672, 128256), (False, True)):
        machine, rows, out, gated = case
        config, blocks = packed.gemv_packed(rows, out, *machine, *block, gated)
        tiles, slots, warps, resident = (config.defines[name] for name in ("TILES", "SLOTS", "WARPS", "RESIDENT"))
        assert config.defines["ROWS"] == rows, case
        assert 8 <= warps * resident <= 24, case
        assert tiles == (2 if gated or out >= 64 * machine[0] else 1), case
        assert tiles < slots <= 2 * tiles, case
        assert config.shared + 256 + 1024 <= min(machine[1], 100 << 10), case
        assert resident * (config.shared + 256 + 1024) <= machine[1], case
        assert blocks == min(-(-out // (16 * tiles)), resident * machine[0]), case


@pytest.mark.parametrize("format", PACKED[::3], ids=lambda format: format.name)
def test_packed_products_of_few_rows_fit_shared_memory(format: WeightFormat) -> None:
    """With two blocks a multiprocessor where slots for a unit more than their tiles fit it; each block has weights, and
    blocks that stay, which are as many as are resident, have two sets of them in the mean of the largest matrix."""
    block = format.values, packed.block_bytes(format)
    unit = 16 * block[1] * max(128, format.values) // format.values
    cases = itertools.product(MACHINES, range(3, GEMM_PACKED_ROWS + 1), (32, 4096, 28672, 128256), (False, True))
    for case in cases:
        machine, rows, out, gated = case
        config, blocks = packed.gemm_packed(rows, out, *machine, *block, gated)
        most, tiles, slots, stays = (config.defines[name] for name in ("ROWS", "TILES", "SLOTS", "STAYS"))
        sets = -(-out // (16 * tiles))
        assert most in (4, 8, 16), case
        assert rows <= most < 2 * rows, case
        assert tiles in ((2, 4) if gated else (1, 2, 4)), case
        assert tiles < 4 or (most > 8 and sets >= 2 * 0.875 * machine[0] - 2), case
        assert tiles == 1 or gated or sets >= 0.875 * machine[0] - 1, case
        assert slots > tiles, case
        resident = 2 if 8 * (tiles + 1) * unit + 1024 <= min(machine[1] // 2, 99 << 10) else 1
        assert blocks == (resident * machine[0] if stays else sets), case
        assert not stays or sets >= 1.5 * blocks, case
        assert stays or tiles == 4 or sets < 1.5 * resident * machine[0] or no_room(most, tiles, unit, machine[1]), case
        assert config.shared + 1024 <= min(machine[1], 100 << 10), case
        assert resident * (config.shared + 1024) <= machine[1], case


def no_room(rows: int, tiles: int, unit: int, memory: int) -> bool:
    """Whether two blocks of gemm_packed fit a multiprocessor, but not with memory of their own for sums."""
    least = 8 * ((tiles + 1) * unit + 4 * rows * (16 * tiles + 4)) + 1024
    return memory // 2 < least


def test_up_to_eight_rows_are_not_padded_to_sixteen() -> None:
    shapes = [launch_configs.gemm_small(rows, 4096, 4096, *H100)[0].defines["ROWS"] for rows in (1, 8, 9, 16, 17, 64)]
    assert shapes == [8, 8, 16, 16, 32, 64]
    assert launch_configs.gemv(GEMV_ROWS, 4096, 4096, 132)[0].defines["ROWS"] == GEMV_ROWS
