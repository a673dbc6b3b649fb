"""Matrices in tiles: their bytes, and how they are packed. `tests/ops/test_linear.py` has products with them."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from polarlm.engine.backends.native import tiles
from polarlm.engine.backends.native.kernels.linear import packing
from polarlm.engine.backends.native.product_ops import loading
from polarlm.engine.backends.native.product_ops.products import LinearOps
from polarlm.engine.jit.compile.target import best
from polarlm.engine.weight_formats import WeightFormat, available, get
from tests import weights
from tests.backends.native.launching import launcher
from tests.pairs import in_turn


@in_turn("name", available())
def test_tiles_take_the_bytes_that_are_planned(name: str) -> None:
    file = weights.random_matrix(np.random.default_rng(3), name, 36, 256)
    (matrix,) = LinearOps(launcher(best())).load([file])
    format, packed = file.format, matrix.data.memory
    assert packed.nbytes == tiles.tile_bytes(format, 36, 256)
    if format.unpack is not None:  # the file's bytes; an exponent becomes a scale, a sign a bit of four indices
        more = {"mxfp4": 1, "iq1_s": 4, "iq1_m": 2}.get(name, 0)
        assert tiles.block_bytes(format) == tiles.ROWS * (format.nbytes + more)


def test_a_format_whose_fields_are_no_moved_bits_is_refused() -> None:
    """A scale that is the sum of two stored bytes, say."""

    def unpack(raw: np.ndarray) -> SimpleNamespace:
        total = raw[:, :1] + raw[:, 1:2]
        return SimpleNamespace(codes=total, scale=raw.view("<f2"), sub_scale=None, offset=None, sub_offset=None)

    format = WeightFormat("sum", 32, 2, lambda raw, out: None, unpack=unpack, bits=8, group=32)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="sum: a bit of codes depends on several stored bits"):
        packing.origins.__wrapped__(format)


def test_matrices_are_packed_together_in_several_launches_by_all_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    rng, size = np.random.default_rng(1), get("q4_k").size(1024)
    matrices = [weights.StoredBytes(rng.integers(0, 256, (n, size), np.uint8), "q4_k") for n in (32, 500)]
    whole = weights.StoredBytes(np.concatenate([matrix.raw for matrix in matrices]), "q4_k")
    (wanted,) = LinearOps(launcher(best())).load([whole])
    monkeypatch.setattr(loading, "_SLAB_BYTES", 1 << 14)
    (packed,) = LinearOps(launcher(best(), threads=2)).load(matrices)
    np.testing.assert_array_equal(packed.data.memory, wanted.data.memory)
