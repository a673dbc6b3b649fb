"""Tiles of `turbo`: codes of values and a norm for each token, see `_tables`."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from polarlm.engine.backends.native.codecs._code_table import CodeTable
from polarlm.engine.backends.native.codecs._tables import TableKeys, TableStore, TableValues
from polarlm.engine.codecs._bits import unpack_row_of_sixes
from polarlm.engine.codecs.turbo import Turbo, levels_of


def keys(codec: Turbo, block_size: int, head_dim: int) -> TableKeys | None:
    return TableKeys(_store(codec), block_size, head_dim) if block_size % 16 == 0 else None


def values(codec: Turbo, block_size: int, head_dim: int) -> TableValues | None:
    return TableValues(_store(codec), block_size, head_dim) if block_size % 16 == 0 else None


def _store(codec: Turbo) -> TableStore:
    bits, rounding = codec.bits, codec.rounding
    shifts = np.arange(0, 6 if bits == 3 else 8, bits).astype(np.uint8)

    def split(fields: Mapping[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
        words = unpack_row_of_sixes(fields["codes"]) if bits == 3 else fields["codes"]
        codes = words[..., None] >> shifts & np.uint8((1 << bits) - 1)
        return codes.reshape(*words.shape[:-1], -1), fields["norm"]

    def join(codes: np.ndarray, norms: np.ndarray) -> dict[str, np.ndarray]:
        return {**rounding.assemble(codes, np.zeros(norms.shape, np.float32)), "norm": norms}

    table, norms = CodeTable(bits, levels_of(bits)[:, None]), rounding.norms
    return TableStore(f"turbo_{bits}", table, norms.dtype, float(norms.largest), split, join)
