"""Calibration: statistics of a model's queries and keys on a built-in text, measured once and kept in a file. They
depend only on the model and the block size, so blocks that are encoded with them can be shared and saved."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path

import numpy as np

from polarlm.engine import codecs
from polarlm.engine.backends.numpy.blas import parallel_map
from polarlm.engine.backends.ops import Array, Ops
from polarlm.engine.config import EngineConfig
from polarlm.engine.errors import EngineError
from polarlm.engine.loading import kept_arrays
from polarlm.engine.loading.encoding import FULL_ENCODING
from polarlm.engine.loading.sizes import cache_shape
from polarlm.engine.model.batch import PromptBatch, run_to_end
from polarlm.engine.model.fingerprint import fingerprint
from polarlm.engine.model.forward import ModelWeights, Transformer
from polarlm.engine.model.kv_scales import scale, variances
from polarlm.engine.model.layers.latent_attention import LatentAttentionWeights, latent_output
from polarlm.engine.quantization.conditioning import Conditioning
from polarlm.engine.quantization.statistics import LayerStatistics, measure, neutral, output_second
from polarlm.engine.sampling.sample import NOT_FINITE
from polarlm.engine.state.plan import plan_for_tokens
from polarlm.engine.state.store import KVStore
from polarlm.model_loaders.config import ModelConfig
from polarlm.model_loaders.tokenizers import Tokenizer

TOKENS = 512  # four times as many give the same quality
TEXT_FILE = Path(__file__).with_name("calibration_text.txt")

Progress = Callable[[int, int], None]

Statistics = dict[int, LayerStatistics]  # number of the layer → its statistics
_NAMES = [field.name for field in fields(LayerStatistics)]
_KIND = "calibration"
_FORMAT = 4  # the version of the meaning of the kept numbers


def load_or_calibrate(
    ops: Ops,
    config: ModelConfig,
    weights: ModelWeights,
    ids: Sequence[int],
    block_size: int,
    say: Callable[[str], None],
    progress: Progress = lambda done, total: None,
) -> Statistics:
    """Return statistics of every layer with attention: from the user's cache folder, or else measured now on the text
    `ids` and kept there. Of less than two blocks they are neutral, and `say` is called with a warning."""
    if not can_calibrate(ids, block_size):
        say(
            f"The KV cache is not fitted to this model, and quantized types are less precise: fitting takes two blocks "
            f"of {block_size} tokens, and the calibration text has {len(ids)} here; choose a smaller block size."
        )
        return {
            layer: replace(
                neutral(one.kv_heads, one.head_dim),
                output_second=output_second(_output(ops, weights, layer), one.kv_heads, one.head_dim),
            )
            for layer, one in config.kv_attentions.items()
        }
    key = kept_arrays.digest_key(_FORMAT, block_size, list(ids), fingerprint(ops, config, weights))
    if (arrays := kept_arrays.read(_KIND, key)) is not None:
        return read_statistics(arrays, config)
    say(f"Fitting the KV cache to this model on {len(ids)} tokens of text, once")
    statistics = calibrate(ops, config, weights, ids, block_size, progress)
    kept_arrays.write(_KIND, key, statistics_arrays(statistics), say)
    return statistics


def statistics_arrays(statistics: Statistics) -> dict[str, np.ndarray]:
    """Return the arrays of all layers by names such as "3 query_mean", float32."""
    return {f"{layer} {name}": getattr(one, name) for layer, one in statistics.items() for name in _NAMES}


def read_statistics(arrays: Mapping[str, np.ndarray], config: ModelConfig) -> Statistics:
    """Return the statistics whose `statistics_arrays` are among these. Raises KeyError or ValueError if some are
    missing, or are of another model."""
    statistics: Statistics = {}
    for layer, one in config.kv_attentions.items():
        statistics[layer] = LayerStatistics(*(arrays[f"{layer} {name}"] for name in _NAMES))
        model = neutral(one.kv_heads, one.head_dim)
        if any(getattr(statistics[layer], name).shape != getattr(model, name).shape for name in _NAMES):
            raise ValueError("an array has another shape")
    return statistics


def can_calibrate(ids: Sequence[int], block_size: int) -> bool:
    return len(ids) >= 2 * block_size


def text_ids(tokenizer: Tokenizer, count: int) -> list[int]:
    """Return at most `count` ids of the built-in text, from its start, after BOS if the model has one."""
    start = [] if tokenizer.bos_id is None else [tokenizer.bos_id]
    return (start + tokenizer.tokenize(TEXT_FILE.read_text(encoding="utf-8")))[:count]


def calibrate(
    ops: Ops,
    config: ModelConfig,
    weights: ModelWeights,
    ids: Sequence[int],
    block_size: int,
    progress: Progress = lambda done, total: None,
) -> Statistics:
    """Return statistics of every layer's queries and keys, from a prefill of `ids` in full precision.

    progress: called with (rows done, all rows), each summed over the layers. Raises ValueError for fewer than two
    blocks of ids, EngineError ("model_damaged") for numbers that are not finite.
    """
    model = _full_precision_model(ops, config, weights, len(ids), block_size)
    _check_finite(model, ids[:8])
    recorder = model.tap = _QueriesAndKeys(model, len(ids))
    span = model.store.open(model.store.new_sequence(), len(ids))
    statistics: Statistics = {}
    rows = 0
    for unit in model.chunks(PromptBatch([span], ids, outputs=0, by_layer=True)):  # only queries and keys are needed
        rows += unit
        progress(rows, len(config.layers) * len(ids))
        layer, rest = rows // len(ids) - 1, rows % len(ids)
        if rest == 0 and layer in config.kv_attentions:  # the layer is complete
            queries, keys = recorder.arrays(layer)
            if not (np.isfinite(queries).all() and np.isfinite(keys).all()):
                raise EngineError(NOT_FINITE, "model_damaged")
            mixer, keys = config.attentions[layer], np.ascontiguousarray(keys.swapaxes(0, 1))
            output = _output(ops, weights, layer)
            sink_scores = getattr(weights.layers[layer].mixer, "sink_scores", None)
            layer_statistics = measure(
                queries,
                keys,
                output,
                mixer.score_scale,
                mixer.window,
                block_size,
                parallel_map,
                softcap=mixer.softcap,
                sink_scores=None if sink_scores is None else ops.layer_ops(layer).to_host(sink_scores),
            )
            # Squares of large values overflow.
            if not all(np.isfinite(getattr(layer_statistics, field.name)).all() for field in fields(layer_statistics)):
                raise EngineError(NOT_FINITE, "model_damaged")
            statistics[layer] = layer_statistics
    return statistics


def _output(ops: Ops, weights: ModelWeights, layer: int) -> np.ndarray:
    """Return the output projection of a layer with attention, (E, H·D) float32, or one whose results are as long."""
    mixer = weights.layers[layer].mixer
    rows: np.ndarray = ops.layer_ops(layer).rows(mixer.out)
    return latent_output(ops.layer_ops(layer), mixer, rows) if isinstance(mixer, LatentAttentionWeights) else rows


def _check_finite(model: Transformer, ids: Sequence[int]) -> None:
    """Raises EngineError if the logits of the last of `ids` are not finite. A few ids suffice: they use nearly all
    weights, take little time, and eight of them need only kernels that loading compiles anyway."""
    sequence = model.store.new_sequence()
    span = model.store.open(sequence, len(ids))
    try:
        model.logits(run_to_end(model.chunks(PromptBatch([span], ids, outputs=1))))
    finally:
        model.store.abort(span)
        model.store.release(sequence)


class _QueriesAndKeys:
    """Records the queries (T, H, D) and keys (T, K, D) of the current layer, after RoPE and without the scale, a power
    of two, so that removing it rounds nothing."""

    def __init__(self, model: Transformer, tokens: int):
        self._ops, self._conditioning = model.ops, model.store.conditioning
        self._mixers = model.config.kv_attentions
        mixers = self._mixers.values()
        shapes = {(heads, mixer.head_dim) for mixer in mixers for heads in (mixer.heads, mixer.kv_heads)}
        self._arrays = {
            name: {shape: np.empty((tokens, *shape), np.float32) for shape in shapes} for name in ("queries", "keys")
        }

    def arrays(self, layer: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the queries and keys of a layer, which the next layer of the same shape overwrites."""
        mixer = self._mixers[layer]
        shapes = {"queries": (mixer.heads, mixer.head_dim), "keys": (mixer.kv_heads, mixer.head_dim)}
        queries, keys = (self._arrays[name][shape] for name, shape in shapes.items())
        return queries, keys

    def __call__(self, layer: int, position: int, queries: Array, keys: Array) -> None:
        heads = self._mixers[layer].heads
        scales = self._conditioning[layer].scales(heads)
        assert scales is not None
        rows = slice(position, position + len(queries))
        for name, x, first in (("queries", queries, 0), ("keys", keys, heads)):
            head_scales = scales[first : first + x.shape[1]]
            self._arrays[name][x.shape[1:]][rows] = self._ops.layer_ops(layer).to_host(x) / head_scales


def _full_precision_model(
    ops: Ops, config: ModelConfig, weights: ModelWeights, tokens: int, block_size: int
) -> Transformer:
    settings = EngineConfig(cache_type=codecs.FULL, block_size=block_size, key_conditioning=False)
    plan = plan_for_tokens(cache_shape(settings, FULL_ENCODING, ops, config), tokens, 1)
    conditioning = [Conditioning(scale=size and scale(size)) for size in variances(ops, config, weights)]
    return Transformer(ops, config, weights, KVStore(ops, plan, conditioning))
