"""The reference, which scores the same weights in float32, and engines of the same model to compare with it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from polarlm import model_loaders
from polarlm.bench.quality.attention_error import Recorder, Recording
from polarlm.engine import Engine, Score
from polarlm.engine.backends.numpy.ops import NumpyOps
from polarlm.engine.backends.ops import Ops
from polarlm.engine.cli.commands import note
from polarlm.engine.cli.flags import FlagError
from polarlm.engine.loading import assembly
from polarlm.engine.loading.checks import settle
from polarlm.engine.loading.encoding import WHOLE, Encoding
from polarlm.engine.model.forward import Transformer

Change = Callable[[Transformer], None]

_BIASED_PAIRS = 4  # number of RoPE pairs, those of the lowest frequencies, which rotate little


def open_engine(
    weights: str | None,
    *changes: Change,
    encoding: Encoding = WHOLE,
    verbose: Callable[[str], None] | None = None,
    **settings: Any,
) -> Engine:
    """`Engine.load` with NumPy's float32 arithmetic, the parts of the encoding that `encoding` switches on, and
    `changes` applied to the model."""
    parts = assembly.assemble(settle(weights, None, settings), verbose, encoding, NumpyOps())
    for change in changes:
        change(parts.model)
    return Engine(parts)


class Reference:
    """Scores up to `window` tokens in full precision: all are in the sink block, which is never quantized.

    A context manager.
    """

    def __init__(self, weights: str | None, window: int):
        """Raises LoadError or EngineError."""
        self._recorder = Recorder()
        self._bias: Change | None = None
        self._exact: dict[str, Any] = {
            "cache_type_k": "f16",
            "cache_type_v": "f16",
            "ctx_size": window,
            "block_size": -(-window // 4) * 4,
            "kept_sequences": 0,
        }
        self._engine = open_engine(weights, self._recorder.install, verbose=note, **self._exact)

    @property
    def model(self) -> model_loaders.Model:
        return self._engine.model

    @property
    def transformer(self) -> Transformer:
        return self._recorder.model

    def tokenize(self, text: str) -> list[int]:
        return self._engine.tokenize(text)

    def detokenize(self, ids: Sequence[int]) -> str:
        return self._engine.detokenize(ids)

    def score(self, ids: Sequence[int]) -> Score:
        return self._engine.score(ids, logits=True)

    def record(self, ids: Sequence[int]) -> Recording:
        """Each layer's arrays for `ids` (T,)."""
        return self._recorder.record(self._engine, ids)

    def bias_keys(self, times: float, ids: Sequence[int]) -> None:
        """Add to the keys a constant, `times` their RMS over `ids`, here and in all engines opened later.

        It is added to the RoPE pairs of the lowest frequencies, so it is nearly the same for all tokens of a block, as
        a bias of the key projection is in some model families. Calibration runs without the bias, which changes its
        statistics little. Raises FlagError for a model that normalizes its keys.
        """
        if self.model.config.attention.qk_norm:
            raise FlagError(
                f"--key-bias: {self.model.name} normalises its keys, and a bias with them; take another model"
            )
        rms = [float(np.sqrt(np.square(keys, dtype=np.float64).mean())) for keys in self.record(ids).keys]

        def add_bias(model: Transformer) -> None:
            biased = [_with_key_bias(model, i, times * rms[i]) for i in range(len(rms))]
            model.weights = replace(model.weights, layers=biased)

        add_bias(self._recorder.model)
        self._bias = add_bias

    def open(self, *changes: Change, encoding: Encoding = WHOLE, **settings: Any) -> Engine:
        """An engine of the same model with its own cache."""
        changes = (*([self._bias] if self._bias else []), *changes)
        return open_engine(str(self.model.path), *changes, encoding=encoding, **settings)

    def assemble(self, ops: Ops, encoding: Encoding = WHOLE, **settings: Any) -> assembly.Parts:
        """The same model with its own cache, computed by `ops`. The caller closes it."""
        parts = assembly.assemble(settle(str(self.model.path), None, settings), None, encoding, ops)
        if self._bias:
            self._bias(parts.model)
        return parts

    def open_exact(self, **settings: Any) -> Engine:
        """An engine of the same model that scores in full precision like this reference, with other settings."""
        return open_engine(str(self.model.path), verbose=note, **self._exact, **settings)

    def __enter__(self) -> Reference:
        return self

    def __exit__(self, *error: object) -> None:
        self._engine.close()


def _with_key_bias(model: Transformer, index: int, amount: float) -> Any:
    """The layer's weights, with `amount` added to both channels of the last pairs of every key."""
    attention, layer = model.config.attentions[index], model.weights.layers[index]
    heads, kv_heads, dim = attention.heads, attention.kv_heads, attention.head_dim
    pairs, qkv = min(_BIASED_PAIRS, dim // 2), layer.mixer.qkv
    bias = np.zeros((heads + 2 * kv_heads, dim), np.float32)
    if qkv.bias is not None:
        bias += model.ops.to_host(qkv.bias).reshape(bias.shape)
    for end in (dim // 2, dim):
        bias[heads : heads + kv_heads, end - pairs : end] += amount
    qkv = replace(qkv, bias=model.ops.to_device(bias.reshape(-1)))
    return replace(layer, mixer=replace(layer.mixer, qkv=qkv))
