"""Rows of an image see its later rows, too, on every backend, against a plain softmax in float64."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("llvmlite")

from polarlm.engine import codecs
from polarlm.engine.backends.cuda.ops import CudaOps
from polarlm.engine.backends.kv import AttentionRule
from polarlm.engine.backends.native.ops import NativeOps
from polarlm.engine.backends.numpy import attention as numpy_attention
from polarlm.engine.backends.numpy.ops import NumpyOps
from polarlm.engine.model.decoder import cut
from polarlm.engine.quantization.conditioning import Conditioning
from polarlm.engine.state.image_positions import ImagePositions
from polarlm.engine.state.layer_shapes import LayerShape
from polarlm.engine.state.plan import plan_for_tokens
from polarlm.engine.state.positions import whole_images
from polarlm.engine.state.shapes import CacheShape
from polarlm.engine.state.store import KVStore
from tests.cuda.emulated import open_device
from tests.ops import reference
from tests.pairs import each

N, HEADS, KV_HEADS, D, SCALE = 16, 4, 2, 16, 0.3
KINDS = [(None, True), (24, True), (5, True), (7, False)]  # window of a layer, and whether it sees images as a whole
IMAGES = range(3, 12), range(20, 75), range(75, 80), range(90, 124)
OPS = {
    "numpy": (NumpyOps, 1e-6),
    "compiled": (lambda: NativeOps(1), 1e-3),  # by numbers of 16 bits
    "emulated GPU": (lambda: CudaOps(open_device(checked=False)), 4e-3),  # in half precision
}


def exact(q: np.ndarray, k: np.ndarray, v: np.ndarray, first: int, window: int | None, *, whole: bool) -> np.ndarray:
    """Attention of q (T, H, D), from position `first` on, to k, v (S, K, D) → (T, H, D) float64."""
    rows, keys = np.arange(first, first + len(q))[:, None], np.arange(len(k))
    seen = keys <= rows
    for image in IMAGES if whole else ():
        seen |= ((rows >= image.start) & (rows < image.stop)) & ((keys >= image.start) & (keys < image.stop))
    return reference.attention(q, k, v, seen & (keys > rows - (window or len(k))), AttentionRule(SCALE))


@pytest.mark.parametrize(("backend", "known", "step"), each([*OPS], [0, 10, 41], [32, 1000]))
def test_rows_of_an_image_see_all_of_it(
    rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch, backend: str, known: int, step: int
) -> None:
    """known: tokens that a prefix has, which may end in an image. step: rows of a unit, which cuts no image."""
    make, allowed = OPS[backend]
    monkeypatch.setattr(numpy_attention, "_QUERY_TILE", 2 * 24)
    monkeypatch.setattr(numpy_attention, "_KEY_TILE", 32)
    ops, f16, count = make(), codecs.get("f16"), 130 - known
    layers = tuple(LayerShape(f16, f16, KV_HEADS, D, 0, window, images_whole=whole) for window, whole in KINDS)
    store = KVStore(ops, plan_for_tokens(CacheShape(N, layers), 200, 4), [Conditioning()] * len(KINDS))
    kv = store.new_sequence()
    q, k, v = (rng.standard_normal((130, heads, D)).astype(np.float16).astype(np.float32) for heads in (4, 2, 2))
    for first, rows in ((0, known), (known, count)):
        if not rows:
            continue
        kv.image_positions = ImagePositions(IMAGES) if first == known else None
        span = store.open(kv, rows)
        units = cut(rows, step, whole_images([span]))
        assert max(unit.stop - unit.start for unit in units) <= max(step, len(IMAGES[1]))
        for layer, (window, whole) in enumerate(KINDS):
            store.begin_layer(layer, span)
            for unit in units:
                table, at = (
                    store.spans([span], unit)[store.group_of(layer)],
                    slice(first + unit.start, first + unit.stop),
                )
                ops.append_kv(store.cache(layer), table, ops.to_device(k[at]), ops.to_device(v[at]))
                rule = AttentionRule(SCALE, window)
                out = ops.to_host(ops.attention(ops.to_device(q[at]), store.cache(layer), table, rule))
                if first == known:
                    wanted = exact(q[at], k, v, at.start, window, whole=whole)
                    assert np.abs(out - wanted).max() <= allowed * np.abs(wanted).max()
            store.seal(layer, span)
        store.commit(span)
