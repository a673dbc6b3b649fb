"""Statistics of a model's queries and keys, measured once by running it on a built-in text, and kept for the next time.

They depend on the model and the block size alone, so that everything encoded by them can be shared and stored.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from typing import Any, cast

import numpy as np

from engine import checked_file, codecs
from engine.backends.ops import Array, Cache, CacheSpan, Ops, Spans, StoredSpace
from engine.errors import EngineError
from engine.kv.plan import CacheShape, LayerShape, plan_for_tokens
from engine.kv.store import KVStore
from engine.model.forward import Model, ModelWeights
from engine.model.magnitudes import scale, variances
from engine.model.weights import fingerprint
from engine.quantization.conditioning import Conditioning
from engine.quantization.statistics import LayerStatistics, balance, measure, neutral
from engine.sampling.sample import NOT_FINITE
from model_loaders.config import ModelConfig
from model_loaders.errors import LoadError
from model_loaders.tokenizers import Tokenizer
from model_loaders.user_dirs import cache_folder

__all__ = ["LayerStatistics", "balance", "calibrate", "load_or_calibrate"]

TOKENS = 512  # four times as many give the same quality
TEXT_FILE = Path(__file__).with_name("calibration_text.txt")

_FORMAT = 1  # of the kept file, and of what the numbers in it mean


def load_or_calibrate(
    ops: Ops,
    config: ModelConfig,
    weights: ModelWeights,
    tokenizer: Tokenizer,
    block_size: int,
    say: Callable[[str], None],
    progress: Callable[[int], None] | None = None,
) -> list[LayerStatistics]:
    """Statistics of every layer: those kept in the user's cache folder, else measured now and kept if that can be.

    `progress` is told the layers that have been measured since its last call. A model whose context holds less than
    two blocks of the text has neutral statistics, and `say` a sentence about it.
    """
    ids = text_ids(tokenizer, min(TOKENS, config.max_context))
    if len(ids) < 2 * block_size:
        say(
            f"The KV cache is not fitted to this model, and quantized types are less precise: fitting takes two blocks "
            f"of {block_size} tokens, and the calibration text has {len(ids)} here; choose a smaller block size."
        )
        return [neutral(config.kv_heads, config.head_dim, block_size)] * config.layers
    key = _key(ops, config, weights, ids, block_size)
    file = _file(key, say)
    statistics = _read(file, key) if file else None
    if statistics is None:
        say(f"Fitting the KV cache to this model on {len(ids)} tokens of text, once")
        statistics = calibrate(ops, config, weights, ids, block_size, progress)
        if file:
            _write(file, key, statistics)
    return statistics


def _file(key: str, say: Callable[[str], None]) -> Path | None:
    """Where the statistics are kept; None where the user has no cache folder."""
    try:
        return cache_folder() / f"calibration-{key[:32]}.safetensors"
    except LoadError as error:
        say(f"What fitting the KV cache measures is not kept for the next time. {error}")
        return None


def text_ids(tokenizer: Tokenizer, count: int) -> list[int]:
    """The first `count` ids of the built-in text, or all there are; BOS first where the model wants one."""
    start = [] if tokenizer.bos_id is None else [tokenizer.bos_id]
    return (start + tokenizer.tokenize(TEXT_FILE.read_text(encoding="utf-8")))[:count]


def calibrate(
    ops: Ops,
    config: ModelConfig,
    weights: ModelWeights,
    ids: Sequence[int],
    block_size: int,
    progress: Callable[[int], None] | None = None,
) -> list[LayerStatistics]:
    """Run the model over `ids` in full precision and measure every layer's queries and keys, on the host.

    `progress` is told the layers done since its last call. Raises ValueError on fewer ids than two blocks have,
    EngineError ("model_damaged") where queries or keys are not finite.
    """
    watched = _WatchedOps(ops, config, len(ids))
    model = _exact_model(cast(Ops, watched), config, weights, len(ids), block_size)
    span = model.store.open(model.store.new_sequence(), len(ids))
    statistics: list[LayerStatistics] = []
    rows = 0
    for unit in model.walk([span], ids, by_layer=True):
        rows += unit
        if rows % len(ids) == 0:  # all rows are through a layer
            if not (np.isfinite(watched.queries).all() and np.isfinite(watched.keys).all()):
                raise EngineError(NOT_FINITE, "model_damaged")
            keys = np.ascontiguousarray(watched.keys.swapaxes(0, 1))
            layer = measure(watched.queries, keys, watched.scale, watched.window, block_size, ops.each)
            statistics.append(layer)
            if progress is not None:
                progress(1)
    return statistics


class _WatchedOps:
    """Ops that keep queries (T, H, D) and keys (T, K, D) of the layer in work, in whatever parts they come.

    As RoPE leaves them: what the store scales them by is taken back, and it is powers of two.
    """

    def __init__(self, ops: Ops, config: ModelConfig, tokens: int):
        self._ops = ops
        self.queries = np.empty((tokens, config.heads, config.head_dim), np.float32)
        self.keys = np.empty((tokens, config.kv_heads, config.head_dim), np.float32)
        self.scale = 1.0
        self.window: int | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ops, name)

    def spans(self, spans: Sequence[CacheSpan]) -> tuple[int, Spans]:
        (span,) = spans
        return span.position, self._ops.spans(spans)

    def place_kv(
        self,
        qkv: Array,
        turns: tuple[Array, Array],
        space: StoredSpace,
        cache: Cache,
        spans: tuple[int, Spans],
        norms: tuple[Array, Array, float] | None = None,
    ) -> Array:
        position, of = spans
        rows = slice(position, position + len(qkv))
        q, k, v = self._ops.condition(qkv, turns, space, norms)
        assert space.scale is not None
        of_queries, of_keys = space.scale[: q.shape[1]], space.scale[q.shape[1] : -space.kv_heads]
        self.queries[rows], self.keys[rows] = self._ops.to_host(q) / of_queries, self._ops.to_host(k) / of_keys
        self._ops.append_kv(cache, of, k, v)
        return q

    def attention(
        self,
        q: Array,
        cache: Cache,
        spans: tuple[int, Spans],
        scale: float,
        window: int | None,
        back: Array | None = None,
        scale_back: Array | None = None,
    ) -> Array:
        _, of = spans
        self.scale, self.window = scale, window
        return self._ops.attention(q, cache, of, scale, window, back, scale_back)


def _exact_model(ops: Ops, config: ModelConfig, weights: ModelWeights, tokens: int, block_size: int) -> Model:
    """A model that sees one prompt of `tokens` in full precision, unrotated."""
    f16 = codecs.get("f16")
    shape = CacheShape(block_size, config.kv_heads, config.head_dim, (LayerShape(f16, f16),) * config.layers)
    plan = plan_for_tokens(shape, tokens, 1)
    conditioning = [Conditioning(scale=scale(variances(ops, config, layer))) for layer in weights.layers]
    return Model(ops, config, weights, KVStore(ops, plan, conditioning))


def _key(ops: Ops, config: ModelConfig, weights: ModelWeights, ids: Sequence[int], block_size: int) -> str:
    """What the statistics depend on, as a digest: the model, ids, block size."""
    model = fingerprint(ops, config, weights)
    return hashlib.sha256(repr((_FORMAT, block_size, list(ids), model)).encode()).hexdigest()


# -- the kept file: one array per field with a leading axis of layers ------------------------------------------------


def _read(file: Path, key: str) -> list[LayerStatistics] | None:
    """What `_write` left for this key, None where there is nothing, or something else or damaged."""
    try:
        header, arrays = checked_file.read(file)
    except (OSError, checked_file.DamagedFile):
        return None
    if header != {"key": key}:
        return None
    columns = (arrays[field.name] for field in fields(LayerStatistics))
    return [LayerStatistics(*layer) for layer in zip(*columns, strict=True)]


def _write(file: Path, key: str, statistics: Sequence[LayerStatistics]) -> None:
    """Keep the statistics in `file`; where that cannot be done, they are measured again next time."""
    names = [field.name for field in fields(LayerStatistics)]
    arrays = {name: np.stack([getattr(layer, name) for layer in statistics]) for name in names}
    with suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        checked_file.write(file, {"key": key}, arrays)
