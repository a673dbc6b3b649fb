"""Tiles of `ring`: codes of pairs and a norm for each token, see `_tables`."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from polarlm.engine.backends.native.codecs._code_table import CodeTable
from polarlm.engine.backends.native.codecs._tables import TableKeys, TableStore, TableValues
from polarlm.engine.codecs.ring import Ring, points_of


def keys(codec: Ring, block_size: int, head_dim: int) -> TableKeys | None:
    return TableKeys(_store(codec), block_size, head_dim) if block_size % 16 == 0 else None


def values(codec: Ring, block_size: int, head_dim: int) -> TableValues | None:
    return TableValues(_store(codec), block_size, head_dim) if block_size % 16 == 0 else None


def _store(codec: Ring) -> TableStore:
    packing, norms = codec.store.packing, codec.store.norms

    def split(fields: Mapping[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
        return packing.codes(fields), fields["norm"]

    def join(codes: np.ndarray, norms: np.ndarray) -> dict[str, np.ndarray]:
        return {"norm": norms, **packing.pack(codes)}

    name = f"ring_{packing.bits}_norm_{8 * norms.dtype.itemsize}"
    table = CodeTable(packing.bits, points_of(packing.bits))
    return TableStore(name, table, norms.dtype, float(norms.largest), split, join)
