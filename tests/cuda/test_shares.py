"""The shares of decode_attention, as the device forms them: equal for any lengths, and every unit once."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest

from polarlm.engine import codecs, records
from polarlm.engine.backends.cuda import launch_configs
from polarlm.engine.backends.cuda.device.kernel_source import folder, source_from_text
from polarlm.engine.backends.cuda.kv.cache import HEADER, SpanHeader
from tests.cuda.programs import Program

N, WARPS, KV_HEADS, GROUP = 64, 3, 2, 4


def span(length: int, rows: int, dropped: int = 0, kept: int = 0) -> SpanHeader:
    """The span of a sequence of `length` tokens, the last `rows` of them new. dropped: blocks lost to a window. kept:
    newest complete blocks in full precision."""
    position = length - rows
    complete = position // N
    first = max(min(1, complete), complete - kept)
    lost = max(0, min(dropped, first - 1))
    return SpanHeader(0, rows, position, 0 if complete else -1, 1 + lost, max(0, first - 1 - lost), -1, first)


# For each CTA and warp: its share's first unit and end. Of every unit: the CTA and the warp that have it by `taker`;
# sequence, number, start and end of its cell; then, of the turn that has it: sequence, number, and the place in the
# cell.
PROBE = """
extern "C" __global__ void __launch_bounds__(WARPS * 32)
probe(int *shares, int *units, const int *spans, int span_stride, int sequences, int kv_heads, int window) {
    DYNAMIC_SHARED(int, memory);
    const Plan plan(memory + 40, spans, span_stride, sequences, kv_heads, window);
    if (threadIdx.x < 32) plan.fill();
    else plan.expect_spans(memory, 40);
    __syncthreads();
    const bool has_units = plan.begin();
    const Shares ctas = plan.ctas(), warps = plan.warps(ctas);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (lane == 0) {
        shares[2 * (blockIdx.x * WARPS + warp)] = warps.begin(warp);
        shares[2 * (blockIdx.x * WARPS + warp) + 1] = warps.end(warp);
    }
    for (int unit = warps.begin(warp); unit < warps.end(warp);) {
        plan.begin_turn();
        const Turn &turn = plan.turns[warp];
        for (int i = 0; i < turn.units; ++i, ++unit) {
            const Cell cell = plan.cell(unit);
            const int values[9] = {ctas.taker(unit), warps.taker(unit), cell.sequence, cell.number,    cell.start,
                                  cell.end,         turn.sequence,     turn.number,   turn.first + i};
            if (lane < 9) units[9 * unit + lane] = values[lane];
        }
        if (unit != turn.next) return;
    }
    if (!has_units) return;
    plan.begin_turn();
    if (lane == 0 && plan.turns[warp].units != 0) shares[2 * (blockIdx.x * WARPS + warp)] = -2;
}
"""


@cache
def probe(codec: str, rows: int) -> Program:
    layouts = [records.layout(codecs.get(codec), values, N, 16, 0) for values in (False, True)]
    files = (folder() / "attention" / name for name in ("attention.cuh", "shares.cuh"))
    joined = "".join(file.read_text(encoding="utf-8") for file in files)
    return Program(source_from_text(joined + PROBE, *layouts, GROUP=GROUP, WARPS=WARPS, STEP_ROWS=rows))


@pytest.mark.parametrize(
    ("codec", "rows", "window", "ctas"),
    [("f16", 1, 0, 40), ("f16", 16, 700, 5), ("ring4", 1, 100, 1), ("ring4", 16, 0, 40), ("ring4", 16, 700, 5)],
)
def test_shares_are_equal_and_cover_every_unit_once(
    rng: np.random.Generator, codec: str, rows: int, window: int, ctas: int
) -> None:
    """There are more sequences than lanes of a warp; two pad the batch. The busiest CTA has one unit more than the
    least busy one, whatever the lengths."""
    counts = rng.integers(1, rows + 1, 40)
    lengths = rng.integers(20, 1500, 40)
    pairs = zip(lengths.tolist(), counts.tolist(), strict=True)
    headers = [span(length, count, length % 3, count % 5) for length, count in pairs]
    headers[0] = headers[33] = SpanHeader(0, 0, 0, 0, 0, 0, 0, 0)
    spans = np.zeros((40, HEADER + 3), np.int32)
    spans[:, :HEADER] = headers
    most = 2 * KV_HEADS * 16 * 1500  # units, at most
    shares, units = np.full((ctas, WARPS, 2), -1, np.int32), np.full((most, 9), -1, np.int32)
    numbers = [np.int32(x) for x in (spans.shape[1], 40, KV_HEADS, window)]
    words = 40 + 2 * 40 + 7 * WARPS + 2  # scratch, and the plan of 40 sequences and the warps
    probe(codec, rows).launch("probe", (ctas,), (32 * WARPS,), shares, units, spans, *numbers, shared=4 * words)
    borders = shares.reshape(-1, 2)
    total = int(borders[-1, 1])
    assert borders[0, 0] == 0
    np.testing.assert_array_equal(borders[1:, 0], borders[:-1, 1])
    assert np.ptp(shares[:, -1, 1] - shares[:, 0, 0]) <= 1
    assert np.ptp(shares[..., 1] - shares[..., 0], axis=1).max() <= 1
    units = units[:total]
    takers = np.repeat(np.arange(ctas * WARPS), borders[:, 1] - borders[:, 0])
    np.testing.assert_array_equal(units[:, 0] * WARPS + units[:, 1], takers)
    ends = np.unique(units[:, 5])
    cell = np.searchsorted(ends, np.arange(total), side="right")
    np.testing.assert_array_equal(units[:, 4], np.concatenate([[0], ends])[cell])
    np.testing.assert_array_equal(units[:, 6:8], units[:, 2:4])
    np.testing.assert_array_equal(units[:, 8], np.arange(total) - units[:, 4])
    assert set(units[:, 2]) == {*range(40)} - {0, 33}
    # The sums' places: cells and CTAs both grow along the row, so that no two pairs share one.
    chunks = -(-GROUP * rows // launch_configs.decode_cells(GROUP, rows)[1])
    pairs = np.unique(np.stack([units[:, 2] * KV_HEADS * chunks + units[:, 3], units[:, 0]], 1), axis=0)
    assert len(np.unique(pairs.sum(1))) == len(pairs)


@pytest.mark.parametrize("dim", [64, 80, 128])
def test_codes_of_few_bits_leave_a_cta_all_its_warps(dim: int) -> None:
    codec = codecs.get("ring3")
    keys, values = records.layout(codec, False, N, dim, 8), records.layout(codec, True, N, dim)
    assert launch_configs.decode_attention(keys, values, GROUP).threads == 12 * 32
