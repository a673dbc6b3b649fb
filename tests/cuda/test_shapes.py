"""The launches of the larger kernels: everything is covered, and fits into every GPU."""

from __future__ import annotations

import itertools

import pytest

from polarlm.engine import codecs, records
from polarlm.engine.backends.cuda import launch_configs, packed, wide
from polarlm.engine.backends.cuda.launch_configs import GEMV_ROWS, SHARED_BYTES
from polarlm.engine.weight_formats import available, get
from tests.cuda.formats import FORMAT_PAIRS

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
                columns = 32 // config.defines["SPLIT"]
                assert config.defines["ROWS"] >= rows
                assert (blocks - 1) * columns < out <= blocks * columns
            parts = wide.parts((out,), width, processors)
            blocks = parts * -(-out // (32 * wide.warps_for((out,), parts, processors)[0]))
            assert parts == 1 or (512 * parts <= width + 255 and blocks <= 2 * processors)


@pytest.mark.parametrize("rows", [3, 9, 40, 64, 65, 300])
def test_blocks_of_wide_products_have_every_row_and_fit_their_multiprocessors(rows: int) -> None:
    """One that is alone leaves no room for a second one, if the multiprocessor has enough memory for its stages."""
    most, groups = wide.row_groups(rows)
    assert rows <= most * groups < rows + 16 * groups
    formats, warps = [get(name) for name in ("bf16", *(name for (name,) in PACKED[::2]))], ((8, 1), (4, 1), (2, 2))
    for format, (_, memory), (out, deep) in itertools.product(formats, MACHINES, warps):
        alone, tile = wide.gemm_wide(most, (format,), (out, deep), memory)
        for config in (alone, wide.gemm_wide_experts(most, format, memory)[0]):
            assert config.defines["STAGES"] >= 3, format.name
            assert config.shared + 1024 <= memory, format.name
        assert tile == 32 * out or memory == SMALL[1]
        assert alone.defines["WARPS_K"] == deep
        assert 2 * (alone.shared + 1024) > memory or memory == SMALL[1], format.name


# Multiprocessors, and bytes of shared memory of one ("Technical Specifications per Compute Capability" in the CUDA
# programming guide).
MACHINES = H100, A100, RTX_4090, SMALL = (132, 228 << 10), (108, 164 << 10), (128, 100 << 10), (24, 100 << 10)
PACKED = [(name,) for name in available() if packed.is_packed(get(name))]


@pytest.mark.parametrize("formats", [*PACKED[::3], *FORMAT_PAIRS[::7]], ids="/".join)
def test_packed_products_have_every_output_and_fit_their_multiprocessors(formats: tuple[str, ...]) -> None:
    """Blocks that stay are as many as are resident; each has room for the next weights while it multiplies."""
    outs = [(out,) for out in (32, 4096, 128256)]
    if len(formats) == 2:
        outs = [*itertools.product((32, 5120, 28672), (16, 1024, 8192))]
    for (processors, memory), rows, out, gated in itertools.product(MACHINES, (1, 2), outs, (False, True)):
        case = processors, rows, out, gated
        weights = tuple(packed.rows_of(get(name), size) for name, size in zip(formats, out, strict=True))
        config, blocks, border = packed.gemv_packed(rows, processors, memory, weights, gated)
        defines = config.defines
        tiles, slots = ([defines[f"{of}{name}"] for of in ("", "SECOND_")[: len(out)]] for name in ("TILES", "SLOTS"))
        sets = [-(-size // (16 * of)) for size, of in zip(out, tiles, strict=True)]
        assert rows <= defines["ROWS"] < 2 * rows, case
        assert min(tiles) >= 2 or not gated, case
        assert all(count > of for count, of in zip(slots, tiles, strict=True)), case
        assert config.shared + 256 + 1024 <= min(memory, 100 << 10), case
        if len(out) == 2:
            assert 0 < border < blocks, case
            assert border <= sets[0], case
            assert blocks - border <= sets[1], case
        assert blocks == min(sum(sets), defines["RESIDENT"] * processors), case
        assert defines["RESIDENT"] * (config.shared + 256 + 1024) <= memory, case


@pytest.mark.parametrize("experts", [8, 32, 128, 512])
def test_groups_of_experts_have_few_empty_rows_and_few_groups(experts: int) -> None:
    """Products of all rows of a group are computed: of fewer than four times the pairs, where an expert has many."""
    for each in range(5, 200, 3):
        rows, groups = wide.expert_groups(each * experts, experts)
        assert -(-each // rows) * rows < 4 * each
        assert groups >= experts * -(-each // rows)
        assert rows == 64 or each <= rows // 2
