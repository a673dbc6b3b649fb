"""The class that computes each kind of mixer and of feed-forward network."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from polarlm.engine.backends.ops import Array, Ops
from polarlm.engine.model.layers import Eps, LayerInputs, Tap, slot
from polarlm.engine.model.layers.attention import Attention
from polarlm.engine.model.layers.experts import Experts, ExpertsWeights
from polarlm.engine.model.layers.gated_mlp import GatedMLP, GatedMLPWeights
from polarlm.engine.model.layers.latent_attention import LatentAttention
from polarlm.engine.model.layers.layer_embedding import LayerEmbeddingWeights
from polarlm.engine.model.layers.recurrent import ChannelDelta, GatedDelta, Mamba2, ShortConv
from polarlm.engine.state.layer_shapes import RecurrentShape
from polarlm.engine.weight_formats import Linear, Matrix
from polarlm.model_loaders import config


class Mixer(Protocol):
    """The mixer of one layer. `project` is called for the rows of a chunk before `mix` is called for them."""

    Weights: ClassVar[Any]
    """A dataclass whose fields are `slot`s of a layer."""

    def __init__(self, ops: Ops, shape: Any, eps: Eps, weights: Any, cache: Any, transform: Any):
        """shape: the mixer in the configuration. cache: where the layer's state lies. transform: for attention, its
        HeadTransform, prepared by `Ops.prepare`."""

    @staticmethod
    def state_shape(shape: Any) -> RecurrentShape:
        """Return how the state of a layer is stored. Not called for attention, whose codecs the settings choose."""

    def project(self, x: Array, inputs: LayerInputs, tap: Tap | None = None) -> Any:
        """Append the state of the rows x (T, E), and return what `mix` needs of them; `mix` may get only its last rows.
        tap: never in `Ops.run_graph`."""

    def mix(self, x: Array, projected: Any, inputs: LayerInputs) -> None:
        """Add the mixer's result to x (T, E), in place."""


# The class of a kind in a configuration → the class that computes it, a Mixer.
MIXERS: dict[type[config.Mixer], Any] = {
    config.Attention: Attention,
    config.LatentAttention: LatentAttention,
    config.ShortConv: ShortConv,
    config.GatedDelta: GatedDelta,
    config.ChannelDelta: ChannelDelta,
    config.Mamba2: Mamba2,
}
FFNS: dict[type[config.Ffn], Any] = {config.GatedMLP: GatedMLP, config.Experts: Experts}


@dataclass(frozen=True)
class MtpWeights:
    """What the layer of `ModelConfig.mtp` has besides others."""

    embedding_norm: Array = slot("mtp_embedding_norm")  # (E,)
    hidden_norm: Array = slot("mtp_hidden_norm")  # (E,)
    projection: Linear = slot(
        "mtp_in", "linear"
    )  # (E, 2E): of an embedding and a hidden state; an EAGLE-3 head has none
    norm: Array = slot("mtp_norm")  # (E,): before the model's head


@dataclass(frozen=True)
class HeadWeights(MtpWeights):
    """What the layer of `ModelConfig.eagle3`, or the first of `ModelConfig.assistant`, has besides others. E: of the
    head."""

    states: tuple[Linear, ...] = slot("head_states", "linears")  # (E, E of the model) each
    head: Linear | None = slot("head_logits", "linear")  # (its V, E); None: the model's
    embedding: Matrix | None = slot("head_embedding", "matrix")  # (V, E); None: the model's
    out: Linear | None = slot(
        "head_out", "linear"
    )  # (E of the model, E): of the state for the next row, in an assistant


@dataclass(frozen=True)
class LayerWeights:
    """The weights of a decoder layer."""

    mixer: Any  # an instance of the mixer's `Weights`
    ffn: GatedMLPWeights | ExpertsWeights | None
    scale: Array | None = None  # (1,)
    embedding: LayerEmbeddingWeights | None = None
    mtp: MtpWeights | None = None

    @property
    def matrices(self) -> dict[str, Linear]:
        """The projections of the layer, by their names."""
        parts = [self.mixer, self.ffn] if self.ffn is not None else [self.mixer]
        return {name: w for part in parts for name, w in vars(part).items() if isinstance(w, Linear)}
