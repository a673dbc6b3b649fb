"""Models without tokenizer and engine: weights, KV store and forward pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from polarlm.engine import codecs
from polarlm.engine.backends.numpy.ops import NumpyOps
from polarlm.engine.codecs import Codec
from polarlm.engine.model.batch import PromptBatch, StepBatch, join, run_to_end
from polarlm.engine.model.forward import ModelWeights, Transformer
from polarlm.engine.model.layers.kinds import MIXERS
from polarlm.engine.model.weights import load_weights
from polarlm.engine.quantization.conditioning import Conditioning
from polarlm.engine.sampling.sample import SamplerInput, greedy
from polarlm.engine.state.layer_shapes import LayerShape, SharedShape
from polarlm.engine.state.plan import plan_for_tokens
from polarlm.engine.state.shapes import CacheShape
from polarlm.engine.state.store import KVStore, SequenceKV, Span
from polarlm.model_loaders import load_weights as open_weights
from polarlm.model_loaders.config import Attention, LatentAttention, Mixer, ModelConfig


def read_model(path: Path) -> tuple[ModelConfig, ModelWeights]:
    config, source, _ = open_weights(path)
    weights = load_weights(NumpyOps(), config, source)
    source.close()
    return config, weights


def bare_model(
    config: ModelConfig,
    weights: ModelWeights,
    types: tuple[str, str] = ("f16", "f16"),
    *,
    block_size: int = 16,
    centred: bool = True,
    tokens: int = 2048,
    ops: NumpyOps | None = None,
) -> Transformer:
    """A model with its own store; models may share weights."""
    k, v = (codecs.get(name) for name in types)
    mean_bits = 16 if centred and types[0] != "f16" else 0
    layers = tuple(shape_of(layer.mixer, k, v, mean_bits) for layer in config.layers)
    plan = plan_for_tokens(CacheShape(block_size, layers), tokens, 8)
    plan = replace(plan, quantized_blocks=tuple(4 * count for count in plan.quantized_blocks))  # for each sequence
    ops = ops or NumpyOps()
    conditioning = [
        Conditioning(k.rotation(one.head_dim), (v if getattr(one, "codec_v", v) else k).rotation(one.head_dim))
        if isinstance(one, LayerShape | SharedShape)
        else Conditioning()
        for one in layers
    ]
    return Transformer(ops, config, weights, KVStore(ops, plan, conditioning))


def shape_of(mixer: Mixer, k: Codec, v: Codec, mean_bits: int) -> Any:
    if not isinstance(mixer, Attention):
        return MIXERS[type(mixer)].state_shape(mixer)
    if mixer.shares_kv:
        return SharedShape(mixer.kv_heads, mixer.head_dim, mixer.window)
    values = None if isinstance(mixer, LatentAttention) else v
    return LayerShape(
        k, values, mixer.kv_heads, mixer.head_dim, mean_bits, mixer.window, images_whole=mixer.images_whole
    )


def forward(model: Transformer, spans: Sequence[Span], ids: Sequence[int], outputs: int | None = None) -> Any:
    """The hidden states of the last `outputs` rows of spans, or of all."""
    return run_to_end(model.chunks(PromptBatch(spans, ids, outputs)))


def forward_together(
    model: Transformer,
    spans: Sequence[Span],
    ids: Sequence[Sequence[int]],
    steps: Sequence[Span] = (),
    step_ids: Sequence[int] = (),
) -> Any:
    """The hidden states of the last rows of prompts that are joined, and of a step's rows."""
    return run_to_end(model.chunks(join(model.ops, spans, ids, steps, step_ids)))


def feed(
    model: Transformer,
    kv: SequenceKV,
    ids: Sequence[int],
    *,
    step: bool = False,
    round_trip: bool = False,
    as_steps: bool = False,
) -> np.ndarray:
    """Feed `ids` in one span of a prompt or of a step → logits (T, V)."""
    store = model.store
    prompt = {"round_trip": round_trip, "as_steps": as_steps}
    span = store.open_step(kv, len(ids)) if step else store.open(kv, len(ids), **prompt)
    hidden = forward(model, [span], ids)
    model.store.commit(span)
    return model.logits(hidden)


def prefill_logits(model: Transformer, ids: Sequence[int]) -> np.ndarray:
    """Logits (T, V) of a prompt, which attends to its own K/V in full precision."""
    return feed(model, model.store.new_sequence(), ids)


def step_logits(model: Transformer, ids: Sequence[int]) -> np.ndarray:
    """Logits (T, V) of a step for each of `ids`, one after the other."""
    kv = model.store.new_sequence()
    return np.concatenate([feed(model, kv, [i], step=True) for i in ids])


def stepped(
    model: Transformer,
    spans: Sequence[Span],
    ids: Sequence[int],
    sampler_inputs: Sequence[SamplerInput] | None = None,
) -> tuple[np.ndarray, list[Any]]:
    """A step with the rows `ids` of all spans, drawn greedily by default: the logits (T, V) that its tokens are chosen
    from, and the tokens."""
    seen: list[np.ndarray] = []
    fetch_tokens = model.ops.fetch_tokens

    def watched(chosen: Any, logits: Any, sampler_inputs: Sequence[SamplerInput]) -> list[Any]:
        seen.append(np.array(model.ops.to_host(logits)))
        return fetch_tokens(chosen, logits, sampler_inputs)

    model.ops.fetch_tokens = watched  # type: ignore[method-assign]
    try:
        samplers = sampler_inputs or [greedy(model.config.vocab_size)] * len(ids)
        tokens = model.step(StepBatch(spans, ids, samplers)).wait()
    finally:
        model.ops.fetch_tokens = fetch_tokens  # type: ignore[method-assign]
    if sampler_inputs is None:
        assert tokens == seen[0].argmax(-1).tolist()
    return seen[0], tokens


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """Independent of the engine's, which is tested against it."""
    x = logits.astype(np.float64)
    x -= x.max(axis=-1, keepdims=True)
    return x - np.log(np.exp(x).sum(axis=-1, keepdims=True))


def kl(reference: np.ndarray, logits: np.ndarray) -> float:
    """Mean KL divergence in nats of the distributions of `logits` from `reference`, (T, V) each."""
    p, q = log_softmax(reference), log_softmax(logits)
    return float((np.exp(p) * (p - q)).sum(axis=-1).mean())


def spread(logits: np.ndarray) -> float:
    """The range of logits that tolerances are relative to."""
    return float(logits.max() - logits.min())
