"""Tiles of `ring`: codes of pairs and a norm for each token, see `_tables`."""

from __future__ import annotations

from polarlm.engine.backends.native.codecs._code_table import CodeTable
from polarlm.engine.backends.native.codecs._tables import TableKeys, TableValues
from polarlm.engine.codecs.ring import Ring, points_of


def keys(codec: Ring, block_size: int, head_dim: int) -> TableKeys | None:
    return TableKeys(_name(codec), codec, _table(codec), block_size, head_dim) if block_size % 16 == 0 else None


def values(codec: Ring, block_size: int, head_dim: int) -> TableValues | None:
    return TableValues(_name(codec), codec, _table(codec), block_size, head_dim) if block_size % 16 == 0 else None


def _name(codec: Ring) -> str:
    return f"ring_{codec.store.bits}_norm_{8 * codec.store.norms.dtype.itemsize}"


def _table(codec: Ring) -> CodeTable:
    return CodeTable(codec.store.bits, points_of(codec.store.bits))
