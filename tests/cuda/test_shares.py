"""The shares of decode_attention: equal for any lengths, every unit once, and the same on the device."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polarlm.engine import codecs, records
from polarlm.engine.backends.cuda import launch_configs
from polarlm.engine.backends.cuda.device.kernel_source import folder, with_readers
from polarlm.engine.backends.cuda.kv.cache import HEADER, SpanHeader
from tests.cuda.programs import Program
from tests.cuda.shares import Plan, Shares
from tests.pairs import pairs

N, GROUP = 64, 4


def span(length: int, rows: int, dropped: int = 0) -> SpanHeader:
    """Of a sequence of `length` tokens, of which the last `rows` are new. dropped: blocks lost to a window."""
    position = length - rows
    now = position // N
    lost = max(0, min(dropped, now - 1))
    return SpanHeader(0, rows, position, 0 if now else -1, 1 + lost, max(0, now - 1 - lost), 1, now, 2)


def plan_of(lengths: list[int], ctas: int, *, rows: int = 1, kv_heads: int = 8, window: int = 0) -> Plan:
    counts = [min(rows, length) for length in lengths]
    spans = [span(length, count) for length, count in zip(lengths, counts, strict=True)]
    _, columns = launch_configs.decode_cells(GROUP, max(counts))
    return Plan(spans, kv_heads, GROUP, columns, N, ctas, window)


lengths = st.lists(st.integers(1, 131072), min_size=1, max_size=64)


@pytest.mark.slow
@given(lengths, st.integers(1, 160), st.integers(1, 16), st.sampled_from([0, 512, 4096]), st.sampled_from([1, 2, 8]))
@settings(max_examples=200, deadline=None)
def test_no_cta_has_more_than_one_unit_above_the_mean(
    lengths: list[int], ctas: int, rows: int, window: int, kv_heads: int
) -> None:
    """So whatever the lengths, the busiest CTA has at most 1.15 times the mean from seven units of each on."""
    plan = plan_of(lengths, ctas, rows=rows, window=window, kv_heads=kv_heads)
    most, mean = max(plan.ctas.sizes()), plan.total / ctas
    assert most < mean + 1
    assert mean < 7 or most <= 1.15 * mean
    warps = [size for cta in range(ctas) for size in plan.warps(cta, 12).sizes()]
    assert max(warps) < plan.total / (12 * ctas) + 1
    assert sum(warps) == plan.total


@pytest.mark.parametrize(
    "lengths",
    [[131072] + 15 * [2048], [131072] + 7 * [2048], [32768] + 31 * [1024], [131072] + 63 * [4096], [32768]],
    ids=["128K + 15 × 2K", "128K + 7 × 2K", "32K + 31 × 1K", "128K + 63 × 4K", "32K"],
)
def test_a_long_sequence_among_short_ones_is_shared_by_all(lengths: list[int]) -> None:
    """For 8 KV heads and 132 multiprocessors. As many CTAs for every sequence would give the first one's CTAs up to 13
    times the mean."""
    plan = plan_of(lengths, 132)
    assert max(plan.ctas.sizes()) <= 1.15 * plan.total / 132


@given(st.integers(0, 3000), st.integers(0, 5000), st.integers(1, 160))
@settings(max_examples=100, deadline=None)
def test_shares_are_adjacent_and_cover_everything(first: int, units: int, count: int) -> None:
    shares = Shares(first, units, count)
    assert shares.begin(0) == first
    assert shares.end(count - 1) == first + units
    assert max(shares.sizes()) - min(shares.sizes()) <= 1


# For each CTA and warp: its share's first unit and end. Of every unit: the CTA and the warp that have it by `taker`;
# sequence, number, start and end of its cell; then, of the turn that has it: sequence, number, and the place in the
# cell.
PROBE = """
extern "C" __global__ void __launch_bounds__(WARPS * 32)
probe(int *shares, int *units, const int *spans, int span_stride, int sequences, int kv_heads, int window) {
    DYNAMIC_SHARED(int, memory);
    const Plan plan(memory + 40, spans, span_stride, sequences, kv_heads, window);
    plan.fill(memory, 40);
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
            const int found[9] = {ctas.taker(unit), warps.taker(unit), cell.sequence, cell.number,    cell.start,
                                  cell.end,         turn.sequence,     turn.number,   turn.first + i};
            if (lane < 9) units[9 * unit + lane] = found[lane];
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
    return Program(with_readers(joined + PROBE, *layouts, GROUP=4, WARPS=3, STEP_ROWS=rows))


@pytest.mark.parametrize(
    ("codec", "rows", "window", "ctas"), pairs(["f16", "ring4"], [1, 16], [0, 100, 700], [1, 5, 40])
)
def test_the_device_forms_the_same_shares(
    rng: np.random.Generator, codec: str, rows: int, window: int, ctas: int
) -> None:
    """Of more sequences than a warp has lanes; two of them pad the batch."""
    counts = rng.integers(1, rows + 1, 40)
    headers = [
        span(int(n), int(r), dropped=int(n) % 3) for n, r in zip(rng.integers(20, 1500, 40), counts, strict=True)
    ]
    headers[0] = headers[33] = SpanHeader(0, 0, 0, 0, 0, 0, 0, 0, 0)
    spans = np.zeros((40, HEADER + 3), np.int32)
    spans[:, :HEADER] = headers
    _, columns = launch_configs.decode_cells(4, rows)
    plan = Plan(headers, 2, 4, columns, N, ctas, window, all_full=codec == "f16")
    shares, units = np.full((ctas, 3, 2), -1, np.int32), np.full((plan.total, 9), -1, np.int32)
    numbers = [np.int32(x) for x in (spans.shape[1], 40, 2, window)]
    words = 40 + 2 * 40 + 7 * 3 + 2  # scratch, and the plan of 40 sequences and 3 warps
    probe(codec, rows).launch("probe", (ctas,), (96,), shares, units, spans, *numbers, shared=4 * words)
    for cta in range(ctas):
        warps = plan.warps(cta, 3)
        assert shares[cta].tolist() == [[warps.begin(w), warps.end(w)] for w in range(3)]
        for w in range(3):
            assert (units[warps.begin(w) : warps.end(w), :2] == [cta, w]).all()
    ends = np.cumsum(plan.sizes)
    cell = np.searchsorted(ends, np.arange(plan.total), side="right")
    np.testing.assert_array_equal(units[:, 4], ends[cell] - plan.sizes[cell])
    np.testing.assert_array_equal(units[:, 5], ends[cell])
    np.testing.assert_array_equal(units[:, 6:8], units[:, 2:4])
    np.testing.assert_array_equal(units[:, 8], np.arange(plan.total) - units[:, 4])
    # The sums' places: cells and CTAs both grow along the row, so that no two pairs share one.
    chunks = -(-4 * rows // columns)
    pairs = np.unique(np.stack([units[:, 2] * 2 * chunks + units[:, 3], units[:, 0]], 1), axis=0)
    assert len(np.unique(pairs.sum(1))) == len(pairs)
