"""Tiles of pairs of a radius and an angle: exact packing, and the int8 arithmetic against float64."""

from __future__ import annotations

import numpy as np

from polarlm.engine import codecs
from polarlm.engine.backends.native import codecs as tiles
from polarlm.engine.jit.lang import Level
from tests.backends.native.codecs import attend
from tests.codecs.data import streams
from tests.jit.levels import SOME
from tests.pairs import each, in_turn

NAMES = ("polarpair-m4n4", "polarpair-m4n2", "polarpair-m4n4+g16", "polarpair-m4n2+g32")


@in_turn("level name", [*each(SOME, NAMES[::2]), *each(SOME, NAMES[1::2])])
def test_scores(name: str, level: Level) -> None:
    """Exact integers, and within half a step of the table and half a step of the query of the decoded keys. Every level
    has tables of both sizes."""
    d, n, heads = attend.sizes(NAMES.index(name), level)
    n = max(n, 32)
    codec = codecs.get(name)
    fields, queries, got = attend.scored(codec, level, n, d, heads)
    key_tiles = tiles.keys(codec, n, d)

    scale, limit = key_tiles._table.scale, np.float32(127)  # type: ignore[attr-defined]
    spans = fields["radius_step"].shape[-2]
    steps = np.repeat(fields["radius_step"].astype(np.float32), 2, axis=-1)  # (blocks, spans, D)
    products = queries[:, None, None] * steps  # (H, blocks, spans, D)
    top = np.abs(products).max(-1, keepdims=True)
    rounded, step = np.rint(products * (limit / top)).astype(np.float64), top.astype(np.float64) / limit
    bytes_ = key_tiles._table.bytes_[streams(codec, fields)["codes"]].reshape(3, spans, -1, d)  # type: ignore[attr-defined]
    signed = bytes_.astype(np.float64)
    model = np.einsum("hbsd,bstd->bhst", rounded * step, signed).reshape(3, heads, n) * scale
    size = np.einsum("hbsd,bstd->bhst", np.abs(rounded) * step, np.abs(signed)).reshape(3, heads, n) * scale
    assert (np.abs(got - model) <= 1e-6 * size + 1e-12).all()

    exact = np.einsum("hd,bnd->bhn", queries, codec.decode(fields).astype(np.float64))
    of_table = np.abs(products).sum(-1)[..., None] * scale / 2
    points = (np.abs(signed) + 0.5).sum(-1) * scale  # (blocks, spans, tokens)
    of_query = points * step / 2
    bound = (of_table + of_query).swapaxes(0, 1).reshape(3, heads, n)
    assert (np.abs(got - exact) <= 1.001 * bound + 1e-5 * size).all()
