"""Tiles of `turbo`: codes of values and a norm for each token, see `_tables`."""

from __future__ import annotations

from polarlm.engine.backends.native.codecs._code_table import CodeTable
from polarlm.engine.backends.native.codecs._tables import TableKeys, TableValues
from polarlm.engine.codecs.turbo import Turbo, levels_of


def keys(codec: Turbo, block_size: int, head_dim: int) -> TableKeys | None:
    return (
        TableKeys(f"turbo_{codec.bits}", codec, _table(codec), block_size, head_dim) if block_size % 16 == 0 else None
    )


def values(codec: Turbo, block_size: int, head_dim: int) -> TableValues | None:
    name = f"turbo_{codec.bits}"
    return TableValues(name, codec, _table(codec), block_size, head_dim) if block_size % 16 == 0 else None


def _table(codec: Turbo) -> CodeTable:
    return CodeTable(codec.bits, levels_of(codec.bits)[:, None])
