"""The launches of a prompt's forward pass, without a GPU."""

from __future__ import annotations

import numpy as np

from polarlm.bench.command import CacheType
from polarlm.bench.gpu.paper import BLOCK_SIZE, Notes, PaperDevice, Part, cache_format, head_transform
from polarlm.engine.backends.kv import KVLocation, SpanView
from polarlm.model_loaders.config import ModelConfig


def prompt_parts(
    config: ModelConfig, weight: str, cache_type: CacheType, tokens: int, device: PaperDevice
) -> list[Part]:
    """The parts of a first prompt up to its first token, without the encoding of its blocks. weight: one of
    `known_weights`. Layers take as many rows at a time as the engine gives them; the last of these may be fewer, and
    count as the others.

    Raises EngineError for a cache type without kernels.
    """
    notes, e, dim = Notes(config, weight, device), config.hidden_size, config.attention.head_dim
    ops, note, layers = notes.ops, notes.note, len(config.layers)
    rows = min(tokens, ops.prefill_rows)
    times = -(-tokens // rows)  # that a layer takes rows
    x = notes.embed(np.zeros(tokens, np.int32))[:rows]
    norm = np.ones(e, np.float32), config.norm_eps
    heads, kv_heads = config.attention.heads, config.attention.kv_heads
    qkv = notes.product("qkv", x, ((heads + kv_heads) * dim, kv_heads * dim), times, norm=norm)
    qkv = qkv.reshape(rows, heads + 2 * kv_heads, dim)

    shape = cache_format(config, cache_type)
    cache, buffer = ops.cache(shape, 1, 2), ops.buffer(shape, tokens)
    (transform,) = ops.prepare([head_transform(config, cache_type)])
    spans = [
        ops.spans([SpanView(slice(0, rows), first, KVLocation(buffer, 0), 0, None, (), 0)], BLOCK_SIZE)
        for first in range(0, tokens, rows)
    ]
    rope = np.zeros((rows, dim // 2), np.float32), np.zeros((rows, dim // 2), np.float32)
    q = note("heads", times * layers, lambda: ops.place_kv(qkv, rope, transform, cache, spans[0]))

    def attend() -> np.ndarray:
        return [ops.attention(q, cache, seen, dim**-0.5, None, transform) for seen in spans][-1]

    mixed = note("attention", layers, attend, prompt=tokens)
    notes.product("out", mixed.reshape(rows, -1), (e,), times, residual=x)
    down = notes.following("down", e, config.ffn.size)
    activated = notes.product(
        "gate_up", x, (2 * config.ffn.size,), times, norm=norm, activation=config.ffn.activation, then=down
    )
    notes.product("down", activated, (e,), times, residual=x)
    notes.choose(notes.product("head", x[-1:], (config.vocab_size,), norm=norm))
    return notes.parts
