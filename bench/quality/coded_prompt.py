"""A prompt in full precision, of which parts are read as codes: what these parts cost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from polarlm.engine.backends.kv import CacheFormat
from polarlm.engine.backends.numpy.kv.cache import LayerCache
from polarlm.engine.loading.checks import settle
from polarlm.engine.loading.encoding import WHOLE
from polarlm.engine.loading.placement.wanted import Sizes, Wanted
from polarlm.engine.loading.sizes import cache_shape
from polarlm.engine.model.forward import Transformer
from polarlm.engine.quantization.encode import decode_centred, encode_centred
from polarlm.engine.state.store import KVStore


class CodedPrompt:
    """A prompt in full precision, whose complete blocks can be replaced by what their codes decode to.

    It is in the current block of a store whose blocks are as long as a window. Rotations and scales of keys and values
    are those of the coded model's store.
    """

    def __init__(self, coded: Transformer, store: KVStore) -> None:
        self.model = Transformer(coded.ops, coded.config, coded.weights, store)
        self._sequence = store.new_sequence()
        self._formats = [coded.store.cache(layer).format for layer in range(len(coded.config.layers))]
        self._block = coded.store.shape.block_size
        empty = np.empty((coded.config.attention.kv_heads, 0, coded.config.attention.head_dim), np.float32)
        self._decoded = [[empty, empty] for _ in self._formats]

    @property
    def _sides(self) -> list[tuple[np.ndarray, np.ndarray]]:
        """Views of each layer's stored keys and values (K, T, D)."""
        length, slot = self._sequence.length, self._sequence.tables[0].current
        caches: list[LayerCache] = [self.model.store.cache(layer) for layer in range(len(self._formats))]
        return [(cache.full_k[slot][:, :length], cache.full_v[slot][:, :length]) for cache in caches]

    def grow(self, ids: Sequence[int]) -> dict[str, list[float]]:
        """Append the ids that the prompt does not have yet, whole blocks. Returns the relative errors of their codes:
        "keys" and "values", one for each layer and block."""
        done = self._sequence.length
        span = self.model.store.open(self._sequence, len(ids) - done)
        self.model.forward([span], ids[done:])
        self.model.store.commit(span)
        errors: dict[str, list[float]] = {"keys": [], "values": []}
        for format, sides, decoded in zip(self._formats, self._sides, self._decoded, strict=True):
            for side, name in enumerate(("keys", "values")):
                new = sides[side][:, done:].astype(np.float32)
                blocks = new.reshape(len(new), -1, self._block, new.shape[2])
                back = self._read_back(format, blocks, side)
                error, size = (np.sqrt(np.square(x).sum(axis=(0, 2, 3))) for x in (back - blocks, blocks))
                errors[name].extend((error / size).tolist())
                back = back.reshape(new.shape)
                decoded[side] = np.concatenate([decoded[side], back], axis=1)
        return errors

    @staticmethod
    def _read_back(format: CacheFormat, blocks: np.ndarray, side: int) -> np.ndarray:
        """Keys (side 0) or values (1) of complete blocks (K, B, N, D), encoded and decoded."""
        if side == 0:
            fields = encode_centred(format.codec_k, blocks, format.metric_k, format.mean_bits)
            return decode_centred(format.codec_k, *fields)
        return decode_centred(format.codec_v, *encode_centred(format.codec_v, blocks, format.metric_v))

    def logits(self, ids: Sequence[int], keys: slice, values: slice, taps: Any = None) -> np.ndarray:
        """Logits (T, V) of the next ids, which are not appended. keys, values: the tokens of the prompt whose keys and
        values are read as codes."""
        exact = [[side.copy() for side in sides] for sides in self._sides]
        for sides, decoded in zip(self._sides, self._decoded, strict=True):
            for side, coded in enumerate((keys, values)):
                sides[side][:, coded] = decoded[side][:, coded]
        self.model.taps = taps
        span = self.model.store.open(self._sequence, len(ids))
        try:
            return self.model.logits(self.model.forward([span], ids))
        finally:
            self.model.store.abort(span)
            self.model.taps = None
            for sides, kept in zip(self._sides, exact, strict=True):
                for side in (0, 1):
                    sides[side][:] = kept[side]

    def share(self, q: np.ndarray, k: np.ndarray, layer: int) -> np.ndarray:
        """The share of attention on complete blocks after the first, (T,), mean of all heads.

        q (T, H, D), k (T, K, D): a layer's queries and keys of the tokens after the prompt, from the taps.
        """
        config = self.model.config.attentions[layer]
        keys = np.concatenate([self._sides[layer][0].astype(np.float32), k.swapaxes(0, 1)], axis=1)
        grouped = q.reshape(len(q), config.kv_heads, -1, config.head_dim).transpose(1, 2, 0, 3)
        scores = grouped @ keys[:, None].swapaxes(2, 3) * config.score_scale  # (K, G, T, S)
        length = self._sequence.length
        scores[..., length:][..., ~np.tri(len(q), dtype=bool)] = -np.inf
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        coded = weights[..., self._block : length].sum(axis=-1) / weights.sum(axis=-1)
        return coded.mean(axis=(0, 1))

    def release(self) -> None:
        self.model.store.release(self._sequence)


def whole_store(coded: Transformer, settings: Mapping[str, Any]) -> KVStore:
    """A store for `_Prompt`, with `ctx_size` tokens in one block. settings: those of the coded model's store."""
    config = settle(None, None, {**settings, "block_size": -(-settings["ctx_size"] // 4) * 4})
    ops, layers = coded.ops, len(coded.config.layers)
    shape = cache_shape(config, WHOLE, ops, coded.config)
    plan = Wanted(config, coded.config, Sizes(0)).plan(ops, shape, ops.room_beside(0))
    return KVStore(ops, plan, coded.store.conditioning, [(None, None)] * layers)
