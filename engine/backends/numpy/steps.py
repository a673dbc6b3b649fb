"""Steps of several sequences in NumPy: thin products, and attention of all sequences at once.

A step has one row, or a few, for each sequence. Attending one sequence after another costs more in calls than in
arithmetic if they are short. BLAS repacks the matrix before a product, which pays for many rows but not for a few.

Letters: T rows of B sequences, at most R of one; M blocks that they attend to, in full precision or quantized.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from polarlm.engine.backends.kv import SpanView
from polarlm.engine.backends.numpy.attention import LayerCache, read_blocks

# OpenBLAS's kernels for AVX-512 multiply without repacking the matrix, up to this many multiplications in a product.
_IN_PLACE = 1_000_000
_IN_PLACE_KERNELS = {"SkylakeX", "Cooperlake", "SapphireRapids"}
_ALIGNED = 16  # rows of the matrix that a kernel multiplies together
_MOST_ROWS = 32

# Blocks of all sequences that are decoded at once; a sequence that has more attends alone.
_MOST_BLOCKS = 64


def multiplies_in_place(architecture: str) -> bool:
    """Whether `thin_product` is faster with the BLAS kernels of that name."""
    return architecture in _IN_PLACE_KERNELS


def is_thin(rows: int) -> bool:
    """Whether a product of `rows` rows is one for `thin_product`."""
    return 1 < rows <= _MOST_ROWS


def thin_product(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """x (T, in) @ weight (out, in).T → (T, out), in pieces that BLAS does not repack; on one thread."""
    columns = np.ascontiguousarray(x.T)
    size = max(_ALIGNED, _IN_PLACE // x.size // _ALIGNED * _ALIGNED)
    y = np.empty((len(x), len(weight)), np.float32)
    for first in range(0, len(weight), size):
        y[:, first : first + size] = (weight[first : first + size] @ columns).T
    return y


class StepSpans(tuple[SpanView, ...]):
    """The spans of a step, cut into parts whose sequences attend together. All layers of a group share them."""

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
        self._blocks: dict[int, StepBlocks] = {}

    def blocks(self, part: int, block_size: int) -> StepBlocks:
        """The blocks of the part with this number."""
        if part not in self._blocks:
            self._blocks[part] = StepBlocks(self.parts[part], block_size)
        return self._blocks[part]


def is_step(spans: Sequence[SpanView]) -> bool:
    """Whether `spans` are several sequences whose current blocks all lie in full-precision slots."""
    return len(spans) > 1 and all(span.current.buffer is None for span in spans)


class StepBlocks:
    """The M blocks that B sequences attend to: first those in full-precision `slots`, then the quantized `ids`.

    rows (B, R): the rows of each sequence, relative to the first of all; its last row fills up the others.
    owner (M,): the sequence of a block. positions (M, N): of the block's tokens. row_positions (M, R): of the owner's
    rows. order (M,): the blocks sorted by owner. first (B,): where each sequence's blocks begin in that order.
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
        self.row_positions = (np.array([span.position for span in spans])[:, None] + in_sequence)[self.owner]
        self.order = np.argsort(self.owner, kind="stable")
        self.first = np.searchsorted(self.owner[self.order], sequences)

    def hidden(self, window: int | None) -> np.ndarray:
        """(M, R, N): true where a row of the owner does not see a token: after the row, or before its window."""
        positions, rows = self.positions[:, None], self.row_positions[..., None]
        hidden = positions > rows
        return hidden if window is None else hidden | (positions <= rows - window)


def attend_together(q: np.ndarray, cache: LayerCache, blocks: StepBlocks, window: int | None) -> np.ndarray:
    """Attention of scaled q (T, K, G, D) over all of `blocks` at once → (T, K, G, D)."""
    (_, kv_heads, group, dim), full = q.shape, len(blocks.slots)
    most = blocks.rows.shape[1]
    # (K, M, R·G, D): the queries of a sequence's rows for each of its blocks.
    queries = (
        q[blocks.rows[blocks.owner]].transpose(2, 0, 1, 3, 4).reshape(kv_heads, len(blocks.owner), most * group, dim)
    )
    hidden = blocks.hidden(window)
    k, v = (whole[blocks.slots].swapaxes(0, 1).astype(np.float32) for whole in (cache.full_k, cache.full_v))
    # A slot may hold anything after its last token, and 0 · NaN is not 0.
    v[np.broadcast_to(hidden[:full].all(axis=1), v.shape[:3])] = 0
    scores, values = [queries[:, :full] @ k.swapaxes(2, 3)], [v]
    if len(blocks.ids):
        quantized_k, quantized_v, mean = read_blocks(cache, blocks.ids)
        by_block = (len(quantized_k), len(blocks.ids), -1, dim)
        quantized_scores = queries[:, full:] @ quantized_k.reshape(by_block).swapaxes(2, 3)
        if mean is not None:
            quantized_scores += queries[:, full:] @ mean[..., None]
        scores.append(quantized_scores)
        values.append(quantized_v.reshape(by_block))
    weights = np.concatenate(scores, axis=1)  # (K, M, R·G, N)
    np.copyto(weights, -np.inf, where=hidden if most == 1 else hidden.repeat(group, axis=1))
    # Every row sees itself, so that no maximum is −inf.
    weights -= _over_blocks(np.maximum, weights.max(axis=-1, keepdims=True), blocks)[:, blocks.owner]
    np.exp(weights, out=weights)
    total = _over_blocks(np.add, weights.sum(axis=-1, keepdims=True), blocks)
    edges = [0, full, len(blocks.owner)]
    mixed = [weights[:, a:b] @ x for a, b, x in zip(edges, edges[1:], values, strict=False)]
    out = _over_blocks(np.add, np.concatenate(mixed, axis=1), blocks) / total  # (K, B, R·G, D)
    out = out.reshape(kv_heads, -1, most, group, dim).transpose(1, 2, 0, 3, 4)
    # Rows that fill up a sequence are its last row again and get the same result.
    y = np.empty(q.shape, np.float32)
    y[blocks.rows] = out
    return y


def _over_blocks(reduce: np.ufunc, x: np.ndarray, blocks: StepBlocks) -> np.ndarray:
    """x (K, M, …), reduced over the blocks of each sequence: (K, B, …)."""
    return reduce.reduceat(x[:, blocks.order], blocks.first, axis=1)
