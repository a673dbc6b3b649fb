"""Gemma 4's assistant: layers after a model's last one, which read its keys and values and have none of their own.

Each drafted token comes from the embedding of the token before it and a hidden state: the model's, or the one that the
assistant has made of the row before. All rows of a draft are at one place: queries turn as those of the newest token,
and see the K/V of the tokens before it, in layers with a window as many as the window has. So prompts and steps
compute nothing here, and no draft begins where a block does, whose current block is empty.

Letters: T rows, E hidden size of the model, A of the assistant, V vocabulary size.
"""

from __future__ import annotations

from typing import Any

from polarlm.engine.backends.ops import Array, Ops
from polarlm.engine.model.decoder import Inputs
from polarlm.engine.model.layers.kinds import HeadWeights
from polarlm.engine.model.layers.mtp import MtpLayer
from polarlm.engine.weight_formats import Linear
from polarlm.model_loaders.config import ModelConfig


class AssistantLayers(MtpLayer):
    """The layers of `ModelConfig.assistant`."""

    def __init__(
        self, ops: Ops, config: ModelConfig, weights: HeadWeights, last_norm: Array, head: Linear, *others: Any
    ) -> None:
        assert config.assistant is not None
        assert weights.out is not None
        super().__init__(ops, config, weights, last_norm, weights.head or head, *others)
        self._norm, self._out = (weights.norm, config.assistant.norm_eps), weights.out

    def _draft(self, inputs: Inputs) -> tuple[Array, Array, Array]:
        """Rows of an embedding and the hidden state before it, `x` (T, 2E) → tokens (T,), logits (T, V), hidden states
        (T, E)."""
        x = self._ops.linear(inputs.x, self._projection)
        for number, layer in enumerate(self._layers, self._number):
            layer_inputs = self._choice(number, inputs)
            layer.complete(x, layer.mixer.project(x, layer_inputs), layer_inputs)
        self._ops.rms_norm(x, self._norm)
        logits = self._ops.linear(x, self._head)
        return self._ops.sample(logits, inputs.sampler), logits, self._ops.linear(x, self._out)
