"""What makes a step of many sequences cheap in NumPy: thin products, and attention of all of them at once.

A step has a row for each sequence, or a few. Taken one by one, sequences of moderate length cost more in calls than in
arithmetic; and BLAS, whose products of many rows first copy the matrix into an order of its own, does so for a few
rows as well.

Letters: T rows of B sequences, R of them at most of one; M blocks that they see, in full precision or coded.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from engine.backends.numpy.attention import LayerCache, read_blocks
from engine.backends.ops import SpanView

# OpenBLAS's kernels for AVX-512 multiply matrices as they lie, as long as a product takes so few multiplications.
_IN_PLACE = 1_000_000
_IN_PLACE_KERNELS = {"SkylakeX", "Cooperlake", "SapphireRapids"}
_ALIGNED = 16  # rows of the matrix that a kernel takes together
_MOST_ROWS = 32

# Blocks of all sequences that are read at once; a sequence that has more goes by itself.
_MOST_BLOCKS = 64


def multiplies_in_place(architecture: str) -> bool:
    """Whether the BLAS kernels of that name gain by `thin_product`."""
    return architecture in _IN_PLACE_KERNELS


def is_thin(rows: int) -> bool:
    """Whether a product of so many rows is one for `thin_product`."""
    return 1 < rows <= _MOST_ROWS


def thin_product(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """x (T, in) @ weight (out, in).T in pieces that BLAS does not copy first, on one thread."""
    columns = np.ascontiguousarray(x.T)
    size = max(_ALIGNED, _IN_PLACE // x.size // _ALIGNED * _ALIGNED)
    y = np.empty((len(x), len(weight)), np.float32)
    for first in range(0, len(weight), size):
        y[:, first : first + size] = (weight[first : first + size] @ columns).T
    return y


class StepSpans(tuple[SpanView, ...]):
    """The spans of a step, cut into parts whose sequences attend together; the same ones in all layers of a group."""

    def __init__(self, spans: Sequence[SpanView]) -> None:
        self.parts: list[list[SpanView]] = []
        room = 0
        for span in spans:
            blocks = len(span.table) + len(span.following) + 2
            if blocks > room:
                self.parts.append([])
                room = _MOST_BLOCKS
            self.parts[-1].append(span)
            room -= blocks
        self._layouts: dict[int, StepBlocks] = {}

    def layout(self, part: int, block_size: int) -> StepBlocks:
        if part not in self._layouts:
            self._layouts[part] = StepBlocks(self.parts[part], block_size)
        return self._layouts[part]


def is_step(spans: Sequence[SpanView]) -> bool:
    """Whether these are rows of several sequences, whose newest tokens all lie in full-precision slots."""
    return len(spans) > 1 and all(span.current.buffer is None for span in spans)


class StepBlocks:
    """The M blocks that B sequences see: first those in exact `slots`, then the quantized ones, `ids`.

    rows (B, R): the rows of each sequence, counted from the first of all; where it has fewer, its last one again.
    owner (M,): the sequence that sees a block. positions (M, N): of its tokens. seen (M, R): those of the owner's rows.
    order (M,): the blocks by owner. first (B,): where each sequence's blocks begin in that order.
    """

    def __init__(self, spans: Sequence[SpanView], block_size: int) -> None:
        sequences = range(len(spans))
        sinks = [i for i in sequences if spans[i].sink is not None]
        following = [(i, number) for i in sequences for number in range(len(spans[i].following))]
        tables = [span.table for span in spans]
        starts = [span.current_start for span in spans] + [0] * len(sinks)
        starts += [spans[i].current_start + block_size * (1 + number) for i, number in following]
        starts += [span.table_start + block_size * i for span in spans for i in range(len(span.table))]
        self.owner = np.array(
            [*sequences, *sinks, *(i for i, _ in following), *(i for i in sequences for _ in tables[i])]
        )
        slots = [span.current.block for span in spans], [spans[i].sink for i in sinks]
        self.slots = np.array([*slots[0], *slots[1], *(spans[i].following[number] for i, number in following)])
        self.ids = np.array([i for table in tables for i in table], np.intp)
        self.positions = np.array(starts)[:, None] + np.arange(block_size)
        counts = np.array([span.rows.stop - span.rows.start for span in spans])
        in_sequence = np.minimum(np.arange(counts.max()), counts[:, None] - 1)  # (B, R)
        self.rows = np.array([span.rows.start - spans[0].rows.start for span in spans])[:, None] + in_sequence
        self.seen = (np.array([span.position for span in spans])[:, None] + in_sequence)[self.owner]
        self.order = np.argsort(self.owner, kind="stable")
        self.first = np.searchsorted(self.owner[self.order], sequences)

    def hidden(self, window: int | None) -> np.ndarray:
        """(M, R, N): tokens of a block that a row of its owner does not see, behind the row or before its window."""
        positions, seen = self.positions[:, None], self.seen[..., None]
        hidden = positions > seen
        return hidden if window is None else hidden | (positions <= seen - window)


def attend_together(q: np.ndarray, cache: LayerCache, layout: StepBlocks, window: int | None) -> np.ndarray:
    """Attention of q (T, K, G, D), scaled, over all blocks of `layout` at once: (T, K, G, D)."""
    (_, kv_heads, group, dim), full = q.shape, len(layout.slots)
    most = layout.rows.shape[1]
    # (K, M, R·G, D): the queries of a sequence's rows for each of its blocks.
    asked = (
        q[layout.rows[layout.owner]].transpose(2, 0, 1, 3, 4).reshape(kv_heads, len(layout.owner), most * group, dim)
    )
    hidden = layout.hidden(window)
    k, v = (whole[layout.slots].swapaxes(0, 1) for whole in (cache.full_k, cache.full_v))
    # Behind its last token a slot may hold anything, and not even nothing times NaN is nothing.
    v[np.broadcast_to(hidden[:full].all(axis=1), v.shape[:3])] = 0
    scores, values = [asked[:, :full] @ k.swapaxes(2, 3)], [v]
    if len(layout.ids):
        quantized_k, quantized_v, mean = read_blocks(cache, layout.ids)
        by_block = (len(quantized_k), len(layout.ids), -1, dim)
        of_coded = asked[:, full:] @ quantized_k.reshape(by_block).swapaxes(2, 3)
        if mean is not None:
            of_coded += asked[:, full:] @ mean[..., None]
        scores.append(of_coded)
        values.append(quantized_v.reshape(by_block))
    weights = np.concatenate(scores, axis=1)  # (K, M, R·G, N)
    np.copyto(weights, -np.inf, where=hidden if most == 1 else hidden.repeat(group, axis=1))
    # Every row sees itself, so that no maximum is −inf.
    weights -= _over_blocks(np.maximum, weights.max(axis=-1, keepdims=True), layout)[:, layout.owner]
    np.exp(weights, out=weights)
    total = _over_blocks(np.add, weights.sum(axis=-1, keepdims=True), layout)
    edges = [0, full, len(layout.owner)]
    mixed = [weights[:, a:b] @ of for a, b, of in zip(edges, edges[1:], values, strict=False)]
    out = _over_blocks(np.add, np.concatenate(mixed, axis=1), layout) / total  # (K, B, R·G, D)
    out = out.reshape(kv_heads, -1, most, group, dim).transpose(1, 2, 0, 3, 4)
    # What stands where a sequence has no row is that of its last one once more.
    y = np.empty(q.shape, np.float32)
    y[layout.rows] = out
    return y


def _over_blocks(reduce: np.ufunc, x: np.ndarray, layout: StepBlocks) -> np.ndarray:
    """x (K, M, …), reduced over the blocks of each sequence: (K, B, …)."""
    return reduce.reduceat(x[:, layout.order], layout.first, axis=1)
