"""Measures what errors of each layer's keys, and of its values, cost: the divergence of the model's distributions from
full precision, on the calibration text, when this side alone is stored with codes.

Costs of different sides add up: on SmolLM2-135M their sum is within a tenth of what codes everywhere cost. Those of
near and of far tokens differ: which layers cost most with every token coded says little about which do as served. So
blocks of the first half of the text read their own tokens in full precision, as steps do, those of the second half read
them as codes, and both halves count alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from polarlm.engine import codecs
from polarlm.engine.backends.ops import Array, Ops
from polarlm.engine.codecs import Codec
from polarlm.engine.loading.calibration import Progress, Statistics, full_precision_shape
from polarlm.engine.loading.encoding import WHOLE, Stored, stored_layers
from polarlm.engine.model.forward import ModelWeights, Transformer
from polarlm.engine.model.kv_scales import variances
from polarlm.engine.model.score import states
from polarlm.engine.state.layer_shapes import LayerShape
from polarlm.engine.state.plan import plan_for_tokens
from polarlm.engine.state.shapes import CacheShape
from polarlm.engine.state.store import KVStore
from polarlm.model_loaders.config import ModelConfig

TOKENS = 1280  # of the calibration text, at most
MEASURED = "ring3"  # the type with the largest errors, which stand out most from those of arithmetic


def measure(
    ops: Ops,
    config: ModelConfig,
    weights: ModelWeights,
    ids: Sequence[int],
    block_size: int,
    statistics: Statistics,
    progress: Progress = lambda done, total: None,
) -> dict[int, tuple[float, float]]:
    """Return what codes of each layer's keys and of its values cost, for each layer with K/V of its own: the means of
    the divergence from full precision, in nats, as served and with every token coded, over their sums for all sides.

    ids: whole blocks, three or more. statistics: of all layers with K/V; none if codes are not fitted to the model.
    Raises EngineError ("model_damaged") if logits are not finite.
    """
    sides = _Sides(ops, config, weights, block_size, len(ids), statistics)
    found = np.zeros((len(config.kv_attentions), 2, 2))  # layer, side, scoring
    whole = sides.model(0)
    exact, inputs = whole.states(ids), None
    for layer in range(len(config.layers)):
        if layer in config.kv_attentions:
            place, first = [*config.kv_attentions].index(layer), 0 if inputs is None else layer
            coded = [sides.model(first, layer, side).states(ids, inputs) for side in (0, 1)]
            found[place] = whole.costs(exact, coded)
            progress(place + 1, len(found))
        if sides.can_be_cut:
            inputs = sides.model(layer, last=layer).states(ids, inputs)
    total = found.sum(axis=(0, 1))
    shares = (found / np.where(total > 0, total, 1)).sum(axis=2)
    return {layer: (float(k), float(v)) for layer, (k, v) in zip(config.kv_attentions, shares, strict=True)}


def divergence(reference: np.ndarray, logits: np.ndarray) -> float:
    """Return the mean divergence of the distributions of `logits` (T, V) from those of `reference`, in nats: the first
    term of its series, half the variance of what has been added to the logits."""
    share = reference - reference.max(axis=1, keepdims=True)
    np.exp(share, out=share)
    share /= share.sum(axis=1, keepdims=True)
    added = logits - reference
    added -= np.einsum("tv,tv->t", share, added)[:, None]
    return float(np.einsum("tv,tv,tv->t", share, added, added).mean() / 2)


class _Pass(Transformer):
    """A model, or layers of it, that reads a text block by block."""

    def states(self, ids: Sequence[int], inputs: Sequence[np.ndarray] | None = None) -> list[np.ndarray]:
        """Return what the last layer makes of each block of `ids`, (N, E) on the host.

        inputs: of the first layer, for each block; None for the embeddings.
        """
        size = self.store.shape.block_size
        if inputs is not None:
            self.taps = partial(self._replace, inputs)
        served = (len(ids) // size + 1) // 2 * size  # tokens of the blocks that are read as steps read them
        sequence, found = self.store.new_sequence(), []
        for part, is_coded in ((ids[:served], False), (ids[served:], True)):
            for _, hidden in states(self, sequence, part, every_token_coded=is_coded):
                found.append(np.array(self.ops.to_host(hidden)))
        return found

    def _replace(self, inputs: Sequence[np.ndarray], name: str, layer: int, position: int, x: Array) -> None:
        """As taps: replace the input of the first layer."""
        if (name, layer) == ("input", 0):
            block, first = divmod(position, self.store.shape.block_size)
            x[...] = self.ops.to_device(inputs[block][first:][: len(x)])

    def costs(self, exact: Sequence[np.ndarray], coded: Sequence[Sequence[np.ndarray]]) -> np.ndarray:
        """Return the mean divergence of each of several texts' states from `exact`: (texts, 2), of blocks as served and
        of coded blocks. The first block has no codes and counts for neither."""
        each = np.empty((len(coded), len(exact)))
        for number, reference in enumerate(exact):
            logits = self.logits(self.ops.to_device(reference))
            for text, own in enumerate(coded):
                each[text, number] = divergence(logits, self.logits(self.ops.to_device(own[number])))
        half = (len(exact) + 1) // 2
        return np.stack([each[:, 1:half].mean(axis=1), each[:, half:].mean(axis=1)], axis=1)


class _Sides:
    """Models with the same weights, of which one side of one layer at most is stored with codes."""

    def __init__(
        self, ops: Ops, config: ModelConfig, weights: ModelWeights, block_size: int, tokens: int, statistics: Statistics
    ) -> None:
        self._ops, self._config, self._weights, self._statistics = ops, config, weights, statistics
        self._tokens = tokens
        full, coded = codecs.get(codecs.FULL), codecs.get(MEASURED)
        mean_bits = 8 if statistics else 0
        plain = full_precision_shape(config, block_size)
        sides = self._of(plain, coded, full, mean_bits), self._of(plain, full, coded, 0)
        self._shapes = plain, *sides
        self._stored = [self._layers(shape) for shape in self._shapes]

    @property
    def can_be_cut(self) -> bool:
        """Whether layers stand alone: none reads keys and values of others, or has inputs by its number."""
        shares = any(one.shares_kv for one in self._config.attentions.values())
        return self._weights.layer_inputs is None and not shares

    def _of(self, plain: CacheShape, codec_k: Codec, codec_v: Codec, mean_bits: int) -> CacheShape:
        """Return the shape whose layers with K/V all have these codecs."""
        layers = [
            replace(one, codec_k=codec_k, codec_v=codec_v, mean_bits=mean_bits) if isinstance(one, LayerShape) else one
            for one in plain.layers
        ]
        return replace(plain, layers=tuple(layers))

    def _layers(self, shape: CacheShape) -> Stored:
        """Return how all layers are stored."""
        centred = {layer for layer, one in shape.kv_layers.items() if one.mean_bits}
        sizes = [shape.block_size if layer in centred else None for layer in range(len(shape.layers))]
        squares = variances(self._ops, self._config, self._weights, sizes)
        return stored_layers(WHOLE, shape, squares, self._statistics)

    def model(self, first: int, coded: int | None = None, side: int = 0, *, last: int | None = None) -> _Pass:
        """Return the model from layer `first` to layer `last` (None: all), with codes of the keys (side 0) or of the
        values of layer `coded`."""
        which = [0 if layer != coded else 1 + side for layer in range(len(self._config.layers))]
        cut = slice(first, None if last is None else last + 1)
        layers = [self._shapes[kind].layers[layer] for layer, kind in enumerate(which)][cut]
        conditioning = [self._stored[kind][0][layer] for layer, kind in enumerate(which)][cut]
        metrics = [self._stored[kind][1][layer] for layer, kind in enumerate(which)][cut]
        config = replace(self._config, layers=self._config.layers[cut])
        plan = plan_for_tokens(replace(self._shapes[0], layers=tuple(layers)), self._tokens, 1)
        weights = replace(self._weights, layers=self._weights.layers[cut])
        return _Pass(self._ops, config, weights, KVStore(self._ops, plan, conditioning, metrics))
