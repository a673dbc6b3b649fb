"""Rows of files become tiles; `test_product` reads every bit of them back."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("llvmlite")

from polarlm.engine.backends.native.kernels.linear import packing
from polarlm.engine.backends.native.product_ops import loading
from polarlm.engine.backends.native.product_ops.linear import LinearOps
from polarlm.engine.jit.compile.target import best
from polarlm.engine.weight_formats import WeightFormat, get
from tests import weights
from tests.backends.native.launching import launcher


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
