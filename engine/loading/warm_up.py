"""Warms up for requests: for the first ones before the weights are loaded, for all others after a moment."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial

import numpy as np

from polarlm import model_loaders
from polarlm.engine.backends.ops import STEP_ROWS, WarmUp
from polarlm.engine.config import EngineConfig
from polarlm.engine.limits import DRAFT_ROWS
from polarlm.engine.loading.encoding import FULL_ENCODING, NO_ENCODING, encode_layer
from polarlm.engine.loading.sizes import is_calibrated, weight_format
from polarlm.engine.model.adapters import Loaded
from polarlm.engine.model.encoder import Encoder
from polarlm.engine.model.forward import Transformer
from polarlm.engine.model.warm_up import (
    least_plan,
    warm_up,
    warm_up_adapter,
    warm_up_batch,
    warm_up_codes,
    warm_up_drafts,
    warm_up_rows,
)
from polarlm.engine.model.weights import layer_formats, load_weights
from polarlm.engine.quantization.conditioning import Conditioning, Scale
from polarlm.engine.quantization.statistics import neutral
from polarlm.engine.state.layer_shapes import LayerShape
from polarlm.engine.state.shapes import CacheShape
from polarlm.engine.state.store import KVStore, Metrics
from polarlm.engine.weight_formats import WeightFormat
from polarlm.model_loaders.config import ModelConfig

_STEP_ROWS = (*range(2, 9), STEP_ROWS)  # rows of steps of one sequence: a CPU has kernels for each up to 8
ENCODED_ROWS = 48  # rows of a text of a warm-up: kernels for many rows take 6, 4, 3 or 2 at a time
_SECONDS = 2.0  # after loading: a process that ends before need not map a compiler


def warm_up_first(
    config: EngineConfig,
    warm: WarmUp,
    source: model_loaders.Model,
    shape: CacheShape,
    on_host: int,
    adapters: Loaded = (),
) -> list[Callable[[], None]]:
    """Warm up for first requests to a model of these shapes, of any values; return calls that do so for later ones.
    on_host, adapters: as in `load_weights`."""
    ops, format = warm.ops, weight_format(config)
    if source.config.is_encoder:
        return _warm_up_encoder(warm, source, shape, format)
    formats = [*enumerate(layer_formats(ops, source.config, source.weights, format))]
    numbers = _different_layers(
        source.config, shape, [(number < on_host, layer_format) for number, layer_format in formats]
    )
    model = replace(source.config, layers=tuple(source.config.layers[number] for number in numbers))
    shape = CacheShape(shape.block_size, tuple(shape.layers[number] for number in numbers))
    encodings: dict[LayerShape, tuple[Conditioning, Metrics]] = {}
    for number in model.kv_attentions:
        layer = shape.kv_layers[number]
        if layer not in encodings:
            heads, dim = layer.kv_heads, layer.head_dim
            statistics = [neutral(heads, dim)] if is_calibrated(config, shape) else []
            scale = Scale(np.ones((heads, dim), np.float32), np.ones(heads, np.float32))
            (encodings[layer],) = encode_layer(FULL_ENCODING, layer, [scale], statistics)
    conditioning, metrics = zip(
        *(encodings[layer] if isinstance(layer, LayerShape) else NO_ENCODING for layer in shape.layers), strict=True
    )
    weights = load_weights(
        ops, source.config, source.weights, None, format, numbers, on_host=on_host, adapters=adapters
    )
    shared = [] if warm.rows else [rows for rows in _STEP_ROWS if rows <= config.parallel]  # of as many sequences
    store = KVStore(ops, least_plan(shape, max([0, *warm.rows, *shared])), conditioning, metrics)
    transformer = Transformer(ops, model, weights, store)
    sequence = warm_up(transformer, warm.short)
    most_drafted = config.draft_max if config.drafts else 0
    # Prompts of a few tokens are steps of several rows, too, and need all kernels of as many sequences.
    most_rows = 1 + most_drafted if store.sparse_groups else STEP_ROWS
    return [
        *([partial(warm_up_adapter, transformer)] if adapters else []),
        partial(warm_up_codes, transformer, sequence),
        *(partial(warm_up_drafts, transformer, rows) for rows in _STEP_ROWS if rows <= most_rows),
        *(partial(warm_up_rows, transformer, rows, in_steps=True) for rows in shared if rows > most_rows),
        *(partial(warm_up_batch, transformer, rows) for rows in DRAFT_ROWS),
        *(
            partial(warm_up_rows, transformer, rows, in_steps=fewer < config.parallel)
            for fewer, rows in itertools.pairwise((1, *warm.rows))
        ),
    ]


def _warm_up_encoder(
    warm: WarmUp, source: model_loaders.Model, shape: CacheShape, format: WeightFormat | None
) -> list[Callable[[], None]]:
    """As `warm_up_first`, for an encoder: texts of a few lengths, one at a time."""
    weights = load_weights(warm.ops, source.config, source.weights, None, format)
    store = KVStore(warm.ops, least_plan(shape, 0), [])
    model = Encoder(warm.ops, source.config, weights, store)
    for rows in (ENCODED_ROWS, *warm.short):
        model.encode([[0] * rows])
    return []


def warm_up_later(later: Sequence[Callable[[], None]], wait: Callable[[], None]) -> threading.Timer | None:
    """Make these calls in a thread, a moment from now, and then `wait` for the kernels that they need; return its
    timer, or None if the system refuses the thread."""
    calls = [*later, wait]

    def run() -> None:
        with suppress(Exception):  # what cannot be warmed up is an error of the requests that need it
            while calls:
                calls.pop(0)()
        calls.clear()  # the timer stays, and they have a model

    timer = threading.Timer(_SECONDS, run)
    timer.daemon = True
    try:
        timer.start()
    except RuntimeError:
        return None
    return timer


def _different_layers(model: ModelConfig, shape: CacheShape, formats: Sequence[object]) -> list[int]:
    """Return the numbers of layers that have all kernels of the model: also the last layer, where a prompt computes
    only its last rows, and those that draft. formats: the formats of each layer's matrices."""
    kinds, last = [*zip(model.layers, shape.layers, formats, strict=True)], min(model.depth, len(model.layers) - 1)
    return [number for number, kind in enumerate(kinds) if number >= last or kind not in kinds[number + 1 : last]]
